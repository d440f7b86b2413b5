"""Tables 4 and 6 in minutes: `moretta reproduce`, with a quicker way to add up clipped gradients.

    python experiments/cgd/dp.py cgd-table-4 --data DIR        # what follows is as for: moretta reproduce

The gradient of one row in a linear layer is an outer product, delta a', whose norm is |delta| |a|. So the norms of all
rows' gradients, and the sum of what is left of them after clipping, need no row's gradient written out: two products a
layer, some hundred times as fast as `moretta.protocols.fedsgd.private`, which takes any model. Lots, noise, accountant
and all else are its own; the sums agree up to rounding, and a test compares them.
"""

import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moretta.commands import main as cli
from moretta.protocols.fedsgd.private import PrivateGradient

Sums = dict[str, NDArray[np.float64]]
general: Callable[[PrivateGradient, nn.Module, NDArray[np.int64]], Sums] = PrivateGradient.clipped_sum


def clipped_sum(self: PrivateGradient, model: nn.Module, rows: NDArray[np.int64], sizes: Sequence[int] = ()) -> Sums:
    """Return sum_i g_i / max(1, |g_i| / C) over some rows, by parameter, for a network of linear layers and ReLU."""
    layers = dict(model.named_children())
    if not isinstance(model, nn.Sequential) or not all(
        isinstance(layer, nn.Flatten | nn.Linear | nn.ReLU) for layer in layers.values()
    ):
        return general(self, model, rows)
    (value, y), inputs, sums = self._rows.rows(rows), dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, layer in layers.items():
        if isinstance(layer, nn.Linear):
            inputs[name], value = value.detach(), layer(value)
            sums[name] = value
        else:
            value = layer(value)
    if not len(rows):
        return {name: np.zeros(tuple(parameter.shape)) for name, parameter in model.named_parameters()}
    deltas = torch.autograd.grad(self._loss(value, y) * len(rows), list(sums.values()))
    squares = [_square(delta, inputs[name], layers[name]) for name, delta in zip(sums, deltas, strict=True)]
    factors = 1.0 / (torch.stack(squares).sum(0).sqrt() / self.noise.privacy.clip).clamp(min=1.0)
    if not torch.isfinite(factors).all():
        return general(self, model, rows)
    total: Sums = {}
    for name, delta in zip(sums, deltas, strict=True):
        clipped = delta * factors[:, None].to(delta)
        total[f"{name}.weight"] = (clipped.T @ inputs[name]).double().numpy()
        if layers[name].bias is not None:
            total[f"{name}.bias"] = clipped.double().sum(0).numpy()
    return {name: total[name] for name, _ in model.named_parameters()}


def _square(delta: torch.Tensor, inputs: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """Return the squared norm of each row's gradient in one layer: |delta|^2 (|a|^2 + 1), the 1 that of the bias."""
    bias = 1.0 if layer.bias is not None else 0.0
    return delta.double().square().sum(1) * (inputs.double().square().sum(1) + bias)


if __name__ == "__main__":
    PrivateGradient.clipped_sum = clipped_sum  # type: ignore[method-assign]
    sys.argv = ["moretta", "reproduce", *sys.argv[1:]]
    sys.exit(cli.main())
