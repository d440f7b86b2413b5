"""A silo fits the offset of PBPFL's head by least squares, for any number m of parts.

Derivation: y^_n(t) = y_n(t) + alpha_n(t) gamma(t) o r_a(t) for each own row n and round t, and a silo knows y^, alpha
and r_a. The true outputs move little from one round to the next, so

    y^_n(t) - y^_n(t - 1)  ~  alpha_n(t) gamma(t) o r_a(t) - alpha_n(t - 1) gamma(t - 1) o r_a(t - 1)

is, over all rows, outputs and consecutive rounds, a least-squares problem with one unknown for each part and round.
Keys are fresh every round, which separates its two terms. At first, the label replaces y.

The true outputs do not move like white noise: a step moves all rows of a class alike. So once gamma is approximately
right, the rows' covariance of the motion is estimated from the residuals, over rounds and outputs. The fit is repeated
with its inverse for weights (feasible generalised least squares, Aitken 1935), so it rests on contrasts of rows in
which the model stands still. `practical.md` (Lemma 7) counts the solutions of one row's equations in one round, but
there are equations of all rows, outputs and rounds.

**Predictions** (`LEMMA_SEVEN`). `practical.md`, Lemma 7: with m >= 2 parts the probability that a silo obtains the true
prediction is at most 1 / m; with m = 1 it is less than 1. Here the silo subtracts the fitted offset from y^ of each
recorded round and takes the largest output. Chance is the lemma's 1 / m, or the share of the most frequent predicted
class where that is more; for m = 1, where the lemma names no figure, it is that share. One gamma decides for all rows
of a round, so rounds are the units and not rows. Under cross-entropy a silo also has the softmax of its batch
(`attacks.pbpfl.softmax`), which is not used here.

**Silos together** (`TOGETHER`). In a round all silos see the same W^, so the rows of all silos but one are more
equations in the same m unknowns, and the covariance of the fit's residuals is over more rows. Two silos do not expose
each other in this way, as neither sees an upload or a sum. That needs the server (`attacks.common.server_and_silos`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, first_of, no_head, no_training, rounds_of
from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.heads import as_outputs
from moretta.audit.evidence.intervals import Floats, of_mean, of_units, relative_error, to_error
from moretta.audit.evidence.network import head_inputs
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Stamp
from moretta.errors import ParameterError
from moretta.protocols.pbpfl.messages import TrainOn
from moretta.protocols.pbpfl.perturbation import Key
from moretta.protocols.pbpfl.server import Server

ROUNDS = 20  # only the last ones
ROWS = 512  # of a silo, only the first ones: the covariance is rows by rows
SWEEPS = 5  # of weighing pairs of rounds anew, with rows as independent
WHITENED = 3  # more sweeps, with the rows' covariance
LABEL = 0.1  # weight of a label for y in the first sweeps, against the change of y between two rounds
SHRINKAGE = 0.1  # of a covariance towards independent rows: its samples are fewer than the rows
TINY = 1e-300  # against a fit without residuals


@dataclass(frozen=True)
class SeenHead:
    """What a silo sees of the head in T rounds.

    Attributes:
        noisy: y^, [T, rows, outputs].
        alpha: [T, rows].
        spread: r_a on part s and 0 elsewhere, [T, m, outputs].
        rounds: The numbers of the rounds, ascending, [T].
    """

    noisy: Floats
    alpha: Floats
    spread: Floats
    rounds: NDArray[np.int64]

    def truer(self, gamma: Floats) -> Floats:
        """Return y^ - alpha gamma o r_a, [T, rows, outputs]. gamma: [T, m]."""
        offset = np.einsum("tm,tmc->tc", gamma, self.spread)
        truer: Floats = self.noisy - self.alpha[:, :, None] * offset[:, None, :]
        return truer

    @property
    def pairs(self) -> list[int]:
        """Return the places of rounds whose predecessor was seen too."""
        return [t for t in range(1, len(self.rounds)) if self.rounds[t] == self.rounds[t - 1] + 1]


fits = first_of(no_head, no_training)


def gather(truth: Truth) -> Given:
    """Return the first silo's view and its own rows."""
    silo, rounds = truth.run.silos[0], truth.recorded[-ROUNDS:]
    rows = truth.rows(silo).of(slice(ROWS))
    return Given(
        views={silo: rounds},
        arrays={"x": rows.x, "y": as_outputs(rows.y, truth.run.outputs)},
        view=f"{rounds_of(len(rounds))} of {silo}'s messages",
        knowledge=f"{len(rows.x)} labelled rows of {silo}, its own",
    )


def seen(case: Case, silo: str, x: NDArray[np.generic]) -> SeenHead:
    """Return the head in a silo's view, on rows x."""
    asks, model = case.last_of_each_round(silo, TrainOn), case.model()
    rounds = sorted(asks)
    if not rounds:
        raise ParameterError(f"{silo} received no request in the recorded rounds")
    noisy, alpha = [], []
    for number in rounds:
        h, outputs = head_inputs(model, case.run, asks[number].parameters, x)
        noisy.append(outputs)
        alpha.append(h.sum(axis=1) + bool(case.run.head_bias))
    spread = [spread_of(asks[number]) for number in rounds]
    return SeenHead(np.array(noisy), np.array(alpha), np.array(spread), np.array(rounds))


def spread_of(ask: TrainOn) -> Floats:
    """Return r_a spread over its parts, [m, outputs]."""
    parts = np.arange(ask.parts.max() + 1)[:, None]
    return np.asarray(ask.direction * (ask.parts == parts), dtype=np.float64)


def attack(case: Case) -> Claim:
    """Claim gamma of each round, [rounds, m]."""
    (silo,) = case.views
    head = seen(case, silo, case.arrays["x"])
    return {"rounds": head.rounds, "gamma": fit(head, np.asarray(case.arrays["y"]))}


def fit(head: SeenHead, y: Floats) -> Floats:
    """Return gamma by round and part, [T, m]. y: labels as outputs, [rows, outputs]."""
    count, rows, _ = head.noisy.shape
    pairs, alone = head.pairs, _Whitening.none(rows)
    gamma = _solve(head, y, alone, alone, np.ones(count), np.zeros(len(pairs)))
    for sweep in range(SWEEPS + WHITENED):
        truer = head.truer(gamma)
        errors, steps = truer - y, np.array([truer[t] - truer[t - 1] for t in pairs]).reshape(-1, *y.shape)
        by_label, by_step = (alone, alone) if sweep < SWEEPS else (_Whitening.of(errors), _Whitening.of(steps))
        trust = LABEL**2 if sweep < SWEEPS else 1.0
        gamma = _solve(head, y, by_label, by_step, trust * _weights(by_label, errors), _weights(by_step, steps))
    return gamma


@dataclass(frozen=True)
class _Whitening:
    """Makes rows of one covariance independent, up to a common factor: x - U diag(d) U^T x, U [rows, k], d [k]."""

    basis: Floats
    damped: Floats

    @classmethod
    def none(cls, rows: int) -> _Whitening:
        return cls(np.zeros((rows, 0)), np.zeros(0))

    @classmethod
    def of(cls, rests: Floats) -> _Whitening:
        """Return that of the rows' covariance in rests, [samples, rows, outputs], shrunk towards independence."""
        rows = rests.shape[1]
        flat = rests.transpose(1, 0, 2).reshape(rows, -1)
        if not flat.any():
            return cls.none(rows)
        basis, sizes, _ = np.linalg.svd(flat, full_matrices=False)
        alone = SHRINKAGE * float(np.sum(sizes**2)) / rows
        return cls(basis, 1.0 - np.sqrt(alone / (sizes**2 + alone)))

    def __call__(self, values: Floats) -> Floats:
        """Return values, [.., rows, columns], made independent by row."""
        made: Floats = values - self.basis @ (self.damped[:, None] * (self.basis.T @ values))
        return made


def _weights(whitening: _Whitening, rests: Floats) -> Floats:
    """Return one over the mean square of each sample, whitened."""
    means: Floats = np.mean(whitening(rests) ** 2, axis=(1, 2))
    return 1.0 / np.maximum(means, TINY)


def _solve(head: SeenHead, y: Floats, by_label: _Whitening, by_step: _Whitening, label: Floats, step: Floats) -> Floats:
    """Return gamma from y^ - label of every round and y^(t) - y^(t - 1) of every pair, whitened and with weights."""
    count, m, _ = head.spread.shape
    matrix, vector = np.zeros((m, count, count)), np.zeros((m, count))
    alpha, rest = by_label(head.alpha.T).T, by_label(head.noisy - y)
    squares = np.einsum("tmc,tmc->tm", head.spread, head.spread)
    for t in range(count):
        matrix[:, t, t] += label[t] * (alpha[t] @ alpha[t]) * squares[t]
        vector[:, t] += label[t] * head.spread[t] @ (alpha[t] @ rest[t])
    alpha, noisy = by_step(head.alpha.T).T, by_step(head.noisy)
    for t, weight in zip(head.pairs, step, strict=True):
        moved = noisy[t] - noisy[t - 1]
        both = np.einsum("mc,mc->m", head.spread[t - 1], head.spread[t]) * (alpha[t - 1] @ alpha[t])
        for at, sign in ((t - 1, -1.0), (t, 1.0)):
            matrix[:, at, at] += weight * (alpha[at] @ alpha[at]) * squares[at]
            vector[:, at] += sign * weight * head.spread[at] @ (alpha[at] @ moved)
        matrix[:, t - 1, t] -= weight * both
        matrix[:, t, t - 1] -= weight * both
    return np.array([_least_squares(a, b) for a, b in zip(matrix, vector, strict=True)]).T


def _least_squares(matrix: Floats, vector: Floats) -> Floats:
    """Return the solution of normal equations, scaled to a diagonal of ones.

    Weights of rounds may be many orders of magnitude apart, and the smallest would look like a lack of rank.
    """
    scale = np.sqrt(np.maximum(np.diagonal(matrix), np.finfo(np.float64).tiny))
    solution: Floats = np.linalg.lstsq(matrix / np.outer(scale, scale), vector / scale, rcond=None)[0] / scale
    return solution


@lru_cache(maxsize=64)  # for one audit
def key_of(truth: Truth, number: int) -> Key:
    """Return the server's key of a round, for scorers."""
    server = cast(Server, truth.roles(number).server)
    return server.key(Stamp(truth.place.run, number, 0, *truth.drawn(number)[1:]))


def errors_of(claim: Claim, truth: Truth) -> Floats:
    """Return the relative error of gamma by round of a claim's `rounds`."""
    pairs = zip(claim["rounds"], claim["gamma"], strict=True)
    return np.array([relative_error(gamma, key_of(truth, int(number)).gamma) for number, gamma in pairs])


def finding(errors: Floats, who: str, figures: dict[str, float]) -> AttackResult:
    """Return 1 - relative error, median over rounds, whose keys are drawn anew. errors: by round."""
    median = float(np.median(errors))
    return AttackResult(
        "1 - relative error of gamma, median over rounds",
        *of_units(errors),
        sentence=f"{who} the head's offset {to_error(median)}, median of {len(errors)} round{'s' * (len(errors) != 1)}",
        figures={"relative_error": median, "last_round": float(errors[-1]), "rounds": float(len(errors)), **figures},
    )


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the keys."""
    return finding(errors_of(claim, truth), "A silo works out", {})


GAMMA = Attack(
    name="gamma-least-squares",
    title="works out the secret offset of the model's last layer",
    severity="protocol",
    role="silo",
    source="generalised least squares over rows and rounds; contradicts Lemma 7 of Feng et al. for more than one row",
    protocols=frozenset({"pbpfl"}),
    fits=fits,
    given=gather,
    attack=attack,
    score=score,
)


def fits_classes(run: PublicRun) -> str:
    """Return why the attack cannot be tried; empty if it can."""
    if run.outputs < 2:
        return "a model of one output predicts no class by its largest output"
    return fits(run)


def attack_classes(case: Case) -> Claim:
    """Claim the predicted class of each own row, [rounds, rows], and for comparison the largest of y^."""
    (silo,) = case.views
    head = seen(case, silo, case.arrays["x"])
    truer = head.truer(fit(head, np.asarray(case.arrays["y"])))
    return {
        "rounds": head.rounds,
        "parts": np.array([head.spread.shape[1]]),
        "predicted": truer.argmax(axis=2),
        "naive": head.noisy.argmax(axis=2),
    }


def score_classes(claim: Claim, truth: Truth) -> AttackResult:
    """Compare the rates of rows with the true class with those of guessing in the same rounds."""
    m = int(claim["parts"][0])
    x = truth.rows(truth.run.silos[0]).x[:ROWS]
    true = np.array([truth.outputs(truth.parameters(int(n)), x).argmax(axis=1) for n in claim["rounds"]])
    majority = np.array([np.bincount(classes).max() / len(classes) for classes in true])
    guess = np.maximum(majority, 1.0 / m if m > 1 else 0.0)
    rates = np.mean(claim["predicted"] == true, axis=1)
    bound, rate, chance = f"1/{m}" if m > 1 else "less than 1", float(rates.mean()), float(guess.mean())
    low, high = of_mean(rates - guess, -chance, 1.0 - chance)  # the same rounds: their luck is in both
    return AttackResult(
        measure="rate of true predicted classes, mean over rounds",
        score=rate,
        chance=chance,
        constant=float(majority.mean()),
        interval=(chance + low, chance + high),
        sentence=f"A silo obtains the true prediction of {100 * rate:.1f} % of its rows, where Lemma 7 says {bound}",
        figures={
            "without_gamma": float(np.mean(claim["naive"] == true)),
            "lemma_bound": 1.0 / m,
            "majority": float(majority.mean()),
            "rows": float(true.shape[1]),
            "rounds": float(len(true)),
            "last_round": float(rates[-1]),
        },
    )


LEMMA_SEVEN = Attack(
    name="lemma-7-hit-rate",
    title="obtains the true model's predictions for its own rows",
    severity="protocol",
    role="silo",
    source="Lemma 7 of Feng et al. (practical.md), measured",
    protocols=frozenset({"pbpfl"}),
    fits=fits_classes,
    given=gather,
    attack=attack_classes,
    score=score_classes,
)


ROWS_TOGETHER = 2 * ROWS  # of all silos


def fits_together(run: PublicRun) -> str:
    """Return why the attack cannot be tried; empty if it can."""
    if run.loss != "mse":
        return "under cross-entropy a silo alone has the offset from the softmax of its batch"
    if len(run.silos) < 3:
        return "of two silos, all but one is one silo alone"
    return fits(run)


def gather_together(truth: Truth) -> Given:
    """Return the views and own rows of all silos but the last."""
    silos, rounds = truth.run.silos[:-1], truth.recorded[-ROUNDS:]
    arrays = {}
    for silo in silos:
        rows = truth.rows(silo).of(slice(max(1, ROWS_TOGETHER // len(silos))))
        arrays[f"x/{silo}"] = rows.x
        arrays[f"y/{silo}"] = as_outputs(rows.y, truth.run.outputs)
    total = sum(len(arrays[f"x/{silo}"]) for silo in silos)
    return Given(
        views=dict.fromkeys(silos, rounds),
        arrays=arrays,
        view=f"{rounds_of(len(rounds))} of the messages of {len(silos)} silos, all but {truth.run.silos[-1]}",
        knowledge=f"{total} labelled rows of these silos, their own",
    )


def attack_together(case: Case) -> Claim:
    """Claim gamma of each round from all rows, and from the first silo's alone, [rounds, m]."""
    silos = list(case.views)
    each = [seen(case, silo, case.arrays[f"x/{silo}"]) for silo in silos]
    labels = [np.asarray(case.arrays[f"y/{silo}"]) for silo in silos]
    together, alone = joined(each), {"alone/rounds": each[0].rounds, "alone/gamma": fit(each[0], labels[0])}
    return {"rounds": together.rounds, "gamma": fit(together, np.concatenate(labels)), **alone}


def joined(each: list[SeenHead]) -> SeenHead:
    """Return the rows of several silos as one's, in the rounds that all of them saw."""
    rounds = np.array(sorted(set.intersection(*(set(head.rounds.tolist()) for head in each))), dtype=np.int64)
    if not len(rounds):
        raise ParameterError("no recorded round was seen by all of these silos")
    places = [np.searchsorted(head.rounds, rounds) for head in each]
    noisy, alpha = (
        np.concatenate([getattr(head, name)[at] for head, at in zip(each, places, strict=True)], axis=1)
        for name in ("noisy", "alpha")
    )
    return SeenHead(noisy, alpha, each[0].spread[places[0]], rounds)


def score_together(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the keys."""
    alone = errors_of({name: claim[f"alone/{name}"] for name in ("rounds", "gamma")}, truth)
    who = f"{len(truth.run.silos) - 1} silos together work out"
    return finding(errors_of(claim, truth), who, {"relative_error_alone": float(np.median(alone))})


TOGETHER = Attack(
    name="silos-together",
    title="pools its rows to work out the secret offset of the model's last layer",
    severity="protocol",
    role="silos together",
    source="generalised least squares over the rows of all silos but one",
    protocols=frozenset({"pbpfl"}),
    fits=fits_together,
    given=gather_together,
    attack=attack_together,
    score=score_together,
)
