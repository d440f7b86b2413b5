"""Runs whose silos play in several processes: the same bytes as in one, whatever happens on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_contract import ADDITIVE, ALSO, CASES, ENTRY, MORE, federation_of, silos

from moretta import CGD, Engine, Faults, Federation, SecureAggregation, Silo
from moretta.engines.workers import Workers
from moretta.errors import ParameterError, RunFailed
from moretta.run import loop as engines

TIMES = ("seconds", "seconds_total")


def timeless(found: Any) -> Any:
    """JSON without what a clock has said."""
    if isinstance(found, list):
        return [timeless(item) for item in found]
    if not isinstance(found, dict):
        return found
    return {key: timeless(item) for key, item in found.items() if "seconds" not in key and key != "settings"}


def left_by(out: Path, *without: str) -> dict[str, Any]:
    """All that a run leaves, by file: bytes, JSON without times, and of the log what does not come by the clock."""
    found = dict[str, Any]()
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        name = str(path.relative_to(out))
        if path.suffix == ".json":
            found[name] = timeless(json.loads(path.read_text()))
        elif name == "history.jsonl":
            found[name] = timeless([json.loads(line) for line in path.read_text().splitlines()])
        elif name == "log.txt":
            said = [line.split(" ", 2)[2] for line in path.read_text().splitlines()]
            found[name] = [line for line in said if not line.startswith("INFO round ")]
        elif not name.startswith(without or ("-",)):
            found[name] = path.read_bytes()
    return found


@pytest.fixture(autouse=True)
def workers_of_runs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """See to it that workers were there, and are gone."""
    started = list[int]()
    begin = Workers.__init__

    def noted(self: Workers, *of: Any) -> None:
        begin(self, *of)
        started.extend(one.process for one in self._workers)

    monkeypatch.setattr(Workers, "__init__", noted)
    yield started
    for process in started:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def played(name: str, out: Path, workers: int, rounds: int = 3, **given: Any) -> dict[str, Any]:
    options = {"record_views": True, "checkpoint_every": 1} | given
    engine = options.pop("engine", Engine()).model_copy(update={"workers": workers})
    federation_of(name, out, engine=engine, **options).train(rounds, seed=3)
    return left_by(out)


@pytest.mark.parametrize("name", [*CASES, *ALSO])
def test_any_number_of_workers_leaves_the_same(name: str, tmp_path: Path, workers_of_runs: list[int]) -> None:
    one, *others = (played(name, tmp_path / str(workers), workers) for workers in (1, 2, 3))
    assert len([file for file in one if file.startswith("views/")]) >= (3 if ENTRY[name].pooled else 9)
    assert len([file for file in one if file.startswith("checkpoint/")]) >= 4
    for other in others:
        assert other == one
    assert len(workers_of_runs) == (0 if ENTRY[name].pooled else 5)


FAULTS = Faults.model_validate(
    {
        "drop": [{"round": 2, "silo": "south"}, {"round": 3, "silo": "west", "phase": "unmasking"}],
        "delay": [{"round": 2, "silo": "east", "seconds": 900.0}, {"round": 3, "silo": "north", "seconds": 5.0}],
        "corrupt": [{"round": 4, "silo": "centre"}],
        "drop_probability": 0.1,
    }
)


@pytest.mark.parametrize("aggregation", [SecureAggregation(threshold=3), ADDITIVE], ids=["pairwise", "additive"])
@pytest.mark.parametrize("name", ["fedsgd", "cgd", "local"])
def test_faults_and_participation_come_to_the_same(name: str, aggregation: Any, tmp_path: Path) -> None:
    given = {
        "silos": silos(MORE), "aggregation": aggregation, "engine": Engine(deadline=500.0, faults=FAULTS),
        "participation": 0.8 if (name, aggregation) == ("fedsgd", ADDITIVE) else 1.0,
    }  # fmt: skip
    one, two = (played(name, tmp_path / str(workers), workers, 5, **given) for workers in (1, 2))
    assert one["result.json"]["dropped"]
    assert two == one


def test_the_best_round_is_returned_to(tmp_path: Path) -> None:
    x = np.random.default_rng(9).normal(0, 2, (20, 4)).astype(np.float32)
    wrong = np.full(20, 2)  # so that it gets worse
    given = {"validation": (x, wrong.astype(np.int64)), "early_stopping": 2, "evaluate_every": 1}
    for name in ("local", "fedsgd"):
        one, two = (played(name, tmp_path / f"{name}-{workers}", workers, 12, **given) for workers in (1, 2))
        assert one["result.json"]["facts"]["best_round"] < 12
        assert two == one


def test_a_blind_score_and_an_alignment_are_brought_back(tmp_path: Path) -> None:
    generator, made = np.random.default_rng(4), list[Silo]()
    for row in ("one", "two"):
        x = generator.normal(0, 2, (24, 4)).astype(np.float32)
        ids = np.array([f"person {row} {number}" for number in range(24)])
        for part, columns in enumerate([(0, 3), (1, 2)]):
            order = generator.permutation(24)[: 20 + part]
            y = (x[order, 0] > 0).astype(np.int64) if not part else np.empty(0, np.int64)
            made.append(Silo(f"{row}-{part}", x[order][:, columns], y, row, columns, ids[order]))
    given = {"silos": made, "protocol": CGD(learning_rate=1.0, delta=0.3, align=True)}
    one, two = (played("cgd-joint", tmp_path / f"grid-{workers}", workers, 2, **given) for workers in (1, 2))
    assert two == one
    scored = [replace(silo, held_out=(silo.x, silo.y)) for silo in silos(MORE)]
    given = {"silos": scored, "score_at_silos": True}
    one, two = (played("cgd", tmp_path / f"scored-{workers}", workers, 2, **given) for workers in (1, 2))
    assert one["result.json"]["test"]["by"] == "silos"
    assert two == one


@pytest.mark.parametrize("name", ["fedavg", "pbpfl"])
def test_stacks_are_the_same_with_any_number(name: str, tmp_path: Path, workers_of_runs: list[int]) -> None:
    many = silos({f"silo-{number}": 8 for number in range(52)})  # three slots
    given = {"silos": many, "aggregation": SecureAggregation(scheme="none"), "checkpoint_every": 10}
    one, *others = (played(name, tmp_path / str(workers), workers, 2, **given) for workers in (1, 2, 8))
    assert all(other == one for other in others)
    assert len(workers_of_runs) == 2 + 3


class Stop(Exception):
    """Ends a run in the middle."""


def stop_at(number: int) -> Any:
    def progress(done: int, of: int, line: Any) -> None:
        if done == number:
            raise Stop

    return progress


@pytest.mark.parametrize("name", ["fedsgd", "local", "cgd", "pbpfl", "baffle"])
def test_a_run_is_resumed_with_another_number_of_workers(name: str, tmp_path: Path) -> None:
    def federation(out: Path, workers: int) -> Federation:
        return federation_of(name, out, engine=Engine(workers=workers), checkpoint_every=2)

    whole = federation(tmp_path / "whole", 1).train(5, seed=3)
    for before, after in ((2, 3), (2, 1), (1, 2)):
        out = tmp_path / f"{before}-{after}"
        with pytest.raises(Stop):
            federation(out, before).train(5, seed=3, progress=stop_at(3))
        resumed = federation(out, after).train(5, seed=3, resume=True)
        assert models_of(out) == models_of(tmp_path / "whole")
        assert resumed.record["sessions"] == whole.record["sessions"] + 1


def models_of(out: Path) -> dict[str, bytes]:
    return {name: data for name, data in left_by(out, "checkpoint/").items() if name.endswith(".safetensors")}


def test_a_run_whose_worker_was_killed_goes_on_from_its_checkpoint(tmp_path: Path, workers_of_runs: list[int]) -> None:
    def kill(done: int, of: int, line: Any) -> None:
        if done == 3:
            os.kill(workers_of_runs[-1], signal.SIGKILL)

    whole = federation_of("fedsgd", tmp_path / "whole").train(5, seed=3)
    made = federation_of("fedsgd", tmp_path / "run", engine=Engine(workers=2))
    with pytest.raises(RunFailed, match=r"killed by signal 9\), and with it .*go on with resume=True"):
        made.train(5, seed=3, progress=kill)
    resumed = made.train(5, seed=3, resume=True)
    assert models_of(tmp_path / "run") == models_of(tmp_path / "whole")
    assert resumed.record["dropped"] == whole.record["dropped"] == []


RUN = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it begins in the background ignore it
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_contract import federation_of
from moretta import Engine

def progress(number, of, line):
    time.sleep(0.05)

federation_of("fedsgd", Path(sys.argv[2]), engine=Engine(workers=2)).train(100_000, progress=progress)
"""


@pytest.mark.parametrize("with_signal", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_process_and_a_whole_checkpoint(with_signal: int, tmp_path: Path) -> None:
    out = tmp_path / "run"
    # The workers hold the other end of this pipe as long as any of them lives.
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(Path(__file__).parent), str(out)],
        stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )  # fmt: skip
    until, history = time.monotonic() + 60, out / "history.jsonl"
    while not history.exists() or history.read_bytes().count(b"\n") < 3:
        assert run.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    if with_signal == signal.SIGINT:
        os.killpg(run.pid, with_signal)  # as a terminal does
    else:
        run.send_signal(with_signal)
    try:
        said = run.communicate(timeout=120)[1].decode()
    finally:
        run.kill()
    assert run.returncode != 0
    assert said.count("KeyboardInterrupt") == (with_signal == signal.SIGINT)
    again = federation_of("fedsgd", out, engine=Engine(workers=1))
    done = len(history.read_bytes().splitlines())
    assert again.train(done + 1, resume=True).record["sessions"] == 2


# -- how many ----------------------------------------------------------------------------------------------------------


def players(count: int) -> Any:
    return dict.fromkeys(map(str, range(count)))


def test_how_many_workers_there_are_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "cores", lambda: 4)
    few = federation_of("fedsgd")
    assert engines.workers_of(few, 3, 10) == 1  # nothing to gain
    assert engines.workers_of(few, 3, 10_000) == 3  # no more than silos
    assert engines.workers_of(few, 100, 1000) == 4
    large = Federation(torch.nn.Linear(4, 30_000), silos(), few.spec.protocol)
    assert engines.workers_of(large, 100, 1_000_000) == 1  # whose passes use PyTorch's threads
    given = Federation(torch.nn.Linear(4, 30_000), silos(), few.spec.protocol, engine=Engine(workers=3))
    assert engines.workers_of(given, 100, 1) == 3
    assert engines.computes_on_one_thread(given)
    assert not engines.computes_on_one_thread(large)
    monkeypatch.delattr(os, "fork")
    assert engines.workers_of(few, 100, 1000) == 1
    with pytest.raises(ParameterError, match=r"\[engine\] workers = 3: silos run in other processes on the CPU"):
        engines.workers_of(given, 100, 1)


def test_the_number_is_of_cores_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5, 7}, raising=False)
    assert engines.cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert engines.cores() == 1


@pytest.mark.parametrize("name", ["flare", "fused", "exact-ring"])
def test_other_engines_have_no_workers(name: str) -> None:
    with pytest.raises(ParameterError, match=r'Engine\(workers=..\) is for name="in-process"'):
        Engine.model_validate({"name": name, "workers": 2})
