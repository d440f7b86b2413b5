"""Long-lived identities: an Ed25519 key pair for every silo (RFC 8032), and the roster of all public keys.

    identity.key    moretta-identity-1 <base64 of 32 bytes>    mode 0600; never leaves the silo
    identity.pub    moretta-public-1 <base64 of 32 bytes>      goes into everybody's roster
    roster.toml     [[silo]]
                    name = "hospital-a"
                    key = "moretta-public-1 <base64>"          # what `moretta keys show` prints
                    engine-name = "site-1"                     # the silo's name in the engine, where it differs
                    [server]                                   # optional: the server whose envelopes sites accept
                    key = "moretta-public-1 <base64>"          # or a list of two, while one replaces the other

A signature is of a purpose (`moretta.secure_aggregation.keystream.encode_purpose`) that begins with "signed", so
different statements have different bytes and a signature serves one use. Silos must compare the roster's digest to
ensure that all hold the same one.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from moretta.contract.messages import length
from moretta.contract.wording import nearest
from moretta.errors import ParameterError, PeerError
from moretta.secure_aggregation.keystream import encode_purpose

KEY_BYTES = 32
KEY_FILE, PUBLIC_FILE = "identity.key", "identity.pub"
_SECRET, _PUBLIC = "moretta-identity-1", "moretta-public-1"
_ENTRY = ("name", "key", "engine-name")
MOST_BYTES = 4 << 20  # of a roster or a key's file; a run folder names a roster, which may be any file
SERVER_KEYS = 2  # the server's own, and the next one during a change
_P = 2**255 - 19
_D = -121665 * pow(121666, -1, _P) % _P


class Identity:
    """A private key, and what it signs. Its representation shows only the public key's fingerprint.

    Args:
        private: 32 bytes of the operating system.

    Raises:
        ParameterError: The key has another length.
    """

    def __init__(self, private: bytes) -> None:
        if len(private) != KEY_BYTES:
            raise ParameterError(f"expected a private key of {KEY_BYTES} bytes, got {len(private)}; use Identity.fresh")
        self._private = Ed25519PrivateKey.from_private_bytes(private)
        self.public_key: bytes = self._private.public_key().public_bytes_raw()

    @classmethod
    def fresh(cls) -> Identity:
        """Draw an identity from the operating system."""
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def load(cls, path: str | Path) -> Identity:
        """Read a key file, or the one in a folder of `save`. Raises ParameterError if damaged or open to others."""
        path = Path(path, KEY_FILE) if os.path.isdir(path) else Path(path)
        text, mode = _read(path, "the key file")
        if os.name == "posix" and mode & 0o077:  # on other systems these bits have no meaning
            raise ParameterError(f"{path} is open to others (mode {mode & 0o777:04o}); run: chmod 600 {path}")
        private = _decode(_SECRET, text.removesuffix("\n"))
        if private is None:  # none of the text is shown: most of it may be a key
            raise ParameterError(
                f"{path}: expected one line, `{_SECRET}` and {KEY_BYTES} bytes in base64, got {len(text)} other "
                "characters; bring back a copy, or make a new key by `moretta keys new`"
            )
        return cls(private)

    def save(self, folder: str | Path, *, alone: bool = False) -> None:
        """Write ``identity.key``, with mode 0600 from its first byte on, and ``identity.pub`` into a folder, made here.

        Args:
            alone: Refuse a folder that holds anything, so that no key is sent with other files.

        Raises:
            ParameterError: Either file exists already, or `alone` refuses the folder.
            OSError: The folder is not writable.
        """
        folder = Path(folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (folder / KEY_FILE, folder / PUBLIC_FILE):
            if os.path.lexists(path):
                raise ParameterError(f"{path} exists already, and a key is never overwritten; choose another folder")
        if alone and any(folder.iterdir()):
            raise ParameterError(f"{folder} is not empty, and a key lies in a folder of its own; name a new one")
        _create(folder / KEY_FILE, _encode(_SECRET, self._private.private_bytes_raw()), 0o600)
        _create(folder / PUBLIC_FILE, public_line(self.public_key), 0o644)

    def sign(self, *purpose: int | str | bytes) -> bytes:
        """Return the signature of a statement, 64 bytes, the same for equal statements.

        Args:
            purpose: As for `moretta.secure_aggregation.keystream.encode_purpose`; first the kind of the statement.
        """
        return self._private.sign(encode_purpose("signed", *purpose))

    def __repr__(self) -> str:
        return f"Identity({fingerprint(self.public_key)}, <redacted>)"


def verify(public_key: bytes, signature: bytes, *purpose: int | str | bytes) -> bool:
    """Return whether the key's owner signed this statement; False also for a key that rosters refuse."""
    if _flaw(public_key):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, encode_purpose("signed", *purpose))
    except InvalidSignature:
        return False
    return True


def is_silo_name(name: str) -> bool:
    """Return whether a name has 1 to 64 letters, digits, dots, dashes and underscores, and is not `server`.

    A dot may not be first, as names are those of files and folders too.
    """
    return re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", name) is not None and name != "server"


def fingerprint(key: bytes) -> str:
    """Return the first 128 bits of a public key's SHA-256, in groups of four digits, to compare by telephone."""
    return grouped(hashlib.sha256(key).hexdigest())


def grouped(digest: str) -> str:
    """Return the first 128 bits of a digest in hex, in groups of four digits."""
    return " ".join(digest[place : place + 4] for place in range(0, 32, 4))


def public_line(key: bytes) -> str:
    """Return a public key in a roster's form.

    >>> key = Identity.fresh().public_key
    >>> parse_public_line(public_line(key)) == key
    True
    """
    return _encode(_PUBLIC, key)


def parse_public_line(line: str) -> bytes:
    """Return the key, 32 bytes, of a line by `public_line`. Raises `moretta.errors.ParameterError` for any other."""
    key = _decode(_PUBLIC, line)
    wrong = f"{len(line)} other characters" if key is None else _flaw(key)  # not shown: it may be a private key's
    if key is None or wrong:
        raise ParameterError(
            f"expected `{_PUBLIC}` and {KEY_BYTES} bytes of Ed25519 in base64, got {wrong}; "
            "take what `moretta keys show` prints"
        )
    return key


def parse_server_keys(value: object) -> tuple[bytes, ...]:
    """Return the 32-byte public keys of a public line, or of one or two in a list. Raises ParameterError for others."""
    lines = value if isinstance(value, (list, tuple)) else (value,)
    if not 1 <= len(lines) <= SERVER_KEYS or len(set(map(str, lines))) < len(lines):
        raise ParameterError(
            f"expected one public key of the server, or two different ones while it changes, got {len(lines)}; use "
            "what `moretta keys show` prints at the server"
        )
    if not all(isinstance(line, str) for line in lines):
        raise ParameterError('expected the server\'s public key in quotes, got something else; write key = "..."')
    return tuple(parse_public_line(line) for line in lines)


def read_public_key(path: str | Path) -> bytes:
    """Return the public key, 32 bytes, of a key file, public file or folder with one key. Raises ParameterError."""
    if os.path.isdir(path):
        there = [file for name in (KEY_FILE, PUBLIC_FILE) if (file := Path(path, name)).exists()]
        keys = {read_public_key(file) for file in there}
        if len(keys) != 1:
            got = "two that do not belong together" if keys else "neither"
            raise ParameterError(f"{path}: expected {KEY_FILE} or {PUBLIC_FILE}, got {got}; name the one that is meant")
        return keys.pop()
    text, _ = _read(Path(path), "the key")
    if text.startswith(_SECRET):
        return Identity.load(path).public_key
    try:
        return parse_public_line(text.removesuffix("\n"))
    except ParameterError as error:
        raise ParameterError(f"{path}: {error}") from None


@dataclass(frozen=True)
class Roster:
    """The silos that take part, one or more, each with a key and an engine name of its own.

    A name has 1 to 64 letters, digits, dots, dashes and underscores, does not begin with a dot and is not ``server``.

    Args:
        keys: 32 bytes by silo.
        engine_names: Of the silos whose name in the engine differs.
        server: The one or two keys by which the server of a run over many machines signs; empty if the roster names
            none.

    Raises:
        ParameterError: A name or key is invalid or used twice; the message names the silo.
    """

    keys: Mapping[str, bytes]
    engine_names: Mapping[str, str] = field(default_factory=dict)
    server: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if not self.keys:
            raise ParameterError("expected a [[silo]] for each silo, got none; add one with its name and key")
        names = {silo: self.engine_name(silo) for silo in {**self.keys, **self.engine_names}}
        for silo, engine_name in names.items():
            for what, name in (("name", silo), ("engine-name", engine_name)):
                if not is_silo_name(name):
                    raise ParameterError(
                        f"[[silo]] {silo!r:.80}: {what}: expected 1 to 64 letters, digits, dots, dashes and "
                        f"underscores, not a dot first and not `server`, got {name!r:.80}; choose another"
                    )
            if flaw := _flaw(self.keys.get(silo, b"")):
                raise ParameterError(f"[[silo]] {silo!r}: key: expected one of Ed25519, got {flaw}; ask for another")
        for what, values in (("key", self.keys), ("engine-name", names)):
            uses = Counter(values.values())
            if twins := sorted(silo for silo, value in values.items() if uses[value] > 1):
                raise ParameterError(f"[[silo]] {' and '.join(twins)} have the same {what}; set each one's own")
        if twins := sorted(silo for silo, key in self.keys.items() if key in self.server):
            raise ParameterError(
                f"[server] has the key of [[silo]] {twins[0]}, which could then pose as the server; set each one's own"
            )

    @classmethod
    def load(cls, path: str | Path) -> Roster:
        """Read a roster file. Raises `moretta.errors.ParameterError`, naming file and entry, for any error."""
        text, _ = _read(Path(path), "the roster")
        if _SECRET in text:
            raise ParameterError(f"{path} has a private key in it; put `{_PUBLIC} ...` there and make a new identity")
        try:
            return cls._of(tomllib.loads(text))
        except ParameterError as error:
            raise ParameterError(f"{path}: {error}") from None
        except (ValueError, RecursionError) as error:  # beside TOMLDecodeError: for a number that is too long
            raise ParameterError(f"{path}: expected a roster in TOML, got an error: {error}; fix it there") from None

    @classmethod
    def _of(cls, tables: Mapping[str, Any]) -> Roster:
        _refuse_unknown("", tables, ("silo", "server"))
        entries = tables.get("silo", [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ParameterError("expected each silo below a line [[silo]], got other than that; write both brackets")
        keys: dict[str, bytes] = {}
        engine_names: dict[str, str] = {}
        for number, entry in enumerate(entries, start=1):
            silo = entry.get("name")
            where = f"[[silo]] {f'{silo!r:.80}' if isinstance(silo, str) else f'number {number}'}: "
            _refuse_unknown(where, entry, _ENTRY)
            for what in _ENTRY:
                if not isinstance(entry.get(what, silo if what == "engine-name" else None), str):
                    got = "something else" if what in entry else "nothing"
                    raise ParameterError(f'{where}{what}: expected a string in quotes, got {got}; add {what} = "..."')
            if silo in keys:
                raise ParameterError(f"{where}expected each name once, got it twice; rename one silo")
            try:
                keys[silo] = parse_public_line(entry["key"])
            except ParameterError as error:
                raise ParameterError(f"{where}key: {error}") from None
            engine_names[silo] = entry.get("engine-name", silo)
        return cls(keys, engine_names, _server_of(tables))

    def engine_name(self, silo: str) -> str:
        """Return a silo's name in the engine."""
        return self.engine_names.get(silo, silo)

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hex, of names, keys and engine names in the order of names, and of the server's keys if any."""
        parts = [part for silo in sorted(self.keys) for part in (silo, self.keys[silo], self.engine_name(silo))]
        if self.server:  # without, the digest is the same as before rosters could name them
            parts += ["server", *sorted(self.server)]
        return hashlib.sha256(encode_purpose("roster", *parts)).hexdigest()

    def check_identity(self, silo: str, key: bytes) -> None:
        """Raise `moretta.errors.ParameterError` if the roster lists the silo with another public key."""
        listed = self.keys.get(silo, key)
        if key != listed:
            raise ParameterError(
                f"the identity of silo `{silo}` is not the one that the roster lists for it; expected "
                f"{fingerprint(listed)}, got {fingerprint(key)} (moretta keys show)"
            )

    def check(self, silos: Iterable[str]) -> None:
        """Raise `moretta.errors.ParameterError` unless the roster lists all these silos; it may list more."""
        if missing := sorted(set(silos) - self.keys.keys()):
            names = ", ".join(missing)
            raise ParameterError(
                f"expected each silo of the run in the roster, but it lacks {names}; add a [[silo]] each"
            )


def _server_of(tables: Mapping[str, Any]) -> tuple[bytes, ...]:
    table = tables.get("server")
    if table is None:
        return ()
    if not isinstance(table, dict):
        raise ParameterError("expected the server's key below a line [server], got other than that; write the brackets")
    _refuse_unknown("[server] ", table, ("key",))
    if "key" not in table:
        raise ParameterError('[server] key: expected a string in quotes, got nothing; add key = "..."')
    try:
        return parse_server_keys(table["key"])
    except ParameterError as error:
        raise ParameterError(f"[server] key: {error}") from None


@lru_cache(maxsize=4096)
def _flaw(key: bytes) -> str | None:
    """Return what is wrong with a public key, or None: it must be a point (RFC 8032, section 5.1.3), not of low order.

    Under a point of low order some signatures fit any statement, so anyone can sign; OpenSSL does not refuse it.
    """
    if len(key) != KEY_BYTES:
        return f"{len(key)} bytes"
    y = int.from_bytes(key, "little") % 2**255  # the top bit is the sign of x
    if y >= _P or pow((y * y - 1) * (_D * y * y + 1), _P // 2, _P) == _P - 1:  # x^2 = (y^2 - 1) / (d y^2 + 1): no root
        return "bytes that are no point of the curve"
    for _ in range(3):  # double the point, of which y and x^2 are enough: times 8, only low orders end in (0, 1)
        xx = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
        y = (y * y + xx) * pow(1 - _D * xx * y * y, -1, _P) % _P
    return "a point of low order" if y == 1 else None


def _encode(first: str, key: bytes) -> str:
    return f"{first} {base64.b64encode(key).decode()}"


def _decode(first: str, line: str) -> bytes | None:
    """Return the key of a line of `_encode`, or None for any other line."""
    try:
        key = base64.b64decode(line.removeprefix(f"{first} "), validate=True)
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES and line == _encode(first, key) else None


def _read(path: Path, what: str) -> tuple[str, int]:
    try:
        with path.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
            if len(data) > MOST_BYTES:
                raise ParameterError(f"{what} {path} is larger than {MOST_BYTES >> 20} MiB; expected a list of keys")
            return data.decode(), os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError) as error:  # of a path, or of text
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ParameterError(f"{what} {path} cannot be read ({why}); name one that can be read") from None


def _create(path: Path, line: str, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="ascii") as stream:
        stream.write(f"{line}\n")
        stream.flush()
        os.fsync(stream.fileno())


def _refuse_unknown(where: str, table: Iterable[str], known: Iterable[str]) -> None:
    for key in table:
        if key not in known:
            close = nearest(key, known)
            hint = f"did you mean {close}?" if close else f"the keys here are {', '.join(known)}"
            raise ParameterError(f"{where}{key!r:.80} is not known; {hint}")


PUBLIC_KEY_BYTES = 32
PROBE = X25519PrivateKey.from_private_bytes(bytes(PUBLIC_KEY_BYTES))  # no secret: it only probes public keys
SIGNATURE_BYTES = 64
Signature = Annotated[bytes, length(0, SIGNATURE_BYTES)]
"""Of a message: empty without a roster."""
Signatures = Annotated[Mapping[str, bytes], length(0, SIGNATURE_BYTES)]


def check_public_key(key: bytes) -> None:
    """Raise `moretta.errors.PeerError` for a key that is not 32 bytes, or of low order.

    With a point of low order the shared secret is all zero for any private key (RFC 7748, section 6.1), so a constant
    one suffices as a test.
    """
    if len(key) != PUBLIC_KEY_BYTES:
        raise PeerError(f"expected a public key of {PUBLIC_KEY_BYTES} bytes, got {len(key)}")
    _probe(bytes(key))


@lru_cache(maxsize=4096)  # all silos of a process receive the same public keys
def _probe(key: bytes) -> None:
    shared_secret(PROBE, key)


def check_keys(keys: Mapping[str, bytes], signatures: Mapping[str, bytes]) -> None:
    """Raise `moretta.errors.PeerError` unless at least two silos have valid keys, all different."""
    if len(keys) < 2:
        raise PeerError(f"expected keys of at least 2 silos, got {len(keys)}")
    if set(signatures) != set(keys):
        raise PeerError("expected a signature, or no bytes, with each silo's key")
    for name, key in keys.items():
        try:
            check_public_key(key)
        except PeerError as error:
            raise PeerError(f"silo `{name}`: {error}") from None
    if twins := sharing_a_key(keys):
        raise PeerError(f"expected a key of its own for each silo; {twins} have the same")


def sharing_a_key(keys: Mapping[str, bytes]) -> list[str]:
    """Return the names of silos that share a key with another."""
    uses = Counter(keys.values())
    return sorted(name for name, key in keys.items() if uses[key] > 1)


def shared_secret(private: X25519PrivateKey, public_key: bytes) -> bytes:
    """Return the X25519 shared secret. Raises `moretta.errors.PeerError` for a point of low order."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public_key))
    except ValueError:  # cryptography's error for an all-zero shared secret
        raise PeerError("expected a public key with a secret of its own, got a point of low order") from None
