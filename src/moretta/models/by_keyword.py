"""A model whose forward takes arrays by keyword, given rows in which they are packed (`moretta.data.layout`).

A hook before the module's own forward unpacks the rows. So the module keeps its class, its layers and the names of its
tensors, and everything that calls it with one tensor goes on to.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from itertools import chain, repeat
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from moretta.contract.wording import either
from moretta.data.layout import SampleLayout
from moretta.data.tables.preparation import Preparation
from moretta.errors import ParameterError
from moretta.models.checks import dtype_of
from moretta.models.one_tensor import gives_all, hook_of


class Unpack:
    """A hook before a module's forward: from packed rows, float[..., size], to its arrays by keyword.

    Integers are cast to int64, and numbers keep the dtype of the rows. A call by keyword passes as it is. names: of
    arguments, of arrays that are called otherwise.
    """

    def __init__(self, layout: SampleLayout, names: Mapping[str, str] | None = None) -> None:
        self.layout, self.names = layout, names or {}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of the module's forward."""
        return ((), self.arrays(args[0]) | kwargs) if len(args) == 1 else (args, kwargs)

    def arrays(self, packed: Tensor) -> dict[str, Tensor]:
        """Return the arrays of packed rows, [..., *shape] each."""
        found = dict[str, Tensor]()
        for one in self.layout.arrays:
            part = packed[..., self.layout.places[one.name]].reshape(*packed.shape[:-1], *one.shape)
            found[self.names.get(one.name, one.name)] = part.long() if one.integers else part
        return found


class Packing(nn.Module):
    """A module that takes packed rows, given their arrays, [rows, *shape] each, in the layout's order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arrays: Tensor) -> Tensor:
        """Return the outputs, [rows, outputs]."""
        parts = [one.reshape(one.shape[0], -1).float() for one in arrays]  # as silos pack them
        outputs: Tensor = self.model(torch.cat(parts, dim=1))
        return outputs


def takes_packed(model: nn.Module, layout: SampleLayout | None) -> nn.Module:
    """Let a module take packed rows, and return it; without a layout it is left as it is.

    Raises `moretta.errors.ParameterError` for an `nn.Sequential`, whose forward has no names.
    """
    if layout is None:
        return model
    if isinstance(model, nn.Sequential):
        raise ParameterError(
            f"a sample has the arrays {', '.join(layout.names)}, and an nn.Sequential takes one without a name; give a "
            f"module whose forward takes {', '.join(layout.names)} by keyword{layout.table_hint}"
        )
    # Before all other hooks, which were made for arrays by keyword, such as `standardises`.
    hook = Unpack(layout, argument_names(model, layout))
    takes_arrays(model).register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    return model


def arrays_of(model: nn.Module, packed: Tensor) -> Tensor | dict[str, Tensor]:
    """Return rows as the module's own forward takes them: packed ones as arrays by name, others as they are."""
    hook = _unpack(model)
    return packed if hook is None else hook.arrays(packed)


def _unpack(model: nn.Module) -> Unpack | None:
    return next((one for one in model._forward_pre_hooks.values() if isinstance(one, Unpack)), None)


def argument_names(model: nn.Module, layout: SampleLayout) -> dict[str, str]:
    """Return for each array the argument of a module's forward that it is: its name, or the first that ends in it.

    So `ids` and `mask` are `input_ids` and `attention_mask` of a model of transformers. Raises
    `moretta.errors.ParameterError` where such a model would leave an array out.
    """
    known = [one for one in signature(model.forward).parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
    free = [one.name for one in known if one.name not in layout.names]
    found = dict[str, str]()
    for name in layout.names:
        fits = [name] if name in (one.name for one in known) else [one for one in free if one.endswith(f"_{name}")]
        if not fits and hasattr(model, "main_input_name"):
            raise ParameterError(
                f"array `{name}`: {type(model).__name__} has no such argument; call it {either(free[:8])}, or leave it "
                "out"
            )
        found[name] = fits[0] if fits else name
    return found


def takes_arrays(model: nn.Module) -> nn.Module:
    """Let a module take its arrays by keyword again, as it did before `takes_packed`, and return it."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, Unpack):
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)
    return model


def is_standardised(model: nn.Module) -> bool:
    """Whether a module brings its arrays to scale itself, as `standardises` has it."""
    return any(isinstance(hook, _Standardise) for hook in model._forward_pre_hooks.values())


def is_unscaled(model: nn.Module) -> bool:
    """Whether a module gives outputs in the targets' own units, as `standardises` has it."""
    return any(isinstance(hook, _Unscale) for hook in model._forward_hooks.values())


def standardises(model: nn.Module, layout: SampleLayout, preparation: Preparation) -> nn.Module:
    """Let a module that takes arrays by keyword take them, and give outputs, as the silos have both; return it."""
    model.register_forward_pre_hook(_Standardise(layout, argument_names(model, layout), preparation), with_kwargs=True)
    if preparation.scales_targets:
        model.register_forward_hook(_Unscale(preparation))
    return model


class _Standardise:
    """A hook before a module's forward: brings arrays, by keyword or position, to mean 0 and deviation 1 by column."""

    def __init__(self, layout: SampleLayout, names: Mapping[str, str], preparation: Preparation) -> None:
        self._scales = {
            names[one.name]: [
                torch.tensor(figures[layout.places[one.name]]).reshape(one.shape)
                for figures in (preparation.mean, preparation.deviation)
            ]
            for one in layout.arrays
            if one.standardised
        }

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = dtype_of(module)
        named = {name: self._scaled(name, x, dtype) for name, x in kwargs.items()}
        by_place = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        known = [name for name, one in signature(module.forward).parameters.items() if one.kind in by_place]
        places = chain(known, repeat(""))  # what a forward takes besides, such as *rest, has no name
        return tuple(self._scaled(name, x, dtype) for name, x in zip(places, args, strict=False)), named

    def _scaled(self, name: str, x: Any, dtype: torch.dtype) -> Any:
        if name not in self._scales:
            return x
        x = x.float().double()  # as silos pack and prepare it
        mean, deviation = (figures.to(x.device) for figures in self._scales[name])
        return ((x - mean) / deviation).to(dtype)


class _Unscale:
    """A hook behind a module's forward: `Preparation.unscaled`."""

    def __init__(self, preparation: Preparation) -> None:
        self._figures = torch.tensor(preparation.target_mean), torch.tensor(preparation.target_deviation)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], outputs: Tensor) -> Tensor:
        mean, deviation = (one.to(outputs.device) for one in self._figures)
        return (outputs.double() * deviation + mean).to(outputs.dtype)


def with_one_argument(model: nn.Module) -> nn.Module:
    """Let a module have a forward of one argument and one tensor, as torch.export reads past hooks; return it."""
    hook = _unpack(model)
    taken, forward = hook_of(model), getattr(model.forward, "__func__", type(model).forward)
    if hook is None and taken is None:
        return model
    gives_all(takes_arrays(model))

    def of_rows(own: nn.Module, rows: Tensor) -> Any:
        output = forward(own, rows) if hook is None else forward(own, **hook.arrays(rows))
        return output if taken is None else taken.taken(output, rows.shape[0])

    model.forward = MethodType(of_rows, model)
    return model
