"""A silo's rows as arrays, and its answers to the set-up (`moretta.protocols.common.enrolment`), without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import DTypeLike, NDArray

from moretta.contract.messages import Array, Message, Spent, Stamp, Vector, message
from moretta.contract.roles import unexpected
from moretta.data.rows import Subjects
from moretta.data.tables.preparation import SMALLEST_DEVIATION, Preparation
from moretta.errors import MisuseError, PeerError, RowsError
from moretta.protocols.common import frozen, overlap, scoring
from moretta.protocols.common.batches import Batches, UnionBatches
from moretta.protocols.common.overlap import AskApart, compared
from moretta.protocols.common.scoring import HeldOut, Question, Validate
from moretta.protocols.common.statistics import NOTHING, Statistics, class_columns
from moretta.secure_aggregation.keyed_sums import Contributor
from moretta.secure_aggregation.keystream import digest_of
from moretta.secure_aggregation.one_sum import Answers
from moretta.secure_aggregation.schemes import MESSAGES as SUM_MESSAGES
from moretta.secure_aggregation.statistics import MAY_LACK, AskHistogram, AskMoments, answer_histogram, answer_moments
from moretta.secure_aggregation.sums import message_digest


@message("enrolment/begin")
class Begin(Message):
    """The silo's training: the model's digest, the columns' meaning, and their preparation (each, or all alike).

    Args:
        schema: The digest of the model's tensors.
        table: The digest of the table's schema, empty without one.
        fill, mean, deviation: float64[columns], or float64[1] for all columns together.
    """

    schema: str
    table: str
    fill: Vector
    mean: Vector
    deviation: Vector

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` if fill, mean and deviation do not fit each other."""
        if self.fill.shape != self.mean.shape:
            raise PeerError(f"{self.TAG}: expected a value to fill in for each mean")
        _check_scale(self.TAG, self.mean, self.deviation)

    @classmethod
    def of(cls, stamp: Stamp, schema: str, table: str, prepared: Preparation) -> Begin:
        """Return the message with a preparation of rows."""
        kind = BeginScaled if prepared.scales_targets else cls
        return kind(stamp=stamp, schema=schema, table=table, **prepared.figures)

    @property
    def preparation(self) -> Preparation:
        """The preparation of rows."""
        return Preparation.loads(vars(self))


@message("enrolment/begin-scaled")
class BeginScaled(Begin):
    """The same with scaled targets: target_mean, target_deviation, float64[outputs]."""

    target_mean: Vector
    target_deviation: Vector

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` if the figures do not fit each other."""
        Begin.check(self)
        _check_scale(f"{self.TAG}, targets", self.target_mean, self.target_deviation)


def _check_scale(what: str, mean: Array, deviation: Array) -> None:
    if not mean.size or mean.shape != deviation.shape or not (deviation >= SMALLEST_DEVIATION).all():
        raise PeerError(f"{what}: expected means, and a deviation of at least {SMALLEST_DEVIATION:.0e} for each")


@message("enrolment/ready")
class Ready(Message):
    """The silo trains this model."""


MESSAGES = (Begin, BeginScaled, Ready)


def schema_of(messages: Sequence[type[Message]]) -> Sequence[type[Message]]:
    """Return all messages of a run: a protocol's own, and the common ones."""
    return (Spent, *SUM_MESSAGES, *MESSAGES, *overlap.MESSAGES, *scoring.MESSAGES, *frozen.MESSAGES, *messages)


@dataclass(eq=False, repr=False)
class TrainingRows:
    """A silo's rows, its batches and its half of the enrolment.

    Args:
        x: The inputs, [rows, ...].
        y: The targets encoded for the loss (`moretta.protocols.common.targets.encode`), [rows, outputs] or int64[rows].
        schema: The digest of the silo's model.
        held_out: Rows that it does not train on.
        table: The digest of its table's schema, if any.
        answers: The answers that the silo gives once.
        validation: Other rows that it does not train on; they score models during the run.
        agreed: Digests that the set-up agreed on.
    """

    x: NDArray[np.generic]
    y: Array
    batches: Batches | UnionBatches
    schema: str = ""
    held_out: HeldOut | None = None
    table: str = ""
    subjects: Subjects = field(default_factory=Subjects)
    statistics: Statistics = NOTHING
    answers: Answers = field(default_factory=Answers)
    validation: HeldOut | None = None
    prepared: Preparation = field(default_factory=Preparation.nothing)
    agreed: Sequence[bytes] = ()

    @cached_property
    def _own(self) -> bytes:
        return digest_of({"x": self.x, "y": self.y})

    @property
    def digest(self) -> bytes:
        """SHA-256 over rows, targets, preparation. Never sent: anyone with all rows but one could search that."""
        return digest_of({"rows": np.frombuffer(self._own, np.uint8), **self.prepared.figures})

    def take(self, index: NDArray[np.int64], dtype: DTypeLike) -> tuple[Array, Array]:
        """Return prepared inputs and targets of some rows."""
        return self.prepared.apply(self.x[index], dtype), self.prepared.scaled(self.y[index])

    def answer(self, message: Message, contributor: Contributor, statistics: Statistics | None = None) -> Message:
        """Answer a message of the set-up; statistics: None for the silo's. Raises MisuseError for others."""
        agreed = self.statistics if statistics is None else statistics
        match message:
            case AskMoments():
                agreed.check(message, self.answers)
                return answer_moments(contributor, message, self._matrix(message))
            case AskHistogram():
                agreed.check(message, self.answers)
                return answer_histogram(contributor, message, self.x.reshape(-1, self.x.shape[-1]))
            case AskApart():
                return compared(message, self.subjects, self.answers)
            case Begin():
                if message.schema != self.schema:
                    raise PeerError("the server's model has other tensors than the silo's; expected the same")
                if message.table != self.table:
                    raise PeerError(
                        "the schemas of the server and of this silo differ, as their digests do; set the same at both"
                    )
                if message.mean.size not in (1, self.x.shape[-1]):
                    raise RowsError(
                        f"expected {message.mean.size} input columns, as the server has; got {self.x.shape[-1]}"
                    )
                self.prepare(message, agreed)
                self.agreed = (message_digest(message),)
                return Ready(stamp=message.stamp)
        reply = contributor.answer(message)
        if reply is None:
            raise unexpected("a silo", message)
        return reply

    def scored(self, ask: Question) -> HeldOut:
        """Return the rows of a question. Raises `moretta.errors.MisuseError` without any."""
        rows = self.validation if isinstance(ask, Validate) else self.held_out
        if rows is None:
            raise MisuseError("this silo has no held-out rows to score a model on")
        return rows

    def prepare(self, begin: Begin, statistics: Statistics, *, inputs: bool = True) -> None:
        """Set the preparation of inputs, and of targets if the statistics list their scale.

        Args:
            inputs: False for a group that shares targets alone.

        Raises:
            PeerError: The message scales inputs, which the statistics do not list, or another number of targets.
        """
        preparation = begin.preparation
        if inputs and MAY_LACK not in statistics.matrices and not preparation.is_nothing:
            raise PeerError("expected inputs to stay as they are, as the run's settings have it; got a scale for them")
        if len(preparation.target_mean) != statistics.targets:
            raise PeerError(
                f"expected the scale of {statistics.targets} targets, as the run's settings have it; got that of "
                f"{len(preparation.target_mean)}"
            )
        targets, rest = (
            (preparation if statistics.targets else self.prepared),
            (preparation if inputs else self.prepared),
        )
        self.prepared = replace(rest, target_mean=targets.target_mean, target_deviation=targets.target_deviation)

    def _matrix(self, ask: AskMoments) -> NDArray[np.generic]:
        """Return the matrix of a statistic, [entries, columns]."""
        match ask.what:
            case "rows":
                return np.zeros((len(self.x), 0))
            case "targets" | "target columns":
                return self.y.astype(np.float64).reshape(-1, len(ask.center))
            case "classes":
                return class_columns(self.y, len(ask.center))
        inputs = ask.of(self.x) if self.x.dtype.kind == "f" else np.zeros((len(self.x), 1))  # tokens have no scale
        return inputs.reshape(-1, inputs.shape[-1] if ask.what == MAY_LACK else 1)
