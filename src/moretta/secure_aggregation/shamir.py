"""Shamir's secret sharing (Shamir, "How to share a secret", CACM 22, 1979) over the field of p = 2^255 - 19.

A secret s is the value at 0 of a polynomial of degree t - 1 whose other coefficients are uniform in the field; the
share of point x >= 1 is its value there. Any t shares reconstruct s by Lagrange's weights at 0::

    s = sum_j w_j f(x_j)  mod p,     w_j = prod_{m != j} x_m / (x_m - x_j)

t - 1 shares fit every secret equally well: they reveal nothing, for any computing power. A wrong share in the field is
not detected here: it gives another secret, which the caller must check.

The secret and any t - 1 values determine the polynomial, and every choice of values is one of coefficients. So `share`
draws the shares of the first t - 1 points, and computes the others alone, by Lagrange's weights at their points.

Field elements are 32 bytes, little-endian (as X25519 writes them), below p: each has one encoding. A secret is a field
element and not any 32 bytes; `random_secret` draws one, with 254.9 bits of entropy.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from operator import mul

from moretta.errors import ParameterError, PeerError

PRIME = 2**255 - 19
SHARE_BYTES = 32
DRAWN_BYTES = 48  # reduced mod p these are uniform to 2^-129

Random = Callable[[int], bytes]


def random_secret(random: Random = os.urandom) -> bytes:
    """Return a uniform field element, 32 bytes. random: returns the requested number of random bytes."""
    return _encode(int.from_bytes(random(DRAWN_BYTES), "little") % PRIME)


def share(secret: bytes, threshold: int, points: Sequence[int], random: Random = os.urandom) -> dict[int, bytes]:
    """Return a share of 32 bytes for each point; any `threshold` of them reconstruct the secret.

    Args:
        secret: A field element, 32 bytes.
        threshold: From 2 (with 1 each share is the secret) to the number of points.
        points: Different, from 1 to p - 1.
        random: Returns 48 bytes for each of the first threshold - 1 shares, at once; sources other than the operating
            system are for tests.

    Raises:
        ParameterError: An argument is another.

    >>> secret = random_secret()
    >>> shares = share(secret, 2, points=(1, 2, 3))
    >>> reconstruct({1: shares[1], 3: shares[3]}, 2) == secret
    True
    """
    _check_points(points)
    if not 2 <= threshold <= len(points):
        raise ParameterError(f"expected a threshold from 2 to the {len(points)} points, got {threshold}")
    try:
        constant = _decode(secret)
    except PeerError as error:
        raise ParameterError(f"secret: {error}") from None
    drawn = random(DRAWN_BYTES * (threshold - 1))
    each = (drawn[start : start + DRAWN_BYTES] for start in range(0, len(drawn), DRAWN_BYTES))
    known = [constant, *(int.from_bytes(coefficient, "little") % PRIME for coefficient in each)]
    others = (sum(map(mul, known, weights)) % PRIME for weights in _weights(tuple(points), threshold))
    return {x: _encode(value) for x, value in zip(points, [*known[1:], *others], strict=True)}


def reconstruct(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Return the secret, 32 bytes, from the `threshold` shares of the lowest points; the others are not used.

    Args:
        shares: By point.
        threshold: As shared, 2 or more; another one gives another secret.

    Raises:
        PeerError: The shares are too few, or one is no field element.
        ParameterError: The threshold or a point is impossible.
    """
    _check_points(shares)
    if threshold < 2:
        raise ParameterError(f"expected a threshold of at least 2, got {threshold}")
    if len(shares) < threshold:
        raise PeerError(f"expected at least {threshold} shares, got {len(shares)}")
    points = tuple(sorted(shares)[:threshold])
    total = 0
    for x, weight in zip(points, weights_at_zero(points), strict=True):
        try:
            total += weight * _decode(shares[x])
        except PeerError as error:
            raise PeerError(f"share of point {x}: {error}") from None
    return _encode(total % PRIME)


@lru_cache(maxsize=1024)
def _weights(points: tuple[int, ...], threshold: int) -> tuple[tuple[int, ...], ...]:
    """Return the weights of the secret and the first shares in each other share; cached, as all uploads share them."""
    known = 0, *points[: threshold - 1]
    return tuple(_weights_at(x, known) for x in points[threshold - 1 :])


@lru_cache(maxsize=1024)
def weights_at_zero(points: tuple[int, ...]) -> tuple[int, ...]:
    """Return Lagrange's weights w_j at 0 for different points from 1 to p - 1; cached, as many secrets share them."""
    return _weights_at(0, points)


def _weights_at(place: int, points: tuple[int, ...]) -> tuple[int, ...]:
    """Return Lagrange's weights at a place for different points, itself not among them."""
    product = 1
    for x in points:
        product = product * (place - x) % PRIME
    scales = zip(points, _scales(points), strict=True)
    return tuple(product * scale % PRIME * _inverse(place - x) % PRIME for x, scale in scales)


@lru_cache(maxsize=64)
def _scales(points: tuple[int, ...]) -> tuple[int, ...]:
    """Return the common factors of the weights at any place: for each point 1 / prod_{m != j} (x_j - x_m)."""
    denominators = []
    for x in points:
        denominator = 1
        for other in points:
            if other != x:
                denominator = denominator * (x - other) % PRIME
        denominators.append(denominator)
    # One inversion for all (Montgomery): before[j] is the product of the denominators before j.
    before = [1]
    for denominator in denominators:
        before.append(before[-1] * denominator % PRIME)
    inverse, scales = pow(before.pop(), -1, PRIME), []
    for denominator, rest in zip(reversed(denominators), reversed(before), strict=True):
        scales.append(inverse * rest % PRIME)
        inverse = inverse * denominator % PRIME
    return tuple(reversed(scales))


@lru_cache(maxsize=4096)
def _inverse(difference: int) -> int:
    """Return 1 / difference; cached, as points are places in a cohort, which differ by little."""
    return pow(difference, -1, PRIME)


def _check_points(points: Collection[int]) -> None:
    if len(set(points)) != len(points):
        raise ParameterError("expected a point of its own for each share; some are the same")
    for x in points:
        if not 1 <= x < PRIME:  # the value at 0 is the secret
            raise ParameterError(f"expected points from 1 to 2^255 - 20, got {x}")


def _encode(element: int) -> bytes:
    return element.to_bytes(SHARE_BYTES, "little")


def _decode(content: bytes) -> int:
    """Return the field element; errors do not contain the content, which is secret."""
    if len(content) != SHARE_BYTES:
        raise PeerError(f"expected a field element of {SHARE_BYTES} bytes, got {len(content)}")
    element = int.from_bytes(content, "little")
    if element >= PRIME:
        raise PeerError("expected a field element, got 32 bytes that say 2^255 - 19 or more")
    return element
