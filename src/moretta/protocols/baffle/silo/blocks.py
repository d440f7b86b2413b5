"""One block of layers at a time: what is moved in a round, and what the losses' differences say about it.

Moving all n parameters at once gives an estimate with n/K of the gradient's square as noise, and each of the K costs a
whole forward pass. Here a batch goes forward once, the outputs a of every layer are kept, and a move of one layer only
runs what comes after it. x = (L(w + s d) - L(w)) / s of a move d, with form "central" of the pair w + s d and w - s d.
G: the gradient of the block, R: its repeats, all signs independent, from the seed that all roles share.

    kind       one move                                             estimate of G               E|estimate|^2 / |G|^2
    channels   signs on the e weights of one output channel (or     1/R sum_r x_r d_r           1 + (e - 1) / R
               of several, where K is smaller than the channels)
    rank-one   u v^T of a linear layer, signs u [m] and v [n]; a    1/R sum_r x_r u_r v_r^T     1 + (m n - 1) / R
               row's output moves by u (v . a)
    joint      signs on all e entries of a layer                    1/R sum_r x_r d_r           1 + (e - 1) / R
    anew       the same for one tensor that several layers read, or whose layer is not known: all after it runs anew
    units      z_j, one output of a linear layer, in all rows       1/N sum_i g_ij a_i          1, no noise of signs

g_ij is row i's own difference, so that N rows' moves of one unit are one forward pass. Each estimate is unbiased up to
terms of s; those with signs even up to s^2, as signs have no third moments.

A linear layer's bias is a further column of its matrix, whose input is 1; a convolution's is a further weight of its
channel. The scalars of all blocks go through the secure sum side by side, as without blocks. Estimates of units are as
long as their layers and go beside them: `moretta.protocols.baffle.silo.estimate_upload`.

Differs from the paper, which moves all parameters at once.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.errors import ParameterError
from moretta.protocols.baffle.silo.forward import Layout
from moretta.secure_aggregation.keystream import Keystream, derive

if TYPE_CHECKING:
    from moretta.protocols.baffle.silo.recipe import Recipe

Kind = Literal["channels", "rank-one", "joint", "anew", "units"]
Signs = NDArray[np.int8]
OTHERS = 16  # moves of a block that is no convolution, normalisation or linear layer, where nobody says


@dataclass(frozen=True)
class Block:
    """What is moved together, or unit by unit.

    name: of the layer, or of the one tensor. tensors: the trained ones, by name; the weight before the bias.
    repeats: R, 0 of units. pieces: how many moves a repeat has, each of its own channels; 1 of other kinds.
    """

    name: str
    kind: Kind
    tensors: tuple[str, ...]
    repeats: int = 0
    pieces: int = 1

    @property
    def scalars(self) -> int:
        """How many scalars are uploaded; of units none."""
        return self.repeats * self.pieces

    def moves(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return how many moves a round has."""
        return shapes[self.tensors[0]][0] if self.kind == "units" else self.scalars

    def signs(self, shapes: Mapping[str, tuple[int, ...]], key: bytes) -> Signs:
        """Return the signs of all moves, int8[R, e]; of rank one u and v, one behind the other."""
        entries = sum(self._sides(shapes)) if self.kind == "rank-one" else self._size(shapes)
        drawn = Keystream(key).octets(-(-self.repeats * entries // 8))
        bits = np.unpackbits(drawn, count=self.repeats * entries, bitorder="little")
        return (1 - 2 * bits.astype(np.int8)).reshape(self.repeats, entries)

    def by_tensor(self, shapes: Mapping[str, tuple[int, ...]], signs: Signs) -> dict[str, Signs]:
        """Return the signs on each tensor, [R, ...], of a block that is not of rank one."""
        found, start = dict[str, Signs](), 0
        for name in self.tensors:
            end = start + math.prod(shapes[name])
            found[name] = signs[:, start:end].reshape(-1, *shapes[name])
            start = end
        return found

    def sides(self, shapes: Mapping[str, tuple[int, ...]], signs: Signs) -> tuple[Signs, Signs]:
        """Return u, [R, m], and v, [R, n], of a block of rank one; the bias has the last column of v."""
        rows, _ = self._sides(shapes)
        return signs[:, :rows], signs[:, rows:]

    def channels_of(self, channels: int) -> list[slice]:
        """Return the channels of each piece."""
        width = -(-channels // self.pieces)
        return [slice(start, min(start + width, channels)) for start in range(0, channels, width)]

    def estimate(
        self, shapes: Mapping[str, tuple[int, ...]], signs: Signs, scalars: NDArray[np.float64]
    ) -> dict[str, NDArray[np.float64]]:
        """Return the estimate of each tensor's gradient. scalars: x of each move, [R pieces], repeat by repeat."""
        if self.kind == "rank-one":
            u, v = (side.astype(np.float64) for side in self.sides(shapes, signs))
            matrix = (u * scalars[:, None]).T @ v / self.repeats
            weight = shapes[self.tensors[0]]
            parts = [matrix[:, : weight[1]].reshape(weight), matrix[:, weight[1] :].reshape(-1)]
            return dict(zip(self.tensors, parts, strict=False))
        found = dict[str, NDArray[np.float64]]()
        for name, moved in self.by_tensor(shapes, signs).items():
            weights = scalars[:, None]
            if self.kind == "channels":
                widths = [part.stop - part.start for part in self.channels_of(shapes[name][0])]
                weights = np.repeat(scalars.reshape(self.repeats, self.pieces), widths, axis=1)
            lead = weights.shape[1]
            joined = np.einsum("rc,rce->ce", weights, moved.reshape(self.repeats, lead, -1).astype(np.float64))
            found[name] = joined.reshape(shapes[name]) / self.repeats
        return found

    def _sides(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        units, inputs = shapes[self.tensors[0]]
        return units, inputs + len(self.tensors) - 1

    def _size(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return sum(math.prod(shapes[name]) for name in self.tensors)


@dataclass(frozen=True)
class Rule:
    """How many moves blocks have, and how linear layers move.

    k: about how many by patterns of blocks' names, the first that fits; without patterns 4 a channel up to 64 of
    convolutions, 2 up to 32 of normalisations, m + n of linear layers, 16 of others: estimates whose squares are some
    10 to 40 times the gradient's, for networks of usual widths. linear: "scalars" or "activations".
    """

    k: tuple[tuple[str, int], ...] = ()
    linear: str = "scalars"

    def block(self, name: str, kind: Kind, tensors: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> Block:
        """Return a block with its moves. Raises `moretta.errors.ParameterError` for one that no pattern names."""
        shape = shapes[tensors[0]]
        if kind == "units":
            return Block(name, kind, tuple(tensors))
        k = next((count for pattern, count in self.k if fnmatch.fnmatchcase(name, pattern)), 0)
        if not k and self.k:
            raise ParameterError(f'k: the block `{name}` is left out; add it, or "*" for all others')
        if kind != "channels":
            k = k or (sum(shape) + len(tensors) - 1 if kind == "rank-one" else OTHERS)
            return Block(name, kind, tuple(tensors), k)
        k = k or (min(2 * shape[0], 32) if len(shape) == 1 else min(4 * shape[0], 64))
        pieces = -(-shape[0] // -(-shape[0] // k))
        return Block(name, kind, tuple(tensors), -(-k // pieces), pieces)

    def check(self, blocks: Sequence[Block], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `moretta.errors.ParameterError` unless blocks that another role made are those of this rule."""
        names = [name for block in blocks for name in block.tensors]
        if sorted(names) != sorted(shapes):
            raise ParameterError("the blocks of this cut model leave trained tensors out, or have them twice")
        for block in blocks:
            fits = block.kind != "rank-one" or len(shapes[block.tensors[0]]) == 2
            if block.kind == "units":
                fits = self.linear == "activations" and len(shapes[block.tensors[0]]) == 2
            if block.kind == "channels":
                fits = len({shapes[name][0] for name in block.tensors}) == 1
            if not fits or block != self.block(block.name, block.kind, block.tensors, shapes):
                raise ParameterError(
                    f"the block `{block.name}` of this cut model has other moves than this silo is set for; use the "
                    "same k and linear everywhere"
                )


@runtime_checkable
class MovesBlocks(Protocol):
    """A `moretta.protocols.baffle.silo.forward.Forward` that keeps layers' outputs and runs what comes after one."""

    layout: Layout
    blocks: tuple[Block, ...]

    @property
    def rows_at_once(self) -> int | None:
        """How many rows at most to start with; None is any number."""

    def start(self, at: Array, x: Array) -> Array:
        """Run a batch forward at flat parameters and keep what moves need. Returns the outputs, [rows, outputs]."""

    def moved(self, block: Block, signs: Signs, distance: float) -> Iterator[Array]:
        """Yield the outputs at w + distance d, some moves at a time, [moves, rows, outputs], in the scalars' order.

        Of units, whose signs are empty: one move for each unit.
        """

    def inputs(self, block: Block) -> Array:
        """Return what a layer of units reads, float[rows, n]."""


class Differences(NamedTuple):
    """What a batch's forward passes give.

    derivatives: x of each move and row, float64[moves, rows]. losses: the rows', float64[rows]. estimate: of the layers
    of units, float64[n] of the flat parameters and zero elsewhere; None without such layers.
    """

    derivatives: NDArray[np.float64]
    losses: NDArray[np.float64]
    estimate: NDArray[np.float64] | None = None


def key_of(seed: bytes, number: int, *purpose: int | str | bytes) -> bytes:
    """Return the key of the signs of block `number` for one purpose: the run, the round, the parameters' hash."""
    return derive(seed, "baffle blocks", *purpose, number)


def differences(
    recipe: Recipe,
    forward: MovesBlocks,
    at: Array,
    batches: Sequence[tuple[Array, Array]],
    keys: Sequence[bytes],
) -> list[Differences]:
    """Return those of several silos' batches, which go through the model as one: rows do not affect each other.

    at: w, flat. batches: x and y, as `Forward.outputs` and `RowLosses` take them. keys: of each block's signs.
    """
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    silo_of = np.repeat(np.arange(len(batches)), [len(rows) for rows, _ in batches])
    shapes = forward.layout.shapes
    signs = [block.signs(shapes, key) for block, key in zip(recipe.blocks, keys, strict=True)]
    sums = [dict[str, NDArray[np.float64]]() for _ in batches]
    parts, step = list[tuple[NDArray[np.float64], NDArray[np.float64]]](), forward.rows_at_once or max(1, len(x))
    with np.errstate(invalid="ignore", over="ignore"):  # the caller looks for losses that are not finite
        for start in range(0, len(x), step):
            some = slice(start, start + step)
            own = recipe.loss(forward.start(at, x[some])[None], y[some])[0]
            found = [np.zeros((0, len(own)))]
            for block, drawn in zip(recipe.blocks, signs, strict=True):
                slopes = _slopes(recipe, forward, block, drawn, own, y[some])
                if block.kind == "units":
                    _add_up(sums, block, slopes, forward.inputs(block), silo_of[some])
                else:
                    found.append(slopes)
            parts.append((np.concatenate(found), own))
    derivatives, losses = (np.concatenate(all_rows, axis=-1) for all_rows in zip(*parts, strict=True))
    return [
        Differences(
            derivatives[:, silo_of == silo], losses[silo_of == silo], _mean(forward.layout, sums[silo], len(rows))
        )
        for silo, (rows, _) in enumerate(batches)
    ]


def _slopes(
    recipe: Recipe, forward: MovesBlocks, block: Block, signs: Signs, own: NDArray[np.float64], y: Array
) -> NDArray[np.float64]:
    """Return x of each move and row, float64[moves, rows]. own: the rows' losses."""

    def losses(distance: float) -> NDArray[np.float64]:
        return np.concatenate([recipe.loss(outputs, y) for outputs in forward.moved(block, signs, distance)])

    if recipe.form == "central":
        return (losses(recipe.sigma) - losses(-recipe.sigma)) / (2 * recipe.sigma)
    return (losses(recipe.sigma) - own) / recipe.sigma


def _add_up(
    sums: Sequence[dict[str, NDArray[np.float64]]],
    block: Block,
    slopes: NDArray[np.float64],
    inputs: Array,
    silo_of: NDArray[np.intp],
) -> None:
    """Add rows' slopes of units times what the layer read to each silo's sums. silo_of: of each row."""
    for silo in np.unique(silo_of):
        own = silo_of == silo
        products = slopes[:, own] @ inputs[own].astype(np.float64), slopes[:, own].sum(axis=1)
        for name, product in zip(block.tensors, products, strict=False):
            sums[silo][name] = sums[silo].get(name, 0.0) + product


def _mean(layout: Layout, sums: Mapping[str, NDArray[np.float64]], rows: int) -> NDArray[np.float64] | None:
    return _flat(layout, sums) / rows if sums else None


def gradient(
    blocks: Sequence[Block],
    layout: Layout,
    scalars: NDArray[np.float64],
    estimate: NDArray[np.float64] | None,
    keys: Sequence[bytes],
) -> NDArray[np.float64]:
    """Return the estimate of the whole gradient, float64[n]. scalars: mean x of each move. estimate: as above."""
    found, start = dict[str, NDArray[np.float64]](), 0
    for block, key in zip(blocks, keys, strict=True):
        if block.kind != "units":
            part = scalars[start : start + block.scalars]
            found |= block.estimate(layout.shapes, block.signs(layout.shapes, key), part)
            start += block.scalars
    whole = _flat(layout, found)
    return whole if estimate is None else whole + estimate


def _flat(layout: Layout, tensors: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    zeros = (np.zeros(shape) if name not in tensors else tensors[name] for name, shape in layout.shapes.items())
    return np.concatenate([np.ravel(tensor) for tensor in zeros])
