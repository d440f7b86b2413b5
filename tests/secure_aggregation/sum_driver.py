"""A server's exchange played against silos in memory, every message through the codec as on a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moretta.codec import Codec
from moretta.errors import MorettaError
from moretta.protocol import Aborted, Exchange, Message, Missing, Reason, Replies, Stamp, message
from moretta.secure_aggregation import MESSAGES, Sum, aggregator, contributor

NOW = Stamp("test", 1, 0)


@message("test/train")
class Train(Message):
    encoding: Mapping[str, int]


CODEC = Codec((*MESSAGES, Train))
Answer = Callable[[Message], Any]


def play(exchange: Exchange[Any], silos: Mapping[str, Answer], seen: list[bytes] | None = None) -> Any:
    """Drive an exchange to its end; a silo that raises or sends what was not asked for is missing, by reason."""
    replies = None
    while True:
        try:
            ask = exchange.send(replies)  # type: ignore[arg-type]
        except StopIteration as end:
            return end.value
        answers, missing = {}, {}
        for name, asked in ask.messages.items():
            try:
                data = silos[name](CODEC.decode(CODEC.encode(asked)))
                data = data if isinstance(data, bytes) else CODEC.encode(data)
            except MorettaError as error:
                missing[name] = Missing(Reason.REFUSED, str(error))
                continue
            if seen is not None:
                seen.append(data)
            try:
                reply = CODEC.decode(data)
                if not isinstance(reply, ask.reply):
                    raise MorettaError("another message")
                ask.check(reply)
                answers[name] = reply
            except MorettaError as error:
                missing[name] = Missing(Reason.MALFORMED, str(error))
        replies = Replies(answers, missing)


class Silo:
    """Answers with its contributor; `Train` with its tensors and weight."""

    def __init__(self, scheme: str, name: str, bits: int, tensors: Mapping[str, Any], weight: int = 1) -> None:
        self.contributor = contributor(scheme, name, bits)
        self.tensors, self.weight = {key: np.asarray(value) for key, value in tensors.items()}, weight

    def __call__(self, asked: Message) -> Any:
        if isinstance(asked, Train):
            return self.contributor.upload(asked.stamp, self.tensors, self.weight, asked.encoding)
        return self.contributor.answer(asked)


def whole_sum(
    silos: Mapping[str, Silo],
    scheme: str,
    bits: int = 64,
    limit: float = 100.0,
    replaced: Mapping[str, Answer] | None = None,
    seen: list[bytes] | None = None,
) -> Sum | Aborted:
    """Set up the cohort, then sum its tensors. replaced: silos that answer `Train` in their own way."""
    server = aggregator(scheme, bits)
    assert play(server.setup(NOW, list(silos)), silos) is None
    shapes = {name: value.shape for name, value in next(iter(silos.values())).tensors.items()}
    wanted = server.want(shapes, dict.fromkeys(shapes, limit), sum(silo.weight for silo in silos.values()))
    ask = Train(stamp=NOW, encoding=wanted.fraction_bits)
    return play(server.sum(ask, wanted), {**silos, **(replaced or {})}, seen)
