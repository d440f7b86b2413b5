"""A folder is one process's at a time, and whoever is refused is told whose."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from moretta.engines.folder_lock import HOLDER as JOB
from moretta.engines.folder_lock import LOCK, NO_LOCKS, alone, held, refuse_held, take_turn
from moretta.errors import ParameterError

HOLDER = """
import os, sys, time
from pathlib import Path
from moretta.engines.folder_lock import held
with held(Path(sys.argv[1])):
    if len(sys.argv) > 2:
        ours, theirs = os.pipe()
        if not os.fork():
            os.write(theirs, b".")
            time.sleep(30)
        os.read(ours, 1)  # the child runs, and has closed what it is not to keep
    print("held", flush=True)
    time.sleep(30)
"""


@contextmanager
def another(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a folder."""
    command = [sys.executable, "-c", HOLDER, str(folder), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_a_folder_is_held_and_given_back(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with held(folder):
        said = json.loads((folder / LOCK).read_text())
        assert (said["pid"], said["host"]) == (os.getpid(), platform.node())
        with pytest.raises(ParameterError), held(folder):
            pass
        with pytest.raises(ParameterError):
            refuse_held(folder)
    assert list(folder.iterdir()) == []
    refuse_held(folder)
    with held(folder):
        pass


def test_whoever_is_refused_is_told_by_whom_and_since_when(tmp_path: Path) -> None:
    with another(tmp_path) as process:
        for ask in (lambda: held(tmp_path).__enter__(), lambda: refuse_held(tmp_path)):
            with pytest.raises(ParameterError) as refused:
                ask()
            assert f"{tmp_path} is in use by process {process.pid} on {platform.node()!r}, since 20" in str(
                refused.value
            )
            assert str(refused.value).endswith("wait until that has ended, end it, or name another folder by --out")


@pytest.mark.parametrize("more", [(), ("fork",)])
def test_a_killed_process_holds_nothing_even_where_a_child_outlives_it(tmp_path: Path, more: tuple[str, ...]) -> None:
    with another(tmp_path, *more) as process:
        process.kill()
        process.wait()
        assert (tmp_path / LOCK).exists()  # of the dead
        refuse_held(tmp_path)
        with held(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("written", ["", "no json", "[]", '{"pid": "x"}'])
def test_a_holder_that_says_nothing_is_another_process(tmp_path: Path, written: str) -> None:
    with held(tmp_path):
        (tmp_path / LOCK).write_text(written)
        with pytest.raises(ParameterError, match="in use by another process; wait"):
            refuse_held(tmp_path)


def test_of_many_at_once_one_has_it(tmp_path: Path) -> None:
    inside, most, turns = 0, 0, 0
    count = threading.Lock()

    def take() -> None:
        nonlocal inside, most, turns
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                with held(tmp_path):
                    with count:
                        inside, turns = inside + 1, turns + 1
                        most = max(most, inside)
                    time.sleep(0.001)
                    with count:
                        inside -= 1
                    return
            except ParameterError:
                time.sleep(0.0005)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, turns) == (1, 8)


@pytest.mark.parametrize("number", NO_LOCKS)
def test_where_a_file_system_has_no_locks_a_folder_is_used_without(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A site's job ended with an OSError there, so the site joined and never took part."""

    def refused(file: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    with held(tmp_path / "run"), alone(tmp_path / "site" / "agreed.json"):
        assert json.loads(take_turn(tmp_path / "site", "job", 1.0).read_text())["pid"] == os.getpid()
    assert (tmp_path / "site" / JOB).exists()
    assert caplog.text.count("this file system has no locks") == 3
