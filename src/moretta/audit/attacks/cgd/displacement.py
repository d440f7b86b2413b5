"""A participant uses CGD's displacement D as a model of its own.

Derivation: w_l(k) = w_l(1) + D(k) with w_l(1) = c + delta_l Rand_l about a public point c (0, or the model at the
start). A participant holds D, and c + D is the model of a participant whose start is c itself. Confined starts are
noise to the models that have them, and c + D has none: trained long enough, it predicts as well as they do, and for
larger delta better than any (docs/cgd.md). Confinement hides starts; a holder of D may have a trained model.

**Outsiders** (`OUTSIDER`). An outsider with D and a start of its own takes the same steps as the participants: D does
not depend on the start that it is added to. With w' = c + delta Rand' drawn about the public point c, w' + D(k) is as
good a model as any participant's. But no eavesdropper has D: a role has to disclose it. A relay that is not blind can,
as D follows from the sums that it reads: D(k+1) = D(k) - alpha_k sum n_l g_l / sum n_l. If the relay is blind, a
participant can. The attack measures what is then known.
"""

import numpy as np

from moretta.audit.attacks.cgd import confined
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, always
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.intervals import of_mean, of_rate
from moretta.audit.evidence.truth import Truth
from moretta.contract.roles import over, under
from moretta.protocols.cgd.messages import Descend

NO_FLOOR = 1e300  # R^2 has no floor


def gather(truth: Truth) -> Given:
    """Return the first participant's own D after the last recorded round, and the public point."""
    confined.check_whole(truth)
    silo, number = truth.run.silos[0], confined.after_last(truth)
    return Given(
        views={silo: ()},
        arrays=over("center/", confined.center(truth, silo, number))
        | over("moved/", confined.displacement(truth, silo, number)),
        view=f"none but what {silo} holds itself",
        knowledge=f"D after round {number - 1}, which {silo} has stepped by, and the point that starts lie around",
    )


def attack(case: Case) -> Claim:
    """Claim c + D, by tensor."""
    center = under("center/", case.arrays)
    moved = {n: (center[n] + value).astype(center[n].dtype) for n, value in under("moved/", case.arrays).items()}
    return center | moved


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the confined models on rows outside training."""
    rows, number = truth.others, confined.after_last(truth)
    hits = confined.merits(truth, claim, rows)
    merit, chance = float(hits.mean()), confined.guessing(truth, rows)
    theirs = confined.participants_scores(truth, number, rows)
    beaten = int((merit > theirs).sum())
    tasks = truth.run.task == "classification"
    return AttackResult(
        measure="accuracy of D as a model" if tasks else "R^2 of D as a model",
        score=merit,
        chance=chance,
        constant=chance if tasks else None,
        interval=of_rate(int(hits.sum()), len(hits)) if tasks else of_mean(hits, -NO_FLOOR, 1.0),
        sentence=f"A participant that uses D as a model has {confined.in_words(truth, merit)} on {len(hits)} rows "
        f"that nobody trained on. Confined models have {confined.in_words(truth, float(theirs.mean()))} on "
        f"average; D is better than {beaten} of {len(theirs)}",
        figures={
            "confined_mean": float(theirs.mean()),
            "confined_worst": float(theirs.min()),
            "confined_best": float(theirs.max()),
            "confined_beaten": beaten / len(theirs),
        },
    )


ALONE = Attack(
    name="displacement-alone",
    title="predicts with the shared sum of training steps alone",
    severity="protocol",
    role="silo",
    source="w_l(k) = w_l(1) + D(k) of Confined Gradient Descent, Algorithm 1; docs/cgd.md",
    protocols=frozenset({"cgd"}),
    fits=always,
    given=gather,
    attack=attack,
    score=score,
)


STARTS = 10  # drawn, one after the other
SEED = 0


def gather_outside(truth: Truth) -> Given:
    """Return the relayed sums from the first round on where they are readable, else a participant's D."""
    confined.check_whole(truth)
    silo, rounds = truth.run.silos[0], _from_the_first(truth)
    center = over("center/", confined.center(truth, silo, 1))
    if rounds and confined.is_readable(truth):
        return Given(
            views={"server": rounds},
            arrays=center | {"rates": np.array([confined.rate(truth, number) for number in rounds])},
            view=f"the sums that the aggregator read and relayed in rounds 1 to {rounds[-1]}",
            knowledge="the point that starts lie around, and the rate of each round",
        )
    return Given(
        views={},
        arrays=center | over("moved/", confined.displacement(truth, silo, confined.after_last(truth))),
        view="none",
        knowledge=f"D after round {confined.after_last(truth) - 1}, let out by a participant, and the point that "
        "starts lie around",
    )


def _from_the_first(truth: Truth) -> list[int]:
    return [number for place, number in enumerate(truth.recorded, 1) if number == place]


def attack_outside(case: Case) -> Claim:
    """Claim models, [starts, ...] by tensor, and "after": the round at whose end D is read."""
    center, moved = under("center/", case.arrays), under("moved/", case.arrays)
    if "server" in case.views:
        for number, sums in case.last_of_each_round("server", Descend, "sent").items():
            for name, mean in sums.tensors.items():
                moved[name] = moved.get(name, 0.0) - case.arrays["rates"][number - 1] * mean
    size, generator, models = confined.deviation(case.run), np.random.default_rng(SEED), {}
    for name, value in center.items():
        shifted = value + moved[name] if name in moved else value
        noise = size * generator.standard_normal((STARTS, *value.shape)) if name in moved else 0.0
        models[name] = (np.broadcast_to(shifted, (STARTS, *value.shape)) + noise).astype(value.dtype)
    return models


def score_outside(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the participants' own models on rows outside training. The interval is over rows."""
    rows = truth.others
    last = _from_the_first(truth) if confined.is_readable(truth) else []
    number = last[-1] + 1 if last else confined.after_last(truth)
    hits = np.array([
        confined.merits(truth, {name: value[start] for name, value in claim.items()}, rows) for start in range(STARTS)
    ])  # fmt: skip
    merit, mean = float(hits.mean()), float(confined.participants_scores(truth, number, rows).mean())
    tasks, chance = truth.run.task == "classification", confined.guessing(truth, rows)
    return AttackResult(
        measure=f"{'accuracy' if tasks else 'R^2'} of D on a start of one's own, mean of {STARTS} starts",
        score=merit,
        chance=chance,
        constant=chance if tasks else None,
        interval=of_mean(hits.mean(axis=0), 0.0 if tasks else -NO_FLOOR, 1.0),
        sentence=f"An outsider with D from {'the relay, which is not blind' if last else 'a participant'} and a start "
        f"of its own has {confined.in_words(truth, merit)}, where participants have {confined.in_words(truth, mean)} "
        "on average",
        figures={"confined_mean": mean, "worst_start": float(hits.mean(1).min()), "after_round": number - 1.0},
    )


OUTSIDER = Attack(
    name="outsider-displacement",
    title="predicts with a sum of training steps that somebody gave away",
    severity="protocol",
    role="outsider",
    source="w_l(k) = w_l(1) + D(k) of Confined Gradient Descent, Algorithm 1, with a start of nobody's",
    protocols=frozenset({"cgd"}),
    fits=always,
    given=gather_outside,
    attack=attack_outside,
    score=score_outside,
)
