"""The server's side of the exchange under cross-entropy: the softmax of the true outputs, from the noisy ones.

A silo checks the answer (`check_answer`). Its gradient is a sum over its rows, each weighted by its row of the answer,
and the server reads the sum over silos. A row answered with 2^20 outweighs all others of all silos, and the sum is that
row's features to 1e-5. No honest answer can do that: p is a softmax, and delta and xi are bounded.

Who learns what: the server learns each sample's alpha and true outputs up to a constant, hence its softmax. A silo
learns p in both forms. The cheaper form sends it. In the paper's form a row's sum_i p_i = 1 is one linear equation in
the m secrets xi_s, so a batch of m rows gives them, and with them p, even though delta differs from row to row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Stamp
from moretta.errors import PeerError
from moretta.protocols.pbpfl.messages import Predictions, Softmax
from moretta.protocols.pbpfl.perturbation import Key
from moretta.secure_aggregation.keystream import Keystream

Rows = NDArray[np.float64]

ROUNDING = 1e-5  # by which the sum of a softmax of any precision may miss 1
LARGEST_K = 2.0 * np.expm1(1.0)  # |1 - exp(delta)| is at most e - 1, |xi| at least 1/2


@dataclass(frozen=True)
class TrueSoftmax:
    """The server's view of one silo's batch.

    p: [B, outputs]; y: the true outputs up to a constant per row, [B, outputs]; alpha: [B]. log_normaliser: log sum_i
    exp(y_i), [B].
    """

    p: Rows
    y: Rows
    alpha: Rows
    log_normaliser: Rows


def true_softmax(predictions: Predictions, offset: NDArray[np.float64]) -> TrueSoftmax:
    """Return softmax(z - alpha r) by row, in float64 and in the log domain."""
    alpha = predictions.alpha.astype(np.float64)
    y = predictions.z.astype(np.float64) - np.outer(alpha, offset)
    largest = y.max(axis=1, keepdims=True)
    log_normaliser = largest[:, 0] + np.log(np.exp(y - largest).sum(axis=1))
    return TrueSoftmax(np.exp(y - log_normaliser[:, None]), y, alpha, log_normaliser)


def answer(
    true: TrueSoftmax, key: Key, variant: str, stream: Keystream, now: Stamp, encoding: Mapping[str, int]
) -> Softmax:
    """Return the answer to a silo: p, or in the paper's form p exp(-delta) and (1 - exp(delta)) / xi.

    delta is drawn for each row and part, uniform in [-1, 1] (`practical.md`, Eq. 23 and 24).
    """
    rows, m = len(true.p), len(key.gamma)
    if variant == "probabilities":
        return Softmax(stamp=now, y=true.p, k=np.zeros((rows, 0)), encoding=encoding)
    delta = 2.0 * stream.uniform(rows * m).reshape(rows, m) - 1.0
    y = true.p * np.exp(-delta)[:, key.parts]
    return Softmax(stamp=now, y=y, k=-np.expm1(delta) / key.xi, encoding=encoding)


def check_answer(softmax: Softmax, variant: str) -> None:
    """Raise `moretta.errors.PeerError` for an answer that no softmax yields, in either form.

    y has no negative entry. Its rows sum to 1, or in the paper's form to 1/e to e, as |delta| <= 1. |k| is at most 2 (e
    - 1). Each bound allows a rounding of 1e-5. A row's weight in a silo's gradient is then at most e.
    """
    if (softmax.k.shape[1] > 0) != (variant == "paper"):
        raise PeerError(f'expected the answer of variant = "{variant}", got the other form of it')
    least, most = (np.exp(-1.0), np.exp(1.0)) if variant == "paper" else (1.0, 1.0)
    sums = softmax.y.sum(axis=1, dtype=np.float64)
    if not (np.isfinite(sums).all() and softmax.y.min() >= 0):
        raise PeerError("expected a softmax without negative entries, got one with; nothing was sent")
    if sums.min() < least * (1.0 - ROUNDING) or sums.max() > most * (1.0 + ROUNDING):
        raise PeerError(
            f"expected a softmax whose rows sum to {least:.6g} to {most:.6g}, got others: a row that weighs more "
            "than the others is read out of the sum; nothing was sent"  # under "ratios" its sum reveals outputs
        )
    if not np.abs(softmax.k).max(initial=0.0) <= LARGEST_K * (1.0 + ROUNDING):
        raise PeerError(f"expected k of at most 2 (e - 1) = {LARGEST_K:.6g} in size, got more; nothing was sent")
