"""`moretta serve`: makes kits, runs FLARE's server, submits the job, and follows it to the run's end.

<out>          the run folder, as `moretta train` leaves one
<out>-kits/    startup kits: one a site, for trials, to be handed over; the server's; the administrator's; and in no
               kit identity.key, by which the server signs what it sends. Those of `moretta kit new` have none of sites
<out>-serve/   the job, the server's log, the process id of the server
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moretta.config.run_files import RunFile
from moretta.deployment import job, kits, processes, provisioning, server_connection, shared_settings
from moretta.deployment.kits import identity_of
from moretta.deployment.server_connection import Administrator, logged_in
from moretta.engines.checkpoint import rounds_kept
from moretta.engines.files import new_lines
from moretta.engines.folder_lock import held
from moretta.errors import MorettaError, ParameterError, RunFailed
from moretta.run.preview import losable_of
from moretta.secure_aggregation.identity import KEY_FILE, Roster, public_line

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
    federation = shared_settings.server_side(run_file, places.out)
    federation.rehearse(run_file.run.rounds, run_file.run.seed)
    if places.out.exists() and any(places.out.iterdir()) and not resume:
        raise ParameterError(
            f"{places.out} exists and is not empty; go on with that run by --resume, or name another folder by --out"
        )
    for line in losable_of(federation):
        say(line)
    places.work.mkdir(mode=0o700, parents=True, exist_ok=True)
    with held(places.work):  # else a second `serve` would end the first one's server as a left-over
        remembered = places.work / "server.json"
        processes.end_left_over(remembered)
        names = job.site_names(run_file)
        kit = _kits(run_file, places, host, port, names, say)
        with processes.running(kit.server, places.work / "server.log", remembered) as server:
            serving = _Serving(run_file, places, names, kit, server, say, progress)
            with serving.logged_in() as administrator:
                serving.wait_for_sites(administrator, wait)
                number = serving.submit(administrator, resume=resume)
            serving.play(number)
            serving.shut_down()


def _kits(run_file: RunFile, places: Places, host: str, port: int, names: Sequence[str], say: Say) -> kits.Kits:
    """Make the kits, or find those that were made, and tell what is to be done with them.

    Raises `moretta.errors.ParameterError` where sites would not take the server's key.
    """
    made, keyless = not places.kits.exists(), not (places.kits / KEY_FILE).exists()
    kit = provisioning.provision(places.kits, host, port, names)
    server_connection.check_port(port)
    server_connection.own_address(kit.server)
    provisioning.patch(kit.server)
    path, identity = run_file.secure_aggregation.roster, identity_of(kit.server / "local")
    kits.check_listed(identity, None if path is None else Roster.load(run_file.resolve(path)))
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


@dataclass
class _Serving:
    """A run that is served. after, lines: the last round that was reported, and the history's lines behind it."""

    run_file: RunFile
    places: Places
    names: Sequence[str]
    kit: kits.Kits
    server: processes.Parent
    say: Say
    progress: Progress
    after: int = 0
    lines: Iterator[list[bytes]] = field(default_factory=lambda: iter(list[list[bytes]]()))

    @contextmanager
    def logged_in(self) -> Iterator[Administrator]:
        """Log in at FLARE's server as soon as it is there."""
        until = time.monotonic() + START
        with ExitStack() as stack:
            while True:
                try:
                    administrator = stack.enter_context(logged_in(self.kit.admin, wait=2.0))
                    administrator.connected()
                    break
                except MorettaError as error:
                    stack.close()
                    log = self.places.work / "server.log"
                    if self.server.poll() is not None:
                        raise RunFailed(f"FLARE's server did not start; {log} says why") from None
                    if time.monotonic() > until:
                        raise RunFailed(f"FLARE's server lets nobody log in within {START:.0f} s ({error})") from None
                    time.sleep(0.2)
            yield administrator

    def wait_for_sites(self, administrator: Administrator, wait: float) -> None:
        """Wait until all sites are connected; after `wait` go on without the rest, if they are enough.

        A site that comes later takes no part.
        """
        names, until, reported = self.names, time.monotonic() + wait, None
        while True:
            if self.server.poll() is not None:
                code = self.server.returncode
                raise RunFailed(f"FLARE's server ended with exit code {code}, before any site had come")
            there = administrator.connected()
            missing = [name for name in names if name not in there]
            if not missing:
                self.say(f"all {len(names)} sites are connected")
                return
            left = until - time.monotonic()
            if left <= 0:
                break
            if missing != reported:
                self.say(
                    f"waiting up to {left:.0f} s more for {', '.join(missing)} (moretta join KIT --silo silo.toml)"
                )
                reported = missing
            time.sleep(0.5)
        connected, least = len(names) - len(missing), self.run_file.secure_aggregation.least
        if connected < least:
            raise RunFailed(
                f"{connected} of {len(names)} sites connected within {wait:g} s, at least {least} are needed; missing "
                f"are {', '.join(missing)}: have them run moretta join, and look with moretta doctor what keeps them"
            )
        self.say(f"going on without {', '.join(missing)}, which did not connect within {wait:g} s")

    def submit(self, administrator: Administrator, *, resume: bool) -> str:
        """Hand the run to the server as a job; return the job's id."""
        places, folder = self.places, self.places.work / "job"
        places.status.unlink(missing_ok=True)
        arguments: dict[str, str | bool | float] = {
            "out": str(places.out.absolute()),
            "resume": resume,
            "wait": GATHER,
            "status": str(places.status.absolute()),
        }
        job.write_job(self.run_file, folder, identity_of(self.kit.server / "local"), **arguments)
        return administrator.submit(folder)

    def play(self, number: str) -> None:
        """Follow the job; where its process dies, begin it again from its checkpoint. number: of the first in FLARE."""
        for attempt in range(TRIES + 1):
            if attempt > 0:
                with logged_in(self.kit.admin) as administrator:
                    number = self.submit(administrator, resume=True)
            try:
                ended = self._follow()
            except BaseException:
                with suppress(MorettaError), logged_in(self.kit.admin) as administrator:
                    administrator.abort(number)
                raise
            if ended is not None:
                if ended["state"] == "failed":
                    kind = ParameterError if ended.get("code") == 2 else RunFailed
                    raise kind(str(ended["sentence"]))
                return
            if not rounds_kept(self.places.out / "checkpoint"):
                break
            self.say("the server's job died; it begins again from its last checkpoint")
        raise RunFailed(
            f"the server's job died without a word; {self.places.work / 'server.log'} may say why, and --resume goes "
            "on from its last checkpoint"
        )

    def _follow(self) -> Mapping[str, Any] | None:
        """Report rounds until the job says how it ended; return that, or None where its process died without a word."""
        seen = began = looked = time.monotonic()
        reported: Mapping[str, Any] | None = None
        while True:
            state = None
            with suppress(OSError, ValueError):
                state = json.loads(self.places.status.read_text())  # before the rounds, so that none is missed
            if state is not None and state != reported:
                reported = state
                if state["state"] == "playing":  # by now the history has forgotten what will be played again
                    self.after, self.lines = int(state["after"]), new_lines(self.places.out / "history.jsonl", 0)
                elif state["state"] == "waiting":
                    self.say(str(state["sentence"]))
                else:
                    self._report()
                    return reported
            self._report()
            if self.server.poll() is not None:
                log = self.places.work / "server.log"
                raise RunFailed(
                    f"FLARE's server ended with exit code {self.server.returncode}; {log} says why, and --resume goes "
                    "on from the last checkpoint"
                )
            now = time.monotonic()
            if now > looked + 1 and processes.family_of(self.server):
                seen = looked = now
            elif now > looked + 1 and now - seen > (SILENT if seen > began else START):
                return None
            time.sleep(LOOK)

    def _report(self) -> None:
        """Report rounds that are new in the history."""
        for text in next(self.lines, []):
            with suppress(ValueError):
                line = json.loads(text)
                if line["round"] > self.after:
                    self.after = line["round"]
                    self.progress(line["round"], self.run_file.run.rounds, line)

    def shut_down(self) -> None:
        """End the sites too. FLARE ends nobody whose job has not ended, and that takes it some seconds."""
        until = time.monotonic() + ENDING
        while True:
            try:
                with logged_in(self.kit.admin) as administrator:
                    administrator.shut_down()
                return
            except MorettaError as error:
                if time.monotonic() > until:
                    self.say(f"the sites were not told that the run has ended: {error}")
                    return
                time.sleep(1.0)
