"""A site's half of the engine: it accepts work from the server, has the silo's role do it, and returns the result.

The role works in its own thread, and a request waits for it no longer than the request allows. So a silo that trains
for hours still answers at once that it is busy, which distinguishes it from a killed one. Bytes that the server's
session has not signed (`moretta.engines.flare.signing`) change nothing here.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from moretta.contract.codec import LARGEST, Codec
from moretta.contract.messages import Message
from moretta.contract.roles import Client, answered
from moretta.engines.child import ChildClient
from moretta.engines.flare import envelope as wire
from moretta.engines.flare.signing import Gate, OtherProcess, Trust
from moretta.engines.usage import Clock
from moretta.errors import CodecError, Disconnected, MisuseError, MorettaError, PeerError, PolicyError, with_notes

log = logging.getLogger("moretta")

AT_ONCE = 0.25  # seconds in which an answer accompanies the acknowledgement of its question
# The sentence that a server receives for a site's own error, whose cause may be in a row. The ticket is random; the
# site's own log has the error under it.
UNFIT = "does not answer; its own log says why, under ticket "
LONGEST_WAIT = 10.0  # the most seconds that a poll may wait
QUIET = 1.0  # seconds between two lines of the log about rejected bytes, because a stranger may send any number


class HostedSilo(Protocol):
    """A silo for its worker: it can join a run, save its state, and receive the run's release.

    Attributes:
        largest: The largest number of bytes of an accepted message.
        timed: Whether the server learns how long the role worked, which depends on its rows.
    """

    name: str
    fingerprint: str
    largest: int
    timed: bool

    def enter(self, hello: wire.Hello) -> tuple[Client, Codec]:
        """Join a run at its present round. Raises `moretta.errors.MorettaError` to refuse it."""

    def refused(self, error: BaseException) -> bool:
        """Count a refused answer. Return whether the silo leaves the run."""

    def answered(self, client: Client, asked: Message, answer: Message | None) -> None:
        """Record an answer before it is sent, or its absence."""

    def keep(self, client: Client, round: int) -> None:
        """Save the role's state at the end of a round."""

    def end(self, client: Client, released: bytes) -> None:
        """Receive the run's release: the model as safetensors, or nothing."""


@dataclass(frozen=True)
class _Work:
    number: int
    header: wire.Submit | wire.Hello
    body: memoryview


class SiteWorker:
    """Answer each of a server's requests at once, until `close`.

    Attributes: `process_id` is this process's. `last_heard` is the moment of the server's last request, by
    `time.monotonic`. `ended` is set when the run has ended.

    Args:
        make: Loads the silo, perhaps slowly, and raises the reason if it cannot take part. It is called after a session
            of the server's has begun. Any site of the federation can start a job here, and only then is a job's content
            the server's.
        trust: Loads, quickly, the keys that the site trusts.
    """

    def __init__(self, make: Callable[[], HostedSilo], trust: Callable[[], Trust]) -> None:
        self._gate = Gate(trust)
        self.process_id = self._gate.process_id
        self.last_heard = time.monotonic()
        self.ended = threading.Event()
        self._make = make
        self._logged = float("-inf")
        self._silo: HostedSilo | None = None
        self._clock = Clock()
        self._role: tuple[Client, Codec] | None = None
        self._entered: tuple[str, int] | None = None  # the role's run and session
        self._refusal: str | None = None
        self._changed = threading.Condition()
        self._next: _Work | None = None  # the newest work; no request waits for the one that it replaced
        self._done: tuple[int, wire.Reply, bytes] | None = None
        self._newest = 0
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="moretta silo", daemon=True)
        self._thread.start()

    def answer(self, data: object, limit: int | None = None) -> bytes:
        """Return the reply to any bytes, without raising. limit: the most bytes of its body; a longer one is polled."""
        try:
            request, envelope = wire.request_of(data, LARGEST if self._silo is None else self._silo.largest)
        except CodecError as error:
            return self._deny(error)
        if isinstance(request, wire.Knock):
            return wire.pack(wire.Awake(process_id=self.process_id))
        return self._take_in(request, envelope, limit)

    def _take_in(self, request: wire.Signed, envelope: wire.Envelope, limit: int | None) -> bytes:
        try:
            session = self._gate.take(request, envelope)
        except OtherProcess:
            return wire.pack(wire.Stranger())
        except PeerError as error:
            return self._deny(error)
        except (MorettaError, OSError) as error:  # its keys cannot be loaded, or its session not saved
            return wire.pack(wire.Refused(sentence=_unfit(error, "cannot distinguish the server from others")))
        self.last_heard = time.monotonic()
        reply, body = self._reply(request, envelope.body)
        if limit is not None and len(body) > limit:
            reply, body = wire.Busy(long=True), b""
        return session.pack(request.serial, reply, body)

    def _deny(self, error: PeerError) -> bytes:
        sentence = _sentence(error)
        if time.monotonic() - self._logged > QUIET:
            self._logged = time.monotonic()
            log.warning("an envelope was not taken: %s", sentence)
        return wire.pack(wire.Denied(sentence=sentence))

    def _reply(self, request: wire.Signed, body: memoryview) -> tuple[wire.Reply, bytes]:
        match request:
            case wire.Hello():
                return self._greet(request), b""
            case _ if self._role is None:
                return wire.Stranger(), b""
            case wire.Submit():
                self._take(_Work(request.number, request, body))
                return self._result(request.number, AT_ONCE)
            case wire.Poll():
                return self._result(request.number, min(request.wait, LONGEST_WAIT))

    def close(self) -> None:
        """Let the thread end after its present work."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _greet(self, hello: wire.Hello) -> wire.Reply:
        """Reply that the role is at the hello's place, or bring it to that place."""
        with self._changed:
            if self._entered != (hello.run, hello.session):
                self._entered, self._role, self._refusal = (hello.run, hello.session), None, None
                self._newest, self._done = 0, None  # a new session counts from 1
                self._next = _Work(0, hello, memoryview(b""))
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._role is not None or self._refusal is not None, AT_ONCE)
            if self._refusal is not None:
                if self._next is None:  # the obstacle may be gone
                    self._next = _Work(0, hello, memoryview(b""))
                    self._changed.notify_all()
                return wire.Refused(sentence=self._refusal)
            if self._role is None:
                return wire.Busy()
            silo = self._silo
        return wire.SiteReady(name="" if silo is None else silo.name, key="" if silo is None else silo.fingerprint)

    def _take(self, work: _Work) -> None:
        with self._changed:
            if work.number > self._newest:  # else it arrived twice
                self._newest, self._next, self._done = work.number, work, None
                self._changed.notify_all()

    def _result(self, number: int, wait: float) -> tuple[wire.Reply, bytes]:
        with self._changed:
            self._changed.wait_for(lambda: number != self._newest or self._done is not None, wait)
            done = self._done
        if done is None or done[0] != number:
            if number == self._newest:
                return wire.Busy(), b""
            late = f"expected work {self._newest} or newer, got {number}: it came late, or out of order"
            return wire.Failed(reason="failed", sentence=late), b""
        _, reply, body = done
        return reply, body

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closed)
                work, self._next = self._next, None
                entered = self._entered
                if work is None:
                    return
            if isinstance(work.header, wire.Hello):
                self._enter(work.header)
                continue
            reply, body = self._do(work.header, work.body, entered)
            with self._changed:
                if work.number == self._newest and entered == self._entered:
                    self._done = work.number, reply, body
                self._changed.notify_all()

    def _enter(self, hello: wire.Hello) -> None:
        try:
            silo = self._silo = self._silo or self._make()
            client, codec = silo.enter(hello)
            client.phase = self._clock.phase
            if isinstance(client, ChildClient):
                client.charge = self._clock.charge
            role, refusal = (client, codec), None
        except PolicyError as error:
            role, refusal = None, _sentence(error)
            log.error("cannot take part: %s", refusal)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # `_unfit` logs it, and the site lives on
            role, refusal = None, _unfit(error, "cannot take part")
        with self._changed:
            if self._entered == (hello.run, hello.session):
                self._role, self._refusal = role, refusal
            self._changed.notify_all()

    def _do(self, header: wire.Submit, body: memoryview, entered: tuple[str, int] | None) -> tuple[wire.Reply, bytes]:
        """Do one piece of work; an error costs the silo only this exchange. entered: the work's run and session."""
        if self._role is None or self._silo is None or entered is None:
            return wire.Stranger(), b""
        silo, (client, codec), (run, _) = self._silo, self._role, entered
        try:
            if header.work == "keep":
                silo.keep(client, header.round)
                return wire.WorkDone(), b""
            if header.work == "end":
                silo.end(client, bytes(body))
                self.ended.set()
                return wire.WorkDone(), b""
            return self._play(silo, client, codec, body, run)
        except Disconnected as error:
            return _failed("disconnected", _unfit(error, "cannot answer")), b""
        except (PeerError, MisuseError) as error:  # the server's own fault: a message, or its order
            log.warning("refuses what the server sent: %s", _sentence(error))
            return _failed("refused", error), b""
        except (Exception, SystemExit) as error:  # noqa: BLE001  # it is logged, and costs the silo only this round
            sentence = _unfit(error, "cannot answer")
            if silo.refused(error):
                log.error(
                    "takes no part until moretta accept, because each refusal reveals something about rows to the "
                    "server"
                )
                with self._changed:
                    self._role, self._entered = None, None  # the next hello is refused
            return _failed("failed", sentence), b""

    def _play(
        self, silo: HostedSilo, client: Client, codec: Codec, body: memoryview, run: str
    ) -> tuple[wire.Reply, bytes]:
        try:
            message = codec.decode(bytearray(body))  # the memory of the message's arrays
        except CodecError as error:
            return _failed("malformed", f"received a malformed message: {error}"), b""
        if message.stamp.run.rpartition("/")[2] != run:  # a group's name may stand before it
            return _failed("malformed", f"expected messages of the run {run!r}, got one of {message.stamp.run!r}"), b""
        answer: Message | None = None
        try:
            reply = answered(client, message)
            if not isinstance(reply, Message):  # a silo may run a user's code, whatever its types promise
                return _failed("malformed", f"expected a message, got {type(reply).__name__}"), b""
            answer = reply
        finally:
            silo.answered(client, message, answer)
        data = codec.encode(answer)
        peak = client.peak_mib if isinstance(client, ChildClient) else None
        seconds = dict(self._clock.take())
        return wire.WorkDone(seconds=seconds if silo.timed else {}, peak_mib=peak), data


def _failed(reason: str, error: object) -> wire.Failed:
    return wire.Failed.model_validate({"reason": reason, "sentence": _sentence(error)})


def _unfit(error: BaseException, what: str) -> str:
    """Return the server's sentence for an error, and log the error, both under a new ticket."""
    ticket = secrets.token_hex(4)
    known = isinstance(error, MorettaError)
    log.error("%s (ticket %s): %s", what, ticket, with_notes(error) if known else repr(error), exc_info=not known)
    return UNFIT + ticket


def _sentence(error: object) -> str:
    """Return an error's sentence as valid text for a header: a file's name may hold invalid bytes."""
    text = str(error).encode(errors="replace").decode()
    return "".join(character if character.isprintable() else " " for character in text)[:1000]
