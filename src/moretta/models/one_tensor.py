"""A model that returns more than one tensor [rows, outputs], taken as if it did.

Models of libraries return objects with `logits`, dictionaries, tuples, and outputs at every pixel. A hook behind the
module's forward takes the one tensor that is trained, and lays a row's numbers side by side. So the module keeps its
class, its layers and the names of its tensors, as with `moretta.models.by_keyword`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from moretta.contract.wording import either
from moretta.errors import ParameterError

USUAL = ("logits", "out")  # what libraries call the outputs that a loss is taken of


class OneTensor:
    """A hook behind a module's forward: from whatever it returns to one tensor, [rows, outputs].

    name: of the tensor in an object or a dictionary; empty takes `logits` or `out`, or the only one that fits.
    mask: the shape of masks that are the targets; a row's outputs are then laid position by position. (): not masks.
    """

    def __init__(self, name: str = "", mask: tuple[int, ...] = ()) -> None:
        self.name, self.mask = name, mask

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor:
        """Return the outputs. Raises `moretta.errors.ParameterError` where several tensors fit, or none does."""
        rows = next(one.shape[0] for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
        return self.taken(output, rows)

    def taken(self, output: Any, rows: int) -> Tensor:
        """Return the one tensor of what a module returned for so many rows, as [rows, outputs]."""
        tensor = self.chosen(output, rows)
        tensor = self._by_position(tensor) if self.mask else tensor
        return tensor.flatten(1) if tensor.ndim > 2 else tensor[:, None] if tensor.ndim == 1 else tensor

    def chosen(self, output: Any, rows: int) -> Tensor:
        """Return the one tensor as the module has it."""
        if isinstance(output, Tensor) and not self.name:
            return output
        named, fits = dict(_named(output)), list(that_fit(output, rows))
        name = self.name or next((one for one in USUAL if one in named), fits[0] if len(fits) == 1 else "")
        if name not in fits:
            asked = f"no output `{name}` of floats, one a row" if name else f"{len(fits)} outputs that could be trained"
            has = either(fits or list(named)) if named else type(output).__name__
            raise ParameterError(f'the model returns {asked}; it returns {has}: name one by [model] output = "NAME"')
        return named[name]

    def _by_position(self, output: Tensor) -> Tensor:
        """Return outputs with their classes, which are on the first or the last axis of a row, on the last."""
        positions = math.prod(self.mask)
        if mask := mask_of(output, positions):
            return output.movedim(1, -1) if mask == output.shape[2:] else output
        raise ParameterError(
            f"expected a class a row, or masks with as many positions as the model's outputs, [rows, classes, ...] or "
            f"[rows, ..., classes]; targets have {positions} entries a row, and outputs are {list(output.shape)}"
        )


def mask_of(output: Tensor, positions: int) -> tuple[int, ...]:
    """Return the shape of so many positions in outputs [rows, classes, ...] or [rows, ..., classes]; () in others."""
    shapes = (tuple(output.shape[2:]), tuple(output.shape[1:-1]))
    return next((shape for shape in shapes if shape and math.prod(shape) == positions), ())


def that_fit(output: Any, rows: int) -> dict[str, Tensor]:
    """Return the tensors of an object, a dictionary or a tuple that could be trained: of floats, one a row."""
    return {key: one for key, one in _named(output) if one.is_floating_point() and one.shape[:1] == (rows,)}


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
    yield from ((str(key), one) for key, one in pairs if isinstance(one, Tensor))


def gives_one_tensor(model: nn.Module, output: str = "", mask: tuple[int, ...] = ()) -> nn.Module:
    """Let a module return one tensor, [rows, outputs], and return it. output, mask: as of `OneTensor`."""
    if hook_of(model) is None:
        config: Any = getattr(model, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # of transformers: keys and values for words to come, which none do
        model.register_forward_hook(OneTensor(output, mask), with_kwargs=True, prepend=True)
    return model


def hook_of(model: nn.Module) -> OneTensor | None:
    """Return the hook of `gives_one_tensor`, None where there is none."""
    return next((one for one in model._forward_hooks.values() if isinstance(one, OneTensor)), None)


def gives_all(model: nn.Module) -> nn.Module:
    """Let a module return what it did before `gives_one_tensor`, and return it."""
    for key, hook in list(model._forward_hooks.items()):
        if isinstance(hook, OneTensor):
            del model._forward_hooks[key]
            model._forward_hooks_with_kwargs.pop(key, None)
    return model
