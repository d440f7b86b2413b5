"""How much an attack tries: counts that follow from the model's size and never from a clock.

So the same run and seed have the same score on any machine, under any load. Multiply-adds are counted. The figures
below say about how many an idle core does in a second, and what a call into torch costs beside them, measured on small
networks with one thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

SECOND = 3e9  # in a second
CALL = 4e4  # that an operation on one tensor takes as long as, however small
STEP = 3  # forward passes that a training step is worth
SEARCHED = 24  # that a step of a search through gradients is worth, in float64: it goes back twice


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's has no types
    """Counts the multiplications of matrix products and convolutions, and an entry of any other new result as one."""

    count = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not func.is_view:
            self.count += found.numel() * _terms(str(func).split(".")[1], args)
        return found


def _terms(name: str, args: Any) -> int:
    """Return how many products are summed in an entry of an operation's result."""
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        return int(args[-1 if name in ("mm", "bmm") else 2].shape[-2])
    return int(args[1][0].numel()) if name == "convolution" else 1


def of_row(model: nn.Module, shape: tuple[int, ...], *, tokens: bool = False) -> float:
    """Return the multiplications of one row's forward pass. shape: of a row. tokens: whether rows are token ids."""
    dtype = next(model.parameters()).dtype
    # Two rows, as an exported program may need them, and copies of what they change: running statistics.
    rows = torch.zeros((2, *shape), dtype=torch.int64 if tokens else dtype)
    held = {name: one.clone() for name, one in model.state_dict().items()}
    counter = _Counter()  # type: ignore[no-untyped-call]
    with torch.no_grad(), counter:
        torch.func.functional_call(model, held, (rows,))
    return float(counter.count) / 2.0


def of_passes(model: nn.Module, each_row: float, rows: int, passes: float) -> float:
    """Return what so many rows' forward passes cost, so many times. each_row: by `of_row`."""
    return passes * (rows * each_row + CALL * max(1, len(list(model.parameters()))))


def times(seconds: float, each: float, least: int, most: int) -> int:
    """Return how often a thing that costs `each` goes into so many seconds of an idle core, within bounds."""
    return int(np.clip(seconds * SECOND / max(each, 1.0), least, most))
