"""Silos in worker processes: the same answers, errors and notes as in one, and no process is left behind."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from test_child import WELL_BEHAVED
from toy import SCHEMA, Hello, Said, Say, ToyClient

from moretta.contract.codec import Codec
from moretta.contract.messages import Array, Message, Stamp, message
from moretta.contract.roles import Answering, Ask, InSteps, Reason, Replies
from moretta.engines import frames, process, usage
from moretta.engines.child import ChildClient
from moretta.engines.in_process import InProcess
from moretta.engines.silos_here import SilosHere
from moretta.engines.workers import Workers, shared_out
from moretta.errors import Disconnected, ParameterError, PeerError, RunFailed

NOW = Stamp("run", 1, 0)
SILOS = "abcde"


@message("workers/large")
class Large(Message):
    """Many numbers."""

    numbers: Array


class Keeps(ToyClient):
    """Has a state that each answer changes."""

    total = 0

    def answer(self, message: Message) -> Message:
        self.total += 1
        return super().answer(message)

    def state(self) -> dict[str, Any]:
        return {"total": self.total, "array": np.full(3, self.total), "secret": bytes([self.total])}

    def restore(self, state: Any) -> None:
        self.total = int(state["total"])
        assert (state["array"] == self.total).all()
        assert state["secret"] == bytes([self.total])


Make = Callable[..., InProcess]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes engines, and sees to it that they leave no process."""
    made = list[InProcess]()

    def engine(clients: dict[str, Any], workers: int = 2, **settings: Any) -> InProcess:
        made.append(InProcess(clients, Codec((*SCHEMA, Large)), workers=workers, **settings))
        return made[-1]

    yield engine
    for one in made:
        processes = of(one)
        one.close()
        assert not any(alive(process) for process in processes)


def toys() -> dict[str, Keeps]:
    return {name: Keeps(number) for number, name in enumerate(SILOS)}


def of(engine: InProcess) -> list[int]:
    """The worker processes of an engine."""
    return [one.process for one in engine._silos._workers] if isinstance(engine._silos, Workers) else []


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def say(engine: InProcess, number: int = 1) -> Replies:
    return engine.deliver(Ask.all(list(SILOS), Say(stamp=Stamp("run", number, 0)), Said))


def test_whole_parts_are_shared_out_in_order() -> None:
    assert shared_out([[k] for k in "abcde"], 2) == [["a", "b"], ["c", "d", "e"]]
    assert shared_out([["a", "b"], ["c", "d"], ["e"]], 2) == [["a", "b", "c", "d"], ["e"]]
    assert shared_out([["a", "b", "c"]], 4) == [["a", "b", "c"]]
    for silos in range(1, 40):
        for count in range(1, 50):
            found = shared_out([[str(k)] for k in range(silos)], count)
            assert len(found) == min(count, silos)
            assert [silo for share in found for silo in share] == [str(k) for k in range(silos)]
            assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize("strict", [False, True])
def test_answers_come_in_the_order_of_the_ask_and_of_other_processes(make: Make, strict: bool) -> None:
    clients = toys()
    engine = make(clients, 3, strict=strict)
    replies = engine.deliver(Ask({"e": Say(stamp=NOW), "a": Say(stamp=NOW), "c": Hello(stamp=NOW)}, Said))
    assert [(silo, said.number) for silo, said in replies.answers.items()] == [("e", 4), ("a", 0), ("c", 2)]
    assert all(client.asked == [] for client in clients.values())
    assert len(set(of(engine))) == 3
    assert os.getpid() not in of(engine)


def junk(message: Message) -> object:
    return b"\x00" * 100


def foreign(message: Message) -> object:
    return type("Foreign", (Said,), {"TAG": "toy/foreign"})(stamp=message.stamp, number=1)


def not_finite(message: Message) -> object:
    answer = Large(stamp=message.stamp, numbers=np.ones(3))
    answer.numbers[0] = np.inf
    return answer


FAULTS: list[tuple[Any, Reason]] = [
    (PeerError("not today"), Reason.REFUSED),
    (ParameterError("these rows"), Reason.BAD_INPUT),
    (Disconnected("gone"), Reason.DISCONNECTED),
    (ZeroDivisionError("division by zero"), Reason.FAILED),
    (junk, Reason.MALFORMED),
]


@pytest.mark.parametrize(("fault", "reason"), FAULTS)
def test_who_is_missing_and_why_reads_the_same(make: Make, fault: Any, reason: Reason) -> None:
    found = []
    for workers in (1, 2):
        clients = toys()
        clients["d"].faults["toy/say", 1] = fault
        found.append(say(make(clients, workers)))
    one, two = found
    assert one.missing == two.missing
    assert two.missing["d"].reason is reason
    assert list(one.answers) == list(two.answers) == list("abce")


@pytest.mark.parametrize("answer", [foreign, not_finite])
def test_an_answer_that_is_no_message_of_the_run_is_malformed(make: Make, answer: Any) -> None:
    clients = toys()
    clients["d"].faults["toy/say", 1] = answer
    assert say(make(clients)).missing["d"].reason is Reason.MALFORMED


def test_what_a_silo_logs_is_logged_here(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    clients = toys()
    clients["d"].faults["toy/say", 1] = ZeroDivisionError("division by zero")
    with caplog.at_level(logging.INFO):
        say(make(clients))
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.message.startswith("silo `d` failed\nTraceback")


def test_what_is_logged_is_in_the_order_of_silos(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    def late(message: Message) -> object:
        time.sleep(0.05)
        raise ZeroDivisionError

    clients = toys()
    clients["a"].faults["toy/say", 1], clients["e"].faults["toy/say", 1] = late, ZeroDivisionError()
    say(make(clients))
    failed = [record.message[:15] for record in caplog.records if record.levelno == logging.ERROR]
    assert failed == ["silo `a` failed", "silo `e` failed"]


def test_states_come_back_and_go_there(make: Make) -> None:
    clients = toys()
    engine = make(clients)
    say(engine)
    say(engine)
    assert [client.total for client in clients.values()] == [0] * 5
    engine.gather()
    assert [client.total for client in clients.values()] == [2] * 5
    engine.spread({name: {"total": 7, "array": np.full(3, 7), "secret": b"\x07"} for name in "bd"})
    say(engine)
    engine.gather()
    assert [client.total for client in clients.values()] == [3, 8, 3, 8, 3]


def test_the_same_message_crosses_once_a_worker(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[int]()
    packed = frames.packed

    def noted(value: Any) -> frames.Frame:
        frame = packed(value)
        sent.append(sum(memoryview(part).nbytes for part in frame.body))
        return frame

    engine = make(toys())
    monkeypatch.setattr(frames, "packed", noted)
    large = Large(stamp=NOW, numbers=np.zeros(1000))
    engine.deliver(Ask(dict.fromkeys(SILOS, large), Said))
    assert sent == [8024, 8024]  # 24 bytes before an array


def test_phases_last_no_longer_than_the_delivery(make: Make) -> None:
    class Slow(ToyClient):
        def answer(self, message: Message) -> Message:
            with self.phase("thought"):
                time.sleep(0.02)
            time.sleep(0.02)
            return super().answer(message)

    engine = make({name: Slow(0) for name in SILOS})
    began = time.perf_counter()
    say(engine)
    took, phases = time.perf_counter() - began, engine.clock.take()
    assert set(phases) == {"thought", "preparation", "delivery", "aggregation"}
    assert sum(phases.values()) <= took


def test_phases_are_charged_by_the_busiest_worker_and_what_passes_between_processes_is_delivery(make: Make) -> None:
    engine = make(toys())
    assert isinstance(engine._silos, Workers)
    told = [{"busy": 6.0, "phases": {"thought": 4.0, "preparation": 1.0}}, {"busy": 2.0, "phases": {"thought": 2.0}}]
    times = mock.Mock(perf_counter=mock.Mock(side_effect=[0.0, *[10.0] * 4]))
    engine.clock.take()
    with mock.patch.object(usage, "time", times), engine.clock.phase("delivery"):
        engine._silos._charge(told)
    assert engine.clock.take() == {"delivery": 4.75, "thought": 4.5, "preparation": 0.75}


def test_what_workers_wait_for_is_no_silos_preparation(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, open_then = make(toys()), list[list[str]]()
    receive = frames.receive

    def noted(of: Any) -> Any:
        open_then.append(list(engine.clock._open))
        return receive(of)

    monkeypatch.setattr(frames, "receive", noted)
    say(engine)
    assert open_then == [["delivery"]] * 2


@pytest.mark.parametrize("when", ["idle", "asked"])
def test_a_killed_worker_ends_the_run_with_one_sentence(make: Make, when: str) -> None:
    clients = toys()
    if when == "asked":
        clients["d"].faults["toy/say", 1] = lambda message: os.kill(os.getpid(), signal.SIGKILL)
    engine = make(clients)
    processes = of(engine)
    if when == "idle":
        os.kill(processes[1], signal.SIGKILL)
    said = r"has ended \(killed by signal 9\), and with it c, d, e; where memory was short, fewer \[engine\] workers"
    for ask in (lambda: say(engine), lambda: say(engine), engine.gather):
        with pytest.raises(RunFailed, match=said):
            ask()
    assert not any(alive(process) for process in processes)


def test_a_failure_of_a_worker_itself_is_told(make: Make) -> None:
    clients = toys()
    engine = make(clients)
    with pytest.raises(RunFailed, match="failed: KeyError: 'array'"):
        engine.spread({"d": {"total": 1}})


def test_a_state_that_cannot_be_sent_is_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keeps, "state", lambda self: {"total": np.float32(1)})
    engine = make(toys())
    say(engine)
    with pytest.raises(RunFailed, match="failed: TypeError: Object of type float32"):
        engine.gather()


def test_where_the_second_process_cannot_start_the_first_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, started = os.fork, list[int]()

    def once() -> int:
        if started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(fork())
        return started[-1]

    monkeypatch.setattr(os, "fork", once)
    with pytest.raises(ParameterError, match=r"cannot run in other processes here .*temporarily unavailable.*; use 1"):
        InProcess(toys(), Codec(SCHEMA), workers=2)  # type: ignore[arg-type]
    assert not alive(started[0])


def test_whatever_goes_wrong_in_a_worker_never_runs_on_as_the_first_process(
    make: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def wrong(self: SilosHere) -> None:
        raise RuntimeError("an end that fails")

    engine = make(toys())
    owner = os.getpid()
    monkeypatch.setattr(SilosHere, "close", wrong)
    with pytest.raises(ParameterError):
        InProcess(toys(), Codec(SCHEMA), workers=2, prepare=lambda: 1 / 0)  # type: ignore[arg-type]
    assert os.getpid() == owner
    assert "an end that fails" in capfd.readouterr().err
    assert len(say(engine).answers) == 5


def test_silos_that_compute_together_play_in_one_process(make: Make) -> None:
    class Together(ToyClient):
        @InSteps
        def answer(self, message: Message) -> Answering:  # type: ignore[override]
            yield from ()
            return Said(stamp=message.stamp, number=self.number)

    def processes(silos: int, kind: type[ToyClient] = Together, **settings: Any) -> int:
        return len(of(make({f"silo-{k}": kind(k) for k in range(silos)}, 3, **settings)))

    assert processes(5) == processes(6, Keeps) == 3
    assert processes(6) == processes(25) == 0  # there is nothing to share out
    assert processes(26) == 2
    assert processes(6, strict=True) == processes(6, stacks=False) == 3


def test_a_worker_that_cannot_start_is_told(make: Make) -> None:
    def prepare() -> None:
        raise RuntimeError("threads were started before")

    with pytest.raises(ParameterError, match=r"cannot run in other processes here \(.*threads were started before"):
        make(toys(), prepare=prepare)


def test_a_worker_ends_with_the_process_that_it_belongs_to(make: Make) -> None:
    read, write = os.pipe()
    if not (owner := os.fork()):  # a process that is killed while its workers compute
        clients = toys()
        clients["d"].faults["toy/say", 1] = lambda message: time.sleep(0.2)
        engine = InProcess(clients, Codec(SCHEMA), workers=2)  # type: ignore[arg-type]
        os.write(write, b" ".join(str(process).encode() for process in of(engine)) + b"\n")
        try:
            say(engine)
        finally:
            os._exit(0)
    with os.fdopen(read) as stream:
        os.close(write)
        assert len(stream.readline().split()) == 2
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        assert stream.read() == ""  # its other ends are closed once all are gone


def test_an_interrupt_is_for_the_first_process_alone(make: Make) -> None:
    engine = make(toys())
    for one in of(engine):
        os.kill(one, signal.SIGINT)
    assert len(say(engine).answers) == 5


def test_a_worker_has_the_time_to_end_a_silos_process_that_hangs(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PATIENCE", 0.5)
    monkeypatch.setattr("moretta.engines.workers.PATIENCE", 0.2)  # which alone would be too little
    clients = dict[str, Any]()
    for name in "ab":
        script = f"import os; open({str(tmp_path / name)!r}, 'w').write(str(os.getpid()))\n"
        script += WELL_BEHAVED.format(folder=os.path.dirname(__file__)) + "import time; time.sleep(600)\n"
        rows = np.zeros(2), np.zeros(2)
        clients[name] = ChildClient(name, "", {}, rows, SCHEMA, (sys.executable, "-c", script))
    engine = make({**clients, "c": ToyClient(3)}, 2)
    assert len(engine.deliver(Ask.all(list("abc"), Hello(stamp=NOW), Said)).answers) == 3
    engine.close()
    assert not any(alive(int((tmp_path / name).read_text())) for name in "ab")
