"""The silos' roles: FedSGD's client, FedAvg's and FedProx's, and the lone one.

A silo computes the gradient of a batch, or under federated averaging takes epochs of its own. Silos with equal batches
are stepped together where that is exact (`moretta.protocols.common.stacked`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moretta.contract.messages import Array, Message
from moretta.contract.roles import LEAST, Answering, InSteps, Phase, State, no_phase
from moretta.protocols.common import modules
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.modules import take_step
from moretta.protocols.common.scoring import Score
from moretta.protocols.common.stacked import Stack, Stacked, StackedSGD, in_own_memory
from moretta.protocols.common.statistics import without_noise
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd.messages import Show, Shown, Step, Stepped, TrainOn
from moretta.protocols.fedsgd.params import Epochs
from moretta.protocols.fedsgd.private import PrivateGradient
from moretta.secure_aggregation.sums import Contributor, query_of

MOST_NUMBERS = 1 << 22  # of the inputs that are gathered for a stack at once

Upload = dict[str, Array]
"""What a silo uploads: ``gradient/<name>``, ``loss`` and ``buffer/<name>``, with class weights FedSGD's ``density``."""
Batches = Sequence[NDArray[np.int64]]
"""The indices of the rows of each step, in order."""


class Client:
    """Answers `TrainOn` with the gradient of its batch, or under `Epochs` with the difference of its epochs.

    model: never written to; the silo makes a copy of its own when it first trains alone. stacked: the same model, one
    object for all silos that may be stepped together. rounds: of the whole run.
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
        self.params, self.rows, self._loss, self._rounds = params, rows, params.loss_function, rounds
        self.stacked, self._given = stacked or Stacked(model, self._loss), model
        self._contributor, self._private = contributor, private
        self._pull = params.pull if isinstance(params, Epochs) else 0.0
        if private is not None:
            private.check(self.model)

    @InSteps
    def answer(self, message: Message) -> Answering:
        """Answer one message; the work on rows may be done together with other silos'."""
        if isinstance(message, TrainOn):
            answer = yield from self._train(message)
        else:
            model = self.model if isinstance(message, Score) else self._given
            with self.phase("aggregation"):
                answer = self.rows.answer(message, self._contributor, model)
        if self._private is not None:
            self._private.releases.answered(message, answer)
        return answer

    def privacy(self) -> Mapping[str, float | str]:
        """Return the privacy of the silo's own rows, by its own count of releases; nothing without noise."""
        if self._private is None:
            return {}
        return self._private.facts(without_noise(self.rows.answers.names(self._private.releases.run)))

    def lot(self, ask: TrainOn) -> NDArray[np.int64]:
        """Return the indices of the rows that an ask draws, for an audit's scorer."""
        if self._private is None:
            return self.rows.batches.of_round(ask.stamp.round)
        return self._private.rows_of_lot(*self._private.purpose(ask.parameters, ask.stamp))

    def _train(self, ask: TrainOn) -> Answering:
        if self._private is not None:
            return self._train_in_private(ask, self._private)
        in_epochs, drawn = isinstance(self.params, Epochs), self.rows.batches
        about = query_of(ask, *self.rows.agreed, whole=drawn.whole or in_epochs)
        self._contributor.check(ask.stamp, about)
        batches = self.batches(ask)
        upload = yield LocalWork(self, ask, batches)
        rows = drawn.rows if in_epochs else len(batches[0])  # an epoch counts by all of them
        with self.phase("aggregation"):
            return self._contributor.upload(ask.stamp, upload, rows, ask.encoding, asked=about)

    def _train_in_private(self, ask: TrainOn, private: PrivateGradient) -> Message:
        """Upload the noised sum alone: no loss, no number of rows, no buffers.

        A lot of all rows does not count as `whole`: each take has noise of its own, and is counted.
        """
        modules.load(self.model, ask.parameters)
        about = query_of(ask, *self.rows.agreed)
        self._contributor.check(ask.stamp, about)
        with self.phase("local_backward"):
            upload = private.upload(self.model, ask.parameters, ask.stamp, ask.encoding)
        with self.phase("aggregation"), private.releases.sent():
            return self._contributor.upload(ask.stamp, upload, private.lot, ask.encoding, asked=about)

    @cached_property
    def model(self) -> nn.Module:
        """The silo's own copy of the model."""
        return copy.deepcopy(self._given).train()

    @cached_property
    def _trained(self) -> dict[str, nn.Parameter]:
        return modules.trainable(self.model)

    @cached_property
    def _buffers(self) -> dict[str, Tensor]:
        return modules.running_buffers(self.model)

    def batches(self, ask: TrainOn) -> Batches:
        """Return the indices of the rows of each step, in order."""
        if not isinstance(self.params, Epochs):
            return [self.rows.batches.of_round(*ask.stamp.drawn)]
        epochs = range((ask.stamp.round - 1) * self.params.local_epochs, ask.stamp.round * self.params.local_epochs)
        return [index for epoch in epochs for index in self.rows.batches.of_epoch(epoch)]

    def alone(self, ask: TrainOn, batches: Batches) -> Upload:
        """Return the upload by the silo's own model."""
        modules.load(self.model, ask.parameters)
        with self.rows.randomness(*ask.stamp.drawn):
            if isinstance(self.params, Epochs):
                upload = self._epochs(ask, batches)
            else:
                inputs, targets = self.rows.rows(batches[0])
                gradients, loss = self._backward(inputs, targets)
                upload = self.weighted(modules.on_host(dict(zip(self._trained, gradients, strict=True))), loss, targets)
        buffers = {f"buffer/{name}": buffer.clone() for name, buffer in self._buffers.items()}
        return upload | modules.on_host(buffers)  # in one copy from a device

    def weighted(self, gradients: dict[str, Array], loss: float, targets: Tensor) -> Upload:
        """Return the upload of a batch's gradient and mean loss: silos weigh as D_k, not as their rows."""
        upload = {f"gradient/{name}": value for name, value in gradients.items()} | {"loss": np.asarray(loss)}
        if self._loss.class_weights:  # N_k times the density
            density = self._loss.density(targets)
            upload = {name: value * density for name, value in upload.items()} | {"density": np.asarray(density)}
        return upload

    def _backward(self, inputs: Tensor, targets: Tensor) -> tuple[Sequence[Tensor], float]:
        with self.phase("local_forward"):
            loss = self._loss(self.model(inputs), targets)
        with self.phase("local_backward"):
            gradients = torch.autograd.grad(loss, list(self._trained.values()), materialize_grads=True)
        return gradients, float(loss.detach())

    def _epochs(self, ask: TrainOn, batches: Batches) -> Upload:
        """Take epochs of SGD; return W - W_k and the mean loss along the way, without the pull towards W."""
        parameters, total, rows = self._trained, 0.0, 0
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        kept: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
        for index in batches:
            gradients, loss = self._backward(*self.rows.rows(index))
            with self.phase("update"):
                found = dict(zip(parameters, gradients, strict=True))
                if self._pull:  # else -0 might become 0, and federated averaging's bits are kept
                    found = {
                        name: value + self._pull * (parameters[name].detach() - before[name])
                        for name, value in found.items()
                    }
                if self.params.clip_norm is not None:
                    found = in_own_memory(found)  # or what two of them share would be clipped twice
                    for name, parameter in parameters.items():
                        parameter.grad = found[name]
                    nn.utils.clip_grad_norm_(parameters.values(), self.params.clip_norm)
                for name, parameter in parameters.items():
                    take_step(parameter, found[name], kept[name], self.rate(ask), self.params)
            total, rows = total + loss * len(index), rows + len(index)
        upload = modules.on_host({f"gradient/{name}": before[name] - parameters[name] for name in parameters})
        return upload | {"loss": np.asarray(total / rows)}

    def rate(self, ask: TrainOn) -> float:
        """Return the learning rate of the round."""
        return self.params.rate(ask.stamp.round, self._rounds)

    def state(self) -> State:
        """Return what lots and noise follow from, if any, and releases.

        Batches follow from the round, the model from the ask.
        """
        return {} if self._private is None else self._private.state()

    def restore(self, state: State) -> None:
        """Take up what `state` returned."""
        if self._private is not None:
            self._private.restore(state)


@dataclass(frozen=True)
class LocalWork:
    """The work of one silo in one round; its result is what the silo uploads."""

    silo: Client
    ask: TrainOn
    batches: Batches
    least: int = LEAST

    @property
    def key(self) -> Hashable | None:
        """Equal for silos with the same model and batches of the same shapes; None for a model that is not stacked."""
        rows, stacked, lengths = self.silo.rows, self.silo.stacked, tuple(map(len, self.batches))
        if not isinstance(rows.x, Tensor) or rows.varied or not stacked.small:
            return None
        if stacked.refuses(lengths, rows.x, rows.y):
            return None
        shapes = tuple(rows.x.shape[1:]), tuple(rows.y.shape[1:]), rows.y.dtype
        return id(stacked), id(self.silo.params), id(self.ask.parameters), self.ask.stamp, lengths, *shapes

    def alone(self) -> Upload:
        """Return the upload by the silo's own model."""
        return self.silo.alone(self.ask, self.batches)

    def together(self, works: Sequence[LocalWork]) -> Sequence[Upload]:
        """Return the uploads of silos with this key, stepped together."""
        return _Together([(work.silo, work.batches) for work in works], self.ask).uploads()


class _Together:
    """Silos of one key in one round."""

    def __init__(self, silos: Sequence[tuple[Client, Batches]], ask: TrainOn) -> None:
        self._silos, self._ask, first = silos, ask, silos[0][0]
        self._phase, self._stacked, self._params, self._rate = first.phase, first.stacked, first.params, first.rate(ask)

    def uploads(self) -> list[Upload]:
        """Return what each silo uploads."""
        trained, buffers = self._stacked.load(self._ask.parameters)
        uploads = self._epochs(trained) if isinstance(self._params, Epochs) else self._gradients(trained)
        return [upload | {f"buffer/{name}": value for name, value in buffers.items()} for upload in uploads]

    def _gradients(self, trained: Stack) -> list[Upload]:
        ((x, y),) = self._steps()
        with self._phase("local_backward"):
            gradients, losses = self._stacked.gradients(trained, x, y, common=True)
        each = zip(self._silos, _apart(gradients), losses.tolist(), y, strict=True)
        return [silo.weighted(found, loss, targets) for (silo, _), found, loss, targets in each]

    def _epochs(self, trained: Stack) -> list[Upload]:
        params, rows = self._params, sum(map(len, self._silos[0][1]))
        pull = params.pull if isinstance(params, Epochs) else 0.0
        total = torch.zeros(len(self._silos), dtype=torch.float64)
        sgd = StackedSGD(trained, self._rate, params.momentum, params.weight_decay, params.clip_norm)
        for x, y in self._steps():
            with self._phase("local_backward"):
                gradients, losses = self._stacked.gradients(sgd.at or trained, x, y, common=not sgd.at)
            with self._phase("update"):
                for name, value in sgd.at.items() if pull else ():
                    gradients[name].add_(value - trained[name], alpha=pull)
                sgd.step(gradients)
            total += losses.cpu().double() * x.shape[1]
        with self._phase("update"):
            differences = _apart(sgd.differences())
        mean = zip(differences, (total / rows).numpy(), strict=True)
        return [{f"gradient/{name}": one for name, one in found.items()} | {"loss": loss} for found, loss in mean]

    def _steps(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs and targets of each step, [silos, rows, ...]."""
        silo, batches = self._silos[0]
        lengths = list(map(len, batches))
        numbers = len(self._silos) * lengths[0] * math.prod(silo.rows.x.shape[1:])
        at_once = max(1, MOST_NUMBERS // max(1, numbers))
        for start in range(0, len(lengths), at_once):
            some = slice(start, start + at_once)
            parts = [silo.rows.rows(np.concatenate(batches[some])) for silo, batches in self._silos]
            x, y = (torch.stack(each) for each in zip(*parts, strict=True))
            for step in zip(*(torch.split(each, lengths[some], dim=1) for each in (x, y)), strict=True):
                self._stacked.check(*step)
                yield step


def _apart(stack: Stack) -> list[dict[str, Array]]:
    """Return each silo's tensors of a stack, as arrays; a number is an array too."""
    arrays = {name: value.cpu().numpy() for name, value in stack.items()}
    silos = len(next(iter(arrays.values())))
    return [{name: value[silo, ...] for name, value in arrays.items()} for silo in range(silos)]


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
