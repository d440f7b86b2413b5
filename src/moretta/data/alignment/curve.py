"""Points of Curve25519, identified by their x coordinate: ids encoded as points, and points under a secret.

The encoding is RFC 9380's encode_to_curve of the suite curve25519_XMD:SHA-512_ELL2_NU_, without its last step: a
clamped X25519 secret is a multiple of the cofactor 8, so `blind` clears it. X25519 works on x coordinates alone, so y
is never computed, nor the square root that it needs; one Jacobi symbol decides which of two x is on the curve.

Points of the twist are accepted as well. Its order is 4 times a prime, so a clamped secret is as hard to compute there,
and no multiple of one is on the curve, so it matches none.

Nothing here takes constant time. A partner's list is sent as a whole, so no other party can time one id.
"""

import hashlib
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from numpy.typing import NDArray

from moretta.errors import PeerError

POINT_BYTES = 32
TAG = b"MORETTA-V01-CS01-with-curve25519_XMD:SHA-512_ELL2_NU_"
"""RFC 9380's domain separation tag: another use of the same ids has other points."""

_P = 2**255 - 19
_A = 486662  # y^2 = x^3 + A x^2 + x
_WIDE = 48  # bytes of a hash reduced modulo p, so that the bias is below 2^-128
_BATCH = 1024  # points with one common inversion

Points = NDArray[np.uint8]  # [points, 32], each x little-endian


def encode(messages: Sequence[bytes], tag: bytes = TAG) -> Points:
    """Return the x coordinates of map_to_curve(hash_to_field(message)), uint8[messages, 32]."""
    parts = [messages[start : start + _BATCH] for start in range(0, len(messages), _BATCH)]
    return _points(b"".join(x.to_bytes(POINT_BYTES, "little") for part in parts for x in _map(_hash(part, tag))))


def blind(points: Points, secret: bytes) -> Points:
    """Return the points multiplied by a secret, uint8[points, 32] (X25519).

    Args:
        secret: 32 bytes, which X25519 clamps.

    Raises:
        PeerError: A point's order is too low to hide anything.
    """
    exchange, point_of = X25519PrivateKey.from_private_bytes(secret).exchange, X25519PublicKey.from_public_bytes
    data = points.tobytes()
    try:
        return _points(
            b"".join([exchange(point_of(data[at : at + POINT_BYTES])) for at in range(0, len(data), POINT_BYTES)])
        )
    except ValueError:
        raise PeerError("expected points of the curve, got one of low order, which would hide no secret") from None


def random_points(seeds: Points) -> Points:
    """Return points indistinguishable from blinded ids: multiples of the base point. seeds: secret uint8[n, 32]."""
    secrets = (X25519PrivateKey.from_private_bytes(seed.tobytes()) for seed in seeds)
    return _points(b"".join(secret.public_key().public_bytes_raw() for secret in secrets))


def as_points(data: bytes) -> Points:
    """Return a peer's list of points. Raises `moretta.errors.PeerError` unless it is whole, canonical and distinct."""
    if not data or len(data) % POINT_BYTES:
        raise PeerError(f"expected points of {POINT_BYTES} bytes each, at least one; got {len(data)} bytes")
    points = _points(data)
    top = points[:, 1:31].min(axis=1) == 0xFF
    if (points[:, 31] > 0x7F).any() or (top & (points[:, 31] == 0x7F) & (points[:, 0] >= 0xED)).any():
        raise PeerError("expected x coordinates below 2^255 - 19; got a larger number")
    if len(np.unique(keys(points))) < len(points):
        raise PeerError("expected each point once; got one twice")
    return points


def keys(points: Points) -> NDArray[np.bytes_]:
    """Return points as values that compare and sort, bytes[points]."""
    return np.ascontiguousarray(points).view(f"S{POINT_BYTES}").reshape(-1)


def _points(data: bytes) -> Points:
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, POINT_BYTES)


def _hash(messages: Sequence[bytes], tag: bytes) -> list[int]:
    """Return hash_to_field of each message: one element, by expand_message_xmd with SHA-512."""
    marked = tag + bytes([len(tag)])
    begun, ending = hashlib.sha512(bytes(128)), _WIDE.to_bytes(2, "big") + b"\0" + marked
    elements = []
    for message in messages:
        first = begun.copy()
        first.update(message + ending)
        wide = hashlib.sha512(first.digest() + b"\1" + marked).digest()[:_WIDE]
        elements.append(int.from_bytes(wide, "big") % _P)
    return elements


def _map(elements: Sequence[int]) -> list[int]:
    """Return map_to_curve_elligator2 of field elements, x alone (RFC 9380, section 6.7.1, with Z = 2).

    x1 = -A / d with d = 1 + 2 u^2, which is never 0, as -1/2 is no square. Of x1 and -x1 - A just one is on the curve.
    """
    divisors = [1 + 2 * u * u % _P for u in elements]
    firsts = [-_A * inverse % _P for inverse in _inverses(divisors)]
    # x^3 + A x^2 + x is -A d (A^2 - A^2 d + d^2) over d^4 for x = -A / d, and on the curve a square.
    on_curve = [_is_square(-_A * d * (_A * _A - _A * _A * d + d * d) % _P) for d in divisors]
    return [x if there else -x - _A + _P for x, there in zip(firsts, on_curve, strict=True)]


def _inverses(numbers: Sequence[int]) -> list[int]:
    """Return the inverses modulo p by one inversion (Montgomery's trick)."""
    products = list(accumulate(numbers, lambda a, b: a * b % _P))
    rest, inverses = pow(products[-1], -1, _P), []
    for before, number in zip([*reversed(products[:-1]), 1], reversed(numbers), strict=True):
        inverses.append(rest * before % _P)
        rest = rest * number % _P
    return inverses[::-1]


def _is_square(a: int) -> bool:
    """Whether a is a square modulo p, by the Jacobi symbol: a seventh of the time of a power.

    For (a / n), factors of 2 are removed, each a change of sign where n is 3 or 5 modulo 8; then the two change places,
    a change of sign where both are 3 modulo 4.
    """
    n, negative = _P, False
    while a:
        twos = (a & -a).bit_length() - 1
        a >>= twos
        if twos & 1 and n & 7 in (3, 5):
            negative = not negative
        if a & n & 2:
            negative = not negative
        a, n = n % a, a
    return not negative
