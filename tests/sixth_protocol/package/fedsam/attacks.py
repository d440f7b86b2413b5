"""A silo under FedSAM holds the true model of every round: it is what the server sends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given
from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.exposure import Exposure, Models
from moretta.audit.evidence.intervals import flat, recovered, relative_error, to_error
from moretta.contract.messages import Tensors

from .messages import TrainOn

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import Truth


def fits(run: PublicRun) -> str:
    """Say why not."""
    return "" if run.training else "no round of training was recorded"


def given(truth: Truth) -> Given:
    """Give the first silo its view of the last recorded round of training."""
    silo, number = truth.run.silos[0], truth.run.training[-1]
    return Given({silo: [number]}, {}, view=f"round {number} of {silo}", knowledge="nothing")


def attack(case: Case) -> Claim:
    """Claim the model that was sent: ``<round>/<tensor>``."""
    (silo,) = case.views
    ((number, sent),) = case.last_of_each_round(silo, TrainOn).items()
    return {f"{number}/{name}": value for name, value in sent.parameters.items()}


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the server's model; nothing at all scores 0."""
    number = int(next(iter(claim)).split("/")[0])
    true = truth.parameters(number)
    error = relative_error(flat({name: claim[f"{number}/{name}"] for name in true}), flat(true))
    found = float(recovered(error))
    return AttackResult(
        measure="1 - relative error of the model",
        score=found,
        chance=0.0,
        interval=(found, found),
        sentence=f"A silo holds the true model before round {number} {to_error(error)}",
        figures={"relative_error": error},
    )


ATTACK = Attack(
    name="model-in-the-clear",
    title="holds the model that is trained",
    severity="protocol",
    role="silo",
    source="FedSAM sends the model as it is",
    protocols=frozenset({"fedsam"}),
    fits=fits,
    given=given,
    attack=attack,
    score=score,
)


def sent(case: Case, silo: str, base: Tensors) -> Models:
    """Return the models that a silo is sent."""
    return {n: {**base, **one.parameters} for n, one in case.last_of_each_round(silo, TrainOn).items()}


EXPOSED = {"fedsam": Exposure(frozenset({"membership-inference"}), sent=sent)}
