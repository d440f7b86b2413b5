"""The sizes behind the next key's offset and the ring's steps, and how little one silo can change them.

Under cross-entropy each silo sends alpha and its outputs in the clear, and all silos' next offset and ring step follow
from their sizes. One silo that sends alpha = 1e6 would coarsen all steps by as much. So each size is the median over
silos of their rms. With an even number of silos the previous round's size counts as one more, so that of two silos
neither decides. Fewer than half of the silos cannot move the median out of the others' range.

Under the squared error the secure sum gives the size of alpha, and there one silo can set any value. In both cases a
size is clamped to 1/16 to 16 times its running median (`moretta.protocols.common.clipping.RunningMedian`). alpha is the
sum of s_j h_j, with scales s_j from 1/2 to 2 drawn anew each round. If h has one sign, as after ReLU, the key alone
can change alpha by a factor of 4 between rounds. Another factor of 4 is left for the batch and the step.

If a silo's own size is above 2^10 times the median, or positive and below 2^-20 times it, the silo is named and misses
the round. The lower bound is wider because a small size harms nobody, and an honest alpha can be small by chance. It is
a sum of terms of either sign; for a batch of one row it is below 2^-20 of its rms once in a million rows. Alpha is 0
for a batch whose ReLUs are all 0. The median omits that 0, which shows no size.

Behind a normalisation with tiny weights the head's inputs h add up to 0 except for rounding. An offset in proportion to
1 / alpha would then have no bound. So on synthetic inputs alpha counts as at least a thousandth of sqrt(H) rms(h), its
size for H inputs of either sign (`terms.least_alpha`).
"""

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass

import numpy as np

from moretta.contract.messages import Array
from moretta.contract.roles import Missing, Reason
from moretta.protocols.common.clipping import RunningMedian
from moretta.protocols.pbpfl.softmax import TrueSoftmax

APART = 16.0  # times the running median, up or down
MOST, LEAST = 2.0**10, 2.0**-20  # times the median over silos


@dataclass(frozen=True)
class Sizes:
    """The rms of alpha, and of the true outputs (or of the targets), from which the next key's offset follows."""

    alpha: float
    outputs: float


def sizes_of(batch: TrueSoftmax) -> Sizes:
    """Return the rms over one silo's rows of alpha, and of the true outputs about each row's mean."""
    return Sizes(rms(batch.alpha), rms(batch.y - batch.y.mean(axis=1, keepdims=True)))


def rms(values: Array) -> float:
    """Return the root of the mean square, in float64."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def agreed(reported: Mapping[str, Sizes], last: Sizes) -> Sizes:
    """Return the median of each size over silos; 0 if all are 0. last: the sizes of the previous round."""
    medians = list[float]()
    for column, before in zip(zip(*map(astuple, reported.values()), strict=True), astuple(last), strict=True):
        positive = [value for value in column if value > 0]
        odd = positive if len(positive) % 2 else [*positive, before]
        medians.append(float(np.median(odd)) if positive else 0.0)
    return Sizes(*medians)


def outliers(reported: Mapping[str, Sizes], median: Sizes) -> dict[str, Missing]:
    """Return the silos with a size out of proportion to the median."""
    refused = dict[str, Missing]()
    for silo, sizes in reported.items():
        for what, value, middle in zip(("alpha", "outputs"), astuple(sizes), astuple(median), strict=True):
            if value > 0 and middle > 0 and not LEAST * middle <= value <= MOST * middle:
                detail = f"its {what} have rms {value:.6g}, and the median over silos is {middle:.6g}; it is left out"
                refused.setdefault(silo, Missing(Reason.MALFORMED, detail))
    return refused


def within(measured: Sizes, before: Mapping[str, RunningMedian]) -> Sizes:
    """Return a round's sizes within bounds, and record them. A size of 0 becomes the running median, or 1 at first."""
    return Sizes(_within(before["alpha"], measured.alpha), _within(before["outputs"], measured.outputs))


def _within(before: RunningMedian, value: float) -> float:
    middle = before.note(value)
    if math.isinf(middle):
        return value or 1.0
    return min(max(value, middle / APART), middle * APART) if value > 0 else middle
