"""Steps of SGD and Adam, to the bit those of `torch.optim` on the CPU.

`torch.optim` loads PyTorch's compiler when it is first used, which takes a third as long as all of PyTorch, and around
the step of a small model it does more than in it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moretta.protocols.common.training import Training

EPS = 1e-8  # PyTorch's default of Adam


@torch.no_grad()
def take_step(parameter: Tensor, gradient: Tensor, kept: dict[str, Tensor], rate: float, params: Training) -> None:
    """Move a parameter along its gradient, by the optimizer, momentum and weight decay of `params`.

    gradient: of the parameter's shape, dtype and device; not written to. kept: what the parameter's next step needs of
    earlier ones, empty before the first; written to, under the names that `torch.optim` gives.
    """
    if params.weight_decay:
        gradient = gradient.add(parameter, alpha=params.weight_decay)
    if params.optimizer == "adam":
        _adam(parameter, gradient, kept, rate, params.betas)
    elif params.momentum:
        if kept:
            kept["momentum_buffer"].mul_(params.momentum).add_(gradient)
        else:
            kept["momentum_buffer"] = gradient.clone()
        parameter.add_(kept["momentum_buffer"], alpha=-rate)
    else:
        parameter.add_(gradient, alpha=-rate)


def _adam(
    parameter: Tensor, gradient: Tensor, kept: dict[str, Tensor], rate: float, betas: tuple[float, float]
) -> None:
    if not kept:
        kept |= {"step": torch.tensor(0.0, dtype=torch.float32)}
        kept |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    kept["step"] += 1
    mean = kept["exp_avg"].lerp_(gradient, 1 - betas[0])
    square = kept["exp_avg_sq"].mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    first, second = (1 - beta ** kept["step"].item() for beta in betas)
    deviation = (square.sqrt() / math.sqrt(second)).add_(EPS)
    parameter.addcdiv_(mean, deviation, value=-rate / first)
