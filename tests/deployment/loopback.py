"""A run on one machine, and the same run with its silos on machines of their own, joined by a loopback, not FLARE."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from moretta.config import run_files, silo_file
from moretta.config.run_files import RunFile
from moretta.contract.codec import Codec
from moretta.contract.roles import Missing, Reason
from moretta.deployment import shared_settings as told
from moretta.deployment.kits import trust_of
from moretta.deployment.site import Site, pack_released
from moretta.engines.checkpoint import CheckpointId
from moretta.engines.flare.delivery import Sites
from moretta.engines.flare.envelope import Hello, digest_of
from moretta.engines.flare.site_worker import SiteWorker
from moretta.engines.run_folder import read_model
from moretta.engines.views import Recorder
from moretta.protocols.common import modules
from moretta.run import record
from moretta.run.assembly import federation_of
from moretta.run.federation import Federation
from moretta.run.result import Result
from moretta.secure_aggregation.identity import Identity, Roster, public_line

SEED, ROUNDS, COLUMNS, CLASSES = 7, 3, 4, 3
NAMES = ("silo-1", "silo-2", "silo-3")
DEAD = Missing(Reason.DISCONNECTED, "cannot be reached")

MODEL = 'source = "mlp"\nhidden = [5]'
FEDSGD = 'name = "fedsgd"\nlearning-rate = 0.1\nmomentum = 0.5'
SERVER = Identity(b"the server's key, for tests only".ljust(32)[:32])
BUILDING = threading.Lock()  # weights are drawn from the one generator of a process, which sites have each of their own
Wrap = Callable[[str, bytes], "bytes | Missing"]


def write_rows(folder: Path, rows: int = 75) -> None:
    """Write all.npz, rows of three classes that can be learnt, with a test part."""
    generator = np.random.default_rng(0)
    y = generator.integers(0, CLASSES, rows)
    x = (np.eye(CLASSES, COLUMNS)[y] * 2 + generator.normal(0, 1, (rows, COLUMNS))).astype(np.float32)
    np.savez(folder / "all.npz", x_train=x[15:], y_train=y[15:], x_test=x[:15], y_test=y[:15])


def write_identities(folder: Path, engine_names: Mapping[str, str]) -> None:
    """Write keys/<silo>, and roster.toml with what the engine calls them."""
    entries = []
    for name in NAMES:
        identity = Identity.fresh()
        identity.save(folder / "keys" / name)
        called = f'engine-name = "{engine_names[name]}"\n' if name in engine_names else ""
        entries.append(f'[[silo]]\nname = "{name}"\nkey = "{public_line(identity.public_key)}"\n{called}')
    (folder / "roster.toml").write_text("\n".join(entries))


def hello_of(
    federation: Federation, run_file: RunFile, text: str, place: CheckpointId, torch: tuple[str, ...] = ()
) -> Hello:
    """What a server says first."""
    return Hello(
        run=place.run,
        round=place.round,
        session=place.session,
        job=digest_of(text),
        model=told.model_digest(federation, run_file),
        versions=record.versions(),
        torch=torch,
        tensors=modules.schema(federation.model),
        outputs=federation.outputs,
    )


class Machines:
    """Sites in a folder each, and a server; restarting one is a new worker with a new `Site` on the same folder.

    engine_names: what the engine calls silos, in a roster that is then in use; None: there is no roster.
    protocol, extra: TOML of [protocol], and of further sections. data: of [data] on both, sites: where rows are at
    sites. here: the run file for one machine; run_file: that for many.
    """

    def __init__(
        self,
        folder: Path,
        protocol: str = FEDSGD,
        extra: str = "",
        *,
        data: str = "silos = 3\nbatch-size = 8",
        sites: str = "",
        rounds: int = ROUNDS,
        run: str = "checkpoint-every = 1",
        engine_names: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.rounds = folder, rounds
        write_rows(folder)
        run = f"rounds = {rounds}\nseed = {SEED}\ninsecure-secret-seed = 3\nrecord-views = true\n{run}"
        rest = f"[model]\n{MODEL}\n[protocol]\n{protocol}\n{extra}"
        text = f'[run]\nname = "run"\n{run}\n[data]\nsource = "all.npz"\nstandardise = true\n{data}\n{rest}'
        secure = ("", "")
        if engine_names is not None:
            write_identities(folder, engine_names)
            roster = '[secure-aggregation]\nroster = "roster.toml"\n'
            secure = f'{roster}identity = "{folder}/keys/{{silo}}"\n', roster
        (folder / "here.toml").write_text(text + secure[0])
        self.here = run_files.load(folder / "here.toml")
        whole = self.on_one_machine(None)
        self.names = [silo.name for silo in whole.silos]
        assert whole.test is not None
        np.savez(folder / "test.npz", x=whole.test[0], y=whole.test[1])
        for silo in whole.silos:
            arrays: dict[str, Any] = {"x": silo.x} | ({"y": silo.y} if len(silo.y) else {})
            arrays |= {} if silo.ids is None else {"id": silo.ids}
            (folder / silo.name).mkdir()
            own = f'roster = "../roster.toml"\nidentity = "../keys/{silo.name}"\n'
            identified = "" if engine_names is None else own
            np.savez(folder / silo.name / "rows.npz", **arrays)
            (folder / silo.name / "silo.toml").write_text(
                f'[silo]\nname = "{silo.name}"\nout = "kept"\nrecord-views = true\ninsecure-secret-seed = 3\n'
                f'server-key = "{public_line(SERVER.public_key)}"\n'
                f'{identified}[data]\nsource = "rows.npz"\n' + ("rows-in-order = true\n" if silo.columns else "")
            )
        described = f'source = "sites"\ninputs = [{COLUMNS}]\nclasses = {CLASSES}\ntest = "test.npz"\n{sites}'
        engine = f'[engine]\nname = "flare"\nsites = {self.names}'
        rest = re.sub(r"^identity = .*$", "", rest, flags=re.MULTILINE)  # each site's own is in its silo.toml
        text = f'[run]\nname = "run"\n{run}\n[data]\nstandardise = true\n{data}\n{described}\n{rest}\n{engine}'
        (folder / "many.toml").write_text(f"{text}\n{secure[1]}")
        self.read(engine_names or {})

    def read(self, engine_names: Mapping[str, str] = MappingProxyType({})) -> None:
        """Take up the run file that was written for many machines; no site is started yet."""
        self.engine_names = {name: engine_names.get(name, name) for name in self.names}
        self.run_file = run_files.load(self.folder / "many.toml")
        self.text = told.shared_text(self.run_file)
        self.workers: dict[str, SiteWorker] = {}
        self.made: list[Sites] = []
        self.wrap: Wrap = self._ask

    def reread(self) -> None:
        """Read both run files again, after a test has written them."""
        self.here = run_files.load(self.folder / "here.toml")
        self.read()

    def change(
        self, model: str, code: str, rows: Callable[[dict[str, Any], str], None], text: Callable[[str], str]
    ) -> None:
        """Give the run another model, its rows and its settings; each site has the code and agrees to run it.

        model: "module:name". rows: changes the arrays of a file, whose samples are under a name that begins with "x".
        text: of a run file.
        """
        for path in (self.folder / "all.npz", self.folder / "test.npz", *self.folder.glob("*/rows.npz")):
            held = dict(np.load(path))
            for part in [name for name in held if name.startswith("x")]:
                rows(held, part)
            np.savez(path, **held)
        for path in (self.folder / "here.toml", self.folder / "many.toml"):
            path.write_text(text(re.sub(r'source = "mlp"\nhidden = .*', f'source = "{model}"', path.read_text())))
        for folder in (self.folder, *(self.folder / name for name in self.names)):
            (folder / f"{model.partition(':')[0]}.py").write_text(code)
        for path in self.folder.glob("*/silo.toml"):
            path.write_text(path.read_text().replace("[data]", f'models = ["{model}"]\n[data]', 1))
        self.reread()

    def draw_secrets(self) -> None:
        """Let the server and all sites draw their secrets, as outside of tests."""
        for path in (self.folder / "many.toml", *self.folder.glob("*/silo.toml")):
            path.write_text(path.read_text().replace("insecure-secret-seed = 3\n", ""))
        self.reread()

    def let_be_edge(self, name: str) -> None:
        """Let a site have no PyTorch, on one machine too."""
        path = self.folder / "here.toml"
        path.write_text(path.read_text() + f'\n[engine]\nedge = ["{name}"]\n')
        path = self.folder / name / "silo.toml"
        path.write_text(path.read_text().replace("[data]", "edge = true\n[data]", 1))
        self.reread()

    def on_one_machine(self, out: Path | None) -> Federation:
        with BUILDING:
            return federation_of(self.here, out)

    def start(self, *names: str) -> None:
        for name in names or self.names:
            path = self.folder / name / "silo.toml"
            self.workers[name] = SiteWorker(
                lambda name=name, path=path: self._site(name, path),
                lambda path=path: trust_of(silo_file.load(path), path.parent),
            )

    def stop(self, *names: str) -> None:
        """End processes without a word, as a power cut does."""
        for name in names or list(self.workers):
            self.workers.pop(name).close()

    def serve(
        self,
        out: Path,
        *,
        resume: bool = False,
        progress: Any = None,
        run_file: RunFile | None = None,
        least: int = 2,
        wait: float = 20.0,
        identity: Identity = SERVER,
    ) -> Result:
        run_file = run_file or self.run_file
        path = run_file.secure_aggregation.roster
        keys = None if path is None else Roster.load(run_file.resolve(path)).keys
        with BUILDING:
            federation = told.server_side(run_file, out)

        def transport(codec: Codec, place: CheckpointId, recorder: Recorder | None) -> Sites:
            hello = hello_of(federation, self.run_file, self.text, place, run_file.engine.torch_versions)
            deadline = run_file.engine.deadline
            given = {"keys": keys, "recorder": recorder, "deadline": deadline}
            made = Sites(self.names, self.send, codec, hello, identity, **given)
            made.gather(least, wait)
            self.made.append(made)
            return made

        ended = federation.train(self.rounds, SEED, resume=resume, progress=progress, transport=transport)
        released = b""
        if ended.released is not None:
            inputs = json.loads((out / "inputs.json").read_text())
            released = pack_released(inputs, read_model(out, "released.safetensors"))
        self.made[-1].end(released)
        return ended

    def send(self, packed: Mapping[str, bytes], timeout: float, long: bool) -> Iterator[tuple[str, bytes | Missing]]:
        return ((name, self.wrap(name, data)) for name, data in packed.items())

    def kept(self, name: str) -> Path:
        """The one run folder of a site."""
        (found,) = [path for path in (self.folder / name / "kept").iterdir() if path.is_dir()]
        return found

    def _ask(self, name: str, data: bytes) -> bytes | Missing:
        worker = self.workers.get(name)
        return DEAD if worker is None else worker.answer(data)

    def _site(self, name: str, path: Path) -> Site:
        with BUILDING:
            return Site(silo_file.load(path), self.text, self.engine_names[name])
