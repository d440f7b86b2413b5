"""A silo's targets as arrays that its loss takes, encoded alike with PyTorch and without."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

from moretta.contract.messages import Array
from moretta.errors import ParameterError, RowsError


def encode(y: NDArray[np.generic], outputs: int, loss: str, silo: str, dtype: DTypeLike) -> Array:
    """Return a silo's targets as the loss wants them.

    y: whole numbers are classes: one-hot under "mse" when the model has more than one output, 0/1 for one output,
    int64[rows] under "cross-entropy". Floats are targets [rows] or [rows, outputs], one-hot or probability rows
    under "cross-entropy". Raises `moretta.errors.ParameterError` where they do not fit the loss or the outputs.
    """
    fits = _classes if y.dtype.kind in "iub" else _floats
    return fits(y, outputs, loss, silo, dtype)


def _classes(y: NDArray[np.generic], outputs: int, loss: str, silo: str, dtype: DTypeLike) -> Array:
    classes = y.astype(np.int64)
    if classes.ndim != 1:
        raise RowsError(f"silo `{silo}`: expected one class a row, got targets of shape {list(y.shape)}")
    low, high, most = int(classes.min()), int(classes.max()), max(outputs, 2)
    if low < 0 or high >= most:
        raise RowsError(
            f"silo `{silo}`: expected classes 0 to {most - 1} for a model with {outputs} outputs, got {low} to {high}"
        )
    if loss == "cross-entropy":
        if outputs < 2:
            raise ParameterError('loss = "cross-entropy" needs an output a class; the model has one: use loss = "mse"')
        return classes
    if outputs == 1:
        return classes[:, None].astype(dtype)
    hot = np.zeros((len(classes), outputs), dtype)
    hot[np.arange(len(classes)), classes] = 1
    return hot


def _floats(y: NDArray[np.generic], outputs: int, loss: str, silo: str, dtype: DTypeLike) -> Array:
    values = y.astype(np.float64).reshape(len(y), -1)
    if not np.isfinite(values).all():
        raise RowsError(f"silo `{silo}`: expected finite targets, got NaN or infinity")
    if loss == "cross-entropy" and y.ndim == 1:
        raise RowsError(
            f'silo `{silo}`: loss = "cross-entropy" needs classes as whole numbers from 0, or probability rows; got '
            'one float a row: give y.astype(int) where they are classes, and loss = "mse" where they are numbers'
        )
    if values.shape[1] != outputs:
        raise RowsError(f"silo `{silo}`: expected {outputs} targets a row, the model's outputs, got {values.shape[1]}")
    if loss == "cross-entropy" and not ((values >= 0).all() and (np.abs(values.sum(axis=1) - 1) < 1e-6).all()):
        raise RowsError(
            f'silo `{silo}`: loss = "cross-entropy" needs classes or probability rows, got other numbers: use "mse"'
        )
    with np.errstate(over="ignore"):  # an infinite loss is reported later
        return values.astype(dtype)
