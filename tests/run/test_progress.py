"""What a run shows of itself, and what reaches the log: once, at its level, and nothing secret."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from networks import seeded
from torch import nn

from moretta import Engine, Faults, FedAvg, Federation, FedSGD, FinishedRound, SecureAggregation, Silo, StopTraining
from moretta.contract.roles import State
from moretta.protocols.common.training import Training
from moretta.run import progress
from moretta.run.loop import Session


def silos(count: int = 3) -> list[Silo]:
    made = []
    for number in range(count):
        x = np.random.default_rng(number).normal(size=(12, 3)).astype(np.float32)
        made.append(Silo(f"silo-{number + 1}", x, (x[:, 0] > 0).astype(np.int64)))
    return made


def federation(out: Path | None = None, protocol: Training | None = None, **settings: Any) -> Federation:
    with seeded():
        model = nn.Linear(3, 2)
    return Federation(model, silos(), protocol or FedSGD(), out=out, **settings)


DROPPED = Engine(faults=Faults.model_validate({"drop": [{"round": 2, "silo": "silo-2"}]}))
TWO = SecureAggregation(threshold=2)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test moves by hand."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_the_last_round_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    federation(test=(silos()[0].x, silos()[0].y)).train(3)
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("fedsgd: round 3 of 3: loss ")
    assert "test accuracy" in line


def test_a_line_comes_every_few_seconds(slow: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    def later(told: object) -> None:
        slow[0] += 2.0

    federation(evaluate_every=7).train(7, on_round=later)
    said = [line.split(":")[1].strip() for line in capsys.readouterr().err.splitlines() if "round" in line]
    assert said == ["round 4 of 7", "round 7 of 7"]  # before round 4 six seconds had passed


def test_a_run_that_is_stopped_shows_the_round_it_stopped_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])

    def stop(told: FinishedRound) -> None:
        if told.number == 2:
            raise StopTraining

    federation().train(9, on_round=stop)
    first, *more = capsys.readouterr().err.splitlines()
    assert first.startswith("fedsgd: round 2 of 9: loss ")
    assert any("stopped after round 2 of 9" in line for line in more)


def test_one_argument_turns_it_off(capsys: pytest.CaptureFixture[str]) -> None:
    federation().train(2, progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_silo_that_misses_a_round_is_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    federation(engine=DROPPED, aggregation=TWO).train(4)
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("round 2: silo-2 ") for line in lines)


def test_warnings_of_the_result_are_shown_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own listen otherwise
    result = federation(insecure_secret_seed=3).train(2)
    err = capsys.readouterr().err
    assert len(result.record["warnings"]) >= 2
    for sentence in result.record["warnings"]:
        assert err.count(sentence) == 1


def test_a_program_that_logs_has_lines_and_warnings_in_its_log_and_nowhere_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    handler, log = logging.StreamHandler(stream), logging.getLogger("moretta")
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        result = federation(tmp_path / "run", insecure_secret_seed=3).train(2)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert capsys.readouterr().err == ""
    lines = stream.getvalue().splitlines()
    assert sum(line.startswith("INFO round 2 of 2: loss ") for line in lines) == 1
    for sentence in result.record["warnings"]:
        assert lines.count(f"WARNING {sentence}") == 1
    kept = (tmp_path / "run" / "log.txt").read_text()
    assert all(kept.count(sentence) == 1 for sentence in result.record["warnings"])


def test_a_log_that_wants_warnings_gets_warnings_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    handler, root = logging.StreamHandler(stream), logging.getLogger()
    root.addHandler(handler)
    try:
        result = federation(tmp_path / "run", insecure_secret_seed=3).train(2)
    finally:
        root.removeHandler(handler)
    assert sorted(stream.getvalue().splitlines()) == sorted(result.record["warnings"])
    assert not handler.filters
    assert capsys.readouterr().err.startswith("fedsgd: round 2 of 2: ")
    assert "INFO round 2 of 2" in (tmp_path / "run" / "log.txt").read_text()


def test_the_library_sets_up_no_handler_that_prints() -> None:
    script = "import logging, moretta; logging.getLogger('moretta').warning('nobody asked')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("protocol", [FedSGD(), FedAvg()])
def test_no_level_tells_a_secret_or_a_row(
    protocol: Training, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[State] = []
    play = Session.play

    def watched(session: Session) -> Any:
        result = play(session)
        states.extend(client.state() for client in session._players.clients.values())
        return result

    monkeypatch.setattr(Session, "play", watched)
    caplog.set_level(logging.DEBUG, logger="moretta")
    federation(protocol=protocol, engine=DROPPED, aggregation=TWO).train(4)
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "round 4 of 4" in said
    secrets = [value for state in states for value in state.values() if isinstance(value, bytes)]
    for secret in secrets:
        assert secret.hex() not in said
        assert repr(secret) not in said
    for silo in silos():
        assert not [cell for cell in silo.x.ravel() if f"{cell:.6g}" in said]


TERMINAL = """
import numpy as np, torch
from torch import nn
from moretta import Federation, FedSGD, Silo
x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
silos = [Silo(name, x, (x[:, 0] > 0).astype(np.int64)) for name in ("north", "south", "east")]
Federation(nn.Linear(3, 2), silos, FedSGD(), test=(silos[0].x, silos[0].y)).train(5, seed=1)
"""


def test_a_terminal_s_bar_names_figures_and_who_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    federation(engine=DROPPED, aggregation=TWO).train(4)
    err = capsys.readouterr().err
    assert "4/4" in err
    assert "loss 0." in err
    assert "round 2: silo-2 " in err
    assert "warning: no test rows were given" in err


def test_a_real_terminal_has_a_bar() -> None:
    import pty

    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "160"}
    with subprocess.Popen([sys.executable, "-c", TERMINAL], stderr=theirs, stdout=subprocess.PIPE, env=env) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            said += part
        assert process.stdout is not None
        assert process.stdout.read() == b""
    os.close(ours)
    assert process.returncode == 0, said
    assert b"5/5" in said
    assert b"test accuracy" in said
    assert b"\xe2\x94\x81" in said  # the bar itself


def test_a_notebook_has_a_bar_in_its_cell() -> None:
    pytest.importorskip("ipykernel", reason="a notebook's kernel is not installed")
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel()
    try:
        shown: list[dict[str, Any]] = []
        client.execute_interactive(TERMINAL, timeout=60, output_hook=shown.append)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    kinds = [message["msg_type"] for message in shown]
    assert "error" not in kinds, shown
    pictures = [
        message["content"] for message in shown if message["msg_type"] in ("display_data", "update_display_data")
    ]
    assert len({picture["transient"]["display_id"] for picture in pictures}) == 1
    assert '<progress value="5" max="5">' in pictures[-1]["data"]["text/html"]
    assert "5/5" in pictures[-1]["data"]["text/plain"]
    assert "stream" not in kinds
