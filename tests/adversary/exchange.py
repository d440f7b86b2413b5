"""What PBPFL's exchange under cross-entropy may tell, and what it may not.

The server sees z and alpha of a silo's rows in the clear, by design, and answers with a softmax of its choice. From
that a silo forms its upload, which is an affine function of the softmax y::

    u_k(y) = c_k + sum_e y_e A_ke          e: the entries of y; c_k, A_ke: of the silo's rows and the model it was sent

So a server that is given two sums over the same rows, and answers one silo differently, has that silo's A_ke, which are
gradients of its outputs. The judge's unknowns are c_k and A_ke of each silo and each forward pass; a sum is a row of
them, with the entries of y as its numbers. No combination of rows may hold one honest silo's unknowns alone. As y is
real, so is this elimination: by ranks, in float64.

And of one round and take a silo predicts for one model: else a server reads its rows off predictions of many models.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from equations import Equation
from numpy.typing import NDArray
from wiretap import Wiretap

from moretta.protocols.pbpfl.messages import Softmax

TOLERANCE = 1e-6  # of singular values, against entries of y from 0 to 1 and models that nearly are the same


def silos_told(sums: Sequence[Equation]) -> list[str]:
    """Return the honest silos of which some combination of sums tells something alone."""
    rows = [_row(one) for one in sums]
    columns = sorted({name for row in rows for name in row})
    matrix = np.array([[row.get(name, 0.0) for name in columns] for row in rows]).reshape(len(rows), len(columns))
    told = []
    for silo in sorted({name[0] for name in columns}):
        others = matrix[:, [name[0] != silo for name in columns]]
        if _rank(matrix) > _rank(others):
            told.append(silo)
    return told


def _row(one: Equation) -> dict[tuple[str, bytes, int], float]:
    """Return a sum's numbers by silo, forward pass and entry of y, of which the first is of c; none of other sums."""
    row = dict[tuple[str, bytes, int], float]()
    for made, coefficient in one.coefficients.items():
        if isinstance(made.asked, Softmax):
            signed = coefficient - (coefficient >> 63 << 64)
            for entry, value in enumerate([1.0, *made.asked.y.ravel()]):
                name = made.unknown.silo, made.passed, entry
                row[name] = row.get(name, 0.0) + signed * value
    return row


def _rank(matrix: NDArray[np.float64]) -> int:
    return int(np.linalg.matrix_rank(matrix, tol=TOLERANCE)) if matrix.size else 0


def predicted_twice(tap: Wiretap) -> list[tuple[str, str]]:
    """Return silos that predicted for several models in one round and take, and when."""
    return sorted((silo, when) for (silo, when), models in tap.predicted.items() if len(models) > 1)
