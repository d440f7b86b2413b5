"""What FedSGD must equal: plain PyTorch training on the union of the silos' batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moretta.protocols.common.losses import Loss


def train(
    model: nn.Module, rounds: Sequence[tuple[Tensor, Tensor]], loss: str, learning_rate: float, momentum: float = 0.0
) -> None:
    """Train the model in place: one SGD step for each (inputs, targets) of `rounds`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum)
    for inputs, targets in rounds:
        optimizer.zero_grad()
        Loss(loss)(model(inputs), targets).backward()  # type: ignore[no-untyped-call]  # torch's stub lacks one
        optimizer.step()
