"""What a participant computes by itself: a model's gradient, or one part of a joint model's.

Everything is deterministic in weights, rows and round.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moretta.contract.messages import Array, Tensors
from moretta.contract.roles import Phase
from moretta.protocols.cgd.layers import Layers
from moretta.protocols.common import modules
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.losses import Loss


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
    """Return the gradient of a whole model on the batch of a round (Algorithm 1, line 7). drawn: `Stamp.drawn`.

    module: in train mode; overwritten with `weights`, and not changed otherwise.
    """
    modules.load(module, weights)
    trained = modules.trainable(module)
    with rows.randomness(*drawn):
        inputs, targets = rows.batch(*drawn)
        with phase("local_forward"):
            mean = loss(module(inputs), targets)
        with phase("local_backward"):
            gradients = torch.autograd.grad(mean, list(trained.values()), materialize_grads=True)
    buffers = modules.on_host({name: tensor.detach().clone() for name, tensor in module.named_buffers()})
    named = modules.on_host(dict(zip(trained, gradients, strict=True)))
    return Local(named, float(mean.detach()), len(inputs), {name: buffers[name] for name in buffers if name in weights})


def narrowed(model: nn.Module, layers: Layers, columns: int) -> nn.Module:
    """Return a copy of an N-layer network for so many columns; its first weight is yet to be loaded."""
    narrow = copy.deepcopy(model)
    name, _, _ = layers.weight.rpartition(".")
    first = nn.Linear(columns, layers.width, bias=bool(layers.bias))
    reference = next(model.parameters())
    setattr(narrow, name, first.to(device=reference.device, dtype=reference.dtype))
    return narrow


def part_of_z(x: Tensor, weight: Array) -> Array:
    """Return X_ij W1_ij, [rows, H1] (`cgd.txt`, Algorithm 2, line 6, of one holder's columns)."""
    return (x @ torch.from_numpy(weight).to(x).T).cpu().numpy()


def head_pass(
    layers: Layers, weights: Tensors, z: Tensor, targets: Tensor, loss: Loss, phase: Phase
) -> tuple[Tensor, Local]:
    """Return Delta = d(sum of the row's losses)/dz, [rows, H1], and the mean gradients of all but the first weight.

    z: the sum over the row's holders, [rows, H1].
    """
    upper = modules.trainable(layers.upper)
    modules.load(layers.upper, {name: value for name, value in weights.items() if name not in layers.first})
    leaf = z + torch.from_numpy(weights[layers.bias]).to(z) if layers.bias else z.clone()
    leaf.requires_grad_()
    with phase("local_forward"):
        mean = loss(layers.upper(leaf), targets)
    with phase("local_backward"):
        delta, *gradients = torch.autograd.grad(mean, [leaf, *upper.values()])
    named = dict(zip(upper, gradients, strict=True)) | ({layers.bias: delta.sum(0)} if layers.bias else {})
    return delta * len(targets), Local(modules.on_host(named), float(mean.detach()), len(targets), {})


def part_of_gradient(x: Tensor, delta: Tensor) -> Array:
    """Return a holder's part of the first layer's mean gradient, [H1, columns]: X_ij' Delta_i / n_i."""
    return (delta.T @ x / len(x)).cpu().numpy()
