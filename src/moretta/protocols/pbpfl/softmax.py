"""The server's side of the exchange under cross-entropy: the softmax of the true outputs, from the noisy ones.

A silo checks the answer (`check_answer`, `check_offset`). Its gradient is a sum over its rows, each weighted by its row
of the answer, and the server reads the sum over silos. Without checks, three kinds of answers would show it one row's
features:

- One row answered with 2^20 outweighs all other rows of all silos. So p must be a softmax; delta and xi are bounded.
- In the paper's form psi and beta are sums of U y* k, and rows with k = 0 are not in them. So |delta| is at least 1/2.
- A row answered with its own one-hot label has no gradient, and a server knows the labels that its model predicts. So
  one offset of the head must lead from all of a silo's predictions to their softmax. The server then chooses m numbers
  per silo, and none per row. In the paper's form with several parts a silo cannot compute the softmax from one row.
  There y* cannot be one-hot, because |delta| is at least 1/2.

Who learns what: the server learns each sample's alpha and true outputs up to a constant, hence its softmax. A silo
learns p in both forms. With "probabilities" it receives p. In the paper's form a row's sum_i p_i = 1 is one linear
equation in the m secrets xi_s. So a batch of m rows gives them and then p, although delta differs from row to row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Stamp
from moretta.errors import PeerError
from moretta.protocols.pbpfl.messages import Predictions, Softmax
from moretta.protocols.pbpfl.perturbation import Key
from moretta.secure_aggregation.keystream import Keystream

Rows = NDArray[np.float64]

ROUNDING = 1e-5  # the most by which the sum of a softmax may differ from 1, in any dtype
LEAST_K = -0.5 * np.expm1(-0.5)  # |delta| is at least 1/2, |xi| at most 2
LARGEST_K = 2.0 * np.expm1(1.0)  # |1 - exp(delta)| is at most e - 1, |xi| at least 1/2
TINY = 1e-300  # smaller entries of a softmax count as 0


@dataclass(frozen=True)
class TrueSoftmax:
    """The server's view of one silo's batch, float64.

    Attributes:
        p: [B, outputs].
        y: The true outputs up to a constant per row, [B, outputs].
        alpha: [B].
        log_normaliser: log sum_i exp(y_i), [B].
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

    Args:
        variant: "probabilities", or "paper" for the paper's form.
        stream: Of the deltas.

    Source:
        `practical.md`, Eq. 23 and 24.
    """
    rows, m = len(true.p), len(key.gamma)
    if variant == "probabilities":
        return Softmax(stamp=now, y=true.p, k=np.zeros((rows, 0)), encoding=encoding)
    delta = draw_deltas(stream, rows, m)
    y = true.p * np.exp(-delta)[:, key.parts]
    return Softmax(stamp=now, y=y, k=-np.expm1(delta) / key.xi, encoding=encoding)


def draw_deltas(stream: Keystream, rows: int, parts: int) -> Rows:
    """Draw delta of each row and part, uniform in [-1, -1/2] and [1/2, 1].

    Differs from the paper, which has no least size: a silo could not distinguish k = 0 from an honest answer.

    Returns:
        float64[rows, parts].
    """
    drawn = 2.0 * stream.uniform(rows * parts).reshape(rows, parts) - 1.0
    return np.asarray(0.5 * drawn + np.copysign(0.5, drawn))


def check_answer(softmax: Softmax, variant: str) -> None:
    """Refuse an answer that follows from no softmax, in either form.

    y has no negative entry. Its rows sum to 1, or in the paper's form to 1/e to e, because |delta| <= 1. |k| is from
    (1 - exp(-1/2)) / 2 to 2 (e - 1). Each bound allows a rounding of 1e-5. So a row weighs at most e in a silo's
    gradient.

    Args:
        variant: The silo's form, "probabilities" or "paper".

    Raises:
        PeerError: The answer has the other form, or is outside one of these bounds.
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
    sizes = np.abs(softmax.k)
    if not sizes.max(initial=0.0) <= LARGEST_K * (1.0 + ROUNDING):
        raise PeerError(f"expected k of at most 2 (e - 1) = {LARGEST_K:.6g} in size, got more; nothing was sent")
    if not sizes.min(initial=LEAST_K) >= LEAST_K * (1.0 - ROUNDING):
        raise PeerError(
            f"expected k of at least {LEAST_K:.6g} in size, got less: rows whose k is 0 leave the others alone in the "
            "sum; nothing was sent"
        )


def check_offset(softmax: Softmax, sent: Predictions, parts: NDArray[np.int64], direction: Rows) -> None:
    """Raise `moretta.errors.PeerError` unless one offset of the head leads from all predictions to their softmax.

    In the paper's form with several parts one row does not give p. There each row's largest part must fit a delta from
    1/2 to 1 in size.

    Args:
        softmax: An answer that `check_answer` has accepted.
        sent: The predictions that it answers; with ratios, the silo's own, which it did not send.
        parts: I_s of each output, int64[outputs].
        direction: r_a, float64[outputs].
    """
    members = (parts == np.arange(parts.max() + 1)[:, None]).astype(np.float64)
    alike, sums = True, softmax.y.sum(axis=1, dtype=np.float64)
    if softmax.k.size:
        largest = (softmax.y @ members.T).max(axis=1)
        rest = sums - largest  # largest e^delta + rest e^(of -1 to 1) = 1
        low, high = (1.0 - np.exp(1.0) * rest) / largest, (1.0 - np.exp(-1.0) * rest) / largest
        fits = [(low <= np.exp(b) + ROUNDING) & (high >= np.exp(a) - ROUNDING) for a, b in ((-1, -0.5), (0.5, 1))]
        xi = (1.0 - 1.0 / sums) / softmax.k[:, 0]  # of one part: 1 - exp(delta) = xi k
        one_xi = len(members) > 1 or float(np.ptp(xi)) <= ROUNDING * float(np.abs(xi).max())
        alike = one_xi and bool((fits[0] | fits[1]).all())
    if len(members) == 1 or not softmax.k.size:
        p, alpha = softmax.y / sums[:, None], sent.alpha.astype(np.float64)
        scaled = replace(sent, alpha=alpha / (np.abs(alpha).max() or 1.0))
        again = true_softmax(scaled, _offset(scaled, p, members * direction)).p
        alike = alike and float(np.abs(again - p).max()) <= ROUNDING
    if not alike:
        raise PeerError(
            "expected one offset of the head to lead to the softmax of all rows, got another: rows that are answered "
            "with their labels leave others alone in the sum; nothing was sent; if the server is honest, lower "
            "learning-rate"
        )


def _offset(sent: Predictions, p: Rows, spread: Rows) -> Rows:
    """Return the offset that leads from predictions to their softmax, float64[outputs]; of several the smallest.

    z_i - log p_i = alpha r_i + a constant of the row, and r = gamma_s r_a on part s. Least squares over the differences
    to each row's largest entry give gamma. Entries of p that are 0 do not count.
    """
    rows, top, known = np.arange(len(p)), p.argmax(axis=1), p > TINY
    rest = sent.z - np.log(np.maximum(p, TINY))
    rest = np.where(known, rest - rest[rows, top][:, None], 0.0)
    weights, largest = known * sent.alpha[:, None], np.eye(p.shape[1])[top]
    pairs, seen = largest.T @ weights**2, largest.T @ (weights * rest)  # by the largest entry and another
    normal = np.diag(pairs.sum(axis=0) + pairs.sum(axis=1)) - pairs - pairs.T
    target = spread @ (seen.sum(axis=0) - seen.sum(axis=1))
    return np.asarray(np.linalg.lstsq(spread @ normal @ spread.T, target, rcond=1e-14)[0] @ spread)
