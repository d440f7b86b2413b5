"""One process of `slices.py`: a round's losses by a whole graph or by slices, its peak memory and processor time."""

import json
import math
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
from memory_child import CLASSES, K, peak_mib, rows

from moretta.protocols.baffle.edge import onnx_forward
from moretta.protocols.baffle.silo.directions import Directions, keys_of
from moretta.protocols.baffle.silo.estimate import differences
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.common.targets import RowLosses

ROUNDS = {"one": 1}  # else 3, as the first may leave more behind than it takes; loading slices anew takes long
ROWS = 4


class Slices:
    """A model's layers as graphs of their own, one after the other. kept: whether all stay loaded."""

    def __init__(self, folder: Path, *, kept: bool) -> None:
        told = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        self._folder, self._plan = folder, told["slices"]
        self.layout = Layout({name: tuple(shape) for name, shape in told["shapes"].items()}, "float32", b"")
        self._kept = [self._load(number) for number in range(len(self._plan))] if kept else []
        self._uses = Counter(name for part in self._plan for name in part["uses"])

    def _load(self, number: int) -> "object":
        return onnx_forward.session_of((self._folder / f"{number}.onnx").read_bytes())

    def at_once(self, rows: int) -> int:
        """Return 1, as an edge client."""
        return 1

    def outputs(self, parameters: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return outputs [m, rows, outputs], a few rows at a time."""
        found = []
        for flat in parameters:
            weights, start = {}, 0
            for name, shape in self.layout.shapes.items():
                weights[name] = flat[start : start + math.prod(shape)].reshape(shape)
                start += math.prod(shape)
            parts = [self._through(weights, x[at : at + ROWS]) for at in range(0, len(x), ROWS)]
            found.append(np.concatenate(parts))
        return np.stack(found)

    def _through(self, weights: "dict[str, np.ndarray]", x: np.ndarray) -> np.ndarray:
        live, left = {"x": x}, self._uses.copy()
        for number, part in enumerate(self._plan):
            session = self._kept[number] if self._kept else self._load(number)
            given = {name: live[name] if name in live else weights[name] for name in part["uses"]}
            made = session.run(part["gives"], given)  # type: ignore[attr-defined]
            del given, session
            for name in part["uses"]:
                left[name] -= 1
                if not left[name]:
                    live.pop(name, None)
            live |= dict(zip(part["gives"], made, strict=True))
            del made
        return live["outputs"]


def forward_of(mode: str, graph: Path, folder: Path) -> "object":
    """Return what runs the model in a mode, and nothing else loaded."""
    if mode in ("slices", "one"):
        return Slices(folder, kept=mode == "slices")
    if mode == "whole":
        onnx_forward.OnnxForward._speed_up = lambda self, graph: None  # type: ignore[method-assign]
    return onnx_forward.OnnxForward(graph.read_bytes())


def main(mode: str, graph: str, folder: str, batch: str, side: str) -> None:
    """Run rounds, and print what they took."""
    forward = forward_of(mode, Path(graph), Path(folder))
    size = forward.layout.size  # type: ignore[attr-defined]
    at = np.random.default_rng(2).normal(0, 0.05, size).astype(np.float32)
    spent, losses = [], []  # the first round's loss is told, as all ways play that one
    for number in range(ROUNDS.get(mode, 3)):
        directions = Directions(keys_of(bytes(32), K, number), K, size)
        x, y = rows(int(batch), int(side))
        began = time.process_time()
        found = differences("mean", 1e-3, directions, forward, RowLosses("cross-entropy"), at, x, y % CLASSES)  # type: ignore[arg-type]
        spent.append(time.process_time() - began)
        losses.append(float(found[1].mean()))
    told = {
        "peak_mib": round(peak_mib(), 1),
        "seconds": float(np.median(spent)),
        "loss": losses[0],
    }  # of the round that all play
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
