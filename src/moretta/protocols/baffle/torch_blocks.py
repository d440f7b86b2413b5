"""A PyTorch module that is moved block by block: `moretta.protocols.baffle.silo.blocks.MovesBlocks`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moretta.contract.messages import Array
from moretta.protocols.baffle import cut as cutting
from moretta.protocols.baffle.channels import Path, follow, path_of
from moretta.protocols.baffle.cut import Cut, Layer, Node, arguments_of, called
from moretta.protocols.baffle.silo.blocks import LayerBlock, Signs, stretches
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.baffle.torch_forward import TorchForward

TOGETHER = 1 << 18  # entries of a layer's outputs that go on together, so that they stay in the processor's cache
ROWS = 64  # that go through the model as one, so that layers' outputs stay in the cache
FEW = 4  # moves; fewer are faster one by one
ONE_BY_ONE = (torch.ops.aten.scaled_dot_product_attention.default,)  # as torch.vmap runs it too, with a warning


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
        self._alone = set[tuple[Node, ...]]()  # what torch.vmap was found not to run

    @property
    def rows_at_once(self) -> int:
        """How many rows at most to start with."""
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
        """Return what a linear layer reads, float[rows, n]."""
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
        """Yield a layer's moved outputs, [moves, ...], as many as go on together."""
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
            slopes = inputs @ v[:, : inputs.shape[-1]].T  # the same for all units but for their sign
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
        """Yield by what a layer's output moves, [moves, ...], so many repeats at a time."""
        moves = block.by_tensor(self.layout.shapes, signs)
        for some in stretches(block.repeats, together):
            yield self._effect(layer, {n: torch.from_numpy(each[some]).to(self._flat) for n, each in moves.items()})

    def _effect(self, layer: Layer, signs: Mapping[str, Tensor]) -> Tensor:
        """Return what signs [moves, ...], as weights, make of what a layer reads."""
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
        """Return the model's outputs, [moves, rows, outputs], where what is `moved` is as given, [moves, ...]."""

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
            except RuntimeError:  # it has no rule for an operation, such as recurrent layers; one by one it may go
                self._alone.add(nodes)
        return torch.stack([go_on({node: value[move] for node, value in moved.items()}) for move in range(len(first))])

    @staticmethod
    def _numbers(tensor: Tensor) -> Array:
        array: Array = tensor.cpu().numpy()
        return array


def _run(nodes: Sequence[Node], values: dict[Node, Any]) -> None:
    for node in nodes:
        values[node] = called(node, values)
