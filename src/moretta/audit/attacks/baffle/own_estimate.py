"""BAFFLE's uploads of whole estimates: how much of the true gradient is in what the server opens.

With `directions = "own"` silo c uploads g^_c = D_c' D_c g_c / K along K directions that it alone knows. The server has
the mean over C silos of a sum, or each g^_c where uploads are in the clear. Directions of different silos are
independent, so that, for silos of equal gradients,

    cos(g^, g)  ~  sqrt(C K / (C K + n))

as of C K shared directions. That the directions are secret takes nothing off: the estimate is unbiased, and its noise
lies in all n parameters alike.

With `linear = "activations"` silos upload, of linear layers, their gradient itself but for the finite differences'
error: the cosine is 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moretta.audit.attacks.baffle.estimates import (
    cosine,
    draws_own,
    forward_at,
    recipe_of,
    true_gradient,
    uploads_layers,
)
from moretta.audit.attacks.baffle.moves import cosine_expected
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, rounds_of
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.intervals import of_mean
from moretta.audit.evidence.public_run import PublicRun
from moretta.audit.evidence.uploads import first_rounds, of_round
from moretta.contract.messages import Array
from moretta.errors import ParameterError
from moretta.protocols.baffle.silo.estimate import directions_of
from moretta.protocols.baffle.silo.estimate_upload import ESTIMATE, Parts
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.baffle.silo.messages import Estimate

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import Truth

ROUNDS = 12  # the first so many


def fits(run: PublicRun) -> str:
    """Say why not."""
    if not (draws_own(run) or uploads_layers(run)) or run.setting("local-epochs"):
        return (
            'silos upload whole estimates with directions = "own", and of layers with linear = "activations", at the '
            "batch level alone"
        )
    if run.setting("batch-statistics"):
        return "with batch-statistics a gradient is of a whole batch, and is not computed again here"
    if run.augmented:
        return "rows are augmented anew in every round, and there is no record of what to compare with"
    if run.scheme == "additive-shares":
        return "the sums that the server opened are not put together from shares again here"
    return "" if run.recorded else "no round of training was recorded"


def given(truth: Truth) -> Given:
    """Give the server its view of the first rounds."""
    rounds, layers = list(first_rounds(truth, ROUNDS)), not draws_own(truth.run)
    if layers and not recipe_of(truth.run, forward_at(truth)).units:
        raise ParameterError("no linear layer of this model moves unit by unit, and no estimate was uploaded")
    return Given(
        views={"server": tuple(number for number in truth.run.recorded if number <= rounds[-1])},
        arrays={"rounds": np.array(rounds)},
        view=f"{rounds_of(len(rounds))} of the server",
        knowledge="nothing",
    )


def attack(case: Case) -> Claim:
    """Claim estimates [uploads, n] of rounds and silos (-1 for their sum)."""
    found = list[tuple[int, int, Array]]()
    for number in case.arrays["rounds"].tolist():
        held = of_round(case, number)
        if case.run.masked:
            found.append((number, -1, held.total().means[ESTIMATE]))
        else:
            silos = case.run.silos
            found += [(number, silos.index(silo), held.bare(silo, 1)[ESTIMATE]) for silo in held.counted]
    rounds, silos_of, estimates = zip(*found, strict=True)
    return {"rounds": np.array(rounds), "silos": np.array(silos_of), "estimates": np.array(estimates, np.float32)}


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the true gradients of the rows in each upload or sum: the mean cosine."""
    forward, counted, own, silos = forward_at(truth), first_rounds(truth, ROUNDS), draws_own(truth.run), 1
    layout, recipe = forward.layout, recipe_of(truth.run, forward)
    parts, cosines, expected = Parts.of(layout, None if own else recipe.units), list[float](), list[float]()
    for number, silo, estimate in zip(claim["rounds"], claim["silos"], claim["estimates"], strict=True):
        names = counted[int(number)] if silo < 0 else (truth.run.silos[int(silo)],)
        true, silos = _true(truth, layout, int(number), names), len(names)
        cosines.append(cosine(estimate, parts.taken(true)))
        compared = [one for one in recipe.blocks if own or one.kind == "units"]
        if compared:
            expected.append(cosine_expected(compared, layout, true, silos))
    k = (recipe.scalars if recipe.blocks else directions_of(recipe.form, recipe.most)) if own else 0
    size, mean = parts.size, float(np.mean(cosines))
    return AttackResult(
        measure="cosine between what the server opened and the true gradient",
        score=mean,
        chance=float(np.sqrt(2 / (np.pi * size))),
        interval=of_mean(np.array(cosines), -1.0, 1.0),
        sentence=(
            f"Of {silos * k} directions that the server does not know, in {size} parameters, it opens an estimate of "
            f"the silos' gradient at a cosine of {mean:.2f} with the true one"
            if own
            else f"Of {size} of {layout.size} parameters, those of linear layers, the server opens the silos' gradient "
            f"at a cosine of {mean:.4f} with the true one"
        ),
        figures={
            "directions": float(k * silos),
            "parameters": float(size),
            "cosine_expected": float(np.mean(expected or np.sqrt(silos * k / (silos * k + size)))),
            "uploads": float(len(cosines)),
        },
    )


def _true(truth: Truth, layout: Layout, number: int, names: tuple[str, ...]) -> NDArray[np.float64]:
    from moretta.audit.evidence.truth import PartyRows

    (ask,) = {id(one.message): one.message for one in truth.heard("server", number)
              if isinstance(one.message, Estimate) and one.peer == names[0]}.values()  # fmt: skip
    parts = [truth.rows(name).part(truth.batch(name, number)) for name in names]
    rows = PartyRows(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))
    return true_gradient(truth, layout, ask.parameters, rows)


ATTACK = Attack(
    name="own-estimate",
    title="learns part of the silos' update from the estimates that they upload",
    severity="protocol",
    role="server",
    source="Feng et al. (BAFFLE), Theorem 3.1, of directions that the authors' code draws at each client",
    protocols=frozenset({"baffle"}),
    fits=fits,
    given=given,
    attack=attack,
    score=score,
)
