"""From what a source gave (a table, arrays, with or without a test part) to a checked `Dataset`."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moretta.contract.lazy_rows import taken
from moretta.contract.messages import Array
from moretta.data.checks import as_features, as_targets
from moretta.data.dataset import Dataset
from moretta.data.images.sets import scaled
from moretta.data.split import RowNumbers, split
from moretta.data.tables.table import MissingValues, Table, Task, absent_columns
from moretta.errors import ParameterError


@dataclass(frozen=True)
class Wish:
    """What the run file says about rows and targets, for any source."""

    name: str
    task: Task | None
    test: float
    validation: float
    missing: MissingValues
    seed: int


def from_table(table: Table, wish: Wish) -> Dataset:
    """A table that was read, split by the wished fractions."""
    y, task, classes = as_targets(table.y, wish.name, wish.task)
    return split_rows(
        wish,
        table.x,
        y,
        task,
        classes,
        feature_names=table.names,
        origins=table.origins,
        class_names=table.class_names if task == "classification" else (),
        missing_columns=table.missing_columns,
        ids=table.ids,
    )


def split_rows(
    wish: Wish,
    x: Array,
    y: Array,
    task: Task,
    classes: int | None,
    *,
    feature_names: tuple[str, ...] = (),
    origins: tuple[str, ...] = (),
    class_names: tuple[str, ...] = (),
    missing_columns: tuple[int, ...] = (),
    domain: Array | None = None,
    ids: Array | None = None,
    standardise: bool = True,
    parts: tuple[RowNumbers, RowNumbers, RowNumbers] | None = None,
) -> Dataset:
    """A source without a test part: one is drawn (or given as `parts`: test, validation, train)."""
    test, validation, train = parts or split(y, (wish.test, wish.validation), wish.seed, wish.name)
    return Dataset(
        name=wish.name,
        task=task,
        x_train=taken(x, train),
        y_train=y[train],
        x_test=taken(x, test),
        y_test=y[test],
        x_validation=taken(x, validation),
        y_validation=y[validation],
        classes=classes,
        feature_names=feature_names,
        class_names=class_names,
        origins=origins,
        domain=_domain(domain, len(x), wish.name, train),
        domain_test=_domain(domain, len(x), wish.name, test),
        ids=_ids(ids, len(x), wish.name, train),
        missing=wish.missing,
        missing_columns=missing_columns,
        standardise=standardise,
    )


def from_arrays(arrays: Mapping[str, Array], wish: Wish) -> Dataset:
    """Arrays x_train, y_train, x_test, y_test, or x and y to be split.

    Optionally also domain_train, domain_test and id_train, or domain and id, [rows] each.
    Raises ParameterError if the arrays are others or do not fit together.
    """
    if {"x_train", "y_train", "x_test", "y_test"} <= arrays.keys():
        return from_parts(arrays, wish)
    if not {"x", "y"} <= arrays.keys():
        raise ParameterError(
            f"{wish.name}: expected arrays x_train, y_train, x_test, y_test, or x and y; "
            f"got {', '.join(arrays) or 'none'}"
        )
    x = as_features(arrays["x"], wish.name)
    y, task, classes = as_targets(arrays["y"], wish.name, wish.task)
    _check_rows(wish.name, x, y)
    return split_rows(
        wish,
        x,
        y,
        task,
        classes,
        feature_names=_numbered(x),
        domain=arrays.get("domain"),
        ids=arrays.get("id"),
        missing_columns=_absent(x, wish.missing),
        standardise=_is_table(x, wish.name),
    )


def from_parts(
    arrays: Mapping[str, Array], wish: Wish, *, pixels: bool = False, class_names: tuple[str, ...] = ()
) -> Dataset:
    """A source with a test part; the task is decided on all targets together, so that both parts have the same."""
    y_train, y_test = arrays["y_train"], arrays["y_test"]
    if y_train.shape[1:] != y_test.shape[1:] or y_train.ndim == 0:
        raise ParameterError(f"{wish.name}: y_train {list(y_train.shape)} and y_test {list(y_test.shape)} do not match")
    y, task, classes = as_targets(np.concatenate([y_train, y_test]), wish.name, wish.task)
    y_train, y_test = y[: len(y_train)], y[len(y_train) :]
    if pixels:
        x, x_test = scaled(arrays["x_train"]), scaled(arrays["x_test"])
    else:
        x, x_test = (as_features(arrays[key], f"{wish.name}: {key}") for key in ("x_train", "x_test"))
    _check_rows(wish.name, x, y_train)
    validation, train = split(y_train, (wish.validation,), wish.seed, wish.name)
    same = len(train) == len(x)  # then nothing is copied: image sets are large
    return Dataset(
        name=wish.name,
        task=task,
        x_train=x if same else x[train],
        y_train=y_train[train],
        x_test=x_test,
        y_test=y_test,
        x_validation=x[validation],
        y_validation=y_train[validation],
        classes=classes,
        feature_names=_numbered(x),
        class_names=class_names if task == "classification" else (),
        domain=_domain(arrays.get("domain_train"), len(x), wish.name, train),
        domain_test=arrays.get("domain_test"),
        ids=_ids(arrays.get("id_train"), len(x), wish.name, train),
        missing=wish.missing,
        missing_columns=tuple(sorted({*_absent(x, wish.missing), *_absent(x_test, wish.missing)})),
        standardise=_is_table(x, wish.name),
    )


def _check_rows(name: str, x: Array, y: Array) -> None:
    if len(x) != len(y) or not len(x):
        raise ParameterError(
            f"{name} has {len(x)} samples and {len(y)} targets; expected as many of each, at least one"
        )


def _domain(domain: Array | None, rows: int, name: str, part: RowNumbers) -> Array | None:
    """The domains of the rows of one part, out of those of all `rows`."""
    if domain is None:
        return None
    if domain.shape != (rows,):
        raise ParameterError(f"{name}: expected one domain per row ({rows}), got an array of shape {domain.shape}")
    return domain[part]


def _ids(ids: Array | None, rows: int, name: str, train: RowNumbers) -> NDArray[np.str_] | None:
    """The ids of the training rows as strings, out of those of all `rows`, of which no two may be the same."""
    if ids is None:
        return None
    if ids.shape != (rows,) or ids.dtype.kind not in "iuU":
        raise ParameterError(
            f"{name}: expected one id per row ({rows}), integers or strings, "
            f"got an array of shape {ids.shape} and type {ids.dtype}"
        )
    texts = ids.astype(np.str_)
    distinct, count = np.unique(texts, return_counts=True)
    if len(distinct) < rows:
        raise ParameterError(
            f"{name}: {count.max()} rows have the id {str(distinct[count.argmax()])!r}; give each row an id of its own"
        )
    return texts[train]


def _numbered(x: Array) -> tuple[str, ...]:
    return tuple(f"x{j}" for j in range(x.shape[1])) if x.ndim == 2 else ()


def _absent(x: Array, missing: MissingValues) -> tuple[int, ...]:
    return () if missing == "error" or x.ndim != 2 or x.dtype.kind != "f" else absent_columns(x)


def _is_table(x: Array, name: str) -> bool:
    """Whether to standardise by default: tables of numbers do, the arrays of a user's function do not."""
    return x.ndim == 2 and x.dtype.kind == "f" and name.endswith(".npz")
