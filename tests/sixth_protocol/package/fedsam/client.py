"""The silo's role."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from moretta.contract.messages import Array, Message
from moretta.contract.roles import Phase, State, no_phase
from moretta.protocols.common import modules
from moretta.protocols.common.enrolment import SiloRows
from moretta.secure_aggregation.keyed_sums import Contributor
from moretta.secure_aggregation.sums import query_of

from .messages import TrainOn
from .params import FedSAM


class Client:
    """Answers `TrainOn` with the difference that its epochs make. rounds: of the whole run."""

    def __init__(self, params: FedSAM, model: nn.Module, rows: SiloRows, contributor: Contributor, rounds: int) -> None:
        self.phase: Phase = no_phase
        self._params, self._rows, self._contributor, self._rounds = params, rows, contributor, rounds
        self._model = copy.deepcopy(model).train()
        self._trained, self._buffers = modules.trainable(self._model), modules.running_buffers(self._model)
        self._loss = params.loss_function

    def answer(self, message: Message) -> Message:
        """Answer one message."""
        if isinstance(message, TrainOn):
            return self._train(message)
        return self._rows.answer(message, self._contributor, self._model)

    def _train(self, ask: TrainOn) -> Message:
        modules.load(self._model, ask.parameters)
        about = query_of(ask, *self._rows.agreed, whole=True)
        self._contributor.check(ask.stamp, about)
        before = {name: parameter.detach().clone() for name, parameter in self._trained.items()}
        with self._rows.randomness(*ask.stamp.drawn):
            loss = self._epochs(ask.stamp.round)
        with self.phase("aggregation"):
            moved = {name: before[name] - parameter.detach() for name, parameter in self._trained.items()}
            upload: dict[str, Array] = {f"gradient/{name}": value.cpu().numpy() for name, value in moved.items()}
            upload |= {f"buffer/{name}": buffer.cpu().numpy().copy() for name, buffer in self._buffers.items()}
            upload["loss"] = np.asarray(loss)
            return self._contributor.upload(ask.stamp, upload, self._rows.batches.rows, ask.encoding, asked=about)

    def _epochs(self, number: int) -> float:
        """Take the epochs of round `number` in place; return the mean of F_k at the points stepped from."""
        params, epochs, total = self._params, self._params.local_epochs, 0.0
        rate = params.rate(number, self._rounds)
        optimizer = torch.optim.SGD(
            self._trained.values(), lr=rate, momentum=params.momentum, weight_decay=params.weight_decay
        )
        for epoch in range((number - 1) * epochs, number * epochs):
            for index in self._rows.batches.of_epoch(epoch):
                loss = self._backward(*self._rows.rows(index))
                if params.clip_norm is not None:
                    nn.utils.clip_grad_norm_(self._trained.values(), params.clip_norm)
                optimizer.step()
                total += loss * len(index)
        return total / (self._rows.batches.rows * epochs)

    def _backward(self, inputs: Tensor, targets: Tensor) -> float:
        """Leave the gradient a little uphill with each parameter; return F_k of the batch where it stands."""
        gradients, loss = self._gradients(inputs, targets)
        if radius := self._params.radius:
            here = [parameter.detach().clone() for parameter in self._trained.values()]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            with torch.no_grad():
                for parameter, gradient in zip(self._trained.values(), gradients, strict=True):
                    parameter.add_(gradient * (radius / norm))
            gradients, _ = self._gradients(inputs, targets)
            with torch.no_grad():
                for parameter, value in zip(self._trained.values(), here, strict=True):
                    parameter.copy_(value)
        for parameter, gradient in zip(self._trained.values(), gradients, strict=True):
            parameter.grad = gradient
        return loss

    def _gradients(self, inputs: Tensor, targets: Tensor) -> tuple[Sequence[Tensor], float]:
        with self.phase("local_forward"):
            loss = self._loss(self._model(inputs), targets)
        with self.phase("local_backward"):
            gradients = torch.autograd.grad(loss, list(self._trained.values()), materialize_grads=True)
        return gradients, float(loss.detach())

    def state(self) -> State:
        """Return nothing: batches follow from the round, the model from the ask."""
        return {}

    def restore(self, state: State) -> None:
        """Take up what `state` returned."""
