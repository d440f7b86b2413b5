"""The settings of a silo, in plain data, as an edge client has no pydantic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moretta.protocols.baffle.silo.blocks import LayerBlock, Rule, key_of
from moretta.protocols.baffle.silo.directions import Directions, keys_of
from moretta.protocols.baffle.silo.estimate import Form, directions_of
from moretta.protocols.baffle.silo.local_steps import BETAS, LocalSteps
from moretta.protocols.common.targets import RowLosses


@dataclass(frozen=True)
class Recipe:
    """The settings of `moretta.protocols.baffle.params.BAFFLE` that a silo needs, each as there.

    loss: of a row. most: the largest K. own_directions: whether each silo draws its own and uploads its estimate.
    clip_entry: the largest entry of a silo's estimate, 0 for any. augment: how images of a batch are varied
    (`augmentation.cropped`), empty: not. batch_statistics: whether those of BatchNorm go up too. At the epoch
    level alone: local_epochs; rates, the learning rate of each round; adam, whether steps are Adam's, of these betas,
    else SGD's; weight_decay; clip_norm, the largest norm of a step's gradient, 0 for any. rule: of blocks of layers
    that move one after the other; None where all parameters move at once. blocks: of the model, once it is known;
    `most` is then how many moves a round has.
    """

    form: Form
    sigma: float
    loss: RowLosses
    most: int
    direction: str = "rademacher"
    orthogonal: bool = False
    seed_pool: int = 0
    own_directions: bool = False
    local_epochs: int = 0
    rates: tuple[float, ...] = ()
    clip_norm: float = 0.0
    adam: bool = False
    weight_decay: float = 0.0
    batch_statistics: bool = False
    betas: tuple[float, float] = BETAS
    clip_entry: float = 0.0
    augment: str = ""
    rule: Rule | None = None
    blocks: tuple[LayerBlock, ...] = ()

    def by(self, blocks: Sequence[LayerBlock], shapes: Mapping[str, tuple[int, ...]]) -> Recipe:
        """Return the same with the blocks of a model. shapes: of its trained tensors."""
        return replace(self, blocks=tuple(blocks), most=sum(block.moves(shapes) for block in blocks))

    @property
    def scalars(self) -> int:
        """How many scalars a round of blocks uploads."""
        return sum(block.scalars for block in self.blocks)

    @property
    def units(self) -> tuple[str, ...]:
        """The tensors of layers of units, whose estimates are uploaded whole."""
        return tuple(name for block in self.blocks if block.kind == "units" for name in block.tensors)

    def keys(self, seed: bytes, *purpose: int | str | bytes) -> tuple[bytes, ...]:
        """Return the key of each block's signs for one purpose, as of `directions`."""
        return tuple(key_of(seed, number, *purpose) for number in range(len(self.blocks)))

    def steps(self) -> LocalSteps:
        """Return what takes a silo's own steps at the epoch level."""
        return LocalSteps(adam=self.adam, decay=self.weight_decay, clip=self.clip_norm, betas=self.betas)

    def directions(self, k: int, size: int, seed: bytes, *purpose: int | str | bytes) -> Directions:
        """Return the directions of K = k for one purpose: the run, the round, the parameters' hash.

        seed: that all roles share, or one that a silo keeps for its own directions.
        """
        count = directions_of(self.form, k)
        keys = keys_of(seed, count, *purpose, orthogonal=self.orthogonal, pool=self.seed_pool)
        return Directions(keys, count, size, self.direction, orthogonal=self.orthogonal)
