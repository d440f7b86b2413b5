"""A silo of PBPFL reads the head's offset off the softmax of its batch.

Derivation: with p of one row (`softmax_from_sum`), y_i - y_j = log p_i - log p_j. The silo sent z = y^ + a constant of
the row itself and knows alpha, and y^ = y + alpha r, so

    z_i - log p_i = alpha r_i + a constant of the row

gives r_i - r_j from any row with alpha other than 0; here all rows of a batch count, by alpha^2. As r = gamma_s r_a on
part s and r_a is public, a part of two or more outputs gives its gamma_s, and with it the constant: all of r where m
is below the number of outputs. With m = outputs the differences are known and the common part is not; gamma of least
norm is claimed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moretta.audit.attacks.pbpfl import gamma_least_squares, noisy_outputs, softmax_from_sum
from moretta.audit.attacks.pbpfl.keys import key_of
from moretta.audit.evidence.attack import Attack, AttackResult, Claim
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.intervals import relative_error
from moretta.audit.evidence.public_run import PublicRun
from moretta.protocols.pbpfl.messages import TrainOn

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import Truth

Floats = NDArray[np.float64]

TINY = 1e-300  # of a softmax: its logarithm is taken
SINGULAR = 1e-10  # singular values below it, relative to the largest, are the common part when m = outputs


def fits(run: PublicRun) -> str:
    """Say why not."""
    if run.outputs < 2:
        return "one output has no differences"
    return softmax_from_sum.fits(run)


def attack(case: Case) -> Claim:
    """Claim gamma, [rounds, m], and r less its mean over outputs, [rounds, outputs]."""
    (silo,) = case.views
    asks, sent = case.last_of_each_round(silo, TrainOn), noisy_outputs.sent_by(case, silo)
    softmax = softmax_from_sum.softmax_by_round(case, silo)
    rounds = sorted(softmax)
    centred = [differences(*sent[number], softmax[number]) for number in rounds]
    gamma = [gamma_of(r, asks[number]) for number, r in zip(rounds, centred, strict=True)]
    return {"rounds": np.array(rounds), "gamma": np.array(gamma), "centred": np.array(centred)}


def differences(z: Floats, alpha: Floats, p: Floats) -> Floats:
    """Return r less its mean over outputs, [outputs]. z: y^ up to a constant a row, [rows, outputs]; alpha: [rows]."""
    rest = z - np.log(np.maximum(p, TINY))
    rest -= rest.mean(axis=1, keepdims=True)
    return np.asarray(alpha @ rest / max(float(alpha @ alpha), TINY))


def gamma_of(centred: Floats, ask: TrainOn) -> Floats:
    """Return gamma, [m], of least norm where r less its mean leaves one open."""
    spread = gamma_least_squares.spread_of(ask)
    spread = spread - spread.mean(axis=1, keepdims=True)
    found: Floats = np.linalg.lstsq(spread.T, centred, rcond=SINGULAR)[0]
    return found


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the keys: all of gamma, and for a figure the differences of r alone."""
    true = np.array([key_of(truth, int(number)).offset for number in claim["rounds"]])
    true -= true.mean(axis=1, keepdims=True)
    apart = [relative_error(found, one) for found, one in zip(claim["centred"], true, strict=True)]
    errors = gamma_least_squares.errors_of(claim, truth)
    who = "A silo reads off the softmax of its batch"
    if claim["gamma"].shape[1] == truth.run.outputs:
        who = f"A silo reads differences of the head's offset off the softmax to {np.median(apart):.1e}, and all of"
    return gamma_least_squares.finding(errors, who, {"relative_error_of_differences": float(np.median(apart))})


ATTACK = Attack(
    name="offset-from-softmax",
    title="works out the secret offset of the last layer from the answers to its own rows",
    severity="protocol",
    role="silo",
    source="log p_i - log p_j = y_i - y_j in y^ = y + alpha r (practical.md, Eq. 21)",
    protocols=frozenset({"pbpfl"}),
    fits=fits,
    given=softmax_from_sum.given,
    attack=attack,
    score=score,
)
