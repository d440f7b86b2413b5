"""What an audit needs of the federation that a run was trained by; whoever trains offers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from torch import nn

from moretta.contract.messages import Array
from moretta.data.silo import Silo
from moretta.protocols.common.players import Roles
from moretta.protocols.common.training import Training


class Trained(Protocol):
    """Silos with their rows, a model's architecture, and the settings that a run was trained by."""

    @property
    def model(self) -> nn.Module:
        """The architecture, with weights that say nothing."""

    @property
    def silos(self) -> Sequence[Silo]:
        """Everybody who trained, with their rows."""

    @property
    def protocol(self) -> Training:
        """The protocol's settings."""

    @property
    def test(self) -> tuple[Array, Array] | None:
        """Rows that nobody trained on."""

    @property
    def batch_size(self) -> int:
        """The rows that a silo uses in a round, 0 for all."""

    @property
    def augment(self) -> bool:
        """Whether silos vary their rows anew in each round."""

    @property
    def dtype(self) -> str:
        """Of the model: "float32" or "float64"."""

    @property
    def device(self) -> str:
        """Where silos computed."""

    @property
    def outputs(self) -> int:
        """How many outputs the model has."""

    @property
    def run_file(self) -> tuple[str, str] | None:
        """The run file and its digest, None for a run that was made from Python."""

    @property
    def settings(self) -> Mapping[str, Any] | None:
        """The run file's sections."""

    def digest(self, seed: int, rounds: int) -> str:
        """Return what the states of a run are bound to."""

    def players(self, rounds: int, seed: int) -> Roles:
        """Return all roles of a run anew, to be given a run's states."""

    def without_edge_processes(self) -> Self:
        """Return the same with every silo's role in this process."""
