"""The calls of a model on its inputs: the graph on which the scale solver works.

The model runs once on example inputs, and every function of torch that it calls is recorded with its arguments, its
result and its calling layer. So containers of torch.nn (TransformerEncoder, MultiheadAttention) and branches on shapes
are followed too. A branch on *data* is refused, and the error names its line: the other side would never be seen. The
exception is a yes-or-no question about inputs alone, such as whether the batch has padding. The true and the perturbed
model answer it alike. Both answers are traced (`other_answers`), and a silo's rows may lead only to traced answers
(`YesOrNo`). Symbolic tracing (torch.fx) is not used, because it stops at layers of torch.nn and at branches on shapes.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from moretta.errors import UnsupportedModel

READS = frozenset({"__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__", "__contains__"}) | {
    "item", "tolist", "numpy", "is_nonzero", "equal", "allclose"
}  # fmt: skip

QUESTIONS = frozenset({"__bool__", "__contains__", "is_nonzero", "equal", "allclose"})  # reads with yes or no
MOST_QUESTIONS = 4  # of a model about its inputs

FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError)
"""What a user's forward raises when it cannot run on its tensors."""

_COUNTS = (nn.RNNBase.get_expected_hidden_size.__code__, _BatchNorm.forward.__code__)
"""Code of torch's layers that may read data: the number of rows of a packed sequence, or of earlier batches."""

_TORCH, _OURS = str(Path(torch.__file__).parent), str(Path(__file__).parent)

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
    """One call of a function of torch.

    Attributes:
        name: Normalised, so that `x + y`, `torch.add` and `x.add_(y)` are all "add".
        module, kind: The path and the class of the layer that called it; the model itself is "".
        result: The tensor (or tuple of tensors) itself, so that its identity links calls.
        copies: With `keep`, the result's tensors right after the call.
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
    """All calls of one run, its output, the layers that returned their input as it was, and answers (`YesOrNo`)."""

    calls: tuple[Call, ...]
    output: Any
    idle: frozenset[str]
    answers: tuple[bool, ...] = ()

    @property
    def outline(self) -> Outline:
        """The calls without results and without the bookkeeping of integer buffers."""
        calls = tuple((call.name, call.module) for call in self.calls if not _is_count(call))
        return Outline(calls, type(self.output), self.answers)


@dataclass(frozen=True)
class Outline:
    """The names of all calls of one run with their modules, the type of its output, and answers."""

    calls: tuple[tuple[str, str], ...]
    kind: type
    answers: tuple[bool, ...]


@dataclass(eq=False)
class YesOrNo(TorchFunctionMode):
    """Records a model's yes-or-no questions about tensors, in order. turned: the answers to reverse."""

    turned: frozenset[int] = frozenset()
    answers: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer = func(*args, **(kwargs or {}))
        if isinstance(answer, bool) and getattr(func, "__name__", "") in QUESTIONS:
            answer ^= len(self.answers) in self.turned
            self.answers.append(answer)
        return answer


class CastsToDouble(TorchFunctionMode):
    """Keeps in float64 what a model casts to float32, as some normalisations do, while rules are tried."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args, kwargs = (
            tree_map(lambda leaf: torch.float64 if leaf is torch.float32 else leaf, part)
            for part in (args, kwargs or {})
        )
        return func(*args, **kwargs)


def other_answers(answers: tuple[bool, ...]) -> list[frozenset[int]]:
    """Return which answers to reverse in further runs, to see both sides of each question: each alone, then all."""
    if len(answers) > MOST_QUESTIONS:
        raise UnsupportedModel(
            f"the model asks {len(answers)} questions about the values of its inputs, and {MOST_QUESTIONS} can be "
            "followed; use torch.where or arithmetic on tensors instead"
        )
    alone = [frozenset({place}) for place in range(len(answers))]
    return alone + ([frozenset(range(len(answers)))] if len(answers) > 1 else [])


@dataclass(eq=False)
class _Recorder(TorchFunctionMode):
    """Records calls while active. derived, weighed: the ids of tensors that depend on data, and on weights."""

    derived: set[int]
    weighed: set[int]
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
        read = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        depends, weighs = bool(read & self.derived), bool(read & self.weighed)
        counted = sys._getframe(1).f_code in _COUNTS
        if depends and name in READS and (weighs or name not in QUESTIONS) and not counted:
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
            self.weighed.update(id(leaf) for leaf in produced if weighs)
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


def record(
    model: nn.Module,
    inputs: Sequence[Tensor],
    *,
    training: bool = False,
    keep: bool = False,
    turned: frozenset[int] = frozenset(),
) -> Trace:
    """Run the model once, without gradients and with fixed randomness, and return its calls.

    Args:
        training: Run in train mode, else in evaluation mode; the model stays in it.
        keep: Copy every result at once, because a later in-place call may change it.
        turned: See `YesOrNo`.

    Raises:
        UnsupportedModel: The model cannot run, or reads data other than by a yes-or-no question about its inputs
            alone; the sentence has the line of the user's code. Or it draws from Python's or NumPy's global generator.
    """
    model.train(training)
    tensors = (*inputs, *model.parameters(), *model.buffers())
    weights = [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.is_floating_point())]
    recorder = _Recorder({id(tensor) for tensor in tensors}, {id(tensor) for tensor in weights}, keep)
    asked, drawn = YesOrNo(turned), _drawn()
    idle: set[str] = set()
    hooks = [hook for name, layer in model.named_modules() for hook in _watch(name, layer, recorder, idle)]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            with CastsToDouble(), asked, recorder:
                output = model(*inputs)
    except FAILURES as error:
        raise UnsupportedModel(f"the model does not run on the example inputs: {_blame(error)}") from error
    finally:
        for hook in hooks:
            hook.remove()
    if _drawn() != drawn:
        raise UnsupportedModel(
            "the model draws from Python's random or from numpy.random, which a run does not seed; draw from torch, as "
            "torch.rand does, and branch on no number that is drawn"
        )
    return Trace(tuple(recorder.calls), output, frozenset(idle), tuple(asked.answers))


def _drawn() -> Any:
    """Return the states of the generators of Python and of NumPy."""
    state: Any = np.random.get_state(legacy=False)  # noqa: NPY002  # a user's model may draw from it
    return random.getstate(), state["state"]["pos"], state["state"]["key"].tobytes()


def _watch(name: str, layer: nn.Module, recorder: _Recorder, idle: set[str]) -> Iterator[Any]:
    """Hook one layer, so that the recorder knows when it runs."""

    def enter(module: nn.Module, args: Any) -> None:
        recorder.layers.append((name, type(layer).__name__))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        recorder.layers.pop()
        if args and output is args[0] and not any(True for _ in layer.parameters()):
            idle.add(name)

    yield layer.register_forward_pre_hook(enter, prepend=True)
    yield layer.register_forward_hook(leave)


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
    return filename.startswith((_OURS, _TORCH))
