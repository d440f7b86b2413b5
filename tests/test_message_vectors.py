"""Every message of every protocol: golden vectors, tampered ones, and a fuzz of what fields hold.

`test_codec` plays with the bytes and the JSON; here dtypes, shapes and contents are a peer's to choose.
"""

from __future__ import annotations

import json
import runpy
import sys
import tracemalloc
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from test_codec import json_values, same

from moretta.contract.codec import Codec, size, type_of
from moretta.contract.messages import Array, Message, Spent, Stamp, Tensors
from moretta.data.alignment import steps
from moretta.deployment.flower import messages as flower
from moretta.engines import child as edge
from moretta.errors import CodecError
from moretta.protocols.baffle.silo import messages as baffle
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.baffle.silo.seeds import SERVER, Seed, parameter_hash
from moretta.protocols.cgd import messages as cgd
from moretta.protocols.common import frozen, overlap, scoring, silo_rows
from moretta.protocols.fedsgd import messages as fedsgd
from moretta.protocols.pbpfl import messages as pbpfl
from moretta.protocols.registry import ENTRIES
from moretta.secure_aggregation.keystream import SecretRoot
from moretta.secure_aggregation.schemes import MESSAGES as SUM_MESSAGES
from moretta.secure_aggregation.secure_sum import AskSum

FOLDER = Path(__file__).parent / "vectors"
VECTORS = json.loads((FOLDER / "messages.json").read_text(encoding="utf-8"))
GENERATOR = runpy.run_path(str(FOLDER / "generate.py"))
wire = GENERATOR["wire"]
GOOD: dict[str, dict[str, Any]] = {tag: fields for tag, (_, fields) in GENERATOR["good_messages"]().items()}
SCHEMA = (
    Spent,
    *SUM_MESSAGES,
    AskSum,
    *flower.MESSAGES,
    *silo_rows.MESSAGES,
    *overlap.MESSAGES,
    *scoring.MESSAGES,
    *frozen.MESSAGES,
    *fedsgd.MESSAGES,
    *pbpfl.MESSAGES,
    *cgd.MESSAGES,
    *baffle.MESSAGES,
    *edge.MESSAGES,
    *steps.FILES,
)
KINDS = {kind.TAG: kind for kind in SCHEMA}
CODEC = Codec(SCHEMA)
MEMORY = 1 << 17  # bytes beside a few copies of what was sent
CALLS = 5000  # of functions, beside a few a byte: what is linear in the bytes


@pytest.fixture(scope="module", autouse=True)
def _what_is_imported_once() -> None:
    for case in VECTORS["good"]:  # numpy and cryptography import parts of theirs when those are first used
        CODEC.decode(bytes.fromhex(case["bytes"]))


def name_of(case: Mapping[str, str]) -> str:
    return f"{case['type']}: {case['why']}" if "why" in case else case["type"]


def test_every_message_of_every_protocol_has_a_vector() -> None:
    tags = [kind.TAG for kind in SCHEMA]
    assert len(set(tags)) == len(tags)
    assert sorted(case["type"] for case in VECTORS["good"]) == sorted(tags)
    assert {case["type"] for case in VECTORS["tampered"]} == set(tags)


def test_the_generators_schema_is_the_declared_one() -> None:
    kinds = {Array: "array", Tensors: "arrays", int: "integer", float: "number", bool: "flag", str: "text"}
    kinds |= {bytes: "bytes", tuple[str, ...]: "names", Mapping[str, bytes]: "several bytes"}
    kinds |= {Mapping[str, int]: "integers", Mapping[str, float]: "numbers", Mapping[str, str]: "texts"}
    declared = {kind.TAG: {name: kinds[one] for name, one in kind.KINDS.items()} for kind in SCHEMA}
    assert {tag: list(fields.items()) for tag, fields in GENERATOR["SCHEMA"].items()} == {
        tag: list(fields.items()) for tag, fields in declared.items()
    }
    assert len({type_of(kind) for kind in SCHEMA}) == len(SCHEMA)


def test_no_message_is_declared_outside_the_schemas() -> None:
    assert all(entry.own_messages() for entry in ENTRIES.values())  # which imports all protocols there are
    direct = Message.__subclasses__()
    kinds = [*direct, *(more for kind in direct for more in kind.__subclasses__())]  # one has the fields of another too
    assert {kind for kind in kinds if kind.__module__.split(".")[0] == "moretta"} == set(SCHEMA)


@pytest.mark.parametrize("case", VECTORS["good"], ids=name_of)
def test_vectors(case: Mapping[str, Any]) -> None:
    data = bytes.fromhex(case["bytes"])
    decoded = CODEC.decode(data)
    assert type(decoded) is KINDS[case["type"]]
    assert decoded.stamp == Stamp(*VECTORS["stamp"])
    assert CODEC.encode(decoded) == data
    assert size(decoded) == len(data)
    assert set(decoded.KINDS) == set(case["fields"])
    for name, kind in decoded.KINDS.items():
        assert same(getattr(decoded, name), stated(kind, case["fields"][name])), name


def stated(kind: Any, value: Any) -> Any:
    """Return a field's value as the vector states it in words."""
    if kind == Array:
        return np.array(value["values"], dtype=value["dtype"]).reshape(value["shape"])
    if kind == Tensors:
        return {name: stated(Array, item) for name, item in value.items()}
    if kind is bytes:
        return bytes.fromhex(value)
    if kind == Mapping[str, bytes]:
        return {name: bytes.fromhex(item) for name, item in value.items()}
    return tuple(value) if kind == tuple[str, ...] else value


def test_baffles_vectors_are_what_its_roles_agree_on() -> None:
    """The vectors' commitments, contributions, seed and hash are computed from HMAC and SHA-256 alone."""
    asked = {kind: CODEC.decode(wire(kind.TAG, GOOD[kind.TAG])) for kind in baffle.MESSAGES}
    roots = {name: GENERATOR["ROOTS"][whose] for name, whose in [("anna", "anna"), ("bea", "bea"), (SERVER, "dora")]}
    cohort, run = asked[baffle.Commit].cohort, VECTORS["stamp"][0]
    seeds = {name: Seed(name, SecretRoot(root)) for name, root in roots.items()}
    commitments = asked[baffle.Reveal].commitments
    assert {name: seed.begin(run, cohort) for name, seed in seeds.items()} == commitments
    assert commitments["anna"] == asked[baffle.Committed].commitment
    contributions = asked[baffle.Agree].contributions
    assert {name: seed.reveal(commitments) for name, seed in seeds.items()} == contributions
    assert contributions["anna"] == asked[baffle.Revealed].contribution
    assert {seed.agree(contributions) for seed in seeds.values()} == {asked[baffle.Agreed].digest}
    parameters = asked[baffle.Estimate].parameters
    layout = Layout.of({"0.weight": parameters[:4].reshape(2, 2), "0.bias": parameters[4:]}, {})
    assert layout.digest == asked[baffle.Agree].layout
    assert parameter_hash(layout, parameters) == asked[baffle.Estimate].parameter_hash


@pytest.mark.parametrize("case", VECTORS["tampered"], ids=name_of)
def test_tampered_vectors(case: Mapping[str, str]) -> None:
    with pytest.raises(CodecError):
        CODEC.decode(bytes.fromhex(case["bytes"]))


def message_or_codec_error(data: bytes) -> Message | None:
    """Decode: a message that makes sense, or the one error; with no more memory and steps than the bytes deserve."""
    calls = count()
    tracemalloc.start()
    sys.setprofile(lambda *event: next(calls))
    try:
        decoded = CODEC.decode(data)
    except CodecError:
        decoded = None
    finally:
        sys.setprofile(None)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MEMORY + 16 * len(data)
    assert next(calls) < CALLS + 8 * len(data)
    if decoded is not None:
        assert size(decoded) == len(CODEC.encode(decoded))  # what is accepted can be sent on
        makes_sense(decoded)
    return decoded


def makes_sense(message: Message) -> None:
    """Assert what roles take for granted of a message that was accepted."""
    for name, kind in message.KINDS.items():
        value = getattr(message, name)
        arrays = [value] if kind == Array else value.values() if kind == Tensors else []
        assert all(np.isfinite(array).all() for array in arrays)
    match message:
        case fedsgd.Stepped():
            assert message.rows >= 1
        case pbpfl.TrainOn():
            parts = message.parts.tolist()
            assert len(parts) == message.direction.size > 0
            assert max(parts) < len(parts)  # before anything is made that large
            assert set(parts) == set(range(max(parts) + 1))
        case pbpfl.Predictions():
            rows, _ = message.z.shape
            assert message.alpha.shape == (rows,)
            with np.errstate(over="raise", invalid="raise"):
                np.square(message.z, dtype=np.float64).sum()
                np.square(message.alpha, dtype=np.float64).sum()
        case pbpfl.Softmax():
            assert len(message.y) == len(message.k)
        case pbpfl.Ratios():
            rows, outputs, others, _ = message.words.shape
            assert message.alpha.shape == (rows,)
            assert others == outputs - 1
        case pbpfl.BlindedSoftmax():
            assert message.totals.shape[:2] == message.rests.shape[:2]
            assert len(message.k) == len(message.totals)
        case silo_rows.Begin():
            assert message.mean.shape == message.deviation.shape
        case cgd.Partial() | cgd.Join():
            _, _ = message.words.shape
            assert message.words.dtype == np.uint64
        case cgd.Deltas() | cgd.Backward() | cgd.Displacement() | cgd.CatchUp():
            assert message.sealed.data.nbytes == message.sealed.size == len(message.sealed)
        case cgd.RowsDescribed():
            assert message.rows >= 1
        case baffle.Committed():
            assert len(message.commitment) == 32
            assert message.runs in baffle.RUNS
        case baffle.Revealed():
            assert len(message.contribution) == 32
        case baffle.Reveal():
            assert {len(one) for one in message.commitments.values()} <= {32}
        case baffle.Agree():
            assert {len(one) for one in message.contributions.values()} <= {32}
            assert len(message.graph.tobytes()) == message.graph.size == len(message.graph)
        case baffle.Estimate():
            assert message.parameters.shape == (message.parameters.size,)
            assert message.parameters.dtype in (np.float32, np.float64)
            assert 2 <= message.k < 2**16  # before directions are drawn


SHAPES = [(), (0,), (1,), (2,), (3,), (2, 3), (3, 2), (1, 1), (0, 3), (2, 0), (1, 2, 3), (1,) * 32]
WHOLE = [0, 1, 2, 3, -1, 7, 255, 10**7, 4 * 10**12, 2**31 - 1, 2**31, 2**32, 2**63 - 1, -(2**31), -(2**63), 2**64 - 1]
REAL = [0.0, -0.0, 1.0, -1.0, 5e-324, 65504.0, 1e30, -1e30, 1.1e30, 3e38, -3e38, 1.7e308, -1.7e308, np.nan, np.inf]


@st.composite
def other_arrays(draw: st.DrawFn, was: np.ndarray | None = None) -> np.ndarray:
    """Draw an array: often of the dtype or shape that it was, seldom of the contents."""
    dtype = np.dtype(draw(st.sampled_from(list(GENERATOR["DTYPES"]))))
    shape = draw(st.sampled_from(SHAPES))
    if was is not None:
        kept = draw(st.sampled_from(["neither", "dtype", "shape", "both", "both"]))
        dtype = was.dtype if kept in ("dtype", "both") else dtype
        shape = was.shape if kept in ("shape", "both") else shape
    elements = npst.from_dtype(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        elements |= st.sampled_from([value for value in WHOLE if info.min <= value <= info.max])
    elif dtype.kind == "f":
        largest = float(np.finfo(dtype).max)
        elements |= st.sampled_from([v for v in REAL if not abs(v) > largest or np.isinf(v)]).map(dtype.type)
    return draw(npst.arrays(dtype, shape, elements=elements))


KEYS = st.sampled_from(["w", "0.weight", "most weight", "a/b", "", "città", "x" * 513])
PLAIN = json_values | st.sampled_from([*WHOLE, *REAL]) | st.dictionaries(KEYS, st.sampled_from([*WHOLE, 0.5, "00"]))


@st.composite
def changed_messages(draw: st.DrawFn) -> bytes:
    """Draw a valid message in which one field or two are a peer's choice."""
    tag = draw(st.sampled_from([tag for tag, fields in GOOD.items() if fields]))
    fields = dict(GOOD[tag])
    names = sorted(fields)
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        value = fields[name]
        if GENERATOR["is_array"](value):
            fields[name] = draw(other_arrays(value))
        elif GENERATOR["is_arrays"](value):
            some = st.dictionaries(KEYS, other_arrays(), min_size=1, max_size=2)
            key = draw(st.sampled_from(sorted(value)))
            fields[name] = draw(some | other_arrays(value[key]).map(lambda array, k=key, v=value: {**v, k: array}))
        else:
            alike = WHOLE if type(value) is int else REAL if type(value) is float else [value]
            fields[name] = draw(st.sampled_from(alike) | PLAIN)
    return wire(tag, fields)


@given(changed_messages())
def test_any_array_in_any_field(data: bytes) -> None:
    message_or_codec_error(data)


@given(other_arrays(np.zeros(3, np.int64)), other_arrays(np.zeros(3)))
def test_any_parts_and_direction(parts: np.ndarray, direction: np.ndarray) -> None:
    fields = GOOD["pbpfl/train-on"]
    message_or_codec_error(wire("pbpfl/train-on", fields | {"parts": parts}))
    message_or_codec_error(wire("pbpfl/train-on", fields | {"parts": parts, "direction": direction}))


@given(st.sampled_from(["local/shown", "fedsgd/train-on", "cgd/partial", "baffle/agree"]), st.data())
def test_any_description_of_an_array(tag: str, data: st.DataObject) -> None:
    head, behind = GENERATOR["described"](tag, GOOD[tag])
    places = [(head, at) for at, entry in enumerate(head) if isinstance(entry, list) and entry]
    places += [(entry, name) for entry in head[6:] if isinstance(entry, dict) for name in entry]
    holder, at = data.draw(st.sampled_from(places))
    whole = st.sampled_from([*WHOLE, 2**58, 2**61, 2**62]) | st.integers(0, 64)
    dtype = st.sampled_from(["bf", "c8", "i1", "i2", "u2", "f8", "b1", "", "F8"])
    holder[at] = data.draw(st.tuples(dtype, whole, whole) | st.lists(whole, max_size=3) | json_values)
    message_or_codec_error(GENERATOR["laid"](json.dumps(head).encode(), behind))


@pytest.mark.parametrize(
    "shape", [(2**59, 0), (2**63, 0), (2**64 - 1, 0), (0, 2**64), (0,) * 65, (2**32, 2**32), (-1,)]
)
def test_shapes_that_no_array_has(shape: tuple[int, ...]) -> None:
    head, behind = GENERATOR["described"]("local/shown", {"parameters": {"w": np.zeros((9, 0))}})
    head[6] = {"w": ["f8", *shape]}
    message_or_codec_error(GENERATOR["laid"](json.dumps(head).encode(), behind))


@pytest.mark.parametrize("wrong", [-1, 10**5, 10**7, 4 * 10**12, 2**63 - 1, -(2**63)])
def test_many_parts_take_no_more_than_their_bytes(wrong: int) -> None:
    parts = np.arange(10**5)
    fields = GOOD["pbpfl/train-on"] | {"direction": np.ones(10**5)}
    assert message_or_codec_error(wire("pbpfl/train-on", fields | {"parts": parts})) is not None
    parts[500] = wrong
    assert message_or_codec_error(wire("pbpfl/train-on", fields | {"parts": parts})) is None
