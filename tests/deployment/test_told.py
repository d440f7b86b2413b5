"""What sites are told, and what a site makes of it before it takes part: nothing more is told than it needs, and
nothing is done that it has not agreed to."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refused_rows import Row, refused

from moretta.config import run_files, silo_file
from moretta.config.run_files import RunFile
from moretta.contract.messages import Stamp
from moretta.deployment import shared_settings as told
from moretta.deployment import site_policy
from moretta.deployment.agreed_settings import SiteAgreement
from moretta.deployment.site import Site, pack_released, unpack_released
from moretta.engines.checkpoint import CheckpointId
from moretta.engines.flare.envelope import Busy, Hello, Refused, Reply, digest_of
from moretta.engines.flare.signing import ServerSession, Trust
from moretta.engines.flare.site_worker import UNFIT, SiteWorker
from moretta.errors import CodecError, ParameterError, PolicyError
from moretta.models import catalogue
from moretta.protocols.common import modules
from moretta.protocols.common.accountant import epsilon
from moretta.protocols.fedsgd.messages import TrainOn
from moretta.run import record
from moretta.secure_aggregation.identity import Identity, public_line

pytestmark = pytest.mark.usefixtures("one_process")
SITES = 'source = "sites"\ninputs = [4]\nclasses = 3'
ENGINE = 'name = "flare"\nsites = ["silo-1", "silo-2", "silo-3"]'
FEDSGD = 'name = "fedsgd"\nlearning-rate = 0.1'
CGD = 'name = "cgd"\nlearning-rate = 0.3\ndelta = 0.1'
PBPFL = 'name = "pbpfl"\nlearning-rate = 0.1'
MLP = 'source = "mlp"\nhidden = [5]'


def toml(
    *,
    run: str = "",
    data: str = SITES,
    model: str = MLP,
    protocol: str = FEDSGD,
    engine: str = ENGINE,
    more: str = "",
) -> str:
    return (
        f'[run]\nname = "run"\nrounds = 3\nseed = 7\n{run}\n[data]\n{data}\n[model]\n{model}\n[protocol]\n{protocol}\n'
        f"[engine]\n{engine}\n{more}"
    )


def load(folder: Path, **sections: str) -> RunFile:
    (folder / "many.toml").write_text(toml(**sections))
    return run_files.load(folder / "many.toml")


def site(folder: Path, silo: str = "", *, name: str = "silo-1", rows: int = 20, limits: str = "") -> silo_file.SiloFile:
    generator = np.random.default_rng(1)
    x = generator.normal(size=(rows, 4)).astype(np.float32)
    np.savez(folder / "rows.npz", x=x, y=generator.integers(0, 3, rows))
    (folder / "silo.toml").write_text(
        f'[silo]\nname = "{name}"\n{silo}\n[data]\nsource = "rows.npz"\n[limits]\n{limits}\n'
    )
    return silo_file.load(folder / "silo.toml")


# -- what is told ------------------------------------------------------------------------------------------------------


def test_nothing_is_told_that_is_the_servers_own(tmp_path: Path) -> None:
    run_file = load(
        tmp_path,
        run='out = "/concealed/out"\ninsecure-secret-seed = 424242\nrecord-views = true\nevaluate-every = 1',
        data=f'{SITES}\ntest = "concealed-test.npz"',
        protocol=f'{FEDSGD}\nwarm-start = "concealed-start.safetensors"',
        more='[secure-aggregation]\nroster = "concealed-roster.toml"',
    )
    text = told.shared_text(run_file)
    assert "concealed" not in text
    assert "424242" not in text
    assert str(tmp_path) not in text
    tables = tomllib.loads(text)
    assert not {"out", "insecure-secret-seed", "evaluate-every", "base"} & tables["run"].keys()
    assert not tables["run"]["record-views"]
    assert "test" not in tables["data"]
    assert "warm-start" not in tables["protocol"]
    assert not {"roster", "identity"} & tables["secure-aggregation"].keys()
    assert run_file.run.insecure_secret_seed == 424242  # the server's own copy is as it was


def test_what_is_only_the_servers_changes_no_digest(tmp_path: Path) -> None:
    plain = digest_of(told.shared_text(load(tmp_path)))
    same = load(
        tmp_path,
        run='out = "elsewhere"\ninsecure-secret-seed = 1\nrecord-views = [1]\nevaluate-every = 2',
        data=f'{SITES}\ntest = "test.npz"',
    )
    assert digest_of(told.shared_text(same)) == plain


@pytest.mark.parametrize(
    "changed",
    [
        {"protocol": FEDSGD.replace("0.1", "0.2")},
        {"protocol": f"{FEDSGD}\nclip-norm = 1.0"},
        {"protocol": FEDSGD.replace("fedsgd", "fedavg")},
        {"model": MLP.replace("5", "6")},
        {"data": SITES.replace("classes = 3", "classes = 4")},
        {"data": f"{SITES}\nbatch-size = 8"},
        {"data": f"{SITES}\nleast-rows = 20"},
        {"run": "participation = 0.5"},
        {"run": 'dtype = "float64"'},
        {"engine": ENGINE.replace("silo-3", "silo-4")},
        {"more": '[secure-aggregation]\nscheme = "none"'},
        {"more": "[secure-aggregation]\nthreshold = 3"},
    ],
)
def test_whatever_a_role_depends_on_changes_the_digest(tmp_path: Path, changed: dict[str, str]) -> None:
    assert digest_of(told.shared_text(load(tmp_path, **changed))) != digest_of(told.shared_text(load(tmp_path)))


def test_each_edit_of_what_is_told_changes_its_digest(tmp_path: Path) -> None:
    text = told.shared_text(load(tmp_path))
    digests = {digest_of(text)}
    for place in range(0, len(text), 37):
        digests.add(digest_of(text[:place] + "#" + text[place:]))
    assert len(digests) == 1 + len(range(0, len(text), 37))


def test_what_is_told_reads_back_to_the_same_wherever_it_is_read(tmp_path: Path) -> None:
    """The server's job checks its digest that way, having read its run file elsewhere."""
    run_file = load(tmp_path)
    text = told.shared_text(run_file)
    assert told.shared_text(run_files.loads(text, Path("/elsewhere/told.toml"))) == text
    with pytest.raises(ParameterError, match=r"\[run\] base is a path on the machine that sent this run file"):
        run_files.loads(run_files.dump(run_file), Path("run.toml"))
    assert told.shared_text(run_files.loads(run_files.dumps(run_file), Path("/base/run.toml"))) == text


@given(
    name=st.text(st.characters(exclude_categories=["C"], exclude_characters="/\\"), min_size=1, max_size=20),
    rate=st.floats(1e-300, 1e300),
    seed=st.integers(0, 2**63 - 1),
)
def test_odd_values_read_back_to_the_same(name: str, rate: float, seed: int) -> None:
    run_file = run_files.loads(toml(), Path("run.toml"))
    run_file = run_file.model_copy(
        update={
            "run": run_file.run.model_copy(update={"name": f"_{name}", "seed": seed}),
            "protocol": run_file.protocol.model_copy(update={"learning_rate": rate}),
        }
    )
    text = told.shared_text(run_file)
    assert told.shared_text(run_files.loads(text, Path("told.toml"))) == text


# -- run files for many machines ---------------------------------------------------------------------------------------


# -- the server's side -------------------------------------------------------------------------------------------------


def weights(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def built(seed: int) -> torch.Tensor:
    return weights(catalogue.build("mlp", inputs=(4,), outputs=3, seed=seed, hidden=[5]))


@pytest.mark.parametrize("protocol", ["fedsgd", "pbpfl"])
def test_nobody_can_rebuild_the_start_from_what_is_told(protocol: str, tmp_path: Path) -> None:
    """PBPFL hides the model; and of any protocol two runs of one seed over other sites have no upload in common."""
    run_file = load(tmp_path, protocol=PBPFL) if protocol == "pbpfl" else load(tmp_path)
    starts = [weights(told.server_side(run_file, tmp_path / "out").model) for _ in range(3)]
    assert not any(torch.equal(one, two) for one, two in zip(starts, [*starts[1:], built(7)], strict=True))
    assert not any(torch.equal(one, built(7)) for one in starts)


def test_in_tests_and_around_confined_starts_it_follows_from_the_seed(tmp_path: Path) -> None:
    for changes in ({"protocol": PBPFL, "run": "insecure-secret-seed = 3"}, {"protocol": CGD}):
        run_file = load(tmp_path, **changes)
        assert torch.equal(weights(told.server_side(run_file, tmp_path / "out").model), built(7))


def test_the_server_has_no_rows_but_its_own_for_the_test(tmp_path: Path) -> None:
    np.savez(tmp_path / "test.npz", x=np.ones((5, 4), np.float32), y=np.arange(5) % 3)
    federation = told.server_side(load(tmp_path, data=f'{SITES}\ntest = "test.npz"'), tmp_path / "out")
    assert [(silo.name, len(silo.x), silo.remote) for silo in federation.silos] == [
        ("silo-1", 0, True), ("silo-2", 0, True), ("silo-3", 0, True),
    ]  # fmt: skip
    assert federation.test is not None
    assert federation.test[0].shape == (5, 4)
    np.savez(tmp_path / "test.npz", x=np.ones((5, 3), np.float32), y=np.arange(5) % 3)
    with pytest.raises(ParameterError, match=r"\[data\] test"):
        told.server_side(load(tmp_path, data=f'{SITES}\ntest = "test.npz"'), tmp_path / "out")


def test_silos_of_a_grid_are_named_row_by_row(tmp_path: Path) -> None:
    run_file = load(
        tmp_path,
        data=f'{SITES}\npartition = "grid"\ngrid = [2, 2]\nlabel-holder = [1, 2]',
        protocol='name = "cgd"\nlearning-rate = 0.1',
        engine='name = "flare"\nsites = ["a", "b", "c", "d"]',
    )
    silos = told.silos_of(run_file)
    assert [(silo.name, silo.row, silo.columns, silo.labelled) for silo in silos] == [
        ("a", "row-1", (0, 1), True), ("b", "row-1", (2, 3), False),
        ("c", "row-2", (0, 1), False), ("d", "row-2", (2, 3), True),
    ]  # fmt: skip


# -- a site's side -----------------------------------------------------------------------------------------------------

NETS = """
from pathlib import Path
from torch import nn

def build():
    Path(__file__).with_name("called").touch()
    return nn.Linear(4, 3)
"""


def nets(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "site_nets.py").write_text(NETS)
    return folder / "called"


@pytest.fixture(autouse=True)
def _forget_nets() -> Any:
    yield
    sys.modules.pop("site_nets", None)


def made(file: silo_file.SiloFile, text: str, certificate: str = "silo-1") -> Site:
    return Site(file, text, certificate)


def test_code_that_a_site_has_not_agreed_to_is_not_run(tmp_path: Path) -> None:
    called = nets(tmp_path)
    text = told.shared_text(load(tmp_path, model='source = "site_nets:build"'))
    with pytest.raises(PolicyError, match=r"is code that this site has not agreed to run"):
        made(site(tmp_path), text)
    harmful = told.shared_text(
        load(tmp_path, model=f'source = "subprocess:call"\nargs = ["touch", "{tmp_path / "touched"}"]')
    )
    with pytest.raises(PolicyError, match=r"is code that this site has not agreed to run"):
        made(site(tmp_path, 'models = ["site_nets:build"]'), harmful)
    assert not called.exists()
    assert not (tmp_path / "touched").exists()
    made(site(tmp_path, 'models = ["site_nets:build"]'), text)
    assert called.exists()


LOSSES = """
from pathlib import Path
from torch import nn

Path(__file__).with_name("imported").touch()

def own(outputs, targets):
    return nn.functional.mse_loss(outputs, targets, reduction="none").sum(dim=1)
"""


def test_a_loss_is_code_that_a_site_agrees_to_and_has_alike(tmp_path: Path) -> None:
    (tmp_path / "site_losses.py").write_text(LOSSES)
    run_file = load(tmp_path, protocol=FEDSGD + '\nown-loss = "site_losses:own"', run='metrics = ["site_losses:own"]')
    text = told.shared_text(run_file)
    assert tomllib.loads(text)["run"]["metrics"] == []
    with pytest.raises(PolicyError, match=r"\[protocol\] own-loss = 'site_losses:own' of the run is code that this"):
        made(site(tmp_path), text)
    assert not (tmp_path / "imported").exists()
    made(site(tmp_path, 'models = ["site_losses:own"]'), text)
    assert (tmp_path / "imported").exists()
    plain = load(tmp_path)
    federation = told.site_side(plain, site(tmp_path))
    before = told.model_digest(federation, run_file)
    assert before != told.model_digest(federation, plain)
    (tmp_path / "site_losses.py").write_text(LOSSES + "\n# another\n")
    sys.modules.pop("site_losses", None)
    assert told.model_digest(federation, run_file) != before
    sys.modules.pop("site_losses", None)


def test_agreed_code_is_the_sites_own_wherever_the_server_points(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    ours, theirs = nets(tmp_path / "here"), nets(tmp_path / "theirs")
    text = told.shared_text(load(tmp_path, model='source = "site_nets:build"'))
    text = text.replace("[run]\n", f'[run]\nbase = "{tmp_path / "theirs"}"\n', 1)
    file = site(tmp_path / "here", 'models = ["site_nets:build"]')
    with pytest.raises(PolicyError, match=r"\[run\] base is a path on the machine that sent this run file"):
        made(file, text)
    assert not ours.exists()
    assert not theirs.exists()


def test_a_site_with_a_roster_masks_or_takes_no_part(tmp_path: Path) -> None:
    for name in ("silo-1", "silo-2", "silo-3"):
        Identity.fresh().save(tmp_path / "keys" / name)
    entries = [
        f'[[silo]]\nname = "{name}"\nkey = "{public_line(Identity.load(tmp_path / "keys" / name).public_key)}"\n'
        for name in ("silo-1", "silo-2", "silo-3")
    ]
    (tmp_path / "roster.toml").write_text("".join(entries))
    keyed = site(tmp_path, 'roster = "roster.toml"\nidentity = "keys/silo-1"')
    open_ = told.shared_text(load(tmp_path, more='[secure-aggregation]\nscheme = "none"'))
    with pytest.raises(PolicyError, match="which this site does not trust, as it has a roster"):
        made(keyed, open_)
    assert len(made(keyed, told.shared_text(load(tmp_path))).fingerprint) == 39
    stolen = site(tmp_path, 'roster = "roster.toml"\nidentity = "keys/silo-2"')
    with pytest.raises(ParameterError, match="identity of silo `silo-1` is not the one that the roster lists"):
        enter(made(stolen, told.shared_text(load(tmp_path))), load(tmp_path))


@refused("told.txt")
def test_what_cannot_be_is_refused(row: Row, request: pytest.FixtureRequest) -> None:
    row.play(globals(), request)


def test_what_is_told_that_is_no_run_for_many_machines(tmp_path: Path) -> None:
    for text in (
        "", "[run]", "x", told.shared_text(load(tmp_path)).replace('"flare"', '"in-process"'),
        told.shared_text(load(tmp_path)).replace('source = "sites"', 'source = "/etc/passwd.csv"'),
    ):  # fmt: skip
        with pytest.raises(PolicyError) as caught:
            made(site(tmp_path), text)
        assert str(tmp_path) not in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1


def test_a_site_sets_what_is_its_own(tmp_path: Path) -> None:
    run_file = run_files.loads(told.shared_text(load(tmp_path, run="insecure-secret-seed = 5")), tmp_path / "told.toml")
    assert told.site_side(run_file, site(tmp_path)).spec.run.insecure_secret_seed is None
    federation = told.site_side(run_file, site(tmp_path, "insecure-secret-seed = 9"))
    assert federation.spec.run.insecure_secret_seed == 9
    assert [silo.remote for silo in federation.silos] == [False, True, True]


def test_what_is_wrong_with_a_sites_rows_is_its_own_to_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_file = load(tmp_path, data=SITES.replace("[4]", "[5]"))
    file, text = site(tmp_path), told.shared_text(run_file)
    server = Identity.fresh()
    worker = SiteWorker(
        lambda: Site(file, text, "silo-1"), lambda: Trust("silo-1", (server.public_key,), None, tmp_path)
    )
    session = ServerSession(server, Hello(run="a", round=0, session=0, job="j", model="m", versions={}, torch=()))

    def greet() -> Reply:
        data, serial = session.pack(session.hello, {"silo-1": worker.process_id})
        return session.open(worker.answer(data), worker.process_id, serial, None)[0]

    with caplog.at_level("ERROR", "moretta"):
        while isinstance(reply := greet(), Busy):
            pass
    worker.close()
    assert isinstance(reply, Refused)
    assert re.fullmatch(f"{UNFIT}[0-9a-f]{{8}}", reply.sentence)
    assert f"cannot take part (ticket {reply.sentence.removeprefix(UNFIT)}): " in caplog.text
    assert "expected samples of shape [5]" in caplog.text


def hello(run_file: RunFile, **changed: Any) -> Hello:
    federation = told.server_side(run_file, Path("out"))
    given: dict[str, Any] = {
        "run": "0123abcd",
        "round": 0,
        "session": 0,
        "job": digest_of(told.shared_text(run_file)),
        "model": told.model_digest(federation, run_file),
        "versions": record.versions(),
        "torch": run_file.engine.torch_versions,
    }
    return Hello(**given | changed)


def enter(one: Site, run_file: RunFile, **changed: Any) -> Any:
    return one.enter(hello(run_file, **changed))


@pytest.fixture
def run_file(tmp_path: Path) -> RunFile:
    return load(tmp_path)


@pytest.fixture
def one(tmp_path: Path, run_file: RunFile) -> Site:
    return made(site(tmp_path), told.shared_text(run_file))


def test_a_role_is_cast_and_its_first_state_kept_in_the_sites_folder(
    one: Site, run_file: RunFile, tmp_path: Path
) -> None:
    enter(one, run_file)
    state = tmp_path / "moretta" / "0123abcd" / "checkpoint" / "round-000000" / "silo-silo-1.safetensors"
    assert state.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "moretta" / "0123abcd").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("run", ["../up", "/absolute", "a/b", ".", "..", "", "a\x00b"])
def test_no_run_is_named_by_a_path(one: Site, run_file: RunFile, run: str) -> None:
    with pytest.raises(ValueError, match="run"):
        enter(one, run_file, run=run)


def test_another_job_is_refused(one: Site, run_file: RunFile) -> None:
    with pytest.raises(PolicyError, match=r"this site's run settings differ from the server's .*edited by hand"):
        enter(one, run_file, job="0" * 64)


def test_another_model_is_refused(one: Site, run_file: RunFile) -> None:
    with pytest.raises(PolicyError, match=r"builds another model than the server from \[model\] source"):
        enter(one, run_file, model="0" * 64)


def test_the_digest_of_a_model_is_of_its_layers_and_not_of_its_weights(tmp_path: Path) -> None:
    def digest(**sections: str) -> str:
        run_file = load(tmp_path, **sections)
        return told.model_digest(told.server_side(run_file, tmp_path), run_file)

    digests = {digest(model=MLP), digest(model=MLP, run="dtype = 'float32'"), digest(protocol=PBPFL)}
    assert len(digests) == 1
    assert digest(model=MLP.replace("5", "6")) not in digests
    found = set()
    for function in ("relu", "tanh"):  # of no tensor's shape, and of no layer's name
        (tmp_path / "digest_nets.py").write_text(
            "import torch\n\n\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n"
            f"        return torch.{function}(super().forward(x))\n\n\ndef build():\n    return Net(4, 3)\n"
        )
        found.add(digest(model='source = "digest_nets:build"'))
    assert len(found) == 2


@pytest.mark.parametrize(
    ("ours", "theirs", "allowed", "taken"),
    [
        ("2.6.0", "2.6.0", (), True),
        ("2.6.1+cu124", "2.6.0", (), True),
        ("2.7.0", "2.6.0", (), False),
        ("2.7.0", "2.6.0", ("2.7",), True),
        ("2.12.0", "2.6.0", ("2.1",), False),
        ("2.1.0", "2.6.0", ("2.12",), False),
        ("2.6.0", "2.7.0", ("2.8",), False),
    ],
)
def test_versions_of_torch_are_as_the_server_allows(
    one: Site,
    run_file: RunFile,
    monkeypatch: pytest.MonkeyPatch,
    ours: str,
    theirs: str,
    allowed: tuple[str, ...],
    taken: bool,
) -> None:
    said = hello(run_file, versions={**record.versions(), "torch": theirs}, torch=allowed)
    monkeypatch.setattr(one._role, "torch", ours)
    if taken:
        one.enter(said)
        return
    with pytest.raises(PolicyError, match=r"runs PyTorch .*\[engine\] torch-versions"):
        one.enter(said)


@pytest.mark.parametrize("versions", [{"moretta": "0.0.1"}, {}, {"torch": "2.6.0"}])
def test_another_moretta_is_refused(one: Site, run_file: RunFile, versions: dict[str, str]) -> None:
    with pytest.raises(PolicyError, match=r"runs Moretta .*, but the server .*; install the same"):
        enter(one, run_file, versions=versions)


def test_a_state_of_another_run_is_not_taken_up(
    one: Site, run_file: RunFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client, _ = enter(one, run_file)
    one._place = CheckpointId("another", 2, 0, "")
    one.keep(client, 2)
    enter(one, run_file, round=2, session=1)
    assert "has no state of round 2 or before" in caplog.text


def test_no_round_that_a_server_names_brings_back_what_a_role_has_told(tmp_path: Path) -> None:
    """Nor another secret root: other noise on the same gradient, or another start, would tell what they hide."""
    run_file = load(tmp_path, protocol='name = "baffle"\nlearning-rate = 0.1\nk = 2\nsigma = 0.01')
    one = made(site(tmp_path), told.shared_text(run_file))
    client, _ = enter(one, run_file)
    (root,) = (value for key, value in client.state().items() if key.endswith("secret_root"))
    told_of = client.state() | {"seed/revealed-for/7.0": b"a digest"}
    client.restore(told_of)
    one._remember(client)  # as it does with each answer
    for session, number in enumerate((0, 10, 5), 1):  # whatever the server says that it stands at
        again, _ = enter(one, run_file, session=session, round=number)
        assert again.state() == told_of
        assert root in again.state().values()
    for number in (10, 20, 30):
        one.keep(client, number)
    with pytest.raises(ParameterError, match="has no state of this run at round 9 or before"):
        enter(one, run_file, session=9, round=9)
    lasting = tmp_path / "moretta" / "0123abcd" / "lasting.json"
    assert lasting.stat().st_mode & 0o777 == 0o600


NOISED = f"{FEDSGD}\ndp-noise = {{}}\ndp-clip = 1.0"
LEAST = f"{SITES}\nleast-rows = 9\nbatch-size = 0"
CLEAR = '[secure-aggregation]\nscheme = "none"'


def test_a_server_that_tells_another_noise_under_the_same_run_does_not_cancel_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site keeps its secret root by the run's id, which the server names: dp-noise 8 and then 9 gave the gradient."""
    uploads = {}
    for session, noise in enumerate((8.0, 9.0)):
        run_file = load(tmp_path, data=LEAST, protocol=NOISED.format(noise), more=CLEAR)
        file, text = site(tmp_path), told.shared_text(run_file)
        if session:  # the operator has to be talked into it first
            with pytest.raises(PolicyError, match=r"\[protocol\] dp-noise: 8.0 -> 9.0"):
                made(file, text)
            SiteAgreement(file.out).accept(SiteAgreement(file.out).waiting())
        one = made(file, text)
        if session:
            with pytest.raises(PolicyError, match="expected the settings that this site began run 0123abcd with"):
                enter(one, run_file, session=session)
            monkeypatch.setattr(site_policy, "one_run", lambda *of: None)  # and without that rule
        client, _ = enter(one, run_file, session=session)
        model = modules.arrays(told.site_side(run_file, one._file).model)
        ask = TrainOn(stamp=Stamp("0123abcd", 1, 0), parameters=model, encoding={})
        answer = client.answer(ask)
        one.answered(client, ask, answer)
        uploads[noise] = np.concatenate([np.ravel(value) for _, value in sorted(answer.tensors.items())])
    off = 9 * uploads[8.0] - 8 * uploads[9.0]  # the gradient of 20 rows, each of norm 1 at most, if noise had gone
    assert np.linalg.norm(off) > 0.5 * 72 * np.sqrt(2 * off.size) / 20 > 10
    one.end(client, b"")
    stated = json.loads((tmp_path / "moretta" / "0123abcd" / "privacy.json").read_text())
    assert stated["releases"] == 2  # of both, whatever the server says; and epsilon as of the noise told last
    assert stated["epsilon"] == epsilon(9.0, 1e-5, 1.0, 2)


def test_a_damaged_state_is_a_sentence(one: Site, run_file: RunFile, tmp_path: Path) -> None:
    enter(one, run_file)
    (path,) = tmp_path.glob("moretta/*/checkpoint/*/silo-silo-1.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ParameterError, match="the checkpoint is damaged"):
        enter(one, run_file, session=1)


# -- what a run releases -----------------------------------------------------------------------------------------------

TENSORS = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "scalar": np.array(3, np.int64)}


def test_what_was_released_comes_back() -> None:
    inputs, tensors = unpack_released(pack_released({"shape": [4], "task": "ü"}, TENSORS))
    assert inputs == {"shape": [4], "task": "ü"}
    assert tensors.keys() == TENSORS.keys()
    for name, array in TENSORS.items():
        assert (tensors[name].dtype, tensors[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(tensors[name], array)


@given(st.data())
def test_any_bytes_are_a_released_model_or_one_error(data: st.DataObject) -> None:
    damaged = bytearray(pack_released({"shape": [4]}, TENSORS))
    if data.draw(st.booleans()):
        damaged = bytearray(data.draw(st.binary(max_size=60)))
    for _ in range(data.draw(st.integers(0, 4)) if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        inputs, tensors = unpack_released(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))
    except CodecError:
        return
    assert isinstance(inputs, dict)
    assert all(isinstance(value, np.ndarray) for value in tensors.values())


def test_a_pbpfl_silo_is_not_told_the_start(tmp_path: Path) -> None:
    """Neither of what it is told, nor of what it has built, follows the model that the server begins with."""
    run_file = load(tmp_path, protocol=PBPFL)
    theirs = modules.arrays(told.server_side(run_file, tmp_path).model)
    ours = modules.arrays(
        told.site_side(run_files.loads(told.shared_text(run_file), tmp_path / "told.toml"), site(tmp_path)).model
    )
    for name, array in theirs.items():
        assert array.shape == ours[name].shape
        assert array.tobytes() != ours[name].tobytes()


def test_a_runs_model_above_a_sites_limit_is_refused_before_it_is_built(tmp_path: Path) -> None:
    """Before there were [limits] of it, a site built whatever [model] of the run came to."""
    from loopback import Machines

    many = Machines(tmp_path)
    huge = run_files.loads(many.text.replace("hidden = [\n    5,\n]", "hidden = [2147483648, 2147483648]"), tmp_path)
    assert huge.model.arguments["hidden"] == [2**31, 2**31]
    file = silo_file.load(tmp_path / "silo-1" / "silo.toml")
    with pytest.raises(PolicyError, match="allows 100000000 in 10000 here"):
        told.site_side(huge, file)
    less = file.model_copy(update={"limits": file.limits.model_copy(update={"parameters": 10})})
    with pytest.raises(PolicyError, match="allows 10 in 10000 here"):
        told.site_side(run_files.loads(many.text, tmp_path), less)
    assert told.site_side(run_files.loads(many.text, tmp_path), file).model is not None
