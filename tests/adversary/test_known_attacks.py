"""Attacks that once gave a silo's own upload, as lists of operations; and those that are known to give it still."""

from __future__ import annotations

from collections import Counter

import exchange
import pytest
from coalition import Job, Operation, Resume, SetUp, Sum, Swap
from judge import played
from silos import PROTOCOLS, SCHEMES, World
from wiretap import leaks

from moretta.protocols.common.batches import Batches

RESUMED = [Sum(10, "abcde", 10), Sum(11, "abcde", 11), Resume("abcde", 1), Sum(11, "abce", 11)]
"""Killed in round 12 and resumed from 10: `d` is lost in round 11 the second time, and both sums are known."""

LOST = [Sum(1, "abcde", 1), Sum(1, "abcde", 1, lost="d")]
"""The same without a resume: the server plays a round again, under another attempt, and says that `d` was lost."""

ONE_FEWER = [Sum(1, "abcde", 1), Sum(1, "abcd", 1)]
PAIRS = [Sum(1, "ab", 1), Sum(1, "bc", 1), Sum(1, "ac", 1)]
"""A server that asks cohorts of its choice: a threshold of five becomes one of two."""

ODD = [Sum(1, "abcde", 1), Sum(1, "abcde", 1, odd="d")]
"""The second time `d` is asked about another model than the others: what is left is its own two's difference."""

NEARLY = [Sum(1, "abcde", 1), Sum(1, "abcd", 1.5)]
"""The second time the model is another in its tenth digit."""

WITHHELD = [Sum(1, "abcde", 1, mute="d"), Sum(1, "abce", 1)]
"""`e` has the share that is missing at the threshold, and the server repeats the round without `d`."""

WITHHELD_AT_SET_UP = [SetUp(1, "abcde", mute="d"), SetUp(1, "abce")]
"""The same with the common statistics: the difference is how many rows `d` has, and what their columns sum to."""

LET_IN_AGAIN = [
    Sum(1, "abcde", 1, unsigned="e"), Sum(1, "abcd", 1, take=1),
    Sum(2, "abcde", 2, mute="e"), Sum(2, "abcd", 2, take=1),
    Sum(3, "abcd", 3), Sum(4, "abcde", 4), Sum(2, "abcde", 2), Sum(1, "abcde", 1), Sum(1, "abcde", 1, take=1),
]  # fmt: skip
"""`e` costs two takes, sits a round out and is set up anew; now it would complete the takes that it held up."""

SAID_TO_BE_LOST = [
    Sum(1, "abcde", 1, lost="de"), Sum(2, "abcde", 1, mute="ab"), Sum(3, "abcd", 1), Sum(2, "abcde", 1),
    Sum(2, "abcd", 1), Sum(1, "abcd", 1),
]  # fmt: skip
"""A server says that rounds were lost, goes on under the same model, and comes back to the lost ones."""

FOOLED = [Sum(1, "abcde", 1), Sum(1, "abcde", 1, fooled=("d", 0))]
"""PBPFL's cross-entropy: the second time `d` alone is sent another softmax, which gives its gradient of one output."""

TWO_MODELS = [Sum(1, "abcde", 1), Sum(1, "abcde", 11)]
NEVER_OPENED = [Sum(1, "abcde", 1, late="ab"), Sum(1, "abcde", 11)]
"""PBPFL's cross-entropy: silos predict for two models in one round, and of the first no sum was opened."""

FROZEN = [Sum(1, "abcde", 1), Sum(2, "abcd", 1)]
SECOND_JOB = [Sum(1, "abcde", 1), Job(2), Sum(1, "abcd", 1)]


def told(operations: list[Operation], world: World) -> list[str]:
    """Return the honest silos of whose uploads something is known alone after this list."""
    return sorted(leaks(played(world, operations).tap.rows()))


@pytest.mark.parametrize("roster", [False, True], ids=["", "roster"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("operations", [RESUMED, LOST, ONE_FEWER, PAIRS, ODD, NEARLY])
def test_a_round_s_uploads_are_in_one_sum(operations: list[Operation], scheme: str, roster: bool) -> None:
    assert told(operations, World(scheme=scheme, roster=roster)) == []


@pytest.mark.parametrize("roster", [False, True], ids=["", "roster"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("operations", [WITHHELD, WITHHELD_AT_SET_UP])
def test_a_withheld_share_gives_no_second_sum(operations: list[Operation], scheme: str, roster: bool) -> None:
    assert told(operations, World(scheme=scheme, roster=roster, corrupted=1)) == []


@pytest.mark.parametrize("roster", [False, True], ids=["", "roster"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("operations", [LET_IN_AGAIN, SAID_TO_BE_LOST])
def test_neither_a_lost_round_nor_a_silo_let_in_again_gives_one(
    operations: list[Operation], scheme: str, roster: bool
) -> None:
    assert told(operations, World(scheme=scheme, roster=roster, corrupted=1)) == []


@pytest.mark.parametrize("operations", [RESUMED, LOST, ODD, LET_IN_AGAIN, SAID_TO_BE_LOST])
@pytest.mark.parametrize("protocol", [name for name in PROTOCOLS if name != "fedsgd"])
def test_nor_under_another_protocol(protocol: str, operations: list[Operation]) -> None:
    assert told(operations, World(protocol, corrupted=1)) == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_exchange_of_a_round_is_for_one_model_and_one_softmax(scheme: str) -> None:
    world = World("pbpfl-ce", scheme)
    for first, second in (FOOLED, TWO_MODELS, NEVER_OPENED):
        for between in ([], [Resume("abcde", 1)]):
            tap = played(world, [first, *between, second]).tap
            assert exchange.silos_told(tap.sums()) == []
            assert exchange.predicted_twice(tap) == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_swapped_key_is_refused_by_name(protocol: str) -> None:
    coalition = played(World(protocol, roster=True, silos=3), [Swap("b", "abc")])
    assert coalition.deceived == []
    refused = [sentence[:3] for sentence in coalition.refusals if "the key of silo `b` is not signed" in sentence]
    assert refused == ["a: ", "c: "]


@pytest.mark.parametrize("operations", [FROZEN, SECOND_JOB])
def test_known_limit_the_same_model_under_two_rounds_or_jobs(operations: list[Operation]) -> None:
    """Round, job and model are the server's own words, and whole rows are the same in every round.

    This pins what is true, not what is wanted; and that the judge sees what there is to be seen.
    """
    rows = played(World(batch=0), operations).tap.rows()
    assert "e" in leaks(rows)


@pytest.mark.parametrize("roster", [False, True], ids=["", "roster"])
@pytest.mark.parametrize("operations", [FROZEN, SECOND_JOB])
def test_sets_that_are_apart_stop_that(operations: list[Operation], roster: bool) -> None:
    coalition = played(World(batch=0, roster=roster, apart=2), operations)
    assert not leaks(coalition.tap.rows())
    assert any("[privacy] apart = 2" in sentence for sentence in coalition.refusals)


def test_known_limit_batches_that_come_again() -> None:
    """Two sums over one set under one model differ by one honest silo's upload, if the others' batches come again.

    Here one of 35 batches comes again by chance, in the second round of another job. So do whole rows, always.
    This pins what is true, not what is wanted.
    """
    world = World("pbpfl", "additive-shares", silos=3, corrupted=1, apart=3)
    rows = played(world, [Sum(1, "abc", 0), Sum(2, "abc", 0), Job(3), Sum(2, "abc", 0)]).tap.rows()
    first, second = (row for row in rows if {number for _, number in row.of} == {2})
    assert first.coefficients.keys() ^ second.coefficients.keys()
    assert leaks([first, second]).keys() == {"a"}


def test_known_limit_epochs_of_unequal_length() -> None:
    """An epoch has each row once, so under one model rounds of whole epochs cancel, but for whose epochs are longer."""
    batches = {silo: Batches(rows, 10, 1, silo) for silo, rows in {"a": 30, "b": 20, "c": 20}.items()}

    def summed(*rounds: int) -> Counter[tuple[str, int]]:
        return Counter((silo, row) for silo, one in batches.items() for n in rounds for row in one.of_round(n).tolist())

    first, second = summed(1, 2), summed(3, 4)
    assert {silo for silo, row in first | second if first[silo, row] != second[silo, row]} == {"a"}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_honest_round_is_a_sum_over_all(protocol: str, scheme: str) -> None:
    """The judge is neither blind nor sees too much: he finds the honest silos' sum, and no part of it."""
    world = World(protocol, scheme, corrupted=1)
    rows = [row for row in played(world, [Sum(1, "abcde", 1)]).tap.rows() if {number for _, number in row.of} == {1}]
    assert rows
    for row in rows:
        assert sorted(unknown.silo for unknown in row.coefficients) == list(world.honest)
        assert len(set(row.coefficients.values())) == 1
