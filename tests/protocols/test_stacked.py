"""Silos that are stepped together learn what they would one by one, whatever the model; where not, they are not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from networks import seeded
from torch import Tensor, nn

from moretta import BAFFLE, PBPFL, Engine, FedAvg, Federation, FedProx, FedSGD, SecureAggregation, Silo
from moretta.engines import silos_here
from moretta.errors import MisuseError, ParameterError
from moretta.protocols.common import modules
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.stacked import Stacked, clip_each
from moretta.protocols.common.training import Training

SILOS = 8


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.norm, self.last = (
            nn.Linear(4, 6),
            nn.Linear(6, 6),
            nn.LayerNorm(6),
            nn.Linear(6, 3),
        )
        self.register_buffer("shift", torch.full((6,), 0.3))
        self.inner.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) + self.shift
        return self.last(self.norm(h + torch.tanh(self.inner(h))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(3, 5), nn.Linear(5, 3, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).mean(dim=1))


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None] * torch.ones(3, 1, dtype=x.dtype)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(dim=1))


class Counting(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.layer(x) * self.calls


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Numbering(nn.Linear):
    """Keeps a number that is no tensor."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Drawing(nn.Linear):
    """Draws by what is not PyTorch's, rarely with an effect."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__(4, 3)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.draw() < 1e-9 else 1)


class Sum(nn.Module):
    """Parameters whose gradients autograd makes one tensor, in full and in part, and one that the outputs lack."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.row = (nn.Parameter(torch.randn(*shape)) for shape in ((3, 4), (3, 4), (1, 4)))
        self.unused = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        below = torch.cat([self.one.new_zeros(2, 4), self.row])
        return x @ (self.one + self.other + below).T


def frozen_norm() -> nn.Module:
    norm = nn.BatchNorm1d(5).eval()
    norm.train = lambda mode=True: norm  # type: ignore[method-assign, assignment]
    return nn.Sequential(nn.Linear(4, 5), norm, nn.ReLU(), nn.Linear(5, 3))


STACKED: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)),
    "residual": Residual,
    "tied": Tied,
    "frozen norm": frozen_norm,
    "sum": Sum,
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(4, 3),
    ),
}  # fmt: skip
ALONE: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)),
    "counts": Counting,
    "numbers calls": lambda: Numbering(4, 3),
    "draws by Python": lambda: Drawing(random.random),
    "draws by NumPy": lambda: Drawing(lambda: np.random.random()),  # noqa: NPY002
    "branches": lambda: Branching(4, 3),
    "attention": Attentive,  # vmap would do it silo by silo, slower
}


def model_of(make: Callable[[], nn.Module]) -> nn.Module:
    with seeded():
        return make().double()


def batches(name: str, silos: int = SILOS, rows: int = 5) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    y = torch.randint(0, 3, (silos, rows), generator=drawn)
    if name == "tied":
        return torch.randint(0, 3, (silos, rows, 4), generator=drawn), y
    return torch.randn(silos, rows, 4, generator=drawn, dtype=torch.float64), y


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("common", [True, False])
def test_gradients_are_those_of_each_alone(name: str, common: bool) -> None:
    model, loss = model_of(STACKED[name]).train(), Loss("cross-entropy", 0.1, (1.0, 2.0, 0.5))
    x, y = batches(name)
    stacked = Stacked(model, loss)
    stacked.check(x, y)
    trained, _ = stacked.load(modules.arrays(model))
    at = (
        trained
        if common
        else {name: torch.stack([value * (1 + 0.1 * n) for n in range(SILOS)]) for name, value in trained.items()}
    )
    found, losses = stacked.gradients(at, x, y, common=common)
    for silo in range(SILOS):
        with torch.no_grad():
            for name, parameter in modules.trainable(model).items():
                parameter.copy_(at[name] if common else at[name][silo])
        wanted = loss(model(x[silo]), y[silo])
        gradients = torch.autograd.grad(wanted, list(modules.trainable(model).values()), materialize_grads=True)
        torch.testing.assert_close(losses[silo], wanted.detach(), rtol=1e-12, atol=1e-12)
        for name, gradient in zip(found, gradients, strict=True):
            torch.testing.assert_close(found[name][silo], gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ALONE)
def test_a_model_that_a_stack_would_change_is_refused(name: str) -> None:
    model = model_of(ALONE[name]).train()
    before, generator = modules.arrays(model), torch.get_rng_state()
    stacked = Stacked(model, Loss("cross-entropy"))
    for _ in range(2):
        with pytest.raises(MisuseError, match="cannot be stacked"):
            stacked.check(*batches(name))
    assert all(np.array_equal(value, before[name]) for name, value in modules.arrays(model).items())
    assert torch.equal(generator, torch.get_rng_state())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_steps_are_those_of_sgd(momentum: float, decay: float, clip_norm: float | None) -> None:
    drawn = torch.Generator().manual_seed(0)
    start = {"w": torch.randn(3, 2, generator=drawn), "b": torch.randn((), generator=drawn)}
    gradients = [
        {name: torch.randn(4, *value.shape, generator=drawn) for name, value in start.items()} for _ in range(3)
    ]
    params, memory = Training(momentum=momentum, weight_decay=decay), {name: dict[str, Any]() for name in start}
    found = {name: value.expand(4, *value.shape).clone() for name, value in start.items()}
    for gradient in gradients:
        stack = {name: value.clone() for name, value in gradient.items()}
        if clip_norm is not None:
            clip_each(stack, clip_norm)
        for name, value in found.items():
            modules.take_step(value, stack[name], memory[name], 0.1, params)
    for silo in range(4):
        own = {name: value.clone().requires_grad_() for name, value in start.items()}
        optimizer = torch.optim.SGD(own.values(), 0.1, momentum, weight_decay=decay)
        for gradient in gradients:
            for name, parameter in own.items():
                parameter.grad = gradient[name][silo].clone()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(own.values(), clip_norm)
            optimizer.step()
        for name, parameter in own.items():
            torch.testing.assert_close(found[name][silo], parameter.detach(), rtol=0, atol=1e-6)


# -- Whole runs --------------------------------------------------------------------------------------------------------


def silos(sizes: Sequence[int]) -> list[Silo]:
    random = np.random.default_rng(0)
    return [Silo(f"s{n}", random.normal(size=(size, 4)), random.integers(0, 3, size)) for n, size in enumerate(sizes)]


def calls_of(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """Count the calls for several silos, by work and number of silos."""
    calls, together = Counter[tuple[str, int]](), silos_here._together

    def watched(works: Sequence[Any]) -> Sequence[Any] | None:
        found = together(works)
        calls[type(works[0]).__name__, len(works)] += found is not None
        return found

    monkeypatch.setattr(silos_here, "_together", watched)
    return calls


def trained(protocol: Training, *, strict: bool, sizes: Sequence[int] = (20,) * SILOS, **settings: Any) -> Any:
    chosen: dict[str, Any] = {
        "model": model_of(STACKED["mlp"]),
        "batch_size": 8,
        "dtype": "float64",
        "insecure_secret_seed": 1,
    }
    return Federation(silos=silos(sizes), protocol=protocol, engine=Engine(strict=strict), **(chosen | settings)).train(
        2
    )


SHARED = {"loss": "cross-entropy", "learning_rate": 0.1}
PROTOCOLS: dict[str, tuple[Training, set[str]]] = {
    "fedsgd": (FedSGD.model_validate(SHARED | {"class_weights": (1.0, 2.0, 0.5)}), {"LocalWork"}),
    "fedsgd mse": (FedSGD(learning_rate=0.1), {"LocalWork"}),
    "fedavg": (
        FedAvg.model_validate(SHARED | {"local_epochs": 2, "momentum": 0.9, "weight_decay": 0.01, "clip_norm": 1.0}),
        {"LocalWork"},
    ),
    "fedprox": (
        FedProx.model_validate(SHARED | {"local_epochs": 3, "mu": 0.5, "momentum": 0.9, "clip_norm": 1.0}),
        {"LocalWork"},
    ),
    "pbpfl": (PBPFL(learning_rate=0.1), {"ForwardWork", "BackwardWork"}),
    "pbpfl softmax": (PBPFL.model_validate(SHARED), {"ForwardWork", "BackwardWork"}),
    "pbpfl paper": (PBPFL.model_validate(SHARED | {"variant": "paper"}), {"ForwardWork", "BackwardWork"}),
    "baffle": (BAFFLE.model_validate(SHARED | {"k": 16, "sigma": 1e-3}), {"LossWork"}),
    "baffle central": (BAFFLE.model_validate(SHARED | {"k": 16, "sigma": 1e-3, "form": "central"}), {"LossWork"}),
}


@pytest.mark.parametrize("scheme", ["none", "pairwise"])
@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_run_is_that_of_silos_one_by_one(name: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    protocol, works = PROTOCOLS[name]
    calls, secure = calls_of(monkeypatch), SecureAggregation(scheme=scheme)
    alone = trained(protocol, strict=True, aggregation=secure)
    assert not calls
    together = trained(protocol, strict=False, aggregation=secure)
    assert calls == {(work, SILOS): 2 for work in works}
    torch.testing.assert_close(together.model.state_dict(), alone.model.state_dict(), rtol=0, atol=1e-6)
    for one, other in zip(together.history, alone.history, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert one["rows"] == other["rows"]


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.01, "clip_norm": 0.1}])
def test_gradients_that_share_memory_are_stepped_apart(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, protocol = calls_of(monkeypatch), FedAvg.model_validate(SHARED | {"local_epochs": 2} | options)
    alone, together = (trained(protocol, strict=strict, model=model_of(Sum)) for strict in (True, False))
    assert calls == {("LocalWork", SILOS): 2}
    torch.testing.assert_close(together.model.state_dict(), alone.model.state_dict(), rtol=0, atol=1e-9)


def test_float32_is_equal_within_its_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, protocol = calls_of(monkeypatch), PROTOCOLS["fedavg"][0]
    alone, together = (trained(protocol, strict=strict, dtype="float32") for strict in (True, False))
    assert calls == {("LocalWork", SILOS): 2}
    torch.testing.assert_close(together.model.state_dict(), alone.model.state_dict(), rtol=0, atol=1e-6)


def test_batches_of_other_shapes_are_other_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, protocol = calls_of(monkeypatch), PROTOCOLS["fedavg"][0]
    sizes = [20, 33] * 6 + [7] * 5
    alone, together = (trained(protocol, strict=strict, sizes=sizes) for strict in (True, False))
    assert calls == {("LocalWork", 6): 2 * 2}
    torch.testing.assert_close(together.model.state_dict(), alone.model.state_dict(), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("protocol", "settings"),
    [
        (FedSGD(dp_noise=1.0, dp_clip=1.0), {"sizes": (8,) * 6}),
        (FedSGD(), {"model": model_of(ALONE["dropout"])}),
        (FedAvg(), {"model": model_of(ALONE["batch norm"])}),
        (
            FedSGD(learning_rate=1e-6),
            {"model": nn.Sequential(nn.Linear(4, 13_000), nn.Linear(13_000, 3)), "sizes": (8,) * 6},
        ),
        (FedSGD(), {"sizes": (20,) * 5}),
        (PBPFL(), {"model": nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))}),
    ],
)
def test_what_is_not_stacked_keeps_its_bits(
    protocol: Training, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_of(monkeypatch)
    alone, other = (trained(protocol, strict=strict, **settings) for strict in (True, False))
    assert not +calls
    for name, value in alone.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name])


def test_a_silo_whose_losses_are_not_finite_costs_only_itself() -> None:
    given = silos([20] * SILOS)
    given[3].x[:] = 1e308
    federation = Federation(
        model_of(STACKED["mlp"]), given, FedSGD(learning_rate=0.1), dtype="float64", standardise=False, batch_size=8
    )
    result = federation.train(2)
    assert {one["silo"] for one in result.record["dropped"]} == {"s3"}
    assert result.history[0]["rows"] == 8 * (SILOS - 1)


def test_weights_that_do_not_fit_are_each_silos_own_error() -> None:
    stacked = Stacked(model_of(STACKED["mlp"]), Loss("mse"))
    with pytest.raises(ParameterError, match="tensors of the model"):
        stacked.load({})
