"""What a round in Flower's simulation costs: plain FedAvg, Flower's own SecAgg+, and Moretta's sum by mod and strategy.

    python -m venv FLOWER; FLOWER/bin/pip install 'flwr[simulation]==1.42.0' .     # torch by constraints.txt, as here
    OMP_NUM_THREADS=1 python benchmarks/flower_sums.py --flower FLOWER/bin/python --json

The task is that of `peers.py` with a model of 306,730 parameters; its scripts play it, each run in a process of its own
and in turns. Plain FedAvg and ours are over Flower's message interface, SecAgg+ over its older one, which alone has it.
All end with the same weights, up to the rounding of each, or the benchmark stops.

Bytes are of messages' contents as Flower serialises them, of all clients together: `first` is a run's first round, with
the set-up of keys; `later` the second. Seconds and processor seconds of a round are as in `peers.py`.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from itertools import product
from typing import Any

from measure import figure, main, ratio
from peer_task import WARM, Task
from peers import Told, difference, figures, play

from moretta import SecureAggregation

CASES = {"plain": ("flower_messages", False, 64), "ours_64": ("flower_messages", True, 64)}
CASES |= {"ours_32": ("flower_messages", True, 32), "secagg": ("flower", True, 64)}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Play all cases for each number of clients."""
    found: dict[str, Any] = {"repeats": arguments.repeats, "load": list(os.getloadavg())}
    for silos in map(int, arguments.silos.split(",")):
        found |= compare(silos, arguments)
    return found


def compare(silos: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one number of clients."""
    plan = SecureAggregation().rules(None).plan(silos)
    shares = min(plan.degree + 1, silos) if plan.degree else silos
    task = Task(arguments.model, silos, arguments.rows, arguments.rounds + WARM, False, shares, plan.threshold)
    cases = {name: CASES[name] for name in arguments.cases.split(",")}
    told: dict[str, list[Told]] = {name: [] for name in cases}
    about: dict[str, Any] = {}
    for _ in range(arguments.repeats):
        weights = {"start": {name: value.numpy() for name, value in task.build().state_dict().items()}}
        for name, (script, masks, bits) in cases.items():
            one, weights[name] = play(arguments.flower, script, replace(task, masks=masks, ring_bits=bits), 2)
            told[name].append(one)
        about[f"{silos}_weights_differ"] = difference(**weights)
    for name, runs in told.items():
        about |= {f"{silos}_{name}_{key}": value for key, value in figures(runs).items()}
        for way, (number, when) in ((way, one) for way in ("down", "up") for one in enumerate(("first", "later"))):
            about[f"{silos}_{name}_{way}_{when}_mib"] = figure([one[way][number] for one in runs], "MiB", 2**-20)
    for ours, theirs in product(told, ("plain", "secagg")):
        if ours in ("plain", theirs) or theirs not in told:
            continue
        measures = {"seconds": _round, "processor": _processor, "bytes_first": _first, "bytes_later": _later}
        for key, measure in measures.items():
            pair = [[measure(each) for each in told[name]] for name in (ours, theirs)]
            about[f"{silos}_{ours}_over_{theirs}_{key}"] = ratio(*pair)
    return about


def _round(told: Told) -> float:
    return sorted(told["rounds_s"])[len(told["rounds_s"]) // 2]


def _processor(told: Told) -> float:
    return float(told["processor_s"])


def _first(told: Told) -> float:
    return float(told["down"][0] + told["up"][0])


def _later(told: Told) -> float:
    return float(told["down"][1] + told["up"][1])


if __name__ == "__main__":
    main(
        __doc__ or "",
        run,
        ("--flower", {"required": True, "help": "a Python that has flwr, ray and torch"}),
        ("--model", {"default": "wide"}),
        ("--silos", {"default": "20", "help": "numbers of clients, such as 20,100"}),
        ("--cases", {"default": ",".join(CASES), "help": "such as plain,ours_32"}),
        ("--rows", {"type": int, "default": 30}),
        ("--rounds", {"type": int, "default": 5, "help": "timed rounds of a run"}),
        ("--repeats", {"type": int, "default": 3}),
    )
