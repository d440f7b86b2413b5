"""The engine of one machine: it passes messages between roles in one process.

It can inject faults, to show that a federation survives them: a silo vanishes, answers late or is cut short. A fault
depends only on settings, round, silo and a message's phase, not on time or the order of asking. So a resumed run has
the same faults.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moretta.contract.codec import Codec, size
from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Ask, Client, Missing, Reason, Replies
from moretta.engines.checkpoint import CheckpointId
from moretta.engines.delivery import TrafficCounter, replies_of, valid
from moretta.engines.mapped import laid_down
from moretta.engines.settings import Fault, FaultPhase, Faults
from moretta.engines.silos_here import Answered, SilosHere
from moretta.engines.usage import Clock
from moretta.engines.views import Recorder
from moretta.engines.workers import Workers
from moretta.errors import CodecError

INJECTED = "fault injection: "


@dataclass(frozen=True)
class Mishap:
    """A message's fault.

    Attributes:
        gone: The reason why the silo is never reached; None if it is.
        seconds: The seconds of delay.
        cut: Whether the last byte is lost.
    """

    gone: Missing | None = None
    seconds: float = 0.0
    cut: bool = False


NO_MISHAP = Mishap()


class Injector:
    """Chooses the fault of each message, in order of sending. phases: the phase by tag, else "upload"."""

    def __init__(self, faults: Faults, phases: Mapping[str, FaultPhase]) -> None:
        self._faults, self._phases = faults, phases
        self._drawn: tuple[FaultPhase, ...] = ("upload", "unmasking") if "unmasking" in phases.values() else ("upload",)
        self._gone: dict[str, tuple[int, Missing]] = {}  # by silo, the last round in which it cannot be reached
        self._uploading: dict[str, Stamp] = {}  # by silo, the stamp of its last request to upload

    def befalls(self, silo: str, message: Message) -> Mishap:
        """Return the fault of a message to this silo, and of its answer."""
        number, phase = message.stamp.round, self._phase(silo, message)
        if (gone := self._is_gone(silo, number, phase)) is not None:
            return Mishap(gone=gone)
        delays = [row.seconds for row in self._faults.delay if _is_of(row, silo, number, phase)]
        cut = any(_is_of(row, silo, number, phase) for row in self._faults.corrupt)
        return Mishap(seconds=sum(delays), cut=cut)

    def _phase(self, silo: str, message: Message) -> FaultPhase:
        phase = self._phases.get(message.TAG, "upload")
        if phase == "upload":
            self._uploading[silo] = message.stamp
        if phase == "unmasking" and self._uploading.get(silo) != message.stamp:
            return "set-up"  # a sum of the set-up, such as common statistics, is unmasked
        return phase

    def _is_gone(self, silo: str, number: int, phase: FaultPhase) -> Missing | None:
        until, missing = self._gone.get(silo, (-1, None))
        if until == number:
            return missing
        for row in self._faults.drop:
            # A round without a set-up begins with the upload: a silo that vanishes in the set-up has vanished by then.
            if _is_of(row, silo, number, phase) or _is_of(row, silo, number, "set-up"):
                return self._lose(silo, number, row.phase)
        if phase in self._drawn and self._draw(silo, number) == phase:
            return self._lose(silo, number, phase, f", drawn with probability {self._faults.drop_probability:g}")
        return None

    def _lose(self, silo: str, number: int, phase: FaultPhase, how: str = "") -> Missing:
        detail = f"{INJECTED}unreachable from the {phase} of round {number} on{how}"
        missing = Missing(Reason.DISCONNECTED, detail)
        self._gone[silo] = number, missing
        return missing

    def _draw(self, silo: str, number: int) -> FaultPhase | None:
        """Return the phase in which the silo vanishes by chance in this round, if it does."""
        name = int.from_bytes(hashlib.sha256(silo.encode()).digest()[:8], "big")
        generator = np.random.Generator(np.random.PCG64([self._faults.seed, number, name]))
        if generator.random() >= self._faults.drop_probability:
            return None
        return self._drawn[generator.integers(len(self._drawn))]


def _is_of(row: Fault, silo: str, number: int, phase: FaultPhase) -> bool:
    return (row.silo, row.round, row.phase) == (silo, number, phase)


log = logging.getLogger("moretta")


class InProcess:
    """Deliver asks to clients in this process, or in processes that it starts.

    Args:
        strict: Whether every message passes through the codec, both ways, as in a network.
        recorder: Records views.
        deadline: Seconds after which an answer is dropped as late, and a silo's own process is ended.
        injector: Of faults.
        workers: Processes for silos, 1 for this one; the number does not change answers (`moretta.engines.workers`).
        prepare: Called in each worker at its start.
        scores, stacks: As in `moretta.engines.silos_here.SilosHere`.
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
        # `gather` copies the states of clients in other processes to `clients`; `spread` copies given states to
        # the clients in other processes.
        self.gather, self.spread, self.scores = self._silos.gather, self._silos.spread, self._silos.scores

    def deliver(self, ask: Ask) -> Replies:
        """Send each silo its message; return the valid answers and the reasons of the missing ones."""
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
                with self.clock.phase("aggregation"):  # the server checks its answers
                    return valid(silo, ask, message, answer)
            return answer

        with self.clock.phase("delivery"):
            answers = self._silos.answers(reached)
            return replies_of(ask, exchanged)

    @property
    def peak_mib(self) -> float | None:
        """The largest memory of any silo's own process so far; None without such silos."""
        return self._silos.peak_mib

    def back(self, silos: Sequence[str], least: int) -> Sequence[str]:
        """Return an empty list: waiting brings no silo of this process back."""
        return ()

    def away(self, silos: Sequence[str]) -> Mapping[str, Missing]:
        """Return an empty mapping: a missing silo is noticed when it is asked."""
        return {}

    def renewed(self) -> bool:
        """Return whether a silo's process has ended since the last call, so that another answers from now."""
        ends, before = self._silos.ends, self._ends
        self._ends = ends
        return ends > before

    def close(self) -> None:
        """End the silos' processes."""
        self._silos.close()

    def keep(self, place: CheckpointId) -> None:
        """Do nothing: the silos' states are kept with the server's."""

    def _arrived(self, silo: str, message: Message, answered: Answered, mishap: Mishap) -> Message | Missing:
        """Return a silo's answer as it arrives, or why it is missing."""
        if silo in self._clients:
            self._record(silo, "received", "server", message)
        answer, took = answered.answer, answered.seconds + mishap.seconds
        if isinstance(answer, Missing):
            return answer
        self._record(silo, "sent", "server", answer)
        if took > self._deadline:
            self._record("server", "received", silo, answer)  # too late, but it arrived
            late = f"expected an answer in {self._deadline:g} s, it took {took:.1f} s"
            return Missing(Reason.LATE, f"{INJECTED}{late}" if mishap.seconds else late)
        if mishap.seconds:
            log.warning("%s: silo `%s`: %s%g s late", message.stamp, silo, INJECTED, mishap.seconds)
        if not self._strict and not mishap.cut:
            return answer
        try:  # the codec accepts no answer whose last byte is lost
            wired = self._codec.encode(answer)
            return self._codec.decode(wired[:-1] if mishap.cut else wired)
        except CodecError as error:
            return Missing(Reason.MALFORMED, f"{INJECTED}the last byte was lost: {error}" if mishap.cut else str(error))

    def _record(self, role: str, direction: str, peer: str, message: Message) -> None:
        if self._recorder is not None and self._recorder.wants(message.stamp.round):
            self._recorder.saw(role, direction, peer, self._codec.encode(message))
