"""Means over small windows of images as matrix products: ONNX Runtime takes a quarter of the time for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

MOST_WINDOWS = 64  # beside each other; a product costs as much for each. PyTorch's limit is in `batched`


class Windows(NamedTuple):
    """Windows that tile images of [channels, height, width] without rest."""

    channels: int
    height: int
    width: int
    tall: int
    broad: int

    def product(self, kind: Any) -> NDArray[np.floating]:
        """Return what a row of windows, [tall width], is multiplied with: [tall width, width / broad]."""
        each = np.repeat(np.eye(self.width // self.broad, dtype=kind), self.broad, axis=0)
        means: NDArray[np.floating] = np.tile(each, (self.tall, 1)) / np.asarray(self.tall * self.broad, kind)
        return means


def pool_by_products(proto: onnx.ModelProto) -> None:
    """Replace each `AveragePool` whose windows lie beside each other and tile the image."""
    graph = proto.graph
    known = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    types = {value.name: value.type.tensor_type for value in known.value_info}
    nodes = list[onnx.NodeProto]()
    for node in graph.node:
        windows = _windows(node, types.get(node.input[0])) if node.op_type == "AveragePool" else None
        if windows is None:
            nodes.append(node)
            continue
        kind = helper.tensor_dtype_to_np_dtype(types[node.input[0]].elem_type)
        name, lines = node.output[0], [-1, windows.tall * windows.width]
        images = [-1, windows.channels, windows.height // windows.tall, windows.width // windows.broad]
        constants = {"lines": np.array(lines), "means": windows.product(kind), "images": np.array(images)}
        graph.initializer.extend(numpy_helper.from_array(value, f"{name}/{end}") for end, value in constants.items())
        nodes += [
            helper.make_node("Reshape", [node.input[0], f"{name}/lines"], [f"{name}/rows"]),
            helper.make_node("MatMul", [f"{name}/rows", f"{name}/means"], [f"{name}/pooled"]),
            helper.make_node("Reshape", [f"{name}/pooled", f"{name}/images"], [name]),
        ]
    del graph.node[:]
    graph.node.extend(nodes)


def _windows(node: onnx.NodeProto, kind: onnx.TypeProto.Tensor | None) -> Windows | None:
    """Return the windows of an `AveragePool`, where they tile an image of known size."""
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    sizes = [dim.dim_value for dim in kind.shape.dim[1:]] if kind is not None else []
    kernel = attributes.get("kernel_shape", [])
    plain = attributes.get("auto_pad", b"NOTSET") == b"NOTSET" and not any(attributes.get("pads", ()))
    if len(sizes) != 3 or not all(sizes) or not plain or set(attributes.get("dilations", [1])) != {1}:
        return None
    if attributes.get("strides") != kernel or any(size % side for size, side in zip(sizes[1:], kernel, strict=True)):
        return None
    return Windows(*sizes, *kernel) if sizes[2] // kernel[1] <= MOST_WINDOWS else None
