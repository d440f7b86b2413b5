"""A toy protocol, so that engines are tested without torch: each silo says a number, the server adds them up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moretta.contract.messages import Message, Spent, Stamp, message
from moretta.contract.roles import Aborted, Ask, Exchange, Outcome, Report, State, no_phase, unexpected
from moretta.errors import PeerError


@message("toy/hello")
class Hello(Message):
    """Begin anew."""


@message("toy/say")
class Say(Message):
    """Say your number."""


@message("toy/said")
class Said(Message):
    """A number."""

    number: int


SCHEMA = (Hello, Say, Said, Spent)


class ToyServer:
    """Adds up numbers; `setups` and `sums` are what it did."""

    def __init__(self) -> None:
        self.phase = no_phase
        self.setups: list[tuple[Stamp, tuple[str, ...]]] = []
        self.sums: list[int] = []
        self.cohort: Sequence[str] = ()

    def setup(self, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
        self.setups.append((now, tuple(cohort)))
        replies = yield Ask.all(cohort, Hello(stamp=now), Said)
        self.cohort = cohort
        return Aborted(replies.missing) if replies.missing else None

    def round(self, now: Stamp) -> Exchange[Report | Aborted]:
        replies = yield Ask.all(self.cohort, Say(stamp=now), Said, _not_negative)
        if replies.missing:
            return Aborted(replies.missing)
        self.sums.append(sum(said.number for said in replies.answers.values()))
        return Report({"sum": float(self.sums[-1])})

    def finish(self, now: Stamp) -> Exchange[Outcome | Aborted]:
        replies = yield Ask.all(self.cohort, Say(stamp=now), Said)
        return Aborted(replies.missing) if replies.missing else Outcome(parameters={}, facts={"last": "word"})

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        raise NotImplementedError


def _not_negative(silo: str, said: Said) -> None:
    if said.number < 0:
        raise PeerError(f"expected a number of at least 0, got {said.number}")


class ToyClient:
    """Says its number, or what `faults` has for a message of that tag and round: an exception, or a function."""

    def __init__(self, number: int) -> None:
        self.phase = no_phase
        self.number = number
        self.faults: dict[tuple[str, int], Exception | Callable[[Message], object]] = {}
        self.asked: list[Message] = []

    def answer(self, message: Message) -> Message:
        self.asked.append(message)
        fault = self.faults.get((message.TAG, message.stamp.round))
        if isinstance(fault, Exception):
            raise fault
        if fault is not None:
            return fault(message)  # type: ignore[return-value]  # junk is the point
        if not isinstance(message, Hello | Say):
            raise unexpected("a toy", message)
        return Said(stamp=message.stamp, number=self.number)

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        raise NotImplementedError
