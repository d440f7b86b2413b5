"""The sender of an envelope: the server's session signs requests; a site accepts nothing else and seals its answers.

FLARE's server relays messages between sites, and believes the sender's own name. So a site trusts signatures alone
(Ed25519):

    server's key, long-lived        pinned at each site
      └─ signs, at the start of a session (each resume of a run begins one), the certificate
         (format, session's key, session's exchange key, digest of the job, run, session)
           └─ the session's key signs every envelope
              (format, run, session, header, SHA-256 of the body); in the header are kind, process ids by site, serial

An envelope for several sites is signed once. A site accepts one that names it and its own process, under a serial that
it has not seen. Among the last 64 serials it accepts any, because polls run concurrently; it accepts no older one. It
keeps a run's highest session on disk with the session's key, and accepts no lower session and no other key. So an
envelope is accepted once, by one process, in one session. Work that is sent again, because the first copy may be lost,
has the same number and a new serial.

A process id is an X25519 key that the process draws at its start. The result of a site's work is sealed for the
session's exchange key (AES-128-GCM under HKDF of both, the serial as nonce). Without the seal, one of several
addressees could send its copy to another before the server does, and would receive the answer. It receives a sealed
answer that it cannot open; the server's own copy is denied, and the server sends the work again.

With a roster, replies are signed by the silo's identity (format, run, session, process id, serial, SHA-256 of header
and body). Without one they can be forged, because the server trusts the received process ids.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from moretta.contract.codec import LARGEST
from moretta.engines.files import make_folder, write_atomically
from moretta.engines.flare import envelope as wire
from moretta.engines.mapped import LARGE, room
from moretta.errors import CodecError, PeerError
from moretta.secure_aggregation.identity import Identity, fingerprint, verify
from moretta.secure_aggregation.keystream import derive

WINDOW = 64  # serials
PIECE, TAG = 1 << 30, 16  # bytes: the cipher seals 2 GiB at most at a time
Bytes = bytes | memoryview
RECORD = "session.json"  # in the run's folder: its highest session, and that session's key


def _certificate(hello: wire.Hello) -> tuple[int | str, ...]:
    return "flare session", wire.FORMAT, hello.key, hello.exchange, hello.job, hello.run, hello.session


def _request(run: str, session: int, header: bytes, body: Bytes) -> tuple[int | str | bytes, ...]:
    return "flare request", wire.FORMAT, run, session, header, sha256(body).digest()


def _reply(
    run: str, session: int, process_id: str, serial: int, header: bytes, body: Bytes
) -> tuple[int | str | bytes, ...]:
    return "flare reply", wire.FORMAT, run, session, process_id, serial, sha256(header).digest(), sha256(body).digest()


def _seal(mine: X25519PrivateKey, theirs: str, hello: wire.Hello, process_id: str) -> AESGCM:
    """Return the cipher of a site's answers in a session. Raises `moretta.errors.PeerError` for an invalid key."""
    try:
        shared = mine.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(theirs)))
    except ValueError:
        raise PeerError("expected an X25519 key of 32 bytes, got one that shares no secret") from None
    return AESGCM(derive(shared, "flare answers", hello.run, hello.session, hello.exchange, process_id)[:16])


def _public(private: X25519PrivateKey) -> str:
    return private.public_key().public_bytes_raw().hex()


# The server's half


class ServerSession:
    """The server's side of one session of a run.

    Args:
        identity: The server's own, long-lived.
        hello: The first request to each site. The attribute also has the session's keys and their certificate.
    """

    def __init__(self, identity: Identity, hello: wire.Hello) -> None:
        self._identity, self._exchange = Identity.fresh(), X25519PrivateKey.generate()
        keys = {"key": self._identity.public_key.hex(), "exchange": _public(self._exchange)}
        hello = hello.model_copy(update=keys)
        self.hello = hello.model_copy(update={"certificate": identity.sign(*_certificate(hello)).hex()})
        self._serials = count(1)  # its next is one step of the interpreter, so threads need no lock
        self._seals = dict[str, AESGCM]()

    def pack(self, request: wire.Signed, processes: Mapping[str, str], body: bytes = b"") -> tuple[bytes, int]:
        """Return a signed envelope for these processes, by silo, and its serial."""
        serial, run, session = next(self._serials), self.hello.run, self.hello.session
        header = request.model_copy(update={"processes": dict(processes), "serial": serial})
        return wire.pack(header, body, lambda *parts: self._identity.sign(*_request(run, session, *parts))), serial

    def open(
        self, data: object, process_id: str, serial: int, key: bytes | None, largest: int = LARGEST
    ) -> tuple[wire.Reply, Bytes]:
        """Return a process's reply under a serial, with its body opened, in a mapped file if it is large.

        Args:
            key: The public key of the silo's identity. None without a roster, and then nothing proves the sender.
            largest: The largest number of bytes of the body.

        Raises:
            CodecError: The bytes are malformed, too many, or not sealed for this session.
            PeerError: The reply is not signed by the key.
        """
        sealed = largest + TAG * max(1, -(-largest // PIECE))
        reply, envelope = wire.reply_of(data, sealed)
        # A sender without a session may send these; they reveal nothing and end nothing.
        if isinstance(reply, (wire.Awake, wire.Stranger, wire.Denied)):
            return reply, b""
        if key is not None:  # only then is the body hashed
            statement = _reply(self.hello.run, self.hello.session, process_id, serial, envelope.header, envelope.body)
            if not verify(key, envelope.signature, *statement):
                raise PeerError(_unsigned(reply, fingerprint(key)))
        if not isinstance(reply, wire.WorkDone):
            return reply, b""
        try:
            return reply, _opened(self._seal_of(process_id), serial, envelope.body)
        except (InvalidTag, PeerError):
            raise CodecError("expected an answer sealed for this session, got one that does not open") from None

    def _seal_of(self, process_id: str) -> AESGCM:
        if process_id not in self._seals:
            self._seals[process_id] = _seal(self._exchange, process_id, self.hello, process_id)
        return self._seals[process_id]


def _unsigned(reply: wire.Reply, listed: str) -> str:
    """Return the fault of a reply that the identity in the roster has not signed."""
    match reply:
        case wire.SiteReady():
            return (
                f"has the identity {reply.key or 'of nobody'}, and the roster lists {listed} for it; expected the key "
                "that the roster names (moretta keys show)"
            )
        case wire.Refused():
            return f"sent a refusal that its identity in the roster, {listed}, has not signed: {reply.sentence}"
    return f"sent a reply that its identity in the roster, {listed}, has not signed"


# A site's half


@dataclass(frozen=True)
class Trust:
    """The keys that a site trusts.

    Attributes:
        name: The silo's name in the run; its name in the engine may differ.
        keys: The server's public keys, one or two.
        identity: The silo's own; None without one.
        folder: The folder with a folder for each of the silo's runs.
    """

    name: str
    keys: tuple[bytes, ...]
    identity: Identity | None
    folder: Path


class OtherProcess(PeerError):
    """An envelope is for another process of this site, perhaps its predecessor."""


class Window:
    """Accepts each serial once, and none older than the last 64."""

    def __init__(self) -> None:
        self._highest, self._seen = 0, 0  # bit i: whether the serial i below the highest was accepted

    def take(self, serial: int) -> bool:
        """Accept a serial once; return whether it was accepted now."""
        ahead = serial - self._highest
        if ahead > 0:
            kept = 0 if ahead >= WINDOW else self._seen << ahead
            self._highest, self._seen = serial, (kept | 1) & (1 << WINDOW) - 1
            return True
        if -ahead >= WINDOW or self._seen >> -ahead & 1:
            return False
        self._seen |= 1 << -ahead
        return True


class SiteSession:
    """A site's side of a session of the server's."""

    def __init__(self, hello: wire.Hello, process_id: str, identity: Identity | None, seal: AESGCM) -> None:
        self.hello, self.window = hello, Window()
        self._process_id, self._identity, self._seal = process_id, identity, seal

    def signed(self, envelope: wire.Envelope) -> bool:
        """Return whether the session's key has signed an envelope."""
        key, statement = (
            bytes.fromhex(self.hello.key),
            (self.hello.run, self.hello.session, envelope.header, envelope.body),
        )
        return verify(key, envelope.signature, *_request(*statement))

    def pack(self, serial: int, reply: wire.Reply, body: bytes = b"") -> bytes:
        """Return the reply to a serial: sealed if work is done, signed if the silo has an identity."""
        if isinstance(reply, wire.WorkDone):
            body = _sealed(self._seal, serial, body)
        if self._identity is None:
            return wire.pack(reply, body)
        identity, hello = self._identity, self.hello
        statement = hello.run, hello.session, self._process_id, serial
        return wire.pack(reply, body, lambda *parts: identity.sign(*_reply(*statement, *parts)))


class Gate:
    """Accepts each envelope of the server's session to this process once, and nothing else.

    Args:
        load: Returns the site's `Trust`, or raises `moretta.errors.MorettaError`.
    """

    def __init__(self, load: Callable[[], Trust]) -> None:
        self._load = load
        self._exchange = X25519PrivateKey.generate()
        self.process_id = _public(self._exchange)
        self._lock = threading.Lock()
        self._trust: Trust | None = None
        self._joined: SiteSession | None = None
        self._left = set[str]()  # the keys of replaced sessions

    def take(self, request: wire.Signed, envelope: wire.Envelope) -> SiteSession:
        """Return an envelope's session. Raises PeerError for a rejected one, which changes nothing; and as `load`."""
        name = self._loaded().name
        if name not in request.processes:
            raise PeerError(
                f"it was addressed to {', '.join(request.processes)[:200] or 'nobody'}, not to {name}: passed on "
                "by another than the server"
            )
        if request.processes[name] != self.process_id:
            raise OtherProcess("it was addressed to another process of this site: it was replayed")
        with self._lock:
            joined = self._session_of(request) if isinstance(request, wire.Hello) else self._joined
            if joined is None:
                raise PeerError("it was sent before any session of the server's has begun here")
            if not joined.signed(envelope):
                raise PeerError(
                    f"it is not signed by the key of session {joined.hello.session}: it is of another than the server, "
                    "or of another session"
                )
            if joined is not self._joined and isinstance(request, wire.Hello):
                _record(self._loaded().folder, request)
            if not joined.window.take(request.serial):
                raise PeerError(
                    f"it has the serial {request.serial}, which was seen or is older than the last {WINDOW}: it was "
                    "replayed, or came twice"
                )
            if self._joined is not None and joined is not self._joined:
                self._left.add(self._joined.hello.key)
            self._joined = joined
            return joined

    def _loaded(self) -> Trust:
        self._trust = self._trust or self._load()
        return self._trust

    def _session_of(self, hello: wire.Hello) -> SiteSession:
        """Return the session of a hello: the present one, or another that the server's key certifies."""
        if self._joined is not None and _certificate(self._joined.hello) == _certificate(hello):
            return self._joined
        if hello.key in self._left:
            raise PeerError("it is of a session that another has replaced here: it was replayed")
        trust = self._loaded()
        signature = bytes.fromhex(hello.certificate)
        if not any(verify(key, signature, *_certificate(hello)) for key in trust.keys):
            raise PeerError(
                "its session is not signed by the server's key (pinned here: "
                f"{' and '.join(map(fingerprint, trust.keys))}): another poses as the server, or its key has changed"
            )
        seal = _seal(self._exchange, hello.exchange, hello, self.process_id)
        return SiteSession(hello, self.process_id, trust.identity, seal)


def _record(folder: Path, hello: wire.Hello) -> None:
    """Save the session of a run on disk. Raises `moretta.errors.PeerError` for a past one."""
    path = folder / hello.run / RECORD
    try:
        kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"session": -1, "key": ""}
        highest, key = int(kept["session"]), str(kept["key"])
    except (OSError, ValueError, KeyError, TypeError):
        raise PeerError("it may be replayed, because the record of the run's sessions is damaged") from None
    if hello.session < highest:
        raise PeerError(
            f"it is of session {hello.session} of the run, and session {highest} has begun: it was replayed"
        )
    if hello.session == highest and hello.key != key:
        raise PeerError(
            f"it is of a second beginning of session {highest} of the run; have the server go on by --resume, or begin "
            "another run"
        )
    if hello.session > highest:
        make_folder(path.parent, 0o700)
        write_atomically(path, json.dumps({"session": hello.session, "key": hello.key}).encode(), mode=0o600)


def _sealed(seal: AESGCM, serial: int, body: bytes) -> bytes:
    pieces = _pieces(body, PIECE)
    return b"".join(seal.encrypt(_nonce(serial, pieces, number), piece, None) for number, piece in enumerate(pieces))


def _opened(seal: AESGCM, serial: int, body: Bytes) -> Bytes:
    """Undo `_sealed`. Raises `cryptography.exceptions.InvalidTag` for anything else."""
    pieces, opened = _pieces(body, PIECE + TAG), 0
    if len(pieces) == 1 and len(body) < LARGE:
        return seal.decrypt(_nonce(serial, pieces, 0), body, None)
    if len(pieces[-1]) < TAG:
        raise InvalidTag
    memory = room(len(body) - TAG * len(pieces))
    for number, piece in enumerate(pieces):
        place = memory[opened : opened + len(piece) - TAG]
        opened += seal.decrypt_into(_nonce(serial, pieces, number), piece, None, place)
    return memory


def _pieces(body: Bytes, size: int) -> list[Bytes]:
    return [body[begin : begin + size] for begin in range(0, max(len(body), 1), size)]


def _nonce(serial: int, pieces: Sequence[Bytes], number: int) -> bytes:
    """Return a piece's nonce, used once: serial, number, and whether it is the last, so that truncation is detected."""
    return serial.to_bytes(7, "big") + number.to_bytes(4, "big") + bytes([number == len(pieces) - 1])
