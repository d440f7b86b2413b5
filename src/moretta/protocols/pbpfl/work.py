"""A silo's computations: a forward pass to the noisy head, and the gradients of the scalars there.

All silos of a round receive the same weights. So in a small chain of linear layers and ReLUs the batches of several
silos pass each layer in one product. Only the gradients of weights take one product per silo.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import vmap

from moretta.contract.roles import LEAST, Phase
from moretta.errors import PeerError
from moretta.models.checks import is_plain
from moretta.protocols.common import modules
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.passes import WHOLE, Passes, Replayed
from moretta.protocols.common.stacked import LARGEST
from moretta.protocols.pbpfl import terms
from moretta.protocols.pbpfl.backward import gradients_along
from moretta.protocols.pbpfl.head import Head
from moretta.protocols.pbpfl.messages import TrainOn
from moretta.protocols.pbpfl.terms import NoisyHead, Terms

Ends = tuple[Tensor, Tensor | None]
"""The results of `Head.run`: the head's inputs, and the addend of its outputs."""


class Trunk:
    """Runs a model up to its head and back with several cotangents.

    Args:
        model: In train mode, with the noisy parameters of the round.
        head: Its last linear layer; its parameters belong to the trunk only if another layer uses them too.
        passes: If rows pass in parts, each part goes to the head twice, the second time when its cotangents are known.
    """

    def __init__(self, model: nn.Module, head: Head, passes: Passes = WHOLE) -> None:
        self._model, self._head, self._passes = model, head, passes
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name not in head.above
        }
        self._dense = dense_layers(model, head.module) if passes == WHOLE else None

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head's input h, [B, inputs], and the outputs y^, [B, outputs].

        Each position of dense outputs is a row (`moretta.protocols.pbpfl.head`).

        Args:
            inputs: [B, ...]; for `dense_layers` also several silos', [silos, B, ...], and likewise the results.

        Source:
            `practical.md`, Eq. 9.
        """
        if self._dense is not None:
            return self._forward_dense(self._dense, inputs)
        pairs, parts = list[tuple[Tensor, Tensor]](), self._passes.parts(len(inputs))
        self._ways = list[Ends | Callable[[], Ends]]()
        for part in [inputs[some] for some in parts]:
            again = Replayed(self._model) if len(parts) > 1 else nullcontext()
            with torch.set_grad_enabled(len(parts) == 1 and torch.is_grad_enabled()):
                h, rest = ends = self._to_head(part, nullcontext())
            self._ways.append(partial(self._to_head, part, again) if len(parts) > 1 else ends)
            with torch.no_grad():
                pairs.append((h.detach(), self._head.outputs_of(self._model, h, rest)))
        h, outputs = map(torch.cat, zip(*pairs, strict=True)) if len(pairs) > 1 else pairs[0]
        return h, outputs

    def _to_head(self, inputs: Tensor, again: AbstractContextManager[None]) -> Ends:
        with again, self._passes.through(self._model, self._head.module):
            return self._head.run(self._model, (inputs,))

    def backward(
        self, cotangents: Tensor, places: Sequence[int] | None = None, beside: Tensor | None = None
    ) -> Mapping[str, Tensor | Sequence[Tensor]]:
        """Return each trunk parameter's gradients along the k cotangents of the last `forward`.

        Args:
            cotangents: d scalar / d h, [k, B, inputs]; for several silos [k, places, B, inputs].
            places: The places of the silos with cotangents among those of the last `forward`.
            beside: d scalar / d c, [k, B, outputs], if the outputs have an addend c.

        Returns:
            By name k tensors, or [k, *shape]; for several silos [k, places, *shape].
        """
        if not self._parameters:
            return {}
        if self._dense is not None:
            return self._backward_dense(self._dense, cotangents, places)
        parameters, begin = list(self._parameters.values()), 0
        total = [list[Tensor]() for _ in cotangents]
        while self._ways:  # each frees its graph before the next makes its own
            way = self._ways.pop(0)
            h, rest = way() if callable(way) else way
            some = slice(begin, begin + len(h))
            ways = [(h, cotangents), *([] if rest is None or beside is None else [(rest, beside)])]
            ways = [(end, seeds) for end, seeds in ways if end.requires_grad]  # layers below may be frozen
            seeds = [[seeds[number][some] for _, seeds in ways] for number in range(len(cotangents))]
            part = gradients_along([end for end, _ in ways], seeds, parameters)
            total = [  # frees what was added
                [before.pop(0) + more.pop(0) for _ in parameters] if before else more
                for before, more in zip(total, part, strict=True)
            ]
            begin = some.stop
        return dict(zip(self._parameters, zip(*total, strict=True), strict=True))

    # A chain of linear layers and ReLUs is differentiated by hand: all cotangents pass each layer in one product. Small
    # networks for tables spend their time in calls, not arithmetic.

    @torch.no_grad()
    def _forward_dense(self, layers: Mapping[str, nn.Linear], inputs: Tensor) -> tuple[Tensor, Tensor]:
        self._activations = [inputs]
        for layer in layers.values():
            self._activations.append(layer(self._activations[-1]).clamp_min_(0))
        h = self._activations[-1]
        return h, self._head.outputs_of(self._model, h, None)

    @torch.no_grad()
    def _backward_dense(
        self, layers: Mapping[str, nn.Linear], cotangents: Tensor, places: Sequence[int] | None
    ) -> Mapping[str, Tensor]:
        gradients: dict[str, Tensor] = {}
        some = places is not None and len(places) < len(self._activations[0])
        activations = [activation[places] for activation in self._activations] if some else self._activations
        names = list(layers)
        for depth in range(len(names), 0, -1):
            layer, below = layers[names[depth - 1]], activations[depth - 1]
            cotangents = cotangents * (activations[depth] > 0)
            if layer.bias is not None:
                gradients[f"{names[depth - 1]}.bias"] = cotangents.sum(-2)
            gradients[f"{names[depth - 1]}.weight"] = cotangents.transpose(-2, -1) @ below
            if depth > 1:
                cotangents = cotangents @ layer.weight
        return gradients


def dense_layers(model: nn.Module, head: str) -> dict[str, nn.Linear] | None:
    """Return the linear layers below the head, by name, if the model is just Linear, ReLU, Linear, .., Linear."""
    if type(model) is not nn.Sequential:
        return None
    layers = list(model._modules.items())  # named_children() would omit the second use of a layer
    pairs = zip(layers[0:-1:2], layers[1:-1:2], strict=False)
    linears = [layer for _, layer in layers[::2]]
    if len(layers) % 2 == 0 or layers[-1][0] != head or len(set(linears)) != len(linears):
        return None
    dense: dict[str, nn.Linear] = {}
    for (name, linear), (_, activation) in pairs:
        if type(linear) is not nn.Linear or type(activation) is not nn.ReLU or not is_plain(linear):
            return None
        dense[name] = linear
    frozen = any(not parameter.requires_grad for layer in dense.values() for parameter in layer.parameters())
    return None if frozen else dense


@dataclass(frozen=True)
class Forwarded:
    """A batch at the noisy head. trunk: does the backward pass. place: the silo's, if several went forward together."""

    at: NoisyHead
    targets: Tensor
    parts: Tensor
    trunk: Trunk
    place: int | None = None


@dataclass(frozen=True)
class TermGradients:
    """A silo's terms, and the trunk's gradients along the cotangents by name: a tensor each, or [scalars, *shape]."""

    terms: Terms
    trunk: Mapping[str, Tensor | Sequence[Tensor]]


class NoisyModel:
    """A model that gets each round's noisy weights: copies of `built`, which is never written to."""

    def __init__(self, model: nn.Module, head: Head, rows: SiloRows) -> None:
        self.built, self.head, self.passes, self._frozen = model, head, rows.passes, rows.frozen

    @cached_property
    def own(self) -> nn.Module:
        """A copy for one silo alone."""
        return copy.deepcopy(self.built).train()

    @cached_property
    def buffers(self) -> Mapping[str, Tensor]:
        """The running statistics of that copy; a model that stacks has none."""
        return {} if self.stacks else modules.running_buffers(self.own)

    @cached_property
    def trunk(self) -> Trunk:
        """The trunk of that copy."""
        return Trunk(self.own, self.head, self.passes)

    @cached_property
    def stacks(self) -> bool:
        """Whether several silos' batches may go through the model together."""
        small = modules.size(self.built) <= LARGEST and not list(self.built.buffers())
        return small and self.passes == WHOLE and dense_layers(self.built, self.head.module) is not None

    def at_head(self, ask: TrainOn, model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        """Load a round's weights; return the head's weight, the parts, int64[outputs], and the `terms.selector`."""
        modules.load(model, self._frozen.beside(ask.parameters))
        weight = self.head.matrix(self.head.effective(model).detach())
        if len(ask.parts) != len(weight):
            raise PeerError(f"{ask.stamp}: expected parts of {len(weight)} outputs, got {len(ask.parts)}")
        parts = torch.from_numpy(ask.parts).to(weight.device)
        return weight, parts, terms.selector(parts, torch.from_numpy(ask.direction).to(weight))


@dataclass(frozen=True)
class ForwardWork:
    """The forward pass of a silo's batch. index: of its rows."""

    model: NoisyModel
    rows: SiloRows
    index: NDArray[np.int64]
    ask: TrainOn
    phase: Phase
    least: int = LEAST

    @property
    def key(self) -> Hashable | None:
        """Equal for silos with the same model and batches of the same shapes; None for a model that is not stacked."""
        if not isinstance(self.rows.x, Tensor) or self.rows.augment or not self.model.stacks:
            return None
        shapes = tuple(self.rows.x.shape[1:]), tuple(self.rows.y.shape[1:]), self.rows.y.dtype
        return id(self.model.built), id(self.ask), len(self.index), *shapes

    def alone(self) -> Forwarded:
        """Return the silo's batch at its own model's head."""
        weight, parts, spread = self.model.at_head(self.ask, self.model.own)
        trunk = self.model.trunk
        with self.phase("local_forward"), self.rows.randomness(*self.ask.stamp.drawn):
            inputs, targets = self.rows.rows(self.index)
            h, outputs = trunk.forward(inputs)
        head = self.model.head
        at = NoisyHead(h, outputs, weight, head.bias is not None, spread, head.positions, head.residual)
        return Forwarded(at, targets, parts, trunk)

    def together(self, works: Sequence[ForwardWork]) -> list[Forwarded]:
        """Return the batches of several silos at the head of one copy of the model."""
        head = self.model.head
        model = copy.deepcopy(self.model.built).train()
        weight, parts, spread = self.model.at_head(self.ask, model)
        trunk, batches = Trunk(model, head), [work.rows.rows(work.index) for work in works]
        inputs = torch.stack([inputs for inputs, _ in batches])
        with self.phase("local_forward"):
            h, outputs = trunk.forward(inputs)
        heads = [
            NoisyHead(*features, weight, head.bias is not None, spread) for features in zip(h, outputs, strict=True)
        ]
        each = enumerate(zip(heads, batches, strict=True))
        return [Forwarded(at, targets, parts, trunk, place) for place, (at, (_, targets)) in each]


@dataclass(frozen=True)
class BackwardWork:
    """The terms of a silo's batch and their gradients. form: of the loss; own: this silo's inputs to it."""

    forwarded: Forwarded
    form: Callable[..., Terms]
    own: Sequence[Tensor]
    phase: Phase
    least: int = LEAST

    @property
    def key(self) -> Hashable | None:
        """Equal for silos that went forward together; None for a silo that did so alone."""
        if self.forwarded.place is None:
            return None
        return id(self.forwarded.trunk), tuple((tuple(tensor.shape), tensor.dtype) for tensor in self.own)

    def alone(self) -> TermGradients:
        """Return the silo's terms and gradients."""
        if self.forwarded.place is not None:
            return self.together([self])[0]
        with self.phase("local_backward"):
            result = self.form(self.forwarded.at, *self.own)
            return TermGradients(result, self.forwarded.trunk.backward(result.cotangents, beside=result.beside))

    def together(self, works: Sequence[BackwardWork]) -> list[TermGradients]:
        """Return the terms and gradients of silos that went forward together."""
        prefixes: list[tuple[str, ...]] = []

        def tensors_of(h: Tensor, outputs: Tensor, *own: Tensor) -> dict[str, Any]:
            result = self.form(replace(self.forwarded.at, h=h, outputs=outputs), *own)
            prefixes.append(result.prefixes)
            named = {field.name: getattr(result, field.name) for field in fields(result) if field.name != "prefixes"}
            return {name: value for name, value in named.items() if value is not None}

        ats = [(work.forwarded.at.h, work.forwarded.at.outputs, *work.own) for work in works]
        with self.phase("local_backward"):
            stack = vmap(tensors_of)(*map(torch.stack, zip(*ats, strict=True)))
            places = [place for work in works if (place := work.forwarded.place) is not None]
            trunk = self.forwarded.trunk.backward(stack["cotangents"].transpose(0, 1), places)
        results = []
        for place in range(len(works)):
            own = {name: _part(value, place) for name, value in stack.items()}
            gradients = {name: value[:, place] for name, value in trunk.items() if isinstance(value, Tensor)}  # all are
            results.append(TermGradients(Terms(prefixes=prefixes[0], **own), gradients))
        return results


def _part(of: Any, place: int) -> Any:
    return {name: value[place] for name, value in of.items()} if isinstance(of, dict) else of[place]
