"""A model's ONNX graph cut into the part before each block of layers, the layer, and the part after it.

Importing this needs onnx, which is in `moretta[onnx]`. One file is the whole graph, which also outputs what the cut
needs: inputs and outputs of layers, and the values from before a block that its successors read. Each block has a
further file, whose input is the layer's output or, if the graph does not have the layer in PyTorch's form, the trained
tensors themselves; each convolution has another file with the layer alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import onnx
from onnx import helper

from moretta.errors import ParameterError
from moretta.protocols.baffle.edge import metadata
from moretta.protocols.baffle.silo.blocks import LayerBlock
from moretta.protocols.baffle.silo.forward import Layout

OUTPUTS = "outputs"


@dataclass(frozen=True)
class _Graph:
    """A graph's values: their nodes, and which depend on the rows."""

    graph: Any
    makers: dict[str, Any]
    of_rows: set[str]
    kinds: dict[str, int]
    opsets: tuple[Any, ...]
    ir_version: int

    @classmethod
    def of(cls, proto: Any) -> _Graph:
        known = onnx.shape_inference.infer_shapes(proto, data_prop=True)
        graph = known.graph
        makers = {name: node for node in graph.node for name in node.output}
        of_rows = {"x"}
        for node in graph.node:
            if of_rows.intersection(node.input):
                of_rows.update(node.output)
        values = (*graph.value_info, *graph.input, *graph.output)
        kinds = {value.name: value.type.tensor_type.elem_type for value in values}
        return cls(graph, makers, of_rows, kinds, tuple(known.opset_import), known.ir_version)

    def after(self, names: Iterable[str]) -> list[Any]:
        """Return the nodes that depend on values."""
        reached, nodes = set(names), []
        for node in self.graph.node:
            if reached.intersection(node.input):
                reached.update(node.output)
                nodes.append(node)
        return nodes

    def readers(self, name: str) -> list[Any]:
        """Return the nodes that read a value."""
        return [node for node in self.graph.node if name in node.input]


def cut(proto: Any, layout: Layout, blocks: Sequence[LayerBlock]) -> bytes:
    """Return the files of a graph of `moretta.protocols.baffle.onnx_export`, packed by `metadata.packed`.

    Raises:
        ParameterError: The graph lacks a layer of units.
    """
    whole, files, entries = _Graph.of(proto), list[Any](), list[dict[str, Any]]()
    for block in blocks:
        reads, moves = _layer(whole, block)
        if block.kind == "units" and not moves:
            raise ParameterError(
                f'linear = "activations": ONNX does not have the layer `{block.name}` as one product of the rows; use '
                'linear = "scalars", or no edge clients'
            )
        start = [moves] if moves else list(block.tensors)
        inputs = list[str]()
        if moves != OUTPUTS:  # the last layer has no successors
            after, inputs = _part(whole, whole.after(start), start, layout, OUTPUTS)
            files.append(after)
        entry = asdict(block) | {
            "reads": reads,
            "moves": moves,
            "kept": [name for name in inputs if name in whole.of_rows and name != moves],
        }
        if block.kind == "channels" and moves:
            alone, _ = _part(whole, [whole.makers[moves]], [reads], layout, moves)
            files.append(alone)
        entries.append(entry)
    needed = {name for entry in entries for name in (entry["reads"], entry["moves"], *entry["kept"])} - {"", "x"}
    known = {output.name for output in whole.graph.output}
    for name in sorted(needed - known):
        proto.graph.output.append(helper.make_tensor_value_info(name, whole.kinds[name], None))
    helper.set_model_props(proto, metadata.written(layout, "float32") | {metadata.BLOCKS: json.dumps(entries)})
    return metadata.packed([each.SerializeToString() for each in (proto, *files)])


def _layer(whole: _Graph, block: LayerBlock) -> tuple[str, str]:
    """Return a convolution's or linear layer's input and output, or two empty names."""
    weight, bias = block.tensors[0], block.tensors[1] if len(block.tensors) > 1 else ""
    if len(whole.readers(weight)) != 1 or (bias and len(whole.readers(bias)) != 1):
        return "", ""
    (node,) = whole.readers(weight)
    if block.kind == "channels" and node.op_type == "Conv" and node.input[1] == weight:
        return node.input[0], node.output[0]
    if block.kind not in ("rank-one", "units"):
        return "", ""
    if node.op_type == "Gemm" and node.input[1] == weight and _is_plain(node):
        return node.input[0], node.output[0]
    if node.op_type == "Transpose" and len(whole.readers(node.output[0])) == 1:
        (product,) = whole.readers(node.output[0])
        if product.op_type == "MatMul" and product.input[1] == node.output[0]:
            if not bias:
                return product.input[0], product.output[0]
            (added,) = whole.readers(bias)
            if (
                added.op_type == "Add"
                and product.output[0] in added.input
                and len(whole.readers(product.output[0])) == 1
            ):
                return product.input[0], added.output[0]
    return "", ""


def _is_plain(node: Any) -> bool:
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    return (
        attributes.pop("transB", 0) == 1
        and not attributes.pop("transA", 0)
        and all(value == 1.0 for value in attributes.values())
    )


def _part(
    whole: _Graph, nodes: Sequence[Any], start: Sequence[str], layout: Layout, output: str
) -> tuple[Any, list[str]]:
    """Return the file of some operations, with all values that need no rows, and the names of its inputs."""
    chosen, made = {id(node) for node in nodes}, {name for node in nodes for name in node.output} | set(start)
    constants = {tensor.name: tensor for tensor in whole.graph.initializer}
    waiting = [name for node in nodes for name in node.input]
    inputs = dict.fromkeys(start)
    while waiting:
        name = waiting.pop()
        if not name or name in made or name in constants or name in inputs:
            continue
        maker = whole.makers.get(name)
        if maker is None or name in whole.of_rows:
            inputs[name] = None
        elif id(maker) not in chosen:
            chosen.add(id(maker))
            made.update(maker.output)
            waiting += maker.input
    kept = [node for node in whole.graph.node if id(node) in chosen]
    read = {name for node in kept for name in node.input}
    graph = helper.make_graph(
        kept,
        "part",
        [_value(whole, name, layout, free=output != OUTPUTS) for name in inputs],
        [helper.make_tensor_value_info(output, whole.kinds[output], None)],
        [tensor for name, tensor in constants.items() if name in read],
    )
    proto = helper.make_model(graph, opset_imports=list(whole.opsets))
    proto.ir_version = whole.ir_version
    return proto, list(inputs)


def _value(whole: _Graph, name: str, layout: Layout, *, free: bool) -> Any:
    shape = None if free else layout.shapes.get(name)
    return helper.make_tensor_value_info(name, whole.kinds[name], shape)
