"""Envelopes between the server's job and a site: a header that only the engine reads, a signature, and a body.

    server -> site                                                site -> server
      Knock     asks for the process id; unsigned, changes nothing  Awake
      Hello     which run this is, and how far                      SiteReady, Busy (not ready yet) or Refused
      Submit    work: a message to answer, a state to keep, ..      WorkDone, Busy, Failed or Stranger
      Poll      is the work done?                                   the same
                an envelope that the session has not signed         Denied

The body is the codec's bytes of a protocol message, or empty; that of WorkDone is sealed for the server. A header is
JSON of a closed schema, checked by pydantic on either side; other bytes raise `moretta.errors.CodecError`.
`moretta.engines.flare.signing` describes the signatures.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from moretta.contract import framing
from moretta.contract.codec import LARGEST
from moretta.errors import CodecError
from moretta.secure_aggregation.agreement import RUN_DIGEST

FORMAT = 2
HEADER_LIMIT = 1 << 16  # bytes; parsed, such JSON takes a few MiB of memory at most
LENGTH = 4  # bytes of the length of the header
SIGNATURE = 64  # bytes, of Ed25519
UNSIGNED = bytes(SIGNATURE)  # replaces a signature

PLAIN = r"^[^\x00-\x1f\x7f-\x9f]*$"  # a peer's words appear in a terminal and a log
Text = Annotated[str, Field(max_length=1000, pattern=PLAIN)]
# A site names a folder by it, beside its own files: only a roster's digest may follow a dot, never a file's ending.
RunId = Annotated[str, Field(pattern=rf"^[A-Za-z0-9][A-Za-z0-9-]{{0,63}}(\.[0-9a-f]{{{RUN_DIGEST}}})?$")]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=PLAIN)]
PhaseName = Annotated[str, Field(pattern=r"^[a-z_]{1,40}$")]
Key = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]  # 32 bytes in hex
Signature = Annotated[str, Field(pattern=r"^([0-9a-f]{128})?$")]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Serial = Annotated[int, Field(ge=0, lt=2**53)]
Seconds = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]

Work = Literal["answer", "keep", "end"]


class _Header(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)] = FORMAT


class Knock(_Header):
    """Asks for the process id."""

    kind: Literal["knock"] = "knock"


class Hello(_Header):
    """The run, its round, its number of resumes, and the settings that both sides must share.

    Args:
        processes: By silo, the process that an envelope is for; several silos get the same bytes, signed once.
        serial: Counts a session's envelopes.
        key, exchange: The session's own, to sign and to seal answers for.
        certificate: The server's signature of them.
        job: The digest of the shared settings (`moretta.deployment.shared_settings`).
        versions: Of Moretta and PyTorch.
        torch: The PyTorch versions that a site may have.
        model: The digest of the server's model.
        tensors, outputs: The digest of its tensors alone (`moretta.protocols.common.modules.schema`), and the number of
            outputs, for a site that cannot build the model.
    """

    kind: Literal["hello"] = "hello"
    run: RunId
    round: Count
    session: Count
    job: Name
    model: Name
    versions: dict[Name, Text]
    torch: tuple[Text, ...]
    tensors: Text = ""
    outputs: Count = 0
    processes: dict[Name, Name] = {}
    serial: Serial = 0
    key: Key = ""
    exchange: Key = ""
    certificate: Signature = ""


class Submit(_Header):
    """Numbered work: to answer the message in the body, to save the state, or to end the run.

    A repeat has the same number and another serial.

    Args:
        round: The round of "keep".
        processes, serial: As in `Hello`.
    """

    kind: Literal["submit"] = "submit"
    number: Count
    work: Work
    round: Count = 0
    processes: dict[Name, Name] = {}
    serial: Serial = 0


class Poll(_Header):
    """Asks for the result of numbered work, and how long to wait for it. processes, serial: as in `Hello`."""

    kind: Literal["poll"] = "poll"
    number: Count
    wait: Seconds
    processes: dict[Name, Name] = {}
    serial: Serial = 0


class Awake(_Header):
    """A process of the site answers. Its id distinguishes it from an earlier one, and is the key that seals answers."""

    kind: Literal["awake"] = "awake"
    process_id: Key


class SiteReady(_Header):
    """A site is ready. key: its identity's fingerprint."""

    kind: Literal["here"] = "here"
    name: Name
    key: Text = ""


class Busy(_Header):
    """The work is not done, or (long) it is done and too long for a plain reply, so poll by a stream."""

    kind: Literal["busy"] = "busy"
    long: bool = False


class WorkDone(_Header):
    """The work is done: seconds by phase, and the largest memory of an edge client."""

    kind: Literal["done"] = "done"
    seconds: Annotated[dict[PhaseName, Seconds], Field(max_length=20)] = {}
    peak_mib: Seconds | None = None


class Failed(_Header):
    """The work failed: one of `moretta.contract.roles.Reason`, and a sentence."""

    kind: Literal["failed"] = "failed"
    reason: Literal["bad input", "disconnected", "refused", "failed", "malformed"]
    sentence: Text


class Stranger(_Header):
    """This process is not the addressee; knock and say hello first."""

    kind: Literal["stranger"] = "stranger"


class Refused(_Header):
    """The site takes no part in this run, with a sentence why."""

    kind: Literal["no"] = "no"
    sentence: Text


class Denied(_Header):
    """The envelope was rejected and changed nothing: the server's session did not send it here or now."""

    kind: Literal["denied"] = "denied"
    sentence: Text


Signed = Hello | Submit | Poll
Request = Knock | Signed
Reply = Awake | SiteReady | Busy | WorkDone | Failed | Stranger | Refused | Denied
H = TypeVar("H", Request, Reply)
Sign = Callable[[bytes, bytes], bytes]
"""Returns the signature of a header and a body."""


@dataclass(frozen=True)
class Envelope:
    """The bytes of an envelope: header, signature, body; the body is not copied."""

    header: bytes
    signature: bytes
    body: memoryview


_REQUEST: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
_REPLY: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Field(discriminator="kind")])


def digest_of(settings: str) -> str:
    """Return the SHA-256, in hex, of a run's shared settings: `Hello.job`."""
    return hashlib.sha256(settings.encode()).hexdigest()


def pack(header: Request | Reply, body: bytes = b"", sign: Sign | None = None) -> bytes:
    """Return header, signature and body joined."""
    text = header.model_dump_json().encode()
    signature = UNSIGNED if sign is None else sign(text, body)
    return b"".join((framing.length_of(text, LENGTH), signature, text, body))


def request_of(data: object, largest: int = LARGEST) -> tuple[Request, Envelope]:
    """Return a server's request.

    Args:
        largest: The largest number of bytes of a body.

    Raises:
        CodecError: The data are anything else.
    """
    envelope = _split(data, largest)
    return _read(_REQUEST, envelope.header, "request"), envelope


def reply_of(data: object, largest: int = LARGEST) -> tuple[Reply, Envelope]:
    """Return a site's reply.

    Args:
        largest: The largest number of bytes of a body.

    Raises:
        CodecError: The data are anything else.
    """
    envelope = _split(data, largest)
    return _read(_REPLY, envelope.header, "reply"), envelope


def _split(data: object, largest: int) -> Envelope:
    if not isinstance(data, (bytes, memoryview)):
        raise CodecError(f"expected an envelope; got {type(data).__name__}")
    data = memoryview(data)
    header = framing.find(data, limit=HEADER_LIMIT, width=LENGTH, gap=SIGNATURE, what="a header")
    if len(data) - header.stop > largest:
        raise CodecError(f"expected a message of at most {largest} bytes; got {len(data) - header.stop}")
    return Envelope(bytes(data[header]), bytes(data[LENGTH : header.start]), data[header.stop :])


def _read(kinds: TypeAdapter[H], header: bytes, what: str) -> H:
    """Return a header; only a refused one is parsed again, to find its fault."""
    try:
        parsed = kinds.validate_json(header)
    except ValidationError as error:
        _check_format(header)
        raise _wrong(what, error) from None
    if "format" not in parsed.model_fields_set:  # its default is for headers that this process makes
        _check_format(header)
    return parsed


def _check_format(header: bytes) -> None:
    try:
        version = json.loads(header)["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CodecError(f"expected a header in JSON: {error}") from None
    if type(version) is not int or version != FORMAT:
        raise CodecError(f"expected an envelope of format {FORMAT}; got {version!r:.40}; update the older side")


def _wrong(what: str, error: ValidationError) -> CodecError:
    first = error.errors(include_url=False, include_input=False)[0]
    # The place may hold a peer's own key, and the sentence its `kind`.
    place, why = (text.encode("unicode_escape").decode() for text in (".".join(map(str, first["loc"])), first["msg"]))
    return CodecError(f"expected a {what} of this engine: {place[:80]}: {why[:200]}")
