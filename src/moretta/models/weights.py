"""Which initial weights and which layers a model may have."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn
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
