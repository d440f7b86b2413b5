"""Small models of every kind, each exported once a precision, and what of them the tests compare."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from networks import seeded
from torch import Tensor, nn

from moretta.protocols.baffle import onnx_export
from moretta.protocols.baffle.silo.forward import Layout


class Residual(nn.Module):
    """Two convolutions with BatchNorm, whose statistics are not the initial ones, and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.other = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        for norm in (self.norm, self.other):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(x + self.other(self.second(x)))
        return self.last(x.mean((2, 3)))


class Tied(nn.Module):
    """An encoder whose weight, transposed, decodes."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.last = nn.Linear(6, 4), nn.Linear(4, 6, bias=False), nn.Linear(6, 3)
        self.again = self.last
        self.up.weight = nn.Parameter(self.down.weight.detach().T.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(torch.tanh(self.down(x)), self.down.weight.T)
        return self.last(y) + self.again(self.up(torch.tanh(self.down(x))))


class Tokens(nn.Module):
    """The mean of a few tokens' vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(11, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.hardswish(self.embedding(x)).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 7), nn.Hardswish(), nn.Linear(7, 3))


def lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.GroupNorm(2, 6), nn.Hardswish(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.GroupNorm(4, 16), nn.Hardswish(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 84), nn.Hardswish(), nn.Linear(84, 10)),
    )


def frozen() -> nn.Module:
    model = lenet()
    model[:5].requires_grad_(False)
    return model


EXPORTED = onnx_export._exported
KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (5,)),
    "lenet": (lenet, (1, 28, 28)),
    "residual": (Residual, (3, 8, 8)),
    "tied": (Tied, (6,)),
    "frozen": (frozen, (1, 28, 28)),
    "tokens": (Tokens, (4,)),
}


@dataclass(frozen=True)
class Sample:
    """A model, its weights as one array, and rows for it."""

    model: nn.Module
    layout: Layout
    flat: np.ndarray[Any, Any]
    x: np.ndarray[Any, Any]
    targets: np.ndarray[Any, Any]
    graph: Callable[[str], bytes]

    def torch_outputs(self, flat: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        weights = {name: torch.tensor(array) for name, array in self.layout.split(flat).items()}
        with torch.no_grad():
            model = copy.deepcopy(self.model)  # of a module with two names it does not always put the tensors back
            return torch.func.functional_call(model, weights, (torch.tensor(self.x),)).numpy()

    def losses(self, outputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return each row's cross-entropy, float64[..., rows]."""
        logits = outputs.astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        own = logits[..., np.arange(len(self.targets)), self.targets]
        return np.log(np.exp(logits).sum(-1)) - own


@functools.cache
def made(kind: str) -> Sample:
    build, shape = KINDS[kind]
    with seeded(3):
        model = build().eval()
    trained = {name: p.detach().numpy() for name, p in model.named_parameters() if p.requires_grad}
    rest = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    fixed = {name: tensor.detach().numpy() for name, tensor in rest.items() if name not in trained}
    layout = Layout.of(trained, fixed)
    random = np.random.default_rng(4)
    x = random.integers(0, 11, (64, *shape)) if kind == "tokens" else random.normal(size=(64, *shape)).astype("float32")
    dtype = torch.int64 if kind == "tokens" else torch.float32
    exported = functools.cache(lambda: EXPORTED(model, layout, shape, dtype))  # once for all precisions

    @functools.cache
    def graph(precision: str) -> bytes:
        with mock.patch.object(onnx_export, "_exported", return_value=copy.deepcopy(exported())):
            return onnx_export.graph_of(model, layout, shape, dtype, precision)

    return Sample(model, layout, layout.flat(trained), x, random.integers(0, 3, 64), graph)


@pytest.fixture(params=KINDS)
def sample(request: pytest.FixtureRequest) -> Sample:
    return made(request.param)


@pytest.fixture
def lenet_sample() -> Sample:
    return made("lenet")


@pytest.fixture
def mlp_sample() -> Sample:
    return made("mlp")
