"""Theorem 3.1: how far BAFFLE's estimate is from the gradient, over K, beside what follows for each kind of direction.

    python experiments/baffle/theorem.py --data DIR

One batch of 32 rows of MNIST through LeNet, at its start and after some steps of Adam: the estimate of
`moretta.protocols.baffle.silo.estimate` beside autograd's gradient g. For n parameters, directions d_k and no curvature
E|g^ - g|^2 / |g|^2 is

                  form base        form mean
    Rademacher    (n - 1) / K      (n - 1) / (K - 1) + 2 / (K (K - 1))
    Gaussian      (n + 1) / K      (n + 1) / (K - 1)
    orthogonal    n / K - 1        n / (K - 1) - 1

In the form base g^ = (1 / K) sum_k d_k d_k' g, a mean of K independent terms, and E|d|^2 (d . g)^2 is n |g|^2 for
Rademacher and (n + 2) |g|^2 for Gaussian entries. In the form mean g^ = C g, where C is the sample covariance of the
d_k. With unit variances cov(C_ij, C_il) is (1{j = l} + 1{i = j = l}) / (K - 1), plus the fourth cumulant over K where
i = j = l. It is 0 for Gaussian and -2 for Rademacher entries. Summed over i and weighted by g_j g_l, that is (n + 1) /
(K - 1) |g|^2, less 2 / K |g|^2 for Rademacher entries. Orthogonal directions of length sqrt(n) make g^ n / K times g's
projection on their span; the mean takes one dimension out of it.

The cosine is near 1 / sqrt(1 + that). The rate is the theorem's, sqrt(n / K), for K far below n.
"""

import argparse
import math
import sys
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from records import SEED, Record, Row, images, name_of, parser, run
from torch import nn

from moretta.models import catalogue
from moretta.protocols.baffle.silo.directions import Directions, keys_of
from moretta.protocols.baffle.silo.estimate import Form, differences, gradient
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.baffle.torch_forward import TorchForward, layout_of
from moretta.protocols.common import modules
from moretta.protocols.common.targets import RowLosses

KINDS = ("rademacher", "gaussian", "orthogonal")
COLUMNS = ("relative error", "± of the error", "expected", "cosine", "expected cosine")
LOSS = RowLosses("cross-entropy")


def expected(kind: str, n: int, k: int, form: Form = "mean") -> float:
    """Return the relative error sqrt(E|g^ - g|^2) / |g| of K directions of n entries, without curvature.

    Args:
        kind: of the directions, one of `KINDS`.
        n: how many parameters there are.
        k: how many directions, 2 or more in the form "mean".
        form: "mean" or "base".
    """
    if form == "base":
        square = {"rademacher": (n - 1) / k, "gaussian": (n + 1) / k, "orthogonal": n / k - 1}[kind]
    else:
        same = (n + 1) / (k - 1)
        square = {"rademacher": same - 2 / k, "gaussian": same, "orthogonal": n / (k - 1) - 1}[kind]
    return math.sqrt(max(0.0, square))


def true_gradient(
    model: nn.Module, layout: Layout, x: NDArray[np.float32], y: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return autograd's gradient of the mean cross-entropy, flat."""
    named = modules.trainable(model)
    loss = nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))
    found = torch.autograd.grad(loss, list(named.values()))
    tensors = {name: value.numpy() for name, value in zip(named, found, strict=True)}
    return layout.flat(tensors).astype(np.float64)


def estimated(
    model: nn.Module,
    x: NDArray[np.float32],
    y: NDArray[np.int64],
    kind: str,
    k: int,
    draw: int,
    sigma: float = 1e-3,
    form: Form = "mean",
) -> NDArray[np.float64]:
    """Return BAFFLE's estimate of that gradient from K directions, the `draw`-th of their kind."""
    layout, orthogonal = layout_of(model), kind == "orthogonal"
    at = layout.flat(modules.arrays(model))
    keys = keys_of(bytes(32), k, "theorem", kind, draw, orthogonal=orthogonal)
    distribution = "rademacher" if orthogonal else kind
    directions = Directions(keys, k, layout.size, distribution, orthogonal=orthogonal)
    derivatives, _ = differences(form, sigma, directions, TorchForward(model, layout), LOSS, at, x, y)
    return gradient(form, derivatives.mean(axis=1), directions)


def compared(estimate: NDArray[np.float64], truth: NDArray[np.float64]) -> tuple[float, float]:
    """Return the relative error and the cosine."""
    size = float(np.linalg.norm(truth))
    error = float(np.linalg.norm(estimate - truth)) / size
    return error, float(estimate @ truth) / (size * float(np.linalg.norm(estimate)) or 1.0)


def rows_of(
    model: nn.Module, x: NDArray[np.float32], y: NDArray[np.int64], ks: tuple[int, ...], most: int, where: str
) -> Iterator[Row]:
    """Yield a row for each kind of direction and K: the error's root mean square over draws, and the mean cosine.

    most: how many directions all draws of a K have together; there are 3 to 48 draws.
    """
    layout = layout_of(model)
    truth = true_gradient(model, layout, x, y)
    for kind in KINDS:
        for k in ks:
            draws = min(48, max(3, most // k))
            found = np.array([compared(estimated(model, x, y, kind, k, draw), truth) for draw in range(draws)])
            squares = np.square(found[:, 0])
            error = math.sqrt(squares.mean())
            spread = float(squares.std(ddof=1)) / math.sqrt(draws) / (2 * error)
            says = expected(kind, layout.size, k)
            facts = {"n": layout.size, "k": k, "draws": draws, "each": found.tolist()}
            ours = (error, spread, says, float(found[:, 1].mean()), 1 / math.sqrt(1 + says**2))
            yield Row(f"{where}, {kind}, K = {k}", ours, None, facts)


def measure(given: argparse.Namespace) -> Record:
    """Measure at the start and after some steps."""
    ks, most, steps = ((16, 64, 256), 512, 20) if given.quick else ((16, 64, 256, 1024, 4096), 4096, 100)
    settings = {"model": "lenet", "data": "mnist", "batch": 32, "sigma": 1e-3, "form": "mean", "steps": steps}
    notes = ["The paper prints no figures: its theorem says sqrt(n / K), up to a constant that it does not name."]
    title = "Theorem 3.1: the estimate beside autograd's gradient, LeNet on MNIST"
    record = Record(name_of(given, "baffle-theorem"), title, COLUMNS, settings, notes)
    x, y = images(given, "mnist", 32 * 11)
    model = catalogue.build("lenet", inputs=x.shape[1:], outputs=10, seed=SEED)
    for row in rows_of(model, x[:32], y[:32], ks, most, "start"):
        record.add(row)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for number in range(steps):  # on other rows than those measured on
        part = slice(32 * (1 + number % 10), 32 * (2 + number % 10))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.from_numpy(x[part])), torch.from_numpy(y[part])).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for row in rows_of(model, x[:32], y[:32], tuple(k for k in ks if k <= 1024), most, f"after {steps} steps"):
        record.add(row)
    return record


if __name__ == "__main__":
    sys.exit(run(measure, parser("Measure Theorem 3.1.").parse_args()))
