"""What a round of many small silos costs beyond the silos' own steps and the keystream of their masks.

100 silos of 30 rows take one step each with an MLP of 30,418 parameters, by FedAvg, in one process on one thread.
`in_no_phase` is the part of the rounds' seconds that no phase of the engine's clock accounts for. `floor_ms` is the
seconds of local steps and, with masks, of the same keystreams by themselves: as many as silos and server expand, each
opened, read over an upload and added. `over_floor_ratio` is a round over it; rounds and keystreams take turns.
`in_workers_ms` is a round whose silos play in worker processes, and `in_workers_ratio` such a run over one in one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from measure import Figure, figure, main
from torch import nn

from moretta import Engine, FedAvg, Federation, SecureAggregation, Silo
from moretta.secure_aggregation.keystream import Keystream
from moretta.secure_aggregation.masks import ZEROS
from moretta.secure_aggregation.ring import CHUNK

SILOS, ROWS, WARM = 100, 30, 3
STEPS = ("local_forward", "local_backward", "update")  # the silos' own, and the server's one, which is short


def rounds(scheme: str, count: int, workers: int = 1) -> list[dict[str, Any]]:
    """Return the lines of the rounds of one run, without those that warm up."""
    random = np.random.default_rng(0)
    model = nn.Sequential(nn.Linear(16, 200), nn.ReLU(), nn.Linear(200, 128), nn.ReLU(), nn.Linear(128, 10))
    silos = [
        Silo(f"silo-{k}", random.normal(size=(ROWS, 16)).astype("f4"), random.integers(0, 10, ROWS))
        for k in range(SILOS)
    ]
    federation = Federation(
        model,
        silos,
        FedAvg(loss="cross-entropy", learning_rate=0.1),
        batch_size=ROWS,
        aggregation=SecureAggregation(scheme=scheme),
        engine=Engine(workers=workers),
    )
    return list(federation.train(count + WARM).history)[WARM:]


def keystreams(words: int) -> float:
    """Return the seconds of a round's keystreams alone: opened, read over an upload, and added to it."""
    degree = SecureAggregation().rules(None).plan(SILOS).degree or SILOS - 1
    upload, part = np.zeros(words, dtype=np.uint32), np.empty(CHUNK, dtype=np.uint32)
    began = time.perf_counter()
    for _ in range(SILOS * (degree + 1) + SILOS):  # each silo's pairs and its own mask, which the server removes
        stream = Keystream(bytes(32))
        for start in range(0, words, CHUNK):
            chunk = upload[start : start + CHUNK]
            stream.fill(part[: chunk.size], ZEROS)
            np.add(chunk, part[: chunk.size], out=chunk)
    return time.perf_counter() - began


def measured(scheme: str, turns: int, count: int, workers: int) -> dict[str, Any]:
    """Return the figures of a scheme."""
    lines, ratios, floors = list[dict[str, Any]](), list[float](), list[float]()
    shared, gains = list[float](), list[float]()
    for _ in range(turns):
        streams = keystreams(30_418 + 2) if scheme == "pairwise" else 0.0
        run = rounds(scheme, count)
        steps = statistics.median(sum(line["seconds"].get(phase, 0.0) for phase in STEPS) for line in run)
        floors.append(steps + streams)
        ratios.append(statistics.median(line["seconds_total"] for line in run) / floors[-1])
        lines += run
        others = [line["seconds_total"] for line in rounds(scheme, count, workers)]
        gains.append(statistics.median(others) / statistics.median(line["seconds_total"] for line in run))
        shared += others
    found: dict[str, Figure] = {
        "round_ms": figure([line["seconds_total"] for line in lines], "ms", 1000),
        "in_no_phase": figure([1 - sum(line["seconds"].values()) / line["seconds_total"] for line in lines], "times"),
        "floor_ms": figure(floors, "ms", 1000),
        "over_floor_ratio": figure(ratios, "times"),
        "in_workers_ms": figure(shared, "ms", 1000),
        "in_workers_ratio": figure(gains, "times"),
    }
    for phase in lines[0]["seconds"]:
        found[f"{phase}_ms"] = figure([line["seconds"].get(phase, 0.0) for line in lines], "ms", 1000)
    return {f"{scheme}_{name}": value for name, value in found.items()}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure rounds in the clear and with masks."""
    found: dict[str, Any] = {
        "silos": SILOS,
        "rows": ROWS,
        "parameters": 30_418,
        "rounds": arguments.rounds,
        "workers": arguments.workers,
    }
    for scheme in ("none", "pairwise"):
        found |= measured(scheme, arguments.turns, arguments.rounds, arguments.workers)
    return found


if __name__ == "__main__":
    main(
        __doc__ or "",
        run,
        ("--turns", {"type": int, "default": 5}),
        ("--rounds", {"type": int, "default": 10}),
        ("--workers", {"type": int, "default": 2}),
    )
