"""A look at rows before training: their number, absent values, and the distribution of values and classes.

    look_at(owners, ...)   -> Look      exact counts, at each owner
    Look.plain(...)         -> plain     what may be shown, small counts withheld

A minimum or maximum is one person's value, so the look shows neither. A column's range is the one that the schema
declares, or approximately the 5 % to the 95 % quantile of all values. The first and last bins are open.

**Small counts** are not shown, and cannot be computed by subtraction. A variable's cells (classes, bins, blanks) add up
to its rows, over all silos and at each silo. A count below `least` is shown as "fewer than 5". Where the sum minus the
shown counts would reveal it, larger counts are "withheld" too, the smallest first. Each small count may then be
anything from 0 to 4, as "fewer than 5" states. By silo both kinds look the same, and a cell is withheld at all silos or
none. Not hidden: anyone who knows how the further cells are chosen, or knows rows of a table, can narrow counts down.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.contract.wording import LEAST_SHOWN, first_of
from moretta.data.rows import class_of
from moretta.data.silo import Silo
from moretta.data.tables.preparation import ColumnRules
from moretta.data.tables.rows import expansion_of, limits_of
from moretta.data.tables.schema import Category, Date, Number, Ordered, Schema

Counts = NDArray[np.int64]
Shown = int | str

WITHHELD = "withheld"
BINS = 12  # approximately, for a number
LISTED = 12  # silos, columns or classes in a line
TAILS = 0.05  # the fraction of the values below a computed range, and above it
Kind = Literal["number", "date", "category", "ordered", "classes"]


@dataclass(frozen=True, eq=False)
class Spread:
    """The distribution of a column's values, or of the targets.

    Attributes:
        cells: Names of bins or classes, such as "40 to 50".
        counts: int64[silos, cells].
        absent: int64[silos]; None if no value may be absent.
        range: The smallest and the largest value, in words; empty if it is not shown.
        declared: Whether the range is by the schema.
    """

    name: str
    kind: Kind
    cells: tuple[str, ...]
    counts: Counts
    absent: NDArray[np.int64] | None = None
    unit: str = ""
    range: tuple[str, str] | tuple[()] = ()
    declared: bool = False

    def plain(self, least: int, silos: Sequence[str] | None) -> dict[str, Any]:
        """Return the values that may be shown. silos: their names, to show each one's counts too."""
        counts = self.counts if self.absent is None else np.column_stack([self.counts, self.absent])
        sums = shown(counts.sum(axis=0), least)
        each = [] if silos is None else shown_by_silo(counts, least)

        def cell(place: int) -> dict[str, Any]:
            by_silo = {name: own[place] for name, own in zip(silos or (), each, strict=True)}
            return {"rows": sums[place]} | ({"by_silo": by_silo} if silos is not None else {})

        shown_parts: dict[str, Any] = {"name": self.name, "kind": self.kind}
        shown_parts |= {"unit": self.unit} if self.unit else {}
        shown_parts |= (
            {"range": list(self.range), "range_from": "schema" if self.declared else "rows"} if self.range else {}
        )
        shown_parts["cells"] = [{"label": label} | cell(place) for place, label in enumerate(self.cells)]
        shown_parts["absent"] = None if self.absent is None else cell(len(self.cells))
        return shown_parts


@dataclass(frozen=True, eq=False)
class Look:
    """Exact counts, which may not be shown. held: rows outside training, by purpose."""

    silos: tuple[str, ...]
    rows: NDArray[np.int64]
    columns: tuple[Spread, ...]
    target: Spread
    held: Mapping[str, int]
    sample: tuple[int, ...]

    def plain(self, least: int = LEAST_SHOWN, *, by_silo: bool = False) -> dict[str, Any]:
        """Return plain values: whole numbers, or words below `least`; `by_silo` adds each silo's counts."""
        names = self.silos if by_silo else None
        own = dict(zip(self.silos, shown(self.rows, least), strict=True))
        rows: dict[str, Any] = {"training": total(self.rows, least)}
        rows |= {what: total([count], least) for what, count in self.held.items() if count}
        return {
            "withhold": least,
            "silos": len(self.silos),
            "rows": rows | ({"by_silo": own} if by_silo else {}),
            "sample": list(self.sample),
            "columns": [column.plain(least, names) for column in self.columns],
            "target": self.target.plain(least, names),
        }


def look_at(
    owners: Sequence[Silo],
    names: Sequence[str],
    *,
    table: Schema | None = None,
    rules: ColumnRules | None = None,
    classes: int | None = None,
    class_names: Sequence[str] = (),
    held: Mapping[str, int] | None = None,
    least: int = LEAST_SHOWN,
) -> Look:
    """Count the rows of all owners.

    Args:
        names: of the columns of x, empty where samples have no columns.
        table: the schema; by default each column is a number.
        rules: where values may be absent.
        classes: None for targets that are numbers.
        held: rows for testing and the like, by name.
        least: as in `Look.plain`; computed ranges leave out that many values at each end.
    """
    rows = np.array([len(owner.x) for owner in owners])
    lacking = rules is not None and rules.may_lack
    columns: list[Spread] = []
    if table is not None and table.features:  # images have no columns to show
        columns = _of_schema(owners, table, least)
    elif names:
        fills = rules.fills if rules is not None and lacking else np.zeros(len(names))
        values = ([owner.x[:, place].astype(np.float64) for owner in owners] for place in range(len(names)))
        columns = [
            _numbers(name, own, least, Number(blanks="mean" if fill else "refuse"))
            for name, own, fill in zip(names, values, fills, strict=True)
        ]
    named = (table and table.name_of("target")) or "target"
    targets = _targets(named, [owner.y for owner in owners], classes, class_names, least)
    return Look(
        tuple(owner.name for owner in owners), rows, tuple(columns), targets, held or {}, tuple(owners[0].x.shape[1:])
    )


def lines_of(look: Mapping[str, Any]) -> list[str]:
    """Return `Look.plain` in short: rows, absent values and classes, a line each."""
    rows, silos = dict(look["rows"]), look["silos"]
    own = first_of([f"{name} {count}" for name, count in rows.pop("by_silo", {}).items()], LISTED)
    at = f" at {silos} silos" * (silos > 1) + f" ({own})" * bool(own)
    held = "".join(f", {count} for {what}" for what, count in rows.items() if what != "training")
    lines = [f"rows: {rows['training']} to train on{at}{held}"]
    lacking = {column["name"]: column["absent"]["rows"] for column in look["columns"] if column["absent"] is not None}
    some = [f"{name} {count}" for name, count in lacking.items() if isinstance(count, int)]
    if hidden := len(lacking) - len(some):
        some.append(f"few or withheld in {hidden} {'other' * bool(some)} column{'s' * (hidden > 1)}".replace("  ", " "))
    lines += [f"values absent: {first_of(some, LISTED)}"] if lacking else []
    target = look["target"]
    if target["kind"] == "classes":
        lines.append("classes: " + first_of([f"{cell['label']} {cell['rows']}" for cell in target["cells"]], LISTED))
    elif "range" in target:
        lines.append(f"target: about {' to '.join(target['range'])}")
    return lines


def _of_schema(owners: Sequence[Silo], table: Schema, least: int) -> list[Spread]:
    expansion, spreads = expansion_of(table), list[Spread]()
    coded = [expansion.undo(owner.x) for owner in owners]
    for place, (name, feature) in enumerate(table.features.items()):
        values, may_lack = [own[:, place] for own in coded], feature.blanks != "refuse"
        if isinstance(feature, Category | Ordered):
            spreads.append(_places(name, feature.kind, feature.categories, values, may_lack=may_lack))
        else:
            spreads.append(_numbers(name, values, least, feature))
    return spreads


def _places(
    name: str, kind: Kind, words: Sequence[str], values: Sequence[NDArray[Any]], *, may_lack: bool = False
) -> Spread:
    """Count values that are indices of words."""
    counts = np.array([np.bincount(own[~np.isnan(own)].astype(np.int64), minlength=len(words)) for own in values])
    return Spread(name, kind, tuple(words), counts, _absent(values) if may_lack else None)


def _targets(name: str, ys: Sequence[Array], classes: int | None, names: Sequence[str], least: int) -> Spread:
    if classes is None:
        columns = [y.reshape(len(y), -1)[:, :1].reshape(-1).astype(np.float64) for y in ys]  # of several the first
        return _numbers(name, columns, least, Number())
    words = tuple(names) or tuple(f"class {number}" for number in range(classes))
    return _places(name, "classes", words, [np.asarray(class_of(y), np.float64) for y in ys])


def _numbers(name: str, values: Sequence[NDArray[np.float64]], least: int, feature: Number | Date) -> Spread:
    """Count numbers in bins with round edges."""
    there = np.concatenate([own[~np.isnan(own)] for own in values])
    kind: Kind = feature.kind
    unit = feature.unit if isinstance(feature, Number) else ""
    absent = None if feature.blanks == "refuse" else _absent(values)
    limits = None if feature.range is None else limits_of(feature)
    ends = limits or _tails(there, least)
    if ends is None:  # too few for any bin
        counts = np.array([[int((~np.isnan(own)).sum())] for own in values])
        return Spread(name, kind, ("any value",), counts, absent, unit)
    whole = bool((there == np.round(there)).all())
    edges, word = _edges(*ends, whole=whole), _day if kind == "date" else _number
    inner = edges[1:-1]
    counts = np.array(
        [np.bincount(np.searchsorted(inner, own[~np.isnan(own)], "right"), minlength=len(edges) - 1) for own in values]
    )
    alone = whole and bool((np.diff(edges) == 1).all())  # a bin is one whole number
    low, high = limits or (edges[0], edges[-1] - alone)
    limits_shown = word(float(low)), word(float(high))
    return Spread(name, kind, _bins(edges, word, alone=alone), counts, absent, unit, limits_shown, limits is not None)


def _tails(values: NDArray[np.float64], least: int) -> tuple[float, float] | None:
    """Return the approximate 5 and 95 % quantiles, with `least` values or more outside at either end."""
    if len(values) < 4 * max(least, 1):
        return None
    part = max(TAILS, least / len(values))
    low, high = np.quantile(values, [part, 1 - part], method="inverted_cdf")
    return float(low), float(high)


def _edges(low: float, high: float, *, whole: bool) -> NDArray[np.float64]:
    """Return round edges around a range: multiples of 1, 2 or 5 times a power of 10."""
    width = high - low or abs(high) or 1.0
    raw = width / BINS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last + (1 if whole and step == 1 else 0), first + 1)
    return np.array([float(f"{number * step:.12g}") for number in range(first, last + 1)])


def _bins(edges: NDArray[np.float64], word: Callable[[float], str], *, alone: bool) -> tuple[str, ...]:
    """Return the name of each bin; the first and the last are open. alone: whether each is one whole number."""
    if len(edges) == 2:
        return ("any value",)
    first = f"up to {word(edges[1] - 1)}" if alone else f"below {word(edges[1])}"
    middle = [word(low) if alone else f"{word(low)} to {word(high)}" for low, high in pairwise(edges[1:-1])]
    return (first, *middle, f"{word(edges[-2])} or more")


def _number(value: float) -> str:
    return f"{value:,.6g}".replace("-", "\N{MINUS SIGN}")


def _day(value: float) -> str:
    days = min(max(round(value), -719_162), 2_932_896)  # the range of `date`
    return (date(1970, 1, 1) + timedelta(days)).isoformat()


def _absent(values: Sequence[NDArray[np.float64]]) -> NDArray[np.int64]:
    return np.array([int(np.isnan(own).sum()) for own in values])


def few(least: int) -> str:
    """Return the words for a count below `least`."""
    return f"fewer than {least}"


def shown(counts: Sequence[int] | Counts, least: int) -> list[Shown]:
    """Return the counts of cells whose sum is known, or words for them. least: 0 or 1 shows all."""
    cells = np.asarray(counts, np.int64)
    if least <= 1:
        return [int(cell) for cell in cells]
    if cells.sum() < least:
        return [few(least)] * len(cells)
    small = cells < least
    hidden = small.copy()
    while hidden.any() and not _is_open(cells, small, hidden, least):
        if hidden.all():
            return [WITHHELD] * len(cells)
        hidden[np.argmin(np.where(hidden, np.iinfo(np.int64).max, cells))] = True
    return [
        few(least) if low else WITHHELD if gone else int(cell)
        for cell, low, gone in zip(cells, small, hidden, strict=True)
    ]


def total(counts: Sequence[int] | Counts, least: int) -> Shown:
    """Return the sum of cells, or words for it."""
    rows = int(np.sum(counts))
    return rows if rows >= least else few(least)


def shown_by_silo(counts: Counts, least: int) -> list[list[Shown]]:
    """Return the counts at each silo. counts: [silos, cells]; rows of silos and `shown` sums over them are known."""
    if least <= 1:
        return [[int(cell) for cell in silo] for silo in counts]
    rows, sums = counts.sum(axis=1), shown(counts.sum(axis=0), least)
    hidden = np.array([isinstance(cell, str) for cell in sums]) | (counts < least).any(axis=0)
    if any(isinstance(cell, str) for cell in shown(rows, least)):
        hidden[:] = True  # a silo's counts would reveal its rows
    while hidden.any() and not hidden.all() and not _is_open_by_silo(counts, sums, hidden, least):
        hidden[np.argmin(np.where(hidden, np.iinfo(np.int64).max, counts.sum(axis=0)))] = True
    return [[WITHHELD if gone else int(cell) for cell, gone in zip(silo, hidden, strict=True)] for silo in counts]


def _is_open(cells: Counts, small: NDArray[np.bool_], hidden: NDArray[np.bool_], least: int) -> bool:
    """Return whether each small cell may be anything from 0 to least - 1, given the sum of the hidden cells."""
    rest, others, larger = int(cells[hidden].sum()), int(small.sum()) - 1, int((hidden & ~small).sum())
    if not small.any():
        return True
    up = rest - larger * least >= least - 1  # the larger ones have at least `least` each
    down = larger > 0 or rest <= others * (least - 1)
    return up and down


def _is_open_by_silo(counts: Counts, sums: Sequence[Shown], hidden: NDArray[np.bool_], least: int) -> bool:
    """Return whether each small count at a silo may have `least` values, given the sums of silos and cells."""
    of = np.flatnonzero(hidden)
    inner = counts[:, of]
    rows, columns, whole = inner.sum(axis=1), inner.sum(axis=0), int(inner.sum())
    unknown = np.array([isinstance(sums[int(cell)], str) for cell in of])
    columns = np.where(unknown, columns[unknown].sum(), columns)  # of these cells together the sum is known
    most = np.minimum(rows[:, None], columns[None, :])
    fewest = np.maximum(0, rows[:, None] + columns[None, :] - whole)
    fewest = np.where(unknown[None, :] & (unknown.sum() > 1), 0, fewest)
    return bool((most - fewest >= least - 1)[inner < least].all())
