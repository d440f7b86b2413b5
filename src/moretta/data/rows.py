"""What a loader returns: arrays that were checked once, and their task.

    Dataset    train, validation and test rows of one source, before they are split over silos
    SiloData   one owner's rows

Samples `x` are float32[n, ...], or int64[n, ...] for token ids. Targets `y` are

    int64[n]              classes 0 .. classes - 1             (classification)
    float32[n, classes]   one-hot rows                         (classification; accuracy by argmax)
    float32[n] or [n, k]  numbers, k outputs                   (regression)

`as_features` and `as_targets` turn a user's arrays into these; the `check_` functions raise ParameterError, naming the
owner. An edge client's process imports this, which has no pydantic, and so no schema of tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moretta.contract.lazy_rows import LazyRows, as_array
from moretta.contract.messages import Array
from moretta.data.layout import SampleLayout
from moretta.data.tables.preparation import ColumnRules
from moretta.errors import ParameterError

if TYPE_CHECKING:  # of pydantic, which an edge client's process lacks
    from moretta.data.tables.inference import Task
    from moretta.data.tables.schema import Schema


@dataclass(frozen=True, eq=False)
class SiloData:
    """The rows of one owner: x [n, ...] and y [n] or [n, k] as in the module's table, n >= 1.

    row: in a grid, the name of its row part, "row-1" ...; else empty. columns: in a grid, which columns of the whole
    flat sample x has, in their order; else empty. ids, groups: str[n], each row's id and group, if the source has them.
    holds_labels: false for participants of a grid whose labels another participant holds. may_lack: whether x may hold
    NaN, an absent value.
    Raises ParameterError, naming the silo and the column, for other arrays.
    """

    name: str
    x: Array
    y: Array
    feature_names: tuple[str, ...] = ()
    row: str = ""
    columns: tuple[int, ...] = ()
    ids: NDArray[np.str_] | None = None
    holds_labels: bool = True
    may_lack: bool = False
    groups: NDArray[np.str_] | None = None

    def __post_init__(self) -> None:
        if len(self.x) == 0:
            raise ParameterError(f"{self.name} has no rows; give it data or leave it out")
        check_pair(self.x, self.y, self.name)
        check_finite(self.x, self.feature_names, self.name, allow_missing=self.may_lack)
        check_targets_finite(self.y, self.name)
        for what, given in (("id", self.ids), ("group", self.groups)):
            if given is not None and given.shape != (len(self.x),):
                raise ParameterError(
                    f"{self.name}: expected one {what} per row ({len(self.x)}), got {list(given.shape)}"
                )


def _no_rows() -> Array:
    return np.empty(0, np.float32)


@dataclass(frozen=True, eq=False)
class Dataset:
    """One source, split into train, validation and test rows, and validated on construction.

    Without a validation part both its arrays have no rows. `classes` is None for regression. `feature_names` has one
    name per column of a two-dimensional x, and is empty otherwise; `origins` has, for each, the column of the source
    that it was encoded from, and is empty where each is its own. `domain` [rows of train] says where a row comes from,
    for the by-domain partition, `domain_test` [rows of test] likewise, to score each domain by itself
    (`test_rows_by_domain`), and `ids` str[rows of train] whose it is. `column_rules` says in which columns x may hold
    NaN, an absent value, and what is filled in once training has found it; None: in none. `table` is the schema of a
    source that is a table. `standardise` is what the source advises: true for tables. `layout` says how the arrays of a
    sample are packed in x, where it has several (`moretta.data.layout`). Raises ParameterError, naming the part and the
    column, if anything does not fit. That training rows are finite is checked by `SiloData`, which can name the silo.
    """

    name: str
    task: Task
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    x_validation: Array = field(default_factory=_no_rows)
    y_validation: Array = field(default_factory=_no_rows)
    classes: int | None = None
    feature_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    domain: Array | None = None
    domain_test: Array | None = None
    ids: NDArray[np.str_] | None = None
    column_rules: ColumnRules | None = None
    table: Schema | None = None
    groups: NDArray[np.str_] | None = None
    standardise: bool = True
    layout: SampleLayout | None = None

    def __post_init__(self) -> None:
        if self.x_validation.ndim == 1 and len(self.x_validation) == 0:  # not given: the same shape with no rows
            object.__setattr__(self, "x_validation", self.x_train[:0])
            object.__setattr__(self, "y_validation", self.y_train[:0])
        for part, x, y in self.parts():
            where = f"{self.name}: the {part} part"
            if part != "validation" and len(x) == 0:
                raise ParameterError(f"{where} has no rows; expected at least one")
            check_pair(x, y, where)
            if x.shape[1:] != self.x_train.shape[1:] or x.dtype != self.x_train.dtype:
                raise ParameterError(
                    f"{where} has samples of shape {x.shape[1:]} and type {x.dtype}, but training has "
                    f"{self.x_train.shape[1:]} and {self.x_train.dtype}; make them the same"
                )
            self._check_task(y, where)
            if part != "training":  # training rows are checked with their owners, so that the error can name one
                check_finite(x, self.feature_names, where, allow_missing=self.may_lack)
        if self.feature_names and (self.x_train.ndim != 2 or len(self.feature_names) != self.x_train.shape[1]):
            raise ParameterError(
                f"{self.name}: expected a name per column of x {self.x_train.shape}, got {len(self.feature_names)}"
            )
        if self.origins and len(self.origins) != len(self.feature_names):
            raise ParameterError(
                f"{self.name}: expected an origin per feature name ({len(self.feature_names)}), got {len(self.origins)}"
            )
        for part, domain, rows in (
            ("training", self.domain, len(self.x_train)),
            ("test", self.domain_test, len(self.x_test)),
        ):
            if domain is not None and domain.shape != (rows,):
                raise ParameterError(f"{self.name}: expected one domain per {part} row ({rows}), got {domain.shape}")
        for what, given in (("id", self.ids), ("group", self.groups)):
            if given is not None and given.shape != (len(self.x_train),):
                raise ParameterError(
                    f"{self.name}: expected one {what} per training row ({len(self.x_train)}), got {given.shape}"
                )

    @property
    def may_lack(self) -> bool:
        """Whether any value may be absent."""
        return self.column_rules is not None and self.column_rules.may_lack

    def parts(self) -> tuple[tuple[str, Array, Array], ...]:
        """The three parts as (name, x, y)."""
        return (
            ("training", self.x_train, self.y_train),
            ("test", self.x_test, self.y_test),
            ("validation", self.x_validation, self.y_validation),
        )

    @property
    def inputs(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.x_train.shape[1:]

    @property
    def outputs(self) -> int:
        """How many outputs a model needs: one per class, or one per number of a regression target."""
        if self.classes is not None:
            return self.classes
        return 1 if self.y_train.ndim == 1 else int(self.y_train.shape[1])

    def test_rows_by_domain(self) -> dict[str, NDArray[np.int64]]:
        """The row numbers of the test part of each domain, by its name in sorted order; none if the source has none.

        The test part keeps its order when it is distributed, so they are row numbers of `Distributed.test` too.
        """
        if self.domain_test is None:
            return {}
        return {str(name): np.flatnonzero(self.domain_test == name) for name in np.unique(self.domain_test)}

    def _check_task(self, y: Array, where: str) -> None:
        check_targets_finite(y, where)
        if self.task == "regression":
            if self.classes is not None or y.dtype != np.float32:
                raise ParameterError(f"{where}: regression needs float32 targets and no classes, got {y.dtype}")
            if y.shape[1:] != self.y_train.shape[1:]:
                raise ParameterError(
                    f"{where} has targets of shape {y.shape[1:]}, training has {self.y_train.shape[1:]}"
                )
        elif self.task != "classification":
            raise ParameterError(f'{where}: expected task "classification" or "regression", got "{self.task}"')
        elif self.classes is None or self.classes < 2:
            raise ParameterError(f"{where}: classification needs at least two classes, got {self.classes}")
        elif y.ndim != self.y_train.ndim or y.dtype != self.y_train.dtype:
            raise ParameterError(
                f"{where} has targets {y.dtype}{list(y.shape)}, training has {self.y_train.dtype}"
                f"{list(self.y_train.shape)}; expected classes in both, or one-hot rows in both"
            )
        elif len(y):
            check_fit(y, self.classes, where)


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
    """Raise ParameterError unless x and y have the types and shapes of `moretta.data.rows`, and as many rows."""
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


@dataclass(frozen=True, eq=False)
class Subjects:
    """Whom rows are about: str[rows], each row's id and group, None where there are none. Never shown or printed."""

    ids: NDArray[np.str_] | None = field(default=None, repr=False)
    groups: NDArray[np.str_] | None = field(default=None, repr=False)

    def named(self) -> Mapping[str, NDArray[np.str_] | None]:
        """Return both by what sentences call them."""
        return {"ids": self.ids, "groups": self.groups}
