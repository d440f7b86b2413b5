"""The scales and permutations that a model allows: two union-finds over the channels of its tensors.

Every element of every tensor in the graph carries two whole numbers. Its *scale* is v for "multiplied by s_v", -v for
"divided by s_v" and 0 for "scale 1". Its *channel* is c for "moves with channel c" and 0 for "stays in its place".
Because they are plain integer tensors, any operation that only moves elements (reshape, permute, cat, chunk, a channel
shuffle, ...) is followed exactly by running it on them. All other operations state equalities:

    log s_a = +- log s_b   and   channel a moves with channel b,

kept in a signed union-find and an ordinary one. A sign conflict (s = 1/s) forces scale 1. Scales are positive, except
those of `signs`, which are 1 or -1 and their own inverses. Only functions in `rules.SIGNED` pass these on. The rules
that state equalities are in `rules.py` and `layers.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

ANY = 1 << 52
"""The number of an element that is always 0, such as padding: every scale and every channel fits it."""

MOST_ELEMENTS = 1 << 18
"""A parameter with more elements gets no scale per element; linear layers and the like need none."""

OUTPUT = "the head's outputs are not scaled"


class SignedUnion:
    """Variables 1, 2, ... joined by s_a = s_b or s_a = 1/s_b (written a = -b), some of them forced to 1."""

    def __init__(self) -> None:
        self._up = [0]
        self._forced: dict[int, str] = {}
        self._signs = set[int]()

    def __len__(self) -> int:
        return len(self._up) - 1

    def fresh(self, count: int) -> Tensor:
        """Return `count` new variables, int64[count]."""
        start = len(self._up)
        self._up.extend(range(start, start + count))
        return torch.arange(start, start + count)

    def signs(self, count: int) -> Tensor:
        """Return `count` new variables that are 1 or -1, int64[count]."""
        made = self.fresh(count)
        self._signs.update(made.tolist())
        return made

    def is_sign(self, variable: int) -> bool:
        """Whether a variable is 1 or -1."""
        return abs(self.find(variable)) in self._signs

    def force_signs(self, variables: Tensor, because: str) -> None:
        """Set to 1 every variable of a tensor that could be -1."""
        for variable in names_in(variables) if self._signs else ():
            if self.is_sign(variable):
                self.force(variable, because)

    def find(self, variable: int) -> int:
        """Return the root of a variable, negative if the variable is the root's inverse."""
        sign, node = (1, variable) if variable >= 0 else (-1, -variable)
        while abs(self._up[node]) != node:
            up = self._up[node]
            above = self._up[up] if up > 0 else -self._up[-up]
            self._up[node] = above
            sign, node = (sign, above) if above > 0 else (-sign, -above)
        return sign * node

    def value(self, variable: int) -> int:
        """Return the root as `find` does, but 0 if it is forced."""
        root = self.find(variable)
        return 0 if abs(root) in self._forced else root

    def reason(self, variable: int) -> str | None:
        """Return why a variable is forced, or None if it is free."""
        return self._forced.get(abs(self.find(variable)))

    def force(self, variable: int, because: str) -> None:
        """Set a variable to 1; the first reason is kept."""
        if variable:
            self._forced.setdefault(abs(self.find(variable)), because)

    def equate(self, a: int, b: int, because: str) -> None:
        """State s_a = s_b; 0 stands for 1."""
        a, b = self.find(a), self.find(b)
        signs = abs(a) in self._signs
        if a == b or (a == -b and signs):
            return
        if a == 0 or b == 0 or a == -b:
            self.force(a or b, because)
            return
        if signs != (abs(b) in self._signs):  # 1 is the only positive number that is its own inverse
            self.force(a, because)
            self.force(b, because)
            return
        self._up[abs(a)] = b if a > 0 else -b
        if abs(a) in self._forced:
            self._forced.setdefault(abs(b), self._forced.pop(abs(a)))

    def equate_all(self, a: Tensor, b: Tensor, because: str) -> None:
        """State s_a = s_b for each pair of elements of two tensors of one shape; ANY fits all."""
        pairs = torch.stack([a.reshape(-1), b.reshape(-1)])
        pairs = pairs[:, (pairs[0] != pairs[1]) & (pairs.abs() != ANY).all(0)]
        for first, second in torch.unique(pairs, dim=1).T.tolist():
            self.equate(first, second, because)

    def force_all(self, variables: Tensor, because: str) -> None:
        """Set every variable in a tensor to 1."""
        for variable in names_in(variables):
            self.force(variable, because)

    def values(self, variables: Tensor) -> Tensor:
        """Return `value` of each element; ANY stays ANY."""
        distinct, inverse = torch.unique(variables, return_inverse=True)
        roots = [v if abs(v) == ANY else self.value(v) for v in distinct.tolist()]
        return torch.tensor(roots, dtype=torch.int64)[inverse].reshape(variables.shape)


class Channels(SignedUnion):
    """Channels that move together, and the blocks of channels that may change places.

    Every channel collects marks: its block and its later tags. Two sets of channels that move together may change
    places if their members have the same marks, one by one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._marks: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._events = 0

    def fresh_blocks(self, count: int, blocks: int = 1) -> Tensor:
        """Return `count` new channels in `blocks` equal blocks; only channels of one block may change places."""
        channels = self.fresh(count)
        self.tag(channels, torch.arange(count) // max(count // blocks, 1))
        return channels

    def tag(self, channels: Tensor, tags: Tensor) -> None:
        """Keep channels with different tags apart; a channel that occurs more than once gets its smallest tag."""
        self._events += 1
        smallest: dict[int, int] = {}
        for channel, tag in zip(channels.reshape(-1).tolist(), tags.reshape(-1).tolist(), strict=True):
            if channel not in (0, ANY):
                smallest[channel] = min(tag, smallest.get(channel, tag))
        for channel, tag in smallest.items():
            self._marks[channel].append((self._events, tag))

    def marks(self, channel: int) -> tuple[tuple[int, int], ...]:
        """Return the marks of one channel, which distinguish it from others that move with it."""
        return tuple(self._marks[channel])

    def blocks(self) -> list[list[int]]:
        """Return the roots that may change places, block by block, without blocks of one."""
        members: defaultdict[int, list[tuple[tuple[int, int], ...]]] = defaultdict(list)
        for channel in range(1, len(self) + 1):
            if root := self.value(channel):
                members[root].append(self.marks(channel))
        blocks: defaultdict[tuple[tuple[tuple[int, int], ...], ...], list[int]] = defaultdict(list)
        for root, seen in members.items():
            # Two indistinguishable members (x + shuffle(x)) could be confused with each other: they stay.
            if len(seen) == len(set(seen)):
                blocks[tuple(sorted(seen))].append(root)
        return [block for block in blocks.values() if len(block) > 1]


@dataclass(frozen=True, eq=False)
class Ids:
    """The scale and the channel of every element of a tensor: two int64 tensors of its shape (or broadcastable)."""

    scale: Tensor
    channel: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Ids:
        """Return the ids after a function that moves elements."""
        return Ids(function(self.scale), function(self.channel))

    def expand(self, shape: Sequence[int]) -> Ids:
        """Return the ids broadcast to a shape."""
        return self.map(lambda numbers: numbers.expand(tuple(shape)))

    def inverse(self) -> Ids:
        """Return the same channels with the inverse scales."""
        return Ids(torch.where(self.scale == ANY, self.scale, -self.scale), self.channel)

    def still(self) -> Ids:
        """Return the same scales without channels, for a term of R whose axis another term moves already."""
        return Ids(self.scale, torch.zeros_like(self.channel))

    def along(self, axis: int, dimensions: int) -> Ids:
        """Return one-dimensional ids along one axis of a tensor with `dimensions` axes; the others have size 1."""
        shape = [1] * dimensions
        shape[axis] = -1
        return self.map(lambda numbers: numbers.reshape(shape))


@dataclass(frozen=True, eq=False)
class View:
    """A parameter, or a rearrangement of its elements: their flat positions, None for all in order."""

    name: str
    shape: torch.Size
    elements: Tensor | None = None

    def positions(self) -> Tensor:
        """Return the flat position in the parameter of every element, int64 of the view's shape."""
        return torch.arange(prod(self.shape)).reshape(self.shape) if self.elements is None else self.elements


@dataclass(eq=False)
class Stored:
    """The scale of one parameter or buffer: R = (scale of `out`) * (scale of `into`), element by element.

    Attributes:
        out, into: None before the first use. For a linear layer `out` varies along the rows, `into` (1 / s_in) along
            the columns.
        because: Why all of it has scale 1, if its scales have no reason of their own.
        normed: Whether weight normalisation divides each row by its norm.
    """

    shape: torch.Size
    out: Ids | None = None
    into: Ids | None = None
    because: str = "it stands between tensors of scale 1"
    normed: bool = False


class Solver:
    """The state of the rules: each tensor's ids in the graph, and each parameter's scale."""

    def __init__(self, shapes: dict[str, torch.Size], head: str) -> None:
        self.head = head  # the name of its weight
        self.scales, self.channels = SignedUnion(), Channels()
        self.stored = {name: Stored(shape) for name, shape in shapes.items()}
        self.values: dict[int, Ids | View] = {}
        self.buffers: dict[int, str] = {}
        self.where = ""

    def fresh(self, count: int, blocks: int = 1) -> Ids:
        """Return the ids of `count` new channels, each with a free scale, in blocks that keep to themselves."""
        return Ids(self.scales.fresh(count), self.channels.fresh_blocks(count, blocks))

    def value(self, tensor: Tensor) -> Ids | View:
        """Return the ids of a tensor; a tensor that no rule has seen is a constant: scale 1, in its place."""
        return self.values.get(id(tensor), constant(tensor.shape))

    def ids(self, tensor: Tensor) -> Ids:
        """Return the ids of a tensor; a parameter used as an ordinary tensor gets a free scale per element."""
        value = self.value(tensor)
        ids = self._ids_of(value) if isinstance(value, View) else value
        channel = compress(ids.channel)
        pinned = self.channels.values(channel) == 0
        return Ids(ids.scale, channel.masked_fill(pinned, 0).expand(ids.channel.shape))

    def _ids_of(self, view: View) -> Ids:
        stored = self.stored[view.name]
        neutral, count = constant((1,) * len(stored.shape)), prod(stored.shape)
        out = stored.out or neutral
        if stored.out is None and count <= MOST_ELEMENTS:
            out = self.fresh(count).map(lambda numbers: numbers.reshape(stored.shape))
        self.bind(View(view.name, stored.shape), out, neutral)
        return out.expand(stored.shape).map(lambda numbers: numbers.reshape(-1)[view.positions()])

    def bind(self, view: View, out: Ids | None, into: Ids | None = None) -> None:
        """State that R of a parameter's view is s_out * s_into.

        A parameter with two uses has one R: both are made equal, term by term.

        Args:
            out, into: Broadcastable to the view; None is scale 1.
        """
        stored = self.stored[view.name]
        stored.out = self._place(view, stored.shape, stored.out, out)
        stored.into = self._place(view, stored.shape, stored.into, into)

    def _place(self, view: View, shape: torch.Size, known: Ids | None, term: Ids | None) -> Ids:
        if term is None:
            term = constant((1,) * len(view.shape))
        if view.elements is not None:
            elements, term = view.elements.reshape(-1), term.expand(view.shape)
            flat = Ids(torch.full((prod(shape),), ANY), torch.full((prod(shape),), ANY))
            flat.scale[elements], flat.channel[elements] = term.scale.reshape(-1), term.channel.reshape(-1)
            shown = flat.map(lambda numbers: numbers[elements].reshape(view.shape))
            self.equate(shown, term)
            term = flat.map(lambda numbers: compress(numbers.reshape(shape)))
        return term if known is None else self.equate(known, term)

    def equate(self, a: Ids, b: Ids) -> Ids:
        """Make two tensors equal, element by element after broadcasting, and return what both now carry."""
        return Ids(self._equal(self.scales, a.scale, b.scale), self._equal(self.channels, a.channel, b.channel))

    def _equal(self, union: SignedUnion, a: Tensor, b: Tensor) -> Tensor:
        a, b = broadcast(compress(a), compress(b))
        union.equate_all(a, b, f"{self.where} joins it with scale 1")
        return torch.where(a == ANY, b, a)

    def merge(self, a: Ids, b: Ids, shape: Sequence[int]) -> Ids:
        """Return the ids of a sum of two tensors: scales are made equal, and channels move together.

        If one tensor has no channels, the other's may not move along axes on which the first is longer than 1.
        """
        return Ids(self._equal(self.scales, a.scale, b.scale).expand(tuple(shape)), self.together(a, b, shape))

    def together(self, a: Ids, b: Ids, shape: Sequence[int]) -> Tensor:
        """Return the channels of an elementwise function of two tensors, broadcast to its shape."""
        if not self.moves(b.channel):
            self.hold(a.channel, b.channel.shape, shape)
            return a.channel.expand(tuple(shape))
        if not self.moves(a.channel):
            return self.together(b, a, shape)
        return self._equal(self.channels, a.channel, b.channel).expand(tuple(shape))

    def hold(self, channels: Tensor, other: Sequence[int], shape: Sequence[int]) -> None:
        """Let channels change places only if they meet the same elements of another tensor, of shape `other`."""
        small = compress(channels.expand(tuple(shape)))
        index = torch.arange(prod(other)).reshape(tuple(other)).expand(tuple(shape))
        for axis, size in enumerate(small.shape):
            if size == 1 and index.shape[axis] > 1:
                index = index.narrow(axis, 0, 1)  # the smallest that a channel meets, as indices ascend
        index = index.expand(small.shape)
        names = names_in(small)
        if len(names) > 1 and len(torch.unique(index)) >= len(names) and self._alone(small, index):
            self.pin(small)
        elif bool((index != index.reshape(-1)[0]).any()):
            self.channels.tag(small, index)

    @staticmethod
    def _alone(channels: Tensor, index: Tensor) -> bool:
        """Whether every channel meets its own element, which no other channel meets: then none can move."""
        pairs = torch.unique(torch.stack([channels.reshape(-1), index.reshape(-1)]), dim=1)
        return all(len(torch.unique(row)) == pairs.shape[1] for row in pairs)

    def moves(self, channels: Tensor) -> bool:
        """Whether any element may still move."""
        return any(self.channels.value(channel) for channel in names_in(channels))

    def scaled(self, ids: Ids) -> bool:
        """Whether any element may still have a scale other than 1."""
        return any(self.scales.value(variable) for variable in names_in(ids.scale))

    def collapse(self, ids: Ids, keep: Sequence[int]) -> Ids:
        """Make ids equal along all axes except `keep`, and return them with size 1 on those axes."""
        return Ids(self._collapse(self.scales, ids.scale, keep), self.collapse_channels(ids.channel, keep))

    def collapse_channels(self, channels: Tensor, keep: Sequence[int]) -> Tensor:
        """Do what `collapse` does, for channels alone."""
        return self._collapse(self.channels, channels, keep)

    def equate_channels(self, a: Tensor, b: Tensor) -> Tensor:
        """Let the channels of two tensors move together, element by element after broadcasting."""
        return self._equal(self.channels, a, b)

    def _collapse(self, union: SignedUnion, numbers: Tensor, keep: Sequence[int]) -> Tensor:
        kept = [axis % numbers.dim() for axis in keep]
        small = compress(numbers)
        others = [axis for axis in range(small.dim()) if axis not in kept]
        rows = small.permute(*kept, *others).reshape(prod(small.shape[axis] for axis in kept), -1)
        known = (rows.abs() != ANY).to(torch.int8).argmax(1, keepdim=True)
        first = rows.gather(1, known)
        union.equate_all(first.expand_as(rows), rows, f"{self.where} joins it with scale 1")
        shape = [small.shape[axis] if axis in kept else 1 for axis in range(small.dim())]
        back = first.reshape([small.shape[axis] for axis in kept] + [1] * len(others))
        placed = back.permute([[*kept, *others].index(axis) for axis in range(small.dim())]).reshape(shape)
        return placed.expand([numbers.shape[axis] if axis in kept else 1 for axis in range(small.dim())])

    def force(self, ids: Ids, because: str | None = None) -> None:
        """Set the scale of every element to 1."""
        self.scales.force_all(ids.scale, because or f"{self.where} needs scale 1")

    def unsigned(self, tensor: Tensor) -> None:
        """Set to 1 every scale of a tensor that could be -1."""
        value = self.value(tensor)
        stored = None if isinstance(value, Ids) else self.stored[value.name]
        for ids in (value,) if isinstance(value, Ids) else (stored.out, stored.into) if stored else ():
            if ids is not None:
                self.scales.force_signs(ids.scale, f"{self.where} needs positive scales")

    def pin(self, channels: Tensor) -> None:
        """Let no channel move."""
        self.channels.force_all(channels, self.where)


def broadcast(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors with their common shape."""
    first, second = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
    return first, second


def constant(shape: Sequence[int]) -> Ids:
    """Return the ids of a tensor of scale 1 whose elements stay in their places."""
    zeros = torch.zeros((1,) * len(shape), dtype=torch.int64).expand(tuple(shape))
    return Ids(zeros, zeros)


def empty(shape: Sequence[int]) -> Ids:
    """Return the ids of a tensor of zeros, which every scale and every channel fits."""
    numbers = torch.full((1,) * len(shape), ANY).expand(tuple(shape))
    return Ids(numbers, numbers)


def compress(numbers: Tensor) -> Tensor:
    """Return the tensor with size 1 on every axis along which it is constant."""
    for axis in range(numbers.dim()):
        if numbers.stride(axis) == 0 and numbers.shape[axis] > 1:
            numbers = numbers.narrow(axis, 0, 1)
    for axis in range(numbers.dim()):
        first = numbers.narrow(axis, 0, min(1, numbers.shape[axis]))
        if numbers.shape[axis] > 1 and bool((numbers == first).all()):
            numbers = first
    return numbers


def names_in(numbers: Tensor) -> list[int]:
    """Return the distinct variables in a tensor, without 0 and ANY."""
    distinct: list[int] = torch.unique(compress(numbers)).tolist()
    return [number for number in distinct if number and abs(number) != ANY]
