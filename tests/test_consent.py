"""Somebody else's run folder runs no code before it is asked."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moretta.commands import main as cli
from moretta.commands import terminal as shell
from moretta.errors import ParameterError
from moretta.run import trained_model

RUN = """
[run]
name = "theirs"
rounds = 1
record-views = true
[data]
source = "rows:load"
silos = 2
batch-size = 8
standardise = true
[model]
source = "nets:build"
[protocol]
name = "fedsgd"
learning-rate = 0.1
"""
NETS = """
from pathlib import Path
from torch import nn
Path(__file__).with_name("ran").write_text("code ran")
def build():
    return nn.Sequential(nn.Linear(4, 3))
"""
ROWS = """
import numpy as np
from pathlib import Path
Path(__file__).with_name("ran").write_text("code ran")
def load():
    x, y = np.random.default_rng(0).normal(size=(60, 4)).astype("float32"), np.arange(60) % 3
    return x[:40], y[:40], x[40:], y[40:]
"""
MORETTA = (sys.executable, "-c", "from moretta.commands.main import main; main()")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    for name, text in (("run.toml", RUN), ("nets.py", NETS), ("rows.py", ROWS)):
        (folder / name).write_text(text)
    np.savez(folder / "rows.npz", x=np.zeros((2, 4), np.float32))
    subprocess.run([*MORETTA, "train", "run.toml", "--out", "run"], cwd=folder, check=True, capture_output=True)
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    (folder / "ran").unlink()
    return folder


COMMANDS = {
    "predict": ("predict", "run", "--data", "rows.npz", "--out", "out.csv"),
    "export": ("export", "run", "--out", "out.onnx"),
    "audit": ("audit", "run"),
    "compare": ("compare", "run", "--audit"),
}


def moretta(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> int:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["moretta", *words])
    monkeypatch.setattr(shell.screen, "width", 10_000)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_terminal_code_is_refused(
    theirs: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert moretta(monkeypatch, theirs, *COMMANDS[command]) == 2
    assert not (theirs / "ran").exists()
    said = capsys.readouterr().err
    assert f"run names code that would be run as you: build of nets ({theirs / 'nets.py'})" in said
    assert (f"load of rows ({theirs / 'rows.py'})" in said) == (command in ("audit", "compare"))
    assert "read it, and if you trust it give --allow-code" in said


def answering(theirs: Path, answer: bytes) -> tuple[int, str]:
    """Predict in a terminal, and answer what is asked."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(theirs)
        os.execv(MORETTA[0], [*MORETTA, *COMMANDS["predict"]])
    said = b""
    with open(terminal, "rb+", buffering=0) as stream:
        while b"[y/N]" not in said:
            said += stream.read(1)
        stream.write(answer)
        while True:
            try:
                more = stream.read(1000)
            except OSError:  # a terminal whose other end is closed
                break
            if not more:
                break
            said += more
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), said.decode()


@pytest.mark.slow
def test_in_a_terminal_it_is_asked(theirs: Path) -> None:
    code, said = answering(theirs, b"n\n")
    assert code == 2
    assert "build of nets" in said
    assert not (theirs / "ran").exists()
    assert not (theirs / "out.csv").exists()
    code, _ = answering(theirs, b"y\n")
    assert code == 0
    assert (theirs / "ran").exists()
    assert (theirs / "out.csv").exists()
    for name in ("ran", "out.csv"):
        (theirs / name).unlink()


def test_with_the_option_nobody_is_asked(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert moretta(monkeypatch, theirs, *COMMANDS["predict"], "--allow-code") == 0
    for name in ("ran", "out.csv"):
        (theirs / name).unlink()


def test_a_state_dict_and_a_report_need_no_code(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (("export", "run", "--out", "out.safetensors"), ("report", "run")):
        assert moretta(monkeypatch, theirs, *command) == 0
    assert not (theirs / "ran").exists()


def test_from_python_it_is_refused_too(theirs: Path) -> None:
    with pytest.raises(ParameterError, match="give --allow-code"):
        trained_model.read(theirs / "run")
    assert not (theirs / "ran").exists()
