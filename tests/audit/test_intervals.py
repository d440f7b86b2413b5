"""Intervals and shared scores against known values, and how often they see something where there is nothing."""

import math

import numpy as np
import pytest

from moretta.audit.evidence import intervals

FEW = (1, 2, 3, 6)
RUNS = 300
# An interval may lie above chance in 2.5 % of cases: 7.5 of 300, and three deviations of 2.7 more.
MOST = 15


def generator(seed=1):
    return np.random.Generator(np.random.PCG64(seed))


@pytest.mark.parametrize(
    ("hits", "tries", "low", "high"),
    # Of none and of all in closed form: 1 - 0.025^(1/n) and 0.025^(1/n). 8 of 10: Clopper and Pearson's tables.
    [(0, 10, 0.0, 0.3085), (10, 10, 0.6915, 1.0), (8, 10, 0.4439, 0.9748), (5, 10, 0.1871, 0.8129)],
)
def test_rate(hits, tries, low, high):
    assert intervals.of_rate(hits, tries) == pytest.approx((low, high), abs=1e-4)


def test_rate_of_nothing_is_anything():
    assert intervals.of_rate(0, 0) == (0.0, 1.0)


def test_mean():
    # mean 2, deviation 1, n = 3: 2 +- 4.3027 / sqrt(3), 4.3027 Student's 97.5 % quantile of 2 degrees of freedom
    assert intervals.of_mean(np.array([1.0, 2.0, 3.0])) == pytest.approx((-0.48414, 4.48414), abs=1e-4)
    assert intervals.of_mean(np.array([1.0, 2.0, 3.0]), 0.0, 4.0) == (0.0, 4.0)


def test_mean_of_one_value_or_of_few_that_agree_is_anything():
    assert intervals.of_mean(np.array([3.0])) == (-np.inf, np.inf)
    assert intervals.of_mean(np.ones(3), 0.0, 1.0) == (0.0, 1.0)
    assert intervals.of_mean(np.ones(6), 0.0, 1.0) == (1.0, 1.0)


def test_bootstrap_covers_the_mean():
    draw, covered = generator(), 0
    for _ in range(200):
        low, high = intervals.bootstrapped(draw.standard_normal(50), lambda v: float(v.mean()), draws=200)
        covered += low <= 0.0 <= high
    # Of 200 intervals of 93 to 95 %, as those of 50 values are: three deviations, 0.017 each, below.
    assert covered / 200 > 0.88
    assert covered < 200


def test_bootstrap_of_a_constant_is_the_constant_and_of_few_rows_anything():
    assert intervals.bootstrapped(np.ones(6), lambda v: float(v.mean()), draws=20) == (1.0, 1.0)
    assert intervals.bootstrapped(np.ones(5), lambda v: float(v.mean()), draws=20, low=-1.0) == (-1.0, 1.0)


def test_median():
    # P(fewer than 2 of 10 below the median) = 11 / 1024, fewer than 3: 56 / 1024. So the second from either side.
    assert intervals.of_median(np.arange(10.0), -1.0, 99.0) == (1.0, 8.0)
    assert intervals.of_median(np.arange(6.0), -1.0, 99.0) == (0.0, 5.0)
    assert intervals.of_median(np.arange(5.0), -1.0, 99.0) == (-1.0, 99.0)


def test_few_errors_go_by_their_size():
    # 2 max / 0.025^(1/n)
    assert intervals.of_errors(np.array([0.001])) == pytest.approx((0.0, 0.08))
    assert intervals.of_errors(np.array([0.01, 0.02]), 0.5) == pytest.approx((0.0, 0.04 / 0.025**0.5))
    assert intervals.of_errors(np.array([0.1] * 6 + [0.2])) == pytest.approx((0.1, 0.2))
    # An exact leak of one round is no luck, and one that is a third off may be.
    assert intervals.kept(intervals.of_errors(np.array([1e-15])))[0] > 0.999999
    assert intervals.kept(intervals.of_errors(np.array([0.33])))[0] == 0.0


def by_guess(draw, count):
    """Return errors of a claim of nothing: of a sign and a size as keys have them, which is known, and no more."""
    true = np.exp(draw.uniform(np.log(0.7), np.log(1.4), count)) * draw.choice([-1.0, 1.0], count)
    return np.abs(true - 1.0) / np.abs(true)


@pytest.mark.parametrize("count", FEW)
def test_nothing_is_seen_where_there_is_nothing(count):
    draw = generator(count)
    seen = dict.fromkeys(("mean", "median", "errors", "gain", "rate"), 0)
    for _ in range(RUNS):
        values = draw.standard_normal(count)
        seen["mean"] += intervals.of_mean(values)[0] > 0.0
        seen["median"] += intervals.of_median(values, -np.inf, np.inf)[0] > 0.0
        errors = by_guess(draw, count)
        seen["errors"] += intervals.kept(intervals.of_errors(errors))[0] > 0.0
        if count < intervals.FEWEST:
            seen["gain"] += intervals.of_gain(np.column_stack([errors**2, np.ones(count)]))[0] > 0.0
        seen["rate"] += intervals.of_rate(int((values > 0).sum()), count)[0] > 0.5
    assert max(seen.values()) <= MOST, seen


@pytest.mark.parametrize("count", FEW)
def test_bootstrap_sees_nothing_where_there_is_nothing(count):
    draw, runs, seen = generator(count), 200, 0
    for _ in range(runs):
        low, _ = intervals.bootstrapped(draw.standard_normal(count), lambda v: float(v.mean()), draws=200, low=-1.0)
        seen += low > 0.0
    assert seen <= 0.025 * runs + 3 * np.sqrt(0.025 * 0.975 * runs)


@pytest.mark.parametrize("count", FEW)
@pytest.mark.parametrize("ties", [False, True])
def test_area_sees_nothing_where_there_is_nothing(count, ties):
    draw, runs, seen = generator(count), 100, 0
    for _ in range(runs):
        both = [np.round(one) if ties else one for one in draw.standard_normal((2, count))]
        seen += intervals.auc(*both)[1][0] > 0.5
    assert seen <= 0.025 * runs + 3 * np.sqrt(0.025 * 0.975 * runs)


def test_area_under_the_curve():
    assert intervals.auc(np.array([0.0]), np.array([1.0]))[0] == 0.0
    assert intervals.auc(np.ones(4), np.ones(4))[0] == 0.5  # ties count half
    area, (low, high) = intervals.auc(np.array([1.0, 3.0]), np.array([0.0, 2.0]))
    assert area == 0.75  # three of four pairs
    assert low < 0.5 < area < high <= 1.0


def test_area_of_one_has_a_width():
    # One of each: (1 - t)^2 = 1.96^2 t (1 - t), so t = 1 / (1 + 1.96^2).
    assert intervals.auc(np.array([1.0]), np.array([0.0])) == (1.0, pytest.approx((1 / (1 + 1.96**2), 1.0)))
    # 1 of 6 orders of two and two: nothing to go by. Of ten and ten, 1 of 184 756.
    assert intervals.auc(np.array([2.0, 3.0]), np.array([0.0, 1.0]))[1][0] <= 0.5
    low, high = intervals.auc(np.arange(10.0) + 10, np.arange(10.0))[1]
    assert 0.6 < low < 1.0
    assert high == 1.0
    assert intervals.auc(np.arange(10.0), np.arange(10.0) + 10) == (0.0, pytest.approx((0.0, 1.0 - low)))


def test_area_of_many_is_as_hanley_and_mcneil_have_it():
    draw = generator()
    area, (low, high) = intervals.auc(draw.standard_normal(200) + 0.5, draw.standard_normal(200))
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    deviation = np.sqrt((area * (1 - area) + 199 * (q1 + q2 - 2 * area**2)) / 200**2)
    # The two differ by terms of the order of the deviation squared.
    assert low == pytest.approx(area - 1.96 * deviation, abs=5 * deviation**2)
    assert high == pytest.approx(area + 1.96 * deviation, abs=5 * deviation**2)


def test_gain():
    assert intervals.gain(np.array([[1.0, 2.0], [0.0, 2.0]])) == 0.75
    assert intervals.of_gain(np.tile([1.0, 4.0], (6, 1))) == (0.75, 0.75)
    # two units, errors of a hundredth of the guess's: 1 - (2 * 0.01 / 0.025^(1/2))^2
    low, high = intervals.of_gain(np.array([[1e-4, 1.0]] * 2))
    assert (low, high) == pytest.approx((1 - 4e-4 / 0.025, 1.0))
    assert intervals.of_gain(np.array([[0.5, 1.0]])) == (0.0, 1.0)


def test_relative_error_and_what_is_recovered():
    assert intervals.relative_error(np.array([3.0, 0.0]), np.array([3.0, 4.0])) == pytest.approx(0.8)
    assert intervals.relative_error(np.zeros(2), np.zeros(2)) == 0.0
    assert intervals.relative_error(np.ones(2), np.zeros(2)) == 1.0
    assert list(intervals.recovered(np.array([0.25, 3.0]))) == [0.75, 0.0]


def test_an_error_in_words():
    assert intervals.to_error(0.0) == "exactly"
    assert intervals.to_error(0.012) == "to a relative error of 1.2e-02"


def test_batches_that_share_rows_are_one_unit():
    batches = [{1, 2}, {3, 4}, {2, 5}, {5, 6}, {7}]
    assert intervals.units(batches).tolist() == [0, 1, 0, 0, 2]  # the first and the fourth by way of the third
    assert intervals.units(batches, 0.5).tolist() == [0, 1, 2, 3, 4]  # none shares more than half
    assert intervals.units([{1, 2, 3}, {2, 3, 4}, {3}, {1, 2, 3}], 0.5).tolist() == [0, 0, 1, 0]


def test_guesses_of_coins_bound_epsilon_from_below():
    assert intervals.least_epsilon(100, 100, 50, 1e-5) == 0.0
    rate = 0.05 ** (1 / 60)  # of one guess, where 60 right ones have a chance of 5 %
    assert intervals.least_epsilon(100, 60, 60, 0.0) == pytest.approx(math.log(rate / (1 - rate)) / 2, abs=2e-4)
    assert intervals.least_epsilon(100, 60, 60, 1e-3) < intervals.least_epsilon(100, 60, 60, 0.0)


def test_the_bound_holds_of_randomised_response():
    """Which of two rows was there is answered rightly with a chance of e^(2 epsilon) / (1 + e^(2 epsilon))."""
    draw, epsilon, tries = np.random.Generator(np.random.PCG64(0)), 0.7, 400
    rate = 1 / (1 + math.exp(-2 * epsilon))
    above = sum(intervals.least_epsilon(80, 80, int(draw.binomial(80, rate)), 1e-6) > epsilon for _ in range(tries))
    assert above <= 0.05 * tries + 3 * math.sqrt(0.05 * tries)
