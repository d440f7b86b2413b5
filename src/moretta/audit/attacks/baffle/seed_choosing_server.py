"""What a server would gain by choosing the seed of BAFFLE's directions, and whether this run's server did.

Feng et al. let the server send the seed. So it chooses the directions: along e_i, silos upload coordinate i of their
gradient; along a head's bias, their balance of classes. If directions follow from the seed by a cipher, a server cannot
set them, but it can try seeds before it sends one. Of a target v of length 1 it learns

    S(seed) = 1/K sum_k (d_k . v)^2,        E S = 1 over seeds, deviation ~ sqrt(2 / K)

times what it would learn with any seed, and the best of M seeds has S ~ 1 + sqrt(2 / K) sqrt(2 log M). With moves of
blocks S = sum_b 1/R_b sum_k (d_k . v)^2 over blocks b of R_b repeats, of v where they move; E S = 1 as well.

In Moretta all roles contribute to the seed, and each is committed before it sees another's contribution
(`moretta.protocols.baffle.silo.seeds`). The attack makes two checks. First, the view shows all commitments before the
first contribution, each contribution is the committed one, and the seed follows from them. If not, the server could
choose, and the attack succeeds for any S. Second, u is the share of M random seeds whose S lies below that of the
recorded seed; u is uniform if no role chose. A run has one u, so its interval is that of the share estimated from M
seeds, and chance is 0.975, below which an agreed seed lies with 97.5 %.

The target is the gradient of background rows at the first round's parameters: what a server would most want to see. The
attack cannot detect a choice made for another target.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from moretta.audit.attacks.baffle import estimates
from moretta.audit.attacks.baffle.estimates import Moves
from moretta.audit.evidence import network
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given
from moretta.audit.evidence.case import Case, Heard, PublicRun
from moretta.audit.evidence.intervals import Floats, of_rate
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Array, Message
from moretta.contract.roles import under
from moretta.protocols.baffle.silo.directions import Directions
from moretta.protocols.baffle.silo.forward import Forward, Layout
from moretta.protocols.baffle.silo.messages import Agree, Commit, Committed, Reveal, Revealed
from moretta.protocols.baffle.silo.seeds import SERVER, commitment
from moretta.protocols.common.losses import Loss
from moretta.secure_aggregation.keystream import SecretRoot

SEEDS, LEAST = 1 << 10, 160  # seeds that a server tries, and the fewest where directions take long; 146 suffice
SECONDS, SECONDS_THOROUGH = 4.0, 60.0  # of an idle core, approximately; they set the number of seeds
AGREED = 0.975  # an agreed seed lies below it in 39 of 40 runs
OUT_OF_ORDER = "the commitments are not in order, so that the server could choose"
INSECURE = 17  # of a fixed stream of seeds: repeated audits of a run agree


def fits(run: PublicRun) -> str:
    """Return why the attack cannot be tried; empty if it can."""
    if run.setting("local-epochs"):
        return "with local-epochs each silo has directions of its own for each step"
    if run.setting("directions") == "own":
        return 'with directions = "own" no direction follows from the seed'
    if run.setting("batch-statistics"):
        return "with batch-statistics a gradient is of a whole batch, and is not computed here"
    return "" if 1 in run.recorded else "the round in which the seed was agreed on was not recorded"


def gather(truth: Truth) -> Given:
    """Return the server's view of the first round, in which the seed was agreed on, and background rows."""
    estimates.check_scalars(truth)
    known = truth.background
    arrays = estimates.fixed_of(truth)
    return Given(
        views={"server": truth.recorded[:1]},
        arrays=arrays | {"x": known.x, "y": known.y},
        view="the first round of the server, with the agreement on the seed",
        knowledge=f"{len(known.x)} background rows, whose gradient is what it would like to see more of",
    )


def attack(case: Case) -> Claim:
    """Claim S of the recorded seed and of random seeds, and whether the agreement is in order."""
    heard = case.heard("server", Message)
    forward = estimates.forward_in(case, tokens=case.arrays["x"].dtype.kind in "iu")
    seen = next(iter(estimates.seeded_rounds(case.run, heard, forward).values()))
    target = _target(case, seen, forward.layout)
    seconds = SECONDS_THOROUGH if case.thorough else SECONDS
    seeds = network.times(seconds, estimates.drawn_at(seen.directions), LEAST, SEEDS)
    return {
        "recorded": np.array(gain(seen.directions, target)),
        "others": gains(case.run, forward, seen, target, seeds),
        "in_order": np.array(in_order(heard)),
        "k": np.array(seen.directions.count),
    }


def gain(directions: Directions | Moves, target: Floats) -> float:
    """Return S, what is learned of a target of length 1 relative to the average over directions."""
    if isinstance(directions, Moves):
        return directions.gain(target)
    total, zero = 0.0, np.zeros(directions.size)
    for together in directions.perturbed(zero, 1.0):
        total += float(np.square(together @ target).sum())
    return total / directions.count


def gains(run: PublicRun, forward: Forward, seen: estimates.Round, target: Floats, seeds: int) -> Floats:
    """Return S of `seeds` random seeds in this round."""
    recipe, root = estimates.recipe_of(run, forward), SecretRoot.insecure(INSECURE, SERVER)
    values = list[float]()
    for number in range(seeds):
        seed = root.derive("a seed that a server tries", number)
        values.append(gain(estimates.directions_at(recipe, forward.layout, seen.ask, seed), target))
    return np.array(values)


def in_order(heard: Sequence[Heard]) -> bool:
    """Return whether all silos, and the server, committed before commitments were shown, and kept to theirs."""
    committed, shown, opened = dict[str, bytes](), dict[str, bytes](), dict[str, bytes]()
    cohort, agreed = tuple[str, ...](), dict[str, bytes]()
    for entry in heard:
        match entry.message:
            case Commit():
                if shown:  # a set-up that begins again
                    committed, shown, opened = {}, {}, {}
                cohort = entry.message.cohort
            case Committed() if shown:
                return False  # it arrived when others' were already shown
            case Committed():
                committed[entry.peer] = entry.message.commitment
            case Reveal():
                shown = dict(entry.message.commitments)
            case Revealed() if not shown:
                return False
            case Revealed():
                opened[entry.peer] = entry.message.contribution
            case Agree():
                agreed = dict(entry.message.contributions)
    if set(committed) != set(cohort) or {**committed, SERVER: shown.get(SERVER)} != shown:
        return False
    same = agreed == {**opened, SERVER: agreed.get(SERVER, b"")}
    return same and all(commitment(name, value) == shown[name] for name, value in agreed.items())


def _target(case: Case, seen: estimates.Round, layout: Layout) -> Floats:
    """Return the gradient of the background rows at the round's parameters, scaled to length 1."""
    model = estimates.partly_trained(case.model(), case.run)
    at = {
        name: torch.tensor(value, requires_grad=True)
        for name, value in layout.split(np.array(seen.ask.parameters)).items()
    }
    fixed: dict[str, Any] = {name: torch.tensor(value) for name, value in under(estimates.FIXED, case.arrays).items()}
    outputs = torch.func.functional_call(model, {**fixed, **at}, (torch.tensor(case.arrays["x"]),))
    value = Loss(case.run.loss)(outputs, torch.tensor(case.arrays["y"]))
    slopes = torch.autograd.grad(value, list(at.values()), materialize_grads=True)
    flat: Array = np.concatenate([slope.numpy().ravel() for slope in slopes]).astype(np.float64)
    length = float(np.linalg.norm(flat))
    return flat / length if length else np.full(flat.size, flat.size**-0.5)


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Return u, the share of random seeds that show less of the target than the recorded one; 1 if it could choose."""
    recorded, others = float(claim["recorded"]), claim["others"]
    below, best, count = int(np.sum(others < recorded)), float(others.max()), len(others)
    order, place = bool(claim["in_order"]), below / count
    when = "all were committed before any contribution was shown" if order else OUT_OF_ORDER
    return AttackResult(
        measure="part of random seeds that show the server less of what it would like to see; 1 if it could choose",
        score=place if order else 1.0,
        chance=AGREED,
        interval=of_rate(below, count) if order else (1.0, 1.0),
        sentence=f"The recorded seed shows the server {recorded:.2f} times what seeds show on average of a gradient "
        f"that it would like to see. That is more than {100 * place:.0f} % of {count} seeds. The best of these would "
        f"have shown {best:.2f} times the average; {when}",
        figures={
            "place": place,
            "gain_recorded": recorded,
            "gain_by_choosing": best,
            "cosine_gain_by_choosing": float(np.sqrt(best)),
            "seeds": float(count),
            "in_order": float(order),
        },
    )


ATTACK = Attack(
    name="seed-choosing-server",
    title="chooses what silos measure, to learn more of their update",
    severity="protocol",
    role="server",
    source="derivation; Feng et al. (BAFFLE) let the server send the seed",
    protocols=frozenset({"baffle"}),
    fits=fits,
    given=gather,
    attack=attack,
    score=score,
)
