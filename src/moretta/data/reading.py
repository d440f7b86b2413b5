"""The reader of rows: tables, arrays, images, DICOM and a user's own functions.

    read(source, expected, where)  -> Rows     one owner's rows, which must have the form that the run expects

It reads a site's rows, a silo's file, the server's test rows, a file to look at and a file to predict; only the
expectation differs. Each owner reads its rows alone, so nothing may depend on its file's content: another file may lack
a category or a class. So a table is read by the run's schema, which all owners have, and arrays have whole numbers as
classes, numbered as in the run. Only `moretta.data.datasets.load`, which has all rows, may infer a schema. Nothing here
reads a pickle.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moretta.contract.messages import Array
from moretta.data.images.folder import FOLDER, read_labelled
from moretta.data.images.pixels import ImageForm
from moretta.data.images.sets import read_npz
from moretta.data.layout import SampleLayout, packed_parts
from moretta.data.python_rows import subjects
from moretta.data.references import OWN_CODE, beside, cause, is_reference, resolve
from moretta.data.rows import (
    Rows,
    as_features,
    as_positions,
    as_targets,
    check_finite,
    check_fit,
    check_pair,
    check_targets_finite,
)
from moretta.data.tables.files import ENDINGS, Format, is_table, read_columns
from moretta.data.tables.mapping import ColumnMapping
from moretta.data.tables.preparation import check_rounding
from moretta.data.tables.rows import encode, expansion_of, rules_of
from moretta.data.tables.schema import Schema
from moretta.errors import MissingExtra, ParameterError, RowsError


@dataclass(frozen=True)
class ExpectedRows:
    """The form that rows must have.

    Args:
        inputs: the shape of a sample, packed where it has a layout; None: any.
        tokens: whether samples are token ids.
        classes: the number of classes; None where targets are numbers, `outputs` a row.
        labelled: whether these rows have targets.
        training: whether they are trained on, and so have no other columns; other rows that do not fit the table are
            left out.
        may_lack: whether values may be absent.
        table: the schema of these rows, where they come from a table.
        image: the form of images, where the table names their files.
        mask: the shape of masks as targets, of `outputs` classes; None: targets are not masks.
    """

    inputs: tuple[int, ...] | None
    tokens: bool
    classes: int | None
    outputs: int | None
    labelled: bool = True
    may_lack: bool = False
    table: Schema | None = None
    layout: SampleLayout | None = None
    image: ImageForm | None = None
    training: bool = True
    mask: tuple[int, ...] | None = None

    @classmethod
    def of_table(cls, table: Schema, *, labelled: bool = True, image: ImageForm | None = None) -> "ExpectedRows":
        """Return the form that a schema demands. image: the form of the images that it names."""
        classes = len(table.classes) or None
        masks = table.target and table.target.mask_values  # a model has an output for each
        outputs = None if classes else len(masks) if masks else 1
        expected = cls(None, False, classes, outputs, labelled, table=table, image=image)
        rules = None if image is not None else rules_of(table)
        return expected if rules is None else replace(expected, inputs=(rules.columns,), may_lack=rules.may_lack)


class Source(NamedTuple):
    """The place of rows.

    Args:
        source: a table, an .npz file with x and y (or x_train and y_train) and perhaps id, "module:function" that
            returns (x_train, y_train, x_test, y_test), or "image-folder".
        path: the folder of images of "image-folder".
        labels: the table that names these images.
        form: the form of a .csv file.
        base: the folder where relative paths and modules start.
        mapping: changes of a table's columns before the schema reads them.
    """

    source: str
    form: Format | None = None
    path: Path | None = None
    labels: Path | None = None
    base: Path = Path(".")
    mapping: ColumnMapping = ColumnMapping()


def read(source: Source, expected: ExpectedRows, where: str) -> Rows:
    """Return the rows of a source.

    Args:
        where: Their owner, which begins each error's sentence.

    Raises:
        RowsError: The source cannot be read, or its rows are not the expected ones.
        MissingExtra: The package that reads them is not installed.
    """
    try:
        rows = _read(source, expected, where)
        _check(rows, expected, where)
        return rows
    except (MissingExtra, RowsError):
        raise
    except ParameterError as error:  # any error of a reader is about these rows
        raise RowsError(str(error)) from error


def _read(source: Source, expected: ExpectedRows, where: str) -> Rows:
    name, base = source.source, source.base
    if name == FOLDER:
        return _images_of_folder(source, expected, where)
    if source.path is not None or source.labels is not None:
        raise ParameterError(f'{where}: path and labels are for "{FOLDER}", not for source = {name!r}')
    if expected.image is not None:
        raise ParameterError(
            f"{where}: the run's rows are images that a table names; expected source = "
            f'"{FOLDER}" with path and labels, got {name!r}'
        )
    if is_table(name):
        return _of_table(source, expected, where)
    if source.mapping != ColumnMapping():
        raise ParameterError(f"{where}: [mapping] of silo.toml is for tables, not for source = {name!r}; remove it")
    if expected.table is not None:
        raise ParameterError(
            f"{where}: the run's rows are a table's; expected a source that ends in {', '.join(ENDINGS)}, got {name!r}"
        )
    if name.endswith(".npz"):
        return of_arrays(read_npz(base / name), expected, f"{where}: {name}")
    if is_reference(name):
        return of_arrays(called(name, base), expected, f"{where}: {name}")
    raise ParameterError(
        f"{where}: source = {name!r}: expected a table ({', '.join(ENDINGS)}), an .npz file or "
        f'"module:function" of this site\'s own rows, or "{FOLDER}"'
    )


def _of_table(source: Source, expected: ExpectedRows, where: str) -> Rows:
    table, path, form, mapping = expected.table, source.base / source.source, source.form, source.mapping
    if table is None:
        raise ParameterError(
            f"{where}: {path.name} is a table, and the run has no schema; have the run name one by [data] schema, the "
            "same for all sites (moretta schema init FILE proposes one)"
        )
    labelled, training = expected.labelled, expected.training
    place = f"{where}: {path.name}"
    left_out: Mapping[int, str] = {}
    if training:
        columns, _ = mapping.read(path, form, place, table.dropped)
        rows = encode(columns, table, place, form, labelled=labelled)
    else:
        target = table.name_of("target")
        unread = [*table.dropped, target] if target is not None and not labelled else table.dropped
        columns, unmapped, numbers = mapping.fitting(read_columns(path, form, mapping.unread(unread)), place, form)
        rows = encode(columns, table, place, form, labelled=labelled, training=False, leave_out=True)
        left_out = {**unmapped, **{int(numbers[row - 1]): why for row, why in rows.left_out.items()}}
    names, y = expansion_of(table).names, _numbers(rows.y, expected, where)
    return Rows(rows.x, y, rows.ids, rows.groups, names=names, left_out=dict(sorted(left_out.items())))


def _images_of_folder(source: Source, expected: ExpectedRows, where: str) -> Rows:
    if source.path is None or source.labels is None:
        raise ParameterError(
            f'{where}: source = "{FOLDER}" needs path, the folder of images, and labels, the table of their files'
        )
    if expected.table is None or expected.image is None:
        raise ParameterError(
            f'{where}: source = "{FOLDER}" needs a run whose [data] schema has a column of kind "file", which this '
            "run lacks; correct source, or have the run name such a schema"
        )
    folder, labels, place = source.base / source.path, source.base / source.labels, f"{where}: {source.labels.name}"
    form, mapping, labelled = source.form, source.mapping, expected.labelled
    rows = read_labelled(
        folder, labels, expected.image, expected.table, written=form, labelled=labelled, where=place, mapping=mapping
    )
    return Rows(rows.x, _numbers(rows.y, expected, where), rows.ids, rows.groups)


def of_arrays(arrays: Mapping[str, Array], expected: ExpectedRows, where: str) -> Rows:
    """Return the rows of a file's or a function's arrays, for `read`."""
    arrays, layout = packed_parts(arrays, where, expected.layout)
    if layout is not None and expected.layout is None:
        raise ParameterError(
            f"{where}: expected samples as one array, as in [data] inputs of the run; got the arrays "
            f"{', '.join(layout.names)}"
        )
    x, y, ids, groups = (arrays.get(key, arrays.get(f"{key}_train")) for key in ("x", "y", "id", "group"))
    if x is None or (y is None and expected.labelled):
        needed = "arrays x and y" if expected.labelled else "an array `x`"
        raise ParameterError(f"{where}: expected {needed}; got {', '.join(arrays) or 'none'}")
    for name, numbers in (("x", x), ("y", y)):
        if expected.training and numbers is not None:
            check_rounding(np.asarray(numbers), f"{where}: {name}")
    x = as_features(x, where)
    whose = {"id": ids, "group": groups}
    whom = {what: subjects(values, len(x), f"{where}: {what}") for what, values in whose.items() if values is not None}
    if not expected.training:  # predictions have the file's
        whom = {what: np.asarray(whose[what]).astype(np.str_) for what in whom}
    y = _targets(y, expected, where) if expected.labelled and y is not None else np.empty(0, np.float32)
    return Rows(x, y, whom.get("id"), whom.get("group"))


def _numbers(y: Array, expected: ExpectedRows, where: str) -> Array:
    """Return a table's targets: places of classes, or numbers as float32."""
    return y if expected.classes or not expected.labelled else as_targets(y, where, "regression")[0]


def _targets(y: Array, expected: ExpectedRows, where: str) -> Array:
    if expected.mask is not None:
        return as_positions(np.asarray(y), where)
    if expected.classes is None:
        return as_targets(y, where, "regression")[0]
    labels = np.asarray(y)
    if labels.ndim == 2 and labels.shape[1] > 1:  # one-hot rows
        return as_targets(labels, where, "classification")[0]
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    whole = labels.ndim == 1 and labels.dtype.kind in "fiub" and bool((np.abs(labels.astype(np.float64)) < 2**31).all())
    if not whole or (labels != np.round(labels)).any():
        raise ParameterError(
            f"{where}: expected classes 0 to {expected.classes - 1} as whole numbers; got other targets"
        )
    return labels.astype(np.int64)


def _check(rows: Rows, expected: ExpectedRows, where: str) -> None:
    x, y, kind = rows.x, rows.y, np.dtype(np.int64 if expected.tokens else np.float32)
    if expected.inputs is not None and (x.shape[1:] != expected.inputs or x.dtype != kind):
        raise ParameterError(
            f"{where}: expected samples of shape {list(expected.inputs)} as {kind}, as in [data] inputs and tokens of "
            f"the run; got {list(x.shape[1:])} as {x.dtype}"
        )
    if not len(x):
        raise ParameterError(f"{where} has no rows; expected at least one")
    check_finite(x, rows.names if len(rows.names) == x.shape[-1] else (), where, may_lack=expected.may_lack)
    if expected.labelled:
        check_pair(x, y, where)
        check_targets_finite(y, where)
        if expected.mask is not None and (y.ndim != 3 or y.shape[1] != math.prod(expected.mask)):
            raise ParameterError(
                f"{where}: expected masks of {' x '.join(map(str, expected.mask))} positions, as in the run; got "
                f"{y.shape[1] if y.ndim == 3 else 'no'} positions"
            )
        if expected.mask is None and expected.table is None and y.ndim == 3:
            raise ParameterError(
                f"{where}: the targets are masks, but the run file names no mask; set their shape and classes there, "
                "for example mask = [64, 64] and classes = 2 in [data]"
            )
        check_fit(y, y.shape[1] if y.ndim == 3 else expected.classes or expected.outputs or 1, where)


def called(source: str, base: Path) -> dict[str, Array]:
    """Return the result of a module:function, as arrays x_train, y_train, x_test and y_test.

    Mappings of arrays, x_train and x_test, become ``x_train.ids`` and so on, as in an .npz file.

    Raises:
        ParameterError: The function cannot be found, fails, or returns anything else.
    """
    function = resolve(source, base, OWN_CODE)
    try:
        with beside(base):
            made = function()
    except (Exception, SystemExit) as error:
        raise ParameterError(f'calling "{source}" failed with {cause(error)}; fix the function') from error
    expected = f'"{source}" must return (x_train, y_train, x_test, y_test)'
    if not isinstance(made, tuple | list) or len(made) != 4:
        got = f"{len(made)} values" if isinstance(made, tuple | list) else type(made).__name__
        raise ParameterError(f"{expected}, got {got}")
    parts = dict[str, object]()
    for name, part in zip(("x_train", "y_train", "x_test", "y_test"), made, strict=True):
        parts |= {f"{name}.{key}": array for key, array in part.items()} if isinstance(part, Mapping) else {name: part}
    try:
        return {name: np.asarray(part) for name, part in parts.items()}
    except (ValueError, TypeError, RuntimeError) as error:
        raise ParameterError(f"{expected} as arrays, but one is not ({cause(error)})") from error
