"""ResNet for small images (He et al. 2016, section 4.2), with three kinds of shortcut.

    A        out = relu(f(x) + x), where the shape changes x is subsampled and its new channels are zero
    B        out = relu(f(x) + x), where the shape changes x goes through a 1x1 convolution and normalisation
    concat   out = [relu(f(x)); x], along the channels: what both PBPFL papers' texts use in place of addition
             (`practical.md`, III-A2: a layer's input is the concatenation of all outputs connected with it)

The papers' released code differs from their texts: its networks have shortcut B, no normalisation, no biases and He's
normal start, 270,704 numbers at depth 20 with 7 outputs.

Depth 6n + 2: a first convolution, three stages of n blocks of two convolutions with 16, 32, 64 channels (at width 16),
the first block of stages two and three at stride 2, then the mean over positions and a linear layer. With `concat` the
channels grow by a block's own each time: width (1 + 7n) at the end.
"""

import torch
from torch import nn
from torch.nn import functional as F

from moretta.errors import ParameterError
from moretta.models.arguments import flag, image, one_of, positive
from moretta.models.layers import NORMS, Norm, convolution, norm_of, normalisation, started

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

    def __init__(self, channels: int, own: int, stride: int, shortcut: str, norm: Norm, bias: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            convolution(channels, own, 3, stride=stride, bias=bias),
            normalisation(norm, own),
            nn.ReLU(),
            convolution(own, own, 3, bias=bias),
            normalisation(norm, own),
        )
        self.concatenates = shortcut == "concat"
        self.joined = channels + own if self.concatenates else own
        self.shortcut = _shortcut(channels, own, stride, shortcut, norm, bias)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float[n, channels, h, w] -> float[n, joined, h / stride, w / stride]."""
        if self.concatenates:
            return torch.cat([self.relu(self.body(x)), self.shortcut(x)], dim=1)
        out: torch.Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


def _shortcut(channels: int, own: int, stride: int, shortcut: str, norm: Norm, bias: bool) -> nn.Module:
    # max pooling over single positions is subsampling, in an operation that every tracer knows
    subsample: list[nn.Module] = [nn.MaxPool2d(1, stride)] if stride > 1 else []
    if shortcut == "concat" or (channels == own and stride == 1):
        return nn.Sequential(*subsample)
    if shortcut == "A":
        return nn.Sequential(*subsample, PadChannels(own - channels))
    return nn.Sequential(convolution(channels, own, 1, stride=stride, bias=bias), normalisation(norm, own))


def resnet(
    inputs: tuple[int, ...],
    outputs: int,
    *,
    depth: int = 20,
    shortcut: str = "A",
    norm: str = "batch",
    width: int = 16,
    bias: bool | None = None,
    start: str = "he-fan-out",
) -> nn.Sequential:
    """float32[n, channels, height, width] -> float32[n, outputs].

    `depth` is 6n + 2 (20, 32, 56), `shortcut` "A", "B" or "concat", `norm` "batch", "frozen-batch", "group"
    or "none", `width` the channels of the first stage. `bias` says whether convolutions and the last layer have
    biases; None: the last layer, and convolutions that no normalisation follows. `start` draws the first weights
    (`moretta.models.layers.started`).
    Raises ParameterError for samples that are no images and for arguments outside these.
    """
    channels = image(inputs, "resnet")
    shortcut, normed = one_of(shortcut, "shortcut", SHORTCUTS), norm_of(norm, NORMS)
    biased = normed.kind == "none" if bias is None else flag(bias, "bias")
    blocks, odd = divmod(positive(depth, "depth") - 2, 6)
    if odd or blocks < 1:
        raise ParameterError(f"model: depth of a resnet is 6n + 2, such as 20, 32 or 56, got {depth}")
    width = positive(width, "width")
    parts = [convolution(channels, width, 3, bias=biased), normalisation(normed, width), nn.ReLU()]
    channels = width
    for stage in range(3):
        for number in range(blocks):
            stride = 2 if stage > 0 and number == 0 else 1
            block = Block(channels, width * 2**stage, stride, shortcut, normed, biased)
            parts.append(block)
            channels = block.joined
    head = nn.Linear(channels, outputs, bias=bias is not False)
    return started(nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head), start)
