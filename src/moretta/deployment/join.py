"""`moretta join`: patch a startup kit, wait for the server, start FLARE's client, and say what becomes of it."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from moretta.config import silo_file
from moretta.config.silo_file import SiloFile
from moretta.deployment import checks, kits, processes, provisioning, server_connection
from moretta.deployment.checks import writable
from moretta.deployment.server_key import SILO
from moretta.engines.files import new_lines, write_atomically
from moretta.engines.folder_lock import held
from moretta.errors import ParameterError, RunFailed
from moretta.protocols.registry import check_edge_packages

LOOK = 0.2
AGAIN = 2.0  # seconds between two tries to reach a server that is not there yet
OFTEN, WITHIN = 4, 150.0  # so many connections in so many seconds: somebody else takes them over; FLARE starts by two
LOCK = "join.lock"
KIT_HELD = "this kit has joined already, by {holder}; a site joins once, so leave one of them"
OUT_HELD = (
    "the folder of silo.toml is in use by another join, {holder}; leave one of them, or give each its own [silo] out, "
    "as two federations need"
)
TWICE = (
    "the server drops this site's connection again and again, as it does where the same kit has joined on another "
    "machine too; leave one of them"
)
Say = Callable[[str], None]


def join(kit: Path, silo: Path, say: Say, *, edge: bool = False, memory_limit_mib: float | None = None) -> Path:
    """Take part in runs by a startup kit until the server ends them; return the folder of what the site has now.

    A server that is not there yet is waited for. Raises `moretta.errors.ParameterError` for what cannot work: a kit, a
    silo.toml, keys or rows that are wrong or do not fit, a clock outside of the certificate's dates, a server of
    another federation; and `moretta.errors.RunFailed` where FLARE's client ends by itself.
    """
    file = silo_file.load(silo)
    edge = edge or file.silo.edge
    processes.require("edge-flare" if edge else "flare")
    if edge:
        check_edge_packages()
    _check(kit, silo, file)
    settings: dict[str, object] = {"silo": os.path.abspath(silo)}
    settings |= {"edge": True} if edge else {}
    settings |= {} if memory_limit_mib is None else {"memory-limit-mib": memory_limit_mib}
    file.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    with held(kit / "local", LOCK, KIT_HELD), held(file.out, LOCK, OUT_HELD):
        return _join(kit, file.out, settings, say)


def _check(kit: Path, silo: Path, file: SiloFile) -> None:
    """Look, before anything is started, at what `moretta doctor` looks at."""
    checks.belongs(kit, silo, file)
    kits.check_certificates(kit)
    checks.identified(file)
    checks.pinned(kit, file)
    checks.openable(file)
    writable(file.out)


def _join(kit: Path, out: Path, settings: Mapping[str, object], say: Say) -> Path:
    if kits.for_trials(kit):
        say("this kit is for trials: its private key was made by the server (else: moretta join --request)")
    remembered = kit / "local" / "join.json"
    if processes.end_left_over(remembered):
        say("ended what an earlier join of this kit, which was killed, had left running")
    for change in provisioning.patch(kit):
        say(change)
    write_atomically(kit / "local" / SILO, (json.dumps(settings, indent=2) + "\n").encode())
    _wait_for_server(kit, say)
    host, port = kits.address_of(kit)
    say(f"joining {host}:{port} as {kits.name_of(kit)}; ends when the server ends it, or by ctrl-c")
    logs = out / "log.txt", out / "flare.log"
    site, flare = (new_lines(log, log.stat().st_size if log.exists() else 0) for log in logs)  # before it starts
    with processes.running(kit, out / "flare.log", remembered) as client:
        _watch(client, kit, site, flare, say)
    if client.returncode != 0:
        raise RunFailed(
            f"FLARE's client ended with exit code {client.returncode}; {out / 'flare.log'} says why, and joining again "
            "takes part in the next run"
        )
    return out


def _wait_for_server(kit: Path, say: Say) -> None:
    """Return once the server and this kit take each other's certificate; a server that is not there yet may come."""
    said, refused = "", False
    while True:
        try:
            server_connection.reach_by_grpc(kit)
            return
        except RunFailed as error:
            refused = False
            if str(error) != said:
                said = str(error)
                host, port = kits.address_of(kit)
                say(f"waiting for {host}:{port}, until it is there or ctrl-c: {said}")
            time.sleep(AGAIN)
        except ParameterError:
            if refused:
                raise
            refused = True  # one that is just ending hangs up too: only the second time in a row is it meant
            time.sleep(LOOK)


def _watch(
    client: processes.Parent, kit: Path, site: Iterator[list[bytes]], flare: Iterator[list[bytes]], say: Say
) -> None:
    """Say what the site's log says until the client ends, and where somebody else has joined by the same kit.

    site, flare: what comes to their logs.
    """
    host, port = kits.address_of(kit)
    again = f"=> {host}:{port}] is created: PID: {client.pid}".encode()  # what FLARE logs when this process connects
    connected: deque[float] = deque(maxlen=OFTEN)
    warned, why = False, TWICE
    ended = False
    while not ended:
        ended = client.poll() is not None  # before its last words are read
        for line in next(site):
            say(line.decode(errors="replace"))
        if found := [line for line in next(flare) if again in line]:
            connected.extend(time.monotonic() for _ in found)
            try:
                server_connection.reach(kit, LOOK)
                why = TWICE
            except RunFailed:  # the server is away, which explains it
                connected.clear()
            except ParameterError as error:
                why = str(error)
        if not warned and len(connected) == OFTEN and connected[-1] - connected[0] < WITHIN:
            warned = True
            say(why)
        if not ended:
            time.sleep(LOOK)
