"""Whole numbers with the discrete Gaussian's probabilities, from a keystream, by integer arithmetic alone.

The discrete Gaussian N_Z(s^2) has P(n) proportional to g_s(n) = exp(-n^2 / (2 s^2)) on whole numbers n (Canonne,
Kamath, Steinke, NeurIPS 2020). All claims here follow from one sum. For any real c, by Poisson's summation,

    (A)  sum_n g_s(n - c) = s sqrt(2 pi) (1 + 2 sum_{k >= 1} exp(-2 pi^2 s^2 k^2) cos(2 pi k c))

so it lies within s sqrt(2 pi) (1 +- e), with e < 2.1 exp(-16 pi^2) < 1e-67 wherever s^2 >= 8 (`SMOOTH`).

    (B)  Sums. X from N_Z(s^2) and Y from N_Z(u^2), independent, have P(X + K Y = n) = const g_w(n) sum_y g_t(y - c_n),
         where w^2 = s^2 + K^2 u^2 and t = s u / w. If t^2 >= 8, (A) bounds the last sum on both sides, so P(n) is that
         of N_Z(w^2) within the factors (1 - e) / (1 + e) and (1 + e) / (1 - e), for every n, however far out.
    (C)  Rounding. Draw y from the normal distribution N(0, s^2 - 8), then n from N_Z centred at y with variance 8:
         P(n) = const E_y[g(n - y) / sum_m g(m - y)]. By (A) the denominator is constant within 1 +- e, and without it
         the mean is proportional to g_s(n). So P(n) is that of N_Z(s^2) within the same two factors.

**What (C) proves.** A mechanism that adds N_Z(s^2) to each of d whole numbers is, within a factor exp(2.1 d e) for
every outcome, one that adds N(0, s^2 - 8) and then works on the sum alone. It works in the same way for all numbers:
adding a whole number to them adds it to y and to n. All that holds for the Gaussian mechanism of variance s^2 - 8 under
any sampling of rows, its privacy-loss distribution too, therefore holds for this one. Its epsilon is larger by at most
4.2 d e a release: less than 1e-40 for every possible run. By (B) the same holds for the sum of the noises of k silos,
each of variance s^2 >= 16, as of variance k s^2 - 8 (Kairouz, Liu, Steinke, ICML 2021, bound such sums in the same
way). (C) fails for a Skellam, which is closed under sums but has heavier tails; docs/noise.md measures the cost of its
Renyi bounds.

**How numbers are drawn.** A table has P(|X| <= n) of N_Z(s^2) to 256 bits. 32 bits of the keystream are a sign and 31
bits of a uniform number; in the rare draw that these do not decide, 256 further bits do. Larger deviations are sums X_0
+ 32 X_1 + 32^2 X_2 of draws from one table, as (B) allows. Beside the factors above, a draw is decided wrongly with a
chance of less than 2^-230. The same keystream has the same numbers on every machine.

Source: the convolutions are those of Micciancio and Walter (CRYPTO 2017), who bound the same ratio.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moretta.errors import ParameterError
from moretta.secure_aggregation.keystream import Keystream

SMOOTH = 8  # the variance from which on sums over whole numbers are constant, within 1e-67
RADIX = 32
LEAST_BASE = math.sqrt(SMOOTH * (1 + RADIX**2))  # of a table whose draws are summed: then t^2 >= 8 in (B)
MOST_BASE = LEAST_BASE * math.sqrt(1 + RADIX**2)
LARGEST = 1e12  # deviations above which sums might leave 64 bits
BITS, GUARD, WORD, GUIDE = 256, 64, 31, 16  # of probabilities, of the arithmetic beside them, of words, of the guide
PART = 8192  # of numbers drawn at once: their lookups stay in the processor's cache
TAIL = math.sqrt(2 * math.log(2) * BITS)  # in deviations; values beyond are less likely than 2^-256


@dataclass(frozen=True, eq=False, repr=False)
class DiscreteGaussian:
    """The distribution N_Z(deviation^2), ready for draws. Made by `discrete_gaussian`.

    Args:
        levels: The number of summed draws.
        words: The first 31 bits of P(|X| <= n), uint32.
        exact: All of its 256 bits.
        guide: By the first 16 bits of a uniform number, the number of words below all with these first bits.
        crowded: Whether more than one word begins so, at that distance.
    """

    deviation: float
    levels: int
    words: NDArray[np.uint32]
    exact: tuple[int, ...]
    guide: NDArray[np.int32]
    crowded: NDArray[np.bool_]

    def draw(self, stream: Keystream, count: int) -> NDArray[np.int64]:
        """Return `count` independent numbers, int64[count]."""
        total = self._base(stream, count)
        for _ in range(1, self.levels):
            total = self._base(stream, count) + RADIX * total
        return total

    def _base(self, stream: Keystream, count: int) -> NDArray[np.int64]:
        drawn, signed = stream.integers(count, 32), np.empty(count, dtype=np.int64)
        for start in range(0, count, PART):
            part = slice(start, start + PART)
            uniform = drawn[part] >> np.uint32(1)
            cells = uniform >> np.uint32(WORD - GUIDE)
            indices = self.guide.take(cells)
            words = self.words.take(indices)
            undecided = words == uniform  # its 31 bits are those of a bound: more decide
            indices += words < uniform
            out = np.flatnonzero(self.crowded.take(cells))
            indices[out] = np.searchsorted(self.words, uniform[out])
            undecided[out] = self.words[indices[out]] == uniform[out]
            for place in np.flatnonzero(undecided):
                rest = int.from_bytes(stream.octets(BITS // 8).tobytes(), "big") >> WORD
                indices[place] = bisect_right(self.exact, (int(uniform[place]) << BITS - WORD) | rest)
            np.multiply(indices, 1 - 2 * (drawn[part] & np.uint32(1)).astype(np.int32), out=signed[part])
        return signed


@lru_cache(maxsize=64)
def discrete_gaussian(deviation: float) -> DiscreteGaussian:
    """Return N_Z(deviation^2).

    Raises:
        ParameterError: The deviation is below 4 or above 1e12.

    >>> noise = discrete_gaussian(1000.0)
    >>> bool(abs(noise.draw(Keystream(bytes(32)), 10_000).std() / 1000 - 1) < 0.03)
    True
    """
    if not 4 <= deviation <= LARGEST:
        raise ParameterError(f"discrete noise has a deviation of 4 to {LARGEST:g} steps, not {deviation:g}")
    base, levels = _base_of(deviation)
    exact = _cumulative(base)
    words = np.array([bound >> BITS - WORD for bound in exact], dtype=np.uint32)
    starts = np.searchsorted(words, np.arange((1 << GUIDE) + 1) << WORD - GUIDE).astype(np.int32)
    return DiscreteGaussian(deviation, levels, words, exact, starts[:-1], np.diff(starts) > 1)


def largest(deviation: float) -> int:
    """Return the largest possible magnitude of a draw of N_Z(deviation^2)."""
    base, levels = _base_of(deviation)
    steps: int = sum(RADIX**place for place in range(levels))
    return (math.ceil(TAIL * base) + 1) * steps


def _base_of(deviation: float) -> tuple[float, int]:
    """Return the deviation of the table's draws, and how many of them are summed."""
    levels, variance = 1, 1
    while deviation / math.sqrt(variance) > MOST_BASE:
        levels, variance = levels + 1, variance * RADIX**2 + 1
    return deviation / math.sqrt(variance), levels


def _cumulative(base: float) -> tuple[int, ...]:
    """Return P(|X| <= n) of N_Z(base^2) for n = 0, 1, ..., in units of 2^-256; the last is 1."""
    bits = BITS + GUARD
    exact = Context(prec=120)
    ratio = exact.exp(exact.divide(Decimal(-1), exact.multiply(Decimal(2), exact.power(Decimal(base), 2))))
    factor = int(exact.multiply(ratio, Decimal(1 << bits)))  # g(1); then g(n + 1) = g(n) g(1)^(2 n + 1)
    square, weight, sums = factor * factor >> bits, 1 << bits, [1 << bits]
    for _ in range(math.ceil(TAIL * base)):
        weight, factor = weight * factor >> bits, factor * square >> bits
        sums.append(sums[-1] + 2 * weight)
    return tuple((each << BITS) // sums[-1] for each in sums)
