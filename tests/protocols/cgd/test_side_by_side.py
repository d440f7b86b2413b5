"""Exchanges that are played side by side, each as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from moretta.contract.codec import Codec
from moretta.contract.messages import Message, Stamp, message
from moretta.contract.roles import Ask, Exchange, Missing, Reason, Replies, side_by_side
from moretta.engines.in_process import InProcess
from moretta.errors import MisuseError, PeerError

NOW = Stamp("together", 1, 0)


@message("test-together/question")
class Question(Message):
    number: int


@message("test-together/answer")
class Answer(Message):
    number: int


@message("test-together/other")
class Other(Message):
    pass


class Toy:
    """Adds its own number; `way` misbehaves."""

    def __init__(self, own: int, way: Callable[[Question], Message] | None = None) -> None:
        self.own, self.way = own, way

    def answer(self, asked: Message) -> Message:
        assert isinstance(asked, Question)
        return self.way(asked) if self.way else Answer(stamp=asked.stamp, number=asked.number + self.own)


def played(exchange: Exchange[Any], toys: Mapping[str, Toy]) -> tuple[Any, list[list[str]]]:
    """Return what an exchange came to on the engine of one machine, and who was asked in each step."""
    engine = InProcess(toys, Codec((Question, Answer, Other)), strict=True)  # type: ignore[arg-type]
    replies, asked = None, list[list[str]]()
    while True:
        try:
            ask = exchange.send(replies)  # type: ignore[arg-type]
        except StopIteration as end:
            return end.value, asked
        asked.append(list(ask.messages))
        replies = engine.deliver(ask)


Heard = list[tuple[dict[str, int], dict[str, Missing]]]


def counting(
    silos: Sequence[str],
    steps: int,
    begin: int = 0,
    stamp: Stamp = NOW,
    check: Callable[[str, Any], None] | None = None,
) -> Exchange[Heard]:
    """Ask silos so often, those who are left, each time a question of its own; return all that came back."""
    heard: Heard = []
    for step in range(steps):
        replies = yield Ask.all(silos, Question(stamp=stamp, number=begin + step), Answer, check)
        heard.append(({name: reply.number for name, reply in replies.answers.items()}, dict(replies.missing)))
        silos = list(replies.answers)
    return heard


TOYS = {name: Toy(1000 * place) for place, name in enumerate("abcdef")}


def test_replies_go_to_the_exchange_that_asked() -> None:
    found, asked = played(side_by_side({"odd": counting("ace", 1, 10), "even": counting("bdf", 1, 20)}), TOYS)
    assert list(found) == ["odd", "even"]
    assert found["odd"] == [({"a": 10, "c": 2010, "e": 4010}, {})]
    assert found["even"] == [({"b": 1020, "d": 3020, "f": 5020}, {})]
    assert asked == [["a", "c", "e", "b", "d", "f"]]


def test_each_comes_to_what_it_comes_to_alone() -> None:
    def exchanges() -> dict[str, Exchange[Heard]]:
        return {
            "one": counting("ab", 3, 10),
            "two": counting("c", 1, 20),
            "none": counting("f", 0),
            "three": counting("ed", 2, 30),
        }

    found, asked = played(side_by_side(exchanges()), TOYS)
    assert found == {name: played(exchange, TOYS)[0] for name, exchange in exchanges().items()}
    assert list(found) == ["one", "two", "none", "three"]  # in the order given, whoever ends first
    assert asked == [["a", "b", "c", "e", "d"], ["a", "b", "e", "d"], ["a", "b"]]


def test_a_silo_may_go_from_one_exchange_to_another_that_asks_later() -> None:
    def late() -> Exchange[Heard]:
        yield Ask.all("c", Question(stamp=NOW, number=0), Answer)
        return (yield from counting("a", 1, 7))

    found, asked = played(side_by_side({"early": counting("ab", 1), "late": late()}), TOYS)
    assert found["late"] == [({"a": 7}, {})]
    assert asked == [["a", "b", "c"], ["a"]]


def test_no_exchanges_ask_nothing() -> None:
    assert played(side_by_side({}), {}) == ({}, [])
    assert played(side_by_side({"none": counting("a", 0)}), {}) == ({"none": []}, [])


def test_an_ask_of_nobody_passes() -> None:
    found, asked = played(side_by_side({"nobody": counting("", 2), "one": counting("a", 1)}), TOYS)
    assert found == {"nobody": [({}, {}), ({}, {})], "one": [({"a": 0}, {})]}
    assert asked == [["a"], []]


def raises(asked: Question) -> Message:
    raise PeerError("not today")


def test_who_is_missing_is_missing_in_its_own_exchange_alone() -> None:
    toys = {**TOYS, "b": Toy(0, raises), "d": Toy(0, raises)}
    found, asked = played(
        side_by_side({"one": counting("ab", 2), "two": counting("cd", 2), "three": counting("ef", 2)}), toys
    )
    refused = Missing(Reason.REFUSED, "not today")
    assert found["one"] == [({"a": 0}, {"b": refused}), ({"a": 1}, {})]
    assert found["two"] == [({"c": 2000}, {"d": refused}), ({"c": 2001}, {})]
    assert found["three"] == [({"e": 4000, "f": 5000}, {}), ({"e": 4001, "f": 5001}, {})]
    assert asked[1] == ["a", "c", "e", "f"]


def test_a_silo_that_is_not_there_is_missing_too() -> None:
    found, _ = played(side_by_side({"one": counting("ax", 1), "two": counting("b", 1)}), TOYS)
    ((answers, missing),) = found["one"]
    assert (answers, set(missing), missing["x"].reason) == ({"a": 0}, {"x"}, Reason.DISCONNECTED)
    assert found["two"] == [({"b": 1000}, {})]


WRONG = {
    "another kind": (
        lambda asked: Other(stamp=asked.stamp),
        "expected `test-together/answer`, got `test-together/other`",
    ),
    "the question": (lambda asked: asked, "expected `test-together/answer`, got `test-together/question`"),
    "another time": (
        lambda asked: Answer(stamp=Stamp("together", 1, 7), number=0),
        "expected an answer for round 1, attempt 0, got one for round 1, attempt 7",
    ),
    "another group's": (lambda asked: Answer(stamp=Stamp("other", 1, 0), number=0), "expected an answer for round 1"),
    "an odd number": (lambda asked: Answer(stamp=asked.stamp, number=3), "expected an even number"),
}


def is_even(silo: str, reply: Answer) -> None:
    if reply.number % 2:
        raise PeerError("expected an even number")


@pytest.mark.parametrize("way", WRONG)
def test_a_wrong_reply_is_malformed_for_that_silo_alone(way: str) -> None:
    wrong, said = WRONG[way]
    toys = {**TOYS, "b": Toy(0, wrong)}
    found, _ = played(side_by_side({"one": counting("abc", 2, check=is_even), "two": counting("de", 2)}), toys)
    (answers, missing), then = found["one"]
    assert answers == {"a": 0, "c": 2000}
    assert set(missing) == {"b"}
    assert missing["b"].reason is Reason.MALFORMED
    assert missing["b"].detail.startswith(said)
    assert set(then[1]) == {"a", "c"}, "in the second step all numbers are odd"
    assert found["two"] == [({"d": 3000, "e": 4000}, {}), ({"d": 3001, "e": 4001}, {})]


def test_each_exchange_has_its_own_kind_of_reply_and_its_own_check() -> None:
    def others() -> Exchange[list[str]]:
        replies = yield Ask.all("ab", Question(stamp=NOW, number=1), Other)
        return sorted(replies.answers)

    toys = {**TOYS, "a": Toy(0, lambda asked: Other(stamp=asked.stamp))}
    found, _ = played(
        side_by_side({"others": others(), "even": counting("cd", 1, 1, check=is_even), "any": counting("e", 1, 1)}),
        toys,
    )
    assert found["others"] == ["a"], "b answers as the other exchanges want it"
    assert set(found["even"][0][1]) == {"c", "d"}
    assert found["any"] == [({"e": 4001}, {})]


@pytest.mark.parametrize("steps", [1, 2])
def test_two_that_ask_one_silo_at_a_time_are_misuse(steps: int) -> None:
    def later() -> Exchange[None]:
        if steps == 2:
            yield Ask.all("d", Question(stamp=NOW, number=0), Answer)
        yield Ask.all("ab", Question(stamp=NOW, number=0), Answer)

    with pytest.raises(MisuseError, match="`two` asks silo `b` while another exchange does"):
        played(side_by_side({"one": counting("bc", 2), "two": later()}), TOYS)


def test_what_one_raises_ends_them_all() -> None:
    def fails() -> Exchange[None]:
        yield Ask.all("a", Question(stamp=NOW, number=0), Answer)
        raise PeerError("some silo did not follow the protocol")

    with pytest.raises(PeerError, match="did not follow"):
        played(side_by_side({"one": counting("bc", 2), "two": fails()}), TOYS)


def test_it_composes_with_itself() -> None:
    def inner() -> Exchange[Any]:
        return (yield from side_by_side({"b": counting("b", 1, 5), "c": counting("c", 2, 5)}))

    found, asked = played(side_by_side({"outer": counting("a", 1), "inner": inner()}), TOYS)
    assert found["inner"] == {"b": [({"b": 1005}, {})], "c": [({"c": 2005}, {}), ({"c": 2006}, {})]}
    assert asked == [["a", "b", "c"], ["c"]]


def test_replies_of_silos_that_were_not_asked_are_nobodys() -> None:
    exchange = side_by_side({"one": counting("a", 1)})
    ask = exchange.send(None)  # type: ignore[arg-type]
    assert list(ask.messages) == ["a"]
    reply = Answer(stamp=NOW, number=1)
    with pytest.raises(StopIteration) as ended:
        exchange.send(Replies({"a": reply, "b": reply}, {"c": Missing(Reason.LATE, "")}))
    assert ended.value.value == {"one": [({"a": 1}, {})]}
