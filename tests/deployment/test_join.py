"""`moretta join` and `serve` with bad input: one sentence with the way out, before any process of FLARE has started."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="the engine for many machines needs nvflare")

from hospitals import asked, connected
from one_site import RUN, aim, answering, edit, free_port, make
from test_cli import Called, call

from moretta.deployment import join as joining
from moretta.deployment import kits, processes, provisioning, server_connection
from moretta.deployment.agreed_settings import CLOSED
from moretta.engines.folder_lock import held
from moretta.errors import ParameterError, RunFailed

SLEEPS = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
SLEEPS += "print('up', flush=True); time.sleep(60)"
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kits of two federations, a run file and a site's folder, which no test changes."""
    return make(tmp_path_factory.mktemp("made"))


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the same that a test may change; nothing answers where its kits point, and nothing is started."""
    folder = tmp_path / "here"
    shutil.copytree(made, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(joining, "AGAIN", 0.05)
    monkeypatch.setattr(joining, "LOOK", 0.02)
    monkeypatch.setattr(processes, "start", lambda *given: pytest.fail("FLARE was started"))
    aim(folder / "kits/north", free_port())
    return folder


def at(monkeypatch: pytest.MonkeyPatch, moment: datetime) -> None:
    """Let the clock by which certificates are looked at say another time."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return moment

    monkeypatch.setattr(kits, "datetime", Clock)


def join(kit: str = "kits/north", silo: str = "silo.toml") -> Called:
    return call("join", kit, "--silo", silo)


def refused(called: Called) -> str:
    assert called.code == 2, called.err
    return called.sentence


def starting(
    monkeypatch: pytest.MonkeyPatch, code: str, mark: str = "family"
) -> tuple[list[Path], list[processes.Parent]]:
    """Let a small process stand for FLARE's client; returns the kits that were started, and the processes."""
    started: list[Path] = []
    found: list[processes.Parent] = []

    def start(kit: Path, log: Path) -> processes.Parent:
        started.append(kit)
        with log.open("ab") as sink:
            environment = {**os.environ, processes.MARK: f"{mark}-{os.getpid()}"}
            words = [sys.executable, "-c", code]
            parent = processes.Parent(words, stdout=sink, stderr=sink, env=environment, start_new_session=True)
        parent.family = f"{mark}-{os.getpid()}"
        found.append(parent)
        return parent

    monkeypatch.setattr(processes, "start", start)
    return started, found


def test_what_is_no_kit_of_this_site(here: Path) -> None:
    assert "is not a startup kit of FLARE: expected local/" in refused(join("keys"))
    assert "is the server's kit; a site needs its own" in refused(join("kits/server"))
    assert "is an administrator's kit, expected a server's or a site's: name another" in refused(join("kits/admin"))
    assert refused(join("kits/south")) == (
        "silo.toml is of `north`, and kits/south is the kit of `south`; use the kit of the same name"
    )


def test_certificates_that_are_not_the_kits(here: Path) -> None:
    startup = here / "kits/north/startup"
    for file in ("client.crt", "client.key"):
        shutil.copy(here / "kits/south/startup" / file, startup / file)
    assert "is for north, and its certificate for south: get both from one kit" in refused(join())
    shutil.copy(here / "others/north/startup/client.crt", startup)
    assert "was not issued by the root beside it" in refused(join())
    (startup / "client.crt").unlink()
    assert "is not a readable certificate: get a new kit" in refused(join())


def test_a_clock_that_is_a_day_off_and_an_expired_certificate(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begins, ends = kits.validity_of(here / "kits/north")
    at(monkeypatch, datetime.now(UTC) - DAY)
    sentence = refused(join())
    assert f"valid from {begins:%Y-%m-%d %H:%M} UTC, but this machine's clock says" in sentence
    assert sentence.endswith("set the clock")
    at(monkeypatch, ends + DAY)
    assert f"ended at {ends:%Y-%m-%d}" in refused(join())


def test_a_site_that_knows_no_key_of_its_server(here: Path) -> None:
    pinned = here / "kits/north/local" / kits.SERVER_KEY
    line = pinned.read_text().strip()
    pinned.unlink()
    assert refused(join()).startswith("no key of the server is pinned here, so anybody could pose as it: have its")
    called = call("kit", "patch", "kits/north", "--server-key", "kits")
    assert (called.code, pinned.read_text().strip()) == (0, line)
    assert "The server's key is pinned at the site" in called.out
    edit(here / "silo.toml", "[data]", 'server-key = "moretta-public-1 x"\n[data]')
    assert "[silo] server-key: expected `moretta-public-1` and 32 bytes" in refused(join())


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[silo]", "[sillo]", "did you mean [silo]?"),
        ('name = "north"', "", "name"),
        ('"north"', '"east"', "use the kit of the same name"),
        ("rows.npz", "none.npz", "none.npz cannot be read (No such file or directory); correct [data] source"),
        ('"north"', '"north"\nout = "rows.npz"', "rows.npz cannot be written to (Not a directory)"),
        ('"north"', '"north"\nidentity = "keys/south"\nroster = "roster.toml"', "is not that of"),
        ('"north"', '"north"\nidentity = "keys/none"\nroster = "roster.toml"', "cannot be read"),
        ('"north"', '"north"\nidentity = "keys/north"\nroster = "none.toml"', "the roster"),
        ("[data]", "[data", "silo.toml"),
    ],
)
def test_what_is_wrong_with_a_silo_file(here: Path, before: str, after: str, message: str) -> None:
    edit(here / "silo.toml", before, after)
    assert message in refused(join())
    assert "silo.toml" in refused(join(silo="nowhere/silo.toml"))


def test_a_mapping_that_does_not_fit_ends_it_before_anything_is_started(here: Path) -> None:
    (here / "rows.csv").write_text("Station\nInnere\nOPS\n")
    (here / "silo.toml").write_text(
        '[silo]\nname = "north"\n[data]\nsource = "rows.csv"\n[mapping.recode.Station]\nInnere = "medicine"\n'
    )
    assert refused(join()).startswith(
        "rows.csv: column 'Station' has a word that [mapping.recode.Station] of silo.toml does not map in 1 of 2 rows"
    )


def test_what_is_not_installed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "nvflare"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "nvflare", None)
    expected = "this command needs nvflare; install it by: pip install 'moretta[flare]'"
    assert refused(join()) == expected
    assert refused(call("serve", "run.toml", "--out", "out")) == expected


def test_a_server_of_another_federation(here: Path) -> None:
    with answering(here / "others/server") as port:
        aim(here / "kits/north", port)
        called = join()
    assert called.code == 2
    assert "has no certificate for localhost of this kit's root" in called.err.splitlines()[-1]


def test_a_site_that_the_server_refuses(here: Path) -> None:
    kit = here / "kits/north"
    shutil.copy(here / "kits/server/startup/rootCA.pem", here / "kept.pem")
    shutil.copy(here / "others/server/startup/rootCA.pem", here / "kits/server/startup/rootCA.pem")
    with answering(here / "kits/server") as port:
        aim(kit, port)
        assert "does not accept the certificate of north" in join().err.splitlines()[-1]


def test_a_server_that_is_not_there_yet_is_waited_for(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit, said = here / "kits/north", list[str]()
    started, _ = starting(monkeypatch, "pass")
    host, port = kits.address_of(kit)
    with contextlib.ExitStack() as stack:

        def say(line: str) -> None:
            said.append(line)
            if line.startswith("waiting"):
                assert not started
                stack.enter_context(answering(here / "kits/server", port))

        done = joining.join(kit, here / "silo.toml", say, once=True)
    assert started == [kit]
    assert done == joining.Attendance(here / "moretta")
    waiting = f"waiting until {host}:{port} answers, or for ctrl-c: no server of this federation answers at "
    (line,) = [line for line in said if line.startswith("waiting")]
    assert line.startswith(f"{waiting}{host}:{port}, as ")
    assert "refuses the connection: have it started there (moretta serve)" in line
    assert said[-1].startswith(f"joining {host}:{port} as north")
    assert json.loads((kit / "local/moretta.json").read_text()) == {"silo": str(here / "silo.toml")}
    assert provisioning.lacks(kit, here / "silo.toml") == []
    assert not (kit / "local/join.json").exists()


def test_a_name_that_means_nothing_yet_is_waited_for_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aim(here / "kits/north", 8102, "nowhere.invalid")

    def say(line: str) -> None:
        if line.startswith("waiting"):
            assert "the name nowhere.invalid of the server does not resolve on this machine: check" in line
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        joining.join(here / "kits/north", here / "silo.toml", say)


def test_a_site_joins_once(here: Path) -> None:
    (here / "moretta").mkdir()
    with held(here / "kits/north/local", joining.LOCK):
        assert refused(join()).startswith(f"this kit has joined already, by process {os.getpid()} on ")
    shutil.copytree(here / "kits/north", here / "copy")
    with held(here / "moretta", joining.LOCK):
        assert f"is in use by another join, process {os.getpid()} on " in refused(join("copy"))


def test_what_the_site_says_is_said_and_a_client_that_fails_is_told(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys, time; open('moretta/log.txt', 'a').write('round 1 of 2, 0 s\\n'); time.sleep(0.2); sys.exit(101)"
    )
    starting(monkeypatch, code)
    with answering(here / "kits/server") as port:
        aim(here / "kits/north", port)
        called = join()
    assert called.code == 1
    assert "round 1 of 2, 0 s" in called.err.splitlines()
    assert "FLARE's client ended with exit code 101" in called.err.splitlines()[-1]


PLAYS = """
import pathlib, sys, time
out, number = pathlib.Path("moretta"), len(list(pathlib.Path("moretta").glob("run-*")))
run = out / f"run-{number}"
(run / "checkpoint").mkdir(parents=True)
if "open" not in sys.argv:
    (run / "run.toml").touch()
    (run / "released.safetensors").touch()
"""


def interrupted_at(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Let ctrl-c come when a server's end has been waited for so often."""
    waited = list[Path]()

    def wait(kit: Path) -> None:
        waited.append(kit)
        if len(waited) == times:
            raise KeyboardInterrupt

    monkeypatch.setattr(joining, "_wait_for_end", wait)


def test_a_site_stays_for_the_next_run_and_says_at_the_end_what_it_did(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "moretta" / "old" / "checkpoint").mkdir(parents=True)
    for path in (here / "moretta" / "old", here / "moretta" / "old" / "checkpoint"):
        os.utime(path, (1, 1))
    started, _ = starting(monkeypatch, PLAYS)
    interrupted_at(monkeypatch, 3)
    with answering(here / "kits/server") as port:
        aim(here / "kits/north", port)
        called = join()
    assert called.code == 0
    assert len(started) == 3
    last = here / "moretta/run-2"
    assert called.out == f"took part in 3 runs; the last one left {last}/released.safetensors\n"
    assert called.err.count("the server has ended its run; waiting for its next one, until ctrl-c") == 3


@pytest.mark.parametrize("code", ["pass", PLAYS.replace('"open" not in sys.argv', "number == 0")])
def test_ctrl_c_before_a_run_has_ended_or_within_one_is_an_interruption(
    here: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    starting(monkeypatch, code)
    interrupted_at(monkeypatch, 2)
    with answering(here / "kits/server") as port:
        aim(here / "kits/north", port)
        with pytest.raises(KeyboardInterrupt):
            joining.join(here / "kits/north", here / "silo.toml", print)


def test_a_server_that_ends_hangs_up_before_it_is_gone(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = iter([None, ParameterError("does not accept the certificate"), None, RunFailed("nobody answers"), None])

    def reach(kit: Path, wait: float) -> None:
        if error := next(tries):
            raise error

    monkeypatch.setattr(server_connection, "reach", reach)
    joining._wait_for_end(here / "kits/north")
    assert [*tries] == [None]


def test_rounds_are_said_once_a_minute_and_what_goes_wrong_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], list[str]()
    monkeypatch.setattr(joining.time, "monotonic", lambda: now[0])
    voice = joining.Voice(said.append)
    at = "2026-11-26 06:41:02,123"
    wrong = f"{at} ERROR cannot take part (ticket {{}}): silo `north`: rows.csv has no rows"
    wrong += "; the site takes no part in such runs until moretta accept"
    for number in range(1, 401):
        voice.hear(f"{at} INFO round {number} of 400, {number} s; on its own rows held back: loss 0.5")
        voice.speak()
        now[0] += 1.0
    assert [int(line.partition("round ")[2].partition(" of")[0]) for line in said] == [*range(1, 401, 60)]
    assert said[0].endswith("loss 0.5")
    said.clear()
    voice.hear(f"{at} WARNING an envelope was not taken: it was replayed")
    voice.hear(f"{at} ERROR cannot take part (ticket 01): {CLOSED}, last at 06:41 (its log says why)")
    assert said.pop().endswith("(its log says why)"), "of its own rows it has said nothing"
    assert [line.partition(" ")[2].partition(": ")[0].split()[1:3] for line in said] == [
        ["INFO", "round"], ["WARNING", "an"],
    ], "the last round comes before what followed it"  # fmt: skip
    said.clear()
    voice = joining.Voice(said.append)
    for ticket in ("3f9a2c1d", "00aa11bb"):
        voice.hear(wrong.format(ticket))
        voice.hear("Traceback (most recent call last):")
    voice.hear(f"{at} ERROR cannot take part (ticket 02): {CLOSED}, last at 06:41 (its log says why)")
    voice.hear(f"{at} INFO the run has ended; this site's files are in moretta/x")
    assert said == [
        wrong.format("3f9a2c1d"),
        "Traceback (most recent call last):",
        f"{at} INFO the run has ended; this site's files are in moretta/x",
    ]


@pytest.mark.parametrize("answers", [True, False])
def test_a_kit_that_has_joined_elsewhere_too_is_noticed(
    here: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """FLARE lets two clients of one name take the connection from each other for ever, and says so to neither."""
    code = (
        "import os, time\n"
        "for number in range(5):\n"
        "    print(f'[CN{number} N/A => localhost:PORT] is created: PID: {os.getpid()}', flush=True)\n"
        "    time.sleep(0.05)\n"
    )
    said: list[str] = []
    with answering(here / "kits/server") as port:
        aim(here / "kits/north", port)
        starting(monkeypatch, code.replace("PORT", str(port if answers else 1)))
        joining.join(here / "kits/north", here / "silo.toml", said.append, once=True)
    assert sum("the same kit has joined on another machine too" in line for line in said) == answers


def waits(log: Path) -> None:
    until = time.monotonic() + 10
    while b"up" not in log.read_bytes() and time.monotonic() < until:
        time.sleep(0.01)


def test_what_a_join_that_was_killed_has_left_is_ended(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit, said = here / "kits/north", list[str]()
    starting(monkeypatch, SLEEPS, "left")
    left = processes.start(kit, here / "left.log")
    waits(here / "left.log")
    processes.remember(left, kit / "local/join.json")
    reaper = threading.Thread(target=left.wait)  # as init does
    reaper.start()
    assert len(processes.family_of(left)) == 1
    starting(monkeypatch, "pass", "next")
    with answering(here / "kits/server") as port:
        aim(kit, port)
        joining.join(kit, here / "silo.toml", said.append, once=True)
    reaper.join(10)
    assert left.returncode == -signal.SIGKILL
    assert processes.family_of(left) == []
    assert any(one.startswith("ended the processes of an earlier join of this kit") for one in said)


def test_only_what_is_marked_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "join.json"
    for text in ("", "[]", "{}", '{"pid": "x", "family": "y"}'):
        path.write_text(text)
        assert not processes.end_left_over(path)
    assert not processes.end_left_over(tmp_path / "none.json")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        path.write_text(json.dumps({"pid": other.pid, "family": "ours"}))  # the number has gone to somebody else
        assert not processes.end_left_over(path)
        assert not path.exists()
        assert other.poll() is None
        assert other.stdin is not None
        other.stdin.write(b"\n")


def test_a_server_that_cannot_serve(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve: Callable[..., Called] = lambda *more: call("serve", "run.toml", "--out", "out", *more)  # noqa: E731
    with socket.create_server(("", 0)) as listening:
        port = listening.getsockname()[1]
        called = serve("--port", port)
    assert f"port {port} cannot be used (Address already in use); end what uses it, or choose" in refused(called)
    assert "holds the kits of host localhost, port 8102" in refused(serve("--kits", "kits", "--port", port))
    assert "is not empty and holds no kits of Moretta" in refused(serve("--kits", "keys", "--port", port))
    (here / "one.toml").write_text(
        RUN[: RUN.index("[engine]")].replace('"sites"\ninputs = [2]\nclasses = 2', '"digits"')
    )
    assert 'many need name = "flare"' in refused(call("serve", "one.toml", "--out", "out"))


def test_a_servers_kit_that_has_expired(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(here)
    monkeypatch.setattr(processes.subprocess.Popen, "__init__", lambda *given, **more: pytest.fail("started"))
    provisioning.provision(here / "mine", "localhost", free := free_port(), ["north", "south"])
    at(monkeypatch, kits.validity_of(here / "mine/server")[1] + DAY)
    called = call("serve", "run.toml", "--out", "out", "--kits", "mine", "--port", free)
    assert called.code == 2
    assert "get a new kit" in called.err.splitlines()[-1]


def test_ports(here: Path) -> None:
    port = free_port()
    server_connection.check_port(port)
    with socket.create_server(("", port)), pytest.raises(ParameterError, match="choose another by --port"):
        server_connection.check_port(port)


@pytest.mark.slow
def test_a_client_of_flare_that_was_left_is_ended_by_the_next_join(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With FLARE itself: a server, a join that is killed, and another join of the same kit."""
    monkeypatch.undo()
    monkeypatch.chdir(here)
    port = free_port()
    made = provisioning.provision(here / "mine", "localhost", port, ["north"])
    provisioning.patch(made.server)
    server = processes.start(made.server, here / "server.log")
    words = [
        sys.executable,
        "-c",
        "from moretta.commands.main import main; main()",
        "join",
        "mine/north",
        "--silo",
        "silo.toml",
        "--once",
    ]
    remembered = made.sites["north"] / "local/join.json"
    joins: list[subprocess.Popen[bytes]] = []
    try:
        families: list[str] = []
        for _ in range(2):
            joins.append(subprocess.Popen(words, stderr=subprocess.PIPE))
            until = time.monotonic() + 60
            while time.monotonic() < until:
                with contextlib.suppress(OSError, ValueError):
                    if (family := json.loads(remembered.read_text())["family"]) not in families:
                        families.append(family)
                        break
                time.sleep(0.1)
            if len(joins) == 1:
                joins[0].kill()
                joins[0].communicate()
                assert processes._marked(families[0])
        assert processes._marked(families[0]) == []
        assert processes._marked(families[1])
        until = time.monotonic() + 60
        while connected(made.admin) != ["north"] and time.monotonic() < until:
            time.sleep(0.5)
        asked(made.admin, "shut_down")
        _, told = joins[1].communicate(timeout=60)
        assert joins[1].returncode == 0
        assert b"ended the processes of an earlier join" in told
    finally:
        for one in joins:
            if one.poll() is None:
                one.terminate()
                one.communicate(timeout=30)
        processes.end_left_over(remembered)
        processes.stop(server)
