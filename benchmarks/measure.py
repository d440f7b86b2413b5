"""How the benchmarks measure, and the one form in which all of them print what they found.

    {"benchmark": "engine", "command": "python benchmarks/engine.py --json", "machine": {..}, "date": "2026-11-22",
     "figures": {"overhead_ms": {"median": 0.2, "unit": "ms", "runs": 7, "quartiles": [0.19, 0.22]}}, "about": {..}}

So figures of two days or two machines can be laid beside each other. `about` has what they were measured on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

Work = Callable[[], object]


@dataclass(frozen=True)
class Figure:
    """What was measured. runs: how many the median is of; quartiles: the lower and the upper, of four runs or more."""

    median: float
    unit: str
    runs: int
    quartiles: tuple[float, float] | None = None

    def told(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        between = "" if self.quartiles is None else f" ({self.quartiles[0]:.4g} to {self.quartiles[1]:.4g})"
        return f"{self.median:.4g} {self.unit}{between}"


def figure(values: float | Sequence[float], unit: str, factor: float = 1.0) -> Figure:
    """Return the figure of one run or several. factor: from what was measured to the unit."""
    each = [factor * value for value in (values if isinstance(values, Sequence) else [values])]
    quarters = statistics.quantiles(each, n=4) if len(each) > 3 else None
    return Figure(statistics.median(each), unit, len(each), None if quarters is None else (quarters[0], quarters[2]))


def ratio(ours: Sequence[float], theirs: Sequence[float], factor: float = 1.0) -> Figure:
    """Return the figure of the ratios of paired runs."""
    return figure([a / b for a, b in zip(ours, theirs, strict=True)], "times", factor)


def interleaved(
    work: Mapping[str, Work],
    pairs: int,
    calls: int = 1,
    warm_up: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return seconds a call, by name, from `pairs` turns in which each piece of work runs `calls` times."""
    for piece in work.values():
        for _ in range(warm_up):
            piece()
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(pairs):
        for name, piece in work.items():
            began = clock()
            for _ in range(calls):
                piece()
            seconds[name].append((clock() - began) / calls)
    return seconds


def begin_peak() -> float:
    """Let the peak of resident memory begin anew; return the resident MiB (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_mib("VmRSS")


def resident_mib(field: str) -> float:
    """Return a field of this process's memory in MiB: "VmRSS" now, "VmHWM" at its peak (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(field)).split()[1]) / 1024


Run = Callable[[argparse.Namespace], Mapping[str, Any]]


def main(description: str, run: Run, *options: tuple[str, dict[str, Any]]) -> None:
    """Parse ``--json`` and the benchmark's own options, run it, print its figures and what they are about."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    for flag, settings in options:
        parser.add_argument(flag, **settings)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    told = report(run(arguments), arguments.threads)
    if arguments.json:
        print(json.dumps(told, default=Figure.told))
        return
    for name, value in (told["about"] | told["figures"]).items():
        print(f"{name:48} {value}")


def report(found: Mapping[str, Any], threads: int) -> dict[str, Any]:
    """Return the object that a benchmark prints: what is a `Figure` is one of its figures, the rest is about them."""
    script = Path(sys.argv[0])
    return {
        "benchmark": script.stem,
        "command": shlex.join(["python", f"benchmarks/{script.name}", *sys.argv[1:]]),
        "machine": {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "system": platform.system(),
            "threads": threads,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        },
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "figures": {name: value for name, value in found.items() if isinstance(value, Figure)},
        "about": {name: value for name, value in found.items() if not isinstance(value, Figure)},
    }
