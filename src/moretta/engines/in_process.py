"""The engine of one machine: passes messages between roles in one process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from moretta.contract.codec import Codec, size
from moretta.contract.messages import Message
from moretta.contract.roles import Ask, Client, Missing, Reason, Replies
from moretta.engines.checkpoint import CheckpointId
from moretta.engines.delivery import TrafficCounter, replies_of, valid
from moretta.engines.faults import INJECTED, NO_MISHAP, Injector, Mishap
from moretta.engines.mapped import laid_down
from moretta.engines.silos_here import Answered, SilosHere
from moretta.engines.usage import Clock
from moretta.engines.views import Recorder
from moretta.engines.workers import Workers
from moretta.errors import CodecError

log = logging.getLogger("moretta")


class InProcess:
    """Delivers asks to clients that live in this process, or in one each that this one started.

    strict: pass every message through the codec, both ways, as a network would.
    recorder: keeps what each role saw. deadline: an answer that took more seconds is dropped as late, and a silo's own
    process that has not answered by then is ended. injector: injects faults. workers: how many processes the silos
    play in, this one if 1; any number gives the same answers (`moretta.engines.workers`). prepare: called in each at
    its start. scores, stacks: as of `moretta.engines.silos_here.SilosHere`.
    """

    def __init__(
        self,
        clients: Mapping[str, Client],
        codec: Codec,
        *,
        strict: bool = False,
        recorder: Recorder | None = None,
        deadline: float | None = None,
        injector: Injector | None = None,
        workers: int = 1,
        prepare: Callable[[], None] = lambda: None,
        scores: Callable[[], Mapping[str, float]] = dict,
        stacks: bool = True,
    ) -> None:
        self.clock = Clock()
        self._clients, self._codec, self._strict, self._recorder = clients, codec, strict, recorder
        self._deadline = float("inf") if deadline is None else deadline
        self._injector = injector
        self._silos: SilosHere | Workers = SilosHere(
            clients,
            codec if strict else None,
            kept=laid_down,
            deadline=deadline,
            clock=self.clock,
            scores=scores,
            stacks=stacks,
        )
        if min(workers, len(self._silos.parts)) > 1:
            self._silos = Workers(clients, codec, self._silos, workers, prepare)
        self._traffic, self._ends = TrafficCounter(), 0
        self.take_traffic = self._traffic.take
        # `gather` brings the clients that this engine was given to where those stand that answer in other processes,
        # `spread` those to states that the given ones were brought to.
        self.gather, self.spread, self.scores = self._silos.gather, self._silos.spread, self._silos.scores

    def deliver(self, ask: Ask) -> Replies:
        """Hand each silo its message; return the valid answers and why the others are missing."""
        mishaps, reached = dict[str, Mishap](), ask.messages
        if self._injector is not None:
            mishaps = {silo: self._injector.befalls(silo, message) for silo, message in ask.messages.items()}
            reached = {silo: message for silo, message in ask.messages.items() if mishaps[silo].gone is None}
        lengths: dict[int, int] = {}  # the same message often goes to every silo

        def exchanged(silo: str, message: Message) -> Message | Missing:
            if id(message) not in lengths:
                lengths[id(message)] = size(message)
            self._traffic.down(message, lengths[id(message)])
            self._record("server", "sent", silo, message)
            mishap = mishaps.get(silo, NO_MISHAP)
            if mishap.gone is not None:
                return mishap.gone
            answer = self._arrived(silo, message, answers[silo], mishap)
            if isinstance(answer, Message):
                self._traffic.up(message, answer, answers[silo].lengths)
                self._record("server", "received", silo, answer)
                with self.clock.phase("aggregation"):  # the server looks at what it was sent
                    return valid(silo, ask, message, answer)
            return answer

        with self.clock.phase("delivery"):
            answers = self._silos.answers(reached)
            return replies_of(ask, exchanged)

    @property
    def peak_mib(self) -> float | None:
        """The most memory that any silo with a process of its own has taken so far; None without such silos."""
        return self._silos.peak_mib

    def back(self, silos: Sequence[str], least: int) -> Sequence[str]:
        """Return none: a silo of this process does not come back by waiting."""
        return ()

    def away(self, silos: Sequence[str]) -> Mapping[str, Missing]:
        """Return none: a missing silo is noticed when it is asked."""
        return {}

    def renewed(self) -> bool:
        """Return whether a silo's process has ended since the last call, so that another answers from now."""
        ends, before = self._silos.ends, self._ends
        self._ends = ends
        return ends > before

    def close(self) -> None:
        """End the processes of silos, and those that silos run in."""
        self._silos.close()

    def keep(self, place: CheckpointId) -> None:
        """Do nothing: the silos' states are kept with the server's."""

    def _arrived(self, silo: str, message: Message, answered: Answered, mishap: Mishap) -> Message | Missing:
        """Return what comes of a silo's answer on its way, or why nothing does."""
        if silo in self._clients:
            self._record(silo, "received", "server", message)
        answer, took = answered.answer, answered.seconds + mishap.seconds
        if isinstance(answer, Missing):
            return answer
        self._record(silo, "sent", "server", answer)
        if took > self._deadline:
            self._record("server", "received", silo, answer)  # it is too late, and it came
            late = f"expected an answer in {self._deadline:g} s, it took {took:.1f} s"
            return Missing(Reason.LATE, f"{INJECTED}{late}" if mishap.seconds else late)
        if mishap.seconds:
            log.warning("%s: silo `%s`: %s%g s late", message.stamp, silo, INJECTED, mishap.seconds)
        if not self._strict and not mishap.cut:
            return answer
        try:  # of an answer whose last byte was lost nothing is left that the codec takes for a message
            wired = self._codec.encode(answer)
            return self._codec.decode(wired[:-1] if mishap.cut else wired)
        except CodecError as error:
            return Missing(Reason.MALFORMED, f"{INJECTED}the last byte was lost: {error}" if mishap.cut else str(error))

    def _record(self, role: str, direction: str, peer: str, message: Message) -> None:
        if self._recorder is not None and self._recorder.wants(message.stamp.round):
            self._recorder.saw(role, direction, peer, self._codec.encode(message))
