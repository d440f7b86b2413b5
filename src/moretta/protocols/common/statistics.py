"""The closed list of statistics of a silo's rows: it follows from the settings that the silo agreed to.

    what               order   columns                         when it is on the list
    rows               1       none                            rounds use all rows, so their number bounds the sums
    classes            1       one per class                   [data] look
    input columns      0       of the inputs                   values may be absent
    input columns      1, 2    of the inputs                   inputs are standardised, or values may be absent
    histogram          -       those with a median             a median is filled in, within the schema's range
    target columns     1, 2    of the targets                  targets are standardised
    inputs             1, 2    one: all inputs together        the protocol scales by it (pbpfl)
    targets            1, 2    one                             the same, and targets are not standardised

A silo answers one question about each in a run. The server chooses the center of order 2, and sums of squares around
many centers round differently, which reveals single values. A repeated question gets the same numbers, at any time; in
a sum over silos once in a life (`moretta.secure_aggregation.one_sum`). All else that leaves a silo belongs to a round,
or is the score of one model at the end (`scoring`).

A look before training (`Counted`) has rows and classes of all silos together, through one secure sum. Present values
are counted by column where any may be absent, and means are known where inputs are standardised, with or without a
look.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.contract.roles import State, over
from moretta.data.tables.preparation import MedianRanges
from moretta.errors import PeerError
from moretta.protocols.common.overlap import COMPARISON
from moretta.secure_aggregation.one_sum import Answers
from moretta.secure_aggregation.statistics import MAY_LACK, AskHistogram, AskMoments, Moments

TARGETS = "target columns"  # the matrix whose columns are the targets of the model's outputs
Entry = tuple[str, int, int, tuple[int, ...]]  # matrix, order, number of columns, their indices (() for all)
Asked = AskMoments | AskHistogram


@dataclass(frozen=True)
class Statistics:
    """The statistics that a silo gives to one group of silos; empty by default.

    Args:
        moments: each allowed `AskMoments`.
        medians: the columns of the one allowed `AskHistogram`, with their ranges; empty for none.
    """

    moments: tuple[Entry, ...] = ()
    medians: MedianRanges = ()

    @classmethod
    def read(cls, values: Mapping[str, list[list[object]]]) -> Statistics:
        """Return the list from its JSON form (`dataclasses.asdict`)."""
        return cls(*(tuple(map(_frozen, values[name])) for name in ("moments", "medians")))  # type: ignore[arg-type]

    @property
    def names(self) -> list[str]:
        """Return the names under which answers are recorded."""
        return [*(_name(what, order) for what, order, _, _ in self.moments), *([_HISTOGRAM] if self.medians else [])]

    @property
    def matrices(self) -> dict[str, tuple[int, tuple[int, ...], bool]]:
        """By matrix: the number of columns, their indices, and whether present values are counted first."""
        matrices = dict[str, tuple[int, tuple[int, ...], bool]]()
        for what, order, columns, of in self.moments:
            matrices.setdefault(what, (columns, of, not order))
        return matrices

    @property
    def targets(self) -> int:
        """The number of a row's targets that are scaled; 0 without scaling."""
        return next((columns for what, _, columns, _ in self.moments if what == TARGETS), 0)

    def check(self, ask: Asked, answers: Answers) -> None:
        """Record a question before its answer. Raises PeerError if not listed, or unlike the run's first one."""
        center = b""
        if isinstance(ask, AskMoments):
            center = ask.center.tobytes()
            entry = ask.what, ask.order, len(ask.center), tuple(ask.columns.tolist())
            listed, name = entry in self.moments, _name(ask.what, ask.order)
        else:
            ranges = tuple(zip(*(ends.tolist() for ends in ask.ranges), strict=True))
            listed, name = ask.what == MAY_LACK and ranges == self.medians != (), _HISTOGRAM
        if not listed:
            raise PeerError(
                f"expected a statistic of the run's settings, was asked for {name:.100}, or for it of other columns "
                "or within other ranges; nothing was sent"
            )
        if not answers.hold(ask.stamp.run, name, center):
            raise PeerError(
                f"expected the question for {name} around the center that was answered before in this run, got another "
                "center; nothing was sent"
            )


NOTHING = Statistics()
_HISTOGRAM = f"histogram of {MAY_LACK}"


def _name(what: str, order: int) -> str:
    return f"{what}, order {order}"


def without_noise(names: Collection[str]) -> str:
    """Return the uses of rows beside the uploads that epsilon covers, in words; empty without any.

    Args:
        names: Of answers (`Answers.names`), or those of a list and of the comparison if the run asks for it.
    """
    words = {
        _name(MAY_LACK, 1): "means and deviations of the input columns, summed without noise",
        _name(TARGETS, 1): "means and deviations of the targets, summed without noise",
        _name(MAY_LACK, 0): "how many values of each column are there",
        _HISTOGRAM: "histograms of the columns with a median",
        _name("rows", 1): "the number of rows of all silos together",
        COMPARISON: "whether rows are about whom the server's test rows are about",
    }
    return " and ".join(use for name, use in words.items() if name in names)


def _frozen(values: list[object]) -> tuple[object, ...]:
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)


CLASSES = "classes"  # the matrix of zeros and ones whose columns are summed


def _none() -> NDArray[np.float64]:
    return np.empty(0)


@dataclass(frozen=True, eq=False)
class Counted:
    """Statistics of all silos' training rows together.

    Args:
        rows: Their number.
        classes: int64[classes], rows of each; for numeric targets one entry, all rows.
        present: int64[columns], the number of present values; empty if inputs have no statistics.
        mean, deviation: float64[columns] of the present values; empty likewise.
    """

    rows: int
    classes: NDArray[np.int64]
    present: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    mean: NDArray[np.float64] = field(default_factory=_none)
    deviation: NDArray[np.float64] = field(default_factory=_none)

    def among(self, moments: Moments) -> Counted:
        """Return the same with the statistics of the input columns."""
        return Counted(self.rows, self.classes, moments.present, moments.mean, moments.deviation)

    def state(self) -> State:
        """Return all that `restored` needs."""
        return over("counted_", vars(self))


def restored(state: State) -> Counted | None:
    """Return what `Counted.state` returned; None if nothing was counted."""
    if "counted_rows" not in state:
        return None
    names = ("classes", "present", "mean", "deviation")
    return Counted(int(state["counted_rows"]), *(np.asarray(state[f"counted_{name}"]) for name in names))


def class_columns(y: Array, classes: int) -> NDArray[np.float64]:
    """Return zeros and ones, [rows, classes], 1 for a row's class; with one class all are 1.

    Args:
        y: Targets encoded for a loss: int64[rows], one-hot rows, or 0 and 1, [rows, 1].
    """
    if classes == 1:
        return np.ones((len(y), 1))
    labels = y if y.ndim == 1 else (y[:, 0] > 0.5) if y.shape[1] == 1 else y.argmax(axis=1)
    columns: NDArray[np.float64] = (np.asarray(labels).astype(np.int64)[:, None] == np.arange(classes)).astype(
        np.float64
    )
    return columns
