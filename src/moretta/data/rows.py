"""Rows after reading: arrays that were checked once, and their task.

    Rows    samples, their targets, and their subjects
    Split   train, test and validation rows of one source, before they are assigned to silos

Samples `x` are float32[n, ...], or int64[n, ...] for token ids. Targets `y` are

    int64[n]              classes 0 .. classes - 1             (classification)
    float32[n, classes]   one-hot rows                         (classification; accuracy by argmax)
    float32[n] or [n, k]  numbers, k outputs                   (regression)
    float32[n, p, 2]      a class and its weight at each of p positions, such as a mask's pixels (regression)

`as_features` and `as_targets` turn a user's arrays into these; the `check_` functions raise ParameterError, naming the
owner. `moretta.data.reading` reads rows, `moretta.data.silo.Silo` owns some.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moretta.contract.lazy_rows import LazyRows, as_array, taken
from moretta.contract.messages import Array
from moretta.data.layout import SampleLayout
from moretta.data.tables.preparation import ColumnRules
from moretta.errors import ParameterError, RowsError

if TYPE_CHECKING:  # rows need no pydantic
    from moretta.data.tables.doubts import Task
    from moretta.data.tables.schema import Schema


@dataclass(frozen=True, eq=False)
class Rows:
    """Samples x [n, ...] and targets y [n] or [n, k], empty without targets.

    Args:
        ids, groups: str[n], each row's id and group, if the source has them; whole numbers become words.
        domain: [n], the origin of a row, for the by-domain partition and for scores by domain.
        names: of its columns.
        left_out: rows of a file to predict that are not among these, from 1, each with the reason.
    """

    x: Array = field(repr=False)
    y: Array = field(repr=False)
    ids: Array | None = field(default=None, repr=False)
    groups: Array | None = field(default=None, repr=False)
    domain: Array | None = field(default=None, repr=False)
    names: tuple[str, ...] = ()
    left_out: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("ids", "groups"):
            values = getattr(self, name)
            if values is not None and values.dtype.kind in "iu":
                object.__setattr__(self, name, values.astype(np.str_))

    def __len__(self) -> int:
        return len(self.x)

    def of(self, numbers: NDArray[np.int64] | slice) -> Rows:
        """Return these rows, in this order; lazy ones stay lazy."""
        ids, groups, domain = (
            None if values is None else values[numbers] for values in (self.ids, self.groups, self.domain)
        )
        y = self.y[numbers] if len(self.y) else self.y
        return Rows(taken(self.x, numbers), y, ids, groups, domain, self.names)


@dataclass(frozen=True, eq=False)
class Split:
    """The rows of one source in three parts, of which only training is never empty.

    Args:
        classes: the number of classes; None for regression.
        feature_names: one name per column of a two-dimensional x, otherwise empty.
        origins: for each feature name the column of the source that it was encoded from; empty where each is its own.
        column_rules: the columns of x in which values may be absent (NaN), and the values that training fills in;
            without it, no value may be absent.
        table: the schema of a source that is a table.
        standardise: the source's advice: true for tables.
        layout: how x packs the arrays of a sample that has several (`moretta.data.layout`).

    Raises:
        ParameterError: parts do not fit each other or are not finite; the sentence names the part and the column.
            Training rows are checked with their owners (`check_owned`), so that the error can name one.
    """

    train: Rows
    test: Rows
    validation: Rows
    name: str
    task: Task
    classes: int | None = None
    feature_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    column_rules: ColumnRules | None = None
    table: Schema | None = None
    standardise: bool = True
    layout: SampleLayout | None = None

    def __post_init__(self) -> None:
        train = self.train.x
        for part, rows in self.parts().items():
            where = f"{self.name}: the {part} part"
            if part == "training" and not len(rows):
                raise ParameterError(f"{where} has no rows; expected at least one")
            check_pair(rows.x, rows.y, where)
            if rows.x.shape[1:] != train.shape[1:] or rows.x.dtype != train.dtype:
                raise ParameterError(
                    f"{where} has samples of shape {rows.x.shape[1:]} and type {rows.x.dtype}, but training has "
                    f"{train.shape[1:]} and {train.dtype}; make them the same"
                )
            check_targets_finite(rows.y, where)
            check_about(rows, where, distinct=False)
            if part != "training":
                check_finite(rows.x, self.feature_names, where, may_lack=self.may_lack)

    @property
    def may_lack(self) -> bool:
        """Whether some values may be absent."""
        return self.column_rules is not None and self.column_rules.may_lack

    def parts(self) -> dict[str, Rows]:
        """The three parts by their names."""
        return {"training": self.train, "test": self.test, "validation": self.validation}

    @property
    def inputs(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.train.x.shape[1:]

    @property
    def outputs(self) -> int:
        """The number of a model's outputs (for masks, at each position): one per class, or per number of a target."""
        if self.classes is not None:
            return self.classes
        if self.train.y.ndim == 3:  # of each position
            return max(2, *(int(rows.y[..., 0].max()) + 1 for rows in self.parts().values() if len(rows)))
        return 1 if self.train.y.ndim == 1 else int(self.train.y.shape[1])

    def test_rows_by_domain(self) -> dict[str, NDArray[np.int64]]:
        """Return each domain's row numbers in the test part, by sorted name; empty for a source without domains.

        The test part keeps its order in `Distributed`, so they are row numbers of `Distributed.test` too.
        """
        domain = self.test.domain
        return {} if domain is None else {str(name): np.flatnonzero(domain == name) for name in np.unique(domain)}


def as_features(x: ArrayLike, where: str) -> Array:
    """Return samples as float32, or int64 if they are integers of 16 bits or more: token ids, never negative.

    Bytes and booleans become floats unscaled.

    Raises:
        ParameterError: Samples are of another type, negative token ids, or have no axis of columns.
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
    with np.errstate(over="ignore", invalid="ignore"):  # too large becomes infinite, which `check_finite` refuses
        return np.ascontiguousarray(array, np.float32)


def _single(y: Array) -> Array:
    with np.errstate(over="ignore"):  # too large becomes infinite, which `check_targets_finite` refuses
        return y.astype(np.float32)


def as_targets(y: ArrayLike, where: str, task: Task | None = None) -> tuple[Array, Task, int | None]:
    """Return targets by the rules of the run file.

    Integers are classes unless `task` is regression. Rows that are all one-hot are classes. Other floats are
    regression, [n, 1] as [n]. With task = "classification" floats must be whole numbers. Masks have the form of
    `as_positions`.

    Returns:
        The targets, the task, and the number of classes; None for numbers and masks.

    Raises:
        ParameterError: The targets have another form.
    """
    array = np.asarray(y)
    if array.ndim > 2 or (task != "regression" and are_positions(array)):
        return as_positions(array, where), "regression", None
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


def are_positions(y: Array) -> bool:
    """Return whether targets are masks: classes as whole numbers at several positions of each row."""
    several = y.ndim == 2 and y.shape[1] > 1 and y.dtype.kind in "iub"
    return y.ndim > 2 or (several and not _one_hot(y))


def as_positions(y: Array, where: str) -> Array:
    """Return masks as float32[rows, positions, 2], a class and its weight at each position.

    Args:
        y: Whole numbers [rows, ...]: classes, negative where a position does not count. Or floats [rows, ..., 2]: a
            class and its weight, 0 where it does not count.
        where: Begins the sentence of an error.

    Raises:
        ParameterError: for other arrays.
    """
    if y.dtype.kind in "iub":
        classes, weights = y.astype(np.float32), np.ones(y.shape, np.float32)
    elif y.dtype.kind == "f" and y.ndim > 2 and y.shape[-1] == 2:
        classes, weights = y[..., 0], y[..., 1]
    else:
        raise ParameterError(
            f"{where}: targets are {y.dtype}{list(y.shape)}; expected masks as whole numbers [rows, ...] of classes, "
            "or as floats [rows, ..., 2] of class and weight"
        )
    if not (np.isfinite(y).all() and (classes == np.round(classes)).all() and (weights >= 0).all()):
        raise ParameterError(
            f"{where}: expected whole numbers as the classes of masks and weights of 0 or more; got fractions, "
            "negative weights or numbers that are not finite"
        )
    both = np.stack([np.maximum(classes, 0), np.where(classes >= 0, weights, 0)], axis=-1)
    return both.reshape(len(y), int(np.prod(both.shape[1:-1])), 2).astype(np.float32)  # also for no rows


def positions_of(targets: Iterable[Array]) -> int:
    """Return the number of positions of the masks among these owners' targets; 0 without masks."""
    return next((y.shape[1] for y in targets if y.ndim == 3), 0)


def class_of(y: Array) -> NDArray[np.int64] | None:
    """Return the class of each row, int64[n], from labels or one-hot rows; None for regression targets."""
    if y.dtype.kind in "iu":
        return np.asarray(y, np.int64)
    return np.asarray(y.argmax(1), np.int64) if _one_hot(y) else None


def _one_hot(y: Array) -> bool:
    return y.ndim == 2 and y.shape[1] > 1 and bool(np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all())


def check_finite(x: Array, names: Sequence[str], owner: str, *, may_lack: bool | NDArray[np.bool_] = False) -> None:
    """Raise RowsError, naming the owner and the first bad column, if x [n, ...] holds NaN or infinity.

    Args:
        may_lack: Whether NaN is an absent value and passes: in all columns or, bool[columns], in some.
    """
    if x.dtype.kind != "f" or isinstance(x, LazyRows):  # lazy rows are checked when they are read
        return
    bad = np.isinf(x) | (np.isnan(x) & ~np.asarray(may_lack))
    if not bad.any():
        return
    anywhere = bad.any(0)
    first = tuple(int(i) for i in np.unravel_index(int(anywhere.argmax()), anywhere.shape))
    column = f"column {names[first[0]]!r}" if len(first) == 1 and names else f"position {first} of a sample"
    rows = int(bad.reshape(len(x), -1)[:, int(anywhere.argmax())].sum())
    kind = "infinite" if np.broadcast_to(may_lack, anywhere.shape)[first] else "NaN or infinite"
    raise RowsError(
        f"{owner}: {column} is {kind} in {rows} {'row' if rows == 1 else 'rows'} as {x.dtype}; expected finite "
        'numbers: remove or correct those rows, or set missing = "mean" where values are absent (NaN)'
    )


def check_owned(rows: Rows, owner: str, names: tuple[str, ...], *, may_lack: bool) -> None:
    """Raise ParameterError, naming the owner and the column, for training rows that are empty or not finite."""
    if not len(rows):
        raise ParameterError(f"{owner} has no rows; add rows to it, or leave it out")
    check_finite(rows.x, names, owner, may_lack=may_lack)


def check_about(rows: Rows, where: str, *, distinct: bool = True) -> None:
    """Raise ParameterError unless ids, groups and domains are one per row. distinct: no two rows may have one id."""
    for what, values, kinds in (("id", rows.ids, "iuU"), ("group", rows.groups, "iuU"), ("domain", rows.domain, "")):
        if values is not None and (values.shape != (len(rows),) or (kinds and values.dtype.kind not in kinds)):
            raise ParameterError(
                f"{where}: expected one {what} per row ({len(rows)}){', integers or strings' if kinds else ''}, "
                f"got an array of shape {values.shape} and type {values.dtype}"
            )
    if distinct and rows.ids is not None and (count := len(np.unique(rows.ids))) < len(rows):
        raise ParameterError(
            f"{where}: {len(rows)} rows have {count} different ids; expected an id of its own for each row: where one "
            "person or thing has several rows, use a group"
        )


def check_apart(train: Rows, test: Rows, where: str) -> None:
    """Raise ParameterError if any id or group of training rows is among those of test rows."""
    for what, own, held in (("id", train.ids, test.ids), ("group", train.groups, test.groups)):
        if held is not None and held.shape != (len(test),):
            raise ParameterError(
                f"{where}: {what}_test: expected one per test row ({len(test)}), got shape {list(held.shape)}"
            )
        shared = 0 if own is None or held is None else int(np.isin(held.astype(np.str_), own.astype(np.str_)).sum())
        if shared:
            raise RowsError(
                f"{where}: {what}: {shared} of {len(test)} test rows share one with training rows, so test scores "
                "would not be those of new rows; put all rows of each in one part"
            )


def check_fit(y: Array, outputs: int, owner: str) -> None:
    """Raise ParameterError, naming the owner, unless the targets y fit a model with `outputs` outputs.

    Args:
        y: Classes below `outputs` (0 and 1 for a single output), rows of `outputs` numbers, single numbers for one
            output, or masks whose positions divide `outputs`.
    """
    if y.ndim == 3:
        if outputs % y.shape[1]:
            raise ParameterError(
                f"{owner}: masks have {y.shape[1]} positions, and the model has {outputs} outputs a row; expected an "
                "output for each class at each position"
            )
    elif y.ndim == 2:
        if y.shape[1] != outputs:
            raise ParameterError(
                f"{owner}: targets have {y.shape[1]} entries a row; expected {outputs}, one for each output of the "
                "model"
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
    """Raise ParameterError unless x and y have the types and shapes of this module, and as many rows as each other."""
    if x.dtype not in (np.dtype(np.float32), np.dtype(np.int64)) or x.ndim < 2:
        raise ParameterError(f"{where}: expected x as float32 or int64 [rows, ...], got {x.dtype}{list(x.shape)}")
    if y.dtype not in (np.dtype(np.float32), np.dtype(np.int64)) or y.ndim not in (1, 2, 3):
        raise ParameterError(f"{where}: expected y as int64[rows] or float32[rows, ...], got {y.dtype}{list(y.shape)}")
    if len(x) != len(y):
        raise ParameterError(f"{where} has {len(x)} samples but {len(y)} targets; expected one target per sample")
    if 0 in x.shape[1:]:
        raise ParameterError(f"{where}: samples of shape {x.shape[1:]} are empty; expected at least one column")


def check_targets_finite(y: Array, where: str) -> None:
    """Raise ParameterError if a target is NaN or infinite."""
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise ParameterError(f"{where}: the target is NaN or infinite in some rows; remove or fix them")


@dataclass(frozen=True, eq=False)
class Subjects:
    """The persons or things of rows: str[rows], ids and groups, None without them. Never shown or printed."""

    ids: NDArray[np.str_] | None = field(default=None, repr=False)
    groups: NDArray[np.str_] | None = field(default=None, repr=False)

    @property
    def whom(self) -> NDArray[np.str_] | None:
        """The units whose rows stay together: groups, or without groups ids."""
        return self.ids if self.groups is None else self.groups

    def named(self) -> Mapping[str, NDArray[np.str_] | None]:
        """Return both by their names in errors."""
        return {"ids": self.ids, "groups": self.groups}
