"""Noise that suffices without lost silos, and further noise for losses, which is removed if silos are not lost.

Silos add noise to a sum together, each a part, and some of them may be lost. If each part were sized for the most
losses, a sum without any would have too much noise. So each silo adds its noise in components, and those that the
losses did not need are removed ("add, then remove"; Jiang, Wang, Chen, EuroSys 2024). In a cohort of n silos up to T
may be lost, and up to c of them share all that they know with the server. The others' noise must leave a variance of v,
in steps^2 of the lattice. Silo k adds, for each number,

    z_k = e_k0 + e_k1 + .. + e_km,     e_kj from N_Z(v_j)     (`moretta.secure_aggregation.discrete_gaussian`)

Level l covers a_l .. b_l losses, and v_0 + .. + v_l = v / (n - b_l - c) + 8. Levels are as wide as they can be while

    (n - a_l - c) (v_0 + .. + v_l) <= 1.05 v

or cover one number of losses. When K silos are left, in level l, the components l+1 .. m of all of them are removed.
The K - c others' noise then has a variance of v + 8 or more, and of 1.05 v at most (where a level covers one number of
losses, of v + 8 (K - c), which is less). By (B) of that module it is a discrete Gaussian's. Components are whole steps,
and the ring adds and subtracts them exactly.

**Seeds.** e_k0 is drawn from the silo's root and never removed. The others' seeds are a one-way chain,

    seed_1 from the root,     seed_{j+1} = H(seed_j),     e_kj drawn from another HKDF of seed_j

so seed_j gives components j .. m, and none below. Each seed is shared by Shamir's scheme under the threshold of the
self-masks, sealed together with those shares (`moretta.secure_aggregation.unmasking`), and committed to. No message
asks for a seed by its number: at `Unmask` of the survivors S, each silo computes l from n and |S|, and gives its shares
of seed_{l+1} of the silos in S alone.

**Necessary noise stays.** Let a server that at most c < t of the n silos help open the sum over S, in level l. To have
seed_j with j <= l of an honest silo k in S, it must have shares of t holders, of which the honest ones were asked to
unmask another set S', larger than S.

    without a roster   t holders were asked about S, and t about S'. Of n silos 2 t - n or more were asked about both,
                       and if c < 2 t - n, one of them is honest. It helps to open one sum of a take, so it refused.
    with a roster      all of S and all of S' have signed their set, and an honest silo signs one. So k is not in S',
                       and honest holders that were asked about S' gave no share of k's.
    another take,      has other seeds, and other noise: the root's purpose is of all settings (T and c among them),
    cohort, or ask     the cohort, the query, and the take. A silo that has helped to open the sum of this take
                       in another cohort refuses.
    the same again     has the same seeds in fresh shares. Fewer than t shares of each sharing reveal nothing together,
                       and a silo that is bound to S gives the shares of S again and no others.

Sparse graphs need a roster for this, as for masks.

The removed part is independent of the rest, so it reveals nothing of that. A silo whose seed cannot be reconstructed,
as too few holders gave their shares or it committed to something else, leaves its excess in the sum, which is reported;
the accountant counts on no less noise. A silo that draws other noise than its seeds' is not detected, like one that
adds too little.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moretta.errors import ParameterError, PeerError
from moretta.secure_aggregation.discrete_gaussian import SMOOTH, discrete_gaussian, largest
from moretta.secure_aggregation.keystream import Keystream, derive
from moretta.secure_aggregation.shamir import random_secret

RATIO = 1.05  # the most, of the remaining noise to the planned noise
LEAST = 16.0  # of a component's variance, from which on (B) holds


@dataclass(frozen=True)
class Levels:
    """Components of each silo's noise in a cohort. variances: v_0 .. v_m, in steps^2. most: b_0 .. b_m, losses."""

    variances: tuple[float, ...]
    most: tuple[int, ...]

    @property
    def removable(self) -> int:
        """The number of removable components: m."""
        return len(self.variances) - 1

    @property
    def largest(self) -> int:
        """The largest magnitude of a silo's noise."""
        return sum(largest(math.sqrt(variance)) for variance in self.variances)

    def first_removed(self, losses: int) -> int:
        """Return the first removed component after losses, m + 1 if none. Raises PeerError for too many losses."""
        if losses > self.most[-1]:
            raise PeerError(
                f"expected at most {self.most[-1]} silos to be lost, as noise is sized for; lost are {losses}"
            )
        return bisect_left(self.most, losses) + 1


@dataclass(frozen=True)
class Noise:
    """The noise planned for a sum. variance: v, in steps^2. step: of the lattice. colluding: c."""

    variance: float
    step: float
    colluding: int = 0

    def levels(self, cohort: int, losses: int) -> Levels:
        """Return the components of `cohort` silos with `losses`. Raises ParameterError if all others may collude."""
        return _levels(self.variance, cohort, losses, self.colluding)


@lru_cache(maxsize=512)
def _levels(total: float, cohort: int, losses: int, colluding: int) -> Levels:
    if losses < 0 or cohort - losses <= colluding:
        raise ParameterError(
            f"dp-colluding = {colluding}: of {cohort} silos {cohort - losses} may be left in a sum, and none of those "
            "would be sure to add noise; lower it, or raise [secure-aggregation] min-survivors"
        )
    variances, most, first, before = list[float](), list[int](), 0, 0.0
    while first <= losses:
        others, last = cohort - first - colluding, first
        while last < losses and others * (total / (cohort - last - 1 - colluding) + SMOOTH) <= RATIO * total:
            last += 1
        part = max(total / (cohort - last - colluding) + SMOOTH - before, LEAST)
        variances.append(part)
        most.append(last)
        first, before = last + 1, before + part
    return Levels(tuple(variances), tuple(most))


@dataclass(frozen=True, repr=False)
class Removable:
    """The removable part of a silo's noise in one sum: its levels, and seed_1 .. seed_m."""

    levels: Levels
    seeds: Sequence[bytes]

    @classmethod
    def of(cls, levels: Levels, stream: Keystream) -> Removable:
        """Return the chain of seeds whose first is drawn from a stream."""
        seeds = [random_secret(lambda count: stream.octets(count).tobytes())] if levels.removable else []
        while len(seeds) < levels.removable:
            seeds.append(_next(seeds[-1]))
        return cls(levels, tuple(seeds))


def removable_noise(seed: bytes, first: int, levels: Levels, count: int) -> NDArray[np.int64]:
    """Return the sum of a silo's components from `first` on, int64[count]. seed: of the first."""
    total = np.zeros(count, dtype=np.int64)
    for variance in levels.variances[first:]:
        total += discrete_gaussian(math.sqrt(variance)).draw(Keystream(derive(seed, "noise component")), count)
        seed = _next(seed)
    return total


def _next(seed: bytes) -> bytes:
    stream = Keystream(derive(seed, "next noise seed"))
    return random_secret(lambda count: stream.octets(count).tobytes())
