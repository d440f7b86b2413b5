"""A run that was stopped goes on to the very same bytes, with the seed it had; one that gets worse goes back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from baffle_runs import (
    CLEAR,
    SEED,
    client_of,
    farthest,
    learning,
    make,
    normalised,
    same_bytes,
    server_of,
    silos,
    table,
    weights,
)
from cast import casting
from stopped import interrupted

from moretta import Engine, Federation, SecureAggregation
from moretta.contract.messages import Stamp
from moretta.engines.checkpoint import last_checkpoint
from moretta.errors import ParameterError
from moretta.protocols.baffle.silo.messages import Commit, Committed

ROUNDS = 5
SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adam": ({"ema": 0.9}, {}),
    "momentum": (SGD | {"momentum": 0.5}, {"standardise": True}),
    "growing, cosine": ({"k_last": 20, "lr_schedule": "cosine"}, {}),
    "pool": ({"seed_pool": 64}, {"aggregation": CLEAR}),
    "epochs": (SGD | {"local_epochs": 2, "lr_schedule": "step"}, {}),
    "epochs, adam": ({"local_epochs": 2, "learning_rate": 0.02}, {}),
    "own": ({"directions": "own"}, {}),
    "batch statistics": ({"batch_statistics": True}, {"model": normalised()}),
    "private": ({"dp_noise": 1.0, "dp_clip": 1.0}, {}),
    "some of them": ({}, {"participation": 0.7, "silos": silos((16,) * 4), "aggregation": CLEAR}),
    "part of the model": ({"trainable": ("2",), "orthogonal": True, "form": "central"}, {}),
}


def made(case: str, out: Path | None, **settings: Any) -> Federation:
    protocol, rest = CASES[case]
    return make(learning(**{"k": 8, **protocol}), **{"out": out, "checkpoint_every": 1, **rest, **settings})


@pytest.mark.parametrize("case", CASES)
def test_wherever_it_was_stopped_it_ends_with_the_same_bytes(case: str, tmp_path: Path) -> None:
    whole = made(case, None).train(ROUNDS, SEED)
    interrupted(made(case, tmp_path), 1, ROUNDS, SEED)
    interrupted(made(case, tmp_path, checkpoint_every=3), 4, ROUNDS, SEED, resume=True)  # goes on from round 3
    resumed = made(case, tmp_path).train(ROUNDS, SEED, resume=True)
    assert same_bytes(weights(resumed), weights(whole))
    assert resumed.record["facts"] == whole.record["facts"]
    assert [line["round"] for line in resumed.history] == list(range(1, ROUNDS + 1))


@pytest.mark.parametrize("case", ["adam", "own", "private"])
def test_secret_roots_come_back_from_the_checkpoint(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def progress(number: int, of: int, line: object) -> None:
        if number == 2:
            shutil.copytree(folder, tmp_path / "copy")

    settings: dict[str, Any] = {"insecure_secret_seed": None, "aggregation": CLEAR}
    with casting() as players:
        whole = made(case, folder, **settings).train(ROUNDS, SEED, progress=progress)
        resumed = made(case, tmp_path / "copy", **settings).train(ROUNDS, SEED, resume=True)
    assert same_bytes(weights(resumed), weights(whole))
    seeds = [[server_of(one)._seed.seed, client_of(one)._seed.seed] for one in players]
    assert seeds[0] == seeds[1]
    assert len({*seeds[0]}) == 1
    other = made(case, None, **settings).train(ROUNDS, SEED)
    assert not same_bytes(weights(other), weights(whole))


def test_the_seed_is_in_no_checkpoint_but_what_it_follows_from_is_each_ones_own(tmp_path: Path) -> None:
    with casting() as players:
        made("adam", tmp_path).train(2, SEED)
    found = last_checkpoint(tmp_path / "checkpoint")
    assert found is not None
    states, seed = found[1], server_of(players[0])._seed.seed
    roots = {name: state["seed/secret_root"] for name, state in states.items()}
    assert len(set(roots.values())) == len(roots) == 4
    for name, state in states.items():
        values = [value for value in state.values() if isinstance(value, bytes)]
        assert seed not in values
        assert not {root for other, root in roots.items() if other != name} & set(values)


def test_a_silo_that_was_restored_commits_itself_to_the_same(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"insecure_secret_seed": None}
    names = tuple(silo.name for silo in silos())
    with casting() as players:
        made("adam", tmp_path, **settings).train(2, SEED)
        made("adam", tmp_path, **settings).train(3, SEED, resume=True)
        made("adam", None, **settings).train(1, SEED)
    ask = Commit(stamp=Stamp("run", 3, 0), cohort=names)
    said = [client_of(one).answer(ask) for one in players]
    assert all(isinstance(reply, Committed) for reply in said)
    assert said[0].commitment == said[1].commitment != said[2].commitment  # type: ignore[attr-defined]


def test_k_that_depends_on_the_rounds_is_resumed_with_as_many(tmp_path: Path) -> None:
    interrupted(made("growing, cosine", tmp_path), 2, ROUNDS, SEED)
    with pytest.raises(ParameterError, match="other settings"):
        made("growing, cosine", tmp_path).train(ROUNDS + 1, SEED, resume=True)


def test_a_finished_run_goes_on_to_more_rounds(tmp_path: Path) -> None:
    made("adam", tmp_path).train(3, SEED)
    more = made("adam", tmp_path).train(ROUNDS, SEED, resume=True)
    assert same_bytes(weights(more), weights(made("adam", None).train(ROUNDS, SEED)))


def test_who_was_away_when_it_was_stopped_returns_after_it(tmp_path: Path) -> None:
    drop = [{"round": 2, "silo": "silo-3", "phase": "upload"}]
    settings: dict[str, Any] = {
        "silos": silos((16,) * 4),
        "aggregation": SecureAggregation(min_survivors=2),
        "engine": Engine.model_validate({"strict": True, "faults": {"drop": drop}}),
    }
    whole = made("adam", None, **settings).train(ROUNDS, SEED)
    interrupted(made("adam", tmp_path, **settings), 2, ROUNDS, SEED)
    assert same_bytes(weights(made("adam", tmp_path, **settings).train(ROUNDS, SEED, resume=True)), weights(whole))


def test_a_run_that_stops_early_goes_back_to_its_best_round() -> None:
    protocol = learning(k=8, learning_rate=2.0)  # far too much
    settings: dict[str, Any] = {"early_stopping": 3, "validation": table(80, 8), "evaluate_every": 1}
    stopped = make(protocol, **settings).train(30, SEED)
    best = int(stopped.record["facts"]["best_round"])
    assert 1 <= best < stopped.record["rounds"] < 30
    assert same_bytes(weights(stopped), weights(make(protocol).train(best, SEED)))
    assert farthest(weights(stopped), weights(make(protocol).train(best + 1, SEED))) > 1e-3
