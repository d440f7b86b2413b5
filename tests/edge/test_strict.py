"""What ONNX Runtime is given is what was checked: written anew, canonical, and of allowed fields and operations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from refused_rows import Row, refused

from moretta.errors import ParameterError
from moretta.protocols.baffle.edge import strict
from moretta.protocols.baffle.edge.onnx_forward import OnnxForward
from moretta.protocols.baffle.edge.strict import written

SECRET = 400  # numbers of float32 that a key file has


def long_tag(number: int, wire: int) -> bytes:
    """Return a tag of five bytes with bit 32 set, which ONNX Runtime cuts off."""
    tag = number << 3 | wire | 1 << 32
    return bytes([tag >> 7 * place & 127 | (128 if place < 4 else 0) for place in range(5)])


def with_tensor(proto: onnx.ModelProto, tensor: bytes) -> bytes:
    """Return a file whose outputs are a tensor's numbers, for each row."""
    graph = proto.graph
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    zeros = np.zeros((graph.input[0].type.tensor_type.shape.dim[1].dim_value, SECRET), np.float32)
    graph.initializer.append(onnx.numpy_helper.from_array(zeros, "zeros"))
    graph.node.append(helper.make_node("MatMul", ["x", "zeros"], ["nothing"]))
    graph.node.append(helper.make_node("Add", ["nothing", "stolen"], ["outputs"]))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("outputs", TensorProto.FLOAT, ["rows", SECRET]))
    inner = graph.SerializeToString() + written(5, tensor)
    proto.ClearField("graph")
    return proto.SerializeToString() + written(7, inner)


def test_a_tag_that_two_parsers_read_differently_reads_no_key(
    mlp_sample: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: external data under a tag that is field 13 to ONNX Runtime and none to the check."""
    key = np.random.default_rng(0).normal(size=SECRET).astype(np.float32)
    (tmp_path / "client.key").write_bytes(key.tobytes())
    monkeypatch.chdir(tmp_path)
    place = written(1, b"location") + written(2, b"client.key")
    tensor = TensorProto(name="stolen", data_type=TensorProto.FLOAT, dims=[SECRET]).SerializeToString()
    tensor += long_tag(13, 2) + bytes([len(place)]) + place + long_tag(14, 0) + b"\x01"
    evil = with_tensor(onnx.load_from_string(mlp_sample.graph("float32")), tensor)
    with pytest.raises(ParameterError, match="not an ONNX file"):
        OnnxForward(evil).outputs(mlp_sample.flat[None], mlp_sample.x[:1])


def longer(data: bytes) -> bytes:
    """Return a field of a small number with one byte more than it takes."""
    return data[:-1] + bytes([data[-1] | 128, 0])


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (longer(written(1, 8)), "not an ONNX file"),  # a version, in two bytes
        (written(5, 1), "not an ONNX file|which no edge client takes"),
        (written(7, b""), "not an ONNX file"),  # another graph, which one reader joins to the first
        (written(1, 9), "not an ONNX file"),  # another version
        (long_tag(7, 2) + b"\x00", "not an ONNX file"),
        (b"\x0b", "not an ONNX file"),  # a group
        (b"\x00\x00", "not an ONNX file"),  # field 0
        (written(21, b""), "a field 21 of model"),
        (written(1, 1 << 64), "not an ONNX file"),
        (b"\x08" + b"\x80" * 10 + b"\x01", "not an ONNX file"),
    ],
)
def test_what_readers_may_differ_on_is_refused(mlp_sample: Any, field: bytes, said: str) -> None:
    good = mlp_sample.graph("float32")
    with pytest.raises(ParameterError, match=said):
        strict.admitted(field + good if field[:1] != b"\x28" else good + field + field)


def with_type_beyond_32_bits(proto: onnx.ModelProto) -> bytes:
    tensor = written(1, SECRET) + written(2, (1 << 32) + TensorProto.FLOAT) + written(8, b"stolen")
    return with_tensor(proto, tensor + written(9, bytes(4 * SECRET)))


def with_text(proto: onnx.ModelProto) -> bytes:
    return with_tensor(proto, written(1, 1) + written(2, TensorProto.STRING) + written(6, b"x") + written(8, b"stolen"))


def with_operation(name: str) -> Callable[[onnx.ModelProto], bytes]:
    def change(proto: onnx.ModelProto) -> bytes:
        proto.graph.node[0].op_type = name
        return proto.SerializeToString()

    return change


def with_sequence(proto: onnx.ModelProto) -> bytes:
    proto.graph.input[0].type.sequence_type.elem_type.tensor_type.elem_type = 1
    return proto.SerializeToString()


@refused("strict.txt")
def test_what_cannot_be_is_refused(row: Row, request: pytest.FixtureRequest) -> None:
    row.play(globals(), request)


@pytest.mark.parametrize("precision", ["float32", "float16", "int8-activations"])
def test_what_is_written_anew_is_what_was_there(sample: Any, precision: str) -> None:
    """By onnx's own reader: all but the notes of whoever exported it."""
    given = sample.graph(precision)
    found, wanted = strict.admitted(given), onnx.load_from_string(given)
    for field in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        wanted.ClearField(field)
    parts = [wanted.graph, *wanted.graph.node, *wanted.graph.initializer]
    parts += [*wanted.graph.input, *wanted.graph.output, *wanted.graph.value_info]
    parts += [attribute for node in wanted.graph.node for attribute in node.attribute]
    parts += [attribute.t for node in wanted.graph.node for attribute in node.attribute if attribute.HasField("t")]
    for part in parts:
        part.ClearField("doc_string")
    assert onnx.load_from_string(found) == wanted
    assert strict.admitted(found) == found


def test_cut_or_changed_bytes_give_one_error_or_the_same_file(mlp_sample: Any) -> None:
    """Whatever a byte becomes, what is given to ONNX Runtime reads the same to both readers."""
    good, random = strict.admitted(mlp_sample.graph("float32")), np.random.default_rng(1)
    for _ in range(400):
        data = bytearray(good)
        data[random.integers(len(data))] = random.integers(256)
        try:
            found = strict.admitted(bytes(data[: random.integers(1, len(data) + 1)] if random.random() < 0.2 else data))
        except ParameterError:
            continue
        assert strict.admitted(found) == found
        proto = onnx.load_from_string(found)
        assert not proto.functions
        assert all(not tensor.external_data and not tensor.data_location for tensor in proto.graph.initializer)
        assert {node.op_type.encode() for node in proto.graph.node} <= strict.OPERATIONS
