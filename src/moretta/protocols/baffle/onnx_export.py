"""A PyTorch model as an ONNX graph whose trained weights are inputs, which `moretta.edge` runs at many weights.

As the weights are arguments of the export, nothing can fold them into other constants. The graph's metadata
(`moretta.protocols.baffle.edge.metadata`) contain the `Layout` of its weights, so that it runs without torch. Means
over small windows of images become matrix products, for which ONNX Runtime takes a quarter of the time.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moretta.errors import MissingExtra, ParameterError
from moretta.models.graph import quietly
from moretta.protocols.baffle.edge import metadata
from moretta.protocols.baffle.silo.blocks import LayerBlock
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.common import modules

try:
    import onnx
    import onnxscript  # noqa: F401  # needed by torch.onnx
    from onnx import TensorProto, helper, numpy_helper

    from moretta.protocols.baffle import onnx_cut
except ImportError as error:
    raise MissingExtra(f"exporting to ONNX needs {error.name}; run: pip install 'moretta[onnx]'") from None

OPSET = 20  # the last that exports GroupNorm as an InstanceNormalization, which ONNX Runtime runs faster
PRECISIONS = ("float32", "float16", "int8-activations")
MULTIPLIES = ("Conv", "ConvTranspose", "Gemm", "MatMul")
UNROUNDED = ("Flatten", "Identity", "MaxPool", "Relu", "Reshape", "Squeeze", "Transpose", "Unsqueeze")  # stay half


class _Functional(nn.Module):
    """A model as a function of its rows and its trained tensors."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.model, self.names = model, tuple(layout.shapes)
        self.further = _further_places(model, layout)

    def forward(self, x: Tensor, *trained: Tensor) -> Tensor:
        """Return the outputs, [rows, outputs]."""
        tensors = dict(zip(self.names, trained, strict=True))
        tensors |= {name: tensors[first] for name, first in self.further.items()}
        outputs: Tensor = torch.func.functional_call(self.model, tensors, (x,), tie_weights=False)
        return outputs


def _further_places(model: nn.Module, layout: Layout) -> dict[str, str]:
    """Return the further names of tied trained tensors, each with its first, except in a module with two names.

    By default `torch.func.functional_call` sets such a module's tensors twice, in an order that differs from process to
    process, and in one of the orders does not restore them.
    """
    owners = dict(model.named_modules(remove_duplicate=False))

    def place(name: str) -> tuple[int, str]:
        owner, _, leaf = name.rpartition(".")
        return id(owners[owner]), leaf

    places, first_names = {place(name) for name in layout.shapes}, dict[str, str]()
    for name, first in modules.ties(model).items():
        if first in layout.shapes and place(name) not in places:
            places.add(place(name))
            first_names[name] = first
    return first_names


def graph_of(
    model: nn.Module,
    layout: Layout,
    row_shape: tuple[int, ...],
    input_dtype: torch.dtype,
    precision: str = "float32",
    blocks: Sequence[LayerBlock] = (),
) -> bytes:
    """Return the model as an ONNX file with the inputs `x`, [rows, ...], and each trained tensor by its name.

    Inputs and the output `outputs`, [rows, outputs], have `layout.dtype` (tokens: `input_dtype`) at every precision.
    The model is exported in evaluation mode, and unchanged afterwards. Frozen parameters and buffers are part of the
    file. Without onnx, importing this module raises MissingExtra.

    Args:
        precision: "float32": arithmetic in `layout.dtype`, which may also be float64. "float16": weights, inputs, fixed
            tensors and results of operations are rounded to half precision; within one operation sums are kept in
            `layout.dtype`, as in hardware for half precision. "int8-activations": inputs of each convolution or matrix
            product, except weights, are rounded to 256 levels between their least and greatest entry, row by row, so
            that rows do not affect each other.
        blocks: Of layers that are moved one after the other; the graph is then cut into files of these
            (`moretta.protocols.baffle.onnx_cut`), for which only "float32" is supported.

    Raises:
        ParameterError: ONNX cannot express the model, or the settings do not fit each other.
    """
    if precision not in PRECISIONS:
        raise ParameterError(f'precision = "{precision}": expected one of {", ".join(PRECISIONS)}')
    if precision == "int8-activations" and layout.dtype != "float32":
        raise ParameterError(f"int8-activations needs a float32 model, and this one is {layout.dtype}")
    if {"x", "outputs"} & layout.shapes.keys():
        raise ParameterError("a trained tensor is named x or outputs, as the graph's own input and output; rename it")
    if blocks and precision != "float32":
        raise ParameterError(f'perturb = "blocks" moves the outputs of layers, which {precision} rounds; use float32')
    proto = _exported(model, layout, row_shape, input_dtype)
    if precision == "float32":
        pool_by_products(proto)
    if precision == "float16":
        _round_to_half(proto)
    if precision == "int8-activations":
        _round_activations(proto)
    _forget_origin(proto)
    helper.set_model_props(proto, metadata.written(layout, precision))
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise _inexpressible(error) from error
    if blocks:
        return onnx_cut.cut(proto, layout, blocks)
    graph: bytes = proto.SerializeToString()
    return graph


def _exported(
    model: nn.Module, layout: Layout, row_shape: tuple[int, ...], input_dtype: torch.dtype
) -> onnx.ModelProto:
    model = copy.deepcopy(model).eval().requires_grad_(False)
    rows = torch.zeros(2, *row_shape, dtype=input_dtype)
    trained = tuple(torch.zeros(shape, dtype=modules.DTYPES[layout.dtype]) for shape in layout.shapes.values())
    with quietly():
        try:
            program = torch.onnx.export(
                _Functional(model, layout),
                (rows, *trained),
                input_names=["x", *layout.shapes],
                output_names=["outputs"],
                dynamic_shapes=({0: torch.export.Dim("rows")}, tuple({} for _ in trained)),
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
        except Exception as error:
            raise _inexpressible(error) from error
    if program is None:
        raise _inexpressible("torch.onnx gave no program")
    proto: onnx.ModelProto = program.model_proto
    inputs = {put.name: tuple(dim.dim_value for dim in put.type.tensor_type.shape.dim) for put in proto.graph.input[1:]}
    if inputs != {name: tuple(shape) for name, shape in layout.shapes.items()}:
        raise _inexpressible("its inputs are not its trained tensors")
    _join_scale_and_shift(proto)
    return proto


def _forget_origin(proto: onnx.ModelProto) -> None:
    """Remove the exporter's notes on operations: lines and folders of the server's own code."""
    graph = proto.graph
    del proto.metadata_props[:]
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        part.doc_string = ""
        del part.metadata_props[:]


def _join_scale_and_shift(proto: onnx.ModelProto) -> None:
    """Compute y * weight + bias of each GroupNorm in one pass over y, [rows, channels, ...], instead of two.

    That is a BatchNormalization of mean 0 and variance 1; it saves 4 to 8 % of a convolutional net's time.
    """
    graph, known = proto.graph, onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    makers = {name: node for node in graph.node for name in node.output}
    uses = Counter(name for node in graph.node for name in node.input)
    lengths = {put.name: put.type.tensor_type.shape.dim for put in graph.input[1:]}
    shapes = {value.name: value.type.tensor_type.shape.dim for value in known.value_info}
    axes = {tensor.name: onnx.numpy_helper.to_array(tensor).tolist() for tensor in graph.initializer}

    def channels(name: str, rank: int) -> str | None:
        """Return the trained vector along axis 1 under this name, if any."""
        node = makers.get(name)
        if node is None or node.op_type != "Unsqueeze" or len(lengths.get(node.input[0], "..")) != 1:
            return None
        return str(node.input[0]) if axes.get(node.input[1]) == list(range(1, rank - 1)) else None

    nodes = list[onnx.NodeProto]()
    for node in graph.node:
        scaled = makers.get(node.input[0]) if node.op_type == "Add" else None
        if scaled is not None and scaled.op_type == "Mul" and uses[scaled.output[0]] == 1:
            y = scaled.input[0]
            rank = len(shapes.get(y, ()))
            weight, bias = channels(scaled.input[1], rank), channels(node.input[1], rank)
            if weight and bias and shapes[y][1].dim_value == (length := lengths[weight][0].dim_value):
                kind = graph.input[1].type.tensor_type.elem_type
                zero, variance = f"{node.output[0]}/mean", f"{node.output[0]}/variance"
                for name, value in ((zero, 0.0), (variance, 1.0)):
                    graph.initializer.append(helper.make_tensor(name, kind, [length], [value] * length))
                nodes.remove(scaled)
                inputs = [y, weight, bias, zero, variance]
                node = helper.make_node("BatchNormalization", inputs, node.output, epsilon=0.0)
        nodes.append(node)
    used = {name for node in nodes for name in node.input}
    del graph.node[:]
    graph.node.extend(node for node in nodes if node.op_type != "Unsqueeze" or node.output[0] in used)


def _inexpressible(error: object) -> ParameterError:
    while isinstance(error, BaseException) and error.__cause__ is not None:
        error = error.__cause__  # the first cause names the model's part; the others the step
    reason = next((line for line in str(error).splitlines() if line.strip()), "no reason")
    return ParameterError(f"this model cannot be expressed in ONNX: {reason:.300}")


def _round_to_half(proto: onnx.ModelProto) -> None:
    """Cast all inputs and results of operations to half precision and back.

    A graph of half-precision operations would not do. Where ONNX Runtime has no half kernel, it omits the casts in
    between (on x86 nothing is rounded then). It never omits a cast to half and back that the graph itself has.
    """
    graph = proto.graph
    _refuse_control_flow(graph, "float16")
    known = onnx.shape_inference.infer_shapes(proto).graph
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*known.value_info, *known.output, *known.input)}
    floats = {name: kind for name, kind in kinds.items() if kind in (TensorProto.FLOAT, TensorProto.DOUBLE)}

    def rounding(name: str, source: str, out: str) -> Iterator[onnx.NodeProto]:
        yield helper.make_node("Cast", [source], [f"{name}/half"], to=TensorProto.FLOAT16)
        yield helper.make_node("Cast", [f"{name}/half"], [out], to=floats[name])

    for tensor in graph.initializer:
        if tensor.data_type in (TensorProto.FLOAT, TensorProto.DOUBLE):
            exact = onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.numpy_helper.from_array(exact.astype("float16").astype(exact.dtype), tensor.name))
    rounded_names = {put.name: f"{put.name}/rounded" for put in graph.input if put.name in floats}
    nodes = [node for name, rounded in rounded_names.items() for node in rounding(name, name, rounded)]
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = rounded_names.get(name, name)
        nodes.append(node)
        for place, name in enumerate(node.output):
            if name in floats and node.op_type not in UNROUNDED:
                node.output[place] = f"{name}/exact"
                nodes.extend(rounding(name, f"{name}/exact", name))
    del graph.node[:]
    graph.node.extend(nodes)


def _round_activations(proto: onnx.ModelProto) -> None:
    """Round values that depend on x to 256 levels before each product."""
    graph = proto.graph
    _refuse_control_flow(graph, "int8-activations")
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*graph.value_info, graph.input[0])}
    moving, rounded, nodes = {"x"}, set[str](), list[onnx.NodeProto]()
    for node in graph.node:
        if moving.intersection(node.input):
            moving.update(node.output)
        for place, name in enumerate(node.input[:2] if node.op_type in MULTIPLIES else ()):
            if name not in moving:
                continue  # a weight, or computed from weights
            if name not in rounded:
                if not shapes.get(name) or "rows" not in shapes[name][0].dim_param:
                    raise ParameterError(
                        "int8-activations needs the rows on the first axis of what every layer reads, "
                        f"and {name}, which {node.op_type} reads, has something else there"
                    )
                nodes.extend(_rounding(name))
                rounded.add(name)
            node.input[place] = f"{name}/rounded"
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _refuse_control_flow(graph: onnx.GraphProto, precision: str) -> None:
    for node in graph.node:
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            raise ParameterError(f"{precision} is not supported for a model with control flow ({node.op_type})")


def _rounding(name: str) -> Iterator[onnx.NodeProto]:
    """Yield the operations that round a float `name`, [rows, ...]: DynamicQuantizeLinear and its inverse, row by row.

    scale = (max(x, 0) - min(x, 0)) / 255, zero = round(-min(x, 0) / scale), uint8.
    """

    def node(kind: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(kind, [f"{name}{end}" for end in inputs.split(",")], [f"{name}{output}"], **attributes)

    constants = {"/nought": 0.0, "/levels": 255.0, "/tiny": 1e-30}  # tiny: a row of zeros has scale 0 otherwise
    for end, value in constants.items():
        yield helper.make_node("Constant", [], [name + end], value_float=value)
    yield helper.make_node("Constant", [], [f"{name}/axis"], value_ints=[1])
    yield node("Flatten", "", "/flat", axis=1)
    for kind in ("Min", "Max"):
        yield node(f"Reduce{kind}", "/flat,/axis", f"/row{kind}", keepdims=0)
        yield node(kind, f"/row{kind},/nought", f"/{kind}")
    yield node("Sub", "/Max,/Min", "/range")
    yield node("Div", "/range,/levels", "/step")
    yield node("Max", "/step,/tiny", "/scale")
    yield node("Div", "/Min,/scale", "/below")
    yield node("Neg", "/below", "/above")
    yield node("Round", "/above", "/level")
    yield node("Cast", "/level", "/zero", to=TensorProto.UINT8)
    yield node("QuantizeLinear", ",/scale,/zero", "/uint8", axis=0)
    yield node("DequantizeLinear", "/uint8,/scale,/zero", "/rounded", axis=0)


MOST_WINDOWS = 64  # side by side; a product costs as much for each. PyTorch's limit is in `batched`


class Windows(NamedTuple):
    """Windows that tile images of [channels, height, width] without rest."""

    channels: int
    height: int
    width: int
    tall: int
    broad: int

    def product(self, kind: Any) -> NDArray[np.floating]:
        """Return the factor of a row of windows, [tall width]: [tall width, width / broad]."""
        each = np.repeat(np.eye(self.width // self.broad, dtype=kind), self.broad, axis=0)
        means: NDArray[np.floating] = np.tile(each, (self.tall, 1)) / np.asarray(self.tall * self.broad, kind)
        return means


def pool_by_products(proto: onnx.ModelProto) -> None:
    """Replace each `AveragePool` with adjacent windows that tile the image."""
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
    """Return the windows of an `AveragePool`, if they tile an image of known size."""
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    sizes = [dim.dim_value for dim in kind.shape.dim[1:]] if kind is not None else []
    kernel = attributes.get("kernel_shape", [])
    plain = attributes.get("auto_pad", b"NOTSET") == b"NOTSET" and not any(attributes.get("pads", ()))
    if len(sizes) != 3 or not all(sizes) or not plain or set(attributes.get("dilations", [1])) != {1}:
        return None
    if attributes.get("strides") != kernel or any(size % side for size, side in zip(sizes[1:], kernel, strict=True)):
        return None
    return Windows(*sizes, *kernel) if sizes[2] // kernel[1] <= MOST_WINDOWS else None
