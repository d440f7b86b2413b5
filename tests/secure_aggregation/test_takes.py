"""Takes: what silos answer a server that asks again, over fewer silos, over others, or after it was restarted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sum_driver import (
    CODEC,
    NOW,
    Answer,
    Late,
    Seen,
    Silo,
    Train,
    Vanished,
    about_of,
    agreed,
    one_sum,
    play,
    rostered,
    unmask_of,
)

from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Aborted, Exchange, Outcome, Reason, Report, State, no_phase, unexpected
from moretta.engines.driver import Driver, RoundEnd
from moretta.engines.in_process import InProcess
from moretta.errors import Disconnected, PeerError, RunFailed, SumSpent
from moretta.secure_aggregation.additive import AddShares
from moretta.secure_aggregation.cohort import Credentials, Rules
from moretta.secure_aggregation.keyed_sums import Aggregator
from moretta.secure_aggregation.one_sum import HelpedSums
from moretta.secure_aggregation.schemes import aggregator
from moretta.secure_aggregation.statistics import AskMoments, answer_moments, moments
from moretta.secure_aggregation.sums import Sum
from moretta.secure_aggregation.unmasking import Survivors, Unmask

NAMES, VICTIM = tuple("abcdef"), "f"
REST = tuple("abcde")
WAYS = [("pairwise", False), ("pairwise", True), ("additive-shares", False)]


class Room:
    """Silos that keep what they helped to open, and as many sessions of servers as one likes."""

    def __init__(self, scheme: str, *, roster: bool, **rules: Any) -> None:
        made, self.credentials, self.run = rostered(NAMES, **rules) if roster else (Rules(**rules), {}, NOW.run)
        self.scheme, self.rules, self.helped = scheme, made, {name: HelpedSums() for name in NAMES}

    def silo(self, name: str) -> Silo:
        """Return a silo whose process was started again: its keys are new, its record is kept."""
        own: Credentials | None = self.credentials.get(name)
        tensors = {"w": [0.1 * (ord(name) - 96), -1.0]}
        return Silo(self.scheme, name, 64, tensors, rules=self.rules, credentials=own, helped=self.helped[name])

    def at(self, take: int = 0, attempt: int = 0, number: int = 1) -> Stamp:
        return Stamp(self.run, number, attempt, take)

    def session(self, names: Sequence[str], now: Stamp) -> tuple[Aggregator, dict[str, Silo]]:
        silos = {name: self.silo(name) for name in names}
        return agreed(silos, self.scheme, rules=self.rules, now=now), silos

    def sum(self, names: Sequence[str], now: Stamp, **options: Any) -> Sum | Aborted:
        server, silos = self.session(names, now)
        return one_sum(server, silos, now, 1.0, **options)


def spent(result: Sum | Aborted) -> set[tuple[int, tuple[str, ...]]]:
    assert isinstance(result, Aborted)
    assert {why.reason for why in result.missing.values()} == {Reason.SPENT}
    return {(why.spent.next_take, why.spent.survivors) for why in result.missing.values() if why.spent}


def vanishing(silo: Answer, *kinds: type[Message], times: int = 99) -> tuple[Answer, list[Message]]:
    """Return a silo that cannot be reached when it is asked for these, so many times, and what it was asked of them."""
    asked = list[Message]()

    def answer(message: Message) -> Any:
        if isinstance(message, kinds):
            asked.append(message)
            if len(asked) <= times:
                raise Vanished
        return silo(message)

    return answer, asked


# Attacks.


@pytest.mark.parametrize(("scheme", "roster"), WAYS)
def test_a_resumed_round_over_fewer_silos_is_spent(scheme: str, roster: bool) -> None:
    room = Room(scheme, roster=roster)
    whole = room.sum(NAMES, room.at())
    assert isinstance(whole, Sum)
    for attempt in (0, 1):  # a server that was killed, or says so, begins with attempt 0 again
        fewer = room.sum(REST, room.at(attempt=attempt))
        assert spent(fewer) == {(1, NAMES)}
        assert fewer.missing.keys() == set(REST)
    same = room.sum(NAMES, room.at(attempt=1))  # of the same silos it is the same sum, and tells nothing new
    assert isinstance(same, Sum)
    assert same.means["w"].tobytes() == whole.means["w"].tobytes()
    assert isinstance(room.sum(REST, room.at(take=1)), Sum)  # of other rows
    late = room.sum(NAMES, room.at())
    assert spent(late) == {(2, REST)}
    assert late.missing.keys() == set(REST)  # the victim has not played take 1, and would say the same again


@pytest.mark.parametrize("roster", [False, True])
def test_any_other_survivors_of_a_round_that_is_bound_are_refused(roster: bool) -> None:
    room = Room("pairwise", roster=roster)
    server, silos = room.session(NAMES, room.at())
    gone, _ = vanishing(silos[VICTIM], Train)
    assert isinstance(one_sum(server, silos, room.at(), 1.0, {VICTIM: gone}), Sum)  # over the rest
    now = room.at(attempt=1)
    _, again = room.session(NAMES, now)
    encoding = server.want({"w": (2,)}, {"w": 1.0}, len(NAMES)).fraction_bits
    uploads = {name: silo(Train(stamp=now, encoding=encoding)) for name, silo in again.items()}
    for name in REST:
        if roster:
            with pytest.raises(SumSpent):
                again[name](Survivors(stamp=now, survivors=NAMES))
        with pytest.raises((SumSpent, PeerError)):  # with a roster for lack of signatures
            again[name](unmask_of(name, NAMES, uploads))
        with pytest.raises((SumSpent, PeerError)):  # too few
            again[name](Survivors(stamp=now, survivors=tuple("abcd")))
    signed = {name: again[name](Survivors(stamp=now, survivors=REST)) for name in REST}
    given = {name: again[name](unmask_of(name, REST, uploads, signed if roster else {})) for name in REST}
    assert {frozenset(reply.makers) for reply in given.values()} == {frozenset(REST)}


@pytest.mark.parametrize(("scheme", "roster"), WAYS)
def test_a_larger_cohort_of_a_round_that_is_bound_is_refused(scheme: str, roster: bool) -> None:
    room = Room(scheme, roster=roster)
    assert isinstance(room.sum(REST, room.at()), Sum)
    assert spent(room.sum(NAMES, room.at(attempt=1))) == {(1, REST)}


@pytest.mark.parametrize("roster", [False, True])
def test_another_question_in_a_round_that_is_bound_is_refused(roster: bool) -> None:
    room = Room("pairwise", roster=roster)
    assert isinstance(room.sum(NAMES, room.at()), Sum)
    server, silos = room.session(NAMES, room.at(attempt=1))
    wanted = server.want({"w": (2,)}, {"w": 2.0**9}, len(NAMES))
    ask = Train(stamp=room.at(attempt=1), encoding=wanted.fraction_bits)
    assert spent(play(server.sum(ask, wanted), silos)) == {(1, NAMES)}


def test_shares_withheld_from_an_additive_sum_end_the_take() -> None:
    room = Room("additive-shares", roster=False)
    server, silos = room.session(NAMES, room.at())
    gone, asked = vanishing(silos[VICTIM], AddShares)
    aborted = one_sum(server, silos, room.at(), 1.0, {VICTIM: gone})
    assert isinstance(aborted, Aborted)
    assert (aborted.missing.keys(), list(aborted.opened)) == ({VICTIM}, [VICTIM])
    assert len(asked) == 2  # asked again once
    assert spent(room.sum(REST, room.at(attempt=1))) == {(1, NAMES)}
    assert isinstance(room.sum(REST, room.at(take=1, attempt=1)), Sum)


@pytest.mark.parametrize(("scheme", "roster"), WAYS)
def test_statistics_are_never_summed_over_a_second_set(scheme: str, roster: bool) -> None:
    room = Room(scheme, roster=roster)
    rows = {name: np.random.default_rng(place).normal(size=(5 + place, 2)) for place, name in enumerate(NAMES)}

    def counted(names: Sequence[str], now: Stamp) -> Any:
        server, silos = room.session(names, now)

        def answer(silo: Silo, matrix: NDArray[np.float64]) -> Answer:
            def one(message: Message) -> Any:
                if isinstance(message, AskMoments):
                    return answer_moments(silo.contributor, message, matrix)
                return silo(message)

            return one

        ways = {name: answer(silo, rows[name]) for name, silo in silos.items()}
        return play(moments(server, now, 2), ways)

    first = counted(NAMES, room.at(number=0))
    for now in (room.at(number=0, attempt=1), room.at(number=7), room.at(number=0, take=5)):
        assert spent(counted(REST, now)) == {(now.take, NAMES)}
        again = counted(NAMES, replace(now, attempt=now.attempt + 1))
        assert (again.rows, again.mean.tobytes()) == (first.rows, first.mean.tobytes())


# Who is silent.


def test_with_a_roster_who_withholds_its_shares_holds_up_nobody_who_answers() -> None:
    room = Room("pairwise", roster=True, threshold=len(NAMES))
    server, silos = room.session(NAMES, room.at())
    gone, asked = vanishing(silos[VICTIM], Unmask)
    seen = Seen()
    aborted = one_sum(server, silos, room.at(), 1.0, {VICTIM: gone}, seen=seen)
    assert isinstance(aborted, Aborted)  # for the silent one's own mask alone, of which six shares are needed
    assert (aborted.missing.keys(), list(aborted.opened)) == ({VICTIM}, [VICTIM])
    assert len(asked) == 2
    secrets = [reply.secret for _, reply in seen if getattr(reply, "secret", b"")]
    assert len(set(secrets)) == len(REST)
    server, silos = room.session(NAMES, room.at(attempt=1))
    back, asked = vanishing(silos[VICTIM], Unmask, times=1)
    assert isinstance(one_sum(server, silos, room.at(attempt=1), 1.0, {VICTIM: back}), Sum)
    assert len(asked) == 2


def test_without_a_roster_no_silo_gives_its_own_secret() -> None:
    seen = Seen()
    assert isinstance(Room("pairwise", roster=False).sum(NAMES, NOW, seen=seen), Sum)
    assert {reply.secret for _, reply in seen if hasattr(reply, "secret")} == {b""}


@pytest.mark.parametrize("secret", [bytes(32), b""], ids=["false", "none"])
def test_a_false_secret_or_none_counts_as_missing(secret: bytes) -> None:
    room, missing = Room("pairwise", roster=True), dict[str, Any]()
    server, silos = room.session(NAMES, room.at())

    def answer(message: Message) -> Any:
        reply = silos[VICTIM](message)
        return replace(reply, secret=secret) if isinstance(message, Unmask) else reply

    total = one_sum(server, silos, room.at(), 1.0, {VICTIM: answer}, missing=missing)
    assert isinstance(total, Sum)  # five others have shares of its secret
    assert total.silos == NAMES
    assert {name: why.reason for name, why in missing.items()} == {VICTIM: Reason.MALFORMED}


@pytest.mark.parametrize(("kind", "roster", "times"), [(Survivors, True, 2), (Survivors, False, 1), (Unmask, True, 1)])
def test_the_silent_are_asked_again_once_where_nobody_else_can_answer(
    kind: type[Message], roster: bool, times: int
) -> None:
    room = Room("pairwise", roster=roster)
    server, silos = room.session(NAMES, room.at())
    gone, asked = vanishing(silos[VICTIM], kind)
    others = {} if roster else {"a": vanishing(silos["a"], Train)[0]}
    result = one_sum(server, silos, room.at(), 1.0, {VICTIM: gone, **others})
    assert len(asked) == times  # five shares of each secret are enough
    assert isinstance(result, Sum) == (kind is Unmask)


@pytest.mark.parametrize("kind", [Survivors, Unmask])
def test_what_is_asked_again_is_answered_byte_for_byte(kind: type[Message]) -> None:
    room = Room("pairwise", roster=True)
    server, silos = room.session(NAMES, room.at())
    said: dict[str, list[bytes]] = {}

    def answer(name: str) -> Answer:
        def one(message: Message) -> Any:
            reply = silos[name](message)
            if not isinstance(message, kind):
                return reply
            said.setdefault(name, []).extend(CODEC.encode(again) for again in (reply, silos[name](message)))
            return Late(reply) if len(said[name]) == 2 and name == VICTIM else reply

        return one

    total = one_sum(server, silos, room.at(), 1.0, {name: answer(name) for name in NAMES})
    assert isinstance(total, Sum)
    assert all(len(set(replies)) == 1 for replies in said.values())
    assert said.keys() == set(NAMES)


# Runs: the driver plays takes.


def rows_of(name: str, stamp: Stamp) -> NDArray[np.float64]:
    """Return what a silo uploads: of other rows in another round or take."""
    return np.random.default_rng([ord(name), *stamp.drawn]).normal(size=2)


class Site:
    """A client that answers with a silo of a room. gone: the rounds in which it answers nothing."""

    def __init__(self, silo: Silo, *, whole: bool, gone: Sequence[int] = ()) -> None:
        self.phase = no_phase
        self.silo, self.whole, self.gone = silo, whole, gone
        self.name = silo.contributor._name

    def answer(self, message: Message) -> Message:
        if message.stamp.round in self.gone:
            raise PeerError("it is away")
        if not isinstance(message, Train):
            reply = self.silo.contributor.answer(message)
            if reply is None:
                raise unexpected("a site", message)
            return reply
        about = replace(about_of(message), whole=self.whole)
        at = replace(message.stamp, take=0) if self.whole else message.stamp
        tensors = {"w": rows_of(self.name, at)}
        return self.silo.contributor.upload(message.stamp, tensors, 1, message.encoding, asked=about)

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        raise NotImplementedError


class Adder:
    """A server whose rounds are one sum each; `means` is what it knows."""

    def __init__(self, room: Room) -> None:
        self.phase = no_phase
        self.aggregation = aggregator(room.scheme, 64, room.rules)
        self.means = dict[tuple[int, int], Sum]()

    def setup(self, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
        return (yield from self.aggregation.setup(now, cohort))

    def round(self, now: Stamp) -> Exchange[Report | Aborted]:
        wanted = self.aggregation.want({"w": (2,)}, {"w": 16.0}, len(NAMES))
        total = yield from self.aggregation.sum(Train(stamp=now, encoding=wanted.fraction_bits), wanted)
        if isinstance(total, Aborted):
            return total
        self.means[now.round, now.take] = total
        return Report({})

    def finish(self, now: Stamp) -> Exchange[Outcome | Aborted]:
        yield from ()
        return Outcome(parameters={})

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        raise NotImplementedError


def run(
    room: Room, first: int, last: int, *, whole: bool = False, gone: Sequence[int] = ()
) -> tuple[Adder, list[RoundEnd]]:
    """Play rounds in a session of their own, in which the victim is gone in some."""
    server = Adder(room)
    clients = {name: Site(room.silo(name), whole=whole, gone=gone if name == VICTIM else ()) for name in NAMES}
    engine = InProcess(clients, CODEC)
    driver = Driver(server, list(NAMES), room.run, engine, 2)
    return server, list(driver.rounds(first, last))


@pytest.mark.parametrize(("scheme", "roster"), WAYS)
def test_a_run_that_is_resumed_without_a_silo_plays_the_next_take(scheme: str, roster: bool) -> None:
    room = Room(scheme, roster=roster)
    before, ends = run(room, 1, 2)
    assert [(end.take, end.dropped) for end in ends] == [(0, []), (0, [])]
    after, ends = run(room, 2, 3, gone=[2])
    assert [end.take for end in ends] == [1, 0]
    assert [[one.silo for one in end.dropped] for end in ends] == [[VICTIM], []]  # SPENT costs nobody the round
    one, other = before.means[2, 0], after.means[2, 1]
    assert (one.silos, other.silos) == (NAMES, REST)
    difference = one.means["w"] * one.weight - other.means["w"] * other.weight
    assert np.abs(difference - rows_of(VICTIM, Stamp(room.run, 2, 0))).max() > 1e-3
    fewer = sum(rows_of(name, Stamp(room.run, 2, 0, 1)) for name in REST)
    assert other.means["w"] * other.weight == pytest.approx(fewer, abs=1e-6)


@pytest.mark.parametrize(("scheme", "roster"), WAYS)
def test_a_run_that_is_resumed_with_all_silos_has_the_same_sums(scheme: str, roster: bool) -> None:
    room = Room(scheme, roster=roster)
    before, _ = run(room, 1, 3)
    after, ends = run(room, 2, 4)
    assert [end.take for end in ends] == [0, 0, 0]
    for number in (2, 3):
        assert after.means[number, 0].means["w"].tobytes() == before.means[number, 0].means["w"].tobytes()


@pytest.mark.parametrize(("scheme", "roster"), WAYS)
def test_of_whole_rows_a_resumed_run_waits_for_the_same_silos(scheme: str, roster: bool) -> None:
    room = Room(scheme, roster=roster)
    before, _ = run(room, 1, 2, whole=True)
    with pytest.raises(RunFailed, match=r"round 2 can only be repeated by the same silos .* missing: f; bring"):
        run(room, 2, 2, whole=True, gone=[2])
    after, ends = run(room, 2, 3, whole=True)
    assert [end.take for end in ends] == [0, 0]
    assert after.means[2, 0].means["w"].tobytes() == before.means[2, 0].means["w"].tobytes()


# One silo's word: a liar plays its role honestly but for what it says of takes.


class Liar(Site):
    """Claims once a round, from the second on; then, if wanted, it is silent where others sign."""

    def __init__(self, silo: Silo, claim: SumSpent, *, silent: bool) -> None:
        super().__init__(silo, whole=False)
        self.claim, self.silent, self.claimed = claim, silent, list[int]()

    def answer(self, message: Message) -> Message:
        if message.stamp.round > 1 and isinstance(message, Train) and message.stamp.round not in self.claimed:
            self.claimed.append(message.stamp.round)
            raise self.claim
        if message.stamp.round > 1 and isinstance(message, Survivors) and self.silent:
            raise Disconnected("it is silent")
        return super().answer(message)


def lied(room: Room, claim: SumSpent, first: int, last: int, *, silent: bool) -> tuple[Adder, list[RoundEnd]]:
    """Play rounds in a session in which the first silo claims."""
    server = Adder(room)
    clients = {name: Site(room.silo(name), whole=False) for name in NAMES}
    clients["a"] = Liar(room.silo("a"), claim, silent=silent)
    return server, list(Driver(server, list(NAMES), room.run, InProcess(clients, CODEC), 2).rounds(first, last))


def test_a_take_of_a_liar_s_choice_ends_no_run() -> None:
    """The last take there is, and silence when the others have signed who is in its sum: they had none to go on to."""
    room = Room("pairwise", roster=True)
    _, ends = lied(room, SumSpent(2**31 - 1, NAMES, False), 1, 4, silent=True)
    assert [end.take for end in ends] == [0, 2, 2, 0]  # two takes, and it is left out
    assert [[one.silo for one in end.dropped] for end in ends] == [[], ["a"], ["a"], ["a"]]
    _, ends = run(room, 2, 4)  # resumed from the first checkpoint, without the liar
    assert len(ends) == 3
    assert all(not end.dropped for end in ends)


@pytest.mark.parametrize("roster", [False, True])
def test_a_set_of_a_liar_s_choice_shuts_nobody_out(roster: bool) -> None:
    room = Room("pairwise", roster=roster)
    server, ends = lied(room, SumSpent(0, tuple("abdef"), True), 1, 8, silent=False)
    assert [end.take for end in ends] == [0] * 8
    assert [[one.silo for one in end.dropped] for end in ends] == [[], *[["a"]] * 7]
    assert all("c" in total.silos for total in server.means.values())
