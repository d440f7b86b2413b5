"""Seeded splits of rows into train, validation and test, stratified where the targets are classes.

A split assigns *units*: groups of rows that must stay together, such as a patient's visits, or single rows without
groups. No unit is ever on two sides.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.contract.wording import names_keywords
from moretta.data.python_rows import subjects
from moretta.data.rows import class_of
from moretta.data.tables.files import check_order
from moretta.errors import ParameterError, RowsError

log = logging.getLogger("moretta")

RowNumbers = NDArray[np.int64]


def generator(seed: int, *key: int) -> np.random.Generator:
    """Return the generator of a seeded choice: PCG64, the same on every machine, with its own stream for each key."""
    if seed < 0:
        raise ParameterError(f"expected a seed of 0 or more, got {seed}")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


@dataclass(frozen=True, eq=False)
class Units:
    """Rows in units, numbered by their first rows, so that groups' names change no split.

    Attributes:
        of: int64[rows], the unit of each row.
        sizes: int64[units], the number of rows of each.
    """

    of: RowNumbers
    sizes: RowNumbers

    def rows(self, units: RowNumbers) -> RowNumbers:
        """Return the row numbers of some units, sorted."""
        chosen = np.zeros(len(self.sizes), np.bool_)
        chosen[units] = True
        return np.flatnonzero(chosen[self.of])

    def pairs(self, values: NDArray[Any]) -> tuple[RowNumbers, RowNumbers, RowNumbers]:
        """Return each pair of a unit and a value among its rows, numbered from 0 in sorted order, and its rows."""
        names, number = np.unique(values, return_inverse=True)
        pair, count = np.unique(self.of * len(names) + number, return_counts=True)
        return *np.divmod(pair, len(names)), count

    def labels(self, labels: RowNumbers) -> RowNumbers:
        """Return each unit's class, numbered from 0: among its rows' classes the one that the fewest units have."""
        unit, label, _ = self.pairs(labels)
        order = np.lexsort((label, np.bincount(label)[label], unit))
        chosen: RowNumbers = label[order][np.unique(unit, return_index=True)[1]]
        return chosen


def units_of(rows: int, groups: NDArray[Any] | None, where: str) -> Units:
    """Return the units of `rows` rows.

    Args:
        groups: [rows] of whole numbers or strings; None makes each row a unit.
        where: The start of each error's sentence.

    Raises:
        ParameterError: `groups` is another array.
    """
    if groups is None:
        return Units(np.arange(rows), np.ones(rows, np.int64))
    if groups.shape != (rows,) or groups.dtype.kind not in "iuU":
        raise ParameterError(
            f"{where}: expected one group per row ({rows}), integers or strings, "
            f"got an array of shape {groups.shape} and type {groups.dtype}"
        )
    _, first, of = np.unique(groups, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return Units(number[of], np.bincount(number[of]))


def split(
    y: NDArray[Any], fractions: tuple[float, ...], seed: int, where: str, groups: NDArray[Any] | None = None
) -> tuple[RowNumbers, ...]:
    """Return the row numbers of one part per fraction and of the rest last, each sorted, every row exactly once.

    A part has round(fraction n) rows, with every class (int labels or one-hot rows) in proportion to within one row.
    A class with too few rows (or groups) for its share has one in each part while they last, first in training. A
    class with a single one stays in training, and a warning says so.

    Args:
        groups: [rows], each whole in one part. Sizes and proportions are then as near as whole groups allow, and a
            group counts as the class among its rows that the fewest groups have.

    Raises:
        ParameterError: fractions are outside [0, 1) or leave no rows for training, or a part gets no row.
    """
    listed = ", ".join(map(str, fractions))
    if any(not 0 <= f < 1 for f in fractions) or sum(fractions) >= 1 - 1e-9:
        raise ParameterError(f"{where}: expected fractions of 0 or more that leave rows for training, got {listed}")
    units, labels = units_of(len(y), groups, where), class_of(y)
    kinds = np.zeros(len(units.sizes), np.int64) if labels is None else units.labels(labels)
    sizes, what = [round(f * len(y)) for f in fractions], "row" if groups is None else "group"
    rng, left, parts = generator(seed), np.arange(len(units.sizes)), list[RowNumbers]()
    for number, size in enumerate(sizes):
        later = sum(map(bool, sizes[number + 1 :]))
        chosen = _in_proportion(left, kinds, units.sizes, size, later, rng)
        parts.append(units.rows(chosen))
        left = np.setdiff1d(left, chosen, assume_unique=True)
    parts.append(units.rows(left))
    if not len(left) or any(f > 0 and not len(part) for f, part in zip(fractions, parts, strict=False)):
        rows = f"{len(y)} rows" if groups is None else f"{len(y)} rows of {len(units.sizes)} groups"
        raise RowsError(
            f"{where}: {rows} cannot be split by fractions {listed}; every part needs a {what}: add rows, or change "
            "the fractions"
        )
    if labels is not None and any(sizes):
        unit, label, _ = units.pairs(labels)
        if count := int(((np.bincount(label)[label] == 1) & np.isin(unit, left)).sum()):
            single = f"{'1 class has' if count == 1 else f'{count} classes have'} rows of one {what}"
            log.warning("%s: %s alone, which stays in training: no other part has any", where, single)
    return tuple(parts)


@names_keywords()
def split_rows(
    y: Any, fractions: float | Sequence[float] = 0.2, *, groups: Any = None, seed: int = 0
) -> tuple[RowNumbers, ...]:
    """Split rows into a part to train on and one for each fraction: `train, test = split_rows(y, 0.2)`.

    Every class has the same fraction in each part. Take rows by the result: `x[train]`, `frame.iloc[test]`.

    Args:
        y: The targets [rows]: classes as numbers or words, or numbers.
        fractions: Of further parts, in (0, 1), such as (0.1, 0.2).
        groups: [rows], whom each row is about, such as its patient; all rows of a group are in one part.
        seed: Seeds the choice; 0 or more.

    Returns:
        tuple: int64 row numbers, sorted: those to train on, then each fraction's.

    Raises:
        ParameterError: Fractions leave no rows to train on, or a part has none.
    """
    check_order({"y": y, "groups": groups}, "split_rows")
    targets = np.asarray(y)
    if targets.dtype.kind not in "iuf":  # truths are classes too
        targets = np.unique(targets.astype(str), return_inverse=True)[1]
    parts_wanted = (fractions,) if isinstance(fractions, int | float) else tuple(fractions)
    whom = None if groups is None else subjects(groups, len(targets), "split_rows: groups")
    *parts, rest = split(targets, parts_wanted, seed, "split_rows", whom)
    return rest, *parts


def cut(
    order: RowNumbers, parts: int, sizes: Sequence[float] | None, rows: RowNumbers | None = None
) -> list[RowNumbers]:
    """Cut `order` into consecutive parts, near-equal or of these relative sizes, which may leave one empty.

    Each cut is where the number of rows before it is nearest to its target. So a part is off by at most the size of one
    unit.

    Args:
        rows: The number of rows of each unit of `order`; None counts one.
    """
    total = len(order) if rows is None else int(rows.sum())
    if sizes is None:
        ends = np.cumsum([total // parts + (part < total % parts) for part in range(parts)])[:-1]
    else:
        ends = np.round(np.cumsum(np.asarray(sizes, np.float64) / math.fsum(sizes)) * total).astype(np.int64)[:-1]
    places = places_of(ends, rows)
    if sizes is None:  # near-equal parts are empty only if there are fewer units than parts
        least = np.arange(1, parts)
        spare = np.maximum.accumulate(np.maximum(places - least, 0))
        places = np.minimum(spare, max(0, len(order) - parts)) + least
    return list(np.split(order, places))


def places_of(ends: RowNumbers, rows: RowNumbers | None) -> RowNumbers:
    """Return the numbers of units before cuts, so that about `ends` rows precede. rows: each unit's; None counts 1."""
    if rows is None:
        return ends
    reached = np.concatenate([[0], np.cumsum(rows)])
    above = np.searchsorted(reached, ends).clip(1, len(rows))
    return np.where(ends - reached[above - 1] <= reached[above] - ends, above - 1, above)


def _in_proportion(
    left: RowNumbers, kinds: RowNumbers, sizes: RowNumbers, size: int, later: int, rng: np.random.Generator
) -> RowNumbers:
    """Return units of about `size` rows, each class by its share. sizes: of all units. later: parts that follow."""
    orders = [rng.permutation(left[kinds[left] == kind]) for kind in np.unique(kinds[left])]
    if not size:
        return left[:0]
    counts = np.array([len(order) for order in orders])
    most = np.where(counts > 1, np.maximum(1, counts - 1 - later), 0)  # in units: at least one is left for training
    if most.sum() < size and sizes.max() == 1:  # nearly every row is a class of its own: the part has its size
        most = counts
    ascending = [np.sort(sizes[order]) for order in orders]
    highest = np.array(
        [sorted_sizes[len(sorted_sizes) - n :].sum() for sorted_sizes, n in zip(ascending, most, strict=True)]
    )
    lowest = np.array([sorted_sizes[0] if n else 0 for sorted_sizes, n in zip(ascending, most, strict=True)])
    quotas = _apportion(np.array([sorted_sizes.sum() for sorted_sizes in ascending]), size, lowest, highest)
    taken, owed = [left[:0]], 0
    for place in np.argsort(counts, kind="stable"):  # the commonest class compensates for the others
        quota = int(quotas[place])
        chosen = _nearest(orders[place], sizes, quota + owed, int(most[place]), least=quota > 0)
        owed += quota - int(sizes[chosen].sum())
        taken.append(chosen)
    return np.concatenate(taken)


def _apportion(rows: RowNumbers, total: int, lowest: RowNumbers, highest: RowNumbers) -> RowNumbers:
    """Return the rows to take of each class: its share of `total` in bounds, whole shares, then largest remainders."""
    total = min(total, int(highest.sum()))
    if lowest.sum() > total:  # more classes than the part has room for
        lowest = np.zeros_like(lowest)
    giving = np.where(highest > 0, rows, 0)
    share = giving * (total / max(1, giving.sum()))
    quota: RowNumbers = np.clip(np.floor(share + 1e-9).astype(np.int64), lowest, highest)
    # a tie between remainders is broken by the class number, so that the split is the same everywhere
    while quota.sum() < total:
        quota[np.argmax(np.where(quota < highest, share - quota, -np.inf))] += 1
    while quota.sum() > total:
        quota[np.argmax(np.where(quota > lowest, quota - share, -np.inf))] -= 1
    return quota


def _nearest(order: RowNumbers, sizes: RowNumbers, target: int, most: int, *, least: bool) -> RowNumbers:
    """Take units in order wherever their rows approach `target`; with `least`, one in any case."""
    chosen, lack = list[int](), target
    for unit, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        if lack <= 0 or len(chosen) == most:
            break
        if abs(lack - size) < lack:
            chosen.append(unit)
            lack -= size
    if not chosen and least:
        chosen = [int(order[np.argmin(sizes[order])])]
    return np.array(chosen, np.int64)
