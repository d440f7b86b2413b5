"""Rounds that too few silos are there for: lost, counted and told, and the run goes on if that gives nothing away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from networks import perceptron
from test_runs_with_a_roster import enrol

from moretta import PBPFL, Engine, Faults, Federation, FedSGD, FinishedRound, SecureAggregation, Silo
from moretta.audit.evidence.truth import Truth
from moretta.engines.checkpoint import rounds_kept
from moretta.engines.driver import LOSSES
from moretta.engines.run_folder import read_json
from moretta.errors import RunFailed
from moretta.protocols.common.training import Training
from moretta.report.folder import read_run
from moretta.report.page import page
from moretta.run.preview import losable_of
from moretta.run.progress import round_line


def made(names: int, rows: int, protocol: Training, faults: Any = None, **settings: Any) -> Federation:
    silos = []
    for number in range(1, names + 1):
        x = np.random.default_rng(number).normal(0, 1, (rows, 4)).astype(np.float32)
        silos.append(Silo(f"silo-{number}", x, x[:, :2] - x[:, 2:]))
    engine = Engine(faults=None if faults is None else Faults.model_validate(faults))
    return Federation(perceptron(4, 5, 2), silos, protocol, engine=engine, insecure_secret_seed=1, **settings)


def without(silo: str, *rounds: int, phase: str = "upload") -> dict[str, Any]:
    return {"drop": [{"round": number, "silo": silo, "phase": phase} for number in rounds]}


@pytest.mark.parametrize(("protocol", "roster"), [(PBPFL(), False), (FedSGD(), True)], ids=["pbpfl", "fedsgd-roster"])
def test_eight_silos_of_which_each_is_away_in_every_seventh_round_end_with_a_model(
    protocol: Training, roster: bool, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {}
    if roster:
        enrol(tmp_path, [f"silo-{number}" for number in range(1, 9)])
        keys = {"roster": tmp_path / "roster.toml", "identity": str(tmp_path / "keys" / "{silo}")}
    aggregation = SecureAggregation(threshold=5, **keys)
    told = list[FinishedRound]()
    of = made(
        8,
        375,
        protocol,
        {"drop_probability": 0.15, "seed": 1},
        aggregation=aggregation,
        batch_size=64,
        out=tmp_path / "run",
    )
    result = of.train(60, on_round=told.append)
    lost = [one["round"] for one in result.record["lost"]]
    assert 1 <= len(lost) <= 10
    assert [line["round"] for line in result.history] == list(range(1, 61))
    assert [line["round"] for line in result.history if "lost" in line] == lost
    assert [one.number for one in told if one.lost] == lost
    assert result.record["facts"]["lost_rounds"] == len(lost)
    assert result.history[-1]["loss"] < 0.5 * result.history[0]["loss"]
    assert result.model is not None
    # The report says so; a lost round has no sum that came to anything.
    record = read_run(tmp_path / "run")
    assert f"too few silos were there to complete them: {', '.join(map(str, lost))};" in page([record])
    assert not {number for one in record.sums or () if one.used and one.of == "round" for number in one.rounds} & {
        *lost
    }
    assert round_line(lost[0], 60, result.history[lost[0] - 1]).startswith(f"round {lost[0]} of 60: lost, ")


def test_whole_rows_of_a_round_in_which_nobody_was_asked_to_unmask_may_follow_it(tmp_path: Path) -> None:
    of = made(3, 12, FedSGD(), without("silo-1", 2), batch_size=0, out=tmp_path / "run")
    result = of.train(4)
    assert [one["round"] for one in result.record["lost"]] == [2]
    assert [line.get("rows") for line in result.history] == [36, None, 36, 36]
    undisturbed = made(3, 12, FedSGD(), batch_size=0).train(3)
    expected = [line["loss"] for line in undisturbed.history]
    assert [line["loss"] for line in result.history if "loss" in line] == pytest.approx(expected, rel=1e-5)


def test_a_resumed_run_does_not_play_a_lost_round_again(tmp_path: Path) -> None:
    """What followed it was asked under the same model: over other silos its sum and the next could be subtracted."""
    settings: dict[str, Any] = {"batch_size": 0, "out": tmp_path / "run", "checkpoint_every": 100}
    rounds = list(range(2, LOSSES + 3))
    with pytest.raises(RunFailed, match=rf"round {rounds[-1]} cannot .*silo-1: .*; the {LOSSES} rounds before it were"):
        made(3, 12, FedSGD(), without("silo-1", *rounds), **settings).train(9)
    assert max(rounds_kept(tmp_path / "run" / "checkpoint")) == rounds[-2]
    record = made(3, 12, FedSGD(), **settings).train(9, resume=True).record
    assert [one["round"] for one in record["lost"]] == rounds[:-1]
    assert read_json(tmp_path / "run" / "result.json")["lost"] == record["lost"]


def test_whole_rows_of_which_a_sum_may_be_open_fail_by_name() -> None:
    of = made(3, 12, FedSGD(), without("silo-1", 2, phase="unmasking"), batch_size=0)
    with pytest.raises(RunFailed, match=r"round 2 cannot be completed by 2 of 3 silos"):
        of.train(4)
    # Of other rows the next round says nothing about those.
    of = made(3, 12, FedSGD(), without("silo-1", 2, phase="unmasking"), batch_size=4)
    assert [one["round"] for one in of.train(4).record["lost"]] == [2]


def test_an_audit_leaves_a_lost_round_out(tmp_path: Path) -> None:
    of = made(3, 12, FedSGD(), without("silo-1", 2), batch_size=4, out=tmp_path / "run", record_views=True)
    of.train(3)
    assert Truth(tmp_path / "run", of, 3, 0).recorded == (1, 3)


@pytest.mark.parametrize(
    ("names", "secure", "said"),
    [
        (
            3,
            {},
            "all of its 3 silos; with a roster (moretta keys new) and threshold = 2",
        ),
        (3, {"threshold": 2}, "a round can do without 1 of its 3 silos"),
        (4, {"threshold": 4}, "all of its 4 silos; with a lower threshold"),
        (4, {}, ""),
        (2, {}, ""),
        (3, {"scheme": "additive-shares"}, ""),
    ],
)
def test_a_run_of_three_says_what_it_can_lose(names: int, secure: dict[str, Any], said: str) -> None:
    lines = losable_of(made(names, 12, FedSGD(), aggregation=SecureAggregation(**secure)))
    assert len(lines) == bool(said)
    assert all(said in line for line in lines)
