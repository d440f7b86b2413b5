"""A silo solves for the true softmax of its batch under PBPFL with cross-entropy, which should stay hidden from it.

Derivation: in the paper's form the server answers y_i = p_i exp(-delta_s) and k_s = (1 - exp(delta_s)) / xi_s for each
row and part s (`practical.md`, Eq. 22 and 23), so that p_i = y_i - xi_s y_i k_s. The true softmax sums to 1:

    sum_s xi_s (k_s sum_(i in I_s) y_i) = sum_i y_i - 1

is one linear equation per row in the m secrets xi_s of the round, although delta is drawn anew for every row. A batch
of m rows or more gives them, and with them p; for a smaller batch the claim is the solution of least norm. With
``variant = "probabilities"`` the silo receives p itself. With ``exchange = "ratios"`` the answer has sums of exp(r*)
too, and each single row gives its p (`moretta.protocols.pbpfl.ratios.from_one_row`). A silo's view then has neither its
outputs nor its lambdas. It knows both: outputs follow from its rows and the received model, and lambda_i from mu_ij
less the ratio of two outputs. So the attack receives its outputs.

**The head's offset** (`OFFSET`). A silo reads it off the softmax of its batch: with p of one row, y_i - y_j = log p_i -
log p_j. The silo sent z = y^ + a constant of the row itself and knows alpha, and y^ = y + alpha r, so

    z_i - log p_i = alpha r_i + a constant of the row

gives r_i - r_j from any row with alpha other than 0; here all rows of a batch count, by alpha^2. As r = gamma_s r_a on
part s and r_a is public, a part of two or more outputs gives its gamma_s, and with it the constant: all of r where m is
below the number of outputs. With m = outputs the differences are known and the common part is not; the claim is gamma
of least norm.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from moretta.audit.attacks.pbpfl import head_offset
from moretta.audit.attacks.pbpfl.head_offset import key_of
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, no_training, rounds_of
from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.intervals import Floats, Interval, of_units, relative_error
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Array, Tensors
from moretta.errors import ParameterError
from moretta.protocols.common.targets import probabilities
from moretta.protocols.pbpfl import ratios
from moretta.protocols.pbpfl.messages import BlindedSoftmax, Predictions, Ratios, Softmax, TrainOn
from moretta.protocols.pbpfl.ratios import from_one_row
from moretta.protocols.pbpfl.softmax import true_softmax

OWN = "outputs/"  # of a silo's batch, by round
ROUNDS = 20  # only the last ones


def outputs_of(truth: Truth, silo: str, number: int, parameters: Tensors) -> Floats:
    """Return the outputs for a silo's batch of a round at these weights, [rows, outputs]."""
    return truth.outputs(parameters, truth.rows(silo).x[truth.batch(silo, number)])


def known(truth: Truth, silo: str, rounds: tuple[int, ...]) -> dict[str, Array]:
    """Return a silo's noisy outputs of these rounds, where its view does not have them."""
    if truth.run.setting("exchange") != "ratios":
        return {}
    asks = {number: truth.messages(silo, number, TrainOn) for number in rounds}
    return {f"{OWN}{n}": outputs_of(truth, silo, n, of[-1].parameters) for n, of in asks.items() if of}


def sent_by(case: Case, silo: str) -> dict[int, tuple[Floats, Floats]]:
    """Return z, y^ up to a constant per row, and alpha of a silo's batch, by round."""
    if case.run.setting("exchange") != "ratios":
        sent: Mapping[int, Predictions] = case.last_of_each_round(silo, Predictions)
        return {n: (sent[n].z.astype(np.float64), sent[n].alpha.astype(np.float64)) for n in sent}
    blinded: Mapping[int, Ratios] = case.last_of_each_round(silo, Ratios)
    if any(f"{OWN}{number}" not in case.arrays for number in blinded):
        raise ParameterError('exchange = "ratios": the silo\'s view has no outputs, which this attack needs')
    own = {number: case.arrays[f"{OWN}{number}"].astype(np.float64) for number in blinded}
    return {n: (own[n] - own[n].max(axis=1, keepdims=True), blinded[n].alpha.astype(np.float64)) for n in blinded}


def opened(sent: Ratios, answer: BlindedSoftmax, z: Floats) -> Floats:
    """Return y* of an answer to ratios of these outputs, [rows, outputs].

    lambda_i comes from the smallest ratio of i, because rounded outputs shift a ratio in proportion to its size.

    Args:
        z: The outputs from which the silo computed the ratios, [rows, outputs].
    """
    rows, least = np.arange(len(z)), np.argsort(z, axis=1)[:, :2]
    lambdas = np.empty(z.shape, dtype=object)
    for i in range(z.shape[1]):
        other = np.where(least[:, 0] == i, least[:, 1], least[:, 0])
        mu = ratios.from_words(sent.words[rows, i, other - (other > i)])
        lambdas[:, i] = mu - ratios.whole(np.exp(z[rows, other] - z[:, i]))
    return ratios.unblinded(answer, lambdas)


def fits(run: PublicRun) -> str:
    """Return why the attack cannot be tried; empty if it can."""
    if run.loss != "cross-entropy":
        return "the server answers silos with a softmax only under cross-entropy"
    return no_training(run)


def gather(truth: Truth) -> Given:
    """Return the first silo's view."""
    silo, rounds = truth.run.silos[0], truth.recorded[-ROUNDS:]
    own = known(truth, silo, rounds)
    knowledge = "the outputs that it computed" if own else "nothing"
    return Given({silo: rounds}, own, view=f"{rounds_of(len(rounds))} of {silo}'s messages", knowledge=knowledge)


def attack(case: Case) -> Claim:
    """Claim the softmax p/ROUND of each round's batch, [rows, outputs]."""
    (silo,) = case.views
    return {f"p/{number}": p for number, p in softmax_by_round(case, silo).items()}


def softmax_by_round(case: Case, silo: str) -> dict[int, Floats]:
    """Return the softmax of a silo's batch, [rows, outputs], by round."""
    if case.run.setting("exchange") == "ratios":
        outputs, asked = sent_by(case, silo), case.last_of_each_round(silo, Ratios)
        blinded = case.last_of_each_round(silo, BlindedSoftmax).items()
        z = {number: outputs[number][0] for number, _ in blinded}
        return {n: from_one_row(z[n], opened(asked[n], answer, z[n]), answer.rests) for n, answer in blinded}
    asks, answers = (case.last_of_each_round(silo, kind) for kind in (TrainOn, Softmax))
    if not answers:
        raise ParameterError(f"{silo} received no answer in the recorded rounds")
    return {number: solved(answer, asks[number].parts) for number, answer in answers.items()}


def solved(answer: Softmax, parts: NDArray[np.int64]) -> Floats:
    """Return the softmax behind an answer, [rows, outputs]. parts: int64[outputs]."""
    y, k = (np.asarray(array, dtype=np.float64) for array in (answer.y, answer.k))
    if not k.shape[1]:
        return y
    of_part = (parts[:, None] == np.arange(k.shape[1])).astype(np.float64)
    xi = np.linalg.lstsq(k * (y @ of_part), y.sum(axis=1) - 1.0, rcond=None)[0]
    return np.asarray(y * (1.0 - xi[parts] * k[:, parts]))


def true_by_round(truth: Truth, silo: str, numbers: list[int]) -> dict[int, Floats]:
    """Return the server's softmax of a silo's batch, by round; the paper's form keeps it at the server.

    With exchange = "ratios" the server forms no softmax, and the result is that of the true model.
    """
    softmax = {}
    for number in numbers:
        if truth.run.setting("exchange") == "ratios":
            softmax[number] = probabilities(outputs_of(truth, silo, number, truth.parameters(number)), "cross-entropy")
        else:
            sent = truth.messages(silo, number, Predictions)
            softmax[number] = true_softmax(sent[-1], key_of(truth, number).offset).p
    return softmax


def naive_by_round(truth: Truth, silo: str, numbers: list[int]) -> dict[int, Floats]:
    """Return a silo's guess by round, [rows, outputs]: its answer scaled to sum 1, or for p itself 1 / outputs."""
    guesses = {}
    for number in numbers:
        if truth.run.setting("exchange") == "ratios":
            guess = np.ones((len(truth.batch(silo, number)), truth.run.outputs))
        else:
            answer = truth.messages(silo, number, Softmax)[-1]
            guess = np.asarray(answer.y, dtype=np.float64)
            guess = guess if answer.k.shape[1] else np.ones_like(guess)
        guesses[number] = guess / guess.sum(axis=1, keepdims=True)
    return guesses


def squares(claimed: Floats, true: Floats) -> Floats:
    """Return the squared error and the squared size of the truth by row, [rows, 2]."""
    return np.stack([np.sum((claimed - true) ** 2, axis=1), np.sum(true**2, axis=1)], axis=1)


def scores(errors: Floats, guess: Floats) -> tuple[float, float, Interval]:
    """Return score, chance and interval of 1 - median relative error. errors, guess: sums of `squares`, [rounds, 2]."""
    return of_units(*(np.sqrt(pairs[:, 0] / pairs[:, 1]) for pairs in (errors, guess)))


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the server's softmax. Rows of a round share their xi, so the units are rounds."""
    silo, numbers = truth.run.silos[0], sorted(int(name.removeprefix("p/")) for name in claim)
    true, naive = true_by_round(truth, silo, numbers), naive_by_round(truth, silo, numbers)
    claimed = {number: np.asarray(claim[f"p/{number}"]) for number in numbers}
    solved_for, unsolved = (
        np.array([squares(of[number], true[number]).sum(axis=0) for number in numbers]) for of in (claimed, naive)
    )
    miss, size = solved_for.sum(axis=0)
    largest = max(float(np.abs(claimed[number] - true[number]).max()) for number in numbers)
    handed = truth.run.setting("variant") == "probabilities"
    does = "is handed the true softmax of its batch" if handed else "solves for the true softmax of its batch"
    rows = sum(len(p) for p in claimed.values())
    return AttackResult(
        "1 - relative error of the true softmax, median over rounds",
        *scores(solved_for, unsolved),
        sentence=f"A silo {does}, {f'to {largest:.1e}' if largest else 'exactly'} in the worst entry of {rows} rows",
        figures={"max_error": largest, "relative_error": float(np.sqrt(miss / size)), "rows": float(rows)},
    )


SOFTMAX = Attack(
    name="softmax-from-sum",
    title="obtains the true model's probabilities for its own rows",
    severity="protocol",
    role="silo",
    source="sum_i p_i = 1 in the answers of practical.md, Eq. 22 and 23; contradicts Lemma 7 of Feng et al.",
    protocols=frozenset({"pbpfl"}),
    fits=fits,
    given=gather,
    attack=attack,
    score=score,
)


TINY = 1e-300  # of a softmax, before the logarithm
SINGULAR = 1e-10  # singular values below it, relative to the largest, are the common part when m = outputs


def fits_offset(run: PublicRun) -> str:
    """Return why the attack cannot be tried; empty if it can."""
    if run.outputs < 2:
        return "a model of one output has no differences between offsets"
    return fits(run)


def attack_offset(case: Case) -> Claim:
    """Claim gamma, [rounds, m], and r less its mean over outputs, [rounds, outputs]."""
    (silo,) = case.views
    asks, sent = case.last_of_each_round(silo, TrainOn), sent_by(case, silo)
    softmax = softmax_by_round(case, silo)
    rounds = sorted(softmax)
    centred = [differences(*sent[number], softmax[number]) for number in rounds]
    gamma = [gamma_of(r, asks[number]) for number, r in zip(rounds, centred, strict=True)]
    return {"rounds": np.array(rounds), "gamma": np.array(gamma), "centred": np.array(centred)}


def differences(z: Floats, alpha: Floats, p: Floats) -> Floats:
    """Return r less its mean over outputs, [outputs].

    Args:
        z: y^ up to row constants, [rows, outputs].
        alpha: [rows].
        p: The softmax, [rows, outputs].
    """
    rest = z - np.log(np.maximum(p, TINY))
    rest -= rest.mean(axis=1, keepdims=True)
    return np.asarray(alpha @ rest / max(float(alpha @ alpha), TINY))


def gamma_of(centred: Floats, ask: TrainOn) -> Floats:
    """Return gamma, [m], of least norm where r less its mean leaves one open."""
    spread = head_offset.spread_of(ask)
    spread = spread - spread.mean(axis=1, keepdims=True)
    gamma: Floats = np.linalg.lstsq(spread.T, centred, rcond=SINGULAR)[0]
    return gamma


def score_offset(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the keys: all of gamma, and as a figure the differences of r alone."""
    true = np.array([key_of(truth, int(number)).offset for number in claim["rounds"]])
    true -= true.mean(axis=1, keepdims=True)
    misses = [relative_error(centred, expected) for centred, expected in zip(claim["centred"], true, strict=True)]
    errors = head_offset.errors_of(claim, truth)
    who = "A silo reads off the softmax of its batch"
    if claim["gamma"].shape[1] == truth.run.outputs:
        who = f"A silo reads differences of the head's offset off the softmax to {np.median(misses):.1e}, and all of"
    return head_offset.finding(errors, who, {"relative_error_of_differences": float(np.median(misses))})


OFFSET = Attack(
    name="offset-from-softmax",
    title="works out the secret offset of the last layer from the answers to its own rows",
    severity="protocol",
    role="silo",
    source="log p_i - log p_j = y_i - y_j in y^ = y + alpha r (practical.md, Eq. 21)",
    protocols=frozenset({"pbpfl"}),
    fits=fits_offset,
    given=gather,
    attack=attack_offset,
    score=score_offset,
)
