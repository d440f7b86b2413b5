"""What a callback is given after each round, and how it ends a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from moretta.engines.driver import DroppedSilo

TESTED = ("test_", "validation_")


class StopTraining(Exception):  # no error: a callback raises it to end a run
    """Raised by a callback of `moretta.run.federation.Federation.train` to end the run after the round it was told of.

    The run then ends as early stopping ends it: the model is released, scored and written, and a checkpoint is kept.
    """


@dataclass(frozen=True)
class FinishedRound:
    """What the server knows of a round that has ended; nothing in it can be changed.

    number: from 1 to `rounds`. loss: the mean over rows before the round's step, None where nobody is told it.
    metrics: scores on test and validation rows by their names in the history, such as ``test_accuracy``; empty in
    rounds in which the model is not evaluated. missing: silos that missed an answer, each with the reason. bytes: up
    and down per silo, keys and shares in all. seconds: of the whole round. epsilon: spent so far, where silos add
    noise (infinity where it is unbounded); else None.
    """

    number: int
    rounds: int
    loss: float | None
    metrics: Mapping[str, float]
    missing: tuple[DroppedSilo, ...]
    bytes: Mapping[str, float]
    seconds: float
    epsilon: float | None


OnRound = Callable[[FinishedRound], object]
"""Called after each round; what it returns is ignored."""


def round_of(line: Mapping[str, Any], rounds: int) -> FinishedRound:
    """Return what a callback is given, of a line of the history. rounds: of the whole run."""
    return FinishedRound(
        number=line["round"],
        rounds=rounds,
        loss=line.get("loss"),
        metrics=MappingProxyType({name: value for name, value in line.items() if name.startswith(TESTED)}),
        missing=tuple(DroppedSilo(**gone) for gone in line["dropped"]),
        bytes=MappingProxyType(dict(line["bytes"])),
        seconds=line["seconds_total"],
        epsilon=float(str(line["epsilon"]).replace("unbounded", "inf")) if "epsilon" in line else None,
    )
