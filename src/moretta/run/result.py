"""What a run came to, and the record of it that ``result.json`` keeps."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import moretta
from moretta.contract.messages import Array, Tensors
from moretta.errors import ParameterError
from moretta.protocols.common.training import Training

if TYPE_CHECKING:
    from moretta.audit.auditor import Audit
    from moretta.run.federation import Federation

PHASES = ("perturbation", "local_forward", "local_backward", "aggregation", "update")


@dataclass(frozen=True)
class Result:
    """What a run came to.

    record: the content of ``result.json``. history: a mapping a round. model: the true model, as the server holds it
    (None where silos train alone). released: what the silos may be given. models: each silo's own, where it has one.
    played: the federation, its rounds and its seed, of which an audit needs the silos' rows and the architecture.
    """

    record: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    model: nn.Module | None
    released: nn.Module | None
    models: Mapping[str, nn.Module]
    folder: Path | None = None
    played: tuple[Federation, int, int] | None = field(default=None, repr=False)

    @property
    def test(self) -> Mapping[str, Any]:
        """Loss, accuracy or mse, and metrics on the test rows."""
        return self.record["test"]  # type: ignore[no-any-return]

    @property
    def bytes(self) -> Mapping[str, float]:
        """Traffic: up and down per silo and round, and what keys and shares cost in all."""
        return self.record["bytes"]  # type: ignore[no-any-return]

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds in all and by phase; silos' phases are summed over silos."""
        return self.record["seconds"]  # type: ignore[no-any-return]

    def report(self, path: str | Path) -> Path:
        """Write the run's report, one self-contained HTML page, and return its path."""
        from moretta.report.page import write_report

        if self.folder is None:
            raise ParameterError("a report is made from a run folder; train with Federation(.., out=FOLDER)")
        return write_report([self.folder], Path(path))

    def audit(
        self,
        *,
        thorough: bool = False,
        background: tuple[Array, Array] | None = None,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> Audit:
        """Attack what the run recorded, and return what each role could learn (`moretta.audit`).

        Arguments as of `moretta.audit.auditor.audit`. Raises `moretta.errors.ParameterError` for a run without recorded
        views.
        """
        from moretta.audit.auditor import audit

        if self.folder is None or self.played is None:
            raise ParameterError(
                "an audit reads a run folder; train with Federation(.., out=FOLDER, record_views=True)"
            )
        federation, rounds, seed = self.played
        return audit(self.folder, federation, rounds, seed, thorough=thorough, background=background, progress=progress)


def traffic(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the bytes of a run: up and down as means over silos and rounds; the rest in all.

    secure_aggregation: keys, confirmations of survivors and shares given to unmask. set_up: statistics and agreement on
    the model.
    """
    means = {
        f"{way}_per_silo_per_round": float(np.mean([line["bytes"][way] for line in history])) for way in ("up", "down")
    }
    return means | {what: sum(line["bytes"][what] for line in history) for what in ("secure_aggregation", "set_up")}


def seconds(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds of a run: in all, and by phase, where silos' phases are summed over silos.

    Without phases where noise hides rows: how long a silo computes depends on how many rows its secret lot had.
    """
    known = PHASES if any(line["seconds"] for line in history) else ()
    phases = {name: sum(line["seconds"].get(name, 0.0) for line in history) for name in known}
    return {"total": sum(line["seconds_total"] for line in history), **phases}


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {
        "moretta": moretta.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }


def ring_facts(
    history: Sequence[Mapping[str, Any]], protocol: Training, parameters: Tensors, rounds: int
) -> dict[str, float]:
    """State how far fixed point can have moved the weights: the sum over rounds of rate times gradient error.

    This takes the steps not to drive two nearby models apart, which holds near a minimum and not everywhere. Adam
    divides by the gradient's own size, so for it only the gradient's error is stated.
    """
    steps = [line["ring_step"] for line in history if "ring_step" in line]
    if not steps or not max(steps):
        return {}
    facts = {"ring_gradient_error": max(steps)}
    if protocol.optimizer == "sgd" and parameters:
        moved = [_rate(protocol, line["round"], rounds) * line["ring_step"] for line in history if "ring_step" in line]
        facts["ring_weight_error"] = sum(moved)
        smallest = min(float(np.abs(array).max()) for array in _floating(parameters))
        if smallest > 0:
            facts["ring_relative_weight_error"] = facts["ring_weight_error"] / smallest
    return facts


def _rate(protocol: Training, number: int, rounds: int) -> float:
    """Return how far a unit of gradient moves a weight in the end."""
    return 1.0 if protocol.steps_at_silos else protocol.rate(number, rounds) / (1.0 - protocol.momentum)


def mean_of(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of each figure that all scores have."""
    mean: dict[str, Any] = {}
    for key, value in scores[0].items():
        if isinstance(value, Mapping):
            mean[key] = mean_of([score[key] for score in scores])
        elif all(key in score for score in scores):
            mean[key] = value if len(scores) == 1 else float(np.mean([score[key] for score in scores]))
    return mean


def worst_of(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the scores of the worst model, by accuracy if there is one, else by loss, and again as `worst`, with whose
    it is.
    """
    name = max(scores, key=lambda name: (-scores[name].get("accuracy", 0.0), scores[name]["loss"]))
    return {**scores[name], "worst": {"silo": name, **scores[name]}}


def _floating(tensors: Tensors) -> Iterator[Array]:
    return (array for array in tensors.values() if array.dtype.kind == "f" and array.size)
