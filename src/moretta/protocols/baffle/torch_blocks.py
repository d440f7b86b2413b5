"""A PyTorch module that is moved block by block: `moretta.protocols.baffle.silo.blocks.MovesBlocks`.

Moves of a few channels are followed until others change too. The layers after a convolution mostly keep channels
separate: normalisation in groups, an activation, a pooling. The next product reads all channels, but is linear: its
output moves by the product of the few channels' difference. So a move of one channel costs a part of a layer, and full
outputs only from there on.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moretta.contract.messages import Array
from moretta.protocols.baffle import cut as cutting
from moretta.protocols.baffle.batched import means_of_squares
from moretta.protocols.baffle.cut import Cut, Layer, Node, Values, arguments_of, called
from moretta.protocols.baffle.silo.blocks import LayerBlock, Signs, stretches
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.baffle.torch_forward import TorchForward

aten = torch.ops.aten
# Operations that keep each channel of the first argument separate, and read nothing else that moves.
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
    """The part of a graph in which a move of some channels of `start` stays within channels.

    Attributes:
        some: Operations of which only some channels change, in the order of running.
        joining: Products that read these, and change in all channels.
        late: All other operations after `start`.
        handed: Those of `some` that `late` reads, or that are the output.
    """

    start: Node
    some: tuple[Node, ...]
    joining: tuple[Node, ...]
    late: tuple[Node, ...]
    handed: tuple[Node, ...]


def path_of(cut: Cut, start: Node) -> Path:
    """Return the path of moves of a node's channels, its axis 1."""
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
    """Return all moved values that `path.late` reads, each [moves, rows, ...].

    Args:
        moved: Of the channels of `path.start`, [moves, rows, channels, ...].
        kept: Unmoved values, whole.
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
    """Return an operation's changed channels, [moves rows, channels, ...], and their places."""
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
    if node.target is cutting.batch_norm:
        _, weight, bias, mean, variance, *rest = arguments_of(node, kept)
        weight, bias = (None if tensor is None else tensor[part] for tensor in (weight, bias))
        return cutting.batch_norm(values, weight, bias, mean[part], variance[part], *rest), part
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
    """Return whether a node is a product of moved values with unmoved weights, over channels."""
    if [*moved] != [node.args[0]] or node.kwargs:
        return False
    if node.target is cutting.LINEAR:
        return len(moved[0].meta["val"].shape) == 2
    return node.target in cutting.CONVOLUTIONS and (len(node.args) < 7 or node.args[6] == 1)


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
    return node.target in BY_CHANNEL or node.target in (GROUP_NORM, cutting.batch_norm)


TOGETHER = 1 << 18  # entries of a layer's outputs that run together, so that they stay in the processor's cache
ROWS = 64  # in one pass through the model, so that layers' outputs stay in the cache
FEW = 4  # moves; fewer are faster one by one
# torch.vmap runs them too, with a warning each time.
ONE_BY_ONE = (torch.ops.aten.scaled_dot_product_attention.default, torch.ops.aten._weight_norm.default)


class TorchBlocks(TorchForward):
    """Runs a copy of a module. cut: its graph. blocks: those of a round, each one of the cut's layers."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        cut: Cut,
        blocks: Sequence[LayerBlock],
        device: str = "cpu",
        micro_batch: int | None = None,
    ) -> None:
        super().__init__(model, layout, device, micro_batch=micro_batch)
        self._cut, self.blocks = cut, tuple(blocks)
        self._after = {block.name: cut.after(cut.layers[block.name].node) for block in blocks}
        self._paths = dict[str, Path]()
        read = {cut.output} | {cut.layers[block.name].node for block in blocks}
        for block in blocks:
            ran = set(self._after[block.name])
            layer = cut.layers[block.name].node
            read |= {each for node in (layer, *ran) for each in node.all_input_nodes if each not in ran}
            if block.kind == "channels":
                path = self._paths[block.name] = path_of(cut, layer)
                read |= {*path.some, *path.joining}
                read |= {each for node in (*path.some, *path.joining) for each in node.all_input_nodes}
        self._last_use = {each: node for node in cut.nodes for each in node.all_input_nodes if each not in read}
        held = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        self._constants: dict[Node, Any] = {node: held[name] for node, name in cut.tensors.items()} | {**cut.constants}
        self._kept: dict[Node, Any] = {}
        self._alone = set[tuple[Node, ...]]()  # nodes that torch.vmap cannot run

    @property
    def rows_at_once(self) -> int:
        """The most rows to start with."""
        return min(ROWS, self.micro_batch or ROWS)

    def start(self, at: Array, x: Array) -> Array:
        """Run a batch forward at flat parameters and keep what moves need; return the outputs, [rows, outputs]."""
        with torch.inference_mode():
            self._flat.copy_(torch.from_numpy(at))
            self._kept = dict(self._constants)
            self._kept[self._cut.x] = torch.from_numpy(x).to(self._flat.device)
            for node in self._cut.nodes:
                _run([node], self._kept)
                for read in node.all_input_nodes:
                    if self._last_use.get(read) is node:
                        self._kept.pop(read, None)
            return self._numbers(self._kept[self._cut.output])

    def inputs(self, block: LayerBlock) -> Array:
        """Return a linear layer's inputs, float[rows, n]."""
        return self._numbers(self._kept[self._cut.layers[block.name].node.args[0]])

    def moved(self, block: LayerBlock, signs: Signs, distance: float) -> Iterator[Array]:
        """Yield the outputs at w + distance d, [moves, rows, outputs], in the scalars' order."""
        layer = self._cut.layers[block.name]
        with torch.inference_mode():
            if block.kind == "channels":
                yield from map(self._numbers, self._by_channels(block, layer, signs, distance))
            else:
                for values in self._moves(block, layer, signs, distance):
                    yield self._numbers(self._outputs(self._after[block.name], {layer.node: values}))

    def _moves(self, block: LayerBlock, layer: Layer, signs: Signs, distance: float) -> Iterator[Tensor]:
        """Yield a layer's moved outputs, [moves, ...], as many as run together."""
        kept: Tensor = self._kept[layer.node]
        together = max(1, TOGETHER // kept.numel())
        if block.kind == "units":
            for units in stretches(kept.shape[1], together):
                moved = kept.repeat(units.stop - units.start, 1, 1)
                moved.diagonal(offset=units.start, dim1=0, dim2=2).add_(distance)
                yield moved
        elif block.kind == "rank-one":
            u, v = (torch.from_numpy(side).to(kept) for side in block.sides(self.layout.shapes, signs))
            inputs: Tensor = self._kept[layer.node.args[0]]
            slopes = inputs @ v[:, : inputs.shape[-1]].T  # the same for all units up to sign
            if v.shape[1] > inputs.shape[-1]:
                slopes = slopes + v[:, -1]
            slopes = (distance * slopes).movedim(-1, 0)[..., None]
            for some in stretches(len(u), together):
                yield torch.addcmul(kept, slopes[some], u[some].view(-1, *[1] * (kept.ndim - 1), u.shape[1]))
        else:
            for effects in self._effects(block, layer, signs, together):
                yield kept + distance * effects

    def _by_channels(self, block: LayerBlock, layer: Layer, signs: Signs, distance: float) -> Iterator[Tensor]:
        """Yield the outputs for moves of some channels each, [moves, rows, outputs], all of a repeat at least."""
        path, kept = self._paths[block.name], self._kept[layer.node]
        for effects in self._effects(block, layer, signs, max(1, TOGETHER // kept.numel())):
            effects, outputs = distance * effects, list[Tensor]()
            for channels in block.channels_of(kept.shape[1]):
                moved = kept[:, channels] + effects[:, :, channels]
                outputs.append(self._outputs(path.late, follow(path, moved, channels, self._kept)))
            yield torch.stack(outputs, dim=1).flatten(0, 1)

    def _effects(self, block: LayerBlock, layer: Layer, signs: Signs, together: int) -> Iterator[Tensor]:
        """Yield the changes of a layer's output, [moves, ...], `together` repeats at a time."""
        moves = block.by_tensor(self.layout.shapes, signs)
        for some in stretches(block.repeats, together):
            yield self._effect(layer, {n: torch.from_numpy(each[some]).to(self._flat) for n, each in moves.items()})

    def _effect(self, layer: Layer, signs: Mapping[str, Tensor]) -> Tensor:
        """Return the layer's output for signs [moves, ...] as its weights."""
        if not layer.places:
            return signs[layer.tensors[0]]
        arguments = arguments_of(layer.node, self._kept)
        moves = len(next(iter(signs.values())))
        target = layer.node.target
        linear_in = [place for place in cutting.LINEAR_IN_WEIGHTS[target] if place < len(arguments)]
        places = [place for place in linear_in if arguments[place] is not None]
        for place in places:
            still = arguments[place].new_zeros(moves, *arguments[place].shape)
            arguments[place] = signs[layer.places[place]] if place in layer.places else still
        # All moves of a convolution are one layer's channels.
        if target in cutting.CONVOLUTIONS and (len(arguments) < 7 or arguments[6] == 1):
            for place in places:
                arguments[place] = arguments[place].flatten(0, 1)
            effects: Tensor = target(*arguments)
            return effects.view(len(effects), moves, -1, *effects.shape[2:]).movedim(1, 0)
        outputs = list[Tensor]()
        for move in range(moves):
            own = [each[move] if place in places else each for place, each in enumerate(arguments)]
            outputs.append(called(layer.node, self._kept, own))
        return torch.stack(outputs)

    def _outputs(self, nodes: tuple[Node, ...], moved: Mapping[Node, Tensor]) -> Tensor:
        """Return the model's outputs, [moves, rows, outputs], with these moved values, [moves, ...]."""

        def go_on(values: Mapping[Node, Tensor]) -> Tensor:
            values_of = {**self._kept, **values}
            _run(nodes, values_of)
            outputs: Tensor = values_of[self._cut.output]
            return outputs

        first, names = next(iter(moved.values())), list(moved)  # vmap takes lists, not dictionaries of nodes
        few = len(first) < FEW or sum(value[0].numel() for value in moved.values()) * FEW > TOGETHER
        alone = nodes in self._alone or any(node.target in ONE_BY_ONE for node in nodes)
        if not few and not alone:
            try:
                together = torch.vmap(lambda *values: go_on(dict(zip(names, values, strict=True))))
                outputs: Tensor = together(*moved.values())
                return outputs
            except RuntimeError:  # vmap has no rule for an operation, such as recurrent layers; single moves may run
                self._alone.add(nodes)
        return torch.stack([go_on({node: value[move] for node, value in moved.items()}) for move in range(len(first))])

    @staticmethod
    def _numbers(tensor: Tensor) -> Array:
        array: Array = tensor.cpu().numpy()
        return array


def _run(nodes: Sequence[Node], values: dict[Node, Any]) -> None:
    for node in nodes:
        values[node] = called(node, values)
