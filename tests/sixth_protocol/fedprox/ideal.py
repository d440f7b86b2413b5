"""What FedProx must equal: plain PyTorch, the proximal term part of the loss that autograd sees."""

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
    mu: float,
) -> None:
    """Train the model in place; silos: each one's inputs and targets, of which an epoch is one batch."""
    total = sum(len(inputs) for inputs, _ in silos)
    for _ in range(rounds):
        mean = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for inputs, targets in silos:
            own = copy.deepcopy(model)
            optimizer = torch.optim.SGD(own.parameters(), lr=learning_rate)
            for _ in range(epochs):
                optimizer.zero_grad()
                pairs = zip(own.parameters(), model.parameters(), strict=True)
                distance = torch.stack([(mine - sent.detach()).square().sum() for mine, sent in pairs]).sum()
                value = Loss(loss)(own(inputs), targets) + mu / 2 * distance
                value.backward()  # type: ignore[no-untyped-call]  # torch's stub lacks one
                optimizer.step()
            for average, parameter in zip(mean, own.parameters(), strict=True):
                average += parameter.detach() * len(inputs) / total
        for parameter, average in zip(model.parameters(), mean, strict=True):
            parameter.data.copy_(average)
