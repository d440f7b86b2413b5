"""What BAFFLE costs: forwards over plain ones, the server's rebuilding, an edge client's memory, an upload's bytes.

    OMP_NUM_THREADS=1 python benchmarks/baffle.py --json

*_torch_ratio, *_onnx_ratio    a silo's whole work for K directions (drawing them, perturbing, forwards, losses) over K
                               times `model(x)` under no_grad: in process, and with ONNX Runtime
*_products_ms, *_products_ratio
                               the floor: the matrix products of a plain forward by themselves, and over `model(x)`
combine_*                      sum_k c_k d_k for K = 500: milliseconds, and `*_randn_ratio`, how many times as long the
                               same sum over rows of torch.randn takes
*_edge_peak_mib                the most resident memory of a `python -m moretta.edge` that takes part in a run, and
                               `*_edge_by_blocks_peak_mib` where `perturb = "blocks"`;
                               `*_backprop_peak_mib`: of a process that backpropagates with PyTorch on as many rows and
                               steps by hand, as torch.optim imports some 70 MiB that nothing here needs (Linux);
                               `*_memory_ratio`, `*_memory_bar`, `*_memory`: the one over the other, what it is to stay
                               within, and whether it is "met" or "missed"
upload_k*_bytes                what a silo sends a round under pairwise masks, ring of 64 bits; `*_beyond_8k` less 8 K;
                               `*_header`: what of it is not masked numbers: the stamp, the digests of what was asked
                               and committed to, names and shapes

What they are to stay within: torch ratios 0.6 (LeNet) and 1.15 (WRN), ONNX 0.7 and 0.65, combine 35 ms and 260 ms for
0.3 and 2.5 million parameters, randn 15 or more; edge peaks 70 MiB for LeNet, 0.26 of backprop's for WRN with 8 rows,
150 MiB with 64; 64 bytes. MobileNet is there for scale.

With one thread time is the processor's, which others on the machine do not lengthen; with more it is the clock's.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import figure, interleaved, main, ratio
from torch import nn

from moretta import BAFFLE, Engine, Federation, SecureAggregation, Silo
from moretta.models import catalogue
from moretta.protocols.baffle.silo.directions import BLOCK, Directions, keys_of
from moretta.protocols.baffle.silo.estimate import differences
from moretta.protocols.baffle.silo.forward import Forward, Layout
from moretta.protocols.baffle.torch_forward import TorchForward, layout_of
from moretta.protocols.common import modules
from moretta.protocols.common.targets import RowLosses

SHAPES = {"lenet": (1, 28, 28), "wrn": (3, 32, 32), "mobilenet": (3, 32, 32)}
ROWS, SIGMA, SECRET = 64, 1e-3, bytes(32)
FORWARDS = {"lenet": 96, "wrn": 8, "mobilenet": 8}  # K
COMBINED, SIZES = 500, {"0.3m": 300_000, "2.5m": 2_500_000}
TOGETHER = 8  # rows whose products are one call
CHUNK = 10  # rows of torch.randn at a time
MEMORY = [("lenet", 64), ("wrn", 8), ("wrn", 64), ("mobilenet", 64)]
MICRO_BATCH = {"lenet": 16, "wrn": 4, "mobilenet": 4}  # rows that ONNX Runtime runs at a time
BESIDE = 2  # numbers of an upload beside K: the loss and the weight
PERTURBED = {  # of the memory of edge clients; how many moves a block has does not change it
    "all": BAFFLE(loss="cross-entropy", k=2 * BLOCK),
    "blocks": BAFFLE(loss="cross-entropy", perturb="blocks", linear="activations", k=2),
}
MEMORY_BAR = 0.26  # of backpropagation's peak
# the same baseline as that of experiments/baffle/memory_child.py
BACKPROP = """
import sys
import torch
from measure import resident_mib
from moretta.models import catalogue as models
name, rows, shape = sys.argv[1], int(sys.argv[2]), tuple(map(int, sys.argv[3:]))
torch.set_num_threads(1)
model, x, y = models.build(name, inputs=shape, outputs=10), torch.randn(rows, *shape), torch.arange(rows) % 10
for _ in range(3):
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad
print(resident_mib("VmHWM"))
"""
Figures = dict[str, Any]
Clock = Callable[[], float]


def built(name: str) -> nn.Module:
    """Return a built-in model of 10 outputs."""
    torch.manual_seed(0)
    return catalogue.build(name, inputs=SHAPES[name], outputs=10)


def drawn(name: str, rows: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return random rows and classes."""
    random = np.random.default_rng(0)
    return random.normal(size=(rows, *SHAPES[name])).astype("f4"), random.integers(0, 10, rows)


def has_onnx() -> bool:
    """Whether ONNX Runtime and what exports for it are installed."""
    return all(importlib.util.find_spec(package) for package in ("onnxruntime", "onnx", "onnxscript"))


def onnx_forward(name: str, model: nn.Module, layout: Layout) -> Forward:
    """Return a model in ONNX Runtime, as an edge client has it."""
    from moretta.protocols.baffle.edge.onnx_forward import OnnxForward
    from moretta.protocols.baffle.onnx_export import graph_of

    return OnnxForward(graph_of(model, layout, SHAPES[name], torch.float32), micro_batch=MICRO_BATCH[name])


def forwards(name: str, rows: int, k: int, pairs: int, onnx: bool, clock: Clock) -> Figures:
    """Return what a silo's work of a round takes, over K plain forwards."""
    model = built(name)
    layout = layout_of(model)
    x, y = drawn(name, rows)
    at, loss, inputs = layout.flat(modules.arrays(model)), RowLosses("cross-entropy"), torch.from_numpy(x)

    def plain() -> None:
        with torch.no_grad():
            for _ in range(k):
                model(inputs)

    def estimate(forward: Forward) -> object:
        directions = Directions(keys_of(SECRET, k, "benchmark"), k, layout.size)
        return differences("mean", SIGMA, directions, forward, loss, at, x, y)

    ours: dict[str, Forward] = {"torch": TorchForward(model, layout)}
    if onnx:
        ours["onnx"] = onnx_forward(name, model, layout)
    multiply = products(model, inputs)
    work = {"plain": plain, "products": lambda: [multiply() for _ in range(k)]}
    work |= {side: lambda forward=forward: estimate(forward) for side, forward in ours.items()}
    found = interleaved(work, pairs, warm_up=1, clock=clock)
    figures: Figures = {f"{name}_parameters": layout.size, f"{name}_plain_ms": figure(found["plain"], "ms", 1000 / k)}
    figures[f"{name}_products_ms"] = figure(found["products"], "ms", 1000 / k)
    for side in ("products", *ours):
        figures[f"{name}_{side}_ratio"] = ratio(found[side], found["plain"])
    return figures


def products(model: nn.Module, inputs: torch.Tensor) -> Callable[[], None]:
    """Return what runs the matrix products of `model(inputs)` alone, on arrays of their sizes."""
    factors = list[tuple[torch.Tensor, torch.Tensor]]()

    def seen(layer: nn.Module, _: object, out: torch.Tensor) -> None:
        if isinstance(layer, nn.Linear):
            factors.append((torch.rand(1, len(inputs), layer.in_features), torch.rand(1, *layer.weight.T.shape)))
        elif isinstance(layer, nn.Conv2d):
            weights = torch.rand(TOGETHER * layer.groups, out.shape[1] // layer.groups, layer.weight[0].numel())
            patches = torch.rand(len(weights), weights.shape[2], out.shape[2] * out.shape[3])
            factors.extend([(weights, patches)] * (len(inputs) // TOGETHER))

    hooks = [layer.register_forward_hook(seen) for layer in model.modules()]
    with torch.no_grad():
        model(inputs)
    for hook in hooks:
        hook.remove()
    out = torch.empty(max(a.shape[0] * a.shape[1] * b.shape[2] for a, b in factors))

    def multiply() -> None:
        for a, b in factors:
            shape = a.shape[0], a.shape[1], b.shape[2]
            torch.bmm(a, b, out=out[: math.prod(shape)].view(shape))

    return multiply


def combine(label: str, size: int, k: int, pairs: int, clock: Clock) -> Figures:
    """Return what the server's sum over directions takes, and the same over rows of torch.randn."""
    coefficients = np.random.default_rng(0).normal(size=k)
    directions = Directions(keys_of(SECRET, k, "benchmark"), k, size)
    weights = torch.from_numpy(coefficients).float()

    def randn() -> torch.Tensor:
        generator, total, rows = torch.Generator().manual_seed(0), torch.zeros(size), torch.empty(CHUNK, size)
        for start in range(0, k, CHUNK):
            part = rows[: k - start].normal_(generator=generator)
            total += weights[start : start + CHUNK] @ part
        return total

    few = interleaved({"ours": lambda: directions.combine(coefficients), "randn": randn}, min(pairs, 3), 1, 1, clock)
    ours = interleaved({"ours": lambda: directions.combine(coefficients)}, pairs, 1, 1, clock)["ours"]
    return {
        f"combine_{label}_ms": figure(ours, "ms", 1000),
        f"combine_{label}_least_ms": figure(min(ours), "ms", 1000),
        f"combine_{label}_randn_ratio": ratio(few["randn"], few["ours"]),
    }


def same_in_any_order(size: int) -> bool:
    """Whether the sum is the same, bit for bit, with blocks of directions, and those inside, in another order."""
    keys, coefficients = keys_of(SECRET, 8 * BLOCK, "benchmark"), np.random.default_rng(0).normal(size=8 * BLOCK)
    order = np.random.default_rng(1).permutation(8)
    turned = coefficients.reshape(8, BLOCK)[order].reshape(-1)
    one = Directions(keys, 8 * BLOCK, size).combine(coefficients)
    return bool(np.array_equal(one, Directions([keys[i] for i in order], 8 * BLOCK, size).combine(turned)))


def federation(
    model: nn.Module, data: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]], rows: int, protocol: BAFFLE, edge: int
) -> Federation:
    """Return three silos with the same rows; the first is an edge client that runs `edge` at a time, if any."""
    return Federation(
        model,
        [Silo(f"silo-{number}", *data) for number in range(3)],
        protocol,
        aggregation=SecureAggregation(scheme="pairwise", ring_bits=64),
        engine=Engine(edge=("silo-0",), micro_batch=edge) if edge else Engine(),
        batch_size=rows,
    )


def memory(name: str, rows: int) -> Figures:
    """Return the peaks of an edge client, which holds four batches, and of backpropagation."""
    label = f"{name}_{rows}_rows"
    done = subprocess.run(
        [sys.executable, "-c", BACKPROP, name, str(rows), *map(str, SHAPES[name])],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    found: Figures = {f"{label}_backprop_peak_mib": figure(float(done.stdout), "MiB")}
    if has_onnx():
        peaks = dict[str, float]()
        for way, protocol in PERTURBED.items():
            run = federation(built(name), drawn(name, 4 * rows), rows, protocol, MICRO_BATCH[name]).train(2)
            peaks[way] = max(float(line["edge_peak_mib"]) for line in run.history)
        peak, share = peaks["all"], peaks["all"] / float(done.stdout)
        found |= {f"{label}_edge_peak_mib": figure(peak, "MiB"), f"{label}_memory_ratio": figure(share, "times")}
        found |= {f"{label}_edge_by_blocks_peak_mib": figure(peaks["blocks"], "MiB")}
        found |= {f"{label}_memory_bar": MEMORY_BAR, f"{label}_memory": "met" if share <= MEMORY_BAR else "missed"}
    return found


def upload(k: int) -> Figures:
    """Return what a silo sends a round, set-up not counted."""
    data = np.random.default_rng(0).normal(size=(8, 17)).astype("f4"), np.arange(8) % 3
    model = catalogue.build("mlp", inputs=(17,), outputs=3)
    sent = float(
        federation(model, data, 4, BAFFLE(loss="cross-entropy", k=k), edge=0).train(3).bytes["up_per_silo_per_round"]
    )
    return {
        f"upload_k{k}_bytes": figure(sent, "bytes"),
        f"upload_k{k}_bytes_beyond_8k": figure(sent - 8 * k, "bytes"),
        f"upload_k{k}_bytes_header": figure(sent - 8 * (k + BESIDE), "bytes"),
    }


def run(arguments: argparse.Namespace) -> Figures:
    """Measure all of it, or a part."""
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    quick, only, pairs = arguments.quick, arguments.only, 2 if arguments.quick else arguments.pairs
    figures: Figures = {"rows": ROWS, "pairs": pairs, "micro_batch": MICRO_BATCH}
    for name in SHAPES:
        if only in f"forwards {name}" and not (quick and name != "lenet"):
            k, few = (BLOCK, True) if quick else (FORWARDS[name], name == "mobilenet")
            figures |= forwards(name, ROWS, k, min(pairs, 3) if few else pairs, has_onnx() and not quick, clock)
    if only in "combine":
        for label, size in SIZES.items():
            figures |= combine(label, size // 100 if quick else size, COMBINED, pairs, clock)
        figures["combine_same_in_any_order"] = same_in_any_order(100_000)
    for name, rows in [] if quick else MEMORY:
        if only in f"memory {name}":
            figures |= memory(name, rows)
    for k in (100, 500):
        if only in "upload":
            figures |= upload(k)
    return figures


if __name__ == "__main__":
    main(
        __doc__ or "",
        run,
        ("--pairs", {"type": int, "default": 15, "help": "paired runs"}),
        ("--only", {"default": "", "help": "forwards, combine, memory or upload; also, for example, 'forwards lenet'"}),
        (
            "--quick",
            {
                "action": "store_true",
                "help": "few pairs, small sizes, LeNet alone, no ONNX and no memory: does it run?",
            },
        ),
    )
