"""What a look before training asks of silos (`[data] look`): rows and classes of all together, through one secure sum.

Values that are there are counted by column where any may be absent, and means are known where inputs are standardised,
whether or not this is asked for (`moretta.protocols.common.enrolment`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.contract.roles import State
from moretta.secure_aggregation.statistics import Moments

CLASSES = "classes"  # the matrix of zeros and ones whose columns are added up


def _none() -> NDArray[np.float64]:
    return np.empty(0)


@dataclass(frozen=True, eq=False)
class Counted:
    """What all silos' training rows come to together.

    rows: how many. classes: int64[classes], rows of each; of targets that are numbers one entry, all rows. present:
    int64[columns], how many values are there; mean, deviation: float64[columns] of these. The last three have no entry
    where inputs were not looked into.
    """

    rows: int
    classes: NDArray[np.int64]
    present: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    mean: NDArray[np.float64] = field(default_factory=_none)
    deviation: NDArray[np.float64] = field(default_factory=_none)

    def among(self, moments: Moments) -> Counted:
        """Return the same with what is known of the input columns."""
        return Counted(self.rows, self.classes, moments.present, moments.mean, moments.deviation)

    def state(self) -> State:
        """Return all that `restored` needs."""
        return {f"counted_{name}": value for name, value in vars(self).items()}


def restored(state: State) -> Counted | None:
    """Return what `Counted.state` returned; None where nothing was counted."""
    if "counted_rows" not in state:
        return None
    names = ("classes", "present", "mean", "deviation")
    return Counted(int(state["counted_rows"]), *(np.asarray(state[f"counted_{name}"]) for name in names))


def counted_classes(task: str, outputs: int) -> int:
    """Return how many classes are counted: one where targets are numbers. outputs: of the model."""
    return max(2, outputs) if task == "classification" else 1


def class_columns(y: Array, classes: int) -> NDArray[np.float64]:
    """Return zeros and ones, [rows, classes], 1 for the class of a row; with one class all are 1.

    y: targets as a loss wants them: int64[rows], one-hot rows, or 0 and 1, [rows, 1].
    """
    if classes == 1:
        return np.ones((len(y), 1))
    labels = y if y.ndim == 1 else (y[:, 0] > 0.5) if y.shape[1] == 1 else y.argmax(axis=1)
    columns: NDArray[np.float64] = (np.asarray(labels).astype(np.int64)[:, None] == np.arange(classes)).astype(
        np.float64
    )
    return columns
