"""Discrete noise against exact probabilities: tables, sums of levels, statistics of draws, and what would be found."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from moretta.errors import ParameterError
from moretta.secure_aggregation import discrete_gaussian as drawn
from moretta.secure_aggregation.discrete_gaussian import LEAST_BASE, MOST_BASE, RADIX, SMOOTH, discrete_gaussian
from moretta.secure_aggregation.keystream import Keystream, SecretRoot

CHANCE = 1e-6  # with which a right sampler fails a test of statistics here, under other keys than these


def stream(number: int = 0) -> Keystream:
    return SecretRoot.insecure(number, "noise").stream("test")


def exact(deviation: float, reach: int) -> NDArray[np.float64]:
    """P(n) for n in -reach .. reach, of the definition, in float64."""
    numbers = np.arange(-reach, reach + 1)
    weights = np.exp(-np.square(numbers) / (2 * deviation**2))
    return weights / weights.sum()


def convolved(base: NDArray[np.float64], other: NDArray[np.float64], radix: int) -> NDArray[np.float64]:
    """P(X + radix Y = n) of two tables around 0."""
    spread = np.zeros(radix * (len(other) - 1) + 1)
    spread[::radix] = other
    return np.convolve(base, spread)


@pytest.mark.parametrize("deviation", [4.0, 17.3, 250.0])
def test_a_table_has_the_probabilities_of_the_definition(deviation: float) -> None:
    bounds = [Fraction(bound, 1 << drawn.BITS) for bound in discrete_gaussian(deviation).exact]
    found = np.diff([0.0, *map(float, bounds)])  # P(|X| = n)
    both = exact(deviation, len(bounds) - 1)[len(bounds) - 1 :]
    both[1:] *= 2
    assert np.abs(found - both).max() < 1e-14  # the rounding of float64, not of the table
    assert bounds[-1] == 1
    assert 1 - bounds[-2] < Fraction(1, 1 << 250)  # nothing is cut off that could be seen


def bracketed(square: Fraction, last: int) -> list[tuple[Fraction, Fraction]]:
    """Lower and upper bounds of P(|X| <= n), n = 0 .. last, by rational arithmetic on the definition alone.

    exp(-1 / (2 s^2)) lies between two partial sums of its series. Powers of it are rounded down and up, to 400 bits.
    """
    whole, x = 1 << 400, 1 / (2 * square)
    terms = [(-x) ** k / math.factorial(k) for k in range(90)]
    ends = sorted([sum(terms[:-1], Fraction(0)), sum(terms, Fraction(0))])

    def power(base: int, exponent: int, up: int) -> int:
        found = whole
        while exponent:
            if exponent & 1:
                found = found * base + up * (whole - 1) >> 400
            base, exponent = base * base + up * (whole - 1) >> 400, exponent >> 1
        return found

    first = (math.floor(ends[0] * whole), math.ceil(ends[1] * whole))
    weights = [[power(first[up], number * number, up) for number in range(last + 2)] for up in (0, 1)]
    sums = [list(itertools.accumulate([each[0], *(2 * one for one in each[1:])])) for each in weights]
    total = sums[0][last], sums[1][last] + 4 * weights[1][last + 1]  # beyond, each weight is less than half the last
    return [(Fraction(low, total[1]), Fraction(high, total[0])) for low, high in zip(*sums, strict=True)][: last + 1]


@pytest.mark.parametrize("deviation", [4.0, 17.25])
def test_a_table_is_exact_by_another_arithmetic(deviation: float) -> None:
    """An oracle of our own, as OpenDP takes 276 MB: Canonne, Kamath, Steinke 2020, Definition 1."""
    exact_bounds = discrete_gaussian(deviation).exact
    close = Fraction(1, 1 << 248)
    for bound, (low, high) in zip(
        exact_bounds, bracketed(Fraction(deviation) ** 2, len(exact_bounds) - 1), strict=True
    ):
        assert high - low < close
        assert low - close < Fraction(bound, 1 << drawn.BITS) < high + close


def test_levels_add_up_to_the_discrete_gaussian_even_far_out() -> None:
    """(B): the ratio to the definition is 1 at every number, at the least base that is allowed."""
    base = exact(LEAST_BASE, 700)
    whole = LEAST_BASE * math.sqrt(1 + RADIX**2)
    sums = convolved(base, base, RADIX)
    middle, reach = len(sums) // 2, int(6 * whole)
    ratio = sums[middle - reach : middle + reach + 1] / exact(whole, reach)
    # float64's own rounding of weights down to exp(-18), and of what the definition leaves out beyond 6 deviations
    assert np.ptp(ratio) < 1e-9
    bent = convolved(exact(3.0, 60), exact(3.0, 60), 8)  # far below: t^2 is 0.14
    ratio = bent[len(bent) // 2 - 40 : len(bent) // 2 + 41] / exact(3.0 * math.sqrt(65), 400)[360:441]
    assert np.ptp(ratio) > 0.1


def test_rounding_a_normal_number_at_random_gives_the_discrete_gaussian() -> None:
    """(C), whose proof carries the Gaussian mechanism's privacy over: of variance s^2 - 8, rounded with variance 8."""

    def rounded(deviation: float, variance: float) -> NDArray[np.float64]:
        y = np.linspace(-8, 8, 20_001) * math.sqrt(deviation**2 - variance)
        numbers = np.arange(-int(4 * deviation), int(4 * deviation) + 1)
        wide = np.arange(numbers[0] - 60, numbers[-1] + 61)
        kernel = np.exp(-np.square(wide[:, None] - y) / (2 * variance))
        kernel /= kernel.sum(axis=0)
        found = kernel[60:-60] @ (np.exp(-np.square(y) / (2 * (deviation**2 - variance))))
        return found / exact(deviation, numbers[-1])

    ratio = rounded(9.0, SMOOTH)
    assert np.ptp(ratio) / ratio.mean() < 1e-9
    ratio = rounded(9.0, 0.02)  # a kernel that is not smooth is no such thing
    assert np.ptp(ratio) / ratio.mean() > 1e-3


@pytest.mark.parametrize("deviation", [4.0, 60.0, MOST_BASE * 1.01, 60_000.0, 2.5e6])
def test_draws_are_distributed_as_they_should_be(deviation: float) -> None:
    count = 200_000
    found = discrete_gaussian(deviation).draw(stream(), count)
    if deviation < 10:  # number by number
        chances = exact(deviation, 12)
        seen = np.bincount(np.clip(found, -12, 12) + 12, minlength=25)
        chances[[0, -1]] = stats.norm.sf(11.5 / deviation)  # the ends, to 1e-5, with all beyond
        chances /= chances.sum()
    else:  # in 60 parts that are equally likely, as of a normal number: both agree to 1e-5 from 60 on
        bounds = np.rint(stats.norm.ppf(np.arange(1, 60) / 60) * deviation)
        seen = np.bincount(np.searchsorted(bounds, found, side="right"), minlength=60)
        chances = np.diff([0.0, *stats.norm.cdf((bounds - 0.5) / deviation), 1.0])
    assert stats.chisquare(seen, chances * count).pvalue > CHANCE
    squares = np.square(found / deviation).sum()  # chi-square with `count` degrees: mean n, deviation sqrt(2 n)
    assert abs(squares - count) < 5 * math.sqrt(2 * count)
    assert abs(found.sum() / deviation) < 5 * math.sqrt(count)
    for remainder in (2, RADIX):  # no digit of a sum of levels is favoured
        counts = np.bincount(found % remainder, minlength=remainder)
        if deviation > 4 * remainder:
            assert stats.chisquare(counts).pvalue > CHANCE


def test_draws_of_other_streams_are_independent() -> None:
    noise, count = discrete_gaussian(5000.0), 100_000
    one, other = (noise.draw(stream(number), count) / 5000.0 for number in (0, 1))
    assert abs(one @ other) < 5 * math.sqrt(count)  # a sum of products of mean 0 and variance 1
    assert abs(one[1:] @ one[:-1]) < 5 * math.sqrt(count)


def test_the_same_stream_has_the_same_numbers_on_every_machine() -> None:
    noise = discrete_gaussian(24_770.0)
    assert noise.draw(Keystream(bytes(32)), 6).tolist() == KNOWN
    assert noise.levels == 2


KNOWN = [34261, -6910, 10287, 6246, 31506, 11767]


def test_a_draw_that_its_first_bits_leave_open_is_decided_by_256_more(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = discrete_gaussian(4.0)
    bound, open_bits = noise.exact[0], drawn.BITS - drawn.WORD

    class Fixed:
        """Gives the 31 bits of the first bound with a sign, and then what is asked for in the test."""

        def __init__(self, rest: int) -> None:
            self.rest = rest

        def integers(self, count: int, bits: int) -> NDArray[np.uint32]:
            return np.full(count, (bound >> open_bits) << 1, dtype=np.uint32)

        def octets(self, count: int) -> NDArray[np.uint8]:
            return np.frombuffer((self.rest << drawn.WORD).to_bytes(count, "big"), dtype=np.uint8)

    left = bound & ((1 << open_bits) - 1)
    for rest, wanted in ((0, 0), (left - 1, 0), (left, 1), ((1 << open_bits) - 1, 1)):
        assert noise.draw(Fixed(rest), 1).tolist() == [wanted]  # type: ignore[arg-type]


@pytest.mark.parametrize("deviation", [0.0, 3.9, 1.1e12, math.inf, math.nan])
def test_a_deviation_out_of_reach_is_refused(deviation: float) -> None:
    with pytest.raises(ParameterError, match="a deviation of 4 to 1e\\+12 steps"):
        discrete_gaussian(deviation)
