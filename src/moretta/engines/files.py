"""Files that are either complete or absent, also after a power cut.

A file's bytes are on the disk before it gets its name, and then its folder is synced too. Without the second step, a
machine that loses power may restart with the old file of a role's memory, or without one.

A file at a user's path may be the user's own: `check_ending` and `check_replaced` run before any write.

A run folder may come from anyone. All its files are read by `read_file` or `open_file`, which accept plain files alone.
A link may lead out of the folder, and reading a pipe may never end.
"""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from moretta.contract.memory import check_memory
from moretta.contract.wording import either
from moretta.errors import ParameterError

_MOST_BYTES = {".toml": 1 << 22, ".json": 1 << 26, ".jsonl": 1 << 28, ".txt": 1 << 28, ".sha256": 1 << 10}
"""Bytes of a text in a run folder, by its ending; models and views may be as large as the free memory."""
_NO_LINK_NO_WAIT = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # Windows has neither
_LINK = "it is a link, which may lead out of the folder; put the file itself there"


def read_file(folder: Path, name: str, what: str = "a file of a run") -> bytes:
    """Read a file of a run folder.

    Args:
        folder: The run folder, perhaps behind a link; below it links are refused.
        name: The path of the file below the folder.
        what: The file's content, for an error.

    Raises:
        FileNotFoundError: The file is absent.
        ParameterError: It is no plain file, below a link, too large for its kind, or unreadable.
    """
    with open_file(folder, name, what) as stream:
        size, most = os.fstat(stream.fileno()).st_size, _MOST_BYTES.get(Path(name).suffix)
        if most is None:
            check_memory(2 * size, f"{folder / name} takes")  # its bytes, and arrays of them
        elif size > most:
            raise ParameterError(
                f"{folder / name}: expected {what} of at most {most:,} bytes, got {size:,}; restore the file"
            )
        return stream.read(size)


def read_present(folder: Path, name: str, what: str) -> bytes:
    """Read a required file of a run folder. Raises ParameterError as `read_file`, and for an absent one."""
    try:
        return read_file(folder, name, what)
    except FileNotFoundError as error:
        raise ParameterError(f"{folder / name}: expected {what}; {error.strerror}") from None


def read_text(folder: Path, name: str) -> str:
    """Read a text in UTF-8 from a run folder. Raises as `read_file`, and ParameterError for other bytes."""
    try:
        return read_file(folder, name).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ParameterError(f"{folder / name}: expected text in UTF-8; restore the file") from None


def open_file(folder: Path, name: str, what: str = "a file of a run") -> BinaryIO:
    """Open a plain file of a run folder, of any size. Raises as `read_file`."""
    path = folder / name
    try:
        for above in path.relative_to(folder).parents[-2::-1]:
            if (folder / above).is_symlink():
                raise ParameterError(f"{folder / above} is a link, which may lead out of the run folder; remove it")
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | _NO_LINK_NO_WAIT)
    except FileNotFoundError:
        raise
    except OSError as error:
        why = _LINK if path.is_symlink() else error.strerror
        raise ParameterError(f"{path}: expected {what}; {why}") from None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise ParameterError(f"{path}: expected {what}; it is not a plain file")


def check_plain(folder: Path) -> None:
    """Raise ParameterError for a link, pipe or device anywhere in a run folder, before anything is written there."""
    for above, folders, files in os.walk(folder):
        for path in (Path(above, name) for name in (*folders, *files)):
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                kind = "a link" if stat.S_ISLNK(mode) else "not a plain file"
                raise ParameterError(f"{path} is {kind}; a run folder may hold plain files and folders only; remove it")


def is_used(folder: Path, but: str = "") -> bool:
    """Return whether a path holds more than `but`, a file, or is not a folder."""
    return any(path.name != but for path in folder.iterdir()) if folder.is_dir() else folder.exists()


def check_unused(folder: Path, remedy: str, but: str = "") -> None:
    """Raise ParameterError for a folder that `is_used`. remedy: ends the sentence."""
    if is_used(folder, but):
        raise ParameterError(f"{folder} exists and is not empty{remedy}")


def new_lines(path: Path, position: int) -> Iterator[list[bytes]]:
    """Yield, at each step, the whole lines that were added to a file, from a position in bytes on."""
    while True:
        data = b""
        with suppress(OSError), path.open("rb") as stream:
            stream.seek(position)
            data = stream.read()
        whole = data.rfind(b"\n") + 1
        position += whole
        yield data[:whole].splitlines()


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder over any at the new path; return when the disk has the new name."""
    old.replace(new)
    for folder in dict.fromkeys((new.parent, old.parent)):
        sync(folder)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder and its parents, which survive a power cut. mode: of the last one."""
    if not path.is_dir():
        if not path.parent.exists():
            make_folder(path.parent)
        path.mkdir(mode, exist_ok=True)  # also below a file, so that the error names the requested folder
        sync(path.parent)


def sync(folder: Path) -> None:
    """Force the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_ending(path: Path, *endings: str) -> None:
    """Raise `moretta.errors.ParameterError` unless a file's name has one of the endings, such as ``.html``."""
    if path.suffix.lower() not in endings:
        got = path.suffix or "no ending"
        raise ParameterError(f"{path}: expected a file that ends in {either(endings)}, got {got}; name another file")


def check_replaced(out: Path, what: str, is_one: Callable[[Path], bool]) -> None:
    """Raise ParameterError if a file exists that a new one may not replace; an empty one may go.

    Args:
        what: The name of replaceable files, for the error.
        is_one: Returns whether the file is replaceable.
    """
    if out.is_dir():
        raise ParameterError(f"{out}: expected the name of a file, got a folder; name another file")
    try:
        kept = out.exists() and out.stat().st_size and not is_one(out)
    except OSError as error:
        raise ParameterError(f"{out} exists already and cannot be read: {error.strerror}; name another file") from None
    if kept:
        raise ParameterError(f"{out} exists already, and only {what} may be replaced; name another file")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Make an error of the system name this path, which the user chose, and not a temporary one beside it."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def write_atomically(path: Path, data: bytes | Sequence[bytes | memoryview], mode: int = 0o644) -> None:
    """Write a file, so that a reader or a crash sees all of it or none. mode: permissions from the first byte."""
    if not path.parent.is_dir():
        raise ParameterError(
            f"{path} cannot be written: the folder {path.parent} does not exist; make it, or name another"
        )
    partial = path.with_name(f".{path.name}.partial")
    with naming(path):
        partial.unlink(missing_ok=True)  # left by a crash, with permissions of its own
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.writelines([data] if isinstance(data, bytes) else data)
                stream.flush()
                os.fsync(stream.fileno())
            rename(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
