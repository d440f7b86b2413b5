"""A process of its own, its pipes, and a confined one that computes with another party's graph on arrays.

`ConfinedProcess` is the parent's half, and `serve` the process's own. A request and an answer are named arrays
(`moretta.engines.frames`); nothing is pickled.

    parent                                  the process
                                            is confined (`moretta.engines.confinement`)
      arrays by name                   -->  computes
                                       <--  arrays by name, or the one array `error`: its class and its sentence
"""

import contextlib
import io
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, BinaryIO, cast

import numpy as np

from moretta.contract import framing
from moretta.contract.codec import pack_arrays
from moretta.contract.messages import Array
from moretta.engines.confinement import confine, empty_folder, readable
from moretta.engines.frames import LARGEST, receive_arrays, send_arrays
from moretta.errors import CodecError, MisuseError, MorettaError, ParameterError

START = 120.0  # seconds to start and load its rows, whatever the deadline
LONGEST = 600.0  # seconds to answer without a deadline, so that a process that hangs does not hang the run
PATIENCE = 5.0  # seconds to end after its input has ended, and to transfer a finished answer
STDERR_TAIL = 4096  # bytes in which the last line is searched
ERROR = "error"
SENTENCE = 1000  # characters


class Process:
    """A process in an empty folder, and its pipes. Its standard error is kept in an unnamed file.

    Args:
        leads: Whether it leads a session of its own, which ends with it.
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
        self.input, self.output = cast(BinaryIO, self._pipes[0]), cast(BinaryIO, io.BufferedReader(self._pipes[1]))
        self._finalizer = weakref.finalize(self, _end, self._popen, errors, held, leads)  # also at exit

    @contextlib.contextmanager
    def within(self, seconds: float, gone: Callable[[str], Exception]) -> Iterator[None]:
        """Limit reading and writing to these seconds, then kill the process.

        Args:
            gone: Closes the process, and returns the error for a reason in words.

        Raises:
            Exception: The error of `gone`: the process is late, has ended or sends malformed answers.
        """
        for pipe in self._pipes:
            pipe.until = time.monotonic() + seconds
        try:
            yield
        except TimeoutError:
            self.kill()
            raise gone(f"did not answer within {seconds:g} s") from None
        except OSError:
            raise gone("has ended") from None
        except CodecError as error:
            raise gone(f"sent a malformed answer: {error}") from None

    def kill(self) -> None:
        """Kill the process; `close` must follow."""
        _kill(self._popen, self._leads)

    def leave(self) -> None:
        """Leave the process to its parent, of which this one is a fork."""
        self._finalizer.detach()
        self._popen.returncode = 0  # not this process's child, so this process must not wait for it
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
        """Return True, for io."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read available bytes, waiting for the first; 0 at the end."""
        view = memoryview(buffer).cast("B")
        self._wait(select.POLLIN)
        return os.readv(self._pipe.fileno(), [view])

    def write(self, data: Any) -> int:
        """Write all bytes."""
        view, written = memoryview(data).cast("B"), 0
        while written < len(view):
            self._wait(select.POLLOUT)
            with contextlib.suppress(BlockingIOError):  # less room than the system reported
                written += os.write(self._pipe.fileno(), view[written:])
        return written

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._pipe.fileno(), event)
        if not poll.poll(max(0.0, self.until - time.monotonic()) * 1000):
            raise TimeoutError


def kill_group(number: int) -> None:
    """Kill a process that leads a group, and its descendants."""
    with contextlib.suppress(ProcessLookupError):  # all of its processes have ended
        os.killpg(number, signal.SIGKILL)


def last_line(errors: IO[bytes]) -> str:
    """Return the last line in a process's file of errors, at most 300 characters; "" without one."""
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - STDERR_TAIL))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f"{lines[-1]:.300}" if lines else ""


def _kill(popen: subprocess.Popen[bytes], leads: bool) -> None:
    """Kill a process, with its descendants if it leads a session."""
    if leads:
        kill_group(popen.pid)
    else:
        popen.kill()


def _end(popen: subprocess.Popen[bytes], errors: IO[bytes], held: contextlib.ExitStack, leads: bool) -> str:
    """End a process; return how it ended, and its last line of standard error."""
    for stream in (popen.stdin, popen.stdout):
        try:
            if stream is not None:
                stream.close()
        except OSError:
            pass  # the unwritten input has no reader
    try:
        popen.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        _kill(popen, leads)
        popen.wait()
    if leads:
        _kill(popen, leads)
    with held:
        line = last_line(errors)
    code = popen.returncode
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{how}: {line}" if line else how


def command(*program: str) -> list[str]:
    """Return the command line of Python for a confined process. program: further words, such as ``-m module``."""
    return [sys.executable, "-E", "-P", "-W", "ignore", *program]


def environment(threads: int = 1) -> dict[str, str]:
    """Return a confined process's environment, which has only the places of programs."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "PATH": os.environ.get("PATH", ""),
        "LANG": "C.UTF-8",
        "TORCHINDUCTOR_CACHE_DIR": "/",  # an existing folder, so that torch.optim makes none
    }


class ConfinedProcess:
    """A process that calls `serve`, from the first request until `close` or the end of this object.

    Threads wait for each other, and a fork of this process starts its own, because an answer belongs to the last
    request.

    Args:
        module: The process's, run by ``python -m``.
        threads: Of its computations.
    """

    def __init__(self, module: str, threads: int = 1) -> None:
        self._module, self._threads = module, threads
        self._process: Process | None = None
        self._lock, self._owner = threading.Lock(), os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfinedProcess, (self._module, self._threads)  # a copy has a process of its own

    def ask(self, arrays: Mapping[str, Array], seconds: float = LONGEST) -> dict[str, Array]:
        """Return the process's answer. Raises ParameterError for its error, its end, a late or a malformed answer."""
        if self._owner != os.getpid():  # a fork: the process and the lock are the parent's
            if self._process is not None:
                self._process.leave()
            self._process, self._lock, self._owner = None, threading.Lock(), os.getpid()
        with self._lock:
            answer = self._exchange(arrays, seconds)
        if ERROR in answer:
            text = answer[ERROR].tobytes()[: 4 * SENTENCE].decode(errors="replace")
            raise ParameterError("".join(character if character.isprintable() else " " for character in text))
        return answer

    def _exchange(self, arrays: Mapping[str, Array], seconds: float) -> dict[str, Array]:
        if self._process is None:
            self._process = Process(command("-m", self._module), environment(self._threads), leads=True)
            seconds += START
        process = self._process
        try:
            with process.within(seconds, self._gone):
                send_arrays(process.input, arrays)
                if (answer := receive_arrays(process.output)) is None:
                    raise BrokenPipeError
                return answer
        except BaseException:  # such as ctrl-c: its answer must not become the next request's
            if self._process is not None:
                process.kill()
                self.close()
            raise

    def close(self) -> str:
        """End the process, if any; return how it ended."""
        process, self._process = self._process, None
        return "" if process is None else process.close()

    def _gone(self, what: str) -> ParameterError:
        how = "".join(character if character.isprintable() else " " for character in self.close())
        return ParameterError(f"the process of the model's graph {what} ({how})")


def serve(answer: Callable[[dict[str, Array]], Mapping[str, Array]]) -> None:
    """Confine this process, then answer on standard input and output until they end."""
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other output must not mix with answers
    confine(readable())
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):  # the parent is gone, or about to end
        while (arrays := receive_arrays(sys.stdin.buffer, LARGEST)) is not None:
            framing.write(sink, *_answered(answer, arrays))


def _answered(
    answer: Callable[[dict[str, Array]], Mapping[str, Array]], arrays: dict[str, Array]
) -> Sequence[bytes | memoryview]:
    try:
        return pack_arrays({name: np.asarray(array) for name, array in answer(arrays).items()})
    except Exception as error:  # noqa: BLE001  # a graph may raise anything; the process continues
        text = str(error) if isinstance(error, MorettaError) else f"{type(error).__name__}: {error}"
        line = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
        return pack_arrays({ERROR: np.frombuffer(line[:SENTENCE].encode(errors="replace"), np.uint8)})
