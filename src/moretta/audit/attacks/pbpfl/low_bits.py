"""Numbers that lie on a lattice, seen through one multiplication and its rounding.

W^ = round(R W) is a float of few bits, and so is W if it was drawn or kept as one. Divided by the true R, W^ lies
within its rounding of a point of W's lattice; divided by another R, it lies anywhere between two points. If the
rounding is at most h and points are d apart, it is that near by chance in a share min(1, 2 h / d) of cases, so many
values tell the true factor from others. Three kinds of lattice are tried:

    fused, plain    what PyTorch's `uniform_` draws between -b and b in float32: 2 b k / 2^24 - b for whole k, rounded
                    once, or after the product too where a machine does not fuse it with the sum; for the bounds b that
                    its layers and initialisers have
    floats          float32 or float64 itself, for weights that were trained in it: it tells as much as W^ has more bits
                    than R W would have had, somewhere between none and one a value
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Real = NDArray[np.float64]

DRAWN = 24  # random bits of a float32
BELIEVED = 0.99  # that a value is as its lattice has it
SLACK = 2.0**-50  # relative, of R in float64


def bits_of(values: Real) -> int:
    """Return with how many bits of mantissa all values can be written, 53 at the most."""
    mantissa, _ = np.frexp(np.abs(values[values != 0]))
    joined = int(np.bitwise_or.reduce((mantissa * 2.0**53).astype(np.int64), initial=0))
    return 53 - ((joined & -joined).bit_length() - 1) if joined else 0


def half_widths(values: Real, bits: int) -> Real:
    """Return by how much each value may be off as it was rounded to so many bits of mantissa."""
    return np.asarray(np.ldexp(1.0, np.frexp(values)[1] - bits - 1))


def evidence(w: Real, h: Real, shape: tuple[int, ...], bits: int) -> Real:
    """Return the log of how much more likely values are on a lattice than anywhere, by candidate: the best lattice's.

    w, h: values over candidate factors and their half-widths, [candidates, values]. shape: of the weight that they are
    of, or that their bias belongs to. bits: of the message.
    """
    h = h + np.abs(w) * SLACK
    found = [_likelier(np.abs(w - w.astype(kept)), h, np.spacing(np.abs(w).astype(kept))) for kept in _floats(bits)]
    for bound in _bounds(shape):
        step = 2.0 * bound / 2.0**DRAWN
        found += [_likelier(away, h, step) for away in _from_drawn(w, bound, step)]
    return np.asarray(np.max(found, axis=0))


def _floats(bits: int) -> list[type[np.floating]]:
    """Return the floats of which a message of so many bits may tell."""
    return [kept for kept in (np.float32, np.float64) if np.finfo(kept).nmant < bits]


def _from_drawn(w: Real, bound: float, step: float) -> tuple[Real, Real]:
    """Return how far values are from what is drawn in float32, with the product fused and rounded by itself."""
    fused, plain = np.full_like(w, np.inf), np.full_like(w, np.inf)
    nearest = np.rint((w + bound) / step)
    for shift in (-1, 0, 1):  # the rounding of a point may be nearer to its neighbour
        product = (nearest + shift) * step  # 24 bits times 24: exact in float64
        np.minimum(fused, np.abs(w - (product - bound).astype(np.float32)), out=fused)
        np.minimum(plain, np.abs(w - (product.astype(np.float32) - np.float32(bound))), out=plain)
    return fused, plain


def _bounds(shape: tuple[int, ...]) -> set[float]:
    """Return the bounds between which PyTorch draws such a weight and its bias: its layers', He's and Glorot's."""
    fan_in, fan_out = math.prod(shape[1:]), shape[0] * math.prod(shape[2:])
    return {float(np.float32(1 / math.sqrt(n))) for n in (fan_in, fan_in / 6, (fan_in + fan_out) / 6)}


def _likelier(away: Real, width: Real, spacing: Any) -> Real:
    chance = np.minimum(1.0, 2.0 * width / spacing)
    return np.asarray(np.log1p(BELIEVED * ((away <= width) / chance - 1.0)).sum(axis=1))
