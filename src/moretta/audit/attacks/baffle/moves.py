"""The moves of a round by blocks of layers, as the server derives them from the seed: what `Directions` are otherwise.

Each move is a direction d_k that is zero outside of its block, and x_k = d_k . g. Layers of units have no directions:
what silos upload of them is no scalar, and `moretta.audit.attacks.baffle.gradient_estimates` measures it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moretta.audit.evidence.intervals import Floats
from moretta.contract.messages import Array
from moretta.errors import ParameterError
from moretta.protocols.baffle.silo import blocks
from moretta.protocols.baffle.silo.blocks import LayerBlock, MovesBlocks
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.baffle.silo.recipe import Recipe
from moretta.protocols.baffle.silo.work import differences


@dataclass(frozen=True)
class Moves:
    """Those of one round. recipe: with the blocks that have scalars, and no others. keys: of these blocks' signs."""

    recipe: Recipe
    layout: Layout
    keys: tuple[bytes, ...]

    @classmethod
    def of(cls, recipe: Recipe, layout: Layout, seed: bytes, *purpose: int | str | bytes) -> Moves:
        """Return those of one purpose, as `Recipe.keys`.

        Raises `moretta.errors.ParameterError` where there are none.
        """
        pairs = [(b, key) for b, key in zip(recipe.blocks, recipe.keys(seed, *purpose), strict=True) if b.scalars]
        if not pairs:
            raise ParameterError(
                'with linear = "activations" this model\'s layers move unit by unit alone, and no loss differences are '
                "uploaded; what is uploaded, own-estimate attacks"
            )
        some, keys = zip(*pairs, strict=True)
        return cls(replace(recipe, blocks=some), layout, keys)

    @property
    def count(self) -> int:
        """K, how many moves there are."""
        return self.recipe.scalars

    @property
    def size(self) -> int:
        """n, of the whole flat array."""
        return self.layout.size

    @property
    def products(self) -> int:
        """How many multiplications x_1 .. x_K of a gradient are."""
        return sum(block.repeats * size_of(block, self.layout) for block in self.recipe.blocks)

    @cached_property
    def covered(self) -> NDArray[np.bool_]:
        """Which of the n parameters some block moves, bool[n]."""
        names = {name for block in self.recipe.blocks for name in block.tensors}
        return np.concatenate([np.full(math.prod(s), name in names) for name, s in self.layout.shapes.items()])

    def by_row(self, forward: MovesBlocks, at: Array, x: Array, y: Array) -> Floats:
        """Return the x_k of each row, float64[K, rows]."""
        return differences(self.recipe, forward, at, [(x, y)], self.keys)[0].derivatives

    def estimate(self, scalars: Floats) -> Floats:
        """Return the estimate of the gradient, float64[n], zero where nothing moves."""
        return blocks.gradient(self.recipe.blocks, self.layout, scalars, None, self.keys)

    def along(self, gradient: Mapping[str, Tensor]) -> Tensor:
        """Return d_k . g of all moves, float64[K], differentiable. gradient: by tensor, float64."""
        found: list[Tensor] = []
        for block, signs in zip(self.recipe.blocks, self._signs, strict=True):
            parts = [gradient[name] for name in block.tensors]
            if block.kind == "rank-one":
                matrix = torch.cat([part.reshape(len(parts[0]), -1) for part in parts], dim=1)
                found.append((signs[0] @ matrix * signs[1]).sum(dim=1))
                continue
            lead = len(parts[0]) if block.kind == "channels" else 1
            each = [
                (s * part).reshape(block.repeats, lead, -1).sum(dim=2) for s, part in zip(signs, parts, strict=True)
            ]
            sums = torch.stack(each).sum(dim=0)
            pieces = block.channels_of(lead) if block.kind == "channels" else [slice(0, 1)]
            found.append(torch.stack([sums[:, piece].sum(dim=1) for piece in pieces], dim=1).reshape(-1))
        return torch.cat(found)

    def gain(self, target: Floats) -> float:
        """Return what is learned of a target, float64[n], relative to the average over seeds: v . estimate(v) / |v|^2.

        v is the target where something moves.
        """
        parts = {name: torch.from_numpy(value) for name, value in self.layout.split(target).items()}
        shares = np.concatenate([np.full(block.scalars, 1 / block.repeats) for block in self.recipe.blocks])
        whole = float(np.square(target[self.covered]).sum())
        return float(np.square(self.along(parts).numpy()) @ shares) / whole if whole else 1.0

    @cached_property
    def _signs(self) -> Sequence[Sequence[Tensor]]:
        """The signs of each block: u and v of one of rank one, else on each tensor."""
        found, shapes = [], self.layout.shapes
        for block, key in zip(self.recipe.blocks, self.keys, strict=True):
            drawn = block.signs(shapes, key)
            rank_one = block.kind == "rank-one"
            signs = block.sides(shapes, drawn) if rank_one else block.by_tensor(shapes, drawn).values()
            found.append([torch.tensor(one, dtype=torch.float64) for one in signs])
        return found


def size_of(block: LayerBlock, layout: Layout) -> int:
    """Return how many parameters a block has."""
    return sum(math.prod(layout.shapes[name]) for name in block.tensors)


def cosine_expected(some: Sequence[LayerBlock], layout: Layout, true: Floats, silos: int = 1) -> float:
    """Return about what the estimate of these blocks scores, by E|estimate|^2 of each (`silo.blocks`).

    true: the gradient, float64[n]. silos: how many draw moves of their own.
    """
    parts, whole, estimated = layout.split(true), 0.0, 0.0
    for block in some:
        square = sum(float(np.square(parts[name]).sum()) for name in block.tensors)
        entries, extra = size_of(block, layout), 0.0
        if block.kind == "channels":
            channels = layout.shapes[block.tensors[0]][0]
            entries = entries // channels * -(-channels // block.pieces)
        if block.repeats:
            extra = (entries - 1) / (block.repeats * silos)
        whole, estimated = whole + square, estimated + square * (1 + extra)
    return math.sqrt(whole / estimated) if estimated else 0.0
