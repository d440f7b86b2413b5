"""The silos' roles: FedSGD's and FedAvg's client, and the lone one."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moretta.contract.messages import Array, Message
from moretta.contract.roles import Phase, State, no_phase
from moretta.protocols.common import modules
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.steps import take_step
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd.messages import Show, Shown, Step, Stepped, TrainOn
from moretta.protocols.fedsgd.params import FedAvg
from moretta.protocols.fedsgd.private import PrivateGradient
from moretta.secure_aggregation.asked import asked
from moretta.secure_aggregation.sums import Contributor


class Client:
    """Answers `TrainOn` with the gradient of its batch, or under `FedAvg` with the difference of its epochs.

    private: computes the gradient under differential privacy; the constructor then raises
    `moretta.errors.ParameterError` for a model in which a row has no gradient of its own.
    """

    def __init__(
        self,
        params: Training,
        model: nn.Module,
        rows: SiloRows,
        contributor: Contributor,
        rounds: int,
        private: PrivateGradient | None = None,
    ) -> None:
        self.phase: Phase = no_phase
        self._params, self._rows, self._contributor, self._rounds = params, rows, contributor, rounds
        self._model = copy.deepcopy(model).train()
        self._trainable, self._buffers = modules.trainable(self._model), modules.running_buffers(self._model)
        self._loss, self._private = params.loss_function, private
        if private is not None:
            private.check(self._model)

    def answer(self, message: Message) -> Message:
        """Answer one message."""
        if isinstance(message, TrainOn):
            answer = self._train(message)
        else:
            answer = self._rows.answer(message, self._contributor, self._model)
        if self._private is not None:
            self._private.releases.answered(message, answer)
        return answer

    def privacy(self) -> Mapping[str, float | str]:
        """Return the privacy of the silo's own rows, by its own count of releases; nothing without noise."""
        return {} if self._private is None else self._private.facts()

    def lot(self, ask: TrainOn) -> NDArray[np.int64]:
        """Return the indices of the rows that an ask draws, for an audit's scorer."""
        if self._private is None:
            return self._rows.batches.of_round(ask.stamp.round)
        return self._private.rows_of_lot(*self._private.purpose(ask.parameters, ask.stamp))

    def _train(self, ask: TrainOn) -> Message:
        modules.load(self._model, ask.parameters)
        if self._private is not None:
            return self._train_in_private(ask, self._private)
        about = asked(ask, *self._rows.agreed, whole=self._rows.batches.whole or isinstance(self._params, FedAvg))
        self._contributor.check(ask.stamp, about)
        with self._rows.randomness(*ask.stamp.drawn):
            if isinstance(self._params, FedAvg):
                upload, rows = self._epochs(self._params.local_epochs, ask.stamp.round)
            else:
                upload, rows = self._gradient(*ask.stamp.drawn)
        with self.phase("aggregation"):
            upload |= {f"buffer/{name}": buffer.cpu().numpy().copy() for name, buffer in self._buffers.items()}
            return self._contributor.upload(ask.stamp, upload, rows, ask.encoding, asked=about)

    def _train_in_private(self, ask: TrainOn, private: PrivateGradient) -> Message:
        """Upload the noised sum alone: no loss, no number of rows, no buffers.

        A lot of all rows does not count as `whole`: each take has noise of its own, and is counted.
        """
        about = asked(ask, *self._rows.agreed)
        self._contributor.check(ask.stamp, about)
        with self.phase("local_backward"):
            upload = private.upload(self._model, ask.parameters, ask.stamp)
        with self.phase("aggregation"):
            return self._contributor.upload(ask.stamp, upload, private.lot, ask.encoding, asked=about)

    def _gradient(self, number: int, take: int = 0) -> tuple[dict[str, Array], int]:
        """Return the gradient of the mean loss on the round's batch, what else is uploaded, and the rows."""
        inputs, targets = self._rows.batch(number, take)
        gradients, loss = self._backward(inputs, targets)
        upload = {f"gradient/{name}": value.cpu().numpy() for name, value in gradients.items()}
        upload["loss"] = np.asarray(loss)
        if self._loss.weighs_rows:  # silos weigh as D_k, not as their rows: N_k times the density
            density = self._loss.density(targets)
            upload = {name: value * density for name, value in upload.items()} | {"density": np.asarray(density)}
        return upload, len(inputs)

    def _backward(self, inputs: Tensor, targets: Tensor) -> tuple[dict[str, Tensor], float]:
        with self.phase("local_forward"):
            loss = self._loss(self._model(inputs), targets)
        with self.phase("local_backward"):
            gradients = torch.autograd.grad(loss, list(self._trainable.values()), materialize_grads=True)
        return dict(zip(self._trainable, gradients, strict=True)), float(loss.detach())

    def _epochs(self, epochs: int, number: int) -> tuple[dict[str, Array], int]:
        """Take `epochs` epochs of SGD; return W - W_k and the mean loss along the way, and the rows."""
        parameters = self._trainable
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        kept: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
        rate = self._params.rate(number, self._rounds)
        total = 0.0
        for epoch in range((number - 1) * epochs, number * epochs):
            for index in self._rows.batches.of_epoch(epoch):
                gradients, loss = self._backward(*self._rows.rows(index))
                for name, parameter in parameters.items():
                    parameter.grad = gradients[name]
                if self._params.clip_norm is not None:
                    nn.utils.clip_grad_norm_(parameters.values(), self._params.clip_norm)
                for name, parameter in parameters.items():
                    take_step(parameter, gradients[name], kept[name], rate, self._params)
                total += loss * len(index)
        rows = self._rows.batches.rows
        upload = {f"gradient/{name}": (before[name] - parameters[name].detach()).cpu().numpy() for name in parameters}
        return upload | {"loss": np.asarray(total / (rows * epochs))}, rows

    def state(self) -> State:
        """Return what lots and noise follow from, if any, and releases.

        Batches follow from the round, the model from the ask.
        """
        return {} if self._private is None else self._private.state()

    def restore(self, state: State) -> None:
        """Take up what `state` returned."""
        if self._private is not None:
            self._private.restore(state)


class LoneClient:
    """A silo that trains alone, on the same batches, from the same start."""

    def __init__(
        self, params: Training, model: nn.Module, rows: SiloRows, contributor: Contributor, rounds: int
    ) -> None:
        self.phase: Phase = no_phase
        self._rows, self._contributor = rows, contributor
        self._model = copy.deepcopy(model).train()
        self._loss = params.loss_function
        self._optimizer = modules.Optimizer(self._model, params, rounds)
        self._last = (0, 0.0, 0)  # the last step taken: its round, loss and rows

    def answer(self, message: Message) -> Message:
        """Answer one message."""
        match message:
            case Step():
                if message.stamp.round != self._last[0]:  # a round repeated because of another silo is no second step
                    self._step(message.stamp.round)
                return Stepped(stamp=message.stamp, loss=self._last[1], rows=self._last[2])
            case Show():
                return Shown(stamp=message.stamp, parameters=modules.arrays(self._model))
        return self._rows.answer(message, self._contributor, self._model)

    def _step(self, number: int) -> None:
        parameters = modules.trainable(self._model)
        with self.phase("local_forward"), self._rows.randomness(number):
            inputs, targets = self._rows.batch(number)
            loss = self._loss(self._model(inputs), targets)
        with self.phase("local_backward"):
            gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        with self.phase("update"):
            named = zip(parameters, gradients, strict=True)
            self._optimizer.step({name: value.double().cpu().numpy() for name, value in named}, number)
        self._last = number, float(loss.detach()), len(inputs)

    def state(self) -> State:
        """Return model, optimizer and the last step taken."""
        model = {f"model/{name}": value for name, value in modules.arrays(self._model).items()}
        return {**model, **self._optimizer.state(), "last": np.array(self._last, dtype=np.float64)}

    def restore(self, state: State) -> None:
        """Take up what `state` returned."""
        modules.load(self._model, modules.under("model/", state))
        self._optimizer.restore(state)
        number, loss, rows = state["last"]
        self._last = int(number), float(loss), int(rows)
