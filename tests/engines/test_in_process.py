"""The engine of one machine: who is missing and why, what is counted, and that strict changes nothing else."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from toy import SCHEMA, Hello, Said, Say, ToyClient

from moretta.contract.codec import Codec
from moretta.contract.messages import Message, Stamp, message
from moretta.contract.roles import Ask, Missing, Reason, Replies
from moretta.engines import usage, views
from moretta.engines.in_process import InProcess
from moretta.engines.views import Recorder
from moretta.errors import CodecError, MisuseError, ParameterError, PeerError

NOW = Stamp("run", 1, 0)
Clients = dict[str, ToyClient]


@message("toy/foreign")
class Foreign(Message):
    """A message that is not in the schema."""


def deliver(clients: Clients, *, strict: bool = False, deadline: float | None = None, **asked: object) -> Replies:
    engine = InProcess(clients, Codec(SCHEMA), strict=strict, deadline=deadline)
    return engine.deliver(Ask.all(list(clients), Say(stamp=NOW), Said, **asked))  # type: ignore[arg-type]


@pytest.mark.parametrize("strict", [False, True])
def test_answers_come_in_the_order_of_the_ask(clients: Clients, strict: bool) -> None:
    engine = InProcess(clients, Codec(SCHEMA), strict=strict)
    replies = engine.deliver(Ask({"c": Say(stamp=NOW), "a": Say(stamp=NOW)}, Said))
    assert [(silo, said.number) for silo, said in replies.answers.items()] == [("c", 300), ("a", 1)]
    assert replies.missing == {}
    assert clients["b"].asked == []


def no_message(message: Message) -> object:
    return None


def missing_itself(message: Message) -> object:
    return Missing(Reason.BAD_INPUT, "so it says itself")


def bytes_instead(message: Message) -> object:
    return b"\x00" * 100


def another_stamp(message: Message) -> object:
    return Said(stamp=Stamp("run", 1, 1), number=1)


def another_run(message: Message) -> object:
    return Said(stamp=Stamp("other", 1, 0), number=1)


def another_message(message: Message) -> object:
    return Hello(stamp=message.stamp)


def unknown_message(message: Message) -> object:
    return Foreign(stamp=message.stamp)


def unwanted_number(message: Message) -> object:
    return Said(stamp=message.stamp, number=-5)


def check(silo: str, said: Said) -> None:
    if said.number < 0:
        raise PeerError("expected a number of at least 0")


JUNK = [
    no_message, missing_itself, bytes_instead, another_stamp, another_run, another_message, unknown_message,
    unwanted_number,
]  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("junk", JUNK)
def test_junk_is_malformed_and_costs_nobody_else(
    clients: Clients, tmp_path: Path, strict: bool, recorded: bool, junk: Callable[[Message], object]
) -> None:
    clients["b"].faults["toy/say", 1] = junk
    recorder = Recorder(tmp_path, True) if recorded else None
    engine = InProcess(clients, Codec(SCHEMA), strict=strict, recorder=recorder)
    replies = engine.deliver(Ask.all(list(clients), Say(stamp=NOW), Said, check))
    assert list(replies.answers) == ["a", "c"]
    assert list(replies.missing) == ["b"]
    assert replies.missing["b"].reason is Reason.MALFORMED
    assert len(replies.missing["b"].detail.splitlines()) == 1


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("error", "reason", "detail"),
    [
        (ParameterError("a column is missing"), Reason.BAD_INPUT, "a column is missing"),
        (PeerError("not that"), Reason.REFUSED, "not that"),
        (MisuseError("not now"), Reason.REFUSED, "not now"),
        (CodecError("unreadable"), Reason.REFUSED, "unreadable"),
        (ZeroDivisionError("division by zero"), Reason.FAILED, "ZeroDivisionError: division by zero"),
        (RecursionError(), Reason.FAILED, "RecursionError"),
    ],
)
def test_an_error_has_its_reason(clients: Clients, strict: bool, error: Exception, reason: Reason, detail: str) -> None:
    clients["a"].faults["toy/say", 1] = error
    replies = deliver(clients, strict=strict)
    assert list(replies.answers) == ["b", "c"]
    assert replies.missing["a"].reason is reason
    assert replies.missing["a"].detail.startswith(detail)


def test_ctrl_c_is_not_a_silos_failure(clients: Clients) -> None:
    def interrupt(message: Message) -> object:
        raise KeyboardInterrupt

    clients["a"].faults["toy/say", 1] = interrupt
    with pytest.raises(KeyboardInterrupt):
        deliver(clients)


def test_a_silo_that_is_not_here_is_disconnected(clients: Clients) -> None:
    engine = InProcess(clients, Codec(SCHEMA))
    replies = engine.deliver(Ask.all(["a", "d"], Say(stamp=NOW), Said))
    assert list(replies.answers) == ["a"]
    assert replies.missing["d"] == Missing(Reason.DISCONNECTED, "no silo `d` is here")


def test_an_answer_after_the_deadline_is_late(clients: Clients) -> None:
    def slow(message: Message) -> object:
        time.sleep(0.06)
        return Said(stamp=message.stamp, number=20)

    clients["b"].faults["toy/say", 1] = slow
    replies = deliver(clients, deadline=0.05)
    assert "b" not in replies.answers
    assert replies.missing["b"].reason is Reason.LATE
    assert "0.05 s" in replies.missing["b"].detail
    assert list(deliver(clients).answers) == ["a", "b", "c"]  # without a deadline one waits


def test_traffic_is_the_bytes_that_the_codec_makes(clients: Clients) -> None:
    clients["b"].faults["toy/say", 1] = PeerError("no")
    engine, codec = InProcess(clients, Codec(SCHEMA)), Codec(SCHEMA)
    engine.deliver(Ask.all(list(clients), Say(stamp=NOW), Said))
    up = sum(len(codec.encode(Said(stamp=NOW, number=number))) for number in (1, 300))
    assert engine.take_traffic() == {
        ("down", "toy/say"): 3 * len(codec.encode(Say(stamp=NOW))),
        ("up", "toy/say"): up,
    }
    assert engine.take_traffic() == {}


def test_strict_passes_copies_and_otherwise_the_message_itself(clients: Clients) -> None:
    ask = Say(stamp=NOW)
    for strict in (False, True):
        InProcess(clients, Codec(SCHEMA), strict=strict).deliver(Ask.all(["a"], ask, Said))
    direct, wired = clients["a"].asked
    assert direct is ask
    assert wired is not ask
    assert (type(wired), wired.stamp) == (Say, NOW)


def test_silos_mark_their_work_on_the_engines_clock(clients: Clients) -> None:
    engine = InProcess(clients, Codec(SCHEMA))

    def work(message: Message) -> object:
        with clients["a"].phase("local_forward"):
            time.sleep(0.01)
        return Said(stamp=message.stamp, number=1)

    clients["a"].faults["toy/say", 1] = work
    engine.deliver(Ask.all(list(clients), Say(stamp=NOW), Said))
    seconds = engine.clock.take()
    assert set(seconds) == {"local_forward", "preparation", "delivery", "aggregation"}
    assert seconds["local_forward"] >= 0.01


def test_every_second_of_a_delivery_is_in_one_phase(clients: Clients) -> None:
    ticks = iter(range(1000))
    with mock.patch.object(usage, "time", mock.Mock(perf_counter=lambda: float(next(ticks)))):
        engine = InProcess(clients, Codec(SCHEMA))
        engine.deliver(Ask.all(list(clients), Say(stamp=NOW), Said))
    assert sum(engine.clock.take().values()) == next(ticks) - 2  # all but the clock's own making, and this look


def test_seconds_of_another_process_are_not_counted_twice() -> None:
    with mock.patch.object(usage, "time", mock.Mock(perf_counter=mock.Mock(side_effect=[0.0, 0.0, 9.0, 10.0]))):
        ours = usage.Clock()
        with ours.phase("delivery"):
            ours.charge("local_forward", 7.0)
    assert ours.take() == {"delivery": 3.0, "local_forward": 7.0}


def test_who_is_missing_is_logged_with_the_trace_of_a_failure(
    clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    clients["a"].faults["toy/say", 1] = ZeroDivisionError("division by zero")
    clients["b"].faults["toy/say", 1] = PeerError("not that")
    with caplog.at_level(logging.WARNING, "moretta"):
        deliver(clients)
    assert "silo `a` is missing, failed: ZeroDivisionError" in caplog.text
    assert "silo `b` is missing, refused: not that" in caplog.text
    assert caplog.text.count("Traceback") == 1


def test_each_role_sees_what_it_sent_and_received(clients: Clients, tmp_path: Path) -> None:
    clients["b"].faults["toy/say", 1] = PeerError("no")
    recorder, codec = Recorder(tmp_path, True), Codec(SCHEMA)
    engine = InProcess(clients, codec, recorder=recorder)
    engine.deliver(Ask.all(list(clients), Say(stamp=NOW), Said))
    recorder.flush()
    ask = codec.encode(Say(stamp=NOW))
    said = {silo: codec.encode(Said(stamp=NOW, number=client.number)) for silo, client in clients.items()}
    name = "round-000001.0.bin"
    assert list(views.read(tmp_path / "server" / name)) == [
        views.Seen("sent", "a", ask), views.Seen("received", "a", said["a"]),
        views.Seen("sent", "b", ask),
        views.Seen("sent", "c", ask), views.Seen("received", "c", said["c"]),
    ]  # fmt: skip
    assert list(views.read(tmp_path / "a" / name)) == [
        views.Seen("received", "server", ask), views.Seen("sent", "server", said["a"]),
    ]  # fmt: skip
    assert list(views.read(tmp_path / "b" / name)) == [views.Seen("received", "server", ask)]


def test_a_late_answer_is_in_the_servers_view_though_it_is_not_counted(clients: Clients, tmp_path: Path) -> None:
    def slow(message: Message) -> object:
        time.sleep(0.03)
        return Said(stamp=message.stamp, number=1)

    clients["a"].faults["toy/say", 1] = slow
    recorder = Recorder(tmp_path, True)
    engine = InProcess({"a": clients["a"]}, Codec(SCHEMA), recorder=recorder, deadline=0.02)
    assert not engine.deliver(Ask.all(["a"], Say(stamp=NOW), Said)).answers
    recorder.flush()
    assert [seen.direction for seen in views.read(tmp_path / "a" / "round-000001.0.bin")] == ["received", "sent"]
    assert [seen.direction for seen in views.read(tmp_path / "server" / "round-000001.0.bin")] == ["sent", "received"]
