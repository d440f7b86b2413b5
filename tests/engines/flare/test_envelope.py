"""Envelopes: what was packed comes back, and any other bytes are one error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from refused_rows import Row, refused

from moretta.engines.flare.envelope import (
    FORMAT,
    HEADER_LIMIT,
    SIGNATURE,
    UNSIGNED,
    Awake,
    Busy,
    Denied,
    Envelope,
    Failed,
    Hello,
    Knock,
    Poll,
    Refused,
    Reply,
    Request,
    SiteReady,
    Stranger,
    Submit,
    WorkDone,
    pack,
    reply_of,
    request_of,
)
from moretta.errors import CodecError

HELLO = Hello(
    run="0123abcd.0123456789abcdef",
    round=3,
    session=1,
    job="j" * 64,
    model="m" * 64,
    versions={"moretta": "0.1.0", "torch": "2.6.0"},
    torch=("2.12",),
)
SUBMIT = Submit(processes={"north": "b1", "süd": "b2"}, serial=2**53 - 1, number=7, work="keep", round=12)
REQUESTS: list[Request] = [Knock(), HELLO, SUBMIT, Poll(processes={"north": "b1"}, number=2**31 - 1, wait=0.5)]
REPLIES: list[Reply] = [
    Awake(process_id="0a" * 32),
    SiteReady(name="north", key="0123456789abcdef"),
    Busy(),
    WorkDone(seconds={"local_forward": 1.25}, peak_mib=80.5),
    WorkDone(),
    Failed(reason="bad input", sentence='a "sentence" with ü and \u2028'),
    Stranger(),
    Refused(sentence=""),
    Denied(sentence="it was replayed"),
]


def framed(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(4, "little") + UNSIGNED + text + body


def plain(header: Request | Reply, **changed: Any) -> dict[str, Any]:
    return {"format": FORMAT, **header.model_dump(mode="json"), **changed}


@pytest.mark.parametrize("body", [b"", b"\x00" * 9, bytes(range(256))])
def test_what_was_packed_comes_back(body: bytes) -> None:
    for request in REQUESTS:
        found, envelope = request_of(pack(request, body))
        assert (found, envelope.body, envelope.signature) == (request, body, UNSIGNED)
    for reply in REPLIES:
        answer, envelope = reply_of(pack(reply, body))
        assert (answer, envelope.body, envelope.signature) == (reply, body, UNSIGNED)


def test_what_is_signed_are_the_bytes_that_come() -> None:
    seen: list[tuple[bytes, bytes]] = []

    def sign(header: bytes, body: bytes) -> bytes:
        seen.append((header, body))
        return b"s" * SIGNATURE

    _, envelope = request_of(pack(SUBMIT, b"body", sign))
    assert envelope == Envelope(*seen[0][:1], b"s" * SIGNATURE, memoryview(b"body"))
    assert json.loads(envelope.header) == plain(SUBMIT)


@refused("envelope.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


def only_ours(data: object) -> None:
    for read in (request_of, reply_of):
        try:
            header, envelope = read(data)
        except CodecError as error:
            said = str(error)
            assert len(said) < 500
            said.encode()
        else:
            assert isinstance(envelope.body, memoryview)
            assert header.model_dump_json()


@given(st.binary(max_size=200))
@example(b"")
@example(b"\x00\x00\x00\x00")
@example(framed(b"\xff\xfe{\x00}\x00"))
def test_any_bytes_are_a_header_or_one_error(data: bytes) -> None:
    only_ours(data)


@given(st.binary(max_size=150))
def test_any_bytes_as_a_header_are_a_header_or_one_error(header: bytes) -> None:
    only_ours(framed(header))
    only_ours(framed(b'{"format":2,"kind":' + header))


@given(st.sampled_from([*REQUESTS, *REPLIES]), st.data())
def test_damage_gives_a_header_or_one_error(header: Request | Reply, data: st.DataObject) -> None:
    damaged = bytearray(pack(header, b"body"))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        match data.draw(st.sampled_from(["change", "cut", "double"])):
            case "change":
                damaged[place] = data.draw(st.integers(0, 255))
            case "cut":
                del damaged[place : place + data.draw(st.integers(1, 9))]
            case _:
                damaged[place:place] = damaged[place : place + data.draw(st.integers(1, 9))]
        if not damaged:
            break
    only_ours(bytes(damaged))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from([*REQUESTS, *REPLIES]), st.data())
def test_a_key_of_any_value_gives_a_header_or_one_error(header: Request | Reply, data: st.DataObject) -> None:
    content = plain(header)
    key = data.draw(st.sampled_from(sorted(content)) | st.text(max_size=5))
    only_ours(framed(content | {key: data.draw(VALUES)}))
    content.pop(key, None)
    only_ours(framed(content))


@pytest.mark.parametrize("kind", ["two\nlines", "\r", "\x1b[2J"])
def test_a_peers_kind_does_not_reach_a_terminal_as_it_is(kind: str) -> None:
    with pytest.raises(CodecError) as caught:
        request_of(framed(json.dumps({"format": FORMAT, "kind": kind}).encode()))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("key", ["two\nlines", "\r", "\x1b[2J"])
def test_a_refusal_is_one_plain_line(key: str) -> None:
    with pytest.raises(CodecError) as caught:
        request_of(framed(plain(HELLO, **{key: 1})))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("data", [None, 7, "text", bytearray(pack(HELLO)), [pack(HELLO)], {"envelope": b""}])
def test_what_is_no_bytes_is_refused_by_its_type(data: object) -> None:
    with pytest.raises(CodecError, match=f"expected an envelope; got {type(data).__name__}"):
        request_of(data)


@pytest.mark.parametrize("version", [0, 1, 3, 2.0, "2", None, True, [1], 10**400])
def test_another_format_is_refused_by_name(version: object) -> None:
    with pytest.raises(CodecError, match=rf"expected an envelope of format {FORMAT}; got .*; update the older side"):
        request_of(framed(plain(HELLO, format=version)))


def test_a_header_is_no_longer_than_its_limit_and_lies_within_its_envelope() -> None:
    spaces = json.dumps(plain(HELLO)).encode()
    spaces += b" " * (HEADER_LIMIT - len(spaces))
    found, envelope = request_of(framed(spaces, b"body"))
    assert (found, envelope.body) == (HELLO, b"body")
    with pytest.raises(CodecError, match=f"expected a header of at most {HEADER_LIMIT} bytes within"):
        request_of(framed(spaces + b" ", b"body"))
    with pytest.raises(CodecError, match="expected a header of at most"):
        request_of(pack(HELLO)[:-1])
    with pytest.raises(CodecError, match="expected a header of at most"):
        request_of(b"\xff\xff\xff\xff" + pack(HELLO)[4:])


def test_the_longest_sentence_and_as_many_sites_as_may_be_fit_a_header() -> None:
    longest = Refused(sentence="\U0001f600" * 1000)  # twelve bytes of JSON each
    assert reply_of(pack(longest))[0] == longest
    crowd = Submit(processes={f"hospital-{number:03d}": "0a" * 32 for number in range(500)}, number=1, work="end")
    assert request_of(pack(crowd))[0] == crowd


def test_headers_are_frozen_and_their_collections_of_plain_types() -> None:
    request, _ = request_of(pack(HELLO))
    assert isinstance(request, Hello)
    with pytest.raises(ValueError, match="frozen"):
        request.round = 4  # type: ignore[misc]
    assert type(request.torch) is tuple
