"""Deliberate faults: which silo vanishes, answers late or is cut short, to show that a federation survives it.

A fault depends only on the settings, the round, the silo and the phase of a message, never on the time of day or on the
order of asking: a resumed run meets the same faults as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Missing, Reason
from moretta.engines.settings import Fault, FaultPhase, Faults

INJECTED = "fault injection: "


@dataclass(frozen=True)
class Mishap:
    """What happens to one message and its answer.

    gone: why the silo is never reached. seconds: how late the answer is. cut: whether its last byte is lost.
    """

    gone: Missing | None = None
    seconds: float = 0.0
    cut: bool = False


NO_MISHAP = Mishap()


class Injector:
    """Decides what happens to each message, in the order of sending.

    phases: the phase of a message by its tag, where that is not "upload".
    """

    def __init__(self, faults: Faults, phases: Mapping[str, FaultPhase]) -> None:
        self._faults, self._phases = faults, phases
        self._drawn: tuple[FaultPhase, ...] = ("upload", "unmasking") if "unmasking" in phases.values() else ("upload",)
        self._gone: dict[str, tuple[int, Missing]] = {}  # by silo, the round until whose end it cannot be reached
        self._uploading: dict[str, Stamp] = {}  # by silo, when it was last asked to upload

    def befalls(self, silo: str, message: Message) -> Mishap:
        """Return what happens to a message to this silo, and to its answer."""
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
            return "set-up"  # the sum that is unmasked is one of the set-up, as common statistics are
        return phase

    def _is_gone(self, silo: str, number: int, phase: FaultPhase) -> Missing | None:
        until, missing = self._gone.get(silo, (-1, None))
        if until == number:
            return missing
        for row in self._faults.drop:
            # A round without a set-up begins with the upload: who vanishes in its set-up has vanished by then.
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
        """Return the phase in which chance takes this silo in this round, if it does."""
        name = int.from_bytes(hashlib.sha256(silo.encode()).digest()[:8], "big")
        generator = np.random.Generator(np.random.PCG64([self._faults.seed, number, name]))
        if generator.random() >= self._faults.drop_probability:
            return None
        return self._drawn[generator.integers(len(self._drawn))]


def _is_of(row: Fault, silo: str, number: int, phase: FaultPhase) -> bool:
    return (row.silo, row.round, row.phase) == (silo, number, phase)
