"""A participant of CGD takes its own part off the sum: of two, what is left is the other's gradient.

Derivation: all step by G / N = sum_l n_l g_l / sum_l n_l, so with D(k) - D(k+1) = alpha_k G / N a participant i has
N (D(k) - D(k+1)) / alpha_k - n_i g_i = sum of n_l g_l over the others: with two participants the other's, exactly, in
each round. With three it is a sum of two, which is taken here for that of one of them and misses.

**Rows** (`INVERSION`). Gradient inversion looks for rows whose gradient at known weights is that one; here the weights
are secret. But w_l(k) - w_i(k) = w_l(1) - w_i(1) for all k, of a size in proportion to delta, so the attacker's own
w_i(k) stands in for w_l(k). It is the nearer, the smaller delta is beside what all have moved by. One way needs no
weights: for one row, each line of the first layer's gradient is the row times the same line of the bias's gradient
(`evidence.inversion`), so no confined start hides it.

Rows found are paired with the true ones so that the error is least. That flatters: of many rows in few columns one is
near by luck. So chance is the largest of three: what the claim scores on as many rows that nobody trained on, what such
rows score as a claim, and 0, the mean row's score. Rows of a round are found and paired together, so rounds are the
units; rounds that share rows count as one.

Labels are searched for as class probabilities, so smoothed labels are found as well. CGD has no class weights and no
noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moretta.audit.attacks.cgd import confined
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, no_training, rounds_of
from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.intervals import Floats, flat, gain, of_gain, of_units, relative_error, to_error, units
from moretta.audit.evidence.uploads import over
from moretta.contract.messages import Array
from moretta.contract.roles import under
from moretta.errors import ParameterError

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import Truth

FIRST = 10  # the first so many


def fits(run: PublicRun) -> str:
    """Say why not."""
    return no_training(run) if len(run.silos) > 1 else "there is one participant, and nobody else"


def given(truth: Truth) -> Given:
    """Give the first participant the steps of its own D and its own gradients, flat."""
    confined.check_whole(truth)
    silo, rounds = truth.run.silos[0], confined.whole_sums(truth)[:FIRST]
    own = [confined.local(truth, silo, number) for number in rounds]
    return Given(
        views={silo: ()},
        arrays={
            "rounds": np.array(rounds),
            "means": np.array([flat(confined.stepped(truth, silo, number)) for number in rounds]),
            "own": np.array([one.rows * flat(one.gradients) for one in own]),
            "totals": np.array([confined.rows_of_sum(truth, number) for number in rounds], dtype=np.float64),
        },
        view=f"none but what {silo} holds itself",
        knowledge=f"D before and after {rounds_of(len(rounds))}, the gradients of {silo}, and how many rows a sum "
        "is of",
    )


def attack(case: Case) -> Claim:
    """Claim another's n_l g_l of each round, [rounds, parameters]."""
    given = case.arrays
    return {"rounds": given["rounds"], "other": given["totals"][:, None] * given["means"] - given["own"]}


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the true n_l g_l of the participant with the most rows, beside an equal share of the sum."""
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
        "1 - relative error of another's gradient, median over rounds",
        *of_units(np.array(errors), np.array(guesses)),
        sentence=f"A participant that takes its own part off the sum of {len(others) + 1} has another's gradient "
        f"{to_error(error)}, where the mean of all is off by {guess:.1e}",
        figures={"relative_error": error, "mean_of_all": guess, "rounds": float(len(errors))},
    )


TWO_PARTIES = Attack(
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


ROUNDS = 6  # of the smallest batches, the latest: by then all have moved by more than their starts differ
ROUNDS_THOROUGH = 10
SEARCH = {False: (2.0, 3, 300), True: (300.0, 8, 300)}  # thorough: for all rounds (`evidence.inversion.Effort.within`)
OTHERS = 20  # draws of rows that nobody trained on
MOST_ROWS = 128  # in a sum: of more, inversion has never found any


def fits_rows(run: PublicRun) -> str:
    """Say why not."""
    if run.augmented:
        return "inputs are varied each time they are used, so that there is no row to find"
    if run.has_tokens:
        return "rows hold token ids, which cannot be moved a little towards those of the gradient"
    return fits(run)


def given_rows(truth: Truth) -> Given:
    """Give the first participant its D, its confined model, its gradients and its rows."""
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
    """Return the rounds that are worth most: whose sums are of the fewest rows, of these the latest."""
    whole = confined.whole_sums(truth)
    chosen = sorted(whole, key=lambda k: (confined.rows_of_sum(truth, k), -k))[:ROUNDS_THOROUGH]
    others = confined.rows_of_sum(truth, chosen[0]) - len(truth.batch(truth.run.silos[0], chosen[0]))
    if others > MOST_ROWS:
        raise ParameterError(
            f"a sum is of {others} rows of others, more than the {MOST_ROWS} that inversion is tried on"
        )
    return chosen


def attack_rows(case: Case) -> Claim:
    """Claim rows of the others' batches by round, and the rows' mean as the attacker knows it."""
    from moretta.audit.evidence.inversion import Effort, Gradients, Inputs, invert, quotient_start

    inputs, claim = Inputs.of(case.arrays["x"]), dict[str, Floats]()
    model = case.model()
    order = [name for name, one in model.named_parameters() if one.requires_grad]  # a network's first layer first
    rounds = case.arrays["rounds"].tolist()[: ROUNDS_THOROUGH if case.thorough else ROUNDS]
    for number in rounds:
        sums, own = under(f"seen/{number}/", case.arrays), under(f"model/{number}/", case.arrays)
        seen = {name: sums[name] for name in order}
        count = int(case.arrays[f"count/{number}"])
        first = quotient_start(seen, inputs, count)
        if count == 1 and first is not None:
            claim[f"found/{number}"] = first  # needs no weights, so no search among wrong ones betters it
            continue
        gradients = Gradients(model, own, seen, case.run.loss, twice=bool(case.architecture.program))
        step = gradients.step_cost(np.zeros((count, *case.run.shape)))
        effort = Effort.within(SEARCH, step, len(rounds), thorough=case.thorough)
        claim[f"found/{number}"] = invert(gradients, inputs, count, case.run.outputs, first=first, effort=effort).x
    return {name: np.clip(one, inputs.low, inputs.high) for name, one in claim.items()} | {"mean": inputs.mean}


def score_rows(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the true rows, paired, beside the mean row and rows that nobody trained on."""
    misses, lucks, batches, rows = [], [], [], 0
    nobodys = np.concatenate([truth.others.x, truth.background.x])
    generator = np.random.Generator(np.random.PCG64(0))
    for name, found in claim.items():
        if not name.startswith("found/"):
            continue
        number = int(name.removeprefix("found/"))
        true = np.concatenate([truth.rows(who).x[truth.batch(who, number)] for who in truth.run.silos[1:]])
        misses.append(_squares(found, true, claim["mean"]))
        again = len(true) > len(nobodys)  # none is drawn twice where there are enough
        drawn = [nobodys[generator.choice(len(nobodys), len(true), replace=again)] for _ in range(OTHERS)]
        lucks.append([
            [_squares(found, one, claim["mean"]) for one in drawn],
            [_squares(one, true, claim["mean"]) for one in drawn],
        ])  # fmt: skip
        batches.append({(who, row) for who in truth.run.silos[1:] for row in truth.batch(who, number).tolist()})
        rows += len(true)
    errors, unit = np.array(misses), units(batches)  # [rounds, 2]
    by_luck = np.array(lucks).transpose(1, 2, 0, 3)  # [kinds, draws, rounds, 2]
    chance = max(float(np.mean([gain(one) for one in draws])) for draws in by_luck)
    mse, guess = errors.sum(axis=0) / rows
    different = len(set().union(*batches))
    return AttackResult(
        measure="1 - mean squared error of rows / that of the mean row",
        score=gain(errors),
        chance=chance,
        interval=of_gain(np.array([errors[unit == one].sum(axis=0) for one in np.unique(unit)])),
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


def _squares(found: Array, true: Array, mean: Array) -> Floats:
    """Return the sums over rows of the mean squared error, rows paired, and of that of the mean row."""
    from moretta.audit.evidence.inversion import matched, squares

    total: Floats = squares(np.nan_to_num(matched(np.nan_to_num(found), true)), true, mean).sum(axis=0)
    return total


INVERSION = Attack(
    name="confined-inversion",
    title="rebuilds other participants' training rows from the sum of their updates",
    severity="rows",
    role="silo",
    source="Zhu et al., NeurIPS 2019, at the attacker's own confined model; Phong et al., 2018, for one row",
    protocols=frozenset({"cgd"}),
    fits=fits_rows,
    given=given_rows,
    attack=attack_rows,
    score=score_rows,
)
