"""The search for rows of a gradient, on small networks without a run."""

import numpy as np
import torch
from torch import nn

from moretta.audit.evidence.inversion import Effort, Gradients, Inputs, invert, matched, quotient_start
from moretta.protocols.common import modules
from moretta.protocols.common.losses import Loss

INPUTS = Inputs(np.zeros(6), np.ones(6), np.full(6, -4.0), np.full(6, 4.0))


def network(outputs):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, outputs)).double()


def seen(model, x, y, loss):
    value = Loss(loss)(model(torch.tensor(x)), torch.tensor(y))
    trained = modules.trainable(model)
    found = torch.autograd.grad(value, list(trained.values()))
    return {name: one.numpy() for name, one in zip(trained, found, strict=True)}


def test_rows_and_labels_of_a_batch_are_found():
    x, y = np.random.default_rng(0).normal(size=(3, 6)), np.array([0, 2, 2])
    model = network(3)
    gradients = Gradients(model, modules.arrays(model), seen(model, x, y, "cross-entropy"), "cross-entropy")
    found = invert(gradients, INPUTS, 3, 3, effort=Effort(starts=6, steps=600))
    assert found.distance < 1e-9
    np.testing.assert_allclose(matched(found.x, x), x, atol=1e-2)
    assert sorted(found.y.argmax(axis=1)) == [0, 2, 2]


def test_targets_of_a_regression_are_found():
    x, y = np.random.default_rng(1).normal(size=(1, 6)), np.array([[0.7]])
    model = network(1)
    slopes = seen(model, x, y, "mse")
    start = quotient_start(slopes, INPUTS, 1)
    np.testing.assert_allclose(start, x, atol=1e-9)  # one row: the quotient is the row itself
    found = invert(Gradients(model, modules.arrays(model), slopes, "mse", twice=True), INPUTS, 1, 1, first=start)
    np.testing.assert_allclose(found.x, x, atol=1e-3)
    np.testing.assert_allclose(found.y, y, atol=1e-3)


def test_cosine_finds_an_image_through_relus():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).double()
    x, y = np.random.default_rng(2).uniform(size=(1, 1, 6, 6)).cumsum(axis=3) / 6, np.array([3])
    inputs = Inputs(np.full((1, 6, 6), 0.3), np.full((1, 6, 6), 0.3), np.zeros((1, 6, 6)), np.ones((1, 6, 6)))
    gradients = Gradients(model, modules.arrays(model), seen(model, x, y, "cross-entropy"), "cross-entropy")
    found = invert(gradients, inputs, 1, 4, labels=y, effort=Effort(starts=1, steps=1, adam=150))
    assert float(np.square(found.x - x).mean()) < 0.25 * float(np.square(0.3 - x).mean())


def test_another_gradient_is_not_fitted():
    model = network(3)
    noise = {name: np.random.default_rng(3).normal(size=one.shape) for name, one in modules.arrays(model).items()}
    found = invert(Gradients(model, modules.arrays(model), noise, "cross-entropy"), INPUTS, 1, 3)
    assert found.distance > 0.1


def test_rows_are_paired_with_the_true_ones():
    true = np.arange(12.0).reshape(4, 3)
    assert (matched(true[[2, 0, 3, 1]] + 0.1, true) == true + 0.1).all()
