"""A site that takes part without PyTorch: it says what the same silo says in a run on one machine, byte for byte."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from refused_rows import Row, refused
from test_transcripts import models_in, seen
from test_without_torch import ALL, without

from moretta.config import run_files, silo_file
from moretta.config.run_files import RunFile
from moretta.contract.messages import Stamp
from moretta.data.silo import holding_back
from moretta.deployment import shared_settings as told
from moretta.deployment.site import EdgeRole, Site
from moretta.deployment.site_policy import greet, permitted
from moretta.engines.checkpoint import CheckpointId, last_checkpoint
from moretta.engines.flare.envelope import Hello, digest_of
from moretta.engines.journal import HelpedFile
from moretta.engines.run_folder import RunFolder, read_json
from moretta.errors import PolicyError
from moretta.protocols.baffle import onnx_export
from moretta.protocols.common.accountant import epsilon
from moretta.protocols.common.releases import Releases
from moretta.run import record
from moretta.run.federation import Federation
from moretta.run.inputs import RunRows
from moretta.secure_aggregation.identity import Identity, public_line

if TYPE_CHECKING:
    from loopback import Machines

pytest.importorskip("onnxruntime")
EDGE = "silo-2"
BAFFLE = 'name = "baffle"\nlearning-rate = 0.01\nk = 16\nloss = "cross-entropy"'
HELPED = HelpedFile("")  # not opened: the process would
HELLO = {"run": "run", "round": 0, "session": 0, "job": "j", "model": "m", "versions": {}, "torch": (), "outputs": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cross-entropy": (BAFFLE, {}),
    "mse, additive": (
        'name = "baffle"\nlearning-rate = 0.01\nk = 16',
        {"extra": '[secure-aggregation]\nscheme = "additive-shares"'},
    ),
    "dp-noise": (f"{BAFFLE}\ndp-noise = 1.0\ndp-clip = 1.0", {"sites": "least-rows = 20"}),
    "local epochs": (f'{BAFFLE}\nlocal-epochs = 1\noptimizer = "sgd"\nform = "central"\nema = 0', {}),
}


@pytest.fixture(autouse=True)
def _exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_export, "graph_of", graph_of)


EXPORT = onnx_export.graph_of
GRAPHS: dict[tuple[str, ...], bytes] = {}


def graph_of(model: Any, layout: Any, row_shape: Any, dtype: Any, precision: str, blocks: Any = ()) -> bytes:
    key = (
        layout.digest.hex() if isinstance(layout.digest, bytes) else layout.digest,
        str(dtype),
        precision,
        *map(str, blocks),
    )
    if key not in GRAPHS:
        GRAPHS[key] = EXPORT(model, layout, row_shape, dtype, precision, blocks)
    return GRAPHS[key]


def add(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


def with_edge(many: Machines, more: str = "") -> Machines:
    """Let one silo be an edge client: of the run on one machine, and at its site."""
    (many.folder / "here.toml").write_text((many.folder / "here.toml").read_text() + f'\n[engine]\nedge = ["{EDGE}"]\n')
    many.here = run_files.load(many.folder / "here.toml")
    add(many.folder / EDGE / "silo.toml", "[data]\n", f"edge = true\n[data]\n{more}")
    return many


def same(many: Machines, one: Path, out: Path) -> None:
    assert seen(out / "views" / "server") == seen(one / "views" / "server") != {}
    assert seen(many.kept(EDGE) / "views" / EDGE) == seen(one / "views" / EDGE) != {}
    ours, theirs = models_in(out), models_in(one)
    assert ours == theirs != {}
    assert (many.kept(EDGE) / "released.safetensors").read_bytes() == theirs["released.safetensors"]


@pytest.mark.parametrize("case", CASES)
def test_it_says_what_it_says_on_one_machine(case: str, machines: Callable[..., Machines], tmp_path: Path) -> None:
    protocol, settings = CASES[case]
    many = with_edge(machines(protocol, **{"rounds": 2, **settings}))
    one, out = tmp_path / "one", tmp_path / "many"
    many.on_one_machine(one).train(many.rounds, 7)
    many.start()
    result = many.serve(out)
    assert result.record["dropped"] == []
    assert all(line["edge_peak_mib"] > 0 for line in result.history)
    same(many, one, out)


def test_it_scores_what_it_holds_back_as_on_one_machine(machines: Callable[..., Machines], tmp_path: Path) -> None:
    many = with_edge(machines(BAFFLE, rounds=1, sites="score-at-silos = true"))
    for name in many.names:
        add(many.folder / name / "silo.toml", "[data]\n", "[data]\ntest-fraction = 0.25\n")
    whole = many.on_one_machine(tmp_path / "one")
    held = [holding_back(silo, 0.25, "test-fraction") for silo in whole.silos]
    spec = replace(whole.spec, data=whole.spec.data.model_copy(update={"score_at_silos": True}))
    alone = Federation.of(spec, whole.model, RunRows(held, whole.test), whole.out).train(many.rounds, 7)
    many.start()
    together = many.serve(tmp_path / "many")
    assert together.record["test"]["silos"] == alone.record["test"]["silos"]
    assert together.record["test"]["silos"]["rows"] == 15
    same(many, tmp_path / "one", tmp_path / "many")


def root_of(many: Machines) -> bytes:
    found = last_checkpoint(many.kept(EDGE) / "checkpoint")
    assert found is not None
    root = found[1][f"silo-{EDGE}"]["seed/secret_root"]
    assert isinstance(root, bytes)
    return root


def test_one_that_was_killed_keeps_its_secrets(machines: Callable[..., Machines], tmp_path: Path) -> None:
    many = with_edge(machines(BAFFLE))
    many.draw_secrets()
    roots = list[bytes]()

    def progress(number: int, of: int, line: object) -> None:
        roots.append(root_of(many))
        if number == 1:
            many.stop(EDGE)
            many.start(EDGE)

    many.start()
    result = many.serve(tmp_path / "out", progress=progress)
    assert len(result.history) == many.rounds
    assert {(gone["silo"], gone["round"]) for gone in result.record["dropped"]} <= {(EDGE, 2)}
    assert len({*roots, root_of(many)}) == 1


def test_it_is_chosen_by_the_silo_file(machines: Callable[..., Machines]) -> None:
    many = with_edge(machines(BAFFLE))
    made = [Site(silo_file.load(many.folder / name / "silo.toml"), many.text, name)._role for name in (EDGE, "silo-1")]
    assert [isinstance(role, EdgeRole) for role in made] == [True, False]


def test_a_model_of_other_tensors_is_refused_when_the_run_begins(
    machines: Callable[..., Machines], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import loopback

    many = with_edge(machines(BAFFLE, "[secure-aggregation]\nthreshold = 2", rounds=1))
    honest = loopback.hello_of
    monkeypatch.setattr(
        loopback, "hello_of", lambda *given: honest(*given).model_copy(update={"tensors": "of another model"})
    )
    many.start()
    (gone,) = {(one["silo"], one["reason"]) for one in many.serve(tmp_path / "out").record["dropped"]}
    assert gone[0] == EDGE
    assert "the server's model has other tensors than the silo's" in gone[1]


# -- without PyTorch ---------------------------------------------------------------------------------------------------

ABSENT = (*ALL, "pandas", "onnx", "onnxscript")
PROGRAM = """
import importlib.util, time
from pathlib import Path
if importlib.util.find_spec("nvflare"):
    import moretta.deployment.executor, moretta.deployment.join
from moretta.contract.codec import Codec
from moretta.config import silo_file
from moretta.deployment.site import Site
from moretta.engines.flare.site_worker import SiteWorker
from moretta.engines.flare.envelope import Busy, Hello, Poll, Submit
from moretta.engines.flare.signing import ServerSession, Trust
from moretta.contract.messages import Stamp
from moretta.protocols.baffle.silo.messages import MESSAGES, Commit
from moretta.protocols.common.silo_rows import schema_of
from moretta.secure_aggregation.identity import Identity

server = Identity.fresh()
make = lambda: Site(silo_file.load("{name}/silo.toml"), Path("told.toml").read_text(), "{name}")
worker = SiteWorker(make, lambda: Trust("{name}", (server.public_key,), None, Path("{name}/kept")))
session = ServerSession(server, Hello.model_validate_json(Path("hello.json").read_text()))

def say(request, body=b""):
    data, serial = session.pack(request, {{"{name}": worker.process_id}}, body)
    return session.open(worker.answer(data), worker.process_id, serial, None)

def ask(request, body=b"", again=None):
    reply, answer = say(request, body)
    while isinstance(reply, Busy):
        time.sleep(0.02)
        reply, answer = say(again or request)
    return reply, answer

here, _ = ask(session.hello)
assert (here.kind, here.name) == ("here", "{name}"), here
codec = Codec(schema_of(MESSAGES))
commit = codec.encode(Commit(stamp=Stamp("run", 1, 0), cohort=("silo-1", "silo-2")))
done, body = ask(Submit(number=1, work="answer"), commit, Poll(number=1, wait=1.0))
assert done.kind == "done" and done.peak_mib > 0, done
assert codec.decode(body).runs == "float32"
done, _ = ask(Submit(number=2, work="end"), b"", Poll(number=2, wait=1.0))
assert done.kind == "done", done
worker.close()

from moretta.deployment.doctor import examine
edge = examine(kit=None, silo=Path("{name}/silo.toml"), run=Path("many.toml"))
failed = [one.line() for one in edge if not one.passes and one.what != "nvflare"]
assert not failed, failed
assert not {absent} & set(sys.modules)
"""


def test_it_needs_no_torch(machines: Callable[..., Machines]) -> None:
    many = with_edge(machines(BAFFLE))
    federation = told.server_side(many.run_file, many.folder / "out")
    (many.folder / "hello.json").write_text(hello(many, federation).model_dump_json())
    (many.folder / "told.toml").write_text(many.text)
    without(ABSENT, PROGRAM.format(name=EDGE, absent=set(ABSENT)), many.folder)


def hello(many: Machines, federation: Federation) -> Hello:
    from loopback import hello_of

    return hello_of(federation, many.run_file, many.text, CheckpointId("run", 0, 0, ""))


# -- what is refused ---------------------------------------------------------------------------------------------------

RUN = """[run]
name = "run"
rounds = 2
[data]
source = "sites"
inputs = [4]
classes = 3
{data}
[model]
source = "mlp"
[protocol]
{protocol}
[engine]
name = "flare"
sites = ["silo-1", "silo-2", "silo-3"]
{more}
"""
PRIVATE = f"{BAFFLE}\ndp-noise = 1.0\ndp-clip = 1.0"
PLAIN = '[secure-aggregation]\nscheme = "none"'
KEYED = 'edge = true\nroster = "roster.toml"\nidentity = "keys"'


@functools.cache
def identity(name: str) -> Identity:
    return Identity.fresh()


def roles(
    folder: Path,
    *,
    protocol: str = BAFFLE,
    data: str = "",
    more: str = "",
    silo: str = "edge = true",
    rows: str = "",
    limits: str = "",
    name: str = EDGE,
    listed: str = "silo-1 silo-2 silo-3",
    own: str = EDGE,
    classes: int = 3,
) -> tuple[RunFile, silo_file.SiloFile]:
    random = np.random.default_rng(1)
    x = random.normal(size=(20, 4)).astype(np.float32)
    np.savez(folder / "rows.npz", x=x, y=np.arange(20) % classes)
    keys = [f'[[silo]]\nname = "{one}"\nkey = "{public_line(identity(one).public_key)}"\n' for one in listed.split()]
    (folder / "roster.toml").write_text("".join(keys))
    identity(own).save(folder / "keys")
    (folder / "silo.toml").write_text(
        f'[silo]\nname = "{name}"\n{silo}\n[data]\nsource = "rows.npz"\n{rows}\n[limits]\n{limits}\n'
    )
    (folder / "run.toml").write_text(RUN.format(data=data, protocol=protocol, more=more))
    return run_files.load(folder / "run.toml"), silo_file.load(folder / "silo.toml")


def role_of(run_file: RunFile, file: silo_file.SiloFile) -> EdgeRole:
    return EdgeRole(permitted(told.shared_text(run_file), file), file)


@refused("edge_site.txt")
def test_what_cannot_be_is_refused(row: Row, request: pytest.FixtureRequest) -> None:
    row.play(globals(), request)


def test_a_site_states_its_own_releases_with_or_without_an_accountant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = EdgeRole(*roles(tmp_path, protocol=PRIVATE, data="least-rows = 9\nbatch-size = 4"))
    client, _ = role.client(Hello(**HELLO), HELPED)
    one = Releases()
    for number in range(3):
        one.add(Stamp("run", number, 0))
    client.restore({**client.state(), "private/releases": one.state()["releases"]})
    for there in (True, False):
        if not there:
            monkeypatch.setitem(sys.modules, "dp_accounting", None)
        role.leave(client, RunFolder(tmp_path))
        stated = read_json(tmp_path / "privacy.json")
        assert stated["releases"] == 3
        if there:  # of 20 rows, at three silos
            assert (stated["sampling_rate"], stated["noise_silos"]) == (0.2, 3)
            assert stated["epsilon"] == epsilon(1.0, 1e-5, 0.2, 3)
        else:
            assert "pip install 'moretta[dp]'" in stated["epsilon_is_not_stated"]


def test_targets_fit_the_servers_model(tmp_path: Path) -> None:
    run_file, file = roles(tmp_path)
    text = told.shared_text(run_file)
    role, hello = role_of(run_file, file), Hello(**{**HELLO, "job": digest_of(text), "versions": record.versions()})
    with pytest.raises(PolicyError, match="the server's model has 2 outputs, which do not fit the run's targets"):
        greet(hello.model_copy(update={"outputs": 2}), text, run_file)
    greet(hello, text, run_file)
    role.client(hello, HELPED)


def test_without_onnxruntime_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = roles(tmp_path)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(
        PolicyError, match=r"need onnxruntime, which is not installed; run: pip install 'moretta\[edge\]'"
    ):
        role_of(*given)


def test_a_run_of_other_models_needs_no_consent(tmp_path: Path) -> None:
    run_file, file = roles(tmp_path)
    foreign = run_file.model_copy(update={"model": run_file.model.model_copy(update={"source": "nets:build"})})
    role_of(foreign, file).client(Hello(**HELLO), HELPED)  # nothing is imported
    torch_site = file.model_copy(update={"silo": file.silo.model_copy(update={"edge": False})})
    with pytest.raises(PolicyError, match="code that this site has not agreed to run"):
        permitted(told.shared_text(foreign), torch_site)


def test_a_loss_of_the_run_s_own_is_not_for_it(tmp_path: Path) -> None:
    run_file, file = roles(tmp_path)
    own = run_file.model_copy(update={"protocol": run_file.protocol.model_copy(update={"own_loss": "losses:own"})})
    with pytest.raises(PolicyError, match="is code that this site has not agreed to run"):
        role_of(own, file)
    consenting = file.model_copy(update={"silo": file.silo.model_copy(update={"models": ("losses:own",)})})
    with pytest.raises(PolicyError, match="edge clients compute the built-in losses alone"):
        role_of(own, consenting)
