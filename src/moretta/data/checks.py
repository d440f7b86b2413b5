"""Which arrays may be samples and targets, and the errors for those that may not.

`as_features` and `as_targets` turn a user's arrays into the types of `moretta.data.dataset`; the `check_` functions
raise ParameterError, naming the owner, and return nothing.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moretta.contract.lazy_rows import LazyRows, as_array
from moretta.contract.messages import Array
from moretta.data.tables.inference import Task
from moretta.errors import ParameterError


def as_features(x: ArrayLike, where: str) -> Array:
    """Samples as float32, or int64 if they are integers of 16 bits or more: those are token ids, never negative.

    Bytes and booleans become floats unscaled. Raises ParameterError for other types and for rows without a column.
    """
    if isinstance(x, LazyRows):
        return as_array(x)
    array = np.asarray(x)
    if array.ndim < 2 and array.dtype.kind in "fiub":
        raise ParameterError(f"{where}: expected samples of shape [rows, columns or more], got {list(array.shape)}")
    if array.dtype.kind in "iu" and array.dtype.itemsize > 1:
        if array.size and array.min() < 0:
            raise ParameterError(
                f"{where}: integer samples are token ids, but some are negative; save numbers as floats"
            )
        return array.astype(np.int64)
    if array.dtype.kind not in "fiub":
        raise ParameterError(f"{where}: expected an array of numbers, got type {array.dtype}")
    with np.errstate(over="ignore", invalid="ignore"):  # too large becomes infinite, which `check_finite` names
        return np.ascontiguousarray(array, np.float32)


def _single(y: Array) -> Array:
    with np.errstate(over="ignore"):  # too large becomes infinite, which the construction of `Dataset` refuses
        return y.astype(np.float32)


def as_targets(y: ArrayLike, where: str, task: Task | None = None) -> tuple[Array, Task, int | None]:
    """Targets by the rules of the run file, as (y, task, classes).

    Integers are classes unless `task` says regression; rows that are all one-hot are classes; other floats are
    regression, [n, 1] as [n]. With task = "classification" floats must be whole numbers.
    Raises ParameterError for anything else, saying what was expected.
    """
    array = np.asarray(y)
    if array.dtype.kind not in "fiub" or array.ndim not in (1, 2):
        raise ParameterError(
            f"{where}: expected numbers as targets, [rows] or [rows, outputs], got {array.dtype}{list(array.shape)}"
        )
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ParameterError(
            f"{where}: {int((~np.isfinite(array)).sum())} targets are NaN or infinite; remove those rows"
        )
    if task == "regression":
        return _single(array), "regression", None
    if array.ndim == 2:
        if len(array) and _one_hot(array):
            return _single(array), "classification", int(array.shape[1])
        if task == "classification" or array.dtype.kind != "f":
            raise ParameterError(f"{where}: expected class targets [rows] or one-hot rows, got {list(array.shape)}")
        return _single(array), "regression", None
    if array.dtype.kind == "f":
        if task is None:
            return _single(array), "regression", None
        if (array != np.round(array)).any():
            raise ParameterError(f'{where}: task = "classification" needs whole numbers as targets, got fractions')
    labels = array.astype(np.int64)
    if labels.size and labels.min() < 0:
        raise ParameterError(f"{where}: classes are numbered from 0, but the smallest is {labels.min()}; renumber them")
    largest = int(labels.max(initial=0))
    if largest >= max(len(labels), 1000):
        raise ParameterError(
            f"{where}: class {largest} among {len(labels)} rows; number the classes from 0 without gaps, "
            'or set task = "regression"'
        )
    return labels, "classification", max(largest + 1, 2)


def class_of(y: Array) -> NDArray[np.int64] | None:
    """The class of each row, int64[n], from labels or one-hot rows; None for regression targets."""
    if y.dtype.kind in "iu":
        return np.asarray(y, np.int64)
    return np.asarray(y.argmax(1), np.int64) if _one_hot(y) else None


def _one_hot(y: Array) -> bool:
    return y.ndim == 2 and y.shape[1] > 1 and bool(np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all())


def check_finite(x: Array, names: tuple[str, ...], owner: str, *, allow_missing: bool = False) -> None:
    """Raise ParameterError, naming the owner and the first bad column, if x [n, ...] holds NaN or infinity.

    With `allow_missing` NaN stands for an absent value and passes.
    """
    if x.dtype.kind != "f" or isinstance(x, LazyRows):  # these are looked at when they are read
        return
    bad = np.isinf(x) if allow_missing else ~np.isfinite(x)
    if not bad.any():
        return
    anywhere = bad.any(0)
    first = tuple(int(i) for i in np.unravel_index(int(anywhere.argmax()), anywhere.shape))
    column = f"column {names[first[0]]!r}" if len(first) == 1 and names else f"position {first} of a sample"
    rows = int(bad.reshape(len(x), -1)[:, int(anywhere.argmax())].sum())
    kind = "NaN or infinite" if not allow_missing else "infinite"
    raise ParameterError(
        f"{owner}: {column} has {rows} {'row' if rows == 1 else 'rows'} that are {kind} as float32; expected finite "
        'numbers: remove or mend those rows, or for absent values set missing = "mean" or "indicator"'
    )


def check_fit(y: Array, outputs: int, owner: str) -> None:
    """Raise ParameterError, naming the owner, unless the targets y fit a model with `outputs` outputs.

    Classes must be below `outputs` (or 0 and 1 for a single output); rows of targets must have `outputs` entries.
    """
    if y.ndim == 2:
        if y.shape[1] != outputs:
            raise ParameterError(
                f"{owner}: targets have {y.shape[1]} entries a row, but the model has {outputs} outputs"
            )
    elif y.dtype.kind in "iu":
        limit = max(outputs, 2)
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < limit:
            wrong = int(y.max()) if int(y.max()) >= limit else int(y.min())
            raise ParameterError(
                f"{owner}: label {wrong} does not fit {outputs} outputs; expected labels 0 to {limit - 1}"
            )
    elif outputs != 1:
        raise ParameterError(f"{owner}: each target is one number, but the model has {outputs} outputs; expected 1")


def check_pair(x: Array, y: Array, where: str) -> None:
    """Raise ParameterError unless x and y have the types and shapes of `moretta.data.dataset`, and as many rows."""
    if x.dtype not in (np.dtype(np.float32), np.dtype(np.int64)) or x.ndim < 2:
        raise ParameterError(f"{where}: expected x as float32 or int64 [rows, ...], got {x.dtype}{list(x.shape)}")
    if y.dtype not in (np.dtype(np.float32), np.dtype(np.int64)) or y.ndim not in (1, 2):
        raise ParameterError(f"{where}: expected y as int64[rows] or float32[rows, ...], got {y.dtype}{list(y.shape)}")
    if len(x) != len(y):
        raise ParameterError(f"{where} has {len(x)} samples but {len(y)} targets; expected one target per sample")
    if 0 in x.shape[1:]:
        raise ParameterError(f"{where}: samples of shape {x.shape[1:]} hold nothing; expected at least one column")


def check_targets_finite(y: Array, where: str) -> None:
    """Raise ParameterError if a target is NaN or infinite."""
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise ParameterError(f"{where}: the target is NaN or infinite in some rows; remove or mend them")
