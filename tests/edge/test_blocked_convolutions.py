"""Convolutions' weights in blocks, and means as products, change how long a graph takes and nothing else."""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from networks import seeded
from numpy.typing import NDArray
from torch import Tensor, nn

from moretta.errors import ParameterError
from moretta.protocols.baffle.edge import blocked_convolutions, onnx_forward, strict
from moretta.protocols.baffle.edge.onnx_forward import OnnxForward
from moretta.protocols.baffle.onnx_export import PRECISIONS, graph_of
from moretta.protocols.baffle.torch_forward import layout_of
from moretta.protocols.common import modules


class Twice(nn.Module):
    """One convolution's weights in two places, once as they are and once turned."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv(x)) + nn.functional.conv2d(x, self.conv.weight.transpose(2, 3), padding=1)
        return self.last(y.mean((2, 3)))


class Stored(nn.Module):
    """A tensor of four dimensions that is no convolution's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.table = nn.Conv2d(3, 16, 3), nn.Parameter(torch.randn(1, 16, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv(x) * self.table).sum((2, 3))


def frozen_first() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(512, 3))
    model[0].requires_grad_(False)
    return model


def pooled(*layers: nn.Module, last: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), *layers, nn.Flatten(), nn.Linear(last, 3))


KINDS: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # and whether weights of convolutions go to blocks
    "padded": (lambda: pooled(nn.AvgPool2d(2), nn.Conv2d(6, 10, 3), last=40), True),
    "wide": (
        lambda: pooled(nn.Conv2d(6, 16, 3), nn.GELU(), nn.Conv2d(16, 48, 3, 2, 1), nn.GroupNorm(8, 48), last=432),
        True,
    ),
    "batch norm": (lambda: pooled(nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 16, 3), last=576), True),
    "groups": (lambda: pooled(nn.Conv2d(6, 12, 3, groups=3), nn.Conv2d(12, 12, 3, groups=12), last=192), True),
    "frozen first": (frozen_first, True),
    "twice": (lambda: nn.Sequential(nn.Conv2d(3, 16, 1), Twice()), False),
    "stored": (Stored, True),
    "no convolution": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), False),
    "one dimension": (
        lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 16, 5), nn.Flatten(), nn.Linear(960, 3)),
        False,
    ),
}


@functools.cache
def made(kind: str, precision: str = "float32") -> tuple[nn.Module, bytes, NDArray[Any], NDArray[Any]]:
    with seeded():
        model = KINDS[kind][0]().eval()
    layout, random = layout_of(model), np.random.default_rng(1)
    graph = graph_of(model, layout, (3, 8, 8), torch.float32, precision)
    at = layout.flat(modules.arrays(model))
    weights = np.stack([at, *(at + random.normal(0, 0.1, (3, at.size)))]).astype(np.float32)
    return model, graph, weights, random.normal(size=(7, 3, 8, 8)).astype(np.float32)


def plain(graph: bytes, monkeypatch: pytest.MonkeyPatch) -> OnnxForward:
    """What runs the graph as it was exported."""
    with monkeypatch.context() as patch:
        patch.setattr(onnx_forward, "in_blocks", lambda *_: None)
        return OnnxForward(graph)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_change_no_output(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, graph, weights, x = made(kind)
    forward = OnnxForward(graph)
    if platform.machine() in ("x86_64", "AMD64"):  # elsewhere it depends on the version
        assert bool(forward._blocks.places) is KINDS[kind][1]
    wanted = plain(graph, monkeypatch).outputs(weights, x)
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(forward.outputs(weights, x), wanted, rtol=0, atol=1e-6 * scale)
    np.testing.assert_allclose(forward.outputs(weights[::-1].copy(), x)[::-1], wanted, rtol=0, atol=1e-6 * scale)
    with torch.no_grad():
        np.testing.assert_allclose(wanted[0], model(torch.tensor(x)).numpy(), rtol=0, atol=2e-6 * scale)


@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_blocks_change_no_coarser_output(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, graph, weights, x = made("wide", precision)
    found, wanted = OnnxForward(graph).outputs(weights, x), plain(graph, monkeypatch).outputs(weights, x)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-2 * np.abs(wanted).max())


@pytest.mark.parametrize("wrong", ["order", "error", "same array"])
def test_blocks_that_compute_something_else_are_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, graph, weights, x = made("wide")
    wanted = plain(graph, monkeypatch).outputs(weights, x)
    fill, load, kept = blocked_convolutions.Place.fill, onnx_forward.session_of, list[Any]()

    def filled(place: blocked_convolutions.Place, flat: NDArray[np.float32]) -> None:
        fill(place, flat if wrong != "order" else np.roll(flat, 1))

    def loaded(graph: Any, **options: Any) -> Any:
        if "arrays" in options and wrong == "error":
            raise ParameterError("ONNX Runtime has no such kernel")
        if "arrays" in options:  # as a version would that makes copies of what it is given
            value_of = onnx_forward.ort.OrtValue.ortvalue_from_numpy
            options["arrays"] = {name: value_of(value.numpy().copy()) for name, value in options["arrays"].items()}
            kept.append(options["arrays"])
        return load(graph, **options)

    monkeypatch.setattr(blocked_convolutions.Place, "fill", filled)
    if wrong != "order":
        monkeypatch.setattr(onnx_forward, "session_of", loaded)
    forward = OnnxForward(graph)
    assert not forward._blocks.places
    assert np.array_equal(forward.outputs(weights, x), wanted)


POOLS: dict[str, tuple[nn.Module, int, bool]] = {  # how many outputs, and whether it is a product
    "2 x 2": (nn.AvgPool2d(2), 96, True),
    "4 x 2": (nn.AvgPool2d((4, 2)), 48, True),
    "all": (nn.AvgPool2d(8), 6, True),
    "overlapping": (nn.AvgPool2d(2, 1), 294, False),
    "padded": (nn.AvgPool2d(2, padding=1), 150, False),
    "with a rest": (nn.AvgPool2d(3), 24, False),
    "rounded up": (nn.AvgPool2d(3, ceil_mode=True), 54, False),
    "of the largest": (nn.MaxPool2d(2), 96, False),
}


@pytest.mark.parametrize("kind", POOLS)
def test_means_that_tile_an_image_are_products(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, last, product = POOLS[kind]
    monkeypatch.setitem(KINDS, f"pool {kind}", (lambda: pooled(layer, last=last), True))
    model, graph, weights, x = made(f"pool {kind}")
    nodes = [node.op_type for node in onnx.load_from_string(graph).graph.node]
    assert ("MatMul" in nodes) is product
    assert ("AveragePool" in nodes) is (not product and kind != "of the largest")
    with torch.no_grad():
        wanted = model(torch.tensor(x)).numpy()
    np.testing.assert_allclose(OnnxForward(graph).outputs(weights[:1], x)[0], wanted, rtol=0, atol=1e-6)


def test_fields_are_what_was_written() -> None:
    data = strict.written(3, 300) + strict.written(70, b"ab") + strict.head(5, 200) + bytes(200)
    found = [(number, value, bytes(part)) for number, _, value, part, _ in strict.fields(memoryview(data))]
    assert found == [(3, 300, b""), (70, 0, b"ab"), (5, 0, bytes(200))]
    assert b"".join(whole for *_, whole in strict.fields(memoryview(data))) == data
    with pytest.raises(ParameterError, match="not an ONNX file"):
        list(strict.fields(memoryview(data[:-1])))


GIVEN_BACK = """
import numpy as np, onnxruntime
from moretta.engines.usage import give_back_code, status
before = status("RssFile")
give_back_code()
after = status("RssFile")
assert after < before / 2, (before, after)
assert np.linalg.inv(np.eye(3)).sum() == 3 and onnxruntime.get_device()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives pages back so")
def test_code_that_is_given_back_is_read_again() -> None:
    subprocess.run([sys.executable, "-c", GIVEN_BACK], check=True)
