"""What FedSAM must equal: plain PyTorch, one model that goes uphill and comes back."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moretta.protocols.common.losses import Loss


def train(
    model: nn.Module,
    silos: Sequence[tuple[Tensor, Tensor]],
    rounds: int,
    epochs: int,
    loss: str,
    learning_rate: float,
    radius: float,
) -> None:
    """Train the model in place; silos: each one's inputs and targets, of which an epoch is one batch."""
    total = sum(len(inputs) for inputs, _ in silos)
    for _ in range(rounds):
        mean = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for inputs, targets in silos:
            own = copy.deepcopy(model)
            optimizer = torch.optim.SGD(own.parameters(), lr=learning_rate)
            for _ in range(epochs):
                uphill = copy.deepcopy(own)
                slopes = torch.autograd.grad(Loss(loss)(own(inputs), targets), list(own.parameters()))
                norm = torch.cat([slope.flatten() for slope in slopes]).norm()
                for parameter, slope in zip(uphill.parameters(), slopes, strict=True):
                    parameter.data += radius * slope / norm
                found = torch.autograd.grad(Loss(loss)(uphill(inputs), targets), list(uphill.parameters()))
                for parameter, slope in zip(own.parameters(), found, strict=True):
                    parameter.grad = slope
                optimizer.step()
            for average, parameter in zip(mean, own.parameters(), strict=True):
                average += parameter.detach() * len(inputs) / total
        for parameter, average in zip(model.parameters(), mean, strict=True):
            parameter.data.copy_(average)
