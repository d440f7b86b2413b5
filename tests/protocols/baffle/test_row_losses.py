"""Each row's loss is PyTorch's, in float64, and the batch's mean follows from rows and weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from moretta.protocols.common.losses import Loss
from moretta.protocols.common.targets import RowLosses

SHAPE = {
    "rows": st.integers(1, 9), "outputs": st.integers(2, 6), "models": st.integers(1, 5), "seed": st.integers(0, 99)
}  # fmt: skip
SETTINGS = {"smoothing": st.sampled_from([0.0, 0.1, 0.7]), "weighted": st.booleans(), "soft": st.booleans()}


def drawn(rows: int, outputs: int, models: int, seed: int, soft: bool) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """Outputs of several models, and classes or probability rows."""
    generator = np.random.default_rng(seed)
    found = generator.normal(0, 3, (models, rows, outputs))
    if soft:
        return found, generator.dirichlet(np.ones(outputs), rows)
    return found, generator.integers(0, outputs, rows)


@given(**SHAPE, **SETTINGS)
def test_cross_entropy_is_torchs_of_each_row_and_of_the_batch(
    rows: int, outputs: int, models: int, seed: int, smoothing: float, weighted: bool, soft: bool
) -> None:
    values, targets = drawn(rows, outputs, models, seed, soft)
    weights = tuple(0.5 + k for k in range(outputs)) if weighted else ()
    ours = RowLosses("cross-entropy", smoothing, weights)
    found, t = ours(values, targets), torch.tensor(targets)
    weight = torch.tensor(weights, dtype=torch.float64) if weighted else None
    assert (found.shape, found.dtype) == ((models, rows), np.dtype(np.float64))
    for model, own in zip(torch.tensor(values), found, strict=True):
        each = nn.functional.cross_entropy(model, t, weight=weight, label_smoothing=smoothing, reduction="none")
        np.testing.assert_allclose(own, each.numpy(), rtol=1e-12, atol=1e-12)
        mean = float(Loss("cross-entropy", smoothing, weights)(model, t))
        assert own.sum() / ours.weights(targets).sum() == pytest.approx(mean, rel=1e-12, abs=1e-12)


@given(**SHAPE)
def test_mse_is_half_the_squares_of_each_row(rows: int, outputs: int, models: int, seed: int) -> None:
    values, targets = drawn(rows, outputs, models, seed, soft=True)
    found = RowLosses("mse")(values, targets)
    for model, own in zip(torch.tensor(values), found, strict=True):
        each = nn.functional.mse_loss(model, torch.tensor(targets), reduction="none").sum(1) / 2
        np.testing.assert_allclose(own, each.numpy(), rtol=1e-12, atol=1e-12)
        assert own.mean() == pytest.approx(float(Loss("mse")(model, torch.tensor(targets))), rel=1e-12)
    assert np.array_equal(RowLosses("mse").weights(targets), np.ones(rows))


@pytest.mark.parametrize("name", ["mse", "cross-entropy"])
def test_outputs_in_float32_lose_no_more_than_they_have_lost(name: str) -> None:
    values, targets = drawn(8, 4, 3, 0, soft=True)
    short = values.astype(np.float32)
    before = short.copy()
    assert np.array_equal(RowLosses(name)(short, targets), RowLosses(name)(short.astype(np.float64), targets))
    assert np.array_equal(short, before)  # the model's outputs are not written to


def test_outputs_of_any_size_have_a_finite_cross_entropy() -> None:
    values, targets = np.array([[[1e6, -1e6, 0.0], [-1e6, -1e6, -1e6]]]), np.array([1, 0])
    found = RowLosses("cross-entropy")(values, targets)
    np.testing.assert_allclose(found, [[2e6, np.log(3)]], rtol=1e-12)


def test_a_rows_loss_does_not_depend_on_the_others() -> None:
    values, targets = drawn(6, 4, 2, 3, soft=False)
    loss = RowLosses("cross-entropy", 0.1, (1.0, 2.0, 0.5, 1.5))
    alone = [loss(values[:, [row]], targets[[row]])[:, 0] for row in range(6)]
    np.testing.assert_allclose(loss(values, targets), np.array(alone).T, rtol=1e-15)
