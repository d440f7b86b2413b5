"""A silo computes the canonical form of the released model, and has the true model up to the order of its channels.

The release is R o W, permuted, without an offset (`practical.md`, section III-D). R leaves the function unchanged, and
so does every other member of its group: of all networks R' o W the smallest is the same for the release and for W
(`attacks.pbpfl.canonical`). The key hides from a silo only which of these equal networks the server trained.

**Steps** (`STEPS`). A silo follows the model's steps below the head, although scales and channels are drawn afresh
every round. W^(t) = P_t (R_t o W(t)) has the canonical form of W(t) (`attacks.pbpfl.canonical`). One step moves a
channel little compared to the distance between channels, so the assignment of least squared distance matches those of
two consecutive rounds. The difference is the server's step in canonical form: the part of it that changes the function.
The head is omitted, as its rows hold an unknown offset.

The result also has the cosine of the plain difference of two noisy models with the step: under the run's keys, under
fresh scales with channels in their places, and with scales that stay for the next round.
"""

from collections.abc import Sequence

import numpy as np

from moretta.audit.attacks.pbpfl.canonical import (
    Named,
    canonical,
    cosine,
    matched,
    plan_from,
    plan_of,
    structure,
    trunk,
    whole,
)
from moretta.audit.attacks.pbpfl.head_offset import key_of
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, no_head, rounds_of
from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.intervals import flat, kept, of_errors, relative_error, to_error
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Tensors
from moretta.contract.roles import over, under
from moretta.errors import ParameterError
from moretta.protocols.pbpfl.messages import TrainOn
from moretta.protocols.pbpfl.scales import ScaleKey, ScalePlan

SAME = 0.999999  # cosine
ROWS = 256  # the most for the comparison of functions
CHANCE_SEED = 20230711  # of the network with the means and deviations of the true one's tensors alone


def gather(truth: Truth) -> Given:
    """Return the release for a silo."""
    return Given(
        views={truth.run.silos[0]: ()},
        arrays=over("released/", truth.final("released.safetensors")) | structure(plan_of(truth)),
        view="no round of training",
        knowledge="the released model, which every silo receives",
    )


def attack(case: Case) -> Claim:
    """Claim all tensors of the model, its parameters in canonical form."""
    plan = plan_from(case.arrays)
    released = under("released/", case.arrays)
    parameters = canonical(plan, whole(plan, released))
    tied = {name: parameters[first] for name, first in plan.aliases.items() if first in parameters}
    return {**released, **plan.head.split(parameters), **tied}


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the canonical form of the true model, by the cosine; chance is another network's.

    A run has one release, and nothing is drawn again. The interval states how near to 1 a cosine is by luck, as for one
    relative error (`of_errors`).
    """
    plan, held = plan_of(truth), truth.final()
    true = canonical(plan, whole(plan, held))
    claimed = matched(plan, whole(plan, claim), true)
    value = cosine(claimed, true)
    generator = np.random.Generator(np.random.PCG64(CHANCE_SEED))
    drawn = {n: generator.normal(held[n].mean(), held[n].std(), held[n].shape) for n in plan.parameters}
    other = canonical(plan, whole(plan, drawn))
    chance = max(0.0, cosine(matched(plan, other, true), true))
    difference = _apart(truth, claim, held)
    error = relative_error(flat(claimed), flat(true))
    how = (
        f"equals the true one {to_error(error)}" if value >= SAME else f"has a cosine of {value:.3f} with the true one"
    )
    return AttackResult(
        measure="cosine of the released model's canonical form with the true one's",
        score=value,
        chance=chance,
        interval=kept(of_errors(np.array([max(0.0, 1.0 - value)]), 1.0 - chance)),
        sentence=f"In canonical form the model released to a silo {how}. Its outputs differ from the true model's "
        f"by {difference:.1e} of their largest",
        figures={"relative_error": error, "outputs_relative_error": difference, "free_scales": float(plan.positive)},
    )


def _apart(truth: Truth, claim: Tensors, true: Tensors) -> float:
    """Return the largest difference of outputs on a silo's rows, relative to the largest of the true ones."""
    x = truth.rows(truth.run.silos[0]).x[:ROWS]
    outputs, expected = (truth.predicted(tensors, x) for tensors in (claim, true))
    return float(np.abs(outputs - expected).max() / (np.abs(expected).max() or 1.0))


RELEASED = Attack(
    name="canonical-form",
    title="works out the true model from the released one, except for the order of its channels",
    severity="protocol",
    role="silo",
    source="the scaling and permutation symmetry of homogeneous networks; Feng et al., section III-D",
    protocols=frozenset({"pbpfl"}),
    fits=no_head,
    given=gather,
    attack=attack,
    score=score,
)


ROUNDS = 11  # only the last ones with a neighbour
MOST_ENTRIES = 20_000_000  # of all steps together


def fits_steps(run: PublicRun) -> str:
    """Return why the attack cannot be tried; empty if it can."""
    pairs = [number for number in run.training if number + 1 in run.training]
    return no_head(run) or ("" if pairs else "no two consecutive rounds were recorded")


def gather_steps(truth: Truth) -> Given:
    """Return the first silo's view."""
    silo, recorded = truth.run.silos[0], truth.recorded
    rounds = [number for number in recorded if {number - 1, number + 1} & set(recorded)][-ROUNDS:]
    return Given(
        {silo: rounds},
        structure(plan_of(truth)),
        view=f"{rounds_of(len(rounds))} of {silo}'s messages",
        knowledge="nothing",
    )


def attack_steps(case: Case) -> Claim:
    """Claim of each pair of rounds the canonical trunk before it and the step: ``before/<round>/<tensor>``."""
    (silo,) = case.views
    asks, plan = case.last_of_each_round(silo, TrainOn), plan_from(case.arrays)
    pairs = [number for number in sorted(asks) if number + 1 in asks]
    if not pairs:
        raise ParameterError(f"{silo} was sent no models in two rounds in a row")
    size = sum(array.size for array in next(iter(asks.values())).parameters.values())
    most = max(2, MOST_ENTRIES // size)
    claim: dict[str, np.ndarray] = {}
    for number in pairs[-most:]:
        before, step = step_of(plan, asks[number].parameters, asks[number + 1].parameters)
        claim |= over(f"before/{number}/", before) | over(f"step/{number}/", step)
    return claim


def step_of(plan: ScalePlan, before: Tensors, after: Tensors) -> tuple[Named, Named]:
    """Return the canonical trunk before a step and the step in it, with the channels of the former."""
    start, end = (canonical(plan, trunk(plan, tensors)) for tensors in (before, after))
    end = matched(plan, end, start)
    return start, {name: end[name] - start[name] for name in start}


def likeness(plan: ScalePlan, claimed: tuple[Named, Named], true: tuple[Named, Named]) -> tuple[float, float]:
    """Return the cosine of a claimed step with the true one, and with the true one's rows in random order.

    All steps on one kind of data share something, such as the inputs. Only that remains with rows in random order, so
    the second cosine is the score of guessing.

    Args:
        claimed, true: The trunk before a step, and the step (`step_of`).
    """
    step = matched(plan, claimed[0], true[0], claimed[1])
    generator = np.random.Generator(np.random.PCG64(0))
    shuffled = {name: generator.permutation(value, axis=0) for name, value in true[1].items()}
    return cosine(step, true[1]), cosine(step, shuffled)


def score_steps(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the true steps in canonical form: the median cosine over pairs of rounds."""
    plan = plan_of(truth)
    likenesses, plain = [], []
    for number in sorted({int(name.split("/")[1]) for name in claim}):
        claimed = under(f"before/{number}/", claim), under(f"step/{number}/", claim)
        models = [truth.parameters(number), truth.parameters(number + 1)]
        likenesses.append(likeness(plan, claimed, step_of(plan, *models)))
        plain.append(plainly(plan, models, [key_of(truth, number).scales, key_of(truth, number + 1).scales]))
    cosines, shuffled = np.array(likenesses).T
    median, guesses = float(np.median(cosines)), np.maximum(0.0, shuffled)
    fresh, in_place, staying = (float(value) for value in np.median(np.array(plain), axis=0))
    return AttackResult(
        measure="cosine of the step below the head with the true one, median over rounds",
        score=median,
        chance=float(np.median(guesses)),
        interval=kept(of_errors(np.maximum(0.0, 1.0 - cosines), 1.0 - guesses)),
        sentence=f"A silo follows the model's steps below the head in canonical form to a cosine of {median:.6f}, "
        f"although the key is fresh in every round. The plain difference of two obfuscated models has "
        f"{_short(fresh)}; with the same scales and order of channels in both it would have {_short(staying)}",
        figures={
            "rounds": float(len(cosines)),
            "lowest": float(cosines.min()),
            "plain_difference": fresh,
            "plain_difference_with_channels_in_place": in_place,
            "plain_difference_with_scales_that_stay_too": staying,
        },
    )


def _short(cosine: float) -> str:
    return f"{round(cosine, 2) + 0.0:.2f}"  # without the sign of a zero


def plainly(plan: ScalePlan, models: Sequence[Tensors], keys: Sequence[ScaleKey]) -> tuple[float, float, float]:
    """Return three cosines of a plain difference of two noisy models with the true step, below the head.

    Args:
        models: The true models of two rounds.
        keys: The keys of these rounds.

    Returns:
        The cosines under these keys, under their scales with channels in place, and under the first key's scales twice.
    """
    still = plan.identity().permutations
    in_place = [ScaleKey(key.scales, still) for key in keys]
    before, after = (trunk(plan, model) for model in models)
    step, cosines = {name: after[name] - before[name] for name in before}, []
    for first, second in (keys, in_place, (in_place[0], in_place[0])):
        noisy = [trunk(plan, plan.perturb(model, key)) for model, key in zip(models, (first, second), strict=True)]
        cosines.append(cosine({name: noisy[1][name] - noisy[0][name] for name in step}, step))
    return cosines[0], cosines[1], cosines[2]


STEPS = Attack(
    name="update-direction",
    title="follows how the true model changes from round to round",
    severity="protocol",
    role="silo",
    source="canonical forms of consecutive rounds; contradicts the confidentiality of updates in Feng et al., II-C",
    protocols=frozenset({"pbpfl"}),
    fits=fits_steps,
    given=gather_steps,
    attack=attack_steps,
    score=score_steps,
)
