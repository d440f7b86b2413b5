"""Layers that the convolutional models share."""

import math
from typing import Self

import torch
from torch import nn
from torch.nn import functional as F

NORMALISATIONS = ("group", "batch", "frozen-batch")
NORMS = (*NORMALISATIONS, "none")
ACTIVATIONS = {"hardswish": nn.Hardswish, "relu": nn.ReLU, "selu": nn.SELU}


class FrozenBatchNorm(nn.BatchNorm2d):
    """BatchNorm that stays in evaluation mode: for weights that were loaded, on data too few for statistics.

    The running mean and variance are fixed; the affine weight and bias still train.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode, whatever the model around is put in."""
        return super().train(False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """float[n, channels, h, w] -> the same shape."""
        # BatchNorm2d's own branches on the input's dim(), which torch.fx follows in PyTorch's own layers only
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


def normalisation(norm: str, channels: int) -> nn.Module:
    """BatchNorm, frozen or not, GroupNorm of 8 groups (fewer where 8 does not divide the channels), or nothing."""
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "frozen-batch":
        return FrozenBatchNorm(channels)
    return nn.GroupNorm(math.gcd(8, channels), channels) if norm == "group" else nn.Identity()


def activated(norm: str, activation: str, channels: int) -> list[nn.Module]:
    """Normalisation, then the activation."""
    return [normalisation(norm, channels), ACTIVATIONS[activation]()]


def convolution(
    channels: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1, bias: bool = False
) -> nn.Conv2d:
    """A k x k convolution that keeps height and width at stride 1, with He's initialisation for ReLU."""
    layer = nn.Conv2d(channels, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=bias)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer
