"""Every start is moved once, by a lattice's step, for all protocols alike."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from moretta import CGD, PBPFL, Centralised, FedAvg, Federation, FedSGD, Local, SecureAggregation, Silo
from moretta.engines.checkpoint import CheckpointId
from moretta.models import catalogue
from moretta.protocols.common import modules
from moretta.protocols.common.modules import SPREAD, first_weights
from moretta.protocols.registry import build


def arrays(model: nn.Module) -> dict[str, np.ndarray]:
    return modules.arrays(copy.deepcopy(model).double())


def test_noise_is_normal_and_of_the_size_of_a_lattices_step() -> None:
    model = catalogue.build("mlp", inputs=(200,), outputs=3, seed=1, hidden=[100])
    start = first_weights(model)
    built, moved = arrays(model), arrays(start)
    for name, value in built.items():
        assert moved[name].dtype == np.float64
        noise = (moved[name] - value).ravel() / (SPREAD * np.abs(value).max())
        # A normal number is above 6 with a chance of 2e-9; the sum of n squares has the deviation sqrt(2 n).
        assert np.abs(noise).max() < 6
        assert abs(noise @ noise - noise.size) < 6 * np.sqrt(2 * noise.size)
        assert np.unique(noise).size == noise.size


def test_it_follows_from_the_start_alone_and_leaves_it_as_it_is() -> None:
    model = catalogue.build("mlp", inputs=(5,), outputs=3, seed=1, hidden=[4])
    before = arrays(model)
    one, two = arrays(first_weights(model)), arrays(first_weights(copy.deepcopy(model).double()))
    assert all(np.array_equal(one[name], two[name]) for name in one), (
        "a run in float64 starts where one in float32 does"
    )
    assert all(np.array_equal(before[name], value) for name, value in arrays(model).items())
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-6
    other = arrays(first_weights(model))
    assert abs(other["2.bias"] - before["2.bias"]).max() < 6 * SPREAD
    assert not np.array_equal(other["2.bias"], one["2.bias"]), "who knows all but one weight does not know the noise"


def test_tied_parameters_are_moved_and_what_is_frozen_buffers_and_zeros_stay() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 3))
    model[3].weight = model[0].weight
    model[1].weight.requires_grad_(False)
    built, moved = arrays(model), arrays(start := first_weights(model))
    assert start[3].weight is start[0].weight
    assert (np.abs(moved["0.weight"] - built["0.weight"]) > 0).all()
    for name in ("1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"):
        np.testing.assert_array_equal(moved[name], built[name])


def federation(protocol: object, **settings: object) -> Federation:
    random = np.random.default_rng(0)
    silos = [Silo(name, random.normal(size=(20, 4)), random.integers(0, 2, 20)) for name in "ab"]
    model = catalogue.build("mlp", inputs=(4,), outputs=1, seed=3, hidden=[6])
    return Federation(model, silos, protocol, aggregation=SecureAggregation(scheme="none"), **settings)


def start_of(protocol: object, **settings: object) -> dict[str, np.ndarray]:
    """Return the common model before the first round, or one silo's own."""
    of = federation(protocol, **settings)
    players = build(of._setting(0, 3))
    return dict(next(iter(players.models().values())))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("protocol", [FedSGD(), FedAvg(), Local(), Centralised(), PBPFL(scales="powers-of-two")])
def test_all_protocols_have_one_start(protocol, dtype) -> None:
    true = start_of(PBPFL(), dtype=dtype)
    for name, value in start_of(protocol, dtype=dtype).items():
        assert true[name].dtype == np.float64
        assert value.dtype == dtype
        np.testing.assert_array_equal(value, true[name].astype(dtype))


def test_cgds_starts_lie_around_it() -> None:
    true = start_of(FedSGD(), dtype="float64")
    near = start_of(CGD(loss="mse", around="model", delta=1e-14), dtype="float64")
    for name, value in true.items():
        np.testing.assert_allclose(near[name], value, rtol=0, atol=1e-12)


def test_a_start_is_moved_once_however_often_it_is_used() -> None:
    of = federation(FedSGD())
    starts = [modules.arrays(of._setting(0, 3, CheckpointId("run", 0, session, "")).model) for session in range(3)]
    assert all(np.array_equal(starts[0][name], one[name]) for one in starts for name in one)


def test_a_warm_start_is_moved_too(tmp_path) -> None:
    model = federation(PBPFL()).model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.25
    torch.save(model.state_dict(), tmp_path / "warm.pt")
    found, expected = start_of(PBPFL(warm_start=tmp_path / "warm.pt")), arrays(first_weights(model))
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
