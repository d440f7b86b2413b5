"""A device that is not the CPU, on any machine: what is on it can only be reached by a copy, and copies are counted.

Its tensors call themselves "meta" and hold a tensor of the CPU inside. An operation on tensors of both devices is an
error, as on a GPU; only numbers without axes may come from the CPU.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

DEVICE = torch.device("meta")
aten = torch.ops.aten


class There(Tensor):
    """A tensor on the device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> There:
        made: There = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"There({list(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _on_cpu(given: Any) -> Any:
    """Return arguments with what is on the device in the CPU's own tensors, and no device named."""
    given = tree_map_only(There, lambda one: one.held, given)
    return tree_map_only(torch.device, lambda one: torch.device("cpu"), given)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    inner_args, inner_kwargs = _on_cpu((args, kwargs))
    made = func(*inner_args, **inner_kwargs)
    made = tree_map_only(Tensor, lambda one: one if isinstance(one, There) else There(one), made)
    return return_and_correct_aliasing(func, args, kwargs, made)


class Elsewhere(TorchDispatchMode):
    """Lets tensors be made on the device, and counts copies: `there` to it, `back` from it, and numbers asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        tensors = [one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        there = [one for one in tensors if isinstance(one, There)]
        if func.overloadpacket in (aten._to_copy, aten.to):
            named = [one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.device)]
            source, target = bool(there), DEVICE in named or (not named and bool(there))
            if source != target:
                self.copies["there" if target else "back"] += 1
            inner_args, inner_kwargs = _on_cpu((args, kwargs))
            made = func(*inner_args, **inner_kwargs)
            return There(made.clone() if made is inner_args[0] else made) if target else made
        if func is aten.copy_.default and len(there) == 1:
            self.copies["there" if isinstance(args[0], There) else "back"] += 1
            args[0].held.copy_(args[1]) if isinstance(args[0], There) else args[0].copy_(args[1].held)
            return args[0]
        if func is aten._local_scalar_dense.default and there:
            self.copies["numbers"] += 1
            return func(there[0].held)
        mixed = [one for one in tensors if not isinstance(one, There) and one.dim()]
        if there and mixed:
            raise RuntimeError(f"{func}: expected all tensors on one device, got some of the CPU and some elsewhere")
        if there or kwargs.get("device") == DEVICE:
            return _run(func, args, kwargs)
        return func(*args, **kwargs)
