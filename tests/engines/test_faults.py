"""Injected faults: who vanishes when, for how long and why, that chance is the seed's, and that the rest goes on."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy import SCHEMA, Hello, Said, Say, ToyClient, ToyServer

from moretta.contract.codec import Codec
from moretta.contract.messages import Message, Stamp, message
from moretta.contract.roles import Aborted, Ask, Exchange, Missing, Reason, Replies, Report
from moretta.engines import views
from moretta.engines.driver import Driver, DroppedSilo, RoundEnd
from moretta.engines.in_process import NO_MISHAP, Injector, InProcess
from moretta.engines.settings import Delay, Fault, FaultPhase, Faults
from moretta.engines.views import Recorder
from moretta.errors import MisuseError, RunFailed


@message("toy/unmask")
class Unmask(Message):
    """Help to read the sum of those who have spoken."""


PHASES: dict[str, FaultPhase] = {"toy/hello": "set-up", "toy/unmask": "unmasking"}
NOW = Stamp("run", 1, 0)


class HardyServer(ToyServer):
    """Does without silos that fall silent, as a sum that survives dropouts: two must help to read it."""

    def round(self, now: Stamp) -> Exchange[Report | Aborted]:
        said = yield Ask.all(self.cohort, Say(stamp=now), Said)
        helped = yield Ask.all(list(said.answers), Unmask(stamp=now), Said)
        if len(helped.answers) < 2:
            return Aborted(helped.missing)
        self.sums.append(sum(one.number for one in said.answers.values()))
        return Report({"sum": float(self.sums[-1])})


class HelpfulClient(ToyClient):
    """Answers `Unmask` as well."""

    def answer(self, message: Message) -> Message:
        if isinstance(message, Unmask):
            self.asked.append(message)
            return Said(stamp=message.stamp, number=0)
        return super().answer(message)


@pytest.fixture
def helpful() -> dict[str, ToyClient]:
    return {"a": HelpfulClient(1), "b": HelpfulClient(20), "c": HelpfulClient(300), "d": HelpfulClient(4000)}


def engine_of(clients: dict[str, ToyClient], faults: Faults, **settings: Any) -> InProcess:
    return InProcess(clients, Codec((*SCHEMA, Unmask)), injector=Injector(faults, PHASES), **settings)


def play(
    server: ToyServer, clients: dict[str, ToyClient], faults: Faults, last: int = 3, **settings: Any
) -> list[RoundEnd]:
    engine = engine_of(clients, faults, **settings)
    return list(Driver(server, list(clients), "run", engine, 2).rounds(1, last))


def ask(engine: InProcess, kind: Callable[..., Message], stamp: Stamp = NOW) -> Replies:
    return engine.deliver(Ask.all(["a", "b", "c"], kind(stamp=stamp), Said))


def heard(client: ToyClient, number: int) -> list[str]:
    return [message.TAG for message in client.asked if message.stamp.round == number]


def dropped(ends: list[RoundEnd]) -> list[tuple[int, str, str]]:
    return [(gone.round, gone.silo, gone.reason) for end in ends for gone in end.dropped]


# What is dropped.


@pytest.mark.parametrize(
    ("phase", "heard_before", "left"),
    [("set-up", [], 4301), ("upload", ["toy/hello"], 4301), ("unmasking", ["toy/hello", "toy/say"], 4321)],
)
@pytest.mark.parametrize("strict", [False, True])
def test_a_dropped_silo_hears_nothing_from_its_phase_to_the_end_of_the_round(
    helpful: dict[str, ToyClient], phase: FaultPhase, heard_before: list[str], left: int, strict: bool
) -> None:
    faults = Faults(drop=(Fault(round=1, silo="b", phase=phase),))
    server = HardyServer()
    ends = play(server, helpful, faults, strict=strict)
    assert heard(helpful["b"], 1) == heard_before
    assert heard(helpful["b"], 3) == ["toy/say", "toy/unmask"]
    assert server.sums == [left, 4321, 4321]
    reason = f"disconnected: fault injection: unreachable from the {phase} of round 1 on"
    assert dropped(ends) == [(1, "b", reason)]


def test_a_silo_that_is_gone_stays_so_for_later_attempts_and_other_phases(clients: dict[str, ToyClient]) -> None:
    engine = engine_of(clients, Faults(drop=(Fault(round=1, silo="a"),)))
    assert not ask(engine, Hello).missing
    gone = ask(engine, Say).missing
    assert list(gone) == ["a"]
    again = Stamp("run", 1, 1)
    assert [ask(engine, kind, again).missing for kind in (Hello, Say, Unmask)][:2] == [gone, gone]
    assert not ask(engine, Say, Stamp("run", 2, 0)).missing


def test_a_drop_in_the_setup_takes_hold_where_the_round_has_none(clients: dict[str, ToyClient]) -> None:
    server = ToyServer()
    ends = play(server, clients, Faults(drop=(Fault(round=2, silo="c", phase="set-up"),)))
    assert server.sums == [321, 21, 321]
    assert [gone[:2] for gone in dropped(ends)] == [(2, "c")]


def test_a_sum_of_the_setup_is_unmasked_in_the_setup(clients: dict[str, ToyClient]) -> None:
    """Common statistics are sums too: who is to vanish after its upload does not vanish before it."""
    for phase, first in (("set-up", Hello), ("upload", Say), ("unmasking", Unmask)):
        injector = Injector(Faults(drop=(Fault(round=1, silo="a", phase=phase),)), PHASES)  # type: ignore[arg-type]
        told: list[type[Message]] = []
        for attempt in (0, 1):
            kinds = (Hello, Unmask, Say, Unmask)
            messages = [kind(stamp=Stamp("run", 1, attempt)) for kind in kinds]
            told += [type(one) for one in messages if injector.befalls("a", one).gone is None]
        assert told == {Hello: [], Say: [Hello, Unmask], Unmask: [Hello, Unmask, Say]}[first]
    engine = Injector(Faults(drop=(Fault(round=1, silo="a", phase="unmasking"),)), PHASES)
    assert engine.befalls("a", Say(stamp=NOW)) == NO_MISHAP
    assert engine.befalls("a", Unmask(stamp=Stamp("run", 1, 1))) == NO_MISHAP, "the set-up of the next attempt"
    assert engine.befalls("a", Say(stamp=Stamp("run", 1, 1))) == NO_MISHAP
    assert engine.befalls("a", Unmask(stamp=Stamp("run", 1, 1))).gone is not None


def test_a_protocol_that_needs_everybody_repeats_the_round_without(clients: dict[str, ToyClient]) -> None:
    server = ToyServer()
    ends = play(server, clients, Faults(drop=(Fault(round=2, silo="b"),)))
    assert server.sums == [321, 301, 321]
    assert [end.attempt for end in ends] == [0, 1, 0]
    assert [gone[:2] for gone in dropped(ends)] == [(2, "b")]


def test_too_few_who_are_left_end_the_run_and_say_that_it_was_on_purpose(clients: dict[str, ToyClient]) -> None:
    faults = Faults(drop=[{"round": 1, "silo": "a"}, {"round": 1, "silo": "b"}])  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match=r"a: fault injection: unreachable .*; b: fault injection: unreachable"):
        play(ToyServer(), clients, faults, last=1)


def test_the_dropped_saw_nothing_of_what_the_server_sent(clients: dict[str, ToyClient], tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, True)
    engine = engine_of(clients, Faults(drop=(Fault(round=1, silo="a"),)), recorder=recorder)
    ask(engine, Say)
    recorder.flush()
    assert not (tmp_path / "a").exists()
    server = list(views.read(tmp_path / "server" / "round-000001.0.bin"))
    assert [(seen.direction, seen.peer) for seen in server if seen.peer == "a"] == [("sent", "a")]


# What chance drops.


def draws(faults: Faults, silos: list[str], rounds: range, phases: dict[str, FaultPhase] = PHASES) -> set[Any]:
    injector = Injector(faults, phases)
    return {
        (number, silo, kind)
        for number in rounds
        for kind in (Hello, Say, Unmask)
        for silo in silos
        if injector.befalls(silo, kind(stamp=Stamp("run", number, 0))).gone is not None
    }


def test_what_is_drawn_depends_on_seed_round_and_silo_alone() -> None:
    faults, names = Faults(drop_probability=0.3, seed=7), [f"silo-{number}" for number in range(5)]
    drawn = draws(faults, names, range(1, 40))
    assert drawn == draws(faults, names[::-1], range(1, 40))
    assert draws(faults, names[1:3], range(20, 40)) == {
        one for one in drawn if one[0] >= 20 and one[1] in names[1:3]
    }, "a resumed run, of which others are not part"
    assert drawn != draws(Faults(drop_probability=0.3, seed=8), names, range(1, 40))
    assert not draws(Faults(seed=7), names, range(1, 40))


def test_chance_drops_the_part_that_it_should_and_in_either_phase_alike() -> None:
    """2,000 draws at 0.3 have a standard deviation of 20.5; five of them are allowed, and of halves of 600, 12 each."""
    names = [f"silo-{number}" for number in range(20)]
    drawn = draws(Faults(drop_probability=0.3, seed=1), names, range(1, 101))
    by_kind = Counter(kind for _, _, kind in drawn)  # the first who are gone at `Say` are gone at `Unmask` as well
    assert by_kind[Hello] == 0
    assert abs(by_kind[Unmask] - 600) < 5 * 20.5
    assert abs(by_kind[Say] - by_kind[Unmask] / 2) < 5 * 12.3
    without = draws(Faults(drop_probability=0.3, seed=1), names, range(1, 101), {"toy/hello": "set-up"})
    assert {one[:2] for one in without if one[2] is Say} == {one[:2] for one in drawn}, "no unmasking: in the upload"


def test_chance_says_so(clients: dict[str, ToyClient]) -> None:
    engine = engine_of(clients, Faults(drop_probability=0.999999))
    missing = {**ask(engine, Say).missing, **ask(engine, Unmask).missing}
    assert set(missing) == {"a", "b", "c"}
    for why in missing.values():
        assert why.reason is Reason.DISCONNECTED
        assert why.detail.startswith("fault injection: unreachable from the u")
        assert why.detail.endswith("of round 1 on, drawn with probability 0.999999")


def test_a_run_with_chance_goes_on_and_sums_the_survivors() -> None:
    helpful: dict[str, ToyClient] = {f"silo-{number}": HelpfulClient(10**number) for number in range(12)}
    server = HardyServer()
    ends = play(server, helpful, Faults(drop_probability=0.2, seed=3), 60)
    assert len(server.sums) == 60
    gone = {(number, silo, "the upload" in reason) for number, silo, reason in dropped(ends)}
    assert {late for _, _, late in gone} == {True, False}
    for number, total in enumerate(server.sums, start=1):
        uploaded = [silo for silo in helpful if (number, silo, True) not in gone]
        assert total == sum(helpful[silo].number for silo in uploaded)


# What is late or cut short.


@pytest.mark.parametrize("deadline", [None, 5.0, 60.0])
def test_a_delay_counts_against_the_deadline_and_nobody_waits(
    clients: dict[str, ToyClient], deadline: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults(delay=(Delay(round=1, silo="b", seconds=20), Delay(round=1, silo="b", seconds=10)))
    engine = engine_of(clients, faults, deadline=deadline)
    with caplog.at_level(logging.WARNING, "moretta"):
        assert not ask(engine, Hello).missing
        assert not caplog.text
        replies = ask(engine, Say)
    late = Missing(Reason.LATE, "fault injection: expected an answer in 5 s, it took 30.0 s")
    assert replies.missing == ({"b": late} if deadline == 5.0 else {})
    assert len(clients["b"].asked) == 2, "it has worked all the same"
    assert "fault injection: " in caplog.text
    assert not ask(engine, Say, Stamp("run", 2, 0)).missing


@pytest.mark.parametrize("strict", [False, True])
def test_an_answer_that_lost_its_last_byte_is_malformed(clients: dict[str, ToyClient], strict: bool) -> None:
    engine = engine_of(clients, Faults(corrupt=(Fault(round=1, silo="c"),)), strict=strict)
    assert not ask(engine, Hello).missing
    replies = ask(engine, Say)
    assert list(replies.answers) == ["a", "b"]
    assert replies.missing["c"].reason is Reason.MALFORMED
    assert replies.missing["c"].detail.startswith("fault injection: the last byte was lost: expected ")
    assert list(ask(engine, Unmask).missing) != ["c"], "only that phase is cut short"


def test_faults_of_every_kind_at_once(helpful: dict[str, ToyClient]) -> None:
    faults = Faults(
        drop=(Fault(round=2, silo="a", phase="unmasking"),),
        delay=(Delay(round=2, silo="b", seconds=9),),
        corrupt=(Fault(round=3, silo="c"),),
    )
    server = HardyServer()
    ends = play(server, helpful, faults, 4, deadline=8.0)
    assert server.sums == [4321, 4301, 4021, 4321]
    assert [(number, silo, reason.partition(":")[0]) for number, silo, reason in dropped(ends)] == [
        (2, "b", "late"), (2, "a", "disconnected"), (3, "c", "malformed"),
    ]  # fmt: skip


# What the driver makes of it.


def test_who_was_missing_is_named_though_the_round_went_on_without(helpful: dict[str, ToyClient]) -> None:
    faults = Faults(drop=(Fault(round=2, silo="a"), Fault(round=2, silo="b", phase="unmasking")))
    server = HardyServer()
    ends = play(server, helpful, faults)
    assert [(end.number, end.attempt, list(end.cohort)) for end in ends] == [
        (number, 0, ["a", "b", "c", "d"]) for number in (1, 2, 3)
    ]
    assert [[gone.silo for gone in end.dropped] for end in ends] == [[], ["a", "b"], []]


def test_a_repeated_round_asks_nobody_who_was_missing_from_it_and_keeps_the_first_reason(
    helpful: dict[str, ToyClient],
) -> None:
    """Round 1: `a` is cut short, which the sum survives; then too few help to read it."""
    faults = Faults(
        corrupt=(Fault(round=1, silo="a"),),
        drop=(Fault(round=1, silo="a", phase="unmasking"), Fault(round=1, silo="b", phase="unmasking")),
    )

    class Careful(HardyServer):
        def round(self, now: Stamp) -> Exchange[Report | Aborted]:
            said = yield Ask.all(self.cohort, Say(stamp=now), Said)
            helped = yield Ask.all(self.cohort, Unmask(stamp=now), Said)
            if helped.missing:
                return Aborted({silo: why for silo, why in helped.missing.items() if silo == "b"})
            return Report({"sum": float(sum(one.number for one in said.answers.values()))})

    server = Careful()
    (end,) = play(server, helpful, faults, 1)
    assert (end.attempt, end.report.figures, list(end.cohort)) == (1, {"sum": 4300.0}, ["c", "d"])
    assert [(gone.silo, gone.reason.partition(":")[0]) for gone in end.dropped] == [
        ("a", "malformed"), ("b", "disconnected"),
    ]  # fmt: skip


def test_to_abort_and_name_only_who_was_not_asked_is_still_a_bug(helpful: dict[str, ToyClient]) -> None:
    class Careless(HardyServer):
        def round(self, now: Stamp) -> Exchange[Report | Aborted]:
            yield Ask.all(self.cohort, Say(stamp=now), Said)
            return Aborted({"nobody": Missing(Reason.LATE, "")})

    with pytest.raises(MisuseError, match="must name who is missing"):
        play(Careless(), helpful, Faults(drop=(Fault(round=1, silo="a"),)))


def test_the_release_is_one_more_round(helpful: dict[str, ToyClient]) -> None:
    class Forgiving(HardyServer):
        def finish(self, now: Stamp) -> Exchange[Any]:
            yield Ask.all(self.cohort, Say(stamp=now), Said)
            return None

    engine = engine_of(helpful, Faults(drop=(Fault(round=3, silo="d"),)))
    driver = Driver(Forgiving(), list(helpful), "run", engine, 2)
    assert not dropped(list(driver.rounds(1, 2)))
    _, gone = driver.finish(3)
    assert gone == [DroppedSilo(3, "d", "disconnected: fault injection: unreachable from the upload of round 3 on")]


def test_who_misses_the_setup_of_all_is_named_with_the_first_round(helpful: dict[str, ToyClient]) -> None:
    """Where only some silos are chosen, statistics are gathered from all before the first round."""
    helpful["d"].faults["toy/hello", 0] = ValueError("asleep")
    engine = engine_of(helpful, Faults(drop=(Fault(round=1, silo="b"),)))
    driver = Driver(HardyServer(), list(helpful), "run", engine, 2, chosen=lambda number: ["a", "b", "c"])
    ends = list(driver.rounds(1, 2))
    assert [[(gone.round, gone.silo) for gone in end.dropped] for end in ends] == [[(0, "d"), (1, "b")], []]
