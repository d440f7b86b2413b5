"""What a round of many small silos costs beyond the silos' own steps and the keystream of their masks.

100 silos of 30 rows take one step each with an MLP of 30,418 parameters, by FedAvg, in one process on one thread.
`in_no_phase` is the part of the rounds' seconds that no phase of the engine's clock accounts for. `floor_ms` is the
processor time of local steps (the steps' part of the clock's seconds, of the round's processor time) and, with masks,
of the same keystreams by themselves: as many as silos and server expand, each opened, read over an upload and added.
They are of the ring's words, 64 bits; `pairwise_32` is a round in the ring of 32, with its own floor.
`over_floor_ratio` is a round's processor time over it; rounds and keystreams take turns. `in_workers_ms` is a round
whose silos play in worker processes, by the clock, and `in_workers_ratio` such a run over one in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, Literal

import numpy as np
from measure import Figure, figure, main
from torch import nn

from moretta import Engine, FedAvg, Federation, SecureAggregation, Silo
from moretta.secure_aggregation.encoding import CHUNK
from moretta.secure_aggregation.keystream import Keystream
from moretta.secure_aggregation.masks import ZEROS

SILOS, ROWS, WARM = 100, 30, 3
STEPS = ("local_forward", "local_backward", "update")  # the silos' own, and the server's one, which is short


def rounds(scheme: str, count: int, workers: int = 1, bits: Literal[32, 64] = 64) -> list[dict[str, Any]]:
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
        aggregation=SecureAggregation(scheme=scheme, ring_bits=bits),
        engine=Engine(workers=workers),
    )
    ends = [time.process_time()]
    result = federation.train(count + WARM, progress=lambda *_: ends.append(time.process_time()))
    spent = np.diff(ends).tolist()
    return [{**line, "processor": one} for line, one in zip(result.history, spent, strict=True)][WARM:]


def keystreams(words: int, bits: int) -> float:
    """Return the seconds of a round's keystreams alone: opened, read over an upload of the ring's, and added to it."""
    degree = SecureAggregation().rules(None).plan(SILOS).degree or SILOS - 1
    upload, part = np.zeros(words, dtype=f"u{bits // 8}"), np.empty(CHUNK, dtype=f"u{bits // 8}")
    chunks = [(chunk, part[: chunk.size]) for chunk in np.split(upload, range(CHUNK, words, CHUNK))]
    read = [(*pair, pair[1].view(np.uint8).data, memoryview(ZEROS)[: pair[1].nbytes]) for pair in chunks]
    began = time.process_time()
    for _ in range(SILOS * (degree + 1) + SILOS):  # each silo's pairs and its own mask, which the server removes
        stream = Keystream(bytes(32))
        for chunk, mask, octets, zeros in read:
            stream.fill(octets, zeros)
            np.add(chunk, mask, chunk)
    return time.process_time() - began


def measured(scheme: str, turns: int, count: int, workers: int, bits: Literal[32, 64] = 64) -> dict[str, Any]:
    """Return the figures of a scheme in a ring, whose floor is of the same ring."""
    lines, ratios, floors = list[dict[str, Any]](), list[float](), list[float]()
    shared, gains = list[float](), list[float]()
    for _ in range(turns):
        streams = keystreams(30_418 + 2, bits) if scheme == "pairwise" else 0.0
        run = rounds(scheme, count, bits=bits)
        steps = statistics.median(_of_steps(line) * line["processor"] for line in run)
        floors.append(steps + streams)
        ratios.append(statistics.median(line["processor"] for line in run) / floors[-1])
        lines += run
        others = [line["seconds_total"] for line in rounds(scheme, count, workers, bits)]
        gains.append(statistics.median(others) / statistics.median(line["seconds_total"] for line in run))
        shared += others
    found: dict[str, Figure] = {
        "round_ms": figure([line["seconds_total"] for line in lines], "ms", 1000),
        "round_processor_ms": figure([line["processor"] for line in lines], "ms", 1000),
        "in_no_phase": figure([1 - sum(line["seconds"].values()) / line["seconds_total"] for line in lines], "times"),
        "floor_ms": figure(floors, "ms", 1000),
        "over_floor_ratio": figure(ratios, "times"),
        "in_workers_ms": figure(shared, "ms", 1000),
        "in_workers_ratio": figure(gains, "times"),
    }
    for phase in lines[0]["seconds"]:
        found[f"{phase}_ms"] = figure([line["seconds"].get(phase, 0.0) for line in lines], "ms", 1000)
    return {f"{scheme}{'_32' * (bits == 32)}_{name}": value for name, value in found.items()}


def _of_steps(line: dict[str, Any]) -> float:
    """Return which part of a round's seconds are steps."""
    return float(sum(line["seconds"].get(phase, 0.0) for phase in STEPS) / line["seconds_total"])


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
    return found | measured("pairwise", arguments.turns, arguments.rounds, arguments.workers, 32)


if __name__ == "__main__":
    main(
        __doc__ or "",
        run,
        ("--turns", {"type": int, "default": 5}),
        ("--rounds", {"type": int, "default": 10}),
        ("--workers", {"type": int, "default": 2}),
    )
