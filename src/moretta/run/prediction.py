"""Predictions and scores of a finished run's model, the released or the true one, on other rows."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.contract.wording import LEAST_SHOWN, did_you_mean
from moretta.data.images.folder import FILE, read_labelled, read_unlabelled
from moretta.data.images.pixels import ImageForm
from moretta.data.images.sets import read_npz
from moretta.data.reading import ExpectedRows, Source, of_arrays, read
from moretta.data.rows import Rows, Subjects
from moretta.data.tables.files import is_predicted, is_table, read_columns, written
from moretta.data.tables.mapping import ColumnMapping
from moretta.data.tables.rows import ABSENT_CATEGORY, expansion_of
from moretta.data.tables.schema import Number, Schema
from moretta.engines.files import check_ending, check_replaced, write_atomically
from moretta.errors import ParameterError
from moretta.protocols.common.targets import estimates_of, predicted, probabilities
from moretta.run import trained_model
from moretta.run.metrics import judged
from moretta.run.trained_model import ModelChoice, TrainedModel

HEADER = 100_000  # the most characters to read of a first line
MOST_CLASSES = 1 << 16  # if a run does not state its number
PREDICTION = "prediction"  # the column or array with each row's class, mask or number
ROW = "row"  # the column of row numbers, if rows without ids are left out


class Predicted(NamedTuple):
    """The numbers of predicted rows and of outputs. left_out: rows of the table without one, from 1, and why."""

    rows: int
    outputs: int
    left_out: Mapping[int, str]


def predict(
    folder: Path,
    rows: Path,
    out: Path,
    choice: ModelChoice = ModelChoice(),  # noqa: B008  # frozen
    *,
    form: Mapping[str, Any] | None = None,
    mapping: ColumnMapping = ColumnMapping(),  # noqa: B008
) -> Predicted:
    """Predict the rows of a table or an .npz file; write predictions to a .csv, or plain outputs to a .npy.

    For masks a .npz file replaces the .csv: `prediction` has each position's class, int64[rows, *mask], and `id` the
    rows' names, if any. The .npy has [rows, *mask, classes]. Rows of a table with a cell against its schema are left
    out, and rows whose outputs are not finite. A .csv or .npz then has ids or the numbers of the other rows, and a .npy
    has NaN for those left out. Absent values are filled in from the training rows, so no prediction depends on other
    rows of the file. The released model, which silos hold, predicts exactly.

    Args:
        rows: A table with the training data's columns, with or without the target. An .npz file with an array `x`, or
            `x.ids`, `x.mask` and so on for several arrays a sample, and perhaps `id`. For a run on images, a folder of
            them, or a table beside them that names their files.
        out: The file to write.
        form: The fields of `Format` in which a .csv file differs from the run's.
        mapping: Changes a table's columns before the schema reads them; rows that do not fit it are left out too.

    Raises:
        ParameterError: The run lacks the model, no row fits, or `out` holds other content than earlier predictions, or
            is a table of this call or of the run. Nothing is written then.
    """
    if not out.parent.is_dir():
        raise ParameterError(f"{out}: expected an output file in an existing folder; make {out.parent}")
    model = trained_model.read(folder, choice)
    check_ending(out, ".npz" if model.mask else ".csv", ".npy")
    tables = [rows, *model.tables]
    check_replaced(out, "earlier predictions that are no input", lambda path: _are_predictions(path, tables))
    source = Source(rows.name, replace(model.form, **(form or {})), base=rows.parent, mapping=mapping)
    samples, named = rows_of(source, model)
    outputs = model.outputs(samples.x, str(rows))
    good, kept = np.isfinite(outputs).all(axis=1), _kept(samples, len(outputs))
    if not good.any():
        trained_model.finite(outputs, str(rows), kept)
    bad = dict.fromkeys(kept[~good].tolist(), "the model's outputs are not finite")
    ids, left_out = None if samples.ids is None else samples.ids[good], {**samples.left_out, **bad}
    samples, outputs = replace(samples, ids=ids, left_out=dict(sorted(left_out.items()))), outputs[good]
    _write(out, outputs, samples, named, model)
    return Predicted(outputs.shape[0], outputs.shape[1], samples.left_out)


def evaluate(
    folder: Path,
    data: Path,
    choice: ModelChoice = ModelChoice(),  # noqa: B008
    *,
    by: str | None = None,
    form: Mapping[str, Any] | None = None,
    mapping: ColumnMapping = ColumnMapping(),  # noqa: B008
) -> tuple[dict[str, Any], Mapping[int, str]]:
    """Return the scores (`judged`) of a run's model on labelled rows of a table or an .npz file, and the rows left out.

    Args:
        by: A column of the table, by its own name or the mapping's. The rows of each of its values are scored too,
            except values with fewer than `LEAST_SHOWN` rows.
        choice, form, mapping: As in `predict`.

    Returns:
        The scores, and by number from 1 the rows that violate the schema, each with the reason.

    Raises:
        ParameterError: The run has no such model, rows or targets do not fit, outputs are not finite, or the table has
            no column `by`.
    """
    model = trained_model.read(folder, choice)
    source = Source(data.name, replace(model.form, **(form or {})), base=data.parent, mapping=mapping)
    rows, _ = rows_of(source, model, labelled=True)
    of = model.task, model.loss, model.classes
    together = Subjects(rows.ids, rows.groups).whom
    outputs = model.outputs(rows.x, str(data))
    kept = _kept(rows, len(outputs))
    trained_model.finite(outputs, str(data), kept)
    result = judged(outputs, rows.y, *of, together, str(data), model.threshold)
    if by is None:
        return result, rows.left_out
    if not is_table(data.name):
        raise ParameterError(f"--by {by}: {data} has no columns with names; use a table")
    whole = read_columns(data, source.form)
    own = {name: column[kept - 1] for name, column in whole.items()}
    columns = own | mapping.fitting(own, str(data), source.form)[0]  # by the schema's names or the file's own
    if by not in columns:
        raise ParameterError(f'{data} has no column "{by}" for --by; {did_you_mean(by, columns)}')
    values, places = np.unique(columns[by].astype(str), return_inverse=True)
    parts = dict[str, Any]()
    for number, value in enumerate(values):
        chosen = np.flatnonzero(places == number)
        if len(chosen) >= LEAST_SHOWN:
            subjects = None if together is None else together[chosen]
            parts[str(value)] = judged(outputs[chosen], rows.y[chosen], *of, subjects, str(data), model.threshold)
    return result | {"by": by, "parts": parts, "parts_withheld": len(values) - len(parts)}, rows.left_out


def rows_of(source: Source, model: TrainedModel, *, labelled: bool = False) -> tuple[Rows, str]:
    """Return rows in a silo's form, with their ids, and the id column's name. labelled: with targets."""
    path = source.base / source.source
    if source.mapping != ColumnMapping() and (path.is_dir() or not is_table(path.name)):
        raise ParameterError(
            f"{path}: [mapping] of silo.toml is for tables, and this is another file; leave out --silo-file"
        )
    if model.image is not None and (path.is_dir() or is_table(path.name)):
        return _images(source, path, model, model.image, labelled)
    schema = model.table or _of_arrays(model)
    classes = (len(model.classes) or MOST_CLASSES) if model.task == "classification" else None
    outputs = None if classes else model.count
    expected = ExpectedRows(None, False, classes, outputs, labelled, True, layout=model.layout, training=False)
    if path.suffix == ".npz":
        return _arrays(path, model, expected), "id"
    if not is_table(path.name):
        raise ParameterError(f"{path}: expected rows to predict in a table (.csv, .parquet, .arrow) or an .npz file")
    if schema is None:
        raise ParameterError(f"{path}: the run's rows are arrays of shape {list(model.shape)}; use an .npz file")
    if labelled and schema.target is None:
        raise ParameterError(f"{path}: the run's rows were arrays; use an .npz file with x and y")
    rows = read(source, replace(expected, table=schema), str(path.parent))
    if rows.ids is not None:
        return rows, schema.name_of("id") or ""
    return replace(rows, ids=rows.groups), schema.name_of("group") or ""


def _images(source: Source, path: Path, model: TrainedModel, image: ImageForm, labelled: bool) -> tuple[Rows, str]:
    """Return the images of a folder, or those that a table names below its own folder, with their paths as ids."""
    if labelled:
        if path.is_dir() or model.table is None:
            raise ParameterError(f"{path}: expected the table that names images and their classes, beside them")
        images = read_labelled(path.parent, path, image, model.table, written=source.form, mapping=source.mapping)
        return Rows(
            images.x, model.fitting(images.y, str(path)) if model.mask else images.y, images.ids, images.groups
        ), FILE
    column = (model.table.name_of("file") if model.table else None) or FILE
    if path.is_dir():
        x, names = read_unlabelled(path, image)
    else:
        own = next((old for old, new in source.mapping.rename.items() if new == column), column)
        x, names = read_unlabelled(path.parent, image, path, source.form, own)
    return Rows(x, np.empty(0), np.array(names, np.str_)), column


def _arrays(path: Path, model: TrainedModel, expected: ExpectedRows) -> Rows:
    arrays, schema = read_npz(path), _of_arrays(model)
    if "x" in arrays:
        arrays["x"] = model.pixels(arrays["x"])
    if expected.labelled and "y" in arrays:
        y = arrays["y"]
        arrays["y"] = model.fitting(y, str(path)) if model.mask else model.class_numbers(y, f"{path}: y")
    rows = of_arrays(arrays, expected, str(path))
    if schema is not None and rows.x.ndim == 2 and rows.x.shape[1] == len(schema.features) < len(model.columns):
        return replace(rows, x=expansion_of(schema).apply(rows.x))  # adds marks of absent values
    return rows


def _of_arrays(model: TrainedModel) -> Schema | None:
    """Return the schema of arrays with named columns; marks of absence are columns too."""
    names = [name for name in model.columns if f"{name}={ABSENT_CATEGORY}" in model.columns or "=" not in name]
    if not names:
        return None
    marked = {name: "indicator" for name in names if f"{name}={ABSENT_CATEGORY}" in model.columns}
    blanks = "mean" if model.fills_absent else "refuse"
    return Schema(columns={name: Number(blanks=marked.get(name, blanks)) for name in names})


def _kept(rows: Rows, count: int) -> NDArray[np.int64]:
    """Return the numbers, from 1, of the rows that are not left out. count: of those."""
    return np.setdiff1d(np.arange(count + len(rows.left_out)) + 1, list(rows.left_out))


def _write(out: Path, outputs: Array, rows: Rows, named: str, model: TrainedModel) -> None:
    names, kept = rows.ids, _kept(rows, len(outputs))
    if names is None and rows.left_out:
        names, named = kept.astype(np.str_), ROW
    if out.suffix.lower() in (".npy", ".npz"):
        buffer, own = io.BytesIO(), model.at_positions(outputs)
        whole = np.full((len(kept) + len(rows.left_out), *own.shape[1:]), np.nan, outputs.dtype)
        whole[kept - 1] = own
        if out.suffix.lower() == ".npy":
            np.save(buffer, whole, allow_pickle=False)
        else:
            arrays: dict[str, Any] = {PREDICTION: own.argmax(axis=-1)} | ({} if names is None else {"id": names})
            np.savez(buffer, **arrays)
        write_atomically(out, buffer.getvalue(), 0o600)  # private, because rows may be about people
        return
    header, columns = _predicted(outputs, model)
    if names is not None:
        header, columns = [named, *header], [names.tolist(), *columns]
    write_atomically(out, written(header, columns), 0o600)


def _are_predictions(path: Path, tables: Sequence[Path]) -> bool:
    """Return whether a file has the header or arrays that `_write` writes, and is not one of the tables."""
    if path.suffix.lower() == ".npy":  # no table is such a file
        return True
    if path.suffix.lower() == ".npz":
        return {PREDICTION} <= set(read_npz(path)) <= {PREDICTION, "id"}
    with path.open(encoding="utf-8", errors="replace", newline="") as stream:
        line = stream.readline(HEADER)
    (header,) = csv.reader([line])
    if len(line) == HEADER:
        del header[-1]  # it may be cut off
    return is_predicted(header) and not any(_is_same_file(path, table) for table in tables)


def _is_same_file(path: Path, table: Path) -> bool:
    """Return whether a file is a table; false if this user may not look at the table."""
    try:
        return path.samefile(table)
    except OSError:
        return False


def _predicted(outputs: Array, model: TrainedModel) -> tuple[list[str], list[list[Any]]]:
    """Return the columns of predictions: the class and each class's probability, or the numbers."""
    if model.task != "classification":
        outputs = estimates_of(outputs, model.loss)
        names = [PREDICTION] if outputs.shape[1] == 1 else [f"{PREDICTION}_{k}" for k in range(outputs.shape[1])]
        return names, outputs.T.tolist()
    chances = probabilities(outputs, model.loss)
    classes = list(model.classes) or [str(number) for number in range(chances.shape[1])]
    best = predicted(outputs)
    header = [PREDICTION, *(f"probability_{name}" for name in classes)]
    return header, [[classes[k] for k in best], *chances.T.tolist()]
