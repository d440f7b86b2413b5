"""Each remedy that a refusal of a table names is played: after it the command works."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from test_cli import call

from moretta.data.tables import files
from moretta.engines.run_folder import RunFolder

ROWS = "age,ward,ill\n50,north,no\n61,south,yes\n70,north,no\n48,south,yes\n50,north,no\n61,south,yes\n"


@dataclass(frozen=True)
class Refusal:
    """A table that `moretta schema init` refuses or asks about, its sentence, and what it says to do.

    options: what is added to the command. change: what is done to the table. answer: what is put into schema.toml.
    """

    table: bytes
    said: str
    options: tuple[str, ...] = ()
    change: Callable[[bytes], bytes] = field(default=lambda table: table)
    answer: tuple[str, str] = ("", "")


def lines(text: str, encoding: str = "utf-8") -> bytes:
    return text.encode(encoding)


REFUSALS = {
    "pipe": Refusal(lines(ROWS.replace(",", "|")), '--separator "|"', ("--separator", "|")),
    "blanks": Refusal(lines(ROWS.replace(",", "  ")), '--separator " "', ("--separator", " ")),
    "utf-16 without a mark": Refusal(lines(ROWS, "utf-16-le"), '"utf-16-le"', ("--file-encoding", "utf-16-le")),
    "windows": Refusal(lines(ROWS.replace("north", "n€"), "cp1252"), '"cp1252"', ("--file-encoding", "cp1252")),
    "latin": Refusal(lines(ROWS.replace("north", "nö"), "latin-1"), '"latin-1"', ("--file-encoding", "latin-1")),
    "N/A as the example says": Refusal(lines(ROWS.replace("50", "N/A")), 'absent = ["n/a"]', ("--absent", "n/a")),
    "N/A as the answer says": Refusal(
        lines(ROWS.replace("50", "N/A")), "something else", answer=('"decide"  # perhaps "number"', '"number"')
    ),
    "blanks in the target": Refusal(
        lines(ROWS.replace("70,north,no", "70,north,")),
        "remove those rows",
        change=lambda table: table.replace(b"70,north,\n", b""),
        answer=('"decide"  # perhaps "target"', '"target"'),
    ),
    "decimal commas": Refusal(
        lines(ROWS.replace(",", ";").replace("50", "50,5")), 'decimal = ","', ("--decimal", ",")
    ),
    "below": Refusal(lines(ROWS.replace("50", "<50")), 'censored = "half"', answer=('"decide"  # perhaps ', "")),
    "a row first": Refusal(
        lines("north,no\nsouth,yes\nnorth,no\n"), "add a line of names", change=lambda table: b"ward,ill\n" + table
    ),
    "names like cells": Refusal(lines("ward,no\nno,yes\nward,no\n"), "--header", ("--header",)),
    "no name": Refusal(
        lines(ROWS.replace("ward", "")), "for each column", change=lambda table: table.replace(b"age,,", b"age,ward,")
    ),
    "a name twice": Refusal(
        lines(ROWS.replace("ward", "age")),
        "for each column",
        change=lambda table: table.replace(b"age,age", b"age,ward"),
    ),
    "an open quote": Refusal(
        lines(ROWS.replace("south", '"south', 1)),
        "close the cell",
        change=lambda table: table.replace(b'"south', b'"south"'),
    ),
    "a short line": Refusal(
        lines(ROWS.replace("61,south,yes", "61,south", 1)),
        "line 3",
        change=lambda table: table.replace(b"south\n", b"south,yes\n"),
    ),
    "thousands": Refusal(
        lines(ROWS.replace(",", ";").replace("50", "1,250")), 'thousands = ","', answer=('"decide"  # perhaps ', "")
    ),
    "percent": Refusal(lines(ROWS.replace("50", "50%")), 'unit = "%"', answer=('"decide"  # perhaps ', "")),
    "999": Refusal(lines(ROWS.replace("50", "999")), "absent = [999.0]", answer=('"decide"  # perhaps ', "")),
    "spellings": Refusal(lines(ROWS.replace("yes", "YES", 1)), "spellings", answer=('"decide"  # perhaps ', "")),
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refused_table_is_read_after_its_remedy(here: Path, kind: str) -> None:
    refusal = REFUSALS[kind]
    (here / "t.csv").write_bytes(refusal.table)
    done = call("schema", "init", "t.csv")
    assert refusal.said in " ".join((done.out + done.err).split())
    (here / "schema.toml").unlink(missing_ok=True)
    before = call("schema", "init", "t.csv", *refusal.options)
    if refusal.options:
        assert before.code == 0, before.err
    (here / "schema.toml").unlink(missing_ok=True)
    if refusal.answer == ("", ""):
        (here / "t.csv").write_bytes(refusal.change(refusal.table))
    done = call("schema", "init", "t.csv", *refusal.options)
    assert done.code == 0, done.err
    (here / "t.csv").write_bytes(refusal.change(refusal.table))
    text = (here / "schema.toml").read_text()
    assert ("decide" in text) == bool(refusal.answer[0])
    (here / "schema.toml").write_text(text.replace(*refusal.answer) if refusal.answer[0] else text)
    options = [one for one in refusal.options if one != "--header"]
    done = call("schema", "check", "t.csv", "--schema", "schema.toml", *options)
    assert done.code == 0, done.err


def test_utf_16_that_says_so_is_read(here: Path) -> None:
    (here / "t.csv").write_bytes(ROWS.replace(",", "\t").replace("\n", "\r\n").encode("utf-16"))
    assert call("schema", "init", "t.csv").code == 0
    done = call("schema", "check", "t.csv", "--schema", "schema.toml", "--file-encoding", "latin-1")
    assert done.code == 0, done.err


def test_a_file_of_another_owner_is_no_broken_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "t.csv").write_text(ROWS)
    path = files.Path("t.csv")

    class Locked(type(path)):  # type: ignore[misc]  # root may read every file
        def open(self, *given: object, **more: object) -> object:
            raise PermissionError(13, "Permission denied")

    with pytest.raises(files.ParameterError, match=r"no permission to read .*; ask its owner .* or read a copy"):
        files.read_bytes(Locked("t.csv"))


RUN = """
[run]
rounds = 2
[data]
source = "t.csv"
schema = "schema.toml"
silos = 2
[model]
source = "mlp"
hidden = [2]
[protocol]
name = "fedsgd"
loss = "cross-entropy"
"""
SCHEMA = """
[columns.age]
kind = "number"
range = [0, 120]
[columns.ward]
kind = "category"
categories = ["north", "south"]
[columns.ill]
kind = "target"
classes = ["no", "yes"]
"""


def test_rows_that_do_not_fit_are_left_out_of_predictions_and_named(here: Path) -> None:
    (here / "t.csv").write_text(ROWS + "".join(ROWS.splitlines(True)[1:]) * 4)
    for schema, unseen in (("refused", ""), ("blank", 'blanks = "category"\nunseen = "blank"\n')):
        (here / "schema.toml").write_text(SCHEMA.replace('["north", "south"]\n', f'["north", "south"]\n{unseen}'))
        (here / "run.toml").write_text(RUN)
        done = call("train", "run.toml", "--out", schema)
        assert done.code == 0, done.err
    (here / "new.csv").write_text("age,ward\n50,north\n61,zqeast\n1000,south\n,south\n70,south\n")
    done = call("predict", "refused", "--data", "new.csv", "--out", "p.csv")
    assert done.code == 3
    said = done.out.splitlines()
    assert said[0].startswith("2 rows, 2 outputs each")
    assert [line.partition(": column")[0] for line in said[1:]] == [f"left out: row {k}" for k in (2, 3, 4)]
    assert "zqeast" not in done.out + done.err
    lines = (here / "p.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["row", "1", "5"]
    assert call("predict", "refused", "--data", "new.csv", "--out", "p.npy", "--json").code == 3
    (here / "fit.csv").write_text("age,ward\n50,north\n70,south\n")
    assert call("predict", "refused", "--data", "fit.csv", "--out", "q.npy").code == 0
    whole, fit = files.np.load("p.npy"), files.np.load("q.npy")
    files.np.testing.assert_array_equal(files.np.isnan(whole).any(1), [False, True, True, True, False])
    files.np.testing.assert_array_equal(whole[[0, 4]], fit)
    done = call("predict", "blank", "--data", "new.csv", "--out", "p.csv")
    assert done.code == 3
    assert "left out: row 2" not in done.out  # the schema says what becomes of an unseen word
    (here / "none.csv").write_text("age,ward\n50,zqeast\n61,zqeast\n")
    done = call("predict", "refused", "--data", "none.csv", "--out", "none.npy")
    assert done.code == 2
    assert not (here / "none.npy").exists()


def test_training_asks_before_round_one_and_goes_on_once_it_is_answered(here: Path) -> None:
    rows = "".join(f"{3 * k},{40 + k % 9},{('no', 'yes')[k % 2]}\n" for k in range(60))
    (here / "t.csv").write_text(f"index,age,ill\n{rows}")
    (here / "run.toml").write_text(RUN.replace('schema = "schema.toml"\n', ""))
    done = call("train", "run.toml", "--out", "mine")
    assert done.code == 2
    assert "column 'index' looks like ids" in " ".join(done.err.split())
    assert not (here / "mine").exists()
    assert call("schema", "init", "t.csv").code == 0
    text = (here / "schema.toml").read_text().replace('"decide"  # perhaps "id"', '"id"')
    (here / "schema.toml").write_text(text)
    assert call("train", "run.toml", "--out", "mine", "--set", 'data.schema="schema.toml"').code == 0
    assert call("train", "run.toml", "--out", "other", "--set", 'data.id-column="index"').code == 0


def test_a_run_without_a_test_part_trains_and_says_nothing_of_how_good_it_is(here: Path) -> None:
    (here / "t.csv").write_text(ROWS)
    (here / "schema.toml").write_text(SCHEMA)
    (here / "run.toml").write_text(RUN)
    done = call("train", "run.toml", "--out", "mine", "--set", "data.test-fraction=0", "--json")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert set(record["test"]) == {"per_silo"}  # what the silos' own training rows come to
    assert "no test rows were given, so nothing says how good the model is" in record["warnings"]
    history = (here / "mine" / "history.jsonl").read_text()
    assert "test_" not in history
    for command in (("report", "mine", "--out", "page.html"), ("predict", "mine", "--data", "t.csv", "--out", "p.csv")):
        assert call(*command).code == 0
    assert "There were no test rows" in (here / "page.html").read_text()
    done = call("look", "run.toml", "--set", "data.test-fraction=0", "--json", "--withhold", "0")
    assert json.loads(done.out)["rows"] == {"training": 6}
    done = call("compare", "run.toml", "--protocols", "fedsgd,local", "--set", "data.test-fraction=0", "--out", "c")
    assert done.code == 0, done.err
    files.np.savez(
        "parts.npz",
        x_train=files.np.array([[1.0], [2.0]] * 3),
        y_train=[0, 1] * 3,
        x_test=files.np.ones((0, 1)),
        y_test=[],
    )
    (here / "run.toml").write_text(RUN.replace('schema = "schema.toml"\n', "").replace("t.csv", "parts.npz"))
    done = call("train", "run.toml", "--out", "empty")
    assert "parts.npz: the test part has no rows; add some, or set test-fraction = 0" in " ".join(done.err.split())
    assert call("train", "run.toml", "--out", "empty", "--set", "data.test-fraction=0").code == 0


def test_test_rows_may_be_a_table_of_their_own(here: Path) -> None:
    (here / "t.csv").write_text(ROWS + "".join(ROWS.splitlines(True)[1:]) * 4)
    (here / "test.csv").write_text("ward,ill,age\nnorth,no,50\nsouth,yes,61\nsouth,yes,48\n")
    (here / "schema.toml").write_text(SCHEMA)
    (here / "run.toml").write_text(RUN)
    files = '{ north = "t.csv", south = "t.csv" }'
    rows = {"one": ("data.test-fraction=0",), "files": ("data.source=files", "-data.silos", f"data.files={files}")}
    for name, more in rows.items():
        sets = [word for one in ('data.test="test.csv"', *more) if one[0] != "-" for word in ("--set", one)]
        done = call("train", "run.toml", "--out", name, *sets, "--json")
        assert done.code == 0, done.err
        assert json.loads((here / name / "result.json").read_text())["test"]["rows"] == 3
    done = call("train", "run.toml", "--set", 'data.test="test.csv"', "--set", "data.test-fraction=0.2", "--out", "x")
    assert done.code == 2
    assert "set test-fraction = 0" in " ".join(done.err.split())
    (here / "test.csv").write_text("ward,ill,age\neast,no,50\n")
    done = call("train", "run.toml", "--set", 'data.test="test.csv"', "--out", "x")
    assert "[data] test: test.csv: column 'ward' has a word" in " ".join(done.err.split())


@contextmanager
def held_to_permissions() -> Iterator[None]:
    """Have permissions hold for root too: without the right to override them (CAP_DAC_OVERRIDE)."""
    libc, header, rights = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, rights) == 0
    before, rights[0] = rights[0], rights[0] & ~2
    assert libc.capset(header, rights) == 0
    try:
        yield
    finally:
        rights[0] = before
        assert libc.capset(header, rights) == 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table, its schema and a run that has a checkpoint."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "t.csv").write_text(ROWS + "".join(ROWS.splitlines(True)[1:]) * 4)
    (folder / "schema.toml").write_text(SCHEMA)
    (folder / "run.toml").write_text(RUN.replace("rounds = 2", "rounds = 2\ncheckpoint-every = 1"))
    assert call("train", folder / "run.toml", "--out", folder / "mine").code == 0
    return folder


WRITERS: dict[str, tuple[str, ...]] = {
    "a proposal": ("schema", "init", "t.csv", "--out", "shut/s.toml"),
    "a look": ("look", "run.toml", "--out", "shut/look.html"),
    "a run": ("train", "run.toml", "--out", "shut/runs/mine"),
    "a run in it": ("train", "run.toml", "--out", "shut"),
    "predictions": ("predict", "mine", "--data", "t.csv", "--out", "shut/p.csv"),
    "a graph": ("export", "mine", "--out", "shut/m.safetensors"),
    "a report": ("report", "mine", "--out", "shut/r.html"),
    "a comparison": ("compare", "run.toml", "--protocols", "fedsgd,local", "--out", "shut/c"),
    "a project": ("new", "shut/project"),
    "keys": ("keys", "new", "--out", "shut/keys"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="needs what Linux calls capabilities")
@pytest.mark.parametrize("kind", WRITERS)
def test_a_place_that_may_not_be_written_to_is_named_and_another_works(
    kind: str, finished: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished, here, dirs_exist_ok=True)
    (here / "shut").mkdir(0o500)
    with held_to_permissions():
        done = call(*WRITERS[kind])
    assert done.code == 2, done.err
    place = WRITERS[kind][-1]
    said = done.err.splitlines()[-1]
    assert place in said
    assert "name another" in said
    assert "partial" not in said
    assert not list((here / "shut").iterdir())
    monkeypatch.setattr(os, "mkdir", on_a_read_only_disk(os.mkdir))
    monkeypatch.setattr(os, "open", on_a_read_only_disk(os.open))
    done = call(*WRITERS[kind])
    assert done.code == 2, done.err
    assert place in done.err.splitlines()[-1]
    assert re.search("name (a path on )?another", done.err.splitlines()[-1])
    with held_to_permissions():
        assert call(*(word.replace("shut", "open") for word in prepared(WRITERS[kind]))).code == 0


def prepared(words: tuple[str, ...]) -> tuple[str, ...]:
    Path("open").mkdir()
    return words


def on_a_read_only_disk(call: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse what would write below `shut`, as a disk that is mounted for reading does."""

    def called(path: Any, *given: Any, **more: Any) -> Any:
        writes = call is os_mkdir or (given and given[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if writes and "shut" in Path(os.fsdecode(path)).parts:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return call(path, *given, **more)

    return called


os_mkdir = os.mkdir


@pytest.mark.skipif(sys.platform != "linux", reason="needs what Linux calls capabilities")
def test_a_run_folder_that_may_not_be_written_to_is_gone_on_with_once_it_may(finished: Path, here: Path) -> None:
    shutil.copytree(finished, here, dirs_exist_ok=True)
    words = ("train", "run.toml", "--out", "mine", "--resume", "--set", "run.rounds=3")
    (here / "mine").chmod(0o500)
    with held_to_permissions():
        for command, remedy in ((words, "change its permissions"), (("report", "mine"), "name another file by --out")):
            done = call(*command)
            assert done.code == 2, done.err
            assert remedy in done.err.splitlines()[-1]
        (here / "mine").chmod(0o700)
        assert call(*words).code == 0


def test_a_disk_that_becomes_read_only_while_training_is_one_sentence(
    here: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished, here, dirs_exist_ok=True)
    append, lines = RunFolder.append, list[Any]()

    def shut(self: RunFolder, line: Any) -> None:
        lines.append(line)
        if len(lines) == 2:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), "x")
        append(self, line)

    monkeypatch.setattr(RunFolder, "append", shut)
    words = ("train", "run.toml", "--out", "other", "--set", "run.rounds=3")
    done = call(*words)
    assert done.code == 1
    assert "other: Read-only file system; have the disk writable again; the last checkpoint" in done.err
    assert call(*words, "--resume").code == 0
