"""From what a source gave (a table, arrays, with or without a test part) to a checked `Dataset`."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moretta.contract.lazy_rows import taken
from moretta.contract.messages import Array
from moretta.data.images.folder import LabelledImages
from moretta.data.images.pixels import ImageForm
from moretta.data.images.sets import scaled
from moretta.data.layout import SampleLayout, packed_parts
from moretta.data.rows import Dataset, as_features, as_targets
from moretta.data.split import RowNumbers, split
from moretta.data.tables.inference import Missing, Task
from moretta.data.tables.preparation import ColumnRules
from moretta.data.tables.rows import TableRows, expansion_of, rules_of
from moretta.data.tables.schema import Number, Schema
from moretta.errors import ParameterError


@dataclass(frozen=True)
class Wish:
    """What the run file says about rows and targets, for any source."""

    name: str
    task: Task | None
    test: float
    validation: float
    missing: Missing
    seed: int


def from_table(rows: TableRows, table: Schema, wish: Wish, *, domain: Array | None = None) -> Dataset:
    """A table that was read by its schema, split by the wished fractions; domain: [rows], split in proportion too."""
    (y, task, classes), parts = _targets_of(rows.y, table, wish), None
    if domain is not None:
        strata = np.unique(domain, return_inverse=True)[1] * (classes or 1) + (y if classes else 0)
        test, validation, train = split(strata, (wish.test, wish.validation), wish.seed, wish.name, rows.groups)
        parts = test, validation, train
    expansion = expansion_of(table)
    return split_rows(
        wish,
        rows.x,
        y,
        task,
        classes,
        feature_names=expansion.names,
        origins=expansion.origins,
        class_names=table.classes if classes else (),
        domain=domain,
        ids=rows.ids,
        groups=rows.groups,
        column_rules=rules_of(table),
        table=table,
        parts=parts,
    )


def from_images(images: LabelledImages, table: Schema, wish: Wish) -> Dataset:
    """Images that a table with this schema names, split by the wished fractions."""
    y, task, classes = _targets_of(images.y, table, wish)
    return split_rows(
        wish,
        images.x,
        y,
        task,
        classes,
        class_names=table.classes if classes else (),
        table=table,
        ids=images.ids,
        groups=images.groups,
        standardise=False,
    )


def _targets_of(y: Array, table: Schema, wish: Wish) -> tuple[Array, Task, int | None]:
    """Return targets as wished, or as the schema has them: what they are, the task, and how many classes there are."""
    task: Task = wish.task or ("classification" if table.classes else "regression")
    if task == "classification" and not table.classes:
        raise ParameterError(
            f'{wish.name}: task = "classification" needs a target with classes, which the schema lists'
        )
    if task == "classification":
        return y, task, len(table.classes)
    return as_targets(y, wish.name, "regression")


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
    column_rules: ColumnRules | None = None,
    table: Schema | None = None,
    domain: Array | None = None,
    ids: Array | None = None,
    groups: Array | None = None,
    standardise: bool = True,
    layout: SampleLayout | None = None,
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
        ids=_texts(ids, train),
        groups=_texts(groups, train),
        column_rules=column_rules,
        table=table,
        standardise=standardise,
        layout=layout,
    )


def from_arrays(arrays: Mapping[str, Array], wish: Wish) -> Dataset:
    """Arrays x_train, y_train, x_test, y_test, or x and y to be split.

    In the place of x there may be several arrays, ``x.ids``, ``x.mask`` and so on, which are packed
    (`moretta.data.layout`). Optionally also domain_train, domain_test, id_train, id_test, group_train and group_test,
    or domain, id and group, [rows] each. A group is all in one part, and no id or group of training rows is among those
    of test rows.
    Raises ParameterError if the arrays are others or do not fit together.
    """
    arrays, layout = packed_parts(arrays, wish.name)
    if layout is not None and wish.missing != "error":
        raise ParameterError(
            f'{wish.name}: missing = "{wish.missing}" is for one table, and a sample here has the arrays '
            f"{', '.join(layout.names)}; fill in their absent values beforehand"
        )
    if {"x_train", "y_train", "x_test", "y_test"} <= arrays.keys():
        return from_parts(arrays, wish, layout=layout)
    if not {"x", "y"} <= arrays.keys():
        raise ParameterError(
            f"{wish.name}: expected arrays x_train, y_train, x_test, y_test, or x and y; "
            f"got {', '.join(arrays) or 'none'}"
        )
    x = as_features(arrays["x"], wish.name)
    x, names, rules = _lacking(x, wish.missing)
    y, task, classes = as_targets(arrays["y"], wish.name, wish.task)
    _check_rows(wish.name, x, y)
    return split_rows(
        wish,
        x,
        y,
        task,
        classes,
        feature_names=() if layout else names,
        column_rules=rules,
        domain=arrays.get("domain"),
        ids=arrays.get("id"),
        groups=arrays.get("group"),
        standardise=_is_table(x, wish.name),
        layout=layout,
    )


def from_parts(
    arrays: Mapping[str, Array],
    wish: Wish,
    *,
    pixels: ImageForm | None = None,
    class_names: tuple[str, ...] = (),
    layout: SampleLayout | None = None,
) -> Dataset:
    """A source with a test part; the task is decided on all targets together, so that both parts have the same."""
    y_train, y_test = arrays["y_train"], arrays["y_test"]
    if y_train.shape[1:] != y_test.shape[1:] or y_train.ndim == 0:
        raise ParameterError(f"{wish.name}: y_train {list(y_train.shape)} and y_test {list(y_test.shape)} do not match")
    y, task, classes = as_targets(np.concatenate([y_train, y_test]), wish.name, wish.task)
    y_train, y_test = y[: len(y_train)], y[len(y_train) :]
    if pixels is not None:
        x, x_test = (pixels.standardised(scaled(arrays[key])) for key in ("x_train", "x_test"))
    else:
        x, x_test = (as_features(arrays[key], f"{wish.name}: {key}") for key in ("x_train", "x_test"))
    _check_rows(wish.name, x, y_train)
    names, rules, rows = _numbered(x), None, len(x)
    if wish.missing != "error" and x.shape[1:] == x_test.shape[1:]:
        both, names, rules = _lacking(np.concatenate([x, x_test]), wish.missing)
        x, x_test = both[:rows], both[rows:]
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
        feature_names=() if layout else names,
        class_names=class_names if task == "classification" else (),
        domain=_domain(arrays.get("domain_train"), len(x), wish.name, train),
        domain_test=arrays.get("domain_test"),
        ids=_texts(ids, train),
        groups=_texts(groups, train),
        column_rules=rules,
        standardise=_is_table(x, wish.name),
        layout=layout,
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


def _lacking(x: Array, missing: Missing) -> tuple[Array, tuple[str, ...], ColumnRules | None]:
    """Arrays whose values may be absent, NaN: with marks of absence where they are wanted, and what is filled in."""
    names = _numbered(x)
    if missing == "error" or not names or x.dtype.kind != "f":
        return x, names, None
    if missing == "median":
        raise ParameterError(
            'missing = "median": a median is counted within a range, which only the schema of a table declares; set '
            'missing = "mean"'
        )
    table = Schema(columns={name: _column(x[:, place], missing) for place, name in enumerate(names)})
    expansion = expansion_of(table)
    return expansion.apply(x), expansion.names, rules_of(table)


def _column(values: Array, missing: Missing) -> Number:
    """What is filled in where a value of an array's column is absent."""
    there = values[np.isfinite(values)]
    marked = missing == "indicator" and len(there) < len(values)
    return Number(blanks="indicator" if marked else "mean")


def _is_table(x: Array, name: str) -> bool:
    """Whether to standardise by default: tables of numbers do, the arrays of a user's function do not."""
    return x.ndim == 2 and x.dtype.kind == "f" and name.endswith(".npz")
