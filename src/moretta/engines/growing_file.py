"""A file that grows by lines, read from a mark on by whoever follows it, and known again where it was rewritten."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from moretta.engines.files import open_file
from moretta.errors import ParameterError

CHUNK = 1 << 20  # bytes that are read at a time; a longer line is skipped
BEFORE = 256  # bytes before a mark by which its place is known again

_MARK = re.compile(r"(\d{1,15})-([0-9a-f]{16})")


class Rewritten(Exception):  # no error: whoever follows begins anew
    """Raised where a file no longer has before a mark what it had."""


class GrowingFile:
    """Reads the whole lines of a file, time after time; the file may appear later.

    mark: as the property gives it; anything else stands for the beginning.
    """

    def __init__(self, path: Path, mark: str = "") -> None:
        self._path = path
        found = _MARK.fullmatch(mark)
        self._offset, self._digest = (int(found[1]), found[2]) if found else (0, _digest(b""))

    @property
    def mark(self) -> str:
        """The place up to which all was read, and a digest of what stands before it."""
        return f"{self._offset}-{self._digest}"

    def restart(self) -> None:
        """Go back to the file's beginning."""
        self._offset, self._digest = 0, _digest(b"")

    def read(self) -> Iterator[list[bytes]]:
        """Yield lists of whole lines that are new; the mark then stands behind them. Raises Rewritten."""
        try:
            stream = open_file(self._path.parent, self._path.name)
        except (FileNotFoundError, ParameterError):
            if self._offset:
                raise Rewritten from None
            return
        with stream:  # one file from here on, also where another takes its name
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
    """Return the whole lines at the end of a file, as far as 64 KiB hold them; none where there is no such file."""
    try:
        with open_file(path.parent, path.name) as stream:
            stream.seek(max(0, stream.seek(0, 2) - CHUNK // 16))
            data = stream.read()
    except (FileNotFoundError, ParameterError):
        return []
    return data[: data.rfind(b"\n") + 1].splitlines()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
