"""The papers' architectures, each small, traceable by torch.fx, and with an `nn.Linear` as its last layer.

`inputs` is the shape of a sample, [channels, height, width] of images, and `outputs` the number of outputs. `norm` is
"group", "batch", "frozen-batch" or "none" (`moretta.models.layers.Norm`); `activation` is "hardswish", "relu" or
"selu". `start` draws the first weights (`moretta.models.layers.started`). All functions raise
`moretta.errors.ParameterError` for samples and arguments outside their documented range.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from operator import index

import torch
from torch import nn
from torch.nn import functional as F

from moretta.contract.wording import shown
from moretta.errors import ParameterError
from moretta.models.layers import (
    ACTIVATIONS,
    NORMALISATIONS,
    NORMS,
    Norm,
    above_zero,
    activated,
    at_least,
    convolution,
    flag,
    image,
    norm_of,
    normalisation,
    one_of,
    positive,
    started,
)

MOST_LAYERS = 10_000  # more than any model may have; another's folder may request any number


def mlp(
    inputs: tuple[int, ...],
    outputs: int,
    *,
    hidden: Sequence[int] | None = None,
    layers: int | None = None,
    width: int | None = None,
    bias: bool = True,
    output_bias: bool | None = None,
) -> nn.Sequential:
    """Return a multilayer perceptron: float32[n, *inputs] -> float32[n, outputs].

    Samples of more than one axis are flattened first. An empty `hidden`, or one layer, is a linear model.

    Args:
        hidden: The widths of the hidden layers; [32, 32] by default.
        layers: The papers' form instead: MLP-n has n weight layers, so n - 1 hidden ones.
        width: Of those hidden layers; 64 by default.
        bias: Whether layers have biases.
        output_bias: Whether the last layer has one; None follows `bias`.
    """
    if hidden is not None and (layers is not None or width is not None):
        raise ParameterError("model: hidden excludes layers and width; set either")
    if isinstance(hidden, str) or not isinstance(hidden, Sequence | None):
        raise ParameterError(f"model: hidden must be a list of widths such as [32, 32], got {hidden!r}")
    if layers is not None:
        if positive(layers, "layers") > MOST_LAYERS:
            raise ParameterError(f"model: layers must be {MOST_LAYERS:,} at most, got {layers}")
        hidden = [positive(64 if width is None else width, "width")] * (layers - 1)
    elif width is not None:
        raise ParameterError("model: width needs layers; set both, or hidden = [32, 32]")
    widths = [positive(w, "each width in hidden") for w in ([32, 32] if hidden is None else hidden)]
    sizes = [math.prod(inputs), *widths]
    parts: list[nn.Module] = [nn.Flatten()] if len(inputs) > 1 else []
    for size, following in pairwise(sizes):
        parts += [nn.Linear(size, following, bias=flag(bias, "bias")), nn.ReLU()]
    last = flag(bias if output_bias is None else output_bias, "output_bias")
    return nn.Sequential(*parts, nn.Linear(sizes[-1], outputs, bias=last))


class Embedded(nn.Module):
    """Embed categories: float[n, inputs] -> float[n, joined]; columns between categories stay as they are.

    A category's columns are zeros and ones, so a linear map of them looks up a vector for each word: an embedding.
    Because it is a linear layer, it has free scales under PBPFL, and it accepts standardised columns.
    """

    def __init__(self, stretches: Sequence[tuple[int, bool]], most: int) -> None:
        """Take stretches of columns.

        Args:
            stretches: Each one's size, and whether it is a category.
            most: The most numbers of an embedding.
        """
        super().__init__()
        self.sizes, self.parts, self.joined = [size for size, _ in stretches], nn.ModuleList(), 0
        for size, is_category in stretches:
            width = min(most, size // 2 + 1) if is_category else size
            self.parts.append(nn.Linear(size, width, bias=False) if is_category else nn.Identity())
            self.joined += width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Join the numbers and the embeddings."""
        pieces = torch.split(x, self.sizes, dim=1)
        return torch.cat([part(piece) for part, piece in zip(self.parts, pieces, strict=True)], dim=1)


def embeddings(
    inputs: tuple[int, ...],
    outputs: int,
    *,
    categories: Sequence[Sequence[int]] = (),
    most: int = 16,
    hidden: Sequence[int] | None = None,
) -> nn.Sequential:
    """Return an `mlp` behind an embedding for each category of a table: float32[n, columns] -> float32[n, outputs].

    Args:
        categories: The first column and the number of columns of each category; a run with a schema sets them.
        most: The most numbers of an embedding: k columns become k // 2 + 1 numbers, at most this many.
        hidden: The widths of the mlp's hidden layers.
    """
    try:
        pairs = [(index(first), index(count)) for first, count in categories]
        ends = [0, *(first + count for first, count in pairs)]
        fits = all(first >= end and count > 0 for (first, count), end in zip(pairs, ends, strict=False))
    except (TypeError, ValueError):
        fits = False
    if not fits or len(inputs) != 1 or ends[-1] > inputs[0]:
        raise ParameterError(
            f"model: categories = {shown(categories)}: expected pairs [first column, number of columns] that follow "
            f"each other within a sample of shape {list(inputs)}"
        )
    following = zip([*pairs, (inputs[0], 0)], ends, strict=True)
    parts = (part for (first, count), end in following for part in ((first - end, False), (count, True)))
    stretches = [part for part in parts if part[0]]
    embedded = Embedded(stretches, positive(most, "most"))
    return nn.Sequential(embedded, *mlp((embedded.joined,), outputs, hidden=hidden))


def _blocks(depth: object, besides: int, model: str, examples: str) -> int:
    """Return n for a depth of 6n + `besides` layers."""
    blocks, odd = divmod(positive(depth, "depth") - besides, 6)
    if odd or blocks < 1:
        raise ParameterError(f"model: depth of {model} is 6n + {besides}, such as {examples}, got {depth}")
    return blocks


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
    """Return LeNet in BAFFLE's form, its shallow model: float32[n, channels, h, w] -> float32[n, outputs].

    It is a flat `nn.Sequential` of PyTorch's own layers, so that code can walk through it layer by layer. It has 5x5
    convolutions to `channels`, each with normalisation, activation and pooling over 2x2 positions, then `hidden` units:
    25,032 parameters for MNIST. Images need 16 x 16 pixels or more, with `padding` 4 x 4.

    BAFFLE's authors' code has another model under this name: `channels` 16 and 64 (32 and 128 for CIFAR-100),
    `padding`, `pool` "max", `hidden` 0, `bias`, and `norm` "none", or "group" with `group_size` 16 and `affine` false.
    It has 26,730 parameters for MNIST.

    Args:
        channels: Of each convolution.
        padding: Keep height and width in convolutions.
        pool: "mean" or "max", over 2x2 positions.
        hidden: Units of the hidden layer. With 0, the mean over all positions replaces it and the second pooling.
        bias: Whether convolutions have biases; None: only without normalisation.

    Source: LeCun, Bottou, Bengio, Haffner, "Gradient-Based Learning Applied to Document Recognition", 1998.
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
        # the mean by default, as in 1998: a maximum has kinks, which finite differences step over
        parts += [nn.Conv2d(before, own, 5, padding=pad, bias=biased), *activated(normed, activation, own), pooled(2)]
        before, sides = own, [(side - 4 + 2 * pad) // 2 for side in sides]
    if at_least(0, hidden, "hidden") == 0:
        return nn.Sequential(*parts[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, outputs))
    parts += [nn.Flatten(), nn.Linear(before * sides[0] * sides[1], hidden), ACTIVATIONS[activation]()]
    return nn.Sequential(*parts, nn.Linear(hidden, outputs))


SHORTCUTS = ("A", "B", "concat")


class PadChannels(nn.Module):
    """Append channels of zeros: float[n, c, h, w] -> float[n, c + more, h, w]."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.more = more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Append the zero channels."""
        return F.pad(x, (0, 0, 0, 0, 0, self.more))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut around them.

    `joined` is the number of output channels.

        A        out = relu(f(x) + x); if the shape changes, x is subsampled and its new channels are zero
        B        out = relu(f(x) + x); if the shape changes, x passes a 1x1 convolution and normalisation
        concat   out = [relu(f(x)); x], along the channels: both PBPFL papers' texts have it instead of addition
                 (`practical.md`, III-A2: a layer's input is the concatenation of all outputs connected with it)
    """

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
        """Map float[n, channels, h, w] to float[n, joined, h / stride, w / stride]."""
        if self.concatenates:
            return torch.cat([self.relu(self.body(x)), self.shortcut(x)], dim=1)
        out: torch.Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


def _shortcut(channels: int, own: int, stride: int, shortcut: str, norm: Norm, bias: bool) -> nn.Module:
    # max pooling over single positions subsamples by an operation that every tracer knows
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
    """Return a ResNet for small images: float32[n, channels, height, width] -> float32[n, outputs].

    It has a first convolution, and three stages of n blocks of two convolutions with 1, 2 and 4 times `width` channels.
    Then follow the mean over positions and a linear layer. The first block of stages two and three has stride 2. With
    `shortcut` "concat" each block adds its own channels: width (1 + 7n) at the end.

    The released code of the PBPFL papers differs from their texts: shortcut B, no normalisation, no biases and He's
    normal start. At depth 20 with 7 outputs it has 270,704 numbers.

    Args:
        depth: 6n + 2, such as 20, 32, 56.
        shortcut: "A", "B" or "concat" (`ResidualBlock`).
        width: Channels of the first stage.
        bias: Whether convolutions and the last layer have biases; None: the last layer, and convolutions without
            normalisation.

    Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", 2016, section 4.2.
    """
    channels = image(inputs, "resnet")
    shortcut, normed = one_of(shortcut, "shortcut", SHORTCUTS), norm_of(norm, NORMS)
    biased = normed.kind == "none" if bias is None else flag(bias, "bias")
    blocks = _blocks(depth, 2, "a resnet", "20, 32 or 56")
    width = positive(width, "width")
    parts = [convolution(channels, width, 3, bias=biased), normalisation(normed, width), nn.ReLU()]
    channels = width
    for stage in range(3):
        for number in range(blocks):
            stride = 2 if stage > 0 and number == 0 else 1
            block = ResidualBlock(channels, width * 2**stage, stride, shortcut, normed, biased)
            parts.append(block)
            channels = block.joined
    head = nn.Linear(channels, outputs, bias=bias is not False)
    return started(nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head), start)


class Dense(nn.Module):
    """Append `growth` channels by two convolutions: float[n, channels, h, w] -> float[n, channels + growth, h, w]."""

    def __init__(self, channels: int, growth: int, norm: Norm) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_before(channels, 4 * growth, 1, norm),
            *_before(4 * growth, growth, 3, norm),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate x and the new channels."""
        return torch.cat([x, self.body(x)], dim=1)


def _before(channels: int, outputs: int, kernel: int, norm: Norm) -> list[nn.Module]:
    """Return normalisation, ReLU and convolution, in DenseNet's order."""
    return [
        normalisation(norm, channels),
        nn.ReLU(),
        convolution(channels, outputs, kernel, bias=norm.kind == "none"),
    ]


def densenet(
    inputs: tuple[int, ...], outputs: int, *, depth: int = 40, growth: int = 12, norm: str = "batch"
) -> nn.Sequential:
    """Return a DenseNet-BC for small images: float32[n, channels, height, width] -> float32[n, outputs].

    Every layer receives the outputs of all earlier ones of its block, concatenated. There are a first convolution to 2
    `growth` channels, and three blocks of n layers (1x1 convolution to 4 `growth` channels, 3x3 to `growth`). Between
    blocks are a 1x1 convolution to half the channels and a mean over 2x2 positions. Height and width must be 4 or more.

    Args:
        depth: 6n + 4, such as 22, 40, 100.
        growth: Channels that each layer adds.

    Source: Huang, Liu, van der Maaten, Weinberger, "Densely Connected Convolutional Networks", 2017.
    """
    channels = image(inputs, "densenet")
    normed, growth = norm_of(norm, NORMS), positive(growth, "growth")
    layers = _blocks(depth, 4, "a densenet", "22, 40 or 100")
    if min(inputs[1:]) < 4:
        raise ParameterError(f"model: a densenet halves images twice, so they need 4 x 4 pixels or more, got {inputs}")
    parts: list[nn.Module] = [convolution(channels, 2 * growth, 3, bias=normed.kind == "none")]
    channels = 2 * growth
    for stage in range(3):
        for _ in range(layers):
            parts.append(Dense(channels, growth, normed))
            channels += growth
        if stage < 2:
            parts += [*_before(channels, channels // 2, 1, normed), nn.AvgPool2d(2)]
            channels //= 2
    parts += [normalisation(normed, channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*parts, nn.Linear(channels, outputs))


class WideBlock(nn.Module):
    """Two convolutions and a shortcut: float[n, channels, h, w] -> float[n, own, h / stride, w / stride].

    out = f(a) + x, or f(a) + 1x1 convolution of a if the shape changes, where a = activation(normalisation(x)).
    """

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
    """Return a WideResNet for small images: float32[n, channels, height, width] -> float32[n, outputs].

    Its blocks are few and wide, with normalisation and activation before each convolution. It has a first convolution
    to 16 channels, and three stages of n blocks with 16, 32, 64 times `width` channels. Then follow normalisation,
    activation, the mean over positions and a linear layer. The first block of stages two and three has stride 2.

    BAFFLE's light model is WRN-10-2, of 0.3 million parameters. BAFFLE's authors set `group_size` 16, `affine` false,
    `stem_bias` true and `start` "he-uniform": 302,794 parameters for CIFAR-10.

    Args:
        depth: 6n + 4, such as 10, 16, 28.
        width: The factor of the channels.
        stem_bias: Whether the first convolution has a bias.

    Source: Zagoruyko, Komodakis, "Wide Residual Networks", 2016.
    """
    channels = image(inputs, "wrn")
    normed = norm_of(norm, NORMS, group_size, affine)
    activation = one_of(activation, "activation", tuple(ACTIVATIONS))
    blocks = _blocks(depth, 4, "a wrn", "10, 16 or 28")
    width = positive(width, "width")
    parts: list[nn.Module] = [convolution(channels, 16, 3, bias=flag(stem_bias, "stem-bias"))]
    channels = 16
    for stage in range(3):
        own = 16 * width * 2**stage
        for number in range(blocks):
            parts.append(WideBlock(channels, own, 2 if stage > 0 and number == 0 else 1, normed, activation))
            channels = own
    parts += [*activated(normed, activation, channels), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return started(nn.Sequential(*parts, nn.Linear(channels, outputs)), start)


# table 2: the expansion, the channels, the number of blocks, the stride of the first
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


class InvertedResidual(nn.Module):
    """An inverted residual with a linear end: float[n, channels, h, w] -> float[n, own, h / stride, w / stride]."""

    def __init__(self, channels: int, own: int, stride: int, expansion: int, norm: Norm, activation: str) -> None:
        super().__init__()
        wide = channels * expansion
        widen = [_after(norm, activation, channels, wide, 1)] if expansion > 1 else []
        self.conv = nn.Sequential(
            *widen,
            _after(norm, activation, wide, wide, 3, stride=stride, groups=wide),
            convolution(wide, own, 1),
            normalisation(norm, own),
        )
        self.adds = stride == 1 and channels == own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add x if the shape allows it."""
        out: torch.Tensor = self.conv(x)
        return x + out if self.adds else out


def _after(
    norm: Norm, activation: str, channels: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    layer = convolution(channels, outputs, kernel, stride=stride, groups=groups)
    return nn.Sequential(layer, *activated(norm, activation, outputs))


def _divisible(channels: float) -> int:
    """Return the nearest multiple of 8, at least 8, that is at most a tenth too small: the authors' rounding."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * channels else nearest


def mobilenet(
    inputs: tuple[int, ...], outputs: int, *, width: float = 1.0, norm: str = "group", activation: str = "hardswish"
) -> nn.Sequential:
    """Return MobileNetV2: float32[n, channels, height, width] -> float32[n, outputs].

    Inverted residuals widen the channels, filter each separately, and narrow them linearly. The parameters have
    torchvision's names and shapes, so that its ImageNet weights can be loaded. For images below 64 pixels in height or
    width, the first convolution and the first stage of stride 2 have stride 1. So 32 x 32 pixels end as 4 x 4
    positions.

    Args:
        width: The factor of the channels.
        norm: Any but "none".
        activation: Replaces ReLU6.

    Source: Sandler, Howard, Zhu, Zhmoginov, Chen, "MobileNetV2", 2018, table 2.
    """
    channels = image(inputs, "mobilenet")
    normed, activation = norm_of(norm, NORMALISATIONS), one_of(activation, "activation", tuple(ACTIVATIONS))
    width = above_zero(width, "width")
    small = min(inputs[1:]) < 64
    first = _divisible(32 * width)
    parts: list[nn.Module] = [_after(normed, activation, channels, first, 3, stride=1 if small else 2)]
    channels = first
    for number, (expansion, base, blocks, stride) in enumerate(STAGES):
        own = _divisible(base * width)
        for block in range(blocks):
            strided = block == 0 and not (small and number == 1)
            parts.append(InvertedResidual(channels, own, stride if strided else 1, expansion, normed, activation))
            channels = own
    last = _divisible(1280 * max(1.0, width))
    parts.append(_after(normed, activation, channels, last, 1))
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            features=nn.Sequential(*parts),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            # replaces torchvision's dropout, so that training and evaluation are the same
            classifier=nn.Sequential(nn.Identity(), nn.Linear(last, outputs)),
        )
    )
