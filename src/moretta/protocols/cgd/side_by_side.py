"""Several exchanges at a time: disjoint groups of silos need not wait for each other."""

from collections.abc import Mapping
from typing import Any, TypeVar

from moretta.contract.messages import Message
from moretta.contract.roles import Aborted, Ask, Exchange, Replies
from moretta.errors import MisuseError, PeerError

R = TypeVar("R")


def side_by_side(exchanges: Mapping[str, Exchange[R]]) -> Exchange[dict[str, R]]:
    """Run exchanges side by side and return the result of each; their next messages go out as one ask.

    Raises `moretta.errors.MisuseError` if two ask the same silo at the same time.
    """
    ended, asks = dict[str, R](), dict[str, Ask]()

    def advance(name: str, replies: Replies | None) -> None:
        try:
            asks[name] = exchanges[name].send(replies)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as end:
            ended[name] = end.value

    for name in exchanges:
        advance(name, None)
    while asks:
        waiting = dict(asks)
        replies = yield _joined(waiting)
        asks.clear()
        for name, ask in waiting.items():
            answers = {silo: replies.answers[silo] for silo in ask.messages if silo in replies.answers}
            missing = {silo: replies.missing[silo] for silo in ask.messages if silo in replies.missing}
            advance(name, Replies(answers, missing))
    return {name: ended[name] for name in exchanges}


def all_of(exchanges: Mapping[str, Exchange[Aborted | None]]) -> Exchange[Aborted | None]:
    """Run exchanges side by side; if any silo is missing, return `Aborted` with all missing ones."""
    ended = yield from side_by_side(exchanges)
    missing = {silo: why for aborted in ended.values() if aborted is not None for silo, why in aborted.missing.items()}
    opened = [silo for aborted in ended.values() if aborted is not None for silo in aborted.opened]
    return Aborted(missing, opened=opened) if any(aborted is not None for aborted in ended.values()) else None


def _joined(asks: Mapping[str, Ask]) -> Ask:
    """Return one ask of all silos; each silo keeps the terms of its own exchange."""
    of: dict[str, Ask] = {}
    for name, ask in asks.items():
        for silo in ask.messages:
            if silo in of:
                raise MisuseError(f"`{name}` asks silo `{silo}` while another exchange does; expected one at a time")
            of[silo] = ask

    def check(silo: str, reply: Any) -> None:
        if not isinstance(reply, of[silo].reply):
            raise PeerError(f"expected `{of[silo].reply.TAG}`, got `{reply.TAG}`")
        of[silo].check(silo, reply)

    return Ask({silo: ask.messages[silo] for silo, ask in of.items()}, Message, check)
