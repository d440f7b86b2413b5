"""The silos' roles in one process: each silo's answer, or why it has none.

The cost of small models is calls, not arithmetic. So silos are asked slot by slot, and those of a slot advance in
lockstep. If several wait for the same work on batches of the same shapes (`moretta.contract.roles.Work`), one call does
it for all. The silos of a call follow from their order in the federation, from the ask and from shapes, not from a
clock or the number of processes. A process runs whole slots of silos.
"""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

from moretta.contract import roles
from moretta.contract.codec import Codec
from moretta.contract.messages import Message
from moretta.contract.roles import Answering, Client, InSteps, Missing, Reason, State, Work, after_alone, answering
from moretta.engines.child import ChildClient, Waiting
from moretta.engines.usage import Clock
from moretta.errors import Disconnected, MorettaError, ParameterError, with_notes

log = logging.getLogger("moretta")

PROCESSORS = max(1, (os.cpu_count() or 1) - 1)  # for processes of silos; one is this process's own
SLOT = 25  # silos at most; more gain nothing by sharing a call


@dataclass(frozen=True)
class Answered:
    """A silo's answer, or why it has none, and its seconds. lengths: `delivery.lengths_of`, if computed elsewhere."""

    answer: Message | Missing
    seconds: float
    lengths: tuple[int, int] | None = None


def slots_of(silos: Sequence[str]) -> list[Sequence[str]]:
    """Return silos in their order in as few slots as possible, whose sizes differ by at most one."""
    count = -(-len(silos) // SLOT)
    return [silos[len(silos) * k // count : len(silos) * (k + 1) // count] for k in range(count)]


def absent(silo: str) -> Answered:
    """Return the answer for a silo without a role here."""
    return Answered(Missing(Reason.DISCONNECTED, f"no silo `{silo}` is here"), 0.0)


class SilosHere:
    """Ask the clients of this process.

    Args:
        codec: Encodes and decodes each message, as in a network, and silos are then asked one by one; None passes
            objects.
        slots: The silos that advance together; None is `slots_of` the clients.
        kept: Moves an answer to other memory until all have answered.
        deadline: Seconds, for silos with their own process.
        clock: Receives the silos' seconds by phase.
        scores: Returns the scores that silos have received.
        stacks: Whether silos compute together with the model, so that rounding may depend on it.
    """

    def __init__(
        self,
        clients: Mapping[str, Client],
        codec: Codec | None = None,
        slots: Sequence[Sequence[str]] | None = None,
        *,
        kept: Callable[[Message], Message] = lambda answer: answer,
        deadline: float | None = None,
        clock: Clock | None = None,
        scores: Callable[[], Mapping[str, float]] = dict,
        stacks: bool = True,
    ) -> None:
        self._clients, self._codec, self._kept, self.scores = clients, codec, kept, scores
        self._slots = slots_of(list(clients)) if slots is None else slots
        self._stacks = stacks and codec is None
        self.between: Callable[[], None] | None = None  # called before each slot is asked
        self.clock = Clock() if clock is None else clock
        for client in clients.values():
            client.phase = self.clock.phase
        self._children = [client for client in clients.values() if isinstance(client, ChildClient)]
        for child in self._children:
            child.charge = self.clock.charge
            if deadline is not None:
                child.deadline = deadline

    def answers(self, messages: Mapping[str, Message]) -> Mapping[str, Answered]:
        """Return each silo's answer to its message, in their order."""
        slots, answers = self._slots if self._codec is None else [], dict[str, Answered]()
        with self.clock.phase("preparation"):  # silos' work outside their own phases: decode, draw rows
            for slot in slots:
                answers |= self._of_slot({silo: messages[silo] for silo in slot if silo in messages})
            for silo, message in messages.items():
                if silo not in answers:
                    answers |= self._of_slot({silo: message})
        return {silo: answers[silo] for silo in messages}

    @property
    def parts(self) -> Sequence[Sequence[str]]:
        """The silos of each process: the silos that compute together do not depend on the number of processes."""
        parts: list[Sequence[str]] = []
        for slot in self._slots:
            local = [self._clients[silo] for silo in slot if self._clients[silo] not in self._children]
            several = sum(isinstance(client.answer, InSteps) for client in local)
            parts += [slot] if self._stacks and several >= roles.LEAST else [[silo] for silo in slot]
        return parts

    def only(self, silos: Sequence[str]) -> "SilosHere":
        """Return the same for some of the silos, with its own clock."""
        slots = [[silo for silo in slot if silo in silos] for slot in self._slots]
        clients = {silo: self._clients[silo] for silo in silos}
        return SilosHere(clients, self._codec, [slot for slot in slots if slot], kept=self._kept, scores=self.scores)

    @property
    def peak_mib(self) -> float | None:
        """The largest memory of any silo's own process so far; None without such silos."""
        return max(map(attrgetter("peak_mib"), self._children), default=None)

    @property
    def ends(self) -> int:
        """The number of ends of silos' processes."""
        return sum(map(attrgetter("ends"), self._children))

    def states(self) -> Mapping[str, State]:
        """Return the state of each silo."""
        return {silo: client.state() for silo, client in self._clients.items()}

    def gather(self) -> None:
        """Do nothing: the roles of this process are the ones that answer."""

    def spread(self, states: Mapping[str, State]) -> None:
        """Do nothing, as `gather`."""

    def restore(self, states: Mapping[str, State]) -> None:
        """Restore silos' states."""
        for silo, state in states.items():
            self._clients[silo].restore(state)

    def close(self) -> None:
        """End the silos' processes."""
        for child in self._children:
            child.close()

    def _of_slot(self, messages: Mapping[str, Message]) -> dict[str, Answered]:
        if self.between is not None:
            self.between()
        turns = [_Turn(silo, self._steps(silo, message)) for silo, message in messages.items()]
        for turn in turns:
            if self._clients.get(turn.silo) in self._children:
                busy = [other for other in turns if isinstance(other.work, Waiting)]
                if len(busy) >= PROCESSORS:
                    _do(busy[:1])  # at most one process a processor, because each has its own deadline
            turn.go_on(next)
        while waiting := [turn for turn in turns if turn.work is not None]:
            groups = defaultdict[Hashable, list[_Turn]](list)
            ready = [turn for turn in waiting if not isinstance(turn.work, Waiting)]
            for turn in ready or waiting:  # silos' own processes work meanwhile
                groups[turn.key].append(turn)
            for group in groups.values():
                _do(group)
        for turn in turns:
            client = self._clients.get(turn.silo)
            if isinstance(client, ChildClient):
                turn.seconds -= client.starting
        return {turn.silo: Answered(turn.answer, turn.seconds) for turn in turns}

    def _steps(self, silo: str, message: Message) -> Answering:
        client = self._clients.get(silo)
        if client is None:
            raise Disconnected(f"no silo `{silo}` is here")
        wired = message if self._codec is None else self._codec.decode(self._codec.encode(message))
        answer = yield from answering(client, wired)
        return self._kept(answer) if isinstance(answer, Message) else answer


class _Turn:
    """A silo on its way to an answer. work: what it waits for; None if it has answered, or will not."""

    def __init__(self, silo: str, steps: Answering) -> None:
        self.silo, self.seconds = silo, 0.0
        self.answer: Message | Missing = Missing(Reason.FAILED, "it was not asked")
        self.work: Work | None = None
        self.key: Hashable | None = None
        self._steps = steps

    def go_on(self, resume: Callable[[Answering], Work]) -> None:
        """Advance to the answer, or to work that other silos may share; do other work at once."""
        began, answer = time.perf_counter(), None
        try:
            self.work = resume(self._steps)
            while (key := self.work.key) is None:
                self.work = after_alone(self._steps, self.work)
        except StopIteration as end:
            answer = end.value
            if not isinstance(answer, Message):  # a silo may run a user's code, whatever its types promise
                answer = Missing(Reason.MALFORMED, f"expected a message, got {type(answer).__name__}")
        except ParameterError as error:
            answer = Missing(Reason.BAD_INPUT, with_notes(error))  # an input of this machine
        except Disconnected as error:
            answer = Missing(Reason.DISCONNECTED, str(error))
        except MorettaError as error:
            answer = Missing(Reason.REFUSED, str(error))
        except Exception as error:  # any failure costs the round this silo alone
            log.exception("silo `%s` failed", self.silo)
            answer = Missing(Reason.FAILED, f"{type(error).__name__}: {error}")
        else:
            self.key = key
        if answer is not None:
            self.answer, self.work = answer, None
        self.seconds += time.perf_counter() - began


def _do(group: Sequence[_Turn]) -> None:
    """Do the work that silos wait for, in one call if they are enough, and let the silos advance."""
    works = [turn.work for turn in group if turn.work is not None]
    began = time.perf_counter()
    results = _together(works) if len(works) >= max(2, works[0].least) else None
    share = (time.perf_counter() - began) / len(group)
    for place, (turn, work) in enumerate(zip(group, works, strict=True)):
        turn.seconds += share
        turn.go_on(partial(after_alone, work=work) if results is None else methodcaller("send", results[place]))


def _together(works: Sequence[Work]) -> Sequence[Any] | None:
    """Return the results of one call; None if it fails, so that each silo then meets its own error alone."""
    try:
        return works[0].together(works)
    except Exception as error:  # noqa: BLE001  # the silo at fault, if any, raises it again
        log.debug("work of %d silos is done one by one: %s: %s", len(works), type(error).__name__, error)
        return None
