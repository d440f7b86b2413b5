"""Membership inference by the server that silos train alone beside, from the model that each shows it at the end.

Without federation each silo steps on its own rows, and the server learns losses and, for the comparison, the final
models. A model that few rows made tells more of each of them than one that all silos made together: this is what
federation is compared with. The attack is that of `attacks.common.membership_inference`; shadow models train as
one silo does, on halves of the candidates and of the background rows, as the server has no rows of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moretta.audit.attacks.common.membership_inference import HELD, SEED, candidates, ratios, told_apart
from moretta.audit.evidence.attack import Attack, Claim, Finding, Given
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.public_run import Run

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import Truth


def fits(run: Run) -> str:
    """Say why not."""
    return "" if run.recorded else "no round of training was recorded"


def given(truth: Truth) -> Given:
    """Give the server the first silo's model, background rows, and candidates."""
    silo, known = truth.run.silos[0], truth.background
    x, y, _ = candidates(truth, silo)
    arrays = {f"{HELD}{name}": value for name, value in truth.final(f"models/{silo}.safetensors").items()}
    arrays |= {"x": x, "y": y, "own/x": x[:0], "own/y": y[:0], "known/x": known.x, "known/y": known.y}
    return Given(
        views={},
        arrays=arrays,
        view=f"the model that {silo} showed it at the end",
        knowledge=f"{len(known.x)} background rows, and {len(x)} rows to tell members among",
    )


def attack(case: Case) -> Claim:
    """Claim a score of each candidate by the model, and by its loss alone."""
    from moretta.audit.evidence import shadows

    begin = shadows.start_of(case.model(), SEED)
    held = {name.removeprefix(HELD): value for name, value in case.arrays.items() if name.startswith(HELD)}
    plan = shadows.plan_of(case.run, case.run.silos[0])
    return ratios(case, plan, begin, [{**begin, **held}], [])


def score(claim: Claim, truth: Truth) -> Finding:
    """Return the area under the ROC curve, and the hits at a rate of false alarms of 1 %."""
    silo = truth.run.silos[0]
    return told_apart(claim, candidates(truth, silo)[2], f"The server tells {silo}'s")


ATTACK = Attack(
    name="membership-of-local-models",
    role="server",
    source="LiRA: Carlini et al., S&P 2022, Algorithm 1",
    protocols=frozenset({"local"}),
    fits=fits,
    given=given,
    attack=attack,
    score=score,
)
