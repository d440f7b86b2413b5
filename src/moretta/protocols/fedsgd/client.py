"""The silos' roles: FedSGD's client, FedAvg's and FedProx's, and the lone one.

A silo computes the gradient of a batch, or under federated averaging takes epochs of its own. Silos with equal batches
are stepped together where that is exact (`moretta.protocols.common.stacked`).
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moretta.contract.messages import Array, Message, Tensors
from moretta.contract.roles import LEAST, Answering, InSteps, Phase, State, no_phase, over, under
from moretta.engines.checkpoint import HalfDone
from moretta.errors import RangeError
from moretta.protocols.common import modules
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.modules import take_step
from moretta.protocols.common.noise import Sums
from moretta.protocols.common.own_loss import Function
from moretta.protocols.common.passes import WHOLE
from moretta.protocols.common.scoring import Question
from moretta.protocols.common.stacked import Stack, Stacked, clip_each, in_own_memory
from moretta.protocols.common.statistics import without_noise
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd.messages import Show, Shown, Step, Stepped, TrainOn
from moretta.protocols.fedsgd.own_loop import fitted
from moretta.protocols.fedsgd.params import Epochs
from moretta.protocols.fedsgd.private import PrivateGradient, PrivateUpdate
from moretta.secure_aggregation.keyed_sums import Contributor
from moretta.secure_aggregation.keystream import digest_of
from moretta.secure_aggregation.sums import query_of

log = logging.getLogger("moretta")

MOST_NUMBERS = 1 << 22  # of the inputs that a stack gathers at once

Upload = dict[str, Array]
"""A silo's upload: ``gradient/<name>``, ``loss`` and ``buffer/<name>``, with class weights FedSGD's ``density``."""
Batches = Sequence[NDArray[np.int64]]
"""The indices of the rows of each step, in order."""


class Client:
    """Answers `TrainOn` with the gradient of its batch, or under `Epochs` with the difference of its epochs.

    Args:
        model: Never written to; the silo copies it at the first use of its own.
        rounds: Of the whole run.
        private: Computes the gradient, or clips the update, under differential privacy.
        stacked: The same model, one object for all silos that may be stepped together.
        half_done: Saves unfinished epochs to a file; such a silo is never stepped together with others.
        fit: Trains instead of its epochs (`moretta.protocols.fedsgd.own_loop`).

    Raises:
        ParameterError: With noise on gradients, torch cannot compute each row's own gradient in this model. With noise
            on updates, the model has running statistics.
    """

    def __init__(
        self,
        params: Training,
        model: nn.Module,
        rows: SiloRows,
        contributor: Contributor,
        rounds: int,
        private: PrivateGradient | PrivateUpdate | None = None,
        stacked: Stacked | None = None,
        half_done: HalfDone | None = None,
        fit: Function | None = None,
    ) -> None:
        self.phase: Phase = no_phase
        self.half_done = half_done or HalfDone()
        self.params, self.rows, self.loss, self._rounds = params, rows, params.loss_function, rounds
        self.stacked, self._given = stacked or Stacked(model, self.loss), model
        self._contributor, self._private = contributor, private
        self._pull = params.pull if isinstance(params, Epochs) else 0.0
        self._fit = fit
        if private is not None:
            private.check(self.model)

    @InSteps
    def answer(self, message: Message) -> Answering:
        """Answer one message; other silos' work may run together with this silo's."""
        if isinstance(message, TrainOn):
            if isinstance(self._private, PrivateGradient):
                answer = self._train_in_private(message, self._private)
            else:
                answer = yield from self._train(message)
        else:
            model = self.model if isinstance(message, Question) else self._given
            with self.phase("aggregation"):
                answer = self.rows.answer(message, self._contributor, model)
        return answer

    def privacy(self) -> Mapping[str, float | str]:
        """Return the privacy of the silo's own rows, by its own count of releases; empty without noise."""
        if self._private is None:
            return {}
        noise = self._private.noise
        return noise.facts(without_noise(self.rows.answers.names(noise.run)))

    def lot(self, ask: TrainOn) -> NDArray[np.int64]:
        """Return the indices of the rows that an ask draws, for an audit's scorer."""
        if not isinstance(self._private, PrivateGradient):
            return self.rows.batches.of_round(ask.stamp.round)
        return self._private.noise.rows_of_lot(*self._private.purpose(self.at(ask), ask.stamp))

    def _train(self, ask: TrainOn) -> Answering:
        drawn, epochs = self.rows.batches, self.params.local_epochs if isinstance(self.params, Epochs) else 0
        whole = self._private is None and (drawn.whole or epochs > 0)  # under noise every take differs, and counts
        about, at = query_of(ask, *self.rows.agreed, whole=whole), self.at(ask)
        if self._private is not None:
            about = Sums.of(self._contributor, about).asked
        self._contributor.check(ask.stamp, about)
        if self._fit is not None:
            upload, rows = self._by_own_loop(self._fit, ask)
        else:
            if epochs:
                first, rows = (ask.stamp.round - 1) * epochs, drawn.rows  # an epoch's number counts all batches
                batches = [index for epoch in range(first, first + epochs) for index in drawn.of_epoch(epoch)]
            else:
                batches = [drawn.of_round(*ask.stamp.drawn)]
                rows = len(batches[0])
            upload = yield LocalWork(self, ask, batches)
        with self.phase("aggregation"):
            if self._private is not None:
                update = {name: value for name, value in upload.items() if name.startswith("gradient/")}
                sums, follows = Sums(self._contributor, about), (self.rows.of.digest, digest_of(at))
                return self._private.noise.upload_update(ask.stamp, update, ask.encoding, sums, *follows)
            return self._contributor.upload(ask.stamp, upload, rows, ask.encoding, asked=about)

    def _by_own_loop(self, fit: Function, ask: TrainOn) -> tuple[Upload, int]:
        modules.load(self.model, self.at(ask))
        with self.rows.randomness(*ask.stamp.drawn), self.phase("local_backward"):
            x, y = self.rows.rows(np.arange(self.rows.batches.rows))
            try:
                return fitted(fit, self.model, x, y, self.loss, ask.stamp.round, self._pull)
            except RangeError as error:
                if self._private is None:
                    raise
                log.warning("%s; its update counts as 0, so that nobody learns that", error)
                return {f"gradient/{name}": np.zeros(value.shape) for name, value in self.trained.items()}, len(y)

    def _train_in_private(self, ask: TrainOn, private: PrivateGradient) -> Message:
        """Upload the noised sum alone: no loss, no number of rows, no buffers. Every take counts, also of all rows."""
        at = self.at(ask)
        modules.load(self.model, at)
        sums = Sums.of(self._contributor, query_of(ask, *self.rows.agreed))
        self._contributor.check(ask.stamp, sums.asked)
        with self.phase("local_backward"):
            upload = private.upload(self.model, at, ask.stamp, ask.encoding, sums)
        with self.phase("aggregation"):
            return private.noise.upload(ask.stamp, upload, ask.encoding, sums)

    def at(self, ask: TrainOn) -> Tensors:
        """Return the whole model of an ask. Raises as `Frozen.beside`."""
        return self.rows.frozen.beside(ask.parameters)

    @cached_property
    def model(self) -> nn.Module:
        """The silo's own copy of the model."""
        return copy.deepcopy(self._given).train()

    @cached_property
    def trained(self) -> dict[str, nn.Parameter]:
        """The trained parameters of that copy."""
        return modules.trainable(self.model)

    @cached_property
    def buffers(self) -> dict[str, Tensor]:
        """The running statistics of that copy."""
        return modules.running_buffers(self.model)

    def weighted(self, gradients: dict[str, Array], loss: float, targets: Tensor) -> Upload:
        """Return the upload of a batch's gradient and mean loss, with class weights each times D_k / N_k."""
        upload = over("gradient/", gradients) | {"loss": np.asarray(loss)}
        if self.loss.class_weights:  # the sum weighs by N_k, and N_k times the density is D_k
            density = self.loss.density(targets)
            upload = {name: value * density for name, value in upload.items()} | {"density": np.asarray(density)}
        return upload

    def epochs(self, ask: TrainOn, batches: Batches) -> Upload:
        """Take epochs of SGD; return W - W_k and the steps' mean loss, without the pull towards W."""
        parameters, steps, total, rows = self.trained, 0, 0.0, 0
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        kept: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
        if self.half_done.keeps:
            model, own = digest_of(self.at(ask)), self.rows.of.digest
            steps, total, rows = self._take_up(self.half_done.begin(ask.stamp.run, *ask.stamp.drawn, model, own), kept)
        for index in batches[steps:]:
            gradients, loss = modules.gradient(
                self.model, parameters, self.loss, self.rows.rows(index), self.phase, self.rows.passes
            )
            with self.phase("update"):
                if self._pull:  # adding 0 could turn -0.0 into 0.0, and change FedAvg's bits
                    gradients = {
                        name: value + self._pull * (parameters[name].detach() - before[name])
                        for name, value in gradients.items()
                    }
                if self.params.clip_norm is not None:
                    gradients = in_own_memory(gradients)  # tensors with shared memory would be clipped twice
                    for name, parameter in parameters.items():
                        parameter.grad = gradients[name]
                    nn.utils.clip_grad_norm_(parameters.values(), self.params.clip_norm)
                for name, parameter in parameters.items():
                    take_step(parameter, gradients[name], kept[name], self.rate(ask), self.params)
            steps, total, rows = steps + 1, total + loss * len(index), rows + len(index)
            if steps < len(batches):  # after the last one the upload follows at once
                self.half_done.keep(partial(self._halfway, steps, total, rows, kept))
        upload = modules.on_host({f"gradient/{name}": before[name] - parameters[name] for name in parameters})
        return upload | {"loss": np.asarray(total / rows)}

    def _halfway(self, steps: int, loss: float, rows: int, kept: Mapping[str, Mapping[str, Tensor]]) -> State:
        model = over("model/", modules.arrays(self.model))
        optimizer = {f"kept/{key}/{name}": value for name, some in kept.items() for key, value in some.items()}
        random = {f"random/{place}": generator.get_state() for place, generator in enumerate(self.rows.generators)}
        tensors = {name: tensor.cpu().numpy() for name, tensor in {**optimizer, **random}.items()}
        return {**model, **tensors, "steps": steps, "loss": loss, "rows": rows}

    def _take_up(self, done: State, kept: Mapping[str, dict[str, Tensor]]) -> tuple[int, float, int]:
        """Restore the state of `_halfway`, if it was saved; return the steps taken, their loss and rows."""
        if not done:
            return 0, 0.0, 0
        modules.load(self.model, under("model/", done))
        for key, value in under("kept/", done).items():
            slot, _, name = key.partition("/")
            kept[name][slot] = torch.tensor(value, device=self.rows.device)
        for place, value in under("random/", done).items():
            self.rows.generators[int(place)].set_state(torch.tensor(value))
        return done["steps"], done["loss"], done["rows"]

    def rate(self, ask: TrainOn) -> float:
        """Return the learning rate of the round."""
        return self.params.rate(ask.stamp.round, self._rounds)

    def state(self) -> State:
        """Return the state of noise, lots and releases; empty without noise. A round's number fixes its batches."""
        return {} if self._private is None else self._private.noise.state()

    def restore(self, state: State) -> None:
        """Restore what `state` returned."""
        if self._private is not None:
            self._private.noise.restore(state)


@dataclass(frozen=True)
class LocalWork:
    """The work of one silo in one round; its result is the silo's upload."""

    silo: Client
    ask: TrainOn
    batches: Batches
    least: int = LEAST

    @property
    def key(self) -> Hashable | None:
        """Equal for silos with the same model and batches of the same shapes; None for a model that is not stacked."""
        rows = self.silo.rows
        if not isinstance(rows.x, Tensor) or rows.augment or rows.passes != WHOLE or self.silo.half_done.keeps:
            return None
        key = self.silo.stacked.key(tuple(map(len, self.batches)), rows.x, rows.y)
        return key and (id(self.silo.params), id(self.ask.parameters), self.ask.stamp, *key)

    def alone(self) -> Upload:
        """Return the upload by the silo's own model."""
        silo = self.silo
        modules.load(silo.model, silo.at(self.ask))
        with silo.rows.randomness(*self.ask.stamp.drawn):
            if isinstance(silo.params, Epochs):
                upload = silo.epochs(self.ask, self.batches)
            else:
                batch, passes = silo.rows.rows(self.batches[0]), silo.rows.passes
                gradients, loss = modules.gradient(silo.model, silo.trained, silo.loss, batch, silo.phase, passes)
                upload = silo.weighted(modules.on_host(gradients), loss, batch[1])
        if silo.buffers:  # in one copy from a device
            upload |= modules.on_host({f"buffer/{name}": buffer.clone() for name, buffer in silo.buffers.items()})
        return upload

    def together(self, works: Sequence[LocalWork]) -> Sequence[Upload]:
        """Return the uploads of silos with this key, stepped together."""
        trained, buffers = self.silo.stacked.load(self.silo.at(self.ask))
        params = self.silo.params
        uploads = (
            self._epochs(works, trained, params) if isinstance(params, Epochs) else self._gradients(works, trained)
        )
        return [upload | over("buffer/", buffers) for upload in uploads]

    def _gradients(self, works: Sequence[LocalWork], trained: Stack) -> list[Upload]:
        ((x, y),) = self._steps(works)
        with self.silo.phase("local_backward"):
            gradients, losses = self.silo.stacked.gradients(trained, x, y, common=True)
        each = zip(works, _apart(gradients), losses.tolist(), y, strict=True)
        return [work.silo.weighted(gradients, loss, targets) for work, gradients, loss, targets in each]

    def _epochs(self, works: Sequence[LocalWork], trained: Stack, params: Epochs) -> list[Upload]:
        silo, rows, total = self.silo, sum(map(len, self.batches)), torch.zeros(len(works), dtype=torch.float64)
        at = {name: value.expand(len(works), *value.shape).clone() for name, value in trained.items()}
        kept: dict[str, dict[str, Tensor]] = {name: {} for name in at}
        for x, y in self._steps(works):
            with silo.phase("local_backward"):
                gradients, losses = silo.stacked.gradients(at, x, y, common=False)
            with silo.phase("update"):
                for name, value in at.items() if params.pull else ():
                    gradients[name].add_(value - trained[name], alpha=params.pull)
                if params.clip_norm is not None:
                    clip_each(gradients, params.clip_norm)
                for name, value in at.items():
                    take_step(value, gradients[name], kept[name], silo.rate(self.ask), params)
            total += losses.cpu().double() * x.shape[1]
        with silo.phase("update"):
            differences = _apart({name: trained[name] - value for name, value in at.items()})
        mean = zip(differences, (total / rows).numpy(), strict=True)
        return [over("gradient/", gradients) | {"loss": loss} for gradients, loss in mean]

    def _steps(self, works: Sequence[LocalWork]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs and targets of each step, [silos, rows, ...]."""
        lengths = list(map(len, self.batches))
        numbers = len(works) * lengths[0] * math.prod(self.silo.rows.x.shape[1:])
        at_once = max(1, MOST_NUMBERS // max(1, numbers))
        for start in range(0, len(lengths), at_once):
            some = slice(start, start + at_once)
            parts = [work.silo.rows.rows(np.concatenate(work.batches[some])) for work in works]
            x, y = (torch.stack(each) for each in zip(*parts, strict=True))
            for step in zip(*(torch.split(each, lengths[some], dim=1) for each in (x, y)), strict=True):
                self.silo.stacked.check(*step)
                yield step


def _apart(stack: Stack) -> list[dict[str, Array]]:
    """Return each silo's tensors of a stack, as arrays; a number is an array too."""
    arrays = {name: value.cpu().numpy() for name, value in stack.items()}
    silos = len(next(iter(arrays.values())))
    return [{name: value[silo, ...] for name, value in arrays.items()} for silo in range(silos)]


class LoneClient:
    """A silo that trains alone, on the batches and from the start that FedSGD would give it."""

    def __init__(
        self, params: Training, model: nn.Module, rows: SiloRows, contributor: Contributor, rounds: int
    ) -> None:
        self.phase: Phase = no_phase
        self._rows, self._contributor = rows, contributor
        self._model = copy.deepcopy(model).train()
        self._loss = params.loss_function
        self._optimizer = modules.Optimizer(self._model, params, rounds)
        self._last = (0, 0.0, 0)  # the last step: its round, loss and rows

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
        trained = modules.trainable(self._model)
        with self._rows.randomness(number):
            batch, passes = self._rows.batch(number), self._rows.passes
            gradients, loss = modules.gradient(self._model, trained, self._loss, batch, self.phase, passes)
        with self.phase("update"):
            self._optimizer.step(modules.on_host({name: value.double() for name, value in gradients.items()}), number)
        self._last = number, loss, len(batch[0])

    def state(self) -> State:
        """Return model, optimizer and the last step."""
        last = np.array(self._last, dtype=np.float64)
        return {**over("model/", modules.arrays(self._model)), **self._optimizer.state(), "last": last}

    def restore(self, state: State) -> None:
        """Restore what `state` returned."""
        modules.load(self._model, under("model/", state))
        self._optimizer.restore(state)
        number, loss, rows = state["last"]
        self._last = int(number), float(loss), int(rows)
