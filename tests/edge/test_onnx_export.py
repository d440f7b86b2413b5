"""What a graph for BAFFLE's clients computes in fewer bits, and which models have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from moretta.errors import ParameterError
from moretta.protocols.baffle.edge.onnx_forward import OnnxForward
from moretta.protocols.baffle.onnx_export import PRECISIONS, graph_of
from moretta.protocols.baffle.silo.forward import Layout


def layout_of(model: nn.Module) -> tuple[Layout, np.ndarray[Any, Any]]:
    trained = {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}
    layout = Layout.of(trained, {})
    return layout, layout.flat(trained)


def to_half(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.astype(np.float16).astype(array.dtype)


def to_levels(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Round each row of [rows, features] as DynamicQuantizeLinear rounds a whole tensor."""
    low, high = np.minimum(x.min(1, keepdims=True), 0), np.maximum(x.max(1, keepdims=True), 0)
    scale = np.maximum((high - low) / np.float32(255), np.float32(1e-30))
    zero = np.rint(-low / scale)
    return (np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale


# Rounding adds an error of its own to each loss, about as large at every sigma, while the differences between losses
# grow with sigma: so their correlation with float32's is 1 / sqrt(1 + (c / sigma)^2). Measured here (64 rows, 50
# directions, five initial models): c is at most 7.5e-5 for 8-bit activations, 2.0e-5 for half precision, at each of the
# three sigmas; twice that is allowed for.
@pytest.mark.parametrize(("precision", "c"), [("float16", 4e-5), ("int8-activations", 1.5e-4)])
def test_loss_differences_follow_float32s(lenet_sample: Any, precision: str, c: float) -> None:
    exact, rounded = OnnxForward(lenet_sample.graph("float32")), OnnxForward(lenet_sample.graph(precision))
    assert rounded.precision == precision
    random = np.random.default_rng(6)
    directions = random.choice(np.float32([-1, 1]), (50, lenet_sample.flat.size))
    for sigma in (1e-3, 3e-3, 1e-2):
        weights = [lenet_sample.flat + np.float32(sigma) * direction for direction in directions]
        found = [lenet_sample.losses(forward.outputs(weights, lenet_sample.x)).mean(1) for forward in (exact, rounded)]
        assert np.abs(found[0] - found[1]).max() > 1e-7  # it rounds
        assert np.corrcoef(*found)[0, 1] > 1 / np.sqrt(1 + (c / sigma) ** 2), sigma


@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_every_model_runs_in_fewer_bits(sample: Any, precision: str) -> None:
    forward = OnnxForward(sample.graph(precision))
    outputs = forward.outputs([sample.flat], sample.x)
    exact = sample.torch_outputs(sample.flat)
    # a few layers, each of a relative error up to 1/255 of the largest entry (2^-11 of each, in half precision)
    np.testing.assert_allclose(outputs[0], exact, rtol=0, atol=0.02 * np.abs(exact).max())
    forward.micro_batch = 5
    alone = forward.outputs([sample.flat], sample.x)
    step = 2e-2 if precision == "int8-activations" else 2e-3  # float32's last bit may turn a rounding over
    np.testing.assert_allclose(alone, outputs, rtol=0, atol=step * np.abs(exact).max())
    assert np.median(np.abs(alone - outputs)) <= 1e-6  # it seldom does


def test_half_precision_rounds_weights_rows_and_each_result() -> None:
    model = nn.Sequential(nn.Linear(40, 6), nn.Hardswish())
    layout, flat = layout_of(model)
    x = np.random.default_rng(7).normal(size=(9, 40)).astype(np.float32)
    (found,) = OnnxForward(graph_of(model, layout, (40,), torch.float32, "float16")).outputs([flat], x)
    parts = layout.split(to_half(flat))
    sums = to_half(to_half(x) @ parts["0.weight"].T + parts["0.bias"])
    expected = to_half(sums * np.clip(sums / 6 + 0.5, 0, 1))
    assert np.array_equal(to_half(found), found)
    np.testing.assert_allclose(found, expected, rtol=2**-10, atol=1e-6)
    assert np.mean(found == expected) > 0.9


def test_activations_are_rounded_row_by_row() -> None:
    model = nn.Linear(40, 6)
    layout, flat = layout_of(model)
    x = (
        np.random.default_rng(8).normal(size=(9, 40)).astype(np.float32)
        * np.logspace(-3, 3, 9, dtype=np.float32)[:, None]
    )
    x[4], x[5], x[6] = 0, np.abs(x[5]), -np.abs(x[6])
    (found,) = OnnxForward(graph_of(model, layout, (40,), torch.float32, "int8-activations")).outputs([flat], x)
    parts = layout.split(flat)
    expected = to_levels(x) @ parts["weight"].T + parts["bias"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(x).max(1, keepdims=True).max())
    assert np.abs(found - (x @ parts["weight"].T + parts["bias"])).max() > 1e-3


def test_the_model_is_left_as_it_was(lenet_sample: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).train()
    layout, flat = layout_of(model)
    graph = graph_of(model, layout, (4,), torch.float32)
    assert model.training
    assert model[1].training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert np.array_equal(layout_of(model)[1], flat)
    assert OnnxForward(graph).layout == layout


def test_the_same_model_gives_the_same_bytes(mlp_sample: Any) -> None:
    again = graph_of(mlp_sample.model, mlp_sample.layout, (5,), torch.float32)
    assert again == mlp_sample.graph("float32")


def test_group_norm_scales_and_shifts_in_one_pass(lenet_sample: Any) -> None:
    nodes = [node.op_type for node in onnx.load_from_string(lenet_sample.graph("float32")).graph.node]
    assert nodes.count("InstanceNormalization") == nodes.count("BatchNormalization") == 2
    assert not {"Mul", "Add", "Unsqueeze"} & set(nodes)


class Branching(nn.Module):
    """Goes by the values, as no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) if x.sum() > 0 else self.last(-x)


class Crossed(nn.Module):
    """Its product has rows on the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight @ x.T).T


class Named(nn.Module):
    """Its parameter has the name of the graph's input."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(4, 3))

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.x


@pytest.mark.parametrize(
    ("build", "precision", "said"),
    [
        (Branching, "float32", "cannot be expressed in ONNX"),
        (Crossed, "int8-activations", "rows on the first axis"),
        (Named, "float32", "rename"),
        (lambda: nn.Linear(4, 3), "int4", "expected one of float32, float16, int8-activations"),
        (lambda: nn.Linear(4, 3).double(), "int8-activations", "float32"),
    ],
)
def test_models_without_a_graph_are_refused(build: Any, precision: str, said: str) -> None:
    model = build()
    layout, _ = layout_of(model)
    with pytest.raises(ParameterError, match=said) as caught:
        graph_of(model, layout, (4,), next(model.parameters()).dtype, precision)
    assert len(str(caught.value).splitlines()) == 1


def test_float64_runs_where_onnx_runtime_has_kernels() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    layout, flat = layout_of(model)
    x = np.random.default_rng(9).normal(size=(6, 4))
    forward = OnnxForward(graph_of(model, layout, (4,), torch.float64))
    with torch.no_grad():
        expected = model(torch.tensor(x)).numpy()
    np.testing.assert_allclose(forward.outputs([flat], x)[0], expected, rtol=1e-13)
    convolution = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten()).double()
    layout, _ = layout_of(convolution)
    with pytest.raises(ParameterError, match="ONNX Runtime cannot run this model"):
        OnnxForward(graph_of(convolution, layout, (2, 5), torch.float64))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_graph_says_nothing_of_the_servers_folders(precision: str) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    layout, _ = layout_of(model)
    graph = graph_of(model, layout, (6,), torch.float32, precision)
    for place in (b".py", b"site-packages", b"stack_trace", str(Path.cwd()).encode()):
        assert place not in graph
