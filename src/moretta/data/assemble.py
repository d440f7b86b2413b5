"""From what a source gave (a table, arrays, with or without a test part) to a checked `Dataset`."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


def from_table(table: Table, wish: Wish, groups: Array | None = None) -> Dataset:
    """A table that was read, split by the wished fractions. groups: [rows], which rows stay together."""
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
        groups=groups,
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
    groups: Array | None = None,
    standardise: bool = True,
    parts: tuple[RowNumbers, RowNumbers, RowNumbers] | None = None,
) -> Dataset:
    """A source without a test part: one is drawn (or given as `parts`: test, validation, train).

    ids, groups: [rows] of whole numbers or strings. No two rows have one id, and no group is in two parts.
    """
    _check_distinct(ids, len(x), wish.name)
    test, validation, train = parts or split(y, (wish.test, wish.validation), wish.seed, wish.name, groups)
    return Dataset(
        name=wish.name,
        task=task,
        x_train=x[train],
        y_train=y[train],
        x_test=x[test],
        y_test=y[test],
        x_validation=x[validation],
        y_validation=y[validation],
        classes=classes,
        feature_names=feature_names,
        class_names=class_names,
        origins=origins,
        domain=_domain(domain, len(x), wish.name, train),
        domain_test=_domain(domain, len(x), wish.name, test),
        ids=_texts(ids, train),
        groups=_texts(groups, train),
        missing=wish.missing,
        missing_columns=missing_columns,
        standardise=standardise,
    )


def from_arrays(arrays: Mapping[str, Array], wish: Wish) -> Dataset:
    """Arrays x_train, y_train, x_test, y_test, or x and y to be split.

    Optionally also domain_train, domain_test, id_train, id_test, group_train and group_test, or domain, id and group,
    [rows] each. A group is all in one part, and no id or group of training rows is among those of test rows.
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
        groups=arrays.get("group"),
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
    ids, groups = arrays.get("id_train"), arrays.get("group_train")
    _check_distinct(ids, len(x), wish.name)
    validation, train = split(y_train, (wish.validation,), wish.seed, wish.name, groups)
    for what, own in (("id", ids), ("group", groups)):
        check_apart(own, arrays.get(f"{what}_test"), len(x_test), f"{wish.name}: {what}", "test")
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
        ids=_texts(ids, train),
        groups=_texts(groups, train),
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


def _check_distinct(ids: Array | None, rows: int, name: str) -> None:
    """Raise ParameterError unless there is an id for each of the rows, and no two of them have the same."""
    if ids is None:
        return
    if ids.shape != (rows,) or ids.dtype.kind not in "iuU":
        raise ParameterError(
            f"{name}: expected one id per row ({rows}), integers or strings, "
            f"got an array of shape {ids.shape} and type {ids.dtype}"
        )
    distinct = len(np.unique(ids))
    if distinct < rows:
        raise ParameterError(
            f"{name}: {rows} rows have {distinct} different ids; give each row an id of its own, and where one person "
            "or thing has several rows, say so by a group"
        )


def check_apart(train: Array | None, held: Array | None, rows: int, where: str, part: str) -> None:
    """Raise ParameterError if any id or group of training rows is among those of another part, `held` [its rows]."""
    if held is not None and held.shape != (rows,):
        raise ParameterError(f"{where}_{part}: expected one per {part} row ({rows}), got shape {list(held.shape)}")
    if train is None or held is None:
        return
    shared = int(np.isin(held.astype(np.str_), train.astype(np.str_)).sum())
    if shared:
        raise ParameterError(
            f"{where}: {shared} of {rows} {part} rows have one that training rows have too, so the {part} part would "
            "not tell how the model does on new ones; put all rows of each in one part"
        )


def _texts(values: Array | None, part: RowNumbers) -> NDArray[np.str_] | None:
    """The ids or groups of the rows of one part, as strings."""
    return None if values is None else values.astype(np.str_)[part]


def _numbered(x: Array) -> tuple[str, ...]:
    return tuple(f"x{j}" for j in range(x.shape[1])) if x.ndim == 2 else ()


def _absent(x: Array, missing: MissingValues) -> tuple[int, ...]:
    return () if missing == "error" or x.ndim != 2 or x.dtype.kind != "f" else absent_columns(x)


def _is_table(x: Array, name: str) -> bool:
    """Whether to standardise by default: tables of numbers do, the arrays of a user's function do not."""
    return x.ndim == 2 and x.dtype.kind == "f" and name.endswith(".npz")
