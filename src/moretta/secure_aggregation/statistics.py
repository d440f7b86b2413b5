"""Rows, means, deviations and histograms over all silos, from secure sums: data is prepared without being pooled.

    server                                   silo k
      AskMoments(what, order=0)           -->         (where values may be absent)
                                          <--  upload of rows, present values by column
      AskMoments(what, order=1, center=0) -->
                                          <--  upload of rows, sum of x by column
      AskMoments(what, order=2, center=mean) -->
                                          <--  upload of rows, sum of (x - mean)^2 by column
      AskHistogram(what, low, high)       -->         (for columns with a median)
                                          <--  upload of the number of values in each of 64 bins

The server learns the number of rows of all silos together, each column's mean and standard deviation over them, and
where values may be absent the number of present ones. For a column with a median it learns a histogram. The silos learn
the mean from the second ask. With the scheme ``none`` the server sees each silo's.

**Wide integers.** Columns may have any scale, and the server must not know a silo's scale to choose a range. So a
column's sum v becomes the integer round(2^120 v), |v| < 2^118. It is cut into 12 balanced limbs of 20 bits, each an
entry of the upload with weight 1. Limbs are whole numbers, so their sums are exact in either ring for up to 4,000
silos, and the server joins them with Python's integers: adding over silos rounds nothing. The fixed grid of 2^-120
keeps 12 digits of the squares of a column whose scale is 1e-12.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from moretta.contract.lazy_rows import loaded
from moretta.contract.messages import Array, Indices, Message, Stamp, Vector, message, within
from moretta.contract.roles import Aborted, Exchange
from moretta.errors import ParameterError, PeerError, RangeError, RowsError
from moretta.secure_aggregation.encoding import MOST_WEIGHT
from moretta.secure_aggregation.keyed_sums import Aggregator, Contributor
from moretta.secure_aggregation.sums import STATISTICS, query_of

GRID_BITS = 120
LIMB_BITS = 20
LIMBS = 12
HALF = 1 << (LIMB_BITS - 1)
LARGEST = 2.0**118
# Larger means are subtracted afterwards: squares of distances from a far center would be refused for the number of rows
# alone, and a server would learn it by the center from which on a silo refuses. 2^32 rows' squares are within
# `LARGEST`.
CENTERS = 2.0**43
MOST_ROWS = 1 << 48  # of all silos together: more is no count, and would not fit int64
MOST_SILOS = 4_000  # sums of so many limbs stay below 2^31
BLOCK = 1 << 14  # rows summed at once, and fewer where they have many columns:
BLOCK_NUMBERS = 1 << 20
MAY_LACK = "input columns"  # the matrix whose values may be absent, NaN
BINS = 64  # of a histogram: coarse, as each count is of rows of all silos
ALL = np.empty(0, np.int64)  # columns
FLAT = 2.0**-46  # a deviation below this fraction of the mean is the rounding of float64 sums, not data
FAR_FLAT = 1e-7  # for squares of the values themselves, which have 16 digits


@message("secure-aggregation/ask-moments")
class AskMoments(Message):
    """Upload your rows and, by column, your sum of (x - center)^order of the matrix `what`, over present values.

    Args:
        center: float64[columns]; 0 for orders 0 and 1.
        columns: int64[c], which of the inputs' columns, ascending; empty for all.
    """

    what: str
    order: Annotated[int, within(0, 2)]
    center: Vector
    columns: Indices
    encoding: Mapping[str, int]

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` for a center that is too far off, or bad indices."""
        if np.abs(self.center).max(initial=0.0) > (CENTERS if self.order == 2 else 0.0):
            raise PeerError(f"{self.TAG}: expected a center within {CENTERS:.3g}, and of order 0 or 1 none")
        if (np.diff(self.columns, prepend=-1) <= 0).any():
            raise PeerError(f"{self.TAG}: expected the indices of columns, int64[columns], ascending")

    def of(self, inputs: NDArray[Any]) -> NDArray[Any]:
        """Return the requested columns of inputs [..., columns]. Raises `PeerError` for missing ones."""
        if not self.columns.size:
            return inputs
        if self.columns[-1] >= inputs.shape[-1]:
            raise PeerError(f"{self.TAG}: expected indices of {inputs.shape[-1]} columns, got {self.columns[-1]}")
        return inputs[..., self.columns]


@message("secure-aggregation/ask-histogram")
class AskHistogram(Message):
    """Upload the number of values of some columns of the matrix `what` in each of `BINS` equal parts of a range.

    Args:
        columns: int64[c], which columns.
        low, high: float64[c]; a value outside counts in the first or the last part.
    """

    what: str
    columns: Indices
    low: Vector
    high: Vector
    encoding: Mapping[str, int]

    @property
    def ranges(self) -> tuple[Array, Array, Array]:
        """The columns, and the ends of their ranges."""
        return self.columns, self.low, self.high

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless each column has a range that is not empty."""
        if not self.columns.size or not self.low.shape == self.high.shape == self.columns.shape:
            raise PeerError(f"{self.TAG}: expected the ends of a range for each of some columns")
        if not (self.low < self.high).all() or not np.isfinite(self.high / 2 - self.low / 2).all():
            raise PeerError(f"{self.TAG}: expected finite ranges that are not empty")


MESSAGES = (AskMoments, AskHistogram)


@dataclass(frozen=True)
class Moments:
    """The statistics of all silos' rows together.

    Args:
        rows: N over all silos.
        mean, deviation: float64[columns], of present values. The deviation is the population's, and exactly 0 in a
            column that never varies.
        present: int64[columns], the number of present values.
    """

    rows: int
    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]
    present: NDArray[np.int64]


def moments(
    aggregator: Aggregator,
    now: Stamp,
    columns: int,
    what: str = "inputs",
    *,
    may_lack: bool = False,
    of: NDArray[np.int64] = ALL,
    centers: dict[str, NDArray[np.float64]] | None = None,
) -> Exchange[Moments | Aborted]:
    """Return rows, mean and deviation of the silos' matrices `what`: the server's half. With 0 columns, rows only.

    Call it once for each `what` under one stamp.

    Args:
        may_lack: Whether values of `MAY_LACK` may be absent, so that present ones are counted first.
        of: The indices of the requested input columns, ascending; empty for all.
        centers: Of squares, by `what`. The first requested one is kept in it, and requested again in every attempt of
            the run, as silos answer for one.

    Raises:
        PeerError: A count of rows or a sum is impossible.
        ParameterError: A column has no value at any silo, or the silos are more than 4,000.
    """
    counted = list[int]()
    if may_lack:
        zeroth = yield from _sums(aggregator, now, what, 0, np.zeros(columns), of)
        if isinstance(zeroth, Aborted):
            return zeroth
        counted = zeroth
    first = yield from _sums(aggregator, now, what, 1, np.zeros(columns), of)
    if isinstance(first, Aborted):
        return first
    rows, odd = divmod(first[0], 1 << GRID_BITS)
    if not len(aggregator.cohort) <= rows <= MOST_ROWS or odd:
        raise PeerError(f"{now}: expected at least one row a silo of `{what}` and 2^48 in all at most")
    if any(abs(number) >= int(LARGEST) << GRID_BITS for number in first[1:]):
        raise PeerError(f"{now}: expected sums of `{what}` below 2^118, as each silo's are")
    present = _present(what, rows, counted, columns)
    mean = _divide(first[1:], present)
    if not columns:
        return Moments(rows, mean, mean, present)
    center = np.where(np.abs(mean) <= CENTERS, mean, 0.0)
    center = center if centers is None else centers.setdefault(what, center)
    second = yield from _sums(aggregator, now, what, 2, center, of)
    if isinstance(second, Aborted):
        return second
    deviation = np.sqrt(np.maximum(_divide(second[1:], present) - (mean - center) ** 2, 0.0))
    flat = np.where(center == mean, FLAT, FAR_FLAT)
    return Moments(rows, mean, np.where(deviation > flat * np.abs(mean), deviation, 0.0), present)


def counts(
    aggregator: Aggregator, now: Stamp, columns: int, what: str
) -> Exchange[tuple[int, NDArray[np.int64]] | Aborted]:
    """Return rows and column sums of 0-1 matrices `what`: the server's half. Raises PeerError for impossible sums."""
    totals = yield from _sums(aggregator, now, what, 1, np.zeros(columns), ALL)
    if isinstance(totals, Aborted):
        return totals
    rows, *sums = (number >> GRID_BITS for number in totals)
    odd = any(number % (1 << GRID_BITS) for number in totals)
    if odd or not len(aggregator.cohort) <= rows <= MOST_ROWS or any(not 0 <= number <= rows for number in sums):
        raise PeerError(f"{now}: expected counts of rows of `{what}`, at least one row a silo and 2^48 in all at most")
    return rows, np.array(sums, np.int64)


def histograms(
    aggregator: Aggregator,
    now: Stamp,
    columns: NDArray[np.int64],
    low: NDArray[np.float64],
    high: NDArray[np.float64],
    what: str,
) -> Exchange[NDArray[np.int64] | Aborted]:
    """Return all silos' values by part of each column's range, int64[columns, BINS]. Raises PeerError below 0."""
    name = _histogram_of(what)
    silos = len(aggregator.cohort)
    request = aggregator.want({name: (2, len(columns), BINS)}, {name: float(1 << LIMB_BITS)}, silos)
    ask = AskHistogram(stamp=now, what=what, columns=columns, low=low, high=high, encoding=request.fraction_bits)
    total = yield from aggregator.sum(ask, request, query_of(ask).digest, whole=True)
    if isinstance(total, Aborted):
        return total
    least, most = np.rint(total.means[name] * total.weight).astype(np.int64)
    bins = least + (most << LIMB_BITS)
    if (bins < 0).any():
        raise PeerError(f"{now}: expected counts of values of `{what}`, got some below 0")
    return np.asarray(bins)


def median_of(counts: NDArray[np.int64], low: NDArray[np.float64], high: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each column's median, float64[columns], from a histogram [columns, BINS].

    Values of the median's part count as evenly spread, so it is off by (high - low) / BINS at most.

    Raises:
        ParameterError: A column has no value.
    """
    medians = np.empty(len(counts))
    for column, bins in enumerate(counts):
        total = int(bins.sum())
        if total <= 0:
            raise ParameterError("no silo has any value in a column whose median is to be filled in; leave it out")
        number = int(np.searchsorted(np.cumsum(bins), total / 2))
        before = int(bins[:number].sum())
        share = (number + (total / 2 - before) / int(bins[number])) / BINS
        medians[column] = low[column] + (high[column] - low[column]) * share
    return medians


def answer_moments(contributor: Contributor, message: AskMoments, matrix: NDArray[np.generic]) -> Message:
    """Return the upload that answers: the silo's half.

    Args:
        matrix: The silo's, [rows, columns] of numbers, summed in float64; NaN is an absent value, in `MAY_LACK` alone.

    Raises:
        RowsError: The matrix has no row, infinite values or other columns than the server's.
        RangeError: A sum is 2^118 or more.
        PeerError: As `check_exact`.
    """
    if matrix.ndim != 2 or matrix.shape[1] != len(message.center):
        raise RowsError(
            f"`{message.what}`: the server knows {len(message.center)} columns, the silo's data has "
            f"{matrix.shape[1] if matrix.ndim == 2 else 'no columns'}"  # it keeps its number of rows secret
        )
    sums = [float(len(matrix)), *_column_sums(message.what, matrix, message.center, message.order)]
    name = _tensor(message.what, message.order)
    about = query_of(message, once=name, whole=True, lasting=True, beside=STATISTICS)
    check_exact(message.encoding)
    return contributor.upload(message.stamp, {name: to_limbs(sums)}, 1, message.encoding, asked=about, least=HALF)


def answer_histogram(contributor: Contributor, message: AskHistogram, matrix: NDArray[np.generic]) -> Message:
    """Return the upload that answers from a matrix, as `answer_moments`. Raises PeerError for columns it lacks."""
    matrix = loaded(matrix)
    if matrix.ndim != 2 or not 0 <= int(message.columns.min()) <= int(message.columns.max()) < matrix.shape[1]:
        raise PeerError(f"`{message.what}`: expected indices of its columns, got others")
    counts = np.zeros((len(message.columns), BINS), np.int64)
    for row, (column, low, high) in enumerate(zip(message.columns, message.low, message.high, strict=True)):
        values = matrix[:, int(column)].astype(np.float64)
        values = np.clip(values[~np.isnan(values)], low, high)
        counts[row] = np.histogram(values, bins=BINS, range=(float(low), float(high)))[0]
    name = _histogram_of(message.what)
    check_exact(message.encoding)
    about = query_of(message, once=name, whole=True, lasting=True, beside=STATISTICS)
    parts = np.stack([counts & ((1 << LIMB_BITS) - 1), counts >> LIMB_BITS]).astype(np.float64)
    return contributor.upload(message.stamp, {name: parts}, 1, message.encoding, asked=about, least=1 << LIMB_BITS)


def check_exact(encoding: Mapping[str, int]) -> None:
    """Raise `moretta.errors.PeerError` for an encoding that rounds whole numbers.

    Sums of one silo's limbs under several roundings would reveal single ones; without rounding all are equal.
    """
    if any(bits < 0 for name, bits in encoding.items() if name != MOST_WEIGHT):
        raise PeerError("expected an encoding of whole numbers without rounding, got one with negative fraction bits")


def _sums(
    aggregator: Aggregator, now: Stamp, what: str, order: int, center: NDArray[np.float64], of: NDArray[np.int64]
) -> Exchange[list[int] | Aborted]:
    """Return the silos' rows and column sums in units of 2^-120, exact."""
    silos = len(aggregator.cohort)
    if silos > MOST_SILOS:
        raise ParameterError(f"expected at most {MOST_SILOS} silos for common statistics, got {silos}")
    name = _tensor(what, order)
    request = aggregator.want({name: (LIMBS, 1 + len(center))}, {name: float(HALF)}, silos)
    ask = AskMoments(stamp=now, what=what, order=order, center=center, columns=of, encoding=request.fraction_bits)
    total = yield from aggregator.sum(ask, request, query_of(ask).digest, whole=True)
    if isinstance(total, Aborted):
        return total
    # The mean of whole numbers below 2^31, times their count, is off by far less than 1/2.
    return from_limbs(np.rint(total.means[name] * total.weight))


def _tensor(what: str, order: int) -> str:
    """Return the name of the uploaded tensor, another for each ask of a set-up, so that no mask is used twice."""
    return f"moments/{order}/{what}"


def _histogram_of(what: str) -> str:
    return f"histogram/{what}"


def _present(what: str, rows: int, counted: Sequence[int], columns: int) -> NDArray[np.int64]:
    """Return the number of present values of each column. counted: rows and these in units of 2^-120, or nothing."""
    if not counted:
        return np.full(columns, rows, np.int64)
    there = [number >> GRID_BITS for number in counted[1:]]
    if any(number % (1 << GRID_BITS) for number in counted) or any(not 0 <= number <= rows for number in there):
        raise PeerError(f"`{what}`: expected as many values of a column as rows at most")
    present = np.array(there, np.int64)
    if not present.all():
        raise ParameterError(
            f"`{what}`: column {int(np.argmin(present))} (counted from 0) has no value at any silo, so there is "
            "nothing to fill in; leave the column out"
        )
    return present


def _column_sums(what: str, matrix: NDArray[Any], center: NDArray[np.float64], order: int) -> list[float]:
    """Return sum over rows of (x - center)^order: numpy's pairwise sums within blocks, exact sums over blocks."""
    if not len(matrix):
        raise RowsError(f"`{what}`: expected at least one row")
    step = min(BLOCK, max(1, BLOCK_NUMBERS // max(1, matrix.shape[1])))
    blocks, good = np.empty((-(-len(matrix) // step), matrix.shape[1])), np.ones(matrix.shape[1], np.bool_)
    with np.errstate(over="ignore", invalid="ignore"):  # both are checked below
        for number in range(len(blocks)):
            values = matrix[number * step : (number + 1) * step]
            block, absent = (values - center) ** order, np.isnan(values)
            good &= ~(np.isinf(values) if what == MAY_LACK else np.isinf(values) | absent).any(axis=0)
            block[absent] = 0.0
            np.sum(np.ascontiguousarray(block.T), axis=1, out=blocks[number])  # contiguous columns are summed pairwise
        magnitude = np.abs(blocks).sum(axis=0)
    _refuse(what, good, RowsError("a missing or infinite value"))
    _refuse(
        what,
        magnitude < LARGEST,
        RangeError(
            "values too large to be summed, or too far from the mean of all (2^118 and more when squared: divide the "
            "column by a large number)"
        ),
    )
    return [math.fsum(column) for column in blocks.T.tolist()]


def _refuse(what: str, good: Array, error: RowsError) -> None:
    if not good.all():
        raise type(error)(f"`{what}`: column {int(np.argmin(good))} (counted from 0) has {error}; nothing was sent")


def to_limbs(values: Sequence[float]) -> NDArray[np.float64]:
    """Return round(2^120 v) in balanced limbs, least first: whole numbers from -2^19 to 2^19 - 1, [12, values]."""
    limbs = np.empty((LIMBS, len(values)))
    for column, value in enumerate(values):
        numerator, denominator = value.as_integer_ratio()
        rest = ((numerator << (GRID_BITS + 1)) // denominator + 1) >> 1  # to the nearest
        for row in range(LIMBS):
            limb = ((rest + HALF) & (2 * HALF - 1)) - HALF
            limbs[row, column], rest = limb, (rest - limb) >> LIMB_BITS
    return limbs


def from_limbs(limbs: NDArray[np.float64]) -> list[int]:
    """Return the integers of these limbs, or sums of limbs: sum over rows j of limb_j 2^(20 j)."""
    return [sum(int(limb) << (LIMB_BITS * row) for row, limb in enumerate(column)) for column in limbs.T.tolist()]


def _divide(sums: Sequence[int], present: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.array([v / (int(n) << GRID_BITS) for v, n in zip(sums, present, strict=True)], dtype=np.float64)
