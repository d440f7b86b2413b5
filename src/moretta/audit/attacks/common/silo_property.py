"""A property of the other silos, the balance of their labels, from the steps between rounds' models.

Property inference (Melis et al., S&P 2019), by way of the head's bias. Under plain gradient steps at the rate a, a silo
sees W_t and W_{t+1} and so the mean gradient of all rows, g = (W_t - W_{t+1}) / a. It knows N_k, all silos' rows in the
round, and its own part. The rest are the others' rows, whose gradient in the head's bias is

    g_others = (N g - N_own g_own) / (N - N_own) = mean over others' rows of (q - t),

where q are the outputs under mse, or their softmax under cross-entropy, and t is the label's target; T has a column for
each label. The silo estimates the mean of q over a label's rows by that over rows it knows, Q. With s the labels'
shares among the others

    (Q - T) s = g_others,   sum s = 1,   s >= 0

is, over all rounds, a least-squares problem with an unknown for each label. s is of the rows that the others used in
these rounds, so each silo counts by its batch. For numeric targets the mean of q over known rows gives the others' mean
target at once.

The error |s^ - s|_1 / 2 is compared with guesses that need no model. The others may equal the silo itself, the
background rows, the mean of both, or the background less the silo's own rows; or they have equal shares of each label.
Chance is the best of these, though the silo cannot know which is best. The interval is a bootstrap over rounds, moved
to lie about the measured error, as resampling adds error.

Under PBPFL a silo first removes the offset from the head (`attacks.pbpfl.exposure.without_offset`). Under cross-entropy
a number common to all outputs stays open; it moves no softmax, and a gradient, whose entries sum to 0, shows it.
"""

from typing import Any

import numpy as np
import torch

from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, rounds_of
from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.exposure import Models, exposure, fitting
from moretta.audit.evidence.heads import as_outputs
from moretta.audit.evidence.intervals import FEWEST, SIDE, Floats
from moretta.audit.evidence.network import outputs_at, tensors
from moretta.audit.evidence.truth import Truth
from moretta.audit.evidence.uploads import rows_of, survivors
from moretta.contract.roles import under
from moretta.errors import ParameterError

ROUNDS = 20  # only the last ones
DRAWS = 400  # of rounds with replacement, for the interval
SURE = 1e3  # weight of "shares add up to 1" beside an equation of a round
SEED = 29
SMALL = 1e-300
OWN = "own/"
AS_OWN = "its own rows"
MODEL = "model/"


def fits(run: PublicRun) -> str:
    """Return why the attack cannot be tried; empty if it can."""
    if len(run.silos) < 2:
        return "there is one silo, and no others to learn about"
    if not run.head_bias:
        return "the model has no linear layer with an output and a bias each"
    plain = (run.setting("optimizer") or "sgd") == "sgd" and not any(
        run.setting(key) for key in ("momentum", "weight-decay", "clip-norm", "dp-noise", "local-epochs")
    )
    if not plain or run.setting("class-weights") or run.setting("label-smoothing"):
        return "rounds are not plain gradient steps, from which gradients follow"
    if run.setting("schedule") not in (None, "constant"):
        return "the learning rate depends on how many rounds are left"
    pairs = [number for number in run.recorded if number + 1 in run.recorded and number < run.rounds]
    return "" if pairs else "no two consecutive rounds were recorded"


def gather(truth: Truth) -> Given:
    """Return the first silo's view, its rows, the batches it used of them, and background rows."""
    silo, run, shown = truth.run.silos[0], truth.run, exposure(truth.run)
    rounds = truth.recorded[-ROUNDS:]
    own, known = truth.rows(silo), truth.background
    arrays = {"x": own.x, "y": own.y, "known/x": known.x, "known/y": known.y}
    arrays |= {f"{OWN}{number}": truth.batch(silo, number) for number in rounds}
    if holding := shown.holding:
        whole = [number for number in rounds if set(holding.counted(truth, silo, number)) == set(run.silos)]
        models = {number: holding.model(truth, silo, number) for number in rounds}
    else:
        whole = [number for number in rounds if survivors(truth, number) == run.silos]
        models = {0: dict(truth.parameters(rounds[0]))} if shown.sent else {}  # of tensors that do not travel
    arrays |= {f"{MODEL}{number}/{name}": value for number, at in models.items() for name, value in at.items()}
    if not any(number + 1 in rounds for number in whole):
        raise ParameterError(
            "no two consecutive rounds were recorded of which the first summed all silos; this attack needs such a step"
        )
    arrays["whole"] = np.array(whole)
    what = f"{holding.name} it held in" if holding else "its view of"
    return Given(
        views={} if holding else {silo: rounds},
        arrays=arrays,
        view=f"{what} {rounds_of(len(rounds))}",
        knowledge=f"its own {len(own.x)} labelled rows, {len(known.x)} background rows, and silos' numbers of rows",
    )


def attack(case: Case) -> Claim:
    """Claim the others' shares of labels, or their mean target, of all rounds and [draws, ..] of some; which rounds."""
    models, network = _models(case), case.model()
    steps = [number for number in sorted(models) if number + 1 in models and number in case.arrays["whole"]]
    equations = [_equations(case, network, models[number], models[number + 1], number) for number in steps]
    matrices, vectors = np.array([pair[0] for pair in equations]), np.array([pair[1] for pair in equations])
    generator, count = np.random.Generator(np.random.PCG64(SEED)), len(equations)
    draws = [generator.integers(0, count, count) for _ in range(DRAWS)]
    solve = _shares if case.run.task == "classification" else _mean
    solutions = [solve(matrices[index], vectors[index]) for index in (np.arange(count), *draws)]
    return {"found": solutions[0], "draws": np.array(solutions[1:]), "rounds": np.array(steps)}


def _models(case: Case) -> Models:
    """Return the models of the rounds, by round: whole ones, or of the silo's view."""
    models = Models()
    for key, value in under(MODEL, case.arrays).items():
        number, _, name = key.partition("/")
        models.setdefault(int(number), {})[name] = value
    if not case.views:
        return models
    (silo,), shown = case.views, exposure(case.run)
    if shown.worked_out:
        return shown.worked_out(case, silo)
    return shown.sent(case, silo, models[0]) if shown.sent else {}


def _equations(case: Case, network: Any, at: Any, after: Any, number: int) -> tuple[Floats, Floats]:
    """Return Q - T, [outputs, labels], and g_others, [outputs]; for numeric targets the mean of q instead of Q."""
    run, index = case.run, case.arrays[f"{OWN}{number}"]
    rate = run.optimizer.rate(number, run.rounds)
    everybodys = (at[run.head_bias].astype(np.float64) - after[run.head_bias].astype(np.float64)) / rate
    x = np.concatenate([case.arrays["x"], case.arrays["known/x"]])
    targets = as_outputs(np.concatenate([case.arrays["y"], case.arrays["known/y"]]), run.outputs)
    if run.loss == "cross-entropy":
        everybodys -= everybodys.mean()
    with torch.no_grad():
        outputs = outputs_at(network, tensors(at), torch.tensor(x)).double()
    q = np.asarray((outputs if run.loss == "mse" else outputs.softmax(dim=1)).numpy())
    total = sum(rows_of(run, silo, number) for silo in run.silos)
    own = (q[index] - targets[index]).sum(axis=0)  # the silo's own rows are first
    others = (total * everybodys - own) / (total - len(index))
    if run.task != "classification":
        return q.mean(axis=0), others
    labels = labels_of(targets)
    which = np.argmax((targets[:, None] == labels).all(axis=2), axis=1)
    # A label without a known row has an unknown answer of the model; the average replaces it.
    means = [q[which == k].mean(axis=0) if np.any(which == k) else q.mean(axis=0) for k in range(len(labels))]
    return (np.array(means) - labels).T, others


def labels_of(targets: Floats) -> Floats:
    """Return T, the targets of labels, [labels, outputs]: unit vectors, or for one output its values."""
    return np.eye(targets.shape[1]) if targets.shape[1] > 1 else np.unique(targets, axis=0)


def _shares(matrices: Floats, vectors: Floats) -> Floats:
    """Return s >= 0 with sum 1 that solves (Q - I) s = g best over rounds."""
    from scipy.optimize import nnls

    classes = matrices.shape[2]
    rows = np.concatenate([*matrices, np.full((1, classes), SURE)])
    shares, _ = nnls(rows, np.concatenate([vectors.ravel(), [SURE]]))
    return np.asarray(shares / max(float(shares.sum()), SMALL))


def _mean(means: Floats, vectors: Floats) -> Floats:
    return np.asarray((means - vectors).mean(axis=0))


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the others' rows, and with the best guess without a model. The interval is over rounds."""
    run, known = truth.run, truth.background
    own = as_outputs(truth.rows(run.silos[0]).y, run.outputs)
    used = [(silo, truth.batch(silo, int(number))) for silo in run.silos[1:] for number in claim["rounds"]]
    others = np.concatenate([as_outputs(truth.rows(silo).y[batch], run.outputs) for silo, batch in used])
    counted = run.task == "classification"
    labels = labels_of(np.concatenate([own, as_outputs(known.y, run.outputs)]))
    parts = (own, others, as_outputs(known.y, run.outputs))
    ours, theirs, usual = (_property(rows, labels if counted else None) for rows in parts)
    scale = 2.0 if counted else max(float(others.std(axis=0).sum()), SMALL)
    known_rows = np.concatenate([parts[0], parts[2]])
    flat = np.full(len(labels), 1 / len(labels)) if counted else (known_rows.min(axis=0) + known_rows.max(axis=0)) / 2
    guesses = _guesses(ours, usual, flat, len(own), sum(run.rows[silo] for silo in run.silos[1:]), counted=counted)
    misses = {name: float(np.abs(guess - theirs).sum()) / scale for name, guess in guesses.items()}
    best, error = min(misses, key=lambda name: misses[name]), float(np.abs(claim["found"] - theirs).sum()) / scale
    drawn = np.abs(claim["draws"] - theirs).sum(axis=1) / scale
    low, high = np.maximum(0.0, np.quantile(drawn, [SIDE, 1 - SIDE]) - np.median(drawn) + error)
    if len(claim["rounds"]) < FEWEST:
        low, high = 0.0, max(1.0, error, misses[best])
    what = "shares of labels" if counted else "mean target"
    return AttackResult(
        measure=f"1 - error of the {what} in the others' batches",
        score=1.0 - error,
        chance=1.0 - misses[best],
        constant=float(theirs.max()) if counted else None,
        interval=(1.0 - max(float(high), error), 1.0 - min(float(low), error)),
        sentence=f"A silo works out the {what} in the other silos' batches to an error of {error:.3f} (95 %: "
        f"{low:.3f} to {high:.3f}). The best guess without a model ({best}) misses by {misses[best]:.3f}",
        figures={
            "error": error,
            "error_of_own": misses[AS_OWN],
            "error_of_guess": misses[best],
            "above_or_below_right": float(np.mean((claim["found"] > ours) == (theirs > ours))),
            "rounds": float(len(claim["rounds"])),
        },
    )


def _guesses(own: Floats, known: Floats, flat: Floats, rows: int, others: int, *, counted: bool) -> dict[str, Floats]:
    """Return guesses of the others' property that need no model, by their description.

    own, known: the property of such rows. flat: that of no knowledge. rows, others: the number of own and others'.
    """
    left = (known * (rows + others) - own * rows) / others
    if counted:
        left = np.maximum(left, 0.0)
        left = left / max(float(left.sum()), SMALL)
    return {
        AS_OWN: own,
        "the background rows": known,
        "its own and the background rows, half and half": (own + known) / 2,
        "what its own rows leave of the background's": left,
        "as many of each label" if counted else "the middle of what is known": flat,
    }


def _property(targets: Floats, labels: Floats | None) -> Floats:
    """Return the shares of labels, or the mean target."""
    if labels is None:
        return np.asarray(targets.mean(axis=0))
    return np.asarray((targets[:, None] == labels).all(axis=2).mean(axis=0))


ATTACK = Attack(
    name="silo-property",
    title="works out the balance of the other silos' labels",
    severity="labels",
    role="silo",
    source="derivation; property inference as in Melis et al., S&P 2019",
    protocols=fitting("silo-property"),
    fits=fits,
    given=gather,
    attack=attack,
    score=score,
)
