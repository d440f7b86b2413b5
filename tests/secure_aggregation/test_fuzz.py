"""Anything at all, to a silo or from one: the oracle is "accepted, or Moretta's own error, never anything else"."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from sum_driver import CODEC, NOW, Silo, Train, aggregator, agreed, one_sum, play, rostered

from moretta.contract.messages import Message, Stamp, Tensors
from moretta.contract.roles import Aborted
from moretta.errors import CodecError, MorettaError, PeerError
from moretta.secure_aggregation.agreement import AdvertiseKey
from moretta.secure_aggregation.cohort import Rules
from moretta.secure_aggregation.schemes import MESSAGES
from moretta.secure_aggregation.sums import Sum

NAMES = tuple("abcd")


def play_and_listen(roster: bool) -> tuple[dict[str, Silo], dict[str, list[Message]], Stamp, Rules]:
    """Play a sum in which `d` is lost. Returns the silos, what was asked of or said by any, by tag, and when."""
    rules, credentials, run = rostered(NAMES) if roster else (Rules(), {}, NOW.run)
    tensors = {"w": np.array([0.5, -1.0])}
    silos = {
        name: Silo("pairwise", name, 64, tensors, rules=rules, credentials=credentials.get(name)) for name in NAMES
    }
    heard: dict[str, list[Message]] = {}

    def listening(name: str) -> Any:
        def answer(asked: Message) -> Message:
            heard.setdefault(asked.TAG, []).append(asked)
            if name == "d" and isinstance(asked, Train):
                raise MorettaError("lost")
            reply = silos[name](asked)
            heard.setdefault(reply.TAG, []).append(reply)
            return reply

        return answer

    played, now = {name: listening(name) for name in NAMES}, Stamp(run, 1, 0)
    server = agreed(played, rules=rules, now=now)
    assert isinstance(one_sum(server, silos, now, 2.0, played), Sum)
    return silos, heard, now, rules


@cache
def played_once() -> tuple[dict[str, Silo], dict[str, list[Message]], Stamp, Rules]:
    return play_and_listen(False)


OURS = sorted({kind.TAG for kind in MESSAGES})
TEXTS = st.sampled_from([*NAMES, "x", "città", ""]) | st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
OCTETS = st.sampled_from([b"", bytes(32), b"\xff" * 32, bytes(48), bytes(64), b"\x09" + bytes(31)]) | st.binary(
    max_size=66
)


def other_value(draw: st.DrawFn, kind: Any, value: Any) -> Any:
    """Draw something of a field's kind, most often near what it was."""
    match value:
        case bytes():
            return draw(OCTETS | st.integers(0, max(0, 8 * len(value) - 1)).map(lambda bit: flip(value, bit)))
        case tuple():
            return tuple(
                draw(st.lists(TEXTS, max_size=5) | st.permutations(value) | st.just([*value, "d"]).map(sorted))
            )
        case Mapping() if kind == Tensors:
            return draw(st.dictionaries(TEXTS, ARRAYS, max_size=3))
        case Mapping():
            entries = dict(value)
            for name in draw(st.lists(st.sampled_from([*value, *NAMES]), max_size=3)):
                how = draw(st.sampled_from(["drop", "change", "swap"]))
                if how == "drop":
                    entries.pop(name, None)
                elif how == "change":
                    entries[name] = other_value(draw, bytes, entries.get(name, b""))
                elif entries:
                    entries[name] = entries[draw(st.sampled_from(sorted(entries)))]
            return entries
        case int():
            return draw(st.integers(-3, 5) | st.sampled_from([2**31, -(2**63)]))
    return draw(ARRAYS)


def flip(value: bytes, bit: int) -> bytes:
    if not value:
        return value
    return value[: bit // 8] + bytes([value[bit // 8] ^ 1 << bit % 8]) + value[bit // 8 + 1 :]


ARRAYS = st.builds(
    lambda dtype, shape: np.ones(shape, dtype=dtype),
    st.sampled_from(["uint32", "uint64", "float64", "bool"]),
    st.sampled_from([(), (2,), (3,), (0,), (1, 2)]),
)
STAMPS = st.builds(Stamp, st.sampled_from([NOW.run, "x"]), st.integers(0, 2), st.integers(0, 1))


@st.composite
def changed(draw: st.DrawFn, messages: list[Message]) -> Message | None:
    """Draw a message with some fields changed; None where it may not even be made."""
    message = draw(st.sampled_from(messages))
    names = sorted(message.KINDS)
    some = draw(st.lists(st.sampled_from(names), max_size=2, unique=True)) if names else []
    fields = {name: other_value(draw, message.KINDS[name], getattr(message, name)) for name in some}
    if draw(st.integers(0, 9)) == 0:
        fields["stamp"] = draw(STAMPS)
    try:
        return replace(message, **fields)
    except PeerError:
        return None


@given(st.data())
def test_any_message_to_a_silo(data: st.DataObject) -> None:
    roster = data.draw(st.booleans())
    silos, heard, now, rules = play_and_listen(roster)
    if data.draw(st.booleans()):  # with a sum that is still open
        server = agreed(silos, rules=rules, now=now)
        encoding = server.want({"w": (2,)}, {"w": 2.0}, 4).fraction_bits
        for silo in silos.values():
            silo(Train(stamp=now, encoding=encoding))
    room = {tag: messages for tag, messages in heard.items() if tag != Train.TAG}
    for _ in range(data.draw(st.integers(1, 8))):
        message = data.draw(changed(room[data.draw(st.sampled_from(sorted(room)))]))
        if message is None:
            continue
        try:
            reply = silos["a"](message)
        except MorettaError:
            continue
        assert reply is None or isinstance(CODEC.decode(CODEC.encode(reply)), Message)


@given(st.data())
def test_any_reply_to_the_server(data: st.DataObject) -> None:
    silos, _, now, rules = play_and_listen(data.draw(st.booleans()))
    silo, chance = data.draw(st.sampled_from(NAMES)), data.draw(st.integers(1, 3))

    def answer(asked: Message) -> Any:
        reply = silos[silo](asked)
        if data.draw(st.integers(0, chance)):
            return reply
        message = data.draw(changed([reply]))
        return CODEC.encode(reply)[:-1] if message is None else message

    played, now = {**silos, silo: answer}, replace(now, round=2)
    server = aggregator("pairwise", 64, rules)
    result = play(server.setup(now, NAMES), played)
    if result is None:
        try:
            result = one_sum(server, silos, now, 2.0, played)
        except PeerError as error:
            result = str(error)
    match result:
        case Aborted():
            assert silo in result.missing
        case str():
            assert "some silo did not follow the protocol" in result  # the weights show it
        case _:
            assert isinstance(result, Sum)


@given(st.sampled_from(OURS), st.data())
def test_any_bytes_in_the_place_of_a_message(tag: str, data: st.DataObject) -> None:
    _, known, _, _ = played_once()
    good = CODEC.encode(data.draw(st.sampled_from(known[tag] if tag in known else known[AdvertiseKey.TAG])))
    at, span = data.draw(st.integers(0, len(good))), data.draw(st.integers(0, 9))
    wrong = good[:at] + data.draw(st.binary(max_size=9)) + good[at + span :]
    silos, _, _, _ = played_once()
    try:
        message = CODEC.decode(wrong)
    except CodecError:
        return
    with suppress(MorettaError):
        silos["a"](message)
