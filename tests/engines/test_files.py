"""Files that are either whole or not there."""

import ast
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import reproduction

import moretta
from moretta.engines.checkpoint import CheckpointId, save_checkpoint
from moretta.engines.files import make_folder, rename, write_atomically


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

    def note(number: int) -> None:
        mode = os.fstat(number).st_mode
        seen.extend([mode] if stat.S_ISREG(mode) else [])  # folders are synced too
        fsync(number)

    monkeypatch.setattr(os, "fsync", note)
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


class Disk:
    """Which entries of folders a power cut would undo: a name lasts once its folder was synced after it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at_risk: list[Path] = []
        self.renames = 0
        for name in ("replace", "rename"):
            monkeypatch.setattr(os, name, self._watched(getattr(os, name)))
        self._mkdir, self._fsync = os.mkdir, os.fsync
        monkeypatch.setattr(os, "mkdir", self._made)
        monkeypatch.setattr(os, "fsync", self._synced)

    def _watched(self, function: Callable[..., None]) -> Callable[..., None]:
        def renamed(old: Path, new: Path, **named: object) -> None:
            function(old, new, **named)
            self.renames += 1
            self.at_risk += [Path(old).parent, Path(new).parent]

        return renamed

    def _made(self, path: Path, *arguments: object, **named: object) -> None:
        self._mkdir(path, *arguments, **named)  # type: ignore[arg-type]
        self.at_risk.append(Path(path).parent)

    def _synced(self, number: int) -> None:
        self._fsync(number)
        held = os.fstat(number)
        self.at_risk = [one for one in self.at_risk if not os.path.samestat(os.stat(one), held)]


def _checkpoint_twice(folder: Path) -> None:
    place = CheckpointId("run", 1, 0, "digest")
    save_checkpoint(folder / "run" / "checkpoint", place, {"server": {"round": 1}})
    save_checkpoint(folder / "run" / "checkpoint", place, {"server": {"round": 1}})  # a resumed run that comes by again


@pytest.mark.parametrize(
    ("write", "renames"),
    [
        (lambda folder: write_atomically(folder / "file", b"data"), 1),
        (lambda folder: reproduction._write(folder / "results.json", {}), 1),
        (_checkpoint_twice, 7),
        (lambda folder: make_folder(folder / "a" / "b" / "c", 0o700), 0),
    ],
)
def test_a_power_cut_takes_back_no_name_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None], renames: int
) -> None:
    disk = Disk(monkeypatch)
    write(tmp_path)
    assert disk.renames == renames
    assert disk.at_risk == []


def test_a_file_that_changes_folders_is_gone_from_the_one_and_in_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    (tmp_path / "from" / "file").write_bytes(b"data")
    disk = Disk(monkeypatch)
    rename(tmp_path / "from" / "file", tmp_path / "to" / "file")
    assert disk.at_risk == []
    assert (tmp_path / "to" / "file").read_bytes() == b"data"


def test_nothing_else_renames_files() -> None:
    """One function renames, so that none forgets the folder: `rename` of `moretta.engines.files`."""
    (package,) = moretta.__path__
    found = []
    for path in sorted(Path(package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            of, name = node.func.value, node.func.attr
            module = isinstance(of, ast.Name) and of.id in ("os", "shutil")
            # A path's `replace` takes one argument; a text's two, and that of a dataclass names its fields.
            a_path = not module and len(node.args) == 1 and not node.keywords and name in ("rename", "replace")
            if a_path or (module and name in ("rename", "renames", "replace", "move")):
                found.append(f"{path.relative_to(package)}:{node.lineno}")
    assert [one for one in found if not one.startswith("engines/files.py")] == []
