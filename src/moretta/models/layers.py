"""Layers that the convolutional models share."""

import math

from torch import nn

NORMS = ("batch", "group", "none")


def normalisation(norm: str, channels: int) -> nn.Module:
    """BatchNorm, GroupNorm of 8 groups (fewer where 8 does not divide the channels), or nothing."""
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(math.gcd(8, channels), channels) if norm == "group" else nn.Identity()


def convolution(channels: int, outputs: int, kernel: int, *, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """A k x k convolution that keeps height and width at stride 1, with He's initialisation for ReLU."""
    layer = nn.Conv2d(channels, outputs, kernel, stride, padding=kernel // 2, bias=bias)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer
