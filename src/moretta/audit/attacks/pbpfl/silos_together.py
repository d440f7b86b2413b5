"""All silos of PBPFL but one put their views and rows together, to fit the head's offset.

In a round all silos see the same W^, so their rows are more equations in the same m unknowns, and the covariance of
what the fit leaves is over more rows (`gamma_least_squares`). Two silos do not expose each other in this way, as
neither sees an upload or a sum. That needs the server (`moretta.audit.attacks.common.server_and_silos`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moretta.audit.attacks.pbpfl import gamma_least_squares
from moretta.audit.attacks.pbpfl.gamma_least_squares import ROUNDS, ROWS, SeenHead
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, rounds_of
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.heads import as_outputs
from moretta.audit.evidence.public_run import PublicRun
from moretta.errors import ParameterError

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import Truth

TOGETHER = 2 * ROWS  # rows of all silos


def fits(run: PublicRun) -> str:
    """Say why not."""
    if run.loss != "mse":
        return "under cross-entropy a silo alone has the offset from the softmax of its batch"
    if len(run.silos) < 3:
        return "of two silos, all but one is one silo alone"
    return gamma_least_squares.fits(run)


def given(truth: Truth) -> Given:
    """Give all silos but the last their views and their own rows."""
    silos, rounds = truth.run.silos[:-1], truth.recorded[-ROUNDS:]
    arrays = {}
    for silo in silos:
        rows = truth.rows(silo).part(slice(max(1, TOGETHER // len(silos))))
        arrays[f"x/{silo}"] = rows.x
        arrays[f"y/{silo}"] = as_outputs(rows.y, truth.run.outputs)
    total = sum(len(array) for name, array in arrays.items() if name.startswith("x/"))
    return Given(
        views=dict.fromkeys(silos, rounds),
        arrays=arrays,
        view=f"{rounds_of(len(rounds))} of {len(silos)} silos, all but {truth.run.silos[-1]}",
        knowledge=f"{total} labelled rows of these silos, their own",
    )


def attack(case: Case) -> Claim:
    """Claim gamma of each round from all rows, and from the first silo's alone, [rounds, m]."""
    silos = list(case.views)
    each = [gamma_least_squares.seen(case, silo, case.arrays[f"x/{silo}"]) for silo in silos]
    labels = [np.asarray(case.arrays[f"y/{silo}"]) for silo in silos]
    together = joined(each)
    return {
        "rounds": together.rounds,
        "gamma": gamma_least_squares.fit(together, np.concatenate(labels)),
        "alone/rounds": each[0].rounds,
        "alone/gamma": gamma_least_squares.fit(each[0], labels[0]),
    }


def joined(each: list[SeenHead]) -> SeenHead:
    """Return the rows of several silos as one's, in the rounds that all of them saw."""
    rounds = np.array(sorted(set.intersection(*(set(one.rounds.tolist()) for one in each))), dtype=np.int64)
    if not len(rounds):
        raise ParameterError("no recorded round was seen by all of these silos")
    at = [np.searchsorted(one.rounds, rounds) for one in each]
    pairs = list(zip(each, at, strict=True))
    return SeenHead(
        noisy=np.concatenate([one.noisy[places] for one, places in pairs], axis=1),
        alpha=np.concatenate([one.alpha[places] for one, places in pairs], axis=1),
        spread=each[0].spread[at[0]],
        rounds=rounds,
    )


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the keys."""
    alone = {name: claim[f"alone/{name}"] for name in ("rounds", "gamma")}
    error = float(np.median(gamma_least_squares.errors_of(alone, truth)))
    errors = gamma_least_squares.errors_of(claim, truth)
    who = f"{len(truth.run.silos) - 1} silos together work out"
    return gamma_least_squares.finding(errors, who, {"relative_error_alone": error})


ATTACK = Attack(
    name="silos-together",
    title="pools the rows of several silos to work out the secret offset of the last layer",
    severity="protocol",
    role="silos together",
    source="generalised least squares over the rows of all silos but one",
    protocols=frozenset({"pbpfl"}),
    fits=fits,
    given=given,
    attack=attack,
    score=score,
)
