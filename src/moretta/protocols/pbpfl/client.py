"""A silo of PBPFL: trains on the noisy model, exactly."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Phase, State, no_phase
from moretta.errors import MisuseError, PeerError
from moretta.protocols.common import modules
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.losses import Loss
from moretta.protocols.pbpfl import softmax, terms
from moretta.protocols.pbpfl.messages import Predictions, Softmax, TrainOn
from moretta.protocols.pbpfl.scales import Head
from moretta.protocols.pbpfl.terms import NoisyHead, Terms
from moretta.protocols.pbpfl.trunk import Trunk
from moretta.secure_aggregation.asked import Asked, asked
from moretta.secure_aggregation.keystream import digest_of
from moretta.secure_aggregation.sums import Contributor


@dataclass(frozen=True)
class _Forwarded:
    """A batch between the silo's predictions and the server's answer."""

    stamp: Stamp
    at: NoisyHead
    targets: Tensor
    parts: Tensor
    asked: Asked


class Client:
    """Answers `TrainOn` with the gradients of its scalars, through the secure sum.

    Under cross-entropy it answers `TrainOn` with its noisy predictions, and `Softmax` with the gradients.
    head: the model's last linear layer. variant: the only form of the softmax that it accepts.
    """

    def __init__(
        self,
        loss: Loss,
        model: nn.Module,
        head: Head,
        rows: SiloRows,
        contributor: Contributor,
        variant: str = "probabilities",
    ) -> None:
        self.phase: Phase = no_phase
        self._variant = variant
        self._loss, self._head, self._rows, self._contributor = loss, head, rows, contributor
        self._model = copy.deepcopy(model).train()
        self._buffers = modules.running_buffers(self._model)
        self._trunk = Trunk(self._model, head)
        self._forwarded: _Forwarded | None = None

    def answer(self, message: Message) -> Message:
        """Answer one message."""
        match message:
            case TrainOn():
                forwarded = self._forward(message)
                if self._loss.name == "mse":
                    with self.phase("local_backward"):
                        found = terms.squared_error(forwarded.at, forwarded.targets)
                    return self._upload(message.stamp, found, message.encoding, forwarded)
                self._forwarded = forwarded
                return _predictions(message.stamp, forwarded.at)
            case Softmax():
                return self._after_softmax(message)
        return self._rows.answer(message, self._contributor, self._model)

    def _forward(self, ask: TrainOn) -> _Forwarded:
        about = asked(ask, *self._rows.agreed, whole=self._rows.batches.whole)
        # Without an exchange the ask is bound with the sum. Predictions are seen at once, even if no sum is opened.
        self._contributor.check(ask.stamp, about, answers=self._loss.name != "mse")
        modules.load(self._model, ask.parameters)
        weight = self._model.get_parameter(self._head.weight).detach()
        if len(ask.parts) != len(weight):
            raise PeerError(f"{ask.stamp}: expected parts of {len(weight)} outputs, got {len(ask.parts)}")
        parts = torch.from_numpy(ask.parts).to(weight.device)
        spread = terms.selector(parts, torch.from_numpy(ask.direction).to(weight))
        with self.phase("local_forward"), self._rows.randomness(*ask.stamp.drawn):
            inputs, targets = self._rows.batch(*ask.stamp.drawn)
            h, outputs = self._trunk.forward(inputs)
        at = NoisyHead(h, outputs, weight, self._head.bias is not None, spread)
        return _Forwarded(ask.stamp, at, targets, parts, about)

    def _after_softmax(self, ask: Softmax) -> Message:
        batch, self._forwarded = self._forwarded, None
        if batch is None or batch.stamp != ask.stamp:
            raise MisuseError(f"{ask.stamp}: the softmax came without the predictions it answers")
        outputs = batch.at.outputs
        if ask.y.shape != tuple(outputs.shape) or ask.k.shape[1] not in (0, len(batch.at.spread)):
            raise PeerError(f"{ask.stamp}: expected a softmax for {list(outputs.shape)}, got {list(ask.y.shape)}")
        softmax.check_answer(ask, self._variant)
        with self.phase("local_backward"):
            u = self._loss.weighted_targets(batch.targets, outputs)
            y, k = torch.from_numpy(ask.y).to(outputs), torch.from_numpy(ask.k).to(outputs)
            found = terms.cross_entropy(batch.at, u, y, k, batch.parts)
        # Two sums over one set, answered differently to one silo, would differ by its own gradients.
        own = digest_of({"y": ask.y, "k": ask.k})
        return self._upload(ask.stamp, found, ask.encoding, replace(batch, asked=replace(batch.asked, own=own)))

    def _upload(self, stamp: Stamp, found: Terms, encoding: Mapping[str, int], batch: _Forwarded) -> Message:
        with self.phase("local_backward"):
            trunk = self._trunk.backward(found.cotangents)
        with self.phase("aggregation"):
            sent = {"scalars": found.values}
            if found.alpha_h is not None:
                sent["alpha_h"] = found.alpha_h
            for name, values in trunk.items():
                sent |= {f"{prefix}/{name}": value for prefix, value in zip(found.prefixes, values, strict=True)}
            for name, blocks in ((self._head.weight, found.weight), (self._head.bias or "", found.bias)):
                for prefix, value in blocks.items():
                    path = f"{prefix}/{name}"  # a tied head has a part in the trunk already
                    sent[path] = sent[path] + value if path in sent else value
            sent |= {f"buffer/{name}": buffer.clone() for name, buffer in self._buffers.items()}
            upload = modules.on_host(sent)
            if self._loss.weighs_rows:
                upload["density"] = np.asarray(self._loss.density(batch.targets))
            return self._contributor.upload(stamp, upload, len(batch.targets), encoding, asked=batch.asked)

    def state(self) -> State:
        """Return nothing: a client's batches are a function of the round, its model comes with each ask."""
        return {}

    def restore(self, state: State) -> None:
        """Take up nothing."""


def _predictions(stamp: Stamp, at: NoisyHead) -> Predictions:
    z = at.outputs - at.outputs.amax(dim=1, keepdim=True)
    return Predictions(stamp=stamp, **modules.on_host({"z": z, "alpha": at.alpha[:, 0]}))
