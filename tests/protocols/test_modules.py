"""Modules as arrays, losses, and optimizers that step along arrays."""

from __future__ import annotations

import copy

import numpy as np
import psutil
import pytest
import torch
from networks import seeded
from torch import Tensor, nn

from moretta.contract.roles import under
from moretta.errors import ParameterError
from moretta.protocols.common import modules
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.modules import Optimizer
from moretta.protocols.common.training import Training


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    with seeded(seed):
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3, bias=False)).to(dtype)


class Tied(nn.Module):
    """Two names for one parameter, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("scratch", torch.ones(1), persistent=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_arrays_are_copies_and_load_back_bit_for_bit(dtype: torch.dtype) -> None:
    model, other = network(dtype), network(dtype, seed=1)
    taken = modules.arrays(model)
    assert list(taken) == list(model.state_dict())
    before = {name: array.copy() for name, array in taken.items()}
    modules.load(other, taken)
    for tensors in (modules.arrays(other), taken):
        assert all(tensors[name].tobytes() == before[name].tobytes() for name in before)
        assert all(tensors[name].dtype == before[name].dtype for name in before)
    with torch.no_grad():
        other[0].weight.add_(1)
        model[0].weight.add_(2)
    assert all((taken[name] == before[name]).all() for name in before)  # neither shares memory with what it was given


def test_loading_never_writes_to_what_came(recwarn: pytest.WarningsRecorder) -> None:
    model, taken = network(), modules.arrays(network(seed=1))
    for array in taken.values():
        array.flags.writeable = False  # as an array from a message may be
    modules.load(model, taken)
    optimizer = Optimizer(model, Training(momentum=0.5), 2)
    gradients = {name: np.ones(value.shape) for name, value in modules.trainable(model).items()}
    for array in gradients.values():
        array.flags.writeable = False
    optimizer.step(gradients, 1)
    optimizer.step(gradients, 2)
    modules.take_buffers(model, {"1.running_mean": taken["1.running_mean"]})
    assert all((array == 1).all() for array in gradients.values())
    assert not recwarn.list


def test_arrays_of_another_model_are_refused_by_name() -> None:
    taken = modules.arrays(network())
    with pytest.raises(ParameterError, match=r"\['3\.weight'\] differ"):
        modules.load(network(), {name: array for name, array in taken.items() if name != "3.weight"})
    with pytest.raises(ParameterError, match=r"\['extra'\] differ"):
        modules.load(network(), {**taken, "extra": np.zeros(1)})
    with pytest.raises(ParameterError, match=r"`3\.weight`: expected shape \[3, 5\], got \[5, 3\]"):
        modules.load(network(), {**taken, "3.weight": np.zeros((5, 3), np.float32)})


def test_the_schema_is_of_names_shapes_and_dtypes_and_not_of_values() -> None:
    assert modules.schema(network()) == modules.schema(network(seed=1))
    others = [
        network(torch.float64),
        nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)),
        nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3, bias=False)),
        nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3, bias=False)),
    ]
    assert len({modules.schema(model) for model in [network(), *others]}) == 5


def test_a_tied_parameter_is_trained_once_and_a_frozen_one_never() -> None:
    model = Tied()
    assert set(modules.trainable(model)) == {"first.weight", "first.bias", "second.bias"}
    assert set(modules.arrays(model)) == {"first.weight", "first.bias", "second.weight", "second.bias", "frozen"}


def test_running_buffers_are_those_of_floats_that_are_saved() -> None:
    assert set(modules.running_buffers(network())) == {"1.running_mean", "1.running_var"}
    assert modules.running_buffers(Tied()) == {}


def test_running_statistics_are_taken_and_counters_count() -> None:
    model = network()
    mean, variance = np.arange(5.0), np.arange(5.0) + 1
    modules.take_buffers(model, {"1.running_mean": mean, "1.running_var": variance})
    state = modules.arrays(model)
    assert (state["1.running_mean"] == mean).all()
    assert (state["1.running_var"] == variance).all()
    assert state["1.num_batches_tracked"] == 1


def test_arrays_under_a_prefix() -> None:
    state = {"model/a": np.ones(1), "model/b/c": np.ones(2), "optimizer/a": np.ones(3)}
    assert set(under("model/", state)) == {"a", "b/c"}


def test_half_the_squared_error_is_the_papers() -> None:
    outputs, wanted = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    expected = sum(0.5 * float((outputs[n] - wanted[n]).square().sum()) for n in range(7)) / 7
    assert float(Loss("mse")(outputs, wanted)) == pytest.approx(expected, rel=1e-14)
    # outputs / 2 times torch's own mean over rows and outputs
    assert float(Loss("mse")(outputs, wanted)) == pytest.approx(1.5 * float(nn.MSELoss()(outputs, wanted)), rel=1e-14)


SETTINGS = [
    Training(),
    Training(learning_rate=0.3, weight_decay=0.01),
    Training(momentum=0.9, weight_decay=0.1),
    Training(optimizer="adam", learning_rate=0.01),
    Training(optimizer="adam", learning_rate=0.01, weight_decay=0.1),
    Training(optimizer="adam", learning_rate=0.01, weight_decay=5e-4, betas=(0.8, 0.99)),
]


def torchs(settings: Training, model: nn.Module) -> torch.optim.Optimizer:
    chosen = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if settings.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), betas=settings.betas, **chosen)
    return torch.optim.SGD(model.parameters(), momentum=settings.momentum, **chosen)


def gradients_of(model: nn.Module, inputs: Tensor) -> dict[str, np.ndarray]:
    model.zero_grad()
    Loss("mse")(model(inputs), torch.zeros(len(inputs), 3, dtype=inputs.dtype)).backward()
    return {name: value.grad.double().numpy().copy() for name, value in model.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("settings", SETTINGS)
def test_steps_are_those_of_torch_bit_for_bit_also_after_a_restart(settings: Training, dtype: torch.dtype) -> None:
    ours, theirs = network(dtype), network(dtype)
    optimizer, reference = Optimizer(ours, settings, 12), torchs(settings, theirs)
    for number in range(12):
        inputs = torch.randn(6, 4, dtype=dtype, generator=torch.Generator().manual_seed(number))
        optimizer.step(gradients_of(ours, inputs), number + 1)
        gradients_of(theirs, inputs)
        reference.step()
        if number % 5 == 2:  # gone and back, as through a checkpoint
            state = {name: np.array(value) for name, value in optimizer.state().items()}
            kept = copy.deepcopy(ours)
            ours = network(dtype, seed=9)
            modules.load(ours, modules.arrays(kept))
            optimizer = Optimizer(ours, settings, 12)
            optimizer.restore({"model/unrelated": np.zeros(3), **state})
    mine, other = modules.arrays(ours), modules.arrays(theirs)
    assert all(mine[name].tobytes() == other[name].tobytes() for name in mine)


def test_the_optimizers_state_is_flat_and_has_nothing_before_the_first_step() -> None:
    model = network()
    optimizer = Optimizer(model, Training(optimizer="adam"), 1)
    assert optimizer.state() == {}
    optimizer.step({name: np.ones(value.shape) for name, value in modules.trainable(model).items()}, 1)
    assert {path.rsplit("/", 1)[1] for path in optimizer.state()} == {"step", "exp_avg", "exp_avg_sq"}
    assert all(path.startswith("optimizer/") for path in optimizer.state())


def test_the_rate_is_that_of_the_round_and_the_norm_is_clipped() -> None:
    model = nn.Linear(2, 1).double()
    settings = Training(learning_rate=0.5, lr_schedule="step", clip_norm=2.0)
    optimizer, gradient = Optimizer(model, settings, 4), {"weight": np.array([[2.0, 4.0]]), "bias": np.array([4.0])}
    for number, rate in ((1, 0.5), (3, 0.05), (4, 0.005), (2, 0.5)):  # of any round, in any order
        for norm in (6.0, 1.5):
            before = modules.arrays(model)
            optimizer.step({name: value * norm / 6.0 for name, value in gradient.items()}, number)
            for name, value in modules.arrays(model).items():
                expected = before[name] - rate * gradient[name] / 6.0 * min(norm, 2.0)
                np.testing.assert_allclose(value, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("settings", [one for one in SETTINGS if one.momentum or one.optimizer == "adam"])
def test_a_state_that_torch_optim_left_is_taken_up(settings: Training) -> None:
    """Checkpoints from before this package had steps of its own hold what `torch.optim` kept, by parameter."""
    ours, theirs = network(torch.float32), network(torch.float32)
    reference = torchs(settings, theirs)
    for number in range(3):
        gradients_of(theirs, torch.randn(6, 4, generator=torch.Generator().manual_seed(number)))
        reference.step()
    names, left = list(modules.trainable(theirs)), reference.state_dict()["state"]
    optimizer = Optimizer(ours, settings, 4)
    optimizer.restore(
        {
            f"optimizer/{names[index]}/{key}": value.numpy().copy()
            for index, kept in left.items()
            for key, value in kept.items()
        }
    )
    modules.load(ours, modules.arrays(theirs))
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    optimizer.step(gradients_of(ours, inputs), 4)
    gradients_of(theirs, inputs)
    reference.step()
    mine, other = modules.arrays(ours), modules.arrays(theirs)
    assert all(mine[name].tobytes() == other[name].tobytes() for name in mine)


def test_a_blank_module_takes_no_memory_until_it_is_written_to() -> None:
    start = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Linear(2048, 4096, bias=False))
    blank = modules.blank(copy.deepcopy(start))
    assert not any(parameter.any() for parameter in blank.parameters())
    assert [parameter.stride() for parameter in blank.parameters()] == [one.stride() for one in start.parameters()]
    modules.load(blank, modules.arrays(start))
    for name, array in modules.arrays(blank).items():
        np.testing.assert_array_equal(array, start.state_dict()[name].numpy())
    before, large = resident(), nn.Linear(4096, 4096, bias=False)
    assert resident() - before > 60, "MiB of weights"
    blanks = [modules.blank(large) for _ in range(4)]
    assert resident() - before < 10
    del blanks


def resident() -> float:
    """Return this process's resident memory, in MiB."""
    return psutil.Process().memory_info().rss / 2**20
