"""Training by blocks with exact derivatives in the place of differences: for choosing settings at one backward a step.

    python experiments/baffle/surrogate.py --data DIR

What a move's scalar is up to sigma, the gradient along the move, is taken from autograd's gradient, and the estimate is
put together from these by the code that the server has (`moretta.audit.attacks.baffle.estimates`). So a step costs one
backward pass, whatever the number of moves. LeNet on CIFAR-10 or MNIST, batches of 40 rows as of ten silos; accuracy is
of 5,000 training rows that are held out. No test row is read.
"""

import argparse
import math
import sys
import time

import numpy as np
import torch
from numpy.typing import NDArray
from records import SEED, Record, Row, images, name_of, parser, run
from torch import nn

from moretta.audit.attacks.baffle.estimates import Moves
from moretta.models.architectures import lenet
from moretta.protocols.baffle.cut import blocks_of, cut_of
from moretta.protocols.baffle.params import BAFFLE
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.baffle.silo.recipe import Recipe
from moretta.protocols.baffle.torch_forward import layout_of

COLUMNS = ("accuracy on 5,000 held-out rows, %", "scalars a round", "processor seconds")
HELD_OUT, ROWS, RATE, BETAS, EMA = 5000, 40, 3e-3, (0.9, 0.99), 0.995
TWICE = {"0": 48, "1": 24, "4": 128, "5": 64}
TRIED: dict[str, BAFFLE | None] = {
    "backpropagation": None,
    "activations": BAFFLE(loss="cross-entropy", perturb="blocks", linear="activations"),
    "activations, twice the moves": BAFFLE(loss="cross-entropy", perturb="blocks", linear="activations", k=TWICE),
    "scalars": BAFFLE(loss="cross-entropy", perturb="blocks"),
    "scalars, 4,864": BAFFLE(loss="cross-entropy", perturb="blocks", k=TWICE | {"9": 4000, "11": 600}),
}
Tensors = dict[str, NDArray[np.float64]]


def estimated(recipe: Recipe, layout: Layout, of: Tensors, step: int) -> NDArray[np.float64]:
    """Return the estimate that exact scalars give, float64[n]. of: the gradient by tensor."""
    moves = Moves.of(recipe, layout, bytes(32), "surrogate", step)
    found = moves.estimate(moves.along({name: torch.from_numpy(value) for name, value in of.items()}).numpy())
    exact = layout.flat({name: of[name] if name in recipe.units else np.zeros_like(of[name]) for name in layout.shapes})
    return found + exact


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the share of rows that the model gets right, in per cent."""
    with torch.inference_mode():
        found = torch.cat([model(part).argmax(1) for part in x.split(500)])
    return 100 * float((found == y).float().mean())


def row_of(name: str, protocol: BAFFLE | None, x: torch.Tensor, y: torch.Tensor, steps: int) -> Row:
    """Train once; return what it reached."""
    torch.manual_seed(SEED)
    model, held, began = lenet(tuple(x.shape[1:]), 10), slice(0, HELD_OUT), time.process_time()
    layout = layout_of(model)
    recipe = None if protocol is None else protocol.recipe(steps)
    if recipe is not None and recipe.rule is not None:
        graph = cut_of(model, layout, tuple(x.shape[1:]), x.dtype)
        recipe = recipe.by(blocks_of(graph, layout, recipe.rule), layout.shapes)
    named = dict(model.named_parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=BETAS)
    average = {key: value.detach().clone() for key, value in named.items()}
    rng = np.random.default_rng(SEED)
    for step in range(steps):
        rows = torch.from_numpy(rng.integers(HELD_OUT, len(x), ROWS))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        if recipe is not None:
            exact = {key: value.grad.double().numpy() for key, value in named.items() if value.grad is not None}
            for key, part in layout.split(estimated(recipe, layout, exact, step)).items():
                named[key].grad = torch.from_numpy(part).to(named[key])
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.step()
        kept = min(EMA, (step + 1) / (step + 10))
        for key, value in named.items():
            average[key].lerp_(value.detach(), 1 - kept)
    model.load_state_dict(average)
    reached = accuracy(model, x[held], y[held])
    scalars = float(recipe.scalars) if recipe is not None else 0.0
    return Row(name, (reached, scalars, time.process_time() - began), None, {"rounds": steps})


def measure(given: argparse.Namespace) -> Record:
    """Train with each of `TRIED`."""
    steps = 60 if given.quick else given.rounds
    x, y = images(given, given.source, 6000 if given.quick else 60_000)
    mean, deviation = x[HELD_OUT:].mean((0, 2, 3), keepdims=True), x[HELD_OUT:].std((0, 2, 3), keepdims=True)
    rows, classes = torch.from_numpy((x - mean) / deviation), torch.from_numpy(y)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED))
    settings = {"source": given.source, "rounds": steps, "rows": ROWS, "rate": RATE, "betas": BETAS, "ema": EMA}
    title = f"Training by blocks with exact derivatives, LeNet on {given.source}, {steps} rounds"
    record = Record(name_of(given, f"baffle-surrogate-{given.source}"), title, COLUMNS, settings)
    for name, protocol in TRIED.items():
        record.add(row_of(name, protocol, rows[order], classes[order], steps))
    return record


def _options() -> argparse.ArgumentParser:
    options = parser("Train by blocks with exact derivatives in the place of differences.")
    options.add_argument("--source", choices=("cifar10", "mnist"), default="cifar10")
    options.add_argument("--rounds", type=int, default=5000)
    return options


if __name__ == "__main__":
    sys.exit(run(measure, _options().parse_args()))
