"""A silo brings the released model into canonical form, and has the true model up to the order of its channels.

The release is R o W, permuted, without an offset (`practical.md`, section III-D). R leaves the function as it is, and
so does every other member of its group: of all networks R' o W the smallest is the same for the release and for W
(`attacks.pbpfl.canonical`). What the key keeps from a silo is which of these equal networks the server trained.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np

from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.intervals import kept, of_errors, relative_error, to_error
from moretta.audit.evidence.public_run import PublicRun
from moretta.contract.messages import Array, Tensors

if TYPE_CHECKING:
    from moretta.audit.attacks.pbpfl.canonical import Named
    from moretta.audit.evidence.truth import Truth
    from moretta.protocols.pbpfl.scales import ScalePlan

SAME = 0.999999  # cosine
ROWS = 256  # at most, on which the function is compared
CHANCE_SEED = 20230711  # of the network that knows nothing of the run


def fits(run: PublicRun) -> str:
    """Say why not."""
    return "" if run.head else "the model has no linear layer with an output each"


def given(truth: Truth) -> Given:
    """Give a silo the release."""
    from moretta.audit.attacks.pbpfl.canonical import plan_of, structure

    released = {f"released/{name}": value for name, value in truth.final("released.safetensors").items()}
    return Given(
        views={truth.run.silos[0]: ()},
        arrays=released | structure(plan_of(truth)),
        view="no round of training",
        knowledge="the released model, which every silo is given",
    )


def attack(case: Case) -> Claim:
    """Claim all tensors of the model, its parameters in canonical form."""
    from moretta.audit.attacks.pbpfl.canonical import canonical, plan_from, whole

    plan = plan_from(case.arrays)
    released = {n.removeprefix("released/"): v for n, v in case.arrays.items() if n.startswith("released/")}
    found = canonical(plan, whole(plan, released))
    tied = {name: found[first] for name, first in plan.aliases.items() if first in found}
    return {**released, **found, **tied}


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the canonical form of the true model: the cosine; chance is what another network has.

    There is one release, and nothing in it to draw again: the interval says how near to 1 a cosine comes by luck, as
    that of one relative error does (`of_errors`).
    """
    from moretta.audit.attacks.pbpfl import canonical as form
    from moretta.audit.evidence.network import flat

    plan = form.plan_of(truth)
    held = truth.final()
    true = form.canonical(plan, form.whole(plan, held))
    claimed = form.matched(plan, form.whole(plan, claim), true)
    parts = form.sums(claimed, true)
    found = form.of_sums(parts)
    other = form.canonical(plan, form.whole(plan, _unknowing(plan, held)))
    chance = max(0.0, form.cosine(form.matched(plan, other, true), true))
    apart = _apart(truth, claim, held)
    error = relative_error(flat(claimed), flat(true))
    said = f"has a cosine of {found:.3f} with the true one"
    if found >= SAME:
        said = f"is the true one {to_error(error)}"
    return AttackResult(
        measure="cosine of the released model's canonical form with the true one's",
        score=found,
        chance=chance,
        interval=kept(of_errors(np.array([max(0.0, 1.0 - found)]), 1.0 - chance)),
        sentence=f"In canonical form the model released to a silo {said}, and its outputs differ from the true model's "
        f"by {apart:.1e} of their largest",
        figures={
            "relative_error": error,
            "outputs_relative_error": apart,
            "free_scales": float(plan.free),
        },
    )


def _unknowing(plan: ScalePlan, like: Tensors) -> Named:
    """Return a network whose tensors have the true one's means and deviations, and nothing else of it."""
    generator = np.random.Generator(np.random.PCG64(CHANCE_SEED))
    return {n: generator.normal(like[n].mean(), like[n].std(), like[n].shape) for n in plan.parameters}


def _apart(truth: Truth, claim: Tensors, true: Tensors) -> float:
    """Return the largest difference of outputs on a silo's rows, relative to the largest of the true ones."""
    x = truth.rows(truth.run.silos[0]).x[:ROWS]
    found, wanted = (_outputs(truth, tensors, x) for tensors in (claim, true))
    return float(np.abs(found - wanted).max() / (np.abs(wanted).max() or 1.0))


def _outputs(truth: Truth, tensors: Tensors, x: Array) -> Array:
    import torch

    from moretta.protocols.common import modules

    model = copy.deepcopy(truth.federation.model)
    modules.load(model, tensors)
    return modules.outputs_of(model, torch.tensor(x)).double().numpy()


ATTACK = Attack(
    name="canonical-form",
    title="works out the true model from the released one, but for the order of its channels",
    severity="protocol",
    role="silo",
    source="the scaling and permutation symmetry of homogeneous networks; Feng et al., section III-D",
    protocols=frozenset({"pbpfl"}),
    fits=fits,
    given=given,
    attack=attack,
    score=score,
)
