"""One process of `memory.py`: do one thing in it, and say the most memory that it has had resident.

Imports only what its mode needs, as the imports are most of what a small network takes.
"""

import json
import sys
from pathlib import Path

import numpy as np

CLASSES = 10
BATCHES = 3  # one after the other, as the first may leave more behind than it takes
K = 8


def peak_mib() -> float:
    """Return the most memory that this process has had resident, in MiB: VmHWM of Linux."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def rows(batch: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a batch of noise: memory does not depend on what is in it."""
    random = np.random.default_rng(1)
    return random.random((batch, 3, side, side), dtype=np.float32), np.arange(batch) % CLASSES


def backprop(model: str, batch: int, side: int) -> None:
    """Backpropagate through PyTorch and step by hand: torch.optim imports some 70 MiB that nothing here needs."""
    import torch

    from moretta.models import catalogue

    network = catalogue.build(model, inputs=(3, side, side), outputs=CLASSES, seed=1)
    x, y = rows(batch, side)
    for _ in range(BATCHES):
        network.zero_grad()
        torch.nn.functional.cross_entropy(network(torch.from_numpy(x)), torch.from_numpy(y)).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for p in network.parameters():
                p -= 0.01 * p.grad


def torch_import(model: str, batch: int, side: int) -> None:
    """Import PyTorch and build the network, no more."""
    from moretta.models import catalogue

    catalogue.build(model, inputs=(3, side, side), outputs=CLASSES, seed=1)


def forward(model: str, batch: int, side: int) -> None:
    """BAFFLE's differences by PyTorch, as a silo of the in-process engine."""
    from moretta.models import catalogue
    from moretta.protocols.baffle.torch_forward import TorchForward, layout_of

    network = catalogue.build(model, inputs=(3, side, side), outputs=CLASSES, seed=1)
    _differences(TorchForward(network, layout_of(network)), batch, side)


def edge(model: str, batch: int, side: int) -> None:
    """BAFFLE's differences by ONNX Runtime, without PyTorch; `model` is the graph's file."""
    from moretta.protocols.baffle.edge.onnx_forward import OnnxForward

    _differences(OnnxForward(Path(model).read_bytes()), batch, side)


def export(model: str, batch: int, side: int) -> None:
    """Write the graph that `edge` reads; `model` is NAME:FILE."""
    import torch

    from moretta.models import catalogue
    from moretta.protocols.baffle.onnx_export import graph_of
    from moretta.protocols.baffle.torch_forward import layout_of

    name, _, file = model.partition(":")
    network = catalogue.build(name, inputs=(3, side, side), outputs=CLASSES, seed=1)
    Path(file).write_bytes(graph_of(network, layout_of(network), (3, side, side), torch.float32))


def _differences(forward: "object", batch: int, side: int) -> None:
    from moretta.protocols.baffle.silo.directions import Directions, keys_of
    from moretta.protocols.baffle.silo.estimate import differences
    from moretta.protocols.common.targets import RowLosses

    size = forward.layout.size  # type: ignore[attr-defined]
    at = np.random.default_rng(2).normal(0, 0.05, size).astype(np.float32)
    for number in range(BATCHES):
        directions = Directions(keys_of(bytes(32), K, number), K, size)
        differences("mean", 1e-3, directions, forward, RowLosses("cross-entropy"), at, *rows(batch, side))  # type: ignore[arg-type]


if __name__ == "__main__":
    mode, wanted = sys.argv[1], json.loads(sys.argv[2])
    {"backprop": backprop, "torch": torch_import, "forward": forward, "edge": edge, "export": export}[mode](**wanted)
    assert mode != "edge" or "torch" not in sys.modules, "the edge client has imported torch"
    print(json.dumps({"peak_mib": round(peak_mib(), 1)}))
