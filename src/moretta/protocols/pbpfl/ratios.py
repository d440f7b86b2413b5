"""The exchange under cross-entropy as `practical.md` prints it (Eq. 20 to 24): blinded ratios of noisy exponentials.

For each of its rows, and a lambda_i of its own for each class i:

    silo -> server   mu_ij = exp(y^_j - y^_i) + lambda_i for all j other than i, and alpha
    server -> silo   Y_i = exp(delta_i) + sum_j mu_ij exp(r*_ij), R_i = sum_j exp(r*_ij), and (1 - exp(delta)) / xi,
                     where r*_ij = delta_i - (r_j - r_i) alpha
    silo             y*_i = 1 / (Y_i - lambda_i R_i) = p_i exp(-delta_i), and on as in the paper's form (`softmax`)

Differs from the paper: all numbers are multiples of 2^-320. A ratio has at most 256 bits before the point, and lambda_i
is uniform below 2^320, 64 bits more. In floats the server would see a large ratio through a small lambda. Subtracting
lambda_i R_i would also lose digits: an error of about eps lambda_i exp(alpha (r_i - r_j)). The bits suffice, with a
delta of 1, if the outputs of a row, and its alpha r, are at most 176 apart.

**What lambda hides.** With two classes each row has two ratios and two lambdas, and mu is uniform to within 2^-64: the
server sees alpha and no softmax. From three classes on the difference of two ratios of one i contains no lambda,

    mu_ij - mu_ik = (exp(y^_j) - exp(y^_k)) / exp(y^_i),

and three of them give all ratios (`from_differences`), hence every row's softmax, as without lambda.

**What R_i shows.** As p_i exp((r_i - r_j) alpha) = p_j exp(y^_i - y^_j), a silo knows of each row

    R_i y*_i = sum over j other than i of exp(y^_i - y^_j) p_j,

as many equations as classes (`from_one_row`). So one row gives a silo its true softmax for every m. The form without
R_i takes m rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array, Stamp
from moretta.errors import PeerError
from moretta.protocols.pbpfl.messages import RATIO_WORDS, REST_WORDS, TOTAL_WORDS, BlindedSoftmax, Ratios
from moretta.protocols.pbpfl.perturbation import Key
from moretta.protocols.pbpfl.softmax import draw_deltas
from moretta.secure_aggregation.keystream import Keystream

Rows = NDArray[np.float64]
Whole = NDArray[Any]
"""Python's integers, of any length, in an array of objects: multiples of 2^-FRACTION unless stated otherwise."""

FRACTION = 320  # bits behind the point
BEFORE = 256  # bits of a ratio before the point
BLIND = 64  # bits of lambda beyond those
LARGEST_GAP = BEFORE * float(np.log(2.0)) - 1.0  # delta adds up to 1
ONE = 1 << FRACTION


def blinded(now: Stamp, z: Array, alpha: Array, stream: Keystream) -> tuple[Ratios, Whole]:
    """Return a silo's message, and the lambdas, [B, classes], which it keeps to itself.

    Args:
        z: Outputs up to a constant per row, [B, classes].
        alpha: [B].

    Raises:
        PeerError: Two outputs of a row are more than `LARGEST_GAP` apart.
    """
    z = z.astype(np.float64)
    gaps = z[:, None, :] - z[:, :, None]  # y^_j - y^_i at [:, i, j]
    _check_gap(gaps, "outputs of a row")
    words = (FRACTION + BEFORE + BLIND) // 64
    lambdas = from_words(stream.integers(z.size * words, 64).reshape(*z.shape, words))
    mu = _others(whole(np.exp(gaps))) + lambdas[:, :, None]
    return Ratios(stamp=now, words=to_words(mu, RATIO_WORDS), alpha=alpha), lambdas


def answer(ratios: Ratios, key: Key, stream: Keystream, encoding: Mapping[str, int]) -> BlindedSoftmax:
    """Return the server's answer.

    Args:
        stream: Of the deltas, one for each row and part (`softmax.draw_deltas`).

    Raises:
        PeerError: alpha is so large that two entries of alpha r are more than `LARGEST_GAP` apart.

    Source:
        `practical.md`, Eq. 23.
    """
    alpha, r = ratios.alpha.astype(np.float64), key.offset
    delta = draw_deltas(stream, len(alpha), len(key.gamma))
    each = delta[:, key.parts]
    gaps = alpha[:, None, None] * (r[None, :] - r[:, None])  # (r_j - r_i) alpha at [:, i, j]
    _check_gap(gaps, "alpha r of a row")
    factors = _others(whole(np.exp(each[:, :, None] - gaps)))
    totals = whole(np.exp(each)) * ONE + (from_words(ratios.words) * factors).sum(axis=2)
    return BlindedSoftmax(
        stamp=ratios.stamp,
        totals=to_words(totals, TOTAL_WORDS),
        rests=to_words(factors.sum(axis=2), REST_WORDS),
        k=-np.expm1(delta) / key.xi,
        encoding=encoding,
    )


def unblinded(blinded: BlindedSoftmax, lambdas: Whole) -> Rows:
    """Return y* = p exp(-delta), [B, classes] (Eq. 24). Raises PeerError for another shape, or a value of 0 or less."""
    if blinded.totals.shape[:2] != lambdas.shape:
        raise PeerError(f"expected an answer for {list(lambdas.shape)}, got {list(blinded.totals.shape[:2])}")
    left = from_words(blinded.totals) - lambdas * from_words(blinded.rests)  # multiples of 2^-(2 FRACTION)
    if (left <= 0).any():
        raise PeerError("expected an answer above what lambda adds to it, got one below; nothing was sent")
    return _floats(ONE * ONE, left)


def from_differences(words: Array) -> Rows | None:
    """Return numbers in proportion to exp(y^) of each row, computed without any lambda.

    In units of exp(y^_i), with t = mu_il - mu_ik and d = mu_ki - mu_kl: e_k = (1 - t) / (1 + d), and e_j = e_k + mu_ij
    - mu_ik. No digits are lost if e_i is the largest and e_l the least. So a first pass finds these for a second.

    Args:
        words: As in `moretta.protocols.pbpfl.messages.Ratios`.

    Returns:
        float64[B, classes]; None for two classes.
    """
    classes = words.shape[1]
    if classes < 3:
        return None
    relative = []
    for mu in from_words(words):
        square = [np.insert(row, i, 0) for i, row in enumerate(mu)]
        each = _relative(square, [0, *(1 + np.argsort(mu[0])[::-1])])
        relative.append(_relative(square, np.argsort(each)[::-1].tolist()))
    return _floats(np.array(relative, dtype=object), ONE)


def _relative(mu: Sequence[Whole], order: Sequence[int]) -> list[int]:
    """Return e of all classes. order: of classes, with i first, k second and l last."""
    i, k, last = order[0], order[1], order[-1]
    t, d = mu[i][last] - mu[i][k], mu[k][i] - mu[k][last]
    second = (ONE - t) * ONE // max(ONE + d, 1)
    return [ONE if j == i else max(second + mu[i][j] - mu[i][k], 0) for j in range(len(mu))]


def from_one_row(z: Rows, y: Rows, rests: Array) -> Rows:
    """Return the true softmax, [B, classes], from y* and R_i of each row alone.

    With q_j = p_j exp(-z_j) and b_i = R_i y*_i exp(-z_i), b_i is the sum of all q but q_i.

    Args:
        z: y^ up to a constant per row, [B, classes].
        y: y*, [B, classes].
        rests: R_i in words, as in `moretta.protocols.pbpfl.messages.BlindedSoftmax`.
    """
    b = _floats(from_words(rests), ONE) * y * np.exp(-z)
    q = b.sum(axis=1, keepdims=True) / (z.shape[1] - 1) - b
    return np.asarray(q * np.exp(z))


def whole(values: Rows) -> Whole:
    """Return positive floats as multiples of 2^-FRACTION, truncated."""
    mantissas, exponents = np.frexp(values)
    digits, shifts = (mantissas * 2.0**53).astype(np.int64), exponents + (FRACTION - 53)
    pairs = zip(digits.ravel().tolist(), shifts.ravel().tolist(), strict=True)
    numbers = np.empty(values.size, dtype=object)
    numbers[:] = [digit << shift if shift >= 0 else digit >> -shift for digit, shift in pairs]
    return numbers.reshape(values.shape)


def to_words(values: Whole, words: int) -> Array:
    """Return whole numbers from 0 to below 2^(64 words), each as its words, lowest first: uint64[..., words]."""
    octets = b"".join(value.to_bytes(8 * words, "little") for value in values.ravel().tolist())
    return np.frombuffer(octets, dtype="<u8").astype(np.uint64).reshape(*values.shape, words)


def from_words(words: Array) -> Whole:
    """Return the whole numbers that `to_words` wrote."""
    octets, size = words.astype("<u8").tobytes(), 8 * words.shape[-1]
    numbers = np.empty(words[..., 0].size, dtype=object)
    numbers[:] = [int.from_bytes(octets[at : at + size], "little") for at in range(0, len(octets), size)]
    return numbers.reshape(words.shape[:-1])


def _others(square: Whole) -> Whole:
    """Return [B, i, j] without its diagonal, [B, i, others]."""
    rows, classes, _ = square.shape
    return square[:, ~np.eye(classes, dtype=bool)].reshape(rows, classes, classes - 1)


def _floats(above: Any, below: Any) -> Rows:
    """Return quotients of whole numbers as floats, each rounded once."""
    return np.asarray(np.true_divide(above, below), dtype=np.float64)


def _check_gap(gaps: Rows, what: str) -> None:
    largest = float(np.abs(gaps).max(initial=0.0))
    if largest > LARGEST_GAP:
        error = PeerError(
            f'exchange = "ratios" takes {what} up to {LARGEST_GAP:.0f} apart, and these are further; lower rho or the '
            'learning rate, or use exchange = "outputs"'
        )
        error.add_note(f"the largest gap is {largest:.4g}")
        raise error
