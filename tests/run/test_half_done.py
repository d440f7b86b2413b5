"""Rounds of local epochs that a kill interrupts: at most an interval is lost, and the run ends as if none had been."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stopped import Killed
from torch import nn

from moretta import BAFFLE, Engine, FedAvg, Federation, FedProx, Silo
from moretta.engines import checkpoint
from moretta.engines.checkpoint import HalfDone
from moretta.protocols.baffle.silo.recipe import LocalSteps
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd import client

ROWS, STEPS = 40, 2 * 5  # of two epochs of five batches
PROTOCOLS: list[Training] = [
    FedAvg(learning_rate=0.05, local_epochs=2, momentum=0.9, checkpoint_minutes=1),
    FedProx(learning_rate=0.05, local_epochs=2, clip_norm=1.0, checkpoint_minutes=1),
    BAFFLE(k=4, local_epochs=2, ema=0.0, checkpoint_minutes=1),
]


def made(protocol: Training, out: Path) -> Federation:
    silos = []
    for number in range(3):
        x = np.random.default_rng(number).normal(0, 1, (ROWS, 4)).astype(np.float32)
        silos.append(Silo(f"silo-{number}", x, x[:, :2] - x[:, 2:]))
    torch.manual_seed(1)
    norms = isinstance(protocol, FedAvg | FedProx)
    between = [nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3)] if norms else [nn.ReLU()]
    model = nn.Sequential(nn.Linear(4, 6), *between, nn.Linear(6, 2))
    settings: dict[str, Any] = {"batch_size": 8, "insecure_secret_seed": 1, "checkpoint_every": 1}
    return Federation(model, silos, protocol, out=out, engine=Engine(workers=1), **settings)


def kill() -> None:
    raise Killed


def steps_counted(monkeypatch: pytest.MonkeyPatch, at: int = 0, act: Callable[[], object] = lambda: None) -> list[int]:
    """Count steps at silos; call `act` before step `at`, of all silos and rounds together. FedAvg's are by tensor."""
    taken = [0]

    def counted(inner: Any) -> Any:
        def step(*given: Any, **named: Any) -> Any:
            taken[0] += 1
            if taken[0] == at:
                act()
            return inner(*given, **named)

        return step

    monkeypatch.setattr(client.modules, "gradient", counted(client.modules.gradient))
    monkeypatch.setattr(LocalSteps, "step", counted(LocalSteps.step))
    return taken


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=["fedavg", "fedprox", "baffle"])
def test_a_run_that_is_killed_at_half_an_epoch_goes_on_from_there(
    protocol: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "MINUTE", 0.0)  # each step is kept
    whole = made(protocol, tmp_path / "whole").train(2, progress=False)
    killed = 3 * STEPS + STEPS + 7  # in round 2, at the second silo, in its second epoch
    with monkeypatch.context() as patch:
        steps_counted(patch, killed, kill)
        with pytest.raises(Killed):
            made(protocol, tmp_path / "run").train(2, progress=False)
    kept = tmp_path / "run" / "helped" / "silo-1.half-done"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    taken = steps_counted(monkeypatch)
    resumed = made(protocol, tmp_path / "run").train(2, resume=True, progress=False)
    # Of the first silo the last step is left, which is never kept, of the second what was not done, of the third all.
    assert taken == [1 + (STEPS - 6) + STEPS]
    one, other = (tmp_path / folder / "model.safetensors" for folder in ("run", "whole"))
    assert one.read_bytes() == other.read_bytes()
    sums = [one for one in resumed.record["sums"] if one["of"] == "round"]
    assert [(one["rounds"], one["silos"], one["used"]) for one in sums] == [
        ([1, 2], ["silo-0", "silo-1", "silo-2"], True)
    ]
    assert resumed.history[-1]["loss"] == whole.history[-1]["loss"]


def test_what_is_kept_is_of_one_work_alone_and_due_after_its_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: clock[0])
    path = tmp_path / "half-done"
    state = {"at": np.arange(3.0), "loss": 0.1, "steps": 2, "moments": b"\1"}

    def begun(*of: int | str | bytes) -> dict[str, Any]:
        return dict(HalfDone(path, 2.0).begin(*of))

    half = HalfDone(path, 2.0)
    assert half.begin("run", 1) == {}
    for now, there in ((119.0, False), (121.0, True)):
        clock[0] = now
        half.keep(lambda: state)
        assert path.exists() == there
    found = begun("run", 1)
    assert found.pop("at").tolist() == [0.0, 1.0, 2.0]
    assert found == {"loss": 0.1, "steps": 2, "moments": b"\1"}
    assert begun("run", 2) == {}, "another round's"
    assert not path.exists()
    path.write_bytes(b"nonsense")
    assert begun("run", 1) == {}
    assert "is damaged" in caplog.text
    path.write_bytes(b"\x02\0\0\0\0\0\0\0[]")  # a list where names of tensors belong
    assert begun("run", 1) == {}
    assert not HalfDone(None, 2.0).keeps
    assert not HalfDone(path, None).keeps
    clock[0] += 1000.0
    monkeypatch.setattr(checkpoint, "write_atomically", _full)
    half.keep(lambda: state)
    assert "No space left" in caplog.text, "and work goes on"


def _full(*given: object, **named: object) -> None:
    raise OSError(28, "No space left on device")
