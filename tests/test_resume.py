"""A run that is killed at any moment goes on from its last checkpoint and ends with the same bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from networks import perceptron
from stopped import Killed, interrupted, left_by
from torch import nn

from moretta import PBPFL, Centralised, Engine, Faults, FedAvg, Federation, FedSGD, SecureAggregation, Silo
from moretta.contract.codec import Codec
from moretta.contract.messages import Message
from moretta.contract.roles import Ask, Replies
from moretta.engines import journal, views
from moretta.engines.checkpoint import last_checkpoint
from moretta.engines.in_process import InProcess
from moretta.errors import ParameterError
from moretta.protocols.common.modules import arrays
from moretta.protocols.common.training import Training
from moretta.secure_aggregation.agreement import KeyAdvert
from moretta.secure_aggregation.pairwise import MaskedUpload
from moretta.secure_aggregation.schemes import MESSAGES

PROTOCOLS: dict[str, Training] = {
    "fedsgd": FedSGD(learning_rate=0.05, momentum=0.9),
    "fedavg": FedAvg(learning_rate=0.02),
    "centralised": Centralised(optimizer="adam", learning_rate=0.01),
    "pbpfl": PBPFL(learning_rate=0.05, optimizer="adam"),
}
SEED = 11


def make(protocol: str, out: Path | None, **settings: Any) -> Federation:
    generator = np.random.default_rng(0)
    silos = []
    for name, rows in (("north", 20), ("south", 33), ("east", 9)):
        x = generator.normal(0, 1, (rows, 4))
        silos.append(Silo(name, x, (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 1)))
    model = perceptron(4, 6, 3, between=nn.ReLU)
    chosen = {"batch_size": 8, "standardise": True} | settings
    return Federation(model, silos, PROTOCOLS[protocol], out=out, **chosen)


def rounds_of(folder: Path) -> list[int]:
    return [json.loads(line)["round"] for line in (folder / "history.jsonl").read_text().splitlines()]


# -- killed by the operating system ------------------------------------------------------------------------------------

RUN = """
import shutil, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
from test_resume import SEED, make
torch.set_num_threads(1)
protocol, out, rounds, every, resume, pause = sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:8])

def progress(number, of, line):
    if number == 1 and not resume:
        shutil.copytree(out, f"{out}-at-0")  # with the checkpoint of round 0
    time.sleep(600 if number == of - 1 else pause / 1000)  # it never ends by itself: it is there to be killed

federation = make(protocol, out, checkpoint_every=every, record_views=pause > 0)
federation.train(rounds, SEED, resume=bool(resume), progress=progress)
"""


def begin(protocol: str, out: Path, rounds: int, every: int, *, resume: bool, pause: int) -> subprocess.Popen[bytes]:
    numbers = [str(number) for number in (rounds, every, int(resume), pause)]
    command = [sys.executable, "-c", RUN, str(Path(__file__).parent), protocol, str(out), *numbers]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def kill_after(process: subprocess.Popen[bytes], folder: Path, lines: int, later: float = 0.0) -> None:
    """Kill the process once the history has so many lines."""
    history, deadline = folder / "history.jsonl", time.monotonic() + 60
    while not history.exists() or history.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.002)
    time.sleep(later)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def seen_by_server(folder: Path, session: int) -> Iterator[Message]:
    from message_kinds import tag_of  # not on the path of the processes that import this file

    codec = Codec(MESSAGES)
    for path in sorted((folder / "views" / "server").glob(f"round-*.{session}.bin")):
        for seen in views.read(path):
            if seen.direction == "received" and tag_of(seen.data).startswith("secure-aggregation/"):
                yield codec.decode(seen.data)


def keys_of(folder: Path, session: int) -> list[bytes]:
    return [message.public_key for message in seen_by_server(folder, session) if isinstance(message, KeyAdvert)]


@pytest.mark.parametrize("protocol", ["fedsgd", "pbpfl"])
def test_a_killed_run_and_its_copy_of_round_0_end_with_the_same_bytes(protocol: str, tmp_path: Path) -> None:
    out, copied, rounds = tmp_path / "run", tmp_path / "run-at-0", 50
    line = random.SystemRandom().randrange(9, 35)  # whichever it is, it must hold
    kill_after(begin(protocol, out, rounds, 7, resume=False, pause=15), out, line)
    assert not (out / "model.safetensors").exists()
    found = last_checkpoint(out / "checkpoint")
    assert found is not None
    reached, stood = rounds_of(out), found[0].round
    assert 7 <= stood <= len(reached) < rounds
    assert stood % 7 == 0

    resumed = make(protocol, out, checkpoint_every=7, record_views=True).train(rounds, SEED, resume=True)
    again = make(protocol, copied, checkpoint_every=7, record_views=True).train(rounds, SEED, resume=True)
    assert left_by(out) == left_by(copied) != {}
    assert rounds_of(out) == rounds_of(copied) == list(range(1, rounds + 1))
    assert [one["loss"] for one in resumed.history] == [two["loss"] for two in again.history]
    assert resumed.record["sessions"] == again.record["sessions"] == 2

    # No mask is used twice: no key pair is, within a session or from one to the next.
    keys = [*keys_of(out, 0), *keys_of(out, 1), *keys_of(copied, 1)]
    assert len(keys) == 3 * 3  # one set-up each
    assert len(set(keys)) == len(keys)
    # The rounds that were played twice were masked differently, for all that they say the same.
    uploads = [message for session in (0, 1) for message in seen_by_server(out, session)]
    masked = [message for message in uploads if isinstance(message, MaskedUpload) and message.stamp.round > stood]
    twice = [message for message in masked if message.stamp.round in reached[stood:]]
    assert len(twice) == 2 * 3 * len(reached[stood:])
    contents = {array.tobytes() for message in masked for name, array in message.tensors.items() if array.size > 1}
    assert len(contents) == sum(array.size > 1 for message in masked for array in message.tensors.values())


@pytest.mark.slow
def test_a_run_killed_again_and_again_while_it_saves_ends_as_if_it_never_was(tmp_path: Path) -> None:
    out, rounds, kills, random_ = tmp_path / "run", 250, 3, random.SystemRandom()
    for kill in range(kills):
        lines = len(rounds_of(out)) if kill else 0
        process = begin("fedsgd", out, rounds, 1, resume=kill > 0, pause=0)
        kill_after(
            process, out, lines + 20, random_.uniform(0, 0.02)
        )  # a checkpoint a round: often in the midst of one
        found = last_checkpoint(out / "checkpoint")
        assert found is not None
        assert lines < found[0].round <= len(rounds_of(out)) + 1
        assert len(rounds_of(out)) - found[0].round <= 1
        assert found[0].session == kill
    resumed = make("fedsgd", out, checkpoint_every=100).train(rounds, SEED, resume=True)
    assert resumed.record["sessions"] == kills + 1
    make("fedsgd", tmp_path / "whole", checkpoint_every=1000).train(rounds, SEED)
    assert left_by(out) == left_by(tmp_path / "whole")
    assert rounds_of(out) == list(range(1, rounds + 1))
    assert sorted(path.name for path in (out / "checkpoint").iterdir() if path.name.startswith(".")) == []


# -- interrupted in this process ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["fedsgd", "pbpfl"])
def test_a_round_that_others_play_again_has_other_rows(protocol: str, tmp_path: Path) -> None:
    # Else the sum of all and that of the others, of the same rows, would differ by what south uploaded.
    settings: dict[str, Any] = {"checkpoint_every": 100, "batch_size": 4, "aggregation": SecureAggregation(threshold=2)}
    interrupted(make(protocol, tmp_path, **settings), 3, 4, SEED)
    faults = Faults.model_validate({"drop": [{"round": 2, "silo": "south", "phase": "upload"}]})
    again = make(protocol, tmp_path, engine=Engine(faults=faults), **settings).train(4, SEED, resume=True)
    # In round 2 others play; round 3 goes on from another model than the one it was asked for before.
    assert [line.get("take", 0) for line in again.history] == [0, 1, 1, 0]
    assert [[gone["silo"] for gone in line["dropped"]] for line in again.history] == [[], ["south"], [], []]


@pytest.mark.parametrize("batch_size", [8, 0])
def test_a_run_goes_on_after_its_machine_was_started_anew(
    batch_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"batch_size": batch_size, "insecure_secret_seed": 1}
    make("fedsgd", tmp_path / "run", **settings).train(2, SEED)
    (tmp_path / "boot").write_text("another")
    monkeypatch.setattr(journal, "BOOT", tmp_path / "boot")
    resumed = make("fedsgd", tmp_path / "run", **settings).train(4, SEED, resume=True)
    whole = make("fedsgd", None, **settings).train(4, SEED)
    assert whole.model is not None
    assert resumed.model is not None
    for name, array in arrays(whole.model).items():
        np.testing.assert_array_equal(arrays(resumed.model)[name], array)


def test_sessions_that_reach_no_checkpoint_are_counted_and_keep_their_views(tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings: dict[str, Any] = {"checkpoint_every": 100, "record_views": True, "insecure_secret_seed": 3}
    interrupted(make("fedsgd", out, **settings), 2, 6, SEED)
    interrupted(make("fedsgd", out, **settings), 3, 6, SEED, resume=True)
    interrupted(make("fedsgd", out, **settings), 2, 6, SEED, resume=True)
    result = make("fedsgd", out, **settings).train(6, SEED, resume=True)
    assert result.record["sessions"] == 4
    north = out / "views" / "north"
    assert sorted(path.name for path in north.glob("round-000002.*")) == [f"round-000002.{n}.bin" for n in range(4)]
    keys = [key for session in range(4) for key in keys_of(out, session)]
    assert len(set(keys)) == len(keys) == 4 * 3  # even the insecure ones


def test_what_was_seen_in_a_round_that_failed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moretta.protocols.fedsgd.client import Client

    answer = Client.answer

    def failing(self: Client, message: Message) -> Message:
        if message.stamp.round == 3:
            raise ZeroDivisionError
        return answer(self, message)

    monkeypatch.setattr(Client, "answer", failing)
    with pytest.raises(Exception, match="round 3 cannot be completed"):
        make("fedsgd", tmp_path / "run", record_views=True).train(5, SEED)
    assert [seen.direction for seen in views.read(tmp_path / "run" / "views" / "server" / "round-000003.0.bin")] == [
        "sent"
    ] * 3


# -- refused -----------------------------------------------------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("lost", ["helped/north.jsonl", "helped"])
def test_without_the_record_of_sums_a_run_is_not_resumed(tmp_path: Path, lost: str) -> None:
    interrupted(make("fedsgd", tmp_path / "run"), 3, 5, SEED)
    record = tmp_path / "run" / "helped" / "north.jsonl"
    content = record.read_bytes()
    path = tmp_path / "run" / lost
    path.rename(tmp_path / "aside")
    with pytest.raises(ParameterError, match=r"north\.jsonl is missing: expected the record of which sums"):
        make("fedsgd", tmp_path / "run").train(5, SEED, resume=True)
    assert not path.exists()
    (tmp_path / "aside").rename(path)
    make("fedsgd", tmp_path / "run").train(5, SEED, resume=True)
    assert record.read_bytes().startswith(content)


def test_a_run_that_was_killed_before_its_first_sum_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its silos have helped to open nothing, and their records say so."""

    def killed(engine: InProcess, ask: Ask) -> Replies:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(InProcess, "deliver", killed)
        with pytest.raises(Killed):
            make("fedsgd", tmp_path / "run").train(5, SEED)
    assert (tmp_path / "run" / "helped" / "north.jsonl").read_bytes() == b""
    make("fedsgd", tmp_path / "run").train(5, SEED, resume=True)


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="holds no checkpoint to resume from; start without resume=True"):
        make("fedsgd", tmp_path / "none").train(5, SEED, resume=True)
    assert not (tmp_path / "none").exists()
    with pytest.raises(ParameterError, match="needs the run's folder"):
        make("fedsgd", None).train(5, SEED, resume=True)


def test_fewer_rounds_than_the_checkpoint_are_refused(tmp_path: Path) -> None:
    make("fedsgd", tmp_path, checkpoint_every=2).train(6, SEED)
    before = snapshot(tmp_path)
    with pytest.raises(ParameterError, match="is at round 6 already, past the 5 asked for"):
        make("fedsgd", tmp_path).train(5, SEED, resume=True)
    assert snapshot(tmp_path) == before


def test_another_run_file_is_refused(tmp_path: Path) -> None:
    make("fedsgd", tmp_path, run_file=("[run]", "digest one")).train(4, SEED)
    assert (tmp_path / "run.toml").read_text() == "[run]"
    before = snapshot(tmp_path)
    with pytest.raises(ParameterError, match=r"begun with another run file .*run\.toml.*--out"):
        make("fedsgd", tmp_path, run_file=("[run]", "digest two")).train(6, SEED, resume=True)
    assert snapshot(tmp_path) == before
    make("fedsgd", tmp_path, run_file=("[run]", "digest one")).train(6, SEED, resume=True)


def test_rows_that_have_changed_are_refused_by_their_silos_name(tmp_path: Path) -> None:
    federation = make("fedsgd", tmp_path / "run")
    federation.train(2)
    changed = make("fedsgd", tmp_path / "run")
    silo = changed.silos[1]
    silo.x[0, 0] += 1.0  # type: ignore[operator]
    before = snapshot(tmp_path / "run")
    with pytest.raises(ParameterError, match=f"the rows of {silo.name} have changed since the run in .* began"):
        changed.train(4, resume=True)
    assert snapshot(tmp_path / "run") == before
    assert (tmp_path / "run" / "rows.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("part", ["test", "validation", "held_out", "silo_validation"])
@pytest.mark.parametrize("place", [0, 1])
def test_rows_that_nobody_trains_on_are_the_same_too(part: str, place: int, tmp_path: Path) -> None:
    """Only rows to train on were compared: a test file changed on the way, and the result did not say so."""
    rows = (np.ones((5, 4)), np.arange(5) % 3)
    names = {"test": "the test part", "held_out": "the silos' parts for scores"}

    def again() -> Federation:
        copies = {name: (rows[0].copy(), rows[1].copy()) for name in ("test", "validation")}
        made = make("fedsgd", tmp_path, **(copies if part in copies else {}))
        if part not in copies:
            own: dict[str, Any] = {part.removeprefix("silo_"): (rows[0].copy(), rows[1].copy())}
            made.silos = [replace(silo, **own) if silo.name == "south" else silo for silo in made.silos]
        return made

    again().train(2, SEED)
    again().train(3, SEED, resume=True)
    changed = again()
    held = (
        getattr(changed.silos[1], part.removeprefix("silo_"))
        if part not in ("test", "validation")
        else getattr(changed, part)
    )
    held[place][0] = 2
    before = snapshot(tmp_path)
    with pytest.raises(ParameterError, match=f"the rows of {names.get(part, 'the validation part')} have changed"):
        changed.train(4, SEED, resume=True)
    assert snapshot(tmp_path) == before
    kept = json.loads((tmp_path / "rows.json").read_text())
    (tmp_path / "rows.json").write_text(json.dumps({name: kept[name] for name in ("north", "south", "east")}))
    changed.train(4, SEED, resume=True)  # as an earlier version left it
    (tmp_path / "rows.json").unlink()
    changed.train(5, SEED, resume=True)


def test_other_settings_from_python_are_refused_too(tmp_path: Path) -> None:
    out = tmp_path / "run"
    make("fedsgd", out).train(4, SEED)
    before = snapshot(out)
    fewer = make("fedsgd", out)
    fewer.silos = fewer.silos[:2]
    bent = make("fedsgd", out)
    bent.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))  # the same tensors, another function
    others = [
        make("fedavg", out),
        make("centralised", out),
        make("pbpfl", out),
        make("fedsgd", out, dtype="float64"),
        fewer,
        bent,
    ]
    for other in others:
        with pytest.raises(ParameterError, match="other settings"):
            other.train(6, SEED, resume=True)
    with pytest.raises(ParameterError, match="other settings"):
        make("fedsgd", out).train(6, SEED + 1, resume=True)
    assert snapshot(out) == before
    make("fedsgd", out, checkpoint_every=1, record_views=True).train(6, SEED, resume=True)  # these may change


def test_a_checkpoint_that_lacks_a_role_is_refused(tmp_path: Path) -> None:
    make("fedsgd", tmp_path).train(4, SEED)
    (tmp_path / "checkpoint" / "round-000004" / "silo-south.safetensors").unlink()
    before = snapshot(tmp_path)
    with pytest.raises(ParameterError, match="silo-south"):
        make("fedsgd", tmp_path).train(6, SEED, resume=True)
    assert snapshot(tmp_path) == before


def test_a_damaged_checkpoint_is_told_and_the_one_before_serves(tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "run"
    make("pbpfl", whole, insecure_secret_seed=3).train(6, SEED)
    interrupted(make("pbpfl", out, insecure_secret_seed=3, checkpoint_every=2), 5, 6, SEED)
    damaged = out / "checkpoint" / "round-000004" / "server.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-5])
    with pytest.raises(ParameterError, match=r"round-000004: the checkpoint is damaged .*delete it"):
        make("pbpfl", out, insecure_secret_seed=3).train(6, SEED, resume=True)
    shutil.rmtree(damaged.parent)
    make("pbpfl", out, insecure_secret_seed=3).train(6, SEED, resume=True)
    assert left_by(out) == left_by(whole)
