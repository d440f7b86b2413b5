"""PBPFL recovers the gradient of the true model: the whole point, against `ideal.py`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import seeded
from torch import nn

from moretta.contract.messages import Stamp
from moretta.errors import ParameterError
from moretta.protocols.common import enrolment
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.silo_rows import TrainingRows
from moretta.protocols.pbpfl.client import Client
from moretta.protocols.pbpfl.ideal import gradient
from moretta.protocols.pbpfl.messages import TrainOn
from moretta.protocols.pbpfl.perturbation import Key, Perturbation
from moretta.protocols.pbpfl.scales import ScalePlan
from moretta.secure_aggregation.keystream import SecretRoot
from moretta.secure_aggregation.schemes import contributor

ROOT = SecretRoot.insecure(1, "server")


def mlp(widths: list[int], bias: bool, dtype: torch.dtype, seed: int = 0) -> nn.Sequential:
    with seeded(seed):
        layers: list[nn.Module] = []
        for below, above in itertools.pairwise(widths):
            layers += [nn.Linear(below, above, bias=bias), nn.ReLU()]
        return nn.Sequential(*layers[:-1]).to(dtype)


def silo_rows(inputs: int, outputs: int, rows: int, dtype: torch.dtype, seed: int = 0) -> SiloRows:
    random = np.random.default_rng(seed)
    targets = enrolment.targets(random.normal(size=(rows, outputs)), outputs, "mse", "silo", dtype)
    return SiloRows(
        TrainingRows(random.normal(size=(rows, inputs)), targets.numpy(), Batches(rows, 0, 0, "silo")), dtype
    )


def means_of(model: nn.Module, plan: ScalePlan, key: Key, noisy: dict[str, np.ndarray], rows: SiloRows) -> dict:
    """Send the noisy model to a client and return what it would add to the sum."""
    client = Client(Loss("mse"), model, plan.head, rows, contributor("none", "silo"))
    ask = TrainOn(stamp=Stamp("run", 1, 0), parameters=noisy, parts=key.parts, direction=key.direction, encoding={})
    return {name: np.asarray(value, dtype=np.float64) for name, value in client.answer(ask).tensors.items()}


def relative_error(found: dict[str, np.ndarray], wanted: dict[str, torch.Tensor]) -> float:
    difference = np.concatenate([(found[name] - value.double().numpy()).ravel() for name, value in wanted.items()])
    norm = np.sqrt(sum(float(value.double().square().sum()) for value in wanted.values()))
    return float(np.linalg.norm(difference) / norm)


@given(
    widths=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    bias=st.booleans(),
    rows=st.integers(1, 12),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
def test_the_recovered_gradient_is_the_true_one(widths, bias, rows, seed, data) -> None:
    partitions = data.draw(st.integers(1, widths[-1]), label="partitions")
    model = mlp(widths, bias, torch.float64, seed)
    plan = ScalePlan.of(model, (torch.zeros(2, widths[0], dtype=torch.float64),))
    perturbation = Perturbation(plan, partitions, "squared-error")
    key = perturbation.draw_key(ROOT.stream("test", seed), offset_size=0.7)
    own = silo_rows(widths[0], widths[-1], rows, torch.float64, seed)
    wanted = gradient(model, *own.batch(1), Loss("mse"))
    means = means_of(model, plan, key, perturbation.perturb(model.state_dict(), key), own)
    if max(float(value.abs().max()) for value in wanted.values()) > 1e-6:  # dead networks have no gradient to compare
        assert relative_error(perturbation.recover(means, key), wanted) <= 1e-10
    true_loss = float((model(own.batch(1)[0]) - own.batch(1)[1]).square().sum(1).mean().detach()) / 2
    assert perturbation.true_loss(means, key) == pytest.approx(true_loss, rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keys_of_powers_of_two_without_offset_are_bitwise_exact(dtype) -> None:
    """Multiplying by powers of two commutes with rounding, so every bit of the gradient survives the round trip."""
    model = mlp([6, 8, 8, 3], True, dtype)
    plan = ScalePlan.of(model, (torch.zeros(2, 6, dtype=dtype),))
    perturbation = Perturbation(plan, 1, "squared-error")
    drawn = perturbation.draw_key(ROOT.stream("powers"), offset_size=0.0)
    # Such a key leaves channels in place: a sum over permuted channels would be rounded in another order.
    key = Key(
        plan.draw_powers_of_two(ROOT.stream("powers of two")), drawn.gamma, drawn.xi, drawn.parts, drawn.direction
    )
    own = silo_rows(6, 3, 8, dtype)
    noisy = perturbation.perturb(model.state_dict(), key)
    plain = perturbation.perturb(model.state_dict(), Key(plan.identity(), key.gamma, key.xi, key.parts, key.direction))
    assert any(not np.array_equal(noisy[name], plain[name]) for name in plain)
    scaled = perturbation.recover(means_of(model, plan, key, noisy, own), key)
    unscaled = means_of(model, plan, key, plain, own)
    for name, value in scaled.items():
        assert np.array_equal(value, unscaled[f"noisy/{name}"]), name


@pytest.mark.parametrize("partitions", [1, 2, 5])
def test_the_head_is_hidden_by_its_offset_and_the_trunk_by_scales(partitions) -> None:
    model = mlp([4, 16, 5], True, torch.float64)
    plan = ScalePlan.of(model, (torch.zeros(2, 4, dtype=torch.float64),))
    perturbation = Perturbation(plan, partitions, "squared-error")
    key = perturbation.draw_key(ROOT.stream("hide"), offset_size=3.0)
    noisy = perturbation.perturb(model.state_dict(), key)
    assert len(np.unique(key.gamma)) == partitions
    assert len(np.unique(key.direction)) == 5, "r_a has pairwise different components"
    assert np.sqrt(np.mean(key.direction**2)) == pytest.approx(1.0)
    inputs = torch.randn(32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    true_outputs = model(inputs).detach()
    hidden = mlp([4, 16, 5], True, torch.float64)
    hidden.load_state_dict({name: torch.from_numpy(value) for name, value in noisy.items()})
    h = hidden[:2](inputs).detach()
    alpha = h.sum(1) + 1
    # `practical.md`, Eq. 11: the noisy prediction is the true one plus alpha r.
    offset = alpha[:, None] * torch.from_numpy(key.offset)
    torch.testing.assert_close(hidden(inputs).detach(), true_outputs + offset, rtol=1e-12, atol=1e-12)


def test_a_model_without_hidden_layer_has_no_trunk() -> None:
    model = mlp([3, 2], True, torch.float64)
    plan = ScalePlan.of(model, (torch.zeros(2, 3, dtype=torch.float64),))
    perturbation = Perturbation(plan, 2, "squared-error")
    key = perturbation.draw_key(ROOT.stream("linear"), offset_size=1.0)
    own = silo_rows(3, 2, 4, torch.float64)
    means = means_of(model, plan, key, perturbation.perturb(model.state_dict(), key), own)
    assert relative_error(perturbation.recover(means, key), gradient(model, *own.batch(1), Loss("mse"))) <= 1e-12


@pytest.mark.parametrize("partitions", [0, 4])
def test_partitions_outside_the_outputs_are_refused(partitions) -> None:
    plan = ScalePlan.of(mlp([2, 3], True, torch.float64), (torch.zeros(2, 2, dtype=torch.float64),))
    with pytest.raises(ParameterError, match=f"partitions = {partitions}: expected 1 to 3"):
        Perturbation(plan, partitions, "squared-error")


def test_keys_do_not_show_their_secrets() -> None:
    plan = ScalePlan.of(mlp([2, 3], True, torch.float64), (torch.zeros(2, 2, dtype=torch.float64),))
    key = Perturbation(plan, 1, "squared-error").draw_key(ROOT.stream("repr"), 1.0)
    assert "redacted" in repr(key)
    assert str(key.gamma[0])[:6] not in repr(key)


def test_the_head_too_is_rounded_once() -> None:
    model = mlp([4, 16, 5], True, torch.float32)
    plan = ScalePlan.of(model, (torch.zeros(2, 4),))
    perturbation = Perturbation(plan, 2, "squared-error")
    key = perturbation.draw_key(ROOT.stream("rounded once"), offset_size=3.0)
    doubled = {name: value.double() for name, value in model.state_dict().items()}
    exact, noisy = perturbation.perturb(doubled, key), perturbation.perturb(model.state_dict(), key)
    for name, value in noisy.items():
        assert value.dtype == np.float32
        assert np.array_equal(value, exact[name].astype(np.float32)), name


@pytest.mark.parametrize("offset_size", [0.0, 1.0])
def test_what_is_sent_is_a_copy_and_what_is_received_is_not_written_to(offset_size) -> None:
    """The server's optimizer steps in place, and may do so while a message is still held."""
    model = mlp([3, 6, 2], True, torch.float64)
    plan = ScalePlan.of(model, (torch.zeros(2, 3, dtype=torch.float64),))
    perturbation = Perturbation(plan, 1, "squared-error")
    key = perturbation.draw_key(ROOT.stream("copies"), offset_size)
    noisy = perturbation.perturb(model.state_dict(), key)
    means = means_of(model, plan, key, noisy, silo_rows(3, 2, 4, torch.float64))
    sent = {name: value.copy() for name, value in noisy.items()}
    for value in means.values():
        value.flags.writeable = False
    perturbation.recover(means, key)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(np.array_equal(noisy[name], value) for name, value in sent.items())


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 24), (torch.float64, 41)])
def test_what_is_sent_is_rounded_once_and_to_nearest(dtype, bits) -> None:
    model = mlp([4, 16, 5], True, torch.float64)
    plan = ScalePlan.of(model, (torch.zeros(2, 4, dtype=torch.float64),))
    perturbation = Perturbation(plan, 2, "squared-error")
    key = perturbation.draw_key(ROOT.stream("sent"), offset_size=3.0)
    noisy = perturbation.perturb(model.state_dict(), key)
    for name, value in perturbation.perturb(model.state_dict(), key, dtype).items():
        assert value.dtype == {torch.float32: np.float32, torch.float64: np.float64}[dtype]
        mantissa, exponent = np.frexp(noisy[name])
        np.testing.assert_array_equal(value, np.ldexp(np.rint(mantissa * 2.0**bits), exponent - bits))


def test_running_statistics_come_back_in_the_true_order() -> None:
    model = nn.Sequential(nn.Linear(3, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 2)).double()
    model[1].running_mean += torch.arange(9)
    plan = ScalePlan.of(model, (torch.zeros(2, 3, dtype=torch.float64),))
    perturbation = Perturbation(plan, 1, "squared-error")
    key = perturbation.draw_key(ROOT.stream("statistics"), offset_size=1.0)
    noisy = perturbation.perturb(model.state_dict(), key)["1.running_mean"]
    assert not np.array_equal(noisy, np.arange(9))
    found = perturbation.recover_buffers({"buffer/1.running_mean": noisy}, key)
    assert found.keys() == {"1.running_mean"}
    assert np.array_equal(found["1.running_mean"], np.arange(9))


def test_components_of_the_direction_differ_by_no_more_than_three_times() -> None:
    plan = ScalePlan.of(mlp([2, 64], True, torch.float64), (torch.zeros(2, 2, dtype=torch.float64),))
    sizes = np.abs(Perturbation(plan, 1, "squared-error").draw_key(ROOT.stream("sizes"), 1.0).direction)
    assert 2 < sizes.max() / sizes.min() <= 3


def test_a_head_that_another_layer_shares_has_no_offset() -> None:
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 11, bias=False))
    model[3].weight = model[0].weight
    plan = ScalePlan.of(model, (torch.zeros(2, dtype=torch.int64),))
    assert plan.head.tied
    assert not Perturbation(plan, 1, "probabilities").draw_key(ROOT.stream("tied"), 1.0).offset.any()


def test_whole_numbers_are_sent_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()
    model[1].num_batches_tracked += 2**40 + 1
    plan = ScalePlan.of(model, (torch.zeros(2, 3, dtype=torch.float64),))
    perturbation = Perturbation(plan, 1, "squared-error")
    key = perturbation.draw_key(ROOT.stream("whole numbers"), offset_size=1.0)
    for dtype in (torch.float32, torch.float64):
        sent = perturbation.perturb(model.state_dict(), key, dtype)["1.num_batches_tracked"]
        assert sent.dtype == np.int64
        assert sent == 2**40 + 1
