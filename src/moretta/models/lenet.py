"""LeNet (LeCun et al. 1998) as BAFFLE takes it, its shallow model: two convolutions, each normalised, and two layers.

A flat `nn.Sequential` of PyTorch's own layers, so that code may walk it layer by layer instead of calling it. BAFFLE's
authors' code has another one under this name: `channels` 16 and 64 (32 and 128 for CIFAR-100), `padding`, `pool` "max",
`hidden` 0, `bias`, and `norm` "none", or "group" with `group_size` 16 and `affine` false: 26,730 parameters for MNIST.
"""

from collections.abc import Sequence

from torch import nn

from moretta.errors import ParameterError
from moretta.models.arguments import at_least, flag, image, one_of, positive
from moretta.models.layers import ACTIVATIONS, NORMS, activated, norm_of

POOLS = {"mean": nn.AvgPool2d, "max": nn.MaxPool2d}


def lenet(
    inputs: tuple[int, ...],
    outputs: int,
    *,
    norm: str = "group",
    group_size: int = 0,
    affine: bool = True,
    activation: str = "hardswish",
    channels: Sequence[int] = (6, 16),
    padding: bool = False,
    pool: str = "mean",
    hidden: int = 84,
    bias: bool | None = None,
) -> nn.Sequential:
    """float32[n, channels, height, width] -> float32[n, outputs].

    5x5 convolutions to `channels`, each with normalisation, activation and a mean, or maximum, over 2x2 positions, then
    `hidden` units: 25,032 parameters for MNIST. With `hidden` 0 the mean over all positions is in the place of the
    second pooling and of the hidden layer. `padding` keeps height and width in convolutions; without it images need 16
    x 16 pixels or more, with it 4 x 4. `norm` is "group", "batch", "frozen-batch" or "none" (`group_size`, `affine`:
    see `moretta.models.layers.Norm`), `activation` "hardswish", "relu" or "selu". `bias` says whether convolutions have
    biases; None: where no normalisation follows. Raises ParameterError otherwise.
    """
    before, pad = image(inputs, "lenet"), 2 if flag(padding, "padding") else 0
    normed = norm_of(norm, NORMS, group_size, affine)
    activation, pooled = one_of(activation, "activation", tuple(ACTIVATIONS)), POOLS[one_of(pool, "pool", tuple(POOLS))]
    biased = normed.kind == "none" if bias is None else flag(bias, "bias")
    if isinstance(channels, str) or not isinstance(channels, Sequence) or len(channels) != 2:
        raise ParameterError(f"model: channels must be two numbers such as [6, 16], got {channels!r}")
    if min(inputs[1:]) < (least := 4 if pad else 16):
        does = "halves images twice" if pad else "does not pad"
        raise ParameterError(f"model: a lenet {does}, so images need {least} x {least} pixels or more, got {inputs}")
    parts: list[nn.Module] = []
    sides = list(inputs[1:])
    for own in (positive(each, "each of channels") for each in channels):
        # by default the mean, as in 1998: a maximum would have kinks, which finite differences step over
        parts += [nn.Conv2d(before, own, 5, padding=pad, bias=biased), *activated(normed, activation, own), pooled(2)]
        before, sides = own, [(side - 4 + 2 * pad) // 2 for side in sides]
    if at_least(0, hidden, "hidden") == 0:
        return nn.Sequential(*parts[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, outputs))
    parts += [nn.Flatten(), nn.Linear(before * sides[0] * sides[1], hidden), ACTIVATIONS[activation]()]
    return nn.Sequential(*parts, nn.Linear(hidden, outputs))
