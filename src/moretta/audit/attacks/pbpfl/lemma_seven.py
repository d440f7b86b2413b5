"""How often a silo of PBPFL obtains the true predicted class of its own rows, against the bound of Lemma 7.

`practical.md`, Lemma 7: with m >= 2 parts the probability that a silo obtains the true prediction is at most 1 / m;
with m = 1 it is less than 1. The proof counts the solutions of one row's equations. Here the silo subtracts the offset
that it fits over rows and rounds (`gamma_least_squares`) from y^ of each recorded round and takes the largest
output.

The chance beside it is the lemma's 1 / m, or the share of the most frequent predicted class where that is more; for
m = 1, where the lemma names no figure, it is that share. One gamma decides for all rows of a round, so rounds are the
units and not rows. Under cross-entropy a silo also has the softmax of its batch (`softmax_from_sum`), which is not used
here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moretta.audit.attacks.pbpfl import gamma_least_squares
from moretta.audit.evidence.attack import Attack, AttackResult, Claim
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.intervals import of_mean
from moretta.audit.evidence.public_run import PublicRun

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import Truth


def fits(run: PublicRun) -> str:
    """Say why not."""
    if run.outputs < 2:
        return "a model of one output predicts no class by its largest output"
    return gamma_least_squares.fits(run)


def attack(case: Case) -> Claim:
    """Claim the predicted class of each own row, [rounds, rows], and for comparison the largest of y^."""
    (silo,) = case.views
    found = gamma_least_squares.seen(case, silo, case.arrays["x"])
    truer = found.truer(gamma_least_squares.fit(found, np.asarray(case.arrays["y"])))
    return {
        "rounds": found.rounds,
        "parts": np.array([found.spread.shape[1]]),
        "predicted": truer.argmax(axis=2),
        "naive": found.noisy.argmax(axis=2),
    }


def true_classes(truth: Truth, number: int) -> NDArray[np.int64]:
    """Return the class that the true model before a round predicts of each row of the first silo."""
    import copy

    import torch

    from moretta.audit.evidence.network import outputs_at, tensors

    rows = truth.rows(truth.run.silos[0]).part(slice(gamma_least_squares.ROWS))
    model = copy.deepcopy(truth.federation.model).train()  # as silos run it
    with torch.no_grad():
        outputs = outputs_at(model, tensors(truth.parameters(number)), torch.tensor(rows.x))
    return outputs.argmax(dim=1).numpy()


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare the rates of rows whose class was obtained with what guessing has in the same rounds."""
    m = int(claim["parts"][0])
    true = np.array([true_classes(truth, int(number)) for number in claim["rounds"]])
    majority = np.array([np.bincount(one).max() / len(one) for one in true])
    guess = np.maximum(majority, 1.0 / m if m > 1 else 0.0)
    rates = np.mean(claim["predicted"] == true, axis=1)
    bound, rate, chance = f"1/{m}" if m > 1 else "less than 1", float(rates.mean()), float(guess.mean())
    low, high = of_mean(rates - guess, -chance, 1.0 - chance)  # the same rounds: their luck is in both
    return AttackResult(
        measure="rate of true predicted classes, mean over rounds",
        score=rate,
        chance=chance,
        interval=(chance + low, chance + high),
        sentence=f"A silo obtains the true prediction of {rate:.1%} of its rows, where Lemma 7 says {bound}",
        figures={
            "without_gamma": float(np.mean(claim["naive"] == true)),
            "lemma_bound": 1.0 / m,
            "majority": float(majority.mean()),
            "rows": float(true.shape[1]),
            "rounds": float(len(true)),
            "last_round": float(rates[-1]),
        },
    )


ATTACK = Attack(
    name="lemma-7-hit-rate",
    title="obtains the true model's predictions for its own rows",
    severity="protocol",
    role="silo",
    source="Lemma 7 of Feng et al. (practical.md), measured",
    protocols=frozenset({"pbpfl"}),
    fits=fits,
    given=gamma_least_squares.given,
    attack=attack,
    score=score,
)
