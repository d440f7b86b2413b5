"""Patience, and the states of the best round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from moretta import Federation, FedSGD, Silo
from moretta.contract.roles import State
from moretta.run.loop import EarlyStopping, best_round
from moretta.run.persistence import BestRound


def played(stopping: EarlyStopping, losses: Sequence[float | None]) -> list[bool]:
    """Whether the run stops after each round; a round without a loss was not evaluated. States are their round's."""
    history: list[Mapping[str, Any]] = []
    stops = []
    for number, loss in enumerate(losses, start=1):
        history.append({"round": number} | ({} if loss is None else {"validation_loss": loss}))
        states: dict[str, State] = {"server": {"round": number}}
        stops.append(stopping.stops(history, lambda states=states: states))  # type: ignore[misc]
    return stops


@pytest.mark.parametrize(
    ("patience", "losses", "stops", "best"),
    [
        (2, [3, 2, 2.5, 2.5], [False, False, False, True], 2),
        (2, [3, 2, 2.5, 1], [False, False, False, False], 4),
        (1, [3, 3], [False, True], 1),
        (2, [3, None, None, 4], [False, False, False, True], 1),
        (2, [None, None, None, 4], [False, False, False, False], 4),
    ],
    ids=["worse", "better in time", "equal is no better", "judged where it was evaluated", "not yet evaluated"],
)
def test_patience_is_counted_in_rounds(patience: int, losses: list[float | None], stops: list[bool], best: int) -> None:
    stopping = EarlyStopping(patience)
    assert played(stopping, losses) == stops
    assert stopping.best == BestRound(best, {"server": {"round": best}})


def test_without_patience_no_state_is_kept() -> None:
    stopping = EarlyStopping(None)
    assert played(stopping, [1, 2, 3]) == [False] * 3
    assert stopping.best is None


def test_a_best_round_of_an_earlier_session_stays_until_a_better_one() -> None:
    earlier = BestRound(1, {"server": {"round": 1}})
    history = [{"round": 1, "validation_loss": 1.0}, {"round": 2, "validation_loss": 2.0}]
    stopping = EarlyStopping(5, earlier)
    assert not stopping.stops(history, dict)
    assert stopping.best is earlier
    assert best_round([*history, {"round": 3}, {"round": 4, "validation_loss": 1.0}]) == 1


def test_a_run_that_stopped_early_does_not_go_on_where_it_is_resumed(tmp_path: Path) -> None:
    x = np.arange(16, dtype=np.float32).reshape(8, 2) / 16
    silos = [Silo(name, x, np.arange(8) % 2) for name in "abc"]
    run = Federation(
        nn.Linear(2, 2), silos, FedSGD(loss="mse", learning_rate=5.0),
        test=(x, np.arange(8) % 2), validation=(x, np.arange(8) % 2), early_stopping=2, evaluate_every=1,
        checkpoint_every=1, out=tmp_path / "run",
    )  # fmt: skip
    first, again = run.train(9, progress=False), run.train(9, resume=True, progress=False)
    assert [len(result.history) for result in (first, again)] == [3, 3]
    assert first.test == again.test
    assert "best_round" in first.record["facts"]
    assert first.record["facts"] == again.record["facts"]


@pytest.mark.parametrize(
    "lost", [None, float("nan"), float("inf")], ids=["null of a history on disk", "NaN", "infinity"]
)
def test_a_loss_that_is_no_number_is_the_worst(lost: float | None) -> None:
    history: list[dict[str, Any]] = [{"round": 1, "validation_loss": lost}, {"round": 2, "validation_loss": 3.0}]
    assert best_round(history) == 2
    assert best_round([{"round": 1, "validation_loss": 3.0}, {**history[0], "round": 2}]) == 1
    assert best_round(history[:1]) == 1
