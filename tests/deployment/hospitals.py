"""Hospitals in miniature: a server and its sites as child processes on this machine, to be killed, frozen and cut off.

A folder of them looks like this; every process that is started here, and all that those start, carries `WHOSE` in its
environment, by which it is found, and ended by its id.

    server/run.toml, test.npz, paced.py     what the server has; sites/<name>/  patients.npz, silo.toml, paced.py
    server/run/  run-kits/  run-serve/      what `moretta serve` makes            moretta/  what `moretta join` makes
    pace/<name>                             how many seconds a forward pass takes there by now (`Hospitals.pace`)
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
from numpy.typing import NDArray

from moretta import Federation, Silo
from moretta.config import run_files
from moretta.config.run_files import RunFile
from moretta.deployment import kits, processes, provisioning, server_connection
from moretta.engines import driver, views
from moretta.engines.settings import Engine
from moretta.engines.takes import RoundTakes
from moretta.errors import RunFailed
from moretta.models import catalogue

SEED, SECRET = 7, 3
INPUTS = 4
HANGS = 600.0  # seconds after which what is waited for will never be; no slow machine takes so long
WHOSE = "MORETTA_HOSPITAL"  # in the environment: the token of a `Hospitals`, a dash, and who it is
PACE = "MORETTA_PACE"  # in the environment: the file that says how slow this site is
MORETTA = (sys.executable, "-c", "from moretta.commands.main import main; main()")

PROTOCOLS = {
    "pbpfl": 'name = "pbpfl"\nloss = "cross-entropy"\nlearning-rate = 0.05\noptimizer = "adam"',
    "cgd": 'name = "cgd"\nloss = "cross-entropy"\nlearning-rate = 0.5',
    "fedsgd": 'name = "fedsgd"\nloss = "cross-entropy"\nlearning-rate = 0.1\nmomentum = 0.5',
    "baffle": 'name = "baffle"\nloss = "cross-entropy"\nk = 16',
    "fedavg": 'name = "fedavg"\nloss = "cross-entropy"\nlocal-epochs = 2\ncheckpoint-minutes = 0.1',
}
PACED = '''"""A model whose forward pass takes as long as a file says, also while it waits; it is noted beside it."""

import os
import time
from pathlib import Path

from torch import nn


def _pace() -> float:
    place = os.environ.get("MORETTA_PACE")
    try:
        return 0.0 if place is None else float(Path(place).read_text())
    except (OSError, ValueError):
        return 0.0


class Paced(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    def forward(self, x):
        began = time.monotonic()
        while (left := began + _pace() - time.monotonic()) > 0:
            time.sleep(min(left, 0.02))
        if place := os.environ.get("MORETTA_PACE"):
            with open(place + ".passes", "a") as passes:
                passes.write(f"{len(x)}\\n")
        return self.layers(x)


def build(hidden):
    return Paced(hidden)
'''
RUN = """[run]
name = "run"
rounds = {rounds}
seed = {seed}
insecure-secret-seed = {secret}
record-views = true
checkpoint-every = {every}

[data]
source = "sites"
inputs = [{inputs}]
classes = 2
test = "test.npz"
standardise = true
batch-size = 16

[model]
source = "paced:build"
hidden = 5

[protocol]
{protocol}

[secure-aggregation]
{secure}

[engine]
name = "flare"
sites = [{sites}]
deadline = {deadline}
"""
SILO = """[silo]
name = "{name}"
models = ["paced:build"]
insecure-secret-seed = {secret}

[data]
source = "patients.npz"
"""


def rows(seed: int, count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return rows of which every site could have some."""
    x = np.random.default_rng(seed).normal(0, 1, (count, INPUTS)).astype(np.float32)
    return x, (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype(np.int64)


@dataclass
class Hospitals:
    """A server and its sites. near: of whom there is a network namespace, the words that begin a command in it."""

    folder: Path
    protocol: str = "pbpfl"
    sites: Sequence[str] = ("north", "south", "west")
    rounds: int = 60
    every: int = 10
    deadline: float = 60.0
    secure: str = ""
    host: str = "localhost"
    near: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.port = free_port()
        self._token = secrets.token_hex(8)
        self._started: dict[str, list[subprocess.Popen[bytes]]] = {}
        self.server, self.pace_folder = self.folder / "server", self.folder / "pace"
        self.out = self.server / "run"
        for path in (self.server, self.pace_folder):
            path.mkdir(parents=True)
        x, y = rows(99, 50)
        np.savez(self.server / "test.npz", x=x, y=y)
        (self.server / "paced.py").write_text(PACED)
        (self.server / "run.toml").write_text(
            RUN.format(
                rounds=self.rounds,
                seed=SEED,
                secret=SECRET,
                every=self.every,
                inputs=INPUTS,
                protocol=PROTOCOLS[self.protocol],
                secure=self.secure,
                sites=", ".join(f'"{name}"' for name in self.sites),
                deadline=self.deadline,
            )
        )
        for number, name in enumerate(self.sites):
            place = self.site(name)
            place.mkdir(parents=True)
            x, y = rows(number, 30 + 7 * number)
            np.savez(place / "patients.npz", x=x, y=y)
            (place / "silo.toml").write_text(SILO.format(name=name, secret=SECRET))
            (place / "paced.py").write_text(PACED)

    def site(self, name: str) -> Path:
        """The folder of a site."""
        return self.folder / "sites" / name

    # What is run

    def serve(self, *words: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start the server; return when the sites' kits are there."""
        command = ["serve", str(self.server / "run.toml"), "--out", str(self.out), "--port", str(self.port)]
        process = self._start(
            "server", [*command, "--host", self.host, "--wait", str(HANGS), *words], environment or {}
        )
        wait_for(lambda: (self.kit(self.sites[0])).is_dir() or process.poll() is not None, "kits are made")
        return process

    def join(
        self, name: str, environment: Mapping[str, str] | None = None, *, once: bool = True
    ) -> subprocess.Popen[bytes]:
        """Have a site take part. once: in one run."""
        given = {PACE: str(self.pace_folder / name), **(environment or {})}
        words = ["join", str(self.kit(name)), "--silo", str(self.site(name) / "silo.toml"), *["--once"] * once]
        return self._start(name, words, given)

    def join_all(self) -> None:
        """Have all sites take part."""
        for name in self.sites:
            self.join(name)

    def serve_flare(self) -> tuple[kits.Kits, processes.Parent]:
        """Start a server of FLARE that waits for jobs of others, as a hospital may have."""
        made = provisioning.provision(self.server / "run-kits", self.host, self.port, self.sites)
        provisioning.patch(made.server)
        given = {**os.environ, "OMP_NUM_THREADS": "1", WHOSE: f"{self._token}-server"}
        parent = processes.start(made.server, self.folder / "server.out", given)
        self._started.setdefault("server", []).append(parent)
        return made, parent

    def run_file(self) -> RunFile:
        """The run file as read."""
        return run_files.load(self.server / "run.toml")

    def kit(self, name: str) -> Path:
        """A party's startup kit."""
        return self.server / "run-kits" / name

    def pace(self, name: str, seconds: float) -> None:
        """Have a forward pass at a site take so many seconds, also one that is on its way."""
        fresh = self.pace_folder / f".{name}"
        fresh.write_text(str(seconds))
        fresh.rename(self.pace_folder / name)

    def passes(self, name: str, rows: int) -> int:
        """How many forward passes over so many rows there have been at a site."""
        path = self.pace_folder / f"{name}.passes"
        return path.read_text().splitlines().count(str(rows)) if path.exists() else 0

    def ends(self, who: str = "server") -> int:
        """Wait until a command ends, and return its exit code."""
        process = self._started[who][-1]
        try:
            return process.wait(HANGS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{who} has not ended in {HANGS:g} s; it said:\n{self.said(who)}") from None

    def said(self, who: str = "server") -> str:
        """What a party's commands have printed so far, on either stream."""
        path = self.folder / f"{who}.out"
        return path.read_text() if path.exists() else ""

    def _start(self, who: str, words: Iterable[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "", **environment}
        given[WHOSE] = f"{self._token}-{who}"
        with (self.folder / f"{who}.out").open("ab") as sink:
            process = subprocess.Popen(
                [*self.near.get(who, ()), *MORETTA, *words],
                env=given,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        self._started.setdefault(who, []).append(process)
        return process

    # What is seen

    def history(self) -> list[dict[str, Any]]:
        """The rounds that are finished by now."""
        with suppress(OSError):
            text = (self.out / "history.jsonl").read_text()
            return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return []

    def round(self) -> int:
        """The last finished round."""
        history = self.history()
        return history[-1]["round"] if history else 0

    def reach(self, number: int) -> None:
        """Wait until a round is finished."""
        wait_for(lambda: self.round() >= number or self._server_ended(), f"round {number}", self.said)
        assert self.round() >= number, f"serve ended before round {number}:\n{self.said()}"

    def missed(self, name: str) -> dict[int, str]:
        """The rounds without a site, each with why."""
        return {
            line["round"]: gone["reason"]
            for line in self.history()
            for gone in line["dropped"]
            if gone["silo"] == name
        }  # fmt: skip

    def until_missed(self, name: str, since: float) -> float:
        """Wait for a round that ends without a site; return how many seconds that is after `since`."""
        after = self.round()
        wait_for(lambda: any(number > after for number in self.missed(name)), f"a round without {name}", self.said)
        return time.monotonic() - since

    def until_noticed(self, name: str, since: float) -> float:
        """Wait until a round ends without a site, or the server says that it waits for it; return as `until_missed`."""
        after, said = self.round(), len(self.said())
        wait_for(
            lambda: (
                any(number > after for number in self.missed(name)) or f"for {name} to come back" in self.said()[said:]
            ),
            f"the server misses {name}",
            self.said,
        )
        return time.monotonic() - since

    def until_back(self, name: str, since: float) -> float:
        """Wait for a round that ends with a site, after one without; return how many seconds that is after `since`."""
        after = max(self.missed(name), default=0)

        def is_back() -> bool:
            return self.round() > max({after, *self.missed(name)})

        wait_for(is_back, f"a round with {name} again", self.said)
        return time.monotonic() - since

    def _server_ended(self) -> bool:
        return self._started["server"][-1].poll() is not None

    # Processes

    def processes(self, who: str, of: str = "") -> list[int]:
        """The ids of a party's processes whose command line has a word in it."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it has just ended, or is another user's
                if process.environ().get(WHOSE) == f"{self._token}-{who}" and of in " ".join(process.cmdline()):
                    found.append(process.pid)
        return sorted(found)

    def job(self, who: str = "server") -> int:
        """The process of a party's job in FLARE."""
        return self._only(who, "runner_process" if who == "server" else "worker_process")

    def parent(self, who: str = "server") -> int:
        """The process of FLARE itself, which a command has started."""
        return self._only(who, "server_train" if who == "server" else "client_train")

    def kill(self, pid: int, how: signal.Signals = signal.SIGKILL) -> float:
        """Send a signal to one of these processes; return the moment at which it was sent."""
        os.kill(pid, how)
        return time.monotonic()

    def _only(self, who: str, word: str) -> int:
        wait_for(lambda: bool(self.processes(who, word)), f"a {word} of {who}")
        found = self.processes(who, word)
        assert len(found) == 1, f"expected one {word} of {who}, found {found}"
        return found[0]

    def end(self) -> None:
        """End whatever still runs, commands first, so that none of it starts anything anew."""
        for process in [one for some in self._started.values() for one in some]:
            if process.poll() is None:
                process.kill()
            process.wait()
        while left := [pid for who in self._started for pid in self.processes(who)]:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    # What it is compared to

    def in_process(self, out: Path, engine: Engine | None = None) -> Path:
        """Play the same run in this process; return its folder.

        A round that silos had helped with before was played with other rows, those of a further take: so it is here.
        """
        takes, numbers = {line["round"]: line.get("take", 0) for line in self.history()}, itertools.count(1)

        def begun(wanted: Sequence[str]) -> RoundTakes:
            made = RoundTakes(wanted)
            made.take = takes.get(next(numbers), 0)
            return made

        run_file = self.run_file()
        run, data = run_file.run, run_file.data
        silos = [Silo(name, *rows(number, 30 + 7 * number)) for number, name in enumerate(self.sites)]
        code = "paced:build"
        given: dict[str, Any] = {"inputs": (INPUTS,), "outputs": 2, "base": self.server, "agreed": (code,)}
        model = catalogue.build(code, seed=SEED, hidden=5, **given)
        federation = Federation(
            model,
            silos,
            run_file.protocol,
            test=rows(99, 50),
            aggregation=run_file.secure_aggregation,
            engine=engine or Engine(),
            out=out,
            batch_size=data.batch_size,
            standardise=True,
            checkpoint_every=run.checkpoint_every,
            record_views=True,
            insecure_secret_seed=SECRET,
        )
        with mock.patch.object(driver, "RoundTakes", begun):
            federation.train(run.rounds, run.seed)
        return out


def seen(folder: Path, role: str = "server") -> dict[str, list[tuple[str, str, bytes]]]:
    """What a role has seen, by peer and in order: round and session of the file, direction, and the message."""
    found: dict[str, list[tuple[str, str, bytes]]] = {}
    for path in sorted((folder / "views" / role).glob("round-*.bin")):
        for one in views.read(path):
            found.setdefault(one.peer, []).append((path.name, one.direction, one.data))
    return found


def models_of(folder: Path) -> dict[str, bytes]:
    """The bytes of all models in a run folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*.safetensors") if not {"checkpoint", "truth"} & set(path.parts)
    }  # fmt: skip


def free_port() -> int:
    """Return a port that nobody listens at just now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], bool], what: str, said: Callable[[], str] = lambda: "") -> None:
    """Wait until something is so. Raises AssertionError where it seems never to be."""
    until = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < until, f"waited {HANGS:g} s for {what}; {said()}"
        time.sleep(0.02)


def asked(admin: Path, what: str, *given: Any) -> Any:
    """What the server of an administrator's kit says, asked in a login of its own."""
    with server_connection.logged_in(admin) as administrator:
        return getattr(administrator, what)(*given)


def connected(admin: Path) -> list[str]:
    """The sites that the server sees; none for the moment between its listening and its answering of logins."""
    try:
        return list(asked(admin, "connected"))
    except RunFailed:
        return []


def state_of(admin: Path, job: str) -> str:
    """A job's state as FLARE names it: SUBMITTED, DISPATCHED, RUNNING, or one that begins with FINISHED."""
    with server_connection.logged_in(admin) as administrator, administrator.asked() as session:
        return str(session.get_job_status(job))
