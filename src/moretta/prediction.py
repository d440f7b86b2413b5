"""Predict with the model of a finished run: the released one, or the true one."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from moretta import config, models
from moretta.engines.files import write_atomically
from moretta.errors import ParameterError
from moretta.evaluation import outputs_of
from moretta.protocols import modules
from moretta.protocols.enrolment import standardised
from moretta.run_folder import read_json, read_model


def predict(folder: Path, rows: Path, out: Path, *, true_model: bool = False) -> tuple[int, int]:
    """Predict the rows of a .csv or .npz file; write a .csv with a column an output, or a .npy. Return its shape.

    The file has the columns of the training data (its target may be there or not), or an array `x`. The released
    model gives exact predictions; it is the one that silos hold.
    """
    if out.suffix not in (".csv", ".npy"):
        raise ParameterError(f"{out}: expected an output file that ends in .csv or .npy")
    run_file, inputs = config.load(folder / "run.toml"), read_json(folder / "inputs.json")
    tensors = read_model(folder / ("model.safetensors" if true_model else "released.safetensors"))
    x = _rows(rows, inputs["columns"], tuple(inputs["shape"]))
    dtype = {"float32": torch.float32, "float64": torch.float64}[inputs["dtype"]]
    model = models.build(
        run_file.model.source,
        inputs=tuple(inputs["shape"]),
        outputs=int(inputs["outputs"]),
        base=run_file.base,
        seed=run_file.run.seed,
        **run_file.model.arguments,
    ).to(dtype)
    modules.load(model, tensors)
    prepared = standardised(x, np.array(inputs["mean"]), np.array(inputs["deviation"]), dtype)
    outputs = outputs_of(model, prepared).numpy()
    _write(out, outputs)
    return outputs.shape[0], outputs.shape[1]


def _rows(path: Path, columns: list[str], shape: tuple[int, ...]) -> NDArray[np.generic]:
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                if "x" not in arrays:
                    raise ParameterError(f"{path}: expected an array `x`, got {sorted(arrays)}")
                x: NDArray[np.generic] = arrays["x"]
        elif path.suffix == ".csv":
            x = _table(path, columns)
        else:
            raise ParameterError(f"{path}: expected rows to predict in a .csv or .npz file")
    except (OSError, ValueError) as error:
        raise ParameterError(f"{path}: the rows to predict cannot be read; {error}") from None
    if x.shape[1:] != shape:
        raise ParameterError(f"{path}: expected rows of shape {list(shape)}, got {list(x.shape[1:])}")
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise ParameterError(f"{path}: expected finite inputs, got NaN or infinity in {_first_bad(x, columns)}")
    return x if x.dtype.kind in "iu" else x.astype(np.float32)


def _first_bad(x: NDArray[np.generic], columns: list[str]) -> str:
    column = int(np.argwhere(~np.isfinite(x))[0][-1])
    return f"column `{columns[column]}`" if column < len(columns) else f"column {column}"


def _table(path: Path, columns: list[str]) -> NDArray[np.float64]:
    """Read a table by the training data's columns: a number each, or ``name=category`` from a column of text."""
    with path.open(newline="", encoding="utf-8-sig") as stream:
        first = stream.readline()
        stream.seek(0)
        table = list(csv.DictReader(stream, delimiter=";" if first.count(";") > first.count(",") else ","))
    if not table:
        raise ParameterError(f"{path}: expected a header and at least one row")
    return np.array([[_cell(path, row, column) for column in columns] for row in table], dtype=np.float64)


def _cell(path: Path, row: dict[str, str], column: str) -> float:
    name, equals, category = column.partition("=")
    if column in row:
        return float(row[column])
    if equals and name in row:
        return float(row[name].strip() == category)
    raise ParameterError(f"{path}: expected a column `{name if equals else column}`, as the training data has")


def _write(out: Path, outputs: NDArray[np.generic]) -> None:
    if out.suffix == ".npy":
        import io

        buffer = io.BytesIO()
        np.save(buffer, outputs, allow_pickle=False)
        write_atomically(out, buffer.getvalue())
        return
    header = ",".join(f"output_{index}" for index in range(outputs.shape[1]))
    lines = [",".join(repr(float(value)) for value in row) for row in outputs]
    write_atomically(out, "\n".join([header, *lines, ""]).encode())
