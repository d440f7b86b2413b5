"""Tables of classes that silos count on rows they hold back: what they come to, and that no silo's own are had."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refused_rows import Row, refused
from scipy.stats import binom
from test_contract import LOSSY, MORE, dropping, federation_of, silos
from test_scoring import holding_back

from moretta import Engine, Federation, SecureAggregation
from moretta.config import run_files
from moretta.config.silo_file import load
from moretta.contract.messages import Stamp
from moretta.contract.roles import Client
from moretta.data.tables import schema as schemas
from moretta.deployment import shared_settings as told
from moretta.engines.in_process import InProcess
from moretta.engines.journal import HelpedFile
from moretta.errors import ParameterError, PeerError, SumSpent
from moretta.protocols.common import targets
from moretta.protocols.common.scoring import (
    CONFUSION,
    RELIABILITY,
    HeldOut,
    Score,
    asked_of,
    figures_of,
    read_tables,
)
from moretta.report.folder import read_run
from moretta.report.page import write_report
from moretta.run import federation as federations
from moretta.run.evaluation import evaluate
from moretta.run.metrics import judged, of_counts
from moretta.run.result import Result
from moretta.secure_aggregation.one_sum import HelpedSums
from moretta.secure_aggregation.statistics import LIMBS, to_limbs
from moretta.secure_aggregation.sums import Sum

OF_THREE = SecureAggregation(min_survivors=3)
GOES_ON = LOSSY.model_copy(update={"min_survivors": 3})


def counting(name: str, **settings: Any) -> Federation:
    given: dict[str, Any] = {
        "silos": holding_back(), "score_at_silos": "classes", "aggregation": OF_THREE, "engine": Engine(strict=True)
    }  # fmt: skip
    return federation_of(name, **given | settings)


def in_one_place(federation: Federation, result: Result) -> dict[str, Any]:
    """What the run's model scores on all rows that silos hold back, as if somebody had them all."""
    held = [silo.held_out for silo in federation.silos if silo.held_out is not None]
    x, y = (np.concatenate([one[part] for one in held]) for part in (0, 1))
    assert result.model is not None
    return evaluate(result.model, torch.from_numpy(x), y, federation.spec.protocol.loss, "classification")


@pytest.mark.parametrize("name", ["fedsgd", "fedavg", "pbpfl", "baffle"])
def test_tables_are_those_of_all_rows_in_one_place(name: str) -> None:
    federation = counting(name)
    result = federation.train(2)
    wanted = in_one_place(federation, result)
    assert result.test["classes"]["confusion"] == wanted["classes"]["confusion"]
    assert result.test["classes"]["by_class"] == wanted["classes"]["by_class"]
    bins = [{key: one[key] for key in ("from", "rows", "accuracy")} for one in result.test["classes"]["reliability"]]
    assert bins == [{key: one[key] for key in ("from", "rows", "accuracy")} for one in wanted["classes"]["reliability"]]
    figures, whole = result.test["metrics"], wanted["metrics"]
    assert set(figures) == {"f1_macro", "balanced_accuracy", "calibration_error"}
    assert figures["f1_macro"] == whole["f1_macro"]
    # Probabilities travel in whole percents.
    assert figures["calibration_error"] == pytest.approx(whole["calibration_error"], abs=0.005)


def test_nobody_is_asked_for_tables_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    upload, encodings = HeldOut.upload, list[set[str]]()

    def noted(held: HeldOut, ask: Score, *of: Any) -> Any:
        encodings.append(set(ask.encoding))
        return upload(held, ask, *of)

    monkeypatch.setattr(HeldOut, "upload", noted)
    plain, tables = counting("fedsgd", score_at_silos=True).train(1), len(encodings)
    assert not plain.test.keys() & {"classes", "metrics"}
    result = counting("fedsgd").train(1)
    assert len(encodings) == tables + 2 * len(MORE)
    asked_for = [{name for name in one if "confusion" in name or "reliability" in name} for one in encodings]
    assert [bool(one) for one in asked_for] == [False] * (tables + len(MORE)) + [True] * len(MORE)
    assert {key: result.test[key] for key in plain.test if key != "per_silo"} == {
        key: value for key, value in plain.test.items() if key != "per_silo"
    }


def test_a_report_shows_them(tmp_path: Path) -> None:
    counting("fedsgd", out=tmp_path / "run").train(1)
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert "Classes and calibration" in page
    assert "the exact confusion matrix of the rows held back, however small its counts." in page
    assert read_run(tmp_path / "run").test.classes is not None


INDEPENDENT = {f"x{number}": {"kind": "number"} for number in range(4)}
GROUPS = {"whom": {"kind": "group"}}
TARGET = {"y": {"kind": "target", "classes": ["0", "1", "2"]}}


def test_figures_have_intervals_where_rows_are_independent_and_the_page_says_why_not_elsewhere(tmp_path: Path) -> None:
    """Counts of rows drawn again are multinomial, so accuracy's interval is a binomial one, to a step of one row."""
    independent, grouped = (schemas.of({"columns": {**INDEPENDENT, **more, **TARGET}}) for more in ({}, GROUPS))
    plain = counting("fedsgd", table=independent, score_at_silos=True, out=tmp_path / "plain").train(1).test
    tables = counting("fedsgd", table=independent).train(1).test
    assert set(plain["intervals"]) == {"accuracy"}
    assert set(tables["intervals"]) == {"accuracy", "balanced_accuracy", "f1_macro"}
    rows, step = int(plain["rows"]), 1 / plain["rows"]
    expected = binom.ppf([0.025, 0.975], rows, plain["accuracy"]) / rows
    for found in (plain, tables):
        np.testing.assert_allclose(found["intervals"]["accuracy"], expected, atol=step + 1e-9)
        assert found["intervals"]["accuracy"][0] < found["accuracy"] < found["intervals"]["accuracy"][1]
    low, high = tables["intervals"]["balanced_accuracy"]
    assert low < tables["metrics"]["balanced_accuracy"] < high
    assert "intervals" not in counting("fedsgd", table=grouped, out=tmp_path / "grouped").train(1).test
    said = "there are no intervals, because sums over silos do not show how errors are spread over people"
    assert said in write_report([tmp_path / "grouped"], tmp_path / "report.html").read_text()
    page = write_report([tmp_path / "plain"], tmp_path / "report.html").read_text()
    assert said not in page
    assert "intervals are in square brackets" in page


def test_intervals_of_counts_are_those_of_the_rows() -> None:
    random = np.random.default_rng(3)
    y = random.choice(3, 400, p=(0.6, 0.3, 0.1))
    outputs = np.eye(3)[np.where(random.random(400) < 0.7, y, random.integers(0, 3, 400))]
    counts = targets.confusion(targets.predicted(outputs), y, 3)
    of_rows = judged(outputs, y, "classification", "cross-entropy")["figures"]
    for name, (low, high) in of_counts(counts).items():
        # Both are percentiles of 1,000 draws of one distribution, whose ends differ by about 0.1 of its width.
        width = of_rows[name]["high"] - of_rows[name]["low"]
        assert abs(low - of_rows[name]["low"]) < 0.15 * width, name
        assert abs(high - of_rows[name]["high"]) < 0.15 * width, name


# -- attacks -----------------------------------------------------------------------------------------------------------


def spent(first: set[str], then: set[str], **kept: Any) -> None:
    """A silo helps to open tables over some silos, and is asked over others in another run, of another model."""
    helped = HelpedSums(over_runs=True, **kept)
    for number, members in enumerate((first, then)):
        stamp = Stamp(f"run-{number}", 4, 0)
        ask = Score(stamp=stamp, parameters={"w": np.full(3, float(number))}, encoding={"score/confusion": 2})
        about = asked_of(ask, ())
        helped.ask(stamp, about, members)
        helped.bind(stamp, about, tuple(sorted(members)), gives=True)


def test_two_sums_that_differ_by_a_silo_would_be_its_own_counts_and_are_not_opened() -> None:
    everybody = set(MORE)
    one, others = (
        np.array(counting("fedsgd", silos=some).train(1).test["classes"]["confusion"]).sum(axis=1)
        for some in (holding_back(), [silo for silo in holding_back() if silo.name != "south"])
    )
    (south,) = (silo for silo in holding_back() if silo.name == "south")
    assert south.held_out is not None
    assert (one - others).tolist() == np.bincount(south.held_out[1], minlength=3).tolist()  # what it would give away
    spent(everybody, everybody)
    for then in (everybody - {"south"}, everybody | {"another"}):
        for repeats in (False, True):  # its owner may let rounds of whole rows repeat, and tables are none
            with pytest.raises(SumSpent):
                spent(everybody, then, repeats=repeats)


@pytest.mark.parametrize("tables_first", [False, True])
def test_scores_and_tables_of_a_run_are_over_the_same_silos(tables_first: bool) -> None:
    # Rows and hits of both, over sets that differ by one silo, would be that silo's own.
    helped, stamp, members = HelpedSums(over_runs=True), Stamp("run", 4, 0), tuple(sorted(MORE))
    ask, tables = (Score(stamp=stamp, parameters={}, encoding=names) for names in ({}, {"score/confusion": 2}))
    order = [asked_of(ask, ()), asked_of(tables, ())][:: -1 if tables_first else 1]
    helped.bind(stamp, order[0], members, gives=True)
    with pytest.raises(SumSpent):
        helped.bind(stamp, order[1], members[1:], gives=True)
    with pytest.raises(SumSpent):
        helped.ask(stamp, order[1], members[1:])
    helped.bind(stamp, order[1], members, gives=True)
    helped.bind(Stamp("another", 4, 0), asked_of(ask, ()), members[1:], gives=True)  # scores are of one set in each run


RUN = """
[run]
rounds = 1
[data]
source = "sites"
inputs = [4]
classes = 3
score-at-silos = "classes"
standardise = false
[model]
source = "mlp"
[protocol]
name = "fedsgd"
loss = "cross-entropy"
[secure-aggregation]
min-survivors = 3
[engine]
name = "flare"
sites = {sites}
"""
SITE = '[silo]\nname = "{silo}"\n[data]\nsource = "{silo}.npz"\ntest-fraction = 0.25\n'


def played(folder: Path, names: Sequence[str]) -> Result:
    """A run over these sites, each of which keeps what it helped to open in all runs."""
    (folder / "run.toml").write_text(RUN.format(sites=json.dumps(names)))
    run_file, clients = run_files.load(folder / "run.toml"), dict[str, Client]()
    for silo in silos({name: MORE[name] for name in names}):
        np.savez(folder / f"{silo.name}.npz", x=silo.x, y=silo.y)
        (folder / "silo.toml").write_text(SITE.format(silo=silo.name))
        shared = run_files.loads(told.shared_text(run_file), folder / "told.toml")
        side = told.site_side(shared, load(folder / "silo.toml"))
        kept = HelpedFile(str(folder / f"{silo.name}.jsonl"), over_runs=True)
        clients[silo.name] = side.client(silo.name, 1, 0, federations.NOWHERE, kept)[0]
    server = told.server_side(run_file, folder / f"of-{len(names)}")
    return server.train(1, transport=lambda codec, place, recorder: InProcess(clients, codec, strict=True))


def test_a_further_run_over_other_sites_has_no_tables(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = played(tmp_path, ["north", "south", "east", "west"])
    assert np.sum(first.test["classes"]["confusion"]) == first.test["rows"]
    assert "tables" not in caplog.text
    then = played(tmp_path, ["north", "south", "east"])
    assert "classes" not in then.test
    assert then.test["rows"] < first.test["rows"]  # the run itself has ended as it would have
    assert "the tables of classes are left out" in caplog.text


@pytest.mark.parametrize("phase", ["upload", "unmasking"])
def test_where_a_silo_is_missing_the_run_ends_without_tables(phase: str, caplog: pytest.LogCaptureFixture) -> None:
    lost = Engine(faults=dropping([(3, "south", phase)]))
    with caplog.at_level(logging.WARNING, "moretta"):
        result = counting("fedsgd", aggregation=GOES_ON, engine=lost).train(2)
    assert "rows" in result.test
    assert "classes" not in result.test
    assert "the tables of classes are left out" in caplog.text


# -- a silo's half -----------------------------------------------------------------------------------------------------

X, Y = np.zeros((2, 1), np.float32), np.array([0, 1])
WANTED = Score(stamp=Stamp("run", 4, 0), parameters={}, encoding={"score/confusion": 4, "score/reliability": 4})
BOTH = figures_of("mse", "classification", tables=True)


@refused("tables_at_silos.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


def sum_of(confusion: Any, bins: Any) -> Sum:
    numbers = {CONFUSION: confusion, RELIABILITY: bins}
    means = {f"score/{name}": to_limbs(np.ravel(one).astype(float).tolist()) for name, one in numbers.items()}
    assert all(len(one) == LIMBS for one in means.values())
    return Sum(means, 1, {}, ["north", "south"])


def binned(rows: float, percents: float, right: float) -> Any:
    return np.array([[rows], [percents], [right]]) * np.eye(10)[7]


def test_sums_that_no_rows_have_are_refused() -> None:
    good = read_tables(sum_of([[2, 1], [0, 1]], binned(4, 280, 3)), 2)
    assert good[CONFUSION].tolist() == [[2, 1], [0, 1]]
    assert good[RELIABILITY][:, 7].tolist() == [4, 2.8, 3]
    for confusion, bins in [
        ([[2, 1], [0, 2]], binned(4, 280, 3)),  # not as many rows
        ([[5, -1], [0, 0]], binned(4, 280, 3)),
        ([[2, 1], [0, 1]], binned(4, 280, 5)),  # more right than rows
        ([[2, 1], [0, 1]], binned(4, 401, 3)),  # surer than sure
        ([[2, 1], [0, 1]], binned(4, -1, 3)),
        ([[1, 0], [0, 0]], binned(1, 70, 1)),  # fewer rows than silos
        ([[2.5, 0.5], [0, 1]], binned(4, 280, 3)),
        ([[2**50, 0], [0, 0]], binned(2**50, 70, 3)),
    ]:
        with pytest.raises(PeerError, match=r"expected (counts of rows by class|whole numbers of rows)"):
            read_tables(sum_of(confusion, bins), 2)


def test_tables_of_other_rows_than_the_score_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = HeldOut._tables

    def more(held: HeldOut, outputs: Any) -> Any:
        again = [0, 0, *range(1, len(outputs))] if len(outputs) == 2 else list(range(len(outputs)))
        return honest(replace(held, x=held.x[again], y=held.y[again]), outputs[again])  # one silo counts a row twice

    monkeypatch.setattr(HeldOut, "_tables", more)
    result = counting("fedsgd").train(1)
    assert "rows" in result.test
    assert "classes" not in result.test
    assert "left out: expected tables of as many rows as the score is of" in caplog.text


# -- what is refused ---------------------------------------------------------------------------------------------------

FEW = 'score_at_silos = "classes" shows how many rows of a class .*; give .*min_survivors.* at least 3, and a scheme'


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("fedsgd", {"aggregation": SecureAggregation()}, FEW),
        ("fedsgd", {"aggregation": SecureAggregation(scheme="none", min_survivors=3)}, FEW),
        (
            "fedsgd",
            {"silos": holding_back({"north": 20, "south": 33})},
            "but silos is 2; set at most as many",
        ),
        ("local", {}, "is of one model that all silos score, and local has a model for each; set true"),
        ("cgd", {}, "is of one model that all silos score, and cgd has a model for each; set true"),
        ("fedsgd", {"score_at_silos": "tables"}, 'score_at_silos: expected true, false or "classes", got "tables"'),
    ],
)
def test_what_is_refused(name: str, changed: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said) as refused:
        counting(name, **changed).train(1)
    assert len(str(refused.value).splitlines()) == 1
