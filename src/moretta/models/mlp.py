"""The multilayer perceptron: linear layers with ReLU between them."""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from moretta.errors import ParameterError
from moretta.models.arguments import flag, positive

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
    Raises ParameterError for both ways at once, for sizes below 1 and for more than 10,000 layers.
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
