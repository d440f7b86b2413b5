"""Lines that are on disk before what they announce is done, so that a killed process has forgotten none."""

from __future__ import annotations

from pathlib import Path

from moretta.engines.files import write_atomically
from moretta.engines.kept_lines import KeptLines
from moretta.errors import ParameterError


class WriteAhead:
    """A file of lines, to which only more come."""

    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, KeptLines(path, forces=True)

    def begin(self) -> None:
        """Make the file, empty."""
        write_atomically(self._path, b"", mode=0o600)

    def lines(self) -> list[str]:
        """Return the lines, and take off what a crash left of one: what it was to announce was never done.

        Raises `moretta.errors.ParameterError` where there is no file.
        """
        try:
            self._path.stat()
            return self._lines.read()
        except OSError as error:
            raise ParameterError(
                f"{self._path}: expected the record of what this run has released, without which its epsilon cannot be "
                f"stated; restore it, or begin another run ({error})"
            ) from None

    def append(self, line: str) -> None:
        """Add a line, and return when it is on disk."""
        self._lines.keep(line, True)
