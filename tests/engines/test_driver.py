"""The driver: what is repeated, with whom, under which stamp, and when a run fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from toy import SCHEMA, Said, Say, ToyClient, ToyServer

from moretta.contract.codec import Codec
from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Aborted, Ask, Exchange, Missing, Reason, Replies, Report
from moretta.engines.driver import COSTS, LOSSES, READMITS, Driver, DroppedSilo, RoundEnd
from moretta.engines.in_process import InProcess
from moretta.engines.journal import Journal
from moretta.engines.takes import MOST_REPORTS, AskedTakes
from moretta.errors import Disconnected, MisuseError, ParameterError, PeerError, RunFailed, SumSpent
from moretta.secure_aggregation.unmasking import Unmask

Clients = dict[str, ToyClient]


def driver_of(server: ToyServer, clients: Clients, least: int = 2) -> Driver:
    engine = InProcess(clients, Codec(SCHEMA))
    return Driver(server, list(clients), "run", engine, least)


def play(server: ToyServer, clients: Clients, last: int = 3, least: int = 2) -> list[RoundEnd]:
    return list(driver_of(server, clients, least).rounds(1, last))


def test_one_setup_serves_all_rounds_while_everybody_is_there(clients: Clients) -> None:
    server = ToyServer()
    ends = play(server, clients)
    assert [(end.number, end.attempt, end.report, end.dropped) for end in ends] == [
        (number, 0, Report({"sum": 321.0}), []) for number in (1, 2, 3)
    ]
    assert server.setups == [(Stamp("run", 1, 0), ("a", "b", "c"))]


def test_rounds_begin_where_they_are_told_to_and_are_lazy(clients: Clients) -> None:
    server = ToyServer()
    rounds = driver_of(server, clients).rounds(7, 9)
    assert server.setups == []
    assert next(rounds).number == 7
    assert server.sums == [321]
    assert [end.number for end in rounds] == [8, 9]
    assert list(driver_of(server, clients).rounds(10, 9)) == []


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (ValueError("a bug"), "failed: ValueError: a bug"),
        (PeerError("no"), "refused: no"),
        (ParameterError("these rows"), "bad input: these rows"),
    ],
)
def test_a_silo_that_misses_a_round_costs_that_round_itself_only(
    clients: Clients, fault: Exception, reason: str
) -> None:
    clients["b"].faults["toy/say", 2] = fault
    server = ToyServer()
    ends = play(server, clients, 4)
    assert server.sums == [321, 301, 321, 321]
    assert [end.attempt for end in ends] == [0, 1, 0, 0]
    assert [end.dropped for end in ends] == [[], [DroppedSilo(2, "b", reason)], [], []]
    # Every change of the cohort is a set-up of its own, under a stamp of its own, and only a change is one.
    assert server.setups == [
        (Stamp("run", 1, 0), ("a", "b", "c")),
        (Stamp("run", 2, 1), ("a", "c")),
        (Stamp("run", 3, 0), ("a", "b", "c")),
    ]


def test_a_silo_that_misses_the_setup_is_left_out_of_the_round(clients: Clients) -> None:
    clients["a"].faults["toy/hello", 1] = PeerError("not yet")
    server = ToyServer()
    ends = play(server, clients, 2)
    assert server.sums == [320, 321]
    assert ends[0].dropped == [DroppedSilo(1, "a", "refused: not yet")]
    assert [cohort for _, cohort in server.setups] == [("a", "b", "c"), ("b", "c"), ("a", "b", "c")]


def test_silos_may_go_one_after_the_other(clients: Clients) -> None:
    clients["a"].faults["toy/say", 1] = PeerError("first")
    clients["c"].faults["toy/hello", 1] = lambda message: (
        ToyClient(3).answer(message) if message.stamp.attempt == 0 else _raise(PeerError("second"))
    )
    server = ToyServer()
    ends = play(server, clients, 2, least=1)
    assert (ends[0].attempt, ends[0].report.figures) == (2, {"sum": 20.0})
    assert ends[0].dropped == [DroppedSilo(1, "a", "refused: first"), DroppedSilo(1, "c", "refused: second")]
    assert ends[1].report.figures == {"sum": 321.0}


def _raise(error: Exception) -> None:
    raise error


def test_no_stamp_serves_two_attempts(clients: Clients) -> None:
    for number in (1, 2, 4):
        clients["a"].faults["toy/say", number] = PeerError("no")
    clients["b"].faults["toy/hello", 4] = PeerError("no")
    play(ToyServer(), clients, 5, least=1)
    asked = [(message.TAG, message.stamp) for message in clients["c"].asked]
    assert len(set(asked)) == len(asked)
    assert [stamp for _, stamp in asked] == sorted(stamp for _, stamp in asked)


def test_too_few_silos_end_the_run_and_all_who_are_missing_are_named(clients: Clients) -> None:
    clients["a"].faults["toy/say", 2] = ValueError("the disk is full")
    clients["b"].faults["toy/say", 2] = lambda message: (
        _raise(PeerError("I have left")) if message.stamp.attempt else ToyClient(20).answer(message)
    )
    server = ToyServer()
    rounds = driver_of(server, clients).rounds(1, 3)
    assert next(rounds).number == 1
    with pytest.raises(RunFailed, match=r"round 2 .* \(a: ValueError: the disk is full; b: I have left\).*fix what"):
        next(rounds)
    assert server.sums == [321]


def test_input_that_no_silo_can_use_is_the_users_fault(clients: Clients) -> None:
    for client in clients.values():
        client.faults["toy/hello", 1] = ParameterError("other columns")
    with pytest.raises(ParameterError, match=r"^round 1: a: other columns \(and likewise b, c\)$"):
        play(ToyServer(), clients)
    clients["a"].faults["toy/hello", 1] = PeerError("no")
    with pytest.raises(RunFailed, match="a: no; b: other columns"):
        play(ToyServer(), clients)


def test_input_that_was_good_in_earlier_rounds_is_a_run_that_diverged(clients: Clients) -> None:
    for client in clients.values():
        client.faults["toy/say", 2] = ParameterError("NaN in `w`")
    with pytest.raises(RunFailed, match=r"round 2: a: NaN in `w` \(and likewise b, c\); .* probably diverged"):
        play(ToyServer(), clients)


def test_a_protocol_that_aborts_and_names_nobody_is_a_bug(clients: Clients) -> None:
    class Careless(ToyServer):
        def round(self, now: Stamp) -> Exchange[Report | Aborted]:
            yield from ()
            return Aborted({})

    with pytest.raises(MisuseError, match="must name who is missing"):
        play(Careless(), clients)


def test_a_fault_that_nobody_can_be_named_for_ends_the_run_by_its_round(clients: Clients) -> None:
    class Broken(ToyServer):
        def round(self, now: Stamp) -> Exchange[Report | Aborted]:
            yield from ()
            raise PeerError("weights that cannot be")

    with pytest.raises(RunFailed, match=r"round 1, attempt 0: weights that cannot be$"):
        play(Broken(), clients)


def test_the_release_is_repeated_like_a_round(clients: Clients) -> None:
    clients["c"].faults["toy/say", 3] = ValueError("gone")
    server = ToyServer()
    driver = driver_of(server, clients)
    assert len(list(driver.rounds(1, 2))) == 2
    outcome, dropped = driver.finish(3)
    assert outcome.facts == {"last": "word"}
    assert dropped == [DroppedSilo(3, "c", "failed: ValueError: gone")]
    assert server.setups[-1] == (Stamp("run", 3, 1), ("a", "b"))


def test_what_the_server_computes_is_aggregation(clients: Clients) -> None:
    open_phases: list[str] = []

    class Watching(InProcess):
        def deliver(self, ask: Ask) -> Replies:
            open_phases.append(f"delivering in {self.clock._open}")
            return super().deliver(ask)

    engine = Watching(clients, Codec(SCHEMA))

    class Watched(ToyServer):
        def round(self, now: Stamp) -> Exchange[Report | Aborted]:
            open_phases.extend(engine.clock._open)
            return (yield from super().round(now))

    list(Driver(Watched(), list(clients), "run", engine, 2).rounds(1, 1))
    assert open_phases == ["delivering in []", "aggregation", "delivering in []"]


def test_messages_of_a_run_carry_its_id(clients: Clients) -> None:
    play(ToyServer(), clients)
    messages: list[Message] = [message for client in clients.values() for message in client.asked]
    assert {message.stamp.run for message in messages} == {"run"}


# Takes: what silos helped to open is not asked for again over others.


class Spender(ToyClient):
    """Says that takes are spent: `says` has, by round and take, what it says then."""

    def __init__(self, number: int, says: dict[tuple[int, int], tuple[int, str, bool]]) -> None:
        super().__init__(number)
        self.says = says

    def answer(self, message: Message) -> Message:
        said = self.says.get((message.stamp.round, message.stamp.take))
        if said is None or not isinstance(message, Say):
            return super().answer(message)
        self.asked.append(message)
        raise SumSpent(said[0], tuple(said[1]), said[2])


class Opening(ToyServer):
    """A server whose silos are bound in some attempts; `held_up` has who is silent then, by round and attempt."""

    def __init__(self, held_up: dict[tuple[int, int], str]) -> None:
        super().__init__()
        self.held_up, self.played = held_up, list[tuple[Stamp, str]]()

    def round(self, now: Stamp) -> Exchange[Report | Aborted]:
        self.played.append((now, "".join(self.cohort)))
        silent = [silo for silo in self.held_up.get((now.round, now.attempt), "") if silo in self.cohort]
        if silent:
            yield from ()
            return Aborted(dict.fromkeys(silent, Missing(Reason.LATE, "it was silent")), opened=silent)
        return (yield from super().round(now))


class Again(Opening):
    """A server of silos that are bound to sets of whole rows; asked of its own set, a silo answers."""

    def __init__(self, sets: Mapping[str, str], clients: Clients) -> None:
        super().__init__({})
        self.sets, self.clients = sets, clients

    def setup(self, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
        for silo, named in self.sets.items():
            if list(named or cohort) == list(cohort) and now.attempt:
                self.clients[silo].says = {}  # type: ignore[attr-defined]  # they are spenders
        return (yield from super().setup(now, cohort))


def without(only: str, by: str) -> str:
    return (
        f"spent: {', '.join(by)} reported that only {', '.join(only)} may repeat this round, having helped to open a "
        "sum of theirs"
    )


def spenders(names: str = "abc", **says: dict[tuple[int, int], tuple[int, str, bool]]) -> Clients:
    return {name: Spender(10**place, says.get(name, {})) for place, name in enumerate(names)}


def test_a_spent_take_costs_no_silo_the_round_and_the_highest_next_take_wins() -> None:
    clients = spenders(a={(2, 0): (1, "ab", False)}, b={(2, 0): (3, "ab", False)})
    server, asked = Opening({}), AskedTakes()
    asked.ask(Stamp("run", 2, 5, 2))  # in an earlier session
    driver = Driver(server, list(clients), "run", InProcess(clients, Codec(SCHEMA)), 2, asked=asked)
    ends = list(driver.rounds(1, 3))
    assert [(end.attempt, end.take, end.dropped) for end in ends] == [(0, 0, []), (1, 3, []), (0, 0, [])]
    assert server.sums == [111, 111, 111]
    assert server.played[1:3] == [(Stamp("run", 2, 0, 0), "abc"), (Stamp("run", 2, 1, 3), "abc")]


@pytest.mark.parametrize("named", [1, 2, 2**31 - 1])
def test_a_next_take_is_believed_up_to_one_past_those_that_were_asked_for(named: int) -> None:
    ends = play(Opening({}), spenders(a={(2, 0): (named, "ab", False)}))
    assert [(end.attempt, end.take, end.dropped) for end in ends] == [(0, 0, []), (1, 1, []), (0, 0, [])]


def test_each_take_is_on_disk_before_it_is_asked_for(tmp_path: Path) -> None:
    path, on_disk = tmp_path / "takes.txt", list[str]()

    class Watched(Opening):
        def round(self, now: Stamp) -> Exchange[Report | Aborted]:
            on_disk.append(path.read_text() if path.exists() else "")
            return (yield from super().round(now))

    def played(says: int, last: int) -> list[int]:
        clients = spenders(a={(2, take): (take + 1, "ab", False) for take in range(says)})
        engine, asked = InProcess(clients, Codec(SCHEMA)), AskedTakes(Journal(path))
        return [end.take for end in Driver(Watched({}), list(clients), "run", engine, 2, asked=asked).rounds(1, last)]

    assert played(2, 3) == [0, 2, 0]
    assert on_disk == ["", "", "2 1\n", "2 1\n2 2\n", "2 1\n2 2\n"]
    # A server that goes back to an earlier checkpoint believes what is one past them.
    clients = spenders(a={(2, 0): (3, "abc", False)}, b={(2, 0): (9, "abc", False)})
    asked = AskedTakes(Journal(path))
    driver = Driver(Opening({}), list(clients), "run", InProcess(clients, Codec(SCHEMA)), 2, asked=asked)
    assert [end.take for end in driver.rounds(2, 2)] == [3]
    assert path.read_text() == "2 1\n2 2\n2 3\n"
    path.write_text("2 1\nnonsense\n")
    with pytest.raises(ParameterError, match="expected a round and a take"):
        AskedTakes(Journal(path))


def test_who_is_missing_beside_a_spent_take_is_left_out_of_the_next() -> None:
    clients = spenders(a={(1, 0): (1, "abc", False)})
    clients["c"].faults["toy/say", 1] = PeerError("no")
    ends = play(Opening({}), clients, 1)
    assert [(end.take, end.report.figures) for end in ends] == [(1, {"sum": 11.0})]
    assert ends[0].dropped == [DroppedSilo(1, "c", "refused: no")]


def test_after_silos_were_bound_the_next_take_goes_on_without_the_silent() -> None:
    server = Opening({(1, 0): "c"})
    ends = play(server, spenders(), 2)
    assert [(end.attempt, end.take, end.report.figures["sum"]) for end in ends] == [(1, 1, 11.0), (0, 0, 111.0)]
    assert ends[0].dropped == [DroppedSilo(1, "c", "late: it was silent")]


def test_a_silo_that_has_cost_two_takes_sits_a_round_out_and_is_set_up_anew() -> None:
    server = Opening({(1, 0): "c", (3, 0): "c"})
    ends = list(driver_of(server, spenders()).rounds(1, 5))
    assert [(end.take, end.report.figures["sum"]) for end in ends] == [
        (1, 11.0), (0, 111.0), (1, 11.0), (0, 11.0), (0, 111.0)
    ]  # fmt: skip
    assert [[one.silo for one in end.dropped] for end in ends] == [["c"], [], ["c"], ["c"], []]
    assert "silent 2 times" in ends[3].dropped[0].reason
    assert "set up anew in the next" in ends[3].dropped[0].reason
    assert (Stamp("run", 5, 0, 0), tuple("abc")) in server.setups, "its keys are new"


def test_a_silo_that_costs_takes_without_end_is_let_in_again_a_stated_number_of_times() -> None:
    """What a silo that works with a server may gain, a take more each time, has a bound."""
    server = Opening({(number, 0): "c" for number in range(1, 100)})
    ends = list(driver_of(server, spenders()).rounds(1, 99))
    assert sum(end.take for end in ends) == COSTS * (READMITS + 1)
    assert all([one.silo for one in end.dropped] == ["c"] for end in ends)
    assert "left out until the run is resumed" in ends[-1].dropped[0].reason
    assert next(driver_of(server, spenders()).rounds(100, 100)).report.figures == {"sum": 111.0}


def test_a_costly_silo_stays_where_there_would_be_too_few_without_it() -> None:
    server = Opening({(1, 0): "b", (2, 0): "b", (3, 0): "c", (4, 0): "c"})
    ends = list(driver_of(server, spenders(), least=1).rounds(1, 5))
    assert [end.report.figures["sum"] for end in ends] == [101.0, 101.0, 1.0, 11.0, 11.0]
    driver = driver_of(Opening({}), spenders(), least=2)
    driver._charge(0, [*"bbcc"])  # as if each had held up the others where the other one was there
    assert [end.report.figures["sum"] for end in driver.rounds(1, 1)] == [111.0]


# Lost rounds: what cannot be completed is given up, and the next round follows.


class Away(InProcess):
    """An engine that does not reach silos: `away` has them by round and, if not all of it, the tag of the message."""

    def __init__(self, clients: Clients, away: Mapping[int, str]) -> None:
        super().__init__(clients, Codec(SCHEMA))
        self.gone = away

    def deliver(self, ask: Ask) -> Replies:
        gone = [silo for silo, one in ask.messages.items() if silo in self.gone.get(one.stamp.round, "")]
        replies = super().deliver(replace(ask, messages={k: v for k, v in ask.messages.items() if k not in gone}))
        return replace(replies, missing={**replies.missing, **dict.fromkeys(gone, Missing(Reason.LATE, "gone"))})


class Unmasking(ToyServer):
    """A server that asks to open a sum, of which too few come back."""

    def round(self, now: Stamp) -> Exchange[Report | Aborted]:
        report = yield from super().round(now)
        if isinstance(report, Aborted):
            message = Unmask(stamp=now, survivors=("a",), signatures={}, sealed=b"", digests=b"")
            yield Ask.all(self.cohort, message, Said)
        return report


def lossy(away: Mapping[int, str], last: int, server: ToyServer | None = None, **known: bool) -> Iterator[RoundEnd]:
    clients = spenders()
    return Driver(server or ToyServer(), list(clients), "run", Away(clients, away), 2, **known).rounds(1, last)


def test_a_round_that_too_few_are_there_for_is_lost_and_the_next_begins_with_new_keys() -> None:
    server = ToyServer()
    ends = list(lossy({2: "bc"}, 3, server))
    assert [end.report.figures.get("sum") for end in ends] == [111.0, None, 111.0]
    assert [bool(end.lost) for end in ends] == [False, True, False]
    assert "round 2 cannot be completed by 1 of 3 silos" in ends[1].lost
    assert (ends[1].cohort, ends[1].dropped) == ([*"abc"], [DroppedSilo(2, silo, "late: gone") for silo in "bc"])
    assert [stamp for stamp, _ in server.setups][-1] == Stamp("run", 3, 0)


def test_so_many_rounds_in_a_row_may_be_lost() -> None:
    rounds, ends = lossy(dict.fromkeys(range(2, 99), "bc"), 99), list[RoundEnd]()
    with pytest.raises(RunFailed, match=f"round {LOSSES + 2} cannot .*; the {LOSSES} rounds before it were lost too$"):
        ends.extend(rounds)
    assert len(list(lossy({number: "bc" for number in range(2, 99) if number % (LOSSES + 1)}, 98))) == 98


def test_a_run_with_no_round_to_show_fails() -> None:
    with pytest.raises(RunFailed, match=r"round 2 cannot be completed by 1 of 3 silos.*bring the others back$"):
        list(lossy({1: "bc", 2: "bc"}, 2))


@pytest.mark.parametrize("draws", [True, False])
def test_whole_rows_of_which_a_sum_may_be_open_are_not_asked_for_in_another_round(draws: bool) -> None:
    rounds = lossy({2: "bc"}, 3, Unmasking(), draws=draws)
    if draws:
        assert [bool(end.lost) for end in rounds] == [False, True, False]
        return
    with pytest.raises(RunFailed, match=r"round 2 cannot be completed by 0 of 3 silos"):  # nor does a toy unmask
        list(rounds)


def test_a_round_of_which_silos_opened_a_sum_in_an_earlier_session_is_not_lost() -> None:
    """Nobody is asked to open one now: a, b and c were, d and e play without them; the next round would be of all."""
    says = {(2, 0): (0, "abc", True)}
    clients = spenders("abcde", a=says, b=says, c=says)

    class Leaving(InProcess):
        def deliver(self, ask: Ask) -> Replies:
            (stamp, *_) = (one.stamp for one in ask.messages.values())
            left = {"c": 1, "a": 2, "b": 2, "e": 3} if stamp.round == 2 else {}  # from which attempt on
            gone = [silo for silo in ask.messages if left.get(silo, 99) <= stamp.attempt]
            replies = super().deliver(replace(ask, messages={k: v for k, v in ask.messages.items() if k not in gone}))
            return replace(replies, missing={**replies.missing, **dict.fromkeys(gone, Missing(Reason.LATE, "gone"))})

    driver = Driver(ToyServer(), list(clients), "run", Leaving(clients, Codec(SCHEMA)), 2)
    with pytest.raises(RunFailed, match="round 2 "):
        list(driver.rounds(1, 3))


def test_a_round_that_others_will_not_mend_is_not_lost() -> None:
    """Who refuses would refuse the next round too."""
    clients = spenders()
    for silo in "bc":
        clients[silo].faults["toy/say", 2] = PeerError("no")
    with pytest.raises(RunFailed, match=r"round 2 .*fix what these silos report"):
        play(ToyServer(), clients)


def test_the_release_is_not_lost() -> None:
    clients = spenders()
    driver = Driver(ToyServer(), list(clients), "run", Away(clients, {2: "bc"}), 2)
    assert len(list(driver.rounds(1, 1))) == 1
    with pytest.raises(RunFailed, match=r"round 2 cannot be completed by 1 of 3 silos"):
        driver.finish(2)


def test_whole_rows_are_played_again_by_the_same_silos_alone() -> None:
    clients = spenders(a={(1, 0): (0, "ab", True)}, b={(1, 0): (0, "ab", True)})
    ends = play(Again({"a": "ab", "b": "ab"}, clients), clients, 2)
    assert [(end.take, end.cohort, end.report.figures) for end in ends] == [
        (0, ["a", "b"], {"sum": 11.0}), (0, ["a", "b", "c"], {"sum": 111.0})
    ]  # fmt: skip
    assert ends[0].dropped == [DroppedSilo(1, "c", without("ab", by="ab"))]
    assert ends[1].dropped == []


@pytest.mark.parametrize("named", ["z", "yz", "a", "az", "c", "ab", "acz"])
def test_a_silo_that_names_an_impossible_set_is_malformed_and_costs_the_round_only_itself(
    named: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = Opening({})
    ends = play(server, spenders("abcde", c={(2, 0): (0, named, True)}))
    assert server.sums == [11111, 11011, 11111]
    assert [cohort for _, cohort in server.setups] == [tuple("abcde"), tuple("abde"), tuple("abcde")]
    said = (
        f"malformed: it reports that only {list(named)} may repeat this round; expected at least 2 silos of the round, "
        f"itself among them; if others took part before, bring them back, or allow sums "
        "over other sets at each silo ([privacy] repeat-whole-rows)"
    )
    assert [end.dropped for end in ends] == [[], [DroppedSilo(2, "c", said)], []]
    assert f"round 2, attempt 0: silo `c` is missing, {said}" in caplog.text


def test_only_silos_that_were_to_play_the_round_may_be_named() -> None:
    clients = spenders("abcd", c={(1, 0): (1, "acd", True)})
    driver = Driver(Opening({}), list("abcd"), "run", InProcess(clients, Codec(SCHEMA)), 2, lambda number: list("abc"))
    (end,) = driver.rounds(1, 1)
    assert (end.report.figures, [one.silo for one in end.dropped]) == ({"sum": 11.0}, ["c"])


def test_who_names_an_impossible_set_while_others_are_bound_has_cost_the_take() -> None:
    class Bound(ToyServer):
        def round(self, now: Stamp) -> Exchange[Report | Aborted]:
            replies = yield Ask.all(self.cohort, Say(stamp=now), Said)
            if replies.missing:
                return Aborted(replies.missing, opened=sorted(replies.missing))
            return Report({})

    lies = {(number, 0): (0, "z", True) for number in (1, 2)}
    ends = play(Bound(), spenders(c=lies))
    assert [(end.take, [one.silo for one in end.dropped]) for end in ends] == [(1, ["c"]), (1, ["c"]), (0, ["c"])]
    assert "silent 2 times" in ends[2].dropped[0].reason


ALONE = (
    "refused: it reports that only the same silos as before may repeat this round, which most of the others do not "
    "report"
)


@pytest.mark.parametrize("named", ["", "ab", "ac"])
def test_a_set_that_one_silo_names_costs_that_silo_the_round_and_nobody_else(named: str) -> None:
    server = Opening({})
    ends = play(server, spenders(a={(number, 0): (0, named, True) for number in (1, 2)}))
    assert [(end.attempt, end.take, end.cohort) for end in ends] == [
        (1, 0, ["b", "c"]), (1, 0, ["b", "c"]), (0, 0, ["a", "b", "c"])
    ]  # fmt: skip
    assert [end.dropped for end in ends] == [[DroppedSilo(1, "a", ALONE)], [DroppedSilo(2, "a", ALONE)], []]


def test_of_sets_that_few_silos_name_none_is_played() -> None:
    clients = spenders("abcde", a={(1, 0): (0, "abc", True)}, d={(1, 0): (0, "de", True)})
    (end,) = play(Opening({}), clients, 1)
    assert (end.take, end.cohort) == (0, ["b", "c", "e"])
    assert end.dropped == [DroppedSilo(1, silo, ALONE) for silo in "ad"]


def test_a_silo_whose_set_most_name_only_later_plays_again() -> None:
    """Its fellows were away when it was first heard."""
    clients = spenders("abc", a={(1, 0): (0, "ab", True)}, b={(1, 0): (0, "ab", True)})

    class Returning(InProcess):
        here = False

        def deliver(self, ask: Ask) -> Replies:
            gone = {} if self.here else dict.fromkeys({"b"} & ask.messages.keys(), Missing(Reason.DISCONNECTED, "gone"))
            some = replace(ask, messages={name: one for name, one in ask.messages.items() if name not in gone})
            replies = super().deliver(some)
            return replace(replies, missing={**replies.missing, **gone})

        def back(self, silos: Sequence[str], least: int) -> Sequence[str]:
            self.here = True
            return silos

    server = Again({"a": "ab", "b": "ab"}, clients)
    (end,) = Driver(server, list("abc"), "run", Returning(clients, Codec(SCHEMA)), 2).rounds(1, 1)
    assert (end.take, end.cohort) == (0, ["a", "b"])


# Whoever is last in the alphabet would otherwise choose, as would the highest take.
@pytest.mark.parametrize(
    ("says", "only"),
    [
        ({"a": "abd", "b": "abd", "d": "abd", "c": "cde"}, "abd"),
        ({"a": "abd", "b": "abd", "d": "abd", "c": "abcde"}, "abd"),
        ({"a": "abd", "b": "abd", "d": "abd", "e": ""}, "abd"),
    ],
)
def test_the_set_that_most_silos_name_plays(says: dict[str, str], only: str) -> None:
    lone = [silo for silo, named in says.items() if named != only]
    clients = spenders(
        "abcde", **{silo: {(1, 0): (7 if silo in lone else 0, named, True)} for silo, named in says.items()}
    )
    server = Again(says, clients)
    (end,) = play(server, clients, 1)
    assert (end.attempt, end.take, end.cohort) == (1, 0, list(only))
    by = "".join(silo for silo, named in says.items() if named == only)
    assert end.dropped == [DroppedSilo(1, silo, without(only, by=by)) for silo in "abcde" if silo not in only]


def test_a_take_that_one_silo_names_for_the_set_of_the_others_is_not_played() -> None:
    says = {"a": "abc", "b": "abc", "c": "abc"}
    clients = spenders(
        "abcd", **{silo: {(1, 0): (9 if silo == "c" else 0, named, True)} for silo, named in says.items()}
    )
    (end,) = play(Again(says, clients), clients, 1)
    assert (end.take, end.cohort) == (0, ["a", "b", "c"])


@pytest.mark.parametrize("sets", [["bc"], ["bc", "bcd"]], ids=["one", "by turns"])
def test_a_silo_that_names_sets_without_end_takes_nobody_along(sets: list[str]) -> None:
    bound: dict[tuple[int, int], tuple[int, str, bool]] = {(1, 0): (1, "abc", False)}
    clients = spenders("abcd"[: len(set("a").union(*sets))], a=bound, b=bound)

    class Liar(ToyServer):
        def setup(self, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
            clients["c"].says = {(1, 0): (0, sets[now.attempt % len(sets)], True)}
            return (yield from super().setup(now, cohort))

        def round(self, now: Stamp) -> Exchange[Report | Aborted]:
            clients["c"].says = {(1, 0): (0, sets[now.attempt % len(sets)], True)}
            return (yield from super().round(now))

    (end,) = play(Liar(), clients, 1)
    assert (end.take, [one.silo for one in end.dropped]) == (1, ["c"])
    assert end.dropped[0].reason == ALONE


def test_a_run_that_fails_while_nobody_is_missing_says_so() -> None:
    with pytest.raises(RunFailed, match=r"round 1 cannot be completed by 1 of 1 silos, .* \(nobody is missing\)"):
        play(Opening({}), spenders("a", a={(1, 0): (1, "a", False)}), 1)


def test_whole_rows_wait_for_the_same_silos_and_then_fail_by_name() -> None:
    says = {(2, 0): (0, "abc", True)}
    waited: list[tuple[list[str], int]] = []

    class Waiting(InProcess):
        def back(self, silos: Sequence[str], least: int) -> Sequence[str]:
            waited.append((list(silos), least))
            return silos if len(waited) == 2 else ()

    def driver() -> Driver:
        clients = spenders(a=says, b=says)
        clients["c"].faults["toy/say", 2] = Disconnected("gone")
        return Driver(ToyServer(), list(clients), "run", Waiting(clients, Codec(SCHEMA)), 2)

    for _ in range(2):
        with pytest.raises(RunFailed, match=r"round 2 can only be repeated .* as before, a, b, c, .* missing: c;"):
            list(driver().rounds(1, 2))
    assert waited[0] == (["c"], 1)
    assert len(waited) > 2


def test_a_silo_that_says_without_end_that_takes_are_spent_is_left_out() -> None:
    clients = spenders(b={(1, take): (take + 1, "ab", False) for take in range(99)})
    server = Opening({})
    ends = play(server, clients, 2)
    assert [(end.take, end.report.figures["sum"]) for end in ends] == [(MOST_REPORTS, 101.0), (0, 111.0)]
    assert [one.silo for one in ends[0].dropped] == ["b"]
    assert "that the take was spent" in ends[0].dropped[0].reason
    assert len(server.played) == MOST_REPORTS + 3


def test_silos_that_all_say_so_without_end_end_the_run() -> None:
    says = {(1, take): (take + 1, "abc", False) for take in range(99)}
    server = Opening({})
    with pytest.raises(RunFailed, match=r"round 1 .* that the take was spent"):
        play(server, spenders(a=says, b=says, c=says), 1)
    assert len(server.played) <= MOST_REPORTS + 2
