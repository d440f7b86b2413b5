"""Algorithm 1 trains whatever PyTorch trains: each participant's model of its own, the same distance apart for ever."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grids import CLASSES, Run, furthest, run
from networks import seeded
from torch import Tensor, nn

from moretta import CGD, Silo
from moretta.contract.messages import Tensors
from moretta.protocols.common import modules
from moretta.protocols.common.modules import first_weights


def pictures(rows: int, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    generator = np.random.default_rng(seed)
    y = generator.integers(0, CLASSES, rows)
    x = generator.normal(0, 0.5, (rows, 2, 6, 6))
    for index, label in enumerate(y):
        x[index, :, 2 * label : 2 * label + 2] += 1.5
    return x, y


SILOS = [Silo(f"silo-{number}", *pictures(8 + 3 * number, number)) for number in range(3)]


class Frozen(nn.Module):
    """A backbone that is not trained, and a head that is."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(64, CLASSES)
        self.backbone.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def cnn(*norms: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), *norms, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, CLASSES)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "cnn": cnn,
    "batchnorm": lambda: cnn(nn.BatchNorm2d(6)),
    "groupnorm": lambda: cnn(nn.GroupNorm(2, 6)),
    "dropout": lambda: cnn(nn.Dropout(0.2)),
    "frozen": Frozen,
}


def fresh(name: str) -> nn.Module:
    with seeded(1):
        return MODELS[name]()


def trained(name: str, **settings: Any) -> Run:
    around = "model" if name == "frozen" else settings.pop("around", "zero")
    protocol = CGD.model_validate({"delta": 0.15, "learning_rate": 0.3, "around": around, "blind": False})
    return run(SILOS, 25, protocol, model=fresh(name), **settings)


def distances(models: dict[str, Tensors] | Any, names: list[str]) -> list[np.ndarray[Any, Any]]:
    pairs = itertools.combinations(models.values(), 2)
    return [np.concatenate([(one[name] - two[name]).ravel() for name in names]) for one, two in pairs]


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_and_models_stay_as_far_apart_as_they_were(name: str) -> None:
    found = trained(name)
    losses = [line["loss"] for line in found.result.history]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:3])
    names = [tensor for tensor, value in fresh(name).named_parameters() if value.requires_grad]
    for before, after in zip(distances(found.starts, names), distances(found.models, names), strict=True):
        assert np.linalg.norm(before) > 0.1
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-12)
    moved = max(float(np.abs(found.displacement[tensor]).max()) for tensor in names)
    assert moved > 0.05


@pytest.mark.parametrize("name", [name for name in MODELS if name != "dropout"])
def test_one_round_is_the_weighted_mean_of_autograds_gradients(name: str) -> None:
    protocol = CGD(delta=0.15, learning_rate=0.3, around="model")
    found = run(SILOS, 1, protocol, model=fresh(name))
    rows, model = [len(silo.x) for silo in SILOS], fresh(name).double().train()
    trained = {tensor: value for tensor, value in model.named_parameters() if value.requires_grad}
    mean = {tensor: np.zeros(tuple(value.shape)) for tensor, value in trained.items()}
    for silo in SILOS:
        modules.load(model, found.starts[silo.name])
        loss = nn.functional.cross_entropy(model(torch.tensor(silo.x)), torch.tensor(silo.y))
        for tensor, gradient in zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True):
            mean[tensor] += len(silo.x) * gradient.numpy() / sum(rows)
        buffers = {tensor: value.numpy() for tensor, value in model.named_buffers()}
        ours = {tensor: found.models[silo.name][tensor] for tensor in buffers}
        assert furthest(ours, buffers) < 1e-12 if buffers else True
    for silo, (tensor, gradient) in itertools.product(SILOS, mean.items()):
        expected = found.starts[silo.name][tensor] - 0.3 * gradient
        np.testing.assert_allclose(found.models[silo.name][tensor], expected, rtol=0, atol=1e-10)


def test_batchnorms_buffers_are_ones_own() -> None:
    found = trained("batchnorm")
    means = [tensors["1.running_mean"] for tensors in found.models.values()]
    assert min(float(np.abs(one - two).max()) for one, two in itertools.combinations(means, 2)) > 1e-3
    assert {int(tensors["1.num_batches_tracked"]) for tensors in found.models.values()} == {25}
    # They are no part of D, and of no sum: whoever takes D for a model has only its own.
    np.testing.assert_array_equal(found.displacement["1.running_mean"], means[0])
    # Scale and shift of a norm begin where they are, in everybody's own neighbourhood: near zero they shut the network.
    for tensors in found.starts.values():
        assert 0 < np.abs(tensors["1.weight"] - 1).max() < 1


def test_a_frozen_backbone_is_everybodys_and_stays() -> None:
    found = trained("frozen")
    given = {tensor: value.numpy() for tensor, value in first_weights(fresh("frozen").double()).state_dict().items()}
    for tensors in found.models.values():
        for tensor in ("backbone.0.weight", "backbone.0.bias"):
            np.testing.assert_array_equal(tensors[tensor], given[tensor])
        assert np.abs(tensors["head.weight"] - given["head.weight"]).max() > 0.01


def test_dropout_is_drawn_alike_by_whoever_plays_a_round_again() -> None:
    one, two = trained("dropout"), trained("dropout")
    assert all(furthest(one.models[name], two.models[name]) == 0 for name in one.models)


def test_around_the_model_starts_are_near_what_it_comes_with(tmp_path: Path) -> None:
    given = fresh("cnn").double()
    torch.save({name: value + 1 for name, value in given.state_dict().items()}, tmp_path / "warm.pt")
    warm = CGD(delta=0.01, around="model", warm_start=tmp_path / "warm.pt")
    for protocol, shift in ((CGD(delta=0.01, around="model"), 0.0), (warm, 1.0), (CGD(delta=0.01), None)):
        found = run(SILOS, 1, protocol, model=given)
        for tensors in found.starts.values():
            for name, value in given.state_dict().items():
                center = np.zeros(tuple(value.shape)) if shift is None else value.numpy() + shift
                noise = (tensors[name] - center) / 0.01
                assert 0.0 < np.abs(noise).max() < 6
                if noise.size > 100:
                    assert abs(noise.std() - 1) < 5 / np.sqrt(2 * noise.size)
        # D is told about the same point.
        assert set(found.displacement) == set(given.state_dict())
