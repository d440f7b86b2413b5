"""A server that asks for more than a run's settings say, or a second time: real roles, restarted on their records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn

from moretta import BAFFLE, CGD, PBPFL, Engine, Federation, FedSGD, SecureAggregation, Silo
from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Aborted, Client, Exchange, Outcome, answered
from moretta.data.tables.preparation import ColumnRules
from moretta.engines.checkpoint import CheckpointId
from moretta.engines.run_folder import RunFolder
from moretta.errors import MorettaError, PeerError
from moretta.protocols.common import scoring
from moretta.protocols.common.enrolment import Enrolment
from moretta.protocols.common.overlap import AskApart
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.statistics import without_noise
from moretta.protocols.common.training import Training
from moretta.secure_aggregation import statistics
from moretta.secure_aggregation.one_sum import Answers
from moretta.secure_aggregation.statistics import ALL, AskHistogram

NAMES = ("north", "east", "south")
PRIVATE = FedSGD(dp_noise=1.0, dp_clip=1.0)
KINDS = {
    "fedsgd": (FedSGD(), {}),
    "fedsgd with noise": (PRIVATE, {}),
    "pbpfl": (PBPFL(), {}),
    "cgd": (CGD(loss="mse"), {}),
    "baffle": (BAFFLE(k=2), {}),
    "baffle with noise": (BAFFLE(k=2, dp_noise=1.0, dp_clip=1.0), {}),
    "edge": (BAFFLE(k=2), {"engine": Engine(edge=("east",))}),
}


def silos(**more: Any) -> list[Silo]:
    generator = np.random.default_rng(0)
    made = []
    for name in NAMES:
        x = generator.normal(50, 9, (24, 3)).astype(np.float32)
        made.append(Silo(name, x, x[:, :1] * 0.5, ids=np.array([f"{name}-{row}" for row in range(24)]), **more))
    return made


def federation(protocol: Training, **settings: Any) -> Federation:
    settings = {"batch_size": 4, "standardise": False} | settings
    return Federation(nn.Linear(3, 1), settings.pop("silos", None) or silos(), protocol, **settings)


def one_column(made: Enrolment, now: Stamp) -> Exchange[Any]:
    return (yield from statistics.moments(made.aggregation, now, 1, what=statistics.MAY_LACK, of=np.array([1])))


def of_targets(made: Enrolment, now: Stamp) -> Exchange[Any]:
    return (yield from statistics.moments(made.aggregation, now, 1, what="targets"))


def of_each_target(made: Enrolment, now: Stamp) -> Exchange[Any]:
    return (yield from statistics.moments(made.aggregation, now, 1, what="target columns"))


def all_inputs(made: Enrolment, now: Stamp) -> Exchange[Any]:
    return (yield from statistics.moments(made.aggregation, now, 1, what="inputs"))


def number_of_rows(made: Enrolment, now: Stamp) -> Exchange[Any]:
    return (yield from statistics.moments(made.aggregation, now, 0, what="rows"))


def of_classes(made: Enrolment, now: Stamp) -> Exchange[Any]:
    return (yield from statistics.counts(made.aggregation, now, 1, "classes"))


def a_histogram(made: Enrolment, now: Stamp) -> Exchange[Any]:
    column, low, high = np.array([1]), np.array([0.0]), np.array([60.0])
    return (yield from statistics.histograms(made.aggregation, now, column, low, high, statistics.MAY_LACK))


Ask = Callable[[Enrolment, Stamp], Exchange[Any]]
QUESTIONS: tuple[Ask, ...] = (
    one_column, of_targets, of_each_target, all_inputs, number_of_rows, of_classes, a_histogram,
)  # fmt: skip


class Enough(Exception):
    """The attack is over."""


def answers(monkeypatch: pytest.MonkeyPatch, made: Federation, *questions: Ask) -> list[Any]:
    """What a server learns that asks more in its set-up, each in an attempt of its own."""
    honest, found = Enrolment._gather_statistics, list[Any]()

    def greedy(self: Enrolment, now: Stamp) -> Exchange[Aborted | None]:
        yield from honest(self, now)
        for number, question in enumerate(questions, 1):
            later = dataclasses.replace(now, attempt=number)
            assert (yield from self.aggregation.setup(later, list(self.aggregation.cohort))) is None
            found.append((yield from question(self, later)))
        raise Enough

    monkeypatch.setattr(Enrolment, "_gather_statistics", greedy)
    with pytest.raises(Enough):
        made.train(1)
    return found


SCALES = {("pbpfl", of_targets), ("pbpfl", all_inputs)}  # by which it scales


@pytest.mark.parametrize(("kind", "question"), [(a, b) for a in KINDS for b in QUESTIONS if (a, b) not in SCALES])
def test_a_silo_gives_no_statistic_that_its_settings_do_not_ask_for(
    kind: str, question: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol, settings = KINDS[kind]
    (found,) = answers(monkeypatch, federation(protocol, **settings), question)
    assert isinstance(found, Aborted), found
    assert "expected a statistic of the run's settings" in str(found.missing)


def test_members_of_a_group_give_no_statistic_of_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads hold different columns: a sum over them is of no column, and less a column's sum it is one silo's."""
    x = np.random.default_rng(0).normal(50, 9, (24, 4)).astype(np.float32)
    parts = [
        Silo(f"{row}-{part}", x[8 * row : 8 * row + 8, 2 * part : 2 * part + 2],
             x[8 * row : 8 * row + 8, :1] if part == row % 2 else np.empty((0, 1), np.float32),
             row=f"row-{row}", columns=(2 * part, 2 * part + 1), aligned=True)
        for row in range(3) for part in range(2)
    ]  # fmt: skip
    made = Federation(
        nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 1)), parts, CGD(loss="mse"), standardise=True
    )
    honest, found = Enrolment._gather_statistics, list[Any]()

    def greedy(self: Enrolment, now: Stamp) -> Exchange[Aborted | None]:
        if now.run.startswith("columns"):
            return (yield from honest(self, now))
        found.append((yield from statistics.moments(self.aggregation, now, 2, what=statistics.MAY_LACK)))
        raise Enough

    monkeypatch.setattr(Enrolment, "_gather_statistics", greedy)
    with pytest.raises(Enough):
        made.train(1)
    assert isinstance(found[0], Aborted), found


def around(center: float) -> Ask:
    """Sums of squares around a center: far away, each square is rounded to multiples of 2^33."""

    def ask(made: Enrolment, now: Stamp) -> Exchange[Any]:
        return (yield from statistics._sums(made.aggregation, now, statistics.MAY_LACK, 2, np.full(3, center), ALL))

    return ask


def test_squares_are_summed_around_one_center(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their rounding, sums around many centers told how many values are below any."""
    made = federation(FedSGD(), standardise=True)
    found = answers(monkeypatch, made, around(2.0**43), around(2.0**43 - 1 / 16))
    assert all(isinstance(one, Aborted) for one in found), found


def held_back(**settings: Any) -> Federation:
    x = np.random.default_rng(1).normal(50, 9, (6, 3)).astype(np.float32)
    return federation(FedSGD(), silos=silos(held_out=(x, x[:, :1])), score_at_silos=True, **settings)


def test_silos_score_one_model_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With scores of any models, the rows held back were found by their losses."""
    honest, found = Enrolment.scored, list[Any]()

    def greedy(self: Enrolment, now: Stamp, outcome: Outcome, parameters: Any) -> Exchange[Outcome | Aborted]:
        ended = yield from honest(self, now, outcome, parameters)
        others = {name: value * 0 for name, value in parameters.items()}
        for later in (dataclasses.replace(now, attempt=1), dataclasses.replace(now, round=now.round + 1)):
            assert (yield from self.aggregation.setup(later, list(self.aggregation.cohort))) is None
            found.append((yield from scoring.score(self.aggregation, later, others, self.figures, self.agreed)))
        return ended

    monkeypatch.setattr(Enrolment, "scored", greedy)
    assert held_back().train(1).test["rows"] == 18
    assert all(isinstance(one, Aborted) for one in found), found


def test_a_name_before_a_runs_id_scores_no_further_models(tmp_path: Path) -> None:
    """Without secure sums nothing compared a message's run with the silo's, and each name had a record of its own."""
    x = np.random.default_rng(1).normal(50, 9, (6, 3)).astype(np.float32)
    west, east, south = silos(held_out=(x, x[:, :1]))
    others = [
        dataclasses.replace(one, x=x[:0], y=x[:0, :1], held_out=None, ids=None, remote=True) for one in (west, south)
    ]
    clear = SecureAggregation(scheme="none")
    silo = restarted(federation(FedSGD(), silos=[east, *others], score_at_silos=True, aggregation=clear), tmp_path)

    def score(run: str, weight: float) -> Message:
        model = {"weight": np.full((1, 3), weight, np.float32), "bias": np.zeros(1, np.float32)}
        return answered(silo, scoring.Score(stamp=Stamp(run, 2, 0), parameters=model, encoding={}))

    score("run", 0.1)
    for run in ("run", "a/run", "b/run"):
        with pytest.raises(PeerError):
            score(run, 0.2)


def test_silos_validate_one_model_a_round_over_one_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """With scores of any models, or over two sets, validation rows would be found by their losses."""
    honest, found = Enrolment.validation, list[Any]()

    def greedy(self: Enrolment, now: Stamp, parameters: Any, summed: Any) -> Exchange[Any]:
        seen = yield from honest(self, now, parameters, summed)
        model = parameters()
        everybody, figures = list(self.aggregation.cohort), self._setting.validated
        others = {name: value * 0 for name, value in model.items()}
        questions = [(everybody, others), (everybody[:-1], model), (everybody, model)]
        for attempt, (cohort, asked) in enumerate(questions, start=now.attempt + 1):
            later = dataclasses.replace(now, attempt=attempt)
            assert (yield from self.aggregation.setup(later, cohort)) is None
            score = scoring.score(self.aggregation, later, asked, figures, self.agreed, validates=True)
            found.append((yield from score))
        return seen

    monkeypatch.setattr(Enrolment, "validation", greedy)
    rest = SecureAggregation(threshold=2)
    result = federation(FedSGD(), validation_fraction=0.25, evaluate_every=1, aggregation=rest).train(1)
    *refused, (again, _) = found  # the same question over the same set is answered again, and tells nothing new
    assert [type(one) for one in refused] == [Aborted, Aborted], found
    assert again["loss"] == result.history[0]["validation_loss"]


def test_what_epsilon_leaves_out_stands_at_each_silo(tmp_path: Path) -> None:
    """Its own count of releases says nothing of means that were summed without noise; its record does."""
    for name, standardise in (("standardised", True), ("as it is", False)):
        made = federation(PRIVATE, standardise=standardise, out=tmp_path / name)
        made.train(1)
        client: Any = restarted(made, tmp_path / name)
        facts = client.privacy()
        assert ("means and deviations" in str(facts.get("epsilon_leaves_out"))) is standardise


def test_what_epsilon_leaves_out_names_histograms_and_counts() -> None:
    """Of columns with a median, of columns whose values may be absent, and of targets that are standardised."""
    rules = ColumnRules(np.array([True]), np.array([2], np.int8), np.array([0.0]), np.array([9.0]))
    setting: Any = SimpleNamespace(layout=None, classes=0, scaled_targets=1)
    listed = Setting.statistics(setting, rules, batch_size=1)
    said = without_noise(listed.names)
    assert "means and deviations of the targets, summed without noise" in said
    assert "histograms of the columns with a median" in said
    assert "how many values of each column are there" in said
    answers = Answers()
    ask = AskHistogram(
        stamp=Stamp("run", 0, 0),
        what=statistics.MAY_LACK,
        columns=np.array([0], np.int64),
        low=np.array([0.0]),
        high=np.array([9.0]),
        encoding={},
    )
    listed.check(ask, answers)
    assert without_noise(answers.names("run")) == "histograms of the columns with a median"


def restarted(made: Federation, folder: Path, name: str = "east", **change: Any) -> Client:
    """A silo's role in a new process, with the record that the one before left."""
    helped = dataclasses.replace(RunFolder(folder).helped(name), **change)
    return made.client(name, 1, 0, CheckpointId("run", 0, 0, ""), helped)[0]


@pytest.mark.parametrize("kind", ["fedsgd", "cgd", "baffle", "edge"])
@pytest.mark.parametrize(("run", "over_runs"), [("run", False), ("run", True), ("another", True)])
def test_a_restarted_silo_compares_no_second_list(kind: str, run: str, over_runs: bool, tmp_path: Path) -> None:
    """A list of one person is a question about that person: one answer in a life, not one in each session."""
    protocol, settings = KINDS[kind]
    made = federation(protocol, **settings)

    def ask(listed: bytes, run: str) -> Any:
        ids = np.frombuffer(listed, np.uint8).reshape(1, 16)
        message = AskApart(stamp=Stamp(run, 1, 0), key=bytes(32), ids=ids, groups=np.empty((0, 16), np.uint8))
        return restarted(made, tmp_path, over_runs=over_runs).answer(message)

    ask(bytes(16), "run")
    ask(bytes(16), run)
    with pytest.raises(MorettaError, match="one list of test rows"):
        ask(b"another person..", run)
