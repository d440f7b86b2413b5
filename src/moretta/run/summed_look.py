"""A look at rows that are on many machines, from what all silos' rows come to together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moretta.data.look import Look, Spread
from moretta.data.tables.preparation import MARK, ONE_OF, PLAIN
from moretta.data.tables.rows import expansion_of
from moretta.data.tables.schema import Category, Number, Ordered, Schema
from moretta.protocols.common.row_counts import Counted


def told_of_sums(
    found: Counted, silos: int, names: Sequence[str], class_names: Sequence[str], table: Schema | None
) -> dict[str, Any]:
    """Return what may be shown of it (`moretta.data.look.Look.told`). silos: how many. names: of the input columns."""
    if not len(found.present):
        columns = []
    elif table is not None:
        columns = _by_schema(found, table)
    else:
        given = names or [f"x{place}" for place in range(len(found.present))]
        columns = [_number(name, found, place, may_lack=_may_lack(found)) for place, name in enumerate(given)]
    target = _target(found, class_names, table)
    look = Look(("all silos",), np.array([found.rows]), tuple(columns), target, {}, (len(found.present),))
    return look.told() | {"silos": silos}


def _may_lack(found: Counted) -> bool:
    return bool((found.present < found.rows).any())


def _by_schema(found: Counted, table: Schema) -> list[Spread]:
    """Return each column of a schema: the mean of a category's zeros and ones tells how many rows have it."""
    expansion, spreads = expansion_of(table), list[Spread]()
    rows = np.rint(found.mean * found.present).astype(np.int64)
    for place, (name, feature) in enumerate(table.features.items()):
        mine = expansion.source == place
        marks = rows[mine & (expansion.kinds == MARK)]
        if isinstance(feature, Category):
            counts = rows[mine & (expansion.kinds == ONE_OF)][None, :]
            spreads.append(Spread(name, "category", feature.categories, counts, marks if len(marks) else None))
            continue
        (column,) = np.flatnonzero(mine & (expansion.kinds == PLAIN))
        number = _number(name, found, int(column), may_lack=feature.blanks != "refuse")
        kind: Any = "ordered" if isinstance(feature, Ordered) else feature.kind
        limits = None if isinstance(feature, Ordered) else feature.range
        unit = feature.unit if isinstance(feature, Number) else ""
        said = number.range if kind == "number" else ()
        if limits is not None:
            said = str(limits[0]), str(limits[1])
        spreads.append(Spread(name, kind, number.cells, number.counts, number.absent, unit, said, limits is not None))
    return spreads


def _number(name: str, found: Counted, place: int, *, may_lack: bool) -> Spread:
    """Return a column of numbers: how many there are, and about where they lie, two deviations around their mean."""
    there, mean, spread = int(found.present[place]), float(found.mean[place]), float(found.deviation[place])
    absent = np.array([found.rows - there]) if may_lack else None
    about = f"{mean - 2 * spread:.2g}", f"{mean + 2 * spread:.2g}"
    return Spread(name, "number", ("any value",), np.array([[there]]), absent, "", about)


def _target(found: Counted, names: Sequence[str], table: Schema | None) -> Spread:
    named = (table and table.name_of("target")) or "target"
    if len(found.classes) == 1:
        return Spread(named, "number", ("any value",), found.classes[None, :])
    words = tuple(names) or tuple(f"class {number}" for number in range(len(found.classes)))
    return Spread(named, "classes", words, found.classes[None, :])
