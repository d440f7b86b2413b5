"""One process at a time writes into a run's folder: a lock on a file of it that says who has it.

The system takes the lock back when the process ends, however it ends, so none is ever left over. The file goes with the
lock; one that a killed process left says nothing, and the next holder takes it.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moretta.engines.files import make_folder, read_text
from moretta.errors import ParameterError

LOCK = "held.json"
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # what a link leads to would be emptied

log = logging.getLogger("moretta")


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made if need be, for as long as a `with` block lasts.

    Raises `moretta.errors.ParameterError`, which names process, host and time, where another has it, or another thread.
    """
    make_folder(folder)
    path = folder / LOCK
    descriptor = _taken(path)
    _OPEN.add(descriptor)
    owner = os.getpid()
    try:
        os.ftruncate(descriptor, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        os.write(descriptor, json.dumps({"pid": os.getpid(), "host": platform.node(), "since": since}).encode())
        yield
    finally:
        if os.getpid() == owner:
            if _is(path, descriptor):  # while it is held, so that it is nobody else's
                path.unlink()
            _OPEN.discard(descriptor)
            os.close(descriptor)


def refuse_held(folder: Path) -> None:
    """Raise `moretta.errors.ParameterError` where somebody holds a folder; it stays as it is."""
    path = folder / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | _NO_LINK)
    except OSError:
        return  # nobody has it, or whoever has is another user, whose files cannot be written either
    try:
        if not _locks(descriptor):
            raise _refusal(path)
    finally:
        os.close(descriptor)


_OPEN = set[int]()  # of this process; a forked child closes them, as it would keep the lock when its parent is gone


def _close_in_child() -> None:
    while _OPEN:
        os.close(_OPEN.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _taken(path: Path) -> int:
    """Return the descriptor of a file that is locked and has this path."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o644)
        try:
            if not _locks(descriptor):
                raise _refusal(path)
            if _is(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has removed it meanwhile


def _is(path: Path, descriptor: int) -> bool:
    """Return whether a path still names the file that is open: it may be gone, or another by now."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _locks(descriptor: int) -> bool:
    """Lock a file; return whether it was free. Where files cannot be locked, it is taken for free."""
    if os.name != "posix":
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning("this file system has no locks (%s), so nobody keeps two runs out of one folder", error.strerror)
    return True


def _refusal(path: Path) -> ParameterError:
    try:
        holder = json.loads(read_text(path.parent, path.name))
        pid, host, since = int(holder["pid"]), str(holder["host"]), str(holder["since"])
        who = f"process {pid} on {host!r:.80}, since {since:.40}"
    except (OSError, ValueError, KeyError, TypeError, ParameterError):
        who = "another process"  # which has the lock, and has not said yet who it is
    return ParameterError(
        f"{path.parent} is in use by {who}; wait until that has ended, end it, or name another folder by --out"
    )
