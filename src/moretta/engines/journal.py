"""Journals of actions that a role may do once: each is recorded, synced, and only then done.

A role that is killed, or returns to an earlier checkpoint, still has every record. A half record does not count,
because its action was never done. On a full disk nothing is recorded, so nothing is done. `GrowingFile` reads such a
file from a mark on while another process appends to it.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from moretta.engines.files import make_folder, open_file, sync
from moretta.errors import ParameterError, PeerError, RunFailed
from moretta.secure_aggregation.one_sum import HelpedSums

BOOT = Path("/proc/sys/kernel/random/boot_id")
UNKNOWN = "unknown"  # as on macOS; a loss of power would remain unknown, so each line of a site is forced to the disk


class Journal:
    """An append-only file of lines with one writing process at a time.

    Args:
        path: Of the file.
        content: The content of the journal and the consequence of its loss, for the error about a lost file.
        remedy: What the operator does about a lost file. Both are empty if a lost file is no error.
        forces: Whether lines are forced to the disk. One machine with all roles need not force them: a loss of power
            could reveal only data of that machine.
        mode: Of the file.
    """

    def __init__(
        self, path: Path, content: str = "", remedy: str = "", *, forces: bool = True, mode: int = 0o600
    ) -> None:
        self._path, self._content, self._remedy, self._forces, self._mode = path, content, remedy, forces, mode
        self._exists = False  # since the last check: a file that disappears later is not made again

    def open(self, *, begun: bool) -> list[str]:
        """Return the lines of the file, which is made unless it should exist.

        Args:
            begun: Whether there is evidence of earlier use, such as a checkpoint beside the journal.

        Raises:
            ParameterError: The file is missing in spite of the evidence.
        """
        if begun and not self._path.exists():
            raise ParameterError(f"{self._path} is missing: expected {self._content}; {self._remedy}")
        if not begun:
            self.append()
        return self.lines()

    def lines(self) -> list[str]:
        """Return the lines, none without a file, and remove a half line at the end of the file."""
        self._exists = self._path.exists()
        if not self._exists:
            return []
        descriptor = os.open(self._path, os.O_RDWR)
        try:
            _remove_half_line(descriptor)
        finally:
            os.close(descriptor)
        return self._path.read_bytes().decode(errors="replace").splitlines()

    def append(self, *lines: str, force: bool = True) -> None:
        """Append lines, which survive a kill of the process once this returns. The first call makes the file and its
        folder.

        Args:
            lines: Without their ends; all of them are kept, or none.
            force: Whether the disk must have them, and all earlier ones, before this returns.

        Raises:
            RunFailed: The lines cannot be written whole; the file is unchanged.
        """
        try:
            self._append("".join(f"{line}\n" for line in lines).encode(), force and self._forces)
        except OSError as error:
            first = self._forces or self._content
            undone = ", and what it should record first was not done" if first else ""
            raise RunFailed(
                f"{self._path} cannot be written ({error.strerror}){undone}; make room on that disk, or grant read and "
                "write permission"
            ) from error

    def _append(self, data: bytes, force: bool) -> None:
        makes = not self._exists and not self._path.exists()
        if makes:
            make_folder(self._path.parent, 0o700)
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | (os.O_CREAT if makes else 0), self._mode)
        try:
            before = _remove_half_line(descriptor)
            try:
                _write_all(descriptor, data)
                if force:
                    os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, before)
                raise
        finally:
            os.close(descriptor)
        if makes and self._forces:
            sync(self._path.parent)
        self._exists = True


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes: a nearly full disk accepts some of them, and fails only at the next call."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _remove_half_line(descriptor: int) -> int:
    """Remove a half line at the end; return the number of bytes left."""
    size = os.fstat(descriptor).st_size
    if not size or os.pread(descriptor, 1, size - 1) == b"\n":
        return size
    whole = os.pread(descriptor, size, 0).rfind(b"\n") + 1
    os.ftruncate(descriptor, whole)
    return whole


@dataclass(frozen=True)
class HelpedFile:
    """The file of sums that a silo has helped to open. One process at a time runs the silo and opens the file.

    It travels as JSON to the silo's own process.

    Attributes:
        forces: As in `Journal`.
        over_runs, apart, repeats, fewest: As in `HelpedSums`.
        begun: Whether the file must exist.
    """

    path: str
    forces: bool = False
    over_runs: bool = False
    apart: int = 1
    repeats: bool = False
    fewest: int = 1
    begun: bool = False

    def begin(self, *, begun: bool) -> "HelpedFile":
        """Make the file unless it should exist; return it as one that must exist from now on.

        Args:
            begun: Whether there is evidence of earlier runs.

        Raises:
            ParameterError: As `Journal.open`.
        """
        self._journal.open(begun=begun)
        return replace(self, begun=True)

    @property
    def half_done(self) -> Path:
        """The file of the silo's work within a round, beside this one."""
        return Path(self.path).with_suffix(".half-done")

    @property
    def _journal(self) -> Journal:
        return Journal(
            Path(self.path),
            "the record of which sums this silo has helped to open, without which it could help to open another sum "
            "of the same rows",
            "restore a copy, or make an empty file of that name if this silo has helped to open no sum so far",
            forces=self.forces,
        )

    @cached_property
    def opened(self) -> HelpedSums:
        """Return the recorded sums, which record further ones in the file. Raises ParameterError if damaged or lost."""
        journal, powered = self._journal, powered_since() if self.forces else ""
        try:
            return HelpedSums(
                journal.open(begun=True) if self.begun else journal.lines(),
                lambda line, force: journal.append(line, force=force or powered == UNKNOWN),
                powered=powered,
                over_runs=self.over_runs,
                apart=self.apart,
                repeats=self.repeats,
                fewest=self.fewest,
            )
        except (OSError, PeerError) as error:
            raise ParameterError(
                f"{self.path}, the record of the sums that this silo has helped to open, is damaged ({error}); "
                "restore a copy, or take part in new runs alone, in another folder"
            ) from None


def powered_since() -> str:
    """Return a name for the time since this machine was started; `UNKNOWN` where it cannot be read."""
    try:
        return BOOT.read_text().strip() or UNKNOWN
    except OSError:
        return UNKNOWN


CHUNK = 1 << 20  # bytes that are read at a time; a longer line is skipped
BEFORE = 256  # bytes before a mark that identify its place

_MARK = re.compile(r"(\d{1,15})-([0-9a-f]{16})")


class Rewritten(Exception):  # not an error: the reader begins again
    """The content before a mark has changed."""


class GrowingFile:
    """Reads a growing file's new whole lines. The file may appear later.

    Args:
        mark: The position to begin at, from the property `mark`; empty begins at the file's start.
    """

    def __init__(self, path: Path, mark: str = "") -> None:
        self._path = path
        match = _MARK.fullmatch(mark)
        self._offset, self._digest = (int(match[1]), match[2]) if match else (0, _digest(b""))

    @property
    def mark(self) -> str:
        """The position of the last line read, and a digest of what precedes it."""
        return f"{self._offset}-{self._digest}"

    def restart(self) -> None:
        """Return to the file's beginning."""
        self._offset, self._digest = 0, _digest(b"")

    def read(self) -> Iterator[list[bytes]]:
        """Yield lists of new whole lines; the mark is then behind them. Raises Rewritten."""
        try:
            stream = open_file(self._path.parent, self._path.name)
        except (FileNotFoundError, ParameterError):
            if self._offset:
                raise Rewritten from None
            return
        with stream:  # the same file, even if another replaces it
            if self._digest_before(stream) != self._digest:
                raise Rewritten
            while True:
                stream.seek(self._offset)
                data = stream.read(CHUNK)
                whole = data.rfind(b"\n") + 1 or (len(data) if len(data) == CHUNK else 0)
                if not whole:
                    return
                self._offset += whole
                self._digest = self._digest_before(stream)
                yield data[:whole].splitlines()

    def _digest_before(self, stream: BinaryIO) -> str:
        start = max(0, self._offset - BEFORE)
        stream.seek(start)
        return _digest(stream.read(self._offset - start))


def last_lines(path: Path) -> list[bytes]:
    """Return the whole lines in the last `CHUNK` bytes of a file; none without a file."""
    try:
        with open_file(path.parent, path.name) as stream:
            stream.seek(max(0, stream.seek(0, 2) - CHUNK))
            data = stream.read()
    except (FileNotFoundError, ParameterError):
        return []
    return data[: data.rfind(b"\n") + 1].splitlines()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
