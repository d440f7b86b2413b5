"""A participant of CGD takes its own part off the sum: of two, what is left is the other's gradient.

Derivation: all step by G / N = sum_l n_l g_l / sum_l n_l, so with D(k) - D(k+1) = alpha_k G / N a participant i has
N (D(k) - D(k+1)) / alpha_k - n_i g_i = sum of n_l g_l over the others: with two participants the other's, exactly, in
each round. With three it is a sum of two, which is taken here for that of one of them and misses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, rounds_of
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.intervals import kept, of_errors, recovered, relative_error, to_error
from moretta.audit.evidence.public_run import PublicRun
from moretta.errors import ParameterError

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import Truth

ROUNDS = 10  # the first so many


def fits(run: PublicRun) -> str:
    """Say why not."""
    if len(run.silos) < 2:
        return "there is one participant, and nobody else"
    return "" if run.recorded else "no round of training was recorded"


def given(truth: Truth) -> Given:
    """Give the first participant the steps of its own D and its own gradients, flat."""
    from moretta.audit.attacks.cgd import confined
    from moretta.audit.evidence.network import flat

    confined.check_whole(truth)
    silo = truth.run.silos[0]
    rounds = [number for number in truth.recorded if _whole_sum(truth, number)][:ROUNDS]
    if not rounds:
        raise ParameterError("in no recorded round were all participants in the sum")
    steps = [flat(confined.stepped(truth, silo, number)) for number in rounds]
    own = [confined.local(truth, silo, number) for number in rounds]
    totals = [sum(len(truth.batch(name, number)) for name in truth.run.silos) for number in rounds]
    return Given(
        views={silo: ()},
        arrays={
            "rounds": np.array(rounds),
            "means": np.array(steps),
            "own": np.array([one.rows * flat(one.gradients) for one in own]),
            "totals": np.array(totals, dtype=np.float64),
        },
        view=f"none but what {silo} holds itself",
        knowledge=f"D before and after {rounds_of(len(rounds))}, the gradients of {silo}, and how many rows a sum "
        "is of",
    )


def _whole_sum(truth: Truth, number: int) -> bool:
    from moretta.audit.attacks.cgd import confined

    silo = truth.run.silos[0]
    return set(confined.summed_silos(truth, silo, number)) == set(truth.run.silos)


def attack(case: Case) -> Claim:
    """Claim another's n_l g_l of each round, [rounds, parameters]."""
    given = case.arrays
    return {"rounds": given["rounds"], "other": given["totals"][:, None] * given["means"] - given["own"]}


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the true n_l g_l of the participant with the most rows, beside an equal share of the sum."""
    from moretta.audit.attacks.cgd import confined
    from moretta.audit.evidence.network import flat

    silo, *others = truth.run.silos
    other = max(others, key=lambda name: truth.run.rows[name])
    errors, guesses = [], []
    for number, found in zip(claim["rounds"].tolist(), claim["other"], strict=True):
        local = confined.local(truth, other, number)
        true, mean = local.rows * flat(local.gradients), flat(confined.stepped(truth, silo, number))
        errors.append(relative_error(found, true))
        guesses.append(relative_error(local.rows * mean, true))
    error, guess = float(np.median(errors)), float(np.median(guesses))
    return AttackResult(
        measure="1 - relative error of another's gradient, median over rounds",
        score=float(recovered(error)),
        chance=float(recovered(guess)),
        interval=kept(of_errors(np.array(errors), np.array(guesses))),
        sentence=f"A participant that takes its own part off the sum of {len(others) + 1} has another's gradient "
        f"{to_error(error)}, where the mean of all is off by {guess:.1e}",
        figures={"relative_error": error, "mean_of_all": guess, "rounds": float(len(errors))},
    )


ATTACK = Attack(
    name="two-party-exposure",
    title="works out the other participant's update by taking off its own",
    severity="protocol",
    role="silo",
    source="a sum of two less one's own part; docs/cgd.md",
    protocols=frozenset({"cgd"}),
    fits=fits,
    given=given,
    attack=attack,
    score=score,
)
