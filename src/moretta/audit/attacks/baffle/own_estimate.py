"""BAFFLE with `directions = "own"`: how much of the true gradient is in what the server opens.

Silo c uploads g^_c = D_c' D_c g_c / K along K directions that it alone knows. The server has the mean over C silos of a
sum, or each g^_c where uploads are in the clear. Directions of different silos are independent, so that, for silos of
equal gradients,

    cos(g^, g)  ~  sqrt(C K / (C K + n))

as of C K shared directions. That the directions are secret takes nothing off: the estimate is unbiased, and its noise
lies in all n parameters alike.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moretta.audit.attacks.baffle.estimates import forward_of
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, rounds_of
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.intervals import of_mean
from moretta.audit.evidence.public_run import PublicRun
from moretta.audit.evidence.uploads import first_rounds, of_round
from moretta.contract.messages import Array
from moretta.protocols.baffle.silo.estimate import directions_of
from moretta.protocols.baffle.silo.estimate_upload import ESTIMATE
from moretta.protocols.baffle.silo.messages import Estimate

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import Truth

ROUNDS = 12  # the first so many


def fits(run: PublicRun) -> str:
    """Say why not."""
    if run.setting("directions") != "own" or run.setting("local-epochs"):
        return 'silos upload whole estimates with directions = "own" at the batch level alone'
    if run.setting("batch-statistics"):
        return "with batch-statistics a gradient is of a whole batch, and is not computed again here"
    if run.scheme == "additive-shares":
        return "the sums that the server opened are not put together from shares again here"
    return "" if run.recorded else "no round of training was recorded"


def given(truth: Truth) -> Given:
    """Give the server its view of the first rounds."""
    rounds = list(first_rounds(truth, ROUNDS))
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
    counted, cosines, silos = first_rounds(truth, ROUNDS), list[float](), 1
    for number, silo, estimate in zip(claim["rounds"], claim["silos"], claim["estimates"], strict=True):
        names = counted[int(number)] if silo < 0 else (truth.run.silos[int(silo)],)
        cosines.append(_cosine(estimate, _true(truth, int(number), names)))
        silos = len(names)
    size, k = claim["estimates"].shape[1], directions_of(truth.run.setting("form"), int(truth.run.setting("k")))
    mean = float(np.mean(cosines))
    return AttackResult(
        measure="cosine between what the server opened and the true gradient",
        score=mean,
        chance=float(np.sqrt(2 / (np.pi * size))),
        interval=of_mean(np.array(cosines), -1.0, 1.0),
        sentence=f"Of {silos * k} directions that the server does not know, in {size} parameters, it opens an estimate "
        f"of the silos' gradient at a cosine of {mean:.2f} with the true one",
        figures={
            "directions": float(k * silos),
            "parameters": float(size),
            "cosine_expected": float(np.sqrt(silos * k / (silos * k + size))),
            "uploads": float(len(cosines)),
        },
    )


def _true(truth: Truth, number: int, names: tuple[str, ...]) -> NDArray[np.float64]:
    from moretta.audit.evidence.truth import PartyRows, gradient
    from moretta.protocols.common import modules

    (ask,) = {id(one.message): one.message for one in truth.heard("server", number)
              if isinstance(one.message, Estimate) and one.peer == names[0]}.values()  # fmt: skip
    model: Any = copy.deepcopy(truth.federation.model)
    layout = forward_of(copy.deepcopy(model), truth.run, {}).layout
    tensors = {**modules.arrays(model), **layout.split(np.asarray(ask.parameters))}
    for tied, name in modules.ties(model).items():
        tensors[tied] = tensors[name]
    parts = [truth.rows(name).part(truth.batch(name, number)) for name in names]
    rows = PartyRows(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))
    found = gradient(model, tensors, rows, truth.loss)
    return np.concatenate([found[name].ravel() for name in layout.shapes]).astype(np.float64)


def _cosine(a: Array, b: NDArray[np.float64]) -> float:
    scale = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(np.dot(a.astype(np.float64), b)) / scale if scale else 0.0


ATTACK = Attack(
    name="own-estimate",
    role="server",
    source="Feng et al. (BAFFLE), Theorem 3.1, of directions that the authors' code draws at each client",
    protocols=frozenset({"baffle"}),
    fits=fits,
    given=given,
    attack=attack,
    score=score,
)
