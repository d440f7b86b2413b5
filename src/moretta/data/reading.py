"""The rows that one owner has in a file of its own, read so that all owners' columns and classes mean the same.

As each owner reads its rows alone, nothing may depend on its file's content: another file may lack a category or a
class. So a table is read by the run's schema, which all owners have, and arrays have whole numbers as classes,
numbered as in the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.data.images.folder import FOLDER, read_labelled
from moretta.data.images.pixels import ImageForm
from moretta.data.images.sets import read_npz
from moretta.data.layout import SampleLayout, packed_parts
from moretta.data.references import is_reference
from moretta.data.rows import as_features, as_targets, check_finite, check_fit, check_pair, check_targets_finite
from moretta.data.sources import called
from moretta.data.tables.files import ENDINGS, Format, is_table, read_columns
from moretta.data.tables.rows import encode, expansion_of
from moretta.data.tables.schema import Schema
from moretta.errors import MissingExtra, ParameterError, RowsError


@dataclass(frozen=True)
class ExpectedRows:
    """What a run expects of every owner's rows.

    inputs: the shape of a sample, packed where it has a layout. tokens: whether samples are token ids. classes: how
    many there are; None where targets are numbers, `outputs` a row. labelled: whether these rows have targets at all.
    may_lack: whether values may be absent. table: what the columns of these rows mean, where they are a table's. image:
    what images become, where the table names their files.
    """

    inputs: tuple[int, ...]
    tokens: bool
    classes: int | None
    outputs: int | None
    labelled: bool = True
    may_lack: bool = False
    table: Schema | None = None
    layout: SampleLayout | None = None
    image: ImageForm | None = None


class OwnRows(NamedTuple):
    """One owner's rows: inputs [rows, ...], targets, str[rows] ids and groups or None, and columns' names if any."""

    x: Array
    y: Array
    ids: NDArray[np.str_] | None
    groups: NDArray[np.str_] | None
    names: tuple[str, ...]


def read_rows(
    source: str,
    wanted: ExpectedRows,
    where: str,
    *,
    form: Format | None = None,
    path: Path | None = None,
    labels: Path | None = None,
    base: Path = Path("."),
) -> OwnRows:
    """Return the rows of a source.

    source: a table, an .npz file with x and y (or x_train and y_train), and id where rows have one,
    "module:function" that returns (x_train, y_train, x_test, y_test), or "image-folder": the images in the folder
    `path` that the table `labels` names. Relative paths and modules start at `base`.
    form: how a .csv file is written. where: begins each error's sentence. Raises `moretta.errors.RowsError` for rows
    that are not as wanted, and `moretta.errors.MissingExtra`.
    """
    try:
        return _read(source, wanted, where, form, path, labels, base)
    except (MissingExtra, RowsError):
        raise
    except ParameterError as error:  # whatever a reader says, it says of these rows
        raise RowsError(str(error)) from error


def _read(
    source: str,
    wanted: ExpectedRows,
    where: str,
    form: Format | None,
    path: Path | None,
    labels: Path | None,
    base: Path,
) -> OwnRows:
    if source == FOLDER:
        return _images(path and base / path, labels and base / labels, wanted, where, form)
    if path is not None or labels is not None:
        raise ParameterError(f'{where}: path and labels are for "{FOLDER}", and source = {source!r} is none')
    if wanted.image is not None:
        raise ParameterError(
            f"{where}: the run's rows are images that a table names, and source = {source!r} is none; expected "
            f'"{FOLDER}", with path and labels'
        )
    if is_table(source):
        return _table(base / source, wanted, where, form)
    if wanted.table is not None:
        raise ParameterError(
            f"{where}: the run's rows are a table's, and source = {source!r} is none; expected a file that ends in "
            f"{', '.join(ENDINGS)}"
        )
    if source.endswith(".npz"):
        arrays: Mapping[str, Array] = read_npz(base / source)
    elif is_reference(source):
        arrays = called(source, base)
    else:
        raise ParameterError(
            f"{where}: source = {source!r}: expected a table ({', '.join(ENDINGS)}), an .npz file or "
            f'"module:function" of this site\'s own rows, or "{FOLDER}"'
        )
    arrays, layout = packed_parts(arrays, f"{where}: {source}", wanted.layout)
    if layout is not None and wanted.layout is None:
        raise ParameterError(
            f"{where}: {source}: expected samples as one array, as [data] inputs of the run says; got the arrays "
            f"{', '.join(layout.names)}"
        )
    given_x, given_y = (arrays.get(key, arrays.get(f"{key}_train")) for key in ("x", "y"))
    if given_x is None or (given_y is None and wanted.labelled):
        raise ParameterError(f"{where}: {source}: expected arrays x and y; got {', '.join(arrays) or 'none'}")
    x = as_features(given_x, f"{where}: {source}")
    y = _targets(given_y, wanted, f"{where}: {source}") if wanted.labelled and given_y is not None else _no_targets()
    _check(x, y, wanted, where, ())
    ids, groups = (_texts(arrays, what, len(x), f"{where}: {source}") for what in ("id", "group"))
    return OwnRows(x, y, ids, groups, ())


def _images(folder: Path | None, labels: Path | None, wanted: ExpectedRows, where: str, form: Format | None) -> OwnRows:
    if folder is None or labels is None:
        raise ParameterError(
            f'{where}: source = "{FOLDER}" needs path, the folder of images, and labels, the table of their files'
        )
    if wanted.table is None or wanted.image is None:
        raise ParameterError(
            f'{where}: source = "{FOLDER}" needs a run whose [data] schema has a column of kind "file", the same for '
            "all sites; this one's rows are something else"
        )
    said = f"{where}: {labels.name}"
    found = read_labelled(
        folder, labels, wanted.image, wanted.table, written=form, labelled=wanted.labelled, where=said
    )
    y = found.y if wanted.table.classes or not wanted.labelled else as_targets(found.y, where, "regression")[0]
    _check(found.x, y, wanted, where, ())
    return OwnRows(found.x, y, found.ids, found.groups, ())


def _texts(arrays: Mapping[str, Array], what: str, rows: int, where: str) -> NDArray[np.str_] | None:
    """Return each row's id or group, as strings."""
    given = arrays.get(what, arrays.get(f"{what}_train"))
    if given is not None and np.shape(given) != (rows,):
        raise ParameterError(f"{where}: expected one {what} a row, {rows}; got {list(np.shape(given))}")
    return None if given is None else np.asarray(given).astype(np.str_)


def _table(path: Path, wanted: ExpectedRows, where: str, form: Format | None) -> OwnRows:
    if wanted.table is None:
        raise ParameterError(
            f"{where}: {path.name} is a table, and the run says nothing of what columns mean; have it name a schema by "
            "[data] schema, the same for all sites (moretta schema init FILE proposes one)"
        )
    columns = read_columns(path, form, wanted.table.dropped)
    rows = encode(columns, wanted.table, f"{where}: {path.name}", form, labelled=wanted.labelled)
    y = rows.y if wanted.table.classes or not wanted.labelled else as_targets(rows.y, where, "regression")[0]
    names = expansion_of(wanted.table).names
    _check(rows.x, y, wanted, where, names)
    return OwnRows(rows.x, y, rows.ids, rows.groups, names)


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
    check_finite(x, names if len(names) == x.shape[-1] else (), where, allow_missing=wanted.may_lack)
    if not wanted.labelled:
        return
    check_pair(x, y, where)
    check_targets_finite(y, where)
    check_fit(y, wanted.classes or wanted.outputs or 1, where)
