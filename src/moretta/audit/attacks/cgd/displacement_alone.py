"""A participant takes CGD's displacement D for a model of its own.

Derivation: w_l(k) = w_l(1) + D(k) with w_l(1) = c + delta_l Rand_l about a public point c (0, or the model that all
began with). A participant holds D, and c + D is the model of a participant whose start is c itself. Confined starts are
noise to the models that have them, and c + D has none: trained long enough, it predicts as well as they do, and for
larger delta better than any (docs/cgd.md). Confinement hides starts; whoever has D may have a trained model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, always
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.intervals import of_mean, of_rate

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import Truth

NO_FLOOR = 1e300  # R^2 has none


def given(truth: Truth) -> Given:
    """Give the first participant its own D after the last recorded round, and the public point."""
    from moretta.audit.attacks.cgd import confined

    confined.check_whole(truth)
    silo, number = truth.run.silos[0], confined.after_last(truth)
    moved = confined.displacement(truth, silo, number)
    center = confined.center(truth, silo, number)
    return Given(
        views={silo: ()},
        arrays={f"center/{name}": value for name, value in center.items()}
        | {f"moved/{name}": value for name, value in moved.items()},
        view=f"none but what {silo} holds itself",
        knowledge=f"D after round {number - 1}, which {silo} has stepped by, and the point that starts lie around",
    )


def attack(case: Case) -> Claim:
    """Claim c + D, by tensor."""
    model = {name.removeprefix("center/"): value for name, value in case.arrays.items() if name.startswith("center/")}
    for name in model:
        if (moved := case.arrays.get(f"moved/{name}")) is not None:
            model[name] = (model[name] + moved).astype(model[name].dtype)
    return model


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the confined models on rows that nobody trained on."""
    from moretta.audit.attacks.cgd import confined

    rows, number = truth.others, confined.after_last(truth)
    hits = confined.merits(truth, claim, rows)
    found, chance = float(hits.mean()), confined.guessing(truth, rows)
    theirs = np.array([
        float(confined.merits(truth, confined.participant(truth, name, number).model(), rows).mean())
        for name in truth.run.silos
    ])  # fmt: skip
    beaten = int((found > theirs).sum())
    tasks = truth.run.task == "classification"
    return AttackResult(
        measure="accuracy of D as a model" if tasks else "R^2 of D as a model",
        score=found,
        chance=chance,
        interval=of_rate(int(hits.sum()), len(hits)) if tasks else of_mean(hits, -NO_FLOOR, 1.0),
        sentence=f"A participant that takes D for a model has {confined.said(truth, found)} on {len(hits)} rows "
        f"that nobody trained on, where confined models have {confined.said(truth, float(theirs.mean()))} on average; "
        f"D does better than {beaten} of {len(theirs)}",
        figures={
            "confined_mean": float(theirs.mean()),
            "confined_worst": float(theirs.min()),
            "confined_best": float(theirs.max()),
            "confined_beaten": beaten / len(theirs),
        },
    )


ATTACK = Attack(
    name="displacement-alone",
    title="predicts with the shared sum of training steps alone",
    severity="protocol",
    role="silo",
    source="w_l(k) = w_l(1) + D(k) of Confined Gradient Descent, Algorithm 1; docs/cgd.md",
    protocols=frozenset({"cgd"}),
    fits=always,
    given=given,
    attack=attack,
    score=score,
)
