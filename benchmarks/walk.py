"""How much of the package a round runs through: its functions and files, from one `on_round` callback to the next.

Three silos train an MLP in one process with pairwise masks, by FedSGD and by PBPFL. The second round is counted by
`sys.setprofile`: no set-up and no files. A function is what has a qualified name in a file of the package, so a
function's comprehensions of one kind count as one.
"""

from __future__ import annotations

import argparse
import sys
from types import FrameType
from typing import Any

import numpy as np
from measure import figure, main
from torch import nn

import moretta
from moretta import PBPFL, Federation, FedSGD, Silo

PACKAGE = moretta.__path__[0] + "/"
ROUNDS = 4  # of which the second is walked: the first agrees on keys

Step = tuple[str, str]
"""A function: its file in the package, and its qualified name."""


def walk(protocol: FedSGD | PBPFL) -> dict[Step, int]:
    """Return the functions of a round in the order in which it first calls them, each with its depth."""
    depths, depth = dict[Step, int](), 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal depth
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return
        if event == "call":
            depths.setdefault((code.co_filename.removeprefix(PACKAGE), code.co_qualname), depth)
            depth += 1
        elif event == "return":
            depth -= 1

    def on_round(told: Any) -> None:
        sys.setprofile(note if told.number == 1 else None)

    random = np.random.default_rng(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    silos = [Silo(f"silo-{k}", random.normal(size=(20, 8)).astype("f4"), np.arange(20) % 3) for k in range(3)]
    Federation(model, silos, protocol, batch_size=4).train(ROUNDS, on_round=on_round)
    lowest = min(depths.values())
    return {step: depth - lowest for step, depth in depths.items()}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Count both rounds, and print their walks where that is wanted."""
    found = dict[str, Any]()
    for protocol in (FedSGD(learning_rate=0.1), PBPFL(learning_rate=0.1)):
        steps = walk(protocol)
        found[f"{protocol.name}_functions"] = figure(len(steps), "functions")
        found[f"{protocol.name}_files"] = figure(len({file for file, _ in steps}), "files")
        if arguments.walk:
            print(protocol.name, *(f"{'  ' * depth}{file} {name}" for (file, name), depth in steps.items()), sep="\n  ")
    return found


if __name__ == "__main__":
    main(__doc__ or "", run, ("--walk", {"action": "store_true", "help": "print the functions in their order too"}))
