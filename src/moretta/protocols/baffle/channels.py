"""Moves of a few channels, followed as far as no others change.

What comes after a convolution is mostly made channel by channel: normalisation in groups, an activation, a pooling. The
next product reads all channels, but is linear: its output moves by the product of those few's difference. So a move of
one channel costs a part of a layer, and full outputs only from there on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moretta.protocols.baffle.batched import means_of_squares
from moretta.protocols.baffle.cut import CONVOLUTIONS, LINEAR, Cut, Node, Values, arguments_of, batch_norm

aten = torch.ops.aten
# Operations that make each channel of its own in the first argument, and read nothing else that moves.
BY_CHANNEL = frozenset(
    getattr(getattr(aten, name), overload)
    for names, overload in (
        (
            "hardswish relu gelu silu selu elu tanh sigmoid leaky_relu hardtanh relu6 hardsigmoid mish softplus",
            "default",
        ),
        ("avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d", "default"),
        ("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", "default"),
        ("dropout", "default"),
        ("flatten", "using_ints"),
        ("reshape", "default"),
        ("mean", "dim"),
    )
    for name in names.split()
) | {means_of_squares}
RESHAPING = (aten.flatten.using_ints, aten.reshape.default)
GROUP_NORM, ADD = aten.group_norm.default, aten.add.Tensor


@dataclass(frozen=True)
class Path:
    """How far a move of some channels of `start` goes by itself.

    some: operations of which only some channels change, in the order of running. joining: products that read these, and
    of which all changes. late: all other operations after `start`. handed: those of `some` that `late` reads.
    """

    start: Node
    some: tuple[Node, ...]
    joining: tuple[Node, ...]
    late: tuple[Node, ...]
    handed: tuple[Node, ...]


def path_of(cut: Cut, start: Node) -> Path:
    """Return the path of moves of a node's channels, which are its axis 1."""
    some, joining, late = [start], list[Node](), list[Node]()
    for node in cut.after(start):
        moved = [read for read in node.all_input_nodes if read in some or read in joining or read in late]
        if not all(read in some for read in moved):
            late.append(node)
        elif _joins(node, moved):
            joining.append(node)
        else:
            (some if _keeps_apart(node, moved) else late).append(node)
    handed = [node for node in some if node is cut.output or any(user in late for user in node.users)]
    return Path(start, tuple(some[1:]), tuple(joining), tuple(late), tuple(handed))


def follow(path: Path, moved: Tensor, channels: slice, kept: Values) -> dict[Node, Tensor]:
    """Return all that `path.late` reads and that has moved, each [moves, rows, ...].

    moved: of the channels of `path.start`, [moves, rows, channels, ...]. kept: what has not moved, whole.
    """
    moves, rows = moved.shape[:2]
    now = {path.start: (moved.flatten(0, 1), channels)}
    for node in path.some:
        now[node] = _some(node, now, kept, moves)
    moved_values = {node: _whole(*now[node], kept[node], moves) for node in path.handed}
    for node in path.joining:
        values, part = now[node.args[0]]
        change = values.view(moves, rows, *values.shape[1:]) - kept[node.args[0]][:, part]
        arguments = arguments_of(node, kept)
        arguments[:3] = change.flatten(0, 1), arguments[1][:, part], None
        joined: Tensor = node.target(*arguments)
        moved_values[node] = joined.view(moves, rows, *joined.shape[1:]) + kept[node]
    return moved_values


def _some(node: Node, now: Mapping[Node, tuple[Tensor, slice]], kept: Values, moves: int) -> tuple[Tensor, slice]:
    """Return an operation's changed channels, [moves rows, channels, ...], and which they are."""
    if node.target is ADD:
        parts = [now[read][1] for read in node.args if read in now]
        sides = [now[read][0] if read in now else _repeated(kept[read][:, parts[0]], moves) for read in node.args]
        return node.target(*sides, **node.kwargs), parts[0]
    read = node.args[0]
    values, part = now[read]
    before: Tensor = kept[read]
    if node.target is GROUP_NORM:
        _, groups, weight, bias, *rest = arguments_of(node, kept)
        width = before.shape[1] // groups
        wide = slice(part.start // width * width, -(-part.stop // width) * width)
        if wide != part:
            whole = _repeated(before[:, wide], moves)
            whole[:, part.start - wide.start : part.stop - wide.start] = values
            values = whole
        weight, bias = (None if tensor is None else tensor[wide] for tensor in (weight, bias))
        return F.group_norm(values, (wide.stop - wide.start) // width, weight, bias, rest[0]), wide
    if node.target is batch_norm:
        _, weight, bias, mean, variance, *rest = arguments_of(node, kept)
        weight, bias = (None if tensor is None else tensor[part] for tensor in (weight, bias))
        return batch_norm(values, weight, bias, mean[part], variance[part], *rest), part
    if node.target in RESHAPING:
        factor = kept[node].shape[1] // before.shape[1]
        return values.flatten(1), slice(part.start * factor, part.stop * factor)
    return node.target(values, *node.args[1:], **node.kwargs), part


def _whole(values: Tensor, part: slice, kept: Tensor, moves: int) -> Tensor:
    whole = _repeated(kept, moves)
    whole[:, part] = values
    return whole.view(moves, *kept.shape)


def _repeated(tensor: Tensor, moves: int) -> Tensor:
    return tensor.repeat(moves, *[1] * (tensor.ndim - 1))


def _joins(node: Node, moved: list[Node]) -> bool:
    """Return whether a node is a product of all that moved with weights that did not, over channels."""
    if [*moved] != [node.args[0]] or node.kwargs:
        return False
    if node.target is LINEAR:
        return len(moved[0].meta["val"].shape) == 2
    return node.target in CONVOLUTIONS and (len(node.args) < 7 or node.args[6] == 1)


def _keeps_apart(node: Node, moved: list[Node]) -> bool:
    """Return whether only the channels that moved, or their groups, change."""
    shapes = [tuple(read.meta["val"].shape) for read in node.all_input_nodes if hasattr(read.meta.get("val"), "shape")]
    if node.target is ADD:
        return len(node.args) == 2 and len(set(map(str, shapes))) == 1 and len(shapes) == 2
    if node.args[0] is not moved[0] or len(moved) != 1 or len(shapes[0]) < 2:
        return False
    before, after = shapes[0], node.meta["val"]
    if not isinstance(after, Tensor):
        return False
    if node.target in RESHAPING:
        return after.ndim == 2 and str(after.shape[0]) == str(before[0])
    if node.target is aten.mean.dim:
        return all(dim % len(before) >= 2 for dim in node.args[1])
    return node.target in BY_CHANNEL or node.target in (GROUP_NORM, batch_norm)
