"""Every protocol on a device that is not the CPU: the same bits, and as few copies as there are messages."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from elsewhere import DEVICE, Elsewhere
from torch import nn

from moretta.contract.codec import Codec
from moretta.contract.messages import Tensors
from moretta.data.settings import Data
from moretta.data.silo import Silo
from moretta.data.tables.preparation import ColumnRules
from moretta.engines.driver import Driver
from moretta.engines.in_process import InProcess
from moretta.engines.settings import Run
from moretta.protocols.baffle import torch_forward
from moretta.protocols.baffle.params import BAFFLE
from moretta.protocols.baffle.silo.directions import Directions, keys_of
from moretta.protocols.cgd.params import CGD
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.specification import Specification
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd.params import Centralised, FedAvg, FedSGD, Local
from moretta.protocols.pbpfl.params import PBPFL
from moretta.protocols.registry import build
from moretta.secure_aggregation.settings import SecureAggregation

SILOS, ROUNDS, SHAPE = 3, 3, (1, 6, 6)


def convolutional(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))


def batch_norm() -> nn.Module:
    return convolutional(nn.BatchNorm2d(4))


def group_norm() -> nn.Module:
    return convolutional(nn.GroupNorm(2, 4))


def played(protocol: Training, model: nn.Module, device: str) -> tuple[dict[str, Tensors], Counter[str]]:
    """Return the models after all rounds, and the copies between devices in the last one."""
    random = np.random.default_rng(0)
    drawn = [(random.normal(size=(8, *SHAPE)).astype("f4"), random.integers(0, 3, 8)) for _ in range(SILOS)]
    silos = [Silo(f"silo-{number}", x, y) for number, (x, y) in enumerate(drawn)]
    secure, rules = SecureAggregation(scheme="pairwise"), ColumnRules.alike(0)
    run = Run(rounds=ROUNDS, insecure_secret_seed=1).model_copy(update={"device": device})  # no run file has "meta"
    spec = Specification(run, Data(source="python", batch_size=4), protocol, secure)
    with Elsewhere() as mode:
        players = build(Setting(spec, model, 3, silos, rules))
        engine, last = InProcess(players.clients, Codec(players.messages)), Counter[str]()
        for end in Driver(players.server, list(players.clients), "run", engine, 1).rounds(1, ROUNDS):
            assert not end.dropped
            last = Counter(mode.copies)
            mode.copies.clear()
        return dict(players.models()), last


# By case: a protocol, its model, and what a round of three silos copies to the device and back.
CASES = {
    # each silo is sent a model (with BatchNorm's counter in a copy of its own) and the numbers of its batch's rows
    "fedsgd": (FedSGD(loss="cross-entropy"), batch_norm, 9, 6),
    "fedavg": (FedAvg(loss="cross-entropy"), group_norm, 9, 3),
    "fedsgd, dp": (FedSGD(loss="cross-entropy", dp_noise=1.0, dp_clip=1.0), group_norm, 6, 3),
    "local": (Local(loss="cross-entropy"), batch_norm, 6, 3),
    "centralised": (Centralised(loss="cross-entropy"), batch_norm, 3, 2),
    # also parts and direction; under cross-entropy the server's answer too
    "pbpfl, squared error": (PBPFL(loss="mse", partitions=2), batch_norm, 15, 3),
    "pbpfl, cross-entropy": (PBPFL(loss="cross-entropy"), group_norm, 18, 6),
    "pbpfl, dense": (PBPFL(loss="mse"), dense, 12, 3),
    "cgd": (CGD(loss="cross-entropy"), batch_norm, 9, 9),
    # directions are shared: the parameters, three blocks and three batches; the server three blocks and what they weigh
    "baffle": (BAFFLE(loss="cross-entropy", k=20), group_norm, 11, 10),
    # the same ahead and behind, each of 12 directions by itself
    "baffle, gaussian": (BAFFLE(loss="cross-entropy", k=12, direction="gaussian", form="central"), dense, 44, 13),
}


@pytest.mark.parametrize("case", CASES)
def test_a_device_gives_the_same_bits_with_a_copy_a_message(case: str) -> None:
    protocol, model, there, back = CASES[case]
    (ours, copies), (theirs, none) = (played(protocol, model(), device) for device in ("meta", "cpu"))
    assert not none
    assert (copies["there"], copies["back"]) == (there, back)
    assert ours.keys() == theirs.keys()
    for name, tensors in theirs.items():
        for key, value in tensors.items():
            np.testing.assert_array_equal(ours[name][key], value, err_msg=f"{name} {key}")


@pytest.mark.parametrize("distribution", ["rademacher", "orthogonal", "gaussian"])
def test_directions_are_the_same_bits_on_a_device(distribution: str) -> None:
    count, size, orthogonal = 20, 301, distribution == "orthogonal"
    keys = keys_of(bytes(32), count, "test", orthogonal=orthogonal)
    directions = Directions(keys, count, size, distribution.replace("orthogonal", "rademacher"), orthogonal=orthogonal)
    random = np.random.default_rng(0)
    at, coefficients = random.normal(size=size).astype("f4"), random.normal(size=count)
    for distance in (1e-3, -1e-3):
        wanted = [vectors.copy() for vectors in directions.perturbed(at, distance, 8)]
        with Elsewhere() as mode:
            found = [vectors.cpu().numpy() for vectors in torch_forward.perturbed(directions, at, distance, DEVICE)]
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
        assert mode.copies["there"] == 1 + (count if distribution == "gaussian" else 3)  # the parameters, and 3 blocks
    with Elsewhere() as mode:
        summed = torch_forward.combine(directions, coefficients, DEVICE)
    np.testing.assert_array_equal(summed, directions.combine(coefficients))
    assert mode.copies["back"] == 1


def test_a_mixture_of_devices_is_an_error() -> None:
    with Elsewhere(), pytest.raises(RuntimeError, match="on one device"):
        torch.ones(3).to(DEVICE) + torch.ones(3)
