"""Grids: rows are cut into m_h parts and columns into m_v, and every pair of parts is a participant.

    grid        the columns cut in their order, near-equal
    by-feature  the columns of each part named, by feature or by index

Rows are dealt as by "iid", groups whole. A column is one number of a sample, so samples of several axes are flattened.
Every participant gets the targets of its rows here; `Silo.labelled` says which one may use them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from moretta.contract.lazy_rows import loaded
from moretta.contract.wording import did_you_mean, first_of
from moretta.data.rows import Split, check_owned
from moretta.data.settings import Data, label_holders, shape_of_grid
from moretta.data.silo import Silo
from moretta.data.split import RowNumbers, cut, generator, units_of
from moretta.errors import ParameterError

Columns = Sequence[Sequence[str | int]]  # of each column part: features by name, or columns by index from 0


def flat(source: Split) -> Split:
    """The source with samples [n, d], whatever axes they had."""
    if source.train.x.ndim == 2:
        return source
    train, test, validation = (
        replace(rows, x=loaded(rows.x).reshape(len(rows), math.prod(rows.x.shape[1:])))
        for rows in source.parts().values()
    )
    return replace(source, train=train, test=test, validation=validation)


def deal(source: Split, data: Data, seed: int) -> tuple[Silo, ...]:
    """The participants silo-1-1, silo-1-2, ... of a flat source, by row part and then by column part.

    Raises ParameterError for columns or sizes that do not fit the source.
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
            participants.append(silo(labelled=j == holder, aligned=True, names=names))  # all were dealt from one table
    return tuple(participants)


def _row_parts(source: Split, parts: int, sizes: Sequence[float] | None, seed: int) -> list[RowNumbers]:
    """Deal rows as "iid" does to as many silos; errors speak of row parts."""
    rows = len(source.train)
    units, what = (
        units_of(rows, source.train.groups, "groups"),
        "training rows" if source.train.groups is None else "groups",
    )
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
    """The columns of each part, ascending, every column of the samples exactly once."""
    width = source.inputs[0]
    if columns is None:
        if parts > width:
            raise ParameterError(
                f"{width} columns cannot be cut into {parts} column parts; use at most {width} column parts"
            )
        return [part.tolist() for part in np.array_split(np.arange(width), parts)]
    names = [repr(name) for name in source.feature_names] or [str(column) for column in range(width)]
    origins = source.origins or source.feature_names
    named = _by_name(origins, source.feature_names)
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
        raise ParameterError(_left_over(part_of, names, origins))
    return [sorted(column for column, of in part_of.items() if of == number) for number in range(1, parts + 1)]


def _left_over(part_of: Mapping[int, int], names: Sequence[str], origins: tuple[str, ...]) -> str:
    """The sentence about columns in no part, by the source's name if no part has anything that was encoded from it."""
    begun = {origins[column] for column in part_of} if origins else set()
    left = [column for column in range(len(names)) if column not in part_of]
    whole = {column: repr(origins[column]) for column in left if origins and origins[column] not in begun}
    missing = list(dict.fromkeys(whole.get(column, names[column]) for column in left))
    return f"columns are missing: {first_of(missing, 3)} would be in no part; add them to one"


def _by_name(origins: tuple[str, ...], names: tuple[str, ...]) -> dict[str, list[int]]:
    """What each name stands for: a column of the source for all that was encoded from it, a feature for itself."""
    named: dict[str, list[int]] = {}
    for column, origin in enumerate(origins):
        named.setdefault(origin, []).append(column)
    for column, name in enumerate(names):
        named.setdefault(name, [column])
    return named


def _meant(entry: str | int, named: dict[str, list[int]], origins: tuple[str, ...], width: int) -> list[int]:
    if not isinstance(entry, str):
        if not 0 <= entry < width:
            raise ParameterError(f"columns: there is no column {entry}; expected 0 to {width - 1}")
        return [entry]
    if entry in named:
        return named[entry]
    if not named:
        raise ParameterError(
            f'columns: "{entry}" is a name, but these samples have none; give indices from 0 to {width - 1}'
        )
    raise ParameterError(f'columns: there is no column "{entry}"; {did_you_mean(entry, set(origins))}')
