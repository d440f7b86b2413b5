"""A model as an attacker runs it, whatever it is made of: its outputs at some weights, its head, gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from moretta.contract.messages import Array, Tensors

if TYPE_CHECKING:
    from moretta.audit.evidence.public_run import PublicRun


def tensors(parameters: Tensors) -> dict[str, Tensor]:
    """Return copies of named arrays as tensors."""
    return {name: torch.tensor(np.asarray(value)) for name, value in parameters.items()}


def outputs_at(model: nn.Module, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the outputs of the model with these parameters and buffers, [rows, outputs], differentiable in all."""
    found: Tensor = torch.func.functional_call(model, dict(parameters), (x,))
    return found


@torch.no_grad()
def head_inputs(model: nn.Module, run: PublicRun, parameters: Tensors, x: Array) -> tuple[Array, Array]:
    """Return the head's inputs h [rows, inputs] and the outputs [rows, outputs] at these weights, float64.

    It asks the model alone, without looking into it: with unit vectors for rows of the head, its outputs are entries
    of h. So it works for a program that was exported too. The head is one of its own, shared with no other layer.
    """
    held = tensors(parameters)
    inputs = torch.tensor(x)
    outputs = outputs_at(model, held, inputs).double().numpy()
    weight = held[run.head]
    count, width = weight.shape
    columns = []
    for start in range(0, width, count):
        rows = torch.zeros_like(weight)
        for row in range(min(count, width - start)):
            rows[row, start + row] = 1.0
        at = held | {run.head: rows} | ({run.head_bias: torch.zeros(count).to(weight)} if run.head_bias else {})
        columns.append(outputs_at(model, at, inputs)[:, : min(count, width - start)])
    return torch.cat(columns, dim=1).double().numpy(), outputs


def loss_of(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the mean loss of outputs and targets that silos minimise, "mse" or "cross-entropy"; public."""
    if name == "mse":
        return lambda outputs, targets: (outputs - targets).square().sum(dim=1).mean() / 2
    return lambda outputs, targets: nn.functional.cross_entropy(outputs, targets)


def flat(values: Mapping[str, Array]) -> Array:
    """Return named arrays end to end, float64, by the order of their names."""
    return np.concatenate([np.asarray(values[name], dtype=np.float64).ravel() for name in sorted(values)])
