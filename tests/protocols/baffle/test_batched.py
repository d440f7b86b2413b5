"""Models that run together give what each gives alone; networks that are not known layer by layer run alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moretta.models.architectures import lenet, mlp
from moretta.protocols.baffle.torch_forward import SMALL, TorchForward, layout_of
from moretta.protocols.common import modules

Build = Callable[[], nn.Module]


def seeded(build: Build, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().to(dtype)


def vectors(forward: TorchForward, model: nn.Module, count: int) -> list[NDArray[Any]]:
    """Parameters around the model's own, each another way and far enough to tell."""
    at, generator = forward.layout.flat(modules.arrays(model)), np.random.default_rng(1)
    return [(at + 0.1 * generator.choice([-1.0, 1.0], at.shape)).astype(at.dtype) for _ in range(count)]


def alone(model: nn.Module, forward: TorchForward, vector: NDArray[Any], x: NDArray[Any]) -> NDArray[Any]:
    """What the module itself gives at these parameters."""
    state = {name: torch.tensor(value) for name, value in forward.layout.split(vector).items()}
    with torch.no_grad():
        return torch.func.functional_call(model, state, (torch.tensor(x),)).numpy()


def farthest(build: Build, shape: tuple[int, ...], count: int = 8, dtype: torch.dtype = torch.float32) -> float:
    """How far outputs of models that run together are off, over the largest output."""
    model = seeded(build, dtype)
    forward = TorchForward(model, layout_of(model))
    generator = np.random.default_rng(0)
    x = generator.normal(0, 1, (5, *shape)).astype(forward.layout.dtype)
    together, before = vectors(forward, model, count), x.copy()
    wanted = np.stack([alone(model, forward, vector, x.copy()) for vector in together])
    copies = [vector.copy() for vector in together]
    found = forward.outputs(np.stack(together), x)
    assert found.shape == wanted.shape
    assert all(np.array_equal(*pair) for pair in zip(together, copies, strict=True))
    assert np.array_equal(x, before)
    singly = np.concatenate([forward.outputs(vector[None], x) for vector in together])
    return max(float(np.abs(one - wanted).max() / np.abs(wanted).max()) for one in (found, singly))


def is_batched(build: Build) -> bool:
    model = seeded(build)
    return TorchForward(model, layout_of(model)).at_once(1) > 1


def after(*layers: nn.Module, last: int) -> nn.Sequential:
    """These layers, then a linear one of three outputs."""
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(last, 3))


KNOWN: dict[str, tuple[Build, tuple[int, ...]]] = {
    "mlp": (lambda: mlp((7,), 3), (7,)),
    "linear": (lambda: nn.Linear(7, 3), (7,)),
    "linear in a sequence": (lambda: nn.Sequential(nn.Linear(7, 3)), (7,)),
    "no biases": (lambda: nn.Sequential(nn.Linear(7, 5, bias=False), nn.SELU(), nn.Linear(5, 3, bias=False)), (7,)),
    "flatten first": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.GELU(), nn.Linear(5, 3)), (3, 4)),
    "activation first": (lambda: nn.Sequential(nn.Tanh(), nn.Linear(7, 3)), (7,)),
    "conv with bias": (lambda: after(nn.Conv2d(2, 4, 3), nn.ReLU(), last=4 * 6 * 7), (2, 8, 9)),
    "conv without bias": (lambda: after(nn.Conv2d(2, 4, 3, bias=False), nn.ReLU(), last=4 * 6 * 7), (2, 8, 9)),
    "conv with stride and padding": (
        lambda: after(nn.Conv2d(2, 4, 3, 2, 1), nn.ELU(), nn.Conv2d(4, 3, (1, 3), padding=(0, 2)), last=84),
        (2, 8, 9),
    ),
    "dilated conv": (lambda: after(nn.Conv2d(2, 4, 3, dilation=2, padding="same"), last=4 * 72), (2, 8, 9)),
    "two convs": (
        lambda: after(nn.Conv2d(1, 3, 3), nn.SiLU(), nn.Conv2d(3, 5, 3, bias=False), nn.ReLU6(), last=5 * 16),
        (1, 8, 8),
    ),
    "group norm": (
        lambda: after(
            nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.GroupNorm(1, 4), last=80
        ),
        (2, 8, 9),
    ),
    "group norm without tensors": (
        lambda: after(nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6, affine=False), nn.Tanh(), last=6 * 42),
        (2, 8, 9),
    ),
    "group norm first": (lambda: after(nn.GroupNorm(2, 4), nn.Conv2d(4, 3, 3), last=3 * 42), (4, 8, 9)),
    "max of 2 x 2": (lambda: after(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), last=4 * 9), (2, 8, 8)),
    "max of 2 x 2, odd": (lambda: after(nn.Conv2d(2, 4, 2), nn.MaxPool2d(2), last=4 * 3 * 4), (2, 8, 9)),
    "mean of 2 x 2, odd": (lambda: after(nn.Conv2d(2, 4, 2), nn.AvgPool2d(2), last=4 * 3 * 4), (2, 8, 9)),
    "mean of 2 x 2 first": (lambda: after(nn.AvgPool2d((2, 2)), nn.Conv2d(2, 4, 2), last=4 * 3 * 4), (2, 9, 10)),
    "max of 3 x 3, padded": (lambda: after(nn.Conv2d(2, 4, 2), nn.MaxPool2d(3, 2, 1), last=4 * 4 * 4), (2, 8, 9)),
    "mean, padded, not counted": (
        lambda: after(nn.Conv2d(2, 4, 2), nn.AvgPool2d(2, padding=1, count_include_pad=False), last=4 * 4 * 5),
        (2, 8, 9),
    ),
    "mean, rounded up": (lambda: after(nn.Conv2d(2, 4, 2), nn.AvgPool2d(2, ceil_mode=True), last=4 * 4 * 4), (2, 8, 9)),
    "max with stride 1": (lambda: after(nn.Conv2d(2, 4, 2), nn.MaxPool2d(2, 1), last=4 * 6 * 7), (2, 8, 9)),
    "adaptive": (lambda: after(nn.Conv2d(2, 4, 2), nn.AdaptiveAvgPool2d(1), last=4), (2, 8, 9)),
    "adaptive to 3 x 2": (lambda: after(nn.Conv2d(2, 4, 2), nn.AdaptiveAvgPool2d((3, 2)), last=24), (2, 8, 9)),
    "dropout of nothing": (lambda: nn.Sequential(nn.Linear(7, 5), nn.Dropout(0.0), nn.Linear(5, 3)), (7,)),
    **{
        f"lenet, {activation}, {shape[0]} x {shape[1]}": (
            lambda shape=shape, activation=activation: lenet(shape, 10, activation=activation),
            shape,
        )
        for shape in ((1, 28, 28), (3, 32, 32))
        for activation in ("hardswish", "relu", "selu")
    },
}


@pytest.mark.parametrize("kind", KNOWN)
def test_models_that_run_together_give_what_each_gives_alone(kind: str) -> None:
    build, shape = KNOWN[kind]
    assert is_batched(build) or kind == "linear"
    # float32 rounds to 6e-8, and sums of some hundred products in another order lose a few of these.
    assert farthest(build, shape) < 1e-6
    assert farthest(build, shape, dtype=torch.float64) < 1e-14


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_any_number_of_models_runs_together(count: int) -> None:
    assert farthest(lambda: lenet((1, 16, 16), 10), (1, 16, 16), count) < 1e-6


class Twice(nn.Sequential):
    """A sequence whose forward is not that of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Centred(nn.Linear):
    """A layer that uses its weight otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight - self.weight.mean(), self.bias)


class Functional(nn.Module):
    """A model that is no sequence of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def reused() -> nn.Module:
    activation = nn.Tanh()
    return nn.Sequential(nn.Linear(7, 5), activation, nn.Linear(5, 5), activation, nn.Linear(5, 3))


def tied() -> nn.Module:
    middle = nn.Linear(7, 7)
    return nn.Sequential(middle, nn.Tanh(), middle, nn.Tanh(), nn.Linear(7, 3))


def shared_weight() -> nn.Module:
    model = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))
    model[2].weight = model[0].weight
    return model


def frozen_in_part() -> nn.Module:
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    return model


def frozen_bias() -> nn.Module:
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].bias.requires_grad_(False)
    return model


ALONE: dict[str, tuple[Build, tuple[int, ...]]] = {
    "functional": (Functional, (7,)),
    "nested": (lambda: nn.Sequential(nn.Sequential(nn.Linear(7, 5)), nn.Linear(5, 3)), (7,)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3)), (7,)),
    "softmax": (lambda: nn.Sequential(nn.Linear(7, 5), nn.Softmax(1), nn.Linear(5, 3)), (7,)),
    "grouped conv": (lambda: after(nn.Conv2d(2, 4, 3, groups=2), last=4 * 42), (2, 8, 9)),
    "conv with reflection": (
        lambda: after(nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), last=4 * 72),
        (2, 8, 9),
    ),
    "flatten in part": (lambda: nn.Sequential(nn.Flatten(2), nn.Flatten(), nn.Linear(24, 3)), (2, 3, 4)),
    "frozen in part": (frozen_in_part, (7,)),
    "frozen bias": (frozen_bias, (7,)),
    "shared weight": (shared_weight, (7,)),
    "large": (lambda: nn.Sequential(nn.Linear(7, SMALL // 8), nn.Linear(SMALL // 8, 3)), (7,)),
}


@pytest.mark.parametrize("kind", ALONE)
def test_other_models_run_one_after_the_other(kind: str) -> None:
    build, shape = ALONE[kind]
    assert not is_batched(build)
    assert farthest(build, shape) < 1e-6


# Easily taken for what they are not.
MISREAD: dict[str, tuple[Build, tuple[int, ...]]] = {
    "activation used twice": (reused, (7,)),
    "layer used twice": (tied, (7,)),
    "another forward": (lambda: Twice(nn.Linear(7, 3)), (7,)),
    "another layer": (lambda: nn.Sequential(Centred(7, 5), nn.Linear(5, 3)), (7,)),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(7, 5)), nn.Linear(5, 3)),
        (7,),
    ),
    "group norm behind linear": (
        lambda: nn.Sequential(nn.Linear(7, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.Linear(8, 3)),
        (7,),
    ),
    "group norm before linear": (lambda: nn.Sequential(nn.GroupNorm(1, 7), nn.Linear(7, 3)), (7,)),
    "flatten behind linear": (lambda: nn.Sequential(nn.Linear(7, 5), nn.Flatten(), nn.Linear(5, 3)), (7,)),
    "flatten at the end": (lambda: nn.Sequential(nn.Linear(7, 3), nn.Flatten()), (7,)),
    "linear of sequences": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Flatten(), nn.Linear(15, 3)), (3, 4)),
    "linear of images": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(4, 3), nn.Flatten(), nn.Linear(24, 3)),
        (1, 6, 6),
    ),
    "pool of one channel": (lambda: nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, 3)), (4, 5)),
    "in place": (lambda: nn.Sequential(nn.Hardswish(inplace=True), nn.Linear(7, 3)), (7,)),
}


@pytest.mark.parametrize("kind", MISREAD)
def test_a_model_is_not_taken_for_another(kind: str) -> None:
    build, shape = MISREAD[kind]
    assert farthest(build, shape) < 1e-6
