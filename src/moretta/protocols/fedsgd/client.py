"""The silos' roles: FedSGD's client, FedAvg's and FedProx's, and the lone one."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moretta.contract.messages import Message
from moretta.contract.roles import Answering, InSteps, Phase, State, no_phase
from moretta.protocols.common import modules
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.scoring import Score
from moretta.protocols.common.stacked import Stacked
from moretta.protocols.common.statistics import without_noise
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd.local import Local, LocalWork
from moretta.protocols.fedsgd.messages import Show, Shown, Step, Stepped, TrainOn
from moretta.protocols.fedsgd.params import Epochs
from moretta.protocols.fedsgd.private import PrivateGradient
from moretta.secure_aggregation.asked import asked
from moretta.secure_aggregation.sums import Contributor


class Client:
    """Answers `TrainOn` with the gradient of its batch, or under `Epochs` with the difference of its epochs.

    model: never written to. stacked: the same model, one object for all silos that may be stepped together.
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
        stacked: Stacked | None = None,
    ) -> None:
        self.phase: Phase = no_phase
        self._rows, self._contributor, self._private = rows, contributor, private
        self._local = Local(params, model, stacked or Stacked(model, params.loss_function), rows, rounds)
        if private is not None:
            private.check(self._local.model)

    @InSteps
    def answer(self, message: Message) -> Answering:
        """Answer one message; the work on rows may be done together with other silos'."""
        if isinstance(message, TrainOn):
            answer = yield from self._train(message)
        else:
            model = self._local.model if isinstance(message, Score) else self._local.given
            with self.phase("aggregation"):
                answer = self._rows.answer(message, self._contributor, model)
        if self._private is not None:
            self._private.releases.answered(message, answer)
        return answer

    def privacy(self) -> Mapping[str, float | str]:
        """Return the privacy of the silo's own rows, by its own count of releases; nothing without noise."""
        if self._private is None:
            return {}
        return self._private.facts(without_noise(self._rows.answers.names(self._private.releases.run)))

    def lot(self, ask: TrainOn) -> NDArray[np.int64]:
        """Return the indices of the rows that an ask draws, for an audit's scorer."""
        if self._private is None:
            return self._rows.batches.of_round(ask.stamp.round)
        return self._private.rows_of_lot(*self._private.purpose(ask.parameters, ask.stamp))

    def _train(self, ask: TrainOn) -> Answering:
        if self._private is not None:
            return self._train_in_private(ask, self._private)
        about = asked(ask, *self._rows.agreed, whole=self._rows.batches.whole or isinstance(self._local.params, Epochs))
        self._contributor.check(ask.stamp, about)
        self._local.phase = self.phase
        upload, rows = yield LocalWork(self._local, ask)
        with self.phase("aggregation"):
            return self._contributor.upload(ask.stamp, upload, rows, ask.encoding, asked=about)

    def _train_in_private(self, ask: TrainOn, private: PrivateGradient) -> Message:
        """Upload the noised sum alone: no loss, no number of rows, no buffers.

        A lot of all rows does not count as `whole`: each take has noise of its own, and is counted.
        """
        modules.load(self._local.model, ask.parameters)
        about = asked(ask, *self._rows.agreed)
        self._contributor.check(ask.stamp, about)
        with self.phase("local_backward"):
            upload = private.upload(self._local.model, ask.parameters, ask.stamp, ask.encoding)
        with self.phase("aggregation"), private.releases.sent():
            return self._contributor.upload(ask.stamp, upload, private.lot, ask.encoding, asked=about)

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
            self._optimizer.step(modules.on_host({name: value.double() for name, value in named}), number)
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
