"""Jobs for a FLARE that is there already: what is in one, that none is edited by hand, and whose turn it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from filelock import FileLock, Timeout
from nvflare.lighter.utils import sign_folders

from moretta.config import run_files
from moretta.config.run_files import RunFile
from moretta.deployment import job
from moretta.engines import folder_lock
from moretta.engines.flare.envelope import digest_of
from moretta.engines.folder_lock import take_turn
from moretta.errors import ParameterError, PolicyError
from moretta.secure_aggregation.identity import Identity, public_line

RUN = """
[run]
name = "joint-run"
rounds = 3
insecure-secret-seed = 424242
out = "concealed-out"
[data]
source = "sites"
inputs = [4]
classes = 3
test = "concealed.npz"
[model]
source = "mlp"
hidden = [5]
[protocol]
name = "fedsgd"
learning-rate = 0.1
[engine]
name = "flare"
sites = ["north", "south"]
"""
KEY = Identity(b"the server's key, for tests only".ljust(32)[:32])
SERVER = Path("moretta-server", "config", "config_fed_server.json")
SITE = Path("moretta-site", "config", "config_fed_client.json")


@pytest.fixture
def run_file(tmp_path: Path) -> RunFile:
    (tmp_path / "run.toml").write_text(RUN)
    return run_files.load(tmp_path / "run.toml")


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def arguments(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    (workflow,), (executor,) = read(folder / SERVER)["workflows"], read(folder / SITE)["executors"]
    return workflow["args"], executor["executor"]["args"]


def test_a_job_is_three_files_of_plain_json(run_file: RunFile, tmp_path: Path) -> None:
    job.write_job(run_file, tmp_path / "job", KEY, wait=5.0)
    files = {path.relative_to(tmp_path / "job") for path in (tmp_path / "job").rglob("*") if path.is_file()}
    assert files == {Path("meta.json"), SERVER, SITE}
    meta = read(tmp_path / "job" / "meta.json")
    assert meta["name"] == "joint-run"
    assert meta["deploy_map"] == {"moretta-server": ["server"], "moretta-site": ["north", "south"]}
    assert "mandatory_clients" not in meta
    server, site = arguments(tmp_path / "job")
    assert server["wait"] == 5.0
    assert server["digest"] == site["digest"] == digest_of(site["told"])
    assert time.time() - 60 < site["made"] <= time.time()


def test_sites_get_nothing_of_the_servers(run_file: RunFile, tmp_path: Path) -> None:
    job.write_job(run_file, tmp_path / "job", KEY)
    at_sites = (tmp_path / "job" / SITE).read_text()
    assert "concealed" not in at_sites
    assert "424242" not in at_sites
    assert str(tmp_path) not in at_sites
    assert "concealed.npz" in (tmp_path / "job" / SERVER).read_text()


def test_a_roster_names_sites_as_flare_does(run_file: RunFile, tmp_path: Path) -> None:
    lines = []
    for name, more in (("north", 'engine-name = "site-1"'), ("south", "")):
        lines.append(f'[[silo]]\nname = "{name}"\nkey = "{public_line(Identity.fresh().public_key)}"\n{more}\n')
    (tmp_path / "roster.toml").write_text("".join(lines))
    (tmp_path / "run.toml").write_text(f'{RUN}\n[secure-aggregation]\nroster = "roster.toml"\n')
    keyed = run_files.load(tmp_path / "run.toml")
    assert job.site_names(keyed) == ["site-1", "south"]
    job.write_job(keyed, tmp_path / "job", KEY)
    assert read(tmp_path / "job" / "meta.json")["deploy_map"]["moretta-site"] == ["site-1", "south"]


def test_a_job_that_flare_signed_is_replaced(run_file: RunFile, tmp_path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (tmp_path / "owner.crt").write_text("a certificate")
    job.write_job(run_file, tmp_path / "job", KEY)
    before = sorted(path.name for path in (tmp_path / "job").rglob("*"))
    sign_folders(str(tmp_path / "job"), key, str(tmp_path / "owner.crt"))
    assert len([*(tmp_path / "job").rglob("*")]) > len(before)
    job.check_replaced(tmp_path / "job")
    job.write_job(run_file, tmp_path / "job", KEY)
    assert sorted(path.name for path in (tmp_path / "job").rglob("*")) == before


def test_only_a_job_of_ours_is_replaced(run_file: RunFile, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("absent", "empty", "new"):
        job.check_replaced(tmp_path / name)
    job.write_job(run_file, tmp_path / "new", KEY)
    job.check_replaced(tmp_path / "new")
    (tmp_path / "file").write_text("a file")
    for name in (
        "other/thesis.tex", "meta/meta.json", "deep/moretta-server/thesis.tex", "foreign/moretta-server/config/" +
        "config_fed_server.json", "beside/notes.txt", "below/moretta-site/custom/mine.py",
    ):  # fmt: skip
        folder = tmp_path / name.partition("/")[0]
        if folder.name in ("beside", "below"):
            job.write_job(run_file, folder, KEY)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
        with pytest.raises(ParameterError, match="exists and is not a job of Moretta; name another folder by --out"):
            job.check_replaced(folder)
    with pytest.raises(ParameterError, match="exists and is not a job of Moretta"):
        job.check_replaced(tmp_path / "file")


def test_a_run_for_one_machine_is_no_job(tmp_path: Path) -> None:
    here = RUN.replace('"sites"\ninputs = [4]\nclasses = 3\ntest = "concealed.npz"', '"wdbc"')
    (tmp_path / "run.toml").write_text(here[: here.index("[engine]")])
    with pytest.raises(ParameterError, match="is for one machine; many need name"):
        job.write_job(run_files.load(tmp_path / "run.toml"), tmp_path / "job", KEY)
    assert not (tmp_path / "job").exists()


# -- edited by hand ----------------------------------------------------------------------------------------------------


def test_a_site_refuses_what_was_edited(run_file: RunFile, tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    from moretta.deployment.executor import Executor

    job.write_job(run_file, tmp_path / "job", KEY)
    _, given = arguments(tmp_path / "job")
    edited = {**given, "told": given["told"].replace("learning-rate = 0.1", "learning-rate = 0.2")}
    assert edited != given
    with pytest.raises(PolicyError, match=r"this site's run settings differ from the server's .*edited by hand"):
        Executor(**edited)._site(tmp_path, "north")
    with pytest.raises(ParameterError, match=r"does not name this site's silo.toml"):
        Executor(**given)._site(tmp_path, "north")  # past the digest


@pytest.mark.parametrize("broken", ["", "{", "[]", '{"silo": 3}', "{}", '"silo.toml"'])
def test_a_kit_that_names_no_silo_file_is_a_sentence(tmp_path: Path, broken: str) -> None:
    pytest.importorskip("nvflare")
    from moretta.deployment.executor import file_of

    (tmp_path / "moretta.json").write_text(broken)
    with pytest.raises(ParameterError, match=r"does not name this site's silo.toml; run: moretta kit patch"):
        file_of(tmp_path)


class Local:
    """What FLARE's context tells a server's job: where its kit's local folder is."""

    def __init__(self, local: Path) -> None:
        self.local = local

    def get_engine(self) -> Local:
        return self

    def get_workspace(self) -> Local:
        return self

    def get_site_config_dir(self) -> str:
        return str(self.local)


def ended(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The sentence with which a server's job ends that FLARE makes with these arguments."""
    from moretta.deployment.controller import Controller

    said: list[str] = []
    monkeypatch.setattr(Controller, "system_panic", lambda self, sentence, context: said.append(sentence))
    Controller(**given).control_flow(None, Local(tmp_path / "kits" / "server" / "local"))
    return said.pop()


def test_the_server_refuses_what_was_edited(run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nvflare")
    KEY.save(tmp_path / "kits")
    job.write_job(run_file, tmp_path / "job", KEY)
    given, _ = arguments(tmp_path / "job")
    edits: list[dict[str, Any]] = [
        {"run": given["run"].replace("learning-rate = 0.1", "learning-rate = 0.2")},
        {"run": given["run"].replace('"south"', '"outsider"')},
        {"digest": "0" * 64},
        {"base": str(tmp_path / "elsewhere")},
        {"out": str(tmp_path / "out")},
        {"status": str(tmp_path / "status.json")},
        {"resume": True},
        {"wait": 1e9},
        {"made": 1.0},
        {"signature": ""},
        {"signature": "00" * 64},
        {"signature": "x"},
    ]
    before = sorted(tmp_path.rglob("*"))
    for edit in edits:
        sentence = ended({**given, **edit}, tmp_path, monkeypatch)
        assert "the job is not signed by this server's key: it was edited by hand" in sentence, edit
    assert sorted(tmp_path.rglob("*")) == before


def test_a_signed_job_is_played_once(run_file: RunFile, tmp_path: Path) -> None:
    job.write_job(run_file, tmp_path / "job", KEY)
    server, local = arguments(tmp_path / "job")[0], tmp_path / "local"
    signature = server.pop("signature")
    for _ in range(2):  # one that found too few sites may be submitted again
        job.check_signed(job.signed_part(**server), signature, KEY, local)
    job.play_once(signature, local)
    with pytest.raises(ParameterError, match="this job ran before"):  # a copy that came while the first one gathered
        job.play_once(signature, local)
    with pytest.raises(ParameterError, match="this job ran before"):
        job.check_signed(job.signed_part(**server), signature, KEY, local)
    job.write_job(run_file, tmp_path / "job", KEY)
    assert arguments(tmp_path / "job")[0]["signature"] != signature


def test_a_job_of_who_has_no_key_of_the_servers_runs_and_writes_nothing_there(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's code and a status file of any administrator who could submit jobs were the server's machine's."""
    pytest.importorskip("nvflare")
    KEY.save(tmp_path / "kits")
    (tmp_path / "theirs.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    theirs = run_file.model_copy(update={"model": run_file.model.model_copy(update={"source": "theirs:build"})})
    for key in (KEY, Identity.fresh()):
        job.write_job(theirs, tmp_path / "job", key, status=str(tmp_path / "status.json"), out=str(tmp_path / "out"))
        given, _ = arguments(tmp_path / "job")
        sentence = ended(given, tmp_path, monkeypatch)
        found = {name for name in ("ran", "status.json", "out") if (tmp_path / name).exists()}
        assert ("is not signed by this server's key" in sentence) == (key is not KEY)
        assert found == (set() if key is not KEY else {"ran", "status.json"})
        for name in found:
            (tmp_path / name).unlink()


# -- whose turn it is --------------------------------------------------------------------------------------------------

HOLDER = """
import os, signal, sys, time
from pathlib import Path
from filelock import FileLock
from moretta.engines.folder_lock import take_turn
folder, job, made, how = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
if how == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if how == "unsaid":
    lock = FileLock(folder / "job.lock")
    lock.acquire()
else:
    file = take_turn(folder, job, made)
    if how == "silent":
        os.utime(file, (0, 0))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Any]:
    """Start processes that hold the folder, as a site's job does."""
    started: list[subprocess.Popen[str]] = []

    def start(job: str, made: float, how: str = "") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path), job, str(made), how],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def holder(folder: Path) -> tuple[int, float]:
    content = read(folder / "job.json")
    return content["pid"], content["made"]


def test_an_older_process_of_the_same_run_is_ended(tmp_path: Path, hold: Any) -> None:
    process = hold("run", 1.0)
    assert holder(tmp_path) == (process.pid, 1.0)
    take_turn(tmp_path, "run", 2.0)
    assert process.wait(10) != 0
    assert holder(tmp_path) == (os.getpid(), 2.0)
    for made in (1.0, 2.0):  # nor does a second one of the same job, or an older one, take it from us
        with pytest.raises(ParameterError, match=f"process {os.getpid()}.*a second join of the site"):
            take_turn(tmp_path, "run", made)


def test_an_older_process_that_does_not_hear_is_killed(
    tmp_path: Path, hold: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "LEAVE", 0.2)
    process = hold("run", 1.0, "deaf")
    take_turn(tmp_path, "run", 2.0)
    assert process.wait(10) == -9


@pytest.mark.parametrize(("job", "made"), [("run", 1.0), ("run", 2.0), ("another", 1.0), ("another", 9.0)])
def test_a_job_whose_server_speaks_is_left_alone(tmp_path: Path, hold: Any, job: str, made: float) -> None:
    process = hold("run", 2.0)
    with pytest.raises(ParameterError, match=f"process {process.pid}.*another run, or a second join of the site"):
        take_turn(tmp_path, job, made)
    assert process.poll() is None


@pytest.mark.parametrize(("job", "made"), [("run", 1.0), ("another", 1.0), ("another", 9.0)])
def test_a_job_whose_server_is_silent_gives_way(tmp_path: Path, hold: Any, job: str, made: float) -> None:
    process = hold("run", 2.0, "silent")
    take_turn(tmp_path, job, made)  # whatever the clock of its server says
    assert process.wait(10) != 0


def test_a_holder_that_has_not_said_who_it_is_is_not_ended(
    tmp_path: Path, hold: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "LEAVE", 0.1)
    process = hold("run", 1.0, "unsaid")
    with pytest.raises(ParameterError, match="is held by another job of this site that does not end"):
        take_turn(tmp_path, "run", 2.0)
    assert process.poll() is None


def test_what_a_dead_job_left_behind_is_nobody(tmp_path: Path, hold: Any) -> None:
    process = hold("run", 9.0)
    process.kill()
    process.wait()
    take_turn(tmp_path, "run", 1.0)  # younger or not: it holds nothing any more
    assert holder(tmp_path) == (os.getpid(), 1.0)
    with pytest.raises(Timeout):
        FileLock(tmp_path / "job.lock").acquire(timeout=0)
    assert (tmp_path / "job.lock").stat().st_mode & 0o777 == 0o600
