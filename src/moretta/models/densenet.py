"""DenseNet-BC for small images (Huang et al. 2017): every layer sees all earlier ones of its block, concatenated.

Depth 6n + 4: a first convolution to 2 `growth` channels, three blocks of n layers (1x1 convolution to 4 `growth`
channels, 3x3 to `growth`), between blocks a 1x1 convolution to half the channels and a mean over 2x2 positions.
"""

import torch
from torch import nn

from moretta.errors import ParameterError
from moretta.models.arguments import image, positive
from moretta.models.layers import NORMS, Norm, convolution, norm_of, normalisation


class Dense(nn.Module):
    """float[n, channels, h, w] -> float[n, channels + growth, h, w]: x and what two convolutions make of it."""

    def __init__(self, channels: int, growth: int, norm: Norm) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_activated(channels, 4 * growth, 1, norm),
            *_activated(4 * growth, growth, 3, norm),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate x and the new channels."""
        return torch.cat([x, self.body(x)], dim=1)


def _activated(channels: int, outputs: int, kernel: int, norm: Norm) -> list[nn.Module]:
    """Normalisation, ReLU, convolution: the order of DenseNet."""
    return [
        normalisation(norm, channels),
        nn.ReLU(),
        convolution(channels, outputs, kernel, bias=norm.kind == "none"),
    ]


def densenet(
    inputs: tuple[int, ...], outputs: int, *, depth: int = 40, growth: int = 12, norm: str = "batch"
) -> nn.Sequential:
    """float32[n, channels, height, width] -> float32[n, outputs].

    `depth` is 6n + 4 (22, 40, 100), `growth` the channels each layer adds, `norm` "batch", "frozen-batch", "group"
    or "none". Height and width must be 4 or more. Raises ParameterError otherwise.
    """
    channels = image(inputs, "densenet")
    normed, growth = norm_of(norm, NORMS), positive(growth, "growth")
    layers, odd = divmod(positive(depth, "depth") - 4, 6)
    if odd or layers < 1:
        raise ParameterError(f"model: depth of a densenet is 6n + 4, such as 22, 40 or 100, got {depth}")
    if min(inputs[1:]) < 4:
        raise ParameterError(f"model: a densenet halves images twice, so they need 4 x 4 pixels or more, got {inputs}")
    parts: list[nn.Module] = [convolution(channels, 2 * growth, 3, bias=normed.kind == "none")]
    channels = 2 * growth
    for stage in range(3):
        for _ in range(layers):
            parts.append(Dense(channels, growth, normed))
            channels += growth
        if stage < 2:
            parts += [*_activated(channels, channels // 2, 1, normed), nn.AvgPool2d(2)]
            channels //= 2
    parts += [normalisation(normed, channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*parts, nn.Linear(channels, outputs))
