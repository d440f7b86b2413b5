"""Who may use a folder: one `moretta join` at a time, and one job of a site at a time."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from moretta.engines.files import write_atomically
from moretta.errors import ParameterError

HOLDER = "job.json"  # which job has a site's folder
LEAVE = 5.0  # seconds that an earlier job of this site has to end when it is asked to
SILENT = 30.0  # seconds without a word from a job's server after which another may take its place
STEP = 0.05  # seconds between two tries to lock

_held: list[FileLock] = []  # a lock is released with its object, and a job's is to last as long as its process


@contextmanager
def only_one(folder: Path, what: str) -> Iterator[None]:
    """Hold a folder, so that no other join has it. what: the error where one has, with {} for the holder."""
    path = folder / "join.lock"
    lock = _lock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        holder = path.read_text(errors="replace").strip()
        raise ParameterError(what.format(f"process {holder or 'unknown'}")) from None
    try:
        path.write_text(str(os.getpid()))
        yield
    finally:
        lock.release()


def take_turn(folder: Path, job: str, made: float) -> Path:
    """Hold a site's folder for as long as this process lives; return the file to `touch` while its server speaks.

    job: the digest of the shared settings; made: the moment at which the job was made. What still holds the folder is
    ended if it is an older process of the same run, as a server that died leaves one, or if its server is silent.
    Raises `moretta.errors.ParameterError` where another run is played in it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "job.lock"
    lock = _lock(path)
    for how in (None, signal.SIGTERM, signal.SIGKILL):
        if how is not None:
            _end_holder(path, job, made, how)
        with suppress(Timeout):
            lock.acquire(timeout=0 if how is None else LEAVE, poll_interval=STEP)
            _held.append(lock)
            me = {"pid": os.getpid(), "job": job, "made": made}
            write_atomically(folder / HOLDER, json.dumps(me).encode(), mode=0o600)
            return folder / HOLDER
    raise ParameterError(f"{folder} is held by another job of this site that does not end; end that process")


def _lock(path: Path) -> FileLock:
    return FileLock(path, mode=0o600, thread_local=False)  # the thread that takes it may end before the process


def _end_holder(lock: Path, job: str, made: float, how: signal.Signals) -> None:
    path = lock.with_name(HOLDER)
    try:
        holder, silent = json.loads(path.read_text()), time.time() - path.stat().st_mtime
        pid, theirs = int(holder["pid"]), float(holder["made"])
    except (OSError, ValueError, KeyError, TypeError):
        return  # it has the lock, and has not said yet who it is
    if silent < SILENT and (holder["job"] != job or theirs >= made):
        raise ParameterError(
            f"{lock.parent} is in use by another job of this site (process {pid}), which its server still speaks to: "
            "another run, or the site has joined twice; wait for its end, or give each silo.toml an out of its own"
        )
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if any(Path(file.path) == lock.resolve() for file in process.open_files()):  # else the number is another's now
            process.send_signal(how)
