"""The roles of one run, as a protocol builds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moretta.contract.messages import Message, Tensors
from moretta.contract.roles import Client, Server, State
from moretta.data.tables.preparation import Preparation
from moretta.protocols.common.releases import Releases
from moretta.protocols.common.row_counts import Counted


@dataclass(frozen=True)
class Roles:
    """The roles of one run.

    fitted: says how inputs are prepared, as agreed on. scheme: of the secure sums. least: the fewest silos that a round
    may have. models: the current models: the common one under the empty name, or each silo's own under its name.
    displacement: D of confined models, taken as a model of its own. scores: the scores that participants in this
    process have read, where the server does not read them. warnings: sentences for whoever runs this about who takes
    part. releases: the server's count of noised sums, where silos add noise; it must be on disk before any message
    leaves (`moretta.protocols.common.releases`). counted: what a look before training has counted at all silos.
    epsilon: what has been spent so far towards the server, where silos add noise; "unbounded" is infinity.
    gather, spread: where clients play in other processes, bring those here to the states of those that play, and back.
    """

    server: Server
    clients: Mapping[str, Client]
    fitted: Fitted
    scheme: str
    messages: Sequence[type[Message]]
    least: int
    models: Callable[[], Mapping[str, Tensors]]
    displacement: Callable[[], Tensors] | None = None
    warnings: Sequence[str] = ()
    scores: Callable[[], Mapping[str, float]] = dict
    releases: Releases | None = None
    counted: Callable[[], Counted | None] = lambda: None
    epsilon: Callable[[], float | str] | None = None
    gather: Callable[[], None] = lambda: None
    spread: Callable[[Mapping[str, State]], None] = lambda states: None


@dataclass(frozen=True)
class Left:
    """What a silo's role leaves at its site alone.

    privacy: where it added noise, by its own count of releases. model: its own, which nobody else has. scores: on all
    rows held back, where it has read them.
    """

    privacy: Mapping[str, float | str] = field(default_factory=dict)
    model: Tensors = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)


class Fitted(Protocol):
    """Knows how inputs are prepared, once that is agreed on."""

    @property
    def preparation(self) -> Preparation:
        """By column, or alike for all."""
