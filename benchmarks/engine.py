"""What the in-process engine costs: milliseconds a silo and ask beyond the model's own forward and backward."""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from measure import Figure, figure, main
from torch import nn

from moretta.contract.codec import Codec
from moretta.data.settings import Data
from moretta.data.silo import Silo
from moretta.data.tables.preparation import ColumnRules
from moretta.engines.driver import Driver
from moretta.engines.in_process import InProcess
from moretta.engines.settings import Run
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.specification import Specification
from moretta.protocols.fedsgd.params import FedSGD
from moretta.protocols.registry import build
from moretta.secure_aggregation.settings import SecureAggregation

SILOS, ROUNDS, BATCH = 10, 40, 32


def overhead(scheme: str, strict: bool, repeats: int) -> Figure:
    """Return the milliseconds a silo and ask that no model's pass accounts for."""
    random = np.random.default_rng(0)
    model = nn.Sequential(nn.Linear(17, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    silos = [
        Silo(f"silo-{k}", random.normal(size=(320, 17)).astype("f4"), random.integers(0, 2, 320)) for k in range(SILOS)
    ]
    data = Data(source="python", batch_size=BATCH)
    spec = Specification(Run(rounds=ROUNDS), data, FedSGD(loss="mse"), SecureAggregation(scheme=scheme))
    setting = Setting(spec, model, 1, silos, ColumnRules.alike(0))
    found = []
    for _ in range(repeats):
        players = build(setting)
        engine = InProcess(players.clients, Codec(players.messages), strict=strict)
        players.server.phase = engine.clock.phase
        driver = Driver(players.server, list(players.clients), "bench", engine, 1)
        list(driver.rounds(1, 2))  # set-up, and what is warmed up once
        engine.clock.take()
        began = time.perf_counter()
        list(driver.rounds(3, ROUNDS + 2))
        total, phases = time.perf_counter() - began, engine.clock.take()
        passes = phases["local_backward"] + phases.get("local_forward", 0.0)  # stacked silos have both in the first
        found.append((total - passes) / (ROUNDS * SILOS) * 1000)
    return figure(found, "ms")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the schemes, strict or not."""
    return {
        "silos": SILOS,
        "rounds": ROUNDS,
        "repeats": arguments.repeats,
        "parameters": 5377,
        "overhead_ms_per_silo_and_ask": overhead("none", False, arguments.repeats),
        "overhead_ms_per_silo_and_ask_strict": overhead("none", True, arguments.repeats),
        "overhead_ms_per_silo_and_ask_pairwise": overhead("pairwise", False, arguments.repeats),
    }


if __name__ == "__main__":
    main(__doc__ or "", run, ("--repeats", {"type": int, "default": 7}))
