"""Noise in whole steps: the rounding of a silo's sums, how far one row moves them, and the privacy of the result.

A silo rounds the sums over its rows to a lattice, and adds whole steps of noise before it masks them:

    s          the lattice's step, a power of two: d numbers of one upload have s sqrt(d) <= 0.01 C
    n          each number of sum_i g_i, to the nearest whole number of steps
    upload     s (n + z) / L,   z from N_Z(sigma_k^2) for each number (`moretta.secure_aggregation.discrete_gaussian`)

One row more moves the sum by at most C, and rounding moves each number by at most s more. So the sensitivity is

    Delta = C + s sqrt(d),   in steps D = Delta / s,   and sigma_k^2 = sigma^2 D^2 / S + 8

where S silos are in a sum. The sum over k of them is that of whole numbers with the noise of N_Z(k sigma_k^2). It hides
a row as the Gaussian mechanism with variance k sigma_k^2 - 8 >= (sigma D)^2 k / S does (proof: see the draws). So sigma
sqrt(k / S) is the noise multiplier, exactly, and epsilon is the sampled Gaussian's.

S is the number of silos of the cohort, less the c that may pool their noise with the server. Each silo's noise has the
surplus that a sum with lost silos needs, which is removed otherwise (`moretta.secure_aggregation.removable_noise`). So
in every opened sum the multiplier is sigma, and hardly more.

The ring adds whole steps exactly: its own step is a part of s, and no magnitude exceeds 2^50 of them, so that products
of float64 round to the right one. Larger numbers are clamped before the noise is added, which moves no two sums apart.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moretta.errors import ParameterError
from moretta.secure_aggregation.discrete_gaussian import SMOOTH
from moretta.secure_aggregation.encoding import MOST_WEIGHT, check_fraction_bits
from moretta.secure_aggregation.removable_noise import Noise

COARSEST = 0.01  # s sqrt(d) / C
LEAST_STEPS = 64  # the least deviation of a silo's share of the noise, in steps of the lattice
EXACT_BITS = 50  # up to so many of the ring's steps, a product and a quotient of float64 round to the right one


@dataclass(frozen=True)
class Privacy:
    """The settings of noise: the multiplier sigma, the largest norm C of one example's contribution, and delta.

    Args:
        sharers: S, the silos whose noise together is the mechanism's if no silo is lost; 1 if each silo adds all of it.
        unit: The unit that the noise hides: one "row" of a silo, a "group" of its rows, or all that one "silo" uploads.
        most: The largest epsilon of a run; None is any.
        group_rows: The most rows of a group in a round.
        losses: The silos of a round that may be missing from a sum.
        colluding: c, the silos that give the server their noise.
    """

    noise: float
    clip: float
    delta: float
    sharers: int = 1
    unit: str = "row"
    most: float | None = None
    group_rows: int = 0
    losses: int = 0
    colluding: int = 0

    def among(self, silos: int, least: int) -> Self:
        """Return the same for a round of `silos` silos that share noise, whose sum has `least` or more."""
        return replace(self, sharers=silos - self.colluding, losses=silos - least)


@dataclass(frozen=True)
class Lattice:
    """The lattice of one upload, and its noise.

    Args:
        step: s.
        sensitivity: Delta.
        deviation: sigma_k, in steps, if no silo of a round is missing; 0 for no noise, which needs no lattice.
        noise: The noise that silos leave in a sum.
        most: The largest magnitude of a silo's noise, in steps, in any cohort.
    """

    step: float
    sensitivity: float
    deviation: float
    noise: Noise
    most: int

    @classmethod
    def of(cls, privacy: Privacy, entries: int) -> Self:
        """Return the lattice for uploads of `entries` numbers, d."""
        share, root = privacy.noise * privacy.clip / math.sqrt(privacy.sharers), math.sqrt(entries)
        coarsest = min(COARSEST * privacy.clip / root, share / LEAST_STEPS or math.inf)
        step = math.ldexp(0.5, math.frexp(coarsest)[1])  # the largest power of two below or equal
        sensitivity = privacy.clip + step * root
        units, silos = privacy.noise * sensitivity / step, privacy.sharers + privacy.colluding
        noise, most = Noise(units**2, step, privacy.colluding), 0
        if units:
            cohorts = ((silos - missing, privacy.losses - missing) for missing in range(privacy.losses + 1))
            most = max(noise.levels(*cohort).largest for cohort in cohorts)
        return cls(step, sensitivity, math.sqrt(units**2 / privacy.sharers + SMOOTH) if units else 0.0, noise, most)

    def check(self, encoding: Mapping[str, int], lot: int) -> float:
        """Check that a ring adds whole steps of the lattice exactly; return the most steps that it adds.

        Args:
            encoding: The fraction bits f by tensor, whose sum is rounded to 2^-f, and the most weight, which is
                ignored; empty for sums in the clear.
            lot: The expected number of summed rows.

        Raises:
            ParameterError: The ring does not; the message has the remedy.
            PeerError: No limit leads to the fraction bits.
        """
        bits_of = {name: bits for name, bits in encoding.items() if name != MOST_WEIGHT}
        for name, bits in bits_of.items():
            check_fraction_bits(name, bits)
        if not self.deviation or not bits_of:
            return 2.0**EXACT_BITS
        coarse, fine = math.ldexp(1.0, -min(bits_of.values())), math.ldexp(1.0, -max(bits_of.values()))
        if coarse > self.step:
            raise ParameterError(
                f"dp-noise: the noise has steps of {self.step:.3g}, but sums are rounded to {coarse:.3g}, which would "
                "round it away; set ring-bits = 64 if they are 32, a lower [secure-aggregation] limit, fewer rows a "
                "round, or a larger dp-clip"
            )
        most = math.ldexp(fine, EXACT_BITS) / self.step
        if most < 2 * lot * self.sensitivity / self.step + self.most:
            raise ParameterError(
                f"dp-noise: sums are rounded to {fine:.3g}, and {lot} rows with noise need more of such steps than "
                "are added exactly; set a higher [secure-aggregation] limit, or a smaller dp-clip"
            )
        return most - self.most

    def noised(self, total: NDArray[np.float64], most: float, drawn: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return a sum on the lattice with noise, as real numbers. most: as of `check`. drawn: the noise."""
        if not self.deviation:
            return total
        steps = np.clip(np.rint(total.reshape(-1) / self.step), -most, most).astype(np.int64)
        noised: NDArray[np.float64] = np.multiply(steps + drawn.reshape(-1), self.step)
        return noised.reshape(total.shape)

    def range(self, limit: float, most_weight: int) -> float:
        """Return the limit of the 64-bit ring's entries under which `check` passes: at least `limit`.

        A ring of 32 bits has no surplus steps, and keeps its limit.

        Args:
            most_weight: Of all silos' lots.
        """
        if not self.deviation:
            return limit
        noise = self.most * self.step / most_weight
        return max(limit, math.ldexp(2 * self.sensitivity + noise, 64 - EXACT_BITS))

    def facts(self) -> dict[str, float | str]:
        """Return the rounding of sums, and how far one row moves them, for ``result.json``."""
        return {"lattice_step": self.step, "sensitivity": self.sensitivity}
