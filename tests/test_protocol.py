from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from refused_rows import Row, refused

from moretta.contract.messages import FIELD_KINDS, Array, Message, Stamp, Tensors, message
from moretta.contract.roles import Ask, Replies
from moretta.errors import PeerError

NOW = Stamp("run", 1, 0)


@message("test/everything")
class Everything(Message):
    array: Array
    tensors: Tensors
    integer: int
    number: float
    flag: bool
    text: str
    octets: bytes
    integers: Mapping[str, int]
    numbers: Mapping[str, float]
    texts: Mapping[str, str]
    several_octets: Mapping[str, bytes]
    names: tuple[str, ...]


GOOD: dict[str, Any] = {
    "array": np.arange(3.0), "tensors": {"w": np.zeros((2, 0), np.uint8)}, "integer": -(2**63), "number": 1e300,
    "flag": True, "text": "", "octets": b"\0", "integers": {"a": 1}, "numbers": {"a": -0.0}, "texts": {"ü/ ": "x"},
    "several_octets": {"a": b""}, "names": ("a", "b"),
}  # fmt: skip

HALF_A_PAIR = "\ud800"


def test_every_kind_of_field_is_tried() -> None:
    assert set(Everything.KINDS.values()) == set(FIELD_KINDS)
    Everything(stamp=NOW, **GOOD)


@refused("protocol.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


def test_a_message_needs_a_stamp_and_cannot_change() -> None:
    with pytest.raises(PeerError, match="stamp"):
        Everything(stamp=("run", 1, 0), **GOOD)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        Everything(stamp=NOW, **GOOD).integer = 2  # type: ignore[misc]


def test_stamps_are_ordered() -> None:
    one, two, three, four = Stamp("r", 1, 0), Stamp("r", 1, 1), Stamp("r", 2, 0), Stamp("r", 10, 0)
    assert sorted([four, two, one, three]) == [one, two, three, four]


def test_a_representation_shows_no_values() -> None:
    shown = repr(Everything(stamp=NOW, **GOOD | {"text": "secret", "octets": b"secret"}))
    assert "secret" not in shown
    assert shown.startswith("<test/everything round 1, attempt 0; array: float64[3], tensors: dict")


def test_an_unknown_kind_of_field_is_refused_when_declared() -> None:
    with pytest.raises(TypeError, match=r"Wrong\.field"):

        @message("test/wrong")
        class Wrong(Message):
            field: complex


def test_asking_everyone() -> None:
    asked = Everything(stamp=NOW, **GOOD)
    ask = Ask.all(["b", "a"], asked, Everything)
    assert list(ask.messages) == ["b", "a"]
    ask.check("a", asked)  # no check is a check that passes
    assert Replies({}).missing == {}

    def refuse(silo: str, reply: Everything) -> None:
        raise PeerError("no")

    with pytest.raises(PeerError):
        Ask.all(["a"], asked, Everything, refuse).check("a", asked)
