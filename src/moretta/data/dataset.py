"""What a loader returns: arrays that were checked once, and their task.

    Dataset    train, validation and test rows of one source, before they are split over silos
    SiloData   one owner's rows

Samples `x` are float32[n, ...], or int64[n, ...] for token ids. Targets `y` are

    int64[n]              classes 0 .. classes - 1             (classification)
    float32[n, classes]   one-hot rows                         (classification; accuracy by argmax)
    float32[n] or [n, k]  numbers, k outputs                   (regression)
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.data.checks import check_finite, check_fit, check_pair, check_targets_finite
from moretta.data.layout import SampleLayout
from moretta.data.tables.inference import Task
from moretta.data.tables.preparation import ColumnRules
from moretta.data.tables.schema import Schema
from moretta.errors import ParameterError


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
