"""The holders of rows and columns of data that is also split by column: the grid m_h x m_v of CGD."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moretta.data.silo import Silo
from moretta.errors import ParameterError
from moretta.secure_aggregation.keystream import encode_purpose


def grid_of(silos: Sequence[Silo]) -> "Grid":
    """Return the grid; a silo outside is a row of its own, and a row's first labelled silo holds its labels."""
    parts = {silo.name: Part(silo.name, silo.row or silo.name, silo.columns) for silo in silos}
    heads = {parts[silo.name].row: silo.name for silo in reversed(silos) if silo.holds_labels}
    return Grid(parts, heads)


def check_order(silos: Sequence[Silo]) -> None:
    """Raise `moretta.errors.ParameterError` unless ids or owners (`Silo.aligned`) confirm the order of local rows."""
    holders = Counter(silo.row for silo in silos if silo.columns)
    for silo in silos:
        if silo.columns and holders[silo.row] > 1 and not silo.remote and silo.ids is None and not silo.aligned:
            raise ParameterError(
                f"silo `{silo.name}` holds columns of row `{silo.row}`, but nothing confirms the order of its rows; "
                "add ids, align by `moretta align` or [protocol] align = true, or declare the order (rows-in-order = "
                "true in silo.toml, aligned=True in Python)"
            )


def check_ids(silos: Sequence[Silo]) -> None:
    """Raise `moretta.errors.ParameterError` if local silos of one row differ in their ids or their order."""
    first = dict[str, Silo]()
    for silo in silos:
        if not silo.columns or silo.ids is None:
            continue
        other = first.setdefault(silo.row, silo)
        if other.ids is None or not np.array_equal(silo.ids, other.ids):
            raise ParameterError(
                f"row `{silo.row}`: the ids of `{silo.name}` are not those of `{other.name}` in the same order; sort "
                "both by id, and keep the rows that both have"
            )


@dataclass(frozen=True)
class Part:
    """One participant's place.

    Attributes:
        name: The participant's name.
        row: The name of its row of the grid, whose participants hold different columns of the same samples.
        columns: The indices of its columns among all; empty if nothing is split by column.
    """

    name: str
    row: str
    columns: tuple[int, ...] = ()


@dataclass(frozen=True)
class Grid:
    """All participants' places.

    Attributes:
        parts: The place of each participant, by name.
        heads: The participant that holds the labels, by row.
    """

    parts: Mapping[str, Part]
    heads: Mapping[str, str]

    @property
    def is_split(self) -> bool:
        """Whether any participant has only some of the columns."""
        return any(part.columns for part in self.parts.values())

    @cached_property
    def rows(self) -> Mapping[str, tuple[str, ...]]:
        """The participants of each row, in order."""
        rows = dict[str, list[str]]()
        for name, part in self.parts.items():
            rows.setdefault(part.row, []).append(name)
        return {row: tuple(names) for row, names in rows.items()}

    @cached_property
    def column_groups(self) -> Mapping[str, tuple[str, ...]]:
        """The participants that hold the same columns, by the group's name ("columns-1", ...)."""
        held = dict[tuple[int, ...], list[str]]()
        for name, part in self.parts.items():
            held.setdefault(part.columns, []).append(name)
        return {f"columns-{number}": tuple(names) for number, names in enumerate(held.values(), 1)}

    def digest(self, *, joint: bool) -> bytes:
        """Return SHA-256 of the holders of rows, columns and labels, in order, and of the form.

        Silos with different grids have different digests, so they share no key (`moretta.protocols.cgd.group_keys`).

        Args:
            joint: Whether the protocol's `vertical` is "joint", not "independent".
        """
        content: list[int | str] = ["joint" if joint else "independent"]
        for part in self.parts.values():
            content += [
                part.name,
                part.row,
                int(self.heads.get(part.row) == part.name),
                len(part.columns),
                *part.columns,
            ]
        return hashlib.sha256(encode_purpose("cgd grid", *content)).digest()

    def check(self, total: int) -> None:
        """Raise `moretta.errors.ParameterError` unless every row has each of the `total` columns exactly once."""
        cuts = {name: part.columns for name, part in self.parts.items()}
        for row, names in self.rows.items():
            held = Counter(column for name in names for column in cuts[name])
            if twice := sorted(column for column, times in held.items() if times > 1):
                raise ParameterError(
                    f"row `{row}`: columns {twice!r:.100} are held by two participants; expected each column once a row"
                )
            if absent := sorted(set(range(total)) - set(held)):
                raise ParameterError(f"row `{row}`: nobody holds columns {absent!r:.100}; expected all {total}")
            if outside := sorted(set(held) - set(range(total))):
                raise ParameterError(f"row `{row}`: columns {outside!r:.100} are not among the {total} of the data")
            if self.heads.get(row) not in names:
                raise ParameterError(f"row `{row}`: expected one of its participants to hold the labels")
        first = {cuts[name] for name in next(iter(self.rows.values()))}
        for row, names in self.rows.items():
            if {cuts[name] for name in names} != first:
                raise ParameterError(
                    f"row `{row}` has other column parts than the first row; expected the same parts in every row, "
                    "because their layers are summed over the rows"
                )
