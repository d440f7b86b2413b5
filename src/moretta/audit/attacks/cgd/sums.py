"""What a participant of CGD computes from the sums that it steps by: of two, the other's gradient.

Derivation: all step by G / N = sum_l n_l g_l / sum_l n_l, and D(k) - D(k+1) = alpha_k G / N. A participant i subtracts
its own part: N (D(k) - D(k+1)) / alpha_k - n_i g_i = sum of n_l g_l over the others. With two participants this is the
other's, exactly, in each round. With three it is a sum of two; the attack then misses, as it claims the sum for one of
them.

**Rows** (`INVERSION`). Gradient inversion searches rows with that gradient at known weights; here the weights are
secret. But w_l(k) - w_i(k) = w_l(1) - w_i(1) for all k, of a size in proportion to delta, so the attacker's own w_i(k)
replaces w_l(k). It is the nearer, the smaller delta is beside the distance that all have moved. One way needs no
weights: for one row, each line of the first layer's gradient is the row times the same line of the bias's gradient
(`evidence.inversion`), so no confined start hides it.

Claimed rows are paired with the true ones at the least error. That flatters: of many rows in few columns one is near by
luck. So chance is the largest of three: the claim's score on as many rows outside training, the score of such rows as a
claim, and 0, the mean row's score. Rows of a round are claimed and paired together, so rounds are the units; rounds
that share rows count as one.

Labels are searched for as class probabilities, which covers smoothed labels. CGD has no class weights and no noise.

**Second moments** (`MOMENTS`). A participant that fits a linear model computes X'X of all rows from the changes of the
sums. For y^ = X w with mse loss g_l(k) = X_l' (X_l w_l(k) - y_l) / n_l, and all move alike, w_l(k) = w_l(1) + D(k):

    g(k) = sum_l n_l g_l(k) / N = A D(k) + constant,   A = X'X / N,   so   g(k') - g(k) = A (D(k') - D(k)),

for all starts. D and g = (D(k) - D(k+1)) / alpha_k are each participant's own, so A follows in the directions that
steps reach. With one output that takes as many sums as there are columns, with more outputs fewer, and in floating
point more. Where rounding hides A, the participant's own X_i'X_i / n_i replaces it, by a ridge about it. Table 2 of the
paper has "Not applicable" here. With a bias, X has one more column, of ones.
"""

import numpy as np

from moretta.audit.attacks.cgd import confined
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, no_training, rounds_of
from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.intervals import (
    Floats,
    flat,
    gain,
    of_gain,
    of_units,
    relative_error,
    to_error,
    units,
)
from moretta.audit.evidence.inversion import Effort, Gradients, Inputs, invert, matched, quotient_start, squares
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Array, Tensors
from moretta.contract.roles import over, under
from moretta.errors import ParameterError
from moretta.protocols.common import modules

FIRST = 10  # only the first ones


def fits(run: PublicRun) -> str:
    """Return why the attack cannot be tried; empty if it can."""
    return no_training(run) if len(run.silos) > 1 else "there is one participant, and nobody else"


def gather(truth: Truth) -> Given:
    """Return the steps of the first participant's own D and its own gradients, flat."""
    confined.check_whole(truth)
    silo, rounds = truth.run.silos[0], confined.whole_sums(truth)[:FIRST]
    own = [confined.local(truth, silo, number) for number in rounds]
    return Given(
        views={silo: ()},
        arrays={
            "rounds": np.array(rounds),
            "means": np.array([flat(confined.stepped(truth, silo, number)) for number in rounds]),
            "own": np.array([local.rows * flat(local.gradients) for local in own]),
            "totals": np.array([confined.rows_of_sum(truth, number) for number in rounds], dtype=np.float64),
        },
        view=f"none but what {silo} holds itself",
        knowledge=f"D before and after {rounds_of(len(rounds))}, the gradients of {silo}, and how many rows a sum "
        "is of",
    )


def attack(case: Case) -> Claim:
    """Claim another's n_l g_l of each round, [rounds, parameters]."""
    arrays = case.arrays
    return {"rounds": arrays["rounds"], "other": arrays["totals"][:, None] * arrays["means"] - arrays["own"]}


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the true n_l g_l of the participant with the most rows, beside an equal share of the sum."""
    silo, *others = truth.run.silos
    other = max(others, key=lambda name: truth.run.rows[name])
    errors, guesses = [], []
    for number, claimed in zip(claim["rounds"].tolist(), claim["other"], strict=True):
        local = confined.local(truth, other, number)
        true, mean = local.rows * flat(local.gradients), flat(confined.stepped(truth, silo, number))
        errors.append(relative_error(claimed, true))
        guesses.append(relative_error(local.rows * mean, true))
    error, guess = float(np.median(errors)), float(np.median(guesses))
    return AttackResult(
        "1 - relative error of another's gradient, median over rounds",
        *of_units(np.array(errors), np.array(guesses)),
        sentence=f"A participant that subtracts its own part from the sum of {len(others) + 1} has another's gradient "
        f"{to_error(error)}, where the mean of all is off by {guess:.1e}",
        figures={"relative_error": error, "mean_of_all": guess, "rounds": float(len(errors))},
    )


TWO_PARTIES = Attack(
    name="two-party-exposure",
    title="works out the other participant's update by subtracting its own",
    severity="protocol",
    role="silo",
    source="a sum of two less one's own part; docs/cgd.md",
    protocols=frozenset({"cgd"}),
    fits=fits,
    given=gather,
    attack=attack,
    score=score,
)


ROUNDS = 6  # of the smallest batches, the latest: by then all have moved by more than their starts differ
ROUNDS_THOROUGH = 10
SEARCH = {False: (2.0, 3, 300), True: (300.0, 8, 300)}  # thorough: for all rounds (`evidence.inversion.Effort.within`)
OTHERS = 20  # draws of rows outside training
MOST_ROWS = 128  # in a sum: for more, inversion has never succeeded


def fits_rows(run: PublicRun) -> str:
    """Return why the attack cannot be tried; empty if it can."""
    if run.augmented:
        return "inputs are varied each time they are used, so there is no row to find"
    if run.has_tokens:
        return "rows hold token ids, which cannot be moved a little towards those of the gradient"
    return fits(run)


def gather_rows(truth: Truth) -> Given:
    """Return the first participant's D, confined model, gradients and rows."""
    confined.check_whole(truth)
    silo, rounds = truth.run.silos[0], _rounds(truth)
    arrays = {"rounds": np.array(rounds), "x": truth.rows(silo).x}
    for number in rounds:
        own, total = confined.local(truth, silo, number), confined.rows_of_sum(truth, number)
        others = total - own.rows
        for name, mean in confined.stepped(truth, silo, number).items():
            arrays[f"seen/{number}/{name}"] = (total * mean - own.rows * own.gradients[name]) / others
        arrays |= over(f"model/{number}/", confined.participant(truth, silo, number).model())
        arrays[f"count/{number}"] = np.array(others)
    return Given(
        views={silo: ()},
        arrays=arrays,
        view=f"none but what {silo} holds itself",
        knowledge=f"D before and after {rounds_of(len(rounds))}, the rows, the confined model and the gradients of "
        f"{silo}, and how many rows a sum is of",
    )


def _rounds(truth: Truth) -> list[int]:
    """Return the most useful rounds: those whose sums are of the fewest rows, of these the latest."""
    whole = confined.whole_sums(truth)
    chosen = sorted(whole, key=lambda k: (confined.rows_of_sum(truth, k), -k))[:ROUNDS_THOROUGH]
    others = confined.rows_of_sum(truth, chosen[0]) - len(truth.batch(truth.run.silos[0], chosen[0]))
    if others > MOST_ROWS:
        raise ParameterError(f"a sum is of {others} rows of others; inversion is tried on at most {MOST_ROWS}")
    return chosen


def attack_rows(case: Case) -> Claim:
    """Claim rows of the others' batches by round, and the rows' mean as the attacker knows it."""
    inputs, claim = Inputs.of(case.arrays["x"]), dict[str, Floats]()
    model = case.model()
    order = [name for name, value in model.named_parameters() if value.requires_grad]  # a network's first layer first
    rounds = case.arrays["rounds"].tolist()[: ROUNDS_THOROUGH if case.thorough else ROUNDS]
    for number in rounds:
        sums, own = under(f"seen/{number}/", case.arrays), under(f"model/{number}/", case.arrays)
        seen = {name: sums[name] for name in order}
        count = int(case.arrays[f"count/{number}"])
        first = quotient_start(seen, inputs, count)
        if count == 1 and first is not None:
            claim[f"found/{number}"] = first  # needs no weights, so no search among wrong ones improves it
            continue
        gradients = Gradients(model, own, seen, case.run.loss, twice=bool(case.architecture.program))
        step = gradients.step_cost(np.zeros((count, *case.run.shape)))
        effort = Effort.within(SEARCH, step, len(rounds), thorough=case.thorough)
        claim[f"found/{number}"] = invert(gradients, inputs, count, case.run.outputs, first=first, effort=effort).x
    return {name: np.clip(x, inputs.low, inputs.high) for name, x in claim.items()} | {"mean": inputs.mean}


def score_rows(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the true rows, paired, beside the mean row and rows outside training."""
    misses, lucks, batches, rows = [], [], [], 0
    nobodys = np.concatenate([truth.others.x, truth.background.x])
    generator = np.random.Generator(np.random.PCG64(0))
    for name, claimed in claim.items():
        if not name.startswith("found/"):
            continue
        number = int(name.removeprefix("found/"))
        true = np.concatenate([truth.rows(who).x[truth.batch(who, number)] for who in truth.run.silos[1:]])
        misses.append(_squares(claimed, true, claim["mean"]))
        again = len(true) > len(nobodys)  # drawn once each if there are enough
        drawn = [nobodys[generator.choice(len(nobodys), len(true), replace=again)] for _ in range(OTHERS)]
        lucks.append([
            [_squares(claimed, other, claim["mean"]) for other in drawn],
            [_squares(other, true, claim["mean"]) for other in drawn],
        ])  # fmt: skip
        batches.append({(who, row) for who in truth.run.silos[1:] for row in truth.batch(who, number).tolist()})
        rows += len(true)
    errors, unit = np.array(misses), units(batches)  # [rounds, 2]
    by_luck = np.array(lucks).transpose(1, 2, 0, 3)  # [kinds, draws, rounds, 2]
    chance = max(float(np.mean([gain(draw) for draw in draws])) for draws in by_luck)
    mse, guess = errors.sum(axis=0) / rows
    different = len(set().union(*batches))
    return AttackResult(
        measure="1 - mean squared error of rows / that of the mean row",
        score=gain(errors),
        chance=chance,
        interval=of_gain(np.array([errors[unit == group].sum(axis=0) for group in np.unique(unit)])),
        sentence=f"A participant that inverts the others' sum finds {different} rows to a mean squared error of "
        f"{mse:.2g}, where the mean row has {guess:.2g}",
        figures={
            "mse": float(mse),
            "mean_row": float(guess),
            "rows": float(different),
            "rounds": float(len(errors)),
            "units": float(unit.max() + 1),
        },
    )


def _squares(claimed: Array, true: Array, mean: Array) -> Floats:
    """Return the sums over rows of the mean squared error, rows paired, and of that of the mean row."""
    total: Floats = squares(np.nan_to_num(matched(np.nan_to_num(claimed), true)), true, mean).sum(axis=0)
    return total


INVERSION = Attack(
    name="confined-inversion",
    title="rebuilds other participants' training rows from the sum of their updates",
    severity="rows",
    role="silo",
    source="Zhu et al., NeurIPS 2019, at the attacker's own confined model; Phong et al., 2018, for one row",
    protocols=frozenset({"cgd"}),
    fits=fits_rows,
    given=gather_rows,
    attack=attack_rows,
    score=score_rows,
)


FROM = 3  # rounds: two make one difference


def fits_moments(run: PublicRun) -> str:
    """Return why the attack cannot be tried; empty if it can."""
    size = run.setting("batch-size", "data")
    if run.loss != "mse" or not run.head:
        return "second moments follow from sums only for a linear model under mse loss"
    if size and size < max(run.rows.values()):
        return "each round uses other rows, so sums of different rounds do not compare"
    return "" if len(run.recorded) >= FROM else f"it takes {FROM} recorded rounds or more"


def gather_moments(truth: Truth) -> Given:
    """Return the first participant's own D by round, and the rates."""
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
    model, run = truth.federation.model, truth.run
    generator = np.random.default_rng(0)
    weights = modules.arrays(model)
    named = set(modules.trainable(model))
    message = "the model is more than one linear layer, so its gradients are not linear in its weights"
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
    rows = x.reshape(len(x), -1).astype(np.float64)
    return np.concatenate([rows, np.ones((len(rows), 1))], axis=1) if bias else rows


def attack_moments(case: Case) -> Claim:
    """Claim A = X'X / N from the sums, and in directions with little information, from the participant's own rows."""
    steps = np.concatenate(list(np.diff(case.arrays["moved"], axis=0)))
    sums, own = case.arrays["sums"], case.arrays["own"]
    turned = np.concatenate(list(np.diff(sums, axis=0)))
    rounding = float(np.finfo(case.run.dtype).eps * np.abs(sums).max())
    expected = float(np.sqrt(np.mean(own**2) / case.arrays["own_rows"]))  # distance of own moments from those of all
    return {"moments": own + curvature(steps, turned - steps @ own, max(rounding, 1e-300) / expected)}


def curvature(steps: Floats, turned: Floats, ridge: float) -> Floats:
    """Solve turned = steps A for symmetric A by a ridge. Both are [differences * outputs, columns]."""
    u, sizes, v = np.linalg.svd(steps, full_matrices=False)
    kept = sizes**2 / (sizes**2 + ridge**2)  # the information on each direction in the steps
    reached = v.T * kept @ v  # P
    onto = v.T * (kept / np.maximum(sizes, 1e-300)) @ (u.T @ turned)  # P A
    return np.asarray(onto + onto.T - onto @ reached)


def score_moments(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with X'X / N of all rows, beside that of one's own rows.

    The interval is over the data's columns, each with its line of X'X, as if they were drawn of many like them.
    """
    bias = bool(truth.run.head_bias)
    parts = [extended(truth.rows(name).x, bias=bias) for name in truth.run.silos]
    true, own = (np.asarray(rows.T @ rows / len(rows)) for rows in (np.concatenate(parts), parts[0]))
    scores, error, guess = confined.compared(claim["moments"], true, own)
    return AttackResult(
        "1 - relative error of X'X of all rows",
        *scores,
        sentence=f"A participant works out the second moments of all participants' rows {to_error(error)}, "
        f"where those of its own rows are off by {guess:.1e}",
        figures={"relative_error": error, "own_rows": guess, "columns": float(len(true))},
    )


MOMENTS = Attack(
    name="second-moments",
    title="works out the spreads and correlations of all participants' columns",
    severity="labels",
    role="silo",
    source="g(k+1) - g(k) = (X'X / N) (D(k+1) - D(k)); contradicts Table 2 of Confined Gradient Descent",
    protocols=frozenset({"cgd"}),
    fits=fits_moments,
    given=gather_moments,
    attack=attack_moments,
    score=score_moments,
)
