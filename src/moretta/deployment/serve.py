"""`moretta serve`: makes kits, runs FLARE's server, submits the job, and follows it to the run's end.

<out>          the run folder, as `moretta train` leaves one
<out>-kits/    startup kits: one a site, for trials, to be handed over; the server's; the administrator's; and in no
               kit identity.key, by which the server signs what it sends. Those of `moretta kit new` have none of sites
<out>-serve/   the job, the server's log, the process id of the server
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moretta.config.run_files import RunFile
from moretta.deployment import (
    job,
    kits,
    processes,
    provisioning,
    server_connection,
    server_key,
    shared_settings,
)
from moretta.deployment.server_connection import Administrator, logged_in
from moretta.deployment.server_key import identity_of
from moretta.engines.checkpoint import rounds_kept
from moretta.engines.files import new_lines
from moretta.engines.folder_lock import held
from moretta.errors import MorettaError, ParameterError, RunFailed
from moretta.secure_aggregation.identity import KEY_FILE, Identity, Roster, public_line

LOOK = 0.1  # seconds between two looks at the history
START = 120.0  # seconds in which FLARE's server is to answer, and a job is to begin
SILENT = 3.0  # seconds without any process of the job after which it has died
ENDING = 30.0  # seconds that a job has to end in, once the run has
TRIES = 3  # times that a job which died is begun again from its checkpoint
GATHER = 120.0  # seconds in which sites that are connected are to have loaded their data

Say = Callable[[str], None]
Progress = Callable[[int, int, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Places:
    """Where `serve` keeps what belongs to a run."""

    out: Path
    kits: Path

    @property
    def work(self) -> Path:
        """The folder of the job and the server's log."""
        return self.out.with_name(f"{self.out.name}-serve")

    @property
    def status(self) -> Path:
        """The file in which the server's job says how far it is."""
        return self.work / "status.json"


def serve(
    run_file: RunFile,
    places: Places,
    host: str,
    port: int,
    wait: float,
    say: Say,
    progress: Progress,
    *,
    resume: bool = False,
) -> None:
    """Play a run over FLARE, from kits to the result in the run folder.

    host, port: where sites reach this machine. wait: seconds that sites may take to connect. Raises
    `moretta.errors.ParameterError` for what cannot work and `moretta.errors.RunFailed` for a run that cannot go on.
    """
    processes.require()
    job.check(run_file)
    shared_settings.server_side(run_file, places.out).rehearse(run_file.run.rounds, run_file.run.seed)
    if places.out.exists() and any(places.out.iterdir()) and not resume:
        raise ParameterError(
            f"{places.out} exists and is not empty; go on with that run by --resume, or name another folder by --out"
        )
    places.work.mkdir(mode=0o700, parents=True, exist_ok=True)
    with held(places.work):  # else a second `serve` would end the first one's server as a left-over
        _serve(run_file, places, host, port, wait, say, progress, resume)


def _serve(
    run_file: RunFile,
    places: Places,
    host: str,
    port: int,
    wait: float,
    say: Say,
    progress: Progress,
    resume: bool,
) -> None:
    processes.end_left_over(places.work / "server.json")
    names = job.site_names(run_file)
    kit = _kits(run_file, places, host, port, names, say)
    with processes.running(kit.server, places.work / "server.log", places.work / "server.json") as server:
        with _logged_in(kit.admin, places.work, server) as administrator:
            _wait_for_sites(administrator, names, run_file, wait, say, server)
            number = _submit(run_file, places, kit, administrator, resume=resume)
        _play(run_file, places, kit, server, say, progress, number)
        _shut_down(kit.admin, say)


def _kits(run_file: RunFile, places: Places, host: str, port: int, names: Sequence[str], say: Say) -> kits.Kits:
    """Make the kits, or find those that were made, and tell what is to be done with them."""
    made, keyless = not places.kits.exists(), not (places.kits / KEY_FILE).exists()
    kit = provisioning.provision(places.kits, host, port, names)
    server_connection.check_port(port)
    provisioning.patch(kit.server)
    identity = _key(kit.server / "local", run_file)
    if made:
        say(
            f"startup kits are in {places.kits}: hand each site its own, {', '.join(names)}, by a way you trust; they "
            "are for trials, as their private keys were made here (else: moretta kit new, and moretta join --request)"
        )
    elif provisioning.keys_at_sites(places.kits):
        if unsigned := [name for name in names if not (places.kits / f"{name}.reply").exists()]:
            say(
                f"no certificate is signed for {', '.join(unsigned)} yet: moretta kit sign REQUEST --kits {places.kits}"
            )
    elif keyless:
        line = public_line(identity.public_key)
        say(
            f"made {places.kits / KEY_FILE}, by which the server signs from now on; kits that were handed over before "
            f"lack it, so have each site run: moretta kit patch KIT --server-key '{line}'"
        )
    return kit


def _key(local: Path, run_file: RunFile) -> Identity:
    """Return the server's key. Raises `moretta.errors.ParameterError` where sites would not take it."""
    path, identity = run_file.secure_aggregation.roster, identity_of(local)
    server_key.check_listed(identity, None if path is None else Roster.load(run_file.resolve(path)))
    return identity


def _shut_down(admin: Path, say: Say) -> None:
    """End the sites too. FLARE ends nobody whose job has not ended, and that takes it some seconds."""
    until = time.monotonic() + ENDING
    while True:
        try:
            with logged_in(admin) as administrator:
                administrator.shut_down()
            return
        except MorettaError as error:
            if time.monotonic() > until:
                say(f"the sites were not told that the run has ended: {error}")
                return
            time.sleep(1.0)


def _play(
    run_file: RunFile,
    places: Places,
    kit: kits.Kits,
    server: processes.Parent,
    say: Say,
    progress: Progress,
    number: str,
) -> None:
    """Follow the job; where its process dies, begin it again from its checkpoint. number: of the first in FLARE."""
    history = _History(places.out / "history.jsonl", run_file.run.rounds, progress)
    for attempt in range(TRIES + 1):
        if attempt > 0:
            with logged_in(kit.admin) as administrator:
                number = _submit(run_file, places, kit, administrator, resume=True)
        try:
            ended = _follow(places, server, history, say)
        except BaseException:
            with suppress(MorettaError), logged_in(kit.admin) as administrator:
                administrator.abort(number)
            raise
        if ended is not None:
            if ended["state"] == "failed":
                kind = ParameterError if ended.get("code") == 2 else RunFailed
                raise kind(str(ended["sentence"]))
            return
        if not rounds_kept(places.out / "checkpoint"):
            break
        say("the server's job died; it begins again from its last checkpoint")
    raise RunFailed(
        f"the server's job died without a word; {places.work / 'server.log'} may say why, and --resume goes on from "
        "its last checkpoint"
    )


def _submit(run_file: RunFile, places: Places, kit: kits.Kits, administrator: Administrator, *, resume: bool) -> str:
    """Hand the run to the server as a job; return the job's id."""
    places.status.unlink(missing_ok=True)
    arguments: dict[str, str | bool | float] = {
        "out": str(places.out.absolute()),
        "resume": resume,
        "wait": GATHER,
        "status": str(places.status.absolute()),
    }
    job.write_job(run_file, places.work / "job", identity_of(kit.server / "local"), **arguments)
    return administrator.submit(places.work / "job")


def _follow(places: Places, server: processes.Parent, history: _History, say: Say) -> Mapping[str, Any] | None:
    """Report rounds until the job says how it ended; return that, or None where its process died without a word."""
    seen = began = looked = time.monotonic()
    said: Mapping[str, Any] | None = None
    while True:
        state = _read(places.status)  # before the rounds, so that none is missed
        if state is not None and state != said:
            said = state
            if state["state"] == "playing":
                history.begin(int(state["after"]))
            elif state["state"] == "waiting":
                say(str(state["sentence"]))
            else:
                history.report()
                return state
        history.report()
        if server.poll() is not None:
            raise RunFailed(
                f"FLARE's server ended with exit code {server.returncode}; {places.work / 'server.log'} says why, and "
                "--resume goes on from the last checkpoint"
            )
        now = time.monotonic()
        if now > looked + 1 and processes.family_of(server):
            seen = looked = now
        elif now > looked + 1 and now - seen > (SILENT if seen > began else START):
            return None
        time.sleep(LOOK)


def _read(path: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return None


class _History:
    """Reports rounds as the history gets them, once the job has said from which on it plays."""

    def __init__(self, path: Path, rounds: int, progress: Progress) -> None:
        self._path, self._rounds, self._progress = path, rounds, progress
        self._after, self._lines = 0, iter(list[list[bytes]]())

    def begin(self, after: int) -> None:
        """Report rounds after this one: by now the history has forgotten what will be played again."""
        self._after, self._lines = after, new_lines(self._path, 0)

    def report(self) -> None:
        """Report what is new."""
        for text in next(self._lines, []):
            with suppress(ValueError):
                line = json.loads(text)
                if line["round"] > self._after:
                    self._after = line["round"]
                    self._progress(line["round"], self._rounds, line)


def _wait_for_sites(
    administrator: Administrator,
    names: list[str],
    run_file: RunFile,
    wait: float,
    say: Say,
    server: processes.Parent,
) -> None:
    """Wait until all sites are connected; after `wait` go on without the rest, if they are enough.

    A site that comes later takes no part.
    """
    until, told_of = time.monotonic() + wait, None
    while True:
        if server.poll() is not None:
            raise RunFailed(f"FLARE's server ended with exit code {server.returncode}, before any site had come")
        there = administrator.connected()
        missing = [name for name in names if name not in there]
        if not missing:
            say(f"all {len(names)} sites are connected")
            return
        left = until - time.monotonic()
        if left <= 0:
            break
        if missing != told_of:
            say(f"waiting up to {left:.0f} s more for {', '.join(missing)} (moretta join KIT --silo silo.toml)")
            told_of = missing
        time.sleep(0.5)
    here, least = len(names) - len(missing), run_file.secure_aggregation.least
    if here < least:
        raise RunFailed(
            f"{here} of {len(names)} sites connected within {wait:g} s, at least {least} are needed; missing are "
            f"{', '.join(missing)}: have them run moretta join, and look with moretta doctor what keeps them"
        )
    say(f"going on without {', '.join(missing)}, which did not connect within {wait:g} s")


@contextmanager
def _logged_in(admin: Path, work: Path, server: processes.Parent) -> Iterator[Administrator]:
    """Log in at FLARE's server as soon as it is there."""
    until, stack = time.monotonic() + START, ExitStack()
    with stack:
        while True:
            try:
                administrator = stack.enter_context(logged_in(admin, wait=2.0))
                administrator.connected()
                break
            except MorettaError:
                stack.close()
                if server.poll() is not None or time.monotonic() > until:
                    raise RunFailed(f"FLARE's server did not start; {work / 'server.log'} says why") from None
                time.sleep(0.2)
        yield administrator
