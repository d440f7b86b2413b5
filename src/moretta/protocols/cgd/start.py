"""Confined starts: w_l(1) = delta_l * Rand_l (`cgd.txt`, Eq. 11), from a participant's secret root.

The root comes from the operating system and never leaves the participant. A tensor's start follows from root, name and
shape alone, so it is not stored but made again whenever it is needed. What is common to all starts is public.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from torch import nn

from moretta.contract.messages import Array, Tensors
from moretta.errors import ParameterError
from moretta.protocols.cgd.params import CGD, Delta
from moretta.protocols.common import modules
from moretta.secure_aggregation.keystream import Keystream, SecretRoot, derive

COMMON = b"CGD's common start, no secret"  # what a public stream is derived from, in the place of a root
LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def delta_of(delta: Delta, name: str, root: SecretRoot) -> float:
    """Return delta_l of the participant `name`. Raises `moretta.errors.ParameterError` where a mapping lacks it."""
    if isinstance(delta, tuple):
        low, high = delta
        return low + (high - low) * float(root.stream("confined delta").uniform(1)[0])
    if isinstance(delta, Mapping):
        if name not in delta:
            raise ParameterError(f"delta: expected a number for participant `{name}`, got {sorted(delta)!r:.200}")
        return delta[name]
    return delta


def noise(root: SecretRoot, name: str, shape: tuple[int, ...], delta: float) -> Array:
    """Return delta * Rand of one tensor, float64: standard normal numbers of the root's keystream."""
    return delta * root.stream("confined start", name).normal(int(np.prod(shape))).reshape(shape)


def shared_biases(params: CGD, model: nn.Module) -> list[str]:
    """Return the names of the biases that begin alike for everybody: those of all layers with weights but the last."""
    layers = [name for name, module in model.named_modules() if isinstance(module, LAYERS)]
    trained = modules.trainable(model)
    return [f"{name}.bias" for name in layers[:-1] if params.hidden_bias == "shared" and f"{name}.bias" in trained]


def centers(params: CGD, model: nn.Module, seed: int) -> dict[str, Array]:
    """Return what starts are confined around, by PyTorch's names: all parameters and buffers of the model.

    Shared biases are standard normal numbers, which follow from the seed of the training and are as public.

    Scale and shift of normalisation layers keep their values, whatever `around` says: near zero they would shut the
    network. Differs from the paper, whose networks have none.
    """
    values = modules.arrays(model)
    norms = {f"{prefix}." for prefix, module in model.named_modules() if isinstance(module, NORMS)}
    for tensor in modules.trainable(model):
        if params.around == "zero" and tensor[: tensor.rfind(".") + 1] not in norms:
            values[tensor] = np.zeros_like(values[tensor])
    if params.around == "zero":
        for tensor in shared_biases(params, model):
            stream = Keystream(derive(COMMON, "shared bias", seed, tensor))
            values[tensor] = stream.normal(values[tensor].size).astype(values[tensor].dtype)
    return values


def confined(params: CGD, around: Tensors, noised: Collection[str], name: str, root: SecretRoot) -> dict[str, Array]:
    """Return the start of the participant `name`: `around`, with its noise on the tensors that are its own.

    noised: the tensors that are trained, without `shared_biases`.
    """
    delta, start = delta_of(params.delta, name, root), dict(around)
    for tensor in noised:
        value = around[tensor]
        start[tensor] = (value + noise(root, tensor, value.shape, delta)).astype(value.dtype)
    return start
