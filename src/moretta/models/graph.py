"""A model saved as a graph of PyTorch's core operations, so that it can be built again without its code.

`torch.export` traces the model. Its own files are not read here, because `torch.export.load` runs what they contain:
pickled weights and constants (`torch.load(weights_only=False)`), sizes as Python expressions (`sympy.sympify`), and
operations by any dotted name below `torch`. Our file is a safetensors file, whose metadata has the graph as JSON:

    tensors   of the model's state_dict: shape, and whether it is trained; the weights are in a file of their own
    nodes     in the order of running: the operation and its arguments; the tensors of the file are constants
    output    the node whose value is the outputs

An operation is one of `moretta.models.operations`: of ATen's core set, which PyTorch keeps small and stable, or
arithmetic on sizes. Nothing else has a name here, so no code from a file is run, and no other file is read. Each
operation's arguments are checked. A graph from a folder still runs in a confined process (`moretta.run.foreign`).
"""

import contextlib
import copy
import io
import json
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from moretta.contract.messages import Tensors
from moretta.errors import ParameterError
from moretta.models.checks import dtype_of
from moretta.models.hooks import with_one_argument
from moretta.models.operations import SIZES, WORDS, operation

FORMAT = 1
CHECKS = ("_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size")
_PLAIN = (str, bool, int, type(None))
OWN_NAMES = ("_description", "_steps", "_done", "_value", "_process", "_file")


class Graph(nn.Module):
    """A model that was read from a graph: it maps rows to outputs, as in evaluation.

    Its tensors have the names of the model's own. It has no dropout, in training mode either.
    """

    def __init__(
        self, description: Mapping[str, Any], tensors: Mapping[str, Tensor], constants: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self._description = dict(description)
        for name, kind in description["tensors"].items():
            tensor = tensors[name]
            if kind["same_as"] is not None:
                _put(self, name, _get(self, kind["same_as"]))
            else:
                _put(self, name, nn.Parameter(tensor, kind["trained"]) if kind["parameter"] else tensor)
        for name, value in constants.items():
            self.register_buffer(f"constant_{name}", value, persistent=False)
        self._steps = [(operation(node["does"]), node["reads"], node["by_name"]) for node in description["nodes"]]
        last = {place: at for at, (_, *read) in enumerate(self._steps) for place in _places(read)}
        self._done: list[list[int]] = [[] for _ in self._steps]  # by step, the results that no later step reads
        for place in last.keys() - _places(description["output"]):
            self._done[last[place]].append(place)

    @classmethod
    def read(cls, file: bytes, tensors: Tensors) -> Self:
        """Return the model of a file that `written` made, with its weights. Only listed operations are run.

        Raises:
            ParameterError: The file is not one of `written`, or the weights are another model's.
        """
        try:
            constants = load(file)
            description = json.loads(
                json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])["__metadata__"]["graph"]
            )
            if description["format"] != FORMAT:
                raise ParameterError(f"expected a graph of format {FORMAT}; was it written by another version?")
            expected = description["tensors"]
            if set(expected) != set(tensors):
                raise ParameterError(
                    f"expected weights for the {len(expected)} tensors of the graph; got {len(tensors)} others"
                )
            for name, tensor in tensors.items():
                if list(tensor.shape) != (shape := expected[name]["shape"]):
                    raise ParameterError(f"`{name}`: expected shape {shape}, got {list(tensor.shape)}")
            return cls(description, {name: torch.tensor(tensor) for name, tensor in tensors.items()}, constants)
        except SafetensorError as error:
            raise ParameterError(f"expected the graph of a model; {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, RecursionError) as error:
            raise ParameterError(
                f"this is not a model's graph as Result.save writes it ({type(error).__name__}); save it again"
            ) from None

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, [rows, outputs]."""
        values: list[Any] = []
        for (does, reads, by_name), done in zip(self._steps, self._done, strict=True):
            arguments = [self._value(part, x, values) for part in reads]
            values.append(does(*arguments, **{name: self._value(part, x, values) for name, part in by_name.items()}))
            for place in done:
                values[place] = None
        outputs: Tensor = self._value(self._description["output"], x, values)
        return outputs

    def _value(self, description: Any, x: Tensor, values: Sequence[Any]) -> Any:
        match description:
            case {"node": place}:
                return values[place]
            case {"tensor": name}:
                return _get(self, name)
            case {"constant": name}:
                return getattr(self, f"constant_{name}")
            case {"input": _}:
                return x
            case {"word": word}:
                return x.device if word == "device" else WORDS[word]
            case {"number": number}:
                return float(number)
            case list():
                return [self._value(part, x, values) for part in description]
        return description


def _places(description: Any) -> set[int]:
    """Return the operations whose values are read."""
    match description:
        case {"node": int(place)}:
            return {place}
        case dict():
            return set[int]().union(*map(_places, description.values()))
        case list() | tuple():
            return set[int]().union(*map(_places, description))
    return set()


def written(model: nn.Module, shape: Sequence[int], dtype: torch.dtype) -> bytes:
    """Return a model as the bytes of a file without its weights; the model itself is unchanged.

    Args:
        model: Traced in evaluation mode.
        shape: Of an input row, with several arrays packed.
        dtype: Of the input rows.

    Raises:
        ParameterError: The model cannot be traced, or needs an operation outside the core set.
    """
    blank = with_one_argument(copy.deepcopy(model).cpu().eval())
    rows = torch.zeros((2, *shape), dtype=dtype)
    if rows.is_floating_point():
        rows = rows.to(dtype_of(blank))
    try:
        with quietly(), torch.no_grad():
            program = torch.export.export(blank, (rows,), dynamic_shapes=({0: torch.export.Dim("rows")},))
            program = program.run_decompositions()
        _refuse_own_names(blank)
        description, constants = _described(program, blank)
    except Exception as error:  # noqa: BLE001  # a user's model may raise anything while it is traced
        reason = str(error) if isinstance(error, ParameterError) else f"{type(error).__name__}: {error}"
        raise ParameterError(
            f"the model cannot be exported as a graph ({reason.strip().splitlines()[0]:.200}); put the function that "
            'builds it into a file, and pass it to Federation as model="module:function"'
        ) from None
    return save(constants, {"graph": json.dumps(description, allow_nan=False)})


def _described(program: torch.export.ExportedProgram, model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return an exported program as plain data, and its constants by name."""
    state = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    tensors = {
        name: {
            "shape": list(tensor.shape),
            "parameter": isinstance(tensor, nn.Parameter),
            "trained": tensor.requires_grad,
            "same_as": first[id(tensor)] if id(tensor) in first else first.setdefault(id(tensor), name) and None,
        }
        for name, tensor in state.items()
    }
    sources = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    results = [spec.kind.name for spec in program.graph_signature.output_specs]  # changed buffers come first
    places: dict[torch.fx.Node, Any] = {}
    nodes, constants, output = list[dict[str, Any]](), dict[str, Tensor](), None
    for node in program.graph.nodes:
        if node.op == "placeholder":
            target = sources[node.name]
            if target is None:
                places[node] = {"input": True}
            elif target in state:
                places[node] = {"tensor": target}
            else:
                name = str(len(constants))
                constants[name], places[node] = program.constants[target].detach().clone(), {"constant": name}
        elif node.op == "output":
            output = _plain(node.args[0][results.index("USER_OUTPUT")], places)
        elif node.op != "call_function":
            raise ParameterError(f"`{node.name}` is no operation of PyTorch")
        elif not any(name in str(node.target) for name in CHECKS):
            by_name = {name: _plain(part, places) for name, part in node.kwargs.items()}
            nodes.append({"does": _name(node.target), "reads": _plain(node.args, places), "by_name": by_name})
            places[node] = {"node": len(nodes) - 1}
    return {"format": FORMAT, "tensors": tensors, "nodes": nodes, "output": output}, constants


def _refuse_own_names(model: nn.Module) -> None:
    """Refuse tensors whose names a `Graph` needs for its own attributes."""
    for name in model.state_dict():
        first = name.partition(".")[0]
        if first in OWN_NAMES or first.startswith("constant_"):
            raise ParameterError(f"graphs reserve the name `{first}`; rename the model's attribute")


def _plain(value: Any, places: Mapping[torch.fx.Node, Any]) -> Any:
    """Return an operation's argument as JSON content."""
    match value:
        case torch.fx.Node():
            return places[value]
        case list() | tuple():
            return [_plain(part, places) for part in value]
        case torch.device():
            return {"word": "device"}
        case float():
            return value if math.isfinite(value) else {"number": str(value)}
    if str(value) in WORDS:
        return {"word": str(value)}
    if not isinstance(value, _PLAIN):
        raise ParameterError(f"it reads a {type(value).__name__}")
    return value


def _name(target: Any) -> str:
    """Return the name by which `operation` finds an operation."""
    own = str(getattr(target, "__name__", ""))
    name = f"sizes.{own}" if SIZES.get(own) is target else str(target)
    operation(name)
    return name


def _get(module: nn.Module, name: str) -> Tensor:
    *homes, own = name.split(".")
    for home in homes:
        module = module._modules[home] or nn.Module()
    tensor = module._parameters.get(own, module._buffers.get(own))
    if tensor is None:
        raise KeyError(name)
    return tensor


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    """Keep a tensor under a dotted name, which may be that of a method; missing submodules are made."""
    *homes, own = name.split(".")
    for home in homes:
        module = module._modules.setdefault(home, nn.Module()) or nn.Module()
    if isinstance(value, nn.Parameter):
        module._parameters[own] = value
    else:
        module._buffers[own] = value


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silence torch, which warns of its own deprecations and prints pages if a model cannot be exported."""
    output, disabled = io.StringIO(), logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
