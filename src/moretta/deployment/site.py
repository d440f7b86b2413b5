"""A site's place in a run: the role that it plays, its state on disk, and what the run releases to it.

<out>/<run id>/checkpoint/   the last two states of its role; secret    views/   if silo.toml wants them
               released.safetensors, inputs.json      what the run released, and what inputs mean
               confined.safetensors                   of cgd: this participant's own model, which nobody else has
               scores.json                            and what all of them score on rows held back, where sums are blind
               log.txt
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from moretta import __version__, config
from moretta.codec import Codec
from moretta.config import RunFile
from moretta.deployment.silo_file import SiloFile
from moretta.engines.checkpoint import Place, last_checkpoint, save_checkpoint
from moretta.engines.files import write_atomically
from moretta.engines.flare.envelope import Hello, digest_of
from moretta.engines.views import Recorder
from moretta.errors import CodecError, ParameterError
from moretta.protocol import Client, Message, Tensors
from moretta.protocols.baffle.params import BAFFLE
from moretta.run_folder import RunFolder
from moretta.secure_aggregation.identity import Identity, Roster, fingerprint

log = logging.getLogger("moretta")

LEAVE = 5.0  # seconds that an earlier job of this site has to end when it is asked to


class Role(Protocol):
    """What a site plays: by PyTorch (`torch_role`)."""

    def check(self, hello: Hello) -> None:
        """Raise `moretta.errors.ParameterError` where the server has another model, or what runs it."""

    def client(self, hello: Hello) -> tuple[Client, Sequence[type[Message]]]:
        """Cast the protocol's client; return it with the messages of the run."""

    def leave(self, client: Client, folder: RunFolder) -> None:
        """Write what the run leaves at the site alone."""


class Site:
    """One site, as `moretta.engines.flare.desk.Desk` wants it.

    file: its silo.toml. text: what it was told of the run, and made: by what job, by its moment (`take_turn`).
    certificate: the name in its startup kit's certificate.
    Raises `moretta.errors.ParameterError` where silo.toml, its rows and the run do not fit each other.
    """

    def __init__(self, file: SiloFile, text: str, made: float, certificate: str) -> None:
        self.name = file.silo.name
        roster = None if file.silo.roster is None else Roster.load(file.base / file.silo.roster)
        expected = self.name if roster is None else roster.engine_name(self.name)
        if expected != certificate:
            raise ParameterError(
                f"silo.toml says name = {self.name!r}, and this site's certificate is of `{certificate}`; use the "
                f"startup kit of `{expected}`, or correct silo.toml"
            )
        take_turn(file.out, made)
        _log_to(file.out / "log.txt")
        self._file, self._job = file, digest_of(text)
        self._run_file = config.loads(text, file.base / "told.toml")
        self._role = _role(self._run_file, file)
        self.fingerprint = "" if file.silo.identity is None else _fingerprint(file.base / file.silo.identity)
        self._folder: RunFolder | None = None
        self._recorder: Recorder | None = None
        self._place = Place("", 0, 0, "")
        self._round = 0

    def enter(self, hello: Hello) -> tuple[Client, Codec]:
        """Take up a run where it stands: cast the role, and restore the state that was kept of it.

        Raises `moretta.errors.ParameterError` where versions, what was told or the model differ from the server's.
        """
        self._check(hello)
        client, messages = self._role.client(hello)
        path = self._file.out / hello.run
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = RunFolder(path)
        self._place = Place(hello.run, hello.round, hello.session, hello.job)
        self._restore(client, hello)
        if self._file.silo.record_views:
            self._recorder = Recorder(path / "views", True, hello.session)
        return client, Codec(messages)

    def answered(self, client: Client, asked: Message, answer: Message | None) -> None:
        """Record what was seen, and keep at once what the role must not forget even if it is killed."""
        if asked.stamp.round != self._round:
            self._round = asked.stamp.round
            rounds = self._run_file.run.rounds
            log.info(*(("round %d of %d", self._round, rounds) if self._round <= rounds else ("release",)))
        if self._recorder is not None and self._recorder.wants(asked.stamp.round):
            codec = Codec([type(one) for one in (asked, answer) if one is not None])
            self._recorder.saw(self.name, "received", "server", codec.encode(asked))
            if answer is not None:
                self._recorder.saw(self.name, "sent", "server", codec.encode(answer))
        # Of baffle the state says to whom a contribution was revealed: forgotten, it would be revealed to others too.
        if isinstance(self._run_file.protocol, BAFFLE):
            self._save(client)

    def keep(self, client: Client, round: int) -> None:
        """Keep the role's state as of the end of a round."""
        self._place = Place(self._place.run, round, self._place.session, self._place.digest)
        self._save(client)
        if self._recorder is not None:
            self._recorder.flush()

    def _save(self, client: Client) -> None:
        if self._folder is not None:
            save_checkpoint(self._folder.path / "checkpoint", self._place, {f"silo-{self.name}": client.state()})

    def end(self, client: Client, released: bytes) -> None:
        """Write what the run released, and of cgd the participant's own model."""
        if self._folder is None:
            return
        if self._recorder is not None:
            self._recorder.flush()
        write_atomically(self._folder.path / "run.toml", config.dump(self._run_file).encode())
        if released:
            inputs, tensors = unpack_released(released)
            self._folder.write_json("inputs.json", inputs)
            self._folder.write_model("released.safetensors", tensors)
        self._role.leave(client, self._folder)
        log.info("the run has ended; what is this site's is in %s", self._folder.path)

    def _check(self, hello: Hello) -> None:
        theirs = hello.versions.get("moretta", "another")
        if theirs != __version__:
            raise ParameterError(f"runs Moretta {__version__}, and the server {theirs}; install the same")
        if hello.job != self._job:
            raise ParameterError(
                f"was told another run than the server plays (digests {self._job[:12]} and {hello.job[:12]}): the job "
                "was edited by hand; make it anew by moretta job or serve"
            )
        self._role.check(hello)

    def _restore(self, client: Client, hello: Hello) -> None:
        if self._folder is None:
            return
        found = last_checkpoint(self._folder.path / "checkpoint", up_to=hello.round)
        if found is not None and found[0].run == hello.run:
            client.restore(found[1][f"silo-{self.name}"])
        elif hello.round:
            log.warning(
                "has no state of round %d or before; it begins anew, as a silo that was never here", hello.round
            )
        else:
            self.keep(client, 0)


def _role(run_file: RunFile, file: SiloFile) -> Role:
    from moretta.deployment.torch_role import TorchRole  # torch may be absent where nobody asks

    return TorchRole(run_file, file)


def _log_to(path: Path) -> None:
    """Send what Moretta has to say in this process to a file, a line each."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def _fingerprint(path: Path) -> str:
    return fingerprint(Identity.load(path).public_key)


def pack_released(inputs: Mapping[str, object], tensors: Tensors) -> bytes:
    """Return a released model and what its inputs mean, as `Site.end` takes them."""
    text = json.dumps(inputs).encode()
    arrays = {name: np.ascontiguousarray(value).reshape(value.shape) for name, value in tensors.items()}
    return len(text).to_bytes(4, "little") + text + save(arrays)


def unpack_released(data: bytes) -> tuple[Mapping[str, object], Tensors]:
    """Return what `pack_released` packed. Raises `moretta.errors.CodecError` for anything else."""
    end = 4 + int.from_bytes(data[:4], "little")
    try:
        inputs, tensors = json.loads(data[4:end]), load(data[end:])
    except (ValueError, RecursionError, SafetensorError) as error:
        raise CodecError(f"expected a released model; {error}") from None
    if not isinstance(inputs, dict):
        raise CodecError("expected a released model with what its inputs mean")
    return inputs, tensors


def take_turn(folder: Path, made: float) -> None:
    """Hold a site's folder for as long as this process lives. made: the moment at which its job was made.

    An older job of the same site that still runs, left by a server that died, is ended: only one may play the role.
    Raises `moretta.errors.ParameterError` where a younger one does.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder / "job.lock", os.O_RDWR | os.O_CREAT, 0o600)  # open until the process ends
    for asked in (None, signal.SIGTERM, signal.SIGKILL):
        if asked is not None:
            _end_holder(descriptor, folder, made, asked)
        until = time.monotonic() + (LEAVE if asked is not None else 0.0)
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "made": made}).encode(), 0)
                return
            if time.monotonic() > until:
                break
            time.sleep(0.05)
    raise ParameterError(f"{folder} is held by another job of this site that does not end; end that process")


def _end_holder(descriptor: int, folder: Path, made: float, how: signal.Signals) -> None:
    try:
        holder = json.loads(os.pread(descriptor, 100, 0))
        pid, theirs = int(holder["pid"]), float(holder["made"])
    except (ValueError, KeyError, TypeError):
        return  # it has the lock, and has not said yet who it is
    if theirs >= made:
        raise ParameterError(
            f"{folder} is in use by another job of this site (process {pid}), which is as young as this one; is the "
            "site joined twice? Leave one of them"
        )
    with suppress(OSError):
        os.kill(pid, how)
