"""WideResNet for small images (Zagoruyko and Komodakis 2016): few blocks, wide, normalised and activated before.

    out = f(a) + x, and f(a) + 1x1 convolution of a where the shape changes, a = activation(normalisation(x))

Depth 6n + 4: a first convolution to 16 channels, three stages of n blocks of two 3x3 convolutions with 16, 32, 64 times
`width` channels, the first block of stages two and three at stride 2, then normalisation, activation, the mean over
positions and a linear layer. BAFFLE's light model is WRN-10-2, of 0.3 million parameters.
"""

import torch
from torch import nn

from moretta.errors import ParameterError
from moretta.models.arguments import flag, image, one_of, positive
from moretta.models.layers import ACTIVATIONS, NORMS, Norm, activated, convolution, norm_of, started


class Block(nn.Module):
    """float[n, channels, h, w] -> float[n, own, h / stride, w / stride]: two convolutions and a shortcut."""

    def __init__(self, channels: int, own: int, stride: int, norm: Norm, activation: str) -> None:
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
    group_size: int = 0,
    affine: bool = True,
    activation: str = "hardswish",
    stem_bias: bool = False,
    start: str = "he-fan-out",
) -> nn.Sequential:
    """float32[n, channels, height, width] -> float32[n, outputs].

    `depth` is 6n + 4 (10, 16, 28), `width` multiplies the channels, `norm` is "group", "batch", "frozen-batch" or
    "none" (`group_size`, `affine`: see `moretta.models.layers.Norm`), `activation` "hardswish", "relu" or "selu".
    `stem_bias` gives the first convolution a bias; `start` draws the first weights (`moretta.models.layers.started`).
    BAFFLE's authors have `group_size` 16, `affine` false, `stem_bias` true and `start` "he-uniform": 302,794 parameters
    for CIFAR-10. Raises ParameterError for other arguments.
    """
    channels = image(inputs, "wrn")
    normed = norm_of(norm, NORMS, group_size, affine)
    activation = one_of(activation, "activation", tuple(ACTIVATIONS))
    blocks, odd = divmod(positive(depth, "depth") - 4, 6)
    if odd or blocks < 1:
        raise ParameterError(f"model: depth of a wrn is 6n + 4, such as 10, 16 or 28, got {depth}")
    width = positive(width, "width")
    parts: list[nn.Module] = [convolution(channels, 16, 3, bias=flag(stem_bias, "stem-bias"))]
    channels = 16
    for stage in range(3):
        own = 16 * width * 2**stage
        for number in range(blocks):
            parts.append(Block(channels, own, 2 if stage > 0 and number == 0 else 1, normed, activation))
            channels = own
    parts += [*activated(normed, activation, channels), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return started(nn.Sequential(*parts, nn.Linear(channels, outputs)), start)
