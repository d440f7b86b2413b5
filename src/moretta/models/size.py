"""How large a model may be: checked before it takes memory, where possible."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from moretta.errors import ParameterError

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
