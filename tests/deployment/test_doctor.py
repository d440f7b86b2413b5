"""`moretta doctor`: what keeps a site or a server from taking part is found, each by a sentence with the way out."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="the engine for many machines needs nvflare")

from one_site import RUN, aim, answering, edit, free_port, make
from test_cli import call

from moretta.config import silo_file
from moretta.deployment import checks, doctor, kits, provisioning, server_connection
from moretta.deployment.checks import CheckResult, Warned
from moretta.errors import ParameterError, RunFailed
from moretta.secure_aggregation.identity import Identity, fingerprint, public_line


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kits, a run file and a site's folder, which no test changes."""
    return make(tmp_path_factory.mktemp("made"))


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "APART", 0.0)


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the same that a test may change, its kits aimed at a port that is free."""
    folder = tmp_path / "here"
    shutil.copytree(made, folder)
    monkeypatch.chdir(folder)
    aim_all(folder, free_port())
    return folder


def aim_all(folder: Path, port: int) -> None:
    for kit in folder.glob("kits/*"):
        aim(kit, port)


def looked(*arguments: object) -> dict[str, dict[str, Any]]:
    """Return the findings by what they are about; the exit code says whether all pass."""
    called = call("doctor", *arguments, "--json")
    told = called.told
    assert called.code == (0 if told["passes"] else 1)
    assert told["passes"] == all(one["passes"] for one in told["findings"])
    found = {one["what"]: one for one in told["findings"]}
    assert len(found) == len(told["findings"])
    assert not any("\n" in one["sentence"] for one in found.values())
    return found


def failed(*arguments: object) -> dict[str, str]:
    """Return the sentences of what fails."""
    return {what: one["sentence"] for what, one in looked(*arguments).items() if not one["passes"]}


def test_a_site_that_can_take_part_passes(here: Path) -> None:
    edit(here / "silo.toml", 'name = "north"', 'name = "north"\nidentity = "keys/north"\nroster = "roster.toml"')
    assert "made by the server, for trials" in looked("--kit", "kits/north")["private key"]["sentence"]
    (here / "kits/north" / kits.TRIAL).unlink()  # as of a kit whose key was made here
    with answering(here / "kits/server") as port:
        aim(here / "kits/north", port)
        before = {path: path.stat().st_mtime_ns for path in here.rglob("*")}
        called = call("doctor", "--kit", "kits/north", "--silo", "silo.toml")
        assert (called.code, called.err) == (0, "")
        assert {path: path.stat().st_mtime_ns for path in here.rglob("*")} == before  # it only looks
    lines = called.out.splitlines()
    assert all(line.startswith("ok   ") for line in lines), called.out
    whats = [line[5:].partition(":")[0] for line in lines]
    assert {"python", "torch", "nvflare", "certificate", "patched", "server", "clock", "identity", "data"} <= {*whats}
    assert re.search(r"clock: is [0-3] s ahead of the server's", called.out)


def test_a_server_that_can_serve_passes(here: Path) -> None:
    found = looked("--run", "run.toml", "--kit", "kits/server")
    assert all(one["passes"] for one in found.values())
    assert not found["patched"]["warns"]  # as serve does it
    assert "moretta kit patch kits/server" in found["patched"]["sentence"]
    assert found["model"]["sentence"].startswith("mlp of 17 parameters")
    assert "data" not in found
    shutil.move(here / "kits", here / "runs/run-kits")  # where moretta serve makes them
    assert "certificate" in looked("--run", "run.toml")


def test_the_servers_key_is_looked_at_on_either_side(here: Path) -> None:
    mine = fingerprint(Identity.load(here / "kits").public_key)
    at_server = looked("--run", "run.toml", "--kit", "kits/server")["server's key"]
    assert at_server["passes"]
    assert at_server["sentence"].startswith(mine)
    given = ("--kit", "kits/north", "--silo", "silo.toml")
    assert looked(*given)["server's key"]["sentence"] == f"{mine}, of {kits.SERVER_KEY}"
    other = Identity.fresh().public_key
    edit(here / "silo.toml", "[data]", f'server-key = "{public_line(other)}"\n[data]')
    warned = looked(*given)["server's key"]
    assert warned["warns"]
    expected = f"{fingerprint(other)}, of silo.toml; the kit has {mine}: ask the operator which is right"
    assert warned["sentence"] == expected
    edit(here / "silo.toml", f'server-key = "{public_line(other)}"\n', "")
    (here / "kits/north/local" / kits.SERVER_KEY).unlink()
    (here / "kits/identity.key").unlink()
    assert "no key of the server is pinned here" in failed(*given)["server's key"]
    assert "moretta keys new --out DIR" in failed("--run", "run.toml", "--kit", "kits/server")["server's key"]


def test_nothing_to_look_at_is_bad_usage() -> None:
    called = call("doctor")
    assert called.code == 2
    assert called.sentence.startswith("--kit, --silo and --run are missing; set --kit and --silo")


def test_a_clock_that_is_a_day_off_is_found(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = here / "kits/north"
    with answering(here / "kits/server") as port:
        aim(here / "kits/north", port)
        away = server_connection.clock_of_server(kit)
        assert away is not None
        assert abs(away) < 3
        day = 86400.0
        true = time.time
        monkeypatch.setattr(server_connection.time, "time", lambda: true() + day)
        ahead = {one.what: one for one in examine(kit, datetime.now(UTC) + timedelta(days=1))}
        monkeypatch.undo()
    assert not ahead["clock"].passes
    assert "s ahead of the server's; set the wrong clock" in ahead["clock"].sentence
    behind = {one.what: one for one in examine(kit, datetime.now(UTC) - timedelta(days=1))}
    assert "the kit was made at" in behind["clock"].sentence
    for what in ("clock", "certificate", "server"):
        assert not behind[what].passes


def examine(kit: Path, now: datetime) -> list[CheckResult]:
    return doctor.examine(kit=kit, silo=None, run=None, now=now)


def test_what_says_no_time_tells_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of servers whose greetings have random bytes there, always the same, or are none; and of nobody."""

    def answer(listening: socket.socket, greeting: bytes, step: int) -> None:
        for number in (1, 1 + step):
            with contextlib.suppress(OSError), listening.accept()[0] as plain:
                plain.recv(1024)
                plain.sendall(greeting.replace(b"time", bytes([number]) * 4))

    hello = b"\x16\x03\x03\x00\x4c\x02\x00\x00\x48\x03\x03time" + b"r" * 28
    for greeting, step in ((hello, 1), (hello, 0), (b"HTTP/1.1 400 no\r\n\r\n", 0)):
        monkeypatch.setattr(server_connection, "APART", 0.0 if step else 1.6)  # seconds in which a clock goes on
        with socket.create_server(("127.0.0.1", 0)) as listening:
            thread = threading.Thread(target=answer, args=(listening, greeting, step), daemon=True)
            thread.start()
            aim(here / "kits/north", listening.getsockname()[1])
            assert server_connection.clock_of_server(here / "kits/north", 2.0) is None
    assert server_connection.clock_of_server(here / "kits/north", 0.2) is None


def test_a_certificate_that_ends_soon_is_a_warning_and_one_that_ended_is_not(here: Path) -> None:
    kit = here / "kits/server"
    ends = kits.validity_of(kit)[1]
    (soon,) = [one for one in examine(kit, ends - timedelta(days=29)) if one.what == "certificate"]
    assert (soon.passes, soon.warns) == (True, True)
    assert soon.line().startswith("warn certificate: ends in 29 days")
    (ended,) = [one for one in examine(kit, ends + timedelta(days=1)) if one.what == "certificate"]
    assert not ended.passes
    assert "get a new kit" in ended.sentence
    assert ended.line().startswith("FAIL certificate: ")


def test_a_server_that_is_not_there_or_of_another_federation(here: Path, tmp_path: Path) -> None:
    found = looked("--kit", "kits/north")
    assert "have it started there (moretta serve)" in found["server"]["sentence"]
    assert "is unknown" in found["clock"]["sentence"]
    with answering(provisioning.provision(tmp_path / "other", "localhost", 8102, ["north"]).server) as port:
        aim(here / "kits/north", port)
        assert "has no certificate for localhost of this kit's root" in failed("--kit", "kits/north")["server"]
    edit(here / "kits/north/startup/fed_client.json", f"localhost:{port}", "nowhere.invalid:8102")
    sentences = failed("--kit", "kits/north")
    assert "the name nowhere.invalid of the server does not resolve on this machine" in sentences["server's name"]
    assert "fix those first" in sentences["server"]


def test_a_kit_that_is_none_of_this_site(here: Path) -> None:
    assert "is not a startup kit of FLARE" in failed("--kit", "keys")["kit"]
    assert "an administrator's" in failed("--kit", "kits/admin")["kit"]
    assert "name the site's own kit" in failed("--kit", "kits/server", "--silo", "silo.toml")["kit"]
    sentence = failed("--kit", "kits/south", "--silo", "silo.toml")["name"]
    assert sentence == "silo.toml is of `north`, and kits/south is the kit of `south`; use the kit of the same name"
    for file in ("client.crt", "client.key"):
        shutil.copy(here / "kits/south/startup" / file, here / "kits/north/startup" / file)
    assert "is for north, and its certificate for south" in failed("--kit", "kits/north")["certificate"]
    (here / "kits/north/startup/client.key").chmod(0o644)
    assert "run: chmod 600" in looked("--kit", "kits/north")["private key"]["sentence"]


def test_a_port_in_use_is_found(here: Path) -> None:
    with socket.create_server(("", 0)) as listening:
        port = listening.getsockname()[1]
        sentence = failed("--run", "run.toml", "--port", port)["port"]
    assert sentence.startswith(f"port {port} cannot be used (Address already in use); end what uses it")
    assert "port" not in failed("--run", "run.toml", "--port", port)


@pytest.mark.parametrize(
    ("before", "after", "what", "message"),
    [
        ("[silo]", "[sillo]", "silo.toml", "did you mean [silo]?"),
        ("rows.npz", "none.npz", "data", "none.npz cannot be read (No such file or directory); correct [data] source"),
        ("rows.npz", "nowhere:rows", "data", 'importing "nowhere"'),
        ('"north"', '"north"\nidentity = "keys/south"\nroster = "roster.toml"', "identity", "is not that of"),
        ('"north"', '"north"\nidentity = "keys"\nroster = "roster.toml"', "identity", "cannot be read"),
        ('"north"', '"none"\nidentity = "keys/south"\nroster = "roster.toml"', "identity", "it lacks none"),
        ('"north"', '"north"\nout = "rows.npz"', "out", "rows.npz cannot be written to"),
        ('"north"', '"north"\nedge = true', "edge", "pip install 'moretta[edge]'"),
        ("[data]", '[limits]\ndevice = "cuda:99"\n[data]', "device", "PyTorch finds no cuda:99;"),
    ],
)
def test_what_is_wrong_with_a_site(
    here: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, what: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    edit(here / "silo.toml", before, after)
    sentences = failed("--silo", "silo.toml")
    assert message in sentences[what]
    assert [*sentences] == [what]


def test_a_key_that_is_open_to_others(here: Path) -> None:
    edit(here / "silo.toml", 'name = "north"', 'name = "north"\nidentity = "keys/north"\nroster = "roster.toml"')
    (here / "keys/north/identity.key").chmod(0o640)
    assert "run: chmod 600" in failed("--silo", "silo.toml")["identity"]


@pytest.mark.parametrize(
    ("before", "after", "what", "message"),
    [
        ("inputs = [2]", "inputs = [3]", "data", "expected samples of shape [3]"),
        ('["north", "south"]', '["east", "south"]', "data", "lists east, south, but not 'north'"),
        ('"mlp"\nhidden = [4]', '"nets:build"', "model", 'list it there: [silo] models = ["nets:build"]'),
        ("rounds = 2", "rounds = -2", "run file", "rounds"),
        ("[engine]", '[secure-aggregation]\nroster = "roster.toml"\n[engine]', "sums", "add roster and identity"),
    ],
)
def test_what_does_not_fit_the_run(here: Path, before: str, after: str, what: str, message: str) -> None:
    silo = (here / "silo.toml").read_text()
    (here / "silo.toml").write_text(silo.replace("[data]", "[data]\ntest-fraction = 0.25"))
    sentence = looked("--silo", "silo.toml", "--run", "run.toml")["data"]["sentence"]
    assert sentence == "7 rows of shape [2], as the run expects; 2 more are held back"
    (here / "silo.toml").write_text(silo)
    assert looked("--silo", "silo.toml", "--run", "run.toml")["data"]["sentence"].startswith("9 rows of shape [2]")
    edit(here / "run.toml", before, after)
    assert message in failed("--silo", "silo.toml", "--run", "run.toml")[what]


def test_what_is_wrong_with_a_servers_run(here: Path) -> None:
    edit(here / "run.toml", 'source = "mlp"\nhidden', 'source = "mpl"\nhidden')
    assert "mlp" in failed("--run", "run.toml")["model"]
    (here / "one.toml").write_text(RUN[: RUN.index("[engine]")].replace('"sites"\ninputs = [2]', '"digits"'))
    edit(here / "one.toml", "classes = 2\n", "")
    assert 'many need name = "flare"' in failed("--run", "one.toml")["many machines"]


def test_memory_and_disk_are_compared_with_the_model(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "free_memory", lambda: 100)
    monkeypatch.setattr(checks, "LEAST_DISK", 2**80)
    sentences = failed("--run", "run.toml")
    assert "this model needs" in sentences["memory"]
    assert "make room" in sentences["disk"]


def test_what_is_not_installed_is_a_finding(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvflare", None)
    assert "pip install 'moretta[flare]'" in failed("--silo", "silo.toml")["nvflare"]
    monkeypatch.setattr(checks, "PYTHONS", ((3, 5), (3, 6)))
    monkeypatch.setattr(checks, "FLARE", (99, 0))
    assert "make an environment" in failed("--silo", "silo.toml")["python"]
    monkeypatch.undo()
    monkeypatch.setattr(checks, "FLARE", (99, 0))
    os.chdir(here)
    assert "pip install -U" in failed("--silo", "silo.toml")["nvflare"]


def test_the_name_of_a_server_that_means_nothing_is_told(here: Path) -> None:
    edit(here / "kits/north/startup/fed_client.json", "localhost", "nowhere.invalid")
    with pytest.raises(RunFailed, match="to DNS"):
        server_connection.resolve(here / "kits/north")


def test_nothing_given_to_the_function() -> None:
    with pytest.raises(ParameterError, match="--kit, --silo and --run are missing"):
        doctor.examine(kit=None, silo=None, run=None)


def test_a_kernel_that_cannot_confine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(checks.confinement(), str)
    monkeypatch.setattr(checks, "landlock", lambda: 0)
    assert isinstance(checks.confinement(), Warned)


def test_of_a_folder_of_images_the_table_that_names_them_is_opened(tmp_path: Path) -> None:
    """`join` checks it before it starts, and an image folder is no module:function."""
    (tmp_path / "silo.toml").write_text(
        '[silo]\nname = "north"\nout = "k"\n[data]\nsource = "image-folder"\npath = "images"\nlabels = "labels.csv"\n'
    )
    file = silo_file.load(tmp_path / "silo.toml")
    with pytest.raises(ParameterError, match=r"labels\.csv cannot be read"):
        checks.openable(file)
    (tmp_path / "labels.csv").write_text("file,kind\na.png,x\n")
    assert "labels.csv can be read" in str(checks.openable(file))
