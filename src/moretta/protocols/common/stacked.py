"""The gradients of several silos' batches in one call, by `torch.func.vmap`: small models spend their time in calls.

A model is stacked only where that is exact up to rounding. A trial for each shape of batches checks this, on made-up
rows and the built model's weights. It excludes models that draw at random (dropout, or by Python or NumPy), that change
buffers (running statistics) or numbers of their own (counts of calls), or that vmap cannot run. So stacking does not
depend on rows or rounds.
"""

import copy
import logging
import random
import warnings
from collections.abc import Hashable, Mapping
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from moretta.contract.messages import Array, Tensors
from moretta.errors import MisuseError
from moretta.protocols.common import modules
from moretta.protocols.common.losses import Loss

log = logging.getLogger("moretta")

LARGEST = 100_000  # parameters; beyond, arithmetic takes longer than calls
CLOSE = 1e-4  # relative, between a batch alone and in a stack; inexact results differ by far more

Stack = dict[str, Tensor]
"""Tensors by parameter, [silos, *shape]."""


class Stacked:
    """A copy of a model in train mode, and its loss, as a function of several silos' batches."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._built, self._loss = model, loss
        self.small = modules.size(model) <= LARGEST
        self._fits: dict[Hashable, bool] = {}

    @cached_property
    def _copy(self) -> nn.Module:
        return copy.deepcopy(self._built).train()

    def load(self, tensors: Tensors) -> tuple[Stack, dict[str, Array]]:
        """Return trained parameters, the same for every silo, and copies of the buffers that silos upload.

        Args:
            tensors: All parameters and buffers.

        Raises:
            ParameterError: The tensors do not fit the model.
        """
        modules.load(self._copy, tensors)
        trained = {name: parameter.detach() for name, parameter in modules.trainable(self._copy).items()}
        return trained, {
            name: value.cpu().numpy().copy() for name, value in modules.running_buffers(self._copy).items()
        }

    def gradients(self, at: Mapping[str, Tensor], x: Tensor, y: Tensor, *, common: bool) -> tuple[Stack, Tensor]:
        """Return each silo's gradient of its mean loss, and the losses, [silos].

        Args:
            at: The parameters, [silos, *shape], or [*shape] if they are `common` to all.
            x, y: [silos, rows, ...].
        """
        return _gradients(self._copy, self._loss, at, x, y, common)

    def check(self, x: Tensor, y: Tensor) -> None:
        """Raise `moretta.errors.MisuseError` unless batches of these shapes [silos, rows, ...] can be stacked."""
        shapes = (x.shape[1], *_of_a_row(x[0], y[0]))
        if shapes not in self._fits:
            self._fits[shapes] = self._tried(_made_up(x), _made_up(y))
        if not self._fits[shapes]:
            raise MisuseError("this model's batches cannot be stacked")

    def key(self, lengths: tuple[int, ...], x: Tensor, y: Tensor) -> tuple[Hashable, ...] | None:
        """Return the key shared by silos whose batches are stacked; None if `small` or `check` forbids it."""
        of_a_row = _of_a_row(x, y)
        for rows in set(lengths):
            if not self.small or not self._fits.get((rows, *of_a_row), True):
                return None
        return id(self), lengths, *of_a_row

    def _tried(self, x: Tensor, y: Tensor) -> bool:
        """Return whether two made-up batches have the same losses and gradients alone and stacked."""
        model = copy.deepcopy(self._built).train()
        drawn, before, trained = _draws(), _marks(model), modules.trainable(model)
        at = {name: parameter.detach() for name, parameter in trained.items()}
        copies = {name: value.expand(len(x), *value.shape).clone() for name, value in at.items()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                stacked = [
                    _gradients(model, self._loss, at, x, y, True),
                    _gradients(model, self._loss, copies, x, y, False),
                ]
                if _marks(model) != before or _draws() != drawn:
                    return False
                for place in range(len(x)):
                    loss = self._loss(model(x[place]), y[place])
                    alone = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
                    for gradients, losses in stacked:
                        each = zip([losses, *gradients.values()], [loss, *alone], strict=True)
                        if not all(_close(alone_value[place], other) for alone_value, other in each):
                            return False
        except Exception as error:  # noqa: BLE001  # any error of a user's model under vmap
            log.debug("silos are not stacked: %s: %s", type(error).__name__, error)
            return False
        return True


def clip_each(gradients: Stack, most: float) -> None:
    """Shorten each silo's gradient as `torch.nn.utils.clip_grad_norm_` does, in its own memory."""
    norms = torch.stack([value.reshape(len(value), -1).norm(dim=1) for value in gradients.values()]).norm(dim=0)
    factors = (most / (norms + 1e-6)).clamp(max=1.0)
    for value in gradients.values():
        value *= factors.view(-1, *[1] * (value.ndim - 1))


def in_own_memory(gradients: Mapping[str, Tensor]) -> Stack:
    """Return gradients that do not overlap: for summed parameters autograd returns one, or parts of one."""
    taken, separate = set[int](), Stack()
    for name, gradient in gradients.items():
        memory = gradient.untyped_storage().data_ptr()
        shared = memory in taken or not gradient.is_contiguous()
        separate[name] = gradient.clone(memory_format=torch.contiguous_format) if shared else gradient
        taken.add(memory)
    return separate


def _gradients(
    model: nn.Module, loss: Loss, at: Mapping[str, Tensor], x: Tensor, y: Tensor, common: bool
) -> tuple[Stack, Tensor]:
    """Return the result of `Stacked.gradients`.

    vmap runs the model, and autograd the rest: `torch.func.grad` and a loss within vmap import PyTorch's compiler and
    sympy, which takes as long as importing PyTorch.
    """

    def outputs_of(parameters: Stack, inputs: Tensor) -> Tensor:
        outputs: Tensor = functional_call(model, parameters, (inputs,))
        return outputs

    own = {name: value.expand(len(x), *value.shape) if common else value for name, value in at.items()}
    own = {name: value.detach().requires_grad_() for name, value in own.items()}
    losses = loss.of_each(vmap(outputs_of)(own, x), y)
    gradients = torch.autograd.grad(losses.sum(), list(own.values()), materialize_grads=True)
    return in_own_memory(dict(zip(own, gradients, strict=True))), losses.detach()


def _of_a_row(x: Tensor, y: Tensor) -> tuple[Hashable, ...]:
    return tuple(x.shape[1:]), x.dtype, tuple(y.shape[1:]), y.dtype


def _made_up(like: Tensor) -> Tensor:
    """Return two batches of a shape: always the same normal numbers, or zeros for whole numbers."""
    made = torch.zeros((2, *like.shape[1:]), dtype=like.dtype)
    if like.is_floating_point():
        made.normal_(generator=torch.Generator().manual_seed(0))
    return made.to(like.device)


def _marks(model: nn.Module) -> list[Hashable]:
    """Return marks that differ after a forward pass that changes or replaces a tensor or a number of the model."""
    named = [*model.named_parameters(), *model.named_buffers()]
    numbers = [
        (part, name, value)
        for part, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float)
    ]
    return [*((name, id(tensor), tensor._version) for name, tensor in named), *numbers]


def _draws() -> Hashable:
    """Return marks that differ after a draw from the generators of Python or NumPy, which no seed of ours sets."""
    _, words, place, *_ = np.random.get_state()  # noqa: NPY002  # models may use it
    return random.getstate(), np.asarray(words).tobytes(), place


def _close(first: Tensor, other: Tensor) -> bool:
    scale = float(other.detach().abs().max()) if other.numel() else 0.0
    return torch.allclose(first, other, rtol=0.0, atol=CLOSE * scale)
