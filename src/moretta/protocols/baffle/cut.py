"""A model cut into blocks of layers: the part before a layer, the layer, and the part after it.

The graph is `torch.export`'s: every operation of PyTorch with its inputs, without changes in place, for any number of
rows. A layer is an operation that reads trained tensors. Most are linear in these, so a move changes a layer's output
by the same operation on the move instead of the weights.
"""

import copy
import fnmatch
import operator
import re
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate, map_arg
from torch.nn import functional as F

from moretta.contract.wording import nearest
from moretta.errors import ParameterError
from moretta.models.graph import CHECKS, quietly
from moretta.models.hooks import with_one_argument
from moretta.protocols.baffle.batched import means_of_squares
from moretta.protocols.baffle.silo.blocks import Kind, LayerBlock, Rule
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.common import modules

Node = Any
"""A node of torch.fx: `target` is called on `args` and `kwargs`. Its own types are unions of 20."""
Values = Mapping[Node, Any]

aten = torch.ops.aten
FOR_ONE_NUMBER = "Constraints violated (rows)"
FROZEN = aten._native_batch_norm_legit_no_training.default


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, momentum: float, eps: float
) -> Tensor:
    """BatchNorm with fixed statistics; in `torch.export` it has three results."""
    return F.batch_norm(x, mean, variance, weight, bias, False, momentum, eps)


CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
LINEAR = aten.linear.default
NORMS = (aten.group_norm.default, batch_norm)  # of channels
SQUARES = (([2, 2],), ([2, 2], [2, 2]))  # a pooling's windows and strides
# Operations that are linear in weight and bias, with the places of these among their arguments.
LINEAR_IN_WEIGHTS: dict[Any, tuple[int, ...]] = {
    LINEAR: (1, 2),
    **dict.fromkeys(CONVOLUTIONS, (1, 2)),
    aten.conv_transpose1d.default: (1, 2),
    aten.conv_transpose2d.input: (1, 2),
    aten.conv_transpose3d.input: (1, 2),
    aten.group_norm.default: (2, 3),
    aten.layer_norm.default: (2, 3),
    batch_norm: (1, 2),
    aten.embedding.default: (0,),
}


@dataclass(frozen=True)
class Layer:
    """An operation and the trained tensors that only it reads.

    Attributes:
        node: The operation; for a tensor without a layer of its own, the tensor's node.
        places: The tensors by the places of the operation's arguments; empty for a tensor without a layer.
    """

    node: Node
    tensors: tuple[str, ...]
    places: Mapping[int, str]


@dataclass(frozen=True)
class Cut:
    """A model's graph. tensors: model tensors of nodes, by name. constants: of the export. layers: in running order."""

    nodes: tuple[Node, ...]
    tensors: Mapping[Node, str]
    constants: Mapping[Node, Tensor]
    x: Node
    output: Node
    layers: Mapping[str, Layer]

    def after(self, node: Node) -> tuple[Node, ...]:
        """Return the nodes that depend on a node, in the order of running."""
        reached, dependents = {node}, list[Node]()
        for each in self.nodes:
            if any(read in reached for read in each.all_input_nodes):
                reached.add(each)
                dependents.append(each)
        return tuple(dependents)


def cut_of(model: nn.Module, layout: Layout, row_shape: tuple[int, ...], dtype: torch.dtype) -> Cut:
    """Return the graph of a model (`graph_of`) and its layers. Raises as `graph_of` and `with_layers` do."""
    return with_layers(graph_of(model, row_shape, dtype), layout)


def with_layers(cut: Cut, layout: Layout) -> Cut:
    """Return a graph with its layers. Raises `moretta.errors.ParameterError` for a parameter without a use."""
    return replace(cut, layers=_layers(cut, layout))


def graph_of(
    model: nn.Module, row_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Cut:
    """Return the graph of a model without layers; the model is unchanged.

    Args:
        row_shape, dtype: Of the model's rows.
        device: Where it runs, which `torch.export` writes into the graph wherever the model makes a tensor.

    Raises:
        ParameterError: The model cannot be traced; the sentence names the place.
    """
    model = with_one_argument(copy.deepcopy(model).cpu().eval().requires_grad_(False))
    program = _exported(model, torch.zeros(2, *row_shape, dtype=dtype))
    sources = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    ties = modules.ties(model)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    constants = dict[Node, Tensor]()
    tensors, inputs, nodes, output = dict[Node, str](), list[Node](), list[Node](), None

    def on_device(argument: Any) -> Any:
        return torch.device(device) if isinstance(argument, torch.device) else argument

    for node in program.graph.nodes:
        if node.op == "placeholder":
            target = sources[node.name]
            if target is None:
                inputs.append(node)
            elif target in program.constants and target not in held:
                constants[node] = program.constants[target].detach().to(device)
            else:
                tensors[node] = ties.get(target, target)
        elif node.op == "call_function":
            if any(name in str(node.target) for name in CHECKS) and not node.users:
                continue
            node.args, node.kwargs = (map_aggregate(part, on_device) for part in (node.args, node.kwargs))
            if _in_our_terms(node):
                nodes.append(node)
        elif node.op == "output":
            output = node.args[0][0]
        else:
            raise _uncut(f"`{node.name}` is no operation of PyTorch", node.stack_trace)
    if len(inputs) != 1 or not isinstance(output, torch.fx.Node):
        raise _uncut("expected one input and one output")
    return Cut(tuple(nodes), tensors, constants, inputs[0], output, {})


def _exported(model: nn.Module, rows: Tensor) -> Any:
    """Return `torch.export`'s program of a model for any number of rows.

    Its tracing by running fixes len(x) as a number; its tracing of Python's bytecode does not, and takes longer.
    """
    first: BaseException = RuntimeError()
    for strict in (False, True):
        try:
            with quietly():
                any_rows = ({0: torch.export.Dim("rows")},)
                program = torch.export.export(model, (rows,), dynamic_shapes=any_rows, strict=strict)
                return program.run_decompositions({})
        except Exception as error:  # noqa: BLE001  # any error of a user's model during tracing
            first = first if strict else error
            if not str(first).lstrip().startswith(FOR_ONE_NUMBER):
                break
    raise _uncut(_reason(first), "".join(traceback.format_tb(first.__traceback__))) from first


def unused(cut: Cut, names: Iterable[str]) -> list[str]:
    """Return the tensors among these that no output depends on."""
    reaching, waiting = {cut.output}, [cut.output]
    while waiting:
        new = set(waiting.pop().all_input_nodes) - reaching
        reaching |= new
        waiting += new
    used = {name for node, name in cut.tensors.items() if node in reaching}
    return [name for name in names if name not in used]


def _in_our_terms(node: Node) -> bool:
    """Rewrite an operation into a simpler or faster one; return whether it is still needed."""
    if node.target is aten.avg_pool2d.default and node.args[1:] in SQUARES and not node.kwargs:
        node.target, node.args = means_of_squares, node.args[:1]
    if node.target is aten.view.default:  # moves that run together may have another memory order
        node.target = aten.reshape.default
    if node.target is FROZEN and all(user.target is operator.getitem and user.args[1] == 0 for user in node.users):
        node.target, node.meta["val"] = batch_norm, node.meta["val"][0]
        for user in list(node.users):
            user.replace_all_uses_with(node)
    return not (node.target is operator.getitem and node.args[0].target is batch_norm)


def arguments_of(node: Node, values: Values) -> list[Any]:
    """Return the arguments of a node. values: of other nodes. It has no arguments by name, or plain ones."""
    return list(map_arg(node.args, values.__getitem__))


def called(node: Node, values: Values, arguments: Sequence[Any] | None = None) -> Any:
    """Return a node's value. arguments: replace its own."""
    inputs = arguments_of(node, values) if arguments is None else arguments
    return node.target(*inputs, **map_arg(node.kwargs, values.__getitem__))


def blocks_of(cut: Cut, layout: Layout, rule: Rule) -> tuple[LayerBlock, ...]:
    """Return the blocks of a round. Raises `ParameterError` for a rule that omits a layer or matches none."""
    for pattern, _ in rule.k:
        if not any(fnmatch.fnmatchcase(layer, pattern) for layer in cut.layers):
            close = nearest(pattern, sorted(cut.layers))
            hint = f"did you mean `{close}`?" if close else f"they are {', '.join(cut.layers):.200}"
            raise ParameterError(f"k: the model has no block `{pattern}`; {hint}")
    return tuple(
        rule.block(name, _kind(cut, layer, rule.linear), layer.tensors, layout.shapes)
        for name, layer in cut.layers.items()
    )


def _kind(cut: Cut, layer: Layer, linear: str) -> Kind:
    if not layer.places:
        return "anew"
    weight = layer.places.get(1)  # of convolutions and linear layers
    if (layer.node.target in CONVOLUTIONS and weight) or layer.node.target in NORMS:
        return "channels"
    if layer.node.target is LINEAR and weight:
        shape = layer.node.meta["val"].shape
        alone = len(shape) == 2 and str(shape[0]) == str(cut.x.meta["val"].shape[0])
        return "units" if linear == "activations" and alone else "rank-one"
    return "joint"


def _layers(cut: Cut, layout: Layout) -> dict[str, Layer]:
    """Return the layers by name: of their module, or of a tensor without one."""
    uses = Counter[str]()
    for node in cut.nodes:
        uses.update(cut.tensors[read] for read in node.all_input_nodes if read in cut.tensors)
    for name in unused(cut, layout.shapes):
        raise _uncut(f"its parameter `{name}` does not reach the outputs; freeze it, or remove it")
    layers = dict[str, Layer]()
    for node in cut.nodes:
        places = _places(cut, node, layout, uses)
        if places:
            tensors = tuple(places.values())
            home = tensors[0].rpartition(".")[0]
            layers[home if home and home not in layers else tensors[0]] = Layer(node, tensors, places)
    held = {name for layer in layers.values() for name in layer.tensors}
    layers |= {
        name: Layer(node, (name,), {}) for node, name in cut.tensors.items() if name in layout.shapes.keys() - held
    }
    order = {node: place for place, node in enumerate([*cut.tensors, *cut.nodes])}
    return dict(sorted(layers.items(), key=lambda item: order[item[1].node]))


def _places(cut: Cut, node: Node, layout: Layout, uses: Mapping[str, int]) -> dict[int, str]:
    """Return the trained tensors that only this operation reads, and is linear in, by place."""
    places = dict[int, str]()
    for place in LINEAR_IN_WEIGHTS.get(node.target, ()):
        read = node.args[place] if place < len(node.args) else None
        name = cut.tensors.get(read, "") if isinstance(read, torch.fx.Node) else ""
        if name in layout.shapes and uses[name] == 1:
            places[place] = name
    return places


def _reason(error: BaseException) -> str:
    """Return in one line why torch could not trace a model."""
    kind = type(error).__name__
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), kind)
    if line.startswith(FOR_ONE_NUMBER):
        return "it runs for one number of rows alone"
    reads = kind == "GuardOnDataDependentSymNode" or "got FakeTensor" in line  # a size, as that of a packed sequence
    return "what it does depends on the values that it reads" if reads else line


def _uncut(why: str, traceback: str | None = None) -> ParameterError:
    """Return the refusal of a model. traceback: as Python prints it; its last line of a `forward` is named."""
    own = Path(torch.__file__).parent
    lines = re.findall(r'File "(.+)", line (\d+), in forward(?:\n +(.+))?', traceback or "")
    lines = [line for line in lines if own not in Path(line[0]).parents] or lines
    where = ""
    if lines:
        file, line, source = lines[-1]
        where = f"{Path(file).name}, line {line}{f', `{source:.100}`' if source else ''}: "
    return ParameterError(
        f'perturb = "blocks": this model cannot be cut into blocks: {where}{why:.300}; use perturb = "all"'
    )
