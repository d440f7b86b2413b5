"""A site's worker: every request is answered at once, whatever the role does, and whatever the bytes are."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import SCHEMA, Said, Say, ToyClient

from moretta.contract.codec import Codec
from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Client, Missing, Reason
from moretta.engines.flare import site_worker
from moretta.engines.flare.envelope import (
    Busy,
    Denied,
    Failed,
    Hello,
    Knock,
    Poll,
    Refused,
    Reply,
    Signed,
    SiteReady,
    Stranger,
    Submit,
    Work,
    WorkDone,
    pack,
    reply_of,
)
from moretta.engines.flare.signing import ServerSession, Trust
from moretta.engines.flare.site_worker import UNFIT, SiteWorker
from moretta.errors import (
    CodecError,
    Disconnected,
    MisuseError,
    ParameterError,
    PeerError,
    PolicyError,
    RangeError,
    UnreadableRow,
)
from moretta.secure_aggregation.identity import Identity

CODEC = Codec(SCHEMA)
SERVER = Identity(b"the server's key, for tests only".ljust(32)[:32])
LONG = 20.0  # seconds in which anything must have happened; nothing waits for them


class ToySilo:
    """A silo that notes what is wanted of it; `refusals` are raised one after the other as it enters."""

    def __init__(self, client: ToyClient) -> None:
        self.name, self.fingerprint, self.largest, self.timed = "north", "0123", 1 << 20, True
        self.client = client
        self.refusals: list[BaseException] = []
        self.noted: list[object] = []

    def enter(self, hello: Hello) -> tuple[Client, Codec]:
        self.noted.append(("enter", hello.run, hello.session))
        if self.refusals:
            raise self.refusals.pop(0)
        return self.client, CODEC  # type: ignore[return-value]  # a toy has no phase

    def refused(self, error: BaseException) -> bool:
        return False

    def answered(self, client: Client, asked: Message, answer: Message | None) -> None:
        self.noted.append(("answered", asked.stamp.round, None if answer is None else answer.TAG))

    def keep(self, client: Client, round: int) -> None:
        self.noted.append(("keep", round))

    def end(self, client: Client, released: bytes) -> None:
        if released == b"damaged":
            raise CodecError("expected a released model")
        self.noted.append(("end", released))


class Caller:
    """What a server says to one worker, each session of a run by one key."""

    def __init__(self, worker: SiteWorker) -> None:
        self.worker = worker
        self.limit: int | None = None  # of replies
        self.sessions: dict[tuple[str, int], ServerSession] = {}
        self.enter("run", 0)

    def enter(self, run: str, session: int) -> ServerSession:
        hello = Hello(run=run, round=0, session=session, job="j", model="m", versions={}, torch=())
        self.session = self.sessions.setdefault((run, session), ServerSession(SERVER, hello))
        return self.session

    def __call__(
        self, request: Signed, body: bytes = b"", processes: Mapping[str, str] | None = None
    ) -> tuple[Reply, bytes]:
        processes = {"north": self.worker.process_id} if processes is None else processes
        data, serial = self.session.pack(request, processes, body)
        reply, answer = self.session.open(self.worker.answer(data, self.limit), self.worker.process_id, serial, None)
        return reply, bytes(answer)

    def greet(self, run: str = "run", session: int = 0) -> Reply:
        """Say hello once."""
        return self(self.enter(run, session).hello)[0]

    def hello(self, run: str = "run", session: int = 0) -> Reply:
        """Say hello until the site is no longer busy."""
        until = time.monotonic() + LONG
        while True:
            reply = self.greet(run, session)
            if not isinstance(reply, Busy):
                return reply
            assert time.monotonic() < until

    def submit(self, number: int, body: bytes = b"", work: Work = "answer", round: int = 0) -> tuple[Reply, bytes]:
        return self(Submit(number=number, work=work, round=round), body)

    def poll(self, number: int, wait: float = 0.0) -> tuple[Reply, bytes]:
        return self(Poll(number=number, wait=wait))

    def done(self, number: int) -> tuple[Reply, bytes]:
        """Poll until there is something else than Busy."""
        until = time.monotonic() + LONG
        while True:
            reply, body = self.poll(number, 1.0)
            if not isinstance(reply, Busy):
                return reply, body
            assert time.monotonic() < until


def say(number: int = 1, attempt: int = 0, run: str = "run") -> bytes:
    return CODEC.encode(Say(stamp=Stamp(run, number, attempt)))


def said(body: bytes) -> tuple[int, int]:
    message = CODEC.decode(body)
    assert isinstance(message, Said)
    return message.stamp.round, message.number


@pytest.fixture
def silo() -> ToySilo:
    return ToySilo(ToyClient(5))


@pytest.fixture
def trust(tmp_path: Path) -> Callable[[], Trust]:
    return lambda: Trust("north", (SERVER.public_key,), None, tmp_path)


@pytest.fixture
def call(silo: ToySilo, trust: Callable[[], Trust]) -> Iterator[Caller]:
    worker = SiteWorker(lambda: silo, trust)
    caller = Caller(worker)
    assert caller.hello() == SiteReady(name="north", key="0123")
    yield caller
    worker.close()


def hanging(silo: ToySilo, *rounds: int) -> threading.Event:
    """Have the role hang in these rounds until the event is set."""
    go = threading.Event()

    def wait(message: Message) -> Message:
        assert go.wait(LONG)
        return Said(stamp=message.stamp, number=9)

    for number in rounds:
        silo.client.faults["toy/say", number] = wait
    return go


def test_a_servers_text_begins_no_line_of_a_sites_log(
    call: Caller, silo: ToySilo, caplog: pytest.LogCaptureFixture
) -> None:
    silo.refusals = [PolicyError("[columns.age\n2026-01-01 00:00:00 INFO all is well\x1b[2J]: not set")]
    with caplog.at_level("INFO", "moretta"):
        assert isinstance(call.hello("another"), Refused)
    (record,) = (one for one in caplog.records if "all is well" in one.getMessage())
    assert record.getMessage().isprintable()


def test_quick_work_is_answered_with_its_submission(call: Caller, silo: ToySilo) -> None:
    reply, body = call.submit(1, say())
    if isinstance(reply, Busy):  # on a machine that is busy itself
        reply, body = call.done(1)
    assert isinstance(reply, WorkDone)
    assert said(body) == (1, 5)
    assert call.poll(1) == (reply, body)  # as often as it is asked after
    assert silo.noted == [("enter", "run", 0), ("answered", 1, "toy/said")]


def test_long_work_is_busy_until_it_is_done(call: Caller, silo: ToySilo) -> None:
    go = hanging(silo, 1)
    assert call.submit(1, say())[0] == Busy()
    for _ in range(50):
        assert call.poll(1)[0] == Busy()  # none of them waits for the role, which waits for this test
    go.set()
    assert said(call.done(1)[1]) == (1, 9)


def test_a_poll_comes_back_as_soon_as_the_work_is_done(
    call: Caller, silo: ToySilo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_worker, "LONGEST_WAIT", 100 * LONG)  # a poll that outlasts its work is never seen to end
    go = hanging(silo, 1)
    call.submit(1, say())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call.poll, 1, 100 * LONG)
        go.set()
        assert isinstance(waiting.result(LONG)[0], WorkDone)


def test_no_poll_waits_longer_than_the_worker_lets_it(
    call: Caller, silo: ToySilo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_worker, "LONGEST_WAIT", 0.02)
    go = hanging(silo, 1)
    call.submit(1, say())
    assert call.poll(1, 1e6)[0] == Busy()  # while the role waits for this test
    go.set()


def test_the_newest_submission_wins(call: Caller, silo: ToySilo) -> None:
    go = hanging(silo, 1)
    call.submit(1, say(1))
    assert call.submit(2, say(2))[0] == Busy()
    assert call.submit(3, say(3))[0] == Busy()
    assert isinstance(call.poll(1)[0], Failed)
    assert isinstance(call.poll(2)[0], Failed)  # nobody waits for it any more
    go.set()
    assert said(call.done(3)[1]) == (3, 5)
    assert [message.stamp.round for message in silo.client.asked] == [1, 3]
    assert isinstance(call.poll(1)[0], Failed)


def test_what_comes_twice_is_done_once(call: Caller, silo: ToySilo) -> None:
    call.submit(1, say(1))
    first = call.done(1)
    assert call.submit(1, say(1)) == first
    assert call.submit(1, say(2)) == first  # a number is never used for two
    call.submit(4, say(4))
    assert said(call.done(4)[1]) == (4, 5)
    assert isinstance(call.submit(1, say(1))[0], Failed)  # older ones are not taken up again
    assert isinstance(call.submit(3, say(3))[0], Failed)
    assert said(call.poll(4)[1]) == (4, 5)
    assert [message.stamp.round for message in silo.client.asked] == [1, 4]


def test_what_comes_twice_while_it_is_worked_on_is_done_once(call: Caller, silo: ToySilo) -> None:
    go = hanging(silo, 1)
    assert call.submit(1, say())[0] == Busy()
    assert call.submit(1, say())[0] == Busy()
    go.set()
    call.done(1)
    assert len(silo.client.asked) == 1


def test_what_nobody_asked_for_has_no_answer(call: Caller) -> None:
    expected = "expected work 0 or newer, got 7: it came late, or out of order"
    assert call.poll(7)[0] == Failed(reason="failed", sentence=expected)


def no_message(message: Message) -> object:
    return None


def bytes_instead(message: Message) -> object:
    return b"\x00" * 9


def leaves(message: Message) -> object:
    sys.exit(3)


def without_ticket(reply: Failed | Refused) -> Failed | Refused:
    """Return a reply whose ticket, if it has one, is cut off, after a look at it."""
    if not reply.sentence.startswith(UNFIT):
        return reply
    assert re.fullmatch("[0-9a-f]{8}", reply.sentence.removeprefix(UNFIT))
    return reply.model_copy(update={"sentence": UNFIT})


FAILURES: list[tuple[Exception | Callable[[Message], object], str, str]] = [
    # What goes wrong at a silo may follow from its rows: one word for all of it, under a ticket of the site's own log.
    (ParameterError("a column is missing"), "failed", UNFIT),
    (UnreadableRow("labels.csv row 7: the file has changed"), "failed", UNFIT),
    (PeerError("not that"), "refused", "not that"),
    (CodecError("unreadable"), "refused", "unreadable"),
    (MisuseError("not now"), "refused", "not now"),
    (Disconnected("its process ended"), "disconnected", UNFIT),
    (ZeroDivisionError("division by zero"), "failed", UNFIT),
    (RecursionError(), "failed", UNFIT),
    (PeerError("x" * 5000), "refused", "x" * 1000),
    (PeerError("a file \udcff that\nis no\x1b[2J text"), "refused", "a file ? that is no [2J text"),
    (no_message, "malformed", "expected a message, got NoneType"),
    (bytes_instead, "malformed", "expected a message, got bytes"),
    (leaves, "failed", UNFIT),
]


@pytest.mark.parametrize(("fault", "reason", "sentence"), FAILURES)
def test_an_error_of_the_role_has_its_reason_and_costs_one_exchange(
    call: Caller,
    silo: ToySilo,
    fault: Exception | Callable[[Message], object],
    reason: str,
    sentence: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    silo.client.faults["toy/say", 1] = fault
    with caplog.at_level(logging.CRITICAL, "moretta"):
        call.submit(1, say(1))
        reply = call.done(1)[0]
        assert isinstance(reply, Failed)
        assert without_ticket(reply) == Failed.model_validate({"reason": reason, "sentence": sentence})
        assert ("answered", 1, None) in silo.noted  # what it was asked is noted all the same
        call.submit(2, say(2))
        assert said(call.done(2)[1]) == (2, 5)


def test_notes_of_an_error_stay_in_the_sites_own_log(
    call: Caller, silo: ToySilo, caplog: pytest.LogCaptureFixture
) -> None:
    error = RangeError("a value is outside the range")
    error.add_note("the largest magnitude is 7")
    silo.client.faults["toy/say", 1] = error
    call.submit(1, say())
    reply, _ = call.done(1)
    assert isinstance(reply, Failed)
    ticket = reply.sentence.removeprefix(UNFIT)
    assert (reply.reason, reply.sentence) == ("failed", UNFIT + ticket)
    assert f"cannot answer (ticket {ticket}): a value is outside the range; the largest magnitude is 7" in caplog.text


@pytest.mark.parametrize("body", [b"", b"garbage", say()[:-1], b"\x00" * 100])
def test_a_body_that_is_no_message_is_malformed(call: Caller, silo: ToySilo, body: bytes) -> None:
    call.submit(1, body)
    reply, _ = call.done(1)
    assert isinstance(reply, Failed)
    assert reply.reason == "malformed"
    assert silo.client.asked == []


@pytest.mark.parametrize("run", ["other", "run/other", "runs", "x/run/other"])
def test_a_message_of_another_run_than_the_sessions_is_malformed(call: Caller, silo: ToySilo, run: str) -> None:
    call.submit(1, say(run=run))
    reply, _ = call.done(1)
    assert isinstance(reply, Failed)
    assert (reply.reason, reply.sentence) == ("malformed", f"expected messages of the run 'run', got one of {run!r}")
    assert silo.client.asked == []
    call.submit(2, say(run="group/run"))
    assert said(call.done(2)[1])[0] == 1


def test_a_message_above_the_sites_limit_is_refused_unread_and_takes_no_memory(call: Caller) -> None:
    data = pack(Submit(number=1, work="answer", processes={"north": call.worker.process_id}), bytes(64 << 20))
    tracemalloc.start()
    try:
        reply, _ = reply_of(call.worker.answer(data))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert reply == Denied(sentence=f"expected a message of at most {1 << 20} bytes; got {64 << 20}")
    call.submit(1, say())
    assert said(call.done(1)[1]) == (1, 5)  # and the site goes on


@given(st.binary(max_size=100) | st.none() | st.text(max_size=5))
def test_any_bytes_are_refused_in_a_sentence(data: object) -> None:
    worker = SiteWorker(lambda: ToySilo(ToyClient(1)), nobody)
    try:
        reply, envelope = reply_of(worker.answer(data))
        assert isinstance(reply, Denied)
        assert envelope.body == b""
    finally:
        worker.close()


def nobody() -> Trust:
    raise ParameterError("silo.toml does not exist")


def test_strangers_are_told_so(call: Caller, silo: ToySilo) -> None:
    for request in (Submit(number=1, work="answer"), Poll(number=1, wait=5.0)):
        assert call(request, say(), {"north": "another"})[0] == Stranger()
        for processes in ({}, {"south": call.worker.process_id}):
            assert isinstance(call(request, say(), processes)[0], Denied)
    assert silo.client.asked == []
    call(Submit(number=1, work="answer"), say(), {"south": "else", "north": call.worker.process_id})
    assert said(call.done(1)[1]) == (1, 5)


def test_before_hello_nothing_is_taken(silo: ToySilo, trust: Callable[[], Trust]) -> None:
    worker = SiteWorker(lambda: silo, trust)
    assert "before any session" in denied(Caller(worker).submit(1, say())[0])
    assert silo.noted == []
    worker.close()


def denied(reply: Reply) -> str:
    assert isinstance(reply, Denied)
    return reply.sentence


def test_two_workers_are_two_processes() -> None:
    workers = [SiteWorker(lambda: ToySilo(ToyClient(1)), nobody) for _ in range(2)]
    assert workers[0].process_id != workers[1].process_id
    for worker in workers:
        worker.close()


def test_a_site_that_is_still_loading_is_busy_and_loads_once(silo: ToySilo, trust: Callable[[], Trust]) -> None:
    go, loads = threading.Event(), list[int]()

    def make() -> ToySilo:
        loads.append(1)
        assert go.wait(LONG)
        return silo

    worker = SiteWorker(make, trust)
    call = Caller(worker)
    for _ in range(3):
        assert call.greet() == Busy()
    go.set()
    assert isinstance(call.hello(), SiteReady)
    assert loads == [1]
    assert silo.noted == [("enter", "run", 0)]
    worker.close()


def test_nothing_is_made_of_a_job_before_the_server_has_said_hello(silo: ToySilo, trust: Callable[[], Trust]) -> None:
    """Any site of a federation starts a job here, with settings of its choice, and they were read and built at once."""
    made = list[int]()

    def make() -> ToySilo:
        made.append(1)
        return silo

    worker = SiteWorker(make, trust)
    call = Caller(worker)
    reply_of(worker.answer(pack(Knock())))
    forged = ServerSession(Identity.fresh(), call.session.hello).pack(call.session.hello, {"north": worker.process_id})[
        0
    ]
    assert isinstance(reply_of(worker.answer(forged))[0], Denied)
    time.sleep(0.2)
    assert made == []
    assert isinstance(call.hello(), SiteReady)
    assert made == [1]
    worker.close()


def test_a_repeated_hello_changes_nothing(call: Caller, silo: ToySilo) -> None:
    call.submit(1, say())
    first = call.done(1)
    assert isinstance(call.hello(), SiteReady)
    assert call.poll(1) == first
    assert silo.noted.count(("enter", "run", 0)) == 1


@pytest.mark.parametrize(("run", "session"), [("run", 1), ("another", 0)])
def test_another_session_or_run_casts_anew_and_counts_anew(call: Caller, silo: ToySilo, run: str, session: int) -> None:
    call.submit(1, say(1))
    call.done(1)
    silo.client = ToyClient(7)
    assert isinstance(call.hello(run, session), SiteReady)
    assert silo.noted[-1] == ("enter", run, session)
    assert isinstance(call.poll(1)[0], Failed)  # of the session before
    call.submit(1, say(2, run=run))  # whoever serves now begins at 1 again
    assert said(call.done(1)[1]) == (2, 7)


def test_work_of_a_session_before_is_nobodys_answer(call: Caller, silo: ToySilo) -> None:
    go = hanging(silo, 1)
    call.submit(1, say(1))
    assert call.greet(session=1) == Busy()  # until the work is done
    assert call.submit(1, say(2))[0] == Stranger()
    go.set()
    assert isinstance(call.hello(session=1), SiteReady)
    call.submit(1, say(2))
    assert said(call.done(1)[1]) == (2, 5)


@pytest.mark.parametrize(
    ("refusal", "sentence"),
    [
        (PolicyError("other versions"), "other versions"),
        (PolicyError("y" * 3000), "y" * 1000),
        (ParameterError("row 7 is odd"), UNFIT),
        (PeerError("row 7 is odd"), UNFIT),
        (OSError("no file"), UNFIT),
        (ValueError("\udcff"), UNFIT),
        (SystemExit(2), UNFIT),
    ],
)
def test_a_refusal_is_a_sentence_and_is_looked_at_again(
    silo: ToySilo,
    trust: Callable[[], Trust],
    refusal: BaseException,
    sentence: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    silo.refusals = [refusal]
    worker = SiteWorker(lambda: silo, trust)
    call = Caller(worker)
    with caplog.at_level(logging.CRITICAL, "moretta"):
        reply = call.hello()
        assert isinstance(reply, Refused)
        assert without_ticket(reply) == Refused(sentence=sentence)
        while not isinstance(call.hello(), SiteReady):  # what kept it is mended, and each hello looks again
            pass
    worker.close()


def test_what_cannot_be_loaded_is_a_refusal(trust: Callable[[], Trust], caplog: pytest.LogCaptureFixture) -> None:
    def make() -> ToySilo:
        raise ParameterError("rows.csv does not exist")

    caplog.set_level(logging.ERROR, "moretta")
    worker = SiteWorker(make, trust)
    reply = Caller(worker).hello()
    assert isinstance(reply, Refused)
    assert without_ticket(reply) == Refused(sentence=UNFIT)
    assert "rows.csv does not exist" in caplog.text
    worker.close()


def test_a_site_that_cannot_tell_its_server_takes_nothing(silo: ToySilo, caplog: pytest.LogCaptureFixture) -> None:
    worker = SiteWorker(lambda: silo, nobody)
    reply = Caller(worker).hello()
    assert isinstance(reply, Refused)
    assert without_ticket(reply) == Refused(sentence=UNFIT)
    assert re.search(r"cannot distinguish the server from others \(ticket \w+\): silo.toml does not exist", caplog.text)
    assert silo.noted == []
    worker.close()


def test_to_keep_and_to_end_are_work_like_any_other(call: Caller, silo: ToySilo) -> None:
    assert call.submit(1, work="keep", round=12)[0] in (WorkDone(), Busy())
    assert call.done(1)[0] == WorkDone()
    assert not call.worker.ended.is_set()
    call.submit(2, b"damaged", work="end")
    reply, _ = call.done(2)
    assert isinstance(reply, Failed)
    call.submit(3, b"released", work="end")
    assert call.done(3)[0] == WorkDone()
    assert call.worker.ended.is_set()
    assert silo.noted[1:] == [("keep", 12), ("end", b"released")]


def test_seconds_are_told_once_by_phase(call: Caller, silo: ToySilo) -> None:
    def work(message: Message) -> Message:
        with silo.client.phase("local_forward"):
            time.sleep(0.01)
        return Said(stamp=message.stamp, number=1)

    silo.client.faults["toy/say", 1] = work
    call.submit(1, say(1))
    first, _ = call.done(1)
    assert isinstance(first, WorkDone)
    assert set(first.seconds) == {"local_forward"}
    assert first.seconds["local_forward"] >= 0.01
    assert first.peak_mib is None
    call.submit(2, say(2))
    assert call.done(2)[0] == WorkDone()


def test_what_the_server_signed_is_a_sign_of_its_life_and_nothing_else_is(call: Caller) -> None:
    call.worker.last_heard = 0.0
    poll = Poll(number=1, wait=0, processes={"north": call.worker.process_id}, serial=9)
    for data in (pack(poll), b"garbage", pack(Knock())):
        call.worker.answer(data)
        assert call.worker.last_heard == 0.0
    call.poll(1)
    assert call.worker.last_heard > 0.0


def test_work_that_is_too_long_for_a_plain_reply_is_polled_for_by_a_stream(call: Caller) -> None:
    call.submit(1, say())
    call.done(1)
    call.limit = 10
    assert call.submit(1, say()) == call.poll(1) == (Busy(long=True), b"")
    call.limit = None
    assert said(call.poll(1)[1]) == (1, 5)


def test_a_closed_worker_ends_its_thread_once_its_work_is_done(call: Caller, silo: ToySilo) -> None:
    go = hanging(silo, 1)
    call.submit(1, say())
    call.worker.close()
    assert call.poll(1)[0] == Busy()
    go.set()
    assert said(call.done(1)[1]) == (1, 9)
    call.worker._thread.join(LONG)
    assert not call.worker._thread.is_alive()


def test_many_may_ask_at_once(call: Caller, silo: ToySilo) -> None:
    """Whoever asks, in whatever order: each number is done at most once, and has one answer or none.

    What one of the threads has packed comes late where the others have sent 64 meanwhile.
    """
    numbers = [number for number in range(1, 41) for _ in range(3)]
    barrier = threading.Barrier(8)

    def ask(worker: int) -> list[tuple[int, Reply, bytes]]:
        barrier.wait(LONG)
        found = []
        for number in numbers[worker::8]:
            found.append((number, *call.submit(number, say(number))))
            found.append((number, *call.poll(number, 0.05)))
            assert isinstance(call.hello(), SiteReady | Denied)
        return found

    with ThreadPoolExecutor(8) as pool:
        replies = [one for found in pool.map(ask, range(8)) for one in found]
    assert {type(reply) for _, reply, _ in replies} <= {WorkDone, Busy, Failed, Denied}
    assert all("older than the last 64" in reply.sentence for _, reply, _ in replies if isinstance(reply, Denied))
    for number, reply, body in replies:
        if isinstance(reply, WorkDone):
            assert said(body) == (number, 5)
    asked = [message.stamp.round for message in silo.client.asked]
    assert asked == sorted(set(asked))
    call.submit(40, say(40))
    assert said(call.done(40)[1]) == (40, 5)


def test_a_role_that_hangs_blocks_no_request(call: Caller, silo: ToySilo) -> None:
    go = hanging(silo, 1)
    call.submit(1, say())
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda _: call.poll(1, 0.1)[0], range(64)))
        assert replies == [Busy()] * 64  # while the role waits for this test
        assert isinstance(call.hello(), SiteReady)
    go.set()
    assert said(call.done(1)[1]) == (1, 9)


def test_what_says_of_itself_that_it_is_missing_is_no_message(call: Caller, silo: ToySilo) -> None:
    silo.client.faults["toy/say", 1] = lambda message: Missing(Reason.BAD_INPUT, "so it says itself")
    call.submit(1, say())
    assert call.done(1)[0] == Failed(reason="malformed", sentence="expected a message, got Missing")
