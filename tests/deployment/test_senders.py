"""Who plays the server: what another sends, alters, sends again, holds back or hands on is refused, and named.

Each attack is played against sites in the middle of a run, which ends all the same as if nobody had played it. What the
server's relay lets a site do over FLARE itself is in `test_senders_over_flare.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from loopback import SERVER
from message_kinds import messages_in
from stopped import Killed, killed_after

from moretta.contract.roles import Missing, Reason
from moretta.engines.flare import site_worker
from moretta.engines.flare.delivery import Sites
from moretta.engines.flare.envelope import (
    Awake,
    Denied,
    Failed,
    Hello,
    Poll,
    Reply,
    SiteReady,
    Submit,
    WorkDone,
    pack,
    reply_of,
    request_of,
)
from moretta.engines.flare.signing import WINDOW, ServerSession
from moretta.errors import ParameterError
from moretta.secure_aggregation.identity import Identity, fingerprint, public_line

if TYPE_CHECKING:
    from loopback import Machines

PAIRWISE = 'name = "fedsgd"\nlearning-rate = 0.1'
LATE = Missing(Reason.LATE, "has not answered in time")
Attack = Callable[["Machines", list[tuple[str, bytes]]], Iterator[tuple[Reply, str]]]


@pytest.fixture(autouse=True)
def all_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_worker, "QUIET", -1.0)


def is_of_round(number: int, body: Any) -> bool:
    """Whether a request's body has a message of a round."""
    return number in {at for _, at in messages_in(bytes(body))}


def ends_as_undisturbed(many: Machines, out: Path) -> None:
    """The run has missed nobody, and has the bytes of the same run on one machine."""
    one = out.with_name("one")
    many.on_one_machine(one).train(many.rounds, 7)
    assert (out / "model.safetensors").read_bytes() == (one / "model.safetensors").read_bytes()


def deliver(many: Machines, data: bytes, to: str = "silo-1") -> Reply:
    return reply_of(many.workers[to].answer(data))[0]


def heard(sent: list[tuple[str, bytes]], kind: type[Hello | Submit | Poll], by: str = "silo-1") -> bytes:
    """The last envelope of a kind that a site has got, of work with a message."""
    for name, data in reversed(sent):
        request, envelope = request_of(data)
        if name == by and isinstance(request, kind) and (envelope.body or not isinstance(request, Submit)):
            return data
    raise AssertionError(f"{by} has got no {kind.__name__}")


def unsigned(many: Machines, sent: list[tuple[str, bytes]]) -> Iterator[tuple[Reply, str]]:
    """A site copies what the server sent, under serials that are to come."""
    for kind in (Hello, Submit):
        request, envelope = request_of(heard(sent, kind))
        assert isinstance(request, Hello | Submit)
        forged = request.model_copy(update={"serial": request.serial + 1000})
        yield deliver(many, pack(forged, bytes(envelope.body))), "it is not signed by the key of session 0"
    poll = Poll(number=1, wait=0.0, processes=dict(request.processes), serial=2000)
    yield deliver(many, pack(poll)), "it is not signed by the key of session 0"


def another_key(many: Machines, sent: list[tuple[str, bytes]]) -> Iterator[tuple[Reply, str]]:
    """A site plays the server by a key of its own: a session of its own, this session, and one that is to come."""
    hello, _ = request_of(heard(sent, Hello))
    assert isinstance(hello, Hello)
    own = ServerSession(Identity.fresh(), hello)
    for session in (own, ServerSession(Identity.fresh(), hello.model_copy(update={"session": 1}))):
        data, _ = session.pack(session.hello, hello.processes)
        yield (
            deliver(many, data),
            f"session is not signed by the server's key (pinned here: {fingerprint(SERVER.public_key)})",
        )
    request, envelope = request_of(heard(sent, Submit))
    assert isinstance(request, Submit)
    data, _ = own.pack(request, hello.processes, bytes(envelope.body))
    yield deliver(many, data), "it is not signed by the key of session 0"
    # The session's own keys, and the server's certificate of them, are there for all to see, and do not help.
    data, _ = own.pack(hello, hello.processes)
    yield deliver(many, data), "it is not signed by the key of session 0"


def replayed(many: Machines, sent: list[tuple[str, bytes]]) -> Iterator[tuple[Reply, str]]:
    """All that a site has got is sent to it again."""
    for name, data in list(sent):
        if name == "silo-1" and not isinstance(deliver(many, data), Awake):
            yield deliver(many, data), "it was replayed"


def altered(many: Machines, sent: list[tuple[str, bytes]]) -> Iterator[tuple[Reply, str]]:
    """What the server signed is sent with another body, another header, and another signature of its own."""
    data, other = heard(sent, Submit), heard(sent, Hello)
    yield deliver(many, data[:-1] + bytes([data[-1] ^ 1])), "it is not signed"
    yield deliver(many, data.replace(b'"work":"answer"', b'"work":  "keep"')), "it is not signed"
    yield deliver(many, data[:4] + other[4:68] + data[68:]), "it is not signed"


def handed_on(many: Machines, sent: list[tuple[str, bytes]]) -> Iterator[tuple[Reply, str]]:
    """A site hands another what was addressed to it alone: keys of a pair's masks, shares of a secret."""
    alone = [
        data
        for name, data in sent
        if name == "silo-2" and isinstance(request := request_of(data)[0], Submit) and len(request.processes) == 1
    ]
    assert alone
    for data in alone:
        yield deliver(many, data), "it was addressed to silo-2, not to silo-1: passed on by another than the server"


ATTACKS: list[Attack] = [unsigned, another_key, replayed, altered, handed_on]


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_envelope_of_another_is_refused_and_named(
    attack: Attack, machines: Callable[..., Machines], tmp_path: Path
) -> None:
    many = machines(PAIRWISE)
    many.start()
    sent: list[tuple[str, bytes]] = []
    named: list[str] = []

    def wrap(name: str, data: bytes) -> bytes | Missing:
        request, envelope = request_of(data)
        if not named and name == "silo-1" and isinstance(request, Submit) and is_of_round(2, envelope.body):
            before = many.workers["silo-1"].last_heard
            for reply, expected in attack(many, sent):
                assert isinstance(reply, Denied), reply
                assert expected in reply.sentence
                named.append(reply.sentence)
            assert many.workers["silo-1"].last_heard == before  # no sign of life of the server either
        sent.append((name, data))
        return many.workers[name].answer(data)

    many.wrap = wrap
    assert many.serve(tmp_path / "out").record["dropped"] == []
    assert named
    log = (tmp_path / "out" / "log.txt").read_text()  # of this process, in which the sites are too
    assert all(f"an envelope was not taken: {sentence}" in log for sentence in named)
    ends_as_undisturbed(many, tmp_path / "out")


def test_a_site_that_plays_the_whole_server_is_refused_and_named(
    machines: Callable[..., Machines], tmp_path: Path
) -> None:
    """It knows the run, as it was told it, and has a key of its own; before there were keys that was enough."""
    many = machines(PAIRWISE, '[secure-aggregation]\nscheme = "none"')
    many.start()
    with pytest.raises(ParameterError, match=r"0 of 3 sites .* session is not signed by the server's key"):
        many.serve(tmp_path / "stolen", identity=Identity.fresh(), wait=0.3)
    assert many.serve(tmp_path / "out").record["dropped"] == []
    ends_as_undisturbed(many, tmp_path / "out")


def test_who_hands_on_its_copy_first_is_given_what_it_cannot_open(
    machines: Callable[..., Machines], tmp_path: Path
) -> None:
    """What is addressed to several is taken from whoever brings it; the answer is for the server alone."""
    many = machines(PAIRWISE, '[secure-aggregation]\nscheme = "none"')
    many.start()
    got: list[bytes] = []

    def wrap(name: str, data: bytes) -> bytes | Missing:
        request, _ = request_of(data)
        if name == "silo-1" and isinstance(request, Submit | Hello | Poll) and "silo-2" in request.processes:
            reply, envelope = reply_of(many.workers["silo-2"].answer(data))  # before the server's own copy comes
            got.extend([bytes(envelope.body)] if isinstance(reply, WorkDone) and envelope.body else [])
        return many.workers[name].answer(data)

    many.wrap = wrap
    assert many.serve(tmp_path / "out").record["dropped"] == []
    assert len(got) > many.rounds
    assert not any(b"moretta" in body for body in got)  # as is in each message in the clear
    ends_as_undisturbed(many, tmp_path / "out")


def test_what_was_held_back_is_too_late(machines: Callable[..., Machines], tmp_path: Path) -> None:
    """Work that comes after newer work is not taken up; and after 64 envelopes more nothing is."""
    many = machines(PAIRWISE)
    many.start()
    held: list[bytes] = []

    def wrap(name: str, data: bytes) -> bytes | Missing:
        request, envelope = request_of(data)
        if name == "silo-1" and isinstance(request, Submit) and is_of_round(2, envelope.body) and len(held) < 3:
            held.append(data)  # and the server sends it again, under another serial
            return LATE if len(held) == 1 else many.workers[name].answer(data)
        if held and isinstance(request, Submit) and is_of_round(3, envelope.body):
            reply = deliver(many, held[0])
            assert isinstance(reply, Failed | Denied)
            assert "out of order" in reply.sentence or "it was replayed" in reply.sentence
            named.append(reply.sentence)
        return many.workers[name].answer(data)

    named: list[str] = []
    many.wrap = wrap
    assert many.serve(tmp_path / "out").record["dropped"] == []
    assert "out of order" in named[0]
    assert "it was replayed" in named[1]
    ends_as_undisturbed(many, tmp_path / "out")
    poll, serial = many.made[-1]._live._session.pack(
        Poll(number=0, wait=0.0), {"silo-1": many.workers["silo-1"].process_id}
    )
    for _ in range(WINDOW):
        many.made[-1].speak()
    reply = deliver(many, poll)
    assert isinstance(reply, Denied)
    assert f"it has the serial {serial}, which was seen or is older than the last 64" in reply.sentence


def test_a_server_of_an_older_session_is_refused_and_named(machines: Callable[..., Machines], tmp_path: Path) -> None:
    """One that was thought dead speaks up after another has gone on with its run, on the same sites or restarted."""
    many = machines(PAIRWISE)
    many.start()
    with pytest.raises(Killed):
        many.serve(tmp_path / "out", progress=killed_after(1))
    many.serve(tmp_path / "out", resume=True)
    older = many.made[0]._live._session

    def says(request: Any) -> str:
        data, _ = older.pack(request, {"silo-1": many.workers["silo-1"].process_id})
        reply = deliver(many, data)
        assert isinstance(reply, Denied)
        return reply.sentence

    assert "it is not signed by the key of session 1" in says(Poll(number=1, wait=0.0))
    assert "it is of a session that another has replaced here" in says(older.hello)
    many.stop()
    many.start()
    assert "it is of session 0 of the run, and session 1 has begun" in says(older.hello)
    second = many.made[-1]
    again = Sites(many.names, many.send, second._codec, second._live._session.hello, SERVER)
    with pytest.raises(ParameterError, match=r"0 of 3 sites .* it is of a second beginning of session 1"):
        again.gather(2, 0.3)
    data, _ = second._live._session.pack(second._live._session.hello, {"silo-1": many.workers["silo-1"].process_id})
    assert isinstance(deliver(many, data), SiteReady)  # and who has begun it may go on with it


def test_either_of_two_pinned_keys_is_taken_while_one_takes_the_others_place(
    machines: Callable[..., Machines], tmp_path: Path
) -> None:
    many, following = machines(PAIRWISE), Identity.fresh()
    for name in many.names:
        path = many.folder / name / "silo.toml"
        lines = f'["{public_line(SERVER.public_key)}", "{public_line(following.public_key)}"]'
        path.write_text(path.read_text().replace(f'"{public_line(SERVER.public_key)}"', lines))
    many.start()
    with pytest.raises(Killed):
        many.serve(tmp_path / "out", progress=killed_after(1))
    assert many.serve(tmp_path / "out", resume=True, identity=following).record["dropped"] == []
    with pytest.raises(ParameterError, match="session is not signed by the server's key"):
        many.serve(tmp_path / "third", identity=Identity.fresh(), wait=0.3)


def test_a_site_without_a_pinned_key_takes_nothing(machines: Callable[..., Machines], tmp_path: Path) -> None:
    many = machines(PAIRWISE)
    for name in many.names:
        path = many.folder / name / "silo.toml"
        path.write_text(path.read_text().replace("server-key", "# server-key"))
    many.start()
    with pytest.raises(ParameterError, match=r"0 of 3 sites .* no key of the server is pinned here"):
        many.serve(tmp_path / "out", wait=0.3)


# -- replies -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def listed(machines: Callable[..., Machines], tmp_path: Path) -> Machines:
    """Sites with a roster."""
    names, text = ("silo-1", "silo-2", "silo-3", "silo-4"), ""  # of four, three may go on
    for name in names:
        own = Identity.fresh()
        own.save(tmp_path / "keys" / name)
        text += f'[[silo]]\nname = "{name}"\nkey = "{public_line(own.public_key)}"\n'
    (tmp_path / "roster.toml").write_text(f'{text}[server]\nkey = "{public_line(SERVER.public_key)}"\n')
    places = f'roster = "{tmp_path}/roster.toml"\nidentity = "{tmp_path}/keys/{{silo}}"'
    many = machines(PAIRWISE, f"[secure-aggregation]\n{places}", data="silos = 4\nbatch-size = 8")
    for name in names:
        path = many.folder / name / "silo.toml"
        line = f'server-key = "{public_line(SERVER.public_key)}"\n'  # which the roster says too
        path.write_text(path.read_text().replace(line, places.format(silo=name) + "\n"))
    many.start()
    return many


def stripped(reply: bytes, before: list[bytes], others: bytes) -> bytes:
    return reply[:4] + bytes(64) + reply[68:]


def of_before(reply: bytes, before: list[bytes], others: bytes) -> bytes:
    return before[-1]


def of_another(reply: bytes, before: list[bytes], others: bytes) -> bytes:
    return others


@pytest.mark.parametrize("forge", [stripped, of_before, of_another])
def test_a_reply_that_the_silos_identity_has_not_signed_is_refused_and_named(
    forge: Callable[[bytes, list[bytes], bytes], bytes], listed: Machines, tmp_path: Path
) -> None:
    before: list[bytes] = []
    forged: list[str] = []

    def wrap(name: str, data: bytes) -> bytes | Missing:
        request, envelope = request_of(data)
        reply = listed.workers[name].answer(data)
        if name != "silo-2" or not isinstance(request, Submit):
            return reply
        if is_of_round(2, envelope.body) and not forged and "silo-3" in request.processes:
            forged.append(request.kind)
            return forge(reply, before, listed.workers["silo-3"].answer(data))
        before.append(reply)
        return reply

    listed.wrap = wrap
    record = listed.serve(tmp_path / "out").record
    assert forged
    (gone,) = [gone for gone in record["dropped"] if gone["silo"] == "silo-2"]
    assert gone["round"] == 2
    assert "sent a reply that its identity in the roster, " in gone["reason"]
    assert "has not signed" in gone["reason"]


def test_a_server_that_the_roster_does_not_name_is_refused(listed: Machines, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"0 of 4 sites .* session is not signed by the server's key"):
        listed.serve(tmp_path / "stolen", identity=Identity.fresh(), wait=0.3)
    shutil.rmtree(tmp_path / "stolen", ignore_errors=True)
    assert listed.serve(tmp_path / "out").record["dropped"] == []
