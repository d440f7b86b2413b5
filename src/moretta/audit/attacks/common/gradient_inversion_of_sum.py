"""The server looks for the rows of all silos' batches in the sum that a secure sum gives it.

Masks hide each upload and not the sum, which is the mean gradient of all silos' rows together: one batch, of more rows.
`moretta.audit.attacks.common.gradient_inversion` is the search and the score; which silo a row is of is not found. What
protects the rows is how many there are, not the masks: with few and small inputs beside many parameters there are more
equations than unknowns. Under PBPFL the sum is the one that the server's key recovers, at the true parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moretta.audit.attacks.common import gradient_inversion as one_silo
from moretta.audit.evidence.attack import Attack, Claim, Finding, Given
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.public_run import Run
from moretta.audit.evidence.uploads import of_round, rows_of, sum_of, survivors
from moretta.errors import ParameterError

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import Truth


def fits(run: Run) -> str:
    """Say why not."""
    if not run.masked:
        return "uploads are in the clear, and each is attacked by itself"
    return one_silo.unsuited(run)


def given(truth: Truth) -> Given:
    """Give the server its view of the first round whose sum can be searched, and background rows."""
    for number in truth.recorded:
        silos = survivors(truth, number)
        if silos and one_silo.suited(truth.run, silos, number):
            return one_silo.given_of(truth, number, silos, f"{sum_of(len(silos))} in round {number}")
    raise ParameterError(f"no sum of uploads of at most {one_silo.MOST_ROWS} rows was recorded")


def attack(case: Case) -> Claim:
    """Claim x [rows, ...] and y [rows, outputs] of all batches together, and how near their gradient comes.

    round, silos: of which it is, silos by number.
    """
    number = int(case.arrays["round"])
    if case.run.protocol == "pbpfl":
        rows = sum(rows_of(case.run, case.run.silos[at], number) for at in case.arrays["silos"])
        return one_silo.found_rows(case, *one_silo.recovered(case, number, "sum"), rows)
    held = of_round(case, number)
    total = held.total()
    return one_silo.found_rows(case, held.parameters, one_silo.sent(case.run, total.means), total.weight)


def score(claim: Claim, truth: Truth) -> Finding:
    """Compare with the rows of all silos that are in the sum."""
    return one_silo.compared(claim, truth, sum_of(len(claim["silos"])))


ATTACK = Attack(
    name="gradient-inversion-of-sum",
    role="server",
    source="Zhu et al., Deep Leakage from Gradients (NeurIPS 2019), of the summed gradient",
    protocols=frozenset({"fedsgd", "fedavg", "pbpfl"}),
    fits=fits,
    given=given,
    attack=attack,
    score=score,
)
