"""Attacks that once gave a silo's upload, as lists of operations; and what is known to give it still."""

from __future__ import annotations

import pytest
from coalition import Job, Operation, Resume, SetUp, Sum, Swap
from judge import played
from silos import PROTOCOLS, SCHEMES, World
from wiretap import leaks

RESUMED = [Sum(10, "abcde", 10), Sum(11, "abcde", 11), Resume("abcde", 1), Sum(11, "abce", 11)]
"""Killed after round 11 and resumed from 10: `d` is lost the second time, and both sums of round 11 are known."""

LOST = [Sum(1, "abcde", 1), Sum(1, "abcde", 1, lost="d")]
ONE_FEWER = [Sum(1, "abcde", 1), Sum(1, "abcd", 1)]
PAIRS = [Sum(1, "ab", 1), Sum(1, "bc", 1), Sum(1, "ac", 1)]
"""A server that deviates asks again, of whom it likes."""

ODD = [Sum(1, "abcde", 1), Sum(1, "abcde", 1, odd="d")]
"""The second time `d` is asked of another model than the others: what is left is the difference of its own two."""

NEARLY = [Sum(1, "abcde", 1), Sum(1, "abcd", 1.5)]
"""The model of the second time differs in its tenth digit."""

WITHHELD = [Sum(1, "abcde", 1, mute="d"), Sum(1, "abce", 1)]
"""`e` has the share that is missing for the threshold; the server repeats the round without `d`."""

WITHHELD_AT_SET_UP = [SetUp(1, "abcde", mute="d"), SetUp(1, "abce")]
"""The same with the common statistics: the difference is how many rows `d` has, and what they sum to."""

ATTACKS: list[tuple[str, list[Operation], int]] = [
    ("resumed", [*RESUMED], 0),
    ("lost", [*LOST], 0),
    ("odd", [*ODD], 0),
    ("one fewer", [*ONE_FEWER], 0),
    ("pairs", [*PAIRS], 0),
    ("nearly the same model", [*NEARLY], 0),
    ("withheld", [*WITHHELD], 1),
    ("withheld at set-up", [*WITHHELD_AT_SET_UP], 1),
]


@pytest.mark.parametrize("roster", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("operations", "corrupted"), [row[1:] for row in ATTACKS], ids=[row[0] for row in ATTACKS])
def test_no_silo_s_own_upload_comes_out(operations: list[Operation], corrupted: int, scheme: str, roster: bool) -> None:
    world = World(scheme=scheme, corrupted=corrupted, roster=roster)
    assert not leaks(played(world, operations).tap.rows())


@pytest.mark.parametrize("protocol", [name for name in PROTOCOLS if name != "fedsgd"])
def test_no_silo_s_own_upload_comes_out_of_a_resumed_round(protocol: str) -> None:
    assert not leaks(played(World(protocol, corrupted=1), RESUMED).tap.rows())
