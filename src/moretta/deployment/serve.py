"""`moretta serve`: make kits, run FLARE's server, submit the job, and follow it to the run's end.

<out>          the run folder, as `moretta train` writes it
<out>-kits/    startup kits: one per site, for trials, to be handed over; the server's; the administrator's. In no
               kit: identity.key, which signs the server's messages. `moretta kit new` makes no sites' kits
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
from moretta.engines.files import check_unused, new_lines
from moretta.engines.folder_lock import held
from moretta.errors import MorettaError, ParameterError, RunFailed
from moretta.run.preview import losable_of
from moretta.secure_aggregation.identity import KEY_FILE, Roster, public_line

LOOK = 0.1  # seconds between two looks at the history
START = 120.0  # seconds for FLARE's server to answer, and for a job to begin
SILENT = 3.0  # seconds without any process of the job after which it counts as dead
ENDING = 30.0  # seconds for a job to end, once the run has ended
TRIES = 3  # restarts of a dead job from its checkpoint
GATHER = 120.0  # seconds for connected sites to load their data

Say = Callable[[str], None]
Progress = Callable[[int, int, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Places:
    """The folders of a run that `serve` uses."""

    out: Path
    kits: Path

    @property
    def work(self) -> Path:
        """The folder of the job and the server's log."""
        return self.out.with_name(f"{self.out.name}-serve")

    @property
    def status(self) -> Path:
        """The file in which the server's job reports its progress."""
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
    """Carry out a run over FLARE, from kits to the result in the run folder.

    Args:
        host, port: The address of this machine, for sites.
        wait: Seconds that sites may take to connect.

    Raises:
        ParameterError: The settings are invalid, or the run folder is in use.
        RunFailed: The run cannot continue.
    """
    processes.require()
    job.check(run_file)
    federation = shared_settings.server_side(run_file, places.out)
    federation.rehearse(run_file.run.rounds, run_file.run.seed)
    if not resume:
        check_unused(places.out, "; continue that run by --resume, or name another folder by --out")
    for line in losable_of(federation):
        say(line)
    places.work.mkdir(mode=0o700, parents=True, exist_ok=True)
    with held(places.work):  # else a second `serve` would end the first one's server
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
    """Make or reuse the kits, and report their next steps. Raises ParameterError if sites would not accept the key."""
    made, keyless = not places.kits.exists(), not (places.kits / KEY_FILE).exists()
    kit = provisioning.provision(places.kits, host, port, names)
    server_connection.check_port(port)
    server_connection.own_address(kit.server)
    provisioning.patch(kit.server)
    path, identity = run_file.secure_aggregation.roster, identity_of(kit.server / "local")
    kits.check_listed(identity, None if path is None else Roster.load(run_file.resolve(path)))
    if made:
        say(
            f"startup kits are in {places.kits}; hand each of {', '.join(names)} its own by a way you trust. They are "
            "for trials only, because their private keys were made here (otherwise: moretta kit new, moretta join "
            "--request)"
        )
    elif provisioning.keys_at_sites(places.kits):
        if unsigned := [name for name in names if not (places.kits / f"{name}.reply").exists()]:
            say(
                f"no certificate is signed for {', '.join(unsigned)} yet: moretta kit sign REQUEST --kits {places.kits}"
            )
    elif keyless:
        line = public_line(identity.public_key)
        say(
            f"made {places.kits / KEY_FILE}, by which the server signs from now on. Kits handed over before lack its "
            f"public half; have each site run: moretta kit patch KIT --server-key '{line}'"
        )
    return kit


@dataclass
class _Serving:
    """A served run. after, lines: the last reported round, and the history's lines up to it."""

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
        """Log in at FLARE's server as soon as it answers."""
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
                        raise RunFailed(f"FLARE's server did not start; see {log}") from None
                    if time.monotonic() > until:
                        raise RunFailed(
                            f"FLARE's server accepted no login within {START:.0f} s ({error}); see {log}"
                        ) from None
                    time.sleep(0.2)
            yield administrator

    def wait_for_sites(self, administrator: Administrator, wait: float) -> None:
        """Wait until all sites are connected, or after `wait` seconds enough of them; later sites take no part."""
        names, until, reported = self.names, time.monotonic() + wait, None
        while True:
            if self.server.poll() is not None:
                code = self.server.returncode
                raise RunFailed(f"FLARE's server ended with exit code {code} before all sites connected")
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
                f"{connected} of {len(names)} sites connected within {wait:g} s, expected {least} or more; missing are "
                f"{', '.join(missing)}: have them run moretta doctor, then moretta join"
            )
        self.say(f"continuing without {', '.join(missing)}, which did not connect within {wait:g} s")

    def submit(self, administrator: Administrator, *, resume: bool) -> str:
        """Submit the run to the server as a job; return the job's id."""
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
        """Follow the job; restart it from its checkpoint if its process dies. number: of the first in FLARE."""
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
            self.say("the server's job died; it restarts from its last checkpoint")
        raise RunFailed(
            f"the server's job died without a message; see {self.places.work / 'server.log'}, and continue from its "
            "last checkpoint by --resume"
        )

    def _follow(self) -> Mapping[str, Any] | None:
        """Report rounds until the job reports its end; return that, or None if its process died silently."""
        seen = began = looked = time.monotonic()
        reported: Mapping[str, Any] | None = None
        while True:
            state = None
            with suppress(OSError, ValueError):
                state = json.loads(self.places.status.read_text())  # before the rounds, so that none is missed
            if state is not None and state != reported:
                reported = state
                if state["state"] == "playing":  # the history has dropped the rounds that will be repeated
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
                    f"FLARE's server ended with exit code {self.server.returncode}; see {log}, and continue from the "
                    "last checkpoint by --resume"
                )
            now = time.monotonic()
            if now > looked + 1 and processes.family_of(self.server):
                seen = looked = now
            elif now > looked + 1 and now - seen > (SILENT if seen > began else START):
                return None
            time.sleep(LOOK)

    def _report(self) -> None:
        """Report the history's new rounds."""
        for text in next(self.lines, []):
            with suppress(ValueError):
                line = json.loads(text)
                if line["round"] > self.after:
                    self.after = line["round"]
                    self.progress(line["round"], self.run_file.run.rounds, line)

    def shut_down(self) -> None:
        """End the sites too. FLARE ends only sites whose job has ended, which takes some seconds."""
        until = time.monotonic() + ENDING
        while True:
            try:
                with logged_in(self.kit.admin) as administrator:
                    administrator.shut_down()
                return
            except MorettaError as error:
                if time.monotonic() > until:
                    self.say(f"the sites did not learn that the run has ended: {error}")
                    return
                time.sleep(1.0)
