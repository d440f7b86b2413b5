"""A participant's own computations: its confined start, a model's gradient, or one part of a joint model's.

Gradients are deterministic in weights, rows and round. Confined starts: w_l(1) = delta_l * Rand_l (`cgd.txt`, Eq. 11),
from a participant's secret root. The root comes from the operating system and never leaves the participant. A tensor's
start follows from root, name and shape alone, so it is recomputed and not stored. The common part of all starts is
public.
"""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from moretta.contract.messages import Array, Tensors
from moretta.contract.roles import Phase
from moretta.errors import ParameterError
from moretta.models.checks import dtype_of
from moretta.protocols.cgd.layers import Layers
from moretta.protocols.cgd.params import CGD, Delta
from moretta.protocols.common import modules
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.passes import WHOLE, Passes
from moretta.secure_aggregation.keystream import Keystream, SecretRoot, derive


@dataclass(frozen=True)
class Local:
    """The result of one round's batch: mean gradients by tensor, the mean loss, its rows, BatchNorm's buffers."""

    gradients: Tensors
    loss: float
    rows: int
    buffers: Tensors


def whole_gradient(
    module: nn.Module, weights: Tensors, rows: SiloRows, loss: Loss, drawn: tuple[int, ...], phase: Phase
) -> Local:
    """Return the gradient of a whole model on the batch of a round (Algorithm 1, line 7).

    Args:
        module: In train mode; overwritten with `weights`, and not changed otherwise.
        drawn: `Stamp.drawn`.
    """
    modules.load(module, weights)
    with rows.randomness(*drawn):
        batch = rows.batch(*drawn)
        gradients, mean = modules.gradient(module, modules.trainable(module), loss, batch, phase, rows.passes)
    saved = {name: buffer.detach().clone() for name, buffer in module.named_buffers() if name in weights}
    return Local(modules.on_host(gradients), mean, len(batch[0]), modules.on_host(saved))


def narrowed(model: nn.Module, layers: Layers, columns: int) -> nn.Module:
    """Return a copy of an N-layer network for `columns` columns, whose first weight is not loaded yet."""
    narrow = copy.deepcopy(model)
    name, _, _ = layers.weight.rpartition(".")
    first = nn.Linear(columns, layers.width, bias=bool(layers.bias))
    reference = next(model.parameters())
    setattr(narrow, name, first.to(device=reference.device, dtype=dtype_of(model)))
    return narrow


def part_of_z(x: Tensor, weight: Array) -> Array:
    """Return X_ij W1_ij, [rows, H1] (`cgd.txt`, Algorithm 2, line 6, of one holder's columns)."""
    return (x @ torch.from_numpy(weight).to(x).T).cpu().numpy()


def head_pass(
    layers: Layers, weights: Tensors, z: Tensor, targets: Tensor, loss: Loss, phase: Phase, passes: Passes = WHOLE
) -> tuple[Tensor, Local]:
    """Return Delta = d(sum of the row's losses)/dz, [rows, H1] like z, and mean gradients except the first weight's."""
    upper = modules.trainable(layers.upper)
    modules.load(layers.upper, {name: value for name, value in weights.items() if name not in layers.first})
    leaf = z + torch.from_numpy(weights[layers.bias]).to(z) if layers.bias else z.clone()
    leaf.requires_grad_()
    named, mean = modules.gradient(layers.upper, {"z": leaf, **upper}, loss, (leaf, targets), phase, passes)
    delta = named.pop("z")
    named |= {layers.bias: delta.sum(0)} if layers.bias else {}
    return delta * len(targets), Local(modules.on_host(named), mean, len(targets), {})


COMMON = b"CGD's common start, no secret"  # of a public stream, instead of a root
LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def delta_of(delta: Delta, name: str, root: SecretRoot) -> float:
    """Return delta_l of the participant `name`. Raises `moretta.errors.ParameterError` for a mapping without it."""
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
    """Return the names of the biases with one start for all: those of all layers with weights but the last."""
    layers = [name for name, module in model.named_modules() if isinstance(module, LAYERS)]
    trained = modules.trainable(model)
    return [f"{name}.bias" for name in layers[:-1] if params.hidden_bias == "shared" and f"{name}.bias" in trained]


def centers(params: CGD, model: nn.Module, seed: int) -> dict[str, Array]:
    """Return the centres of the starts, by PyTorch's names: all parameters and buffers of the model.

    With `around` "zero" trained parameters are 0, and shared biases are standard normal numbers, which follow from the
    public seed of the training. Scale and shift of normalisation layers keep their values, because near zero they would
    shut the network. Differs from the paper, whose networks have no such layers.
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
    """Return the start of the participant `name`: `around`, plus its noise on the tensors `noised`."""
    delta, start = delta_of(params.delta, name, root), dict(around)
    for tensor in noised:
        value = around[tensor]
        start[tensor] = (value + noise(root, tensor, value.shape, delta)).astype(value.dtype)
    return start
