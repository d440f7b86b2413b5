"""The number of rows of each class in a batch, from the gradient of the head.

Derivation: with p = softmax(y) under cross-entropy, or p = y under the squared error, and t the one-hot target of each
of B rows with head inputs h, the head has

    dL/db_c = mean(p_c) - n_c / B          dL/dW_c = mean((p_c - t_c) h)

so n_c / B = mean(p_c) - dL/db_c. Only the mean output for such rows must be guessed; the attacker runs the model on
background rows for it. Those of class k have the mean output P_kc, hence q = n / B solves

    P' q - q = dL/db,   sum q = 1,   q >= 0

Without a bias, dL/dW_c . h / |h|^2 with the background's mean h replaces dL/db_c. One row under cross-entropy needs no
background: p_c < 1 has dL/db_c > 0 except for the label (iDLG, Zhao et al., 2020). Counts are q B, rounded to whole
numbers with the right sum.
"""

import numpy as np
from numpy.typing import NDArray

from moretta.audit.evidence.case import PublicRun
from moretta.audit.evidence.intervals import Floats
from moretta.contract.messages import Array, Tensors
from moretta.protocols.common.targets import estimates_of

SUM_WEIGHT = 100.0  # weight of "the parts sum to 1" beside the equations
RANK = 1e-3  # of singular values that count as 0: a trained model's gradient no longer has them


def as_outputs(y: Array, outputs: int) -> Floats:
    """Return targets as fitting outputs, [rows, outputs]: class numbers become unit vectors."""
    if y.ndim == 2:
        return np.asarray(y, dtype=np.float64)
    return np.asarray(np.eye(outputs)[np.asarray(y).astype(np.int64)])


def counts_from_head(
    run: PublicRun, gradient: Tensors, h: Floats, outputs: Floats, y: NDArray[np.int64], rows: int
) -> NDArray[np.int64]:
    """Return the number of rows of each class, int64[classes].

    Args:
        h, outputs: The head's inputs and outputs on background rows, [background, inputs] and [background, outputs].
        y: The classes of background rows, [background].
        rows: The number of rows behind the gradient.
    """
    answers = np.asarray(estimates_of(outputs, run.loss), np.float64)
    if run.head_bias:
        slope = np.asarray(gradient[run.head_bias], np.float64)
    else:
        mean = h.mean(axis=0)
        slope = np.asarray(gradient[run.head], np.float64) @ mean / max(float(mean @ mean), 1e-300)
    smoothing = float(run.setting("label-smoothing") or 0.0) if run.loss == "cross-entropy" else 0.0
    if rows == 1 and run.loss == "cross-entropy":
        return np.asarray(np.eye(run.outputs, dtype=np.int64)[int(slope.argmin())])
    if run.outputs == 1:  # one output of 0 and 1
        answers, slope = np.hstack([1.0 - answers, answers]), np.concatenate([-slope, slope])
    count = len(slope)
    means = np.array([answers[y == k].mean(axis=0) if np.any(y == k) else answers.mean(axis=0) for k in range(count)])
    targets = np.eye(count) * (1.0 - smoothing) + smoothing / count
    return whole_numbers(_parts(means - targets, slope, answers.mean(axis=0) - slope), rows)


def _parts(difference: Floats, slope: Floats, first: Floats) -> Floats:
    """Solve difference' q = slope with sum q = 1 and q >= 0, [classes]; without information q stays near `first`."""
    from scipy.optimize import nnls

    count = len(slope)
    first = np.clip(first, 0.0, None)
    first = first / first.sum() if first.sum() > 0 else np.full(count, 1.0 / count)
    least = RANK * float(np.linalg.norm(difference, 2))
    matrix = np.vstack([difference.T, least * np.eye(count), SUM_WEIGHT * np.ones((1, count))])
    vector = np.concatenate([slope, least * first, [SUM_WEIGHT]])
    if not np.isfinite(vector).all() or np.abs(vector).max() > 1e12:  # a masked upload's words
        return first
    return np.asarray(nnls(matrix, vector)[0])


def whole_numbers(parts: Floats, rows: int) -> NDArray[np.int64]:
    """Return whole numbers near parts * rows that sum to rows: the largest remainders are rounded up."""
    parts = np.nan_to_num(np.clip(parts, 0.0, None), posinf=0.0)
    parts = parts / parts.sum() if parts.sum() > 0 else np.full(len(parts), 1.0 / len(parts))
    counts = np.floor(parts * rows).astype(np.int64)
    up = np.argsort(counts - parts * rows, kind="stable")[: rows - int(counts.sum())]
    counts[up] += 1
    return counts
