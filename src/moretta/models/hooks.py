"""Hooks by which models that take arrays by keyword, or return several tensors, take and return one.

A hook before the module's own forward unpacks rows in which several arrays are packed (`moretta.data.layout`). Models
of libraries return objects with `logits`, dictionaries, tuples, and outputs at every pixel. A hook after the forward
selects the tensor that is trained, and lays a row's numbers side by side. So the module keeps its class, its layers and
the names of its tensors, and callers with one tensor need no change.
"""

import math
from collections.abc import Iterator, Mapping
from inspect import Parameter, signature
from itertools import chain, repeat
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from moretta.contract.wording import either
from moretta.data.layout import SampleLayout
from moretta.data.tables.preparation import Preparation
from moretta.errors import ParameterError
from moretta.models.checks import dtype_of

Hook = TypeVar("Hook")
USUAL = ("logits", "out")  # libraries' names for the outputs of a loss


class OneTensor:
    """A hook after a module's forward: from its result to one tensor, [rows, outputs].

    Args:
        name: Of the tensor in an object or a dictionary; empty selects `logits` or `out`, or the only one that fits.
        mask: The shape of masks that are the targets; a row's outputs are then laid position by position. (): not
            masks.
    """

    def __init__(self, name: str = "", mask: tuple[int, ...] = ()) -> None:
        self.name, self.mask = name, mask

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor:
        """Return the outputs. Raises `moretta.errors.ParameterError` unless exactly one tensor fits."""
        rows = next(array.shape[0] for array in (*args, *kwargs.values()) if isinstance(array, Tensor))
        return self.taken(output, rows)

    def taken(self, output: Any, rows: int) -> Tensor:
        """Return the one tensor of a module's result for this many rows, as [rows, outputs]."""
        tensor = self.chosen(output, rows)
        tensor = self._by_position(tensor) if self.mask else tensor
        if rows == 1:  # a squeeze may have removed the axis of rows
            return tensor.reshape(1, -1)
        return tensor.flatten(1) if tensor.ndim > 2 else tensor.reshape(-1, 1) if tensor.ndim < 2 else tensor

    def chosen(self, output: Any, rows: int) -> Tensor:
        """Return the one tensor in the module's own shape."""
        if isinstance(output, Tensor) and not self.name:
            return output
        named, fits = dict(_named(output)), list(that_fit(output, rows))
        name = self.name or next((usual for usual in USUAL if usual in named), fits[0] if len(fits) == 1 else "")
        if name not in fits:
            fault = f"no output `{name}` of floats, one a row" if name else f"{len(fits)} outputs that could be trained"
            has = either(fits or list(named)) if named else type(output).__name__
            raise ParameterError(f'the model returns {fault}; it returns {has}: name one by [model] output = "NAME"')
        return named[name]

    def _by_position(self, output: Tensor) -> Tensor:
        """Return outputs with their classes on the last axis; they are on the first or the last axis of a row."""
        positions = math.prod(self.mask)
        if mask := mask_of(output, positions):
            return output.movedim(1, -1) if mask == output.shape[2:] else output
        raise ParameterError(
            f"targets have {positions} entries a row, and outputs are {list(output.shape)}; expected a class a row, "
            "or a mask of each output's positions, from outputs [rows, classes, ...] or [rows, ..., classes]"
        )


def mask_of(output: Tensor, positions: int) -> tuple[int, ...]:
    """Return the shape of this many positions in outputs [rows, classes, ...] or [rows, ..., classes]; () in others."""
    shapes = (tuple(output.shape[2:]), tuple(output.shape[1:-1]))
    return next((shape for shape in shapes if shape and math.prod(shape) == positions), ())


def that_fit(output: Any, rows: int) -> dict[str, Tensor]:
    """Return the tensors of an object, a dictionary or a tuple that could be trained: floats with one entry a row."""
    return {key: item for key, item in _named(output) if item.is_floating_point() and item.shape[:1] == (rows,)}


def _named(output: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an output by name: keys, fields, or places from 0."""
    fields = getattr(output, "_asdict", None)
    items = fields() if fields else output
    if isinstance(items, Mapping):
        pairs = list(items.items())
    elif isinstance(items, tuple | list):
        pairs = list(enumerate(items))
    else:
        pairs = list(vars(items).items()) if hasattr(items, "__dict__") else []
    yield from ((str(key), item) for key, item in pairs if isinstance(item, Tensor))


def gives_one_tensor(model: nn.Module, output: str = "", mask: tuple[int, ...] = ()) -> nn.Module:
    """Make a module return one tensor, [rows, outputs]; return the module. output, mask: as in `OneTensor`."""
    if hook_of(model) is None:
        config: Any = getattr(model, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # transformers would keep keys and values for further words, and there are none
        model.register_forward_hook(OneTensor(output, mask), with_kwargs=True, prepend=True)
    return model


def hook_of(model: nn.Module) -> OneTensor | None:
    """Return the hook of `gives_one_tensor`, or None."""
    return _hook(model._forward_hooks, OneTensor)


def _hook(hooks: Mapping[int, Any], kind: type[Hook]) -> Hook | None:
    return next((hook for hook in hooks.values() if isinstance(hook, kind)), None)


def _without(kind: "type[OneTensor | Unpack]", hooks: dict[int, Any], by_keyword: dict[int, bool]) -> None:
    for key in [key for key, hook in hooks.items() if isinstance(hook, kind)]:
        del hooks[key]
        by_keyword.pop(key, None)


def gives_all(model: nn.Module) -> nn.Module:
    """Undo `gives_one_tensor`; return the module."""
    _without(OneTensor, model._forward_hooks, model._forward_hooks_with_kwargs)
    return model


class Unpack:
    """A hook before a module's forward: from packed rows, float[..., size], to its arrays by keyword.

    Integers are cast to int64, and numbers keep the rows' dtype. A call by keyword passes unchanged.

    Args:
        names: The argument of each array that has another name.
    """

    def __init__(self, layout: SampleLayout, names: Mapping[str, str] | None = None) -> None:
        self.layout, self.names = layout, names or {}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of the module's forward."""
        return ((), self.arrays(args[0]) | kwargs) if len(args) == 1 else (args, kwargs)

    def arrays(self, packed: Tensor) -> dict[str, Tensor]:
        """Return the arrays of packed rows, [..., *shape] each."""
        arrays = dict[str, Tensor]()
        for array in self.layout.arrays:
            part = packed[..., self.layout.places[array.name]].reshape(*packed.shape[:-1], *array.shape)
            arrays[self.names.get(array.name, array.name)] = part.long() if array.integers else part
        return arrays


class Packing(nn.Module):
    """A module that receives the arrays of rows, [rows, *shape] each, in the layout's order, and packs them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arrays: Tensor) -> Tensor:
        """Return the outputs, [rows, outputs]."""
        parts = [array.reshape(array.shape[0], -1).float() for array in arrays]  # packed as at the silos
        outputs: Tensor = self.model(torch.cat(parts, dim=1))
        return outputs


def takes_packed(model: nn.Module, layout: SampleLayout | None) -> nn.Module:
    """Make a module take packed rows; return the module. Without a layout it is unchanged.

    Raises:
        ParameterError: The module is an `nn.Sequential`, whose forward has no names, or `argument_names` refuses it.
    """
    if layout is None:
        return model
    if isinstance(model, nn.Sequential):
        raise ParameterError(
            f"a sample has the arrays {', '.join(layout.names)}, but an nn.Sequential takes one without a name; use a "
            f"module whose forward takes {', '.join(layout.names)} by keyword{layout.table_hint}"
        )
    # This hook precedes all others, such as that of `standardises`, because they expect arrays by keyword.
    hook = Unpack(layout, argument_names(model, layout))
    takes_arrays(model).register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    return model


def arrays_of(model: nn.Module, packed: Tensor) -> Tensor | dict[str, Tensor]:
    """Return rows in the form of the module's own forward: packed ones as arrays by name, others unchanged."""
    hook = _hook(model._forward_pre_hooks, Unpack)
    return packed if hook is None else hook.arrays(packed)


def argument_names(model: nn.Module, layout: SampleLayout) -> dict[str, str]:
    """Return each array's argument in a module's forward: the one of its name, or the first that ends in it.

    So `ids` and `mask` are `input_ids` and `attention_mask` of a model of transformers.

    Raises:
        ParameterError: A model of transformers would omit an array.
    """
    known = [item for item in signature(model.forward).parameters.values() if item.kind is not Parameter.VAR_KEYWORD]
    free = [item.name for item in known if item.name not in layout.names]
    fitting = dict[str, str]()
    for name in layout.names:
        fits = [name] if name in (item.name for item in known) else [item for item in free if item.endswith(f"_{name}")]
        if not fits and hasattr(model, "main_input_name"):
            raise ParameterError(
                f"array `{name}`: {type(model).__name__} has no argument of this name; rename it to "
                f"{either(free[:8])}, or leave it out"
            )
        fitting[name] = fits[0] if fits else name
    return fitting


def takes_arrays(model: nn.Module) -> nn.Module:
    """Undo `takes_packed`, so that the module takes its arrays by keyword; return the module."""
    _without(Unpack, model._forward_pre_hooks, model._forward_pre_hooks_with_kwargs)
    return model


def is_standardised(model: nn.Module) -> bool:
    """Return whether a module scales its arrays itself, by `standardises`."""
    return _hook(model._forward_pre_hooks, _Standardise) is not None


def is_unscaled(model: nn.Module) -> bool:
    """Return whether a module returns outputs in the targets' own units, by `standardises`."""
    return _hook(model._forward_hooks, _Unscale) is not None


def standardises(model: nn.Module, layout: SampleLayout, preparation: Preparation) -> nn.Module:
    """Make a module that takes arrays by keyword use the silos' own units, of inputs and outputs; return the module."""
    model.register_forward_pre_hook(_Standardise(layout, argument_names(model, layout), preparation), with_kwargs=True)
    if preparation.scales_targets:
        model.register_forward_hook(_Unscale(preparation))
    return model


class _Standardise:
    """A hook before a module's forward: scales arrays, by keyword or position, to mean 0 and deviation 1 by column."""

    def __init__(self, layout: SampleLayout, names: Mapping[str, str], preparation: Preparation) -> None:
        self._scales = {
            names[array.name]: [
                torch.tensor(figures[layout.places[array.name]]).reshape(array.shape)
                for figures in (preparation.mean, preparation.deviation)
            ]
            for array in layout.arrays
            if array.standardised
        }

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = dtype_of(module)
        named = {name: self._scaled(name, x, dtype) for name, x in kwargs.items()}
        by_place = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        known = [name for name, item in signature(module.forward).parameters.items() if item.kind in by_place]
        places = chain(known, repeat(""))  # further arguments, such as *rest, have no name
        return tuple(self._scaled(name, x, dtype) for name, x in zip(places, args, strict=False)), named

    def _scaled(self, name: str, x: Any, dtype: torch.dtype) -> Any:
        if name not in self._scales:
            return x
        x = x.float().double()  # packed and prepared as at the silos
        mean, deviation = (figures.to(x.device) for figures in self._scales[name])
        return ((x - mean) / deviation).to(dtype)


class _Unscale:
    """A hook after a module's forward: `Preparation.unscaled`."""

    def __init__(self, preparation: Preparation) -> None:
        self._figures = torch.tensor(preparation.target_mean), torch.tensor(preparation.target_deviation)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], outputs: Tensor) -> Tensor:
        mean, deviation = (item.to(outputs.device) for item in self._figures)
        return (outputs.double() * deviation + mean).to(outputs.dtype)


def with_one_argument(model: nn.Module) -> nn.Module:
    """Give a module a forward of one argument and one tensor, because torch.export ignores hooks; return the module."""
    hook = _hook(model._forward_pre_hooks, Unpack)
    taken, forward = hook_of(model), getattr(model.forward, "__func__", type(model).forward)
    if hook is None and taken is None:
        return model
    gives_all(takes_arrays(model))

    def of_rows(own: nn.Module, rows: Tensor) -> Any:
        output = forward(own, rows) if hook is None else forward(own, **hook.arrays(rows))
        return output if taken is None else taken.taken(output, rows.shape[0])

    model.forward = MethodType(of_rows, model)
    return model
