"""Appendix C of the paper: what finite differences find in a deep linear network, Eq. 13.

The loss is minus the score of the label, L = -v_l' U x, with parameters U [h, d] and v [classes, h]. Along a direction
(E, e) of unit size and at a distance sigma,

    L(w + s (E, e)) - L(w) = -s (e_l' U + v_l' E) x - s^2 e_l' E x.

The central difference is the first part alone, whatever sigma is. The forward one has the second part too, which has
the mean 0 (e_l and E are independent) and vanishes with sigma: Eq. 13's one pattern for both is true up to that.
"""

from __future__ import annotations

import numpy as np
import pytest
from forwards import drawn, matrix
from numpy.typing import NDArray

from moretta.protocols.baffle.silo.estimate import Form, gradient

HIDDEN, INPUTS, CLASSES, LABEL = 6, 8, 3, 1
SIZE = HIDDEN * INPUTS + CLASSES * HIDDEN

Floats = NDArray[np.float64]


def parts(w: Floats) -> tuple[Floats, Floats]:
    """U and v_l."""
    return w[: HIDDEN * INPUTS].reshape(HIDDEN, INPUTS), w[HIDDEN * INPUTS :].reshape(CLASSES, HIDDEN)[LABEL]


def loss(w: Floats, x: Floats) -> float:
    u, v = parts(w)
    return float(-v @ u @ x)


def problem() -> tuple[Floats, Floats, Floats]:
    """w, x and the gradient of the loss."""
    random = np.random.default_rng(0)
    w, x = random.normal(size=SIZE), random.normal(size=INPUTS)
    u, v = parts(w)
    slope = np.zeros(SIZE)
    slope[: HIDDEN * INPUTS] = -np.outer(v, x).ravel()
    slope[HIDDEN * INPUTS :].reshape(CLASSES, HIDDEN)[LABEL] = -u @ x
    return w, x, slope


def found_along(form: Form, sigma: float, rows: Floats, w: Floats, x: Floats) -> Floats:
    """x_k of each direction, a row of `rows`."""
    ahead = np.array([loss(w + sigma * row, x) for row in rows])
    behind = np.array([loss(w - sigma * row, x) for row in rows])
    return (ahead - behind) / (2 * sigma) if form == "central" else (ahead - loss(w, x)) / sigma


@pytest.mark.parametrize("sigma", [1e-3, 0.1, 10.0])
def test_central_differences_are_the_slope_at_any_sigma(sigma: float) -> None:
    w, x, slope = problem()
    directions = drawn("central", 32, SIZE)
    rows = matrix(directions)
    found = found_along("central", sigma, rows, w, x)
    np.testing.assert_allclose(found, rows @ slope, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(
        gradient("central", found, directions), rows.T @ (rows @ slope) / len(rows), rtol=1e-9, atol=1e-9
    )


def test_forward_differences_are_the_same_up_to_a_part_that_falls_with_sigma() -> None:
    w, x, slope = problem()
    rows = matrix(drawn("base", 4000, SIZE))
    offs = []
    for sigma in (1e-4, 1e-2, 1.0):
        off = found_along("base", sigma, rows, w, x) - rows @ slope
        second = np.array([-sigma * (parts(row)[1] @ parts(row)[0] @ x) for row in rows])
        np.testing.assert_allclose(off, second, atol=1e-9)
        assert abs(off.mean()) < 5 * off.std() / np.sqrt(len(off))  # no trace of a Hessian: its diagonal is 0
        offs.append(off.std() / (rows @ slope).std())
    assert offs[0] < 1e-3 < offs[2]  # at the paper's sigma nothing, at 1 as large as the slope
    assert offs[1] == pytest.approx(100 * offs[0], rel=1e-3)
