"""What each finite difference expects to find, what it does not see, and what it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from forwards import FORMS, MSE, LinearForward, drawn, estimated, matrix
from networks import seeded
from numpy.typing import NDArray
from refused_rows import Row, refused
from torch import nn

from moretta.errors import ParameterError
from moretta.protocols.baffle.silo.estimate import Form, check_sigma, differences, directions_of, forwards_of, gradient
from moretta.protocols.baffle.torch_forward import TorchForward, layout_of
from moretta.protocols.common import modules
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.targets import RowLosses

SIZE, ROWS, OUTPUTS = 16, 5, 3
KINDS = ("rademacher", "gaussian", "orthogonal")

Problem = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]


def problem(size: int = SIZE, seed: int = 0, curvature: float = 1.0) -> Problem:
    """w, A, the targets, and the gradient of the mean loss, mean_r A_r' (A_r w - t_r)."""
    generator = np.random.default_rng(seed)
    at, x = generator.normal(0, 1, size), curvature * generator.normal(0, 1, (ROWS, OUTPUTS, size))
    residual = generator.normal(0, 1, (ROWS, OUTPUTS))
    y = np.einsum("roi,i->ro", x, at) - residual
    return at, x, y, np.einsum("roi,ro->i", x, residual) / ROWS


@pytest.mark.parametrize(
    ("form", "kind"),
    [(form, kind) for form in FORMS for kind in KINDS],
)
def test_the_mean_over_rounds_is_the_gradient(form: Form, kind: str) -> None:
    at, x, y, wanted = problem()
    rounds = 500
    found = np.array([estimated(form, 6, 0.05, at, x, y, number, kind) for number in range(rounds)])
    error = found.std(axis=0, ddof=1) / np.sqrt(rounds)
    off = (found.mean(axis=0) - wanted) / error  # of each entry in standard errors, all of one quadratic loss
    assert np.abs(off).max() < 5
    assert error.max() < np.linalg.norm(wanted) / 4  # so that 5 of them tell something


@pytest.mark.parametrize("form", FORMS)
def test_the_squared_error_is_n_over_k_of_the_gradients_square(form: Form) -> None:
    """Theorem 3.1; for Rademacher directions and a loss without curvature (n - 1) / K."""
    size, k, rounds = 64, 32, 150
    at, x, y, wanted = problem(size)
    found = [estimated(form, k, 1e-7, at, x, y, number) - wanted for number in range(rounds)]
    relative = np.square(found).sum(axis=1) / np.square(wanted).sum()
    expected = (size - 1) / directions_of(form, k)
    # The mean form has K - 1 degrees of freedom: up to 1 + 2 / K more. A sum of about n products spreads by some
    # sqrt(2 / n) of itself, and the rounds' mean by that over their root: 5 of these.
    room = 5 * np.sqrt(2 / size) * 2 / np.sqrt(rounds) + (3 / k if form == "mean" else 0)
    assert relative.mean() == pytest.approx(expected, rel=room)


def diagonal(trace_at: float = 3.0) -> Problem:
    """A problem with a diagonal Hessian: with entries of +-1, d' H d is its trace for every direction d."""
    generator = np.random.default_rng(1)
    at, scales = generator.normal(0, 1, SIZE), generator.uniform(0.5, trace_at, SIZE)
    x, target = np.diag(scales)[None], generator.normal(0, 1, (1, SIZE))
    return at, x, target, scales * (scales * at - target[0])


def test_the_base_form_has_the_trace_of_the_hessian_and_the_mean_form_has_not() -> None:
    at, x, y, slope = diagonal()
    sigma, k = 0.3, 40
    offset = sigma / 2 * np.square(np.diagonal(x[0])).sum()  # L(w + s d) - L(w) = s g'd + s^2 / 2 d'Hd
    for form in ("base", "mean", "twice-forward", "central"):
        directions, forward = drawn(form, k, SIZE), LinearForward(SIZE)
        along = matrix(directions) @ slope
        found = differences(form, sigma, directions, forward, MSE, at, x, y)[0][:, 0]
        wanted = {"mean": along - along.mean(), "central": along}.get(form, along + offset)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12 * offset / sigma * 10)
        assert offset > np.abs(slope).max() / 10  # so that the forms do differ


def test_curvature_costs_the_base_form_and_not_the_mean_form() -> None:
    errors = {}
    for form in ("base", "mean", "central"):
        found = []
        for curved in (False, True):
            at, x, y, slope = diagonal(20.0)
            sigma = 0.3 if curved else 1e-6
            rounds = [estimated(form, 8, sigma, at, x, y, number) - slope for number in range(200)]
            found.append(np.square(rounds).sum(axis=1).mean())
        errors[form] = found[1] / found[0]
    assert errors["mean"] == pytest.approx(1, rel=1e-6)  # the same directions, the same estimate
    assert errors["central"] == pytest.approx(1, rel=1e-6)
    assert errors["base"] > 1.2


def test_the_central_form_is_exact_along_directions_of_a_quadratic() -> None:
    at, x, y, slope = problem()
    directions = drawn("central", 9, SIZE, kind="gaussian")
    found, losses = differences("central", 0.7, directions, LinearForward(SIZE), MSE, at, x, y)
    np.testing.assert_allclose(found.mean(axis=1), matrix(directions) @ slope, rtol=1e-12, atol=1e-12)
    assert losses.shape == (ROWS,)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("at_once", [1, 3, 8, 16])
@pytest.mark.parametrize("k", [2, 8, 13])
def test_a_batch_goes_through_the_model_as_often_as_is_said(form: Form, at_once: int, k: int) -> None:
    at, x, y, _ = problem()
    forward = LinearForward(SIZE, at_once=at_once)
    found, losses = differences(form, 0.1, drawn(form, k, SIZE), forward, MSE, at, x, y)
    said = {"mean": k, "base": k + 1, "twice-forward": 2 * k + 1, "central": 2 * k}[form]
    assert forward.forwards == forwards_of(form, k) == said
    assert max(forward.calls) <= at_once
    assert found.shape == (directions_of(form, k), ROWS)
    assert found.dtype == losses.dtype == np.float64


@pytest.mark.parametrize("form", FORMS)
def test_how_many_models_run_at_once_changes_no_difference(form: Form) -> None:
    at, x, y, _ = problem()
    ways = [
        differences(form, 0.1, drawn(form, 13, SIZE), LinearForward(SIZE, at_once=m), MSE, at, x, y)[0] for m in (1, 8)
    ]
    np.testing.assert_allclose(*ways, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_that_is_told_is_the_rows_own(form: Form) -> None:
    at, x, y, _ = problem()
    _, losses = differences(form, 1e-7, drawn(form, 20, SIZE), LinearForward(SIZE), MSE, at, x, y)
    here = np.square(np.einsum("roi,i->ro", x, at) - y).sum(axis=1) / 2
    np.testing.assert_allclose(losses, here, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_loss_that_overflows_is_returned_and_not_warned_of(form: Form) -> None:
    at, x, y, _ = problem()
    x[2] = 1e200
    found, losses = differences(form, 0.1, drawn(form, 4, SIZE), LinearForward(SIZE), MSE, at, x, y)
    assert not np.isfinite(found[:, 2]).any()
    assert not np.isfinite(losses[2])
    assert np.isfinite(np.delete(found, 2, axis=1)).all()


# -- a whole basis -----------------------------------------------------------------------------------------------------


def network(size: int) -> nn.Sequential:
    """A smooth network of four outputs, whose parameters number a power of two."""
    middle = {32: 4, 64: 8}[size]
    with seeded(4):
        return nn.Sequential(nn.Linear(3, middle), nn.Tanh(), nn.Linear(middle, 4, bias=False)).double()


LOSSES: dict[str, Loss] = {
    "mse": Loss("mse"),
    "cross-entropy": Loss("cross-entropy"),
    "smoothed": Loss("cross-entropy", 0.2),
    "class weights": Loss("cross-entropy", 0.0, (0.5, 2.0, 1.0, 3.0)),
    "smoothed class weights": Loss("cross-entropy", 0.1, (0.5, 2.0, 1.0, 3.0)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("size", [32, 64])
def test_along_a_whole_basis_the_estimate_is_autograds_gradient(form: Form, loss: str, size: int) -> None:
    """As many orthogonal directions as parameters: sum_k (g'd_k) d_k = n g, whatever the signs."""
    model, of = network(size), LOSSES[loss]
    generator = np.random.default_rng(2)
    x, classes = generator.normal(0, 1, (9, 3)), generator.integers(0, 4, 9)
    y: NDArray[Any] = np.eye(4)[classes] if of.name == "mse" else classes
    value = of(model(torch.tensor(x)), torch.tensor(y))
    value.backward()
    layout = layout_of(model)
    assert layout.size == size
    wanted = layout.flat({name: one.grad.numpy() for name, one in model.named_parameters() if one.grad is not None})
    at, forward = layout.flat(modules.arrays(model)), TorchForward(model, layout)
    rows = RowLosses(of.name, of.smoothing, of.class_weights)
    k = size // 2 if form == "twice-forward" else size
    directions = drawn(form, k, size, kind="orthogonal")
    # What is left of the base form is sigma / 2 d'Hd, of the central one sigma^2 / 6 of a third derivative; rounding
    # adds some 1e-16 / sigma. sigma = 1e-8 leaves both near 1e-8 of a loss near 1.
    sigma = 1e-4 if form == "central" else 1e-8
    derivatives, losses = differences(form, sigma, directions, forward, rows, at, x, y)
    density = rows.weights(y).mean()
    found = gradient(form, derivatives.mean(axis=1) / density, directions)
    if form == "mean":  # what all x_k share is taken off, and K - 1 are left
        basis = matrix(directions)
        along = basis @ wanted
        wanted = (along - along.mean()) @ basis / (size - 1)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    assert np.abs(wanted).max() > 1e-2
    assert losses.mean() / density == pytest.approx(float(value.detach()), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_no_parameter_is_left_out_by_the_mean_form(kind: str) -> None:
    at, x, y, wanted = problem(64)
    found = np.array([estimated("mean", 8, 1e-6, at, x, y, number, kind) for number in range(30)])
    assert (np.abs(found).max(axis=0) > 1e-3 * np.abs(wanted)).all()


# -- sigma -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "magnitude", "fits", "lost"),
    [
        ("float64", 1.0, 1e-12, 1e-17),
        ("float32", 1.0, 1e-3, 1e-8),
        ("float32", 1.0, 1e-5, 1e-9),
        ("float32", 1e4, 1e-1, 1e-4),
        ("float32", 1e-6, 1e-12, 1e-16),
        ("float16", 1.0, 1e-2, 1e-4),
    ],
)
def test_a_sigma_that_rounding_swallows_is_refused_and_one_that_works_is_named(
    dtype: str, magnitude: float, fits: float, lost: float
) -> None:
    at = (magnitude * np.random.default_rng(0).uniform(0.5, 1.0, 1000)).astype(dtype)
    check_sigma(fits, at)
    with pytest.raises(ParameterError, match=f"sigma = {lost:g} is lost in the rounding of {dtype}") as caught:
        check_sigma(lost, at)
    named = float(str(caught.value).rpartition("sigma = ")[2].removesuffix(" works"))
    assert lost < named
    check_sigma(named, at)
    with pytest.raises(ParameterError):
        check_sigma(named / 10, at)  # the smallest power of ten that does


def test_a_few_large_parameters_do_not_count_and_more_do() -> None:
    at = np.full(1000, 0.1, dtype=np.float32)
    at[:10] = 1e6
    check_sigma(1e-3, at)
    at[:11] = 1e6
    with pytest.raises(ParameterError, match=r"as large as 1e\+06; sigma = 0.1 works"):
        check_sigma(1e-3, at)


@refused("estimate.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())
