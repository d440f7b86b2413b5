"""What a round, memory and start-up cost in Moretta, in pfl-research and in Flower's simulation, for the same work.

    python -m venv PFL;    PFL/bin/pip install 'pfl[pytorch]==0.6.0'       # torch by constraints.txt, as here
    python -m venv FLOWER; FLOWER/bin/pip install 'flwr[simulation]==1.41.0'
    OMP_NUM_THREADS=1 python benchmarks/peers.py --pfl PFL/bin/python --flower FLOWER/bin/python --json

FedAvg (`peer_task.py`): each of 100 silos takes one step on its 30 rows, one epoch a round; the server averages by
rows. "mlp" has 16 inputs, hidden layers of 200 and 128, and 10 outputs: 30,418 parameters. "resnet20" has groups
normalised instead of batches, 10 silos and fewer rounds. Every run is a process of its own with one thread
(`peer_X.py`); runs of the frameworks take turns. All of a turn must end with the same weights, or the benchmark stops:
the same work is compared. "The same" is a difference of at most a hundredth of how far training moved them, as long:
of the MLP it is a millionth, of ResNet-20 float32 itself makes it some thousandths, and Flower's masks round to
2^-22 of 16. pfl-research has no masks. Flower's SecAgg+ is set up anew in each round, Moretta's masks once in a run.

A round's seconds are the median of a run's rounds after the third, by the clock; processor seconds are the mean over
the same rounds, of all processes. Start-up is from the process's start to the end of its first round, less a round.
Peak memory is the sum over a framework's processes, what they share counted once. Each figure is the median of runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from measure import Figure, figure, main, ratio
from peer_task import WARM, Task

from moretta import Engine, SecureAggregation

HERE = Path(__file__).parent
SIZES = {"mlp": (100, 23), "resnet20": (10, 8)}  # silos, rounds
WITHIN = 0.01  # the largest difference between weights, in lengths of the way from their start
Told = Mapping[str, Any]
Weights = Mapping[str, Any]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Play all models, with masks and without."""
    found: dict[str, Any] = {"rows": arguments.rows, "repeats": arguments.repeats, "load": list(os.getloadavg())}
    for model, masks in itertools.product(arguments.models.split(","), arguments.masks.split(",")):
        found |= compare(model, masks == "on", arguments)
    return found


def compare(model: str, masks: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one model, and what they are about."""
    silos, rounds = arguments.silos or SIZES[model][0], arguments.rounds or SIZES[model][1]
    plan = SecureAggregation().rules(None).plan(silos)
    shares = min(plan.degree + 1, silos) if plan.degree else silos
    task = Task(model, silos, arguments.rows, max(rounds, WARM + 1), masks, shares, plan.threshold)
    prefix = f"{model}_masks" if masks else model
    cases, about = dict(players(arguments, masks)), {f"{prefix}_silos": silos, f"{prefix}_rounds": task.rounds}
    told: dict[str, list[Told]] = {name: [] for name in cases}
    for _ in range(arguments.repeats):
        weights = {"start": {name: value.numpy() for name, value in task.build().state_dict().items()}}
        for name, (python, script, workers) in cases.items():
            one, weights[name] = play(python, script, task, workers)
            told[name].append(one)
        about[f"{prefix}_weights_differ"] = difference(**weights)
    for name, runs in told.items():
        about |= {f"{prefix}_{name}_{key}": value for key, value in figures(runs).items()}
    for ours, theirs in itertools.product(told, told):
        if ours.startswith("moretta") and not theirs.startswith("moretta"):
            pair = f"{prefix}_{ours}_over_{theirs}"
            about[f"{pair}_ratio"] = ratio(*([_round(each) for each in told[name]] for name in (ours, theirs)))
            about[f"{pair}_processor_ratio"] = ratio(
                *([each["processor_s"] for each in told[name]] for name in (ours, theirs))
            )
    return about


def players(arguments: argparse.Namespace, masks: bool) -> Iterator[tuple[str, tuple[str, str, int]]]:
    """Yield the name of each framework that takes part, its Python, script and worker processes."""
    for workers in map(int, arguments.workers.split(",")):
        if workers == 1:
            yield "moretta", (sys.executable, "moretta", 1)
        elif "workers" in Engine.model_fields:
            yield f"moretta_{workers}_workers", (sys.executable, "moretta", workers)
        else:
            print(f"Moretta has no [engine] workers here, so {workers} workers are left out.", file=sys.stderr)
    if arguments.pfl and not masks:
        yield "pfl", (arguments.pfl, "pfl", 1)
    if arguments.flower:
        for workers in map(int, arguments.workers.split(",")):
            yield "flower" if workers == 1 else f"flower_{workers}_workers", (arguments.flower, "flower", workers)


def play(python: str, script: str, task: Task, workers: int) -> tuple[Told, Weights]:
    """Return what one run tells, and its weights."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "weights.npz")
        given = Task(**{**vars(task), "workers": workers, "began": time.monotonic(), "weights": path})
        done = subprocess.run(
            [python, f"peer_{script}.py", given.told()],
            cwd=HERE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"peer_{script}.py failed:\n{done.stderr[-3000:]}")
        told = next(line for line in done.stdout.splitlines() if line.startswith('{"rounds_s"'))
        return json.loads(told), dict(np.load(path))


def difference(start: Weights, **ends: Weights) -> float:
    """Return how far frameworks' weights are from the first's, in lengths of its way from the start.

    Raises SystemExit where it is more than `WITHIN`.
    """
    first, *others = ends.values()
    far = max((_distance(first, other) for other in others), default=0.0) / _distance(first, start)
    if not far <= WITHIN:
        raise SystemExit(f"{', '.join(ends)} end with weights that differ by {far:.1%} of their way: not the same work")
    return far


def _distance(some: Weights, others: Weights) -> float:
    return math.sqrt(sum(np.square(some[name] - others[name], dtype="f8").sum() for name in some))


def figures(runs: list[Told]) -> dict[str, Figure]:
    """Return a framework's figures."""
    return {
        "round_ms": figure([_round(each) for each in runs], "ms", 1000),
        "round_processor_ms": figure([each["processor_s"] for each in runs], "ms", 1000),
        "start_s": figure([each["first_s"] - _round(each) for each in runs], "s"),
        "start_processor_s": figure([each["first_processor_s"] - each["processor_s"] for each in runs], "s"),
        "peak_mib": figure([each["peak_mib"] for each in runs], "MiB"),
    }


def _round(told: Told) -> float:
    return statistics.median(told["rounds_s"])


if __name__ == "__main__":
    main(
        __doc__ or "",
        run,
        ("--pfl", {"default": "", "help": "a Python that has pfl; without it Moretta plays without pfl"}),
        ("--flower", {"default": "", "help": "a Python that has flwr"}),
        ("--models", {"default": "mlp"}),
        ("--masks", {"default": "off", "help": "off, on, or off,on"}),
        ("--workers", {"default": "1", "help": "worker processes of Moretta, such as 1,2"}),
        ("--silos", {"type": int}),
        ("--rows", {"type": int, "default": 30}),
        ("--rounds", {"type": int, "help": f"of a run, of which the first {WARM} are not timed"}),
        ("--repeats", {"type": int, "default": 5}),
    )
