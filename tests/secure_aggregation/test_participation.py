"""Who plays a round, and the threshold that follows from their number and not from who is there."""

from __future__ import annotations

import numpy as np
import pytest
from sum_driver import NOW, Silo, Train, about_of, one_sum, play, unmask_of  # noqa: F401  # the driver's own way of asking

from moretta.contract.messages import Stamp
from moretta.contract.roles import Aborted
from moretta.errors import MorettaError, PeerError
from moretta.secure_aggregation.cohort import Cohort, Participation, Rules
from moretta.secure_aggregation.schemes import aggregator
from moretta.secure_aggregation.sums import Sum

NAMES = tuple(f"s{number}" for number in range(10))


def keys_of(names: tuple[str, ...]) -> dict[str, bytes]:
    return {name: name.encode().ljust(32) for name in names}


@pytest.mark.parametrize(("threshold", "expected"), [(None, 7), (8, 8)])
@pytest.mark.parametrize("there", [10, 9, 7, 2])
def test_it_stays_what_a_round_has_where_silos_are_missing(there: int, threshold: int | None, expected: int) -> None:
    """It shrank with the cohort, from 7 of ten to 2 of two, so that a server could sum pairs."""
    rules = Rules(threshold=threshold, participation=Participation(NAMES, 10))
    assert rules.plan(there).threshold == expected
    assert rules.least("pairwise") == expected
    if there < expected:
        with pytest.raises(PeerError, match=f"at least {expected} silos, the threshold of a round's 10, got {there}"):
            Cohort.of(keys_of(NAMES[:there]), rules)
    else:
        assert Cohort.of(keys_of(NAMES[:there]), rules).plan.threshold == expected


def test_sums_over_pairs_are_refused_by_the_silos_themselves() -> None:
    """The server here goes by rules of its own, by which two are enough."""
    rules = Rules(participation=Participation(NAMES, 10))
    silos = {name: Silo("pairwise", name, 64, {"w": np.ones(3)}, rules=rules) for name in NAMES}
    ended = play(aggregator("pairwise", 64, Rules()).setup(NOW, NAMES[:2]), silos)
    assert isinstance(ended, Aborted)
    assert all("at least 7 silos" in why.detail for why in ended.missing.values())


def test_a_sparse_graph_keeps_degree_and_threshold_too() -> None:
    names = tuple(f"silo-{number:03}" for number in range(100))
    rules = Rules(participation=Participation(names, 100))
    whole = rules.plan(100)
    assert whole.degree is not None
    assert rules.plan(90) == whole
    assert rules.plan(20).threshold == whole.threshold > 20  # so no sum of twenty is ever opened


def test_silos_know_who_plays_a_round() -> None:
    """A server that asks others than seed and participation name is refused before anything is computed."""
    playing = Participation(NAMES, 5, seed=3)
    assert [len(playing.of_round(number)) for number in (1, 2, 3)] == [5, 5, 5]
    assert playing.of_round(1) != playing.of_round(2)
    rules = Rules(participation=playing)
    chosen = playing.of_round(NOW.round)
    silos = {name: Silo("pairwise", name, 64, {"w": np.ones(3)}, rules=rules) for name in NAMES}
    server = aggregator("pairwise", 64, rules)
    assert play(server.setup(NOW, chosen), silos) is None
    assert isinstance(one_sum(server, {name: silos[name] for name in chosen}, NOW), Sum)
    later = next(number for number in range(2, 20) if playing.of_round(number) != chosen)
    ended = one_sum(server, {name: silos[name] for name in chosen}, Stamp(NOW.run, later, 0))
    assert isinstance(ended, Aborted)
    assert all("take part in this round" in why.detail for why in ended.missing.values())


def test_without_a_rule_of_who_plays_the_cohort_is_all_there_is() -> None:
    assert [Rules().plan(count).threshold for count in (10, 3, 2)] == [7, 3, 2]
    with pytest.raises(MorettaError):
        Rules(participation=Participation(NAMES, 10), threshold=11).check(10)
