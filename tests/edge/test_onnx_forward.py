"""ONNX Runtime computes what torch computes, at any weights, in any micro-batches, where torch is absent."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from refused_rows import Row, refused

from moretta.errors import ParameterError
from moretta.protocols.baffle.edge import strict
from moretta.protocols.baffle.edge.onnx_forward import OnnxForward


def perturbed(flat: np.ndarray[Any, Any], sigma: float, count: int) -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(5)
    return [flat + np.float32(sigma) * random.choice(np.float32([-1, 1]), flat.size) for _ in range(count)]


def test_losses_agree_with_torch(sample: Any) -> None:
    forward = OnnxForward(sample.graph("float32"))
    weights = [sample.flat, *perturbed(sample.flat, 0.05, 2)]
    before = [array.copy() for array in weights]
    outputs = forward.outputs(weights, sample.x)
    assert outputs.dtype == np.float32
    assert outputs.shape == (3, *sample.torch_outputs(sample.flat).shape)
    ours = sample.losses(outputs)
    theirs = sample.losses(np.stack([sample.torch_outputs(flat) for flat in weights]))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=0)
    assert all(np.abs(ours[0] - other).max() > 1e-3 for other in ours[1:])
    assert all(np.array_equal(*pair) for pair in zip(weights, before, strict=True))


def test_the_layout_is_the_models(sample: Any) -> None:
    forward = OnnxForward(sample.graph("float32"))
    assert (forward.layout, forward.precision) == (sample.layout, "float32")
    proto = onnx.load_from_string(sample.graph("float32"))
    onnx.checker.check_model(proto, full_check=True)
    assert {entry.key: entry.value for entry in proto.metadata_props}["moretta.layout"] == sample.layout.digest
    assert [put.name for put in proto.graph.input] == ["x", *sample.layout.shapes]
    assert not {tensor.name for tensor in proto.graph.initializer} & sample.layout.shapes.keys()


def test_a_row_alone_is_the_row_among_others(sample: Any) -> None:
    forward = OnnxForward(sample.graph("float32"))
    found = {}
    for forward.micro_batch in (None, 1, 7, 64, 1000):
        found[forward.micro_batch] = forward.outputs([sample.flat], sample.x)
    for outputs in found.values():
        np.testing.assert_allclose(outputs, found[None], rtol=1e-6, atol=1e-6)
    assert forward.outputs([sample.flat], sample.x[:0]).shape == (1, 0, found[None].shape[2])
    assert forward.outputs([], sample.x).shape == (0, *found[None].shape[1:])


def test_weights_are_read_where_they_lie(lenet_sample: Any) -> None:
    forward = OnnxForward(lenet_sample.graph("float32"))
    flat = lenet_sample.flat.copy()
    before = forward.outputs([flat], lenet_sample.x)
    flat += np.float32(0.01)  # the same address, other values
    after = forward.outputs([flat], lenet_sample.x)
    fresh = OnnxForward(lenet_sample.graph("float32")).outputs([flat.copy()], lenet_sample.x)
    assert np.array_equal(after, fresh)
    assert not np.array_equal(before, after)
    del flat
    gc.collect()
    assert np.array_equal(forward.outputs([lenet_sample.flat], lenet_sample.x), before)


def test_rows_of_other_layouts_are_converted(mlp_sample: Any) -> None:
    forward = OnnxForward(mlp_sample.graph("float32"))
    x = mlp_sample.x
    expected = forward.outputs([mlp_sample.flat], x)
    for other in (np.asfortranarray(x), x.astype(np.float64), np.repeat(x, 2, axis=0)[::2]):
        assert np.array_equal(forward.outputs([mlp_sample.flat], other), expected)


@refused("onnx_forward.txt")
def test_what_cannot_be_is_refused(row: Row, request: pytest.FixtureRequest) -> None:
    row.play(globals(), request)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("moretta.format", None, "lack moretta.format"),
        ("moretta.format", "2", "got '2'"),
        ("moretta.layout", "00", "contradict"),
        ("moretta.shapes", "[1]", "contradict"),
        ("moretta.shapes", "{", "contradict"),
        ("moretta.fixed", "no hex", "contradict"),
        ("moretta.precision", None, "contradict"),
        ("moretta.dtype", "float64", "contradict"),
    ],
)
def test_a_file_with_other_metadata_is_refused(mlp_sample: Any, key: str, value: str | None, said: str) -> None:
    proto = onnx.load_from_string(mlp_sample.graph("float32"))
    entries = {entry.key: entry.value for entry in proto.metadata_props} | {key: value}
    del proto.metadata_props[:]
    onnx.helper.set_model_props(proto, {name: text for name, text in entries.items() if text is not None})
    with pytest.raises(ParameterError, match=said) as caught:
        OnnxForward(proto.SerializeToString())
    assert len(str(caught.value).splitlines()) == 1


def test_what_is_no_graph_of_its_metadata_is_refused(mlp_sample: Any, capfd: pytest.CaptureFixture[str]) -> None:
    proto = onnx.load_from_string(mlp_sample.graph("float32"))
    del proto.graph.input[-1]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(3, np.float32), "4.bias"))
    with pytest.raises(ParameterError, match="differ from those of its metadata"):
        OnnxForward(proto.SerializeToString())
    for junk in (b"", b"junk", mlp_sample.graph("float32")[:100]):
        with pytest.raises(ParameterError, match="ONNX") as caught:
            OnnxForward(junk)
        assert len(str(caught.value).splitlines()) == 1
    assert capfd.readouterr() == ("", "")


def tensor_elsewhere(proto: onnx.ModelProto) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name="more", data_type=onnx.TensorProto.FLOAT, dims=[1])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="secret.bin")
    return tensor


def with_file(proto: onnx.ModelProto) -> None:
    proto.graph.initializer.append(tensor_elsewhere(proto))


def with_file_in_a_branch(proto: onnx.ModelProto) -> None:
    branch = onnx.GraphProto(name="branch")
    branch.node.append(onnx.helper.make_node("Constant", [], ["y"], value=tensor_elsewhere(proto)))
    proto.graph.node.append(onnx.helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch))


def with_location_alone(proto: onnx.ModelProto) -> None:
    with_file(proto)
    del proto.graph.initializer[-1].external_data[:]


def with_contrib_operator(proto: onnx.ModelProto) -> None:
    proto.graph.node[0].domain = "com.microsoft"


def with_contrib_domain(proto: onnx.ModelProto) -> None:
    proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))


def with_function(proto: onnx.ModelProto) -> None:
    proto.functions.append(onnx.helper.make_function("ours", "f", ["a"], ["a"], [], proto.opset_import))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_file, "tensors in other files"),
        (with_file_in_a_branch, "tensors in other files"),
        (with_location_alone, "tensors in other files"),
        (with_contrib_operator, "domain b'com.microsoft'"),
        (with_contrib_domain, "domain b'com.microsoft'"),
        (with_function, "functions of its own"),
    ],
)
def test_what_reaches_beyond_the_file_is_refused(mlp_sample: Any, change: Any, said: str) -> None:
    proto = onnx.load_from_string(mlp_sample.graph("float32"))
    change(proto)
    with pytest.raises(ParameterError, match=said) as caught:
        OnnxForward(proto.SerializeToString())
    assert len(str(caught.value).splitlines()) == 1


def test_too_large_a_file_is_refused(mlp_sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict, "LARGEST", 100)
    with pytest.raises(ParameterError, match="at most 100 bytes, got"):
        OnnxForward(mlp_sample.graph("float32"))


def test_a_file_that_is_deeper_than_pythons_stack_is_refused(mlp_sample: Any) -> None:
    data = b""
    for field in (*(6, 5, 1) * 3000, 7):  # from within: a graph in an attribute of a node, of a graph, ..., of a model
        tag, length, octets = bytes([field << 3 | 2]), len(data), b""
        while length > 127:
            octets, length = octets + bytes([length & 127 | 128]), length >> 7
        data = tag + octets + bytes([length]) + data
    with pytest.raises(ParameterError, match="more than 24 messages within each other"):
        OnnxForward(data)


def test_an_operation_that_fails_is_told_of_in_a_sentence(mlp_sample: Any) -> None:
    proto = onnx.load_from_string(mlp_sample.graph("float32"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([3, -1]), "wrong"))
    last = proto.graph.node[-1]
    name, last.output[0] = last.output[0], "before"
    proto.graph.node.append(onnx.helper.make_node("Reshape", ["before", "wrong"], [name]))
    forward = OnnxForward(proto.SerializeToString(), micro_batch=None)
    forward.outputs([mlp_sample.flat], mlp_sample.x[:3])
    with pytest.raises(ParameterError, match="ONNX Runtime cannot run this model: ") as caught:
        forward.outputs([mlp_sample.flat], mlp_sample.x[:7, :])
    assert len(str(caught.value).splitlines()) == 1


PROGRAM = """
import pathlib, sys, warnings
warnings.simplefilter("error")

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "onnx", "onnxscript", "pydantic", "sklearn", "scipy", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import numpy as np
from moretta.engines.usage import peak_mib
from moretta.protocols.baffle.edge.host import fit
from moretta.protocols.baffle.edge.onnx_forward import OnnxForward

forward = OnnxForward(pathlib.Path("model.onnx").read_bytes())
arrays = np.load("arrays.npz")
outputs = forward.outputs([arrays["flat"]], arrays["x"])
np.testing.assert_allclose(outputs[0], arrays["outputs"], rtol=1e-5, atol=1e-5)

from moretta.errors import ParameterError
try:
    fit(forward, arrays["x"], 20, arrays["flat"], ", 3 of them for others")
except ParameterError as error:
    needed = int(str(error).partition("at least ")[2].partition(" ")[0])
    assert str(error) == (
        f"memory-limit-mib = 20: the client needs at least {needed} MiB for one row at a time, 3 of them for others; "
        f"set at least {needed + 1}"
    )
    assert needed - 1 <= peak_mib() <= needed
else:
    raise AssertionError("20 MiB sufficed")
limit = needed + 1 + {spare}
rows = fit(forward, arrays["x"], limit, arrays["flat"])
assert rows == forward.micro_batch and rows & (rows - 1) == 0, rows
for _ in range(3):
    forward.outputs([arrays["flat"]] * 2, arrays["x"])
assert peak_mib() <= limit, (peak_mib(), limit)
assert fit(forward, arrays["x"], 4096, arrays["flat"]) == len(arrays["x"]) >= rows
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("spare", [1, 4, 20])
def test_without_torch_and_within_a_limit(lenet_sample: Any, tmp_path: Path, spare: int) -> None:
    (tmp_path / "model.onnx").write_bytes(lenet_sample.graph("float32"))
    outputs = lenet_sample.torch_outputs(lenet_sample.flat)
    x = np.tile(lenet_sample.x, (4, 1, 1, 1))
    np.savez(tmp_path / "arrays.npz", flat=lenet_sample.flat, x=x, outputs=np.tile(outputs, (4, 1)))
    (tmp_path / "program.py").write_text(PROGRAM.replace("{spare}", str(spare)))
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
