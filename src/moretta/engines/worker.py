"""What a worker does (`moretta.engines.workers`): it answers for its silos until the other end of its socket closes."""

from __future__ import annotations

import gc
import logging
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from moretta.contract.messages import Message
from moretta.contract.roles import Missing
from moretta.engines import frames
from moretta.engines.delivery import lengths_of
from moretta.engines.silos_here import Answered, SilosHere

log = logging.getLogger("moretta")


def play(
    ours: socket.socket, silos: SilosHere, kinds: Mapping[str, type[Message]], prepare: Callable[[], None]
) -> None:
    """Answer until there is nobody to answer to."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes, and is for the first
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        gc.freeze()  # what both processes have stays shared
        _Worker(ours, silos, kinds, prepare).run()
    except (EOFError, OSError):
        pass  # the run is over, or its process has ended
    finally:
        silos.close()


class _Worker:
    def __init__(
        self,
        ours: socket.socket,
        silos: SilosHere,
        kinds: Mapping[str, type[Message]],
        prepare: Callable[[], None],
    ) -> None:
        self._socket, self._silos, self._kinds, self._prepare = ours, silos, kinds, prepare
        silos.between = self._heed
        self._log = _Kept()
        log.handlers, log.propagate = [self._log], False
        log.setLevel(logging.INFO)

    def run(self) -> None:
        while True:
            frames.send(self._socket, self._frame(frames.receive(self._socket)))

    def _frame(self, asked: Mapping[str, Any]) -> frames.Frame:
        began = time.perf_counter()
        told = self._told(asked)
        about = {"phases": self._silos.clock.take(), "ends": self._silos.ends, "peak_mib": self._silos.peak_mib}
        about |= {"log": self._log.taken(), "busy": time.perf_counter() - began}
        try:
            return frames.packed({**told, **about})
        except TypeError as error:  # a state holds what no frame can
            return frames.packed({"failed": f"{type(error).__name__}: {error}", **about})

    def _told(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"failed": "", **self._done(asked)}
        except EOFError:
            raise
        except Exception as error:  # whatever it is, it is told where the run can end
            log.exception("a process that silos play in failed")
            return {"failed": f"{type(error).__name__}: {error}"}

    def _done(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        match asked["do"]:
            case "answer":
                messages = [frames.message_of(one, self._kinds) for one in asked["messages"]]
                found = self._silos.answers({silo: messages[place] for silo, place in asked["to"].items()})
                return {"answers": {silo: _fields_of(one) for silo, one in found.items()}}
            case "states":
                return {"states": self._silos.states(), "scores": self._silos.scores()}
            case "restore":
                self._silos.restore(asked["states"])
            case "begin":
                self._prepare()
        return {}

    def _heed(self) -> None:
        """End where nobody waits for the answers any more: before they are there, nothing else is sent."""
        poll = select.poll()  # `select.select` takes no descriptors of 1,024 and more
        poll.register(self._socket, select.POLLIN)
        if poll.poll(0):
            raise EOFError


def _fields_of(found: Answered) -> dict[str, Any]:
    if isinstance(found.answer, Missing):
        return {"reason": str(found.answer.reason), "detail": found.answer.detail, "seconds": found.seconds}
    lengths = lengths_of(found.answer)
    return {"reason": "", "answer": frames.fields_of(found.answer), "seconds": found.seconds, "lengths": lengths}


class _Kept(logging.Handler):
    """Keeps what is logged, for the process that shows it."""

    def __init__(self) -> None:
        super().__init__()
        self._records: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append((record.levelno, self.format(record)))

    def taken(self) -> list[tuple[int, str]]:
        records, self._records = self._records, []
        return records
