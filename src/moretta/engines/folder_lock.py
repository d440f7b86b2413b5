"""A lock on a folder for one process at a time, by a file in it (filelock) that names the holder.

The system releases the lock when the process ends, however it ends, and the file is removed with the lock. A killed
process's file has no effect, and the next holder replaces it. A fork does not keep its parent's lock.
"""

import errno
import json
import logging
import os
import platform
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from moretta.engines.files import make_folder, read_text, write_atomically
from moretta.errors import ParameterError

LOCK = "held.json"
IN_USE = "{folder} is in use by {holder}; wait until that has ended, end it, or name another folder by --out"
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # errors of a file system without locks
WAIT = 10.0  # seconds for another process to change a file

HOLDER = "job.json"  # names the job that holds a site's folder
LEAVE = 5.0  # seconds for an earlier job of this site to end on request
SILENT = 30.0  # seconds without a request from a job's server after which another job may replace it
STEP = 0.05  # seconds between two tries to lock

log = logging.getLogger("moretta")
_turns = list[FileLock]()  # a lock is released with its object, and a job's lock must last as long as its process


@contextmanager
def held(folder: Path, name: str = LOCK, refusal: str = IN_USE) -> Iterator[None]:
    """Hold a folder within a `with` block; make the folder if it is missing.

    Args:
        folder: The folder.
        name: Of the lock's file in it.
        refusal: The error's sentence, with {folder} and {holder}.

    Raises:
        ParameterError: Another process or thread holds the folder.
    """
    make_folder(folder)
    path, owner = folder / name, os.getpid()
    lock = _locked(path, refusal)
    mine = {"pid": owner, "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    try:
        path.write_text(json.dumps(mine))
        yield
    finally:
        if os.getpid() == owner:
            if _record(path) == mine:  # only while held: another may have made the folder again
                path.unlink()
            lock.release()


def refuse_held(folder: Path) -> None:
    """Raise `moretta.errors.ParameterError` if a process holds a folder; change nothing."""
    if (folder / LOCK).is_file():
        with suppress(OSError):  # a file of another user, whose folder cannot be written either
            _locked(folder / LOCK, IN_USE).release()


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let one process at a time read and change a file, whose folder is made if it is missing; others wait.

    Raises:
        ParameterError: Another process takes longer than `WAIT`.
    """
    make_folder(path.parent, 0o700)
    lock = _locked(
        path.with_name(f".{path.name}.lock"), "a file of {folder} is being changed by {holder}; try again", WAIT
    )
    try:
        yield
    finally:
        lock.release()


def _locked(path: Path, refusal: str, wait: float = 0.0) -> FileLock:
    """Return an acquired lock. Raises ParameterError with the sentence if another holds it for `wait` seconds."""
    lock = _lock(path)
    try:
        _acquire(lock, wait)
    except Timeout:
        raise ParameterError(refusal.format(folder=path.parent, holder=_holder(path))) from None
    return lock


def _acquire(lock: FileLock, wait: float) -> None:
    """Acquire a lock, or continue without where the file system has none. Raises Timeout."""
    try:
        lock.acquire(timeout=wait, poll_interval=STEP)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        log.warning("this file system has no locks (%s), so nobody keeps two runs out of one folder", error.strerror)


def _lock(path: Path) -> FileLock:
    mode = 0o644 if path.name == LOCK else 0o600
    return FileLock(path, mode=mode, thread_local=False, fallback_to_soft=False)  # its thread may end before the lock


def _record(path: Path) -> object:
    try:
        return json.loads(read_text(path.parent, path.name))
    except (OSError, ValueError, ParameterError):
        return None


def _holder(path: Path) -> str:
    match _record(path):
        case {"pid": int(pid), "host": str(host), "since": str(since)}:
            return f"process {pid} on {host!r:.80}, since {since:.40}"
    return "another process"  # it holds the lock, and has not written its name yet


def take_turn(folder: Path, job: str, made: float) -> Path:
    """Hold a site's folder while this process lives; return the file to `touch` while its server sends requests.

    A process of the same run that a dead server left behind is ended, and so is one whose server is silent.

    Args:
        job: The digest of the shared settings.
        made: The time at which the job was made, in seconds since 1970.

    Raises:
        ParameterError: Another job uses the folder.
    """
    make_folder(folder, 0o700)
    lock = _lock(folder / "job.lock")
    for how in (None, signal.SIGTERM, signal.SIGKILL):
        if how is not None:
            _end_job(folder, job, made, how)
        with suppress(Timeout):
            _acquire(lock, 0 if how is None else LEAVE)
            _turns.append(lock)
            me = {"pid": os.getpid(), "job": job, "made": made}
            write_atomically(folder / HOLDER, json.dumps(me).encode(), mode=0o600)
            return folder / HOLDER
    raise ParameterError(f"{folder} is held by another job of this site that does not end; end that process")


def _end_job(folder: Path, job: str, made: float, how: signal.Signals) -> None:
    path, lock = folder / HOLDER, folder / "job.lock"
    try:
        holder, silent = json.loads(path.read_text()), time.time() - path.stat().st_mtime
        pid, theirs = int(holder["pid"]), float(holder["made"])
    except (OSError, ValueError, KeyError, TypeError):
        return  # it holds the lock, and has not written its name
    if silent < SILENT and (holder["job"] != job or theirs >= made):
        raise ParameterError(
            f"{folder} is in use by another job of this site (process {pid}), which still hears from its server: "
            "another run, or a second join of the site; wait for its end, or set another out in each silo.toml"
        )
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if any(Path(file.path) == lock.resolve() for file in process.open_files()):  # else the id is reused
            process.send_signal(how)
