"""Silos that sum a model and their server, all in one process, so that what each side does can be timed.

Seconds are of the processor: what else runs on the machine does not lengthen them.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moretta.contract.codec import Codec
from moretta.contract.messages import Message, Stamp, message
from moretta.contract.roles import Exchange, Missing, Reason, Replies
from moretta.secure_aggregation import shamir
from moretta.secure_aggregation.agreement import RUN_DIGEST, AdvertiseKey, PeerKeys
from moretta.secure_aggregation.cohort import Credentials, Origin, Rules
from moretta.secure_aggregation.identity import Identity, Roster
from moretta.secure_aggregation.schemes import MESSAGES, aggregator, contributor
from moretta.secure_aggregation.sums import Sum
from moretta.secure_aggregation.sums import query_of as about

CODEC = Codec(MESSAGES)
WEIGHT = 32


@message("benchmark/train")
class Train(Message):
    """Upload."""

    encoding: Mapping[str, int]


class Cohort:
    """Silos that sum `parameters` numbers, and their server, in this process. signed: with a roster."""

    def __init__(
        self, count: int, parameters: int, scheme: str = "pairwise", bits: int = 64, signed: bool = False
    ) -> None:
        self.names = [f"silo-{k:03}" for k in range(count)]
        self.tensors = {"model": np.random.default_rng(0).normal(size=parameters).astype("f4")}
        identities = {name: Identity(os.urandom(32)) for name in self.names}
        roster = Roster({name: identity.public_key for name, identity in identities.items()})
        rules = Rules(degree=count - 1, threshold=count * 2 // 3 + 1, roster=roster if signed else None)
        self._run, self._round = f"benchmark.{roster.digest[:RUN_DIGEST]}", 0
        self.server = aggregator(scheme, bits, rules)
        self.silos = {
            name: contributor(
                scheme, name, bits, rules, origin=Origin(Credentials(identities[name], roster) if signed else None)
            )
            for name in self.names
        }
        self.play(self.server.setup(self.now(), self.names))

    def now(self) -> Stamp:
        """Return the stamp of the next round."""
        self._round += 1
        return Stamp(self._run, self._round, 0)

    def set_up(self) -> tuple[float, float, float]:
        """Return the first silo's seconds of its advert, its agreement with all, and an upload, mostly of shares."""
        now, me = self.now(), self.silos[self.names[0]]
        began = time.process_time()
        first = me.answer(AdvertiseKey(stamp=now))
        advertised = time.process_time() - began
        adverts: dict[str, Any] = {
            name: silo.answer(AdvertiseKey(stamp=now)) for name, silo in self.silos.items() if silo is not me
        }
        adverts[self.names[0]] = first
        keys = {name: advert.public_key for name, advert in adverts.items()}
        signatures = {name: advert.signature for name, advert in adverts.items()}
        relayed = CODEC.encode(PeerKeys(stamp=now, keys=keys, signatures=signatures))
        began = time.process_time()
        me.answer(CODEC.decode(relayed))
        agreed = time.process_time() - began
        ask = self.ask()
        began = time.process_time()
        self.upload(ask)
        return advertised, agreed, time.process_time() - began

    def ask(self) -> Train:
        """Return the next round's ask."""
        shapes = {name: value.shape for name, value in self.tensors.items()}
        self.wanted = self.server.want(shapes, dict.fromkeys(shapes, 8.0), WEIGHT * len(self.names))
        return Train(stamp=self.now(), encoding=self.wanted.fraction_bits)

    def upload(self, ask: Train) -> Message:
        """Encode and mask the first silo's part of a sum."""
        return self.silos[self.names[0]].upload(ask.stamp, self.tensors, WEIGHT, ask.encoding, asked=about(ask))

    def sum(self, *lost: str) -> Mapping[tuple[str, str], float]:
        """Sum the uploads of all silos but the lost ones; return what `play` does."""
        shamir.weights_at_zero.cache_clear()  # they are kept from sum to sum; here each is the first
        total, spent = self.play(self.server.sum(self.ask(), self.wanted), lost)
        assert isinstance(total, Sum)
        assert len(total.silos) == len(self.names) - len(lost)
        return spent

    def play(self, exchange: Exchange[Any], lost: Sequence[str] = ()) -> tuple[Any, Mapping[tuple[str, str], float]]:
        """Drive an exchange; return its result, and seconds by "server" or "silos" and what was answered last."""
        spent, answered, replies = defaultdict[tuple[str, str], float](float), "nothing", None
        missing = dict.fromkeys(lost, Missing(Reason.DISCONNECTED, "lost"))

        def timed(who: str, work: Callable[..., Any], *arguments: Any) -> Any:
            began = time.process_time()
            try:
                return work(*arguments)
            finally:
                spent[who, answered] += time.process_time() - began

        while True:
            try:
                ask = timed("server", exchange.send, replies)
            except StopIteration as end:
                return end.value, spent
            answered, answers = ask.reply.__name__, {}
            for name, asked in ask.messages.items():
                if name not in lost:
                    answers[name] = timed("silos", self._answer, name, asked)
                    timed("server", ask.check, name, answers[name])
            replies = Replies(answers, {name: why for name, why in missing.items() if name in ask.messages})

    def _answer(self, name: str, asked: Message) -> Message | None:
        if isinstance(asked, Train):
            return self.silos[name].upload(asked.stamp, self.tensors, WEIGHT, asked.encoding, asked=about(asked))
        return self.silos[name].answer(asked)


def after_uploads(spent: Mapping[tuple[str, str], float]) -> Mapping[str, float]:
    """Return seconds by "server" and "silos" from when all uploads are there."""
    found = defaultdict[str, float](float)
    for (who, answered), seconds in spent.items():
        if answered != "nothing" and (who, answered) != ("silos", "MaskedUpload"):
            found[who] += seconds
    return found
