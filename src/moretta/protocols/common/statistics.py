"""The closed list of statistics that a silo gives of its rows: it follows from the settings that the silo agreed to.

    what               order   columns                         when it is on the list
    rows               1       none                            rounds use all rows, so their number bounds the sums
    classes            1       one a class                     [data] look
    input columns      0       of the inputs                   values may be absent
    input columns      1, 2    of the inputs                   inputs are standardised, or values may be absent
    histogram          -       those with a median             a median is filled in, within the schema's range
    target columns     1, 2    of the targets                  targets are standardised
    inputs             1, 2    one: all inputs together        the protocol scales by it (pbpfl)
    targets            1, 2    one                             the same, and targets are not standardised

A silo gives each to one question a run. The server chooses the center of order 2, and sums of squares around many
centers round differently, which tells single values. That question is answered again, by the same numbers, whenever it
comes; of a sum over silos once in a life (`moretta.secure_aggregation.one_sum`). The rest of what leaves a silo goes
with a round, or is the score at the end (`scoring`), which is of one model.

A look before training (`Counted`) has rows and classes of all silos together, through one secure sum. Values that are
there are counted by column where any may be absent, and means are known where inputs are standardised, with or without
it.
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

TARGETS = "target columns"  # the matrix whose columns are what the model's outputs are to be
Entry = tuple[str, int, int, tuple[int, ...]]  # the matrix, the order, how many columns, and their indices, () for all
Asked = AskMoments | AskHistogram


@dataclass(frozen=True)
class Statistics:
    """What a silo gives to one group of silos; nothing by default.

    Args:
        moments: each allowed `AskMoments`.
        medians: the columns of the one allowed `AskHistogram`, with their ranges; empty for none.
    """

    moments: tuple[Entry, ...] = ()
    medians: MedianRanges = ()

    @classmethod
    def read(cls, values: Mapping[str, list[list[object]]]) -> Statistics:
        """Return the list that JSON made of one (`dataclasses.asdict`)."""
        return cls(*(tuple(map(_frozen, values[name])) for name in ("moments", "medians")))  # type: ignore[arg-type]

    @property
    def names(self) -> list[str]:
        """Return the names under which they are recorded as answered."""
        return [*(_name(what, order) for what, order, _, _ in self.moments), *([_HISTOGRAM] if self.medians else [])]

    @property
    def matrices(self) -> dict[str, tuple[int, tuple[int, ...], bool]]:
        """By matrix: how many columns, their indices, and whether the values that are there are counted first."""
        matrices = dict[str, tuple[int, tuple[int, ...], bool]]()
        for what, order, columns, of in self.moments:
            matrices.setdefault(what, (columns, of, not order))
        return matrices

    @property
    def targets(self) -> int:
        """How many targets of a row are brought to scale; 0 where they are left as they are."""
        return next((columns for what, _, columns, _ in self.moments if what == TARGETS), 0)

    def check(self, ask: Asked, answers: Answers) -> None:
        """Record that a question is about to be answered.

        Raises:
            moretta.errors.PeerError: it is not on the list, or it differs from the one that was answered in this run.
        """
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
                f"expected a statistic that the run's settings ask for, was asked for {name:.100}, or for it of other "
                "columns or within other ranges; nothing was sent"
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
    """Return where rows are used beside the uploads that epsilon is about, in words; empty for nowhere.

    Args:
        names: of answers (`Answers.names`), or those of a list and of the comparison where the run asks for it.
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


CLASSES = "classes"  # the matrix of zeros and ones whose columns are added up


def _none() -> NDArray[np.float64]:
    return np.empty(0)


@dataclass(frozen=True, eq=False)
class Counted:
    """Statistics of all silos' training rows together.

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
        return over("counted_", vars(self))


def restored(state: State) -> Counted | None:
    """Return what `Counted.state` returned; None where nothing was counted."""
    if "counted_rows" not in state:
        return None
    names = ("classes", "present", "mean", "deviation")
    return Counted(int(state["counted_rows"]), *(np.asarray(state[f"counted_{name}"]) for name in names))


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
