"""A silo solves for the true softmax of its batch under PBPFL with cross-entropy, which it was not to learn.

Derivation: in the paper's form the server answers y_i = p_i exp(-delta_s) and k_s = (1 - exp(delta_s)) / xi_s for each
row and part s (`practical.md`, Eq. 22 and 23), so that p_i = y_i - xi_s y_i k_s. The true softmax sums to 1:

    sum_s xi_s (k_s sum_(i in I_s) y_i) = sum_i y_i - 1

is one linear equation a row in the m secrets xi_s of the round, although delta is drawn anew for every row. A batch of
m rows or more gives them, and with them p; for a smaller batch the solution of least norm is claimed. With ``variant =
"probabilities"`` there is nothing to solve: the silo is handed p. With ``exchange = "ratios"`` the answer has sums of
exp(r*) too, and each row by itself gives its p (`moretta.protocols.pbpfl.ratios.from_one_row`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moretta.audit.attacks.pbpfl import noisy_outputs
from moretta.audit.attacks.pbpfl.keys import key_of
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, rounds_of
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.intervals import Interval, kept, of_errors, recovered
from moretta.audit.evidence.public_run import PublicRun
from moretta.errors import ParameterError
from moretta.protocols.pbpfl.messages import BlindedSoftmax, Predictions, Ratios, Softmax, TrainOn
from moretta.protocols.pbpfl.ratios import from_one_row
from moretta.protocols.pbpfl.softmax import true_softmax

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import Truth

Floats = NDArray[np.float64]

ROUNDS = 20  # the last so many


def fits(run: PublicRun) -> str:
    """Say why not."""
    if run.loss != "cross-entropy":
        return "silos are answered with a softmax under cross-entropy alone"
    return "" if run.training else "no round of training was recorded"


def given(truth: Truth) -> Given:
    """Give the first silo its view."""
    silo, rounds = truth.run.silos[0], truth.recorded[-ROUNDS:]
    own = noisy_outputs.known(truth, silo, rounds)
    knowledge = "the outputs that it computed" if own else "nothing"
    return Given({silo: rounds}, own, view=f"{rounds_of(len(rounds))} of {silo}", knowledge=knowledge)


def attack(case: Case) -> Claim:
    """Claim the softmax p/ROUND of each round's batch, [rows, outputs]."""
    (silo,) = case.views
    return {f"p/{number}": p for number, p in softmax_by_round(case, silo).items()}


def softmax_by_round(case: Case, silo: str) -> dict[int, Floats]:
    """Return the softmax of a silo's batch, [rows, outputs], by round."""
    if case.run.setting("exchange") == "ratios":
        return _behind_ratios(case, silo)
    asks, answers = (case.last_of_each_round(silo, kind) for kind in (TrainOn, Softmax))
    if not answers:
        raise ParameterError(f"{silo} was answered nothing in the recorded rounds")
    return {number: solved(answer, asks[number].parts) for number, answer in answers.items()}


def _behind_ratios(case: Case, silo: str) -> dict[int, Floats]:
    asked, answers = (case.last_of_each_round(silo, kind) for kind in (Ratios, BlindedSoftmax))
    outputs, found = noisy_outputs.sent_by(case, silo), dict[int, Floats]()
    for number, told in answers.items():
        z, _ = outputs[number]
        found[number] = from_one_row(z, noisy_outputs.opened(asked[number], told, z), told.rests)
    return found


def solved(answer: Softmax, parts: NDArray[np.int64]) -> Floats:
    """Return the softmax behind an answer, [rows, outputs]. parts: int64[outputs]."""
    y, k = (np.asarray(array, dtype=np.float64) for array in (answer.y, answer.k))
    if not k.shape[1]:
        return y
    of_part = (parts[:, None] == np.arange(k.shape[1])).astype(np.float64)
    xi = np.linalg.lstsq(k * (y @ of_part), y.sum(axis=1) - 1.0, rcond=None)[0]
    return np.asarray(y * (1.0 - xi[parts] * k[:, parts]))


def true_by_round(truth: Truth, silo: str, numbers: list[int]) -> dict[int, Floats]:
    """Return the softmax that the server formed of a silo's batch, which it keeps to itself in the paper's form.

    Behind ratios of two classes it formed none: there it is that of the true model.
    """
    found = {}
    for number in numbers:
        if truth.run.setting("exchange") == "ratios":
            outputs = noisy_outputs.outputs_of(truth, silo, number, truth.parameters(number))
            shifted = np.exp(outputs - outputs.max(axis=1, keepdims=True))
            found[number] = shifted / shifted.sum(axis=1, keepdims=True)
            continue
        sent = [one.message for one in truth.heard(silo, number) if isinstance(one.message, Predictions)]
        found[number] = true_softmax(sent[-1], key_of(truth, number).offset).p
    return found


def naive_by_round(truth: Truth, silo: str, numbers: list[int]) -> dict[int, Floats]:
    """Return what a silo would guess without solving anything: its answer brought to sum 1, or of p itself 1 / outputs.

    [rows, outputs] by round.
    """
    found = {}
    for number in numbers:
        if truth.run.setting("exchange") == "ratios":
            rows = len(truth.batch(silo, number))
            found[number] = np.full((rows, truth.run.outputs), 1.0 / truth.run.outputs)
            continue
        answers = [one.message for one in truth.heard(silo, number) if isinstance(one.message, Softmax)]
        y = np.asarray(answers[-1].y, dtype=np.float64)
        guess = y if answers[-1].k.shape[1] else np.ones_like(y)
        found[number] = guess / guess.sum(axis=1, keepdims=True)
    return found


def squares(found: Floats, true: Floats) -> Floats:
    """Return the squared error and the squared size of the truth by row, [rows, 2]."""
    return np.stack([np.sum((found - true) ** 2, axis=1), np.sum(true**2, axis=1)], axis=1)


def error_of(pairs: Floats) -> float:
    """Return the relative error over all. pairs: of `squares`, or sums of some."""
    miss, size = pairs.sum(axis=0)
    return float(np.sqrt(miss / size))


def by_round(pairs: Floats) -> Floats:
    """Return relative errors. pairs: sums of `squares` by round, [rounds, 2]."""
    return np.asarray(np.sqrt(pairs[:, 0] / pairs[:, 1]))


def scores(found: Floats, guess: Floats) -> tuple[float, float, Interval]:
    """Return score, chance and interval of 1 - relative error, median over rounds. found, guess: errors by round."""
    score, chance = (float(recovered(float(np.median(one)))) for one in (found, guess))
    return score, chance, kept(of_errors(found, guess))


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with what the server formed. Rows of a round share their xi, so that the units are rounds."""
    silo, numbers = truth.run.silos[0], sorted(int(name.removeprefix("p/")) for name in claim)
    true, naive = true_by_round(truth, silo, numbers), naive_by_round(truth, silo, numbers)
    found = {number: np.asarray(claim[f"p/{number}"]) for number in numbers}
    solved_for, unsolved = (
        np.array([squares(of[number], true[number]).sum(axis=0) for number in numbers]) for of in (found, naive)
    )
    got, chance, interval = scores(by_round(solved_for), by_round(unsolved))
    largest = max(float(np.abs(found[number] - true[number]).max()) for number in numbers)
    handed = truth.run.setting("variant") == "probabilities"
    does = "is handed the true softmax of its batch" if handed else "solves for the true softmax of its batch"
    rows = sum(len(p) for p in found.values())
    return AttackResult(
        measure="1 - relative error of the true softmax, median over rounds",
        score=got,
        chance=chance,
        interval=interval,
        sentence=f"A silo {does}, {f'to {largest:.1e}' if largest else 'exactly'} in the worst entry of {rows} rows",
        figures={"max_error": largest, "relative_error": error_of(solved_for), "rows": float(rows)},
    )


ATTACK = Attack(
    name="softmax-from-sum",
    title="obtains the true model's probabilities for its own rows",
    severity="protocol",
    role="silo",
    source="sum_i p_i = 1 in the answers of practical.md, Eq. 22 and 23; contradicts Lemma 7 of Feng et al.",
    protocols=frozenset({"pbpfl"}),
    fits=fits,
    given=given,
    attack=attack,
    score=score,
)
