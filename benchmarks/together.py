"""What a round costs where the silos of a slot are stepped together, over the same round one by one: processor time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measure import figure, interleaved, main, ratio
from torch import nn

from moretta import BAFFLE, PBPFL, FedAvg, FedSGD
from moretta.contract.codec import Codec
from moretta.data.settings import Data
from moretta.data.silo import Silo
from moretta.data.tables.preparation import ColumnRules
from moretta.engines import silos_here
from moretta.engines.driver import Driver
from moretta.engines.in_process import InProcess
from moretta.engines.settings import Run
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.specification import Specification
from moretta.protocols.common.training import Training
from moretta.protocols.registry import build
from moretta.secure_aggregation.settings import SecureAggregation

ROWS, INPUTS, CLASSES = 30, 64, 10
SHARED: dict[str, Any] = {"loss": "cross-entropy", "learning_rate": 0.01}
PROTOCOLS: dict[str, tuple[Training, int]] = {
    "fedavg": (FedAvg(**SHARED), 0),
    "fedavg_in_batches_of_10": (FedAvg(**SHARED), 10),
    "fedsgd": (FedSGD(**SHARED), 0),
    "pbpfl_squared_error": (PBPFL(learning_rate=0.01), 0),
    "pbpfl_cross_entropy": (PBPFL(**SHARED), 0),
    "baffle_k_64": (BAFFLE(k=64, sigma=1e-3, **SHARED), 0),
}


def rounds_of(protocol: Training, batch_size: int, count: int, together: bool) -> Callable[[], object]:
    """Return what plays the next round of a federation. together: whether silos may be stepped in one call."""
    random, shared = np.random.default_rng(0), silos_here._together
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 150), nn.ReLU(), nn.Linear(150, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    silos = [
        Silo(f"silo-{k}", random.normal(size=(ROWS, INPUTS)).astype("f4"), random.integers(0, CLASSES, ROWS))
        for k in range(count)
    ]
    columns, secure = ColumnRules.alike(0), SecureAggregation(scheme="none")
    spec = Specification(Run(rounds=1000), Data(source="python", batch_size=batch_size), protocol, secure)
    players = build(Setting(spec, model, CLASSES, silos, columns))
    engine = InProcess(players.clients, Codec(players.messages))
    players.server.phase = engine.clock.phase
    driver, numbers = Driver(players.server, list(players.clients), "bench", engine, 1), iter(range(1, 1000))

    def play() -> None:
        number = next(numbers)
        silos_here._together = shared if together else lambda works: None
        try:
            list(driver.rounds(number, number))
        finally:
            silos_here._together = shared

    return play


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure each protocol, in pairs of rounds."""
    found: dict[str, Any] = {"silos": arguments.silos, "rows": ROWS, "parameters": 30368, "clock": "processor time"}
    for name, (protocol, batch_size) in PROTOCOLS.items():
        work = {
            way: rounds_of(protocol, batch_size, arguments.silos, way == "together") for way in ("alone", "together")
        }
        seconds = interleaved(work, arguments.pairs, warm_up=2, clock=time.process_time)
        found[f"{name}_one_by_one"] = figure(seconds["alone"], "ms", 1000)
        found[f"{name}_together"] = figure(seconds["together"], "ms", 1000)
        found[f"{name}_ratio"] = ratio(seconds["together"], seconds["alone"])
    return found


if __name__ == "__main__":
    main(__doc__ or "", run, ("--silos", {"type": int, "default": 100}), ("--pairs", {"type": int, "default": 9}))
