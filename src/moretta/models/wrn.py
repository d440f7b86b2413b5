"""WideResNet for small images (Zagoruyko and Komodakis 2016): few blocks, wide, normalised and activated before.

    out = f(a) + x, and f(a) + 1x1 convolution of a where the shape changes, a = activation(normalisation(x))

Depth 6n + 4: a first convolution to 16 channels, three stages of n blocks of two 3x3 convolutions with 16, 32, 64 times
`width` channels, the first block of stages two and three at stride 2, then normalisation, activation, the mean over
positions and a linear layer. BAFFLE's light model is WRN-10-2, of 0.3 million parameters.
"""

import torch
from torch import nn

from moretta.errors import ParameterError
from moretta.models.arguments import image, one_of, positive
from moretta.models.layers import ACTIVATIONS, NORMALISATIONS, activated, convolution


class Block(nn.Module):
    """float[n, channels, h, w] -> float[n, own, h / stride, w / stride]: two convolutions and a shortcut."""

    def __init__(self, channels: int, own: int, stride: int, norm: str, activation: str) -> None:
        super().__init__()
        self.before = nn.Sequential(*activated(norm, activation, channels))
        self.body = nn.Sequential(
            convolution(channels, own, 3, stride=stride),
            *activated(norm, activation, own),
            convolution(own, own, 3),
        )
        self.shortcut = None if channels == own and stride == 1 else convolution(channels, own, 1, stride=stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the two paths."""
        active = self.before(x)
        out: torch.Tensor = self.body(active) + (x if self.shortcut is None else self.shortcut(active))
        return out


def wrn(
    inputs: tuple[int, ...],
    outputs: int,
    *,
    depth: int = 10,
    width: int = 2,
    norm: str = "group",
    activation: str = "hardswish",
) -> nn.Sequential:
    """float32[n, channels, height, width] -> float32[n, outputs].

    `depth` is 6n + 4 (10, 16, 28), `width` multiplies the channels, `norm` is "group", "batch" or "frozen-batch",
    `activation` "hardswish", "relu" or "selu". Raises ParameterError otherwise.
    """
    channels = image(inputs, "wrn")
    norm, activation = one_of(norm, "norm", NORMALISATIONS), one_of(activation, "activation", tuple(ACTIVATIONS))
    blocks, odd = divmod(positive(depth, "depth") - 4, 6)
    if odd or blocks < 1:
        raise ParameterError(f"model: depth of a wrn is 6n + 4, such as 10, 16 or 28, got {depth}")
    width = positive(width, "width")
    parts: list[nn.Module] = [convolution(channels, 16, 3)]
    channels = 16
    for stage in range(3):
        own = 16 * width * 2**stage
        for number in range(blocks):
            parts.append(Block(channels, own, 2 if stage > 0 and number == 0 else 1, norm, activation))
            channels = own
    parts += [*activated(norm, activation, channels), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*parts, nn.Linear(channels, outputs))
