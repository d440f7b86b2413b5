"""The grid m = m_h x m_v of Algorithm 2: who holds which rows and columns, and who shares which layers with whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moretta.data.holders import Grid


@dataclass(frozen=True)
class Group:
    """Participants that share layers, and so step by one sum of their gradients.

    members: in order. shapes: of the layers' tensors, by name. tells_loss: whether the sum includes their losses.
    """

    members: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    tells_loss: bool

    @property
    def summed(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all that is summed."""
        return {**self.shapes, **({"loss": ()} if self.tells_loss else {})}


def groups_of(grid: Grid, shapes: Mapping[str, tuple[int, ...]], first: str, *, joint: bool) -> dict[str, Group]:
    """Return who shares which layers, by the group's name.

    shapes: of all tensors that are trained. first: the name of the first layer's weight, [H1, d], whose columns are
    split; unused where no columns are split and all share all. joint: the rows' heads share the rest, else everybody.
    Differs from the paper: a first layer's bias, which Algorithm 2 lacks, goes with the layers above it.
    """
    everybody = tuple(grid.parts)
    if not any(part.columns for part in grid.parts.values()):
        return {"all": Group(everybody, shapes, True)}
    groups = {
        name: Group(members, {first: (shapes[first][0], len(grid.parts[members[0]].columns))}, False)
        for name, members in grid.column_groups.items()
    }
    rest = {name: shape for name, shape in shapes.items() if name != first}
    if joint:
        return {"heads": Group(tuple(grid.heads[row] for row in grid.rows), rest, True), **groups}
    return {"all": Group(everybody, rest, True), **groups}
