"""The N-layer network of Algorithm 2, cut behind its first layer, and the sharing of layers in the grid m_h x m_v."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from moretta.contract.messages import Array, Tensors
from moretta.data.holders import Grid
from moretta.errors import ParameterError
from moretta.models.checks import is_plain
from moretta.protocols.common import modules


@dataclass(frozen=True)
class Layers:
    """A network as its first linear layer, [H1, d], and all layers after it.

    Args:
        weight, bias: The first layer's tensors by PyTorch's names; bias is "" without one.
        width: H1.
        columns: d.
        upper: Turns z, [rows, H1], into outputs, with the network's own names of its tensors.
    """

    weight: str
    bias: str
    width: int
    columns: int
    upper: nn.Sequential

    @classmethod
    def of(cls, model: nn.Module) -> Layers:
        """Cut a copy of a model. Raises `moretta.errors.ParameterError` for other than [Flatten,] Linear, and so on."""
        children = list(model.named_children()) if isinstance(model, nn.Sequential) else []
        rest = children[1:] if children and isinstance(children[0][1], nn.Flatten) else children
        first = rest[0][1] if rest else None
        if not isinstance(first, nn.Linear):
            raise ParameterError(
                "columns can be split only below a linear first layer; expected an nn.Sequential that begins with "
                f'nn.Linear, such as the built-in "mlp", got {type(model).__name__}'
            )
        if not is_plain(first):
            raise ParameterError(
                f"columns can be split only below a linear first layer, and `{rest[0][0]}` computes its weight from "
                "others (weight_norm, prune) or has hooks; remove those"
            )
        if not first.weight.requires_grad:
            raise ParameterError(
                f"a network that is split by columns, or simulated, trains its first layer; `{rest[0][0]}.weight` is "
                "frozen: let it train, or train a network without that layer on its outputs"
            )
        name, upper = rest[0][0], nn.Sequential(OrderedDict(copy.deepcopy(rest[1:])))
        if modules.ties(model):
            raise ParameterError("a network that is split by columns, or simulated, has no tied weights; untie them")
        if any(buffer.is_floating_point() for buffer in upper.buffers()):
            raise ParameterError(
                "a network that is split by columns has no running statistics of its own; remove BatchNorm or use "
                "LayerNorm"
            )
        bias = f"{name}.bias" if first.bias is not None else ""
        return cls(f"{name}.weight", bias, first.out_features, first.in_features, upper)

    @property
    def first(self) -> tuple[str, ...]:
        """The names of the first layer's tensors."""
        return (self.weight, self.bias) if self.bias else (self.weight,)


def joined(weights: Sequence[Array], columns: Sequence[Sequence[int]], total: int) -> Array:
    """Return the first layer's weight [H1, d] of parts [H1, d_j]; columns without a holder get 0."""
    whole = np.zeros((len(weights[0]), total), dtype=weights[0].dtype)
    for part, indices in zip(weights, columns, strict=True):
        whole[:, list(indices)] = part
    return whole


def summed(start: Tensors, displacement: Mapping[str, Array]) -> dict[str, Array]:
    """Return w = w(1) + D in the start's dtypes; untrained tensors stay as they are."""
    return {
        name: (value + displacement[name]).astype(value.dtype) if name in displacement else value
        for name, value in start.items()
    }


@dataclass(frozen=True)
class Group:
    """Participants that share layers, and so step by one sum of their gradients.

    Args:
        members: In order.
        shapes: Of the layers' tensors, by name.
        tells_loss: Whether the sum includes their losses.
    """

    members: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    tells_loss: bool

    @property
    def summed(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all summed tensors."""
        return {**self.shapes, **({"loss": ()} if self.tells_loss else {})}


def groups_of(grid: Grid, shapes: Mapping[str, tuple[int, ...]], first: str, *, joint: bool) -> dict[str, Group]:
    """Return the groups that share layers, by name.

    Differs from the paper: a first layer's bias, which Algorithm 2 lacks, belongs to the layers above it.

    Args:
        shapes: Of all trained tensors.
        first: The name of the first layer's weight, [H1, d], whose columns are split; unused if all participants share
            all layers.
        joint: The rows' heads share the rest, else all participants do.
    """
    everybody = tuple(grid.parts)
    if not grid.is_split:
        return {"all": Group(everybody, shapes, True)}
    groups = {
        name: Group(members, {first: (shapes[first][0], len(grid.parts[members[0]].columns))}, False)
        for name, members in grid.column_groups.items()
    }
    rest = {name: shape for name, shape in shapes.items() if name != first}
    if joint:
        return {"heads": Group(tuple(grid.heads[row] for row in grid.rows), rest, True), **groups}
    return {"all": Group(everybody, rest, True), **groups}
