"""The assignment of training rows to silos, and the silos that result. `Data.partition` lists the methods.

"by-label" cuts a range of a regression target as it cuts classes. "same-rows" is for tables of papers whose code
assigns rows so, and to measure its loss. "grid" cuts rows and columns into near-equal parts, in their order;
"by-feature" has the columns of each part named.

Domains count in the sorted order of their names. Every row belongs to exactly one silo, or to one row part of a grid,
except under same-rows; the same seed has the same silos on every machine. Where rows have groups (a patient's visits),
all of a group's rows are in one silo; sizes count rows and are off by at most a group.

A grid assigns rows as iid does. A column is one number of a sample, so samples of several axes are flattened. Every
participant gets the targets of its rows here; `Silo.labelled` marks the one that may use them.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.contract.lazy_rows import loaded
from moretta.contract.wording import check_choice, did_you_mean, first_of
from moretta.data.layout import SampleLayout
from moretta.data.rows import Rows, Split, check_owned, class_of
from moretta.data.settings import GRIDS, Data, label_holders, shape_of_grid
from moretta.data.silo import Silo
from moretta.data.split import RowNumbers, Units, cut, generator, places_of, units_of
from moretta.data.tables.preparation import ColumnRules
from moretta.data.tables.schema import Schema
from moretta.errors import ParameterError

log = logging.getLogger("moretta")

HOW = ("iid", "dirichlet", "by-label", "same-rows", "by-domain")


@dataclass(frozen=True, eq=False)
class Distributed:
    """A source assigned to its silos, with the rows that score a run. Further fields are as in `Split`.

    Attributes:
        test, validation: None for a source without them.
        feature_names: The names of all columns. In a grid each silo has some of them (`Silo.columns`), and all samples
            are flat.
        classes: The number of classes; None for numbers as targets.
    """

    silos: Sequence[Silo]
    test: Rows | None
    validation: Rows | None
    feature_names: tuple[str, ...]
    class_names: tuple[str, ...]
    column_rules: ColumnRules | None
    table: Schema | None
    classes: int | None
    outputs: int
    standardise: bool = True
    layout: SampleLayout | None = None


def silo_names(silos: int) -> tuple[str, ...]:
    """Return the names of silos that a run file only counts.

    >>> silo_names(2)
    ('silo-1', 'silo-2')
    """
    return tuple(f"silo-{k + 1}" for k in range(silos))


def distribute(source: Split, data: Data, seed: int = 0) -> Distributed:
    """Assign the training rows to silos as in a run file; they are named silo-1 ... .

    With "grid" and "by-feature" the silos are those of `deal`, named silo-1-1 ...; `sizes` has one for each row part.
    The test and the validation part are owners too.

    Raises:
        ParameterError: The rows do not suit the partition (`partition`, `deal`).
    """
    how, train = data.partition, source.train
    if how in GRIDS:
        if source.layout is not None:
            raise ParameterError(
                f'partition = "{how}" splits the columns of one array, but a sample of {source.name} has the arrays '
                f"{', '.join(source.layout.names)}; join them into one array, or split whole rows"
            )
        source = flat(source)
        return _over(source, deal(source, data, seed))
    parts = partition(
        train.y, data.silos, how, seed, data.alpha, sizes=data.sizes, domain=train.domain, groups=train.groups
    )
    return _owned(source, dict(zip(silo_names(data.silos), parts, strict=True)))


def by_owner(source: Split, names: Sequence[str]) -> Distributed:
    """Return rows to their original silos, which are the domains of the source."""
    return _owned(source, {name: np.flatnonzero(source.train.domain == name) for name in names})


def _owned(source: Split, parts: Mapping[str, RowNumbers]) -> Distributed:
    silos = []
    for name, numbers in parts.items():
        rows = source.train.of(numbers)
        check_owned(rows, name, source.feature_names, may_lack=source.may_lack)
        silos.append(Silo(name, rows.x, rows.y, ids=rows.ids, groups=rows.groups, layout=source.layout))
    return _over(source, tuple(silos))


def _over(source: Split, silos: tuple[Silo, ...]) -> Distributed:
    test, validation = (part if len(part) else None for part in (source.test, source.validation))
    names, of = (source.feature_names, source.class_names), (source.classes, source.outputs)
    rules = source.column_rules, source.table
    return Distributed(silos, test, validation, *names, *rules, *of, source.standardise, source.layout)


def partition(
    y: NDArray[Any],
    silos: int,
    how: str,
    seed: int,
    alpha: float | None = None,
    *,
    sizes: Sequence[float] | None = None,
    domain: NDArray[Any] | None = None,
    groups: NDArray[Any] | None = None,
) -> list[RowNumbers]:
    """Return the row numbers of each silo, sorted int64; every row of y exactly once, except under "same-rows".

    Args:
        silos: 1 or more.
        alpha: above 0, for dirichlet only.
        sizes: a positive relative size per silo, for iid and by-label.
        domain: [rows], for by-domain.
        groups: [rows], dealt whole. Under dirichlet and by-label a group has the class of `Units.labels`, or under
            by-label its mean target. Under by-domain it has the domain of most of its rows; a warning counts the rows
            that go to another domain's silo.

    Raises:
        ParameterError: an unknown `how`, arguments that do not fit, or a silo, by its name, without rows.
    """
    units = units_of(len(y), groups, "groups")
    _check(len(units.sizes), silos, how, sizes, "rows" if groups is None else "groups")
    rng = generator(seed)
    if how == "dirichlet":
        if (labels := class_of(y)) is None:
            raise ParameterError(
                f'partition = "{how}" needs classes, but this is a regression; use "iid" or "by-label"'
            )
        parts = _dirichlet(units.labels(labels), units.sizes, silos, alpha or 1.0, rng)
    elif how == "same-rows":
        parts = [cut(np.arange(len(units.sizes)), silos, None, units.sizes)[0]] * silos
    elif how == "by-domain":
        parts = _by_domain(_domains(domain, units), units.sizes, silos, rng)
    else:
        order = rng.permutation(len(units.sizes))
        if how == "by-label":
            order = order[np.argsort(_sortable(y, units)[order], kind="stable")]
        parts = cut(order, silos, sizes, units.sizes[order])
    empty = [name for name, part in zip(silo_names(silos), parts, strict=True) if len(part) == 0]
    if empty:
        raise ParameterError(f"{', '.join(empty)} would have no rows ({how}, {len(y)} rows); {_way_out(how, alpha)}")
    return [units.rows(part) for part in parts]


def _check(units: int, silos: int, how: str, sizes: Sequence[float] | None, what: str) -> None:
    check_choice("partition", how, (*HOW, *GRIDS))
    if silos > units:
        raise ParameterError(
            f"{units} {what} cannot be dealt to {silos} silos; use at most {units} silos or more {what}"
        )
    if sizes is None:
        return
    if how not in ("iid", "by-label"):
        raise ParameterError(f'sizes are for partition = "iid" and "by-label", not for "{how}"; remove them')
    if len(sizes) != silos:
        raise ParameterError(f"expected a positive size for each of {silos} silos, got {list(sizes)}")


def _way_out(how: str, alpha: float | None) -> str:
    if how == "dirichlet":
        return f"use fewer silos, an alpha above {alpha:g} or another seed"
    return f"use fewer silos or {'bring more rows of a domain' if how == 'by-domain' else 'less unequal sizes'}"


def _sortable(y: NDArray[Any], units: Units) -> NDArray[Any]:
    labels = class_of(y)
    if labels is not None:
        return units.labels(labels)
    if y.ndim > 1:
        raise ParameterError(f'partition = "by-label" needs one target per row, got {y.shape[1]}; use "iid"')
    return np.bincount(units.of, weights=y) / units.sizes


def _dirichlet(
    labels: RowNumbers, sizes: RowNumbers, silos: int, alpha: float, rng: np.random.Generator
) -> list[RowNumbers]:
    """Assign each class by its own draw. A silo may get no row, which the caller refuses.

    With 10,000 rows of 10 classes over 100 silos, none of 200 seeds left a silo empty at alpha 1 or 0.5, where the
    smallest silo had 20 and 10 rows. At alpha 0.1, 75 of 200 did. No rows are moved to avoid that, because the
    distribution would no longer be the requested one.
    """
    parts: list[list[RowNumbers]] = [[] for _ in range(silos)]
    for label in np.unique(labels):
        order = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(silos, alpha))
        ends = np.round(np.cumsum(shares) * sizes[order].sum()).astype(np.int64)
        for part, dealt in zip(parts, np.split(order, places_of(ends[:-1], sizes[order])), strict=True):
            part.append(dealt)
    return [np.concatenate(part) for part in parts]


def _domains(domain: NDArray[Any] | None, units: Units) -> NDArray[Any]:
    """Return the domain of each unit: that of most of its rows, and in a tie the first in sorted order."""
    rows = len(units.of)
    if domain is None:
        raise ParameterError(
            'partition = "by-domain" needs the domain of each row, which this source lacks; use an .npz file with an '
            'array "domain", set domains for images, for example ["plain", "rotated"], or use another partition'
        )
    if domain.shape != (rows,):
        raise ParameterError(f"expected one domain per row ({rows}), got an array of shape {domain.shape}")
    names, (unit, at, count) = np.unique(domain), units.pairs(domain)
    order = np.lexsort((at, -count, unit))
    domains: NDArray[Any] = names[at[order][np.unique(unit, return_index=True)[1]]]
    if moved := int((domains[units.of] != domain).sum()):
        log.warning(
            "by-domain: %d rows go to another domain's silo, because most rows of their group are of that domain", moved
        )
    return domains


def _by_domain(domain: NDArray[Any], sizes: RowNumbers, silos: int, rng: np.random.Generator) -> list[RowNumbers]:
    """Give silo k the domains k, k + silos, ...; with more silos an equal part of domain k modulo the domains."""
    names, number = np.unique(domain, return_inverse=True)
    if silos <= len(names):
        return [np.flatnonzero(number % silos == k) for k in range(silos)]
    parts: list[RowNumbers] = [np.empty(0, np.int64)] * silos
    for d in range(len(names)):
        sharers, order = range(d, silos, len(names)), rng.permutation(np.flatnonzero(number == d))
        for k, part in zip(sharers, cut(order, len(sharers), None, sizes[order]), strict=True):
            parts[k] = part
    return parts


Columns = Sequence[Sequence[str | int]]  # of each column part: features by name, or columns by index from 0


def flat(source: Split) -> Split:
    """Return the source with samples flattened to [n, d]."""
    if source.train.x.ndim == 2:
        return source
    train, test, validation = (
        replace(rows, x=loaded(rows.x).reshape(len(rows), math.prod(rows.x.shape[1:])))
        for rows in source.parts().values()
    )
    return replace(source, train=train, test=test, validation=validation)


def deal(source: Split, data: Data, seed: int) -> tuple[Silo, ...]:
    """Return the participants silo-1-1, silo-1-2, ... of a flat source, by row part and then by column part.

    Raises:
        ParameterError: Columns or sizes do not fit the source.
    """
    (m_h, m_v), holders = shape_of_grid(data), label_holders(data)
    dealt, parts = _row_parts(source, m_h, data.sizes, seed), _column_parts(source, m_v, data.columns)
    participants: list[Silo] = []
    for i, (mine, holder) in enumerate(zip(dealt, holders, strict=True), 1):
        rows, row = source.train.of(mine), f"row-{i}"
        for j, own in enumerate(parts, 1):
            name, x = f"silo-{i}-{j}", np.take(rows.x, own, axis=1)
            names = tuple(source.feature_names[column] for column in own) if source.feature_names else ()
            check_owned(replace(rows, x=x), name, names, may_lack=source.may_lack)
            silo = partial(Silo, name, x, rows.y, row, tuple(own), rows.ids, groups=rows.groups)
            participants.append(silo(labelled=j == holder, aligned=True, names=names))  # all rows are from one table
    return tuple(participants)


def _row_parts(source: Split, parts: int, sizes: Sequence[float] | None, seed: int) -> list[RowNumbers]:
    """Assign rows as "iid" does to `parts` silos; errors name row parts."""
    rows = len(source.train)
    units = units_of(rows, source.train.groups, "groups")
    what = "training rows" if source.train.groups is None else "groups"
    if parts > (most := len(units.sizes)):
        raise ParameterError(f"{most} {what} cannot be cut into {parts} row parts; use at most {most} row parts")
    if sizes is not None and len(sizes) != parts:
        raise ParameterError(f"expected a positive size for each of {parts} row parts, got {list(sizes)}")
    order = generator(seed).permutation(most)
    dealt = cut(order, parts, sizes, units.sizes[order])
    empty = [f"row-{number}" for number, part in enumerate(dealt, 1) if len(part) == 0]
    if empty:
        raise ParameterError(
            f"{', '.join(empty)} would have no rows ({rows} rows); use fewer row parts or less unequal sizes"
        )
    return [units.rows(part) for part in dealt]


def _column_parts(source: Split, parts: int, columns: Columns | None) -> list[list[int]]:
    """Return the columns of each part, ascending, with every column of the samples exactly once."""
    width = source.inputs[0]
    if columns is None:
        if parts > width:
            raise ParameterError(
                f"{width} columns cannot be cut into {parts} column parts; use at most {width} column parts"
            )
        return [part.tolist() for part in np.array_split(np.arange(width), parts)]
    names = [repr(name) for name in source.feature_names] or [str(column) for column in range(width)]
    origins = source.origins or source.feature_names
    named: dict[str, list[int]] = {}  # a column of the source has all inputs encoded from it, a feature is itself
    for column, origin in enumerate(origins):
        named.setdefault(origin, []).append(column)
    for column, name in enumerate(source.feature_names):
        named.setdefault(name, [column])
    part_of: dict[int, int] = {}
    for number, part in enumerate(columns, 1):
        for entry in part:
            for column in _meant(entry, named, origins, width):
                if column in part_of:
                    raise ParameterError(
                        f"columns overlap: {names[column]} is in part {part_of[column]} and again in part {number}; "
                        "name every column once"
                    )
                part_of[column] = number
    if len(part_of) < width:
        # By the source's name, if no part has anything that was encoded from it.
        begun = {origins[column] for column in part_of} if origins else set()
        left = [column for column in range(width) if column not in part_of]
        whole = {column: repr(origins[column]) for column in left if origins and origins[column] not in begun}
        missing = list(dict.fromkeys(whole.get(column, names[column]) for column in left))
        raise ParameterError(f"columns are missing: {first_of(missing, 3)} would be in no part; add them to one")
    return [sorted(column for column, of in part_of.items() if of == number) for number in range(1, parts + 1)]


def _meant(entry: str | int, named: dict[str, list[int]], origins: tuple[str, ...], width: int) -> list[int]:
    if not isinstance(entry, str):
        if not 0 <= entry < width:
            raise ParameterError(f"columns: there is no column {entry}; expected 0 to {width - 1}")
        return [entry]
    if entry in named:
        return named[entry]
    if not named:
        raise ParameterError(
            f'columns: "{entry}" is a name, but these columns have no names; use indices from 0 to {width - 1}'
        )
    raise ParameterError(f'columns: there is no column "{entry}"; {did_you_mean(entry, set(origins))}')
