"""How much privacy DP-SGD's noise gives: epsilon from sigma and back, by privacy-loss distributions.

In a round each example enters the lot with chance q, independently of the others (Poisson sampling). The lot's
gradients, each of norm at most C, are summed and rounded, and whole steps of noise are added
(`moretta.protocols.common.lattice`). Up to 1e-40 this is as private as the Gaussian mechanism of multiplier sigma
(`moretta.secure_aggregation.discrete_gaussian` has the proof, for any sampling). So its privacy-loss distribution is
that of the Poisson-sampled Gaussian mechanism (Koskela, Jalko, Honkela, AISTATS 2020; Zhu, Dong, Wang, AISTATS 2022:
one number in any dimension). Google's dp-accounting bounds it from above on a grid, by Doroshenko, Ghazi, Kamath,
Kumar, Manurangsi (PoPETs 2022), and composes it by convolution. Epsilons above 100 are Renyi bounds in whole orders
(Mironov, Talwar, Zhang 2019; Canonne, Kamath, Steinke, NeurIPS 2020), which are larger and cost nothing. A release is a
noised sum that may have been opened. A round has one release, or several if it was repeated with other rows or other
noise (`moretta.protocols.common.releases`).

A round has n silos, of which up to T may be lost and c collude with the server. In a sum over K of them the others'
noise has a variance of sigma^2 C^2 or more for every K (`moretta.secure_aggregation.removable_noise`). So the part of
each silo that stays has at least sigma^2 C^2 / (K - c). An observer who does not know the noise of k of them faces k /
(K - c) of it, at the least k / (n - c). A silo, which knows only its own noise, faces (K - 1) / (K - c). For c = 0 that
is least at K = n - T. `Accountant.facts` states epsilon for some of these.

Neighbouring data sets differ in one example, added or removed at one silo. Where the unit is a silo, they differ in all
that one silo uploads, which is present or counts as 0. It is then in every sum, so q is 1. Participation follows from a
public seed, so it does not lower epsilon. Public are q, the number of releases, sigma, C and delta; q reveals the
smallest silo's number of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Stamp
from moretta.contract.roles import Ask, Exchange
from moretta.errors import MissingExtra, ParameterError, RunFailed
from moretta.protocols.common.lattice import Lattice, Privacy
from moretta.protocols.common.releases import R, Releases, watched
from moretta.secure_aggregation.additive import AddedShares, SealedShares
from moretta.secure_aggregation.pairwise import MaskedUpload
from moretta.secure_aggregation.plain import PlainUpload
from moretta.secure_aggregation.unmasking import Confirmed, SelfMaskShares

if TYPE_CHECKING:
    from types import ModuleType

    from moretta.secure_aggregation.keyed_sums import Aggregator
    from moretta.secure_aggregation.settings import SecureAggregation
    from moretta.secure_aggregation.sums import Shapes, Sum, Wanted

# Orders of the bounded divergences: whole numbers, which have a closed form.
ORDERS = (*range(2, 256), 512, 1024)
MOST_EPSILON = 100.0  # above it no bound matters, and distributions get long
TOLERANCE = 1e-6  # of a noise multiplier in a search
MECHANISM = {"row": "discrete Gaussian, Poisson-sampled rows", "group": "discrete Gaussian, Poisson-sampled groups"}
MECHANISM |= {"silo": "discrete Gaussian, clipped updates"}
NEIGHBOURS = {
    "row": "one row of one silo, added or removed",
    "group": "all rows of one group of one silo, added or removed",
    "silo": "all that one silo uploads, there or counted as 0",
}
TRUST = "each silo adds its share of the noise and helps to open one sum of a take; the server is not trusted"
TRUST_ALONE = "each silo adds all of the noise to its own upload; neither the server nor other silos are trusted"
THEOREM = (
    "discrete Gaussian noise hides what the Gaussian mechanism hides (Canonne, Kamath, Steinke 2020; (C) of "
    "moretta.secure_aggregation.discrete_gaussian), composed by privacy-loss distributions (Doroshenko et al. 2022), "
    "above 100 by Renyi divergences (Mironov, Talwar, Zhang 2019)"
)
WITH_NOISE_OF = "epsilon_with_noise_of_"  # the number of silos follows; the name of a fact


@lru_cache(maxsize=4096)  # each silo of one process asks for the same value, and the server after each round
def epsilon(sigma: float, delta: float, q: float, rounds: int) -> float:
    """Return the epsilon of `rounds` rounds at this delta; infinity without noise.

    Args:
        sigma: The noise multiplier, the noise's deviation over C; 0 or more.
        delta: In (0, 1).
        q: The chance of an example to be in a round's lot, in (0, 1].

    Raises:
        ParameterError: An argument is out of its range.
        MissingExtra: The extra [dp] is not installed.
    """
    _check(delta, q, rounds)
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ParameterError(f"sigma = {sigma}: expected a noise multiplier of 0 or more")
    library = _dp_accounting()
    renyi, _ = library.rdp.compute_epsilon(ORDERS, rounds * _divergences(sigma, q), delta)
    if renyi > MOST_EPSILON:
        return float(renyi)
    return float(_losses(sigma, q).self_compose(rounds).get_epsilon_for_delta(delta))


def noise_for(epsilon: float, delta: float, q: float, rounds: int) -> float:
    """Return the least noise multiplier, to 1e-6, for this epsilon and delta. Raises as `epsilon`."""
    _check(delta, q, rounds)
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ParameterError(f"epsilon = {epsilon}: expected more than 0")
    least, most = 0.0, 1.0
    while _epsilon(most, delta, q, rounds) > epsilon:
        least, most = most, 2 * most
    while most - least > TOLERANCE:
        middle = (least + most) / 2
        least, most = (middle, most) if _epsilon(middle, delta, q, rounds) > epsilon else (least, middle)
    return most


_epsilon = epsilon  # `noise_for` has an argument of that name


def interval(sigma: float, q: float) -> float:
    """Return the grid's step: a tenth of a release's scale of loss, q / sigma, or coarser, for 10,000 steps at most."""
    far = (1 + 20 * sigma) / (2 * sigma**2)  # the loss without sampling, ten deviations out
    largest = far + math.log(q) if far > 30 else math.log1p(q * math.expm1(far))
    return math.ldexp(0.5, math.frexp(min(max(q / (10 * sigma), largest / 10_000), 0.01))[1])


@lru_cache(maxsize=64)
def _losses(sigma: float, q: float) -> Any:
    """Return the privacy-loss distribution of one release, for an example that is added or removed."""
    of_gaussian = _dp_accounting().pld.privacy_loss_distribution.from_gaussian_mechanism
    return of_gaussian(sigma, value_discretization_interval=interval(sigma, q), sampling_prob=q)


@lru_cache(maxsize=64)
def _divergences(sigma: float, q: float) -> NDArray[np.float64]:
    """Return the Renyi divergence of one release at each of `ORDERS` (Mironov, Talwar, Zhang 2019, section 3.3)."""
    if not sigma:
        return np.full(len(ORDERS), math.inf)
    if q == 1:
        return np.array(ORDERS) / (2 * sigma**2)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, ORDERS[-1] + 1)))])  # their logarithms
    divergences = []
    for order in ORDERS:
        k = np.arange(order + 1)
        ways = factorials[order] - factorials[k] - factorials[order - k]
        terms = ways + k * math.log(q) + (order - k) * math.log1p(-q) + (k * k - k) / (2 * sigma**2)
        divergences.append(np.logaddexp.reduce(terms) / (order - 1))
    return np.array(divergences)


@dataclass(frozen=True)
class Accountant:
    """States a run's privacy, from public figures alone.

    Args:
        rate: The largest q of any silo.
        left_out: Uses of silos' data that epsilon does not cover, in words.
        releases: The count of noised sums; it must be on disk before a message leaves.

    Raises:
        MissingExtra: The extra [dp] is not installed.
    """

    privacy: Privacy
    rate: float
    left_out: str = ""
    releases: Releases = field(default_factory=Releases, compare=False)

    def __post_init__(self) -> None:
        _dp_accounting()

    def facts(self, releases: int, shapes: Shapes | None = None) -> dict[str, float | str]:
        """Return epsilon after these releases, with its assumptions, for ``result.json``.

        Args:
            releases: Noised sums that may have been opened (`moretta.protocols.common.releases`).
            shapes: Of an upload, which determine its lattice; None omits it.

        Returns:
            `epsilon` is towards the server together with `colluding_silos` silos, and anyone who gets the model. They
            do not know the noise of `noise_silos` silos, less the lost ones. `epsilon_to_silos` is towards one other
            silo, which knows its own share. `epsilon_with_noise_of_<k>` is towards anyone who can remove all but k
            silos' noise, such as the server together with the other silos. "unbounded" is infinity.
        """
        sharers = self.privacy.sharers
        facts: dict[str, float | str] = {"noise_multiplier": self.privacy.noise, "delta": self.privacy.delta}
        if self.privacy.noise:
            unit = self.privacy.unit
            facts |= {"unit": unit, "mechanism": MECHANISM[unit], "neighbours": NEIGHBOURS[unit]}
            facts |= {"trust": TRUST if sharers > 1 else TRUST_ALONE, "theorem": THEOREM}
            facts |= self._lattice(shapes).facts() if shapes else {}
        facts |= {"sampling_rate": self.rate, "releases": float(releases), "noise_silos": float(sharers)}
        facts |= {"colluding_silos": float(self.privacy.colluding)} if self.privacy.colluding else {}
        facts["epsilon"] = self._epsilon(1, releases)
        if sharers > 1:
            left = sharers - self.privacy.losses  # silos in the smallest sum that do not collude
            known = 0 if self.privacy.colluding else 1
            facts["epsilon_to_silos"] = self._epsilon((left - known) / left, releases)
        for left in sorted({sharers // 2, 1} - {0}, reverse=True):
            if left < sharers - 1:
                facts[f"{WITH_NOISE_OF}{left}"] = self._epsilon(left / sharers, releases)
        return facts | ({"epsilon_leaves_out": self.left_out} if self.left_out else {})

    def want(self, aggregator: Aggregator, shapes: Shapes, secure: SecureAggregation, most_weight: int) -> Wanted:
        """Plan a sum whose ring adds whole steps of noise exactly.

        Raises:
            ParameterError: As `Lattice.check` and `Aggregator.want`.
            RunFailed: Further takes have spent the budget.
        """
        if not self.allows(self.releases.count + 1):
            raise RunFailed(
                f"dp-epsilon = {self.privacy.most:g} is spent by {self.releases.count} sums that may have been opened, "
                "and this take would pass it; resume the run, which then ends with the model of its last checkpoint"
            )
        lattice, limit = self._lattice(shapes), secure.largest
        if secure.ring_bits == 64:
            limit = lattice.range(limit, most_weight)
        request = aggregator.want(shapes, dict.fromkeys(shapes, limit), most_weight)
        lattice.check(request.fraction_bits, most_weight)
        return replace(request, noise=lattice.noise) if self.privacy.noise else request

    def counted(self, exchange: Exchange[R], now: Stamp, *of: int | str | bytes) -> Exchange[R]:
        """Run the exchange of a sum, and count its take before any request that opens it.

        Args:
            of: All that the uploads follow from, as the server knows it. The asked silos are added, unless each upload
                is seen alone: then the others do not matter.
        """
        if self.privacy.unit == "silo":  # a repeated ask may get another update, which has other noise
            of = (*of, self.releases.count)
        cohort = list[str]()

        def note(ask: Ask) -> None:
            nonlocal cohort
            if issubclass(ask.reply, MaskedUpload | SealedShares):
                cohort = sorted(ask.messages)
            elif issubclass(ask.reply, PlainUpload | Confirmed | SelfMaskShares | AddedShares):
                self.releases.add(now, *of, *cohort)

        return watched(exchange, note)

    def allows(self, releases: int) -> bool:
        """Return whether epsilon stays within its bound after these releases."""
        most, spent = self.privacy.most, None if self.privacy.most is None else self.spent(releases)
        return most is None or (isinstance(spent, float) and spent <= most)

    def _lattice(self, shapes: Shapes) -> Lattice:
        return Lattice.of(self.privacy, sum(map(math.prod, shapes.values())))

    def spent(self, releases: int) -> float | str:
        """Return the epsilon of `facts` alone."""
        return self._epsilon(1, releases)

    def _epsilon(self, part: float, releases: int) -> float | str:
        """Return epsilon if this part of the variance sigma^2 C^2 is unknown noise."""
        if not releases:
            return 0.0
        sigma = self.privacy.noise * math.sqrt(part)
        spent = epsilon(sigma, self.privacy.delta, self.rate, releases)
        return spent if math.isfinite(spent) else "unbounded"


def excess_of(total: Sum) -> dict[str, float]:
    """Return the surplus noise in a sum, in silos, for the history; empty without any."""
    return {"excess_noise_of": float(len(total.excess))} if total.excess else {}


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
