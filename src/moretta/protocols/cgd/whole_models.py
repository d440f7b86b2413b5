"""Confined models put together from their holders, which only a simulation on one machine can do.

A row of a joint grid has one model, whose first layer's parts never leave their holders in a real federation. Here they
are joined to be measured, and the run folder says that it was a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import nn

from moretta.contract.messages import Array, Tensors
from moretta.data.holders import Grid
from moretta.data.tables.preparation import Preparation
from moretta.protocols.cgd.client import Client
from moretta.protocols.cgd.layers import Layers, joined
from moretta.protocols.common import modules
from moretta.protocols.common.enrolment import Enrolment


class WholeModels:
    """The participants of one process, seen together.

    model: the whole architecture. layers: of a network whose columns are split; None where they are not. alone: how
    columns are prepared that a participant shares with nobody, by its name.
    """

    def __init__(
        self,
        grid: Grid,
        clients: Mapping[str, Client],
        model: nn.Module,
        layers: Layers | None,
        enrolments: Mapping[str, Enrolment],
        alone: Mapping[str, Preparation],
    ) -> None:
        self._grid, self._clients, self._layers = grid, clients, layers
        self._names = list(modules.arrays(model))
        self._enrolments, self._alone = enrolments, alone

    def models(self) -> Mapping[str, Tensors]:
        """Return all confined models: by row where a row has one together, else by participant.

        Columns that a model does not read have weight 0.
        """
        joint = any(client.runs_jointly for client in self._clients.values())
        owners = self._grid.rows if joint else {name: (name,) for name in self._clients}
        return {owner: self._joined(names, lambda client: client.model()) for owner, names in owners.items()}

    def displaced(self) -> Tensors:
        """Return D as a model of its own, added to the point that starts are confined around."""
        owners = [(name,) for name in self._clients] if self._layers is None else self._grid.rows.values()
        return self._joined(next(iter(owners)), lambda client: client.displaced())

    def _joined(self, names: Sequence[str], make: Callable[[Client], Tensors]) -> dict[str, Array]:
        """Return one model of its holders' parts, which `make` gives of each."""
        parts = [make(self._clients[name]) for name in names]
        whole = {name: value for part in parts for name, value in part.items()}
        if (layers := self._layers) is None:
            return whole
        columns = [self._grid.parts[name].columns for name in names]
        whole[layers.weight] = joined([part[layers.weight] for part in parts], columns, layers.columns)
        return {name: whole[name] for name in self._names}

    def preparation(self) -> Preparation:
        """Return how each input column is prepared."""
        if self._layers is None:
            agreed = next(iter(self._enrolments.values()), None)
            return Preparation.nothing() if agreed is None else agreed.preparation
        columns = self._layers.columns
        found = Preparation(np.zeros(columns), np.zeros(columns), np.ones(columns))
        for group, members in self._grid.column_groups.items():
            own = self._alone.get(members[0])
            if group in self._enrolments:
                own = self._enrolments[group].preparation
            if own is not None:
                found = found.joined(self._grid.parts[members[0]].columns, own)
        # The group of the layers above has the targets.
        sharing = next((one.preparation for one in self._enrolments.values() if one.preparation.scales_targets), None)
        return found if sharing is None else found.joined((), sharing)
