"""What is written down of a model, and which models are refused, by the name of their layer or line."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moretta.errors import UnsupportedModel
from moretta.protocols.pbpfl.graph import record
from moretta.protocols.pbpfl.scales import ScalePlan


class Net(nn.Module):
    """One hidden layer; `middle` is what happens to its output, `last` what happens to the head's."""

    def __init__(
        self, middle: Callable[[Net, Tensor], Tensor], last: Callable[[Net, Tensor], object] = lambda net, y: y
    ) -> None:
        super().__init__()
        self.body, self.extra, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.middle, self.last = middle, last

    def forward(self, x: Tensor) -> object:
        return self.last(self, self.head(self.middle(self, self.body(x))))


CALLS = itertools.count()


def refused(model: nn.Module, match: str, *inputs: Tensor) -> None:
    with pytest.raises(UnsupportedModel, match=match):
        ScalePlan.of(model, inputs or (torch.randn(4, 5),))


def test_calls_have_one_name_and_know_their_layer() -> None:
    def middle(net: Net, h: Tensor) -> Tensor:
        h = h + 1
        h += net.extra(h)
        return h.relu_()

    trace = record(Net(middle), (torch.randn(2, 5),))
    assert [(call.name, call.module) for call in trace.calls] == [
        ("linear", "body"), ("add", ""), ("linear", "extra"), ("add", ""), ("relu", ""), ("linear", "head")
    ]  # fmt: skip
    assert trace.calls[-1].result is trace.output


def test_containers_of_torch_are_entered() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    trace = record(nn.Sequential(nn.TransformerEncoder(layer, 1)), (torch.randn(2, 3, 8),))
    found = [(call.name, call.module) for call in trace.calls]
    assert ("multi_head_attention_forward", "0.layers.0.self_attn") in found
    assert ("linear", "0.layers.0.linear2") in found


@pytest.mark.parametrize(
    "middle",
    [
        lambda net, h: h if h.sum() > 0 else -h,
        lambda net, h: h * h.max().item(),
        lambda net, h: h + torch.from_numpy(h.detach().numpy()),
        lambda net, h: h[:, : int(h.argmax()) + 1],
    ],
)
def test_reading_data_is_refused_by_its_line(middle: Callable[[Net, Tensor], Tensor]) -> None:
    refused(Net(middle), r"test_graph\.py:\d+ reads the value")


def test_branches_on_shapes_are_followed() -> None:
    assert ScalePlan.of(Net(lambda net, h: F.relu(h) if h.shape[1] == 8 else h), (torch.randn(4, 5),)).free == 8


def test_an_error_of_the_model_is_told_with_its_line() -> None:
    refused(Net(lambda net, h: h @ torch.ones(7, 7)), r"RuntimeError at test_graph\.py:\d+")


def test_calls_of_training_alone_are_followed_too_and_other_outputs_are_refused() -> None:
    plan = ScalePlan.of(Net(lambda net, h: net.extra(h) if net.training else h), (torch.randn(4, 5),))
    assert plan.free == 8  # a channel of `body` is one of `extra`, or evaluation would be another function
    plan = ScalePlan.of(Net(lambda net, h: net.extra(h).sigmoid() if net.training else h), (torch.randn(4, 5),))
    assert plan.free == 0
    refused(Net(lambda net, h: h, lambda net, y: (y, y) if net.training else y), "auxiliary outputs")


@pytest.mark.parametrize(
    ("last", "match"),
    [
        (lambda net, y: y.softmax(1), r"softmax in the model \(Net\)"),
        (lambda net, y: y.exp(), "exp"),
        (lambda net, y: {"logits": y}, "returns a dict"),
        (lambda net, y: (y, y), "returns a tuple"),
        (lambda net, y: y[:, None] + torch.zeros(1, 2, 1), "add"),
        (lambda net, y: y * (y > 0), "mul"),
    ],
)
def test_a_model_that_goes_on_after_its_head_is_refused(last: Callable[[Net, Tensor], object], match: str) -> None:
    refused(Net(lambda net, h: h, last), match + ".*end the model with an nn.Linear")


def test_a_convolution_is_a_head_behind_which_a_mean_is_taken_and_not_a_largest_number() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    head = ScalePlan.of(model, (torch.randn(4, 3, 4, 4),)).head
    assert (head.module, head.inputs, head.outputs, head.positions) == ("0", 3, 2, 1)
    model[1] = nn.AdaptiveMaxPool2d(1)
    refused(model, r"flatten in 2 \(Flatten\)", torch.randn(4, 3, 4, 4))


@pytest.mark.parametrize(
    ("middle", "match"),
    [
        (lambda net, h: h - h.mean(0), "mean"),
        (lambda net, h: torch.cdist(h, h) @ h, "cdist"),
        (lambda net, h: net.extra(h).flip(0), "flip"),
    ],
)
def test_mixed_rows_are_refused_by_name(middle: Callable[[Net, Tensor], Tensor], match: str) -> None:
    refused(Net(middle), rf"depends on the other rows of its batch \({match}")


@pytest.mark.parametrize(
    ("middle", "match"),
    [
        (
            lambda net, h: F.dropout(h),
            r"in evaluation .* for the same rows vary: .* F\.dropout\(x, p, self\.training\)",
        ),
        (lambda net, h: h * next(CALLS), "for the same rows vary: .* or counts its runs"),
        (lambda net, h: h if net.training and random.random() < 0.5 else net.extra(h), "draws from Python's random"),
        (lambda net, h: h * float(np.random.normal()), r"or from numpy\.random, .* torch\.rand"),  # noqa: NPY002
    ],
)
def test_chance_in_evaluation_and_chance_that_is_not_torch_s_are_refused(
    middle: Callable[[Net, Tensor], Tensor], match: str
) -> None:
    refused(Net(middle), match)


def test_an_operation_without_a_rule_is_forced_and_told() -> None:
    plan = ScalePlan.of(Net(lambda net, h: F.relu(net.extra(h.cumsum(1)))), (torch.randn(4, 5),))
    forced = {one.tensor: one.because for one in plan.forced}
    assert forced["body.bias"] == "cumsum in the model (Net), an operation without a rule, needs scale 1"
    assert (plan.free, plan.blocks) == (8, (8,))


def test_a_wrong_rule_would_be_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from moretta.protocols.pbpfl import layers

    monkeypatch.setitem(layers.LAYERS, "tanh", layers.LAYERS["relu"])
    refused(Net(lambda net, h: net.extra(h).tanh()), r"first at tanh in the model \(Net\)")


def test_a_backward_that_is_not_the_forward_s_is_found() -> None:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(context: SimpleNamespace, x: Tensor) -> Tensor:  # type: ignore[override]
            return x.relu()

        @staticmethod
        def backward(context: SimpleNamespace, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient.tanh()

    refused(Net(lambda net, h: Straight.apply(h)), "backward")


def test_inputs_need_one_batch_axis() -> None:
    refused(Net(lambda net, h: h), "batch as axis 0", torch.randn(4, 5), torch.randn(3, 5))


def test_stochastic_depth_is_followed_in_training() -> None:
    class Drop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.empty(len(x), 1).bernoulli_(0.5) if self.training else x

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.extra, self.drop, self.head = nn.Linear(5, 8), nn.Linear(8, 8), Drop(), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.body(x))
            return self.head(x + self.drop(self.extra(x)))

    assert ScalePlan.of(Block(), (torch.randn(4, 5),)).blocks == (8,)


@pytest.mark.parametrize(
    ("middle", "place"),
    [
        (lambda net, h: torch.log(h), r"log in the model \(Net\)"),
        (lambda net, h: torch.relu(h) / torch.relu(-h), r"div in the model \(Net\)"),
        (lambda net, h: net.extra(h.relu()) * float("inf"), r"mul in the model \(Net\)"),
    ],
)
def test_outputs_that_are_not_finite_are_refused_by_their_first_call(
    middle: Callable[[Net, Tensor], Tensor], place: str
) -> None:
    refused(Net(middle), rf"output on the example inputs is not finite \(first from {place}\): use inputs that it is")


def test_inputs_and_gradients_that_are_not_finite_are_refused() -> None:
    refused(Net(lambda net, h: h), r"is not finite \(first from linear in body", torch.full((4, 5), float("nan")))
    refused(Net(lambda net, h: torch.sqrt(h * 0)), "gradient on the example inputs is not finite")


def test_a_mask_of_minus_infinity_is_not_blamed() -> None:
    def middle(net: Net, h: Tensor) -> Tensor:
        masked = h.masked_fill(torch.arange(8) < 3, float("-inf")).softmax(1)
        return torch.log(masked - 1)

    refused(Net(middle), r"not finite \(first from log in the model")
