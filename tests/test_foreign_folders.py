"""Run folders that somebody else made: links, pipes, oversized files, and names that a terminal would obey."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from rich.table import Table
from test_cli import Called, call, prepare

from moretta.commands import main as cli
from moretta.engines.files import read_file
from moretta.engines.run_folder import RunFolder
from moretta.errors import ParameterError
from moretta.report.living import Follower, Status
from moretta.report.terminal import Screen, printable

SECRET = "what only this user may read"
OBEYED = "\x1b]0;owned\x07\x1b[31m\u202egnp\u202c\x9b2J[red]x[/red]"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded and audited run of three rounds."""
    home = tmp_path_factory.mktemp("foreign")
    run = prepare(home)
    done = call(
        "train", run, "--set", "protocol.name=fedsgd", "--set", "run.record-views=true", "--out", home / "run", "--json"
    )
    assert done.code == 0, done.err
    return home / "run"


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "secret").write_text(SECRET)
    return tmp_path / "run"


class Waits(Exception):
    """No OSError, which some readers pass over."""


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """End a test that waits on a pipe, instead of waiting with it."""

    def ring(number: int, frame: object) -> None:
        raise Waits("for ever")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(90)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def oversized(path: Path) -> None:
    os.truncate(path, 1 << 40)  # it takes no room on a disk


Command = Callable[[Path], Called]
COMMANDS: dict[str, tuple[Command, tuple[str, ...]]] = {
    "report": (lambda folder: call("report", folder), ("result.json", "history.jsonl", "audit.json")),
    "compare": (lambda folder: call("compare", folder, folder), ("result.json", "model.safetensors")),
    "dossier": (
        lambda folder: call("dossier", "write", folder),
        (
            "run.toml", "result.json", "history.jsonl", "inputs.json", "audit.json", "views/index.jsonl",
            "views/server/round-000001.0.bin", "model.safetensors", "released.safetensors", "dossier.toml",
        ),
    ),
    "watch": (lambda folder: call("watch", folder, "--json"), ("run.toml", "result.json", "history.jsonl", "log.txt")),
    "predict": (
        lambda folder: call("predict", folder, "--data", folder.parent / "rows.csv", "--out", folder.parent / "p.csv"),
        ("run.toml", "result.json", "inputs.json", "released.safetensors"),
    ),
    "export": (
        lambda folder: call("export", folder, "--out", folder.parent / "model.safetensors"),
        ("result.json", "inputs.json", "released.safetensors"),
    ),
    "audit": (
        lambda folder: call("audit", folder),
        ("run.toml", "result.json", "views/index.jsonl", "truth/rows.sha256", "truth/round-000001/run.json"),
    ),
}  # fmt: skip
PLAYED = [(name, file) for name, (_, files) in COMMANDS.items() for file in files]


def attacked(folder: Path, name: str, attack: Callable[[Path], None]) -> Path:
    path = folder / name
    if not path.exists():
        path.write_text("")
    attack(path)
    return path


@pytest.mark.parametrize(("command", "file"), PLAYED)
def test_a_pipe_is_refused_by_its_name(folder: Path, command: str, file: str) -> None:
    path = attacked(folder, file, piped)
    called = COMMANDS[command][0](folder)
    assert called.code == 2, called.err
    assert called.err.strip().count("\n") == 0
    assert str(path) in called.err
    assert "plain file" in called.err


@pytest.mark.parametrize(("command", "file"), PLAYED)
def test_a_link_is_refused_by_its_name_and_not_followed(folder: Path, command: str, file: str) -> None:
    path = folder / file
    path.unlink(missing_ok=True)
    path.symlink_to(folder.parent / "secret")
    called = COMMANDS[command][0](folder)
    assert called.code == 2, called.err
    assert called.err.strip().count("\n") == 0
    assert str(path) in called.err
    assert "a link" in called.err
    assert (folder.parent / "secret").read_text() == SECRET
    assert not (folder / "dossier.html").exists()


@pytest.mark.parametrize(("command", "file"), [one for one in PLAYED if "/" in one[1]])
def test_a_folder_that_is_a_link_is_refused_by_its_name(folder: Path, command: str, file: str) -> None:
    above = (folder / file).parent
    shutil.move(above, folder.parent / "elsewhere")
    above.symlink_to(folder.parent / "elsewhere")
    called = COMMANDS[command][0](folder)
    assert called.code == 2, called.err
    assert f"{above} is a link" in called.err


@pytest.mark.parametrize(("command", "file"), [one for one in PLAYED if one[0] in ("report", "dossier", "predict")])
def test_a_file_that_is_too_large_is_refused_by_its_name(folder: Path, command: str, file: str) -> None:
    path = attacked(folder, file, oversized)
    called = COMMANDS[command][0](folder)
    assert called.code == 2, called.err
    assert str(path) in called.err
    assert "expected" in called.err or "GiB are free" in called.err


def test_an_audit_removes_nothing_behind_a_link(folder: Path) -> None:
    (folder.parent / "mine").mkdir()
    (folder.parent / "mine" / "thesis.tex").write_text("years of work")
    (folder / "audit").symlink_to(folder.parent / "mine")
    called = call("audit", folder)
    assert called.code == 2
    assert f"{folder / 'audit'} is a link" in called.err
    assert (folder.parent / "mine" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("name", ["held.json", "log.txt", "helped/silo-1.jsonl", "checkpoint/releases.txt"])
def test_a_run_that_goes_on_writes_through_no_link(folder: Path, name: str) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(folder.parent / "secret")
    with pytest.raises(ParameterError, match=f"{name} is a link"):
        RunFolder(folder).hold()
    assert (folder.parent / "secret").read_text() == SECRET


def test_a_page_that_follows_a_run_waits_on_no_pipe(folder: Path) -> None:
    """The file is exchanged while the page is served."""
    follower = Follower(folder)
    assert {one.kind for one in follower.news(Status())} >= {"plan", "rounds", "result", "state"}
    for name in ("history.jsonl", "log.txt", "result.json", "run.toml"):
        piped(folder / name)
    kinds = {one.kind for one in [*follower.news(Status()), *follower.news(Status())]}
    assert kinds <= {"begin", "plan", "result", "state"}


@pytest.mark.parametrize("table", ['[data]\nschema = "pipe"', '[secure-aggregation]\nroster = "pipe"'])
def test_a_file_that_a_run_file_names_is_no_pipe_that_is_waited_on(folder: Path, table: str) -> None:
    os.mkfifo(folder / "pipe")
    section, line = table.split("\n")
    lines = (folder / "run.toml").read_text().splitlines()
    lines = [one for one in lines if not one.startswith("base = ")]
    lines.insert(lines.index(section) + 1, line)
    (folder / "run.toml").write_text("\n".join(lines))
    (folder / "result.json").unlink()
    assert call("dossier", "write", folder).code == 0
    for command in ("predict", "audit"):
        assert COMMANDS[command][0](folder).code == 2


def test_a_run_folder_may_itself_be_reached_by_a_link(folder: Path) -> None:
    (folder.parent / "latest").symlink_to(folder)
    assert call("report", folder.parent / "latest").code == 0
    assert read_file(folder.parent / "latest", "views/index.jsonl")


# Text for a terminal


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def in_a_terminal(*arguments: object) -> str:
    """Return what a command writes to a terminal, on both streams."""
    out, err = Tty(), Tty()
    with (
        mock.patch.object(sys, "argv", ["moretta", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.suppress(SystemExit),
    ):
        cli.main()
    return out.getvalue() + err.getvalue()


def assert_harmless(text: str) -> None:
    assert "gnp" in text  # it is shown
    for obeyed in ("\x1b]", "\x07", "\x9b", "\u202e", "\u202c", "\x1b[31mgnp"):
        assert obeyed not in text
    assert "[red]" in text or "[/red]" not in text  # as it is, where it fits


def edited(path: Path, **changed: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def test_names_of_a_run_folder_reach_a_terminal_cleaned(folder: Path) -> None:
    tables = json.loads((folder / "result.json").read_text())["test"]["classes"]
    tables["by_class"][0]["class"] = OBEYED
    test = json.loads((folder / "result.json").read_text())["test"] | {"classes": tables}
    edited(folder / "result.json", protocol=OBEYED, test=test)
    assert_harmless(in_a_terminal("compare", folder, folder))


def test_errors_about_a_run_folder_reach_a_terminal_cleaned(folder: Path) -> None:
    written = (folder / "run.toml").read_text()
    hidden = json.dumps(OBEYED + "\nmoretta: all is well")
    (folder / "run.toml").write_text(written.replace("[model]\n", f"[model]\n{hidden} = 1\n", 1))
    rows = folder.parent / "rows.csv"
    rows.write_text("age,ward,pressure\n")
    said = in_a_terminal("predict", folder, "--data", rows, "--out", folder.parent / "p.csv")
    assert_harmless(said)
    assert "\nmoretta: all is well" not in said


def test_a_run_from_python_names_its_code_in_clean_text(folder: Path) -> None:
    (folder / "run.toml").unlink()
    made = {"format": 1, "source": f"{OBEYED}:f", "arguments": {}, "base": ".", "rounds": 3, "seed": 0}
    (folder / "model.json").write_text(json.dumps(made))
    rows = folder.parent / "rows.csv"
    rows.write_text("age,ward,pressure\n")
    assert_harmless(in_a_terminal("predict", folder, "--data", rows, "--out", folder.parent / "p.csv"))


def test_a_table_shows_markup_as_it_is_and_keeps_its_own_colours() -> None:
    out = Tty()
    table = Table()
    table.add_column("Class")
    table.add_row("[red]x[/red]\x1b[2J")
    Screen(file=out, force_terminal=True, color_system="standard").print(table, "[bold]", style="red")
    assert "[red]x[/red][2J" in out.getvalue()
    assert "\x1b[31m" in out.getvalue()  # of the style that was asked for


@pytest.mark.parametrize("text", ["Zürich", "µ = 0.5 ± 0.1", "日本語", "a\tb\nc", "\u00a0"])
def test_plain_text_stays(text: str) -> None:
    assert printable(text) == text
