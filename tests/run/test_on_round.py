"""Callbacks: what they are given after each round, how they end a run, and what is left when they fail."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_contract import CASES, federation_of, silos_of, weights

from moretta import Engine, Faults, FedSGD, FinishedRound, SecureAggregation, StopTraining
from moretta.engines.checkpoint import last_checkpoint
from moretta.engines.run_folder import read_json

DROPPED = Engine(faults=Faults.model_validate({"drop": [{"round": 2, "silo": "south"}]}))


def told_of(name: str, rounds: int = 3, **settings: Any) -> tuple[list[FinishedRound], Any]:
    told: list[FinishedRound] = []
    result = federation_of(name, **settings).train(rounds, 7, on_round=told.append, progress=False)
    return told, result


@pytest.mark.parametrize("name", CASES)
def test_it_is_told_what_the_history_has(name: str) -> None:
    held = silos_of(name)[0]
    test = None if held.columns else (held.x, held.y)
    told, result = told_of(name, test=test)
    assert [one.number for one in told] == [1, 2, 3]
    for one, line in zip(told, result.history, strict=True):
        assert one.rounds == 3
        assert one.loss == line.get("loss")
        assert dict(one.metrics) == {key: value for key, value in line.items() if key.startswith("test_")}
        assert dict(one.bytes) == line["bytes"]
        assert one.seconds == line["seconds_total"]
        assert one.missing == ()
        assert one.epsilon is None


@pytest.mark.parametrize("name", CASES)
def test_it_holds_no_silo_s_own_values(name: str) -> None:
    told, _ = told_of(name)
    fields = {field.name for field in dataclasses.fields(told[0])}
    assert fields == {"number", "rounds", "loss", "metrics", "missing", "bytes", "seconds", "epsilon", "lost"}
    plain = json.dumps(dataclasses.asdict(dataclasses.replace(told[0], metrics=dict(told[0].metrics), bytes={})))
    assert len(plain) < 1000  # numbers and names: no array, no key


def test_nothing_in_it_can_be_changed() -> None:
    (one, *_), _ = told_of("fedsgd", test=(silos_of("fedsgd")[0].x, silos_of("fedsgd")[0].y))
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.loss = 0.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        one.metrics["test_loss"] = 0.0  # type: ignore[index]
    with pytest.raises(TypeError):
        one.bytes["up"] = 0.0  # type: ignore[index]


def test_it_names_who_is_missing_and_why() -> None:
    told, _ = told_of("fedsgd", engine=DROPPED, aggregation=SecureAggregation(threshold=2))
    ((gone,),) = [one.missing for one in told if one.missing]
    assert (gone.round, gone.silo) == (2, "south")
    assert "fault" in gone.reason


def test_it_is_told_what_epsilon_is_spent() -> None:
    protocol = FedSGD(dp_noise=1.0, dp_clip=1.0)
    told, result = told_of("fedsgd", protocol=protocol, batch_size=4, standardise=False)
    spent = [one.epsilon for one in told]
    assert all(one is not None for one in spent)
    assert spent == sorted(spent)  # type: ignore[type-var]
    assert spent[-1] == pytest.approx(result.record["facts"]["epsilon"], rel=1e-9)
    assert [line["epsilon"] for line in result.history] == spent


@pytest.mark.parametrize("name", CASES)
def test_it_can_stop_the_run(name: str, tmp_path: Path) -> None:
    def stop(told: FinishedRound) -> None:
        if told.number == 3:
            raise StopTraining

    result = federation_of(name, tmp_path / "run").train(5, 7, on_round=stop, progress=False)
    assert result.record["rounds"] == 3
    assert any("stopped after round 3 of 5" in sentence for sentence in result.record["warnings"])
    assert read_json(tmp_path / "run" / "result.json")["rounds"] == 3
    found = last_checkpoint(tmp_path / "run" / "checkpoint")
    assert found is not None
    assert found[0].round == 3


@pytest.mark.parametrize("name", ["fedsgd", "fedavg", "pbpfl", "cgd", "baffle"])
@pytest.mark.parametrize("failure", [ValueError("the disk of the dashboard"), KeyboardInterrupt()])
def test_if_it_fails_the_run_ends_with_a_checkpoint_and_can_go_on(
    name: str, failure: BaseException, tmp_path: Path
) -> None:
    def fail(told: FinishedRound) -> None:
        if told.number == 3:  # between two checkpoints, which are every two rounds
            raise failure

    with pytest.raises(type(failure)) as caught:
        federation_of(name, tmp_path / "run").train(4, 7, on_round=fail, progress=False)
    assert caught.value is failure
    assert not (tmp_path / "run" / "result.json").exists()
    found = last_checkpoint(tmp_path / "run" / "checkpoint")
    assert found is not None
    assert found[0].round == 3
    resumed = federation_of(name, tmp_path / "run").train(4, 7, resume=True, progress=False)
    assert weights(resumed) == weights(federation_of(name, tmp_path / "whole").train(4, 7, progress=False))
    assert [line["round"] for line in resumed.history] == [1, 2, 3, 4]


def test_it_changes_no_bit() -> None:
    _, watched = told_of("fedavg")
    assert weights(watched) == weights(federation_of("fedavg").train(3, 7, progress=False))


def test_numbers_are_pythons_own() -> None:
    (one, *_), _ = told_of("fedsgd")
    assert type(one.loss) is float
    assert not isinstance(one.seconds, np.generic)
