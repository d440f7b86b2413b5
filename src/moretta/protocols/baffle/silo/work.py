"""What a silo computes of its batch in a round, alone or together with other silos: losses of moved parameters."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.contract.roles import LEAST, Phase
from moretta.protocols.baffle.silo import block_differences, blocks
from moretta.protocols.baffle.silo.blocks import Differences, MovesBlocks
from moretta.protocols.baffle.silo.directions import Directions
from moretta.protocols.baffle.silo.estimate import Combine, differences_together, gradient
from moretta.protocols.baffle.silo.forward import Forward
from moretta.protocols.baffle.silo.recipe import Recipe


@dataclass(frozen=True)
class LossWork:
    """The losses of a silo's batch in all directions of a round, which all silos of a cohort share.

    directions: makes them. about: what they follow from. combine: adds them up.
    """

    recipe: Recipe
    forward: Forward
    at: Array
    inputs: Array
    targets: Array
    directions: Callable[[], Directions]
    about: tuple[int | str | bytes, ...]
    phase: Phase
    combine: Combine
    least: int = 2

    @property
    def key(self) -> Hashable:
        """Equal for silos whose batches run as many directions of a round at once through the same forward pass."""
        return id(self.recipe), id(self.forward), id(self.at), self.about, self.forward.at_once(len(self.inputs))

    def alone(self) -> Differences:
        """Return x_k and the losses of each row."""
        return self.together([self])[0]

    def together(self, works: Sequence[LossWork]) -> list[Differences]:
        """Return those of several silos, whose directions are made once."""
        recipe, batches = self.recipe, [(work.inputs, work.targets) for work in works]
        with self.phase("local_forward"):
            found = differences_together(
                recipe.form, recipe.sigma, self.directions(), self.forward, recipe.loss, self.at, batches
            )
        return [Differences(derivatives, losses) for derivatives, losses in found]

    def gradient(self, means: NDArray[np.float64], estimate: NDArray[np.float64] | None) -> NDArray[np.float64]:
        """Return the estimate that the mean x_k give, float64[n]."""
        return gradient(self.recipe.form, means, self.directions(), self.combine)


@dataclass(frozen=True)
class BlockWork:
    """The losses of a silo's batch as one block of layers after the other moves. keys: of the blocks' signs."""

    recipe: Recipe
    forward: MovesBlocks
    at: Array
    inputs: Array
    targets: Array
    keys: tuple[bytes, ...]
    phase: Phase
    least: int = LEAST

    @property
    def key(self) -> Hashable:
        """Equal for silos with the same moves of the same parameters; their rows go through the model as one batch."""
        return id(self.recipe), id(self.forward), id(self.at), self.keys

    def alone(self) -> Differences:
        """Return x of each move and row, and the estimate of layers of units."""
        return self.together([self])[0]

    def together(self, works: Sequence[BlockWork]) -> list[Differences]:
        """Return those of several silos."""
        batches = [(work.inputs, work.targets) for work in works]
        with self.phase("local_forward"):
            return block_differences.differences(self.recipe, self.forward, self.at, batches, self.keys)

    def gradient(self, means: NDArray[np.float64], estimate: NDArray[np.float64] | None) -> NDArray[np.float64]:
        """Return the estimate that the moves' mean x and that of layers of units give, float64[n]."""
        return blocks.gradient(self.recipe.blocks, self.forward.layout, means, estimate, self.keys)
