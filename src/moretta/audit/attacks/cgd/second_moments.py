"""A participant of CGD that fits a linear model works out X'X of all rows from how the sums change.

Derivation: for y^ = X w with mse loss g_l(k) = X_l' (X_l w_l(k) - y_l) / n_l, and all move alike, w_l(k) = w_l(1) +
D(k):

    g(k) = sum_l n_l g_l(k) / N = A D(k) + constant,   A = X'X / N,   so   g(k') - g(k) = A (D(k') - D(k)),

whatever the starts. D and g = (D(k) - D(k+1)) / alpha_k are each participant's own, so A follows as far as the steps
reach new directions. With one output that takes as many sums as there are columns, with more outputs fewer, and in
floating point more. Where rounding hides A, the participant's own X_i'X_i / n_i stands in, by a ridge about it. Table 2
of the paper has "Not applicable" here. With a bias, X has one more column, of ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moretta.audit.attacks.cgd import confined
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, rounds_of
from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.intervals import Floats, kept, recovered, to_error
from moretta.contract.messages import Array, Tensors
from moretta.errors import ParameterError

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import Truth


FROM = 3  # rounds: two make one difference


def fits(run: PublicRun) -> str:
    """Say why not."""
    size = run.setting("batch-size", "data")
    if run.loss != "mse" or not run.head:
        return "second moments follow from sums only for a linear model under mse loss"
    if size and size < max(run.rows.values()):
        return "each round uses other rows, so that sums of different rounds do not compare"
    return "" if len(run.recorded) >= FROM else f"it takes {FROM} recorded rounds or more"


def given(truth: Truth) -> Given:
    """Give the first participant its own D by round, and the rates."""
    confined.check_whole(truth)
    _check_linear(truth)
    silo = truth.run.silos[0]
    rounds = confined.whole_sums(truth, FROM)
    own = extended(truth.rows(silo).x, bias=bool(truth.run.head_bias))
    return Given(
        views={silo: ()},
        arrays={
            "moved": np.stack([_flat(truth, confined.displacement(truth, silo, k)) for k in rounds]),
            "sums": np.stack([_flat(truth, confined.stepped(truth, silo, k)) for k in rounds]),
            "own": own.T @ own / len(own),
            "own_rows": np.array(len(own)),
        },
        view=f"none but what {silo} holds itself",
        knowledge=f"D before and after {rounds_of(len(rounds))}, and the rows of {silo}",
    )


def _check_linear(truth: Truth) -> None:
    """Raise `moretta.errors.ParameterError` unless the architecture is x W' + b."""
    from moretta.protocols.common import modules

    model, run = truth.federation.model, truth.run
    generator = np.random.default_rng(0)
    weights = modules.arrays(model)
    named = set(modules.trainable(model))
    message = "the model is more than one linear layer, so that its gradients are not linear in its weights"
    if named != {name for name in (run.head, run.head_bias) if name}:
        raise ParameterError(message)
    for name in named:
        weights[name] = generator.standard_normal(weights[name].shape).astype(weights[name].dtype)
    x = truth.rows(run.silos[0]).x[:10]
    if weights[run.head].shape[1] != x[0].size:
        raise ParameterError(message)
    expected = x.reshape(len(x), -1) @ weights[run.head].T + (weights[run.head_bias] if run.head_bias else 0.0)
    if not np.allclose(truth.predicted(weights, x), expected, rtol=1e-3, atol=1e-4):
        raise ParameterError(message)


def _flat(truth: Truth, tensors: Tensors) -> Array:
    """Return weight and bias side by side, [outputs, columns]."""
    bias = truth.run.head_bias
    both = [tensors[truth.run.head], *([tensors[bias][:, None]] if bias else [])]
    return np.concatenate(both, axis=1)


def extended(x: Array, *, bias: bool) -> Floats:
    """Return rows flat, with a column of ones where there is a bias."""
    flat = x.reshape(len(x), -1).astype(np.float64)
    return np.concatenate([flat, np.ones((len(flat), 1))], axis=1) if bias else flat


def attack(case: Case) -> Claim:
    """Claim A = X'X / N from the sums, and where they say little, from the participant's own rows."""
    steps = np.concatenate(list(np.diff(case.arrays["moved"], axis=0)))
    sums, own = case.arrays["sums"], case.arrays["own"]
    turned = np.concatenate(list(np.diff(sums, axis=0)))
    rounding = float(np.finfo(case.run.dtype).eps * np.abs(sums).max())
    expected = float(np.sqrt(np.mean(own**2) / case.arrays["own_rows"]))  # how far own moments are from those of all
    return {"moments": own + curvature(steps, turned - steps @ own, max(rounding, 1e-300) / expected)}


def curvature(steps: Floats, turned: Floats, ridge: float) -> Floats:
    """Solve turned = steps A for symmetric A by a ridge. Both are [differences * outputs, columns]."""
    u, sizes, v = np.linalg.svd(steps, full_matrices=False)
    kept = sizes**2 / (sizes**2 + ridge**2)  # how much of each direction the steps tell
    reached = v.T * kept @ v  # P
    onto = v.T * (kept / np.maximum(sizes, 1e-300)) @ (u.T @ turned)  # P A
    return np.asarray(onto + onto.T - onto @ reached)


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with X'X / N of all rows, beside that of one's own rows.

    The interval is over the data's columns, each with its line of X'X, as if they were drawn of many like them.
    """
    bias = bool(truth.run.head_bias)
    parts = [extended(truth.rows(name).x, bias=bias) for name in truth.run.silos]
    true, own = (np.asarray(rows.T @ rows / len(rows)) for rows in (np.concatenate(parts), parts[0]))
    error, interval = confined.compared(claim["moments"], true)
    guess, _ = confined.compared(own, true)
    return AttackResult(
        measure="1 - relative error of X'X of all rows",
        score=float(recovered(error)),
        chance=float(recovered(guess)),
        interval=kept(interval),
        sentence=f"A participant works out the second moments of all participants' rows {to_error(error)}, "
        f"where those of its own rows are off by {guess:.1e}",
        figures={"relative_error": error, "own_rows": guess, "columns": float(len(true))},
    )


ATTACK = Attack(
    name="second-moments",
    title="works out the spreads and correlations of all participants' columns",
    severity="labels",
    role="silo",
    source="g(k+1) - g(k) = (X'X / N) (D(k+1) - D(k)); contradicts Table 2 of Confined Gradient Descent",
    protocols=frozenset({"cgd"}),
    fits=fits,
    given=given,
    attack=attack,
    score=score,
)
