"""A silo multiplies an adapter's two matrices, and has the true product in each round of PBPFL.

An adapter adds B A x to a frozen layer's output. Silos receive the frozen layer unchanged, so no scale stands before A
or behind B (`moretta.protocols.pbpfl.scales`). One scale per rank and an order of ranks are left, and both cancel:

    A^ = P diag(s) A,   B^ = B diag(1 / s) P^T,   B^ A^ = B A.

With every round's product a silo has the true step of the product too. The architecture shows which matrices belong
together: a scale multiplies the rows of one and divides the columns of the other. Where the base trains as well, scales
stand before A and behind B, and the product is that of no true matrices.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from moretta.audit.attacks.pbpfl.canonical import plan_from, plan_of, structure
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, no_training, rounds_of
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.intervals import flat, of_units, relative_error, to_error
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Array, Tensors
from moretta.errors import ParameterError
from moretta.protocols.pbpfl.messages import TrainOn
from moretta.protocols.pbpfl.scales import ScalePlan

ROUNDS = 20  # only the last ones


def gather(truth: Truth) -> Given:
    """Return a silo's view. Raises `moretta.errors.ParameterError` where nothing is frozen, or no adapter trains."""
    if not truth.frozen:
        raise ParameterError("no parameter is frozen, so each layer has scales before and after it")
    plan, silo, rounds = plan_of(truth), truth.run.silos[0], truth.recorded[-ROUNDS:]
    if not any(alone for *_, alone in pairs(plan)):
        raise ParameterError("no two trained matrices share all their scales, as those of an adapter do")
    return Given(
        {silo: rounds}, structure(plan), view=f"{rounds_of(len(rounds))} of {silo}'s messages", knowledge="nothing"
    )


def pairs(plan: ScalePlan) -> Iterator[tuple[str, str, bool]]:
    """Yield the names of A and B for each two matrices that one scale per rank joins, and if it is their only scale."""
    for first, a in plan.parameters.items():
        for second, b in plan.parameters.items():
            if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or second == plan.head.weight:
                continue
            rows = [ranks for term in a.follows if (ranks := _along(plan, term, a.shape, 0)) is not None]
            columns = [ranks for term in b.follows if (ranks := _along(plan, term, b.shape, 1)) is not None]
            inverse = [np.where(ranks < plan.free, ranks + plan.free, ranks - plan.free) for ranks in columns]
            if any(np.array_equal(ranks, other) for ranks in rows for other in inverse):
                yield first, second, len(a.follows) == len(b.follows) == 1


def _along(plan: ScalePlan, term: Array, shape: tuple[int, ...], axis: int) -> NDArray[np.int64] | None:
    """Return the place of the scale of each entry along an axis of a matrix; None if an entry has no single one."""
    places = np.broadcast_to(term % (2 * plan.free + 1), shape)
    first = places.take(0, axis=1 - axis)
    same = bool((places == np.expand_dims(first, 1 - axis)).all()) and bool((first < 2 * plan.free).all())
    return first if same else None


def adapters(plan: ScalePlan) -> list[tuple[str, str]]:
    """Return the names of A and B of each adapter; without adapters, of each two matrices that a scale joins."""
    joined = list(pairs(plan))
    return [(a, b) for a, b, alone in joined if alone] or [(a, b) for a, b, _ in joined]


def products(joined: Iterable[tuple[str, str]], tensors: Tensors) -> dict[str, Array]:
    """Return B A of each two matrices by the name of B."""
    return {b: tensors[b].astype(np.float64) @ tensors[a].astype(np.float64) for a, b in joined}


def attack(case: Case) -> Claim:
    """Claim the products ROUND/NAME of each round."""
    (silo,), joined = case.views, adapters(plan_from(case.arrays))
    return {
        f"{number}/{name}": product
        for number, ask in case.last_of_each_round(silo, TrainOn).items()
        for name, product in products(joined, ask.parameters).items()
    }


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the true products by round, except in rounds where those are 0, as before the first step."""
    joined, errors = adapters(plan_of(truth)), list[float]()
    for number in sorted({int(name.partition("/")[0]) for name in claim}):
        true = products(joined, truth.parameters(number))
        if np.any(flat(true)):
            errors.append(relative_error(flat({name: claim[f"{number}/{name}"] for name in true}), flat(true)))
    if not errors:
        raise ParameterError("the products of all adapters are 0 in these rounds")
    count = len({b for _, b in joined})
    return AttackResult(
        "1 - relative error of the adapters' products, median over rounds",
        *of_units(np.array(errors)),
        sentence=f"A silo multiplies the two matrices of each of {count} adapters and gets the true product "
        f"{to_error(float(np.median(errors)))}",
        figures={"relative_error": float(np.median(errors)), "adapters": float(count), "rounds": float(len(errors))},
    )


ATTACK = Attack(
    name="adapter-product",
    title="multiplies an adapter's two obfuscated matrices, and gets what it adds to the frozen model",
    severity="protocol",
    role="silo",
    source="B diag(1 / s) diag(s) A = B A where the layers around an adapter are frozen and public",
    protocols=frozenset({"pbpfl"}),
    fits=no_training,
    given=gather,
    attack=attack,
    score=score,
)
