from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from graph_risks import Risks, risks, table
from hypothesis import given
from hypothesis import strategies as st
from refused_rows import Row, refused

from moretta.errors import ParameterError
from moretta.secure_aggregation import graph
from moretta.secure_aggregation.graph import Plan, connected, neighbourhoods, plan, tail

SEED = bytes(range(32))


def names(count: int) -> list[str]:
    return [f"s{number}" for number in range(count)]


@pytest.mark.parametrize(("count", "degree"), [(5, 2), (6, 4), (7, 4), (51, 26), (100, 40), (101, 2)])
def test_a_graph_is_regular_symmetric_and_connected(count: int, degree: int) -> None:
    circle = neighbourhoods(names(count), degree, SEED)
    assert set(circle) == set(names(count))
    for silo, peers in circle.items():
        assert len(peers) == degree
        assert silo not in peers
        assert all(silo in circle[peer] for peer in peers)
    assert connected(circle, circle)


@pytest.mark.parametrize(("count", "degree"), [(1, None), (2, None), (6, None), (6, 5), (6, 8), (7, 6)])
def test_a_complete_graph(count: int, degree: int | None) -> None:
    everyone = set(names(count))
    assert neighbourhoods(names(count), degree, SEED) == {silo: everyone - {silo} for silo in everyone}


@given(st.permutations(names(23)))
def test_every_party_gets_the_same(order: list[str]) -> None:
    assert neighbourhoods(order, 6, SEED) == neighbourhoods(names(23), 6, SEED)


def test_a_graph_that_stays() -> None:
    # Two releases that disagreed on the graph could not sum together: the ring is as it was when first drawn.
    circle = neighbourhoods("abcdefg", 2, SEED)
    ring = "abcfdeg"
    assert circle == {silo: {ring[place - 1], ring[(place + 1) % 7]} for place, silo in enumerate(ring)}


def test_places_are_uniform_over_seeds() -> None:
    seeds = [number.to_bytes(32, "big") for number in range(3000)]
    beside = [neighbourhoods(names(9), 2, seed)["s0"] for seed in seeds]
    # Each of 8 others is a neighbour with chance 1/4: 750 expected, deviation sqrt(3000 3/16) = 23.7; six of them.
    for other in names(9)[1:]:
        assert abs(sum(other in peers for peers in beside) - 750) < 6 * 23.8


@refused("neighbours_graph.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


@pytest.mark.parametrize(
    ("survivors", "whole"),
    [
        (set(), True),
        ({3}, True),
        ({3, 4}, True),
        ({3, 13}, False),
        (set(range(0, 20, 2)), True),
        (set(range(0, 20, 3)), False),
        ({0, 2, 4, 6}, True),  # one gap, however wide, leaves a path
        ({0, 2, 5, 6}, False),
    ],
)
def test_survivors_hang_together_unless_two_gaps_part_them(survivors: set[int], whole: bool) -> None:
    ring = {str(place): {str((place + step) % 20) for step in (-2, -1, 1, 2)} for place in range(20)}
    assert connected(ring, {str(place) for place in survivors}) == whole


@given(st.sets(st.integers(0, 29), min_size=2), st.sampled_from([2, 4, 8]))
def test_parts_are_apart_where_two_arcs_are_empty(survivors: set[int], degree: int) -> None:
    """The lemma under `split`: parted survivors have two gaps of k/2 places or more, and otherwise none are parted."""
    half = degree // 2
    ring = {str(place): {str((place + s) % 30) for s in range(-half, half + 1) if s} for place in range(30)}
    places = sorted(survivors)
    gaps = [(after - before - 1) % 30 for before, after in zip(places, [*places[1:], places[0]], strict=True)]
    assert connected(ring, {str(place) for place in places}) == (sum(gap >= half for gap in gaps) < 2)


@pytest.mark.parametrize("population", [1, 2, 5, 8])
def test_tails_count_every_draw(population: int) -> None:
    for marked, drawn in itertools.product(range(population + 1), repeat=2):
        counts = [sum(one < marked for one in draw) for draw in itertools.combinations(range(population), drawn)]
        for least in range(-1, drawn + 2):
            expected = Fraction(sum(count >= least for count in counts), len(counts))
            assert tail(population, marked, drawn, least) == expected
        for bits in (0, 1, 3):
            most = graph._most(population, marked, drawn, bits)
            assert population * tail(population, marked, drawn, most + 1) <= Fraction(1, 2**bits)
            assert most == 0 or population * tail(population, marked, drawn, most) > Fraction(1, 2**bits)


@pytest.mark.parametrize(
    ("silos", "weak", "corrupt", "dropped", "seen"),
    [(40, Plan(8, 6), 3, 4, ("both", "retry")), (30, Plan(4, 5), 4, 0, ("split",))],
)
def test_bounds_hold_in_simulated_graphs(
    silos: int, weak: Plan, corrupt: int, dropped: int, seen: tuple[str, ...]
) -> None:
    """Plans so weak that all is seen to happen: no more often than bounded, nor so seldom that a bound says nothing."""
    assert weak.degree is not None
    t, rounds, rng = weak.threshold, 4000, np.random.default_rng(3)
    bad, happened = set(names(corrupt)), dict.fromkeys(("both", "split", "retry"), 0)
    for number in range(rounds):
        circle = neighbourhoods(names(silos), weak.degree, number.to_bytes(32, "big"))
        closed = [peers | {silo} for silo, peers in circle.items()]
        lost = {f"s{place}" for place in rng.choice(silos, dropped, replace=False)}
        honest = set(circle) - lost - bad
        known = all(len((circle[silo] | {silo}) & (honest | bad)) >= t for silo in honest)  # the server may have asked
        happened["both"] += any(len(members & bad) >= 2 * t - len(members) for members in closed)
        happened["split"] += known and not connected(circle, honest)
        happened["retry"] += any(len(members - lost) < t for members in closed)
    bounds = risks(silos, weak, corrupt / silos, dropped / silos)
    for what, times in happened.items():
        bound, rate = getattr(bounds, what), times / rounds
        assert rate <= bound + 6 * math.sqrt(bound * (1 - bound) / rounds)  # six deviations
    for what in seen:
        assert 0.1 * getattr(bounds, what) < happened[what] / rounds < 1.0
        assert getattr(bounds, what) < 0.5


def test_one_neighbourhood_is_as_the_law_says() -> None:
    rounds, marked = 4000, set(names(6))
    circles = (neighbourhoods(names(24), 6, number.to_bytes(32, "big")) for number in range(rounds))
    seen = sum(len((circle["s9"] | {"s9"}) & marked) >= 3 for circle in circles)
    # The silo itself is not marked; its 6 neighbours are drawn from 23.
    exact = float(tail(23, 6, 6, 3))
    assert abs(seen / rounds - exact) < 6 * math.sqrt(exact * (1 - exact) / rounds)


@pytest.mark.parametrize(("silos", "threshold"), [(2, 2), (3, 3), (4, 3), (5, 4), (10, 7), (50, 34)])
def test_small_cohorts_are_complete(silos: int, threshold: int) -> None:
    assert plan(silos) == plan(silos, 0.0, 0.0) == Plan(None, threshold)


@pytest.mark.parametrize("rates", [(0.1, 0.1), (0.05, 0.05), (0.2, 0.1), (0.1, 0.2), (0.0, 0.1), (0.1, 0.0)])
@pytest.mark.parametrize("silos", [51, 64, 100, 333, 1000])
def test_a_plan_keeps_its_bounds_and_two_neighbours_fewer_do_not(silos: int, rates: tuple[float, float]) -> None:
    def kept(degree: int, threshold: int) -> bool:
        worth = risks(silos, Plan(degree, threshold), *rates)
        return max(worth.both, worth.split) <= 2.0**-40 and worth.retry <= 2.0**-20

    made = plan(silos, *rates)
    assert made.degree is not None
    assert made.degree < silos - 1
    assert made.degree + 1 < 2 * made.threshold
    assert kept(made.degree, made.threshold)
    fewer = made.degree - 2
    assert not any(kept(fewer, threshold) for threshold in range(fewer // 2 + 1, fewer + 2) if fewer >= 2)


def test_plans_grow_with_the_rates_and_slowly_with_the_silos() -> None:
    def degrees(*cases: tuple[int, float, float]) -> list[int]:
        return [plan(*case).degree or case[0] - 1 for case in cases]

    for grown in (
        degrees(*((silos, 0.1, 0.1) for silos in (51, 100, 200, 500, 1000, 10_000, 100_000))),
        degrees(*((1000, rate, 0.1) for rate in (0.0, 0.05, 0.1, 0.2, 0.3))),
        degrees(*((1000, 0.1, rate) for rate in (0.0, 0.05, 0.1, 0.2, 0.3))),
    ):
        assert grown == sorted(grown)
    assert degrees((100_000, 0.1, 0.1))[0] < 1.3 * degrees((10_000, 0.1, 0.1))[0]


def test_a_complete_graph_where_no_other_does() -> None:
    # 21 of 61 silos corrupt and 19 lost: 42 left are just more than (61 + 21) / 2.
    made = plan(61, 21 / 61, 19 / 61)
    assert made == Plan(None, 42)
    worth = risks(61, made, 21 / 61, 19 / 61)
    assert (worth.both, worth.split, worth.retry) == (0.0, 0.0, 0.0)
    with pytest.raises(ParameterError, match="with 21 of 61 silos corrupt at most 19 may drop out, got 20"):
        plan(61, 21 / 61, 20 / 61)
    with pytest.raises(ParameterError, match="with 61 of 61 silos corrupt at most 0 may drop out"):
        plan(61, 0.99, 0.0)


def test_the_worth_of_a_complete_graph_is_certain() -> None:
    assert risks(30, plan(30), 0.3, 0.3) == Risks(0.0, 0.0, 0.0)
    assert risks(30, plan(30), 0.4, 0.4) == Risks(1.0, 0.0, 1.0)


def test_what_is_given_is_taken() -> None:
    assert plan(7, degree=4) == Plan(4, 4)
    assert plan(7, degree=6) == Plan(None, 5)  # 6 others are all there are
    assert plan(7, degree=4, threshold=3) == Plan(4, 3)
    assert plan(7, threshold=4) == Plan(None, 4)
    assert plan(1000, threshold=80) == Plan(plan(1000).degree, 80)


def test_the_table_is_of_plans() -> None:
    rows = table((10, 51, 100), ((0.1, 0.1),))
    assert rows == [(10, 0.1, 0.1, 9, 7), (51, 0.1, 0.1, 26, 21), (100, 0.1, 0.1, 40, 31)]
    assert len(table()) == 24


def test_rates_are_rounded_up_to_silos_but_not_by_float_dust() -> None:
    assert 0.07 * 100 > 7
    assert plan(100, 0.07, 0.07) == plan(100, 0.069, 0.069) != plan(100, 0.071, 0.071)
