"""Rows that are computed on access, so that a data set may be larger than memory.

`LazyRows` replaces an array [rows, ...]. Indexing or slicing it gives an array of those rows alone; `part` gives lazy
rows, and `blocks` iterates over all of them. So only a batch is in memory, and nothing decoded is written to the disk.
`numpy.asarray` loads all rows, or refuses if they do not fit.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast, final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from moretta.contract.memory import check_memory
from moretta.contract.messages import Array
from moretta.errors import RowsError

BLOCK_BYTES = 1 << 22  # the most in a block's rows
COPIES = 2  # of loaded rows in memory: the array, and a tensor of it


@final
class LazyRows:
    """Rows float32[rows, ...], all finite, each computed by a function of its number.

    Args:
        make: Returns the sample of a row's number, float32 of one shape, or raises ParameterError. Rows are not kept,
            so repeated calls must return the same.
        shape: Of a sample.
        index: The numbers of the rows, int64[rows].
    """

    dtype = np.dtype(np.float32)

    def __init__(self, make: Callable[[int], Array], shape: Sequence[int], index: NDArray[np.int64]) -> None:
        self._make, self._index = make, index
        self.shape = (len(index), *shape)

    @property
    def ndim(self) -> int:
        """The number of axes, as of an array."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all rows once they are loaded."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self._index)

    def __repr__(self) -> str:
        return f"LazyRows({list(self.shape)})"

    def __getitem__(self, key: slice | NDArray[Any]) -> NDArray[np.float32]:
        """Compute some rows. Raises ParameterError if they are invalid, or exceed this machine's memory."""
        numbers = self._index[key]
        check_fits(LazyRows(self._make, self.shape[1:], numbers))
        rows = np.empty((len(numbers), *self.shape[1:]), self.dtype)
        for place, number in enumerate(numbers):
            sample = self._make(int(number))
            if sample.shape != rows.shape[1:]:
                raise RowsError(f"expected samples of shape {list(rows.shape[1:])}, got {list(sample.shape)}")
            rows[place] = sample
        if not np.isfinite(rows).all():
            raise RowsError("expected finite inputs, got NaN or infinity in a row that was read just now")
        return rows

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Compute all rows, or refuse."""
        return self[:] if dtype is None else self[:].astype(dtype, copy=False)

    def part(self, key: slice | NDArray[Any]) -> "LazyRows":
        """Return some of the rows, still lazy."""
        return LazyRows(self._make, self.shape[1:], self._index[key])

    def reshape(self, rows: int, columns: int) -> "LazyColumns":
        """Return the entries as a matrix with this many columns. rows: -1, as for an array."""
        return LazyColumns(self, columns)


@final
class LazyColumns:
    """The entries of lazy rows as a matrix [entries / columns, columns]; its slices are arrays.

    It is for one pass from beginning to end: it keeps only the last block of rows that it computed.
    """

    ndim = 2

    def __init__(self, rows: LazyRows, columns: int) -> None:
        self._rows, self._columns, self.dtype = rows, columns, rows.dtype
        self._each = math.prod(rows.shape[1:]) // columns  # the matrix rows of one sample
        self.shape = (len(rows) * self._each, columns)
        self._begin, self._block = 0, np.empty((0, columns), rows.dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: slice) -> NDArray[np.float32]:
        start, stop, _ = key.indices(len(self))
        parts = []
        while start < stop:
            if not self._begin <= start < self._begin + len(self._block):
                self._read(start // self._each)
            part = self._block[start - self._begin : stop - self._begin]
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else np.concatenate([self._block[:0], *parts])

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Compute all entries, or refuse."""
        entries = self._rows[:].reshape(self.shape)
        return entries if dtype is None else entries.astype(dtype, copy=False)

    def _read(self, row: int) -> None:
        self._begin = row * self._each
        self._block = self._rows[row : row + block_rows(self._rows)].reshape(-1, self._columns)


def block_rows(x: Array | LazyRows) -> int:
    """Return the number of rows in a block of x: up to 4 MiB, at least one row."""
    return max(1, BLOCK_BYTES // max(1, math.prod(x.shape[1:]) * x.dtype.itemsize))


def blocks(x: Array) -> Iterator[Array]:
    """Yield all rows of x in order, a block at a time; an array without axes or rows is yielded as it is."""
    if x.ndim == 0 or not len(x):
        yield np.asarray(x)
        return
    step = block_rows(x)
    yield from (x[start : start + step] for start in range(0, len(x), step))


def taken(x: Array, key: slice | NDArray[Any]) -> Array:
    """Return some rows of x: x[key] of an array, and lazy rows of lazy ones."""
    rows: Any = x
    if isinstance(rows, LazyRows):
        return as_array(rows.part(key))
    chosen: Array = rows[key]
    return chosen


def joined(parts: Sequence[Array]) -> Array:
    """Return the rows of all parts one after the other, lazy if one of them is."""
    if not any(isinstance(part, LazyRows) for part in parts):
        return np.concatenate(parts)
    starts = np.cumsum([0, *map(len, parts)])

    def make(number: int) -> Array:
        of = int(np.searchsorted(starts, number, side="right")) - 1
        row = number - int(starts[of])
        sample: Array = parts[of][row : row + 1][0]
        return sample

    return as_array(LazyRows(make, parts[0].shape[1:], np.arange(starts[-1])))


def as_array(rows: LazyRows) -> Array:
    """Return lazy rows, typed as the array that they replace."""
    return cast(Array, rows)


def loaded(x: Array) -> Array:
    """Return x as an array in memory. Raises ParameterError if lazy rows do not fit."""
    return np.asarray(x)


def check_fits(x: Array | LazyRows) -> None:
    """Raise ParameterError if lazy rows, loaded at once, would not fit into free memory."""
    if isinstance(x, LazyRows):
        advice = "use smaller batches ([data] batch-size), smaller images, or another machine"
        check_memory(COPIES * x.nbytes, f"{len(x)} rows at once take", advice)
