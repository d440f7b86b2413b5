"""ResNet for small images (He et al. 2016, section 4.2), with three kinds of shortcut.

    A        out = relu(f(x) + x), where the shape changes x is subsampled and its new channels are zero
    B        out = relu(f(x) + x), where the shape changes x goes through a 1x1 convolution and normalisation
    concat   out = [relu(f(x)); x], along the channels: what both PBPFL papers use in place of addition
             (`practical.md`, III-A2: a layer's input is the concatenation of all outputs connected with it)

Depth 6n + 2: a first convolution, three stages of n blocks of two convolutions with 16, 32, 64 channels (at width 16),
the first block of stages two and three at stride 2, then the mean over positions and a linear layer. With `concat` the
channels grow by a block's own each time: width (1 + 7n) at the end.
"""

import torch
from torch import nn
from torch.nn import functional as F

from moretta.errors import ParameterError
from moretta.models.arguments import image, one_of, positive
from moretta.models.layers import NORMS, convolution, normalisation

SHORTCUTS = ("A", "B", "concat")


class PadChannels(nn.Module):
    """float[n, c, h, w] -> float[n, c + more, h, w], the new channels zero."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.more = more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Append the zero channels."""
        return F.pad(x, (0, 0, 0, 0, 0, self.more))


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut around them; `joined` counts the channels that come out."""

    def __init__(self, channels: int, own: int, stride: int, shortcut: str, norm: str) -> None:
        super().__init__()
        bias = norm == "none"
        self.body = nn.Sequential(
            convolution(channels, own, 3, stride=stride, bias=bias),
            normalisation(norm, own),
            nn.ReLU(),
            convolution(own, own, 3, bias=bias),
            normalisation(norm, own),
        )
        self.concatenates = shortcut == "concat"
        self.joined = channels + own if self.concatenates else own
        self.shortcut = _shortcut(channels, own, stride, shortcut, norm)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float[n, channels, h, w] -> float[n, joined, h / stride, w / stride]."""
        if self.concatenates:
            return torch.cat([self.relu(self.body(x)), self.shortcut(x)], dim=1)
        out: torch.Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


def _shortcut(channels: int, own: int, stride: int, shortcut: str, norm: str) -> nn.Module:
    # max pooling over single positions is subsampling, in an operation that every tracer knows
    subsample: list[nn.Module] = [nn.MaxPool2d(1, stride)] if stride > 1 else []
    if shortcut == "concat" or (channels == own and stride == 1):
        return nn.Sequential(*subsample)
    if shortcut == "A":
        return nn.Sequential(*subsample, PadChannels(own - channels))
    return nn.Sequential(convolution(channels, own, 1, stride=stride, bias=norm == "none"), normalisation(norm, own))


def resnet(
    inputs: tuple[int, ...],
    outputs: int,
    *,
    depth: int = 20,
    shortcut: str = "A",
    norm: str = "batch",
    width: int = 16,
) -> nn.Sequential:
    """float32[n, channels, height, width] -> float32[n, outputs].

    `depth` is 6n + 2 (20, 32, 56), `shortcut` "A", "B" or "concat", `norm` "batch", "frozen-batch", "group"
    or "none" (the convolutions then have biases), `width` the channels of the first stage.
    Raises ParameterError for samples that are no images and for arguments outside these.
    """
    channels = image(inputs, "resnet")
    shortcut, norm = one_of(shortcut, "shortcut", SHORTCUTS), one_of(norm, "norm", NORMS)
    blocks, odd = divmod(positive(depth, "depth") - 2, 6)
    if odd or blocks < 1:
        raise ParameterError(f"model: depth of a resnet is 6n + 2, such as 20, 32 or 56, got {depth}")
    width = positive(width, "width")
    parts = [convolution(channels, width, 3, bias=norm == "none"), normalisation(norm, width), nn.ReLU()]
    channels = width
    for stage in range(3):
        for number in range(blocks):
            stride = 2 if stage > 0 and number == 0 else 1
            block = Block(channels, width * 2**stage, stride, shortcut, norm)
            parts.append(block)
            channels = block.joined
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, outputs))
