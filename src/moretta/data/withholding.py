"""Which counts of a table are not shown, so that small ones cannot be had back by subtraction.

A variable's cells (classes, bins, blanks) add up to its rows, over all silos and at each silo. A count below `least` is
shown as "fewer than 5"; where a sum less the counts that are shown would give it away, larger ones are "withheld" too,
the smallest first. What is left open of each small count is then no less than what "fewer than 5" says: everything from
0 to 4. By silo nothing tells the one from the other, and a cell is withheld at all silos or at none.

Not hidden: who knows how the further cells are chosen, or knows rows of a table, can narrow counts down more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Shown = int | str

WITHHELD = "withheld"
LEAST_SHOWN = 5  # where nobody says otherwise


def few(least: int) -> str:
    """Return what stands for a count below `least`."""
    return f"fewer than {least}"


def shown(counts: Sequence[int] | Counts, least: int) -> list[Shown]:
    """Return the counts of cells whose sum is known, or what stands for them. least: 0 or 1 shows all."""
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
    """Return the sum of cells, or what stands for it."""
    found = int(np.sum(counts))
    return found if found >= least else few(least)


def shown_by_silo(counts: Counts, least: int) -> list[list[Shown]]:
    """Return the counts at each silo. counts: [silos, cells]; rows of silos and `shown` sums over them are known."""
    if least <= 1:
        return [[int(cell) for cell in silo] for silo in counts]
    rows, sums = counts.sum(axis=1), shown(counts.sum(axis=0), least)
    hidden = np.array([isinstance(one, str) for one in sums]) | (counts < least).any(axis=0)
    if any(isinstance(one, str) for one in shown(rows, least)):
        hidden[:] = True  # a silo's counts would give away its rows
    while hidden.any() and not hidden.all() and not _is_open_by_silo(counts, sums, hidden, least):
        hidden[np.argmin(np.where(hidden, np.iinfo(np.int64).max, counts.sum(axis=0)))] = True
    return [[WITHHELD if gone else int(cell) for cell, gone in zip(silo, hidden, strict=True)] for silo in counts]


def _is_open(cells: Counts, small: NDArray[np.bool_], hidden: NDArray[np.bool_], least: int) -> bool:
    """Whether each small cell may be anything from 0 to least - 1, as far as the sum of the hidden cells says."""
    rest, others, larger = int(cells[hidden].sum()), int(small.sum()) - 1, int((hidden & ~small).sum())
    if not small.any():
        return True
    up = rest - larger * least >= least - 1  # the larger ones have `least` each at least
    down = larger > 0 or rest <= others * (least - 1)
    return up and down


def _is_open_by_silo(counts: Counts, sums: Sequence[Shown], hidden: NDArray[np.bool_], least: int) -> bool:
    """Whether each small count at a silo is open by `least` values, given what silos' and cells' sums leave of it."""
    of = np.flatnonzero(hidden)
    inner = counts[:, of]
    rows, columns, whole = inner.sum(axis=1), inner.sum(axis=0), int(inner.sum())
    unknown = np.array([isinstance(sums[int(cell)], str) for cell in of])
    columns = np.where(unknown, columns[unknown].sum(), columns)  # of these cells together the sum is known
    most = np.minimum(rows[:, None], columns[None, :])
    fewest = np.maximum(0, rows[:, None] + columns[None, :] - whole)
    fewest = np.where(unknown[None, :] & (unknown.sum() > 1), 0, fewest)
    return bool((most - fewest >= least - 1)[inner < least].all())
