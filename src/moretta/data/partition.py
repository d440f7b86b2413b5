"""How training rows are dealt to silos, and the silos that result.

    iid        a seeded shuffle, cut into near-equal parts (or by `sizes`)
    dirichlet  each class dealt by shares drawn from Dirichlet(alpha): the smaller alpha, the less alike the silos
    by-label   sorted by label and cut: a silo sees few classes (or a range of a regression target)
    same-rows  every silo has the same rows: of so many equal parts of all, in the source's order, the first. For tables
               of papers whose code deals rows so, and to see what is lost by it
    by-domain  whole domains (hospitals, devices) to silos, in turn; of more silos than domains each gets an equal part
               of one domain, in turn

Domains count in the sorted order of their names. The partitions grid and by-feature deal columns too: see
`moretta.data.grid`. Every row goes to exactly one silo, or to one row part of a grid, but for same-rows; the same seed
gives the same silos on every machine. Where rows have groups (a patient's visits), whole groups are dealt, and all of a
group's rows are in one silo; sizes are counted in rows and are off by at most a group.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.contract.wording import check_choice
from moretta.data.grid import deal, flat
from moretta.data.layout import SampleLayout
from moretta.data.rows import Rows, Split, check_owned, class_of
from moretta.data.settings import GRIDS, Data
from moretta.data.silo import Silo
from moretta.data.split import RowNumbers, Units, cut, generator, places_of, units_of
from moretta.data.tables.preparation import ColumnRules
from moretta.data.tables.schema import Schema
from moretta.errors import ParameterError

log = logging.getLogger("moretta")

HOW = ("iid", "dirichlet", "by-label", "same-rows", "by-domain")


@dataclass(frozen=True, eq=False)
class Distributed:
    """A source over its silos: what a run trains and is measured on.

    test, validation: None if the source has none. feature_names: of all columns; in a grid the silos have their own of
    these (`Silo.columns`), and all samples are flat. classes: how many, None for numbers. The rest: as of `Split`.
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
    """The names of silos that a run file only counts.

    >>> silo_names(2)
    ('silo-1', 'silo-2')
    """
    return tuple(f"silo-{k + 1}" for k in range(silos))


def distribute(source: Split, data: Data, seed: int = 0) -> Distributed:
    """Partition the training rows over silos as a run file says; they are named silo-1 ... .

    With "grid" and "by-feature" the silos are those of `moretta.data.grid`, named silo-1-1 ...; `sizes` has one for
    each row part. The test and the validation part are owners too. Raises ParameterError as `partition` and `deal`.
    """
    how, train = data.partition, source.train
    if how in GRIDS:
        if source.layout is not None:
            raise ParameterError(
                f'partition = "{how}" deals the columns of one array, and a sample of {source.name} has the arrays '
                f"{', '.join(source.layout.names)}; join them to one array, or deal whole rows"
            )
        source = flat(source)
        return _over(source, deal(source, data, seed))
    parts = partition(
        train.y, data.silos, how, seed, data.alpha, sizes=data.sizes, domain=train.domain, groups=train.groups
    )
    return _owned(source, dict(zip(silo_names(data.silos), parts, strict=True)))


def by_owner(source: Split, names: Sequence[str]) -> Distributed:
    """Return rows to the silos that they came from, which are the domains of the source."""
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
    """The row numbers of each silo, sorted int64, every row of the targets y exactly once (but under "same-rows").

    silos >= 1; `alpha` > 0 is for dirichlet alone, `sizes` (a positive relative size per silo) for iid and by-label,
    `domain` [rows] for by-domain. `groups` [rows] are dealt whole. Under dirichlet a group is of the class that
    `Units.labels` says, under by-label also or of its mean target, and under by-domain of the domain of most of its
    rows; a warning then says how many rows are with another domain's.
    Raises ParameterError for an unknown `how`, for arguments that do not fit, and by name for a silo left without rows.
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
            f"{units} {what} cannot be dealt to {silos} silos; use at most {units} silos or bring more {what}"
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
    """Deal each class by its own draw. A silo may get no row at all, which the caller refuses.

    With 10,000 rows of 10 classes over 100 silos, none of 200 seeds left a silo empty at alpha 1 or 0.5, where the
    smallest silo had 20 and 10 rows, but 75 did at 0.1. No rows are moved to repair that, as the distribution would no
    longer be the one asked for.
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
    """The domain of each unit, that of most of its rows, and of several the first in sorted order."""
    rows = len(units.of)
    if domain is None:
        raise ParameterError(
            'partition = "by-domain" needs the domain of each row, and this source has none; '
            'give an .npz file with an array "domain", for images set for example domains = ["plain", "rotated"], '
            "or use another partition"
        )
    if domain.shape != (rows,):
        raise ParameterError(f"expected one domain per row ({rows}), got an array of shape {domain.shape}")
    names, (unit, at, count) = np.unique(domain), units.pairs(domain)
    order = np.lexsort((at, -count, unit))
    domains: NDArray[Any] = names[at[order][np.unique(unit, return_index=True)[1]]]
    if moved := int((domains[units.of] != domain).sum()):
        log.warning(
            "by-domain: %d rows are dealt with another domain than theirs, as most rows of their group are of it", moved
        )
    return domains


def _by_domain(domain: NDArray[Any], sizes: RowNumbers, silos: int, rng: np.random.Generator) -> list[RowNumbers]:
    """Silo k has the domains k, k + silos, ...; of more silos than domains an equal part of domain k modulo them."""
    names, number = np.unique(domain, return_inverse=True)
    if silos <= len(names):
        return [np.flatnonzero(number % silos == k) for k in range(silos)]
    parts: list[RowNumbers] = [np.empty(0, np.int64)] * silos
    for d in range(len(names)):
        sharers, order = range(d, silos, len(names)), rng.permutation(np.flatnonzero(number == d))
        for k, part in zip(sharers, cut(order, len(sharers), None, sizes[order]), strict=True):
            parts[k] = part
    return parts
