"""A silo reads PBPFL's scales in the low bits of one noisy model: W lies on a lattice, and R W is rounded once.

W^ = round(R W) is a float of few bits, and so is W if it was drawn or kept as one. Divided by the true R, W^ lies
within its rounding of a point of W's lattice; divided by another R, it lies anywhere between two points. If the
rounding is at most h and points are d apart, it is that near by chance in a share min(1, 2 h / d) of cases, so many
values distinguish the true factor from others. Three kinds of lattice are tried:

    fused, plain    what PyTorch's `uniform_` draws between -b and b in float32: 2 b k / 2^24 - b for whole k, rounded
                    once, or after the product too where a machine does not fuse it with the sum; for the bounds b that
                    its layers and initialisers have
    floats          float32 or float64 itself, for weights that were trained in it: it reveals as much as W^ has more
                    bits than R W would have had, somewhere between none and one a value

float32 weights, and initialisers with 24 random bits, leave few values for W; a wrong scale leaves W^ / R anywhere (as
above). No label is needed, and no second round. It is a game, not a search: each scale has 64 candidates within a
percent of each other, one of them true, so the sizes of weights reveal nothing and their low bits decide. A search
needs about 2^24 candidates for the first weight of a row, and fewer for each further one.

Scales are guessed from the input upwards, each with the guesses below it, as R = s_i / s_j has two. The order of
channels is not attacked; s_i is the scale of the channel in place i of the noisy model.

As a defence the server holds W in float64, sends R o W with fewer bits, and moves each tensor of the start by noise of
a lattice's step (`moretta.protocols.common.modules`). Not measured here: rows of two rounds can be matched by
direction, and give the ratio of their scales.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.audit.attacks.pbpfl.canonical import Named, plan_from, plan_of, structure, trunk
from moretta.audit.attacks.pbpfl.head_offset import key_of
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, no_head, no_training
from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.intervals import Floats, of_rate
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Tensors
from moretta.errors import ParameterError
from moretta.protocols.pbpfl import patterns
from moretta.protocols.pbpfl.messages import TrainOn
from moretta.protocols.pbpfl.scales import ScaleKey, ScalePlan

DRAWN = 24  # random bits of a float32
BELIEVED = 0.99  # that a value follows its lattice
SLACK = 2.0**-50  # relative, of R in float64


def bits_of(values: Floats) -> int:
    """Return the number of mantissa bits that suffices for all values, 53 at the most."""
    mantissa, _ = np.frexp(np.abs(values[values != 0]))
    joined = int(np.bitwise_or.reduce((mantissa * 2.0**53).astype(np.int64), initial=0))
    return 53 - ((joined & -joined).bit_length() - 1) if joined else 0


def half_widths(values: Floats, bits: int) -> Floats:
    """Return the largest rounding of each value to `bits` bits of mantissa."""
    return np.asarray(np.ldexp(1.0, np.frexp(values)[1] - bits - 1))


def evidence_of(w: Floats, h: Floats, shape: tuple[int, ...], bits: int) -> Floats:
    """Return the log likelihood ratio of values on a lattice or anywhere, by candidate: the best lattice's.

    Args:
        w, h: The values over candidate factors and their half-widths, [candidates, values].
        shape: The shape of the values' weight; for a bias, that of the weight beside it.
        bits: The mantissa bits of the message.
    """
    h = h + np.abs(w) * SLACK
    floats = [kept for kept in (np.float32, np.float64) if np.finfo(kept).nmant < bits]  # a message may reveal these
    evidence = [_likelier(np.abs(w - w.astype(kept)), h, np.spacing(np.abs(w).astype(kept))) for kept in floats]
    for bound in _bounds(shape):
        step = 2.0 * bound / 2.0**DRAWN
        evidence += [_likelier(away, h, step) for away in _from_drawn(w, bound, step)]
    return np.asarray(np.max(evidence, axis=0))


def _from_drawn(w: Floats, bound: float, step: float) -> tuple[Floats, Floats]:
    """Return the distance of values from float32 draws, with the product fused and rounded separately."""
    fused, plain = np.full_like(w, np.inf), np.full_like(w, np.inf)
    nearest = np.rint((w + bound) / step)
    for shift in (-1, 0, 1):  # the rounding of a point may be nearer to its neighbour
        product = (nearest + shift) * step  # 24 bits times 24: exact in float64
        np.minimum(fused, np.abs(w - (product - bound).astype(np.float32)), out=fused)
        np.minimum(plain, np.abs(w - (product.astype(np.float32) - np.float32(bound))), out=plain)
    return fused, plain


def _bounds(shape: tuple[int, ...]) -> set[float]:
    """Return PyTorch's bounds for such a weight and its bias: its layers', He's and Glorot's."""
    fan_in, fan_out = math.prod(shape[1:]), shape[0] * math.prod(shape[2:])
    return {float(np.float32(1 / math.sqrt(n))) for n in (fan_in, fan_in / 6, (fan_in + fan_out) / 6)}


def _likelier(away: Floats, width: Floats, spacing: Any) -> Floats:
    chance = np.minimum(1.0, 2.0 * width / spacing)
    return np.asarray(np.log1p(BELIEVED * ((away <= width) / chance - 1.0)).sum(axis=1))


CANDIDATES = 64  # for each scale
WINDOW = 0.01  # of the logarithm of a scale, for its candidates
MOST_SCALES = 512  # only the first ones that are not signs
MOST_VALUES = 1024  # of each scale, only the first ones


def fits(run: PublicRun) -> str:
    """Return why the attack cannot be tried; empty if it can."""
    if run.setting("scales") == "powers-of-two":
        return "scales are powers of two, which leave all bits of a weight below the head as they are"
    return no_head(run) or no_training(run)


def true_scales(plan: ScalePlan, key: ScaleKey) -> Floats:
    """Return the scale of each place of the noisy model, float64[free]: R of them is R of the key, permuted.

    Raises:
        ParameterError: A scale has no place of its own below the head.
    """
    factors = patterns.factors(key.scales)
    starts = np.cumsum([0, *plan.blocks])
    moved = [start + order for start, order in zip(starts, key.permutations, strict=False)]
    orders = patterns.orders(np.concatenate([np.empty(0, dtype=np.int64), *moved]))
    placed = np.full(len(factors), np.nan)
    for pattern in plan.parameters.values():
        for places in pattern.follows:
            whole = np.broadcast_to(places, pattern.shape)
            placed[whole] = factors[pattern.permute(whole, orders)]
    scales = np.where(np.isnan(placed[: plan.free]), 1.0 / placed[plan.free : 2 * plan.free], placed[: plan.free])
    if not plan.positive or np.isnan(scales).any():
        raise ParameterError("nothing below the head is scaled")
    return np.abs(scales)  # no digit reveals a sign


def candidates(scales: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """Return the candidates for each scale, and which one is true.

    Returns:
        float64[scales, 64] and the index of the true one, int64[scales]. The others are drawn like it, uniform in the
            logarithm, in a window with the true one anywhere.
    """
    # The seed reveals the scales: an attacker cannot draw the same decoys.
    generator = np.random.Generator(np.random.PCG64(np.asarray(scales, dtype=np.float64).view(np.uint32).tolist()))
    low = np.log(scales) - WINDOW * generator.random(len(scales))
    offered = np.exp(low[:, None] + WINDOW * generator.random((len(scales), CANDIDATES)))
    true = generator.integers(0, CANDIDATES, len(scales))
    offered[np.arange(len(scales)), true] = scales
    return offered, true


def gather(truth: Truth) -> Given:
    """Return the first recorded noisy model for a silo, and candidates for each of its scales."""
    plan, silo, number = plan_of(truth), truth.run.silos[0], truth.recorded[0]
    offered, _ = candidates(true_scales(plan, key_of(truth, number).scales))
    return Given(
        views={silo: (number,)},
        arrays={"candidates": offered, **structure(plan)},
        view=f"round {number} of {silo}'s messages",
        knowledge=f"{CANDIDATES} candidates for each scale, within a percent of each other",
    )


def attack(case: Case) -> Claim:
    """Claim which candidate is the true one, by scale; -1 for scales without values below the head."""
    (silo,) = case.views
    asks = case.last_of_each_round(silo, TrainOn)
    if not asks:
        raise ParameterError(f"{silo} was sent no model in this round")
    plan = plan_from(case.arrays)
    noisy: Tensors = next(iter(asks.values())).parameters
    return {"guess": guessed(plan, trunk(plan, noisy), case.arrays["candidates"])}


def guessed(plan: ScalePlan, noisy: Named, offered: Floats) -> NDArray[np.int64]:
    """Return for each scale the candidate that makes values most likely to lie on a lattice, -1 without a guess.

    A scale is guessed after the scales beside it.

    Args:
        noisy: The noisy parameters below the head.
        offered: The candidates, [scales, 64].
    """
    free, seen = plan.free, _seen(plan, noisy)
    bits = max(bits_of(value) for value in noisy.values())
    guess, factors = np.full(free, -1), np.full(2 * free + 1, np.nan)
    signs = np.array(plan.signs, np.int64)
    factors[[*signs, *(signs + free), -1]] = 1.0  # lattices have as many points above 0 as below
    left = set(np.setdiff1d(np.arange(free), signs)[:MOST_SCALES].tolist())
    while left:
        counts = {scale: sum(int(values.known(factors).sum()) for values in seen.get(scale, ())) for scale in left}
        most = max(counts.values())
        if not most:
            break
        # The bias of a layer alone reveals little of its scale, so scales with the most usable values are first.
        turn = [scale for scale in sorted(left) if 2 * counts[scale] >= most]
        for scale in turn:
            evidence = [values.evidence(offered[scale], factors, bits) for values in seen[scale]]
            guess[scale] = np.sum(evidence, axis=0).argmax()
        for scale in turn:
            factors[scale] = offered[scale, guess[scale]]
            factors[scale + free] = 1.0 / factors[scale]
        left -= set(turn)
    return guess


@dataclass(frozen=True)
class _Values:
    """Noisy values of one tensor that follow one scale.

    power: 1 where they are multiplied by it, -1 where divided. beside: the place of their other factor. shape: of their
    weight, or the weight of their bias.
    """

    values: Floats
    power: Floats
    beside: NDArray[np.int64]
    shape: tuple[int, ...]

    def known(self, factors: Floats) -> NDArray[np.bool_]:
        """Return for which values the other factor is known. factors: NaN where not."""
        return np.isfinite(factors[self.beside])

    def evidence(self, offered: Floats, factors: Floats, bits: int) -> Floats:
        """Return the evidence for each candidate (`evidence_of`)."""
        known = self.known(factors)
        values = self.values[known][:MOST_VALUES]
        beside, power = factors[self.beside[known]][:MOST_VALUES], self.power[known][:MOST_VALUES]
        factor = beside * offered[:, None] ** power
        return evidence_of(values / factor, half_widths(values, bits) / factor, self.shape, bits)


def _seen(plan: ScalePlan, noisy: Named) -> dict[int, list[_Values]]:
    """Return the noisy values by scale; a value with two scales is listed under both."""
    free, seen = plan.free, dict[int, list[_Values]]()
    for name, value in noisy.items():
        terms = [np.broadcast_to(term % (2 * free + 1), value.shape).ravel() for term in plan.parameters[name].follows]
        weight = f"{name.removesuffix('bias')}weight"
        shape = noisy[weight].shape if value.ndim == 1 and weight in noisy else value.shape
        for turn, term in enumerate(terms):
            other = terms[1 - turn] if len(terms) == 2 else np.full(value.size, 2 * free)
            order = np.flatnonzero((term < 2 * free) & (value.ravel() != 0))
            order = order[np.argsort(term[order] % free, kind="stable")]
            scales, starts = np.unique(term[order] % free, return_index=True)
            for scale, at in zip(scales.tolist(), np.split(order, starts[1:]), strict=True):
                power = np.where(term[at] < free, 1.0, -1.0)
                seen.setdefault(scale, []).append(_Values(value.ravel()[at], power, other[at], shape))
    return seen


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Count the scales that were distinguished from their decoys."""
    number = truth.recorded[0]
    _, true = candidates(true_scales(plan_of(truth), key_of(truth, number).scales))
    tried = claim["guess"] >= 0
    if not tried.any():
        raise ParameterError("no scale has a value of its own below the head")
    hits, games = int((claim["guess"] == true)[tried].sum()), int(tried.sum())
    return AttackResult(
        measure=f"rate of scales distinguished from {CANDIDATES - 1} decoys by the low bits of one obfuscated model",
        score=hits / games,
        chance=1.0 / CANDIDATES,
        constant=1.0 / CANDIDATES,
        interval=of_rate(hits, games),
        sentence=f"A silo distinguishes {hits} of {games} scales of round {number} from {CANDIDATES - 1} decoys each, "
        "by the low bits of the obfuscated model",
        figures={"scales": float(games), "round": float(number)},
    )


ATTACK = Attack(
    name="scales-from-low-bits",
    title="works out the secret scales of the obfuscated model from its last digits",
    severity="protocol",
    role="silo",
    source="weights lie on a lattice of floats, of initialisers with 24 random bits; round(R o W) shows where",
    protocols=frozenset({"pbpfl"}),
    fits=fits,
    given=gather,
    attack=attack,
    score=score,
)
