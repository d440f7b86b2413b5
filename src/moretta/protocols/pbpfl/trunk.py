"""The trunk, all of the model below its head: one forward, and the gradients of several scalars from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from moretta.protocols.pbpfl.scales import Head


class Trunk:
    """Runs a model up to its head and back with several cotangents.

    model: in train mode, with the noisy parameters of the round. head: its last linear layer; its parameters belong to
    the trunk only where another layer uses them too.
    """

    def __init__(self, model: nn.Module, head: Head) -> None:
        self._model, self._head = model, model.get_submodule(head.module)
        above = () if head.tied else (head.weight, head.bias)
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name not in above
        }
        self._dense = dense_layers(model, head.module)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head's input h, [B, inputs], and the outputs y^, [B, outputs] (`practical.md`, Eq. 9).

        inputs: [B, ...]; of `dense_layers` perhaps those of several silos, [silos, B, ...], and so is what is returned.
        """
        if self._dense is not None:
            return self._forward_dense(self._dense, inputs)
        seen: list[Tensor] = []
        hook = self._head.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
        try:
            outputs = self._model(inputs)
        finally:
            hook.remove()
        self._h = seen[0]
        return self._h.detach(), outputs.detach()

    def backward(
        self, cotangents: Tensor, places: Sequence[int] | None = None
    ) -> Mapping[str, Tensor | Sequence[Tensor]]:
        """Return for each parameter of the trunk its gradients along the k cotangents: k tensors, or [k, *shape].

        cotangents: d scalar / d h, [k, B, inputs], for the last `forward`. places: of several silos then those whose
        cotangents are given, [k, places, B, inputs]; what is returned is [k, places, *shape].
        """
        if not self._parameters:
            return {}
        if self._dense is not None:
            return self._backward_dense(self._dense, cotangents, places)
        parameters, last = list(self._parameters.values()), len(cotangents) - 1
        gradients = [
            torch.autograd.grad(self._h, parameters, cotangent, retain_graph=number < last, materialize_grads=True)
            for number, cotangent in enumerate(cotangents)
        ]
        del self._h  # frees the graph before the next round makes its own
        return dict(zip(self._parameters, zip(*gradients, strict=True), strict=True))

    # A chain of linear layers and ReLUs is differentiated by hand: all cotangents pass each layer in one product. Small
    # networks for tables are bound by the cost of calls, not by arithmetic.

    @torch.no_grad()
    def _forward_dense(self, layers: Mapping[str, nn.Linear], inputs: Tensor) -> tuple[Tensor, Tensor]:
        self._activations = [inputs]
        for layer in layers.values():
            self._activations.append(layer(self._activations[-1]).clamp_min_(0))
        h = self._activations[-1]
        return h, self._head(h)

    @torch.no_grad()
    def _backward_dense(
        self, layers: Mapping[str, nn.Linear], cotangents: Tensor, places: Sequence[int] | None
    ) -> Mapping[str, Tensor]:
        gradients: dict[str, Tensor] = {}
        some = places is not None and len(places) < len(self._activations[0])
        activations = [one[places] for one in self._activations] if some else self._activations
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
    layers = list(model._modules.items())  # named_children() would leave out the second use of a layer
    pairs = zip(layers[0:-1:2], layers[1:-1:2], strict=False)
    linears = [layer for _, layer in layers[::2]]
    if len(layers) % 2 == 0 or layers[-1][0] != head or len(set(linears)) != len(linears):
        return None
    dense: dict[str, nn.Linear] = {}
    for (name, linear), (_, activation) in pairs:
        if type(linear) is not nn.Linear or type(activation) is not nn.ReLU:
            return None
        dense[name] = linear
    frozen = any(not parameter.requires_grad for layer in dense.values() for parameter in layer.parameters())
    return None if frozen else dense
