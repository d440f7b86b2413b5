"""The interface between an engine and a run's driver: an engine delivers a server's asks, and decides nothing."""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from moretta.contract.codec import size
from moretta.contract.messages import Message, Spent
from moretta.contract.roles import Ask, Missing, Reason, Replies
from moretta.engines import mapped
from moretta.engines.checkpoint import CheckpointId
from moretta.engines.usage import Clock
from moretta.errors import PeerError

log = logging.getLogger("moretta")


class Delivery(Protocol):
    """Delivers asks to silos, local or remote."""

    clock: Clock

    def deliver(self, ask: Ask) -> Replies:
        """Send each silo its message; return the valid answers and the reasons of the missing ones."""

    def take_traffic(self) -> Mapping[tuple[str, str], int]:
        """Return the bytes since the last call, by direction ("up", "down", "shares": also up) and the ask's tag."""

    @property
    def peak_mib(self) -> float | None:
        """The largest memory of any silo's own process so far; None without such silos."""

    def back(self, silos: Sequence[str], least: int) -> Sequence[str]:
        """Wait, if that can help, until at least `least` of these silos are reachable; return the reachable ones."""

    def away(self, silos: Sequence[str]) -> Mapping[str, Missing]:
        """Return which of these silos are known to be unavailable, and why, so that no round begins with them."""

    def renewed(self) -> bool:
        """Return whether any silo's process has been replaced since the last call."""

    def keep(self, place: CheckpointId) -> None:
        """Have remote silos save their states at a round's end."""

    def close(self) -> None:
        """End the processes that were started for silos."""


class TrafficCounter:
    """Counts bytes by direction and by the ask's tag."""

    def __init__(self) -> None:
        self._bytes: defaultdict[tuple[str, str], int] = defaultdict(int)

    def down(self, message: Message, length: int) -> None:
        """Count a message to a silo."""
        self._bytes["down", message.TAG] += length

    def up(self, asked: Message, answer: Message, lengths: tuple[int, int] | None = None) -> None:
        """Count a silo's answer, its keys and shares separately. lengths: of both, if known."""
        spoken, shares = lengths_of(answer) if lengths is None else lengths
        self._bytes["up", asked.TAG] += spoken
        if answer.SHARES:
            self._bytes["shares", asked.TAG] += shares

    def take(self) -> Mapping[tuple[str, str], int]:
        """Return the bytes since the last call, by direction and tag, and begin again."""
        taken, self._bytes = dict(self._bytes), defaultdict(int)
        return taken


def lengths_of(answer: Message) -> tuple[int, int]:
    """Return the bytes of an answer without its keys and shares, and the bytes of these."""
    spoken = size(answer, without=answer.SHARES)
    return spoken, size(answer) - spoken if answer.SHARES else 0


def replies_of(ask: Ask, answer: Callable[[str, Message], Message | Missing]) -> Replies:
    """Return the replies to an ask, in its order, and log the missing ones. answer: a silo's, or why it is missing."""
    answers: dict[str, Message] = {}
    missing: dict[str, Missing] = {}
    for silo, message in ask.messages.items():
        reply = answer(silo, message)
        if isinstance(reply, Missing):
            log.warning("%s: silo `%s` is missing, %s: %s", message.stamp, silo, reply.reason, reply.detail)
            missing[silo] = reply
        else:
            answers[silo] = reply
    return Replies(answers, missing, mapped.empty)


def valid(silo: str, ask: Ask, message: Message, answer: Message) -> Message | Missing:
    """Return an answer to a message of an ask, or why it is invalid."""
    if isinstance(answer, Spent) and answer.stamp == message.stamp:
        return Missing(Reason.SPENT, str(answer), answer)
    if not isinstance(answer, ask.reply):
        return Missing(Reason.MALFORMED, f"expected `{ask.reply.TAG}`, got `{answer.TAG}`")
    if answer.stamp != message.stamp:
        return Missing(Reason.MALFORMED, f"expected an answer for {message.stamp}, got one for {answer.stamp}")
    try:
        ask.check(silo, answer)
    except PeerError as error:
        return Missing(Reason.MALFORMED, str(error))
    return answer
