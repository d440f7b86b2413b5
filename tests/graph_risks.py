"""The worth of a plan of `moretta.secure_aggregation.graph`: bounds of its chances, and the table in the docs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from moretta.secure_aggregation.graph import (
    CORRUPT_RATE,
    DROPOUT_RATE,
    Plan,
    _members,
    _part,
    _split,
    plan,
    tail,
)


@dataclass(frozen=True)
class Risks:
    """Upper bounds, from 0.0 to 1.0, of the three chances in the module's docstring."""

    both: float
    split: float
    retry: float


def risks(silos: int, plan: Plan, corrupt_rate: float = CORRUPT_RATE, dropout_rate: float = DROPOUT_RATE) -> Risks:
    """Return a plan's risks, exact sums of the bounds above. Rates and errors as in `plan`."""
    corrupt, dropped = _part(silos, corrupt_rate, "corrupt"), _part(silos, dropout_rate, "dropout")
    members, t = _members(silos, plan.degree), plan.threshold
    both = silos * tail(silos, corrupt, members, 2 * t - members)
    retry = silos * tail(silos, dropped, members, members - t + 1)
    split = _split(silos, corrupt, plan.degree, t) if plan.degree else Fraction(0)
    return Risks(*(float(min(bound, Fraction(1))) for bound in (both, split, retry)))


def table(
    silos: Sequence[int] = (51, 100, 200, 500, 1000, 10_000),
    rates: Sequence[tuple[float, float]] = ((0.05, 0.05), (0.1, 0.1), (0.2, 0.1), (0.1, 0.2)),
) -> list[tuple[int, float, float, int, int]]:
    """Return rows of silos, corruption rate, dropout rate, degree (n - 1 if complete) and threshold, for the docs."""
    plans = [(n, corrupt, dropout, plan(n, corrupt, dropout)) for corrupt, dropout in rates for n in silos]
    return [(n, corrupt, dropout, _members(n, made.degree) - 1, made.threshold) for n, corrupt, dropout, made in plans]
