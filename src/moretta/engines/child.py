"""A silo in a process of its own, so that its memory can be measured and limited; its standard input takes messages."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import IO, Any, BinaryIO

from moretta.contract import framing
from moretta.contract.codec import Codec
from moretta.contract.messages import Array, Message
from moretta.contract.roles import Answering, InSteps, Phase, State, no_phase
from moretta.engines import pipe as wire
from moretta.engines.confinement import empty_folder
from moretta.engines.pipe import HERE, Acknowledged, AnswerHeader, BeSilo, Restore
from moretta.errors import CodecError, Disconnected, MisuseError

log = logging.getLogger("moretta")

# Threads have buffers of their own, and the C library's pools for them too; large arrays go back when they are freed.
SMALL = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "262144",
}
START = 120.0  # seconds to start and load its rows, whatever the deadline
LONGEST = 600.0  # seconds to answer where no deadline is given, so that a process that hangs does not hang the run
PATIENCE = 5.0  # seconds to end in, once its input has ended, and for an answer that waits to be read
STDERR_TAIL = 4096  # bytes in which the last line is looked for


class ChildClient:
    """Plays a silo's role by a process of its own, which starts with the first message.

    The process answers until `close`, or until this object or the interpreter ends. A process that dies, hangs up, or
    sends no valid answer in time costs the silo that exchange (`moretta.errors.Disconnected`). The next message starts
    another process with the last state that was sent back, from which a new set-up can continue.

    settings: `moretta.protocols.baffle.edge.settings.Settings`, dumped. state: the role's first one, from which its
    secrets follow.
    command: of the process. x, y: the rows, as the role wants them. messages: of the run. insecure: as in `BeSilo`.
    here: answers what concerns data that the process does not have, and returns None to any other message.
    charge: takes the seconds of each phase that the process spent. peak_mib: the most memory that it has taken.
    deadline: seconds to take a message, and again to answer it; `START` where it has to start first.
    ends: how often its process ended by itself or was ended.
    starting: the seconds of the last answer that went to starting; the deadline does not count them.
    """

    def __init__(
        self,
        name: str,
        settings: str,
        state: Mapping[str, bytes],
        rows: tuple[Array, Array],
        messages: Sequence[type[Message]],
        command: Sequence[str],
        insecure: bytes = b"",
        here: Callable[[Message], Message | None] = lambda message: None,
    ) -> None:
        self.phase: Phase = no_phase  # the process has its own clock
        self.charge: Callable[[str, float], None] = lambda phase, seconds: None
        self.peak_mib = self.starting = 0.0
        self.ends = 0
        self.deadline = LONGEST
        self._name, self._settings, self._state, self._rows = name, settings, dict(state), rows
        self._insecure, self._command, self._here = insecure, tuple(command), here
        self._codec = Codec((*messages, *wire.MESSAGES))
        self._process: Process | None = None

    @InSteps
    def answer(self, message: Message) -> Answering:
        """Have the process answer, and raise what it raised. Raises `moretta.errors.Disconnected` if it cannot.

        Others may answer while it works.
        """
        self.starting = 0.0
        if (answer := self._here(message)) is not None:
            return answer
        if self._process is None:
            self._start()
        self._ask(message)
        try:
            reply: Message = yield Waiting(self, time.monotonic())
            return reply
        except GeneratorExit:  # nobody takes its answer, which must not be the next message's
            self.close()
            raise

    def _start(self) -> None:
        began = time.monotonic()
        self._process = Process(self._command, own_environment())
        begin = BeSilo(stamp=HERE, settings=self._settings, state=self._state, insecure=self._insecure)
        try:
            self._done(begin, *self._rows, seconds=max(START, self.deadline))
        except Exception:  # half made, it is of no use to the next message
            self.close()
            raise
        self.starting = time.monotonic() - began

    def state(self) -> State:
        """Return the last state that the process sent; it sends one with each answer that changes it."""
        return dict(self._state)

    def restore(self, state: State) -> None:
        """Restore what `state` returned. If no process runs, the next one starts with it."""
        self._state = dict(state)
        if self._process is not None:
            try:
                self._done(Restore(stamp=HERE, state=self._state))
            except Disconnected as error:
                log.warning("%s; it starts anew with the next message", error)

    def close(self) -> None:
        """End the process, if there is one. The next message starts another."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _done(self, message: Message, *arrays: Array, seconds: float | None = None) -> None:
        self._ask(message, *arrays, seconds=seconds)
        answer = self.reply(seconds)
        if not isinstance(answer, Acknowledged):
            raise self._gone(f"sent `{answer.TAG}` where nothing was asked")

    def _ask(self, message: Message, *arrays: Array, seconds: float | None = None) -> None:
        with self._within(seconds) as process:
            framing.write(process.input, self._codec.encode(message))
            for array in arrays:
                wire.send_array(process.input, array)

    def reply(self, seconds: float | None = None) -> Message:
        """Return the answer to what was asked last. Raises as `answer`. seconds: to wait, None for the deadline."""
        began = time.monotonic()
        with self._within(seconds) as process:
            envelope = self._receive(process)
            answer = None if isinstance(envelope, AnswerHeader) and envelope.error else self._receive(process)
        if not isinstance(envelope, AnswerHeader):
            raise self._gone(f"sent `{envelope.TAG}` before its envelope")
        waited = (time.monotonic() - began) / (sum(envelope.seconds.values()) or 1.0)
        for phase, spent in envelope.seconds.items():  # the rest went by while others answered
            self.charge(phase, spent * min(1.0, waited))
        self.peak_mib = max(self.peak_mib, envelope.peak_mib)
        self._state = dict(envelope.state) or self._state
        if answer is None:
            raise wire.error_of(envelope)
        return answer

    @contextlib.contextmanager
    def _within(self, seconds: float | None) -> Iterator[Process]:
        """Give the process for so long, None for the deadline; end it with an error where it fails or takes longer."""
        seconds, process = self.deadline if seconds is None else seconds, self._process
        if process is None:
            raise MisuseError(f"the process of silo `{self._name}` has ended; expected it to run")
        process.wait_until(time.monotonic() + seconds)
        try:
            yield process
        except TimeoutError:
            process.kill()
            raise self._gone(f"did not answer within {seconds:g} s") from None
        except OSError:
            raise self._gone("has ended") from None
        except CodecError as error:
            raise self._gone(f"sent what is no answer: {error}") from None

    def _receive(self, process: Process) -> Message:
        data = framing.read(process.output)
        if data is None:
            raise BrokenPipeError
        return self._codec.decode(data)

    def _gone(self, what: str) -> Disconnected:
        """End the process and return the error that tells why."""
        said = self._process.close() if self._process is not None else ""
        self._process = None
        self.ends += 1
        return Disconnected(f"the process of silo `{self._name}` {what}" + (f" ({said})" if said else ""))

    def __repr__(self) -> str:
        return f"ChildClient({self._name!r})"


class Waiting:
    """Waits for the answer of a silo's process: `moretta.contract.roles.Work` that is best done last."""

    least = 2

    def __init__(self, client: ChildClient, asked: float) -> None:
        self._client, self._asked = client, asked

    @property
    def key(self) -> Hashable:
        """What no other silo's has."""
        return id(self._client)

    def alone(self) -> Message:
        """Return the answer. Raises as `ChildClient.answer`.

        The deadline counts from when it was asked; an answer that lies there has `PATIENCE` to come through the pipe.
        """
        left = self._asked + self._client.deadline - time.monotonic()
        return self._client.reply(max(left, min(PATIENCE, self._client.deadline)))

    def together(self, works: Sequence[Waiting]) -> Sequence[Message]:
        """Return the answers of several."""
        return [work.alone() for work in works]


def own_environment() -> dict[str, str]:
    """Return this process's environment for a silo's, which is small and starts in another folder."""
    found = {**os.environ, **SMALL}
    if "PYTHONPATH" in found:
        found["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, found["PYTHONPATH"].split(os.pathsep)))
    return found


class Process:
    """A process in an empty folder, and its pipes. What it writes to standard error is kept in an unnamed file.

    leads: whether it leads a session of its own, of which nothing outlives it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, leads: bool = False) -> None:
        with contextlib.ExitStack() as stack:
            errors = stack.enter_context(tempfile.TemporaryFile())
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                cwd=stack.enter_context(empty_folder()),
                env=environment,
                start_new_session=leads,
            )
            held = stack.pop_all()
        self._leads = leads
        self._pipes = _Pipe(self._popen.stdin), _Pipe(self._popen.stdout)
        self.input, self.output = _binary(self._pipes[0]), _binary(io.BufferedReader(self._pipes[1]))
        self._finalizer = weakref.finalize(self, _end, self._popen, errors, held, leads)  # or as the interpreter ends

    def wait_until(self, moment: float) -> None:
        """Let reads and writes raise TimeoutError after a moment of `time.monotonic`."""
        for pipe in self._pipes:
            pipe.until = moment

    def kill(self) -> None:
        """End it at once; `close` is to follow."""
        _kill(self._popen, self._leads)

    def leave(self) -> None:
        """Leave it to the process that started it, of which this one is a fork."""
        self._finalizer.detach()
        self._popen.returncode = 0  # it is not this process's child, so that nobody here waits for it
        for stream in (self._popen.stdin, self._popen.stdout):
            if stream is not None:
                stream.close()

    def close(self) -> str:
        """Close its input, and kill it if it does not end. Return how it ended, with its last line of stderr."""
        return self._finalizer() or ""


class _Pipe(io.RawIOBase):
    """One end of a pipe, which waits for the other until a moment of `time.monotonic`, then raises TimeoutError."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        if pipe is None:
            raise MisuseError("expected a process with pipes")
        self._pipe, self.until = pipe, 0.0
        os.set_blocking(pipe.fileno(), False)

    def readable(self) -> bool:
        """Return True, as io wants to know."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what is there, once anything is; 0 at the end."""
        view = memoryview(buffer).cast("B")
        self._wait(select.POLLIN)
        return os.readv(self._pipe.fileno(), [view])

    def write(self, data: Any) -> int:
        """Write all of it."""
        view, written = memoryview(data).cast("B"), 0
        while written < len(view):
            self._wait(select.POLLOUT)
            with contextlib.suppress(BlockingIOError):  # less room than the system said
                written += os.write(self._pipe.fileno(), view[written:])
        return written

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._pipe.fileno(), event)
        if not poll.poll(max(0.0, self.until - time.monotonic()) * 1000):
            raise TimeoutError


def _binary(stream: Any) -> BinaryIO:
    binary: BinaryIO = stream
    return binary


def _kill(popen: subprocess.Popen[bytes], leads: bool) -> None:
    """Kill a process, and what it started where it leads a session."""
    if leads:
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(popen.pid, signal.SIGKILL)
    else:
        popen.kill()


def _end(popen: subprocess.Popen[bytes], errors: IO[bytes], held: contextlib.ExitStack, leads: bool) -> str:
    """End a process; return how it ended, and the last line that it wrote to standard error."""
    for stream in (popen.stdin, popen.stdout):
        try:
            if stream is not None:
                stream.close()
        except OSError:
            pass  # what was still to be written has nobody to read it
    try:
        popen.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        _kill(popen, leads)
        popen.wait()
    if leads:
        _kill(popen, leads)
    with held:
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - STDERR_TAIL))
        lines = errors.read().decode(errors="replace").strip().splitlines()
    code = popen.returncode
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{how}: {lines[-1]:.300}" if lines else how
