"""`moretta new`: a project that runs, learns and is tested; and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import call

from moretta.config import run_files, silo_file
from moretta.run.assembly import federation_of
from moretta.run.preview import opening_of

FILES = [
    "README.md", "data/east.csv", "data/north.csv", "data/south.csv", "model.py", "run.toml", "schema.toml",
    "silo.toml", "test_project.py",
]  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    done = call("new", "ward", "--json")
    assert (done.code, done.err) == (0, "")
    assert done.told == {"format": 1, "folder": "ward", "files": FILES}
    return tmp_path / "ward"


def test_its_files_are_read_and_fit_each_other(project: Path) -> None:
    run_file = run_files.load(project / "run.toml", ["run.rounds=1"])
    assert run_file.run.name == "ward"
    federation = federation_of(run_file, None)
    federation.rehearse(1)
    assert "270 to train on" in next(iter(opening_of(federation)))
    site = silo_file.load(project / "silo.toml")
    assert site.silo.models == (run_file.model.source,)
    assert (project / site.data.source).exists()


def test_it_trains_in_two_rounds_of_every_kind(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    for protocol in ("fedavg", "fedprox", "pbpfl"):
        text = (project / "run.toml").read_text().replace('"fedavg" ', f'"{protocol}" ')
        if protocol == "pbpfl":
            text = text.replace("local-epochs = 2\n", "")
        (project / "mine.toml").write_text(text)
        done = call("train", "mine.toml", "--set", "run.rounds=2", "--out", f"runs/{protocol}", "--json")
        assert done.code == 0, done.err
        assert done.told["rounds"] == 2


def test_its_own_test_passes(project: Path) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "."]
    done = subprocess.run(words, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "1 passed" in done.stdout


def test_a_person_is_told_what_to_do_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = call("new", "deep/ward")
    assert done.code == 0
    assert "cd deep/ward; moretta train run.toml" in done.out


def test_it_is_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert call("new", tmp_path / name / "ward").code == 0
    for file in FILES:
        assert (tmp_path / "a" / "ward" / file).read_bytes() == (tmp_path / "b" / "ward" / file).read_bytes()


@pytest.mark.parametrize("there", ["a file", "a folder with a file"])
def test_what_is_there_is_left_alone(there: str, tmp_path: Path) -> None:
    place = tmp_path / "ward"
    if there == "a file":
        place.write_text("mine")
    else:
        place.mkdir()
        (place / "mine.txt").write_text("mine")
    done = call("new", place)
    assert done.code == 2
    assert "exists already and is not empty" in done.sentence
    assert [path.name for path in tmp_path.rglob("*")] in (["ward"], ["ward", "mine.txt"])


@pytest.mark.parametrize("name", ["ward", ".", "linked"])
def test_an_empty_folder_is_filled(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``moretta new .`` failed with "Device or resource busy" of a temporary folder."""
    (tmp_path / "ward").mkdir()
    (tmp_path / "linked").symlink_to("ward")
    before = (tmp_path / "ward").stat().st_ino
    monkeypatch.chdir(tmp_path / "ward" if name == "." else tmp_path)
    assert call("new", name).code == 0
    assert sorted(str(path.relative_to(tmp_path / "ward")) for path in (tmp_path / "ward").rglob("*.*")) == FILES
    assert ((tmp_path / "ward").stat().st_ino, len(list(tmp_path.iterdir()))) == (before, 2)  # a shell may be in it


@pytest.mark.parametrize("name", ["two words", "-x=y", "ü", "x" * 65, "'"])
def test_a_name_that_no_run_can_have_is_refused(name: str, tmp_path: Path) -> None:
    done = call("new", "--", tmp_path / name)
    assert done.code == 2
    assert "letters, digits" in done.sentence
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_shell_of_its_readme_plays(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    lines = [line.partition("#")[0].split() for line in (project / "README.md").read_text().splitlines()]
    commands = [words[1:] for words in lines if words[:1] == ["moretta"]]
    assert [words[0] for words in commands] == ["look", "train", "report", "audit", "predict"]
    for words in commands:
        more = ("--set", "run.record-views=true", "--set", "run.rounds=4") if words[0] == "train" else ()
        assert call(*words, *more).code == 0, words
    assert (project / "predictions.csv").exists()
