"""What a round costs a row in multiplications, whatever machine runs it: all at once, block by block, backpropagation.

    python experiments/baffle/multiply_adds.py

Counted are the multiply-adds of convolutions and matrix products as they run, partial ones in part; what goes entry by
entry (normalisation, activations, pooling) is not. No data is read.
"""

import argparse
import sys

import numpy as np
import torch
from records import Record, Row, name_of, parser, run
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from moretta.models import catalogue
from moretta.protocols.baffle.cut import blocks_of, cut_of
from moretta.protocols.baffle.params import BAFFLE
from moretta.protocols.baffle.silo.work import differences
from moretta.protocols.baffle.torch_blocks import TorchBlocks
from moretta.protocols.baffle.torch_forward import layout_of

COLUMNS = ("multiply-adds a row, million", "over one forward pass", "moves or directions")
MODELS = {"LeNet, 1 x 28 x 28": ("lenet", (1, 28, 28)), "LeNet, 3 x 32 x 32": ("lenet", (3, 32, 32))}
LARGER = {"WRN-10-2, 3 x 32 x 32": ("wrn", (3, 32, 32))}
MOVES = {"0": 48, "1": 24, "4": 128, "5": 64, "9": 4000, "11": 600}
BY_BLOCKS = {
    "activations": BAFFLE(loss="cross-entropy", perturb="blocks", linear="activations"),
    "scalars": BAFFLE(loss="cross-entropy", perturb="blocks"),
    "scalars, 4,864": BAFFLE(loss="cross-entropy", perturb="blocks", k=MOVES),
}
ROWS = 1


def counted(model: nn.Module, shape: tuple[int, ...], *, backward: bool) -> float:
    """Return the multiply-adds of a row's forward pass, and of the pass back where that is asked for."""
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        outputs = model(torch.zeros(ROWS, *shape))
        if backward:
            outputs.sum().backward()
    return counter.get_total_flops() / 2 / ROWS


def by_blocks(model: nn.Module, shape: tuple[int, ...], protocol: BAFFLE) -> tuple[float, int]:
    """Return the multiply-adds of a row's round, the first forward pass with them, and how many moves it has."""
    layout, recipe = layout_of(model), protocol.recipe(1)
    if recipe.rule is None:
        raise ValueError("expected settings by blocks")
    graph = cut_of(model, layout, shape, torch.float32)
    blocks = blocks_of(graph, layout, recipe.rule)
    recipe, forward = recipe.by(blocks, layout.shapes), TorchBlocks(model, layout, graph, blocks)
    at = layout.flat({name: tensor.detach().numpy() for name, tensor in model.named_parameters()})
    batch = np.zeros((ROWS, *shape), np.float32), np.zeros(ROWS, np.int64)
    with FlopCounterMode(display=False) as counter:
        differences(recipe, forward, at, [batch], recipe.keys(bytes(32), "counted"))
    return counter.get_total_flops() / 2 / ROWS, recipe.most


def measure(given: argparse.Namespace) -> Record:
    """Count for each model and way to train it."""
    record = Record(name_of(given, "baffle-multiply-adds"), "A round's multiply-adds a row", COLUMNS, {"batch": ROWS})
    for name, (source, shape) in (MODELS if given.quick else MODELS | LARGER).items():
        model = catalogue.build(source, inputs=shape, outputs=10, seed=0)
        forward = counted(model, shape, backward=False)

        def add(way: str, count: float, moves: int | None) -> None:
            record.add(Row(f"{name}, {way}", (count / 1e6, count / forward, moves), None, {"parameters": size}))  # noqa: B023

        size = sum(parameter.numel() for parameter in model.parameters())
        add("one forward pass", forward, None)
        add("backpropagation", counted(model, shape, backward=True), None)
        for k in (100, 500):
            add(f"all at once, K = {k}", k * forward, k)
        for way, protocol in BY_BLOCKS.items():
            if source == "lenet" or way != "scalars, 4,864":
                add(f"by blocks, {way}", *by_blocks(model, shape, protocol))
    return record


if __name__ == "__main__":
    sys.exit(run(measure, parser("Count the multiply-adds of a round.").parse_args()))
