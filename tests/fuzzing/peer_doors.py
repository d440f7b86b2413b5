"""Bytes of another machine: messages, envelopes, and what a run releases."""

from __future__ import annotations

import io
import json
import shutil
from functools import cache
from typing import get_args

import numpy as np
from door import BETWEEN, ROOT, Door, counted, folder, never, parts, uncounted
from safetensors.numpy import save

from moretta.contract import framing
from moretta.contract.codec import Codec, type_of
from moretta.contract.messages import Spent
from moretta.data.alignment import steps
from moretta.deployment.site import unpack_released
from moretta.engines import child
from moretta.engines.flare import envelope
from moretta.engines.flare.signing import Gate, ServerSession, Trust, _request
from moretta.engines.frames import receive_arrays, send_arrays
from moretta.errors import CodecError, PeerError
from moretta.protocols.common import overlap, scoring, silo_rows
from moretta.protocols.registry import ENTRIES
from moretta.secure_aggregation import schemes
from moretta.secure_aggregation.identity import Identity


@cache
def every_message() -> Codec:
    """Return the codec of all messages that the package declares; each is in one of these."""
    shared = (schemes, silo_rows, overlap, scoring, child)
    own = [kind for entry in ENTRIES.values() for kind in entry.own_messages()]
    return Codec(dict.fromkeys([Spent, *steps.FILES, *own, *(kind for one in shared for kind in one.MESSAGES)]))


def open_codec(data: bytes) -> None:
    codec = every_message()
    message = codec.decode(counted(data, 4))
    written_again = codec.encode(message)
    with never(CodecError):
        if codec.encode(codec.decode(written_again)) != written_again:
            raise AssertionError("a message reads back as another one")


def messages() -> list[bytes]:
    vectors = json.loads((ROOT / "tests" / "vectors" / "messages.json").read_text(encoding="utf-8"))
    return [uncounted(bytes.fromhex(case["bytes"]), 4) for case in vectors["good"]]


def open_framing(data: bytes) -> None:
    """Frames of bytes and of a stream, and arrays between an edge client and its parent."""
    framing.find(data, width=4, limit=1 << 16)
    stream = io.BytesIO(data)
    while framing.read(stream, 1 << 16) is not None:
        pass
    receive_arrays(io.BytesIO(data))


def frames() -> list[bytes]:
    stream = io.BytesIO()
    send_arrays(stream, {"x": np.arange(6, dtype=np.float32).reshape(2, 3)})
    return [stream.getvalue()]


HELLO = envelope.Hello(run="run", round=0, session=0, job="j", model="m", versions={"torch": "2"}, torch=("2",))


def open_request(data: bytes) -> None:
    envelope.request_of(counted(data, 4, envelope.UNSIGNED))


def headers() -> list[bytes]:
    known = [HELLO, envelope.Knock(), envelope.Submit(number=1, work="answer"), envelope.Poll(number=1, wait=0.5)]
    return [uncounted(envelope.pack(one, b"body"), 4, 64) for one in known]  # type: ignore[arg-type]


def replies() -> list[bytes]:
    known = [
        envelope.Awake(process_id="ab" * 32),
        envelope.SiteReady(name="north"),
        envelope.Busy(long=True),
        envelope.WorkDone(seconds={"training": 0.5}, peak_mib=3.5),
        envelope.Failed(reason="refused", sentence="no"),
        envelope.Stranger(),
        envelope.Refused(sentence="no"),
        envelope.Denied(sentence="no"),
    ]
    return [uncounted(envelope.pack(one, b"body"), 4, 64) for one in known]  # type: ignore[arg-type]


def header_words() -> list[str]:
    """Return the fields of headers and what stands in them; pydantic reads them, whose lines no fuzzer sees."""
    kinds = [*get_args(envelope.Request), *get_args(envelope.Reply)]
    fields = [
        item for kind in (*kinds, *get_args(envelope.Signed)) for item in getattr(kind, "model_fields", {}).items()
    ]
    literals = [one for _, field in fields for one in get_args(field.annotation) if isinstance(one, str)]
    return sorted({*(name for name, _ in fields), *literals, "true", "null", "1e999", "-1", "[[", "{}", '""'})


@cache
def session() -> ServerSession:
    return ServerSession(Identity(b"s" * 32), HELLO)


def open_signed(data: bytes) -> None:
    """Headers of requests that the server's session signs, whatever they are, one after the other at one site."""
    own = folder() / "runs"
    shutil.rmtree(own, ignore_errors=True)
    gate = Gate(lambda: Trust("north", (Identity(b"s" * 32).public_key,), None, own))
    hello = session().hello.model_copy(update={"processes": {"north": gate.process_id}, "serial": 1})
    for text in [hello.model_dump_json().encode(), *data.split(BETWEEN)[:4]]:
        text = text.replace(b"@process", gate.process_id.encode())
        signature = session()._identity.sign(*_request("run", 0, text, b""))
        request, found = envelope.request_of(b"".join((framing.length_of(text, 4), signature, text)))
        if not isinstance(request, envelope.Knock):
            gate.take(request, found)


def signed() -> list[bytes]:
    told = {"processes": {"north": "@process"}, "serial": 2}
    poll, submit = envelope.Poll(number=1, wait=0.5), envelope.Submit(number=1, work="keep", round=3)
    texts = [one.model_copy(update=told).model_dump_json().encode() for one in (poll, submit)]
    return [texts[0], BETWEEN.join([texts[1], texts[0].replace(b'"serial":2', b'"serial":70')])]


def open_reply(data: bytes) -> None:
    session().open(counted(data, 4, envelope.UNSIGNED), "ab" * 32, 1, None, largest=1 << 16)


def open_released(data: bytes) -> None:
    text, tensors = parts(data, 2)
    unpack_released(framing.length_of(text, 4) + text + counted(tensors, 8))


def released() -> list[bytes]:
    return [b'{"shape": [4]}' + BETWEEN + uncounted(save({"w": np.ones((2, 2), np.float32)}), 8)]


DOORS = {
    "codec": Door(
        open_codec, CodecError, messages, lambda: [type_of(k) for k in every_message().kinds.values()], 3, True
    ),
    "framing": Door(open_framing, CodecError, frames, share=3, peer=True),
    "request": Door(open_request, CodecError, headers, header_words, 3, True),
    "reply": Door(open_reply, PeerError, replies, header_words, 3, True),
    "signed-request": Door(open_signed, PeerError, signed, header_words, 1, True),
    "released": Door(open_released, CodecError, released, share=2, peer=True),
}
