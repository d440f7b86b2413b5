"""The settings of a silo, in plain data, as an edge client has no pydantic, and those of its process.

**Own steps** at the epoch level (`LocalSteps`) are SGD's, or those of Adam (Kingma and Ba, 2015) with moments of the
silo's own, without torch::

    m <- m + (1 - b1) (g - m),   v <- b2 v + (1 - b2) g^2,   w <- w - rate m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

The moments stay at the silo from one round to the next, while parameters are averaged in between, as in the authors'
code. They are never sent. A repeated round starts from its first moments, so that its difference does not depend on the
number of asks.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.contract.roles import State
from moretta.protocols.baffle.silo.blocks import LayerBlock, Rule, key_of
from moretta.protocols.baffle.silo.directions import Directions, keys_of
from moretta.protocols.baffle.silo.estimate import Form, directions_of
from moretta.protocols.common.silo_setup import SiloSetup, frozen
from moretta.protocols.common.targets import RowLosses

BETAS, EPS = (0.9, 0.999), 1e-8
COUNTS = struct.Struct("<4q")  # the round, steps before it, steps with it, bytes of a moment's entry


class LocalSteps:
    """Moves parameters along estimates. adam, betas: else plain SGD. decay: L2. clip: largest norm or 0."""

    def __init__(
        self, *, adam: bool, decay: float = 0.0, clip: float = 0.0, betas: tuple[float, float] = BETAS
    ) -> None:
        self._adam, self._decay, self._clip, self._betas = adam, decay, clip, betas
        self._round = self._before = self._done = 0
        self._start = self._now = np.zeros((2, 0), np.float32)  # both moments, [2, n] in the parameters' dtype

    def begin(self, number: int) -> None:
        """Begin round `number`, or begin it again."""
        if number == self._round:
            self._done, self._now = self._before, self._start.copy()
        else:
            self._round, self._before, self._start = number, self._done, self._now.copy()

    def step(self, at: Array, gradient: NDArray[np.float64], rate: float) -> None:
        """Move `at`, float32 or float64 [n], in place."""
        if self._clip:
            gradient = gradient * min(1.0, self._clip / (float(np.linalg.norm(gradient)) or 1.0))
        if self._decay:
            gradient = gradient + self._decay * at
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks that parameters are still finite
            at -= (rate * (self._along(gradient, at) if self._adam else gradient)).astype(at.dtype)

    def _along(self, gradient: NDArray[np.float64], at: Array) -> NDArray[np.float64]:
        if self._now.shape[1] != len(at):
            self._now = np.zeros((2, len(at)), at.dtype)
        self._done += 1
        (mean, square), (beta, two) = self._now, self._betas
        mean += (1 - beta) * (gradient - mean)
        square += (1 - two) * (np.square(gradient) - square)
        return np.asarray(mean / (1 - beta**self._done) / (np.sqrt(square / (1 - two**self._done)) + EPS))

    @property
    def finite(self) -> bool:
        """Whether all moments are finite; an infinite one would stop its parameter in all later rounds."""
        return bool(np.isfinite(self._now).all())

    def state(self) -> State:
        """Return Adam's moments and counts, all as bytes in an edge client's state; else nothing."""
        if not self._adam:
            return {}
        counts = COUNTS.pack(self._round, self._before, self._done, self._now.itemsize)
        return {"counts": counts, "start": self._start.tobytes(), "now": self._now.tobytes()}

    def restore(self, state: State) -> None:
        """Restore what `state` returned."""
        if not self._adam:
            return
        self._round, self._before, self._done, itemsize = COUNTS.unpack(state["counts"])
        kept = (np.frombuffer(state[key], f"f{itemsize}") for key in ("start", "now"))
        self._start, self._now = (moments.reshape(2, -1).copy() for moments in kept)


@dataclass(frozen=True)
class Recipe:
    """The settings of `moretta.protocols.baffle.params.BAFFLE` that a silo needs, with the same meanings.

    Attributes:
        loss: Of a row.
        most: The largest K; with blocks the number of a round's moves.
        own_directions: Whether each silo draws its own and uploads its estimate.
        local_epochs, adam, weight_decay, betas: At the epoch level alone; steps are Adam's with betas, else SGD's.
        rates: At the epoch level, the learning rate of each round.
        clip_norm: At the epoch level, the largest norm of a step's gradient, 0 for any.
        batch_statistics: Whether BatchNorm's are uploaded too.
        clip_entry: The largest entry of a silo's estimate, 0 for any.
        augment: How images of a batch are varied (`augmentation.cropped`), empty for none.
        rule: Of blocks of layers that move one after the other; None if all parameters move at once.
        blocks: Of the model, once known.
        checkpoint_minutes: None saves nothing within a round.
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
    checkpoint_minutes: float | None = None

    def by(self, blocks: Sequence[LayerBlock], shapes: Mapping[str, tuple[int, ...]]) -> Recipe:
        """Return the same with the blocks of a model. shapes: of its trained tensors."""
        return replace(self, blocks=tuple(blocks), most=sum(block.moves(shapes) for block in blocks))

    @property
    def scalars(self) -> int:
        """The number of scalars that a round of blocks uploads."""
        return sum(block.scalars for block in self.blocks)

    @property
    def units(self) -> tuple[str, ...]:
        """The tensors of layers of units, whose estimates are uploaded whole."""
        return tuple(name for block in self.blocks if block.kind == "units" for name in block.tensors)

    def keys(self, seed: bytes, *purpose: int | str | bytes) -> tuple[bytes, ...]:
        """Return the key of each block's signs for one purpose, as of `directions`."""
        return tuple(key_of(seed, number, *purpose) for number in range(len(self.blocks)))

    def steps(self) -> LocalSteps:
        """Return the stepper of a silo's own steps at the epoch level."""
        return LocalSteps(adam=self.adam, decay=self.weight_decay, clip=self.clip_norm, betas=self.betas)

    def directions(self, k: int, size: int, seed: bytes, *purpose: int | str | bytes) -> Directions:
        """Return the directions of K = k for one purpose. seed: of all roles, or a silo's own secret."""
        count = directions_of(self.form, k)
        keys = keys_of(seed, count, *purpose, orthogonal=self.orthogonal, pool=self.seed_pool)
        return Directions(keys, count, size, self.direction, orthogonal=self.orthogonal)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Recipe:
        """Return the settings of their JSON (`dataclasses.asdict`)."""
        rule = values["rule"]
        moves = rule and tuple((str(pattern), int(count)) for pattern, count in rule["k"])
        built = {"loss": RowLosses(**frozen(values["loss"])), "rule": rule and Rule(**rule | {"k": moves})}
        return cls(**frozen(values) | built)


@dataclass(frozen=True)
class EdgeSettings:
    """The input of an edge client's process, without its rows and secrets, which are sent separately.

    Args:
        setup: of the silo.
        recipe: of its uploads.
        precision: of its graph.
        memory_limit_mib: its largest memory.
        micro_batch: rows that run at a time; None for as many as fit, or without a limit 4.
    """

    setup: SiloSetup
    recipe: Recipe
    precision: str = "float32"
    memory_limit_mib: float | None = None
    micro_batch: int | None = None

    def dump(self) -> str:
        """Return the settings as JSON."""
        own = {"precision": self.precision, "memory_limit_mib": self.memory_limit_mib, "micro_batch": self.micro_batch}
        return json.dumps({"setup": self.setup.plain(), "recipe": asdict(self.recipe), **own}, sort_keys=True)

    @classmethod
    def load(cls, text: str, x: Array, y: Array) -> EdgeSettings:
        """Return the settings that `dump` wrote, with their rows (`SiloSetup.sent`). Raises as `SiloSetup.of`."""
        values: dict[str, Any] = json.loads(text)
        setup, recipe = SiloSetup.of(values.pop("setup"), x, y), Recipe.of(values.pop("recipe"))
        return cls(setup, recipe, **values)
