"""Scores of models on silos' held-out rows at the end of a run, their tables, and scores on validation rows during it.

    server                                     silo k
      Score(the released model, or empty) -->
                                          <--  upload of its rows, and the sums over them of loss and of hits or error
      Score(the released model)           -->         (where tables are requested)
                                          <--  upload of its confusion matrix, and of its rows by how sure they are

The released model is scored; where none is released, each silo scores its own (`local`, `cgd`).

Who learns what: the server learns how many rows the silos hold back together, and loss, accuracy and mean squared error
over all of them. It learns nothing about one silo, and the silos learn nothing. With the scheme ``none`` the server
sees each silo's. Where sums are blind (`cgd`) the server relays this one too, and the participants alone read it
(`moretta.protocols.cgd.messages.Scored`); of two, each then knows the other's. A silo helps to open scores of a run
over one set of silos alone (`moretta.secure_aggregation.one_sum`), so that no sum can be subtracted from another. A
silo answers in the round after the run's last one, and for one model in a run: scores of many models would reveal which
rows are held back. The server chooses that model. With dp-noise no score is requested, as it would be a release without
noise.

**Tables** are requested by `score-at-silos = "classes"` alone. The server then learns, of all silos together, rows by
true and by predicted class, and rows by the probability of the predicted class. That is in whole percents, so that a
bin with one row reveals no more. The number of rows of a class depends on no model: at sites tables are, like
statistics, of one set of silos in all runs. They need at least `LEAST_SILOS`, which each silo's keys enforce, as of two
each knows the other's. They are of the same silos as the score: rows and hits of both would otherwise reveal those of
the silos in one of them alone. Where a silo is missing they are omitted; the run does not wait for them.

**Validation rows** (`[data] validation-fraction` at sites) are other rows, on which a silo neither trains nor tests.
Where a round is evaluated, the server asks in that round, after its step, for its new model's score on them:

    server                                     silo k
      Validate(the round's new model)     -->
                                          <--  upload of its rows, and the sums over them of loss and of hits or error

The model is the one that the next round shows to all silos anyway. The server learns rows, loss and accuracy over all
silos' validation rows, once a round and for one model in it. All validations of a run are over the set of silos of the
first: a silo helps to open no other, so that no sum can be subtracted from another. Where a silo of the set is away, an
evaluation is omitted, and no smaller set replaces it. The score measures a model and chooses the best round, so its
figures are no test: test rows are held back beside them.

**Masks.** A mask is labelled with stamp, cohort, and names, shapes and encoding of the whole upload
(`moretta.secure_aggregation.masks.label_of`). Uploads here have names of their own, ``score/...`` and
``validation/...``, so no other upload under the stamp has their masks: no round's, no set-up's statistics, and no sum
of a protocol's `finish`. A contributor refuses a second upload of a name under one stamp
(`moretta.secure_aggregation.masks.Labels`), and a repeated attempt has another stamp and new keys.

**Numbers.** Sums have any scale, and the server knows no bound for them or the rows. So they travel in limbs, as in
`moretta.secure_aggregation.statistics`, each silo with weight 1: exact over silos.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array, Message, Stamp, Tensors, message
from moretta.contract.roles import Aborted, Exchange
from moretta.errors import PeerError, RowsError
from moretta.protocols.common import targets
from moretta.secure_aggregation import statistics
from moretta.secure_aggregation.keyed_sums import Aggregator, Contributor
from moretta.secure_aggregation.keystream import digest_of
from moretta.secure_aggregation.one_sum import Answers
from moretta.secure_aggregation.sums import Query, Sum, Wanted, query_of

ROWS = "rows"
TABLES = "tables"  # among the figures of a score: tables are requested too
CONFUSION, RELIABILITY = "confusion", "reliability"
LEAST_SILOS = 3  # of summed tables


@message("scoring/score")
class Score(Message):
    """Upload these parameters' (else your own model's) score on held-out rows: figures or tables, by `encoding`."""

    parameters: Tensors
    encoding: Mapping[str, int]


@message("scoring/validate")
class Validate(Message):
    """Upload the score of these parameters, the round's new ones, on your validation rows."""

    parameters: Tensors
    encoding: Mapping[str, int]


Question = Score | Validate
MESSAGES = (Score, Validate)


def figures_of(loss: str, task: str | None, *, tables: bool = False) -> tuple[str, ...]:
    """Return the figures of a score beside its number of rows, each a mean over rows; with tables, `TABLES` too."""
    means = ("loss", *(["mse"] if loss == "mse" else []), *(["accuracy"] if task == "classification" else []))
    return (*means, TABLES) if tables else means


def _means(figures: Sequence[str]) -> list[str]:
    return [ROWS, *(name for name in figures if name != TABLES)]


@dataclass(frozen=True)
class HeldOut:
    """A silo's held-out rows, and its uploads of scores on them.

    Args:
        x: The inputs, [rows, ...].
        y: The targets encoded for the loss (`moretta.protocols.common.targets.encode`).
        loss: Its name; it is plain, without label smoothing and class weights.
        figures: As of `figures_of`.
        after: The run's last round.
        answers: The answers that the silo gives once.
        validates: Whether they are validation rows, which score a round's new model; others score after the last round.
    """

    x: NDArray[np.generic]
    y: Array
    loss: str
    figures: Sequence[str]
    after: int
    answers: Answers = field(default_factory=Answers)
    validates: bool = False

    def upload(
        self,
        ask: Question,
        contributor: Contributor,
        outputs: Array,
        agreed: Sequence[bytes] = (),
        blind: bytes | None = None,
        model: bytes = b"",
    ) -> Message:
        """Return the upload that answers.

        Args:
            outputs: Of the model on x, [rows, outputs].
            agreed: Digests that the set-up agreed on.
            blind: As the contributor's.
            model: A digest of the silo's own model, if that is scored.

        Raises:
            PeerError: The round is not the one after the last, or for validation rows not one of the run. Or the model
                is another than the first, or the run has no tables of classes.
            RowsError: The scores cannot be summed, as those of a diverged model.
        """
        number = ask.stamp.round
        if not self.validates and number != self.after + 1:
            raise PeerError(
                f"expected to be asked for a score right after round {self.after}, the last; got {ask.stamp}"
            )
        if self.validates and not 0 < number <= self.after:
            raise PeerError(f"expected to be asked to validate a model of rounds 1 to {self.after}; got {ask.stamp}")
        statistics.check_exact(ask.encoding)
        by_class = _is_by_class(ask)
        name = f"score after round {self.after}" + (", by class" if by_class else "")
        name = f"validation in round {number}" if self.validates else name
        if not self.answers.hold(ask.stamp.run, name, digest_of(ask.parameters), model, *agreed):
            raise PeerError(f"expected the model of the {name} that was scored before, got another; nothing was sent")
        tensors = self._tables(outputs) if by_class else self._sums(outputs)
        about = asked_of(ask, agreed)
        return contributor.upload(ask.stamp, tensors, 1, ask.encoding, blind, asked=about, least=statistics.HALF)

    def _sums(self, outputs: Array) -> dict[str, Array]:
        """Return the upload of the figures: their sums over rows in limbs, [limbs]."""
        with np.errstate(all="ignore"):  # overflows are checked below
            sums = {name: math.fsum(self._by_row(name, outputs)) for name in _means(self.figures)}
        for name, total in sums.items():
            if not abs(total) < statistics.LARGEST:
                raise RowsError(f"the {name} on the rows held back is not finite or too large; nothing was sent")
        self.answers.scored = {name: total / len(self.x) for name, total in sums.items() if name != ROWS}
        return {_tensor(name, self.validates): statistics.to_limbs([value])[:, 0] for name, value in sums.items()}

    def _tables(self, outputs: Array) -> dict[str, Array]:
        """Return the upload of the tables, whole numbers in limbs, [limbs, numbers]."""
        if TABLES not in self.figures:
            raise PeerError('was asked for tables of classes, which are for score-at-silos = "classes" alone')
        if not np.isfinite(outputs).all():
            raise RowsError("the outputs on the rows held back are not all finite; nothing was sent")
        classes, chances = targets.classes_of(self.y), targets.probabilities(outputs, self.loss)
        chosen = targets.predicted(outputs)
        bins = targets.reliability(chances, chosen == classes, digits=2)
        bins[1] = np.rint(100 * bins[1])
        counts = targets.confusion(chosen, classes, chances.shape[1])
        made = {CONFUSION: counts, RELIABILITY: bins}
        return {_tensor(name): statistics.to_limbs(table.ravel().tolist()) for name, table in made.items()}

    def _by_row(self, figure: str, outputs: Array) -> NDArray[np.float64]:
        """Return a figure of each row, float64[rows]."""
        if figure == ROWS:
            return np.ones(len(self.x))
        if figure == "loss":
            return np.asarray(targets.RowLosses(self.loss)(outputs[None], self.y)[0])
        if figure == "mse":  # that of `torch.nn.MSELoss`
            if self.y.ndim == 3:
                return np.asarray(self._by_row("loss", outputs) * (2 / self.y[0].size))
            return np.asarray(np.square(outputs.astype(np.float64) - self.y).mean(axis=1))
        return np.asarray(targets.predicted(outputs) == targets.classes_of(self.y), dtype=np.float64)


def asked_of(ask: Question, agreed: Sequence[bytes]) -> Query:
    """Return the query of a score; for validation rows each round's, all over one set of silos in a run.

    Tables share the score's, because rows and hits of both would otherwise separate silos.

    Args:
        agreed: Digests that the set-up agreed on.
    """
    if isinstance(ask, Validate):
        return query_of(ask, *agreed, once=f"validation/{ask.stamp.round}", whole=True, beside="validation")
    if _is_by_class(ask):
        return query_of(ask, *agreed, once="score/tables", whole=True, lasting=True, beside="score")
    return query_of(ask, *agreed, once="score", whole=True)


def _is_by_class(ask: Question) -> bool:
    return isinstance(ask, Score) and _tensor(CONFUSION) in ask.encoding


def ask_for(
    aggregator: Aggregator,
    now: Stamp,
    parameters: Tensors,
    figures: Sequence[str],
    *,
    validates: bool = False,
    blinded: bool = False,
) -> tuple[Question, Wanted]:
    """Return the ask of all silos, and the description of the sum of their uploads."""
    shapes = {_tensor(name, validates): (statistics.LIMBS,) for name in _means(figures)}
    limits = dict.fromkeys(shapes, float(statistics.HALF))
    request = aggregator.want(shapes, limits, len(aggregator.cohort), blinded=blinded)
    kind = Validate if validates else Score
    return kind(stamp=now, parameters=parameters, encoding=request.fraction_bits), request


def score(
    aggregator: Aggregator,
    now: Stamp,
    parameters: Tensors,
    figures: Sequence[str],
    agreed: Sequence[bytes],
    *,
    validates: bool = False,
) -> Exchange[tuple[Mapping[str, float], Sequence[str]] | Aborted]:
    """Return the score on the held-out rows of a model, or of each silo's own, and its silos.

    The score is rows, and the figures' means.

    Args:
        parameters: Of the model; empty for each silo's own.
        agreed: Digests that the set-up agreed on.
        validates: On validation rows, of all silos or not at all.
    """
    ask, request = ask_for(aggregator, now, parameters, figures, validates=validates)
    total = yield from aggregator.sum(ask, request, asked_of(ask, agreed).digest, whole=validates)
    return total if isinstance(total, Aborted) else (read(total, figures, validates=validates), total.silos)


def tables(
    aggregator: Aggregator, now: Stamp, parameters: Tensors, classes: int, agreed: Sequence[bytes], rows: float
) -> Exchange[Mapping[str, Array] | Aborted]:
    """Return the tables of a model on the held-out rows, as `read_tables` does; aborts if a silo is missing.

    Args:
        rows: Those of the score.

    Raises:
        PeerError: The tables have more or fewer rows, or are impossible.
    """
    sizes, half = {_tensor(CONFUSION): classes**2, _tensor(RELIABILITY): 3 * targets.BINS}, float(statistics.HALF)
    shapes = {name: (statistics.LIMBS, size) for name, size in sizes.items()}
    request = aggregator.want(shapes, dict.fromkeys(sizes, half), len(aggregator.cohort))
    ask = Score(stamp=now, parameters=parameters, encoding=request.fraction_bits)
    total = yield from aggregator.sum(ask, request, asked_of(ask, agreed).digest, whole=True)
    if isinstance(total, Aborted):
        return total
    read = read_tables(total, classes)
    if read[CONFUSION].sum() != rows:
        raise PeerError("expected tables of as many rows as the score is of, from the same silos")
    return read


def read_tables(total: Sum, classes: int) -> dict[str, Array]:
    """Return `CONFUSION`, int64[classes, classes], `RELIABILITY`, float64[3, bins]. Raises PeerError if impossible."""
    counts, bins = (_whole(total, name) for name in (CONFUSION, RELIABILITY))
    rows, sure, right = bins.reshape(3, targets.BINS)
    fits = (counts >= 0).all() and (right >= 0).all() and (right <= rows).all() and counts.sum() == rows.sum()
    if not fits or (sure < 0).any() or (sure > 100 * rows).any() or counts.sum() < len(total.silos):
        raise PeerError("expected counts of rows by class and by how sure they are, of at least one row a silo")
    return {CONFUSION: counts.reshape(classes, classes), RELIABILITY: np.stack([rows, sure / 100.0, right])}


def _whole(total: Sum, name: str) -> NDArray[np.int64]:
    """Return the whole numbers of a sum in limbs."""
    limbs = np.rint(total.means[_tensor(name)] * total.weight)
    parts = [divmod(number, 1 << statistics.GRID_BITS) for number in statistics.from_limbs(limbs)]
    if any(odd or abs(number) > statistics.MOST_ROWS for number, odd in parts):
        raise PeerError(f"expected whole numbers of rows as a sum's {name}, 2^48 at most")
    return np.array([number for number, _ in parts], np.int64)


def read(total: Sum, figures: Sequence[str], *, validates: bool = False) -> dict[str, float]:
    """Return the number of rows, and the means over them. Raises `moretta.errors.PeerError` for an impossible sum."""
    shapes = {name: mean.shape for name, mean in total.means.items()}
    names = _means(figures)
    if shapes != {_tensor(name, validates): (statistics.LIMBS,) for name in names}:
        raise PeerError(f"expected a sum of {', '.join(names)}, got one of {sorted(shapes)!r:.100}")
    # The mean of whole numbers below 2^31, times their count, is off by far less than 1/2.
    limbs = np.stack([np.rint(total.means[_tensor(name, validates)] * total.weight) for name in names], axis=1)
    counted, *sums = statistics.from_limbs(limbs)
    rows, odd = divmod(counted, 1 << statistics.GRID_BITS)
    if rows < len(total.silos) or odd:
        raise PeerError(f"expected at least one row a silo to be held back, got {rows} in all")
    return {ROWS: rows, **{name: value / counted for name, value in zip(names[1:], sums, strict=True)}}


def _tensor(name: str, validates: bool = False) -> str:
    """Return the name of a figure's upload, which no other upload has: see "Masks" above."""
    return f"{'validation' if validates else 'score'}/{name}"
