"""How a batch passes through a model and back where the whole batch takes too much memory or time.

**A micro-batch.** The mean loss of a batch is the sum of its rows' losses over D (`losses`). So its gradient is the sum
of the gradients of its parts, each with its share of D, equal to the whole batch's up to rounding.

**Recomputing blocks.** A block's activations are dropped in the forward pass and recomputed in the backward pass (Chen
et al. 2016, "Training deep nets with sublinear memory cost"), with the same random numbers and buffers.

**bfloat16.** Operations that `torch.autocast` lists round to 8 bits of mantissa; weights, gradients and losses do not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from moretta.errors import ParameterError

if TYPE_CHECKING:
    from moretta.protocols.common.losses import Loss

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
LARGEST_BLOCK = 0.5  # of a model's parameters; recomputing a larger one would need about as much memory as the model
SAME = 1e-4  # relative, between gradients with and without recomputing: rounding is far below


@dataclass(frozen=True)
class Passes:
    """How the rows of a batch pass through a model.

    Args:
        rows: At a time; None for all.
        recomputes: Whether blocks are recomputed.
        autocast: Whether operations are in bfloat16.
    """

    rows: int | None = None
    recomputes: bool = False
    autocast: bool = False

    def parts(self, rows: int) -> list[slice]:
        """Return the rows of a batch that pass together."""
        step = self.rows or max(1, rows)
        return [slice(start, start + step) for start in range(0, max(1, rows), step)]

    def shares(self, loss: Loss, targets: Tensor) -> Iterator[tuple[slice, float]]:
        """Yield those rows with their part of D; 1 for all of them."""
        parts = self.parts(len(targets))
        weights = [len(targets[some]) * loss.density(targets[some]) for some in parts] if len(parts) > 1 else [1.0]
        yield from ((some, weight / (sum(weights) or 1.0)) for some, weight in zip(parts, weights, strict=True))

    @contextmanager
    def through(self, model: nn.Module, left_out: str | None = None) -> Iterator[None]:
        """Run forward passes within it in this way. left_out: a layer whose block runs normally."""
        with ExitStack() as stack:
            if self.autocast:
                stack.enter_context(torch.autocast(next(model.parameters()).device.type, torch.bfloat16))
            for block in blocks_of(model, left_out) if self.recomputes else ():
                stack.enter_context(_recomputed(block))
            yield

    def check(self, model: nn.Module, x: Tensor) -> None:
        """Raise `moretta.errors.ParameterError` if a model cannot pass in this way. x: a few rows."""
        if self.rows is not None:
            refuse_mixing(model, "[engine] micro-batch takes some rows of a batch at a time")
        if not self.recomputes:
            return
        where, model = '[engine] recompute = "blocks"', copy.deepcopy(model).train()
        if not blocks_of(model):
            raise ParameterError(
                f"{where}: the model has no blocks, modules with layers of their own in an nn.Sequential, an "
                "nn.ModuleList or an nn.ModuleDict; remove it, and lower [engine] micro-batch"
            )
        try:
            same = _same(*(_tried(copy.deepcopy(model), x, way) for way in (replace(self, recomputes=False), self)))
        except Exception as error:
            raise ParameterError(f"{where}: a block cannot be run twice: {error}".split("\n")[0]) from error
        if not same:
            raise ParameterError(
                f"{where}: the model has other gradients or buffers where its blocks are run twice, so that something "
                "in them keeps what it saw; remove it, and lower [engine] micro-batch"
            )


WHOLE = Passes()


def refuse_mixing(model: nn.Module, because: str, *, frozen: bool = False) -> None:
    """Refuse a model with a layer that mixes the rows of a batch.

    Args:
        because: The reason, for the message.
        frozen: Whether a layer that stays in evaluation mode counts too.

    Raises:
        ParameterError: The model has such a layer, or one that keeps running statistics; the message names it.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, _BatchNorm | _InstanceNorm) or not (frozen or copy.copy(layer).train().training):
            continue
        if isinstance(layer, _BatchNorm) or layer.track_running_stats:
            what = "keeps running statistics of" if isinstance(layer, _InstanceNorm) else "mixes"
            raise ParameterError(
                f"`{name or 'the model'}` ({type(layer).__name__}) {what} the rows of a batch, and {because}; use "
                "GroupNorm in its place"
            )


def blocks_of(model: nn.Module, left_out: str | None = None) -> list[nn.Module]:
    """Return the blocks of a model: members of containers that have layers of their own, outermost first.

    A block with more than `LARGEST_BLOCK` of the model is split into smaller ones.

    Args:
        left_out: The name of a layer; blocks that contain it are split too.
    """
    whole = sum(tensor.numel() for tensor in model.parameters())
    left = None if left_out is None else model.get_submodule(left_out)

    def members(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            layers = (
                isinstance(module, CONTAINERS) and type(child) not in CONTAINERS and any(True for _ in child.children())
            )
            size = sum(tensor.numel() for tensor in child.parameters())
            if layers and 0 < size <= LARGEST_BLOCK * whole and all(part is not left for part in child.modules()):
                yield child
            else:
                yield from members(child)

    return [block for block in dict.fromkeys(members(model)) if not isinstance(block, torch.jit.ScriptModule)]


@contextmanager
def _recomputed(block: nn.Module) -> Iterator[None]:
    from torch.utils.checkpoint import checkpoint

    held, forward = vars(block).get("forward"), block.forward

    def again(*args: Any, **kwargs: Any) -> Any:
        run, contexts = partial(forward, *args, **kwargs), lambda: (nullcontext(), Replayed(block))
        return checkpoint(run, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    block.forward = again
    try:
        yield
    finally:
        del block.forward
        if held is not None:
            block.forward = held


class Replayed(AbstractContextManager[None]):
    """Runs a module again from the buffers and random numbers at creation; restores the present ones afterwards."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        device = next(module.parameters()).device
        cuda = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
        self._generators = [torch.default_generator, *cuda]
        self._before = self._state()

    def __enter__(self) -> None:
        self._now = self._state()
        self._set(self._before)

    def __exit__(self, *_: object) -> None:
        self._set(self._now)

    def _state(self) -> tuple[list[Tensor], list[Tensor]]:
        buffers = [buffer.clone() for buffer in self._module.buffers()]
        return buffers, [generator.get_state() for generator in self._generators]

    @torch.no_grad()
    def _set(self, state: tuple[list[Tensor], list[Tensor]]) -> None:
        for buffer, value in zip(self._module.buffers(), state[0], strict=True):
            buffer.copy_(value)
        for generator, value in zip(self._generators, state[1], strict=True):
            generator.set_state(value)


def _tried(model: nn.Module, x: Tensor, passes: Passes) -> list[Tensor]:
    """Return a model's gradients of a function of its outputs, and its buffers afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with passes.through(model):
            outputs: Tensor = model(x)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(outputs.double().square().mean(), trained, materialize_grads=True)
    return [*gradients, *model.buffers()]


def _same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    size = max((float(tensor.abs().max()) for tensor in theirs if tensor.numel()), default=0.0)
    return all(
        torch.allclose(a.double(), b.double(), 0.0, SAME * size, True) for a, b in zip(ours, theirs, strict=True)
    )
