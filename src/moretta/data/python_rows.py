"""Rows and targets of Python users: arrays, lists, tensors, frames of columns and Datasets of PyTorch.

Each becomes an array of numbers, or is refused in one sentence that quotes no cell. pandas, polars, pyarrow and torch
are not imported: a frame has `columns` and `to_numpy`, or `column_names`, and a tensor can be detached. A Dataset has a
length, and returns a sample and its target by index.
"""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.contract.lazy_rows import LazyRows
from moretta.contract.wording import kind_of, nearest
from moretta.data.layout import Samples
from moretta.data.rows import are_positions, as_positions, class_of
from moretta.data.tables.files import check_dense, check_order, column_names, composed, is_frame, is_sparse
from moretta.errors import ParameterError

NUMBERS = "fiub"


def names_of(x: Any) -> tuple[str, ...]:
    """Return the names of a frame's columns, in its order; empty for rows without names."""
    return tuple(map(str, column_names(x))) if is_frame(x) else ()


def rows_and_targets(x: Any, y: Any, where: str, **further: Any) -> tuple[Samples, NDArray[np.generic]]:
    """Return inputs and targets as arrays.

    Args:
        y: None if x is a Dataset of samples with their targets.
        where: The start of each error's sentence.
        further: Other columns of the same rows, whose order is checked.

    Raises:
        ParameterError: The arguments are anything but rows of numbers.
    """
    check_order({"x": x, "y": y, **further}, where)
    _refuse_streams(x, where)
    if is_dataset(x):
        if y is not None:
            raise ParameterError(f"{where}: a Dataset has its targets; leave out y")
        x, y = _of_dataset(x, where)
    if y is None:
        raise ParameterError(f"{where}: y is missing; pass a target for each row")
    return samples(x, where), targets_of(y, where)


def is_dataset(x: object) -> bool:
    """Return whether rows are a Dataset of PyTorch, or its like."""
    plain = isinstance(x, np.ndarray | LazyRows | Mapping | Sequence | str)
    plain = plain or hasattr(x, "detach") or is_sparse(x)
    return (
        not plain
        and not is_frame(x)
        and hasattr(x, "__getitem__")
        and hasattr(x, "__len__")
        and not hasattr(x, "to_numpy")
    )


def samples(x: Any, where: str) -> Samples:
    """Return inputs as an array of numbers; several arrays by name stay a mapping."""
    if isinstance(x, Mapping):
        arrays = dict[str, Any](x)
        for name, array in arrays.items():
            check_dense(array, place := f"{where}: x[{name!r}]")
            arrays[name] = _array(array, place) if hasattr(array, "detach") else array
        return arrays
    if is_frame(x):
        return _of_frame(x, where)
    remedy = "numbers; for a table with words give a schema: moretta.read_table(table, schema)"
    return _of_numbers(x, f"{where}: x", remedy)


def targets_of(y: Any, where: str) -> NDArray[np.generic]:
    """Return targets as an array of numbers; masks in the form of `moretta.data.rows.as_positions`."""
    if is_frame(y):
        names = column_names(y)
        y = y[names[0]] if len(names) == 1 else _of_frame(y, where)
    remedy = (
        "classes numbered from 0, or numbers; for example classes, y = numpy.unique(words, return_inverse=True), with "
        "the same numbers at all silos"
    )
    targets = _of_numbers(y, f"{where}: y", remedy)
    if targets.dtype.kind in "iub" and targets.ndim == 2:
        if targets.shape[1] == 1:
            return targets[:, 0]
        if class_of(targets.astype(np.float32)) is not None:
            return targets.astype(np.float32)
    return as_positions(targets, where) if are_positions(targets) else targets


def _of_numbers(numbers: Any, where: str, expected: str) -> NDArray[np.generic]:
    """Return numbers as an array. where: begins the sentence of an error, and ends with x or y."""
    check_dense(numbers, where, where[-1])
    if numbers is None:
        raise ParameterError(f"{where} is missing; pass {expected}")
    array = _array(numbers, where)
    _check_real(array, where)
    if array.dtype.kind not in NUMBERS:
        raise ParameterError(f"{where} holds words or objects; expected {expected}")
    return array


def _check_real(array: NDArray[Any], where: str) -> None:
    if array.dtype.kind == "c":
        raise ParameterError(f"{where} holds complex numbers; pass real and imaginary parts as separate columns")


def subjects(values: Any, rows: int, where: str) -> NDArray[np.str_]:
    """Return the person or thing of each row, as words."""
    kind = object if isinstance(values, list | tuple) else None  # beside words NumPy makes NaN a word
    array = np.asarray(values.to_numpy() if hasattr(values, "to_numpy") else values, kind)
    cells = array.ravel().tolist()  # of Python's types; True is an int, but not an id
    words = all(isinstance(cell, str | Integral) and not isinstance(cell, bool) for cell in cells)
    if words and "" in cells:
        raise ParameterError(
            f"{where}: {cells.count('')} of {rows} are empty, and would count as the same one; fill them in, one for "
            "each row"
        )
    if array.ndim != 1 or len(array) != rows or not words:
        got = f"{len(array)} values of type {array.dtype}" if array.ndim == 1 else kind_of(values)
        raise ParameterError(f"{where}: expected {rows} words or whole numbers, one a row; got {got}")
    return np.asarray(composed(np.array([str(cell) for cell in cells], np.str_)))


def pair(
    rows: Any, where: str, names: Sequence[str] = (), owner: str = "the first silo"
) -> tuple[Samples, NDArray[np.generic]]:
    """Return rows with targets, a pair or a Dataset, as arrays. names: the columns that a frame must have."""
    if is_dataset(rows):
        rows = (rows, None)
    if not isinstance(rows, tuple | list) or len(rows) != 2:
        raise ParameterError(f"{where}: expected inputs and targets, (x, y), or a Dataset; got {kind_of(rows)}")
    x, y = rows
    return rows_and_targets(in_order(x, names, where, owner) if names and is_frame(x) else x, y, where)


def in_order(x: Any, order: Sequence[str], where: str, owner: str) -> Any:
    """Return a frame's columns in this order.

    Args:
        where: The owner of the columns.
        owner: The owner of the order.

    Raises:
        ParameterError: A column is missing; the sentence names it.
    """
    names = names_of(x)
    for name in order:
        if name not in names:
            close = nearest(name, names)
            hint = f"did you mean {close!r}?" if close else f"it has {', '.join(names):.200}"
            raise ParameterError(f"{where}: expected a column {name!r}, as {owner} has; {hint}")
    if names == tuple(order):
        return x
    return x[list(order)] if hasattr(x, "to_numpy") else x.select(list(order))


def of_columns(columns: Mapping[str, Any], where: str) -> NDArray[np.generic]:
    """Return columns by name, [rows] each, as an array [rows, columns]."""
    arrays = [_of_numbers(column, f"{where}[{name!r}]: x", "numbers") for name, column in columns.items()]
    if {array.ndim for array in arrays} != {1} or len({len(array) for array in arrays}) > 1:
        shapes = ", ".join(f"{name!r} {list(array.shape)}" for name, array in zip(columns, arrays, strict=True))
        raise ParameterError(f"{where}: expected columns [rows] of equal length; got {shapes:.200}")
    return np.stack(arrays, axis=1)


def _of_frame(frame: Any, where: str) -> NDArray[np.generic]:
    names = names_of(frame)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ParameterError(f"{where}: column {twice!r} appears twice; expected each name once: rename one")
    columns = []
    for name in column_names(frame):
        column = np.asarray(frame[name].to_numpy())
        _check_real(column, f"{where}: column {str(name)!r}")
        if column.dtype.kind not in NUMBERS:
            column = _nullable(column, f"{where}: column {str(name)!r}")
        single = column.astype(np.float32)
        columns.append(column if column.dtype.kind == "f" else single if (single == column).all() else column * 1.0)
    return np.stack(columns, axis=1) if columns else np.empty((len(frame), 0), np.float32)


def _nullable(column: NDArray[Any], where: str) -> NDArray[np.float64]:
    """Return numbers and absent values, which a frame has as objects, as floats with NaN."""
    try:
        if column.dtype.kind in "SUMm" or any(isinstance(cell, str) for cell in column):
            raise TypeError
        return np.array([np.nan if cell is None or cell != cell else float(cell) for cell in column])
    except (TypeError, ValueError):
        raise ParameterError(
            f"{where} holds words, dates or objects; expected numbers: read the frame by a schema "
            "(moretta.read_table(frame, schema)), or leave the column out"
        ) from None


def _array(value: Any, where: str) -> NDArray[Any]:
    if isinstance(value, LazyRows):
        rows: Any = value
        return rows  # type: ignore[no-any-return]
    if isinstance(value, np.ndarray):
        return _plain(value)
    try:
        if hasattr(value, "detach"):
            return _plain(np.asarray(value.detach().cpu().numpy()))
        return _plain(np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value))
    except (ValueError, TypeError, RuntimeError):
        raise ParameterError(
            f"{where}: expected numbers, the same count in each row; got {kind_of(value)} of another form"
        ) from None


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in PyTorch's form: of this machine's byte order, at most 64 bits, in no backward order.

    Whole numbers of 16 bits, or above that without a sign, become int64: no embedding of PyTorch takes them.
    """
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if array.dtype.kind + str(array.dtype.itemsize) in ("i2", "u2", "u4", "u8"):
        array = array.astype(np.int64)
    array = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    return np.ascontiguousarray(array) if array.ndim and min(array.strides) < 0 else array


def _refuse_streams(x: Any, where: str) -> None:
    if hasattr(x, "dataset") and hasattr(x, "__iter__") and not hasattr(x, "__getitem__"):
        raise ParameterError(f"{where}: got {kind_of(x)}, but the protocol draws its own batches; pass its dataset")
    if isinstance(x, Iterable) and not hasattr(x, "__len__"):
        raise ParameterError(
            f"{where}: got {kind_of(x)}, whose rows cannot be read by index; pass a list, array or Dataset"
        )


def _of_dataset(data: Any, where: str) -> tuple[Any, Any]:
    """Return the samples and targets of a Dataset, read into memory."""
    rows = [data[place] for place in range(len(data))]
    if not rows:
        raise ParameterError(f"{where}: the Dataset is empty; expected at least one sample with its target")
    if any(not isinstance(row, tuple | list) or len(row) != 2 for row in rows):
        raise ParameterError(f"{where}: expected a Dataset that returns a pair by index, a sample and its target")
    targets = _stacked([row[1] for row in rows], where)
    if isinstance(rows[0][0], Mapping):
        return {name: _stacked([row[0][name] for row in rows], where) for name in rows[0][0]}, targets
    return _stacked([row[0] for row in rows], where), targets


def _stacked(parts: Sequence[Any], where: str) -> NDArray[Any]:
    arrays = [_array(part, where) for part in parts]
    if len({array.shape for array in arrays}) > 1:
        raise ParameterError(f"{where}: the Dataset's samples have different shapes; make them alike")
    return np.stack(arrays)
