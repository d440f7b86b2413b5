"""The pattern of a tensor under a key: the scales that multiply its elements, and its permuted axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moretta.contract.messages import Array
from moretta.protocols.pbpfl.solver import ANY, Channels, Ids, SignedUnion, Stored, compress, names_in

Indices = NDArray[np.int64]
Factors = NDArray[np.float64]

_ONE = np.array([-1])  # the place of the 1 among the factors


def factors(scales: NDArray[np.float64]) -> Factors:
    """Return the factors of tensors: the scales, their inverses and a 1, float64[2 free + 1]."""
    return np.concatenate([scales, 1.0 / scales, [1.0]])


@dataclass(frozen=True, eq=False)
class Positions:
    """The channels along an axis.

    A channel may be in several positions (a flattened map, the rows of queries and keys).

    Attributes:
        channel: The channel at each position, -1 for one that stays.
        rank: The number of a position among those of its channel.
        place: The positions, sorted by channel and rank.
        first: first[c] is where the positions of channel c begin in `place`; first[-1] is 0.
    """

    channel: Indices
    rank: Indices
    place: Indices
    first: Indices

    @classmethod
    def of(cls, channel: Indices, rank: Indices) -> Positions:
        """Sort the positions."""
        place = np.lexsort((rank, channel))
        first = np.searchsorted(channel[place], np.arange(channel.max() + 1))
        return cls(channel, rank, place, np.append(first, 0))

    def order(self, moved: Indices) -> Indices:
        """Return for each position the one whose content it receives. moved: the new channel by the old; -1 at -1."""
        order: Indices = self.place[self.first[moved[self.channel]] + self.rank]
        return order


def _counted(channel: Indices, order: Indices) -> Indices:
    """Return how many positions of the same channel precede each, in an order sorted by channel."""
    ordered = channel[order]
    rank = np.empty_like(channel)
    rank[order] = np.arange(len(channel)) - np.searchsorted(ordered, ordered)
    return rank


Orders = Callable[[Positions], Indices]


def orders(moved: Indices) -> Orders:
    """Return `Positions.order` for `moved`, cached: many tensors have the same channels along an axis."""
    return cache(partial(Positions.order, moved=np.append(moved, -1)))


@dataclass(frozen=True, eq=False)
class Shuffle:
    """An axis whose channels move."""

    axis: int
    positions: Positions


@dataclass(frozen=True, eq=False)
class Pattern:
    """R of one tensor, and its axes that are permuted after scaling.

    Attributes:
        follows: R as a product of arrays, broadcastable to the tensor; each entry is a place among the `factors`. For
            a linear layer's weight the shapes are [out, 1] and [1, in]; for a convolution's the second is [1, in,
            height, width].
    """

    shape: tuple[int, ...]
    follows: tuple[Indices, ...] = ()
    shuffles: tuple[Shuffle, ...] = ()

    @classmethod
    def joined(cls, patterns: Sequence[Pattern]) -> Pattern:
        """Return the pattern of one-dimensional tensors laid end to end, which follows a key as each does alone."""
        sizes = [pattern.shape[0] for pattern in patterns]
        follows = []
        for term in range(max(len(pattern.follows) for pattern in patterns)):
            places = [pattern.follows[term] if term < len(pattern.follows) else _ONE for pattern in patterns]
            follows.append(np.concatenate([np.broadcast_to(*pair) for pair in zip(places, sizes, strict=True)]))
        if not any(pattern.shuffles for pattern in patterns):
            return cls((sum(sizes),), tuple(follows))
        axes = [
            pattern.shuffles[0].positions if pattern.shuffles else Positions.of(np.full(size, -1), np.arange(size))
            for pattern, size in zip(patterns, sizes, strict=True)
        ]
        number = np.repeat(np.arange(len(sizes)), sizes)
        channel = np.concatenate([axis.channel for axis in axes])
        # Ranks count within one tensor, in which all channels of a block occur equally often (`settle_axes`). So if the
        # count goes on from tensor to tensor, corresponding positions have the same rank.
        rank = _counted(channel, np.lexsort((np.concatenate([axis.rank for axis in axes]), number, channel)))
        return cls((sum(sizes),), tuple(follows), (Shuffle(0, Positions.of(channel, rank)),))

    def scales(self, free: int) -> set[int]:
        """Return the indices, below `free`, of the free scales in R."""
        places = np.unique(np.concatenate([_ONE, *map(np.ravel, self.follows)]))
        return {*(places[(places >= 0) & (places < 2 * free)] % free).tolist()}

    def multiplier(self, factors: Factors) -> NDArray[np.float64]:
        """Return R, broadcastable to the tensor, float64."""
        if not self.follows:
            return np.ones((1,) * len(self.shape))
        product, *others = (factors[places] for places in self.follows)
        for other in others:
            product = product * other
        return product

    def perturb(self, array: Array, factors: Factors, orders: Orders) -> Array:
        """Return a copy: R o W with its channels permuted, in the dtype of W and rounded once; whole numbers stay."""
        noisy = np.array(array, order="C")
        if array.dtype.kind != "f":
            return noisy
        if self.follows:
            np.multiply(noisy, self.multiplier(factors), out=noisy, casting="same_kind")  # computed in float64
        return self.permute(noisy, orders)

    def recover(self, array: Array, factors: Factors, orders: Orders) -> Array:
        """Return R o G of a gradient G of the noisy tensor, un-permuted, in float64; `orders` are the inverse ones."""
        return np.asarray(self.permute(array, orders) * self.multiplier(factors))

    def permute(self, array: Array, orders: Orders) -> Array:
        """Return the array with its channels in another order."""
        for shuffle in self.shuffles:
            array = array.take(orders(shuffle.positions), axis=shuffle.axis)
        return array


def follows(stored: Stored, scales: SignedUnion, number: dict[int, int]) -> tuple[Indices, ...]:
    """Return the factors of R of a tensor; `number` maps each free root to its place in the key."""
    factors = []
    for ids in (stored.out, stored.into):
        roots = None if ids is None else compress(scales.values(ids.scale)).numpy()
        if roots is None or not np.any((roots != 0) & (np.abs(roots) != ANY)):
            continue
        places = [_place(root, number) for root in roots.reshape(-1).tolist()]
        factors.append(_filled(np.array(places, dtype=np.int64).reshape(roots.shape), stored.shape))
    return tuple(factors)


def _filled(places: Indices, shape: Sequence[int]) -> Indices:
    """Return places broadcast along all axes after the last on which they vary, unless that is the first axis.

    A filter's 3 x 3 entries and its channels then form one row, which keeps NumPy's inner loops long.
    """
    varying = [axis for axis, size in enumerate(places.shape) if size > 1]
    if not varying or varying[-1] == 0:
        return places
    return np.broadcast_to(places, (*places.shape[: varying[-1] + 1], *shape[varying[-1] + 1 :])).copy()


def _place(root: int, number: dict[int, int]) -> int:
    """Return the place of a free root's scale or inverse among the `factors`; -1, the 1 at their end, for others."""
    if abs(root) not in number:
        return -1
    return number[abs(root)] + (len(number) if root < 0 else 0)


def settle_axes(tensors: Sequence[Stored], channels: Channels) -> None:
    """Pin channels that no permutation of a tensor's axes can move; tag the others by how often an axis has them."""
    why = "its tensor has no axis of its own for it"
    settled = False
    while not settled:
        settled = True
        for stored in tensors:
            for ids, axis in zip(_terms(stored), _moving_axes(stored, channels), strict=True):
                if axis is None:
                    settled = False
                    channels.force_all(ids.channel, why)
    for stored in tensors:
        for labels in _labels(stored, channels).values():
            distinct, counts = torch.unique(labels, return_counts=True)
            channels.tag(distinct, counts)


def shuffles(
    stored: Stored, channels: Channels, number: dict[int, int], known: dict[tuple[bytes, bytes], Positions]
) -> tuple[Shuffle, ...]:
    """Return the axes of a tensor that move.

    Args:
        number: Maps each moving root to its place in the permutation.
        known: The positions of other tensors, which this one shares and adds to.
    """
    shuffles_found = []
    for axis, labels in sorted(_labels(stored, channels).items()):
        places = [number.get(root, -1) for root in channels.values(labels).tolist()]
        if max(places) >= 0:
            marks = [channels.marks(label) for label in labels.tolist()]
            channel = np.array(places, dtype=np.int64)
            # Positions with equal marks correspond when channels change places.
            order = np.array(sorted(range(len(channel)), key=lambda at: (channel[at], marks[at], at)))
            rank = _counted(channel, order)
            positions = known.setdefault((channel.tobytes(), rank.tobytes()), Positions.of(channel, rank))
            shuffles_found.append(Shuffle(axis, positions))
    return tuple(shuffles_found)


def _terms(stored: Stored) -> list[Ids]:
    return [ids for ids in (stored.out, stored.into) if ids is not None]


def _moving_axes(stored: Stored, channels: Channels) -> list[int | None]:
    """Return for each term the axis along which its channels move: -1 if none moves, None if one is not enough."""
    axes: list[int | None] = []
    for ids in _terms(stored):
        wide = _wide(channels.values(ids.channel))
        moves = bool(names_in(channels.values(ids.channel)))
        axis = (wide[0] if wide else None) if moves else -1
        axes.append(None if moves and (wide != _wide(ids.channel) or len(wide) != 1 or axis in axes) else axis)
    return axes


def _wide(numbers: Tensor) -> list[int]:
    return [axis for axis, size in enumerate(compress(numbers).shape) if size > 1]


def _labels(stored: Stored, channels: Channels) -> dict[int, Tensor]:
    axes = zip(_terms(stored), _moving_axes(stored, channels), strict=True)
    return {axis: compress(ids.channel).reshape(-1) for ids, axis in axes if axis is not None and axis >= 0}
