"""Lines that are on disk before what they announce is done, so that a process that is killed has forgotten none."""

from __future__ import annotations

import os
from pathlib import Path

from moretta.engines.files import write_atomically
from moretta.errors import ParameterError


class WriteAhead:
    """A file of lines, to which only more come."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self) -> None:
        """Make the file, empty."""
        write_atomically(self._path, b"", mode=0o600)
        descriptor = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # or a power cut may leave no file of that name
        finally:
            os.close(descriptor)

    def lines(self) -> list[str]:
        """Return the lines, and take off what a crash left of one: what it was to announce was never done.

        Raises `moretta.errors.ParameterError` where there is no file.
        """
        try:
            data = self._path.read_bytes()
        except OSError as error:
            raise ParameterError(
                f"{self._path}: expected the record of what this run has released, without which its epsilon cannot be "
                f"stated; restore it, or begin another run ({error})"
            ) from None
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            write_atomically(self._path, whole, mode=0o600)
        return whole.decode(errors="replace").splitlines()

    def append(self, line: str) -> None:
        """Add a line, and return when it is on disk."""
        with self._path.open("ab") as stream:
            stream.write(f"{line}\n".encode())
            stream.flush()
            os.fsync(stream.fileno())
