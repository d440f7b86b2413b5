"""One sum of a round: every move of the table and every other, what is kept, and what a loss of power may forget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moretta.contract.messages import Stamp
from moretta.engines.journal import HelpedFile
from moretta.errors import ParameterError, PeerError, SumSpent
from moretta.secure_aggregation.one_sum import AHEAD, TABLE, Event, HelpedSums, Relation, State
from moretta.secure_aggregation.sums import Query

S = tuple("abcdef")
FEWER = tuple("abcde")
ONE, OTHER = Query(b"1" * 32), Query(b"2" * 32)
ALL = Query(b"1" * 32, whole=True)
SCORE = Query(b"1" * 32, once="score", whole=True)
ROWS = Query(b"1" * 32, once="moments", whole=True, lasting=True)
Line = tuple[str, bool]


def at(number: int, take: int = 0, run: str = "run", attempt: int = 0) -> Stamp:
    return Stamp(run, number, attempt, take)


class Disk:
    """Lines in the order they were written; what was not forced is gone after a loss of power."""

    def __init__(self) -> None:
        self.lines = list[Line]()

    def keep(self, line: str, force: bool) -> None:
        self.lines.append((line, force))

    def forced(self) -> int:
        return sum(force for _, force in self.lines)

    def opened(self, powered: str = "first", **options: object) -> HelpedSums:
        return HelpedSums([line for line, _ in self.lines], self.keep, powered=powered, **options)  # type: ignore[arg-type]

    def lose_power(self, surviving: int = 0) -> None:
        """Keep what was forced, and so many lines more."""
        forced = max((place for place, (_, force) in enumerate(self.lines, 1) if force), default=0)
        del self.lines[forced + surviving :]


def kept(helped: HelpedSums) -> tuple[object, ...]:
    return dict(helped._helped), dict(helped._last), dict(helped._reserved), dict(helped._sets)


# The table.

WAYS = {
    Relation.LOWER: [(0, ONE, S)],
    Relation.SAME: [(1, ONE, S)],
    Relation.OTHER: [(1, OTHER, S), (1, ONE, FEWER), (1, ONE, (*S, "g")), (1, OTHER, FEWER)],
    Relation.HIGHER: [(2, ONE, S), (2, OTHER, FEWER), (9, ONE, FEWER)],
}
"""Take, what is asked, and survivors, after the sum of take 1 over S of what `ONE` is."""


def in_state(state: State, disk: Disk, asked: Query = ONE) -> HelpedSums:
    helped = disk.opened()
    if state is not State.FREE:
        helped.bind(at(1, 1), asked, S, gives=state is State.GIVEN)
    return helped


def do(helped: HelpedSums, event: Event, stamp: Stamp, asked: Query, survivors: tuple[str, ...]) -> None:
    if event is Event.ASKED:
        helped.ask(stamp, asked, survivors)
    else:
        helped.bind(stamp, asked, survivors, gives=event is Event.GIVES)


CASES = [
    (state, relation, event, way)
    for state, relation, event in product(State, Relation, Event)
    for way in WAYS[relation]
    # Whoever is asked is told of no survivors yet; so the same with a larger cohort is the same.
    if not (event is Event.ASKED and relation is Relation.OTHER and way[1] is ONE)
]


@pytest.mark.parametrize(("state", "relation", "event", "way"), CASES)
def test_every_move_of_the_table_and_every_other(
    state: State, relation: Relation, event: Event, way: tuple[int, Query, tuple[str, ...]]
) -> None:
    take, asked, survivors = way
    disk = Disk()
    helped = in_state(state, disk)
    relation = Relation.HIGHER if state is State.FREE else relation  # than nothing everything is
    before, lines = kept(helped), list(disk.lines)
    if (state, relation, event) not in TABLE:
        with pytest.raises(SumSpent) as refused:
            do(helped, event, at(1, take), asked, survivors)
        assert (refused.value.next_take, refused.value.survivors, refused.value.whole) == (2, S, False)
        assert (kept(helped), disk.lines) == (before, lines)
        return
    do(helped, event, at(1, take), asked, survivors)
    found = helped._kept_of(helped._key(at(1), ONE))
    assert found.state is TABLE[state, relation, event]
    if event is Event.ASKED:
        assert (kept(helped), disk.lines) == (before, lines)
    else:
        assert (found.take, found.digest, found.survivors) == (take, asked.digest[:16], survivors)
        helped.bind(at(1, take, attempt=7), asked, survivors, gives=False)  # under any attempt the same again


def test_there_is_no_move_from_nothing_but_to_something_higher() -> None:
    assert {relation for state, relation, _ in TABLE if state is State.FREE} == {Relation.HIGHER}
    assert not [move for move in TABLE if move[1] in (Relation.LOWER, Relation.OTHER)]


def test_shares_that_were_given_are_not_taken_back_by_the_same_again() -> None:
    helped = in_state(State.GIVEN, Disk())
    helped.bind(at(1, 1), ONE, S, gives=False)
    assert helped._kept_of(helped._key(at(1), ONE)).state is State.GIVEN


def test_a_cohort_without_one_of_the_survivors_is_refused_before_the_upload() -> None:
    helped = in_state(State.BOUND, Disk())
    helped.ask(at(1, 1), ONE, (*S, "g"))  # "g" may be lost
    with pytest.raises(SumSpent):
        helped.ask(at(1, 1), ONE, FEWER)
    helped.ask(at(1, 2), ONE, FEWER)


# Rows that are the same in every take.


@pytest.mark.parametrize("state", [State.BOUND, State.GIVEN])
def test_of_whole_rows_there_is_no_further_take(state: State) -> None:
    disk = Disk()
    helped = in_state(state, disk, ALL)
    before, other = kept(helped), Query(OTHER.digest, whole=True)
    for take, asked, survivors in [(0, ALL, S), (1, other, S), (1, ALL, FEWER), (2, ALL, S), (2, ALL, FEWER)]:
        for gives in (False, True):
            with pytest.raises(SumSpent) as refused:
                helped.bind(at(1, take), asked, survivors, gives=gives)
            assert (refused.value.next_take, refused.value.survivors, refused.value.whole) == (1, S, True)
    for take, asked, cohort in [(0, ALL, S), (1, other, S), (1, ALL, FEWER), (2, ALL, S)]:
        with pytest.raises(SumSpent):
            helped.ask(at(1, take), asked, cohort)
    assert kept(helped) == before
    helped.ask(at(1, 1, attempt=3), ALL, S)
    helped.bind(at(1, 1, attempt=3), ALL, S, gives=True)


def test_an_owner_may_allow_whole_rows_over_other_silos() -> None:
    helped = Disk().opened(repeats=True)
    for survivors in (S, FEWER):
        helped.bind(at(1), ALL, survivors, gives=True)
    helped.bind(at(2), ONE, S, gives=True)
    with pytest.raises(SumSpent):  # which is of other rows than whole ones
        helped.bind(at(2), ONE, FEWER, gives=True)


def test_what_is_summed_once_a_run_is_summed_over_one_set() -> None:
    helped = Disk().opened()
    helped.bind(at(0), SCORE, S, gives=True)
    for stamp in (at(0), at(5, 3), at(9, attempt=4)):
        for asked in (SCORE, Query(OTHER.digest, once="score", whole=True)):
            helped.ask(stamp, asked, S)
            helped.bind(stamp, asked, S, gives=True)
            with pytest.raises(SumSpent) as refused:
                helped.bind(stamp, asked, FEWER, gives=True)
            assert (refused.value.next_take, refused.value.survivors) == (stamp.take, S)
            with pytest.raises(SumSpent):
                helped.ask(stamp, asked, FEWER)
    helped.bind(at(0), ROWS, FEWER, gives=True)  # of another name
    helped.bind(at(0, run="another"), SCORE, FEWER, gives=True)


@pytest.mark.parametrize("over_runs", [False, True])
def test_statistics_are_of_one_set_in_all_runs_where_a_silo_keeps_one_record(over_runs: bool) -> None:
    helped = Disk().opened(over_runs=over_runs)
    helped.bind(at(0), ROWS, S, gives=True)
    helped.bind(at(0, run="group/run"), ROWS, FEWER, gives=True)  # of a group: other columns, or other silos' rows
    if not over_runs:
        helped.bind(at(0, run="another"), ROWS, FEWER, gives=True)
        return
    for run in ("another", "run"):
        helped.bind(at(3, run=run), ROWS, S, gives=True)
        with pytest.raises(SumSpent):
            helped.bind(at(3, run=run), ROWS, FEWER, gives=True)
    with pytest.raises(SumSpent):
        helped.bind(at(0, run="group/another"), ROWS, S, gives=True)


# What a silo's owner sets.


def test_sets_that_are_not_far_enough_apart() -> None:
    disk = Disk()
    helped = disk.opened(apart=3)
    helped.bind(at(1), ONE, S, gives=True)
    before = kept(helped)
    for near in (FEWER, tuple("abcd"), (*S, "g"), (*S, "g", "h"), tuple("abcdeg"), tuple("abcdghij")):
        for stamp in (at(2), at(1, 1), at(1, run="another")):
            with pytest.raises(PeerError, match=r"apart = 3"):
                helped.bind(stamp, ONE, near, gives=False)
    assert kept(helped) == before
    for far in (tuple("abc"), (*S, *"ghi"), tuple("ghij")):
        Disk().opened(apart=3).bind(at(2), ONE, far, gives=True)
    helped.bind(at(2), ONE, tuple("abc"), gives=True)
    helped.bind(at(3), ONE, S, gives=True)
    disk.lose_power()
    with pytest.raises(PeerError, match=r"apart = 3"):  # no set is forgotten
        disk.opened("second", apart=3).bind(at(40), ONE, tuple("abcx"), gives=True)


def test_a_sum_of_too_few() -> None:
    helped = Disk().opened(fewest=6)
    with pytest.raises(PeerError, match="at least 6 silos"):
        helped.bind(at(1), ONE, FEWER, gives=True)
    helped.bind(at(1), ONE, S, gives=True)


# On the disk.


def test_lines_read_back_give_the_same() -> None:
    disk = Disk()
    helped = disk.opened()
    for number in (1, 2, 7, 30):
        helped.bind(at(number), ONE, S, gives=False)
        helped.bind(at(number), ONE, S, gives=True)
    helped.bind(at(2, 1), OTHER, FEWER, gives=True)
    helped.bind(at(2, 0, run="another"), ALL, FEWER, gives=True)
    helped.bind(at(0), SCORE, S, gives=True)
    count = len(disk.lines)
    again = disk.opened()
    assert kept(again) == kept(helped)
    again.bind(at(30), ONE, S, gives=True)  # the same again is written no second time
    assert len(disk.lines) == count
    assert repr(again) == "HelpedSums(6 sums)"


@pytest.mark.parametrize(
    "line",
    ["", "{}", "[]", "7", '["sum"]', '["sum", "run", "", 1, "GIVEN", 0, "00", 7]', '["else", 1]',
     '["sum", "run", "", 1, "LATER", 0, "00", 0]', '["sum", "run", "", 1, "GIVEN", 0, "xy", 0]'],
)  # fmt: skip
def test_lines_of_something_else(line: str) -> None:
    with pytest.raises(PeerError, match="the record of sums"):
        HelpedSums(['["set", "a", "b"]', line])


def test_one_force_is_good_for_sixteen_rounds_and_repetitions_are_forced_at_once() -> None:
    disk = Disk()
    helped = disk.opened()
    forced = []
    for number in range(1, 41):
        before = disk.forced()
        helped.bind(at(number), ONE, S, gives=False)
        helped.bind(at(number), ONE, S, gives=True)
        forced += [number] * (disk.forced() - before)
    assert forced == [1, 1 + AHEAD, 1 + 2 * AHEAD]
    assert disk.opened()._reserved == helped._reserved
    for number, take, gives, more in [
        (40, 1, True, 1),
        (40, 1, True, 0),
        (3, 1, False, 1),
        (3, 1, True, 0),
        (3, 2, True, 1),
    ]:
        before = disk.forced()
        helped.bind(at(number, take), ONE, S, gives=gives)
        assert disk.forced() - before == more
    helped.bind(at(5, 1), ONE, S, gives=False)
    before = disk.forced()
    helped.bind(at(5, 2), ONE, FEWER, gives=True)  # from BOUND too, another take's set must not be forgotten
    assert disk.forced() - before == 1
    for asked in (SCORE, ROWS):
        before = disk.forced()
        helped.bind(at(41), asked, S, gives=True)
        assert disk.forced() - before == 1


def test_a_killed_process_forgets_nothing() -> None:
    disk = Disk()
    disk.opened().bind(at(1), ONE, S, gives=True)
    disk.opened().bind(at(2), ONE, S, gives=False)
    for number in (1, 2):
        with pytest.raises(SumSpent):
            disk.opened().bind(at(number), ONE, FEWER, gives=True)
        disk.opened().bind(at(number), ONE, S, gives=True)
    disk.opened().bind(at(3), ONE, FEWER, gives=True)


def test_after_a_loss_of_power_reserved_rounds_are_spent() -> None:
    disk = Disk()
    helped = disk.opened()
    for number in (1, 2, 3):
        helped.bind(at(number), ONE, S, gives=True)
    disk.lose_power()
    after = disk.opened("second")
    after.bind(at(1), ONE, S, gives=True)  # which was forced
    for number in (2, 3, 4, AHEAD):
        for asked, survivors in ((ONE, S), (ONE, FEWER), (ALL, S)):
            with pytest.raises(SumSpent) as refused:
                after.ask(at(number), asked, survivors)
            assert (refused.value.next_take, refused.value.survivors) == (0 if asked.whole else 1, ())
            with pytest.raises(SumSpent):
                after.bind(at(number), asked, survivors, gives=True)
        after.bind(at(number, 1), ONE, FEWER, gives=True)
    disk.lose_power()
    third = disk.opened("third")
    for number in (2, 3, 4, AHEAD):  # what was played in their place is not forgotten
        with pytest.raises(SumSpent):
            third.bind(at(number, 1), ONE, S, gives=True)
    third.bind(at(AHEAD + 1), ONE, S, gives=True)  # beyond what was reserved
    disk.lose_power()
    fourth = disk.opened("fourth")
    with pytest.raises(SumSpent):
        fourth.ask(at(AHEAD + 2), ONE, S)
    fourth.ask(at(2 * AHEAD + 1), ONE, S)


def test_a_loss_of_power_spends_no_round_of_whole_rows() -> None:
    """They have no further take, so a round that counted as spent could never be played."""
    disk = Disk()
    helped = disk.opened()
    for number in (1, 2):
        helped.bind(at(number), ALL, S, gives=True)
    disk.lose_power()
    after = disk.opened("second")
    for number in (1, 2):
        after.bind(at(number), ALL, S, gives=True)
        with pytest.raises(SumSpent):
            after.bind(at(number), ALL, FEWER, gives=True)
    after.ask(at(3), ALL, FEWER)
    after.bind(at(3), ALL, FEWER, gives=True)


ROUNDS = st.integers(1, 4) | st.integers(1, 40)  # the odd ones of whole rows
BINDS = st.tuples(
    st.sampled_from([Event.BINDS, Event.GIVES]), ROUNDS, st.integers(0, 2), st.sampled_from([b"1" * 32, b"2" * 32]),
    st.sampled_from([S, FEWER]),
)  # fmt: skip
SCORES = st.tuples(st.just("score"), st.sampled_from([S, FEWER]))
# Lines that survive a loss of power though nothing forced them are counted.
ENDS = st.just("killed") | st.just(0) | st.integers(0, 3)
OPERATIONS = BINDS | BINDS | BINDS | ENDS | SCORES


@given(st.lists(OPERATIONS, max_size=40))
def test_of_no_uploads_two_sums_are_ever_opened(operations: Sequence[object]) -> None:
    disk, powered = Disk(), 0
    helped, opened = disk.opened("0"), dict[object, set[object]]()
    for operation in operations:
        match operation:
            case "killed":
                helped = disk.opened(str(powered))
            case int():
                disk.lose_power(operation)
                powered += 1
                helped = disk.opened(str(powered))
            case ("score", survivors):
                if _bound(lambda: helped.bind(at(9), SCORE, survivors, gives=True)):  # noqa: B023
                    opened.setdefault("score", set()).add(survivors)
            case (event, number, take, digest, survivors):
                whole = bool(number % 2)
                asked, gives = Query(digest, whole=whole), event is Event.GIVES
                if _bound(lambda: helped.bind(at(number, take), asked, survivors, gives=gives)):  # noqa: B023
                    key = number if whole else (number, take)
                    opened.setdefault(key, set()).add((take, digest, survivors))
    assert all(len(sums) == 1 for sums in opened.values())


def _bound(bind: Callable[[], None]) -> bool:
    try:
        bind()
    except SumSpent:
        return False
    return True


def test_half_a_line_at_the_end_of_the_file_is_taken_off(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "helped.jsonl"
    HelpedFile(str(path), forces=True).opened.bind(at(1), ONE, S, gives=True)
    whole = path.read_bytes()
    HelpedFile(str(path), forces=True).opened.bind(at(2), ONE, FEWER, gives=True)
    more = path.read_bytes()[len(whole) :]
    for cut in range(1, len(more)):
        path.write_bytes(whole + more[:cut])
        helped = HelpedFile(str(path)).opened
        helped.bind(at(2), ONE, FEWER, gives=True)
        assert kept(HelpedFile(str(path)).opened) == kept(helped)
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"what is this\n" + whole)
    with pytest.raises(ParameterError):
        _ = HelpedFile(str(path)).opened
