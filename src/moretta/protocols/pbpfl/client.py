"""A silo of PBPFL: trains on the noisy model, exactly."""

from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moretta.contract.messages import Message
from moretta.contract.roles import Answering, InSteps, Phase, State, no_phase
from moretta.errors import MisuseError, PeerError
from moretta.protocols.common import modules
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.losses import Loss, chances
from moretta.protocols.common.scoring import Question
from moretta.protocols.pbpfl import ratios, softmax, terms
from moretta.protocols.pbpfl.head import Head
from moretta.protocols.pbpfl.messages import BlindedSoftmax, Predictions, Softmax, TrainOn
from moretta.protocols.pbpfl.ratios import Whole
from moretta.protocols.pbpfl.work import BackwardWork, Forwarded, ForwardWork, NoisyModel, TermGradients
from moretta.secure_aggregation.keyed_sums import Contributor
from moretta.secure_aggregation.keystream import SecretRoot, digest_of
from moretta.secure_aggregation.sums import Query, query_of


@dataclass(frozen=True)
class _Waiting:
    """A batch whose predictions await the server's answer. parts, direction: as in `TrainOn`. lambdas: of ratios."""

    predicted: Predictions
    parts: NDArray[np.int64]
    direction: NDArray[np.float64]
    batch: Forwarded
    asked: Query
    lambdas: Whole | None = field(default=None, repr=False)


class Client:
    """Answers `TrainOn` with the gradients of its scalars, through the secure sum.

    Under cross-entropy it answers `TrainOn` with its noisy predictions, and `Softmax` with the gradients.

    Args:
        model: Never written to; one object for all silos that may be computed together.
        head: The model's last linear layer.
        variant: The only accepted form of the softmax, "probabilities" or "paper".
        root: Of the lambdas that blind its ratios; with None it sends outputs.
    """

    def __init__(
        self,
        loss: Loss,
        model: nn.Module,
        head: Head,
        rows: SiloRows,
        contributor: Contributor,
        variant: str = "probabilities",
        root: SecretRoot | None = None,
    ) -> None:
        self.phase: Phase = no_phase
        self._variant, self._root = variant, root
        self._loss, self._head, self._rows, self._contributor = loss, head, rows, contributor
        self._noisy = NoisyModel(model, head, rows)
        self._shape = model.get_parameter(head.weight).shape
        self._waiting: _Waiting | None = None

    @InSteps
    def answer(self, message: Message) -> Answering:
        """Answer one message; other silos' passes through the model may be computed together with this silo's."""
        match message:
            case TrainOn():
                return (yield from self._train(message))
            case Softmax() if self._root is None:
                return (yield from self._after_softmax(message, self._awaited(message)))
            case BlindedSoftmax(stamp=stamp, k=k, encoding=encoding):
                waiting = self._awaited(message)
                if waiting.lambdas is None:
                    raise MisuseError(f"{stamp}: the blinded softmax came without the ratios it answers")
                y = ratios.unblinded(message, waiting.lambdas)
                answer = Softmax(stamp=stamp, y=y, k=k, encoding=encoding)
                return (yield from self._after_softmax(answer, waiting))
        model = self._noisy.own if isinstance(message, Question) else self._noisy.built
        with self.phase("aggregation"):
            return self._rows.answer(message, self._contributor, model)

    def _train(self, ask: TrainOn) -> Answering:
        about = query_of(ask, *self._rows.agreed, whole=self._rows.batches.whole)
        # The server sees predictions even if no sum is opened. So the silo records at once which ask it answers.
        self._contributor.check(ask.stamp, about, answers=self._loss.name != "mse")
        index = self._rows.batches.of_round(*ask.stamp.drawn)
        batch: Forwarded = yield ForwardWork(self._noisy, self._rows, index, ask, self.phase)
        if self._loss.name == "mse":
            targets, own = batch.targets, list[Tensor]()
            if targets.ndim == 3:  # masks
                own = [targets.sum(dim=2, keepdim=True).expand_as(targets)]
                targets = chances(targets)
            own = [self._head.rows(tensor.flatten(1)) for tensor in (targets, *own)]
            result = yield BackwardWork(batch, terms.squared_error, own, self.phase)
            return self._upload(ask, result, batch, about)
        z = batch.at.outputs - batch.at.outputs.amax(dim=1, keepdim=True)
        result = Predictions(stamp=ask.stamp, **modules.on_host({"z": z, "alpha": batch.at.alpha[:, 0]}))
        waiting = partial(_Waiting, result, ask.parts, ask.direction, batch, about)
        if self._root is None:
            self._waiting = waiting()
            return result
        # Other outputs have other lambdas, even under one stamp. Otherwise differences of answers would have none.
        stamp, seen = ask.stamp, digest_of({"z": result.z})
        stream = self._root.stream("lambda", stamp.run, *stamp.drawn, "attempt", stamp.attempt, seen)
        sent, lambdas = ratios.blinded(stamp, result.z, result.alpha, stream)
        self._waiting = waiting(lambdas)
        return sent

    def _awaited(self, ask: Softmax | BlindedSoftmax) -> _Waiting:
        """Return the waiting batch, and forget it: a server that could try again would learn from refusals."""
        waiting, self._waiting = self._waiting, None
        if waiting is None or waiting.predicted.stamp != ask.stamp:
            raise MisuseError(f"{ask.stamp}: the softmax came without the predictions it answers")
        return waiting

    def _after_softmax(self, ask: Softmax, waiting: _Waiting) -> Answering:
        batch, outputs = waiting.batch, waiting.batch.at.outputs
        if ask.y.shape != tuple(outputs.shape) or ask.k.shape[1] not in (0, len(batch.at.spread)):
            raise PeerError(f"{ask.stamp}: expected a softmax for {list(outputs.shape)}, got {list(ask.y.shape)}")
        softmax.check_answer(ask, self._variant)
        softmax.check_offset(ask, waiting.predicted, waiting.parts, waiting.direction)
        targets = batch.targets  # masks, in a run that hides nothing (`refuse_dense`), become a row per position
        targets = targets if targets.ndim < 3 else self._head.rows(targets.flatten(1))
        u = self._loss.weighted_targets(targets, outputs)
        y, k = torch.from_numpy(ask.y).to(outputs), torch.from_numpy(ask.k).to(outputs)
        form = partial(terms.cross_entropy, parts=batch.parts)
        gradients = yield BackwardWork(batch, form, [u, y, k], self.phase)
        # If one silo had another answer in a second sum over the same silos, the sums would differ by its gradients.
        about = replace(waiting.asked, own=digest_of({"y": ask.y, "k": ask.k}))
        return self._upload(ask, gradients, batch, about)

    def _upload(self, ask: TrainOn | Softmax, gradients: TermGradients, batch: Forwarded, about: Query) -> Message:
        terms_found = gradients.terms
        with self.phase("aggregation"):
            sent = {"scalars": terms_found.values}
            if terms_found.alpha_h is not None:
                sent["alpha_h"] = terms_found.alpha_h
            for name, values in gradients.trunk.items():
                sent |= {f"{prefix}/{name}": value for prefix, value in zip(terms_found.prefixes, values, strict=True)}
            for name, blocks in ((self._head.weight, terms_found.weight), (self._head.bias or "", terms_found.bias)):
                for prefix, block in blocks.items():
                    value = self._head.like(block, self._shape) if name == self._head.weight else block
                    path = f"{prefix}/{name}"  # a tied head has a part in the trunk already
                    sent[path] = sent[path] + value if path in sent else value
            sent |= {f"buffer/{name}": buffer.clone() for name, buffer in self._noisy.buffers.items()}
            upload = modules.on_host(sent)
            if self._loss.class_weights:
                upload["density"] = np.asarray(self._loss.density(batch.targets))
            return self._contributor.upload(ask.stamp, upload, len(batch.targets), ask.encoding, asked=about)

    def state(self) -> State:
        """Return nothing: batches follow from the round, and the model comes with each ask."""
        return {}

    def restore(self, state: State) -> None:
        """Restore nothing."""
