"""Membership inference: whether a row was trained on, by a likelihood ratio over shadow models.

LiRA (Carlini, Chien, Nasr, Song, Terzis, Tramer: "Membership Inference Attacks From First Principles", S&P 2022,
Algorithm 1). For each candidate row the attacker, one of the silos, trains models on sets with it and without it. They
give the distribution of the model's confidence phi in the row both ways: Gaussian, with a mean mu for each row and one
deviation s for all rows (section VI-C, for few shadow models). For the model in its hands

    score(row) = log N(phi; mu_in, s_in) - log N(phi; mu_out, s_out)

Members are rows of another silo; the others are outside training. Both have as many rows of each label, or of each
range of numbers, as labels alone could otherwise distinguish one silo's rows from others.

Shadow models come in pairs: a random half of the candidates and of the background rows, and the other half; the
attacker's own rows, which the run trained on, are in all. Where the attacker saw the model of earlier rounds too, their
likelihood ratios add up (`figures`).

The same shadow models give a second score, RMIA (Zarifzadeh, Liu, Shokri: "Low-Cost High-Power Membership Inference
Attacks", ICML 2024, Eq. 2 to 4 with gamma = 2): how many background rows z the row stands out from,

    score(row) = P_z[ (p(row; model) / p(row)) / (p(z; model) / p(z)) >= gamma ],   p(.) the mean over shadow models

which needs fewer shadow models. It is among the figures.

A silo has the released model, and each round's where silos receive the true one. Under CGD it has the displacement that
all participants share, while others' confined starts stay unknown. With dp-noise the models are seen all the same, and
noise bounds what they reveal of membership; shadow models are trained with as much noise.

**A bound of epsilon from one run** (Steinke, Nasr, Jagielski: "Privacy Auditing with One (1) Training Run", NeurIPS
2023). Candidates are drawn in pairs of one label, a member and another. Where rows were assigned to silos and to test
at random, as by `test-fraction`, either of a pair was as likely to be the member. So each pair is a fair coin, and the
half of them whose losses are furthest apart are guesses of coins (`evidence.intervals.least_epsilon`). The bound uses
the loss at the attacker's model alone, as shadow models with the stated noise hide a run that has none.

Where silos train alone, the attacker is the server, to which they show their final models. This is the comparison for
federation: a model of few rows reveals more of each of them than a common model of all silos. Shadow models then train
as one silo does, on halves of candidates and background rows, as the server has no rows.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moretta.audit.evidence import shadows
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, no_training, rounds_of
from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.exposure import exposure, fitting
from moretta.audit.evidence.intervals import Floats, auc, least_epsilon
from moretta.audit.evidence.shadows import TrainingPlan
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Array, Tensors
from moretta.contract.roles import over, under
from moretta.data.rows import Rows
from moretta.engines.run_folder import read_json
from moretta.errors import ParameterError
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.targets import classes_of

CANDIDATES = 100  # members, and as many others
RANGES = 10  # of numbers; targets within one count as the same
PAIRS, PAIRS_THOROUGH = 4, 32  # of shadow models
SECONDS, SECONDS_THOROUGH = 5.0, 1200.0  # of an idle core, about, for all training; they set the steps
EARLIER = 3  # models of earlier rounds that are used too
GAMMA = 2.0  # of RMIA
RARE = 0.01  # the rate of false alarms of the stated hits
SEED = 23
HELD = "held/"  # the attacker's model at the end


def fits(run: PublicRun) -> str:
    """Return why the attack cannot be tried; empty if it can."""
    if len(run.silos) < 2:
        return "there is one silo, and it knows its own rows"
    return no_training(run)


def candidates(truth: Truth, silo: str) -> tuple[Array, Array, NDArray[np.bool_], NDArray[np.int64]]:
    """Return candidate rows of a silo and of outsiders, in the order of a hash, which is independent of membership.

    Returns:
        x, y, whether each is the silo's, and the number of its pair. A pair is a row of each kind with one label.

    Raises:
        ParameterError: No row outside training has a label of the silo's.
    """
    theirs, nobodys = truth.rows(silo), truth.others
    first, second = _same_labels(*_labels(theirs, nobodys, truth.run.task))
    if not len(first):
        raise ParameterError(
            f"no rows that nobody trained on have the labels of {silo}; expected such rows for comparison; "
            "bring test rows of those labels"
        )
    parts = [theirs.of(first), nobodys.of(second)]
    x, y = (np.concatenate([getattr(part, key) for part in parts]) for key in ("x", "y"))
    member, pair = np.arange(len(x)) < len(first), np.arange(len(x)) % len(first)
    order = sorted(range(len(x)), key=lambda row: hashlib.sha256(x[row].tobytes() + y[row].tobytes()).digest())
    return x[order], y[order], member[order], pair[order]


def _same_labels(theirs: Array, nobodys: Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of rows drawn from two kinds, as many of each label from both. theirs, nobodys: labels."""
    generator = np.random.Generator(np.random.PCG64(SEED))
    drawn, others = generator.permutation(len(theirs)), generator.permutation(len(nobodys))
    left = {label: others[nobodys[others] == label].tolist() for label in np.unique(nobodys)}
    pairs = [(row, left[theirs[row]].pop()) for row in drawn if left.get(theirs[row])][:CANDIDATES]
    first, second = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return first, second


def _labels(theirs: Rows, nobodys: Rows, task: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the labels of both: classes, or in which range numbers lie; each range has as many of theirs.

    With several numbers a row has a range each, which together are its label. Values outside all of theirs have -1.
    """
    if task == "classification":
        return classes_of(theirs.y), classes_of(nobodys.y)
    true, other = (np.asarray(rows.y, np.float64).reshape(len(rows.y), -1) for rows in (theirs, nobodys))
    count = max(2, round(RANGES ** (1 / true.shape[1])))
    edges = np.quantile(true, np.arange(1, count) / count, axis=0)
    ranges = np.concatenate([(numbers[:, None] > edges).sum(axis=1) for numbers in (true, other)])  # [rows, columns]
    labels = np.unique(ranges, axis=0, return_inverse=True)[1].ravel()
    outside = ((other < true.min(axis=0)) | (other > true.max(axis=0))).any(axis=1)
    return labels[: len(true)], np.where(outside, -1, labels[len(true) :])


def gather(truth: Truth) -> Given:
    """Return the first silo's model, its view of earlier ones, its rows, background rows, and candidates."""
    silo, shown = truth.run.silos[0], exposure(truth.run)
    x, y, *_ = candidates(truth, truth.run.silos[1])
    if shown.holding:
        model, held = f"{shown.holding.name} that it holds", shown.holding.model(truth, silo, truth.recorded[-1] + 1)
    else:
        model, held = "the model that was released to it", dict(truth.final("released.safetensors"))
    own, known = truth.rows(silo), truth.background
    recorded = truth.recorded
    few = len(recorded) <= EARLIER
    spread = [] if few else [recorded[len(recorded) * place // (EARLIER + 1)] for place in range(1, EARLIER + 1)]
    rounds = sorted({recorded[0], *spread}) if shown.sent else []
    return Given(
        views={silo: rounds} if rounds else {},
        arrays=_arrays(held, Rows(x, y), own, known),
        view=f"{model}, and its view of {rounds_of(len(rounds))}" if rounds else model,
        knowledge=f"its own {len(own.x)} rows, {len(known.x)} background rows, and {len(x)} rows, some of them members",
    )


def _arrays(held: Tensors, candidates: Rows, own: Rows, known: Rows) -> dict[str, Array]:
    some = {"": candidates, "own/": own, "known/": known}
    return over(HELD, held) | {f"{of}{key}": getattr(rows, key) for of, rows in some.items() for key in ("x", "y")}


def attack(case: Case) -> Claim:
    """Claim a score of each candidate by the attacker's final model, by all models seen, and by their loss alone."""
    shown, begin = exposure(case.run), shadows.start_of(case.model(), SEED)
    held = {**begin, **under(HELD, case.arrays)}
    earlier = shown.sent(case, next(iter(case.views)), held) if shown.sent and case.views else {}
    seen = {number: at for number, at in earlier.items() if number > 1}
    begin = shown.holding.start(begin, held, case.run) if shown.holding else earlier.get(1, begin)
    parts = [(number - 1) / case.run.rounds for number in seen]
    plan = shadows.plan_of(case.run)
    if plan.row_clip and shown.moves:
        plan = replace(plan, moves=shown.moves(case))
    return ratios(case, plan, begin, [*seen.values(), held], parts)


def ratios(case: Case, plan: TrainingPlan, begin: Tensors, held: Sequence[Tensors], parts: Sequence[float]) -> Claim:
    """Claim likelihood ratios of the case's candidates ``x`` and ``y``, of which ``known/`` and ``own/`` are others.

    Args:
        begin: The start of shadow models.
        held: The attacked models; the last one is from the end of the run.
        parts: The run's progress, 0 to 1, at each of the others.
    """
    run, model, program = case.run, case.model(), bool(case.architecture.program)
    x, y = (np.concatenate([case.arrays[key], case.arrays[f"known/{key}"]]) for key in ("x", "y"))
    own, count = (case.arrays["own/x"], case.arrays["own/y"]), len(case.arrays["x"])
    pairs, seconds = (PAIRS_THOROUGH, SECONDS_THOROUGH) if case.thorough else (PAIRS, SECONDS)
    steps = shadows.steps_of(model, plan, x, len(own[0]) + len(x) // 2, 2 * pairs, seconds)
    generator = np.random.Generator(np.random.PCG64(SEED))
    inside, confidences = list[NDArray[np.bool_]](), list[list[Array]]()

    def phi(at: Tensors) -> Array:
        return shadows.confidence(model, at, x, y, run.loss, program=program)

    for number in range(pairs):
        half = generator.permutation(len(x)) < len(x) // 2
        for chosen in (half, ~half):
            rows = np.concatenate([own[0], x[chosen]]), np.concatenate([own[1], y[chosen]])
            seed = SEED + number
            made = shadows.train(model, begin, plan, Loss(run.loss), *rows, parts, steps, seed, program=program)
            confidences.append([phi(at) for at in made])
            inside.append(chosen[:count])
    targets = [phi(at) for at in held]
    shadowed: Array = np.array(confidences)  # [shadow models, models, rows]
    scores = [
        likelihood_ratio(target[:count], shadowed[:, place, :count], np.array(inside))
        for place, target in enumerate(targets)
    ]
    return {
        "score": scores[-1],
        "together": np.sum(scores, axis=0),
        "robust": robust_ratio(targets[-1], shadowed[:, -1], count, run.loss),
        "loss": targets[-1][:count],
        "models": np.array([len(held), 2 * pairs, steps]),
    }


def likelihood_ratio(phi: Array, shadows: Array, inside: NDArray[np.bool_]) -> Floats:
    """Return log N(phi; in) - log N(phi; out) of each row.

    Args:
        phi: The attacked model's confidence, [rows].
        shadows: The confidence of shadow models, [models, rows].
        inside: Whether a row was in a shadow model's training, [models, rows].

    Source:
        LiRA, Carlini et al., S&P 2022, Algorithm 1, with one deviation for all rows (section VI-C).
    """
    total, sides = np.zeros(len(phi)), ((inside, 1.0), (~inside, -1.0))
    for side, sign in sides:
        counts = side.sum(axis=0)
        means = np.where(side, shadows, 0.0).sum(axis=0) / counts
        left = np.where(side, shadows - means, 0.0)
        variance = max(float((left**2).sum() / max(1, (counts - 1).sum())), np.finfo(np.float64).tiny)
        total += sign * (-((phi - means) ** 2) / (2 * variance) - 0.5 * np.log(variance))
    return total


def robust_ratio(phi: Array, shadows: Array, count: int, loss: str) -> Floats:
    """Return for each of the first `count` rows the part of the others from which it stands out by `GAMMA`.

    Args:
        phi: The attacked model's confidence (`moretta.audit.evidence.shadows.confidence`), [rows].
        shadows: The confidence of shadow models, [models, rows].

    Source:
        RMIA, Zarifzadeh, Liu, Shokri, ICML 2024, Eq. 2 to 4.
    """
    each, of_shadows = (value if loss == "mse" else -np.logaddexp(0.0, -value) for value in (phi, shadows))  # log p
    ratio = each - (np.logaddexp.reduce(of_shadows) - np.log(len(shadows)))
    exceeds = ratio[:count, None] - ratio[count:] >= np.log(GAMMA)
    return exceeds.astype(np.float64).mean(axis=1)  # type: ignore[no-any-return]


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Return the area under the ROC curve, and the hits at a rate of false alarms of 1 %."""
    return told_apart(claim, truth, truth.run.silos[1], "A silo distinguishes another's")


def told_apart(claim: Claim, truth: Truth, silo: str, who: str) -> AttackResult:
    """Return the finding of claimed ratios.

    Args:
        silo: The attacked silo.
        who: The start of the sentence.
    """
    *_, member, pair = candidates(truth, silo)
    area, interval = auc(claim["score"][member], claim["score"][~member])
    models, shadows, steps = (int(number) for number in claim["models"])
    hits = hits_at(claim["score"][member], claim["score"][~member])
    figures = {
        "tpr_at_1_percent_fpr": hits,
        "auc_of_loss_alone": auc(claim["loss"][member], claim["loss"][~member])[0],
        "auc_of_robust_ratio": auc(claim["robust"][member], claim["robust"][~member])[0],
        "tpr_of_robust_ratio": hits_at(claim["robust"][member], claim["robust"][~member]),
        "candidates": float(len(member)),
        "shadow_models": float(shadows),
        "shadow_steps": float(steps),
    }
    bound = ""
    if truth.run.setting("dp-noise") is not None:
        figures |= (audit := of_one_run(claim["loss"], member, pair, float(truth.run.setting("dp-delta"))))
        facts = read_json(truth.folder / "result.json")["facts"]
        claimed = facts.get("epsilon_to_silos", facts["epsilon"])  # towards another silo
        size = f"{claimed:.3g}" if isinstance(claimed, int | float) else "any size"
        bound = (
            f". If rows were dealt at random, that takes an epsilon of {audit['epsilon_at_least']:.2g} or more (one "
        )
        bound += f"run, 95 %); {size} is claimed"
    if models > 1:
        figures["auc_with_earlier_models"] = auc(claim["together"][member], claim["together"][~member])[0]
        figures["models"] = float(models)
    return AttackResult(
        measure="area under the ROC curve of distinguishing another silo's training rows from rows of the same "
        "labels that nobody trained on",
        score=area,
        chance=0.5,
        constant=0.5,
        interval=interval,
        sentence=f"{who} training rows from rows that nobody trained on with an AUC of {area:.2f}. "
        f"At a rate of false alarms of 1 % it finds {100 * hits:.0f} % of them{bound}",
        figures=figures,
    )


def of_one_run(score: Array, member: NDArray[np.bool_], pair: NDArray[np.int64], delta: float) -> dict[str, float]:
    """Return the least epsilon that explains which of each pair of candidates has the higher score."""
    ours, others = (score[side][np.argsort(pair[side])] for side in (member, ~member))
    differences = ours - others
    guessed = differences[np.argsort(-np.abs(differences))[: max(1, len(differences) // 2)]]
    right = int((guessed > 0).sum())
    least = least_epsilon(len(differences), len(guessed), right, delta)
    return {"epsilon_at_least": least, "pairs_guessed": float(len(guessed)), "pairs_right": float(right)}


def hits_at(members: Array, others: Array) -> float:
    """Return the part of members above all but `RARE` of the others."""
    return float(np.mean(members > np.quantile(others, 1.0 - RARE, method="higher")))


ATTACK = Attack(
    name="membership-inference",
    title="finds out whether a row was in another silo's training data",
    severity="members",
    role="silo",
    source="LiRA: Carlini et al., S&P 2022, Algorithm 1; RMIA: Zarifzadeh et al., ICML 2024",
    protocols=fitting("membership-inference"),
    fits=fits,
    given=gather,
    attack=attack,
    score=score,
)


def gather_alone(truth: Truth) -> Given:
    """Return the server's model of the first silo, which trained alone, background rows, and candidates."""
    silo, known = truth.run.silos[0], truth.background
    x, y, *_ = candidates(truth, silo)
    rows, model = Rows(x, y), truth.final(f"models/{silo}.safetensors")
    return Given(
        views={},
        arrays=_arrays(model, rows, rows.of(slice(0)), known),
        view=f"the model that {silo} showed it at the end",
        knowledge=f"{len(known.x)} background rows, and {len(x)} rows, some of them members",
    )


def attack_alone(case: Case) -> Claim:
    """Claim as `attack`, of one silo's model."""
    begin = shadows.start_of(case.model(), SEED)
    plan = shadows.plan_of(case.run, case.run.silos[0])
    return ratios(case, plan, begin, [{**begin, **under(HELD, case.arrays)}], [])


def score_alone(claim: Claim, truth: Truth) -> AttackResult:
    """Score as `score` does."""
    silo = truth.run.silos[0]
    return told_apart(claim, truth, silo, f"The server distinguishes {silo}'s")


OF_LOCAL_MODELS = replace(
    ATTACK,
    name="membership-of-local-models",
    title="finds out from one silo's own model whether a row was in its training data",
    role="server",
    protocols=fitting("membership-of-local-models"),
    fits=no_training,
    given=gather_alone,
    attack=attack_alone,
    score=score_alone,
)
