"""A run that was stopped after any round goes on from its checkpoint to the very same models and D."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from grids import SEED, Run, bytes_of, casting, grid, make, run, same_bytes, table, train
from stopped import interrupted, left_by
from torch import nn

from moretta import CGD, Engine, Faults, Federation, Silo
from moretta.engines.checkpoint import last_checkpoint
from moretta.errors import ParameterError

ROUNDS = 6
JOINT = grid([6, 4, 7], [3, 2], holders=[0, 1, 0])
INDEPENDENT = grid([6, 4, 7], [3, 2], joint=False)
ROWS = grid([6, 4, 7], [5])
CASES: dict[str, tuple[list[Silo], dict[str, Any], dict[str, Any]]] = {
    "joint": (JOINT, {}, {"batch_size": 3}),
    "joint, standardised": (JOINT, {}, {"standardise": True}),
    "joint, decaying": (JOINT, {"schedule": "inverse-square", "mu": 0.3, "blind": False}, {}),
    "independent": (INDEPENDENT, {"vertical": "independent"}, {"standardise": True}),
    "rows": (ROWS, {}, {"batch_size": 3}),
    "one row": (grid([9], [3, 2]), {}, {"standardise": True}),
}


def made(case: str, out: Path | None, engine: str = "in-process", **settings: Any) -> Federation:
    silos, protocol, rest = CASES[case]
    return make(
        silos,
        CGD.model_validate({"delta": (0.1, 0.3), **protocol}),
        **{
            "out": out,
            "checkpoint_every": 2,
            "engine": Engine.model_validate({"name": engine}),
            **rest,
            **settings,
        },
    )


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        *((case, "in-process") for case in CASES if case != "joint, decaying"),
        pytest.param("joint, decaying", "in-process", marks=pytest.mark.slow),
        *((case, "fused") for case in CASES),
        ("joint", "exact-ring"),
    ],
)
def test_wherever_it_was_stopped_it_ends_with_the_same_bytes(case: str, engine: str, tmp_path: Path) -> None:
    whole = train(made(case, tmp_path / "whole", engine), ROUNDS)
    for first, second in ((1, 4), (3, 5)) if engine == "in-process" else ((1, 2), (2, 5), (4, 6)):
        out = tmp_path / f"{first}-{second}"
        interrupted(made(case, out, engine), first, ROUNDS, SEED)
        interrupted(made(case, out, engine), second, ROUNDS, SEED, resume=True)
        resumed = train(made(case, out, engine), ROUNDS, resume=True)
        assert same_bytes(resumed, whole)
        assert left_by(out) == left_by(tmp_path / "whole")
        assert [line["round"] for line in resumed.result.history] == list(range(1, ROUNDS + 1))
        assert resumed.result.record["sessions"] == 3


def roots(of: Run) -> dict[str, bytes]:
    roles = of.players.clients or {"": of.players.server}
    return {name: role.state()["root"] for name, role in roles.items()}


@pytest.mark.parametrize(
    ("case", "engine"),
    [("joint", "in-process"), ("independent", "in-process"), ("rows", "in-process"), ("joint", "fused")],
)
def test_secret_starts_come_back_from_the_checkpoint(case: str, engine: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"insecure_secret_seed": None, "checkpoint_every": 1}
    out, stops = tmp_path / "run", (1, 4)

    def progress(number: int, of: int, line: object) -> None:
        if number in stops:
            shutil.copytree(out, tmp_path / f"at-{number}")

    with casting() as (players, _):
        result = made(case, out, engine, **settings).train(ROUNDS, SEED, progress=progress)
    models = {name: dict(tensors) for name, tensors in players[0].models().items()}
    assert players[0].displacement is not None
    whole = Run(result, players[0], {}, models, dict(players[0].displacement()))
    for stop in stops:
        resumed = train(made(case, tmp_path / f"at-{stop}", engine, **settings), ROUNDS, resume=True)
        assert same_bytes(resumed, whole)
        assert roots(resumed) == roots(whole)
        assert left_by(tmp_path / f"at-{stop}") == left_by(out)
    another = train(made(case, None, engine, **settings), ROUNDS)
    assert not set(roots(another).values()) & set(roots(whole).values())
    assert not set(bytes_of(another).values()) & set(bytes_of(whole).values())


def test_a_checkpoint_has_everybodys_own_and_the_aggregators_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    interrupted(made("joint", out, checkpoint_every=1), 3, ROUNDS, SEED)
    found = last_checkpoint(out / "checkpoint")
    assert found is not None
    place, states = found
    assert place.round == 3
    assert set(states) == {"server", *(f"silo-{silo.name}" for silo in JOINT)}
    assert not [name for name, value in states["server"].items() if "weight" in name or "displacement" in name]
    for name, state in states.items():
        if name != "server":
            parts = {tensor.partition("/")[0] for tensor in state}
            assert parts <= {"displacement", "buffer", "steps", "norms", "root"}
            assert {int(value) for tensor, value in state.items() if tensor.startswith("steps/")} == {3}


def test_who_was_away_when_it_was_stopped_returns_after_it(tmp_path: Path) -> None:
    silos = grid([6, 4, 7, 5], [3, 2], holders=1)
    drop = [{"round": number, "silo": "silo-0-0", "phase": "set-up"} for number in (2, 3, 4)]
    engine = Engine(faults=Faults.model_validate({"drop": drop}))

    def of(out: Path) -> Federation:
        return make(silos, CGD(delta=0.2), out=out, engine=engine, checkpoint_every=1)

    whole = train(of(tmp_path / "whole"), ROUNDS)
    for stop in (2, 4):
        interrupted(of(tmp_path / str(stop)), stop, ROUNDS, SEED)
        assert same_bytes(train(of(tmp_path / str(stop)), ROUNDS, resume=True), whole)


def test_batchnorms_own_buffers_come_back(tmp_path: Path) -> None:
    def of(out: Path) -> Federation:
        model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3))
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.5)
        return make(ROWS, CGD(delta=0.2), model, out=out, checkpoint_every=1)

    whole = train(of(tmp_path / "whole"), ROUNDS)
    interrupted(of(tmp_path / "run"), 3, ROUNDS, SEED)
    resumed = train(of(tmp_path / "run"), ROUNDS, resume=True)
    assert same_bytes(resumed, whole)
    assert int(resumed.models["silo-0"]["1.num_batches_tracked"]) == ROUNDS


@pytest.mark.parametrize("engine", ["in-process", "fused"])
def test_a_finished_run_goes_on_to_more_rounds(engine: str, tmp_path: Path) -> None:
    train(made("joint", tmp_path / "run", engine), 4)
    more = train(made("joint", tmp_path / "run", engine), ROUNDS, resume=True)
    assert same_bytes(more, train(made("joint", None, engine), ROUNDS))


def test_one_engines_checkpoint_is_not_anothers(tmp_path: Path) -> None:
    train(made("joint", tmp_path / "run", "fused"), 4)
    with pytest.raises(ParameterError, match="the checkpoint is of other roles"):
        train(made("joint", tmp_path / "run"), ROUNDS, resume=True)


def test_a_decaying_rate_is_that_of_the_whole_run(tmp_path: Path) -> None:
    """The rate depends on how many rounds there are, so a run is resumed with as many as it was begun with."""
    train(made("joint, decaying", tmp_path / "run"), 4)
    with pytest.raises(ParameterError, match="other settings"):
        train(made("joint, decaying", tmp_path / "run"), ROUNDS, resume=True)


@pytest.mark.parametrize("engine", ["in-process", "fused", pytest.param("exact-ring", marks=pytest.mark.slow)])
def test_a_run_that_stops_early_goes_back_to_its_best_round(engine: str) -> None:
    settings: dict[str, Any] = {"early_stopping": 3, "validation": table(20, 5, 1), "evaluate_every": 1}
    silos = grid([6, 4, 7, 5], [3, 2], holders=1)
    stopped = run(silos, 30, CGD(delta=0.2, learning_rate=2.0), engine, **settings)
    best = int(stopped.result.record["facts"]["best_round"])
    assert 1 < best < stopped.result.record["rounds"] < 30
    assert same_bytes(stopped, run(silos, best, CGD(delta=0.2, learning_rate=2.0), engine))
