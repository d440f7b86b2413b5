"""Files that are either whole or not there."""

import os
import stat
from pathlib import Path

import pytest

from moretta.engines.files import write_atomically


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"one")
    assert path.read_bytes() == b"one"
    write_atomically(path, b"another, longer")
    assert path.read_bytes() == b"another, longer"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_the_permissions_hold_from_the_first_byte(tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (seen.append(os.fstat(number).st_mode), fsync(number)))
    umask = os.umask(0o022)
    try:
        write_atomically(tmp_path / "file", b"secret", mode)
    finally:
        os.umask(umask)
    assert [stat.S_IMODE(found) for found in seen] == [mode]
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_what_a_crash_left_behind_lends_nothing_to_the_next_file(tmp_path: Path) -> None:
    left = tmp_path / ".file.partial"
    left.write_bytes(b"left by a crash, and longer than what follows")
    left.chmod(0o644)
    write_atomically(tmp_path / "file", b"secret", 0o600)
    assert (tmp_path / "file").read_bytes() == b"secret"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


@pytest.mark.parametrize("broken", ["fsync", "open"])
def test_a_crash_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def crash(*arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, broken, crash)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
