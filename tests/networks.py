"""Small networks whose first weights follow from a seed, and leave the generator of a test as it was."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """What is made within draws its weights from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def perceptron(*widths: int, between: type[nn.Module] = nn.Tanh, seed: int = 0, bias: bool = True) -> nn.Sequential:
    """Linear layers of these widths, with an activation between each two."""
    with seeded(seed):
        layers = [(nn.Linear(below, above, bias=bias), between()) for below, above in itertools.pairwise(widths)]
        return nn.Sequential(*[one for pair in layers for one in pair][:-1])
