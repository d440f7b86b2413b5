"""The exchange as the paper prints it: exact, what lambda hides from the server, and what it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from refused_rows import Row, refused
from test_cross_entropy import NOW, ROOT
from test_exactness import mlp

from moretta import PBPFL, Federation, FedSGD, SecureAggregation, Silo
from moretta.contract.messages import Stamp
from moretta.errors import MisuseError, PeerError
from moretta.protocols.common import enrolment, modules
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.silo_rows import TrainingRows
from moretta.protocols.pbpfl import ratios
from moretta.protocols.pbpfl.client import Client
from moretta.protocols.pbpfl.messages import BlindedSoftmax, Ratios, Softmax, TrainOn
from moretta.protocols.pbpfl.perturbation import Key, Perturbation
from moretta.protocols.pbpfl.scales import ScalePlan
from moretta.run.evaluation import largest_relative_difference
from moretta.secure_aggregation.schemes import contributor

RATIOS: dict[str, Any] = {"loss": "cross-entropy", "variant": "paper", "exchange": "ratios"}


def key_of(classes: int, parts: int = 2, size: float = 2.0) -> Key:
    plan = ScalePlan.of(mlp([3, 4, classes], True, torch.float64), (torch.zeros(2, 3, dtype=torch.float64),))
    return Perturbation(plan, parts, "paper").draw_key(ROOT.stream("ratios", classes), size)


def drawn(classes: int, rows: int = 20, spread: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    """True outputs and alpha."""
    random = np.random.default_rng(classes)
    return random.normal(scale=spread, size=(rows, classes)), random.uniform(0.5, 4.0, rows)


def play(classes: int, **kind: Any) -> tuple[np.ndarray, np.ndarray, Key, Ratios, BlindedSoftmax, np.ndarray]:
    """Return z, the true softmax, the key, what was sent and answered, and y*."""
    key = key_of(classes, min(2, classes))
    y, alpha = drawn(classes, **kind)
    noisy = y + np.outer(alpha, key.offset)
    z = noisy - noisy.max(axis=1, keepdims=True)
    sent, blinds = ratios.blinded(NOW, z, alpha, ROOT.stream("lambda"))
    told = ratios.answer(sent, key, ROOT.stream("delta"), {})
    p = np.exp(y) / np.exp(y).sum(axis=1, keepdims=True)
    return z, p, key, sent, told, ratios.unblinded(told, blinds)


@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("spread", [0.1, 3.0, 12.0])
def test_what_comes_back_is_the_softmax_behind_delta_and_k(classes: int, spread: float) -> None:
    _, p, key, _, told, y = play(classes, spread=spread)
    np.testing.assert_allclose(y * (1.0 - key.xi * told.k)[:, key.parts], p, rtol=1e-12)
    delta = np.log(p / y)
    assert 0.5 < np.abs(delta).max() <= 1 + 1e-9


@pytest.mark.parametrize("classes", [3, 4, 10])
def test_from_three_classes_on_differences_over_j_cancel_lambda(classes: int) -> None:
    z, _, _, sent, _, _ = play(classes)
    found = ratios.from_differences(sent.words)
    assert found is not None
    wanted = np.exp(z)  # all that a softmax is of, but for each row's size
    np.testing.assert_allclose(found / found.sum(1, keepdims=True), wanted / wanted.sum(1, keepdims=True), atol=1e-12)


def test_with_two_classes_there_is_no_difference_and_mu_says_nothing() -> None:
    z, _, _, sent, _, _ = play(2, rows=400)
    assert ratios.from_differences(sent.words) is None
    mu = np.array(ratios.from_words(sent.words), dtype=object)[:, :, 0]
    top = 1 << (ratios.FRACTION + ratios.BEFORE + ratios.BLIND)
    uniform = np.array(mu / top, dtype=np.float64)
    for column, gap in ((0, z[:, 1] - z[:, 0]), (1, z[:, 0] - z[:, 1])):
        # 400 uniform numbers: mean 0.5 +- 4 * 0.0144, and a correlation with what they hide of 0 +- 4 * 0.05
        assert abs(uniform[:, column].mean() - 0.5) < 0.06
        assert abs(np.corrcoef(uniform[:, column], gap)[0, 1]) < 0.2
    # Another row of the same lambdas, with a ratio e^100 times as large, moves mu by 2^-176 of its range.
    lambdas = ROOT.stream("lambda")
    other, _ = ratios.blinded(NOW, np.array([[0.0, 100.0]]), np.ones(1), lambdas)
    same, _ = ratios.blinded(NOW, np.array([[0.0, 0.0]]), np.ones(1), ROOT.stream("lambda"))
    moved = ratios.from_words(other.words)[0, 0, 0] - ratios.from_words(same.words)[0, 0, 0]
    assert 0 < moved < top >> 170


@pytest.mark.parametrize("classes", [2, 5])
def test_a_silo_has_its_softmax_from_a_single_row_whatever_m(classes: int) -> None:
    """What sums of exp(r*) give away beside the printed answer: as many equations a row as classes."""
    z, p, _, _, told, y = play(classes, rows=1)
    np.testing.assert_allclose(ratios.from_one_row(z, y, told.rests), p, rtol=1e-9)


def test_whole_numbers_and_words_are_inverse() -> None:
    values = np.array([[1.0, 0.5, np.exp(-170.0)], [np.exp(170.0), 2.0**-400, 3.0]])
    found = ratios.from_words(ratios.to_words(ratios.whole(values), 11))
    back = np.array(found / ratios.ONE, dtype=np.float64)
    np.testing.assert_allclose(back, np.where(values < 2.0**-320, 0.0, values), rtol=1e-15)


@refused("ratios.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


def client_and_ask() -> tuple[Client, TrainOn, Key]:
    model = mlp([5, 8, 3], True, torch.float64)
    plan = ScalePlan.of(model, (torch.zeros(2, 5, dtype=torch.float64),))
    perturbation = Perturbation(plan, 2, "paper")
    key = perturbation.draw_key(ROOT.stream("client"), 1.0)
    random = np.random.default_rng(0)
    y = enrolment.targets(random.integers(0, 3, 6), 3, "cross-entropy", "silo", torch.float64)
    rows = SiloRows(TrainingRows(random.normal(size=(6, 5)), y.numpy(), Batches(6, 0, 0, "silo")), torch.float64)
    client = Client(Loss("cross-entropy"), model, plan.head, rows, contributor("none", "silo"), "paper", ROOT)
    noisy = perturbation.perturb(model.state_dict(), key)
    return client, TrainOn(stamp=NOW, parameters=noisy, parts=key.parts, direction=key.direction, encoding={}), key


def test_an_answer_counts_once_and_is_forgotten_where_it_is_refused() -> None:
    client, ask, key = client_and_ask()
    sent = client.answer(ask)
    assert isinstance(sent, Ratios)
    told = ratios.answer(sent, key, ROOT.stream("delta"), {})
    low = replace(told, totals=np.zeros_like(told.totals))
    with pytest.raises(PeerError, match="above what lambda adds"):
        client.answer(low)
    with pytest.raises(MisuseError, match="without the predictions"):  # no second try at where lambda lies
        client.answer(told)
    again = client.answer(ask)
    assert isinstance(again, Ratios)
    np.testing.assert_array_equal(sent.words, again.words)  # of the same stamp and outputs: the same lambdas
    with pytest.raises((MisuseError, PeerError)):  # nor another form of answer than was asked for
        client.answer(Softmax(stamp=NOW, y=np.full((6, 3), 1 / 3), k=np.ones((6, 2)), encoding={}))
    client.answer(told)
    later = client.answer(replace(ask, stamp=Stamp("run", 1, 1)))
    assert isinstance(later, Ratios)
    assert (later.words != sent.words).any()


def silos(classes: int) -> list[Silo]:
    made = []
    for number, name in enumerate(("north", "south", "east")):
        random = np.random.default_rng(number)
        x = random.normal(number / 2, 1, (25, 4))
        made.append(Silo(name, x, (x[:, 0] > 0.4).astype(np.int64) + (classes > 2) * (x[:, 1] > 0.7)))
    return made


@pytest.mark.parametrize("classes", [2, 3])
def test_training_is_fedsgds(classes: int) -> None:
    def run(protocol: FedSGD | PBPFL, scheme: Any) -> Any:
        model = mlp([4, 8, classes], True, torch.float64)
        secure, kind = SecureAggregation(scheme=scheme), {"batch_size": 8, "dtype": "float64"}
        federation = Federation(
            model,
            silos(classes),
            protocol,
            aggregation=secure,
            insecure_secret_seed=3,
            **kind,  # type: ignore[arg-type]
        )
        return federation.train(8, 7)

    ours = run(PBPFL(learning_rate=0.2, partitions=2, **RATIOS), "pairwise")
    theirs = run(FedSGD(learning_rate=0.2, loss="cross-entropy"), "none")
    assert largest_relative_difference(modules.arrays(ours.model), modules.arrays(theirs.model)) <= 1e-9
    assert not any("loss" in line for line in ours.history)  # nobody is told what it would follow from
