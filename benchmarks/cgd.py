"""What playing a whole CGD grid costs: a simulated iteration over one centralised step of plain PyTorch, same rows.

    OMP_NUM_THREADS=1 python benchmarks/cgd.py --data FOLDER --json

FOLDER has mnist/ (else the variable MORETTA_DATA says where); without one, pixels are random and `data` says so.
The model is 784-256-10. Plain is full-batch: zero_grad, forward, cross-entropy, backward, step of torch.optim.SGD.

What the figures are to stay within: `*_fused_over_plain_ratio` 1.15, `1000x112_peak_mib` 400. The peak is of resident
memory in a process of its own, over what is resident once torch and the package are imported and the data are read: the
grid, the starts, three iterations and whatever torch sets up to run them are all in it.

For scale, `*_naive_*`: participant after participant, each with a small layer of its own, a loss and a backward pass
each row of the grid; adding gradients and stepping are left out. From 100 rows of the grid at most, scaled up to all.

With one thread time is the processor's, which others on the machine do not lengthen; with more it is the clock's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import begin_peak, figure, interleaved, main, ratio, resident_mib
from torch import Tensor, nn

from moretta import CGD
from moretta.contract.messages import Stamp
from moretta.data.holders import Grid, Part
from moretta.data.images.sets import load_images, scaled
from moretta.data.settings import Data
from moretta.engines.settings import Run
from moretta.protocols.cgd.simulation import Simulation
from moretta.protocols.common.specification import Specification

GRIDS, QUICK = [(10, 7), (100, 49), (1000, 112)], [(10, 7)]
COLUMNS, WIDTH, OUTPUTS, SAMPLE, RATE = 784, 256, 10, 100, 0.5
Figures = dict[str, Any]


def data(folder: str, rows: int) -> tuple[Tensor, Tensor, str]:
    """Return rows, their classes, and what they are."""
    if folder:
        images = load_images("mnist", Path(folder) / "mnist")
        x, y, said = scaled(images.x[:rows]).reshape(-1, COLUMNS), images.y[:rows], "MNIST"
    else:
        random, said = np.random.default_rng(0), "random pixels"
        x, y = random.random((rows, COLUMNS), dtype=np.float32), random.integers(0, OUTPUTS, rows)
    return torch.from_numpy(x), torch.from_numpy(y), said


def mlp() -> nn.Sequential:
    """Return the paper's network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(COLUMNS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, OUTPUTS))


class Plain:
    """Centralised training."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.model = x, y, mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)

    def step(self) -> None:
        """Take a full-batch step."""
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.x), self.y).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


class Fused:
    """The package's simulation of a grid, (rows of participants, columns of them)."""

    def __init__(self, x: Tensor, y: Tensor, grid: tuple[int, int]) -> None:
        counts = {f"row-{i}": len(part) for i, part in enumerate(np.array_split(np.arange(len(x)), grid[0]))}
        cuts = [tuple(map(int, part)) for part in np.array_split(np.arange(COLUMNS), grid[1])]
        parts = {f"{row}-{j}": Part(f"{row}-{j}", row, cut) for row in counts for j, cut in enumerate(cuts)}
        protocol = CGD(learning_rate=RATE, delta=0.1)
        self.simulation = Simulation(
            protocol,
            Specification(Run(rounds=1000, insecure_secret_seed=0), Data(source="python", batch_size=0), protocol),
            mlp(),
            Grid(parts, {row: f"{row}-0" for row in counts}),
            x,
            y,
            counts,
        )
        self.number = 0
        list(self.simulation.setup(self.now(), list(parts)))

    def now(self) -> Stamp:
        """Return when it is."""
        return Stamp("benchmark", self.number, 0)

    def step(self) -> None:
        """Take an iteration."""
        self.number += 1
        list(self.simulation.round(self.now()))


class Naive:
    """Participant after participant, as each would compute for itself; `scale` times as long for the whole grid."""

    def __init__(self, x: Tensor, y: Tensor, grid: tuple[int, int]) -> None:
        held, cuts = np.array_split(np.arange(len(x)), grid[0])[:SAMPLE], np.array_split(np.arange(COLUMNS), grid[1])
        self.scale = grid[0] / len(held)
        self.rows = [
            (
                [x[rows][:, columns].contiguous() for columns in cuts],
                y[rows],
                [nn.Linear(len(columns), WIDTH, bias=j == 0) for j, columns in enumerate(cuts)],
                mlp()[1:],
            )
            for rows in held
        ]

    def step(self) -> None:
        """Make everybody's gradients once."""
        for parts, y, lower, upper in self.rows:
            for layer in (*lower, upper):
                layer.zero_grad()
            z = torch.stack([layer(part) for layer, part in zip(lower, parts, strict=True)]).sum(0)
            nn.functional.cross_entropy(upper(z), y).backward()  # type: ignore[no-untyped-call]


def peak_mib(folder: str, rows: int, threads: int, grid: tuple[int, int] | None, answer: Any) -> None:
    """Measure, in a process of its own, by how many MiB three steps raise resident memory at its peak (Linux)."""
    torch.set_num_threads(threads)
    x, y, _ = data(folder, rows)
    before = begin_peak()
    work = Fused(x, y, grid) if grid else Plain(x, y)
    for _ in range(3):
        work.step()
    answer.put(resident_mib("VmHWM") - before)


def memory(folder: str, rows: int, threads: int, grids: Sequence[tuple[int, int]]) -> Figures:
    """Return `peak_mib` of plain PyTorch and of the grids."""
    context, found = multiprocessing.get_context("spawn"), Figures()
    for grid in (None, *grids):
        answer: multiprocessing.Queue[float] = context.Queue()
        process = context.Process(target=peak_mib, args=(folder, rows, threads, grid, answer))
        process.start()
        found[f"{f'{grid[0]}x{grid[1]}' if grid else 'plain'}_peak_mib"] = figure(answer.get(), "MiB")
        process.join()
    return found


def run(arguments: argparse.Namespace) -> Figures:
    """Measure each grid."""
    rows, pairs = (1000, 3) if arguments.quick else (60_000, arguments.pairs)
    x, y, said = data(arguments.data, rows)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    figures: Figures = {"data": said, "rows": rows, "pairs": pairs}
    grids = [grid for grid in (QUICK if arguments.quick else GRIDS) if arguments.only in f"{grid[0]}x{grid[1]}"]
    for grid in grids:
        name, plain, began = f"{grid[0]}x{grid[1]}", Plain(x, y), clock()
        fused = Fused(x, y, grid)
        figures[f"{name}_setup_seconds"] = figure(clock() - began, "s")
        found = interleaved({"plain": plain.step, "fused": fused.step}, pairs, clock=clock)
        figures[f"{name}_fused_over_plain_ratio"] = ratio(found["fused"], found["plain"])
        figures |= {f"{name}_{side}_seconds": figure(seconds, "s") for side, seconds in found.items()}
        naive = Naive(x, y, grid)
        found = interleaved({"plain": plain.step, "naive": naive.step}, min(pairs, 3), warm_up=1, clock=clock)
        figures[f"{name}_naive_rows_of_grid"] = len(naive.rows)
        figures[f"{name}_naive_seconds"] = figure(found["naive"], "s", naive.scale)
        figures[f"{name}_naive_over_plain_ratio"] = ratio(found["naive"], found["plain"], naive.scale)
    return figures | memory(arguments.data, rows, arguments.threads, grids)


if __name__ == "__main__":
    main(
        __doc__ or "",
        run,
        ("--pairs", {"type": int, "default": 31, "help": "paired runs of each grid"}),
        ("--data", {"default": os.environ.get("MORETTA_DATA", ""), "metavar": "FOLDER", "help": "has mnist/"}),
        ("--only", {"default": "", "help": "only the grids whose name contains this"}),
        ("--quick", {"action": "store_true", "help": "few rows, few pairs, one grid: does it run?"}),
    )
