"""Confined models put together from their holders, which only a simulation on one machine can do.

A row of a joint grid has one model, whose first layer's parts never leave their holders in a real federation. Here they
are joined to be measured, and the run folder says that it was a simulation.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import nn

from moretta.contract.messages import Array, Tensors
from moretta.data.holders import Grid
from moretta.protocols.cgd.client import Client
from moretta.protocols.cgd.layers import Layers, joined
from moretta.protocols.common import modules
from moretta.protocols.common.enrolment import Enrolment


class WholeModels:
    """The participants of one process, seen together.

    model: the whole architecture. layers: of a network whose columns are split; None where they are not. alone: mean
    and deviation of columns that a participant shares with nobody, by its name.
    """

    def __init__(
        self,
        grid: Grid,
        clients: Mapping[str, Client],
        model: nn.Module,
        layers: Layers | None,
        enrolments: Mapping[str, Enrolment],
        alone: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]],
    ) -> None:
        self._grid, self._clients, self._layers = grid, clients, layers
        self._names = list(modules.arrays(model))
        self._enrolments, self._alone = enrolments, alone

    def models(self) -> Mapping[str, Tensors]:
        """Return all confined models: by row where a row has one together, else by participant.

        Columns that a model does not read have weight 0.
        """
        layers = self._layers
        if layers is None:
            return {name: client.model() for name, client in self._clients.items()}
        return {
            owner: self._joined({name: self._clients[name].model() for name in names}, layers)
            for owner, names in self._owners().items()
        }

    def displaced(self) -> Tensors:
        """Return D as a model of its own, added to the point that starts are confined around."""
        layers = self._layers
        if layers is None:
            return next(iter(self._clients.values())).displaced()
        first = next(iter(self._grid.rows.values()))
        return self._joined({name: self._clients[name].displaced() for name in first}, layers)

    def _owners(self) -> Mapping[str, tuple[str, ...]]:
        if any(client.runs_jointly for client in self._clients.values()):
            return self._grid.rows
        return {name: (name,) for name in self._clients}

    def _joined(self, parts: Mapping[str, Mapping[str, Array]], layers: Layers) -> dict[str, Array]:
        whole = {name: value for part in parts.values() for name, value in part.items()}
        columns = [self._grid.parts[name].columns for name in parts]
        weight = joined([part[layers.weight] for part in parts.values()], columns, layers.columns)
        whole[layers.weight] = weight
        return {name: whole[name] for name in self._names}

    @property
    def mean(self) -> NDArray[np.float64]:
        """What is taken off each input column, float64[columns], or [1] for all alike."""
        return self._agreed(0)

    @property
    def deviation(self) -> NDArray[np.float64]:
        """What each input column is divided by, likewise."""
        return self._agreed(1)

    def _agreed(self, which: int) -> NDArray[np.float64]:
        if self._layers is None:
            agreed = next(iter(self._enrolments.values()), None)
            return np.full(1, float(which)) if agreed is None else (agreed.mean, agreed.deviation)[which]
        found = np.full(self._layers.columns, float(which))
        for group, members in self._grid.column_groups.items():
            columns = list(self._grid.parts[members[0]].columns)
            if group in self._enrolments:
                agreed = self._enrolments[group]
                found[columns] = (agreed.mean, agreed.deviation)[which]
            elif members[0] in self._alone:
                found[columns] = self._alone[members[0]][which]
        return found
