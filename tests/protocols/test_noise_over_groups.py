"""``dp-unit = "group"``: all rows of a patient are one contribution to a noised sum, whatever rows it has."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from networks import seeded
from torch import nn

from moretta import BAFFLE, FedAvg, Federation, FedSGD, Schema, Silo
from moretta.config.rules import RULES
from moretta.data.tables.schema import Grouping, Number, Target
from moretta.errors import ParameterError, RowsError
from moretta.protocols.baffle.silo.client import noised_mean
from moretta.protocols.common import modules
from moretta.protocols.common.accountant import epsilon
from moretta.protocols.common.batches import Batches, rows_by_group
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.lattice import Privacy
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.noise import SiloNoise
from moretta.protocols.common.silo_rows import TrainingRows
from moretta.protocols.fedsgd.private import PrivateGradient
from moretta.secure_aggregation.keystream import SecretRoot

CLIP, ROWS = 0.43, 30
WHOM = np.array([f"p{row * row % 7}" for row in range(ROWS)])  # four patients
X = np.random.default_rng(3).normal(0, 1, (ROWS, 4))
Y = np.arange(ROWS) % 3


def network() -> nn.Module:
    with seeded():
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def private(
    index: np.ndarray, size: int = 0, most: int = 100, whom: np.ndarray = WHOM, noise: float = 0.0
) -> PrivateGradient:
    x, y = X[index], Y[index]
    own = SiloRows(TrainingRows(x, y, Batches(len(x), size, 0, "north")), torch.float64)
    privacy = Privacy(noise, CLIP, 1e-5, unit="group", group_rows=most)
    groups = rows_by_group(whom[index], x, y)
    return PrivateGradient(
        SiloNoise(privacy, len(x), size, SecretRoot.insecure(0, "north"), b"", groups), own, Loss("cross-entropy")
    )


def summed(own: PrivateGradient, *purpose: Any) -> Mapping[str, np.ndarray]:
    return own.clipped_sum(network(), *own.noise.lot_of(*(purpose or ("run", 1))))


def distance(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray] | None = None) -> float:
    return float(np.sqrt(sum(np.square(one[name] - (0 if other is None else other[name])).sum() for name in one)))


def test_a_group_adds_the_mean_gradient_of_its_rows_clipped() -> None:
    model, total = network(), dict[str, np.ndarray]()
    trained, norms = modules.trainable(model), []
    for whom in np.unique(WHOM):
        x, y = torch.tensor(X[whom == WHOM]), torch.tensor(Y[whom == WHOM])
        found = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(trained.values()))
        norms.append(float(torch.stack([value.square().sum() for value in found]).sum().sqrt()))
        for name, value in zip(trained, found, strict=True):
            total[name] = total.get(name, 0) + value.numpy() / max(1.0, norms[-1] / CLIP)
    assert min(norms) < CLIP < max(norms)  # some are clipped, and some are not
    assert distance(summed(private(np.arange(ROWS))), total) < 1e-14


def test_one_group_more_or_less_moves_the_sum_by_at_most_the_clip_norm() -> None:
    whole = summed(private(np.arange(ROWS)))
    moved = [distance(whole, summed(private(np.flatnonzero(whom != WHOM)))) for whom in np.unique(WHOM)]
    assert max(moved) <= CLIP * (1 + 1e-12)
    assert max(moved) > 0.99 * CLIP


@pytest.mark.parametrize("most", [2, 100])
def test_duplicating_rows_changes_nothing(most: int) -> None:
    """Neither one row many times, nor all of a group twice: the same rows in the lot, the same sum, the same rate."""
    once = private(np.arange(ROWS), most=most)
    for extra in ([0] * 20, np.flatnonzero(WHOM[1] == WHOM), [3, 5, 5, 8]):
        twice = private(np.concatenate([np.arange(ROWS), np.array(extra)]), most=most)
        assert (twice.noise.lot, twice.noise.rate) == (once.noise.lot, once.noise.rate)
        assert twice.noise.rows_of_lot("run", 1).tolist() == once.noise.rows_of_lot("run", 1).tolist()
        assert distance(summed(once), summed(twice)) == 0.0


def test_rows_that_differ_in_their_target_alone_are_two_rows() -> None:
    x = np.ones((3, 2), np.float32)
    assert rows_by_group(np.array(["a", "a", "b"]), x, np.array([0, 1, 0])) == ((0, 1), (2,))
    assert rows_by_group(np.array(["a", "a", "b"]), x, np.array([1, 1, 1])) == ((0,), (2,))


def test_a_lot_is_of_whole_groups_each_with_the_same_chance_and_of_at_most_so_many_rows() -> None:
    own, groups = private(np.arange(ROWS), size=2, most=5).noise, len(np.unique(WHOM))
    assert (own.lot, own.rate) == (2, 2 / groups)
    lots = [own.lot_of("run", number) for number in range(400)]
    for rows, sizes in lots:
        assert sum(sizes) == len(rows)
        for part in np.split(rows, np.cumsum(sizes)[:-1]) if sizes else []:
            assert len(set(WHOM[part])) == 1
            assert len(part) == len(set(part)) == min(5, (WHOM[part[0]] == WHOM).sum())
    counts = np.array([len(sizes) for _, sizes in lots])
    # Binomial of 4 groups at 1/2 over 400 lots: five deviations of the mean, and all sizes of a lot occur.
    assert abs(counts.mean() - 2) < 5 * np.sqrt(groups / 4 / 400)
    assert set(counts) == {0, 1, 2, 3, 4}
    used = {row for rows, _ in lots for row in rows}
    assert used == set(range(ROWS))  # which rows of a large group are used is drawn anew


def test_gradients_are_the_same_however_few_are_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = summed(private(np.arange(ROWS)))
    monkeypatch.setattr("moretta.protocols.fedsgd.private.MOST_ROWS", 7)
    assert distance(whole, summed(private(np.arange(ROWS)))) < 1e-13


def test_scalars_of_a_group_are_averaged_before_they_are_clipped() -> None:
    noise = private(np.arange(ROWS)).noise
    derivatives = np.random.default_rng(0).normal(size=(3, 6))
    derivatives[0, 1] = np.inf  # counts as 0
    exact = np.where(np.isfinite(derivatives).all(axis=0), derivatives, 0.0)
    means = np.stack([exact[:, :3].mean(axis=1), exact[:, 3:5].mean(axis=1), exact[:, 5]], axis=1)
    clipped = means / np.maximum(1.0, np.linalg.norm(means, axis=0) / CLIP)
    found = noised_mean(noise, derivatives, {}, "run", 1, sizes=[3, 2, 1])
    assert np.allclose(found * noise.lot, clipped.sum(axis=1), rtol=0, atol=1e-15)
    assert not noised_mean(noise, np.zeros((3, 0)), {}, "run", 1, sizes=[]).any()


def test_a_group_whose_scalars_overflow_together_is_hidden() -> None:
    """Each is finite, and their sum is not: the upload was -1.8e16 wherever the group was in the lot."""
    derivatives = np.full((3, 4), 1e-3)
    derivatives[:, :3] = 1.2e308
    upload = noised_mean(private(np.arange(ROWS)).noise, derivatives, {}, "run", 1, sizes=[3, 1])
    assert np.array_equal(upload, noised_mean(private(np.arange(ROWS)).noise, derivatives[:, 3:], {}, "run", 1))


def made(kind: Any = FedSGD, whom: Any = WHOM, **settings: Any) -> Federation:
    silos = [
        Silo(name, X.astype(np.float32) + start, Y, groups=whom)
        for start, name in enumerate(("north", "south", "east"))
    ]
    keys = {"dp_noise": 1.0, "dp_clip": 1.0, "dp_unit": "group", "dp_group_rows": 4} | settings
    more = {} if kind is not BAFFLE else {"k": 10}
    return Federation(
        network().float(), silos, kind(loss="cross-entropy", learning_rate=0.1, **more, **keys), batch_size=2
    )


@pytest.mark.parametrize("kind", [FedSGD, BAFFLE])
def test_a_run_states_epsilon_of_one_group(kind: Any) -> None:
    facts = made(kind).train(3).record["facts"]
    assert facts["unit"] == "group"
    assert facts["sampling_rate"] == 0.5  # lots of 2 of 4 groups
    assert facts["epsilon"] == epsilon(1.0, 1e-5, 0.5, 3)


def test_rows_whose_groups_nobody_named_are_refused_before_the_first_round() -> None:
    with pytest.raises(RowsError, match='silo `north`: its rows have no groups, which dp-unit = "group" needs'):
        made(whom=None).train(1)


def test_a_schema_that_names_no_group_is_refused() -> None:
    """Before any site is asked: the server knows the schema, and no rows."""
    columns: dict[str, Any] = {"age": Number(), "y": Target(classes=("no", "yes"))}
    protocol = FedSGD(dp_noise=1.0, dp_clip=1.0, dp_unit="group", dp_group_rows=2)
    (rule,) = [rule for rule in RULES if "has no column with kind" in rule.sentence]
    assert rule.broken(SimpleNamespace(protocol=protocol, table=Schema(columns=columns)))
    assert not rule.broken(SimpleNamespace(protocol=protocol, table=Schema(columns={**columns, "who": Grouping()})))
    assert not rule.broken(SimpleNamespace(protocol=protocol, table=None))  # arrays have groups of their own


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (FedSGD, {"dp_group_rows": None}, "belong together"),
        (FedSGD, {"dp_unit": None}, "belong together"),
        (FedSGD, {"dp_unit": "silo", "dp_group_rows": None}, "noise hides one row or one group here"),
        (FedAvg, {}, "noise hides one silo here"),
        (FedSGD, {"dp_noise": None, "dp_clip": None}, "needs dp-noise, which is not set"),
    ],
)
def test_units_that_a_protocol_cannot_hide_are_refused(kind: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        made(kind, **settings)
