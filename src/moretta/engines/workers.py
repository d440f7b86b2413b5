"""Silos that run in several processes of this machine, so that all of its cores work.

Workers are forked from the process that has built the roles, once, before the first round. So they have their silos'
rows and roles without a transfer, whatever a model is made of, and share the memory that they only read. Each silo runs
in one worker from then on. Its role in the first process stands still, and is updated when its state is needed
(`Workers.gather`), so that no secret of a silo is drawn twice.

    the process with the server            a worker
      answer: messages, to whom       -->
                                      <--  the silos' answers, seconds by phase, lines for the log
      states                          -->
                                      <--  the silos' states
      restore: states                 -->
                                      <--  done

A message to many silos is sent once (`moretta.engines.frames`). A worker ends with its socket: when the run ends, or
its parent process for any reason. If a worker ends before, it takes its silos' states along. Some of these must not be
restored from an earlier time (releases, and in a run without a folder the opened sums). So no other worker replaces it:
the run fails, and continues from its checkpoint.
"""

import gc
import logging
import os
import select
import selectors
import signal
import socket
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from moretta.contract.codec import Codec
from moretta.contract.messages import Message
from moretta.contract.roles import Client, Missing, Reason, State
from moretta.engines import child, frames
from moretta.engines import process as of_silo
from moretta.engines.delivery import lengths_of
from moretta.engines.silos_here import Answered, SilosHere, absent
from moretta.errors import ParameterError, PeerError, RunFailed

log = logging.getLogger("moretta")

# Seconds to end, beside those for silos' own processes; a worker checks for its end between two silos.
PATIENCE = 1.0


class _Worker(NamedTuple):
    """A worker. children: the number of its silos with processes of their own, which it ends one by one."""

    silos: Sequence[str]
    process: int
    socket: socket.socket
    children: int


class Workers:
    """Ask silos in `count` processes, as `SilosHere` does in one.

    Args:
        local: The same silos in this process.
        prepare: Called in each worker at its start.

    Raises:
        ParameterError: A worker cannot start.
    """

    def __init__(
        self, clients: Mapping[str, Client], codec: Codec, local: SilosHere, count: int, prepare: Callable[[], None]
    ) -> None:
        self._clients, self._kinds, self.clock = clients, codec.kinds, local.clock
        self._workers: list[_Worker] = []
        self.close = weakref.finalize(self, _end, self._workers, os.getpid())  # also when the interpreter ends
        self._failure: RunFailed | None = None
        self._asked = False  # since the last `gather`
        self._scores: Mapping[str, float] = {}
        self._ends: dict[int, int] = {}
        self._peaks: dict[int, float | None] = {}
        try:
            for silos in shared_out(local.parts, count):
                self._workers.append(self._forked(silos, local, prepare))
            self._exchange({number: {"do": "begin"} for number in range(len(self._workers))})
        except (OSError, RunFailed) as error:
            self.close()
            raise ParameterError(
                f"[engine] workers: silos cannot run in other processes here ({error}); use 1"
            ) from None

    def answers(self, messages: Mapping[str, Message]) -> Mapping[str, Answered]:
        """Return each silo's answer to its message, in their order. Raises RunFailed if a worker has ended."""
        self._asked, requests = True, dict[int, Any]()
        for number, worker in enumerate(self._workers):
            if mine := {silo: messages[silo] for silo in worker.silos if silo in messages}:
                sent = {id(message): message for message in mine.values()}
                order = {key: place for place, key in enumerate(sent)}
                requests[number] = {
                    "do": "answer",
                    "messages": [frames.fields_of(message) for message in sent.values()],
                    "to": {silo: order[id(message)] for silo, message in mine.items()},
                }
        replies = self._exchange(requests)
        answers = {
            silo: self._answered(silo, reply["answers"][silo])
            for reply in replies.values()
            for silo in reply["answers"]
        }
        self._charge(replies.values())
        return {silo: answers[silo] if silo in answers else absent(silo) for silo in messages}

    @property
    def peak_mib(self) -> float | None:
        """The largest memory of any silo's own process so far; None without such silos."""
        return max((peak for peak in self._peaks.values() if peak is not None), default=None)

    @property
    def ends(self) -> int:
        """The number of ends of silos' processes."""
        return sum(self._ends.values())

    def scores(self) -> Mapping[str, float]:
        """Return the scores that silos had received when their states were last gathered."""
        return self._scores

    def gather(self) -> None:
        """Copy the states of the workers' roles to the roles of this process."""
        if not self._asked:
            return
        for reply in self._exchange({number: {"do": "states"} for number in range(len(self._workers))}).values():
            for silo, state in reply["states"].items():
                self._clients[silo].restore(state)
            self._scores = self._scores or reply["scores"]
        self._asked = False

    def spread(self, states: Mapping[str, State]) -> None:
        """Restore states in the workers' silos."""
        self._exchange(
            {
                number: {"do": "restore", "states": {silo: states[silo] for silo in worker.silos if silo in states}}
                for number, worker in enumerate(self._workers)
            }
        )

    def _answered(self, silo: str, fields: Mapping[str, Any]) -> Answered:
        if fields["reason"]:
            return Answered(Missing(Reason(fields["reason"]), fields["detail"]), fields["seconds"])
        try:
            return Answered(frames.message_of(fields["answer"], self._kinds), fields["seconds"], fields["lengths"])
        except (PeerError, KeyError) as error:  # a user's code may return other types than it declares
            return Answered(Missing(Reason.MALFORMED, str(error)), fields["seconds"])

    def _charge(self, replies: Collection[Mapping[str, Any]]) -> None:
        """Charge the workers' phases: in sum the busiest worker's seconds, to each phase its share of all the work.

        The remaining seconds, in which messages passed between processes, stay with the delivery.
        """
        busy = [reply["busy"] for reply in replies]
        for reply in replies:
            for phase, spent in reply["phases"].items():
                self.clock.charge(phase, spent * max(busy) / sum(busy))

    def _exchange(self, requests: Mapping[int, Any]) -> dict[int, Any]:
        """Send each worker its asks; return the answers, in the order of the asks."""
        if self._failure is not None:
            raise self._failure
        number = -1
        try:
            for number, value in requests.items():
                frames.send(self._workers[number].socket, frames.packed(value))
            replies = dict[int, Any]()
            for number in self._readable(list(requests)):
                replies[number] = frames.receive(self._workers[number].socket)
        except (EOFError, OSError):
            how = _how(self._workers[number].process, time.monotonic() + PATIENCE)
            self._fail(number, f"has ended{how}")
        for number, reply in sorted(replies.items()):
            self._ends[number], self._peaks[number] = reply["ends"], reply["peak_mib"]
            for level, text in reply["log"]:
                log.log(level, "%s", text)
            if reply["failed"]:
                self._fail(number, f"failed: {reply['failed']}")
        return {number: replies[number] for number in requests}

    def _readable(self, numbers: list[int]) -> Iterator[int]:
        """Yield workers as their answers come, so that one that has ended is noticed at once."""
        with selectors.DefaultSelector() as selector:
            for number in numbers:
                selector.register(self._workers[number].socket, selectors.EVENT_READ, number)
            while selector.get_map():
                for key, _ in selector.select():
                    selector.unregister(key.fileobj)
                    yield key.data

    def _fail(self, number: int, what: str) -> NoReturn:
        worker = self._workers[number]
        self.close()
        self._failure = RunFailed(
            f"a process that runs silos {what}, and with it {', '.join(worker.silos):.200}; where memory "
            "was short, fewer [engine] workers need less"
        )
        raise self._failure from None

    def _forked(self, silos: Sequence[str], local: SilosHere, prepare: Callable[[], None]) -> _Worker:
        ours, theirs = socket.socketpair()
        # An interrupt waits until the worker ignores it.
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            with warnings.catch_warnings():
                # Python warns of threads, whose locks stay locked after a fork. Those of numpy and torch are idle here.
                warnings.simplefilter("ignore", DeprecationWarning)
                process = os.fork()
            if not process:
                try:
                    ours.close()
                    for other in self._workers:  # else a worker would not see that the first process has ended
                        other.socket.close()
                    play(theirs, local.only(silos), self._kinds, prepare)
                except Exception:  # noqa: BLE001  # no caller of the parent's may handle it
                    traceback.print_exc()
                finally:
                    os._exit(0)  # skips the first process's exit handlers and unwritten output
        except OSError:
            ours.close()
            theirs.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        theirs.close()
        return _Worker(silos, process, ours, sum(isinstance(self._clients[silo], child.ChildClient) for silo in silos))


def shared_out(parts: Sequence[Sequence[str]], count: int) -> list[list[str]]:
    """Return the silos of each of `count` workers: whole parts, in order; fewer parts make fewer workers."""
    count = min(count, len(parts))
    cuts = [round(number * len(parts) / count) for number in range(count + 1)]
    return [[silo for part in parts[cuts[k] : cuts[k + 1]] for silo in part] for k in range(count)]


def _end(workers: Sequence[_Worker], owner: int) -> None:
    """End workers and their silos' processes, within `PATIENCE`."""
    if os.getpid() != owner:  # a copy in a worker
        return
    for worker in workers:
        worker.socket.close()
    began = time.monotonic()
    for worker in workers:  # a killed worker cannot end a silo's process that hangs
        _how(worker.process, began + PATIENCE + worker.children * of_silo.PATIENCE)


def _how(process: int, until: float) -> str:
    """Wait for a process until a moment of `time.monotonic`, then end it; return how it ended."""
    try:
        while not (waited := os.waitpid(process, os.WNOHANG))[0]:
            if time.monotonic() > until:
                os.kill(process, signal.SIGKILL)
                waited = os.waitpid(process, 0)
                break
            time.sleep(0.001)
    except ChildProcessError:  # an earlier call has waited for it
        return ""
    code = os.waitstatus_to_exitcode(waited[1])
    return f" (killed by signal {-code})" if code < 0 else ""


# A worker: it answers for its silos until the other end of its socket closes.


def play(
    ours: socket.socket, silos: SilosHere, kinds: Mapping[str, type[Message]], prepare: Callable[[], None]
) -> None:
    """Answer requests until the other side is gone."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-c reaches all processes, and is meant for the first
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        gc.freeze()  # common memory stays shared
        _Answering(ours, silos, kinds, prepare).run()
    except (EOFError, OSError):
        pass  # the run is over, or its process has ended
    finally:
        silos.close()


class _Answering:
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

    def _frame(self, request: Mapping[str, Any]) -> frames.Frame:
        began = time.perf_counter()
        reply = self._outcome(request)
        about = {"phases": self._silos.clock.take(), "ends": self._silos.ends, "peak_mib": self._silos.peak_mib}
        about |= {"log": self._log.taken(), "busy": time.perf_counter() - began}
        try:
            return frames.packed({**reply, **about})
        except TypeError as error:  # a state has a value that frames cannot hold
            return frames.packed({"failed": f"{type(error).__name__}: {error}", **about})

    def _outcome(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"failed": "", **self._done(request)}
        except EOFError:
            raise
        except Exception as error:  # any error is reported to the process that can end the run
            log.exception("a process that runs silos failed")
            return {"failed": f"{type(error).__name__}: {error}"}

    def _done(self, request: Mapping[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "answer":
                messages = [frames.message_of(framed, self._kinds) for framed in request["messages"]]
                answers = self._silos.answers({silo: messages[place] for silo, place in request["to"].items()})
                return {"answers": {silo: _fields_of(answered) for silo, answered in answers.items()}}
            case "states":
                return {"states": self._silos.states(), "scores": self._silos.scores()}
            case "restore":
                self._silos.restore(request["states"])
            case "begin":
                self._prepare()
        return {}

    def _heed(self) -> None:
        """End if no process waits for the answers any more; before they are complete, no other request arrives."""
        poll = select.poll()  # `select.select` takes no descriptors of 1,024 and more
        poll.register(self._socket, select.POLLIN)
        if poll.poll(0):
            raise EOFError


def _fields_of(answered: Answered) -> dict[str, Any]:
    if isinstance(answered.answer, Missing):
        return {"reason": str(answered.answer.reason), "detail": answered.answer.detail, "seconds": answered.seconds}
    lengths = lengths_of(answered.answer)
    return {"reason": "", "answer": frames.fields_of(answered.answer), "seconds": answered.seconds, "lengths": lengths}


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self._records: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append((record.levelno, self.format(record)))

    def taken(self) -> list[tuple[int, str]]:
        records, self._records = self._records, []
        return records
