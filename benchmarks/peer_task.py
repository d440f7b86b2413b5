"""The task that `peers.py` gives to each framework, and how a framework's process tells what it took.

Nothing but torch, numpy and Moretta's models is imported here, as the frameworks' environments have no more. A peer's
script is run as `python peer_X.py TASK` with the task as JSON. It calls `Tally.round` at the end of every round and
`Tally.tell` after the last, while all its processes still live.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "src"))

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moretta.models.catalogue import build

SHAPES = {"mlp": (16,), "wide": (16,), "resnet20": (3, 32, 32)}
RATES = {"mlp": 0.1, "wide": 0.1, "resnet20": 0.01}
HIDDEN = {"mlp": [200, 128], "wide": [540, 540]}  # "wide" has 306,730 parameters
CLASSES = 10
WARM = 3  # rounds that are not timed


@dataclass(frozen=True)
class Task:
    """FedAvg: each silo takes one step of SGD on the cross-entropy of all its rows, one epoch a round; the server adds
    the mean of their differences, by rows.

    masks: sum under masks, with a silo's secrets in `shares` of which `threshold` restore them, in Z_2^ring_bits.
    began: `time.monotonic()` just before the process was started. weights: the file for those of the end.
    """

    model: str
    silos: int
    rows: int
    rounds: int
    masks: bool
    shares: int
    threshold: int
    workers: int = 1
    ring_bits: int = 64
    began: float = 0.0
    weights: str = ""

    @classmethod
    def given(cls) -> Task:
        """Return the task on the command line."""
        torch.set_num_threads(1)
        return cls(**json.loads(sys.argv[1]))

    def told(self) -> str:
        """Return it for a command line."""
        return json.dumps(asdict(self))

    @property
    def rate(self) -> float:
        """The learning rate."""
        return RATES[self.model]

    def build(self) -> nn.Module:
        """Return the model at its start. Groups are normalised, not batches: there are no buffers to average."""
        hidden = HIDDEN.get(self.model)
        arguments: dict[str, Any] = {"norm": "group"} if hidden is None else {"hidden": hidden}
        name = "resnet" if hidden is None else "mlp"
        return build(name, inputs=SHAPES[self.model], outputs=CLASSES, **arguments)

    def data(self) -> list[tuple[NDArray[np.float32], NDArray[np.int64]]]:
        """Return each silo's rows and classes."""
        random = np.random.default_rng(0)
        shape = SHAPES[self.model]
        teacher = random.normal(size=(int(np.prod(shape)), CLASSES))
        each = [random.normal(size=(self.rows, *shape)).astype("f4") for _ in range(self.silos)]
        return [(x, (x.reshape(self.rows, -1) @ teacher).argmax(1)) for x in each]


class Tally:
    """When rounds ended, and what the processes took."""

    def __init__(self, task: Task) -> None:
        self._task, self._ends, self._processor = task, list[float](), dict[int, float]()

    def round(self) -> None:
        """Note the end of a round."""
        self._ends.append(time.monotonic())
        if len(self._ends) in (1, WARM, self._task.rounds):
            self._processor[len(self._ends)] = sum(map(_processor_seconds, processes()))

    def tell(self, weights: Mapping[str, Any], **more: Any) -> None:
        """Print what was noted, and more, as one line. weights: the server's at the end, by the model's names."""
        timed = self._task.rounds - WARM
        told = {
            "rounds_s": np.diff(self._ends)[WARM - 1 :].tolist(),
            "processor_s": (self._processor[self._task.rounds] - self._processor[WARM]) / timed,
            "first_s": self._ends[0] - self._task.began,
            "first_processor_s": self._processor[1],
            "peak_mib": sum(map(_peak_mib, processes())),
            **more,
        }
        np.savez(self._task.weights, **{name: np.array(value) for name, value in weights.items()})
        print("\n" + json.dumps(told), flush=True)


def processes(pid: int | None = None) -> Iterator[int]:
    """Yield this process and all below it (Linux)."""
    pid = os.getpid() if pid is None else pid
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from processes(int(child))


def _processor_seconds(pid: int) -> float:
    """Return the processor seconds that a process and its children that have ended took."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _peak_mib(pid: int) -> float:
    """Return the peak of a process's resident memory, less what it now shares with others of the machine."""
    peak = _kib(pid, "status", "VmHWM")
    return (peak - _kib(pid, "smaps_rollup", "Rss") + _kib(pid, "smaps_rollup", "Pss")) / 1024


def _kib(pid: int, file: str, field: str) -> int:
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))
