"""Seeded splits of rows into train, validation and test, stratified where the targets are classes."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.data.checks import class_of
from moretta.errors import ParameterError

RowNumbers = NDArray[np.int64]


def generator(seed: int, *key: int) -> np.random.Generator:
    """The generator of every seeded choice here: PCG64, the same on every machine, a stream of its own for each key."""
    if seed < 0:
        raise ParameterError(f"expected a seed of 0 or more, got {seed}")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


def split(y: NDArray[Any], fractions: tuple[float, ...], seed: int, where: str) -> tuple[RowNumbers, ...]:
    """Row numbers of one part per fraction and of the rest last, each sorted, every row exactly once.

    A part has round(fraction n) rows, with every class (int labels or one-hot rows) in proportion to within one row.
    Raises ParameterError if fractions are outside [0, 1), leave nothing over, or a wanted part gets no row.
    """
    said = ", ".join(map(str, fractions))
    if any(not 0 <= f < 1 for f in fractions) or sum(fractions) >= 1 - 1e-9:
        raise ParameterError(f"{where}: expected fractions of 0 or more that leave rows for training, got {said}")
    sizes = [round(f * len(y)) for f in fractions]
    if any(f > 0 and size == 0 for f, size in zip(fractions, sizes, strict=True)) or sum(sizes) >= len(y):
        raise ParameterError(
            f"{where}: {len(y)} rows cannot be split by fractions {said}; "
            "every part needs a row: bring more rows or other fractions"
        )
    rng, left, parts = generator(seed), np.arange(len(y)), []
    labels = class_of(y)
    for size in sizes:
        chosen = rng.permutation(left)[:size] if labels is None else _in_proportion(left, labels, size, rng)
        parts.append(np.sort(chosen))
        left = np.setdiff1d(left, chosen, assume_unique=True)
    return (*parts, left)


def cut(order: RowNumbers, parts: int, sizes: Sequence[float] | None) -> list[RowNumbers]:
    """`order` cut into consecutive parts, near-equal or of these relative sizes, which may leave one empty."""
    if sizes is None:
        return list(np.array_split(order, parts))
    ends = np.round(np.cumsum(np.asarray(sizes, np.float64) / math.fsum(sizes)) * len(order)).astype(np.int64)
    return list(np.split(order, ends[:-1]))


def split_groups(
    labels: RowNumbers, groups: RowNumbers, fraction: float, seed: int, where: str
) -> tuple[RowNumbers, RowNumbers]:
    """Like `split` with one fraction, but whole groups at a time: no group has rows in both parts.

    The fraction is of the groups, stratified by the class of a group's first row. Returns (part, rest).
    """
    _, first, member = np.unique(groups, return_index=True, return_inverse=True)
    part, _ = split(labels[first], (fraction,), seed, where)
    chosen = np.isin(member, part)
    return np.flatnonzero(chosen), np.flatnonzero(~chosen)


def _in_proportion(rows: RowNumbers, labels: RowNumbers, size: int, rng: np.random.Generator) -> RowNumbers:
    """`size` of the rows, each class by its share: whole shares first, then the largest remainders."""
    classes, counts = np.unique(labels[rows], return_counts=True)
    share = counts * (size / len(rows))
    quota = np.floor(share + 1e-9).astype(np.int64)
    # a tie between remainders is broken by the class number, so that the split is the same everywhere
    more = np.argsort(quota - share, kind="stable")[: size - int(quota.sum())]
    quota[more] += 1
    taken = [rng.permutation(rows[labels[rows] == c])[:q] for c, q in zip(classes, quota, strict=True)]
    return np.concatenate(taken)
