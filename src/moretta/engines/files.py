"""Files that are either whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def new_lines(path: Path, position: int) -> Iterator[list[bytes]]:
    """Yield, each time, the whole lines that have come to a file since, from a position in bytes on."""
    while True:
        data = b""
        with suppress(OSError), path.open("rb") as stream:
            stream.seek(position)
            data = stream.read()
        whole = data.rfind(b"\n") + 1
        position += whole
        yield data[:whole].splitlines()


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file so that a reader, or a crash, sees all of it or none. mode: its permissions from the first byte."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # left by a crash, with permissions of its own
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Have a folder's entries outlast a loss of power, such as a file that was just renamed into it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
