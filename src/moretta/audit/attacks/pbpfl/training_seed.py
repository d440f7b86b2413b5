"""A silo with the run file builds the true model of round 1: initial weights follow from its seed alone.

`moretta.models.catalogue.build` draws weights from the seed of the run file, which silos usually hold too, as they draw
batches by it. The distance of W(1) from them follows from them (`moretta.protocols.common.modules`), so W^(1) / W(1) is
R itself. Later rounds do not follow, as they need the other silos' gradients, nor does a warm start from a file that
only the server has.
"""

import numpy as np

from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given
from moretta.audit.evidence.case import Architecture, Case, PublicRun, torch_dtype
from moretta.audit.evidence.intervals import flat, recovered, relative_error, to_error
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Tensors
from moretta.errors import ParameterError
from moretta.protocols.common import modules

ANOTHER = 1_000_003  # further on, the seed whose weights give the score of guessing


def fits(run: PublicRun) -> str:
    """Return why the attack cannot be tried; empty if it can."""
    return "" if 1 in run.recorded else "the first round was not recorded"


def gather(truth: Truth) -> Given:
    """Return the seed for a silo. Raises `moretta.errors.ParameterError` where the weights do not follow from it."""
    if truth.architecture.program:
        raise ParameterError("the model was made in Python: no seed of a run file leads to its weights")
    settings = truth.federation.spec.settings
    if settings.get("protocol", {}).get("warm-start"):
        raise ParameterError("the model started warm: the seed does not lead to its weights")
    seed = int(settings["run"]["seed"])
    silo = truth.run.silos[0]
    return Given({silo: ()}, {"seed": np.array(seed)}, view="no message", knowledge="the run file with its seed")


def attack(case: Case) -> Claim:
    """Claim the true model of round 1."""
    return _weights(case.architecture, case.run, int(case.arrays["seed"]))


def _weights(made: Architecture, run: PublicRun, seed: int) -> Tensors:
    return modules.arrays(modules.first_weights(made.built(run, seed)).to(torch_dtype(run)))


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the true model before round 1."""
    true = truth.parameters(1)
    error = _error(claim, true)
    another = int(truth.federation.spec.settings["run"]["seed"]) + ANOTHER
    guess = _error(_weights(truth.architecture, truth.run, another), true)
    share = float(recovered(error))
    return AttackResult(
        measure="1 - relative error of the model before round 1",
        score=share,
        chance=float(recovered(guess)),
        interval=(share, share),
        sentence=f"A holder of the run file's seed builds the true model before round 1 {to_error(error)}",
        figures={"relative_error": error, "relative_error_of_another_seed": guess},
    )


def _error(claimed: Tensors, true: Tensors) -> float:
    """Return the relative error over all tensors of floats."""
    real = {name for name, value in true.items() if value.dtype.kind == "f"}
    return relative_error(*(flat({name: model[name] for name in real}) for model in (claimed, true)))


ATTACK = Attack(
    name="training-seed",
    title="rebuilds the model's first weights from the run file",
    severity="protocol",
    role="silo",
    source="initial weights are a function of the run file's seed",
    protocols=frozenset({"pbpfl"}),
    fits=fits,
    given=gather,
    attack=attack,
    score=score,
)
