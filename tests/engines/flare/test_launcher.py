"""The launcher of a site's job process, with real processes: which end starts another, how often, and what is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("nvflare", reason="the engine for many machines needs nvflare")

from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.fuel.f3.cellnet.defs import CellChannel
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.client.shell_cmd import ShellCommandProcessor
from nvflare.private.fed.client.sys_cmd import ReportEnvProcessor
from nvflare.private.fed.client.training_cmds import ConfigureJobLogProcessor

from moretta.deployment import processes
from moretta.engines.flare import launcher
from moretta.engines.flare.launcher import Respawned

SLEEPS = "import time; time.sleep(60)"
ENDS = "pass"


def until(test: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not test():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Processes:
    """Starts one process after the other: each runs the next program, and the last of them again and again."""

    def __init__(self, *programs: str) -> None:
        self.programs, self.started, self.forgot = list(programs), [], 0

    def start(self) -> subprocess.Popen[bytes]:
        program = self.programs.pop(0) if len(self.programs) > 1 else self.programs[0]
        words = [sys.executable, "-S", "-c", program]
        self.started.append(subprocess.Popen(words, stderr=subprocess.DEVNULL, start_new_session=True))
        return self.started[-1]

    def forget(self) -> None:
        self.forgot += 1

    def handle(self, pauses: Sequence[float] = (0.01, 0.01, 0.01)) -> Respawned:
        return Respawned(self.start, self.forget, pauses)


@pytest.fixture
def waiting() -> Iterator[Callable[[Respawned], threading.Thread]]:
    """Give what runs `wait` as FLARE does, in a thread; at the end it has returned and no process is left."""
    handles = []

    def wait(handle: Respawned) -> threading.Thread:
        thread = threading.Thread(target=handle.wait, daemon=True)
        thread.start()
        handles.append((handle, thread))
        return thread

    yield wait
    for handle, thread in handles:
        handle.terminate()
        thread.join(10)
        assert not thread.is_alive()
        assert handle._process.returncode is not None


def test_a_process_that_ends_well_is_the_end() -> None:
    processes = Processes(ENDS)
    handle = processes.handle()
    handle.wait()
    assert handle.poll() == JobReturnCode.SUCCESS
    assert (handle.starts, processes.forgot) == (1, 0)


def test_a_killed_process_is_started_again(waiting: Callable[[Respawned], threading.Thread]) -> None:
    processes = Processes(SLEEPS)
    handle = processes.handle()
    thread = waiting(handle)
    for count in (1, 2):
        os.kill(processes.started[-1].pid, signal.SIGKILL)
        until(lambda count=count: len(processes.started) == count + 1)
        assert thread.is_alive()
        assert handle.poll() == JobReturnCode.UNKNOWN
    assert processes.forgot == 2  # what the dead ones may have left is not the outcome of the job
    assert all(process.returncode == -signal.SIGKILL for process in processes.started[:-1])  # reaped


@pytest.mark.parametrize("code", [1, 9, JobReturnCode.EXCEPTION])
def test_an_error_is_followed_by_a_good_end(code: int) -> None:
    processes = Processes(f"import os; os._exit({code})", ENDS)
    handle = processes.handle()
    handle.wait()
    assert handle.starts == 2
    assert handle.poll() == JobReturnCode.SUCCESS


def test_starts_are_bounded_and_the_outcome_is_unknown() -> None:
    processes = Processes("raise SystemExit(1)")
    handle = processes.handle((0.01, 0.02))
    handle.wait()
    assert handle.starts == 3
    assert handle.poll() == JobReturnCode.UNKNOWN  # any other outcome fails the job of all sites
    assert processes.forgot >= 3


@pytest.mark.parametrize("code", launcher.HOPELESS)
def test_what_would_end_so_again_is_not_started_again(code: int) -> None:
    processes = Processes(f"import os; os._exit({code})")
    handle = processes.handle()
    handle.wait()
    assert handle.starts == 1
    assert handle.poll() == JobReturnCode.UNKNOWN
    assert processes.forgot >= 1


def test_terminate_kills_and_nothing_starts(waiting: Callable[[Respawned], threading.Thread]) -> None:
    processes = Processes(SLEEPS)
    handle = processes.handle()
    thread = waiting(handle)
    handle.terminate()
    thread.join(10)
    assert not thread.is_alive()
    assert (handle.starts, handle.poll()) == (1, JobReturnCode.UNKNOWN)
    handle.terminate()  # a second time is no error


def test_terminate_in_the_pause_ends_it(waiting: Callable[[Respawned], threading.Thread]) -> None:
    processes = Processes("raise SystemExit(1)")
    handle = processes.handle((60.0,))
    thread = waiting(handle)
    until(lambda: processes.forgot)
    handle.terminate()
    thread.join(10)
    assert not thread.is_alive()
    assert handle.starts == 1


def test_terminate_kills_the_children_of_the_process_too(waiting: Callable[[Respawned], threading.Thread]) -> None:
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {SLEEPS!r}])"
    processes = Processes(program)
    handle = processes.handle()
    waiting(handle)
    parent = processes.started[0].pid
    children = Path(f"/proc/{parent}/task/{parent}/children")
    until(lambda: children.read_text().split())
    child = int(children.read_text())
    handle.terminate()
    until(lambda: not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text())


def test_pauses_grow_from_a_fifth_of_a_second() -> None:
    assert len(launcher.PAUSES) == 20
    assert launcher.PAUSES[0] == 0.2
    assert list(launcher.PAUSES) == sorted(launcher.PAUSES)


def test_flare_builds_the_launcher_and_starts_by_its_words(tmp_path: Path) -> None:
    """The words and the environment are FLARE's own; the file with the outcome of a process that died is removed."""
    from nvflare.apis.fl_constant import FLContextKey
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.job_launcher_spec import JobProcessArgs, JobProcessEnv
    from nvflare.apis.workspace import Workspace

    for folder in ("startup", "local", "job-1"):
        (tmp_path / folder).mkdir()
    outcome, first, script = tmp_path / "job-1" / "_process_rc.txt", tmp_path / "first", tmp_path / "once.py"
    script.write_text(
        f"import os, pathlib, sys\n"
        f"first, outcome = pathlib.Path({str(first)!r}), pathlib.Path({str(outcome)!r})\n"
        f"if not first.exists():\n"
        f"    first.write_text(' '.join([*sys.argv[1:], os.environ[{JobProcessEnv.AUTH_TOKEN!r}]]))\n"
        f"    outcome.write_text('101')\n"
        f"    os._exit(101)\n"
    )
    context = FLContext()
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(tmp_path), "site-a"), private=True)
    arguments = {JobProcessArgs.EXE_MODULE: (str(script), "run"), JobProcessArgs.JOB_ID: ("-n", "job-1")}
    arguments[JobProcessArgs.AUTH_TOKEN] = ("-t", "token")
    context.set_prop(FLContextKey.JOB_PROCESS_ARGS, arguments, private=True)
    handle = launcher.Launcher().launch_job({"job_id": "job-1"}, context)
    assert (tmp_path / "job-1" / launcher.BEGUN).exists()
    handle.wait()
    assert not (tmp_path / "job-1" / launcher.BEGUN).exists()
    assert first.read_text() == "run -n job-1 token"  # which no command line shows
    assert handle.starts == 2
    assert handle.poll() == JobReturnCode.SUCCESS
    assert not outcome.exists()


def test_a_client_that_starts_begins_the_job_again_that_the_one_before_was_ended_in(tmp_path: Path) -> None:
    from nvflare.apis.event_type import EventType
    from nvflare.apis.fl_constant import FLContextKey, ReservedKey
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.workspace import Workspace

    class Engine:
        begun: ClassVar[list[tuple[str, object]]] = []
        guarded: ClassVar[list[str]] = []

        def get_cell(self) -> object:
            def guards(channel: str, topic: str, refused: object) -> None:
                self.guarded.append(channel)

            return SimpleNamespace(my_info=SimpleNamespace(fqcn="site-a"), add_incoming_request_filter=guards)

        def start_app(self, job: str, job_meta: object) -> str:
            self.begun.append((job, job_meta))
            return "Start the client app..."

    for folder in ("startup", "local", "ended", "left"):
        (tmp_path / folder).mkdir()
    workspace, context = Workspace(str(tmp_path), "site-a"), FLContext()
    Path(workspace.get_job_meta_path("left")).write_text('{"job_id": "left"}')
    (tmp_path / "left" / launcher.BEGUN).touch()
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True)
    context.set_prop(ReservedKey.ENGINE, Engine(), private=True)
    for event in (EventType.SYSTEM_BOOTSTRAP, EventType.SYSTEM_START):
        launcher.Launcher().handle_event(event, context)
    assert Engine.begun == [("left", {"job_id": "left"})]
    assert CellChannel.CLIENT_COMMAND in Engine.guarded


DETACHED = (
    "import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', sys.argv[1]], start_new_session=True);"
)


def parent(program: str) -> processes.Parent:
    words = [sys.executable, "-S", "-c", program, SLEEPS]
    found = processes.Parent(words, env={**os.environ, processes.MARK: "a-family"}, start_new_session=True)
    found.family = "a-family"
    return found


@pytest.mark.parametrize("ends", ["import time; time.sleep(60)", "import signal; signal.pause()"])
def test_stopping_a_parent_ends_processes_of_sessions_of_their_own(ends: str) -> None:
    found = parent(f"{DETACHED} {ends}")
    until(lambda: processes.family_of(found))
    family = processes.family_of(found)
    processes.stop(found, 0.1)
    assert found.returncode == -signal.SIGTERM
    assert processes.family_of(found) == []
    assert not any(" S " in Path(f"/proc/{pid}/stat").read_text() for pid in family if Path(f"/proc/{pid}").exists())


def test_stopping_finds_what_a_parent_left_when_it_died() -> None:
    found = parent(DETACHED)
    found.wait()
    until(lambda: processes.family_of(found))
    processes.stop(found, 0.1)
    assert processes.family_of(found) == []


def test_stopping_a_parent_that_does_not_listen() -> None:
    found = parent("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()")
    time.sleep(0.2)
    processes.stop(found, 0.2)
    assert found.returncode in (-signal.SIGKILL, -signal.SIGTERM)


def test_a_client_of_flare_answers_what_jobs_need_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran `cat` on any file of the site for every other site, whatever the site's policy said."""
    open_ones = [ShellCommandProcessor(), ReportEnvProcessor(), ConfigureJobLogProcessor()]
    given = [*ClientRequestProcessors.request_processors, *open_ones]
    monkeypatch.setattr(ClientRequestProcessors, "request_processors", given)
    launcher.Launcher()
    assert {topic for each in given for topic in each.get_topics()} == launcher.TOPICS
    assert not set(open_ones) & set(given)
