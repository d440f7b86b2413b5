"""A silo's computations on its batch in a round, alone or with other silos: losses of moved parameters.

`differences` has their differences as one block after the other moves (`moretta.protocols.baffle.silo.blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.contract.roles import LEAST, Phase
from moretta.protocols.baffle.silo import blocks
from moretta.protocols.baffle.silo.blocks import Differences, LayerBlock, MovesBlocks, Signs, whole_of
from moretta.protocols.baffle.silo.directions import Directions
from moretta.protocols.baffle.silo.estimate import Combine, differences_together, gradient
from moretta.protocols.baffle.silo.forward import Forward
from moretta.protocols.baffle.silo.recipe import Recipe


@dataclass(frozen=True)
class LossWork:
    """The losses of a silo's batch in a round's directions, made by `directions` from `about`, summed by `combine`."""

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
        """Return the same for several silos, with directions made once."""
        recipe, batches = self.recipe, [(work.inputs, work.targets) for work in works]
        with self.phase("local_forward"):
            differences = differences_together(
                recipe.form, recipe.sigma, self.directions(), self.forward, recipe.loss, self.at, batches
            )
        return [Differences(derivatives, losses) for derivatives, losses in differences]

    def gradient(self, means: NDArray[np.float64], estimate: NDArray[np.float64] | None) -> NDArray[np.float64]:
        """Return the estimate from the mean x_k, float64[n]."""
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
        """Return the same for several silos."""
        batches = [(work.inputs, work.targets) for work in works]
        with self.phase("local_forward"):
            return differences(self.recipe, self.forward, self.at, batches, self.keys)

    def gradient(self, means: NDArray[np.float64], estimate: NDArray[np.float64] | None) -> NDArray[np.float64]:
        """Return the estimate from the moves' mean x and that of layers of units, float64[n]."""
        return blocks.gradient(self.recipe.blocks, self.forward.layout, means, estimate, self.keys)


def differences(
    recipe: Recipe, forward: MovesBlocks, at: Array, batches: Sequence[tuple[Array, Array]], keys: Sequence[bytes]
) -> list[Differences]:
    """Return several silos' differences from one pass over all their rows, which do not affect each other.

    Args:
        at: w, flat.
        batches: x and y, as of `Forward.outputs` and `RowLosses`.
        keys: Of each block's signs.
    """
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    silo_of = np.repeat(np.arange(len(batches)), [len(rows) for rows, _ in batches])
    shapes = forward.layout.shapes
    signs = [block.signs(shapes, key) for block, key in zip(recipe.blocks, keys, strict=True)]
    sums = [dict[str, NDArray[np.float64]]() for _ in batches]
    parts, step = list[tuple[NDArray[np.float64], NDArray[np.float64]]](), forward.rows_at_once or max(1, len(x))
    with np.errstate(invalid="ignore", over="ignore"):  # the caller checks that losses are finite
        for start in range(0, len(x), step):
            some = slice(start, start + step)
            own = recipe.loss(forward.start(at, x[some])[None], y[some])[0]
            slopes_of = [np.zeros((0, len(own)))]
            for block, drawn in zip(recipe.blocks, signs, strict=True):
                slopes = _slopes(recipe, forward, block, drawn, own, y[some])
                if block.kind == "units":
                    _add_up(sums, block, slopes, forward.inputs(block), silo_of[some])
                else:
                    slopes_of.append(slopes)
            parts.append((np.concatenate(slopes_of), own))
    derivatives, losses = (np.concatenate(all_rows, axis=-1) for all_rows in zip(*parts, strict=True))
    found_by = list[Differences]()
    for silo, own in enumerate(sums):
        mine = silo_of == silo
        estimate = whole_of(forward.layout, own) / mine.sum() if own else None
        found_by.append(Differences(derivatives[:, mine], losses[mine], estimate))
    return found_by


def _slopes(
    recipe: Recipe, forward: MovesBlocks, block: LayerBlock, signs: Signs, own: NDArray[np.float64], y: Array
) -> NDArray[np.float64]:
    """Return x of each move and row, float64[moves, rows]. own: the rows' losses."""

    def losses(distance: float) -> NDArray[np.float64]:
        return np.concatenate([recipe.loss(outputs, y) for outputs in forward.moved(block, signs, distance)])

    if recipe.form == "central":
        return (losses(recipe.sigma) - losses(-recipe.sigma)) / (2 * recipe.sigma)
    return (losses(recipe.sigma) - own) / recipe.sigma


def _add_up(
    sums: Sequence[dict[str, NDArray[np.float64]]],
    block: LayerBlock,
    slopes: NDArray[np.float64],
    inputs: Array,
    silo_of: NDArray[np.intp],
) -> None:
    """Add rows' slopes of units times the layer's inputs to each silo's sums. silo_of: of each row."""
    for silo in np.unique(silo_of):
        own = silo_of == silo
        products = slopes[:, own] @ inputs[own].astype(np.float64), slopes[:, own].sum(axis=1)
        for name, product in zip(block.tensors, products, strict=False):
            sums[silo][name] = sums[silo].get(name, 0.0) + product
