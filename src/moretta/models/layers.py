"""Layers that the convolutional models share, and checks of the arguments of built-in models."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn
from torch.nn import functional as F

from moretta.contract.wording import did_you_mean
from moretta.errors import ParameterError


def at_least(least: int, value: object, name: str) -> int:
    """Return `value` if it is an integer of at least `least`, else raise ParameterError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ParameterError(f"model: {name} must be an integer of {least} or more, got {value!r}")
    return value


def positive(value: object, name: str) -> int:
    """Return `value` if it is an integer above 0, else raise ParameterError."""
    return at_least(1, value, name)


def above_zero(value: object, name: str) -> float:
    """Return `value` if it is a finite number above 0, else raise ParameterError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ParameterError(f"model: {name} must be a number above 0, got {value!r}")
    return float(value)


def flag(value: object, name: str) -> bool:
    """Return `value` if it is a boolean, else raise ParameterError."""
    if not isinstance(value, bool):
        raise ParameterError(f"model: {name} must be true or false, got {value!r}")
    return value


def one_of(value: object, name: str, choices: Sequence[str]) -> str:
    """Return `value` if it is one of the choices, else raise ParameterError naming the nearest."""
    if value not in choices:
        raise ParameterError(f"model: {name} = {value!r} is unknown; {did_you_mean(str(value), choices)}")
    return str(value)


def image(inputs: tuple[int, ...], model: str) -> int:
    """Return the channels of samples [channels, height, width], else raise ParameterError."""
    if len(inputs) != 3:
        raise ParameterError(
            f'model "{model}" takes images of shape (channels, height, width), but a sample has shape {inputs}; '
            "use an image source or the mlp"
        )
    return inputs[0]


NORMALISATIONS = ("group", "batch", "frozen-batch")
NORMS = (*NORMALISATIONS, "none")
ACTIVATIONS = {"hardswish": nn.Hardswish, "relu": nn.ReLU, "selu": nn.SELU}
STARTS = ("he-fan-out", "he-normal", "he-uniform")


class FrozenBatchNorm(nn.BatchNorm2d):
    """BatchNorm that stays in evaluation mode: for loaded weights, on data too few for statistics.

    The running mean and variance are fixed; the affine weight and bias still train.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode, whatever the surrounding model's mode."""
        return super().train(False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalised input, float[n, channels, h, w]."""
        # BatchNorm2d's own forward branches on the input's dim(), which torch.fx traces in PyTorch's own layers only
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


@dataclass(frozen=True)
class Norm:
    """The normalisation behind a convolution.

    Args:
        kind: One of `NORMS`.
        group_size: Channels of a group, at least two groups; 0 is 8 groups, fewer if 8 does not divide the channels.
        affine: Whether a trained scale and shift of each channel follow.
    """

    kind: str
    group_size: int = 0
    affine: bool = True


def norm_of(norm: object, choices: tuple[str, ...], group_size: object = 0, affine: object = True) -> Norm:
    """Return the normalisation of a model's arguments. Raises `moretta.errors.ParameterError` if they contradict it."""
    kind = one_of(norm, "norm", choices)
    normed = Norm(kind, at_least(0, group_size, "group-size"), flag(affine, "affine"))
    if normed.group_size and kind != "group":
        raise ParameterError(f'model: group-size belongs to norm = "group", and norm is "{kind}"; remove it')
    if not normed.affine and kind in ("frozen-batch", "none"):
        raise ParameterError(f'model: affine = false belongs to norm = "group" or "batch", and norm is "{kind}"')
    return normed


def normalisation(norm: Norm, channels: int) -> nn.Module:
    """Return BatchNorm, frozen or not, GroupNorm, or the identity."""
    if norm.kind == "batch":
        return nn.BatchNorm2d(channels, affine=norm.affine)
    if norm.kind == "frozen-batch":
        return FrozenBatchNorm(channels)
    if norm.kind == "none":
        return nn.Identity()
    groups = max(2, channels // norm.group_size) if norm.group_size else math.gcd(8, channels)
    if channels % groups:
        raise ParameterError(
            f"model: group-size = {norm.group_size} makes {groups} groups, which do not divide {channels} channels; "
            "choose another"
        )
    return nn.GroupNorm(groups, channels, affine=norm.affine)


def activated(norm: Norm, activation: str, channels: int) -> list[nn.Module]:
    """Return normalisation and activation."""
    return [normalisation(norm, channels), ACTIVATIONS[activation]()]


def convolution(
    channels: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1, bias: bool = False
) -> nn.Conv2d:
    """Return a k x k convolution that keeps height and width at stride 1, with He's initialisation for ReLU."""
    layer = nn.Conv2d(channels, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=bias)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def started(model: nn.Sequential, start: str) -> nn.Sequential:
    """Draw a model's first weights anew; return the model. Biases are 0.

    Args:
        start: "he-fan-out", the start of `convolution`: nothing is drawn, and biases stay. "he-normal": He's normal
            numbers by fan-in, in linear layers too. "he-uniform": He's uniform numbers by fan-in, and Xavier's uniform
            numbers in linear layers.
    """
    if one_of(start, "start", STARTS) == "he-fan-out":
        return model
    draws = nn.init.kaiming_normal_ if start == "he-normal" else nn.init.kaiming_uniform_
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            draw = nn.init.xavier_uniform_ if start == "he-uniform" and isinstance(layer, nn.Linear) else draws
            draw(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model
