"""A PyTorch module run forward at flat parameters: in place, or where it is small several parameter vectors at once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from moretta.contract.messages import Array
from moretta.errors import ParameterError
from moretta.protocols.baffle import on_device
from moretta.protocols.baffle.batched import Batched
from moretta.protocols.baffle.silo.directions import Directions
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.common import modules

SMALL = 100_000  # trained parameters; above, several models at once are no faster than one after the other
MIXING = 1e-3  # of the largest output: by which a row may differ among others; rounding is far below
BATCHES = 32  # of silos that go through the model together; no more are kept on its device
LEAST, MOST, TOGETHER = 8, 32, 256  # models at once, and rows of all of them together


def layout_of(model: nn.Module) -> Layout:
    """Return how a model's trained parameters lie in a flat array."""
    trained = {name: parameter.detach().cpu().numpy() for name, parameter in modules.trainable(model).items()}
    further = modules.ties(model)
    fixed = {name: value for name, value in modules.arrays(model).items() if name not in trained | further}
    return Layout.of(trained, fixed)


class TorchForward:
    """Runs a copy of a module on the CPU or a GPU. Raises `moretta.errors.ParameterError` as `check_model` does."""

    def __init__(self, model: nn.Module, layout: Layout, device: str = "cpu") -> None:
        check_model(model)
        self.layout = layout
        self._model = copy.deepcopy(model).to(device).requires_grad_(False)
        for module in self._model.modules():
            if getattr(module, "inplace", False):
                # the first layer's input is the silo's own rows
                module.inplace = False  # type: ignore[assignment]
        trained = dict(self._model.named_parameters())
        self._flat = torch.zeros(layout.size, dtype=getattr(torch, layout.dtype), device=device)
        self._batches = dict[int, tuple[Array, Tensor]]()  # a round's, here and on the device
        start = 0
        for name in layout.shapes:  # every parameter becomes a view of the flat one: one copy sets them all
            parameter = trained[name]
            parameter.data = self._flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
        self._batched = Batched.of(self._model, layout) if layout.size <= SMALL else None

    def at_once(self, rows: int) -> int:
        """Return how many parameter vectors to run together: the fewer rows share a call, the more."""
        return min(MOST, max(LEAST, TOGETHER // rows)) if self._batched else 1

    def fixed(self) -> dict[str, Array]:
        """Return copies of what is not trained: frozen parameters and all buffers, even those that are not saved."""
        names = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        return {name: value.cpu().numpy().copy() for name, value in names.items() if name not in self.layout.shapes}

    def perturbed(self, directions: Directions, at: Array, distance: float, rows: int) -> Iterator[Any]:
        """Yield perturbed parameters, on the device that they are for."""
        self._batches.clear()
        if self._flat.device.type == "cpu":
            return directions.perturbed(at, distance, self.at_once(rows))
        return on_device.perturbed(directions, at, distance, self._flat.device)

    def outputs(self, parameters: NDArray[np.floating] | Tensor, x: Array) -> Array:
        """Return the model's outputs at each parameter vector: see `moretta.protocols.baffle.silo.forward.Forward`."""
        with torch.inference_mode():
            vectors = parameters if isinstance(parameters, Tensor) else torch.from_numpy(parameters)
            vectors, inputs = vectors.to(self._flat.device), self._on_device(x)
            if self._batched is not None and len(vectors) > 1:
                return np.asarray(self._batched.outputs(vectors, inputs).cpu())
            return np.asarray(torch.stack([self._outputs_at(vector, inputs) for vector in vectors]).cpu())

    def _outputs_at(self, vector: Tensor, inputs: Tensor) -> Tensor:
        self._flat.copy_(vector)
        outputs: Tensor = self._model(inputs)
        return outputs

    def _on_device(self, x: Array) -> Tensor:
        """Return a batch where the model is; all directions of a round have the same, so that it goes there once."""
        if self._flat.device.type == "cpu":
            return torch.from_numpy(x)
        if id(x) not in self._batches:
            if len(self._batches) >= BATCHES:
                self._batches.clear()
            self._batches[id(x)] = x, torch.from_numpy(x).to(self._flat.device)  # x is held, so its id is its own
        return self._batches[id(x)][1]


def check_model(model: nn.Module) -> None:
    """Raise `moretta.errors.ParameterError` where a forward pass draws at random or changes the model; says where."""
    for name, module in model.named_modules():
        place = f"`{name or 'the model'}` ({type(module).__name__})"
        if isinstance(module, _DropoutNd) and module.p > 0:
            raise ParameterError(
                f"{place} drops values at random, so that losses would differ by chance and not by direction; set its "
                "p to 0 or remove it"
            )
        if isinstance(module, _BatchNorm | _InstanceNorm) and module.training and module.track_running_stats:
            raise ParameterError(
                f"{place} changes its running statistics in forward passes; freeze it by .eval() (built-in models: "
                'norm = "frozen-batch"), or use GroupNorm'
            )
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ParameterError(
                f"{place} mixes the rows of a batch, so that their losses are not their own; use GroupNorm"
            )


def check_rows(forward: TorchForward, at: Array, x: Array) -> None:
    """Raise `moretta.errors.ParameterError` where a row's outputs are not its own, or not the same every time.

    x: a few rows, at least one. That a model's forward pass changes its buffers is seen here too.
    """
    before = forward.fixed()
    first, second = (forward.outputs(at[None], x)[0] for _ in range(2))
    changed = sorted(name for name, value in forward.fixed().items() if not np.array_equal(value, before[name]))
    if changed:
        raise ParameterError(
            f"the model changes {', '.join(changed)} in forward passes, so that a loss depends on what ran before it; "
            "freeze what keeps running statistics, or use GroupNorm"
        )
    if not np.array_equal(first, second, equal_nan=True):
        raise ParameterError(
            "the model gives other outputs for the same rows each time, so that losses would differ by chance and not "
            "by direction; remove what it draws at random"
        )
    alone = np.concatenate([forward.outputs(at[None], x[row : row + 1])[0] for row in range(len(x))])
    apart = np.abs(alone - first).max()
    if apart > MIXING * np.abs(first).max():
        raise ParameterError(
            f"the model gives a row other outputs beside other rows than alone, by {apart:.2g}, so that its loss is "
            "not its own; remove what mixes the rows of a batch"
        )
