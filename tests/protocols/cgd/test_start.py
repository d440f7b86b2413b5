"""Confined starts: what they are, whose they are, and what they do not follow from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from moretta import CGD, Federation, SecureAggregation, Silo
from moretta.contract.messages import Tensors
from moretta.contract.roles import State
from moretta.engines.settings import Engine
from moretta.errors import ParameterError
from moretta.protocols.cgd.local import centers, confined, delta_of, noise, shared_biases
from moretta.protocols.common import modules
from moretta.run import federation
from moretta.secure_aggregation.keystream import SecretRoot

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "cgd.json").read_text(encoding="utf-8"))["starts"]
ROOT, OTHER = SecretRoot(bytes(range(32))), SecretRoot(bytes(32))
NAMES = ("north", "south", "east")
SEED = 3
MANY = 200_000


def network(*layers: nn.Module, seed: int = 0) -> nn.Module:
    """Return layers whose parameters and running statistics are all drawn, so that none is 0 or 1."""
    made = nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in made.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 2)
    return made


def started(model: nn.Module, root: SecretRoot = ROOT, name: str = "north", **given: Any) -> dict[str, np.ndarray]:
    """Return a participant's start as its client makes it."""
    params = CGD(**given)
    own = [tensor for tensor in modules.trainable(model) if tensor not in shared_biases(params, model)]
    return confined(params, centers(params, model, SEED), own, name, root)


# Their distribution. For n standard normal numbers, the mean deviates by n^-1/2, the mean square by (2 / n)^1/2, the
# mean fourth power by (96 / n)^1/2; six deviations are exceeded with a chance of 2e-9 by each.


def check_normal(numbers: np.ndarray) -> None:
    count = numbers.size
    assert abs(numbers.mean()) < 6 / np.sqrt(count)
    assert abs((numbers**2).mean() - 1) < 6 * np.sqrt(2 / count)
    assert abs((numbers**4).mean() - 3) < 6 * np.sqrt(96 / count)


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Return the mean product of standard normal numbers in deviations: of independent ones, standard normal."""
    return float((one * other).mean() * np.sqrt(one.size))


@pytest.mark.parametrize("delta", [1e-4, 0.01, 3.0])
@pytest.mark.parametrize("around", ["zero", "model"])
def test_a_start_has_the_asked_delta_about_its_center(delta: float, around: str) -> None:
    model = network(nn.Linear(500, MANY // 500)).double()
    start = started(model, delta=delta, around=around)
    for name, value in modules.arrays(model).items():
        check_normal((start[name] - (value if around == "model" else 0)) / delta)


def test_rows_columns_tensors_and_participants_have_nothing_in_common() -> None:
    shape = (400, 500)
    one, two, three = noise(ROOT, "a", shape, 1.0), noise(ROOT, "b", shape, 1.0), noise(OTHER, "a", shape, 1.0)
    for other in (two, three):
        assert abs(correlation(one, other)) < 6
        assert abs(correlation(one**2 - 1, other**2 - 1) / 2) < 6
        assert not (one == other).any()
    assert abs(correlation(one[1:], one[:-1])) < 6
    assert abs(correlation(one[:, 1:], one[:, :-1])) < 6
    half = one.ravel()[: one.size // 2], one.ravel()[one.size // 2 :]  # of Box and Muller's transform: cos and sin
    assert abs(correlation(*half)) < 6
    assert abs(correlation(half[0] ** 2 - 1, half[1] ** 2 - 1) / 2) < 6
    assert len(np.unique(one)) == one.size


def test_delta_scales_the_same_numbers() -> None:
    np.testing.assert_array_equal(noise(ROOT, "a", (3, 5), 0.25), 0.25 * noise(ROOT, "a", (3, 5), 1.0))


@given(st.lists(st.integers(0, 4), max_size=3), st.binary(min_size=32, max_size=32), st.text(max_size=5))
def test_a_tensors_start_follows_from_root_name_and_size(shape: list[int], root: bytes, name: str) -> None:
    found = noise(SecretRoot(root), name, tuple(shape), 1.0)
    assert (found.shape, found.dtype) == (tuple(shape), np.float64)
    np.testing.assert_array_equal(found, noise(SecretRoot(root), name, tuple(shape), 1.0))
    np.testing.assert_array_equal(found.ravel(), noise(SecretRoot(root), name, (found.size,), 1.0))


# Each participant's delta.


def test_a_number_is_everybodys() -> None:
    assert {delta_of(0.3, name, root) for name in NAMES for root in (ROOT, OTHER)} == {0.3}


def test_of_a_range_each_draws_its_own_uniformly_and_in_secret() -> None:
    low, high, count = 0.001, 0.1, 2000
    found = np.array(
        [delta_of((low, high), "north", SecretRoot(number.to_bytes(32, "big"))) for number in range(count)]
    )
    assert ((low <= found) & (found < high)).all()
    assert len(np.unique(found)) == count
    # Kolmogorov and Smirnov's distance exceeds t / sqrt(n) with a chance below 2 exp(-2 t^2) (Massart, 1990); t = 3.2.
    uniform = np.sort((found - low) / (high - low))
    steps = np.arange(count + 1) / count
    assert max(abs(uniform - steps[1:]).max(), abs(uniform - steps[:-1]).max()) < 3.2 / np.sqrt(count)
    assert delta_of((low, high), "north", ROOT) == delta_of((low, high), "south", ROOT)  # of the root, not of the name


def test_a_range_may_be_a_point() -> None:
    assert delta_of((0.2, 0.2), "north", ROOT) == 0.2


def test_the_start_has_the_delta_that_was_drawn() -> None:
    model = network(nn.Linear(500, MANY // 500)).double()
    for root in (ROOT, OTHER):
        delta = delta_of((0.01, 1.0), "north", root)
        check_normal(started(model, root, delta=(0.01, 1.0))["0.weight"] / delta)


def test_a_mapping_names_each_participants() -> None:
    deltas = {"north": 0.5, "south": 0.125}
    model = network(nn.Linear(3, 2)).double()
    one, two = (started(model, name=name, delta=deltas) for name in ("north", "south"))  # of the same root
    np.testing.assert_array_equal(one["0.weight"], 4 * two["0.weight"])
    with pytest.raises(
        ParameterError, match=r"delta: expected a number for participant `east`, got \['north', 'south'\]"
    ):
        started(model, name="east", delta=deltas)


# What is confined.


def test_around_zero_the_models_weights_are_forgotten() -> None:
    one, two = (started(network(nn.Linear(4, 3), nn.Linear(3, 2), seed=seed)) for seed in (0, 1))
    assert set(one) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])
        assert abs(one[name]).max() < 0.01 * 6


@pytest.mark.parametrize("around", ["zero", "model"])
def test_frozen_parameters_stay_as_they_are(around: str) -> None:
    model = network(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].weight.requires_grad_(False)
    before, start = modules.arrays(model), started(model, around=around, delta=1.0)
    assert start["0.weight"].tobytes() == before["0.weight"].tobytes()
    for name in ("0.bias", "1.weight", "1.bias"):
        assert (start[name] != before[name]).all()


NORMS: Mapping[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm1d(4),
    "batch, 2d": lambda: nn.BatchNorm2d(4),
    "instance": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    "layer": lambda: nn.LayerNorm(4),
    "group": lambda: nn.GroupNorm(2, 4),
    "root mean square": lambda: nn.RMSNorm(4),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("around", ["zero", "model"])
def test_normalisation_layers_begin_at_the_values_they_have(norm: str, around: str) -> None:
    """With noise, as they are trained; buffers without."""
    model = network(nn.Linear(4, 4), nn.Sequential(NORMS[norm](), nn.Linear(4, 2))).double()
    delta = 1e-3
    before, start = modules.arrays(model), started(model, around=around, delta=delta)
    for name in start:
        trained = name in modules.trainable(model)
        kept = name.startswith("1.0.") or around == "model"
        away = start[name] - (before[name] if kept or not trained else 0)
        assert (abs(away) < 6.5 * delta).all(), name  # six and a half deviations: a chance of 1e-10 each
        assert (away != 0).any() == trained, name
        assert start[name].dtype == before[name].dtype


def test_starts_have_the_models_dtypes() -> None:
    model = network(nn.Linear(4, 3), nn.BatchNorm1d(3))
    start = started(model, delta=1.0)
    assert {name: value.dtype for name, value in start.items()} == {
        name: value.dtype for name, value in modules.arrays(model).items()
    }
    np.testing.assert_array_equal(start["0.weight"], noise(ROOT, "0.weight", (3, 4), 1.0).astype(np.float32))


def test_the_model_itself_is_not_written_to() -> None:
    model = network(nn.Linear(4, 3), nn.BatchNorm1d(3))
    before = {name: value.tobytes() for name, value in modules.arrays(model).items()}
    started(model, delta=1.0)
    assert {name: value.tobytes() for name, value in modules.arrays(model).items()} == before


# Of a whole run.


def players(seed: int = 0, insecure: int | None = 5, **given: Any) -> Any:
    """Return the roles that a run begins with."""
    rng = np.random.default_rng(3)
    silos = [Silo(name, rng.normal(size=(8, 4)), np.arange(8) % 3) for name in NAMES]
    made = Federation(
        network(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), silos, CGD(**given), insecure_secret_seed=insecure,
        dtype="float64", aggregation=SecureAggregation(scheme="additive-shares"),
    )  # fmt: skip
    return federation.build(made._setting(seed, 3))


def models(cast: Any) -> dict[str, bytes]:
    found: Mapping[str, Tensors] = cast.models()
    return {name: b"".join(value.tobytes() for value in tensors.values()) for name, tensors in found.items()}


def test_each_participant_has_a_start_of_its_own() -> None:
    found = models(players())
    assert set(found) == set(NAMES)
    assert len(set(found.values())) == 3


def test_starts_do_not_follow_from_the_training_seed() -> None:
    assert models(players(seed=1)) == models(players(seed=2))  # of one root, whatever the seed
    one, two = (models(players(seed=1, insecure=None)) for _ in range(2))
    assert all(one[name] != two[name] for name in NAMES)  # of the operating system's, whatever the seed
    assert models(players(seed=1, insecure=6)) != models(players(seed=1, insecure=7))


def test_shared_biases_are_one_vector_of_standard_normal_numbers_without_delta() -> None:
    model = network(nn.Linear(4, 5000), nn.ReLU(), nn.Linear(5000, 6), nn.ReLU(), nn.Linear(6, 3))
    kind: dict[str, Any] = {"hidden_bias": "shared", "delta": 0.01}
    assert shared_biases(CGD(**kind), model) == ["0.bias", "2.bias"]
    assert shared_biases(CGD(), model) == []
    one, two = started(model, name="north", **kind), started(model, OTHER, name="south", **kind)
    for tensor in ("0.bias", "2.bias"):
        np.testing.assert_array_equal(one[tensor], two[tensor])
    check_normal(one["0.bias"])
    assert np.abs(one["4.bias"]).max() < 0.1  # the output's is confined, as all else is
    assert (one["4.bias"] != two["4.bias"]).all()
    other = centers(CGD(**kind), model, SEED + 1)
    assert (other["0.bias"] != one["0.bias"]).all()  # of the run's seed, which everybody knows
    around = started(model, around="model", hidden_bias="shared")
    np.testing.assert_array_equal(around["0.bias"], model.state_dict()["0.bias"].numpy())


@pytest.mark.parametrize("engine", ["in-process", "fused"])
def test_settings_that_would_change_nothing_are_refused(engine: str) -> None:
    generator = np.random.default_rng(0)
    silos = [Silo(name, generator.normal(size=(6, 4)), generator.integers(0, 2, 6)) for name in "abc"]
    linear = nn.Sequential(nn.Linear(4, 2))
    for settings, sentence in (
        ({"hidden_bias": "shared"}, "needs hidden layers with biases that train, which the model lacks"),
        ({"batches": "in-order"}, "is for batch_size above 0"),
    ):
        with pytest.raises(ParameterError, match=sentence):
            Federation(linear, silos, CGD(**settings), batch_size=0, engine=Engine(name=engine)).train(1, SEED)


def test_what_torch_and_numpy_would_draw_is_not_touched() -> None:
    params, model = CGD(), network(nn.Linear(4, 3))
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    confined(params, centers(params, model, SEED), ["0.weight"], "north", SecretRoot.fresh())
    assert torch.equal(torch.get_rng_state(), before)
    assert np.random.get_state()[1].tolist() == numpy_before  # noqa: NPY002


@pytest.mark.parametrize("delta", [0.01, (0.01, 1.0), {"north": 0.1, "south": 0.2, "east": 0.3}])
def test_starts_are_the_same_after_a_restore(delta: Any) -> None:
    one, two = players(insecure=None, delta=delta), players(insecure=None, delta=delta)
    before = models(one)
    assert all(models(two)[name] != before[name] for name in NAMES)
    states: dict[str, State] = {name: client.state() for name, client in one.clients.items()}
    for name, client in two.clients.items():
        client.restore(states[name])
    assert models(two) == before
    assert not any("start" in key for state in states.values() for key in state), "a start is made, not stored"


def test_no_root_is_in_a_representation() -> None:
    cast = players()
    shown = repr(cast) + "".join(repr(part) for client in cast.clients.values() for part in vars(client).values())
    for client in cast.clients.values():
        root = client.state()["root"]
        assert root.hex() not in shown
        assert repr(root) not in shown


# Vectors.


@pytest.mark.parametrize(
    "case", VECTORS["cases"], ids=lambda case: f"{case['root'][:2]} {case['tensor']} {case['shape']}"
)
def test_start_vectors(case: Mapping[str, Any]) -> None:
    found = noise(SecretRoot(bytes.fromhex(case["root"])), case["tensor"], tuple(case["shape"]), 1.0)
    expected = np.array(case["normal"]).reshape(case["shape"])
    # Stated to the last bit; float64 makes the angle, up to 2 pi, and the rest with errors of a few 2^-53.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)


def test_delta_vectors() -> None:
    for name, root in VECTORS["roots"].items():
        found = delta_of(tuple(VECTORS["range"]), name, SecretRoot(bytes.fromhex(root)))
        assert found == pytest.approx(VECTORS["deltas"][name], rel=1e-15)
