"""A silo in a process of its own: what it answers, what its end costs, and that no process is left behind."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy import SCHEMA, Hello, Said, Say, ToyClient

from moretta.contract import framing
from moretta.contract.codec import Codec
from moretta.contract.messages import Stamp
from moretta.contract.roles import Ask, Reason
from moretta.engines import child, process
from moretta.engines.child import ChildClient
from moretta.engines.frames import receive_arrays, send_arrays
from moretta.engines.in_process import InProcess
from moretta.errors import CodecError, Disconnected, MorettaError, ParameterError, PeerError, RangeError

NOW = Stamp("run", 1, 0)
ROWS = np.arange(6.0).reshape(3, 2), np.array([0, 1, 2])
STATE = {"seed/secret_root": b"r" * 32}

# A process that answers Hello by what it was told in BeSilo, and Say by an error of the class that the settings name.
WELL_BEHAVED = """
import sys
sys.path.insert(0, {folder!r})
from toy import SCHEMA, Hello, Said
from moretta import errors
from moretta.contract import framing
from moretta.contract.codec import Codec
from moretta.engines.child import LOCAL, MESSAGES, BeSilo, Acknowledged, AnswerHeader, Restore, as_arrays
from moretta.engines.frames import receive_arrays
codec, source, sink = Codec((*SCHEMA, *MESSAGES)), sys.stdin.buffer, sys.stdout.buffer
while (data := framing.read(source)) is not None:
    asked, error, answer, state = codec.decode(data), "", Acknowledged(stamp=LOCAL), {{}}
    if isinstance(asked, BeSilo):
        x, y = receive_arrays(source).values()
        begun, number = asked, int(x.sum() + y.sum()) + len(asked.state)
    elif isinstance(asked, Restore):
        number = 100 + len(asked.state)
    elif isinstance(asked, Hello):
        answer, state = Said(stamp=asked.stamp, number=number), {{**as_arrays({{"more": b"m"}}), **begun.state}}
    else:
        error = begun.settings
    envelope = AnswerHeader(stamp=LOCAL, seconds={{"local_forward": 2.0}}, peak_mib=7.5, state=state, error=error,
                        sentence="expected this, got that" if error else "")
    framing.write(sink, codec.encode(envelope))
    if not error:
        framing.write(sink, codec.encode(answer))
"""


pytestmark = pytest.mark.usefixtures("started")


def silo(script: str, settings: str = "") -> ChildClient:
    return ChildClient("north", settings, STATE, ROWS, SCHEMA, command=(sys.executable, "-c", script))


def well_behaved(settings: str = "") -> ChildClient:
    return silo(WELL_BEHAVED.format(folder=os.path.dirname(__file__)), settings)


def test_it_answers_and_tells_what_it_took(started: list[Any]) -> None:
    client = well_behaved()
    charged: list[tuple[str, float]] = []
    client.charge = lambda phase, seconds: charged.append((phase, seconds))
    assert (client.state(), started) == (STATE, [])
    said = client.answer(Hello(stamp=NOW))
    assert isinstance(said, Said)
    assert (said.stamp, said.number) == (NOW, 15 + 3 + 1)
    assert client.state() == {"more": b"m", **STATE}
    assert [phase for phase, _ in charged] == ["local_forward"] * 2
    assert all(0 < seconds <= 2.0 for _, seconds in charged), "no more than what was waited, though it says 2 s"
    assert client.peak_mib == 7.5
    client.restore(STATE)
    assert (client.answer(Hello(stamp=NOW)).number, len(started)) == (101, 1)
    client.close()
    client.close()
    assert started[0].returncode == 0
    client.answer(Hello(stamp=NOW))  # another one, from the state that was told of last
    assert len(started) == 2
    client.close()


def test_others_answer_while_it_works(tmp_path: Path) -> None:
    """It answers once a silo that is asked after it has answered."""
    told = tmp_path / "told"
    script = WELL_BEHAVED.format(folder=os.path.dirname(__file__))
    wait = f"[__import__('time').sleep(0.01) for _ in iter(lambda: __import__('os').path.exists({str(told)!r}), True)]"
    child = silo(script.replace("        answer, state = Said", f"        {wait}\n        answer, state = Said"))

    south = ToyClient(1)
    south.faults[Hello.TAG, 1] = lambda message: (told.touch(), Said(stamp=message.stamp, number=1))[1]
    engine = InProcess({"north": child, "south": south}, Codec(SCHEMA), deadline=60.0)
    answers = engine.deliver(Ask.all(["north", "south"], Hello(stamp=NOW), Said)).answers
    assert {name: said.number for name, said in answers.items()} == {"north": 19, "south": 1}
    child.close()


def test_an_answer_that_nobody_takes_is_not_the_next_message_s(started: list[Any]) -> None:
    client = well_behaved("PeerError")
    steps = client.answer.steps(Hello(stamp=NOW))
    next(steps)
    steps.close()
    with pytest.raises(PeerError, match="expected this"):  # what follows from its settings, and not from Hello
        client.answer(Say(stamp=NOW))
    assert len(started) == 2
    client.close()


@pytest.mark.parametrize("kind", [ParameterError, PeerError, RangeError, MorettaError])
def test_its_errors_are_raised_here(kind: type[MorettaError], started: list[Any]) -> None:
    client = well_behaved(kind.__name__)
    with pytest.raises(MorettaError) as caught:
        client.answer(Say(stamp=NOW))
    assert type(caught.value) is kind
    assert str(caught.value) == "expected this, got that"
    assert client.answer(Hello(stamp=NOW)).number == 19
    assert len(started) == 1
    client.close()


def test_an_error_that_is_none_of_ours_is_a_failure() -> None:
    engine = InProcess({"north": well_behaved("ZeroDivisionError")}, Codec(SCHEMA))
    why = engine.deliver(Ask.all(["north"], Say(stamp=NOW), Said)).missing["north"]
    assert why.reason is Reason.FAILED
    assert "ZeroDivisionError: expected this, got that" in why.detail
    seconds = engine.clock.take()
    assert 0 < seconds["local_forward"] < 4.0  # it says 4 s, in which nobody waited
    assert min(seconds.values()) >= 0.0
    assert engine.peak_mib == 7.5
    engine.close()


READ = "import sys; sys.stdin.buffer.read(100); "
LONG = (1 << 40).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("raise SystemExit('moretta.edge: no ONNX Runtime here')", r"has ended \(exit code 1: moretta.edge: no ONNX"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", r"has ended \(killed by signal 9\)"),
        (READ + "sys.stdout.close()", r"has ended \(exit code 0\)"),
        (
            READ + "print('hello, world, how are you?')",
            "sent a malformed answer: expected a frame of at most",
        ),
        (
            READ + f"sys.stdout.buffer.write({LONG!r})",
            "at most 1073741824 bytes, got 1099511627776",
        ),
        (READ + "sys.stdout.buffer.write(bytes([9] + [0] * 7) + b'garbage')", "expected a frame of 9 bytes, got 7"),
        (READ + "sys.stdout.buffer.write(bytes([7] + [0] * 7) + b'garbage')", "expected a header"),
        (READ + "sys.stdout.buffer.write(bytes(5))", "expected a frame's length of 8 bytes, got 5"),
    ],
)
def test_its_end_is_told_by_name(script: str, sentence: str) -> None:
    client = silo(script)
    engine = InProcess({"north": client, "south": ToyClient(3)}, Codec(SCHEMA))
    replies = engine.deliver(Ask.all(["north", "south"], Say(stamp=NOW), Said))
    assert list(replies.answers) == ["south"]
    why = replies.missing["north"]
    assert why.reason is Reason.DISCONNECTED
    assert why.detail.startswith("the process of silo `north` ")
    with pytest.raises(Disconnected, match=sentence):
        client.answer(Hello(stamp=NOW))
    assert client.state() == STATE


def test_an_answer_before_its_envelope_is_none() -> None:
    junk = f"""
{READ}
sys.path.insert(0, {os.path.dirname(__file__)!r})
from toy import Said, SCHEMA
from moretta.contract import framing
from moretta.contract.codec import Codec
from moretta.engines import child as wire
for _ in range(2):
    framing.write(sys.stdout.buffer, Codec(SCHEMA).encode(Said(stamp=wire.LOCAL, number=1)))
"""
    with pytest.raises(Disconnected, match="sent `toy/said` before its envelope"):
        silo(junk).answer(Hello(stamp=NOW))


def test_one_that_was_killed_is_started_anew(started: list[Any]) -> None:
    client = well_behaved()
    client.answer(Hello(stamp=NOW))
    os.kill(started[0].pid, signal.SIGKILL)
    with pytest.raises(Disconnected, match="killed by signal 9"):
        client.answer(Say(stamp=NOW))
    assert client.answer(Hello(stamp=NOW)).number == 20  # with the state that the first one told of
    client.close()


def test_one_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch, started: list[Any]) -> None:
    monkeypatch.setattr(process, "PATIENCE", 0.1)
    deaf = f"{READ} import time; sys.stdout.buffer.write({LONG!r}); sys.stdout.flush(); time.sleep(60)"
    with pytest.raises(Disconnected, match=r"got 1099511627776 \(killed by signal 9\)"):
        silo(deaf).answer(Hello(stamp=NOW))


# What a process may do instead of answering: nothing; tell of a frame that does not come; no longer read.
SLEEP = "import time; time.sleep(60)"
HANGS = {
    "never answers": READ + SLEEP,
    "answers half": READ + f"sys.stdout.buffer.write(bytes([9] + [0] * 7) + b'half'); sys.stdout.flush(); {SLEEP}",
    "answers drop by drop": READ
    + "import time; sys.stdout.buffer.write(bytes([0, 1] + [0] * 6))\nwhile True: "
    + "sys.stdout.buffer.write(b'drop'); sys.stdout.flush(); time.sleep(0.2)",
    "never reads": SLEEP,
}


@pytest.mark.parametrize("what", HANGS)
def test_one_that_hangs_is_killed(what: str, monkeypatch: pytest.MonkeyPatch, started: list[Any]) -> None:
    monkeypatch.setattr(child, "START", 0.3)
    rows = (np.zeros((1 << 20, 2)), np.zeros(1 << 20)) if what == "never reads" else ROWS  # more than a pipe holds
    client = ChildClient("north", "", STATE, rows, SCHEMA, command=(sys.executable, "-c", HANGS[what]))
    engine = InProcess({"north": client}, Codec(SCHEMA), deadline=0.3)
    why = engine.deliver(Ask.all(["north"], Say(stamp=NOW), Said)).missing["north"]
    assert why.reason is Reason.DISCONNECTED
    assert "the process of silo `north` did not answer within 0.3 s (killed by signal 9" in why.detail
    assert started[0].returncode == -signal.SIGKILL


def test_one_that_hangs_later_is_started_anew(started: list[Any]) -> None:
    client = well_behaved()
    engine = InProcess({"north": client}, Codec(SCHEMA), deadline=1.0)
    ask = Ask.all(["north"], Hello(stamp=NOW), Said)
    assert engine.deliver(ask).answers["north"].number == 19  # in time, although to start takes time
    os.kill(started[0].pid, signal.SIGSTOP)
    assert "did not answer within 1 s" in engine.deliver(ask).missing["north"].detail
    assert engine.deliver(ask).answers["north"].number == 20
    engine.close()


def test_to_start_takes_no_time_of_the_deadline(started: list[Any]) -> None:
    slow = f"import time; time.sleep(1.5)\n{WELL_BEHAVED.format(folder=os.path.dirname(__file__))}"
    engine = InProcess({"north": silo(slow)}, Codec(SCHEMA), deadline=1.0)
    assert list(engine.deliver(Ask.all(["north"], Hello(stamp=NOW), Said)).answers) == ["north"]
    engine.close()


def test_without_a_deadline_it_has_long() -> None:
    engine = InProcess({"north": (client := well_behaved())}, Codec(SCHEMA))
    assert client.deadline == child.LONGEST
    engine.close()


def test_to_restore_one_that_is_gone_is_no_error(started: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    client = well_behaved()
    client.answer(Hello(stamp=NOW))
    os.kill(started[0].pid, signal.SIGKILL)
    started[0].wait()
    client.restore({"other": b"o", "seed/secret_root": b"s" * 32})
    assert "the process of silo `north` has ended (killed by signal 9); it starts anew" in caplog.text
    assert client.state() == {"other": b"o", "seed/secret_root": b"s" * 32}
    assert client.answer(Hello(stamp=NOW)).number == 15 + 3 + 2
    client.close()


def test_a_program_that_ends_ends_it() -> None:
    program = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import test_child
client = test_child.well_behaved()
client.answer(test_child.Hello(stamp=test_child.NOW))
print(client._process._popen.pid)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


@pytest.mark.parametrize(
    "about",
    [
        b"",
        b"no json",
        b"[]",
        b'{"x": "f8"}',
        b'{"x": ["f8", 4]}',  # more than what follows
        b'{"x": ["f8", 16777216]}',
        b'{"x": ["f8", -1]}',
        b'{"x": ["f8", 1.0]}',
        b'{"x": ["O", 1]}',
        b'{"x": ["f8,f8", 1]}',
        b'{"x": ["f8"' + b", 1" * 65 + b"]}",
        b'{"x": ["u1", 3]}',  # less than what follows
    ],
)
def test_arrays_are_as_large_as_what_follows_and_no_numbers_take_no_memory(about: bytes) -> None:
    packed = len(about).to_bytes(4, "little") + about + bytes(-(4 + len(about)) % 8) + b"12345678"
    stream = io.BytesIO(len(packed).to_bytes(8, "little") + packed)
    tracemalloc.start()
    try:
        with pytest.raises(CodecError, match="expected"):
            receive_arrays(stream)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_frame_is_no_longer_than_its_limit() -> None:
    for length in (framing.LIMIT + 1, 2**64 - 1):
        with pytest.raises(CodecError, match=f"expected a frame of at most {framing.LIMIT} bytes, got {length}"):
            framing.read(io.BytesIO(length.to_bytes(8, "little") + b"1"))


def test_arrays_travel_as_they_are() -> None:
    sent = {
        "x": np.arange(6, dtype="<i2").reshape(2, 3)[:, ::2],
        "none": np.ones((0, 3), "float32"),
        "y": np.array([True]),
        "number": np.array(np.nan),  # which no message may hold
    }
    stream = io.BytesIO()
    send_arrays(stream, sent)
    stream.seek(0)
    found = receive_arrays(stream)
    assert found is not None
    assert found.keys() == sent.keys()
    for name, array in sent.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(found[name], array, equal_nan=array.dtype.kind == "f")
    assert receive_arrays(stream) is None
    with pytest.raises(CodecError, match="expected arrays of"):
        send_arrays(stream, {"x": np.array(["text"])})
