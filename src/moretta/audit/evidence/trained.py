"""What an audit needs of the federation that trained a run; `moretta.run.federation.Federation` offers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

from torch import nn

from moretta.config.specification import Specification
from moretta.contract.messages import Array
from moretta.data.layout import SampleLayout
from moretta.data.silo import Silo
from moretta.protocols.common.roles import Roles


class Trained(Protocol):
    """Silos with their rows, a model's architecture, and the settings that a run was trained by."""

    @property
    def model(self) -> nn.Module:
        """The architecture, with weights that say nothing."""

    @property
    def silos(self) -> Sequence[Silo]:
        """Everybody who trained, with their rows."""

    @property
    def spec(self) -> Specification:
        """The settings that it was trained by."""

    @property
    def test(self) -> tuple[Array, Array] | None:
        """Rows that nobody trained on."""

    @property
    def layout(self) -> SampleLayout | None:
        """How a sample of several arrays is packed; None where it is one array."""

    @property
    def outputs(self) -> int:
        """How many outputs the model has."""

    def digest(self, seed: int, rounds: int) -> str:
        """Return what the states of a run are bound to."""

    def players(self, rounds: int, seed: int) -> Roles:
        """Return all roles of a run anew, to be given a run's states."""

    def without_edge_processes(self) -> Self:
        """Return the same with every silo's role in this process."""
