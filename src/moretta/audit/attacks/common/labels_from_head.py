"""The number of rows of each class in a batch, from the gradient of the head.

`evidence.heads` derives it: background rows give the model's outputs for such rows, and the difference of the head's
gradient from that gives the counts. Under a secure sum they are counts of all its batches together. Under PBPFL the
server's key gives it the true gradient of an upload, as FedSGD does.

Chance is the score of the background's shares of classes without a gradient: as counts, or averaged over as many rows
drawn by them, whichever is more. Batches that share more than half of their rows have nearly the same counts, and are
one unit of the interval.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, no_training, rounds_of
from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.exposure import counted, exposure, fitting, gather_rounds, read, why_not
from moretta.audit.evidence.heads import counts_from_head, whole_numbers
from moretta.audit.evidence.intervals import Floats, of_mean, units
from moretta.audit.evidence.network import head_inputs
from moretta.audit.evidence.truth import Truth
from moretta.audit.evidence.uploads import first_rounds, sum_of
from moretta.contract.messages import Array
from moretta.errors import ParameterError
from moretta.protocols.common.targets import classes_of

ROUNDS = 10  # only the first ones
SAME = 0.5  # of two batches' rows; above it their scores are the same


def fits(run: PublicRun) -> str:
    """Return why the attack cannot be tried; empty if it can."""
    if run.task != "classification":
        return "labels are numbers, not classes"
    if not run.head:
        return "the model has no linear layer with an output each"
    if run.setting("class-weights"):
        return "class weights make the rows of a batch count differently"
    if run.setting("dp-noise"):
        return "silos draw their batches in secret and add noise, so there are no known counts to score with"
    return why_not(run) or no_training(run)


def gather(truth: Truth) -> Given:
    """Return the gradients of the first rounds for the server, and background rows."""
    rounds = first_rounds(truth, ROUNDS)
    view = f"{rounds_of(len(rounds))} of the server's messages"
    return gather_rounds(truth, rounds, {"rounds": np.array(list(rounds))}, view)


def attack(case: Case) -> Claim:
    """Claim the counts of labels in uploads, and those that a masked upload's own words would give.

    Returns:
        ``counts``, [rounds, uploads, classes], and ``present``, [rounds, silos]: whether a silo's upload counted. Under
            masks, unless the server's own secret recovers gradients, also ``masked``, [rounds, classes], and
            ``masked_of``, the place of the silo of that upload.
    """
    claims = [_of_round(case, number) for number in case.arrays["rounds"].tolist()]
    return {"rounds": case.arrays["rounds"]} | {n: np.array([claim[n] for claim in claims]) for n in claims[0]}


def _of_round(case: Case, number: int) -> Mapping[str, Array]:
    run, silos = case.run, counted(case, number)
    present = np.array([silo in silos for silo in run.silos])
    if not run.masked:
        none = np.zeros(max(run.outputs, 2), dtype=np.int64)  # of a silo whose upload did not count
        each = [_counts(case, number, silo) if silo in silos else none for silo in run.silos]
        return {"counts": np.array(each), "present": present}
    claim = {"counts": _counts(case, number)[None], "present": present}
    if exposure(run).recovered:
        return claim
    masked = {"masked": _counts(case, number, silos[0]), "masked_of": np.array(run.silos.index(silos[0]))}
    return claim | masked


def _counts(case: Case, number: int, silo: str = "") -> NDArray[np.int64]:
    parameters, gradient, rows = read(case, number, silo)
    if (case.run.head_bias or case.run.head) not in gradient:
        raise ParameterError("the gradient of the model's last layer is not among those that silos upload")
    h, outputs = head_inputs(case.model(), case.run, parameters, case.arrays["x"])
    return counts_from_head(case.run, gradient, h, outputs, classes_of(case.arrays["y"]), rows)


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Return 1 - the total variation distance of the counts, mean over units, beside that of guesses."""
    run, rounds = truth.run, claim["rounds"].tolist()
    count = max(run.outputs, 2)
    usual = np.bincount(classes_of(truth.background.y), minlength=count).astype(float)
    whos = [list(run.silos)] if run.masked else [[silo] for silo in run.silos]
    present = [{silo for silo, there in zip(run.silos, flags, strict=True) if there} for flags in claim["present"]]
    got, means, often = [], [], []
    for place, silos in enumerate(whos):
        scores, batches, shares = [], [], []
        for at, number in enumerate(rounds):
            if counted := [silo for silo in silos if silo in present[at]]:
                true = _true_counts(truth, counted, number, count)
                scores.append(_scores(claim["counts"][at, place], true, usual))
                shares.append(true / true.sum())
                batches.append({(silo, row) for silo in counted for row in truth.batch(silo, number).tolist()})
        if scores:
            unit, values = units(batches, SAME), np.array(scores)
            means += [values[unit == group].mean(axis=0) for group in np.unique(unit)]
            often += [np.array(shares)[unit == group].mean(axis=0) for group in np.unique(unit)]
            got += scores
    masked = []
    for at, number in enumerate(rounds if "masked" in claim else []):
        true = _true_counts(truth, [run.silos[claim["masked_of"][at]]], number, count)
        masked.append(_scores(claim["masked"][at], true, usual))
    constant = float(np.mean(often, axis=0).max())  # always naming a class gets its share right
    return _finding(summed(run, claim["present"]), np.array(got), np.array(means), np.array(masked), constant)


def summed(run: PublicRun, present: Array) -> str:
    """Return the source of counts, in words. present: [rounds, silos], whose uploads counted."""
    if not run.masked:
        return "each upload"
    counts = present.sum(axis=1)
    return sum_of(int(counts.min()), int(counts.max()))


def _true_counts(truth: Truth, silos: list[str], number: int, count: int) -> NDArray[np.int64]:
    labels = [classes_of(truth.rows(silo).of(truth.batch(silo, number)).y) for silo in silos]
    return np.bincount(np.concatenate(labels), minlength=count)


def _shared(claimed: Array, true: Array) -> float:
    """Return 1 - the total variation distance of two counts of the same sum."""
    return 1.0 - 0.5 * float(np.abs(claimed / claimed.sum() - true / true.sum()).sum())


def _scores(claimed: Array, true: Array, usual: Floats) -> tuple[float, float, float]:
    """Return the scores of a claim, and of guesses by the usual counts: fixed, and drawn, the mean over draws.

    Of n rows drawn X are of a class of share p: E|X - t| = n p - t + 2 (t P(X <= t) - n p P(X' < t)), X' of n - 1.
    """
    from scipy import stats

    rows, shares = int(true.sum()), usual / usual.sum()
    mean, most, fewer = rows * shares, stats.binom.cdf(true, rows, shares), stats.binom.cdf(true - 1, rows - 1, shares)
    misses = mean - true + 2 * (true * most - mean * fewer)
    return _shared(claimed, true), _shared(whole_numbers(usual, rows), true), 1.0 - 0.5 * float(misses.sum()) / rows


def _against_guess(scores: Floats) -> tuple[Floats, Floats]:
    """Return the claim's scores, and the better of the guesses'. scores: [.., 3] of `_scores`."""
    return scores[:, 0], scores[:, 1 + int(scores[:, 1:].mean(axis=0).argmax())]


def _finding(of: str, scores: Floats, means: Floats, masked: Floats, constant: float) -> AttackResult:
    """Return the finding. scores, masked: of each upload; means: of each unit (`_scores`)."""
    got, guess = _against_guess(means)
    chance = float(guess.mean())
    low, high = of_mean(got - guess)  # the same batches: their luck is in both
    sentence = (
        f"From {of} the server counts the rows of each class in a batch, {100 * got.mean():.1f} % of them correctly"
    )
    figures = {"exact": float(np.mean(scores[:, 0] > 1.0 - 1e-12)), "uploads": float(len(scores))}
    figures["units"] = float(len(means))
    if masked.size:
        right, alone = (float(shares.mean()) for shares in _against_guess(masked))
        sentence += f". From one silo's masked upload it counts {100 * right:.1f} % correctly, "
        sentence += f"where a guess has {100 * alone:.1f} %"
        figures |= {"from_masked_words": right, "chance_of_masked_words": alone}
    return AttackResult(
        measure="rows whose class is counted correctly, mean over batches",
        score=float(got.mean()),
        chance=chance,
        constant=constant,
        interval=(max(0.0, chance + low), min(1.0, chance + high)),
        sentence=sentence,
        figures=figures,
    )


ATTACK = Attack(
    name="labels-from-head",
    title="counts how many training rows have each label",
    severity="labels",
    role="server",
    source="Zhao et al., iDLG, arXiv:2001.02610 (2020), with counts for batches",
    protocols=fitting("labels-from-head"),
    fits=fits,
    given=gather,
    attack=attack,
    score=score,
)
