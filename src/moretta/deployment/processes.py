"""The parent processes of kits and their children: start, find again by a mark, and end them."""

import contextlib
import importlib.util
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from moretta.deployment import kits
from moretta.engines.files import write_atomically
from moretta.errors import MissingExtra

MALLOC = {"MALLOC_ARENA_MAX": "4"}  # as in FLARE's start scripts
MARK = "MORETTA_FAMILY"  # in the environment, which only job processes inherit
STEP = 0.05  # seconds between two looks at ending processes


class Parent(subprocess.Popen[bytes]):
    """The process of a kit. family: the mark in its environment and its children's."""

    family: str = ""


def require(extra: str = "flare") -> None:
    """Raise MissingExtra, naming the extra, without FLARE, whose processes would end with a stack trace."""
    if importlib.util.find_spec("nvflare") is None:
        raise MissingExtra(f"this command needs nvflare; install it by: pip install 'moretta[{extra}]'")


def start(kit: Path, log: Path, env: Mapping[str, str] | None = None) -> Parent:
    """Start the server or the site of a kit; its output and its job processes' is appended to `log`.

    The process leads its own session, so that ^C here does not reach it.

    Args:
        env: The environment; None takes this process's own.

    Raises:
        ParameterError: The kit's certificate fails (`kits.check_certificates`), or FLARE is not installed.
    """
    require()
    kits.check_certificates(kit)
    kind = "server" if kits.is_server(kit) else "client"
    kit = kit.resolve()
    words = [sys.executable, "-u", "-m", f"nvflare.private.fed.app.{kind}.{kind}_train", "-m", str(kit)]
    words += ["-s", f"fed_{kind}.json", "--set", "secure_train=true"]
    # The server recognises a returned site by its heartbeat: every 2 seconds, not 10.
    words += [f"uid={kits.name_of(kit)}", "heart_beat_interval=2"] if kind == "client" else []
    words += [f"org={kits.organisation_of(kit)}", "config_folder=config"]
    (kit / "transfer").mkdir(mode=0o700, exist_ok=True)
    family = secrets.token_hex(16)
    with log.open("ab") as sink:
        parent = Parent(
            words,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            cwd=kit,
            env={**MALLOC, **(os.environ if env is None else env), MARK: family},
            start_new_session=True,
        )
    parent.family = family
    return parent


@contextlib.contextmanager
def running(kit: Path, log: Path, remembered: Path) -> Iterator[Parent]:
    """Run the server or the site of a kit, and leave none of its processes behind.

    Args:
        log: As in `start`.
        remembered: The file by which the next command finds the processes, if this one is killed.
    """
    parent = start(kit, log)
    try:
        remember(parent, remembered)
        yield parent
    finally:
        stop(parent)
        remembered.unlink(missing_ok=True)


def stop(parent: Parent, patience: float = 10.0) -> None:
    """End a process of `start` and all its job processes.

    A job process leads its own session and checks once a second whether its parent lives.

    Args:
        patience: Seconds in which they may end after a SIGTERM to the parent, before they are killed.
    """
    if parent.poll() is None:
        parent.terminate()
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and (parent.poll() is None or family_of(parent)):
        time.sleep(STEP)
    _end_marked(parent.family, parent.pid)
    parent.wait()


def remember(parent: Parent, path: Path) -> None:
    """Record a process of `start`, for `end_left_over`."""
    write_atomically(path, json.dumps({"pid": parent.pid, "family": parent.family}).encode(), 0o600)


def end_left_over(path: Path) -> bool:
    """End the process that `remember` recorded and its children; return whether any was still running.

    It is for a process that starts after one that was killed and could not `stop`. The mark in their environment
    identifies the processes, so another process with the same id is left alone. The file is removed afterwards.
    """
    try:
        left = json.loads(path.read_text())
        pid, family = int(left["pid"]), str(left["family"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    there = _marked(family)
    _end_marked(family, pid)
    path.unlink(missing_ok=True)
    return bool(there)


def family_of(parent: Parent) -> list[int]:
    """Return the ids of a parent's running children, direct or not."""
    return [process.pid for process in _marked(parent.family) if process.pid != parent.pid]


def _marked(family: str) -> list[psutil.Process]:
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended, or is another user's
            if process.environ().get(MARK) == family:
                processes.append(process)
    return processes


def _end_marked(family: str, first: int) -> None:
    """Kill a family. first: the parent, killed first because it would start the others again."""
    while family_left := _marked(family):
        for process in [process for process in family_left if process.pid == first] or family_left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(STEP)
