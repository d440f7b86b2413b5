"""The server's half: replies as the engine of one machine gives them, whatever becomes of a site, and no site waited
for longer than it says."""

from __future__ import annotations

import logging
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy import SCHEMA, Said, Say, ToyClient, ToyServer

from moretta.contract.codec import Codec
from moretta.contract.messages import Array, Message, Spent, Stamp, message
from moretta.contract.roles import Ask, Client, Missing, Reason, Replies
from moretta.engines import views
from moretta.engines.checkpoint import CheckpointId
from moretta.engines.driver import Driver
from moretta.engines.flare import delivery, liveness, site_worker
from moretta.engines.flare.delivery import BACK, FIRST, KEEPING, LONGEST, MISSES, WAIT, Sites
from moretta.engines.flare.envelope import (
    Awake,
    Busy,
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
from moretta.engines.flare.liveness import AGAIN, LATER, PATIENCE, PLAIN_LIMIT
from moretta.engines.flare.signing import Gate, Trust
from moretta.engines.flare.site_worker import UNFIT, SiteWorker
from moretta.engines.in_process import InProcess
from moretta.engines.views import Recorder
from moretta.errors import CodecError, Disconnected, MisuseError, ParameterError, PeerError, RunFailed
from moretta.secure_aggregation.identity import Identity, fingerprint

NOW = Stamp("run", 1, 0)
NAMES = ("a", "b", "c")
HELLO = Hello(run="run", round=0, session=0, job="j", model="m", versions={}, torch=())
DEAD = Missing(Reason.DISCONNECTED, "cannot be reached")
RESTARTED = Missing(Reason.DISCONNECTED, "was restarted")
SLOW = Missing(Reason.LATE, "has not answered in time")
CODEC = Codec(SCHEMA)
Clients = dict[str, ToyClient]
Behaviour = Callable[[Request, bytes], "Reply | tuple[Reply, bytes] | bytes | Missing"]
SERVER = Identity(b"the server's key, for tests only".ljust(32)[:32])
OWN = {name: Identity(name.encode() * 32) for name in NAMES}


@message("toy/foreign")
class Foreign(Message):
    """A message that is not in the schema."""


@message("toy/large")
class Large(Message):
    """An array, both ways."""

    values: Array


class Time:
    """The server's clock, which runs only where somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class ToySilo:
    def __init__(self, name: str, client: Client, codec: Codec) -> None:
        self.name, self.fingerprint, self.client, self.codec = name, f"key of {name}", client, codec
        self.largest, self.timed = 1 << 30, True
        self.kept: list[int] = []
        self.ended: list[bytes] = []

    def enter(self, hello: Hello) -> tuple[Client, Codec]:
        return self.client, self.codec

    def refused(self, error: BaseException) -> bool:
        return False

    def answered(self, client: Client, asked: Message, answer: Message | None) -> None: ...

    def keep(self, client: Client, round: int) -> None:
        self.kept.append(round)

    def end(self, client: Client, released: bytes) -> None:
        self.ended.append(released)


class Network:
    """Workers, and what stands in for them. A reply that is late costs the time that was to be waited for it.

    instead: by silo, what answers in the place of its worker; it is asked for the process id too, and its reply to that
    is then one if it replies at all. sent: all that was sent, in order; long: whether as streams, an exchange each.
    raw: the bytes of the last. own: identities.
    """

    def __init__(self, clients: Mapping[str, Client], codec: Codec, clock: Time, folder: Path) -> None:
        self.clock, self.folder = clock, folder
        self.raw, self.own = b"", dict[str, Identity]()
        self.silos = {name: ToySilo(name, client, codec) for name, client in clients.items()}
        self.workers: dict[str, SiteWorker] = {}
        self.instead: dict[str, Behaviour] = {}
        self.sent: list[tuple[str, Request, bytes]] = []
        self.data: list[Mapping[str, bytes]] = []
        self.long: list[bool] = []
        self.gates = {name: Gate(lambda name=name: self.trust(name)) for name in clients}
        for name in clients:
            self.start(name)

    def start(self, name: str) -> None:
        """Start a site; where there is one, restart it."""
        self.stop(name)
        self.workers[name] = SiteWorker(lambda: self.silos[name], lambda: self.trust(name))

    def trust(self, name: str) -> Trust:
        return Trust(name, (SERVER.public_key,), self.own.get(name), self.folder / name)

    def stop(self, name: str) -> None:
        if name in self.workers:
            self.workers.pop(name).close()

    def send(self, packed: Mapping[str, bytes], seconds: float, long: bool) -> Iterable[tuple[str, bytes | Missing]]:
        self.data.append(packed)
        self.long.append(long)
        replies: dict[str, bytes | Missing] = {}
        waited, limit = 0.0, None if long else PLAIN_LIMIT
        for name, data in packed.items():
            request, envelope = request_of(data)
            self.raw = data
            body = bytes(envelope.body)
            self.sent.append((name, request, body))
            reply: Reply | tuple[Reply, bytes] | bytes | Missing
            if name in self.instead:
                reply = self.instead[name](request, body)
            else:
                reply = self.workers[name].answer(data, limit) if name in self.workers else DEAD
            if isinstance(reply, Missing):
                replies[name] = reply
                waited = max(waited, seconds if reply.reason is Reason.LATE else 0.0)
            else:
                replies[name] = self.packed(name, request, envelope, reply)
                if isinstance(reply, Busy) and isinstance(request, Poll):
                    waited = max(waited, request.wait)
        self.clock.now += waited
        return replies.items()

    def packed(
        self, name: str, request: Request, envelope: Envelope, reply: Reply | tuple[Reply, bytes] | bytes
    ) -> bytes:
        """The bytes of what stands in for a worker, by the gate of the worker that it stands in for."""
        gate = self.workers[name]._gate if name in self.workers else self.gates[name]
        if isinstance(reply, bytes) and (name not in self.instead or not isinstance(request, Knock)):
            return reply
        if isinstance(request, Knock):
            return pack(reply if isinstance(reply, Awake) else Awake(process_id=gate.process_id))
        assert not isinstance(reply, bytes)
        header, body = reply if isinstance(reply, tuple) else (reply, b"")
        try:
            return gate.take(request, envelope).pack(request.serial, header, body)
        except PeerError:
            return pack(header, body)

    def requests(self, name: str) -> list[str]:
        """What was sent to a site, a greeting as "hello", which begins with a knock."""
        kinds = [request.kind for silo, request, _ in self.sent if silo == name]
        return ["hello" if kind == "knock" else kind for kind in kinds if kind != "hello"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    for module in (delivery, liveness):
        monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(site_worker, "AT_ONCE", 5.0)  # a worker's quick work is done with its acknowledgement
    return made


@pytest.fixture
def network(clients: Clients, clock: Time, tmp_path: Path) -> Iterator[Network]:
    made = Network(clients, CODEC, clock, tmp_path)
    yield made
    for name in list(made.workers):
        made.stop(name)


def over(network: Network, session: int = 0, **settings: Any) -> Sites:
    hello = HELLO.model_copy(update={"session": session})
    return Sites(network.silos, network.send, settings.pop("codec", CODEC), hello, SERVER, **settings)


def say(engine: Sites | InProcess, number: int = 1, names: tuple[str, ...] = NAMES) -> Replies:
    return engine.deliver(Ask.all(names, Say(stamp=Stamp("run", number, 0)), Said))


def numbers(replies: Replies) -> dict[str, int]:
    return {silo: answer.number for silo, answer in replies.answers.items()}


# -- as on one machine -------------------------------------------------------------------------------------------------


def test_answers_come_in_the_order_of_the_ask(network: Network) -> None:
    replies = over(network).deliver(Ask({"c": Say(stamp=NOW), "a": Say(stamp=NOW)}, Said))
    assert [(silo, said.number) for silo, said in replies.answers.items()] == [("c", 300), ("a", 1)]
    assert replies.missing == {}
    assert network.requests("b") == []


def test_missing_silos_come_in_the_order_of_the_ask_too(network: Network) -> None:
    network.stop("a")
    network.silos["c"].client.faults["toy/say", 1] = PeerError("no")  # type: ignore[attr-defined]
    replies = over(network).deliver(Ask(dict.fromkeys(("c", "b", "a"), Say(stamp=NOW)), Said))
    assert list(replies.missing) == ["c", "a"]
    assert list(replies.answers) == ["b"]


def check(silo: str, said: Said) -> None:
    if said.number < 0:
        raise PeerError("expected a number of at least 0")


FAULTS: Mapping[str, Exception | Callable[[Message], object]] = {
    "no message": lambda message: None,
    "missing itself": lambda message: Missing(Reason.BAD_INPUT, "so it says itself"),
    "bytes": lambda message: b"\x00" * 100,
    "another stamp": lambda message: Said(stamp=Stamp("run", 1, 1), number=1),
    "another run": lambda message: Said(stamp=Stamp("other", 1, 0), number=1),
    "another message": lambda message: Say(stamp=message.stamp),
    "unknown message": lambda message: Foreign(stamp=message.stamp),
    "unwanted number": lambda message: Said(stamp=message.stamp, number=-5),
    "bad input": ParameterError("a column is missing"),
    "peer": PeerError("not that"),
    "misuse": MisuseError("not now"),
    "codec": CodecError("unreadable"),
    "gone": Disconnected("its process ended"),
    "failed": ZeroDivisionError("division by zero"),
}
AT_SITES = {"bad input": "failed", "gone": "disconnected", "failed": "failed"}  # what may quote a site's rows


@pytest.mark.parametrize("fault", FAULTS)
def test_who_is_missing_and_why_is_as_on_one_machine(fault: str, network: Network) -> None:
    clients = {name: ToyClient(number) for name, number in zip(NAMES, (1, 20, 300), strict=True)}
    for silo in (clients["b"], network.silos["b"].client):
        silo.faults["toy/say", 1] = FAULTS[fault]  # type: ignore[attr-defined]
    ask = Ask.all(NAMES, Say(stamp=NOW), Said, check)
    here, far = InProcess(clients, CODEC, strict=True), over(network)
    expected, replies = here.deliver(ask), far.deliver(ask)
    if fault in AT_SITES:
        ((name, why),) = replies.missing.items()
        assert (name, why.reason.value, why.detail[:-8]) == ("b", AT_SITES[fault], UNFIT)
    else:
        assert dict(replies.missing) == dict(expected.missing)
    assert list(replies.missing) == ["b"]
    assert numbers(replies) == numbers(expected) == {"a": 1, "c": 300}
    assert far.take_traffic().items() >= {("down", "toy/say"): 3 * len(CODEC.encode(Say(stamp=NOW)))}.items()
    assert numbers(say(far, 2)) == {"a": 1, "b": 20, "c": 300}


def test_traffic_is_counted_as_on_one_machine(network: Network, clients: Clients) -> None:
    here, far = InProcess(clients, CODEC), over(network)
    for number in (1, 2):
        say(here, number)
        say(far, number)
        taken = far.take_traffic()
        assert taken == here.take_traffic() != {}
        assert far.take_traffic() == {}


def test_the_server_sees_what_it_sees_on_one_machine(network: Network, tmp_path: Path) -> None:
    clients = {name: ToyClient(number) for name, number in zip(NAMES, (1, 20, 300), strict=True)}
    for silo in (clients["b"], network.silos["b"].client):
        silo.faults["toy/say", 1] = PeerError("no")  # type: ignore[attr-defined]
    recorders = {where: Recorder(tmp_path / where, (1,)) for where in ("here", "far")}
    for engine in (InProcess(clients, CODEC, recorder=recorders["here"]), over(network, recorder=recorders["far"])):
        say(engine, 1)
        say(engine, 2)  # not recorded
    found: dict[str, dict[str, list[views.Seen]]] = {}
    for where, recorder in recorders.items():
        recorder.flush()
        assert [path.name for path in (tmp_path / where / "server").iterdir()] == ["round-000001.0.bin"]
        seen = list(views.read(tmp_path / where / "server" / "round-000001.0.bin"))
        found[where] = {name: [one for one in seen if one.peer == name] for name in NAMES}
    assert found["far"] == found["here"]
    assert [one.direction for one in found["far"]["b"]] == ["sent"]


def test_seconds_of_silos_are_on_the_servers_clock_and_the_peak_is_the_highest(network: Network) -> None:
    peaks = iter((40.0, 90.0, 60.0))
    body = CODEC.encode(Said(stamp=NOW, number=1))
    for name in NAMES:
        network.instead[name] = lambda request, _: (
            SiteReady(name="a", key="")
            if isinstance(request, Knock | Hello)
            else (WorkDone(seconds={"local_forward": 0.25, "mask": 0.5}, peak_mib=next(peaks)), body)
        )
    engine = over(network)
    assert engine.peak_mib is None
    say(engine, names=("a",))
    assert engine.peak_mib == 40.0
    say(engine, names=("a",))
    say(engine, names=("a",))
    assert engine.peak_mib == 90.0
    assert engine.clock.take() == {"local_forward": 0.75, "mask": 1.5}


def test_large_bodies_are_packed_once_for_all(clock: Time, tmp_path: Path) -> None:
    class Echo(ToyClient):
        def answer(self, message: Message) -> Message:
            assert isinstance(message, Large)
            return Large(stamp=message.stamp, values=message.values * np.float32(self.number))

    codec = Codec([Large])
    network = Network({"a": Echo(2), "b": Echo(3)}, codec, clock, tmp_path)
    values = np.arange(1 << 20, dtype=np.float32)
    replies = over(network, codec=codec).deliver(Ask.all(["a", "b"], Large(stamp=NOW, values=values), Large))
    for name, factor in (("a", 2), ("b", 3)):
        np.testing.assert_array_equal(replies.answers[name].values, values * np.float32(factor))
    submitted = network.data[2]
    assert submitted["a"] is submitted["b"]  # FLARE, too, is to send it once
    assert len(submitted["a"]) > values.nbytes
    assert network.long == [True, False, True]  # a knock, a hello, and the body
    for name in ("a", "b"):
        network.stop(name)


def test_an_answer_that_is_long_is_polled_for_by_a_stream(clock: Time, tmp_path: Path) -> None:
    class Swells(ToyClient):
        def answer(self, message: Message) -> Message:
            return Large(stamp=message.stamp, values=np.zeros(PLAIN_LIMIT, dtype=np.uint8))

    codec = Codec([Large])
    network = Network({"a": Swells(2)}, codec, clock, tmp_path)
    few = Large(stamp=NOW, values=np.zeros(3, dtype=np.uint8))
    replies = over(network, codec=codec).deliver(Ask.all(["a"], few, Large))
    assert replies.answers["a"].values.nbytes == PLAIN_LIMIT
    assert network.requests("a") == ["hello", "submit", "poll"]
    assert network.long == [True, False, False, True]
    network.stop("a")


def test_different_messages_go_to_whom_they_are_for(network: Network) -> None:
    ask = {"a": Say(stamp=NOW), "b": Say(stamp=Stamp("run", 2, 0)), "c": Say(stamp=NOW)}
    replies = over(network).deliver(Ask(ask, Said))
    assert {name: answer.stamp.round for name, answer in replies.answers.items()} == {"a": 1, "b": 2, "c": 1}


# -- sites that are gone -----------------------------------------------------------------------------------------------


def test_a_dead_site_is_missing_and_takes_part_when_it_is_back(network: Network, clock: Time) -> None:
    engine = over(network)
    network.stop("b")
    replies = say(engine, 1)
    assert numbers(replies) == {"a": 1, "c": 300}
    assert replies.missing == {"b": DEAD}
    network.start("b")
    clock.now += AGAIN
    assert numbers(say(engine, 2)) == {"a": 1, "b": 20, "c": 300}


def test_a_site_that_dies_is_greeted_at_most_once_in_a_while(network: Network, clock: Time) -> None:
    engine = over(network)
    say(engine, 1)
    network.stop("b")
    assert say(engine, 2).missing == {"b": DEAD}
    assert network.requests("b") == ["hello", "submit", "submit"]
    for _ in range(5):  # a moment later
        assert say(engine, 3).missing == {"b": DEAD}
    assert network.requests("b") == ["hello", "submit", "submit"]
    clock.now += AGAIN
    say(engine, 4)
    assert network.requests("b") == ["hello", "submit", "submit", "hello"]


def test_a_site_that_dies_while_it_works_is_missing_at_once(network: Network, clock: Time) -> None:
    engine = over(network)
    say(engine, 1)
    began = clock.now
    network.instead["b"] = lambda request, body: Busy() if isinstance(request, Submit) else DEAD
    replies = say(engine, 2)
    assert replies.missing == {"b": DEAD}
    assert numbers(replies) == {"a": 1, "c": 300}
    assert clock.now - began < PATIENCE


def test_a_site_that_dies_with_a_request_is_missing_by_the_next(network: Network, clock: Time) -> None:
    """Nobody tells of a request that died with its process; the one after it is refused at once."""
    engine = over(network)
    say(engine, 1)
    began, script = clock.now, [Busy(), SLOW, DEAD]
    network.instead["b"] = lambda request, body: script.pop(0)
    assert say(engine, 2).missing == {"b": DEAD}
    assert script == []
    assert network.long[-3:] == [False, False, True]  # only a stream is refused where nobody is
    assert clock.now - began <= WAIT + FIRST  # within a second, by the server's clock


def test_a_site_that_no_longer_answers_is_given_up_after_some_misses(network: Network, clock: Time) -> None:
    engine = over(network)
    say(engine, 1)
    began = clock.now
    network.instead["b"] = lambda request, body: SLOW
    replies = say(engine, 2)
    assert replies.missing["b"] == Missing(Reason.DISCONNECTED, "no longer says that it is at work")
    assert numbers(replies) == {"a": 1, "c": 300}
    assert len(network.requests("b")) == 2 + MISSES  # beside the first exchange's
    assert clock.now - began <= sum(WAIT + FIRST * 2**number for number in range(MISSES))  # not `LONGEST`
    del network.instead["b"]
    clock.now += AGAIN
    assert numbers(say(engine, 3)) == {"a": 1, "b": 20, "c": 300}


def test_a_single_miss_is_no_loss(network: Network) -> None:
    engine = over(network)
    say(engine, 1)
    script: list[Reply | Missing | None] = [Busy(), SLOW, Busy(), SLOW, Busy(), SLOW, None]

    def wavering(request: Request, body: bytes) -> Reply | bytes | Missing:
        given = script.pop(0)
        return (WorkDone(), CODEC.encode(Said(stamp=Stamp("run", 2, 0), number=8))) if given is None else given

    network.instead["b"] = wavering
    assert numbers(say(engine, 2)) == {"a": 1, "b": 8, "c": 300}
    assert script == []


def test_a_site_slow_to_greet_is_missing_and_delays_one_greeting(network: Network, clock: Time) -> None:
    network.instead["b"] = lambda request, body: SLOW
    began = clock.now
    replies = say(over(network), 1)
    assert replies.missing == {"b": SLOW}
    assert clock.now - began == PATIENCE


def test_who_is_still_at_work_at_the_deadline_is_late(network: Network, clock: Time) -> None:
    for session, deadline in enumerate((None, 5.0)):
        engine = over(network, session, deadline=deadline)
        network.instead["b"] = lambda request, _: SiteReady(name="b") if isinstance(request, Hello) else Busy()
        began = clock.now
        replies = say(engine, 1)
        seconds = deadline or LONGEST
        assert replies.missing["b"] == Missing(
            Reason.LATE, f"expected an answer in {seconds:g} s, and it was still busy"
        )
        assert numbers(replies) == {"a": 1, "c": 300}
        assert seconds <= clock.now - began <= seconds + 2 * WAIT
        for name in ("a", "c"):
            network.start(name)


def test_a_late_site_is_asked_again_and_its_old_answer_is_not_taken(
    network: Network, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_worker, "AT_ONCE", 0.02)
    monkeypatch.setattr(site_worker, "LONGEST_WAIT", 0.0)
    go = threading.Event()

    def slow(message: Message) -> object:
        assert go.wait(20.0)
        return Said(stamp=message.stamp, number=99)

    clients["b"].faults["toy/say", 1] = slow
    engine = over(network, deadline=3.0)
    busy = network.workers["b"]

    def polled(request: Request, body: bytes) -> Reply | bytes | Missing:
        """As the worker says, with its waiting on the server's clock."""
        data = busy.answer(network.raw)
        if isinstance(request, Poll) and isinstance(reply_of(data)[0], Busy):
            return Busy()
        return data

    network.instead["b"] = polled
    assert say(engine, 1).missing["b"].reason is Reason.LATE
    monkeypatch.setattr(site_worker, "AT_ONCE", 5.0)
    monkeypatch.setattr(site_worker, "LONGEST_WAIT", 5.0)
    assert say(engine, 1).missing["b"].detail == "is still busy with what it was asked before"  # and is not asked more
    go.set()
    assert numbers(say(engine, 2)) == {"a": 1, "b": 20, "c": 300}


# -- sites that restart ------------------------------------------------------------------------------------------------


def test_a_site_that_restarted_is_missing_once_and_comes_back(network: Network) -> None:
    """What it had agreed on is lost, so it is not handed a question that stands on it."""
    engine = over(network)
    say(engine, 1)
    network.start("b")
    assert say(engine, 2).missing == {"b": RESTARTED}
    assert numbers(say(engine, 3)) == {"a": 1, "b": 20, "c": 300}  # without waiting for `AGAIN`
    assert network.requests("b") == ["hello", "submit", "submit", "hello", "submit"]
    assert network.requests("a") == ["hello", "submit", "submit", "submit"]
    asked = network.silos["b"].client.asked  # type: ignore[attr-defined]
    assert [message.stamp.round for message in asked] == [1, 3]


def test_a_site_that_restarts_while_it_works_is_missing_and_is_asked_next_time(network: Network) -> None:
    engine = over(network)
    say(engine, 1)

    def restarts(request: Request, body: bytes) -> Reply | bytes | Missing:
        if isinstance(request, Submit):
            return Busy()
        del network.instead["b"]
        network.start("b")
        return network.workers["b"].answer(network.raw)

    network.instead["b"] = restarts
    assert say(engine, 2).missing == {"b": RESTARTED}
    assert numbers(say(engine, 3)) == {"a": 1, "b": 20, "c": 300}


def test_a_restarted_site_that_is_still_loading_is_missing_until_it_is_there(network: Network) -> None:
    engine = over(network)
    say(engine, 1)
    network.instead["b"] = lambda request, body: Stranger() if isinstance(request, Submit) else Busy()
    assert say(engine, 2).missing == {"b": RESTARTED}
    loading = Missing(Reason.DISCONNECTED, "is still loading its data and model")
    assert say(engine, 3).missing == say(engine, 4).missing == {"b": loading}
    del network.instead["b"]
    assert numbers(say(engine, 5)) == {"a": 1, "b": 20, "c": 300}


def test_a_site_that_restarts_again_and_again_is_missing_each_time(network: Network) -> None:
    engine = over(network)
    ids = (f"{number:064x}" for number in range(1, 100))
    network.instead["b"] = lambda request, body: (
        Awake(process_id=next(ids))
        if isinstance(request, Knock)
        else SiteReady(name="b")
        if isinstance(request, Hello)
        else Stranger()
    )
    for number in (1, 2, 3):
        assert say(engine, number).missing == {"b": RESTARTED}
    assert network.requests("b") == ["hello", "submit"] * 3


def test_a_round_may_wait_for_sites_to_come_back(network: Network, clock: Time) -> None:
    told: list[str] = []
    engine = over(network, waiting=told.append)
    for name in ("a", "b"):
        network.stop(name)
    say(engine, 1)
    began = clock.now

    def later(request: Request, body: bytes) -> Reply | bytes | Missing:
        if clock.now < began + 30.0:
            return DEAD
        return network.workers["b"].answer(network.raw)

    network.start("b")
    network.instead["b"] = later
    assert engine.back(["a", "b"], 1) == ["b"]
    assert 30.0 <= clock.now - began < 30.0 + AGAIN + 0.2
    assert told == [f"waiting up to {BACK:g} s for 1 of a, b to come back"]
    assert len(network.requests("a")) <= 1 + 32 / AGAIN
    assert numbers(say(engine, 2)) == {"b": 20, "c": 300}


def test_a_site_that_was_restarted_is_told_of(network: Network) -> None:
    told: list[str] = []
    engine = over(network, waiting=told.append)
    say(engine, 1)
    network.stop("b")
    network.start("b")
    assert say(engine, 2).missing == {"b": RESTARTED}
    assert not engine.away(["a", "b", "c"])
    assert told == ["restarted, and back: b; all get new keys by a set-up, and continue together"]


def test_sites_that_do_not_come_back_are_not_waited_for_for_ever(network: Network, clock: Time) -> None:
    engine = over(network, waiting=lambda sentence: None)
    network.stop("a")
    say(engine, 1)
    began = clock.now
    assert engine.back(["a"], 1) == []
    assert BACK <= clock.now - began < BACK + 1.0
    with pytest.raises(RunFailed, match="aborted"):
        over(network, waiting=lambda sentence: None, aborted=abort(2)).back(["a"], 1)


# -- sites that talk nonsense ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [("ghost", "zed"), ("c", "ghost")])
def test_a_site_that_names_strangers_costs_the_round_only_itself(
    network: Network, clients: Clients, named: tuple[str, ...]
) -> None:
    clients["c"].faults["toy/say", 2] = lambda message: Spent(
        stamp=message.stamp, next_take=0, survivors=named, whole=True
    )
    server = ToyServer()
    ends = list(Driver(server, NAMES, "run", over(network), 2).rounds(1, 3))
    assert server.sums == [321, 21, 321]
    assert [[one.silo for one in end.dropped] for end in ends] == [[], ["c"], []]


NONSENSE: Mapping[str, Reply | bytes] = {
    "nothing": b"",
    "garbage": b"\xff" * 50,
    "a request": pack(HELLO),
    "cut": pack(Busy())[:-1],
    "here": SiteReady(name="b"),
    "refused": Refused(sentence="no"),
}


@pytest.mark.parametrize("nonsense", NONSENSE)
@pytest.mark.parametrize("to", ["submit", "poll"])
def test_nonsense_is_malformed_and_costs_nobody_else(network: Network, nonsense: str, to: str) -> None:
    engine = over(network)
    say(engine, 1)

    def odd(request: Request, body: bytes) -> Reply | bytes | Missing:
        return NONSENSE[nonsense] if request.kind == to else Busy()

    network.instead["b"] = odd
    replies = say(engine, 2)
    assert numbers(replies) == {"a": 1, "c": 300}
    assert list(replies.missing) == ["b"]
    assert replies.missing["b"].reason in (Reason.MALFORMED, Reason.DISCONNECTED)
    assert replies.missing["b"].detail
    del network.instead["b"]
    network.clock.now += AGAIN
    assert "b" in say(engine, 3).answers or "b" in say(engine, 4).answers


def test_an_answer_above_the_servers_limit_is_malformed_and_takes_no_memory(network: Network) -> None:
    engine = over(network, largest=1 << 20)
    long = pack(WorkDone(), bytes(64 << 20))
    network.instead["b"] = lambda request, body: SiteReady(name="b") if request.kind == "hello" else long
    tracemalloc.start()
    try:
        replies = say(engine)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert numbers(replies) == {"a": 1, "c": 300}
    malformed = Missing(Reason.MALFORMED, f"expected a message of at most {(1 << 20) + 16} bytes; got {64 << 20}")
    assert replies.missing == {"b": malformed}


@pytest.mark.parametrize(
    "nonsense", [b"", b"\xff" * 50, WorkDone(), Stranger(), Failed(reason="failed", sentence="x"), pack(HELLO)]
)
def test_nonsense_for_a_greeting_is_malformed(network: Network, nonsense: Reply | bytes) -> None:
    network.instead["b"] = lambda request, body: nonsense
    engine = over(network)
    replies = say(engine, 1)
    assert replies.missing["b"].reason is Reason.MALFORMED
    assert numbers(replies) == {"a": 1, "c": 300}


@pytest.mark.parametrize(
    "body", [b"", b"junk", CODEC.encode(Say(stamp=NOW))[:-1], Codec([Foreign]).encode(Foreign(stamp=NOW))]
)
def test_a_body_that_is_no_message_is_malformed_and_not_recorded(network: Network, body: bytes, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, True)
    network.instead["b"] = lambda request, _: (
        SiteReady(name="b") if isinstance(request, Knock | Hello) else (WorkDone(), body)
    )
    replies = say(over(network, recorder=recorder), 1)
    assert replies.missing["b"].reason is Reason.MALFORMED
    recorder.flush()
    seen = list(views.read(tmp_path / "server" / "round-000001.0.bin"))
    assert [one.direction for one in seen if one.peer == "b"] == ["sent"]


# -- who may take part -------------------------------------------------------------------------------------------------


def test_a_site_that_refuses_is_named_and_asked_again_later(network: Network, clock: Time) -> None:
    network.instead["b"] = lambda request, body: Refused(sentence="runs Moretta 0.0.9")
    engine = over(network)
    for number in (1, 2, 3):
        assert say(engine, number).missing == {"b": Missing(Reason.REFUSED, "runs Moretta 0.0.9")}
        clock.now += AGAIN
    assert network.requests("b") == ["hello"]
    clock.now += LATER
    del network.instead["b"]  # mended and restarted
    assert numbers(say(engine, 4)) == {"a": 1, "b": 20, "c": 300}


def test_a_site_that_has_another_name_is_not_taken(network: Network) -> None:
    network.silos["b"].name = "c"
    replies = say(over(network), 1)
    assert replies.missing["b"].reason is Reason.REFUSED
    assert "calls itself `c`; expected `b`, whose certificate it has" in replies.missing["b"].detail
    assert network.requests("b") == ["hello"]


@pytest.mark.parametrize(("other", "shown"), [(Identity(b"o" * 32), "another"), (None, "of nobody")])
def test_a_site_with_another_identity_is_not_taken(network: Network, other: Identity | None, shown: str) -> None:
    network.own = {name: own for name, own in {**OWN, "b": other}.items() if own is not None}
    network.silos["b"].fingerprint = "another" if other else ""
    engine = over(network, keys={name: own.public_key for name, own in OWN.items()})
    replies = say(engine, 1)
    assert replies.missing["b"].reason is Reason.REFUSED
    listed = fingerprint(OWN["b"].public_key)
    assert f"has the identity {shown}, and the roster lists {listed} for it" in replies.missing["b"].detail
    assert numbers(replies) == {"a": 1, "c": 300}
    assert network.requests("b") == ["hello"]


# -- the beginning -----------------------------------------------------------------------------------------------------


def test_gathering_takes_no_longer_than_it_must(network: Network, clock: Time) -> None:
    began = clock.now
    over(network).gather(3, 100.0)
    assert clock.now - began < 1.0


def test_gathering_waits_for_who_is_loading(network: Network, clock: Time) -> None:
    until = clock.now + 7.0
    network.instead["b"] = lambda request, body: (
        Busy() if clock.now < until else network.workers["b"].answer(network.raw)
    )
    engine = over(network)
    engine.gather(3, 100.0)
    assert 7.0 <= clock.now - 1000.0 < 8.0
    assert numbers(say(engine)) == {"a": 1, "b": 20, "c": 300}


def test_gathering_names_who_is_missing(network: Network, clock: Time, caplog: pytest.LogCaptureFixture) -> None:
    network.stop("a")
    network.instead["b"] = lambda request, body: Refused(sentence="has no rows")
    engine = over(network)
    began = clock.now
    with caplog.at_level(logging.WARNING, "moretta"), pytest.raises(ParameterError) as caught:
        engine.gather(2, 30.0)
    assert str(caught.value) == (
        "1 of 3 sites take part after waiting up to 30 s, at least 2 are needed (a: cannot be reached; b: has no "
        "rows); fix them and serve again"
    )
    assert 30.0 < clock.now - began < 31.0
    assert "site `a` is missing, disconnected: cannot be reached" in caplog.text
    assert "site `b` is missing, refused: has no rows" in caplog.text
    assert network.requests("a").count("hello") <= 31 / AGAIN
    assert network.requests("b") == ["hello"]


def test_gathering_goes_on_with_enough(network: Network, clock: Time) -> None:
    network.stop("a")
    engine = over(network)
    engine.gather(2, 5.0)
    assert 5.0 < clock.now - 1000.0 < 6.0
    assert numbers(say(engine)) == {"b": 20, "c": 300}


def test_all_that_refuse_are_not_waited_for(network: Network, clock: Time) -> None:
    for name in NAMES:
        network.instead[name] = lambda request, body: Refused(sentence="no")
    with pytest.raises(ParameterError, match="0 of 3 sites take part"):
        over(network).gather(1, 1000.0)
    assert clock.now - 1000.0 < 1.0


def test_sites_that_hang_cost_the_greeting_its_patience_and_no_more(network: Network, clock: Time) -> None:
    network.instead["a"] = network.instead["b"] = lambda request, body: SLOW
    with pytest.raises(ParameterError, match=r"a: has not answered in time; b: has not answered in time"):
        over(network).gather(2, 30.0)
    assert clock.now - 1000.0 <= 30.0 + PATIENCE + 0.2


def abort(after: int) -> Callable[[], None]:
    calls = iter(range(after))

    def aborted() -> None:
        if next(calls, None) is None:
            raise RunFailed("the job was aborted")

    return aborted


def test_an_aborted_job_waits_for_nobody(network: Network, clock: Time) -> None:
    network.stop("a")
    with pytest.raises(RunFailed, match="aborted"):
        over(network, aborted=abort(3)).gather(3, 1000.0)
    assert clock.now - 1000.0 < 5.0
    network.instead["b"] = lambda request, _: SiteReady(name="b") if isinstance(request, Hello) else Busy()
    with pytest.raises(RunFailed, match="aborted"):
        say(over(network, aborted=abort(2)))
    assert clock.now - 1000.0 < 10.0


# -- to keep, and to end -----------------------------------------------------------------------------------------------


def place(round: int) -> CheckpointId:
    return CheckpointId("run", round, 0, "digest")


def test_who_is_there_keeps_its_state_and_a_restarted_site_is_told_of_the_round(network: Network, clock: Time) -> None:
    engine = over(network)
    network.stop("b")
    say(engine, 1)
    engine.keep(place(1))
    assert [network.silos[name].kept for name in NAMES] == [[1], [], [1]]
    network.start("b")
    clock.now += AGAIN
    say(engine, 2)
    (hello,) = [request for name, request, _ in network.sent if name == "b" and isinstance(request, Hello)][-1:]
    assert hello.round == 1
    engine.keep(place(2))
    assert [network.silos[name].kept for name in NAMES] == [[1, 2], [2], [1, 2]]


def test_who_cannot_keep_its_state_is_named(network: Network, clock: Time, caplog: pytest.LogCaptureFixture) -> None:
    engine = over(network)
    say(engine, 1)

    def full(client: Client, round: int) -> None:
        raise OSError("no space left")

    network.silos["a"].keep = full  # type: ignore[method-assign]
    network.instead["b"] = lambda request, body: Busy()
    began = clock.now
    with caplog.at_level(logging.WARNING, "moretta"):
        engine.keep(place(4))
    assert f"round 4: silo `a` did not keep its state: {UNFIT}" in caplog.text
    assert "round 4: silo `b` did not keep its state: expected an answer in 60 s" in caplog.text
    assert clock.now - began <= KEEPING + 2 * WAIT
    assert network.silos["c"].kept == [4]
    del network.instead["b"]
    assert numbers(say(engine, 5)) == {"a": 1, "b": 20, "c": 300}


def test_all_who_are_there_are_given_what_the_run_released(network: Network) -> None:
    engine = over(network)
    network.stop("b")
    say(engine, 1)
    engine.end(b"released")
    assert [network.silos[name].ended for name in NAMES] == [[b"released"], [], [b"released"]]
    assert all(network.workers[name].ended.is_set() for name in ("a", "c"))
    assert engine.take_traffic() == {
        ("down", "toy/say"): 3 * len(CODEC.encode(Say(stamp=NOW))),
        ("up", "toy/say"): sum(len(CODEC.encode(Said(stamp=NOW, number=number))) for number in (1, 300)),
    }  # what the engine says for itself is no traffic of the protocol


def test_a_server_that_resumes_on_living_sites_begins_anew(network: Network) -> None:
    say(over(network), 1)
    resumed = Sites(NAMES, network.send, CODEC, HELLO.model_copy(update={"session": 1, "round": 1}), SERVER)
    for number in (2, 3):
        replies = say(resumed, number)
        assert numbers(replies) == {"a": 1, "b": 20, "c": 300}
        assert {answer.stamp.round for answer in replies.answers.values()} == {number}
