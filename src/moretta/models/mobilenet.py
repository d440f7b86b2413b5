"""MobileNetV2 (Sandler et al. 2018): inverted residuals, which widen, filter each channel apart, and narrow linearly.

The parameters have torchvision's names and shapes, so that its ImageNet weights can be loaded.
"""

from collections import OrderedDict

import torch
from torch import nn

from moretta.models.arguments import above_zero, image, one_of
from moretta.models.layers import ACTIVATIONS, NORMALISATIONS, Norm, activated, convolution, norm_of, normalisation

# table 2: the expansion, the channels, the number of blocks, the stride of the first
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


class Block(nn.Module):
    """float[n, channels, h, w] -> float[n, own, h / stride, w / stride], no activation at its end."""

    def __init__(self, channels: int, own: int, stride: int, expansion: int, norm: Norm, activation: str) -> None:
        super().__init__()
        wide = channels * expansion
        widen = [_activated(norm, activation, channels, wide, 1)] if expansion > 1 else []
        self.conv = nn.Sequential(
            *widen,
            _activated(norm, activation, wide, wide, 3, stride=stride, groups=wide),
            convolution(wide, own, 1),
            normalisation(norm, own),
        )
        self.adds = stride == 1 and channels == own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add x where the shape allows."""
        out: torch.Tensor = self.conv(x)
        return x + out if self.adds else out


def _activated(
    norm: Norm, activation: str, channels: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    layer = convolution(channels, outputs, kernel, stride=stride, groups=groups)
    return nn.Sequential(layer, *activated(norm, activation, outputs))


def _divisible(channels: float) -> int:
    """The nearest multiple of 8, from 8 on, that is not over a tenth too small: the authors' rounding."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * channels else nearest


def mobilenet(
    inputs: tuple[int, ...], outputs: int, *, width: float = 1.0, norm: str = "group", activation: str = "hardswish"
) -> nn.Sequential:
    """float32[n, channels, height, width] -> float32[n, outputs].

    For images below 64 pixels in height or width, the first convolution and the first stage of stride 2 have stride 1:
    32 x 32 pixels end as 4 x 4 positions. `width` multiplies the channels, `norm` is "group", "batch" or
    "frozen-batch", `activation`, in place of ReLU6, "hardswish", "relu" or "selu". Raises ParameterError otherwise.
    """
    channels = image(inputs, "mobilenet")
    normed, activation = norm_of(norm, NORMALISATIONS), one_of(activation, "activation", tuple(ACTIVATIONS))
    width = above_zero(width, "width")
    small = min(inputs[1:]) < 64
    first = _divisible(32 * width)
    parts: list[nn.Module] = [_activated(normed, activation, channels, first, 3, stride=1 if small else 2)]
    channels = first
    for number, (expansion, base, blocks, stride) in enumerate(STAGES):
        own = _divisible(base * width)
        for block in range(blocks):
            strided = block == 0 and not (small and number == 1)
            parts.append(Block(channels, own, stride if strided else 1, expansion, normed, activation))
            channels = own
    last = _divisible(1280 * max(1.0, width))
    parts.append(_activated(normed, activation, channels, last, 1))
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            features=nn.Sequential(*parts),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            # in the place of torchvision's dropout, without which training and evaluation are the same
            classifier=nn.Sequential(nn.Identity(), nn.Linear(last, outputs)),
        )
    )
