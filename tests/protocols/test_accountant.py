"""The accountant against what others have published, and its search against itself."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from math import comb, exp, inf, log

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from refused_rows import Row, refused
from scipy import optimize, stats

from moretta.errors import MissingExtra, ParameterError  # noqa: F401  (of refused rows)
from moretta.protocols.common.accountant import (
    MECHANISM,
    NEIGHBOURS,
    THEOREM,
    TRUST,
    TRUST_ALONE,
    Accountant,
    epsilon,
    interval,
    noise_for,
)
from moretta.protocols.common.lattice import Lattice, Privacy


def divergences(sigma: float, q: float, rounds: int) -> dict[int, float]:
    """Renyi divergences of whole orders: `rounds` times (3) of Mironov, Talwar, Zhang 2019, in closed form."""
    found = {}
    for order in range(2, 64):
        terms = [
            comb(order, k) * (1 - q) ** (order - k) * q**k * exp(min((k * k - k) / (2 * sigma**2), 700.0))
            for k in range(order + 1)
        ]
        found[order] = rounds * log(sum(terms)) / (order - 1)
    return found


# (sigma, q, rounds, the published epsilon at delta = 1e-5 by the moments accountant)
PUBLISHED = [
    (4.0, 0.01, 10_000, 1.26),  # Abadi et al., CCS 2016, section 3.2: q = 0.01, sigma = 4, T = 10000
    (1.3, 256 / 60_000, 20 * 60_000 // 256, 1.34),  # Bu, Dong, Long, Su, HDSR 2020, figure 4: 20 epochs of MNIST
]


@pytest.mark.parametrize(("sigma", "q", "rounds", "published"), PUBLISHED)
def test_epsilon_is_the_published_one_but_for_the_conversion(
    sigma: float, q: float, rounds: int, published: float
) -> None:
    delta, renyi = 1e-5, divergences(sigma, q, rounds)
    # The moments accountant's conversion, Theorem 2 of Abadi et al., of the same divergences. Its authors took the
    # orders up to 33, and print two digits.
    moments = min(value + log(1 / delta) / (order - 1) for order, value in renyi.items())
    assert moments == pytest.approx(published, abs=0.01)
    # Canonne, Kamath, Steinke 2020, Proposition 12, is never worse, and privacy-loss distributions are better still.
    better = {
        order: value + log((order - 1) / order) - (log(delta) + log(order)) / (order - 1)
        for order, value in renyi.items()
    }
    assert 0.85 * min(better.values()) < epsilon(sigma, delta, q, rounds) < 0.97 * min(better.values()) < moments


@pytest.mark.parametrize(
    ("sigma", "q", "rounds"), [(1.0, 0.1, 100), (0.8, 0.1, 40), (4.0, 0.01, 10_000), (0.5, 1e-3, 100), (1.0, 1.0, 40)]
)
def test_epsilon_is_dp_accountings_by_hand(sigma: float, q: float, rounds: int) -> None:
    gaussian = dp_accounting.GaussianDpEvent(sigma)
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(q, gaussian), rounds)
    ours = epsilon(sigma, 1e-5, q, rounds)
    by_hand = PLDAccountant(value_discretization_interval=interval(sigma, q)).compose(event).get_epsilon(1e-5)
    assert ours == pytest.approx(by_hand, rel=1e-9)
    finer = PLDAccountant(value_discretization_interval=interval(sigma, q) / 4).compose(event).get_epsilon(1e-5)
    assert finer * (1 - 1e-12) <= ours < 1.003 * finer  # a bound from above, and a close one


@pytest.mark.parametrize(("sigma", "rounds"), [(1.0, 1), (2.0, 30), (0.7, 4)])
def test_epsilon_of_whole_sums_is_the_analytic_gaussians(sigma: float, rounds: int) -> None:
    """Balle and Wang, ICML 2018, Theorem 8, solved for epsilon: exact, by other code than a grid's."""
    sensitivity = math.sqrt(rounds) / sigma

    def delta(found: float) -> float:
        first = stats.norm.cdf(sensitivity / 2 - found / sensitivity)
        return float(first - exp(found) * stats.norm.cdf(-sensitivity / 2 - found / sensitivity))

    wanted = optimize.brentq(lambda found: delta(found) - 1e-5, 0.0, 90.0)
    assert wanted <= epsilon(sigma, 1e-5, 1.0, rounds) < 1.001 * wanted


def test_epsilons_that_bound_nothing_are_renyi_bounds() -> None:
    renyi = [rounds_ + log(1 - 1 / order) - log(1e-5 * order) / (order - 1) for order, rounds_ in
             ((order, 1000 * order / 0.5) for order in range(2, 256))]  # fmt: skip
    assert epsilon(0.5, 1e-5, 1.0, 1000) == pytest.approx(min(renyi), rel=1e-9)


def test_more_noise_fewer_rounds_and_smaller_lots_cost_less() -> None:
    usual = epsilon(1.0, 1e-5, 0.1, 100)
    assert epsilon(1.1, 1e-5, 0.1, 100) < usual < epsilon(0.9, 1e-5, 0.1, 100)
    assert epsilon(1.0, 1e-5, 0.1, 90) < usual < epsilon(1.0, 1e-5, 0.1, 110)
    assert epsilon(1.0, 1e-5, 0.09, 100) < usual < epsilon(1.0, 1e-5, 0.11, 100)
    assert epsilon(1.0, 1e-4, 0.1, 100) < usual < epsilon(1.0, 1e-6, 0.1, 100)
    assert epsilon(0.0, 1e-5, 0.1, 100) == inf


@pytest.mark.parametrize("wanted", [0.5, 2.0, 8.0])
@pytest.mark.parametrize(("q", "rounds"), [(0.01, 1000), (1.0, 10)])
def test_the_noise_for_an_epsilon_keeps_to_it_and_is_no_more_than_needed(wanted: float, q: float, rounds: int) -> None:
    sigma = noise_for(wanted, 1e-5, q, rounds)
    assert epsilon(sigma, 1e-5, q, rounds) <= wanted < epsilon(sigma - 1e-5, 1e-5, q, rounds)


@refused("accountant.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


def test_the_facts_say_towards_whom_and_what_is_left_out() -> None:
    privacy = Privacy(noise=2.0, clip=1.0, delta=1e-5)
    clear = Accountant(privacy, 0.1).facts(50)
    assert clear == {
        "noise_multiplier": 2.0, "unit": "row", "mechanism": MECHANISM["row"], "delta": 1e-5,
        "neighbours": NEIGHBOURS["row"], "trust": TRUST_ALONE, "theorem": THEOREM,
        "sampling_rate": 0.1, "releases": 50.0, "noise_silos": 1.0, "epsilon": epsilon(2.0, 1e-5, 0.1, 50),
    }  # fmt: skip
    shared = Accountant(replace(privacy, sharers=4), 0.1, "the means").facts(50)
    assert (shared["noise_silos"], shared["trust"]) == (4, TRUST)
    assert shared["epsilon"] == clear["epsilon"]
    # One of four silos knows a quarter of the variance, two half of it, and all but one three quarters.
    assert shared["epsilon_to_silos"] == epsilon(2.0 * 0.75**0.5, 1e-5, 0.1, 50)
    assert shared["epsilon_with_noise_of_2"] == epsilon(2.0 * 0.5**0.5, 1e-5, 0.1, 50)
    assert shared["epsilon_with_noise_of_1"] == epsilon(2.0 * 0.25**0.5, 1e-5, 0.1, 50)
    assert [key for key in Accountant(replace(privacy, sharers=2), 0.1).facts(5) if "with_noise" in key] == []
    assert shared["epsilon_leaves_out"] == "the means"
    stated = Accountant(privacy, 0.1).facts(50, {"w": (40, 4), "b": ()})
    assert stated == clear | Lattice.of(privacy, 161).facts()
    assert Accountant(Privacy(0.0, 1.0, 1e-5), 0.1).facts(50)["epsilon"] == "unbounded"
    assert Accountant(privacy, 0.1).facts(0)["epsilon"] == 0.0


def test_without_the_extra_it_says_which_one_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(MissingExtra, match=r"pip install 'moretta\[dp\]'"):
        Accountant(Privacy(1.0, 1.0, 1e-5), 0.1)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("rate", [0.001, 0.05, 0.7, 1.0])
def test_what_is_spent_on_the_way_is_the_epsilon_of_the_end(sigma: float, rate: float) -> None:
    made = Accountant(Privacy(sigma, 1.0, 1e-5, 3), rate)
    for releases in (1, 1000):
        assert made.spent(releases) == pytest.approx(made.facts(releases)["epsilon"], rel=1e-9)
    assert made.spent(0) == 0.0


def test_without_noise_what_is_spent_is_unbounded() -> None:
    assert Accountant(Privacy(0.0, 1.0, 1e-5, 3), 0.1).spent(1) == "unbounded"
