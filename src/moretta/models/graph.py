"""A model written down as a graph of PyTorch's core operations, so that it can be built again without its code.

`torch.export` follows the model. Its own files are not read here, because `torch.export.load` runs what they say:
weights and constants that are pickled (`torch.load(weights_only=False)`), sizes as Python expressions
(`sympy.sympify`), and operations by any dotted name below `torch`. Our file is one of safetensors, whose metadata holds
the graph as JSON:

    tensors   of the model's state_dict: shape, whether it is trained; the weights are in a file of their own
    nodes     in the order of running: the operation, and what it reads; the tensors of the file are constants
    output    the node whose value is the outputs

An operation is one of ATen's core set, which PyTorch keeps small and stable, computes values alone and changes nothing
in place, or arithmetic on sizes. Nothing else has a name here: no code of somebody else's file is run, and no other
file is read. Operations that read memory which is not theirs, where what they are given does not fit, are refused or
checked (`_UNSAFE`, `_NORMS`). Such a file can still compute wrong numbers, take long and take much memory.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from moretta.contract.messages import Tensors
from moretta.errors import ParameterError
from moretta.models.by_keyword import with_one_argument

FORMAT = 1
_SIZES: Mapping[str, Callable[..., Any]] = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "mod", "neg", "getitem", "eq", "ne", "lt", "le", "gt", "ge")
}
_CHECKS = ("_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size")
_WORDS = {
    str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype | torch.memory_format | torch.layout)
}
_PLAIN = (str, bool, int, type(None))
# They show what was in memory before, or trust sizes and offsets that they are given.
_UNSAFE = ("empty", "empty_strided", "_embedding_bag", "_fft_c2r")
_NORMS = ("_native_batch_norm_legit", "_native_batch_norm_legit_no_training")  # they trust their tensors' lengths
OWN_NAMES = ("_told", "_steps", "_done", "_value")


class Graph(nn.Module):
    """A model that was read from a graph: it takes rows and returns outputs, as in evaluation.

    Its tensors have the names of the model's own. Dropout and the like are gone, in training mode too.
    """

    def __init__(self, told: Mapping[str, Any], tensors: Mapping[str, Tensor], constants: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._told = dict(told)
        for name, kind in told["tensors"].items():
            one = tensors[name]
            if kind["same_as"] is not None:
                _put(self, name, _get(self, kind["same_as"]))
            else:
                _put(self, name, nn.Parameter(one, kind["trained"]) if kind["parameter"] else one)
        for name, value in constants.items():
            self.register_buffer(f"constant_{name}", value, persistent=False)
        self._steps = [(_operation(node["does"]), node["reads"], node["by_name"]) for node in told["nodes"]]
        last = {place: at for at, (_, *read) in enumerate(self._steps) for place in _places(read)}
        self._done: list[list[int]] = [[] for _ in self._steps]  # by step, the results that nothing later reads
        for place in last.keys() - _places(told["output"]):
            self._done[last[place]].append(place)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, [rows, outputs]."""
        values: list[Any] = []
        for (does, reads, by_name), done in zip(self._steps, self._done, strict=True):
            given = [self._value(one, x, values) for one in reads]
            values.append(does(*given, **{name: self._value(one, x, values) for name, one in by_name.items()}))
            for place in done:
                values[place] = None
        outputs: Tensor = self._value(self._told["output"], x, values)
        return outputs

    def _value(self, told: Any, x: Tensor, values: Sequence[Any]) -> Any:
        match told:
            case {"node": place}:
                return values[place]
            case {"tensor": name}:
                return _get(self, name)
            case {"constant": name}:
                return getattr(self, f"constant_{name}")
            case {"input": _}:
                return x
            case {"word": word}:
                return x.device if word == "device" else _WORDS[word]
            case {"number": number}:
                return float(number)
            case list():
                return [self._value(one, x, values) for one in told]
        return told


def _places(told: Any) -> set[int]:
    """Return which operations' values are read."""
    match told:
        case {"node": int(place)}:
            return {place}
        case dict():
            return set[int]().union(*map(_places, told.values()))
        case list() | tuple():
            return set[int]().union(*map(_places, told))
    return set()


def written(model: nn.Module, shape: Sequence[int], dtype: torch.dtype) -> bytes:
    """Return a model as the bytes of a file; the model, which is read in evaluation mode, is left as it was.

    shape, dtype: of a row of what it reads, several arrays packed. Its weights are not in the file.
    Raises `moretta.errors.ParameterError` for a model that cannot be followed, or does what no core operation does.
    """
    blank = with_one_argument(copy.deepcopy(model).cpu().eval())
    rows = torch.zeros((2, *shape), dtype=dtype)
    if rows.is_floating_point():
        rows = rows.to(next(blank.parameters()).dtype)
    try:
        with quietly(), torch.no_grad():
            program = torch.export.export(blank, (rows,), dynamic_shapes=({0: torch.export.Dim("rows")},))
            program = program.run_decompositions()
        _refuse_own_names(blank)
        told, constants = _told(program, blank)
    except Exception as error:  # noqa: BLE001  # whatever a model of somebody's does while it is followed
        said = str(error) if isinstance(error, ParameterError) else f"{type(error).__name__}: {error}"
        raise ParameterError(
            f"the model cannot be written down as a graph ({said.strip().splitlines()[0]:.200}); put what builds it "
            'into a file and give Federation that, as model="module:function"'
        ) from None
    return save(constants, {"graph": json.dumps(told, allow_nan=False)})


def read(path: Path, tensors: Tensors) -> Graph:
    """Return the model of a file that `written` made, with its weights. No code is run but core operations.

    Raises `moretta.errors.ParameterError` for a file that is none, and for weights of another model.
    """
    if not path.is_file():  # a pipe would never end
        raise ParameterError(f"{path}: expected the graph of a model; it is no file")
    try:
        with safe_open(path, "pt") as file:
            told = json.loads((file.metadata() or {})["graph"])
            constants = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        if told["format"] != FORMAT:
            raise ParameterError(f"{path}: expected a graph of format {FORMAT}; was it written by another version?")
        _check_weights(told["tensors"], tensors)
        return Graph(told, {name: torch.tensor(one) for name, one in tensors.items()}, constants)
    except (OSError, SafetensorError) as error:
        raise ParameterError(f"{path}: expected the graph of a model; {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ParameterError(
            f"{path}: this is no graph of a model as Result.save writes it ({type(error).__name__}); save it again"
        ) from None


def _check_weights(wanted: Mapping[str, Any], tensors: Tensors) -> None:
    if set(wanted) != set(tensors):
        raise ParameterError(f"expected weights for the {len(wanted)} tensors of the graph; got {len(tensors)} others")
    for name, one in tensors.items():
        if list(one.shape) != wanted[name]["shape"]:
            raise ParameterError(f"`{name}`: expected shape {wanted[name]['shape']}, got {list(one.shape)}")


def _told(program: torch.export.ExportedProgram, model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return an exported program as plain data, and its constants by name."""
    state = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    tensors = {
        name: {
            "shape": list(one.shape),
            "parameter": isinstance(one, nn.Parameter),
            "trained": one.requires_grad,
            "same_as": first[id(one)] if id(one) in first else first.setdefault(id(one), name) and None,
        }
        for name, one in state.items()
    }
    sources = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
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
            output = _plain(node.args[0][0], places)
        elif node.op != "call_function":
            raise ParameterError(f"`{node.name}` is no operation of PyTorch")
        elif not any(name in str(node.target) for name in _CHECKS):
            by_name = {name: _plain(one, places) for name, one in node.kwargs.items()}
            nodes.append({"does": _name(node.target), "reads": _plain(node.args, places), "by_name": by_name})
            places[node] = {"node": len(nodes) - 1}
    return {"format": FORMAT, "tensors": tensors, "nodes": nodes, "output": output}, constants


def _refuse_own_names(model: nn.Module) -> None:
    """Refuse tensors that a `Graph` could not hold, as it has attributes of these names."""
    for name in model.state_dict():
        first = name.partition(".")[0]
        if first in OWN_NAMES or first.startswith("constant_"):
            raise ParameterError(f"a graph has the name `{first}` for itself; give the model's attribute another one")


def _plain(value: Any, places: Mapping[torch.fx.Node, Any]) -> Any:
    """Return what an operation reads as JSON has it."""
    match value:
        case torch.fx.Node():
            return places[value]
        case list() | tuple():
            return [_plain(one, places) for one in value]
        case torch.device():
            return {"word": "device"}
        case float():
            return value if math.isfinite(value) else {"number": str(value)}
    if str(value) in _WORDS:
        return {"word": str(value)}
    if not isinstance(value, _PLAIN):
        raise ParameterError(f"it reads a {type(value).__name__}")
    return value


def _name(target: Any) -> str:
    """Return the name by which `_operation` finds an operation."""
    own = str(getattr(target, "__name__", ""))
    name = f"sizes.{own}" if _SIZES.get(own) is target else str(target)
    _operation(name)
    return name


def _operation(name: str) -> Callable[..., Any]:
    """Return an operation by its name, "aten.addmm.default" or "sizes.mul", of those that may be in a graph."""
    home, _, rest = name.partition(".")
    if home == "sizes" and rest in _SIZES:
        return _SIZES[rest] if rest == "getitem" else partial(_of_sizes, _SIZES[rest])
    packet, _, overload = rest.partition(".")
    if home == "aten" and packet.isidentifier() and overload.isidentifier() and not packet.startswith("__"):
        found = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if isinstance(found, torch._ops.OpOverload) and packet not in _UNSAFE and _may_be_in(found):
            return partial(_normalised, found) if packet in _NORMS else found
    raise ParameterError(f"a graph has core operations of PyTorch alone, and `{name:.80}` is none")


def _may_be_in(found: torch._ops.OpOverload) -> bool:
    """Whether an operation computes values and nothing else."""
    core = torch.Tag.core in found.tags
    return core and not found._schema.is_mutable and not found._schema.name.endswith("_backward")


def _of_sizes(does: Callable[..., Any], *given: Any) -> Any:
    """Return what arithmetic gives. Of text and lists it could fill the memory, and of huge numbers too."""
    # A SymInt is a size while a graph is exported again.
    known = [one for one in given if not isinstance(one, torch.SymInt)]
    if not all(isinstance(one, int | float) and abs(one) < 1 << 63 for one in known):
        raise ParameterError("this graph reckons with what is no size; have the model saved again")
    return does(*given)


def _normalised(does: Callable[..., Any], x: Tensor, *given: Any, **by_name: Any) -> Any:
    """Return what a norm gives of tensors with one number a channel; it would read on beyond shorter ones.

    One without statistics has to be told to take the batch's: else it reads those that are not there.
    """
    tensors = [one for one in (*given, *by_name.values()) if isinstance(one, Tensor)]
    unknown = does is torch.ops.aten._native_batch_norm_legit.no_stats and (by_name or given[2:3] != (True,))
    if x.ndim < 2 or unknown or any(one.shape != x.shape[1:2] for one in tensors):
        raise ParameterError("this graph's norms and channels do not fit each other; have the model saved again")
    return does(x, *given, **by_name)


def _get(module: nn.Module, name: str) -> Tensor:
    home, _, own = name.rpartition(".")
    found = getattr(module.get_submodule(home), own)
    if not isinstance(found, Tensor):
        raise KeyError(name)
    return found


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    """Register a tensor under a dotted name, in submodules that are made where they are missing."""
    *homes, own = name.split(".")
    for home in homes:
        if home not in module._modules:
            module.add_module(home, nn.Module())
        module = module.get_submodule(home)
    if isinstance(value, nn.Parameter):
        module.register_parameter(own, value)
    else:
        module.register_buffer(own, value)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silence torch, which warns of its own deprecations and prints pages where a model cannot be exported."""
    said, disabled = io.StringIO(), logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
