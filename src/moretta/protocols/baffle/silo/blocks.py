"""One block of layers at a time: the moves of a round, and the estimates from the losses' differences.

Moving all n parameters at once gives an estimate with n/K of the gradient's square as noise, and each of the K costs a
whole forward pass. Here a batch goes forward once, the outputs a of every layer are kept, and a move of one layer only
runs the layers after it. A move d has x = (L(w + s d) - L(w)) / s, or with form "central" the same of the pair w + s d
and w - s d. G: the gradient of the block, R: its repeats, all signs independent, from the seed that all roles share.

    kind       one move                                             estimate of G               E|estimate|^2 / |G|^2
    channels   signs on the e weights of one output channel (or     1/R sum_r x_r d_r           1 + (e - 1) / R
               of several, where K is smaller than the channels)
    rank-one   u v^T of a linear layer, signs u [m] and v [n]; a    1/R sum_r x_r u_r v_r^T     1 + (m n - 1) / R
               row's output moves by u (v . a)
    joint      signs on all e entries of a layer                    1/R sum_r x_r d_r           1 + (e - 1) / R
    anew       the same for one tensor that several layers read, or whose layer is unknown: all after it runs anew
    units      z_j, one output of a linear layer, in all rows       1/N sum_i g_ij a_i          1, no noise of signs

g_ij is row i's own difference, so that N rows' moves of one unit are one forward pass. Each estimate is unbiased up to
terms of s; those with signs even up to s^2, as signs have no third moments.

A linear layer's bias is a further column of its matrix, whose input is 1; a convolution's is a further weight of its
channel. The scalars of all blocks go through the secure sum side by side, as without blocks. Estimates of units are as
long as their layers, and are further tensors of the upload: `moretta.protocols.baffle.silo.estimate`.
Differs from the paper, which moves all parameters at once.
"""

import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.errors import ParameterError
from moretta.protocols.baffle.silo.forward import Layout
from moretta.secure_aggregation.keystream import Keystream, derive

Kind = Literal["channels", "rank-one", "joint", "anew", "units"]
Signs = NDArray[np.int8]
OTHERS = 16  # default moves of a block that is no convolution, normalisation or linear layer


@dataclass(frozen=True)
class LayerBlock:
    """A block: parameters that move together, or unit by unit.

    Attributes:
        name: Of the layer, or of the one tensor.
        tensors: The trained ones, by name; the weight before the bias.
        repeats: R, 0 for units.
        pieces: Moves of a repeat, each with its own channels; 1 for other kinds.
    """

    name: str
    kind: Kind
    tensors: tuple[str, ...]
    repeats: int = 0
    pieces: int = 1

    @property
    def scalars(self) -> int:
        """The number of uploaded scalars, 0 for units."""
        return self.repeats * self.pieces

    def moves(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return the number of a round's moves."""
        return shapes[self.tensors[0]][0] if self.kind == "units" else self.scalars

    def signs(self, shapes: Mapping[str, tuple[int, ...]], key: bytes) -> Signs:
        """Return the signs of all moves, int8[R, e]; for rank one u and v, end to end."""
        entries = sum(self._sides(shapes)) if self.kind == "rank-one" else self._size(shapes)
        drawn = Keystream(key).octets(-(-self.repeats * entries // 8))
        bits = np.unpackbits(drawn, count=self.repeats * entries, bitorder="little")
        return (1 - 2 * bits.astype(np.int8)).reshape(self.repeats, entries)

    def by_tensor(self, shapes: Mapping[str, tuple[int, ...]], signs: Signs) -> dict[str, Signs]:
        """Return the signs on each tensor, [R, ...], of a block that is not of rank one."""
        signs_of, start = dict[str, Signs](), 0
        for name in self.tensors:
            end = start + math.prod(shapes[name])
            signs_of[name] = signs[:, start:end].reshape(-1, *shapes[name])
            start = end
        return signs_of

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
        estimates = dict[str, NDArray[np.float64]]()
        for name, moved in self.by_tensor(shapes, signs).items():
            weights = scalars[:, None]
            if self.kind == "channels":
                widths = [part.stop - part.start for part in self.channels_of(shapes[name][0])]
                weights = np.repeat(scalars.reshape(self.repeats, self.pieces), widths, axis=1)
            lead = weights.shape[1]
            joined = np.einsum("rc,rce->ce", weights, moved.reshape(self.repeats, lead, -1).astype(np.float64))
            estimates[name] = joined.reshape(shapes[name]) / self.repeats
        return estimates

    def _sides(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        units, inputs = shapes[self.tensors[0]]
        return units, inputs + len(self.tensors) - 1

    def _size(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return sum(math.prod(shapes[name]) for name in self.tensors)


@dataclass(frozen=True)
class Rule:
    """How many moves blocks have, and how linear layers move.

    Attributes:
        k: The approximate number, by patterns of blocks' names; the first match counts. Without patterns 4 a channel up
            to 64 for convolutions, 2 up to 32 for normalisations, m + n for linear layers, 16 for others. The squares
            of estimates are then some 10 to 40 times the gradient's, for networks of usual widths.
        linear: "scalars" or "activations".
    """

    k: tuple[tuple[str, int], ...] = ()
    linear: str = "scalars"

    def block(self, name: str, kind: Kind, tensors: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> LayerBlock:
        """Return a block with its moves. Raises `moretta.errors.ParameterError` for one that matches no pattern."""
        shape = shapes[tensors[0]]
        if kind == "units":
            return LayerBlock(name, kind, tuple(tensors))
        k = next((count for pattern, count in self.k if fnmatch.fnmatchcase(name, pattern)), 0)
        if not k and self.k:
            raise ParameterError(f'k: the block `{name}` is left out; add it, or "*" for all others')
        if kind != "channels":
            k = k or (sum(shape) + len(tensors) - 1 if kind == "rank-one" else OTHERS)
            return LayerBlock(name, kind, tuple(tensors), k)
        k = k or (min(2 * shape[0], 32) if len(shape) == 1 else min(4 * shape[0], 64))
        pieces = -(-shape[0] // -(-shape[0] // k))
        return LayerBlock(name, kind, tuple(tensors), -(-k // pieces), pieces)

    def check(self, blocks: Sequence[LayerBlock], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `moretta.errors.ParameterError` unless another role's blocks follow this rule."""
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
    """A `moretta.protocols.baffle.silo.forward.Forward` that keeps layers' outputs and runs the part after one."""

    layout: Layout
    blocks: tuple[LayerBlock, ...]

    @property
    def rows_at_once(self) -> int | None:
        """The most rows to start with; None for any number."""

    def start(self, at: Array, x: Array) -> Array:
        """Run a batch forward at flat parameters and keep what moves need. Returns the outputs, [rows, outputs]."""

    def moved(self, block: LayerBlock, signs: Signs, distance: float) -> Iterator[Array]:
        """Yield the outputs at w + distance d, some moves at a time, [moves, rows, outputs], in the scalars' order.

        Units, whose signs are empty, have one move each.
        """

    def inputs(self, block: LayerBlock) -> Array:
        """Return the inputs of a layer of units, float[rows, n]."""


class Differences(NamedTuple):
    """The result of a batch's forward passes.

    Attributes:
        derivatives: x of each move and row, float64[moves, rows].
        losses: The rows', float64[rows].
        estimate: Of the layers of units, float64[n] of the flat parameters and zero elsewhere; None without such
            layers.
    """

    derivatives: NDArray[np.float64]
    losses: NDArray[np.float64]
    estimate: NDArray[np.float64] | None = None


def stretches(count: int, together: int) -> Iterator[slice]:
    """Yield 0 .. count in slices of at most `together` moves."""
    return (slice(start, min(start + together, count)) for start in range(0, count, together))


def key_of(seed: bytes, number: int, *purpose: int | str | bytes) -> bytes:
    """Return the key of the signs of block `number` for one purpose: the run, the round, the parameters' hash."""
    return derive(seed, "baffle blocks", *purpose, number)


def gradient(
    blocks: Sequence[LayerBlock],
    layout: Layout,
    scalars: NDArray[np.float64],
    estimate: NDArray[np.float64] | None,
    keys: Sequence[bytes],
) -> NDArray[np.float64]:
    """Return the estimate of the whole gradient, float64[n]. scalars: mean x of each move. estimate: as above."""
    estimates, start = dict[str, NDArray[np.float64]](), 0
    for block, key in zip(blocks, keys, strict=True):
        if block.kind != "units":
            part = scalars[start : start + block.scalars]
            estimates |= block.estimate(layout.shapes, block.signs(layout.shapes, key), part)
            start += block.scalars
    whole = whole_of(layout, estimates)
    return whole if estimate is None else whole + estimate


def whole_of(layout: Layout, tensors: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return tensors as one flat array, float64[n], with zeros for missing ones."""
    zeros = (np.zeros(shape) if name not in tensors else tensors[name] for name, shape in layout.shapes.items())
    return np.concatenate([np.ravel(tensor) for tensor in zeros])
