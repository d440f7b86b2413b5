"""`moretta join`: patch a startup kit, start FLARE's client beneath, and say what becomes of it."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from moretta.deployment import silo_file
from moretta.engines.files import write_atomically
from moretta.engines.flare import kits, processes
from moretta.errors import ParameterError, RunFailed
from moretta.secure_aggregation.identity import Roster

LOOK = 0.2
Say = Callable[[str], None]


def join(kit: Path, silo: Path, say: Say, *, edge: bool = False, memory_limit_mib: float | None = None) -> Path:
    """Take part in runs by a startup kit until the server ends them; return the folder of what the site has now.

    Raises `moretta.errors.ParameterError` for a kit and a silo.toml that do not fit, and
    `moretta.errors.RunFailed` where FLARE's client ends by itself.
    """
    file = silo_file.load(silo)
    if kits.is_server(kit):
        raise ParameterError(f"{kit} is the server's kit; a site joins by its own, which moretta serve made beside it")
    name = file.silo.name
    if file.silo.roster is not None:
        name = Roster.load(file.base / file.silo.roster).engine_name(name)
    if name != kits.name_of(kit):
        raise ParameterError(
            f"{silo} is of `{name}`, and {kit} is the kit of `{kits.name_of(kit)}`; use the kit of the same name"
        )
    for change in kits.patch(kit, silo):
        say(change)
    settings: dict[str, object] = {"silo": str(silo.absolute())}
    if edge:
        settings["edge"] = True
    if memory_limit_mib is not None:
        settings["memory-limit-mib"] = memory_limit_mib
    write_atomically(kit / "local" / "moretta.json", (json.dumps(settings, indent=2) + "\n").encode())
    out = file.out
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _only_one(kit):
        host, port = kits.address_of(kit)
        say(f"joining {host}:{port} as {kits.name_of(kit)}; ends when the server ends it, or by ctrl-c")
        client = processes.start(kit, out / "flare.log")
        try:
            _watch(client, out, say)
        finally:
            processes.stop(client)
    if client.returncode != 0:
        raise RunFailed(
            f"FLARE's client ended with exit code {client.returncode}; {out / 'flare.log'} says why, and joining again "
            "takes part in the next run"
        )
    return out


def _watch(client: processes.Parent, out: Path, say: Say) -> None:
    """Say what the site's log says until the client ends."""
    log, position = out / "log.txt", _size(out / "log.txt")
    while client.poll() is None:
        time.sleep(LOOK)
        with suppress(OSError), log.open("rb") as stream:
            stream.seek(position)
            data = stream.read()
            whole = data.rfind(b"\n") + 1
            position += whole
            for line in data[:whole].decode(errors="replace").splitlines():
                say(line)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class _only_one:  # used as a with statement
    """Hold a kit, so that a site does not join twice by it."""

    def __init__(self, kit: Path) -> None:
        self._kit = kit
        self._descriptor = -1

    def __enter__(self) -> None:
        self._descriptor = os.open(self._kit / "local" / "join.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 20, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise ParameterError(
                f"{self._kit} has joined already, by process {holder or 'unknown'}; a site joins once"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)
