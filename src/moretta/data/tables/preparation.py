"""Preparation of rows for a model: absent inputs filled in, columns and targets brought to a common scale.

    ColumnRules    the treatment of each column, agreed before any value is known
    Expansion      how categories and marks of absence become columns; follows from the schema
    Preparation    statistics of all silos' training rows, applied alike at silos, at the server and in predictions

An absent value is NaN until it is prepared. The filling is from training rows, never from the rows to predict, so that
a prediction does not depend on the other rows of a file. Needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from moretta.errors import ParameterError, RowsError

Fill = Literal["none", "mean", "median"]
MedianRanges = tuple[tuple[int, float, float], ...]
PLAIN, ONE_OF, MARK = 0, 1, 2
SMALLEST_DEVIATION = 1e-150  # below, prepared inputs would overflow


@dataclass(frozen=True, eq=False)
class ColumnRules:
    """The treatment of each input column, the last axis of a sample.

    Args:
        scaled: bool[columns], whether a column is brought to mean 0 and deviation 1.
        fills: int8[columns], the filling of absent values as an index into `Fill`; 0 where none may be absent.
        low, high: float64[columns], the declared range of a column whose median is filled in; 0 elsewhere.

    Raises:
        moretta.errors.ParameterError: a median without a range.
    """

    scaled: NDArray[np.bool_]
    fills: NDArray[np.int8]
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    def __post_init__(self) -> None:
        if not (self.low < self.high)[self.medians].all():
            raise ParameterError(
                "a median needs a range; declare the column's range in the schema, for example range = [0, 120], or "
                "fill in the mean"
            )

    @classmethod
    def alike(cls, columns: int, *, scaled: bool = False, fill: Fill = "none") -> ColumnRules:
        """Return the same rules for all columns."""
        kind = np.full(columns, get_args(Fill).index(fill), np.int8)
        return cls(np.full(columns, scaled), kind, np.zeros(columns), np.zeros(columns))

    @property
    def columns(self) -> int:
        """The number of columns; 0 where all stay as they are."""
        return len(self.scaled)

    @property
    def fitted(self) -> int:
        """The number of columns that need statistics: all, or 0 where nothing is scaled and nothing may be absent."""
        return self.columns if self.scaled.any() or self.may_lack else 0

    @property
    def may_lack(self) -> bool:
        """Whether a value may be absent in any column."""
        return bool(self.fills.any())

    @property
    def medians(self) -> NDArray[np.int64]:
        """The indices of the columns whose median is filled in."""
        return np.flatnonzero(self.fills == get_args(Fill).index("median"))

    @property
    def median_ranges(self) -> MedianRanges:
        """The index and range of each column whose median is filled in; only these need a histogram."""
        return tuple((int(j), float(self.low[j]), float(self.high[j])) for j in self.medians)

    def of(self, columns: Sequence[int]) -> ColumnRules:
        """Return the rules of some columns."""
        kept = list(columns)
        return ColumnRules(self.scaled[kept], self.fills[kept], self.low[kept], self.high[kept])


@dataclass(frozen=True, eq=False)
class Expansion:
    """How coded rows (`moretta.data.tables.rows`) become inputs, without any fitted value.

    Attributes:
        features: The names of the coded columns.
        names: The names of the inputs.
        source: int64[inputs], each input's coded column.
        kinds: int8[inputs]: `PLAIN`, the value; `ONE_OF`, 1 where it is the code; `MARK`, 1 where it is absent.
        codes: float64[inputs], the code of each `ONE_OF`.
    """

    features: tuple[str, ...]
    names: tuple[str, ...]
    source: NDArray[np.int64]
    kinds: NDArray[np.int8]
    codes: NDArray[np.float64]

    def apply(self, coded: NDArray[np.generic]) -> NDArray[np.float32]:
        """Return inputs, float32[rows, inputs], NaN where a plain value is absent."""
        expanded = np.take(coded, self.source, axis=1).astype(np.float32)
        absent = np.isnan(expanded)
        one_of, mark = self.kinds == ONE_OF, self.kinds == MARK
        expanded[:, one_of] = expanded[:, one_of] == self.codes[one_of]
        expanded[:, mark] = absent[:, mark]
        return expanded

    def undo(self, x: NDArray[np.generic]) -> NDArray[np.float64]:
        """Return the coded rows of inputs, float64[rows, features], NaN where a value is absent."""
        coded = np.full((len(x), len(self.features)), np.nan)
        plain = self.kinds == PLAIN
        coded[:, self.source[plain]] = x[:, plain]
        for column in np.flatnonzero(self.kinds == ONE_OF):
            coded[x[:, column] == 1, self.source[column]] = self.codes[column]
        return coded

    @property
    def origins(self) -> tuple[str, ...]:
        """The coded column's name of each input."""
        return tuple(self.features[place] for place in self.source)


def check_rounding(numbers: NDArray[np.generic], where: str, names: Sequence[str] = ()) -> None:
    """Raise RowsError, naming the column, where float32, in which rows are kept, loses their differences.

    That is a rounding of more than 1 % of a column's deviation.

    Args:
        numbers: [rows] or [rows, columns], NaN where absent. Numbers of 32 bits or several axes are not checked.
        where: The start of the error's sentence.
    """
    if numbers.dtype.kind not in "fiu" or numbers.dtype.itemsize <= 4 or numbers.ndim not in (1, 2) or not len(numbers):
        return
    for place, column in enumerate(numbers.reshape(len(numbers), -1).T):  # one by one, as each is copied
        wide = column.astype(np.float64)
        wide = wide[np.abs(wide) < np.finfo(np.float32).max]  # others are refused elsewhere
        if not len(wide):
            continue
        lost, deviation = np.abs(wide - wide.astype(np.float32)).max(), wide.std()
        if lost > deviation / 100 and deviation > 1e-12 * np.abs(wide).max():  # below that it is a constant
            named = f": column {(names[place] if names else place)!r}" if numbers.ndim == 2 else ""
            raise RowsError(
                f"{where}{named}: float32, in which rows are kept, moves numbers by up to {lost / deviation:.1g} of "
                "their deviation; subtract a number that is the same at all silos"
            )


@dataclass(frozen=True, eq=False)
class Preparation:
    """The fitted statistics, applied as (x, or fill where x is absent, - mean) / deviation.

    Attributes:
        fill, mean, deviation: float64[columns], or [1] for all columns alike.
        target_mean, target_deviation: float64[outputs]: silos train on (y - target_mean) / target_deviation. Empty for
            unchanged targets.
    """

    fill: NDArray[np.float64]
    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]
    target_mean: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    target_deviation: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    @classmethod
    def nothing(cls, columns: int = 1) -> Preparation:
        """Return the preparation that changes nothing, of `columns` columns, or of all alike."""
        return cls(np.zeros(columns), np.zeros(columns), np.ones(columns))

    @classmethod
    def loads(cls, figures: Mapping[str, Any]) -> Preparation:
        """Return the preparation in ``inputs.json``: lists of numbers under the names of its `figures`."""
        targets = {name: np.array(figures.get(name, ()), np.float64) for name in ("target_mean", "target_deviation")}
        return cls(*(np.array(figures[name], np.float64) for name in ("fill", "mean", "deviation")), **targets)

    @property
    def figures(self) -> dict[str, NDArray[np.float64]]:
        """All figures by name; those of targets only where targets are scaled."""
        return {name: value for name, value in vars(self).items() if value.size}

    @property
    def scales_targets(self) -> bool:
        """Whether targets are brought to mean 0 and deviation 1."""
        return bool(self.target_mean.size)

    @property
    def is_nothing(self) -> bool:
        """Whether inputs stay unchanged and absent values count as 0."""
        return self.changes_nothing and not self.fill.any()

    @property
    def changes_nothing(self) -> bool:
        """Whether inputs without absent values stay unchanged."""
        return bool((self.mean == 0).all() and (self.deviation == 1).all())

    def apply(self, x: NDArray[np.generic], dtype: DTypeLike) -> NDArray[Any]:
        """Return inputs [rows, ..., columns] prepared, in a floating dtype; whole numbers are tokens and stay."""
        if x.dtype.kind in "iu":
            return x
        absent = np.isnan(x)
        if self.changes_nothing and not absent.any():
            return x.astype(dtype, copy=False)
        filled = np.where(absent, self.fill, x.astype(np.float64))
        return ((filled - self.mean) / self.deviation).astype(dtype)

    def behind(self, mean: NDArray[np.float64], deviation: NDArray[np.float64]) -> Preparation:
        """Return the preparation of values that first become (x - mean) / deviation."""
        fill, own = mean + deviation * self.fill, mean + deviation * self.mean
        return replace(self, fill=fill, mean=own, deviation=deviation * self.deviation)

    def scaled(self, y: NDArray[Any]) -> NDArray[Any]:
        """Return targets, encoded for the loss, scaled for training, in their dtype."""
        if not self.scales_targets:
            return y
        return ((y.astype(np.float64) - self.target_mean) / self.target_deviation).astype(y.dtype)

    def unscaled(self, outputs: NDArray[Any]) -> NDArray[Any]:
        """Return a network's outputs, [rows, outputs], in the targets' own units, in their dtype."""
        if not self.scales_targets:
            return outputs
        return (outputs.astype(np.float64) * self.target_deviation + self.target_mean).astype(outputs.dtype)

    def scaling(self, mean: NDArray[np.float64], deviation: NDArray[np.float64]) -> Preparation:
        """Return the same with targets scaled. Raises `moretta.errors.ParameterError` for targets that do not vary."""
        flat = np.flatnonzero(deviation < SMALLEST_DEVIATION)
        if flat.size:
            which = f"target {flat[0]} (counted from 0)" if len(deviation) > 1 else "the target"
            raise ParameterError(
                f"[data] standardise-targets: {which} is the same number in all rows of all silos, so there is nothing "
                "to learn; check the rows, or remove standardise-targets"
            )
        return replace(self, target_mean=mean, target_deviation=deviation)

    def joined(self, columns: Sequence[int], part: Preparation) -> Preparation:
        """Return this with these columns' figures replaced by those of `part`, and its targets' if it has them."""
        arrays = []
        for whole, own in zip(self._arrays, part._arrays, strict=True):
            mine = whole.copy()
            mine[list(columns)] = own
            arrays.append(mine)
        targets = part if part.scales_targets else self
        fill, mean, deviation = arrays
        return replace(targets, fill=fill, mean=mean, deviation=deviation)

    @property
    def _arrays(self) -> tuple[NDArray[np.float64], ...]:
        return self.fill, self.mean, self.deviation


def usable(deviation: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the divisors of inputs: 1 for a column that never varies."""
    return np.where(deviation >= SMALLEST_DEVIATION, deviation, 1.0)
