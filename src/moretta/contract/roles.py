"""The contract between protocols and engines: questions, answers, and the roles that exchange them.

A server's round is a generator: it yields an `Ask`, receives `Replies`, and returns a `Report`. So it reads from top to
bottom like the algorithm box of its paper. A client answers one message at a time. Sub-protocols compose with
``yield from``, and those of disjoint groups of silos with `side_by_side`. This module imports no torch.

Roles do no I/O of their own and read no clock. Two objects write to disk for a silo: the record of the sums that it
helped to open (`moretta.engines.journal`), and its unfinished work in a round (`moretta.engines.checkpoint.HalfDone`).

    engine                      server                      clients
      |-- setup(now, cohort) ---->|
      |<---------- Ask -----------|
      |-- one message each ------------------------------------>| answer(message)
      |<--------------------------------------------- a message |
      |-- Replies --------------->|
      |<------- Report / Aborted -|
"""

import dataclasses
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from moretta.contract.messages import Array, Message, Spent, Stamp, Tensors
from moretta.errors import MisuseError, PeerError, SumSpent

Phase = Callable[[str], AbstractContextManager[None]]
"""Marks a stretch of work, ``with self.phase("local_forward"): ...``; the engine, which owns the clock, provides it."""


R = TypeVar("R")
V = TypeVar("V")
State = Mapping[str, Any]
"""The state that a role resumes from after a restart: a flat mapping of arrays, bytes, text and numbers."""


def no_phase(name: str) -> AbstractContextManager[None]:
    """Mark nothing: the `Phase` of a role that no engine drives."""
    return nullcontext()


def under(prefix: str, state: State) -> dict[str, Any]:
    """Return the part of a state whose names begin with a prefix, with the prefix removed."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def over(prefix: str, state: Mapping[str, V]) -> dict[str, V]:
    """Return a state with a prefix before its names; `under` removes it."""
    return {f"{prefix}{name}": value for name, value in state.items()}


class Reason(StrEnum):
    """Why the replies lack a silo's answer."""

    LATE = "late"
    REFUSED = "refused"
    MALFORMED = "malformed"
    DISCONNECTED = "disconnected"
    FAILED = "failed"
    BAD_INPUT = "bad input"
    SPENT = "spent"


@dataclass(frozen=True)
class Missing:
    """A silo without a valid answer: the reason, and one sentence. spent: the silo's report, for `Reason.SPENT`."""

    reason: Reason
    detail: str
    spent: Spent | None = None


@dataclass(frozen=True)
class Ask:
    """A server's question: one message for each addressee, and which answers are valid.

    Args:
        messages: By silo.
        reply: The class of a valid answer.
        check: Takes a silo and its well-formed answer. Raises `moretta.errors.PeerError` if the answer does not fit the
            question; the silo is then missing for `Reason.MALFORMED`.
    """

    messages: Mapping[str, Message]
    reply: type[Message]
    check: Callable[[str, Any], None] = lambda silo, reply: None

    @classmethod
    def all(
        cls,
        silos: Sequence[str],
        message: Message,
        reply: type[Message],
        check: Callable[[str, Any], None] | None = None,
    ) -> "Ask":
        """Ask every silo the same question."""
        messages = dict.fromkeys(silos, message)
        return cls(messages, reply) if check is None else cls(messages, reply, check)


@dataclass(frozen=True)
class Replies:
    """The valid answers that arrived in time, in the order of the ask, and the missing silos with their reasons.

    Roles may read answers in any order and more than once. They never write to them, because large arrays may be in
    files that are mapped read-only.

    Attributes:
        empty: Allocates results that are as large as the answers: `numpy.empty`, or the same in a mapped file.
    """

    answers: Mapping[str, Any]
    missing: Mapping[str, Missing] = dataclasses.field(default_factory=dict)
    empty: Callable[[Sequence[int] | int, Any], Array] = np.empty


@dataclass(frozen=True)
class Aborted:
    """An exchange that could not be completed; the engine repeats it without the missing silos.

    Args:
        missing: The missing silos, with their reasons.
        because: A sentence for the log, where these reasons are not enough.
        opened: The silos that failed after others had signed the survivors or revealed shares, so that another take
            follows; empty if none did.
    """

    missing: Mapping[str, Missing]
    because: str = ""
    opened: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """The result of a round: figures for the history, by name. left_out: silos with unused answers, and why."""

    figures: Mapping[str, float]
    left_out: Mapping[str, Missing] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Args:
        parameters: The true model that the server holds: parameters and buffers by PyTorch's names.
        released: The model for silos, if the protocol makes one.
        models: Each silo's own model, for protocols without a common one.
        facts: The protocol's statements about the run, for ``result.json``.
        unperturbed: Where a protocol hides the model from silos, the tensors that are not fully hidden, with the
            reasons.
        scores: On all silos' held-out rows together, if requested (`moretta.protocols.common.scoring`).
        tables: A classifier's tables of the same rows, by name.
    """

    parameters: Tensors
    released: Tensors | None = None
    models: Mapping[str, Tensors] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, float | str] = dataclasses.field(default_factory=dict)
    unperturbed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
    tables: Tensors = dataclasses.field(default_factory=dict)


Exchange = Generator[Ask, Replies, R]
"""A generator of one exchange: it yields an ask, receives the replies, and returns its result."""


class Server(Protocol):
    """The coordinating role. `state` and `restore` make it survive a restart."""

    phase: Phase

    def setup(self, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
        """Prepare for a cohort: keys, statistics, headroom. Called first, and whenever the cohort changes."""

    def round(self, now: Stamp) -> Exchange[Report | Aborted]:
        """Run one round; an aborted round leaves the server's state unchanged."""

    def finish(self, now: Stamp) -> Exchange[Outcome | Aborted]:
        """Release the run's result."""

    def state(self) -> State:
        """Return everything that `restore` needs to continue from the end of a round."""

    def restore(self, state: State) -> None:
        """Restore what `state` returned."""


class Client(Protocol):
    """A silo's role."""

    phase: Phase

    def answer(self, message: Message) -> Message:
        """Answer one message. Raises a `moretta.errors.MorettaError` to refuse; that costs the silo this round only."""

    def state(self) -> State:
        """Return everything that `restore` needs to continue from the end of a round."""

    def restore(self, state: State) -> None:
        """Restore what `state` returned."""


LEAST = 6  # the fewest works to do together where that changes their rounding; fewer are as fast alone


class Work(Protocol):
    """A part of an answer that may be computed together with the same part of other silos' answers."""

    @property
    def key(self) -> Hashable | None:
        """Equal keys mean the same function of inputs with matching shapes; None means that the work is done alone."""

    @property
    def least(self) -> int:
        """The number of works from which one call is faster, a constant."""

    def alone(self) -> Any:
        """Return the result."""

    def together(self, works: Sequence[Any]) -> Sequence[Any]:
        """Return the results of works with this key, this one included, in order; equal to `alone` up to rounding.

        It may raise anything if one of them fails; each is then done alone.
        """


Answering = Generator[Work, Any, Message]
"""A generator of one answer: it yields work, receives its result, and returns the message. While it waits, no phase is
open and no random generator is set, because other silos continue meanwhile.
"""


class InSteps:
    """Makes a client's `answer` from a method that is an `Answering` generator.

    A plain call returns the answer, with all work done alone. An engine may use `steps` instead. A function assigned to
    `answer` replaces both.
    """

    def __init__(self, steps: Callable[..., Answering]) -> None:
        self.steps = steps
        self.__doc__ = steps.__doc__

    def __get__(self, client: object, owner: object = None) -> "InSteps":
        return self if client is None else InSteps(partial(self.steps, client))

    def __call__(self, *arguments: Any) -> Message:
        """Return the answer to a message. Raises as the client does."""
        return alone(self.steps(*arguments))


def answering(client: Client, message: Message) -> Answering:
    """Return a client's answer in steps; it is `Spent` if the client has helped to open another sum of the round."""
    answer = client.answer
    try:
        return (yield from answer.steps(message)) if isinstance(answer, InSteps) else answer(message)
    except SumSpent as spent:
        return Spent(stamp=message.stamp, next_take=spent.next_take, survivors=spent.survivors, whole=spent.whole)


def after_alone(steps: Answering, work: Work) -> Work:
    """Do work alone, pass its result on, and return the next work. Raises StopIteration with the answer at the end."""
    try:
        result = work.alone()
    except Exception as error:  # noqa: BLE001  # the client's own error, raised where it yielded the work
        return steps.throw(error)
    return steps.send(result)


def alone(steps: Answering) -> Message:
    """Return an answer with all its work done alone. Raises as the client does."""
    try:
        work = next(steps)
        while True:
            work = after_alone(steps, work)
    except StopIteration as end:
        answer: Message = end.value
        return answer


def answered(client: Client, message: Message) -> Message:
    """Return a client's answer, `Spent` if it helped to open another sum of the round. Raises as the client does."""
    return alone(answering(client, message))


def unexpected(role: str, message: Message) -> MisuseError:
    """Return the error of a role that has no answer to a message."""
    return MisuseError(f"{role} has no answer to `{message.TAG}`; is it another protocol's message?")


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
    """Return one ask of all silos, which checks each silo's answer as its own exchange does."""
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
