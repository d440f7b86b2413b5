"""Models that a test can differentiate by hand, run forward as a silo's are; and what they were asked."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moretta.protocols.baffle.silo.directions import Directions, keys_of
from moretta.protocols.baffle.silo.estimate import Form, differences, directions_of, gradient
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.common.targets import RowLosses

MSE = RowLosses("mse")
FORMS: tuple[Form, ...] = ("mean", "base", "twice-forward", "central")


class LinearForward:
    """Row r's outputs are A_r w, with x = A, [rows, outputs, n]: under mse a quadratic loss, of Hessian A_r' A_r."""

    def __init__(self, size: int, dtype: str = "float64", at_once: int = 8) -> None:
        self.layout = Layout({"w": (size,)}, dtype, b"")
        self._at_once = at_once
        self.calls: list[int] = []

    def at_once(self, rows: int) -> int:
        return self._at_once

    @property
    def forwards(self) -> int:
        return sum(self.calls)

    def outputs(self, parameters: NDArray[np.floating], x: NDArray[np.floating]) -> NDArray[np.floating]:
        self.calls.append(len(parameters))
        return np.einsum("roi,mi->mro", x, parameters)


def drawn(form: Form, k: int, size: int, number: int = 0, kind: str = "rademacher") -> Directions:
    """The directions of one round, by its number; kind may be "orthogonal"."""
    count, orthogonal = directions_of(form, k), kind == "orthogonal"
    keys = keys_of(bytes(range(32)), count, "test", number, orthogonal=orthogonal)
    return Directions(keys, count, size, "rademacher" if orthogonal else kind, orthogonal=orthogonal)


def matrix(of: Directions) -> NDArray[np.float64]:
    """The directions themselves, float64[K, n]: moved by 1 from the origin, which rounds nothing."""
    return np.array([vector.copy() for together in of.perturbed(np.zeros(of.size), 1.0) for vector in together])


def estimated(
    form: Form,
    k: int,
    sigma: float,
    at: NDArray[np.floating],
    x: NDArray[np.floating],
    y: NDArray[np.floating],
    number: int = 0,
    kind: str = "rademacher",
) -> NDArray[np.float64]:
    """One round's estimate of the gradient of the rows' mean loss."""
    directions, forward = drawn(form, k, len(at), number, kind), LinearForward(len(at), at.dtype.name)
    found, _ = differences(form, sigma, directions, forward, MSE, at, x, y)
    return gradient(form, found.mean(axis=1), directions)
