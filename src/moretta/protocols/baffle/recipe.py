"""What a silo is set to do, in plain data that an edge client can be given too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moretta.protocols.baffle.directions import Directions, keys_of
from moretta.protocols.baffle.estimate import Form, directions_of
from moretta.protocols.baffle.row_losses import RowLosses

if TYPE_CHECKING:
    from moretta.protocols.baffle.params import BAFFLE  # pydantic is absent from an edge client's process


@dataclass(frozen=True)
class Recipe:
    """The settings of `moretta.protocols.baffle.params.BAFFLE` that a silo needs, each as there.

    loss: of a row. most: the largest K. Of the epoch level alone: local_epochs, rates, the learning rate of each round,
    and clip_norm, the largest norm of a step's gradient, 0 for any.
    """

    form: Form
    sigma: float
    loss: RowLosses
    most: int
    direction: str = "rademacher"
    orthogonal: bool = False
    seed_pool: int = 0
    local_epochs: int = 0
    rates: tuple[float, ...] = ()
    clip_norm: float = 0.0

    @classmethod
    def of(cls, protocol: BAFFLE, rounds: int) -> Recipe:
        """Return what the protocol's settings come to in a run of so many rounds."""
        epochs = protocol.local_epochs or 0
        return cls(
            protocol.form,
            protocol.sigma,
            RowLosses(protocol.loss, protocol.label_smoothing, protocol.class_weights),
            max(protocol.k, protocol.k_last or 0),
            protocol.direction,
            protocol.orthogonal,
            protocol.seed_pool or 0,
            epochs,
            tuple(protocol.rate(number, rounds) for number in range(1, rounds + 1)) if epochs else (),
            protocol.clip_norm or 0.0,
        )

    def directions(self, k: int, size: int, seed: bytes, *purpose: int | str | bytes) -> Directions:
        """Return the directions of K = k for one purpose: the run, the round, the parameters' hash."""
        count = directions_of(self.form, k)
        keys = keys_of(seed, count, *purpose, orthogonal=self.orthogonal, pool=self.seed_pool)
        return Directions(keys, count, size, self.direction, orthogonal=self.orthogonal)
