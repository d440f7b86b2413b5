"""How one tensor follows a key: which scales multiply its elements, and which of its axes are permuted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moretta.protocols.pbpfl.solver import ANY, Channels, Ids, SignedUnion, Stored, compress, names_in

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Follow:
    """One factor of R: scale[index] ** sign, both broadcastable to the tensor; index -1 is scale 1.

    For the weight of a linear layer one factor has the shape [out, 1], the other [1, in].
    """

    index: Indices
    sign: NDArray[np.int8]


@dataclass(frozen=True, eq=False)
class Shuffle:
    """An axis whose channels move: channel[i] is the channel at position i, -1 for one that stays.

    A channel may stand in several positions (a flattened map, the rows of queries and keys); rank counts them.
    """

    axis: int
    channel: Indices
    rank: Indices

    def order(self, moved: Indices) -> Indices:
        """Return for each position the position whose content comes there, when channel c is replaced by moved[c]."""
        positions = np.lexsort((self.rank, self.channel))
        channels = self.channel[positions]
        moving = self.channel >= 0
        order = np.arange(len(self.channel))
        starts = np.searchsorted(channels, moved[self.channel[moving]])
        order[moving] = positions[starts + self.rank[moving]]
        return order


@dataclass(frozen=True, eq=False)
class Pattern:
    """R of one tensor as a product of `follows`, and the axes that are permuted after scaling."""

    shape: tuple[int, ...]
    follows: tuple[Follow, ...] = ()
    shuffles: tuple[Shuffle, ...] = ()

    def multiplier(self, scales: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return R, broadcastable to the tensor, float64."""
        padded = np.append(scales, 1.0)  # index -1 finds the 1
        product = np.ones((1,) * len(self.shape))
        for follow in self.follows:
            factor = padded[follow.index]
            product = product * np.where(follow.sign < 0, 1.0 / factor, factor)
        return product

    def perturb(self, tensor: Tensor, scales: NDArray[np.float64], moved: Indices) -> Tensor:
        """Return R o W with its channels permuted, in the dtype of W and rounded once."""
        noisy = self._scaled(tensor.detach(), scales).to(tensor.dtype)
        for shuffle in self.shuffles:
            noisy = noisy.index_select(shuffle.axis, _on(shuffle.order(moved), tensor))
        return noisy

    def recover(self, tensor: Tensor, scales: NDArray[np.float64], moved: Indices) -> Tensor:
        """Return R o G of a gradient G of the noisy tensor, un-permuted, in float64."""
        return self._scaled(self.put_back(tensor, moved), scales)

    def put_back(self, tensor: Tensor, moved: Indices) -> Tensor:
        """Return the tensor with its channels in the original order."""
        for shuffle in self.shuffles:
            tensor = tensor.index_select(shuffle.axis, _on(np.argsort(shuffle.order(moved)), tensor))
        return tensor

    def _scaled(self, tensor: Tensor, scales: NDArray[np.float64]) -> Tensor:
        double = tensor.to(torch.float64)
        return double * torch.from_numpy(self.multiplier(scales)).to(double.device) if self.follows else double


def _on(order: Indices, tensor: Tensor) -> Tensor:
    return torch.from_numpy(order).to(tensor.device)


def follows(stored: Stored, scales: SignedUnion, number: dict[int, int]) -> tuple[Follow, ...]:
    """Return the factors of R of a tensor; `number` gives each free root its place in the key."""
    factors = []
    for ids in (stored.out, stored.into):
        roots = None if ids is None else compress(scales.values(ids.scale)).numpy()
        if roots is None or not np.any((roots != 0) & (np.abs(roots) != ANY)):
            continue
        places = [number.get(abs(root), -1) for root in roots.reshape(-1).tolist()]
        index = np.array(places, dtype=np.int64).reshape(roots.shape)
        factors.append(Follow(index, np.sign(roots).astype(np.int8)))
    return tuple(factors)


def settle_axes(tensors: Sequence[Stored], channels: Channels) -> None:
    """Pin channels that no permutation of a tensor's axes can move, and tag how often each stands on an axis."""
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
            found, counts = torch.unique(labels, return_counts=True)
            channels.tag(found, counts)


def shuffles(stored: Stored, channels: Channels, number: dict[int, int]) -> tuple[Shuffle, ...]:
    """Return the axes of a tensor that move; `number` gives each moving root its place in the permutation."""
    found = []
    for axis, labels in sorted(_labels(stored, channels).items()):
        places = [number.get(root, -1) for root in channels.values(labels).tolist()]
        if max(places) >= 0:
            marks = [channels.marks(label) for label in labels.tolist()]
            channel = np.array(places, dtype=np.int64)
            found.append(Shuffle(axis, channel, _ranks(channel, marks)))
    return tuple(found)


def _ranks(channel: Indices, marks: Sequence[tuple[tuple[int, int], ...]]) -> Indices:
    """Number the positions of each channel: those with equal marks stand for each other when channels change places."""
    order = np.array(sorted(range(len(channel)), key=lambda position: (channel[position], marks[position], position)))
    ordered = channel[order]
    rank = np.empty_like(channel)
    rank[order] = np.arange(len(channel)) - np.searchsorted(ordered, ordered)
    return rank


def _terms(stored: Stored) -> list[Ids]:
    return [ids for ids in (stored.out, stored.into) if ids is not None]


def _moving_axes(stored: Stored, channels: Channels) -> list[int | None]:
    """Return for each term the axis of its channels: -1 if none moves, None if no single axis will do."""
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
    """Return the channels along each axis that moves."""
    axes = zip(_terms(stored), _moving_axes(stored, channels), strict=True)
    return {axis: compress(ids.channel).reshape(-1) for ids, axis in axes if axis is not None and axis >= 0}
