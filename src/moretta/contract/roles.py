"""The contract between protocols and engines: who asks what, and what comes back.

A server's round is a generator: it yields an `Ask`, receives `Replies`, and returns a `Report`, so it reads from
top to bottom like the algorithm box of its paper. A client answers one message at a time. Sub-protocols compose
with ``yield from``. Nothing here does I/O, knows a clock or knows torch.

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
from moretta.errors import MisuseError, SumSpent

Phase = Callable[[str], AbstractContextManager[None]]
"""Marks a stretch of work, ``with self.phase("local_forward"): ...``; the engine, which owns the clock, gives it."""


V = TypeVar("V")
State = Mapping[str, Any]
"""What a role needs to resume after a restart: a flat mapping of arrays, bytes, text and numbers."""


def no_phase(name: str) -> AbstractContextManager[None]:
    """Mark nothing: the `Phase` of a role that no engine drives."""
    return nullcontext()


def under(prefix: str, state: State) -> dict[str, Any]:
    """Return the part of a state whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def over(prefix: str, state: Mapping[str, V]) -> dict[str, V]:
    """Return a state with a prefix before its names, which `under` takes off again."""
    return {f"{prefix}{name}": value for name, value in state.items()}


class Reason(StrEnum):
    """Why a silo's answer is not among the replies."""

    LATE = "late"
    REFUSED = "refused"
    MALFORMED = "malformed"
    DISCONNECTED = "disconnected"
    FAILED = "failed"
    BAD_INPUT = "bad input"
    SPENT = "spent"


@dataclass(frozen=True)
class Missing:
    """A silo without a valid answer: why, and one sentence. spent: what it said, for the reason `Reason.SPENT`."""

    reason: Reason
    detail: str
    spent: Spent | None = None


@dataclass(frozen=True)
class Ask:
    """What a server asks: one message for each addressee, and what a valid answer is.

    check: takes a silo and its well-formed answer, and raises `moretta.errors.PeerError` if it does not fit the
    question; that silo is then missing for the reason `Reason.MALFORMED`.
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
        """Ask every silo the same."""
        messages = dict.fromkeys(silos, message)
        return cls(messages, reply) if check is None else cls(messages, reply, check)


@dataclass(frozen=True)
class Replies:
    """The valid answers that came in time, in the order of the ask, and who is missing and why.

    Roles read answers in any order and more than once, and never write to them: large arrays lie in files that are
    mapped read-only. empty: `numpy.empty`, or the same in such a file, for what is made of all answers.
    """

    answers: Mapping[str, Any]
    missing: Mapping[str, Missing] = dataclasses.field(default_factory=dict)
    empty: Callable[[Sequence[int] | int, Any], Array] = np.empty


@dataclass(frozen=True)
class Aborted:
    """An exchange that could not be completed; the engine repeats it without those who are missing.

    because: a sentence for the log, where the reasons of the missing are not enough.
    opened: the silos that held it up after others had signed the survivors or given shares, so that another take
    follows; empty if none had.
    """

    missing: Mapping[str, Missing]
    because: str = ""
    opened: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """The result of a round: figures for the history, by name.

    left_out: silos with valid answers that the server did not use, and why.
    """

    figures: Mapping[str, float]
    left_out: Mapping[str, Missing] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    `parameters`: the true model as the server holds it (parameters and buffers by PyTorch's names).
    `released`: the model that silos may be given, where the protocol makes one.
    `models`: each silo's own model, for protocols without a common one.
    `facts`: what the protocol states about the run, for ``result.json``.
    `unperturbed`: for protocols that hide the model from silos, the tensors that are not fully hidden, and why.
    `scores`: on all silos' held-out rows together, where that was asked for (`moretta.protocols.common.scoring`).
    `tables`: of the same rows and by name, a classifier's.
    """

    parameters: Tensors
    released: Tensors | None = None
    models: Mapping[str, Tensors] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, float | str] = dataclasses.field(default_factory=dict)
    unperturbed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
    tables: Tensors = dataclasses.field(default_factory=dict)


R = TypeVar("R")
Exchange = Generator[Ask, Replies, R]
"""A generator of one exchange: it yields an ask, receives the replies, and returns its result."""


class Server(Protocol):
    """The coordinating role. `state` and `restore` make it survive a restart."""

    phase: Phase

    def setup(self, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
        """Prepare for a cohort: keys, statistics, headroom. Runs at the start and whenever the cohort changes."""

    def round(self, now: Stamp) -> Exchange[Report | Aborted]:
        """Play one round; an aborted one leaves the server's state unchanged."""

    def finish(self, now: Stamp) -> Exchange[Outcome | Aborted]:
        """Release the run's result."""

    def state(self) -> State:
        """Return all that `restore` needs to go on from the end of a round."""

    def restore(self, state: State) -> None:
        """Restore what `state` returned."""


class Client(Protocol):
    """A silo's role."""

    phase: Phase

    def answer(self, message: Message) -> Message:
        """Answer one message. Raises a `moretta.errors.MorettaError` to refuse; that costs the round only itself."""

    def state(self) -> State:
        """Return all that `restore` needs to go on from the end of a round."""

    def restore(self, state: State) -> None:
        """Restore what `state` returned."""


LEAST = 6  # works that are done together, where that rounds otherwise than each alone; fewer are as fast alone


class Work(Protocol):
    """A part of an answer that may be computed together with the same part of other silos' answers.

    key: equal keys mean the same function, of inputs of shapes that go together; None for work that is done alone.
    least: from so many works on one call is faster.
    """

    @property
    def key(self) -> Hashable | None:
        """What must be equal for works to be done together."""

    @property
    def least(self) -> int:
        """How many works it takes, a constant."""

    def alone(self) -> Any:
        """Return the result."""

    def together(self, works: Sequence[Any]) -> Sequence[Any]:
        """Return the results of works with this key, in their order, this one among them: up to rounding as `alone`.

        Raises whatever it likes where one of them fails; each is then done alone.
        """


Answering = Generator[Work, Any, Message]
"""A generator of one answer: it yields work, receives its result, and returns the message. No phase is open and no
generator of randomness is set while it waits, as other silos go on meanwhile."""


class InSteps:
    """Makes a client's `answer` of a method that is such a generator.

    Its caller gets the answer, with all work done alone. An engine may take its `steps` instead, and another function
    in the place of `answer` replaces both.
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
    """Return a client's answer in steps; it is `Spent` where it has helped to open another sum of the round."""
    answer = client.answer
    try:
        return (yield from answer.steps(message)) if isinstance(answer, InSteps) else answer(message)
    except SumSpent as spent:
        return Spent(stamp=message.stamp, next_take=spent.next_take, survivors=spent.survivors, whole=spent.whole)


def after_alone(steps: Answering, work: Work) -> Work:
    """Do work alone, go on with its result, and return the next. Raises StopIteration with the answer, and errors."""
    try:
        result = work.alone()
    except Exception as error:  # noqa: BLE001  # it is the client's own: raised there, where the work was yielded
        return steps.throw(error)
    return steps.send(result)


def alone(steps: Answering) -> Message:
    """Return an answer all of whose work is done alone. Raises as the client does."""
    try:
        work = next(steps)
        while True:
            work = after_alone(steps, work)
    except StopIteration as end:
        answer: Message = end.value
        return answer


def answered(client: Client, message: Message) -> Message:
    """Return a client's answer, `Spent` where it has helped to open another sum of the round. Raises as it does."""
    return alone(answering(client, message))


def unexpected(role: str, message: Message) -> MisuseError:
    """Return the error of a role that was sent a message it has no answer to."""
    return MisuseError(f"{role} has no answer to `{message.TAG}`; is it another protocol's message?")
