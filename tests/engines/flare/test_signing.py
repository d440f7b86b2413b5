"""Who sent an envelope: a site takes what a session signed for this process, once; and seals and signs its answer."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moretta.engines.flare import signing
from moretta.engines.flare.envelope import (
    Busy,
    Denied,
    Hello,
    Poll,
    Refused,
    Signed,
    SiteReady,
    Stranger,
    Submit,
    WorkDone,
    pack,
    reply_of,
    request_of,
)
from moretta.engines.flare.signing import RECORD, WINDOW, Gate, ServerSession, SiteSession, Trust, Window
from moretta.engines.mapped import LARGE
from moretta.errors import CodecError, ParameterError, PeerError
from moretta.secure_aggregation.identity import Identity, fingerprint

SERVER, OWN, OTHER = Identity(b"s" * 32), Identity(b"o" * 32), Identity(b"x" * 32)
HELLO = Hello(run="run", round=0, session=0, job="j", model="m", versions={}, torch=())
POLL = Poll(number=1, wait=0.0)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(lambda: Trust("north", (SERVER.public_key,), None, tmp_path))


def send(session: ServerSession, gate: Gate, request: Signed, body: bytes = b"") -> SiteSession:
    return take(gate, session.pack(request, {"north": gate.process_id}, body)[0])


def take(gate: Gate, data: bytes) -> SiteSession:
    request, envelope = request_of(data)
    assert isinstance(request, Hello | Submit | Poll)
    return gate.take(request, envelope)


def begun(gate: Gate, session: int = 0, identity: Identity = SERVER) -> ServerSession:
    made = ServerSession(identity, HELLO.model_copy(update={"session": session}))
    send(made, gate, made.hello)
    return made


@given(st.lists(st.integers(1, 300), max_size=200))
def test_a_serial_is_taken_once_and_within_the_last_64(serials: list[int]) -> None:
    window, taken = Window(), set[int]()
    for serial in serials:
        fresh = serial not in taken and serial > max(taken, default=0) - WINDOW
        assert window.take(serial) == fresh
        taken |= {serial} if fresh else set()


def test_serials_far_apart_cost_nothing() -> None:
    window = Window()
    assert [window.take(serial) for serial in (1, 2**53 - 1, 2**53 - 2, 1, 2**53 - 2)] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_what_several_are_sent_is_signed_once_and_taken_by_each(tmp_path: Path) -> None:
    trust = Trust("north", (OTHER.public_key, SERVER.public_key), None, tmp_path)
    gates = {
        name: Gate(lambda name=name: replace(trust, name=name, folder=tmp_path / name)) for name in ("north", "south")
    }
    session = ServerSession(SERVER, HELLO)
    ids = {name: gate.process_id for name, gate in gates.items()}
    for request, body in ((session.hello, b""), (Submit(number=1, work="answer"), b"body"), (POLL, b"")):
        data, _ = session.pack(request, ids, body)
        assert {take(gate, data).hello.session for gate in gates.values()} == {0}


CHANGES: list[dict[str, Any]] = [
    {"run": "other"},
    {"session": 1},
    {"job": "k"},
    {"key": OTHER.public_key.hex()},
    {"exchange": "09" + "00" * 31},
    {"certificate": "00" * 64},
    {"certificate": ""},
    {"key": ""},
]


@pytest.mark.parametrize("changed", CHANGES)
def test_a_certificate_is_of_one_run_session_job_and_pair_of_keys(changed: dict[str, Any], gate: Gate) -> None:
    session = ServerSession(SERVER, HELLO)
    with pytest.raises(PeerError, match=r"session is not signed by the server's key|is not signed"):
        send(session, gate, session.hello.model_copy(update=changed))
    send(session, gate, session.hello)  # and nothing of that was kept


@pytest.mark.parametrize("changed", [{"round": 7}, {"model": "n"}, {"tensors": "t"}, {"serial": 99}])
def test_a_header_is_signed_whole(changed: dict[str, Any], gate: Gate) -> None:
    session = ServerSession(SERVER, HELLO)
    data, _ = session.pack(session.hello, {"north": gate.process_id})
    request, envelope = request_of(data)
    forged = pack(request.model_copy(update=changed), b"", lambda *parts: envelope.signature)
    with pytest.raises(PeerError, match="is not signed by the key of session 0"):
        take(gate, forged)


def test_an_exchange_key_that_shares_no_secret_is_refused(gate: Gate) -> None:
    session = ServerSession(SERVER, HELLO)
    hello = session.hello.model_copy(update={"exchange": "00" * 32})
    hello = hello.model_copy(update={"certificate": SERVER.sign(*signing._certificate(hello)).hex()})
    with pytest.raises(PeerError, match="shares no secret"):
        send(session, gate, hello)


def test_only_what_names_this_site_and_process_is_taken(gate: Gate) -> None:
    session = begun(gate)
    for processes, sentence in (
        ({}, "addressed to nobody, not to north"),
        ({"south": gate.process_id}, "addressed to south, not to north: passed on by another than the server"),
        ({"north": "0" * 64}, "addressed to another process of this site"),
    ):
        with pytest.raises(PeerError, match=sentence):
            take(gate, session.pack(POLL, processes)[0])


def test_a_session_before_any_hello_is_none(gate: Gate) -> None:
    with pytest.raises(PeerError, match="before any session of the server's has begun here"):
        send(ServerSession(SERVER, HELLO), gate, POLL)


def test_the_highest_session_is_on_disk_before_anything_is_taken(gate: Gate, tmp_path: Path) -> None:
    session = begun(gate, 3)
    path = tmp_path / "run" / RECORD
    assert json.loads(path.read_text()) == {"session": 3, "key": session.hello.key}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = Gate(lambda: Trust("north", (SERVER.public_key,), None, tmp_path))  # another process
    with pytest.raises(PeerError, match="is of session 2 of the run, and session 3 has begun"):
        begun(again, 2)
    with pytest.raises(PeerError, match="is of a second beginning of session 3"):
        begun(again, 3)
    with pytest.raises(PeerError, match="before any session"):
        send(session, again, POLL)
    send(session, again, session.hello)
    assert begun(again, 4).hello.key == json.loads(path.read_text())["key"]


@pytest.mark.parametrize("record", ["", "{}", "[]", '{"session": "x", "key": "y"}', "\xff"])
def test_a_damaged_record_lets_nobody_in(record: str, gate: Gate, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RECORD).write_bytes(record.encode("latin-1"))
    with pytest.raises(PeerError, match="the record of the run's sessions is damaged"):
        begun(gate)


def test_a_session_that_cannot_be_kept_is_not_taken(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*given: object, **named: object) -> None:
        raise OSError("no space left")

    session = ServerSession(SERVER, HELLO)
    with monkeypatch.context() as patched:
        patched.setattr(signing, "write_atomically", full)
        with pytest.raises(OSError, match="no space left"):
            send(session, gate, session.hello)
    with pytest.raises(PeerError, match="before any session"):
        send(session, gate, POLL)
    send(session, gate, session.hello)


def test_a_session_whose_place_another_has_taken_is_over_in_this_process(gate: Gate) -> None:
    first, second = begun(gate), ServerSession(SERVER, HELLO.model_copy(update={"run": "another"}))
    send(second, gate, second.hello)
    with pytest.raises(PeerError, match="that another has replaced here"):
        send(first, gate, first.hello)
    with pytest.raises(PeerError, match="is not signed by the key of session 0"):
        send(first, gate, POLL)


def test_a_site_whose_keys_cannot_be_told_takes_nothing() -> None:
    def load() -> Trust:
        raise ParameterError("silo.toml: damaged")

    with pytest.raises(ParameterError, match="damaged"):
        begun(Gate(load))


# -- replies -----------------------------------------------------------------------------------------------------------


def listed(folder: Path, identity: Identity | None = OWN) -> Gate:
    return Gate(lambda: Trust("north", (SERVER.public_key,), identity, folder))


def asked(session: ServerSession, gate: Gate) -> tuple[SiteSession, int]:
    data, serial = session.pack(POLL, {"north": gate.process_id})
    return take(gate, data), serial


def test_what_is_done_is_sealed_for_the_session_that_asked(gate: Gate) -> None:
    session = begun(gate)
    joined, serial = asked(session, gate)
    data = joined.pack(serial, WorkDone(), b"a gradient")
    assert b"a gradient" not in data
    assert session.open(data, gate.process_id, serial, None) == (WorkDone(), b"a gradient")
    other = ServerSession(SERVER, session.hello)
    other.hello = session.hello  # all that anybody else knows of it
    for opener, process_id, number in ((other, gate.process_id, serial), (session, gate.process_id, serial + 1)):
        with pytest.raises(CodecError, match="expected an answer sealed for this session"):
            opener.open(data, process_id, number, None)
    for process_id in ("09" + "00" * 31, "00" * 32, "", "no"):
        with pytest.raises(CodecError, match="expected an answer sealed for this session"):
            session.open(data, process_id, serial, None)
    for damaged in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), pack(WorkDone()), pack(WorkDone(), b"short")):
        with pytest.raises(CodecError, match="expected an answer sealed for this session"):
            session.open(damaged, gate.process_id, serial, None)


def test_what_is_too_long_for_the_cipher_is_sealed_in_pieces(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signing, "PIECE", 10)
    session = begun(gate)
    for length in (0, 1, 9, 10, 11, 20, 35):
        joined, serial = asked(session, gate)
        body = bytes(range(length))
        header, envelope = reply_of(joined.pack(serial, WorkDone(), body))
        sealed = bytes(envelope.body)
        assert len(sealed) == length + 16 * max(1, -(-length // 10))
        assert session.open(pack(header, sealed), gate.process_id, serial, None, length)[1] == body
        if length:
            with pytest.raises(CodecError, match="expected a message of at most"):
                session.open(pack(header, sealed), gate.process_id, serial, None, length - 1)
        for cut in (sealed[:26], sealed[26:], sealed[26:52] + sealed[:26]):
            if length > 10:
                with pytest.raises(CodecError, match="does not open"):
                    session.open(pack(header, cut), gate.process_id, serial, None)


def test_a_large_answer_is_opened_into_a_file(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    session = ServerSession(SERVER, HELLO)
    joined, body = send(session, gate, session.hello), bytes(range(256)) * (LARGE >> 8)
    _, serial = session.pack(POLL, {"north": gate.process_id})
    rooms, real = list[int](), signing.room
    monkeypatch.setattr(signing, "room", lambda length: rooms.append(length) or real(length))
    data = joined.pack(serial, WorkDone(), body)
    opened = session.open(data, gate.process_id, serial, None)[1]
    assert (rooms, isinstance(opened, memoryview), opened == body) == ([len(body)], True, True)
    with pytest.raises(CodecError, match="expected an answer sealed for this session"):
        session.open(data[:-1] + bytes([data[-1] ^ 1]), gate.process_id, serial, None)


def test_a_reply_is_signed_over_process_serial_and_digest(tmp_path: Path) -> None:
    gate = listed(tmp_path)
    session = begun(gate)
    joined, serial = asked(session, gate)
    for reply, body in ((Busy(), b""), (WorkDone(peak_mib=1.0), b"body"), (SiteReady(name="north"), b"")):
        data = joined.pack(serial, reply, body)
        assert session.open(data, gate.process_id, serial, OWN.public_key) == (reply, body)
        for key, process_id, number in (
            (OTHER.public_key, gate.process_id, serial),
            (OWN.public_key, "0" * 64, serial),
            (OWN.public_key, gate.process_id, serial + 1),
        ):
            with pytest.raises(PeerError, match="roster") as caught:
                session.open(data, process_id, number, key)
            assert fingerprint(key) in str(caught.value)
        _, envelope = reply_of(data)
        forged = pack(WorkDone(peak_mib=2.0), bytes(envelope.body), lambda *parts, found=envelope: found.signature)
        with pytest.raises(PeerError, match="has not signed"):
            session.open(forged, gate.process_id, serial, OWN.public_key)


def test_without_a_signature_only_what_gives_nothing_is_heard(tmp_path: Path) -> None:
    session = ServerSession(SERVER, HELLO)
    gate = listed(tmp_path, None)
    for reply in (Stranger(), Denied(sentence="it was replayed")):
        assert session.open(pack(reply), gate.process_id, 1, OWN.public_key) == (reply, b"")
    said: list[tuple[Any, str]] = [
        (SiteReady(name="north", key=""), "has the identity of nobody, and the roster lists"),
        (Refused(sentence="has no rows"), "has not signed: has no rows"),
        (Busy(), "has not signed"),
    ]
    for reply, sentence in said:
        with pytest.raises(PeerError, match=sentence):
            session.open(pack(reply), gate.process_id, 1, OWN.public_key)


def test_a_body_is_hashed_only_where_its_signature_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(lambda: Trust("north", (SERVER.public_key,), OWN, tmp_path))
    server = begun(gate)
    data, serial = server.pack(POLL, {"north": gate.process_id})
    reply, hashed, real = take(gate, data).pack(serial, WorkDone(), b"sum"), list[int](), signing.sha256

    def counted(data: bytes) -> Any:
        hashed.append(len(data))
        return real(data)

    monkeypatch.setattr(signing, "sha256", counted)
    for key, hashes in ((None, 0), (OWN.public_key, 2)):  # of the header, and of the body
        hashed.clear()
        assert server.open(reply, gate.process_id, serial, key)[1] == b"sum"
        assert len(hashed) == hashes


def test_nothing_of_a_session_shows_its_keys(gate: Gate) -> None:
    session = begun(gate)
    joined, _ = asked(session, gate)
    assert len({repr(one)[:40] for one in (session, gate, joined)}) == 3
    assert not any(session._identity._private.private_bytes_raw().hex() in repr(one) for one in (session, gate, joined))
