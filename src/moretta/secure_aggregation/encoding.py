"""What all schemes over the ring do alike: plan how a sum is encoded, encode a silo's part of it, read the total.

`moretta.secure_aggregation.ring` has the numbers.

**What one silo can do to a sum.** Masks hide its part, so it can put in any ring elements and any weight. The fraction
bits leave just enough room that no sum reads as more than twice all silos at their limit. Within that, a result that
honest silos cannot reach is clipped to what they can, and the log says so: the total weight to between 1 a silo and W,
a mean to the range of each silo's own entries. So one silo can neither end a run by an impossible weight nor make means
large by a small one. `moretta.protocols.common.clipping` bounds what is left from round to round.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Tensors
from moretta.errors import MisuseError, ParameterError, PeerError
from moretta.secure_aggregation.masks import Label, add_masks, blind_key
from moretta.secure_aggregation.ring import EXPONENTS, Ring, Words, check_fraction_bits, largest_magnitude
from moretta.secure_aggregation.sums import Relayed, Shapes, Sum, Wanted, as_real, check_limits, check_weight

log = logging.getLogger("moretta")

MOST_WEIGHT = "most weight"
"""The entry of an encoding that announces W, the upper bound of the total weight; no tensor may have this name.

A silo needs W to refuse values that could wrap, as it knows neither the others' weights nor the server's limits.
"""


def plan(ring: Ring, parties: int, shapes: Shapes, limits: Mapping[str, float], most_weight: int) -> Wanted:
    """Choose the fraction bits of each tensor from its limit. Raises as
    `moretta.secure_aggregation.sums.Aggregator.want`.

    parties: how many silos' entries are added, at most.
    """
    check_limits(shapes, limits, most_weight)
    if MOST_WEIGHT in shapes:
        raise MisuseError(f"`{MOST_WEIGHT}` is reserved; expected another name of a tensor")
    bits = {name: ring.fraction_bits(name, limits[name], most_weight, parties) for name in shapes}
    return Wanted(dict(shapes), bits | {MOST_WEIGHT: most_weight}, most_weight)


class Range:
    """What a silo demands of encodings before it looks at its values: by a refusal a server learns about them.

    limit: of the settings. one_weight: whether all sums of rounds have one total weight, as they do where who plays is
    known beforehand. A server that chose a narrower range, or another total weight each time, would find a silo's
    largest value, or its weight, by what is refused.
    """

    def __init__(self, limit: float, *, one_weight: bool) -> None:
        self._limit, self._one_weight = limit, one_weight
        self._most_weight: int | None = None  # of the first sum of a round in this session

    def check(self, ring: Ring, encoding: Mapping[str, int], parties: int, least: float | None, *, once: bool) -> None:
        """Raise `moretta.errors.PeerError` for a range of less than `least`, and for another total weight than before.

        least: None is the limit of the settings. once: whether this is a sum of the run, where each silo's weight is 1.
        """
        most_weight = encoding.get(MOST_WEIGHT, 0)
        least = self._limit if least is None else least
        if not 0 < most_weight <= ring.most_weight:
            raise PeerError(f"expected a total weight of 1 to {ring.most_weight}, got {most_weight}")
        for name in encoding.keys() - {MOST_WEIGHT}:
            check_fraction_bits(name, encoding[name], most_weight)
            if ring.largest(encoding[name], most_weight, parties) <= least:
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

    The weight comes first, then the tensors by name: the order in which they are masked, as one array.
    weight, encoding: as for `moretta.secure_aggregation.sums.Contributor.upload`. Raises the same as that, and
    `moretta.errors.PeerError` for an encoding of other tensors.
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

    That is the order in which they are masked. empty: makes the vector, as `numpy.empty` does.
    """
    whole = empty(1 + sum(map(math.prod, shapes.values())), ring.dtype)
    return whole, unpacked(whole[1:], shapes)


def shapes_of(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """Return the shapes of arrays by name."""
    return {name: array.shape for name, array in tensors.items()}


def unpacked(words: Words, shapes: Shapes) -> dict[str, Words]:
    """Return the tensors that a vector holds one after the other, in the order of their names, without a copy."""
    tensors, start = dict[str, Words](), 0
    for name in sorted(shapes):
        count = math.prod(shapes[name])
        tensors[name] = words[start : start + count].reshape(shapes[name])
        start += count
    return tensors


def add_up(words: Sequence[Words], total: Words | None = None) -> Words:
    """Return the sum modulo 2^b, contiguous, the same for any order. The arrays given are not written to.

    total: where it is written; None makes a new array.
    """
    total = np.empty(words[0].shape, words[0].dtype) if total is None else total
    np.copyto(total, words[0])
    for others in words[1:]:
        np.add(total, others, out=total)
    return total


def read(
    ring: Ring,
    relayed: Relayed,
    encoding: Mapping[str, int],
    blind: bytes | None,
    label: Label,
    *,
    public_weights: bool,
) -> Sum:
    """Return the result of a relayed sum: take off the blinds of all silos in it, and decode.

    Raises `moretta.errors.PeerError` for elements of another ring, other tensors, or an impossible encoding or weight.
    """
    everything = [relayed.weight, *relayed.tensors.values()]
    if any(words.dtype != ring.dtype for words in everything) or relayed.weight.shape != ():
        raise PeerError(f"expected a sum of elements of Z_2^{ring.bits}")
    if set(encoding) != {*relayed.tensors, MOST_WEIGHT}:
        raise PeerError(f"expected a sum of the tensors {sorted(relayed.tensors)!r:.200}")
    if any(not -EXPONENTS - 60 <= encoding[name] <= EXPONENTS + 64 for name in relayed.tensors):
        raise PeerError("expected fraction bits that a limit leads to")  # others leave float64's range
    whole, tensors = room_for(shapes_of(relayed.tensors), ring)
    whole[0], weight = relayed.weight, whole[0:1].reshape(())
    for name, words in tensors.items():
        words[...] = relayed.tensors[name]
    if blind is not None:
        add_masks(whole[public_weights:], [(False, blind_key(blind, label, silo)) for silo in relayed.silos])
    wanted = Wanted(shapes_of(tensors), encoding, encoding[MOST_WEIGHT])
    if not len(relayed.silos) <= int(weight) <= wanted.most_weight:  # also where another blind's key was used
        raise PeerError(
            f"expected weights that sum to {len(relayed.silos)} to {wanted.most_weight}, got {int(weight)}; some silo "
            "did not follow the protocol"
        )
    return decode(ring, tensors, int(weight), relayed.silos, wanted)


def decode(ring: Ring, tensors: Mapping[str, Words], weight: int, silos: Sequence[str], wanted: Wanted) -> Sum:
    """Return the means that sums in the ring stand for.

    tensors: contiguous, of the shapes wanted; with 64 bits the means overwrite their memory. silos: in the sum, sorted.
    Means that honest silos cannot reach are clipped to what they can; whose fault it is stays hidden.
    """
    parties, possible = len(silos), min(max(weight, len(silos)), wanted.most_weight)
    if weight != possible:
        log.warning(
            "a secure sum's weights sum to %d, expected %d to %d: some silo did not follow the protocol; taken as %d",
            weight,
            parties,
            wanted.most_weight,
            possible,
        )
        weight = possible
    means, steps = dict[str, NDArray[np.float64]](), dict[str, float]()
    for name, words in tensors.items():
        bits = wanted.fraction_bits[name]
        mean = ring.decode(words, bits)
        means[name] = np.divide(mean, weight, out=mean)
        steps[name] = parties * 2.0 ** -(bits + 1) / weight
        # Where the total weight is W, a mean beyond this range would have wrapped.
        most = float(ring.largest(bits, wanted.most_weight, parties)) + steps[name]
        largest = largest_magnitude(name, mean) if weight < wanted.most_weight else 0.0
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
