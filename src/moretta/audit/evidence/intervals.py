"""Confidence intervals of 95 %, and scores that several attacks share.

By chance alone, an interval may lie above chance in at most 2.5 % of cases, for any number of values. If n values lie
on either side of chance with even odds, all lie on one side in 2^(1 - n) of cases. So the order of fewer than `FEWEST`
= 6 values shows nothing, and neither does a bootstrap of them. The interval is then the whole range, except for
relative errors, whose size itself is informative (`of_errors`).

scipy and scikit-learn are imported where they are used: an attacker's process imports this with its attack.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence, Set

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array

Interval = tuple[float, float]
Floats = NDArray[np.float64]

SIDE = 0.025  # of chance, below an interval and above it
FEWEST = 6  # values, of which all lie on one side of their median in 2 / 64 of cases
FEW_RANKS = 8  # in the smaller of two groups: up to here the law of ranks is exact
DENSEST = 2.0  # the most for the density of a guessed number's logarithm (`of_errors`)
TINY = 1e-300


def of_rate(hits: int, tries: int) -> Interval:
    """Return Clopper and Pearson's interval of a rate of independent tries, (0, 1) without tries."""
    from scipy import stats

    if not tries:
        return 0.0, 1.0
    interval = stats.binomtest(hits, tries).proportion_ci(1 - 2 * SIDE, "exact")
    return float(interval.low), float(interval.high)


def least_epsilon(pairs: int, guessed: int, right: int, delta: float) -> float:
    """Return an epsilon below which, at this delta, so many right guesses of one run have a chance of 5 % or less.

    pairs: of which one at random was trained on. guessed, right: the number of guesses, and of correct ones.

    Source: one training run, whose pairs are independent coins: Steinke, Nasr, Jagielski (NeurIPS 2023), Theorem 5.2.
    Epsilon is of a row that is added or removed, so for one that replaces another it is 2 epsilon, with (1 + e^epsilon)
    delta.
    """
    from scipy import stats

    def chance(epsilon: float) -> float:
        rate = 1.0 / (1.0 + math.exp(-2.0 * epsilon))
        below = np.cumsum(stats.binom.pmf(right - np.arange(1, right + 1), guessed, rate)) / np.arange(1, right + 1)
        both = (1.0 + math.exp(epsilon)) * delta
        return float(stats.binom.sf(right - 1, guessed, rate) + 2 * pairs * both * below.max(initial=0.0))

    least, most = 0.0, 32.0
    while most - least > 1e-4:
        middle = (least + most) / 2
        least, most = (middle, most) if chance(middle) <= 2 * SIDE else (least, middle)
    return least


def of_mean(values: Array, low: float = -math.inf, high: float = math.inf) -> Interval:
    """Return Student's interval of a mean, within a range.

    One value, or fewer than `FEWEST` equal ones, have the whole range as interval. Such values are counts, not
    measurements, and so few agree by luck.

    Args:
        low, high: The ends of the range.
    """
    from scipy import stats

    values = np.asarray(values, dtype=np.float64)
    few = values.size < FEWEST and (values.size < 2 or not np.ptp(values))
    if few:
        return low, high
    mean = float(values.mean())
    spread = float(stats.sem(values)) * float(stats.t.ppf(1 - SIDE, values.size - 1))
    return max(low, mean - spread), min(high, mean + spread)


def bootstrapped(
    values: Array, statistic: Callable[[Array], float], draws: int = 2000, low: float = 0.0, high: float = 1.0
) -> Interval:
    """Return the percentile interval of a statistic of rows drawn again with replacement.

    Args:
        values: [rows, ...].
        draws: The number of draws of all rows.
        low, high: The range of the statistic, which is the interval for fewer than `FEWEST` rows.

    Source:
        Percentiles that make it Student's for a mean: Hesterberg, The American Statistician 2015, section 5.3.
    """
    from scipy import stats

    count = len(values)
    if count < FEWEST:
        return low, high
    generator = np.random.Generator(np.random.PCG64(0))
    drawn = [statistic(values[generator.integers(0, count, count)]) for _ in range(draws)]
    side = float(stats.norm.cdf(math.sqrt(count / (count - 1)) * stats.t.ppf(SIDE, count - 1)))
    least, most = np.quantile(drawn, [side, 1 - side])
    return float(least), float(most)


def of_median(values: Array, low: float, high: float) -> Interval:
    """Return the order statistics between which a median lies, of any law.

    They are the k-th from either side, for the largest k with P(fewer than k of n below the median) <= 2.5 %.

    Args:
        low, high: The interval for fewer than `FEWEST` values.
    """
    from scipy import stats

    if len(values) < FEWEST:
        return low, high
    place, ordered = int(stats.binom.ppf(SIDE, len(values), 0.5)), np.sort(np.asarray(values, dtype=np.float64))
    return float(ordered[place - 1]), float(ordered[-place])


def of_errors(errors: Array, guesses: Array | float = 1.0) -> Interval:
    """Return the interval of the median relative error of units that were drawn anew, such as keys of rounds.

    For `FEWEST` units or more the interval is `of_median` of errors over guesses. For fewer it follows from the errors'
    size. A claim without knowledge of a true value has at most a part e of a guess's error with a chance of at most 2
    e. Its sign is right in one case of two. Its logarithm must be within e of the true one, which has a density of
    `DENSEST` or less. In more dimensions the chance is less. So the largest of n errors is below e with a chance of at
    most (2 e)^n. Errors of a scale s have s <= 2 max / 0.025^(1/n) with 97.5 %, and the interval is from 0 to that.

    Args:
        errors: The relative error of each unit, at least 0.
        guesses: The error of a guess, of each unit or one for all; guessing 0 has 1.
    """
    errors = np.asarray(errors, dtype=np.float64)
    guesses = np.broadcast_to(np.asarray(guesses, dtype=np.float64), errors.shape)
    parts, scale = errors / np.maximum(guesses, TINY), float(np.median(guesses))
    few = 0.0, DENSEST * float(parts.max()) / SIDE ** (1 / len(parts))
    low, high = of_median(parts, *few)
    middle = float(np.median(errors))
    return min(low * scale, middle), max(high * scale, middle)


def of_gain(squares: Array) -> Interval:
    """Return the interval of 1 - squared error of units / that of a guess, at least 0.

    Units are drawn again (`bootstrapped`). If they are few, the size of errors decides (`of_errors`).

    Args:
        squares: The squared error of each unit and of a guess at it, [units, 2].
    """
    if len(squares) >= FEWEST:
        return bootstrapped(squares, gain)
    errors, guess = np.sqrt(np.asarray(squares, dtype=np.float64)).T
    low, high = of_errors(errors / np.maximum(guess, TINY))
    return max(0.0, 1.0 - high**2), max(0.0, 1.0 - low**2)


def gain(squares: Array) -> float:
    """Return 1 - squared error of units / that of a guess, at least 0. squares: both, [units, 2]."""
    error, guess = np.asarray(squares, dtype=np.float64).sum(axis=0)
    return max(0.0, 1.0 - float(error) / float(guess)) if guess else float(error == 0)


def auc(members: Array, others: Array) -> tuple[float, Interval]:
    """Return the area under the ROC curve of scores, higher for members, and its interval.

    The interval holds the areas t with |area - t| <= 1.96 sqrt(V(t)). V is at t, not at the area of the scores, so the
    interval has a width also at areas of 0 and 1. A normal law is too sure of few scores: if ranks as far apart have a
    chance above 2.5 %, the interval includes 1/2.

    Source:
        Newcombe, Statistics in Medicine 2006, method 5; V by Hanley and McNeil.
    """
    from sklearn.metrics import roc_auc_score

    labels = np.concatenate([np.ones(len(members)), np.zeros(len(others))])
    area = float(roc_auc_score(labels, np.concatenate([members, others])))
    low, high = (_limit(area, end, len(members), len(others)) for end in (0.0, 1.0))
    if _by_ranks(members, others) > SIDE:
        low = min(low, 0.5)
    if _by_ranks(others, members) > SIDE:
        high = max(high, 0.5)
    return area, (low, high)


def _limit(area: float, end: float, n: int, m: int) -> float:
    """Return the true area nearest to an end of the range."""
    from scipy import optimize

    half = (n + m) / 2 - 1

    def over(true: float) -> float:
        variance = true * (1 - true) * (1 + half * ((1 - true) / (2 - true) + true / (1 + true))) / (n * m)
        return (area - true) ** 2 - 1.96**2 * max(variance, 0.0)

    if area == end:
        return end
    # At the area itself it is not above 0, unless that is an end too: then it is 0 there, and a little inside below.
    inside = area + (end - area) * 1e-9
    return float(optimize.brentq(over, inside, end)) if over(end) > 0 else end


def _by_ranks(higher: Array, lower: Array) -> float:
    """Return the chance of ranks as high, of scores of one law (Mann and Whitney); ties count against the claim."""
    from scipy import stats

    if min(len(higher), len(lower)) > FEW_RANKS:
        with np.errstate(divide="ignore", invalid="ignore"):
            p_value = float(stats.mannwhitneyu(higher, lower, alternative="greater", method="asymptotic").pvalue)
        return 1.0 if math.isnan(p_value) else p_value
    scores = np.concatenate([higher, lower])
    first = np.arange(len(scores)) < len(higher)
    ranks = np.empty(len(scores))
    ranks[np.lexsort((~first, scores))] = np.arange(len(scores))
    return float(stats.mannwhitneyu(ranks[first], ranks[~first], alternative="greater", method="exact").pvalue)


def units(batches: Sequence[Set[Hashable]], part: float = 0.0) -> NDArray[np.int64]:
    """Return the number of each batch's unit, from 0: a repeated success on the same rows is no new evidence.

    Args:
        batches: The rows of each batch.
        part: Two batches that share more than this part of the larger one's rows, 0 to 1, are of one unit. So are two
            that both do so with others of that unit.
    """
    from scipy.sparse import csgraph

    shared = [[len(a & b) > part * max(len(a), len(b)) for b in batches] for a in batches]
    return np.asarray(csgraph.connected_components(np.array(shared), directed=False)[1], dtype=np.int64)


def relative_error(claimed: Array, true: Array) -> float:
    """Return |claimed - true| / |true| in the Euclidean norm, float64; 0 / 0 is 0."""
    a, b = (np.asarray(array, dtype=np.float64).ravel() for array in (claimed, true))
    scale = float(np.linalg.norm(b))
    miss = float(np.linalg.norm(a - b))
    return miss / scale if scale else float(miss > 0)


def flat(values: Mapping[str, Array]) -> Array:
    """Return named arrays end to end, float64, by the order of their names."""
    return np.concatenate([np.asarray(values[name], dtype=np.float64).ravel() for name in sorted(values)])


def recovered(errors: Array | float) -> Floats:
    """Return 1 - relative error, at least 0, the score of a guess of nothing."""
    return np.maximum(0.0, 1.0 - np.asarray(errors, dtype=np.float64))


def kept(interval: Interval) -> Interval:
    """Return the interval of `recovered` of that of an error."""
    low, high = interval
    return float(recovered(high)), float(recovered(low))


def of_units(errors: Array, guesses: Array | float = 1.0) -> tuple[float, float, Interval]:
    """Return score, chance and interval of 1 - relative error, median over units. Arguments as of `of_errors`."""
    score, chance = (float(recovered(float(np.median(values)))) for values in (errors, guesses))
    return score, chance, kept(of_errors(errors, guesses))


def to_error(error: float) -> str:
    """Return an error in words: "exactly", or "to a relative error of"."""
    return f"to a relative error of {error:.1e}" if error else "exactly"
