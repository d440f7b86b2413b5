from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from refused_rows import Row, refused

from moretta.contract import codec
from moretta.contract.codec import Codec, size, type_of
from moretta.contract.messages import DTYPES, Array, Message, Stamp, Tensors, message
from moretta.errors import CodecError
from moretta.protocols.baffle.silo.messages import MESSAGES as BAFFLE_MESSAGES
from moretta.protocols.common import silo_rows
from moretta.protocols.fedsgd.messages import MESSAGES as FEDSGD_MESSAGES
from moretta.protocols.pbpfl.messages import MESSAGES as PBPFL_MESSAGES
from moretta.secure_aggregation.pairwise import MaskedUpload
from moretta.secure_aggregation.schemes import MESSAGES as SUM_MESSAGES

VECTORS = json.loads((Path(__file__).parent / "vectors" / "messages.json").read_text(encoding="utf-8"))


@message("test/all")
class All(Message):
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


@message("test/nothing")
class Nothing(Message):
    pass


MORETTA = Codec((*SUM_MESSAGES, *silo_rows.MESSAGES, *FEDSGD_MESSAGES, *PBPFL_MESSAGES, *BAFFLE_MESSAGES))
OURS = Codec((All, Nothing))

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
integers = st.integers(-(2**63), 2**63 - 1)
numbers = st.floats(allow_nan=False, allow_infinity=False)
stamps = st.builds(
    Stamp, st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9),
    st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1),
)  # fmt: skip


def arrays() -> st.SearchStrategy[np.ndarray]:
    shapes = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=12)
    finite = {"allow_nan": False, "allow_infinity": False}
    return st.sampled_from(sorted(DTYPES, key=str)).flatmap(
        lambda dtype: npst.arrays(dtype, shapes, elements=finite if dtype.kind == "f" else None)
    )


def mapping(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(names, values, max_size=4)


messages = st.builds(
    All, stamp=stamps, array=arrays(), tensors=mapping(arrays()), integer=integers, number=numbers, flag=st.booleans(),
    text=texts, octets=st.binary(max_size=9), integers=mapping(integers), numbers=mapping(numbers),
    texts=mapping(texts), several_octets=mapping(st.binary(max_size=9)), names=st.lists(names).map(tuple),
)  # fmt: skip


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return set(one) == set(other) and all(same(one[name], other[name]) for name in one)
    return type(one) is type(other) and one == other


@given(messages)
def test_decode_inverts_encode_and_size_is_the_length(sent: All) -> None:
    data = OURS.encode(sent)
    assert size(sent) == len(data)
    got = OURS.decode(data)
    assert isinstance(got, All)
    assert got.stamp == sent.stamp
    for name in All.KINDS:
        assert same(getattr(sent, name), getattr(got, name))
    assert OURS.encode(got) == data
    assert OURS.encode(OURS.decode(bytearray(data))) == OURS.encode(OURS.decode(memoryview(data))) == data


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_arrays_are_parts_of_the_memory_that_was_decoded(kind: type[bytearray] | type[memoryview]) -> None:
    sent = All(
        stamp=Stamp("r", 0, 0), array=np.arange(5.0), tensors={}, integer=0, number=0.0, flag=False, text="",
        octets=b"", integers={}, numbers={}, texts={}, several_octets={}, names=(),
    )  # fmt: skip
    data = kind(OURS.encode(sent))
    got = OURS.decode(data)
    assert isinstance(got, All)
    assert np.shares_memory(got.array, np.frombuffer(data, np.uint8))
    assert got.array.flags.writeable == (kind is bytearray)


def test_sizes_where_the_order_of_dtypes_decides_the_offsets() -> None:
    # All of 8 bytes an entry, or of 4 and 1: only the dtype's own rank says which comes first.
    for some in (("float64", "int64", "uint64"), ("float32", "int32", "uint32"), ("uint8", "bool"), ("float16",)):
        for lengths in ((1, 100, 10_000), (10_000, 100, 1), (0, 5, 2_000)):
            tensors = {dtype: np.ones(n, dtype) for dtype, n in zip(sorted(some), lengths, strict=False)}
            sent = All(
                stamp=Stamp("r", 0, 0), array=np.ones(1), tensors=tensors, integer=0, number=0.0, flag=False, text="",
                octets=b"", integers={}, numbers={}, texts={}, several_octets={}, names=(),
            )  # fmt: skip
            assert size(sent) == len(OURS.encode(sent))


def test_layout_of_memory_does_not_matter() -> None:
    straight = np.arange(12, dtype=np.uint32).reshape(3, 4)
    for array in (np.asfortranarray(straight), np.repeat(straight, 2, axis=1)[:, ::2]):
        sent, plain = (
            All(
                stamp=Stamp("r", 0, 0), array=values, tensors={}, integer=0, number=0.0, flag=False, text="",
                octets=b"", integers={}, numbers={}, texts={}, several_octets={}, names=(),
            )
            for values in (array, straight)
        )  # fmt: skip
        assert OURS.encode(sent) == OURS.encode(plain)


def accepted_or_codec_error(codec: Codec, data: bytes) -> None:
    for kind in (bytes, bytearray):
        try:
            decoded = codec.decode(kind(data))
        except CodecError:
            continue
        assert size(decoded) == len(codec.encode(decoded))  # what is accepted can be sent on


@given(st.binary(max_size=200))
def test_arbitrary_bytes(data: bytes) -> None:
    accepted_or_codec_error(MORETTA, data)
    accepted_or_codec_error(MORETTA, len(data).to_bytes(8, "little") + data)


@given(st.sampled_from([bytes.fromhex(case["bytes"]) for case in VECTORS["good"]]), st.data())
def test_mutated_messages(good: bytes, data: st.DataObject) -> None:
    changed = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
        if not changed:
            break
    accepted_or_codec_error(MORETTA, bytes(changed))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def header(content: object, behind: bytes = b"") -> bytes:
    text = json.dumps(content).encode()
    return len(text).to_bytes(4, "little") + text + behind


def of_nothing(**changed: Any) -> list[Any]:
    good = {"format": 3, "type": type_of(Nothing), "run": "r", "round": 0, "attempt": 0, "take": 0}
    return list((good | changed).values())


PLAIN = {
    "array": ["u1", 0], "tensors": {}, "integer": 0, "number": 0.0, "flag": False, "text": "", "octets": 0,
    "integers": {}, "numbers": {}, "texts": {}, "several_octets": {}, "names": [],
}  # fmt: skip


def of_all(**changed: Any) -> list[Any]:
    return [*of_nothing(type=type_of(All)), *(PLAIN | changed).values()]


@given(st.sampled_from(["format", "type", "run", "round", "attempt", "take"]), json_values)
def test_any_json_in_any_place(name: str, value: object) -> None:
    accepted_or_codec_error(OURS, header(of_nothing(**{name: value})))
    accepted_or_codec_error(OURS, header(value))
    accepted_or_codec_error(OURS, header([*of_nothing(), value]))
    accepted_or_codec_error(OURS, header([3, value]))


@given(st.sampled_from(list(PLAIN)), json_values, st.binary(max_size=20))
def test_any_json_in_any_field(name: str, value: object, behind: bytes) -> None:
    accepted_or_codec_error(OURS, header(of_all(**{name: value}), behind))


@refused("codec.txt")
def test_bytes_that_are_no_message(row: Row) -> None:
    row.play(globals())
    OURS.decode(header(of_nothing()))  # of which the good form is one
    OURS.decode(header(of_all()) + bytes(-len(header(of_all())) % 8))


def test_a_message_of_an_older_format_is_named() -> None:
    older = json.dumps({"__metadata__": {"moretta": "{}"}}).encode()
    with pytest.raises(CodecError, match=r"expected a header of wire format 3: .*; update the older side"):
        OURS.decode(len(older).to_bytes(8, "little") + older)


@pytest.mark.parametrize("name", ["two\nlines", "\r", "\x1b[2J"])
def test_a_refusal_is_one_plain_line(name: str) -> None:
    """A name of a peer's is in it, and it may end at a terminal or in a log."""
    data = header(of_all(integers={name: 0.5}))
    data += bytes(-len(data) % 8)
    with pytest.raises(CodecError, match="64-bit whole number") as caught:
        OURS.decode(data)
    assert str(caught.value).isprintable()


def test_flags_are_0_or_1() -> None:
    """Of other bytes numpy's functions make different truths: `~` leaves 2 true, and a sum counts it twice."""
    data = header(of_all(array=["b1", 3]))
    data += bytes(-len(data) % 8)
    OURS.decode(data + b"\0\1\1")
    with pytest.raises(CodecError, match="flags of 0 or 1"):
        OURS.decode(data + b"\0\1\2")


def test_arrays_have_the_machines_own_order_whatever_the_wires(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages take no others; here the wire's order is turned, which is what a big-endian machine sees."""
    wire = {name: dtype.newbyteorder(">") for name, dtype in codec._DTYPES.items()}
    monkeypatch.setattr(codec, "_DTYPES", wire)
    data = header(of_all(array=["i4", 1]))
    got = OURS.decode(data + bytes(-len(data) % 8) + b"\0\0\1\2")
    assert isinstance(got, All)
    assert got.array.dtype == np.int32
    assert got.array.tolist() == [258]


def test_text_is_no_list_of_names() -> None:
    data = header(of_all(names="ab"))
    with pytest.raises(CodecError, match="names"):
        OURS.decode(data + bytes(-len(data) % 8))


def test_a_message_that_was_declared_otherwise_is_unknown() -> None:
    """Fields' names do not travel, so two versions of a message differ in its type."""

    @message("test/pair")
    class Pair(Message):
        first: int
        second: int

    @message("test/pair")
    class Turned(Message):
        second: int
        first: int

    sent = Codec([Pair]).encode(Pair(stamp=Stamp("r", 0, 0), first=1, second=2))
    with pytest.raises(CodecError, match=r"expected one of \['test/pair'\], as declared here; got the type"):
        Codec([Turned]).decode(sent)


def test_the_bytes_beside_what_is_said_are_few() -> None:
    """Beside numbers and three digests: the run's id, 35 bytes with its marks, and stamp, type, shapes and names."""
    upload = MaskedUpload(
        stamp=Stamp("0123456789abcdef" * 2, 100, 0), maker="north", tensors={"sums": np.zeros(500, np.uint64)},
        weight=np.zeros((), np.uint64), asked=bytes(32), committed=bytes(32), sealed=b"", digests=bytes(32),
    )  # fmt: skip
    assert len(MORETTA.encode(upload)) - 8 * 501 - 96 <= 35 + 80
