"""What a model does to its inputs, call by call: the graph on which the scale solver works.

The model is run once on example inputs, and every function of torch that it calls is recorded with its arguments, its
result and the layer it was called from. So containers of torch.nn (TransformerEncoder, MultiheadAttention) and branches
on shapes are followed like anything else. A branch on *data* is refused, naming its line: its other side would never be
seen. Symbolic tracing (torch.fx) is not used, as it stops at the layers of torch.nn and at every branch on a shape.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from moretta.errors import UnsupportedModel

READS = frozenset({"__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__", "__contains__"}) | {
    "item", "tolist", "numpy", "is_nonzero", "equal", "allclose"
}  # fmt: skip

FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError)
"""What a user's forward raises when it cannot run on the tensors it is given."""

_TORCH = str(Path(torch.__file__).parent)

_ALIASES = {
    "__add__": "add", "__radd__": "add", "__iadd__": "add", "subtract": "sub", "__sub__": "sub", "__isub__": "sub",
    "rsub": "rsub", "__rsub__": "rsub", "__mul__": "mul", "__rmul__": "mul", "__imul__": "mul", "multiply": "mul",
    "divide": "div", "true_divide": "div", "__truediv__": "div", "__rdiv__": "rdiv", "__rtruediv__": "rdiv",
    "__matmul__": "matmul", "__rmatmul__": "rmatmul", "__neg__": "neg", "negative": "neg", "absolute": "abs",
    "__pow__": "pow", "__rpow__": "rpow", "concat": "cat", "concatenate": "cat", "swapaxes": "transpose",
    "swapdims": "transpose", "moveaxis": "movedim", "bmm": "matmul", "clip": "clamp", "special_expit": "sigmoid",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Call:
    """One function of torch as it was called.

    name: normalised, so that `x + y`, `torch.add` and `x.add_(y)` are all "add".
    module, kind: the path and the class of the layer that called it; the model itself is "".
    result: the tensor (or tuple of tensors) itself, so that its identity links calls.
    copies: with `keep`, the tensors of the result as they were right after the call.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    module: str
    kind: str
    copies: tuple[Tensor, ...] = ()

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument given by position or by name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    @property
    def place(self) -> str:
        """The call in words, for messages: `gelu in blocks.0 (Block)`."""
        return f"{self.name} in {self.module or 'the model'} ({self.kind})"


@dataclass(frozen=True, eq=False)
class Trace:
    """All calls of one run, its output, and the layers that returned their input unchanged."""

    calls: tuple[Call, ...]
    output: Any
    idle: frozenset[str]


@dataclass(eq=False)
class _Recorder(TorchFunctionMode):
    """Records every call while it is active. `derived` holds the ids of tensors that depend on data."""

    derived: set[int]
    keep: bool
    calls: list[Call] = field(default_factory=list)
    layers: list[tuple[str, str]] = field(default_factory=lambda: [("", "model")])

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        depends = any(id(leaf) in self.derived for leaf in tree_leaves((args, kwargs)))
        if depends and name in READS:
            raise UnsupportedModel(
                f"{_user_line(sys._getframe())} reads the value of a tensor that depends on the data ({name}), in "
                f"{self.layers[-1][0] or 'the model'}: a branch or number taken from data cannot be followed; use "
                "torch.where or arithmetic on the tensor instead"
            )
        result = func(*args, **kwargs)
        outcome = args[0] if name == "__setitem__" else result
        produced = [leaf for leaf in tree_leaves(outcome) if isinstance(leaf, Tensor)]
        if produced:
            self.derived.update(id(leaf) for leaf in produced if depends)
            copies = tuple(leaf.detach().clone() for leaf in produced) if self.keep else ()
            args, kwargs = tree_map(lambda leaf: leaf, (args, kwargs))  # a list may grow after the call
            self.calls.append(Call(name, func, args, kwargs, outcome, *self.layers[-1], copies))
        return result


def function_name(function: Callable[..., Any]) -> str:
    """Return the normalised name of a function of torch: without the in-place underscore, operators by their verb."""
    name = getattr(function, "__name__", "unknown")
    if name == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", "unknown")
    if name.endswith("_") and not name.endswith("__"):
        name = name.rstrip("_")
    return _ALIASES.get(name, name)


def record(model: nn.Module, inputs: Sequence[Tensor], *, training: bool = False, keep: bool = False) -> Trace:
    """Run the model once, without gradients and with fixed randomness, and return its calls.

    keep: copy every result at once, because a later in-place call may change it.
    Raises UnsupportedModel, with the line of the user's code, if the model reads data or cannot run.
    """
    model.train(training)
    tensors = (*inputs, *model.parameters(), *model.buffers())
    recorder = _Recorder({id(tensor) for tensor in tensors}, keep)
    idle: set[str] = set()
    hooks = [hook for name, layer in model.named_modules() for hook in _watch(name, layer, recorder, idle)]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            with recorder:
                output = model(*inputs)
    except FAILURES as error:
        raise UnsupportedModel(f"the model does not run on the example inputs: {_blame(error)}") from error
    finally:
        for hook in hooks:
            hook.remove()
    return Trace(tuple(recorder.calls), output, frozenset(idle))


def _watch(name: str, layer: nn.Module, recorder: _Recorder, idle: set[str]) -> Iterator[Any]:
    """Hook one layer, so that the recorder knows which layer is running."""

    def enter(module: nn.Module, args: Any) -> None:
        recorder.layers.append((name, type(layer).__name__))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        recorder.layers.pop()
        if args and output is args[0] and not any(True for _ in layer.parameters()):
            idle.add(name)

    yield layer.register_forward_pre_hook(enter, prepend=True)
    yield layer.register_forward_hook(leave)


def refuse_two_structures(evaluation: Trace, training: Trace) -> None:
    """Raise UnsupportedModel, naming the layer, if the model calls other functions in training than in evaluation.

    Layers without parameters that do nothing in evaluation (stochastic depth, drop path) are left out: the noise they
    multiply with belongs to training, and the solver follows them in the training trace.
    """
    if type(training.output) is not type(evaluation.output):
        raise UnsupportedModel(
            f"in training the model returns {type(training.output).__name__} and in evaluation "
            f"{type(evaluation.output).__name__}: switch auxiliary outputs off (for example aux_logits=False)"
        )
    ours, theirs = (_steps(trace, evaluation.idle) for trace in (evaluation, training))
    for calm, busy in zip_longest(ours, theirs):
        if calm is None or busy is None or (calm.name, calm.module) != (busy.name, busy.module):
            found = " and ".join(f"{call.place}" for call in (busy, calm) if call is not None)
            raise UnsupportedModel(
                f"the model is built differently in training and in evaluation (first at {found}): "
                "make its forward the same in both modes"
            )


def _steps(trace: Trace, idle: frozenset[str]) -> list[Call]:
    """Return the calls outside of idle layers, without the bookkeeping of integer buffers."""
    return [call for call in trace.calls if call.module not in idle and not _is_count(call)]


def _is_count(call: Call) -> bool:
    return isinstance(call.result, Tensor) and not call.result.is_floating_point() and call.name == "add"


def _user_line(frame: FrameType | None) -> str:
    """Return `file:line` of the innermost frame outside torch and this file."""
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "the model"


def _blame(error: BaseException) -> str:
    """Return the error with the last line of the user's code that led to it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def _is_ours(filename: str) -> bool:
    return filename == __file__ or filename.startswith(_TORCH)
