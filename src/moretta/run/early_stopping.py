"""Early stopping: when a run stops improving, and the states of its best round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moretta.contract.roles import State


@dataclass(frozen=True)
class BestRound:
    """The round of the lowest validation loss, and all roles' states at its end."""

    number: int
    states: Mapping[str, State]


def best_round(history: Sequence[Mapping[str, Any]]) -> int:
    """Return the round of the lowest validation loss, the earliest of several, of those that were evaluated.

    A loss that is no finite number, which a history on disk has as null, is higher than any other.
    """
    tested = [line for line in history if "validation_loss" in line]
    losses: dict[int, float] = {line["round"]: _finite(line["validation_loss"]) for line in tested}
    return min(losses, key=lambda number: (losses[number], number))


def _finite(loss: float | None) -> float:
    return loss if loss is not None and math.isfinite(loss) else math.inf


class EarlyStopping:
    """Keeps the best round, and says when too many rounds have passed since.

    patience: so many rounds may pass without a lower validation loss; None never stops a run. It is counted in rounds
    and judged where the model was evaluated (`evaluate_every`), nowhere between.
    """

    def __init__(self, patience: int | None, best: BestRound | None = None) -> None:
        self._patience, self.best = patience, best

    def stops(self, history: Sequence[Mapping[str, Any]], states: Callable[[], Mapping[str, State]]) -> bool:
        """Keep the states if the last round is the best; return whether the run stops after it.

        history: a line a round, the last included. states: returns all roles' states as they stand.
        """
        last = history[-1]
        if self._patience is None or "validation_loss" not in last:
            return False
        best = best_round(history)
        if best == last["round"]:
            self.best = BestRound(best, states())
        return bool(last["round"] - best >= self._patience)
