"""The rows that one owner has in a file of its own, read so that all owners' columns and classes mean the same.

As each owner reads its rows alone, nothing may depend on its file's content: another file may lack a category or a
class. So text is refused here, and classes are whole numbers from 0, numbered as in the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.data.checks import as_features, as_targets, check_finite, check_fit, check_pair, check_targets_finite
from moretta.data.images.folder import FOLDER, read_labelled
from moretta.data.images.pixels import Form
from moretta.data.images.sets import read_npz
from moretta.data.references import is_reference
from moretta.data.sources import called
from moretta.data.tables.table import MissingValues, fill_missing, is_table, numbers_of, read_table
from moretta.errors import ParameterError


@dataclass(frozen=True)
class ExpectedRows:
    """What a run expects of every owner's rows.

    inputs: the shape of a sample. tokens: whether samples are token ids. classes: how many there are; None where
    targets are numbers, `outputs` a row. labelled: whether these rows have targets at all. window, spacing: of images
    (`moretta.data.images.pixels.Form`).
    """

    inputs: tuple[int, ...]
    tokens: bool
    classes: int | None
    outputs: int | None
    labelled: bool = True
    window: tuple[float, float] | None = None
    spacing: float | None = None


def read_rows(
    source: str,
    wanted: ExpectedRows,
    where: str,
    *,
    target: str | None = None,
    missing: MissingValues = "error",
    id_column: str | None = None,
    path: Path | None = None,
    labels: Path | None = None,
    group_column: str | None = None,
    base: Path = Path("."),
) -> tuple[Array, Array, NDArray[np.str_] | None, tuple[str, ...]]:
    """Return inputs [rows, ...], targets, the rows' ids if given, and the columns' names if they have any.

    source: a .csv or .csv.gz table, an .npz file with x and y (or x_train and y_train), and id where rows have one,
    "module:function" that returns (x_train, y_train, x_test, y_test), or "image-folder", the images in the folder
    `path` that the table `labels` names (`moretta.data.images.folder`). Relative paths and modules start at `base`.
    target, id_column: of a table, as in `moretta.data.tables.table.read_table`; missing: "error", or "median",
    of this owner's rows.
    where: begins each error's sentence. Raises `moretta.errors.ParameterError` for rows that are not as wanted.
    """
    names: tuple[str, ...] = ()
    arrays: Mapping[str, Array]
    if source != FOLDER and (path or labels or group_column or wanted.window or wanted.spacing):
        raise ParameterError(
            f"{where}: path, labels, group-column and the run's window and spacing are for image-folder, and source = "
            f"{source!r} is none"
        )
    if source == FOLDER:
        arrays = _images(wanted, where, path and base / path, labels and base / labels, target, id_column, group_column)
    elif is_table(source):
        arrays, names = _table(base / source, wanted, target, missing, id_column)
    elif target is not None or id_column is not None:
        raise ParameterError(
            f"{where}: target and id-column are for .csv files and image-folder, and source = {source!r} is none"
        )
    elif source.endswith(".npz"):
        arrays = read_npz(base / source)
    elif is_reference(source):
        arrays = called(source, base)
    else:
        raise ParameterError(
            f'{where}: source = {source!r}: expected a .csv, .csv.gz or .npz file or "module:function" of this site\'s '
            f'own rows, or "{FOLDER}"'
        )
    given_x, given_y = (arrays.get(key, arrays.get(f"{key}_train")) for key in ("x", "y"))
    if given_x is None or (given_y is None and wanted.labelled):
        raise ParameterError(f"{where}: {source}: expected arrays x and y; got {', '.join(arrays) or 'none'}")
    x = as_features(given_x, f"{where}: {source}")
    x, names = fill_missing(x, missing, names, where, ())
    y = _targets(given_y, wanted, f"{where}: {source}") if wanted.labelled and given_y is not None else _no_targets()
    _check(x, y, wanted, where, names)
    ids = arrays.get("id", arrays.get("id_train"))
    if ids is not None and np.shape(ids) != (len(x),):
        raise ParameterError(f"{where}: {source}: expected one id a row, {len(x)}; got {list(np.shape(ids))}")
    return x, y, None if ids is None else np.asarray(ids).astype(np.str_), names


def _images(
    wanted: ExpectedRows,
    where: str,
    folder: Path | None,
    labels: Path | None,
    target: str | None,
    id_column: str | None,
    group_column: str | None,
) -> dict[str, Array]:
    if folder is None or labels is None:
        raise ParameterError(
            f'{where}: source = "{FOLDER}" needs path, the folder of images, and labels, the .csv file that has a '
            "column `file` and the target"
        )
    channels, height, width = wanted.inputs if len(wanted.inputs) == 3 else (0, 0, 0)
    if channels not in (1, 3) or height != width or wanted.tokens:
        raise ParameterError(
            f'{where}: source = "{FOLDER}" gives samples of shape [1 or 3, size, size], and [data] inputs of the run '
            f"is {list(wanted.inputs)}"
        )
    form = Form(height, channels, wanted.window, wanted.spacing)
    found = read_labelled(
        folder,
        labels,
        form,
        target=target,
        id_column=id_column,
        group_column=group_column,
        labelled=wanted.labelled,
    )
    arrays = {"x": found.x, "id": found.ids, "group": found.groups}
    if wanted.labelled:
        arrays["y"] = numbers_of(found.targets)
        if arrays["y"] is None:
            raise ParameterError(
                f"{where}: {labels.name}: column {found.target!r} has words in it; number the classes, in the same way "
                "at every site"
            )
    return {name: array for name, array in arrays.items() if array is not None}


def _table(
    path: Path, wanted: ExpectedRows, target: str | None, missing: MissingValues, id_column: str | None
) -> tuple[Mapping[str, Array], tuple[str, ...]]:
    # Targets as numbers, whatever the task: the classes of one owner's rows are not all the classes.
    table = read_table(
        path, target=target, task="regression", missing=missing, id_column=id_column, labelled=wanted.labelled
    )
    if table.names != table.origins:
        text = next(origin for name, origin in zip(table.names, table.origins, strict=True) if name != origin)
        raise ParameterError(
            f"{path.name}: column {text!r} has text in it, whose categories may be others at another site; "
            "encode it as numbers in the same way everywhere"
        )
    arrays: dict[str, Array] = {"x": table.x, "y": table.y}
    if table.ids is not None:
        arrays["id"] = table.ids
    return arrays, table.names


def _targets(y: Array, wanted: ExpectedRows, where: str) -> Array:
    if wanted.classes is None:
        return as_targets(y, where, "regression")[0]
    labels = np.asarray(y)
    if labels.ndim == 2 and labels.shape[1] > 1:  # one-hot rows
        return as_targets(labels, where, "classification")[0]
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    whole = labels.ndim == 1 and labels.dtype.kind in "fiub" and bool((np.abs(labels.astype(np.float64)) < 2**31).all())
    if not whole or (labels != np.round(labels)).any():
        raise ParameterError(f"{where}: expected classes 0 to {wanted.classes - 1} as whole numbers; got other targets")
    return labels.astype(np.int64)


def _no_targets() -> Array:
    return np.empty(0, np.float32)


def _check(x: Array, y: Array, wanted: ExpectedRows, where: str, names: tuple[str, ...]) -> None:
    kind = np.dtype(np.int64 if wanted.tokens else np.float32)
    if x.shape[1:] != wanted.inputs or x.dtype != kind:
        raise ParameterError(
            f"{where}: expected samples of shape {list(wanted.inputs)} as {kind}, as [data] inputs and tokens of the "
            f"run say; got {list(x.shape[1:])} as {x.dtype}"
        )
    if not len(x):
        raise ParameterError(f"{where} has no rows; expected at least one")
    check_finite(x, names if len(names) == x.shape[-1] else (), where)
    if not wanted.labelled:
        return
    check_pair(x, y, where)
    check_targets_finite(y, where)
    check_fit(y, wanted.classes or wanted.outputs or 1, where)
