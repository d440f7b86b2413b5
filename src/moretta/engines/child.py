"""A silo in a process of its own, so that its memory can be measured and limited; it reads messages on standard input.

Each part follows its length (`moretta.contract.framing`): a message of the codec, or named arrays
(`moretta.engines.frames`). Standard output carries nothing else. The command line and the environment hold no secret.

    parent                                          the process
      BeSilo(settings, its state), its rows     -->   makes its role
      Restore(state)                            -->   restores it
      any message of the protocol               -->   answers it
                                                <--   AnswerHeader, and unless it has an error, the answer, or
                                                      Acknowledged where the message needs none
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import numpy as np

from moretta import errors
from moretta.contract import framing
from moretta.contract.codec import Codec
from moretta.contract.messages import Array, Message, Stamp, Tensors, message
from moretta.contract.roles import Answering, InSteps, Phase, State, no_phase
from moretta.engines.frames import send_arrays
from moretta.engines.process import LONGEST, PATIENCE, START, Process
from moretta.errors import Disconnected, MisuseError, MorettaError

log = logging.getLogger("moretta")

LOCAL = Stamp("edge", 0, 0)  # of messages that do not leave the machine
SENTENCE = 10_000  # characters


@message("edge/be-silo")
class BeSilo(Message):
    """Become this silo, by its settings (`moretta.protocols.baffle.silo.recipe`) and state; its rows follow as arrays.

    Attributes:
        insecure: For tests, the root of its keys; if empty, the operating system draws them.
    """

    settings: str
    state: Tensors
    insecure: bytes


@message("edge/restore")
class Restore(Message):
    """Set the role's state."""

    state: Tensors


@message("edge/done")
class Acknowledged(Message):
    """The message was handled."""


@message("edge/envelope")
class AnswerHeader(Message):
    """The header of an answer; protocols never receive it.

    Attributes:
        seconds: Seconds by phase.
        peak_mib: The process's largest resident memory, in MiB.
        state: The silo's state, if it has changed.
        error, sentence: The class of an error and its sentence; no answer follows then. Empty without an error.
    """

    seconds: Mapping[str, float]
    peak_mib: float
    state: Tensors
    error: str
    sentence: str


MESSAGES = (BeSilo, Restore, Acknowledged, AnswerHeader)


def as_arrays(state: Mapping[str, bytes]) -> dict[str, Array]:
    """Return a state for the codec, because an optimizer's moments are longer than a message's bytes may be."""
    return {name: np.frombuffer(value, np.uint8) for name, value in state.items()}


def as_bytes(state: Tensors) -> dict[str, bytes]:
    """Undo `as_arrays`."""
    return {name: value.tobytes() for name, value in state.items()}


_ERRORS = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, MorettaError)
}


def error_of(envelope: AnswerHeader) -> Exception:
    """Return the error of a header, of the same class if it is one of ours."""
    kind = _ERRORS.get(envelope.error)
    return RuntimeError(f"{envelope.error}: {envelope.sentence}") if kind is None else kind(envelope.sentence)


# One thread and one memory pool save their buffers; a low threshold returns large arrays to the system when freed.
SMALL = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "262144",
}


class ChildClient:
    """Run a silo's role in a process of its own, which starts with the first message.

    The process answers until `close`, or until this object or the interpreter ends. If it dies, hangs up, or sends no
    valid answer in time, the silo misses that exchange (`moretta.errors.Disconnected`). The next message starts another
    process with the last returned state, from which a new set-up can continue.

    Attributes: `charge` receives the process's seconds by phase. `peak_mib` is its largest memory. `deadline` is the
    seconds to take a message, and again to answer it, or `START` if the process has to start first. `ends` counts the
    ends of processes. `starting` is the start's part of the last answer's seconds, which the deadline does not count.

    Args:
        name: The silo's.
        settings: `moretta.protocols.baffle.silo.recipe.EdgeSettings`, dumped.
        state: The role's first one, which determines its secrets.
        command: Of the process.
        rows: Inputs and targets in the role's form.
        messages: Of the run.
        insecure: As in `BeSilo`.
        answer_locally: Answers messages about data that the process lacks, and returns None to any other.
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
        answer_locally: Callable[[Message], Message | None] = lambda message: None,
    ) -> None:
        self.phase: Phase = no_phase  # the process measures its own phases
        self.charge: Callable[[str, float], None] = lambda phase, seconds: None
        self.peak_mib = self.starting = 0.0
        self.ends = 0
        self.deadline = LONGEST
        self._name, self._settings, self._state = name, settings, dict(state)
        self._rows = dict(zip("xy", rows, strict=True))
        self._insecure, self._command, self._answer_locally = insecure, tuple(command), answer_locally
        self._codec = Codec((*messages, *MESSAGES))
        self._process: Process | None = None

    @InSteps
    def answer(self, message: Message) -> Answering:
        """Return the process's answer; other silos may answer meanwhile.

        Raises:
            Disconnected: No valid answer came in time. The process's own errors are raised as they are.
        """
        self.starting = 0.0
        if (answer := self._answer_locally(message)) is not None:
            return answer
        if self._process is None:
            self._start()
        self._ask(message)
        try:
            reply: Message = yield Waiting(self, time.monotonic())
            return reply
        except GeneratorExit:  # no caller takes the answer, which must not become the next message's
            self.close()
            raise

    def _start(self) -> None:
        began = time.monotonic()
        self._process = Process(self._command, own_environment())
        state = as_arrays(self._state)
        begin = BeSilo(stamp=LOCAL, settings=self._settings, state=state, insecure=self._insecure)
        try:
            self._done(begin, self._rows, seconds=max(START, self.deadline))
        except Exception:  # half started, it cannot serve the next message
            self.close()
            raise
        self.starting = time.monotonic() - began

    def state(self) -> State:
        """Return the last state that the process sent; it sends each changed state with its answer."""
        return dict(self._state)

    def restore(self, state: State) -> None:
        """Restore a state of `state`. If no process runs, the next one starts with it."""
        self._state = dict(state)
        if self._process is not None:
            try:
                self._done(Restore(stamp=LOCAL, state=as_arrays(self._state)))
            except Disconnected as error:
                log.warning("%s; it starts anew with the next message", error)

    def close(self) -> None:
        """End the process, if any. The next message starts another."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _done(self, message: Message, rows: Mapping[str, Array] | None = None, seconds: float | None = None) -> None:
        self._ask(message, rows, seconds)
        answer = self.reply(seconds)
        if not isinstance(answer, Acknowledged):
            raise self._gone(f"sent `{answer.TAG}` where nothing was asked")

    def _ask(self, message: Message, rows: Mapping[str, Array] | None = None, seconds: float | None = None) -> None:
        with self._within(seconds) as process:
            framing.write(process.input, self._codec.encode(message))
            if rows is not None:
                send_arrays(process.input, rows)

    def reply(self, seconds: float | None = None) -> Message:
        """Return the answer to the last message.

        Args:
            seconds: The time to wait; None waits for the deadline.

        Raises:
            Disconnected: As `answer`.
        """
        began = time.monotonic()
        with self._within(seconds) as process:
            envelope = self._receive(process)
            answer = None if isinstance(envelope, AnswerHeader) and envelope.error else self._receive(process)
        if not isinstance(envelope, AnswerHeader):
            raise self._gone(f"sent `{envelope.TAG}` before its envelope")
        waited = (time.monotonic() - began) / (sum(envelope.seconds.values()) or 1.0)
        for phase, spent in envelope.seconds.items():  # the other seconds passed while others answered
            self.charge(phase, spent * min(1.0, waited))
        self.peak_mib = max(self.peak_mib, envelope.peak_mib)
        self._state = as_bytes(envelope.state) or self._state
        if answer is None:
            raise error_of(envelope)
        return answer

    @contextlib.contextmanager
    def _within(self, seconds: float | None) -> Iterator[Process]:
        """Limit the exchange to these seconds, None for the deadline; end the process with an error on failure."""
        seconds, process = self.deadline if seconds is None else seconds, self._process
        if process is None:
            raise MisuseError(f"the process of silo `{self._name}` has ended; expected it to run")
        with process.within(seconds, self._gone):
            yield process

    def _receive(self, process: Process) -> Message:
        data = framing.read(process.output)
        if data is None:
            raise BrokenPipeError
        return self._codec.decode(data)

    def _gone(self, what: str) -> Disconnected:
        ending = self._process.close() if self._process is not None else ""
        self._process = None
        self.ends += 1
        return Disconnected(f"the process of silo `{self._name}` {what}" + (f" ({ending})" if ending else ""))

    def __repr__(self) -> str:
        return f"ChildClient({self._name!r})"


class Waiting:
    """Waiting for the answer of a silo's process: `moretta.contract.roles.Work` that is best done last."""

    least = 2

    def __init__(self, client: ChildClient, asked: float) -> None:
        self._client, self._asked = client, asked

    @property
    def key(self) -> Hashable:
        """A key that no other silo's work has."""
        return id(self._client)

    def alone(self) -> Message:
        """Return the answer.

        The deadline counts from the message; a finished answer has `PATIENCE` to pass through the pipe.

        Raises:
            Disconnected: As `ChildClient.answer`.
        """
        left = self._asked + self._client.deadline - time.monotonic()
        return self._client.reply(max(left, min(PATIENCE, self._client.deadline)))

    def together(self, works: "Sequence[Waiting]") -> Sequence[Message]:
        """Return the answers of several works."""
        return [work.alone() for work in works]


def own_environment() -> dict[str, str]:
    """Return this process's environment, adapted to a silo's process, which is small and starts in another folder."""
    environment = {**os.environ, **SMALL}
    if "PYTHONPATH" in environment:
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, environment["PYTHONPATH"].split(os.pathsep)))
    return environment
