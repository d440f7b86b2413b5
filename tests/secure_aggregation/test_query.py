"""The digest of what was asked: what it depends on, and that a silo that was asked something else is named."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from sum_driver import Seen, Silo, agreed, play, rostered

from moretta.contract.codec import Codec
from moretta.contract.messages import Array, Message, Stamp, Tensors, message
from moretta.contract.roles import Aborted, Reason
from moretta.secure_aggregation.additive import AddedShares
from moretta.secure_aggregation.cohort import Rules
from moretta.secure_aggregation.sums import Sum, _add, message_digest, query_of
from moretta.secure_aggregation.unmasking import Confirmed, SelfMaskShares

NOW = Stamp("run", 3, 1, 2)
NAMES, VICTIM = tuple("abcdef"), "c"


@message("test/question")
class Query(Message):
    OWN: ClassVar[frozenset[str]] = frozenset({"own"})

    array: Array
    tensors: Tensors
    integer: int
    number: float
    flag: bool
    text: str
    octets: bytes
    integers: Mapping[str, int]
    numbers: Mapping[str, float]
    names: tuple[str, ...]
    own: str


@message("test/another-question")
class AnotherQuestion(Query):
    OWN: ClassVar[frozenset[str]] = frozenset({"own"})


GOOD = Query(
    stamp=NOW, array=np.arange(6, dtype=np.float32).reshape(2, 3), tensors={"a": np.ones(2), "b": np.zeros(())},
    integer=1, number=0.5, flag=True, text="1", octets=b"1", integers={"a": 1, "b": 2}, numbers={"a": 1.0},
    names=("a", "bc"), own="mine",
)  # fmt: skip
CHANGES: list[dict[str, Any]] = [
    {"array": GOOD.array.reshape(3, 2)},
    {"array": GOOD.array.astype(np.float64)},
    {"array": GOOD.array.astype(np.int32)},
    {"array": -GOOD.array},  # of which one entry is a zero with a sign
    {"array": np.nextafter(GOOD.array, np.float32(9))},
    {"array": GOOD.array[:1]},
    {"tensors": {"a": np.zeros(()), "b": np.ones(2)}},
    {"tensors": {"a": np.ones(2)}},
    {"tensors": {"a": np.ones(2), "c": np.zeros(())}},
    {"tensors": {}},
    {"integer": 2},
    {"integer": -1},
    {"number": -0.5},
    {"number": float(np.nextafter(0.5, 1))},
    {"flag": False},
    {"text": "11"},
    {"text": ""},
    {"octets": b"2"},
    {"integers": {"a": 2, "b": 1}},
    {"integers": {"a": 1}},
    {"integers": {}},
    {"numbers": {"a": 2.0}},
    {"numbers": {"b": 1.0}},
    {"names": ("ab", "c")},
    {"names": ("a", "bc", "d")},
    {"names": ()},
]


def test_any_change_of_a_field_changes_the_digest() -> None:
    digests = {message_digest(replace(GOOD, **change)) for change in CHANGES}
    assert len(digests | {message_digest(GOOD)}) == len(CHANGES) + 1
    assert {name for change in CHANGES for name in change} == set(Query.KINDS) - Query.OWN


def test_the_kind_of_message_is_in_it() -> None:
    fields = {name: getattr(GOOD, name) for name in Query.KINDS}
    assert message_digest(AnotherQuestion(stamp=NOW, **fields)) != message_digest(GOOD)


@pytest.mark.parametrize(
    "change",
    [{"stamp": stamp} for stamp in (Stamp("another", 3, 1, 2), Stamp("run", 4, 1, 2), Stamp("run", 3, 0, 2),
                                    Stamp("run", 3, 1, 0))] + [{"own": "another's"}, {"own": ""}],
)  # fmt: skip
def test_stamps_and_what_is_the_addressees_own_are_not_in_it(change: dict[str, Any]) -> None:
    assert message_digest(replace(GOOD, **change)) == message_digest(GOOD)


def test_how_memory_is_laid_out_is_not_in_it() -> None:
    straight, codec = GOOD.array, Codec((Query,))
    for array in (np.asfortranarray(straight), np.repeat(straight, 2, axis=1)[:, ::2]):
        assert message_digest(replace(GOOD, array=array)) == message_digest(GOOD)
        assert message_digest(replace(GOOD, tensors={"w": array})) == message_digest(
            replace(GOOD, tensors={"w": straight})
        )
    assert message_digest(codec.decode(codec.encode(GOOD))) == message_digest(GOOD)
    little, big = hashlib.sha256(), hashlib.sha256()  # of a machine of the other kind; no message carries such arrays
    _add(little, straight)
    _add(big, straight.astype(">f4"))
    assert little.digest() == big.digest()
    turned = {"integers": {"b": 2, "a": 1}, "tensors": dict(reversed(list(GOOD.tensors.items())))}
    assert message_digest(replace(GOOD, **turned)) == message_digest(GOOD)


def test_what_was_agreed_on_before_is_in_it_and_what_a_silo_says_of_itself_is_not() -> None:
    found = [query_of(GOOD, *agreed).digest for agreed in [(), (b"a",), (b"b",), (b"a", b"b"), (b"ab",), (b"b", b"a")]]
    assert len(set(found)) == len(found)
    assert {len(digest) for digest in found} == {32}
    ways: list[dict[str, Any]] = [{}, {"whole": True}, {"once": "score", "whole": True}]
    assert len({query_of(GOOD, **way).digest for way in ways}) == 1


# A silo that was asked something else.


@message("test/learn")
class Learn(Message):
    model: Array
    encoding: Mapping[str, int]


class Learner(Silo):
    """Answers `Learn` too. agreed: the digest of what was agreed on before."""

    agreed = b"as agreed"

    def __call__(self, message: Message) -> Any:
        if isinstance(message, Learn):
            about = query_of(message, self.agreed)
            return self.contributor.upload(message.stamp, self.tensors, 1, message.encoding, asked=about)
        return super().__call__(message)


SCHEMES = [("pairwise", False), ("pairwise", True), ("additive-shares", False), ("additive-shares", True)]


@pytest.mark.parametrize("vote", [False, True])
@pytest.mark.parametrize("what", ["model", "agreed"])
@pytest.mark.parametrize(("scheme", "roster"), SCHEMES)
def test_a_silo_that_was_asked_something_else_is_named_before_anything_opens(
    scheme: str, roster: bool, what: str, vote: bool
) -> None:
    rules, credentials, run = rostered(NAMES) if roster else (Rules(), {}, "run")
    silos = {
        name: Learner(scheme, name, 64, {"w": [0.1, 0.2]}, rules=rules, credentials=credentials.get(name))
        for name in NAMES
    }
    now = Stamp(run, 1, 0)
    server = agreed(silos, scheme, rules=rules, now=now)
    wanted = server.want({"w": (2,)}, {"w": 1.0}, len(NAMES))
    ask = Learn(stamp=now, model=np.zeros(3), encoding=wanted.fraction_bits)
    asks = dict.fromkeys(NAMES, ask)
    if what == "model":  # one that lets the victim's rows be seen in its gradient, say
        asks[VICTIM] = replace(ask, model=np.full(3, 1e9))
    else:
        silos[VICTIM].agreed = b"another standardisation"
    expected = None if vote else query_of(ask, Learner.agreed).digest
    seen, missing = Seen(), dict[str, Any]()
    result = play(server.sum(asks, wanted, expected), silos, seen, missing, codec=False)
    opened = [name for name, reply in seen if isinstance(reply, Confirmed | SelfMaskShares | AddedShares)]
    assert VICTIM not in opened
    if scheme == "pairwise":
        assert isinstance(result, Sum)
        assert result.silos == tuple(name for name in NAMES if name != VICTIM)
    else:
        assert isinstance(result, Aborted)
        assert {name: why.reason for name, why in result.missing.items()} == {VICTIM: Reason.MALFORMED}
        assert not opened
        assert not result.opened
        missing |= result.missing
    if not vote or scheme != "pairwise":
        assert missing.keys() == {VICTIM}
        assert "is not what the others were" in missing[VICTIM].detail


def test_where_each_is_asked_something_else_nothing_opens() -> None:
    silos = {name: Learner("pairwise", name, 64, {"w": [0.1, 0.2]}) for name in NAMES}
    server, now = agreed(silos, now=Stamp("run", 1, 0)), Stamp("run", 1, 0)
    wanted = server.want({"w": (2,)}, {"w": 1.0}, len(NAMES))
    asks = {
        name: Learn(stamp=now, model=np.full(3, float(place)), encoding=wanted.fraction_bits)
        for place, name in enumerate(NAMES)
    }
    seen = Seen()
    result = play(server.sum(asks, wanted), silos, seen, codec=False)
    assert isinstance(result, Aborted)
    assert len(result.missing) == len(NAMES) - 1
    assert not [reply for _, reply in seen if isinstance(reply, Confirmed | SelfMaskShares)]
