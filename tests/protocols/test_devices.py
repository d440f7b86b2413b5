"""Every protocol on a device that is not the CPU: the same bits, and as few copies as there are messages."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from elsewhere import Elsewhere
from torch import nn

from moretta.config.run_files import SecureAggregation
from moretta.contract.codec import Codec
from moretta.contract.messages import Tensors
from moretta.data.silo import Silo
from moretta.data.tables.preparation import ColumnRules
from moretta.engines.driver import Driver
from moretta.engines.in_process import InProcess
from moretta.protocols.baffle.on_device import combine, perturbed
from moretta.protocols.baffle.params import BAFFLE
from moretta.protocols.baffle.silo.directions import Directions, keys_of
from moretta.protocols.cgd.params import CGD
from moretta.protocols.common import modules
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd.params import Centralised, FedAvg, FedSGD, Local
from moretta.protocols.pbpfl.params import PBPFL
from moretta.protocols.registry import build

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


def played(
    protocol: Training, model: nn.Module, device: str, scheme: str = "pairwise"
) -> tuple[dict[str, Tensors], Counter[str]]:
    """Return the models after all rounds, and the copies between devices in the last one."""
    random = np.random.default_rng(0)
    silos = [
        Silo(f"silo-{k}", random.normal(size=(8, *SHAPE)).astype("f4"), random.integers(0, 3, 8)) for k in range(SILOS)
    ]
    secure, rules = SecureAggregation(scheme=scheme), ColumnRules.alike(0)
    setting = Setting(model, 3, silos, secure, 4, rules, torch.float32, device, seed=0, rounds=ROUNDS, insecure=1)
    mode = Elsewhere()
    with mode:
        players = build(protocol, setting)
        driver = Driver(
            players.server, list(players.clients), "run", InProcess(players.clients, Codec(players.messages)), 2
        )
        for end in driver.rounds(1, ROUNDS):
            assert not end.dropped
            if end.number == ROUNDS - 1:
                mode.copies.clear()
        copies = Counter(mode.copies)
        return dict(players.models()), copies


CASES = {
    "fedsgd": (FedSGD(loss="cross-entropy"), batch_norm),
    "fedavg": (FedAvg(loss="cross-entropy"), group_norm),
    "fedsgd, dp": (FedSGD(loss="cross-entropy", dp_noise=1.0, dp_clip=1.0), group_norm),
    "local": (Local(loss="cross-entropy"), batch_norm),
    "centralised": (Centralised(loss="cross-entropy"), batch_norm),
    "pbpfl, squared error": (PBPFL(loss="mse", partitions=2), batch_norm),
    "pbpfl, cross-entropy": (PBPFL(loss="cross-entropy"), group_norm),
    "pbpfl, dense": (PBPFL(loss="mse"), dense),
    "cgd": (CGD(loss="cross-entropy"), batch_norm),
    "baffle": (BAFFLE(loss="cross-entropy", k=20), group_norm),
    "baffle, gaussian": (BAFFLE(loss="cross-entropy", k=12, direction="gaussian", form="central"), dense),
}


@pytest.mark.parametrize("case", CASES)
def test_a_device_gives_the_same_bits(case: str) -> None:
    protocol, model = CASES[case]
    (ours, copies), (theirs, none) = (played(protocol, model(), device) for device in ("meta", "cpu"))
    assert none == {} and copies["there"] and copies["back"]
    assert ours.keys() == theirs.keys()
    for name, tensors in theirs.items():
        for key, value in tensors.items():
            np.testing.assert_array_equal(ours[name][key], value, err_msg=f"{name} {key}")
    print(case, copies)
