"""How much privacy DP-SGD's noise gives: epsilon from sigma and back, by Renyi differential privacy.

The mechanism, once a round: each example enters the lot with chance q, independently of the others (Poisson sampling);
the lot's gradients, each of norm at most C, are summed; noise N(0, sigma^2 C^2) is added. Its Renyi divergences are
those of the sampled Gaussian mechanism (Mironov, Talwar, Zhang 2019), they add up over releases, and the conversion to
(epsilon, delta) is that of Canonne, Kamath, Steinke (NeurIPS 2020), as Google's dp-accounting has them. A release is a
noised sum that may have been opened, so a round has one, or several where it was played again with other rows and
other noise (`moretta.protocols.common.releases`).

Where S silos share the noise, each adds N(0, sigma^2 C^2 / S), and S of them or more are in every sum that is opened.
An observer who does not know the noise of k of these faces N(0, sigma^2 C^2 k / S): k is S for the server by itself,
S - 1 for a silo, which knows its own, and less for those who collude. `Accountant.facts` states epsilon for some k.

Neighbouring data sets differ in one example that is added or removed, at one silo. q, the number of releases, sigma, C
and delta are public; by its q, so is the number of rows of the silo that has fewest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from moretta.errors import MissingExtra, ParameterError
from moretta.protocols.common.releases import Releases
from moretta.secure_aggregation.encoding import MOST_WEIGHT, check_fraction_bits

if TYPE_CHECKING:
    from types import ModuleType

# Orders of the divergences that are bounded: whole numbers, which have a closed form. Between them the library adds up
# series that need not converge; they would lower an epsilon of 8 by some 3 %, and one of 1 not at all.
ORDERS = (*range(2, 256), 512, 1024)
# Sums of normals of deviation s, each rounded to whole numbers, differ from a normal sum by about exp(-pi^2 s^2)
# (Kairouz, Liu, Steinke, ICML 2021, of discrete ones): with s = 4 by less than 1e-68.
LEAST_STEPS = 4
WITH_NOISE_OF = "epsilon_with_noise_of_"  # so many silos: the name of a fact


def epsilon(sigma: float, delta: float, q: float, rounds: int) -> float:
    """Return the epsilon of `rounds` rounds at this delta; infinity without noise.

    sigma: the noise multiplier, the noise's deviation over C. q: the chance of an example to be in a round's lot.
    Raises `moretta.errors.ParameterError` for impossible values, `moretta.errors.MissingExtra` without the extra [dp].
    """
    _check(delta, q, rounds)
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ParameterError(f"sigma = {sigma}: expected a noise multiplier of 0 or more")
    library = _dp_accounting()
    return float(_accountant(library).compose(_rounds_of(library, sigma, q, rounds)).get_epsilon(delta))


def noise_for(epsilon: float, delta: float, q: float, rounds: int) -> float:
    """Return the least noise multiplier, to 1e-6, at which so many rounds cost no more than this epsilon and delta.

    Raises as `moretta.protocols.common.accountant.epsilon`.
    """
    _check(delta, q, rounds)
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ParameterError(f"epsilon = {epsilon}: expected more than 0")
    library = _dp_accounting()
    return float(
        library.calibrate_dp_mechanism(
            lambda: _accountant(library), lambda sigma: _rounds_of(library, sigma, q, rounds), epsilon, delta
        )
    )


@dataclass(frozen=True)
class Privacy:
    """The settings of noise: the multiplier sigma, the largest norm C of what one example adds, and delta.

    sharers: S, the silos whose noise together is that of the mechanism; 1 where each silo adds all of it.
    """

    noise: float
    clip: float
    delta: float
    sharers: int = 1

    @property
    def share(self) -> float:
        """The deviation of what each silo adds: sigma C / sqrt(S)."""
        return self.noise * self.clip / math.sqrt(self.sharers)

    def check_steps(self, encoding: Mapping[str, int]) -> None:
        """Check that the ring is fine enough not to round a silo's share of the noise away.

        encoding: the fraction bits f by tensor, whose sum is rounded to 2^-f, and the most weight, which is passed
        over; empty where sums are in the clear. As all uploads are whole steps, round(a) + Z = round(a + Z): what is
        opened follows from one silo's noised sum a and the others' rounded ones Z. From `LEAST_STEPS` on Z is as smooth
        as noise that was never rounded; far below, it is nearly constant, and a silo has but its own share to hide in.
        Raises `moretta.errors.ParameterError`, saying what to change; `moretta.errors.PeerError` for fraction bits that
        no limit leads to.
        """
        share = self.share
        bits_of = {name: bits for name, bits in encoding.items() if name != MOST_WEIGHT}
        for name, bits in bits_of.items():
            check_fraction_bits(name, bits)
        step = max((math.ldexp(1.0, -bits) for bits in bits_of.values()), default=0.0)
        if share and share < LEAST_STEPS * step:
            raise ParameterError(
                f"dp-noise: a silo's share of the noise has the deviation {share:.3g}, and sums are rounded to "
                f"{step:.3g}; expected {LEAST_STEPS} such steps or more, as else the noise is rounded away: give "
                "ring-bits = 64 if they are 32, a lower [secure-aggregation] limit, fewer rows a round, or more "
                "dp-noise or dp-clip"
            )


@dataclass(frozen=True)
class Accountant:
    """States the privacy that a run gave, from public figures alone.

    rate: the largest q of any silo. left_out: where the silos' data was used beside the updates that epsilon is about.
    releases: the count of noised sums, which must be on disk before any message leaves.
    Raises `moretta.errors.MissingExtra` without the extra [dp], before a run and not at its end.
    """

    privacy: Privacy
    rate: float
    left_out: str = ""
    releases: Releases = field(default_factory=Releases, compare=False)

    def __post_init__(self) -> None:
        _dp_accounting()

    def facts(self, releases: int) -> dict[str, float | str]:
        """Return epsilon after so many releases, and what it is about, for ``result.json``.

        releases: noised sums that may have been opened (`moretta.protocols.common.releases`).

        epsilon: towards the server and whoever gets the model, to whom the noise of `noise_silos` silos in each sum is
        unknown. epsilon_to_silos: towards one other silo, which knows its own share. epsilon_with_noise_of_<k>: towards
        whoever can take off all but k silos' noise, as the server together with the other silos. "unbounded" is
        infinity.
        """
        sharers = self.privacy.sharers
        facts: dict[str, float | str] = {"noise_multiplier": self.privacy.noise, "delta": self.privacy.delta}
        facts |= {"sampling_rate": self.rate, "releases": float(releases), "noise_silos": float(sharers)}
        facts["epsilon"] = self._epsilon(sharers, releases)
        if sharers > 1:
            facts["epsilon_to_silos"] = self._epsilon(sharers - 1, releases)
        for left in sorted({sharers // 2, 1} - {0}, reverse=True):
            if left < sharers - 1:
                facts[f"{WITH_NOISE_OF}{left}"] = self._epsilon(left, releases)
        return facts | ({"epsilon_leaves_out": self.left_out} if self.left_out else {})

    def spent(self, releases: int) -> float | str:
        """Return the epsilon of `facts` alone, at little cost: what one release diverges by is worked out once."""
        if not releases:
            return 0.0
        library = _dp_accounting()
        found, _ = library.rdp.compute_epsilon(ORDERS, releases * self._divergences, self.privacy.delta)
        return float(found) if math.isfinite(found) else "unbounded"

    @cached_property
    def _divergences(self) -> NDArray[np.float64]:
        """What one release diverges by at each of `ORDERS` (Mironov, Talwar, Zhang 2019, section 3.3)."""
        sigma, q = self.privacy.noise, self.rate
        if not sigma:
            return np.full(len(ORDERS), math.inf)
        if q == 1:
            return np.array(ORDERS) / (2 * sigma**2)
        factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, ORDERS[-1] + 1)))])  # their logarithms
        found = []
        for order in ORDERS:
            k = np.arange(order + 1)
            ways = factorials[order] - factorials[k] - factorials[order - k]
            terms = ways + k * math.log(q) + (order - k) * math.log1p(-q) + (k * k - k) / (2 * sigma**2)
            found.append(np.logaddexp.reduce(terms) / (order - 1))
        return np.array(found)

    def _epsilon(self, silos: int, releases: int) -> float | str:
        """Return epsilon where the noise of so many silos is unknown: each has a variance of sigma^2 C^2 / S."""
        if not releases:
            return 0.0
        sigma = self.privacy.noise * math.sqrt(silos / self.privacy.sharers)
        found = epsilon(sigma, self.privacy.delta, self.rate, releases)
        return found if math.isfinite(found) else "unbounded"


def _accountant(library: ModuleType) -> Any:
    return library.rdp.RdpAccountant(ORDERS, library.NeighboringRelation.ADD_OR_REMOVE_ONE)


def _rounds_of(library: ModuleType, sigma: float, q: float, rounds: int) -> Any:
    one = library.PoissonSampledDpEvent(q, library.GaussianDpEvent(sigma))
    return library.SelfComposedDpEvent(one, rounds)


def _check(delta: float, q: float, rounds: int) -> None:
    for name, value, most in (("delta", delta, "less than 1"), ("q", q, "at most 1")):
        if not 0 < value <= 1 or (name == "delta" and value == 1):
            raise ParameterError(f"{name} = {value}: expected more than 0 and {most}")
    if rounds < 1:
        raise ParameterError(f"rounds = {rounds}: expected at least 1")


def _dp_accounting() -> ModuleType:
    try:
        import dp_accounting as library
    except ImportError as error:
        raise MissingExtra(f"stating epsilon needs {error.name}; run: pip install 'moretta[dp]'") from None
    return cast("ModuleType", library)
