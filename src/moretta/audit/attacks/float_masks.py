"""Which of two uploads is under a mask: the server's guess, for the run's masks and for masks of real numbers.

Silos of a round are taken in pairs. Of each pair the server is told both gradients, in the order of their hashes, and
not whose is whose; it takes each off either upload. What is left would be the mask. It guesses by two signs of a mask:

    support      a mask of known bounds has no entry outside of them
    statistics   the mask that was drawn is smaller than the mask plus a difference: the smaller sum of squares

Over a ring the mask is uniform whatever is under it, so both are as good as a coin. Masks of real numbers, as papers
draw them, are put on the same gradients here to compare: uniform in +-10, of which every entry that leaves the bounds
rules a gradient out, with chance 1 - prod_i (1 - |d_i| / 20) for gradients that differ by d; and Gaussian of deviation
1e6, whose sum over silos no longer has the gradients in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moretta.audit.attacks.common import server_and_silos
from moretta.audit.evidence.attack import Attack, Claim, Finding, Given, rounds_of
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.intervals import of_rate
from moretta.audit.evidence.uploads import NOISY, PREFIX, Uploads, first_rounds, of_round, rows_of, under, uploaded
from moretta.contract.messages import Array, Tensors
from moretta.secure_aggregation.encoding import MOST_WEIGHT
from moretta.secure_aggregation.keystream import digest_of
from moretta.secure_aggregation.ring import Ring

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import Truth

Matrix = NDArray[np.float64]
ROUNDS = 10  # the first so many
BOUND, DEVIATION = 10.0, 1e6  # of the masks of real numbers


def given(truth: Truth) -> Given:
    """Give the server its view, and by round and pair of silos both gradients in the order of their hashes."""
    run, games = truth.run, pairs(truth)
    arrays = {"games": np.array([(number, *map(run.silos.index, pair)) for number, pair in games])}
    for number, pair in games:
        for side, (_, own) in enumerate(in_order(truth, number, pair)):
            arrays |= {f"{number}/{'+'.join(pair)}/{side}/{name}": np.asarray(value) for name, value in own.items()}
    rounds = sorted({number for number, _ in games})
    views = tuple(number for number in run.recorded if number <= rounds[-1])
    known = "of pairs of uploads both gradients, not which is under which, and how many rows each batch has"
    return Given({"server": views}, arrays, f"{rounds_of(len(rounds))} of the server", known)


def pairs(truth: Truth) -> list[tuple[int, tuple[str, str]]]:
    """Return round and silos of each pair whose uploads counted; of an odd number each round leaves out another."""
    found = list[tuple[int, tuple[str, str]]]()
    for number, silos in first_rounds(truth, ROUNDS, least=2).items():
        first = number % len(silos)
        turned = silos[first:] + silos[:first]
        found += [(number, pair) for pair in zip(turned[::2], turned[1::2], strict=False)]
    return found


def in_order(truth: Truth, number: int, pair: tuple[str, str]) -> list[tuple[str, Tensors]]:
    """Return two silos with their gradients in the order of their hashes, which says nothing of whose they are."""
    return sorted(((silo, uploaded(truth, silo, number)) for silo in pair), key=lambda one: digest_of(one[1]))


def attack(case: Case) -> Claim:
    """Claim which gradient is under each tensor of both uploads of each pair, [pairs, 2, tensors].

    Beside it the gradients' own guesses under masks of real numbers.
    """
    run = case.run
    prefix = NOISY if run.protocol == "pbpfl" else PREFIX
    ring, uniform, gaussian, lost = [], [], [], []
    generator = np.random.Generator(np.random.PCG64(0))
    for number, *places in case.arrays["games"].tolist():
        held, pair = of_round(case, number), [run.silos[place] for place in places]
        sides = [under(case.arrays, f"{number}/{'+'.join(pair)}/{side}/") for side in (0, 1)]
        ring.append([[_under_ring(held, s, prefix + n, [one[n] for one in sides]) for n in sides[0]] for s in pair])
        uniform.append(_under_floats(sides, 0, generator))
        gaussian.append(_under_floats(sides, DEVIATION, generator))
        lost.append(_lost_in_sum(sides, generator))
    return {
        "ring": np.array(ring),
        "uniform": np.array(uniform),
        "gaussian": np.array(gaussian),
        "gaussian_sum": np.array(lost),
    }


def _under_ring(held: Uploads, silo: str, name: str, sides: list[Array]) -> int:
    """Return the gradient that leaves the smaller words."""
    ring, words = Ring(held.run.ring_bits or 64), held.words(silo)[name]
    most, rows, left = held.encoding[MOST_WEIGHT], rows_of(held.run, silo, held.stamp.round), []
    for side in sides:
        plain = ring.encode(name, side, rows, held.encoding[name], most, len(held.names))
        signed = (words - plain).view(f"int{ring.bits}").astype(np.float64)
        left.append(float(np.square(np.ldexp(signed, 1 - ring.bits)).sum()))
    return int(left[1] < left[0])


def _under_floats(sides: list[dict[str, Array]], deviation: float, generator: np.random.Generator) -> Matrix:
    """Return whether the right one of two is told with each of them uploaded, [2]; a coin's 1/2 where neither is.

    deviation: of Gaussian masks, 0 for uniform ones in +-BOUND.
    """
    flat = [np.concatenate([one[name].ravel() for name in sorted(one)]).astype(np.float64) for one in sides]
    told = []
    for right in (0, 1):
        size = flat[right].size
        mask = deviation * generator.standard_normal(size) if deviation else generator.uniform(-BOUND, BOUND, size)
        left = [flat[right] + mask - one for one in flat]
        possible = [deviation > 0 or float(np.abs(one).max()) <= BOUND * (1 + 1e-9) for one in left]
        if possible[0] != possible[1]:
            told.append(float(possible[right]))
        elif deviation:
            told.append(float(np.square(left[right]).sum() < np.square(left[1 - right]).sum()))
        else:
            told.append(0.5)  # inside the bounds a uniform mask is as likely one as another
    return np.array(told)


def _lost_in_sum(own: list[dict[str, Array]], generator: np.random.Generator) -> float:
    """Return the relative error of a float32 sum of uploads whose Gaussian masks cancel."""
    flat = [np.concatenate([one[name].ravel() for name in sorted(one)]).astype(np.float32) for one in own]
    masks = [(DEVIATION * generator.standard_normal(flat[0].size)).astype(np.float32) for _ in flat[1:]]
    masks.append(-np.asarray(np.sum(masks, axis=0, dtype=np.float32)))
    total = np.zeros_like(flat[0])
    for one, mask in zip(flat, masks, strict=True):
        total = total + (one + mask)
    true = np.sum(flat, axis=0, dtype=np.float64)
    return float(np.linalg.norm(total - true) / max(float(np.linalg.norm(true)), 1e-300))


def score(claim: Claim, truth: Truth) -> Finding:
    """Return how often the guess is right, by tensor, beside a coin's half."""
    orders = [([silo for silo, _ in in_order(truth, *game)], game[1]) for game in pairs(truth)]
    true = np.array([[order.index(silo) for silo in pair] for order, pair in orders])
    hits, tries = int(np.sum(claim["ring"] == true[..., None])), int(claim["ring"].size)
    rate = hits / max(tries, 1)
    uniform, gaussian = float(claim["uniform"].mean()), float(claim["gaussian"].mean())
    lost = float(np.median(claim["gaussian_sum"]))
    sentence = f"Of two gradients the server names the one under a masked upload in {rate:.1%} of {tries} tensors"
    sentence += f"; under masks of real numbers in +-{BOUND:.0f} it would be {uniform:.1%} of uploads"
    return Finding(
        measure="gradients named right",
        score=rate,
        chance=0.5,
        interval=of_rate(hits, tries),
        sentence=sentence,
        figures={
            "tensors": float(tries),
            "under_uniform_masks": uniform,
            "under_gaussian_masks": gaussian,
            "error_of_a_sum_under_gaussian_masks": lost,
        },
    )


ATTACK = Attack(
    name="float-masks",
    role="server",
    source="support and variance of masks of real numbers, against Lemma 8 of Feng et al.",
    protocols=frozenset({"fedsgd", "pbpfl"}),
    fits=server_and_silos.fits,
    given=given,
    attack=attack,
    score=score,
)
