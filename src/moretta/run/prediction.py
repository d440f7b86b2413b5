"""Predict with the model of a finished run: the released one, or the true one."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moretta.config import run_files
from moretta.contract.messages import Array
from moretta.data.checks import as_features
from moretta.data.images.sets import SETS, read_npz, scaled
from moretta.data.tables.table import ABSENT_CATEGORY, cells_of, fill_missing, numbers_of
from moretta.engines.files import write_atomically
from moretta.errors import ParameterError
from moretta.protocols.common import enrolment
from moretta.protocols.common.modules import outputs_of
from moretta.run import finished


def predict(
    folder: Path,
    rows: Path,
    out: Path,
    *,
    true_model: bool = False,
    silo: str | None = None,
    allow_code: bool = False,
) -> tuple[int, int]:
    """Predict the rows of a .csv or .npz file; write a .csv with a column an output, or a .npy. Return its shape.

    The file has the columns of the training data (its target may be there or not), or an array `x`. Where the run
    filled in absent values, the file's own medians fill in those of its rows. The released model gives exact
    predictions; it is the one that silos hold. allow_code: as of `moretta.run.finished.load`.
    Raises `moretta.errors.ParameterError`, and writes nothing, where the run has no such model or the rows do not fit.
    """
    if out.suffix not in (".csv", ".npy"):
        raise ParameterError(f"{out}: expected an output file that ends in .csv or .npy")
    if not out.parent.is_dir():
        raise ParameterError(f"{out}: expected an output file in a folder that is there; make {out.parent}")
    model = finished.load(folder, true_model=true_model, silo=silo, allow_code=allow_code)
    x = _rows(rows, list(model.columns), model.shape, model.run_file.data)
    prepared = enrolment.prepared(x, model.preparation, model.dtype)
    try:
        outputs = outputs_of(model.module, prepared).numpy()
    except (RuntimeError, IndexError, TypeError) as error:
        raise ParameterError(
            f"{rows}: the model cannot take these rows of {x.dtype} ({error}); save numbers as floats, and tokens as "
            "the integers that it was trained on"
        ) from error
    _write(out, outputs)
    return outputs.shape[0], outputs.shape[1]


def _rows(path: Path, columns: list[str], shape: tuple[int, ...], wanted: run_files.Data) -> Array:
    """Return the rows to predict as training had its own: float32, or int64 for tokens, and no value absent."""
    indicators = _indicators(columns)
    given = columns[: len(columns) - len(indicators)]
    if path.suffix == ".npz":
        arrays = read_npz(path)
        if "x" not in arrays:
            raise ParameterError(f"{path}: expected an array `x`, got {sorted(arrays)}")
        pixels = wanted.source in SETS and arrays["x"].dtype == np.uint8
        x = scaled(arrays["x"]) if pixels else as_features(arrays["x"], str(path))
    elif path.suffix == ".csv":
        x = as_features(_table(path, given), str(path))
    else:
        raise ParameterError(f"{path}: expected rows to predict in a .csv or .npz file")
    if x.ndim == 2 and x.shape[1] == len(given):
        x, _ = fill_missing(x, wanted.missing, tuple(given), str(path), indicators)
    if len(shape) == 1 and len(x) and x[0].size == shape[0]:  # where columns were dealt out, samples are flat
        x = x.reshape(len(x), -1)
    if x.shape[1:] != shape or not len(x):
        raise ParameterError(f"{path}: expected rows of shape {list(shape)}, got {len(x)} of {list(x.shape[1:])}")
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise ParameterError(f"{path}: expected finite inputs, got NaN or infinity in {_first_bad(x, columns)}")
    return x


def _indicators(columns: list[str]) -> tuple[int, ...]:
    """Return which columns have an indicator at the end of all columns, 1 where their value was absent."""
    ends = f"={ABSENT_CATEGORY}"
    named = [column.removesuffix(ends) for column in columns if column.endswith(ends)]
    return tuple(columns.index(name) for name in named if name in columns)  # else it is a category of a text


def _first_bad(x: Array, columns: list[str]) -> str:
    column = int(np.argwhere(~np.isfinite(x))[0][-1])
    return f"column `{columns[column]}`" if column < len(columns) else f"column {column}"


def _table(path: Path, columns: list[str]) -> NDArray[np.float64]:
    """Read a table by the training data's columns: a number each, NaN if absent, or ``name=category`` of a text."""
    cells = _cells(path)
    read: list[list[float]] = []
    for column in columns:
        text = max((name for name in cells if column.startswith(f"{name}=")), key=len, default=None)
        if column in cells:
            read.append(_numbers(path, column, cells[column]))
        elif text is not None:
            known = [other.removeprefix(f"{text}=") for other in columns if other.startswith(f"{text}=")]
            found = [_category(path, text, cell, known) for cell in cells[text]]
            read.append([float(f"{text}={category}" == column) for category in found])
        else:
            name = column.partition("=")[0]
            raise ParameterError(
                f"{path}: expected a column `{name}`, as the training data has; got {', '.join(cells)}"
            )
    return np.array(read, dtype=np.float64).T


def _cells(path: Path) -> dict[str, list[str]]:
    """Return each column's cells, stripped, absent ones as the empty string."""
    try:
        return cells_of(path.read_bytes(), str(path))[1]
    except OSError as error:
        raise ParameterError(f"{path}: the rows to predict cannot be read; {error}") from None


def _numbers(path: Path, column: str, cells: list[str]) -> list[float]:
    numbers = numbers_of(cells)
    if numbers is None:
        wrong = next(cell for cell in cells if numbers_of([cell]) is None)
        raise ParameterError(f"{path}: column `{column}`: expected numbers, as in training, got `{wrong:.80}`")
    return list(numbers)


def _category(path: Path, column: str, cell: str, known: list[str]) -> str:
    category = cell or ABSENT_CATEGORY
    if category not in known:
        got = f"`{cell:.80}`" if cell else "an empty cell"
        raise ParameterError(f"{path}: column `{column}`: expected {' or '.join(known)}, as in training, got {got}")
    return category


def _write(out: Path, outputs: Array) -> None:
    if out.suffix == ".npy":
        buffer = io.BytesIO()
        np.save(buffer, outputs, allow_pickle=False)
        write_atomically(out, buffer.getvalue())
        return
    header = ",".join(f"output_{index}" for index in range(outputs.shape[1]))
    lines = [",".join(repr(float(value)) for value in row) for row in outputs]
    write_atomically(out, "\n".join([header, *lines, ""]).encode())
