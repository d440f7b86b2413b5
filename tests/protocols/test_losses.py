"""A loss is PyTorch's, and u, U and D rebuild it: the notation that PBPFL's terms are written in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from moretta.errors import ParameterError
from moretta.protocols.common.losses import Loss, usable_density

SHAPE = {"rows": st.integers(1, 9), "outputs": st.integers(2, 6), "seed": st.integers(0, 2**16)}
SETTINGS = {"smoothing": st.sampled_from([0.0, 0.1, 0.7]), "weighted": st.booleans(), "soft": st.booleans()}


def drawn(rows: int, outputs: int, seed: int, soft: bool) -> tuple[Tensor, Tensor]:
    """Outputs, and classes or probability rows."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(rows, outputs, generator=generator, dtype=torch.float64)
    if soft:
        return y, torch.rand(rows, outputs, generator=generator, dtype=torch.float64).softmax(1)
    return y, torch.randint(outputs, (rows,), generator=generator)


def class_weights(outputs: int, weighted: bool) -> tuple[float, ...]:
    return tuple(0.5 + k for k in range(outputs)) if weighted else ()


@given(**SHAPE, **SETTINGS)
def test_cross_entropy_is_torchs(rows, outputs, seed, smoothing, weighted, soft) -> None:
    y, t = drawn(rows, outputs, seed, soft)
    weights = class_weights(outputs, weighted)
    wanted = nn.functional.cross_entropy(
        y, t, weight=torch.tensor(weights, dtype=y.dtype) if weighted else None, label_smoothing=smoothing
    )
    assert torch.equal(Loss("cross-entropy", smoothing, weights)(y, t), wanted)


@given(**SHAPE, **SETTINGS)
def test_u_and_d_rebuild_the_cross_entropy_and_its_gradient(rows, outputs, seed, smoothing, weighted, soft) -> None:
    """The loss is -sum u . log p / D and its gradient at the outputs (U p - u) / D, as `terms` has it."""
    y, t = drawn(rows, outputs, seed, soft)
    loss = Loss("cross-entropy", smoothing, class_weights(outputs, weighted))
    u, normaliser = loss.weighted_targets(t, y), loss.density(t) * rows
    leaf = y.clone().requires_grad_()
    wanted = loss(leaf, t)
    (gradient,) = torch.autograd.grad(wanted, leaf)
    torch.testing.assert_close(-(u * y.log_softmax(1)).sum() / normaliser, wanted.detach(), rtol=1e-13, atol=1e-14)
    found = (u.sum(1, keepdim=True) * y.softmax(1) - u) / normaliser
    torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-14)


@given(**SHAPE)
def test_mse_is_half_the_outputs_times_torchs(rows, outputs, seed) -> None:
    y, _ = drawn(rows, outputs, seed, False)
    t = drawn(rows, outputs, seed + 1, True)[1]
    torch.testing.assert_close(Loss("mse")(y, t), outputs / 2 * nn.MSELoss()(y, t), rtol=1e-13, atol=0)


@given(**SHAPE, smoothing=st.sampled_from([0.0, 0.3]), split=st.integers(1, 8))
def test_weighing_silos_by_their_d_gives_the_loss_of_the_union(rows, outputs, seed, smoothing, split) -> None:
    y, t = drawn(rows + 1, outputs, seed, False)
    loss, cut = Loss("cross-entropy", smoothing, class_weights(outputs, True)), min(split, rows)
    parts = [(y[:cut], t[:cut]), (y[cut:], t[cut:])]
    weights = [loss.density(targets) * len(targets) for _, targets in parts]
    mean = sum(d * loss(*part) for d, part in zip(weights, parts, strict=True)) / sum(weights)
    torch.testing.assert_close(mean, loss(y, t), rtol=1e-13, atol=1e-14)


def test_density_is_1_without_class_weights_and_with_probability_rows() -> None:
    y, t = drawn(4, 3, 0, False)
    assert Loss("cross-entropy", 0.1).density(t) == 1.0
    weighted = Loss("cross-entropy", 0.0, (1.0, 2.0, 4.0))
    assert weighted.density(y.softmax(1)) == 1.0
    assert weighted.density(torch.tensor([0, 1, 2, 2])) == 11 / 4


def test_weighted_targets_keep_the_dtype_of_the_outputs() -> None:
    y, t = drawn(4, 3, 0, False)
    assert Loss("cross-entropy", 0.1, (1.0, 2.0, 3.0)).weighted_targets(t, y.float()).dtype == torch.float32
    assert Loss("cross-entropy").weighted_targets(t, y.float()).dtype == torch.float32


def test_class_weights_of_another_number_are_refused() -> None:
    y, t = drawn(4, 3, 0, False)
    with pytest.raises(ParameterError, match="class-weights: expected 3, one an output, got 2"):
        Loss("cross-entropy", 0.0, (1.0, 2.0))(y, t)


WEIGHTS = (0.5, 3.0)


@pytest.mark.parametrize("told", [-65536.0, 0.0, 1e-6, 65536.0])
def test_a_density_that_no_rows_have_is_taken_as_the_nearest_that_can_be(told: float) -> None:
    """One silo can put anything into the sum; a density of 0 ended the run, a small one blew up every step."""
    assert usable_density(told, 1e-6, WEIGHTS) == pytest.approx(0.5 if told < 1 else 3.0, rel=1e-5)
    assert usable_density(1.7, 1e-6, WEIGHTS) == 1.7
    assert usable_density(0.5 - 1e-6, 1e-6, WEIGHTS) == 0.5 - 1e-6  # rounded by the ring


def test_class_weights_that_fixed_point_cannot_tell_from_0_are_refused() -> None:
    with pytest.raises(ParameterError, match="set weights that the sum's fixed point can distinguish from 0"):
        usable_density(0.0, 1e-3, (1e-4, 1.0))
