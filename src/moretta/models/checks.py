"""What a model may be: how large, checked before it takes memory where possible; its first weights, and its layers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.nn.parameter import is_lazy

from moretta.errors import ParameterError, UnsupportedModel


def check_weights(model: nn.Module) -> None:
    """Check that a model has something to train, and finite numbers to begin with.

    Raises `moretta.errors.ParameterError`, naming the tensor where it is one.
    """
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ParameterError(f"model: expected the module itself, not {type(model).__name__} around it; give .module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ParameterError("model: expected one with parameters to train; this has none that require a gradient")
    for name, value in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(value):
            raise ParameterError(
                f"model: `{name}`: expected numbers, and a lazy layer's has none yet; call the model once on a row"
            )
        if value.is_meta:
            raise ParameterError(
                f"model: `{name}`: expected numbers, got the meta device, which has none; build the model on the CPU"
            )
        if isinstance(value, nn.Parameter) and not value.numel():
            raise ParameterError(f"model: `{name}`: expected numbers, got shape {list(value.shape)}; leave it out")
        if isinstance(value, nn.Parameter) and not value.isfinite().all():
            raise ParameterError(f"model: `{name}`: expected finite numbers, got NaN or infinity; start it anew")


def check_traceable(model: nn.Module) -> None:
    """Raise `moretta.errors.UnsupportedModel` for a module whose layers cannot be looked into or run one by one."""
    for name, module in model.named_modules():
        compiled = isinstance(module, torch.jit.ScriptModule)
        if compiled or hasattr(module, "_orig_mod"):
            raise UnsupportedModel(
                f"{f'`{name}`' if name else 'model'}: expected a module of Python's, whose layers can be run; give it "
                f"as it was before {'torch.jit' if compiled else 'torch.compile'}"
            )


TENSORS = 10_000  # as many as a message's header has room for


def build_within(most: int, build: Callable[[], nn.Module], otherwise: str = "") -> nn.Module:
    """Build a model of at most `most` numbers in at most `TENSORS` parameters and buffers.

    It is built twice: first without memory, on PyTorch's meta device. Where its code cannot do that, its tensors are
    counted while it is built. otherwise: what is said of a larger one; by default that [limits] of a site are less.
    Raises `moretta.errors.ParameterError` for a larger one.
    """
    with suppress(Exception), _counted(most, otherwise) as found, torch.device("meta"):
        build()
    _refuse(found, most, otherwise)
    try:
        with _counted(most, otherwise) as found:
            return build()
    except Exception:
        _refuse(found, most, otherwise)
        raise


@contextmanager
def _counted(most: int, otherwise: str) -> Iterator[list[int]]:
    """Count the numbers of each tensor that this thread registers in a module, and stop when there are too many."""
    found, thread = list[int](), threading.get_ident()

    def count(owner: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is not None and threading.get_ident() == thread:
            found.append(tensor.numel())
            _refuse(found, most, otherwise)

    handles = [
        hooks.register_module_parameter_registration_hook(count),
        hooks.register_module_buffer_registration_hook(count),
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _refuse(found: list[int], most: int, otherwise: str) -> None:
    if sum(found) > most or len(found) > TENSORS:
        raise ParameterError(
            otherwise
            or f"[model] of the run has {sum(found)} numbers or more in {len(found)} tensors, and [limits] parameters "
            f"here allows {most} in {TENSORS}; raise it if this machine is to hold that"
        )
