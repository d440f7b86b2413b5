"""Somebody else's run folder runs no code before it is asked; one's own runs the code that trained it, unasked."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import pty
import py_compile
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moretta.commands import main as cli
from moretta.commands import terminal as shell
from moretta.errors import ParameterError
from moretta.run import consent, trained_model

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


def trained(folder: Path, **environment: str) -> Path:
    for name, text in (("run.toml", RUN), ("nets.py", NETS), ("rows.py", ROWS)):
        (folder / name).write_text(text)
    np.savez(folder / "rows.npz", x=np.zeros((6, 4), np.float32), y=np.arange(6) % 3)
    words = [*MORETTA, "train", "run.toml", "--out", "run"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True, env={**os.environ, **environment})
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    (folder / "ran").unlink()
    return folder


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("theirs"), XDG_STATE_HOME=str(tmp_path_factory.mktemp("their-state")))


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("mine"))


COMMANDS = {
    "evaluate": ("evaluate", "run", "--data", "rows.npz"),
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


# -- runs of one's own -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_of_ones_own_is_not_asked_about(mine: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert moretta(monkeypatch, mine, *COMMANDS[command]) == 0
    assert (mine / "ran").exists()


def test_what_is_noted_is_the_users_alone_and_tells_nothing(mine: Path) -> None:
    notes = consent.state_folder() / consent.NOTES
    assert notes.is_relative_to(os.environ["XDG_STATE_HOME"])
    assert notes.stat().st_mode & 0o777 == 0o600
    assert notes.parent.stat().st_mode & 0o777 == 0o700
    assert all(re.fullmatch("[0-9a-f]{64}", line) for line in notes.read_text().splitlines())


def writing(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((path.read_text() if path.exists() else "") + text)

    return change


CHANGES: dict[str, Callable[[Path], object]] = {
    "the model's code": writing("nets.py", "# changed"),
    "the rows' code": writing("rows.py", "# changed"),
    "a module that would hide an installed one": writing("numpy.py", ""),
    "a package that would hide an installed one": writing("torch/__init__.py", ""),
    "a module of a folder": writing("parts/more.py", ""),
    "compiled code": writing(f"nets{importlib.machinery.EXTENSION_SUFFIXES[0]}", ""),
    "what the code is called with": lambda folder: (folder / "run" / "run.toml").write_text(
        (folder / "run" / "run.toml").read_text().replace('source = "nets:build"', 'source = "nets:build"\nsize = 3')
    ),
    "another result": writing("run/result.json", " "),
    "no result": lambda folder: (folder / "run" / "result.json").unlink(),
    "a link to code": lambda folder: (folder / "helpers.py").symlink_to(folder / "nets.py"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_asked_about(mine: Path, tmp_path: Path, change: str) -> None:
    assert consent.is_own(mine / "run")
    kept = tmp_path / "kept"
    shutil.copytree(mine, kept, symlinks=True)
    try:
        CHANGES[change](mine)
        assert not consent.is_own(mine / "run")
    finally:
        shutil.rmtree(mine)
        shutil.copytree(kept, mine, symlinks=True)
    assert consent.is_own(mine / "run")


def test_what_is_no_code_may_change(mine: Path) -> None:
    (mine / "notes.txt").write_text("thoughts")
    (mine / "figures").mkdir()
    assert consent.is_own(mine / "run")


def test_a_folder_from_elsewhere_claims_nothing(mine: Path, theirs: Path, tmp_path: Path) -> None:
    assert not consent.is_own(theirs / "run")
    copied = tmp_path / "run"
    shutil.copytree(mine / "run", copied)  # the very same files, in another place
    assert not consent.is_own(copied)
    link = tmp_path / "link"
    link.symlink_to(mine / "run")
    assert consent.is_own(link)
    kept = tmp_path / "kept"
    (mine / "run").rename(kept)
    try:
        shutil.copytree(theirs / "run", mine / "run")  # another's run in its place, with my run file and code
        shutil.copy(kept / "run.toml", mine / "run" / "run.toml")
        assert not consent.is_own(mine / "run")
    finally:
        shutil.rmtree(mine / "run")
        kept.rename(mine / "run")
    assert consent.is_own(mine / "run")


def test_notes_that_others_could_write_count_for_nothing(mine: Path) -> None:
    notes = consent.state_folder() / consent.NOTES
    for mode in (0o620, 0o602, 0o644):
        notes.chmod(mode)
        assert not consent.is_own(mine / "run")
    notes.chmod(0o600)
    assert consent.is_own(mine / "run")
    notes.rename(notes.with_suffix(".kept"))
    assert not consent.is_own(mine / "run")
    notes.symlink_to(notes.with_suffix(".kept"))
    assert not consent.is_own(mine / "run")
    notes.with_suffix(".kept").replace(notes)


def test_bytecode_that_is_not_of_the_sources_does_not_run(mine: Path) -> None:
    source, evil = mine / "nets.py", mine / "evil.txt"
    evil.write_text(NETS.replace('"ran").write_text("code ran")', '"evil").write_text("x")').ljust(len(NETS)))
    os.utime(evil, ns=(source.stat().st_atime_ns, source.stat().st_mtime_ns))
    cache = mine / "__pycache__" / Path(importlib.util.cache_from_source(str(source))).name
    cache.parent.mkdir(exist_ok=True)
    py_compile.compile(str(evil), str(cache), doraise=True)  # with the time and size of the true source
    plain = subprocess.run([sys.executable, "-c", "import nets"], cwd=mine, capture_output=True, text=True)
    assert (plain.returncode, (mine / "evil").exists()) == (0, True), plain.stderr  # plain Python takes it
    (mine / "evil").unlink()
    done = subprocess.run([*MORETTA, *COMMANDS["predict"]], cwd=mine, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (mine / "evil").exists()
    shutil.rmtree(cache.parent)
    evil.unlink()


def test_too_many_files_are_not_looked_through(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consent, "MOST", 3)
    assert consent.code_digest(mine / "run") == ""
    assert not consent.is_own(mine / "run")


def test_a_run_from_python_is_ones_own_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    np.savez(tmp_path / "rows.npz", x=np.zeros((2, 4), np.float32))
    program = """
import numpy as np
from moretta import Federation, FedSGD, Silo
x, y = np.random.default_rng(0).normal(size=(60, 4)).astype("float32"), np.arange(60) % 3
silos = [Silo(name, x, y) for name in ("north", "east")]
protocol = FedSGD(loss="cross-entropy", learning_rate=0.1)
Federation("nets:build", silos, protocol, out="run").train(1, progress=False)
"""
    (tmp_path / "program.py").write_text(program)
    subprocess.run([sys.executable, "program.py"], cwd=tmp_path, check=True, capture_output=True)
    assert moretta(monkeypatch, tmp_path, *COMMANDS["predict"]) == 0
    (tmp_path / "nets.py").write_text(f"{NETS}# changed")
    assert moretta(monkeypatch, tmp_path, *COMMANDS["predict"]) == 2


def test_where_nothing_can_be_noted_a_run_ends_well(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trained(tmp_path, XDG_STATE_HOME=str(tmp_path / "file"))  # below a file
    assert not consent.is_own(tmp_path / "run")
