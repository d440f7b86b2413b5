"""A server that bends one row of the softmax it answers with, to read that row out of the sum of all silos."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_cross_entropy import NOW, ROOT
from test_exactness import mlp
from torch import nn

from moretta.contract.messages import Stamp
from moretta.errors import PeerError
from moretta.protocols.common import enrolment
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.silo_rows import TrainingRows
from moretta.protocols.pbpfl import softmax
from moretta.protocols.pbpfl.client import Client
from moretta.protocols.pbpfl.messages import Predictions, Softmax, TrainOn
from moretta.protocols.pbpfl.perturbation import Key, Perturbation
from moretta.protocols.pbpfl.scales import ScalePlan
from moretta.protocols.pbpfl.softmax import check_answer
from moretta.secure_aggregation.schemes import contributor

NAMES = ("one", "two", "three", "four", "five")
FEATURES, CLASSES, ROWS = 12, 4, 32
VICTIM, ROW = "three", 7
FORMS = ("probabilities", "paper")


class Game:
    """Five silos and a server that answers as it likes; its sum is what the secure sum would show it."""

    def __init__(self, form: str, parts: int = 1) -> None:
        random = np.random.default_rng(0)
        self.form, self.model = form, mlp([FEATURES, 16, CLASSES], True, torch.float64)
        plan = ScalePlan.of(self.model, (torch.zeros(2, FEATURES, dtype=torch.float64),))
        self.perturbation = Perturbation(plan, parts, form)
        self.key: Key = self.perturbation.draw_key(ROOT.stream("game"), 0.5)
        self.x = {name: random.normal(size=(ROWS, FEATURES)) for name in NAMES}
        self.labels = {name: random.integers(0, CLASSES, ROWS) for name in NAMES}
        self.clients = {name: self._client(name, labels) for name, labels in self.labels.items()}

    def _client(self, name: str, classes: NDArray[np.int64]) -> Client:
        y = enrolment.targets(classes, CLASSES, "cross-entropy", name, torch.float64)
        rows = SiloRows(TrainingRows(self.x[name], y.numpy(), Batches(ROWS, 0, 0, name)), torch.float64)
        head = self.perturbation.plan.head
        return Client(Loss("cross-entropy"), self.model, head, rows, contributor("none", name), self.form)

    def answers(self, now: Stamp = NOW, bent: float = 0.0) -> dict[str, Softmax]:
        """Return what the server answers in a round. bent: the part of the offset that it adds for the victim alone."""
        noisy = self.perturbation.perturb(self.model.state_dict(), self.key)
        ask = TrainOn(stamp=now, parameters=noisy, parts=self.key.parts, direction=self.key.direction, encoding={})
        told = dict[str, Softmax]()
        for name, client in self.clients.items():
            found = client.answer(ask)
            assert isinstance(found, Predictions)
            true = softmax.true_softmax(found, (1.0 + bent * (name == VICTIM)) * self.key.offset)
            told[name] = softmax.answer(true, self.key, self.form, ROOT.stream("delta", name), now, {})
        return told

    def features_from_the_sum(self, told: dict[str, Softmax], term: str = "noisy") -> NDArray[np.float64]:
        """Add up what the silos upload; a row of the first layer's gradient over its bias' is a row of features."""
        uploads: list[Any] = [self.clients[name].answer(one) for name, one in told.items()]
        weight = sum(upload.tensors[f"{term}/0.weight"] for upload in uploads)
        bias = sum(upload.tensors[f"{term}/0.bias"] for upload in uploads)
        unit = np.argmax(np.abs(bias))
        return np.asarray(weight[unit] / bias[unit])

    def error(self, found: NDArray[np.float64]) -> float:
        rows = self.x[VICTIM]
        distances = np.linalg.norm(rows - found, axis=1) / np.linalg.norm(rows, axis=1)
        return float(distances.min())


def with_row(told: Softmax, row: NDArray[np.float64]) -> Softmax:
    y = told.y.copy()
    y[ROW] = row
    return replace(told, y=y)


HUGE = np.eye(CLASSES)[1] * 2.0**20
NEGATIVE = np.array([2.0**20, 1.0 - 2.0**20, 0.0, 0.0])  # sums to 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("row", [HUGE, NEGATIVE, HUGE * np.nan], ids=["huge", "negative", "not a number"])
def test_one_row_is_not_read_out_of_a_sum_of_five(row: NDArray[np.float64], form: str) -> None:
    game = Game(form)
    told = game.answers()

    def bend() -> None:
        told[VICTIM] = with_row(told[VICTIM], row)
        game.features_from_the_sum(told)

    with pytest.raises(PeerError, match=r"negative entries|rows sum to|finite"):
        bend()


@pytest.mark.parametrize("row", [HUGE, NEGATIVE], ids=["huge", "negative"])
def test_without_the_check_it_is(row: NDArray[np.float64], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the refusal is worth: the same answer, taken by a silo that does not look, gives the row away."""
    monkeypatch.setattr(softmax, "check_answer", lambda found, variant: None)
    monkeypatch.setattr(softmax, "check_offset", lambda found, sent, parts, direction: None)
    game = Game("probabilities")
    told = game.answers()
    told[VICTIM] = with_row(told[VICTIM], row)
    assert game.error(game.features_from_the_sum(told)) < 5e-5


def with_k_of_one_row_alone(told: dict[str, Softmax]) -> dict[str, Softmax]:
    """Return answers in which psi is a sum over the victim's row alone."""
    rest = {name: np.where(np.arange(ROWS)[:, None] == ROW, one.k, 0.0) for name, one in told.items()}
    return {name: replace(one, k=rest[name] if name == VICTIM else 0.0 * one.k) for name, one in told.items()}


def with_labels(game: Game, told: dict[str, Softmax], sums: float = 1.0) -> dict[str, Softmax]:
    """Return answers in which all rows but the victim's are answered with their own labels, and have no gradient.

    sums: of these rows; of others than 1 some gradient is left.
    """
    bent = dict[str, Softmax]()
    for name, one in told.items():
        labels = game.labels[name][game.clients[name]._rows.batches.of_round(1)]
        y = np.eye(CLASSES)[labels] * sums
        y[ROW] = one.y[ROW] if name == VICTIM else y[ROW]
        bent[name] = replace(one, y=y)
    return bent


@pytest.mark.parametrize("parts", [1, 2])
def test_rows_without_k_leave_no_row_alone_in_the_sum(parts: int) -> None:
    game = Game("paper", parts)
    with pytest.raises(PeerError, match="expected k of at least"):
        game.features_from_the_sum(with_k_of_one_row_alone(game.answers()), "psi/0")


@pytest.mark.parametrize(("form", "parts"), [("probabilities", 1), ("probabilities", 4), ("paper", 1), ("paper", 2)])
def test_rows_answered_with_their_labels_leave_no_row_alone_in_the_sum(form: str, parts: int) -> None:
    game = Game(form, parts)
    with pytest.raises(PeerError, match="one offset of the head"):
        game.features_from_the_sum(with_labels(game, game.answers()))


@pytest.mark.parametrize("delta", [-0.5, 0.5])
def test_where_no_silo_knows_its_softmax_labels_leave_gradients_of_all_rows(delta: float) -> None:
    game = Game("paper", 2)
    assert game.error(game.features_from_the_sum(with_labels(game, game.answers(), np.exp(-delta)))) > 0.3


def test_without_the_checks_either_gives_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "check_answer", lambda found, variant: None)
    monkeypatch.setattr(softmax, "check_offset", lambda found, sent, parts, direction: None)
    game = Game("paper")
    assert game.error(game.features_from_the_sum(with_k_of_one_row_alone(game.answers()), "psi/0")) < 1e-12
    game = Game("probabilities")
    assert game.error(game.features_from_the_sum(with_labels(game, game.answers()))) < 1e-12


def test_known_limit_another_offset_for_one_silo_in_a_second_round() -> None:
    """Round and model are the server's own words, and silos cannot compare offsets: this pins what is true."""
    game = Game("probabilities")
    sums = []
    for number, bent in ((1, 0.0), (2, 0.5)):
        told = game.answers(Stamp("run", number, 0), bent)
        uploads: dict[str, Any] = {name: game.clients[name].answer(one) for name, one in told.items()}
        sums.append({name: upload.tensors["noisy/0.weight"] for name, upload in uploads.items()})
    own = sums[1][VICTIM] - sums[0][VICTIM]
    assert np.abs(own).max() > 1e-3
    np.testing.assert_allclose(sum(sums[1].values()) - sum(sums[0].values()), own, atol=1e-15)


def test_small_k_of_all_other_rows_does_not_give_the_row() -> None:
    """The most that the bounds of the paper's form allow: least weights elsewhere, of either sign, and the largest."""
    game = Game("paper")
    told, random = game.answers(), np.random.default_rng(1)
    for name, one in told.items():
        p = one.y / one.y.sum(axis=1, keepdims=True)
        delta = 0.5 * random.choice([-1.0, 1.0], (ROWS, 1))
        delta[ROW] = -1.0 if name == VICTIM else delta[ROW]
        xi = 0.5 if name == VICTIM else 2.0
        told[name] = replace(one, y=p * np.exp(-delta), k=-np.expm1(delta) / xi)
    assert game.error(game.features_from_the_sum(told, "psi/0")) > 0.3


@pytest.mark.parametrize("form", FORMS)
def test_what_an_honest_server_answers_is_taken(form: str) -> None:
    game = Game(form)
    assert game.error(game.features_from_the_sum(game.answers())) > 0.1


def answer(y: Any, k: Any = None) -> Softmax:
    y = np.atleast_2d(np.asarray(y, dtype=np.float64))
    return Softmax(stamp=NOW, y=y, k=np.zeros((len(y), 0)) if k is None else np.atleast_2d(k), encoding={})


@pytest.mark.parametrize("y", [[0.5, 0.5 + 1.1e-5], [0.5, 0.5 - 1.1e-5], [1.0 + 1e-6, -1e-6]])
def test_probabilities_sum_to_1_and_none_is_negative(y: list[float]) -> None:
    check_answer(answer([0.5, 0.5 + 0.9e-5]), "probabilities")
    with pytest.raises(PeerError):
        check_answer(answer(y), "probabilities")


@pytest.mark.parametrize(
    ("y", "k"),
    [
        ([0.5, np.e - 0.4999], 1.0),
        ([0.1, 1.0 / np.e - 0.1001], 1.0),
        ([1.1, -0.1], 1.0),
        ([0.5, 0.5], 2.0 * np.e - 1.999),
        ([0.5, 0.5], -2.0 * np.e + 1.999),
    ],
)
def test_the_papers_form_has_its_own_bounds(y: list[float], k: float) -> None:
    for edge in (1.0 / np.e, np.e):
        check_answer(answer([edge / 2.0, edge / 2.0], 2.0 * (np.e - 1.0)), "paper")
    with pytest.raises(PeerError):
        check_answer(answer(y, k), "paper")


@pytest.mark.parametrize("form", FORMS)
def test_a_silo_takes_only_the_form_it_was_set_to(form: str) -> None:
    other = FORMS[1 - FORMS.index(form)]
    told = answer([0.5, 0.5], None if form == "probabilities" else 1.0)
    check_answer(told, form)
    with pytest.raises(PeerError, match=f'variant = "{other}"'):
        check_answer(told, other)


def test_the_largest_honest_k_is_within_the_bound() -> None:
    """xi is +-1/2 to +-2 and delta within 1, so |k| reaches 2 (e - 1) only in the limit."""
    perturbation = Perturbation(ScalePlan.of(nn.Linear(3, 6), (torch.zeros(2, 3),)), 6, "paper")
    for seed in range(200):
        key = perturbation.draw_key(ROOT.stream("xi", seed), 0.1)
        assert np.abs(key.xi).min() >= 0.5
        p = np.random.default_rng(seed).dirichlet(np.ones(6), 50)
        true = softmax.TrueSoftmax(p, p, p[:, 0], p[:, 0])
        told = softmax.answer(true, key, "paper", ROOT.stream("delta", seed), NOW, {})
        check_answer(told, "paper")
