"""Z_2^b, the integers in which sums are exact: from floats to ring elements and back.

An entry x of a silo with weight N_k becomes the integer nearest to 2^f N_k x (ties to even), modulo 2^b in two's
complement. A sum over K silos is exact in the ring; read back and divided by 2^f N it is the weighted mean with an
error of at most K / (2 * 2^f N).

**Headroom.** With |x| <= limit, sum_k N_k <= W = `most_weight` and K = `parties`, f is the largest integer with

    2^f W limit (1 + 2^-53) + K / 2 < 2^(b - 1)

so the sum of K rounded entries cannot wrap. Here W limit bounds sum_k N_k |x_k|, the factor covers the rounding of the
float64 product N_k x (exact below 53 bits, the most that float64 can hold), and K / 2 the rounding to integers. The
exponent f may be negative. As f is the largest, no ring elements read as a sum above 2^(b - 1) / 2^f, at most twice W
limit (and K / 2^f of rounding): one silo that deviates can move a sum no further. Nearly the full ring is used: 2^f W
limit is at least a quarter of it, so with N near W a mean's step is about limit / 2^(b - 2). W itself is summed too;
where it does not fit the ring there is no headroom.

This serves the small ring too: (N_k / N_max) x with N_max = 2^p and p more fraction bits is the same integer. Only raw
counts as weights, with f fixed beforehand, would leave no room.

**What one silo can do to a sum.** Masks hide its part, so it can put in any ring elements and any weight. The fraction
bits leave just enough room that no sum reads as more than twice all silos at their limit. Within that, a result out of
honest silos' reach is clipped to their range, and logged: the total weight to between 1 per silo and W, a mean to the
range of each silo's own entries. So one silo can neither end a run by an impossible weight nor make means large by a
small one. `moretta.protocols.common.clipping` bounds the rest from round to round.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array, Tensors
from moretta.errors import MisuseError, ParameterError, PeerError, RangeError
from moretta.secure_aggregation.sums import Shapes, Sum, Wanted, as_real, check_limits, check_weight

Words = NDArray[np.unsignedinteger]
"""Ring elements, uint32 or uint64."""

EXPONENTS = 900  # limits lie from 2^-900 to 2^900, so every power of two here fits float64
CHUNK = 1 << 14  # entries in work at once, few enough for a processor's cache
ROUNDING = 1 + Fraction(1, 2**53)  # of one float64 product


def largest_magnitude(name: str, values: Array) -> float:
    """Return max |x|, 0.0 for an empty array. Raises `moretta.errors.RangeError` for NaN or infinity."""
    if not values.size:
        return 0.0
    # NaN passes through both
    largest = max(float(np.maximum.reduce(values, axis=None)), -float(np.minimum.reduce(values, axis=None)))
    if not math.isfinite(largest):
        raise RangeError(f"`{name}`: expected finite numbers, got NaN or infinity; nothing was sent")
    return largest


def check_fraction_bits(name: str, bits: int, weight: int = 1) -> None:
    """Raise `moretta.errors.PeerError` for fraction bits of no limit: their powers may leave float64."""
    if abs(bits) > EXPONENTS + 64 or bits + weight.bit_length() > EXPONENTS + 65:
        raise PeerError(f"`{name}`: expected at most {EXPONENTS + 64} fraction bits, got {bits}")


@dataclass(frozen=True)
class Ring:
    """Z_2^bits with its fixed-point encoding. Raises `moretta.errors.ParameterError` unless bits is 32 or 64.

    Two silos that send 2.5 and -1.0, each with the weight 1:

    >>> ring = Ring(64)
    >>> bits = ring.fraction_bits("x", limit=8.0, most_weight=2, parties=2)
    >>> sent = [ring.encode("x", np.array([x]), 1, bits, most_weight=2, parties=2) for x in (2.5, -1.0)]
    >>> ring.decode(sent[0] + sent[1], bits).tolist()
    [1.5]
    """

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in (32, 64):
            raise ParameterError(f"ring-bits = {self.bits}: expected 32 or 64")

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The dtype of ring elements."""
        return np.dtype(f"uint{self.bits}")

    @property
    def most_weight(self) -> int:
        """The largest total weight: it must fit the ring, and the 64-bit field that announces it."""
        return int(min(2**self.bits, 2**63)) - 1

    def _room(self, parties: int) -> Fraction:
        """Return the bound that 2^f W limit must stay below."""
        return ((1 << (self.bits - 1)) - Fraction(parties, 2)) / ROUNDING

    def fraction_bits(self, name: str, limit: float, most_weight: int, parties: int) -> int:
        """Return the largest f that has headroom. Raises `moretta.errors.RangeError` without one."""
        if not 2.0**-EXPONENTS <= limit <= 2.0**EXPONENTS:
            raise RangeError(f"`{name}`: expected a limit from 2^-{EXPONENTS} to 2^{EXPONENTS}, got {limit}")
        if most_weight > self.most_weight:
            raise RangeError(
                f"`{name}`: a total weight of up to {most_weight} has no headroom beside +-{limit:.6g} in "
                f"Z_2^{self.bits}, which counts to {self.most_weight}; use ring-bits = 64 or fewer rows a round"
            )
        ratio = self._room(parties) / (most_weight * Fraction(limit))
        bits = ratio.numerator.bit_length() - ratio.denominator.bit_length()  # 2^(bits - 1) < ratio < 2^(bits + 1)
        return bits if _power_of_two(bits) < ratio else bits - 1

    def largest(self, fraction_bits: int, most_weight: int, parties: int) -> Fraction:
        """Return the range: |x| must stay below it, so that a total weight of `most_weight` never wraps."""
        return self._room(parties) / (most_weight * _power_of_two(fraction_bits))

    def encode(
        self,
        name: str,
        values: Array,
        weight: int,
        fraction_bits: int,
        most_weight: int,
        parties: int,
        words: Words | None = None,
    ) -> Words:
        """Return round(2^f N_k x) mod 2^b, uint<bits> of the same shape.

        Args:
            values: Real numbers, converted to float64.
            weight: N_k, from 1 to `most_weight`.
            fraction_bits: f.
            words: The contiguous array for the result; None makes a new one.

        Raises:
            RangeError: A value is not finite or not within `largest`; nothing is masked or sent yet.
            PeerError: No limit leads to the fraction bits.
        """
        check_fraction_bits(name, fraction_bits, weight)
        most = _most(self, fraction_bits, most_weight, parties)
        words = np.empty(values.shape, dtype=self.dtype) if words is None else words
        flat, into = values.reshape(-1), words.reshape(-1).view(f"int{self.bits}")
        # One factor: a power of two scales exactly, so only the product with N_k rounds.
        factor = math.ldexp(float(weight), fraction_bits)
        buffer = np.empty(min(flat.size, CHUNK))
        for start in range(0, flat.size, CHUNK):
            part = flat[start : start + CHUNK]
            if largest_magnitude(name, part) >= most:
                error = RangeError(
                    f"`{name}`: a value is outside the range of the secure sum, +-{most:.6g}; nothing was sent "
                    "(bring inputs to scale by standardise, and targets that are numbers by standardise-targets; a "
                    "higher `limit` widens the range and coarsens its step)"
                )
                error.add_note(f"the largest magnitude is {largest_magnitude(name, flat):.6g}")
                raise error
            scaled = buffer[: part.size]
            scaled[:] = part  # and only then the product, which is one of float64
            scaled *= factor
            into[start : start + CHUNK] = np.rint(scaled, out=scaled)
        return words

    def decode(self, total: Words, fraction_bits: int) -> NDArray[np.float64]:
        """Return the float64 sum of encoded entries, two's complement times 2^-f, in the memory of 64-bit words."""
        signed = total.view(f"int{self.bits}").reshape(-1)
        values = total.view(np.float64) if self.bits == 64 else np.empty(total.shape)
        into = values.reshape(-1)
        for start in range(0, signed.size, CHUNK):
            into[start : start + CHUNK] = np.ldexp(signed[start : start + CHUNK].astype(np.float64), -fraction_bits)
        return values


@lru_cache(maxsize=256)
def _most(ring: Ring, fraction_bits: int, most_weight: int, parties: int) -> float:
    """Return the bound that magnitudes must stay below; cached, as fractions are slow and a run has few ranges.

    It is the smallest float64 that is not below the exact bound: a float is below either if it is below both.
    """
    bound = ring.largest(fraction_bits, most_weight, parties)
    nearest = float(min(bound, Fraction(2**1023)))
    return nearest if Fraction(nearest) >= bound else math.nextafter(nearest, math.inf)


def _power_of_two(exponent: int) -> Fraction:
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


log = logging.getLogger("moretta")

MOST_WEIGHT = "most weight"
"""The entry of an encoding that announces W, the upper bound of the total weight; no tensor may have this name.

A silo needs W to refuse values that could wrap, as it knows neither the others' weights nor the server's limits.
"""


def plan(ring: Ring, parties: int, shapes: Shapes, limits: Mapping[str, float], most_weight: int) -> Wanted:
    """Choose tensors' fraction bits by limits, for entries of `parties` silos. Raises as `KeyedAggregator.want`."""
    check_limits(shapes, limits, most_weight)
    if MOST_WEIGHT in shapes:
        raise MisuseError(f"`{MOST_WEIGHT}` is reserved; expected another name of a tensor")
    bits = {name: ring.fraction_bits(name, limits[name], most_weight, parties) for name in shapes}
    return Wanted(dict(shapes), bits | {MOST_WEIGHT: most_weight}, most_weight)


class Range:
    """A silo's demands on encodings before it reads its values: a refusal would inform the server about them.

    A server that chose a narrower range, or another total weight each time, would learn a silo's largest value, or its
    weight, from refusals.

    Args:
        limit: Of the settings.
        one_weight: Whether all sums of rounds have one total weight, as with participation known beforehand.
    """

    def __init__(self, limit: float, *, one_weight: bool) -> None:
        self._limit, self._one_weight = limit, one_weight
        self._most_weight: int | None = None  # of the first sum of a round in this session

    def check(self, ring: Ring, encoding: Mapping[str, int], parties: int, least: float | None, *, once: bool) -> None:
        """Check the range and the total weight of an encoding.

        Args:
            least: The least range; None is the limit of the settings.
            once: Whether this is a sum of the run, where each silo's weight is 1.

        Raises:
            PeerError: The range is narrower, or no limit leads to it. Or the total weight does not fit the ring, or is
                another than before.
        """
        most_weight = encoding.get(MOST_WEIGHT, 0)
        least = self._limit if least is None else least
        if not 0 < most_weight <= ring.most_weight:
            raise PeerError(f"expected a total weight of 1 to {ring.most_weight}, got {most_weight}")
        for name in encoding.keys() - {MOST_WEIGHT}:
            check_fraction_bits(name, encoding[name], most_weight)
            if _most(ring, encoding[name], most_weight, parties) <= least:
                raise PeerError(f"`{name}`: expected an encoding of values up to {least:.6g}, got one of fewer")
        if once or not self._one_weight:
            return
        if self._most_weight not in (None, most_weight):
            raise PeerError(f"expected the total weight of the sums before, {self._most_weight}; got {most_weight}")
        self._most_weight = most_weight


def encode(
    ring: Ring, tensors: Tensors, weight: int, encoding: Mapping[str, int], parties: int
) -> tuple[Words, dict[str, Words]]:
    """Return N_k and round(2^f N_k x_k) mod 2^b, uint<bits>[1 + entries], and the tensors' parts of it by name.

    The weight is first, then the tensors by name: the order in which they are masked, as one array.

    Args:
        weight, encoding: As for `moretta.secure_aggregation.keyed_sums.KeyedContributor.upload`, which lists the
            errors.
    """
    check_weight(weight)
    most_weight = encoding.get(MOST_WEIGHT, 0)
    if not tensors or set(encoding) != {*tensors, MOST_WEIGHT} or not 0 < most_weight <= ring.most_weight:
        raise PeerError(f"expected an encoding of the tensors {sorted(tensors)!r:.200} and of a total weight")
    if weight > most_weight:
        raise ParameterError(f"expected a total weight of at least this silo's own, got {most_weight}")
    real = {name: as_real(name, values) for name, values in tensors.items()}
    whole, words = room_for(shapes_of(real), ring)
    whole[0] = weight
    for name, into in words.items():
        ring.encode(name, real[name], weight, encoding[name], most_weight, parties, into)
    return whole, words


def room_for(shapes: Shapes, ring: Ring, empty: Callable[..., Words] = np.empty) -> tuple[Words, dict[str, Words]]:
    """Return a vector for a weight and then all tensors in the order of their names, and the tensors' parts of it.

    That is the order in which they are masked.

    Args:
        empty: Makes the vector, as `numpy.empty` does.
    """
    whole = empty(1 + sum(map(math.prod, shapes.values())), ring.dtype)
    return whole, unpacked(whole[1:], shapes)


def shapes_of(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """Return the shapes of arrays by name."""
    return {name: array.shape for name, array in tensors.items()}


def unpacked(words: Words, shapes: Shapes) -> dict[str, Words]:
    """Return the tensors of a vector, concatenated in the order of their names, without a copy."""
    tensors, start = dict[str, Words](), 0
    for name in sorted(shapes):
        count = math.prod(shapes[name])
        tensors[name] = words[start : start + count].reshape(shapes[name])
        start += count
    return tensors


def add_up(words: Sequence[Words], total: Words | None = None) -> Words:
    """Return the sum modulo 2^b, contiguous, equal in any order; inputs are not written to. total: for the result."""
    total = np.empty(words[0].shape, words[0].dtype) if total is None else total
    np.copyto(total, words[0])
    for others in words[1:]:
        np.add(total, others, out=total)
    return total


def decode(ring: Ring, tensors: Mapping[str, Words], weight: int, silos: Sequence[str], request: Wanted) -> Sum:
    """Return the means of sums in the ring.

    Means out of honest silos' reach are clipped to their range; the silo at fault stays hidden.

    Args:
        tensors: Contiguous, of the planned shapes; with 64 bits the means overwrite their memory.
        silos: The silos in the sum, sorted.
    """
    parties, possible = len(silos), min(max(weight, len(silos)), request.most_weight)
    if weight != possible:
        log.warning(
            "a secure sum's weights sum to %d, expected %d to %d: some silo did not follow the protocol; taken as %d",
            weight,
            parties,
            request.most_weight,
            possible,
        )
        weight = possible
    means, steps = dict[str, NDArray[np.float64]](), dict[str, float]()
    for name, words in tensors.items():
        bits = request.fraction_bits[name]
        mean = ring.decode(words, bits)
        means[name] = np.divide(mean, weight, out=mean)
        steps[name] = parties * 2.0 ** -(bits + 1) / weight
        # Where the total weight is W, a mean beyond this range would have wrapped.
        most = float(ring.largest(bits, request.most_weight, parties)) + steps[name]
        largest = largest_magnitude(name, mean) if weight < request.most_weight else 0.0
        if largest > most:
            log.warning(
                "`%s`: a mean of the secure sum is %.6g in size, and silos that follow the protocol upload up to %.6g; "
                "it was clipped to that",
                name,
                largest,
                most,
            )
            np.clip(mean, -most, most, out=mean)
    return Sum(means, weight, steps, tuple(silos))
