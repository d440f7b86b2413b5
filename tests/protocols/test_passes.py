"""Rows that pass a few at a time, blocks that run twice and bfloat16 leave a step as it is, to what each may round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from networks import seeded
from torch import Tensor, nn

from moretta import BAFFLE, CGD, PBPFL, Engine, FedAvg, Federation, FedSGD, SecureAggregation, Silo
from moretta.errors import ParameterError
from moretta.protocols.common import modules
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.passes import WHOLE, Passes, blocks_of
from moretta.protocols.common.training import Training
from moretta.protocols.pbpfl.head import Head
from moretta.protocols.pbpfl.work import Trunk

ROWS = 7


class Residual(nn.Module):
    """A block. between: a layer that draws, or normalises, or remembers."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), between, nn.Tanh())
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + self.layers(x)


class Drifting(nn.Module):
    """Multiplies by a number that it counts up by itself, in no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def forward(self, x: Tensor) -> Tensor:
        self.times += 1
        return x * self.times


def deep(between: Callable[[], nn.Module] = nn.Identity) -> nn.Sequential:
    with seeded():
        return nn.Sequential(nn.Linear(4, 6), *(Residual(between()) for _ in range(3)), nn.Linear(6, 3))


def silos(dtype: Any = np.float32) -> list[Silo]:
    drawn = np.random.default_rng(0)
    return [Silo(f"silo-{k}", drawn.normal(size=(ROWS + k, 4)).astype(dtype), np.arange(ROWS + k) % 3) for k in (1, 2)]


def trained(protocol: Training, engine: Engine | None, model: nn.Module, dtype: str = "float32") -> dict[str, Any]:
    """Two rounds; one of BAFFLE's, whose next directions follow from the parameters to the last bit."""
    plain = SecureAggregation(scheme="none")
    made = Federation(model, silos(), protocol, engine=engine, aggregation=plain, dtype=dtype, insecure_secret_seed=1)
    result = made.train(1 if isinstance(protocol, BAFFLE) else 2, seed=0)
    return modules.arrays(result.model or result.models["silo-1"])


WEIGHTS = (0.5, 1.0, 2.0)
CASES: dict[str, tuple[Training, str, float]] = {
    "fedsgd": (FedSGD(loss="mse"), "float32", 1e-6),
    "fedsgd, weighted": (FedSGD(loss="cross-entropy", class_weights=WEIGHTS), "float32", 1e-6),
    "fedavg": (FedAvg(loss="cross-entropy", local_epochs=2), "float32", 1e-6),
    "cgd": (CGD(loss="cross-entropy"), "float32", 1e-6),
    "pbpfl, squared error": (PBPFL(loss="mse"), "float64", 1e-9),
    "pbpfl, cross-entropy": (PBPFL(loss="cross-entropy", partitions=2), "float64", 1e-9),
    "pbpfl, the paper's": (PBPFL(loss="cross-entropy", variant="paper"), "float64", 1e-9),
    "baffle": (BAFFLE(loss="cross-entropy", k=16, ema=0.0), "float64", 1e-9),
    "baffle, blocks": (BAFFLE(loss="mse", perturb="blocks", ema=0.0), "float64", 1e-9),
}


@pytest.mark.parametrize("name", CASES)
def test_a_micro_batch_takes_the_same_steps(name: str) -> None:
    protocol, dtype, bar = CASES[name]
    whole, parts = (trained(protocol, engine, deep(), dtype) for engine in (None, Engine(micro_batch=3)))
    start = modules.arrays(deep())
    for key, value in whole.items():
        assert np.abs(value - start[key]).max() > 100 * bar  # it did step
        np.testing.assert_allclose(parts[key], value, rtol=0, atol=bar * np.abs(value).max(), err_msg=key)


def test_the_terms_of_a_trunk_are_those_of_the_whole_batch_in_float32() -> None:
    model, inputs = deep(), torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
    head = Head("4", "4.weight", "4.bias", outputs=3, inputs=6, tied=False)
    cotangents = torch.randn(3, ROWS, 6, generator=torch.Generator().manual_seed(1))
    found = []
    for passes in (WHOLE, Passes(rows=2), Passes(recomputes=True), Passes(rows=3, recomputes=True)):
        trunk = Trunk(model, head, passes)
        ends = trunk.forward(inputs)
        found.append([*ends, *(one for parts in trunk.backward(cotangents).values() for one in parts)])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(two, one, rtol=0, atol=1e-6 * float(one.abs().max()))


def test_rows_that_go_to_the_head_again_draw_as_they_did() -> None:
    model, inputs = deep(lambda: nn.Dropout(0.5)), torch.randn(4, 4)
    head = Head("4", "4.weight", "4.bias", outputs=3, inputs=6, tied=False)
    trunk, cotangents = Trunk(model, head, Passes(rows=2)), torch.ones(1, 4, 6)
    with seeded(7):
        trunk.forward(inputs)
    with seeded(8):
        found = trunk.backward(cotangents)
    below = list(model.children())[:-1]
    with seeded(7):
        h = [nn.Sequential(*below)(part) for part in inputs.split(2)]
    wanted = torch.autograd.grad(torch.cat(h).sum(), list(nn.Sequential(*below).parameters()))
    for (one,), two in zip(found.values(), wanted, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("between", [lambda: nn.Dropout(0.5), lambda: nn.BatchNorm1d(6)], ids=["dropout", "batch norm"])
def test_recomputed_blocks_run_twice_and_change_nothing(between: Callable[[], nn.Module]) -> None:
    batch = torch.randn(ROWS, 4), torch.arange(ROWS) % 3
    found = []
    for passes in (WHOLE, Passes(recomputes=True)):
        model = deep(between)
        with seeded(3):
            gradients, loss = modules.gradient(
                model, modules.trainable(model), Loss("cross-entropy"), batch, passes=passes
            )
        found.append([torch.tensor(loss), *gradients.values(), *model.buffers()])
        assert {one.runs for one in model.modules() if isinstance(one, Residual)} == {1 + passes.recomputes}
        assert not any("forward" in vars(one) for one in model.modules())
    assert all(map(torch.equal, *found))


def test_blocks_are_members_of_containers_that_have_layers_and_hold_at_most_half_of_the_model() -> None:
    model = deep()
    assert blocks_of(model) == list(model)[1:4]
    assert blocks_of(model, "2.layers.0") == [model[1], model[3]]  # the head's own is run as ever
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.Sequential(Residual(nn.Identity()), nn.Linear(6, 1)))) == []
    stages = nn.ModuleList([nn.Sequential(*list(deep())[1:3]), nn.Sequential(*list(deep())[1:3])])
    assert len(blocks_of(stages)) == 4


@pytest.mark.parametrize(
    ("make", "engine", "sentence"),
    [
        (lambda: deep(lambda: nn.BatchNorm1d(6)), {"micro_batch": 2}, r"BatchNorm1d\) mixes the rows .* micro-batch"),
        (
            lambda: nn.Sequential(
                nn.Unflatten(1, (1, 4)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten(), nn.Linear(4, 3)
            ),
            {"micro_batch": 2},
            "keeps running statistics",
        ),
        (lambda: nn.Sequential(nn.Linear(4, 3)), {"recompute": "blocks"}, "the model has no blocks"),
        (lambda: deep(Drifting), {"recompute": "blocks"}, "other gradients or buffers"),
    ],
    ids=["batch norm", "instance norm", "no blocks", "a block that remembers"],
)
def test_models_that_cannot_pass_so_are_refused_before_round_one(
    make: Callable[[], nn.Module], engine: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ParameterError, match=sentence) as caught:
        trained(FedSGD(loss="mse"), Engine(**engine), make())
    assert len(str(caught.value).splitlines()) == 1


def test_autocast_rounds_to_bfloat16_and_no_more() -> None:
    batch = torch.randn(32, 4), torch.arange(32) % 3
    plain, rounded = (
        modules.gradient(model, modules.trainable(model), Loss("cross-entropy"), batch, passes=passes)
        for model, passes in ((deep(), WHOLE), (deep(), Passes(autocast=True)))
    )
    assert all(one.dtype == torch.float32 for one in rounded[0].values())
    ours, exact = (torch.cat([one.flatten() for one in found[0].values()]) for found in (rounded, plain))
    assert 1e-4 < float((ours - exact).norm() / exact.norm()) < 5e-2


def test_a_part_that_weighs_all_but_all_of_a_batch_passes_with_its_own_rows() -> None:
    """Its share of the loss is 1.0 in float64, as that of a whole batch is."""
    model, loss = nn.Linear(2, 2).double(), Loss("cross-entropy", class_weights=(1.0, 1e-20))
    batch = torch.randn(4, 2, dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    trained_of = dict(model.named_parameters())
    whole, parts = (modules.gradient(model, trained_of, loss, batch, passes=Passes(rows)) for rows in (None, 2))
    for name, value in whole[0].items():
        torch.testing.assert_close(parts[0][name], value)
    assert parts[1] == pytest.approx(whole[1])
