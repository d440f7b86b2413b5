"""Noise on whole updates: what one silo can do to a sum, that silos count alike, and runs of all that sums them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from networks import seeded
from torch import Tensor, nn

from moretta import BAFFLE, Engine, Faults, FedAvg, Federation, FedProx, SecureAggregation, Silo
from moretta.contract.messages import Stamp
from moretta.errors import ParameterError
from moretta.protocols.common import modules
from moretta.protocols.common.accountant import epsilon
from moretta.protocols.common.lattice import Lattice, Privacy
from moretta.protocols.common.noise import SiloNoise
from moretta.protocols.fedsgd.private import PrivateUpdate
from moretta.run.result import Result
from moretta.secure_aggregation.keystream import SecretRoot

CLIP, NOW = 0.5, Stamp("run", 1, 0)
NAMES = ("north", "south", "east", "west")


def private(noise: float = 0.0, sharers: int = 1) -> SiloNoise:
    return SiloNoise(Privacy(noise, CLIP, 1e-5, sharers, "silo"), 40, 0, SecretRoot.insecure(0, "north"), b"")


def noised(by: SiloNoise, what: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return by.of_update(NOW, what, {}, b"rows")


def update(scale: float) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(1)
    return {"gradient/w": drawn.normal(0, scale, (30, 20)), "gradient/b": drawn.normal(0, scale, 20)}


def norm(values: Mapping[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(value).sum() for value in values.values())))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e30])
def test_one_silo_adds_no_more_than_the_clip_norm(scale: float) -> None:
    mine = update(scale)
    found = noised(private(), mine)
    assert (mine["gradient/w"] == update(scale)["gradient/w"]).all(), "the silo's own arrays stay"
    assert norm(found) == pytest.approx(min(CLIP, norm(update(scale))), rel=1e-12)
    for name, value in found.items():  # the direction stays
        np.testing.assert_allclose(value * norm(update(scale)), update(scale)[name] * norm(found), rtol=1e-9)


def test_what_is_not_finite_counts_as_nothing() -> None:
    broken = update(0.001)
    broken["gradient/b"][:] = [np.nan, np.inf, -np.inf, *np.zeros(17)]
    found = noised(private(), broken)
    assert not found["gradient/b"].any()
    np.testing.assert_array_equal(found["gradient/w"], broken["gradient/w"])


def test_a_take_has_the_same_noise_and_another_update_has_other_noise() -> None:
    one = private(noise=1.0)
    lattice = Lattice.of(one.privacy, 620)
    first = noised(one, update(0.001))
    assert all((value == first[name]).all() for name, value in noised(one, update(0.001)).items())
    moved = update(0.001)
    moved["gradient/b"][0] += 1e-9  # as of a loop that is not the same twice, below a step
    other = noised(one, moved)
    difference = np.concatenate([np.ravel(first[name] - other[name]) for name in first]) / lattice.step
    squares = np.square(difference / lattice.deviation).sum() / 2  # of independent noises: chi-square of 620
    assert abs(squares - 620) < 5 * np.sqrt(2 * 620)


def test_a_model_with_running_statistics_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"`1\.running_mean` is a running statistic of rows, and under dp-noise"):
        PrivateUpdate(private()).check(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))


# -- runs --------------------------------------------------------------------------------------------------------------


def silos() -> list[Silo]:
    """Of 10, 20, 30 and 40 rows, so that weights by rows would be seen."""
    drawn = np.random.default_rng(3)
    parts = [drawn.normal(0, 1, (10 * (place + 1), 4)).astype(np.float32) for place in range(len(NAMES))]
    return [Silo(name, x, (x[:, 0] > 0).astype(np.int64)) for name, x in zip(NAMES, parts, strict=True)]


def network() -> nn.Module:
    with seeded():
        return nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 2))


def train(rounds: int = 1, kind: Any = FedAvg, engine: Engine | None = None, **settings: Any) -> Result:
    rate = {} if "fit" in settings else {"learning_rate": 0.5}
    protocol = kind(**{"loss": "cross-entropy", "dp_noise": 1.0, "dp_clip": CLIP} | rate | settings)
    made = Federation(network(), silos(), protocol, batch_size=5, dtype="float64", insecure_secret_seed=3,
                      aggregation=SecureAggregation(threshold=3), engine=engine or Engine())  # fmt: skip
    return made.train(rounds)


def weights(result: Result) -> np.ndarray:
    assert result.model is not None
    return np.concatenate([np.ravel(value) for value in modules.arrays(result.model).values()])


forwards = partial(BAFFLE, k=8, local_epochs=1, optimizer="sgd", ema=0.0)
adam = partial(BAFFLE, k=8, local_epochs=1, ema=0.0)
blocks = partial(forwards, k=None, perturb="blocks", linear="activations")


@pytest.mark.parametrize("kind", [FedAvg, FedProx, forwards, adam, blocks, partial(forwards, directions="own")])
def test_a_run_moves_by_the_mean_of_clipped_updates_with_noise(kind: Any) -> None:
    noised, bare, start = (weights(train(kind=kind)), weights(train(kind=kind, dp_noise=0.0)), weights_of_start())
    assert np.linalg.norm(bare - start) <= CLIP * (1 + 1e-6)
    lattice = Lattice.of(Privacy(1.0, CLIP, 1e-5, 4, "silo"), start.size)
    values = (noised - bare) * len(NAMES)  # four silos' noise: the rest, for one that may be lost, was taken off
    wanted = 4 * (lattice.deviation * lattice.step) ** 2
    assert abs(np.square(values).sum() / wanted - start.size) < 5 * np.sqrt(2 * start.size)


def weights_of_start() -> np.ndarray:
    return np.concatenate([np.ravel(value) for value in modules.arrays(network().double()).values()])


def test_silos_count_alike_whatever_rows_they_have() -> None:
    """Each update is clipped to the same norm, and a mean by rows would be nearer to that of the largest silo."""
    alone = []
    for place in range(len(NAMES)):
        protocol = FedAvg(loss="cross-entropy", learning_rate=0.5, dp_noise=0.0, dp_clip=1e-3)
        one = Federation(network(), [silos()[place]], protocol, batch_size=5, dtype="float64",
                         aggregation=SecureAggregation(scheme="none")).train(1)  # fmt: skip
        alone.append(weights(one) - weights_of_start())
    together = weights(train(dp_noise=0.0, dp_clip=1e-3)) - weights_of_start()
    assert np.linalg.norm(together - np.mean(alone, axis=0)) < 1e-9
    assert [np.linalg.norm(one) for one in alone] == pytest.approx([1e-3] * 4, rel=1e-4)  # a start is moved by 2^-23


@pytest.mark.parametrize("kind", [FedAvg, forwards])
def test_the_result_states_the_unit_and_no_loss_of_rows(kind: Any) -> None:
    result = train(3, kind)
    facts = result.record["facts"]
    assert (facts["unit"], facts["sampling_rate"], facts["noise_silos"], facts["releases"]) == ("silo", 1.0, 4.0, 3.0)
    assert facts["epsilon"] == epsilon(1.0, 1e-5, 1.0, 3)
    assert facts["epsilon_to_silos"] == epsilon(np.sqrt(2 / 3), 1e-5, 1.0, 3)
    assert facts["sensitivity"] == Lattice.of(Privacy(1.0, CLIP, 1e-5, 4), weights_of_start().size).sensitivity
    assert all("loss" not in line for line in result.history)
    assert {line["rows"] for line in result.history} == {4.0}  # silos, each of which counts once


def loop(model: nn.Module, x: Tensor, y: Tensor, number: int) -> tuple[nn.Module, int]:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(100.0)
    return model, len(x)


def test_a_loop_of_ones_own_is_clipped_too() -> None:
    moved = weights(train(kind=FedAvg, fit=loop, dp_noise=0.0)) - weights_of_start()
    assert moved == pytest.approx(CLIP / np.sqrt(moved.size), rel=1e-3)  # each was 100


def overflowing(model: nn.Module, x: Tensor, y: Tensor, number: int) -> tuple[nn.Module, int]:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model, len(x)


def test_a_loop_of_ones_own_that_overflows_is_hidden() -> None:
    """A silo that refused told, without noise, what its rows do to a model that the server chose."""
    result = train(kind=FedAvg, fit=overflowing, dp_noise=0.0)
    assert not result.record["dropped"]
    assert weights(result) == pytest.approx(weights_of_start(), abs=1e-6)


@pytest.mark.parametrize("kind", [FedAvg, forwards])
def test_a_round_goes_on_without_a_silo_and_counts(kind: Any) -> None:
    faults = Faults(drop=[{"silo": "west", "round": 2, "phase": "upload"}])  # type: ignore[list-item]
    result = train(3, kind, engine=Engine(faults=faults))
    assert result.record["dropped"]
    assert result.record["facts"]["releases"] >= 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dp_clip": None}, "dp-noise is set, but dp-clip is not"),
        ({"dp_noise": None}, "dp-clip is set, but dp-noise is not"),
        ({"dp_delta": 1.0}, "dp_delta: expected less than 1, got 1.0"),
    ],
)
def test_what_does_not_belong_together_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        FedAvg(**{"loss": "cross-entropy", "dp_noise": 1.0, "dp_clip": 1.0} | settings)


def test_a_run_without_noise_says_nothing_of_delta() -> None:
    """So that the text of such runs, to which digests are bound, is what it was."""
    assert "dp-delta" not in FedAvg(loss="mse").model_dump(mode="json", by_alias=True)
    assert FedAvg(loss="mse", dp_noise=1.0, dp_clip=1.0).model_dump(mode="json", by_alias=True)["dp-delta"] == 1e-5
