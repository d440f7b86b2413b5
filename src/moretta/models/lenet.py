"""LeNet (LeCun et al. 1998) as BAFFLE takes it, its shallow model: two convolutions, each normalised, and two layers.

A flat `nn.Sequential` of PyTorch's own layers, so that code may walk it layer by layer instead of calling it.
"""

from torch import nn

from moretta.errors import ParameterError
from moretta.models.arguments import image, one_of
from moretta.models.layers import ACTIVATIONS, NORMALISATIONS, activated


def lenet(
    inputs: tuple[int, ...], outputs: int, *, norm: str = "group", activation: str = "hardswish"
) -> nn.Sequential:
    """float32[n, channels, height, width] -> float32[n, outputs].

    5x5 convolutions to 6 and 16 channels without padding, each with normalisation, activation and a mean over 2x2
    positions, then 84 hidden units: 25,032 parameters for MNIST. `norm` is "group", "batch" or "frozen-batch",
    `activation` "hardswish", "relu" or "selu". Height and width must be 16 or more. Raises ParameterError otherwise.
    """
    channels = image(inputs, "lenet")
    norm, activation = one_of(norm, "norm", NORMALISATIONS), one_of(activation, "activation", tuple(ACTIVATIONS))
    if min(inputs[1:]) < 16:
        raise ParameterError(f"model: a lenet does not pad, so images need 16 x 16 pixels or more, got {inputs}")
    parts: list[nn.Module] = []
    sides = list(inputs[1:])
    for own in (6, 16):
        # the mean, as in 1998: a maximum would have kinks, which finite differences step over
        parts += [nn.Conv2d(channels, own, 5, bias=False), *activated(norm, activation, own), nn.AvgPool2d(2)]
        channels, sides = own, [(side - 4) // 2 for side in sides]
    parts += [nn.Flatten(), nn.Linear(channels * sides[0] * sides[1], 84), ACTIVATIONS[activation]()]
    return nn.Sequential(*parts, nn.Linear(84, outputs))
