"""`moretta join`: patch a startup kit, wait for the server, start FLARE's client, and report its progress.

FLARE's client outlives a job, and ends when `moretta serve` ends its server after a run. Then the command waits for the
server's next run and starts another client, until its operator ends it.
"""

import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moretta.config import silo_file
from moretta.config.silo_file import SiloFile
from moretta.data.tables.mapping import ColumnMapping
from moretta.deployment import checks, kits, processes, provisioning, server_connection
from moretta.deployment.agreed_settings import CLOSED
from moretta.deployment.checks import writable
from moretta.deployment.kits import SILO
from moretta.engines.files import new_lines, write_atomically
from moretta.engines.folder_lock import held
from moretta.errors import ParameterError, RunFailed
from moretta.protocols.registry import check_edge_packages

LOOK = 0.2
AGAIN = 2.0  # seconds between two tries to reach a server that has not started yet
ENDING = 30.0  # seconds for a server to stop, once it has ended this site's client
MINUTE = 60.0  # seconds between two lines about rounds
OFTEN, WITHIN = 4, 150.0  # connections in seconds by which another machine competes; FLARE starts with two
LOCK = "join.lock"
KIT_HELD = "this kit has joined already, by {holder}; a site joins once, so leave one of them"
OUT_HELD = (
    "the folder of silo.toml is in use by another join, {holder}; leave one of them, or give each its own [silo] out, "
    "as two federations need"
)
TWICE = (
    "the server repeatedly drops this site's connection, probably because the same kit has joined on another machine "
    "too; stop one of them"
)
Say = Callable[[str], None]
LOGGED = re.compile(r"\d{4}-\d\d-\d\d \S+ ([A-Z]+) (.*)")  # a line of a site's log: its level and its text
TICKET = re.compile(r" \(ticket \w+\)")


@dataclass(frozen=True)
class Attendance:
    """A site's runs since a moment.

    Attributes:
        out: The site's folder.
        ended: The folders of finished runs, the last one last.
        going: Whether another run has begun.
    """

    out: Path
    ended: tuple[Path, ...] = ()
    going: bool = False

    @classmethod
    def since(cls, out: Path, began: float) -> "Attendance":
        """Return the attendance in a site's folder. began: by `time.time`."""
        checkpoints = sorted((path.stat().st_mtime, path.parent) for path in out.glob("*/checkpoint"))
        folders = [folder for moment, folder in checkpoints if moment >= began]
        ended = [folder for folder in folders if (end := folder / "run.toml").exists() and end.stat().st_mtime >= began]
        return cls(out, tuple(ended), folders[-1:] != ended[-1:])

    @property
    def model(self) -> Path | None:
        """The model that the last run left here."""
        names = ("released.safetensors", "confined.safetensors")
        return next((path for name in names for folder in self.ended[-1:] if (path := folder / name).exists()), None)

    def sentence(self) -> str:
        """Return it as a sentence."""
        if not self.ended:
            return f"finished no run; this site's files are in {self.out}"
        left = f"left no model; its folder is {self.ended[-1]}" if self.model is None else f"left {self.model}"
        return f"took part in {len(self.ended)} run{'s' if len(self.ended) > 1 else ''}; the last one {left}"

    def as_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        model = None if self.model is None else str(self.model)
        return {"out": str(self.out), "runs": [str(folder) for folder in self.ended], "model": model}


def join(
    kit: Path, silo: Path, say: Say, *, edge: bool = False, memory_limit_mib: float | None = None, once: bool = False
) -> Attendance:
    """Take part in a server's runs by a startup kit until an interrupt; return the attendance.

    The site waits for the server to start, and after a run for its next one. once: return after the first run.

    Raises:
        moretta.errors.ParameterError: a kit, a silo.toml, keys or rows are wrong or do not fit, the clock is outside
        the certificate's dates, or the server belongs to another federation.
        moretta.errors.RunFailed: FLARE's client ends without an interrupt.
        KeyboardInterrupt: the interrupt arrives before a run has ended, or within a run.
    """
    began = time.time()
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
        try:
            _join(kit, file.out, settings, say, once=once)
        except KeyboardInterrupt:
            if not (done := Attendance.since(file.out, began)).ended or done.going:
                raise
        return Attendance.since(file.out, began)


def _check(kit: Path, silo: Path, file: SiloFile) -> None:
    """Make the site's checks of `moretta doctor`, before anything is started."""
    checks.belongs(kit, silo, file)
    kits.check_certificates(kit)
    checks.identified(file)
    checks.pinned(kit, file)
    checks.openable(file)
    if file.mapping != ColumnMapping():
        checks.mapped(file)
    writable(file.out)


def _join(kit: Path, out: Path, settings: Mapping[str, object], say: Say, *, once: bool) -> None:
    if kits.for_trials(kit):
        say("this kit is for trials: the server made its private key (make your own: moretta join --request)")
    remembered = kit / "local" / "join.json"
    if processes.end_left_over(remembered):
        say("ended the processes of an earlier join of this kit that was killed")
    for change in provisioning.patch(kit):
        say(change)
    write_atomically(kit / "local" / SILO, (json.dumps(settings, indent=2) + "\n").encode())
    host, port = kits.address_of(kit)
    while True:
        _wait_for_server(kit, say)
        say(f"joining {host}:{port} as {kits.name_of(kit)}; ctrl-c ends it")
        logs = out / "log.txt", out / "flare.log"
        site, flare = (new_lines(log, log.stat().st_size if log.exists() else 0) for log in logs)  # before it starts
        with processes.running(kit, out / "flare.log", remembered) as client:
            _watch(client, kit, site, flare, say)
        if client.returncode != 0:
            raise RunFailed(
                f"FLARE's client ended with exit code {client.returncode}; see {out / 'flare.log'}, and join again to "
                "continue its run or to join the next one"
            )
        if once:
            return
        say("the server has ended its run; waiting for its next one, until ctrl-c")
        _wait_for_end(kit)


def _wait_for_end(kit: Path) -> None:
    """Return once an ending server is gone; a plain FLARE server stays."""
    until = time.monotonic() + ENDING
    with suppress(RunFailed):
        while time.monotonic() < until:
            with suppress(ParameterError):  # it hangs up before it is gone
                server_connection.reach(kit, LOOK)
            time.sleep(LOOK)


def _wait_for_server(kit: Path, say: Say) -> None:
    """Wait until the server answers, and it and this kit accept each other's certificate."""
    reason, refused = "", False
    while True:
        try:
            server_connection.reach_by_grpc(kit)
            return
        except RunFailed as error:
            refused = False
            if str(error) != reason:
                reason = str(error)
                host, port = kits.address_of(kit)
                say(f"waiting until {host}:{port} answers, or for ctrl-c: {reason}")
            time.sleep(AGAIN)
        except ParameterError:
            if refused:
                raise
            refused = True  # a server that is ending hangs up too: only a second refusal in a row counts
            time.sleep(LOOK)


def _watch(
    client: processes.Parent, kit: Path, site: Iterator[list[bytes]], flare: Iterator[list[bytes]], say: Say
) -> None:
    """Report the site's log (`Voice`) until the client ends, and warn if another joined by the same kit.

    site, flare: the new lines of their logs.
    """
    host, port = kits.address_of(kit)
    again = f"=> {host}:{port}] is created: PID: {client.pid}".encode()  # FLARE's log line when this process connects
    connected: deque[float] = deque(maxlen=OFTEN)
    warned, why = False, TWICE
    ended, voice = False, Voice(say)
    while not ended:
        ended = client.poll() is not None  # before its last lines are read
        for line in next(site):
            voice.hear(line.decode(errors="replace"))
        voice.speak()
        if lines := [line for line in next(flare) if again in line]:
            connected.extend(time.monotonic() for _ in lines)
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


class Voice:
    """Reports a site's log: the last round once a minute, and each repeated error once."""

    def __init__(self, say: Say) -> None:
        self._say, self._round, self._spoke = say, "", float("-inf")
        self._wrong, self._again = set[str](), False

    def hear(self, line: str) -> None:
        """Handle a line of the log."""
        level, what = match.groups() if (match := LOGGED.match(line)) else ("", line)
        if what.startswith("round "):
            self._round = line
            return
        if level:  # other lines continue the previous one
            known, wrong = TICKET.sub("", what), level in ("WARNING", "ERROR")
            closed = CLOSED in known and any("takes no part" in wrong for wrong in self._wrong)  # already reported
            self._again = wrong and (known in self._wrong or closed)
            self._wrong |= {known} if wrong else set()
        if not self._again:
            self._say_round()  # keeps the order of lines
            self._say(line)

    def speak(self) -> None:
        """Report the round, at most once a minute."""
        if time.monotonic() - self._spoke >= MINUTE:
            self._say_round()

    def _say_round(self) -> None:
        if self._round:
            self._say(self._round)
            self._round, self._spoke = "", time.monotonic()
