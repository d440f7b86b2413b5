"""The papers' architectures, each small, traceable by torch.fx, and ending in an `nn.Linear` that gives the outputs.

`norm` is "group", "batch", "frozen-batch" or "none" (`moretta.models.layers.Norm`), `activation` "hardswish", "relu"
or "selu". All raise `moretta.errors.ParameterError` for samples and arguments outside what they document.
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

MOST_LAYERS = 10_000  # more tensors than any model may have; a folder of somebody else's may ask for any number


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
    """float32[n, *inputs] -> float32[n, outputs]; samples of more than one axis are flattened first.

    `hidden` are the widths of the hidden layers, [32, 32] unless given. `layers` and `width` (64) are the papers' way:
    MLP-n has n weight layers, so n - 1 hidden ones. `bias` is of all layers, `output_bias` of the last, as the others
    unless given. An empty `hidden`, or one layer, is a linear model.
    """
    if hidden is not None and (layers is not None or width is not None):
        raise ParameterError("model: give either hidden, or layers and width, not both")
    if isinstance(hidden, str) or not isinstance(hidden, Sequence | None):
        raise ParameterError(f"model: hidden must be a list of widths such as [32, 32], got {hidden!r}")
    if layers is not None:
        if positive(layers, "layers") > MOST_LAYERS:
            raise ParameterError(f"model: layers must be {MOST_LAYERS:,} at most, got {layers}")
        hidden = [positive(64 if width is None else width, "width")] * (layers - 1)
    elif width is not None:
        raise ParameterError("model: width goes with layers; give both, or hidden = [32, 32]")
    widths = [positive(w, "each width in hidden") for w in ([32, 32] if hidden is None else hidden)]
    sizes = [math.prod(inputs), *widths]
    parts: list[nn.Module] = [nn.Flatten()] if len(inputs) > 1 else []
    for size, following in pairwise(sizes):
        parts += [nn.Linear(size, following, bias=flag(bias, "bias")), nn.ReLU()]
    last = flag(bias if output_bias is None else output_bias, "output_bias")
    return nn.Sequential(*parts, nn.Linear(sizes[-1], outputs, bias=last))


class Embedded(nn.Module):
    """float[n, inputs] -> float[n, joined]: each category by a linear map of its columns, what is between as it is.

    A category's columns are zeros and ones, so the map looks up a vector for each word: an embedding. As a linear layer
    it has free scales under PBPFL, and it takes columns that are standardised.
    """

    def __init__(self, stretches: Sequence[tuple[int, bool]], most: int) -> None:
        """Take how many columns each stretch has, and whether they are of a category."""
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
    """An `mlp` behind an embedding for each category of a table: float32[n, columns] -> float32[n, outputs].

    `categories` has the first column of each and how many it has; of a run with a schema they follow from that. k
    columns become k // 2 + 1 numbers, `most` at most. `hidden` are the widths of the mlp's hidden layers.
    """
    try:
        pairs = [(index(first), index(count)) for first, count in categories]
        ends = [0, *(first + count for first, count in pairs)]
        fits = all(first >= end and count > 0 for (first, count), end in zip(pairs, ends, strict=False))
    except (TypeError, ValueError):
        fits = False
    if not fits or len(inputs) != 1 or ends[-1] > inputs[0]:
        raise ParameterError(
            f"model: categories = {shown(categories)}: expected pairs, the first column of each and how many it has, "
            f"one behind the other within a sample of shape {list(inputs)}"
        )
    following = zip([*pairs, (inputs[0], 0)], ends, strict=True)
    parts = (part for (first, count), end in following for part in ((first - end, False), (count, True)))
    stretches = [part for part in parts if part[0]]
    embedded = Embedded(stretches, positive(most, "most"))
    return nn.Sequential(embedded, *mlp((embedded.joined,), outputs, hidden=hidden))


def _blocks(depth: object, besides: int, model: str, examples: str) -> int:
    """Return n of a depth of 6n + `besides` layers."""
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
    """LeNet (LeCun et al. 1998) as BAFFLE takes it, its shallow model: float32[n, channels, h, w] -> [n, outputs].

    A flat `nn.Sequential` of PyTorch's own layers, so that code may walk it layer by layer instead of calling it. It
    has 5x5 convolutions to `channels`, each with normalisation, activation and a mean, or maximum, over 2x2 positions,
    then `hidden` units: 25,032 parameters for MNIST. With `hidden` 0 the mean over all positions is in the place of the
    second pooling and of the hidden layer. `padding` keeps height and width in convolutions; without it images need 16
    x 16 pixels or more, with it 4 x 4. `bias` says whether convolutions have biases; None: where no normalisation
    follows. BAFFLE's authors' code has another one under this name: `channels` 16 and 64 (32 and 128 for CIFAR-100),
    `padding`, `pool` "max", `hidden` 0, `bias`, and `norm` "none", or "group" with `group_size` 16 and `affine` false:
    26,730 parameters for MNIST.
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


SHORTCUTS = ("A", "B", "concat")


class PadChannels(nn.Module):
    """float[n, c, h, w] -> float[n, c + more, h, w], the new channels zero."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.more = more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Append the zero channels."""
        return F.pad(x, (0, 0, 0, 0, 0, self.more))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut around them.

    `joined` counts the channels that come out.

        A        out = relu(f(x) + x), where the shape changes x is subsampled and its new channels are zero
        B        out = relu(f(x) + x), where the shape changes x goes through a 1x1 convolution and normalisation
        concat   out = [relu(f(x)); x], along the channels: what both PBPFL papers' texts use in place of addition
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
    """ResNet for small images (He et al. 2016, section 4.2): float32[n, channels, height, width] -> [n, outputs].

    `depth` is 6n + 2 (20, 32, 56): a first convolution, three stages of n blocks of two convolutions with 1, 2 and 4
    times `width` channels, then the mean over positions and a linear layer. The first block of stages two and three has
    stride 2. With `shortcut` "concat" the channels grow by a block's own each time: width (1 + 7n) at the end. `bias`
    says whether convolutions and the last layer have biases; None: the last layer, and convolutions that no
    normalisation follows. `start` draws the first weights (`moretta.models.layers.started`). The PBPFL papers' released
    code differs from their texts: its networks have shortcut B, no normalisation, no biases and He's normal start,
    270,704 numbers at depth 20 with 7 outputs.
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
    """float[n, channels, h, w] -> float[n, channels + growth, h, w]: x and what two convolutions make of it."""

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
    """Normalisation, ReLU, convolution: the order of DenseNet."""
    return [
        normalisation(norm, channels),
        nn.ReLU(),
        convolution(channels, outputs, kernel, bias=norm.kind == "none"),
    ]


def densenet(
    inputs: tuple[int, ...], outputs: int, *, depth: int = 40, growth: int = 12, norm: str = "batch"
) -> nn.Sequential:
    """DenseNet-BC for small images (Huang et al. 2017): float32[n, channels, height, width] -> [n, outputs].

    Every layer sees all earlier ones of its block, concatenated. `depth` is 6n + 4 (22, 40, 100): a first convolution
    to 2 `growth` channels, three blocks of n layers (1x1 convolution to 4 `growth` channels, 3x3 to `growth`). Between
    blocks are a 1x1 convolution to half the channels and a mean over 2x2 positions. Height and width must be 4 or more.
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
    """float[n, channels, h, w] -> float[n, own, h / stride, w / stride]: two convolutions and a shortcut.

    out = f(a) + x, and f(a) + 1x1 convolution of a where the shape changes, a = activation(normalisation(x))
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
    """WideResNet for small images (Zagoruyko and Komodakis 2016): float32[n, channels, height, width] -> [n, outputs].

    Few blocks, wide, normalised and activated before. `depth` is 6n + 4 (10, 16, 28): a first convolution to 16
    channels, three stages of n blocks with 16, 32, 64 times `width` channels, then normalisation, activation, the mean
    over positions and a linear layer. The first block of stages two and three has stride 2. BAFFLE's light model is
    WRN-10-2, of 0.3 million parameters. `stem_bias` gives the first convolution a bias; `start` draws the first weights
    (`moretta.models.layers.started`). BAFFLE's authors have `group_size` 16, `affine` false, `stem_bias` true and
    `start` "he-uniform": 302,794 parameters for CIFAR-10.
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
    """float[n, channels, h, w] -> float[n, own, h / stride, w / stride], no activation at its end."""

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
        """Add x where the shape allows."""
        out: torch.Tensor = self.conv(x)
        return x + out if self.adds else out


def _after(
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
    """MobileNetV2 (Sandler et al. 2018): float32[n, channels, height, width] -> float32[n, outputs].

    Inverted residuals, which widen, filter each channel apart, and narrow linearly. The parameters have torchvision's
    names and shapes, so that its ImageNet weights can be loaded. For images below 64 pixels in height or width, the
    first convolution and the first stage of stride 2 have stride 1: 32 x 32 pixels end as 4 x 4 positions. `width`
    multiplies the channels; `norm` is not "none", and `activation` stands in the place of ReLU6.
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
            # in the place of torchvision's dropout, without which training and evaluation are the same
            classifier=nn.Sequential(nn.Identity(), nn.Linear(last, outputs)),
        )
    )
