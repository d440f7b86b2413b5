"""A server that writes what it likes to a site, and twin sites that tell whether anything of them comes back.

Twins have the same silo.toml. They differ in their rows, in how many these are, in what other files hold, and in one
file that only the second has. A server that tells them apart before training has learnt something: of settings that a
site has agreed to, whether its rows fit them, and of a site whose operator does nothing these are those of one run. All
of a site is in this process but FLARE: a real `Site` behind a real `SiteWorker`, which is asked by signed envelopes.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.config import run_files, silo_file
from moretta.contract.codec import Codec
from moretta.contract.messages import Message, Stamp
from moretta.deployment import shared_settings
from moretta.deployment.kits import trust_of
from moretta.deployment.site import Site
from moretta.engines.flare.envelope import (
    Busy,
    Failed,
    Hello,
    Poll,
    Refused,
    Reply,
    Signed,
    SiteReady,
    Submit,
    WorkDone,
    digest_of,
)
from moretta.engines.flare.signing import ServerSession
from moretta.engines.flare.site_worker import UNFIT, SiteWorker
from moretta.run import record
from moretta.secure_aggregation import schemes, statistics
from moretta.secure_aggregation.agreement import AdvertiseKey, KeyAdvert
from moretta.secure_aggregation.identity import Identity, public_line
from moretta.secure_aggregation.statistics import AskMoments

SERVER = Identity(b"the server's key, for tests only".ljust(32)[:32])
COLUMNS, CLASSES = 4, 3
ROWS = {"a": 23, "b": 31}  # of each twin
PATIENCE = 60.0  # seconds in which a site answers
CODEC = Codec([*schemes.MESSAGES, *statistics.MESSAGES])
TICKET = re.compile(f"(?<=^{UNFIT})[0-9a-f]{{8}}$")  # of a refusal, which the site's own log explains

BASE: Mapping[str, Mapping[str, str]] = {
    "run": {"name": '"run"', "rounds": "3", "seed": "7"},
    "data": {"source": '"sites"', "inputs": f"[{COLUMNS}]", "classes": f"{CLASSES}"},
    "model": {"source": '"mlp"', "hidden": "[3]"},
    "protocol": {"name": '"fedsgd"', "learning-rate": "0.1"},
    "secure-aggregation": {},
    "engine": {"name": '"flare"', "sites": '["north", "south", "west"]'},
}
MARKS = """from pathlib import Path

Path({mark!r}).touch()


def mark(*given, **named):
    Path({mark!r}).touch()
    return 0.0
"""


@dataclass(frozen=True)
class Edit:
    """A key of the text as the server writes it; `value` is TOML, in which HERE stands for the site's folder."""

    section: str
    key: str
    value: str


@dataclass(frozen=True)
class Job:
    """A text, and how the server begins the session: `model` and `version` may be of another.

    moments: whether the server asks for a statistic, which the text says that it does not need.
    """

    edits: tuple[Edit, ...]
    moments: bool = False
    model: str = ""
    version: str = ""
    round: int = 0

    def text(self, folder: Path) -> str:
        """Return what the server sends."""
        sections = {name: dict(keys) for name, keys in BASE.items()}
        for edit in self.edits:
            sections.setdefault(edit.section, {})[edit.key] = edit.value.replace("HERE", str(folder))
        return "".join(
            f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items())
            for name, keys in sections.items()
        )


@dataclass
class Told:
    """What a server has of one site: by job the replies as it could compare them, bytes, and public keys."""

    jobs: list[list[tuple[str, str]]] = field(default_factory=list)
    data: list[bytes] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)


class Twin:
    """A site's folder, with canaries: rows, files, and code that leaves a mark when it is imported or called."""

    def __init__(self, folder: Path, which: str) -> None:
        self.folder, self.which = folder / which, which
        self.folder.mkdir(parents=True)
        generator = np.random.default_rng(ord(which))
        x = generator.normal(0, 1, (ROWS[which], COLUMNS)).astype(np.float32)
        np.savez(self.folder / "rows.npz", x=x, y=np.arange(ROWS[which]) % CLASSES)
        self.secret = f"canary-{generator.integers(10**12, 10**13)}"
        for name in ("secret.txt", "schema.toml", "weights.safetensors", *(["only.txt"] if which == "b" else [])):
            (self.folder / name).write_text(f'note = "{self.secret}"\n')
        self.marked = self.folder / "marked"
        for name in ("nightly_cleanup", "installed_canary"):  # the second is what pip put there
            place = self.folder if name == "nightly_cleanup" else folder / "installed"
            place.mkdir(exist_ok=True)
            (place / f"{name}.py").write_text(MARKS.format(mark=str(folder / "marked")))
        (self.folder / "silo.toml").write_text(
            f'[silo]\nname = "north"\nout = "kept"\nserver-key = "{public_line(SERVER.public_key)}"\n'
            '[data]\nsource = "rows.npz"\n'
        )
        self.canaries = [self.secret.encode(), *_written(x)]
        self._before = self._files()

    def play(self, jobs: tuple[Job, ...]) -> Told:
        """Play the jobs one after the other, each in a process of its own; what the site keeps stays until the end."""
        told = Told()
        for number, job in enumerate(jobs):
            told.jobs.append([])
            self._play(job, number, told)
            told.jobs[-1] = [(kind, said.replace(str(self.folder), "HERE")) for kind, said in told.jobs[-1]]
        return told

    def leave(self) -> tuple[set[str], bool]:
        """Return the secrets that the site keeps, and whether any other file has changed; forget what it keeps."""
        kept = {
            value
            for path in (self.folder / "kept").rglob("lasting.json")
            for value in json.loads(path.read_text()).values()
            if len(value) >= 64  # hexadecimal digits: the rest counts releases
        }
        shutil.rmtree(self.folder / "kept", ignore_errors=True)
        return kept, self._files() != self._before

    def _play(self, job: Job, number: int, told: Told) -> None:
        text, path = job.text(self.folder), self.folder / "silo.toml"
        worker = SiteWorker(
            lambda: Site(silo_file.load(path), text, "north"), lambda: trust_of(silo_file.load(path), self.folder)
        )
        try:
            session = ServerSession(SERVER, _hello(job, text, number))
            server = Server(worker, session, told)
            reply = server.wait(session.hello)
            stamp = Stamp(session.hello.run, 1, 0)
            if isinstance(reply, SiteReady):
                server.ask(AdvertiseKey(stamp=stamp))
            if isinstance(reply, SiteReady) and job.moments:
                none, center = np.empty(0, np.int64), np.zeros(COLUMNS)
                server.ask(
                    AskMoments(stamp=stamp, what="input columns", order=1, center=center, columns=none, encoding={})
                )
        finally:
            worker.close()
            worker._thread.join(PATIENCE)  # which may be reading once more, after a refusal

    def _files(self) -> dict[str, bytes]:
        """All files of the site but what it keeps and what Python does."""
        whole = self.folder.rglob("*")
        kept = {"kept", "__pycache__"}
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in whole
            if path.is_file() and not kept & set(path.parts)
        }


class Server:
    """A session's half at the server, which notes what comes back."""

    def __init__(self, worker: SiteWorker, session: ServerSession, told: Told) -> None:
        self._worker, self._session, self._told, self._number = worker, session, told, 0

    def wait(self, request: Signed) -> Reply:
        """Ask until the site is no longer busy, and note the reply."""
        until = time.monotonic() + PATIENCE
        while isinstance((found := self._once(request))[0], Busy):
            assert time.monotonic() < until, "the site is busy for ever"
            time.sleep(0.001)
        reply, body = found
        sentence = reply.sentence if isinstance(reply, (Refused, Failed)) else ""
        self._told.jobs[-1].append((reply.kind, TICKET.sub("TICKET", sentence)))
        self._told.data.append(body)
        return reply

    def ask(self, asked: Message) -> None:
        """Have the role answer a message; a key that it advertises is noted."""
        self._number += 1
        self._once(Submit(number=self._number, work="answer"), CODEC.encode(asked))
        if isinstance(self.wait(Poll(number=self._number, wait=1.0)), WorkDone):
            message = CODEC.decode(bytearray(self._told.data[-1]))
            self._told.jobs[-1].append(("message", message.TAG))
            if isinstance(message, KeyAdvert):
                self._told.keys.append(message.public_key)

    def _once(self, request: Signed, body: bytes = b"") -> tuple[Reply, bytes]:
        process = self._worker.process_id
        data, serial = self._session.pack(request, {"north": process}, body)
        whole = self._worker.answer(data)
        self._told.data.append(bytes(whole))
        reply, opened = self._session.open(whole, process, serial, None)
        return reply, bytes(opened)


def _hello(job: Job, text: str, number: int) -> Hello:
    versions = dict(record.versions()) | ({"moretta": job.version} if job.version else {})
    return Hello(
        run=f"{number:032x}",
        round=job.round,
        session=0,
        job=digest_of(text),
        model=job.model or _model(),
        versions=versions,
        torch=(),
        outputs=CLASSES,
    )


@cache
def _model() -> str:
    run_file = run_files.loads(Job(()).text(Path()), Path("run.toml"))
    return shared_settings.model_digest(shared_settings.server_side(run_file, Path("out")), run_file)


def _written(x: NDArray[np.float32]) -> Iterator[bytes]:
    """Return how rows could stand in a reply: two neighbours as numbers of either size, and one as text."""
    for row in x:
        yield row[:2].tobytes()
        yield row[:2].astype(np.float64).tobytes()
        yield repr(float(row[0])).encode()
        yield str(row[1]).encode()


class Opened:
    """Which files of a folder Python opens, as its audit hook sees them; a hook is never taken away again."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.paths, self._on = str(folder), set[str](), False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, given: tuple[Any, ...]) -> None:
        if self._on and event == "open" and str(given[0]).startswith(self._folder):
            self.paths.add(str(given[0])[len(self._folder) + 1 :])

    @contextmanager
    def watched(self) -> Iterator[None]:
        self.paths.clear()
        self._on = True
        try:
            yield
        finally:
            self._on = False
