"""Inputs that are read and made ready for a model a batch at a time, where they may be larger than memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moretta.contract.lazy_rows import LazyRows

CHUNK = 2048  # rows in one forward without gradients
CHUNK_NUMBERS = 1 << 22  # of their inputs; fewer rows where samples are large


@final
class LazyTensor:
    """Lazy rows in the place of a tensor [rows, ...]; an index or a slice of it is a tensor of those rows alone.

    make: from rows as they are read to the tensor that a model takes.
    """

    def __init__(self, rows: LazyRows, make: Callable[[NDArray[np.float32]], Tensor]) -> None:
        self._rows, self._make, self.shape = rows, make, rows.shape

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: Tensor | slice) -> Tensor:
        return self._make(self._rows[key.cpu().numpy() if isinstance(key, Tensor) else key])


Inputs = Tensor | LazyTensor


def chunks(inputs: Inputs, most: int = CHUNK) -> Iterator[Tensor]:
    """Yield inputs [rows, ...] in order, as many rows at a time as a forward without gradients takes, or fewer."""
    step = min(most, max(1, CHUNK_NUMBERS // max(1, math.prod(inputs.shape[1:]))))
    yield from (inputs[start : start + step] for start in range(0, max(1, len(inputs)), step))
