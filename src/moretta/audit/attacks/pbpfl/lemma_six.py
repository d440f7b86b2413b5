"""A silo wins the game by which Feng et al. define the security of the noisy model.

`practical.md`, Definition 2 and Lemma 6: an adversary chooses W_0 and W_1, receives W^_b of one of them and must guess
b; the paper claims that no algorithm does better than a coin. But R > 0 changes no sign and no rank, and permutations
change only their order, so these invariants distinguish most pairs:

    signs      how many entries of each row and column are positive or negative, sorted; of tensors that follow no sign
    rank       of each matrix, as diag(s) W diag(1 / s') has that of W
    canonical  the distance of canonical forms (`moretta.audit.attacks.pbpfl.canonical`)

The true model of a round is one of the two. The other is a network drawn afresh with the same mean and deviation of
every tensor, or the true one with some signs of one matrix flipped, or with one matrix of half its rank. Their order is
that of their hashes, which reveals nothing. The first invariant that differs decides. The head is omitted.
"""

from collections.abc import Callable
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from moretta.audit.attacks.pbpfl.canonical import PLAN, Named, canonical, matched, plan_from, plan_of, structure, trunk
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, first_of, no_head, no_training, rounds_of
from moretta.audit.evidence.case import FROZEN, Case
from moretta.audit.evidence.intervals import flat, of_rate, relative_error
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Array, Tensors
from moretta.contract.roles import under
from moretta.errors import ParameterError
from moretta.protocols.pbpfl.messages import TrainOn
from moretta.protocols.pbpfl.scales import ScalePlan
from moretta.secure_aggregation.keystream import digest_of

ROUNDS = 8  # only the last ones
MOST_ENTRIES = 20_000_000  # of all candidates together
FLIPPED = 0.1  # of the entries of a matrix
SMALLEST = 1e-5  # of counted singular values, relative to the largest
EQUAL = 1e-4  # distances of canonical forms whose difference rounding could explain are equal
INVARIANTS = ("signs", "rank", "canonical")

Generator = np.random.Generator


def _fresh(true: Tensors, matrix: str, generator: Generator) -> dict[str, Array]:
    """Return another network with the means and deviations of the true one's tensors."""
    return {n: generator.normal(v.mean(), v.std(), v.shape).astype(v.dtype) for n, v in true.items()}


def _flipped(true: Tensors, matrix: str, generator: Generator) -> dict[str, Array]:
    """Return the network with some signs of one matrix flipped."""
    value = true[matrix]
    signs = np.where(generator.random(value.shape) < FLIPPED, -1.0, 1.0)
    return {**true, matrix: (value * signs).astype(value.dtype)}


def _lower_rank(true: Tensors, matrix: str, generator: Generator) -> dict[str, Array]:
    """Return the network with one matrix of half its rank."""
    value = true[matrix]
    u, s, v = np.linalg.svd(value.reshape(len(value), -1).astype(np.float64), full_matrices=False)
    half = (u[:, : len(s) // 2] * s[: len(s) // 2]) @ v[: len(s) // 2]
    return {**true, matrix: half.reshape(value.shape).astype(value.dtype)}


ALTERNATIVES: dict[str, Callable[[Tensors, str, Generator], Tensors]] = {
    "fresh": _fresh,
    "flipped": _flipped,
    "lower-rank": _lower_rank,
}
"""Alternatives to the true model, made from it, its largest matrix below the head, and randomness."""


def candidates(truth: Truth, number: int, kind: str) -> tuple[list[Tensors], int]:
    """Return two candidates for the model of a round in the order of their hashes, and which one is true."""
    held = truth.parameters(number)
    true = {n: v for n, v in held.items() if v.dtype.kind == "f"}
    below = [n for n, v in true.items() if v.ndim > 1 and n not in (truth.run.head, truth.run.head_magnitude)]
    if not below:
        raise ParameterError("the model is a head alone; there is nothing below it")
    matrix = max(below, key=lambda name: true[name].size)
    seed = f"{number}/{kind}".encode()
    other = ALTERNATIVES[kind](true, matrix, np.random.Generator(np.random.PCG64(list(seed))))
    # Each game has its own hashes, or the true model's would have one place in all games of a round.
    both = sorted(((true, True), (other, False)), key=lambda candidate: sha256(seed + digest_of(candidate[0])).digest())
    return [tensors for tensors, _ in both], int(both[1][1])


def gather(truth: Truth) -> Given:
    """Return a silo's view, and for each round two candidates for the true model."""
    silo = truth.run.silos[0]
    size = sum(value.size for value in truth.parameters(truth.recorded[-1]).values())
    rounds = truth.recorded[-max(1, min(ROUNDS, MOST_ENTRIES // (2 * len(ALTERNATIVES) * size))) :]
    arrays = {
        f"{number}/{kind}/{place}/{name}": value
        for number in rounds
        for kind in ALTERNATIVES
        for place, tensors in enumerate(candidates(truth, number, kind)[0])
        for name, value in tensors.items()
    }
    return Given(
        views={silo: rounds},
        arrays=arrays | structure(plan_of(truth)),
        view=f"{rounds_of(len(rounds))} of {silo}'s messages",
        knowledge=f"{len(ALTERNATIVES)} pairs of candidates for the true model of each round, as in the paper's game",
    )


def attack(case: Case) -> Claim:
    """Claim of each game the round, the alternative, the distances by invariant [games, 3, 2], and the guess."""
    (silo,) = case.views
    plan = plan_from(case.arrays)
    noisy = {n: _seen(plan, ask.parameters) for n, ask in case.last_of_each_round(silo, TrainOn).items()}
    named = dict.fromkeys(tuple(name.split("/", 2)[:2]) for name in case.arrays if not name.startswith((PLAN, FROZEN)))
    games = [(number, kind) for number, kind in named if int(number) in noisy]
    if not games:
        raise ParameterError(f"{silo} was sent no model in these rounds")
    distances = np.array([
        np.array([
            _distances(plan, noisy[int(number)], _seen(plan, under(f"{number}/{kind}/{place}/", case.arrays)))
            for place in range(2)
        ]).T
        for number, kind in games
    ])  # fmt: skip
    kinds = [kind for _, kind in games]
    return {
        "rounds": np.array([int(number) for number, _ in games]),
        "kinds": np.array([list(ALTERNATIVES).index(kind) for kind in kinds]),
        "distances": distances,
        "guess": np.array([_guess(game) for game in distances]),
    }


def _seen(plan: ScalePlan, tensors: Tensors) -> tuple[Named, Named]:
    """Return the tensors below the head, plain and in canonical form."""
    below = trunk(plan, tensors)
    return below, canonical(plan, below)


def _distances(plan: ScalePlan, noisy: tuple[Named, Named], candidate: tuple[Named, Named]) -> list[float]:
    """Return the distance of a noisy model from a candidate, by each invariant."""
    below, form = candidate
    compared = [n for n in below if plan.parameters[n].scales(plan.free).isdisjoint(plan.signs)]
    signs = float(sum(np.abs(_signs(noisy[0][name]) - _signs(below[name])).sum() for name in compared))
    ranks = sum(abs(_rank(noisy[0][name]) - _rank(below[name])) for name in below if below[name].ndim > 1)
    return [signs, float(ranks), relative_error(flat(matched(plan, noisy[1], form)), flat(form))]


def _signs(value: Array) -> NDArray[np.int64]:
    """Return the sorted numbers of positive and of negative entries of rows and columns."""
    counts = []
    for sign in (value > 0, value < 0):
        for axis in range(min(2, value.ndim)):
            counts.append(np.sort(np.moveaxis(sign, axis, 0).reshape(value.shape[axis], -1).sum(axis=1)))
    return np.concatenate([np.atleast_1d(count) for count in counts] or [np.zeros(1)]).astype(np.int64)


def _rank(value: Array) -> int:
    values = np.linalg.svd(value.reshape(len(value), -1), compute_uv=False)
    return int((values > SMALLEST * values[0]).sum())


def _guess(distances: Array) -> int:
    """Return the nearer candidate by the first invariant that differs; the first one if none differs."""
    return next((int(two[1] < two[0]) for two, clear in zip(distances, _differ(distances), strict=True) if clear), 0)


def _differ(distances: Array) -> NDArray[np.bool_]:
    """Return whether each invariant distinguishes the two candidates. distances: [..., 3, 2]."""
    difference = np.abs(distances[..., 1] - distances[..., 0])
    return np.asarray(difference > np.array([0.0, 0.0, EQUAL]))


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Count the won games."""
    kinds = [list(ALTERNATIVES)[place] for place in claim["kinds"]]
    true = np.array([candidates(truth, int(n), kind)[1] for n, kind in zip(claim["rounds"], kinds, strict=True)])
    won, games = int((claim["guess"] == true).sum()), len(true)
    differ = _differ(claim["distances"])
    # Definition 2: |Pr(Z_0) - Pr(Z_1)|, the rates of guesses of 1 where W^ is from W_0 and from W_1.
    advantage = abs(_rate(claim["guess"], true == 1) - _rate(claim["guess"], true == 0))
    alone = (claim["distances"][..., 1] < claim["distances"][..., 0]) == true[:, None].astype(bool)
    return AttackResult(
        measure="rate of games won; in each, the obfuscated model's true one is to be guessed out of two",
        score=won / games,
        chance=0.5,
        constant=0.5,
        interval=of_rate(won, games),
        sentence=f"A silo finds out which of two models an obfuscated one was made from in {won} of {games} games, by "
        "signs, ranks and canonical forms",
        figures={
            "games": float(games),
            "advantage": advantage,
            "undecided": float((~differ.any(axis=1)).mean()),
            # A single invariant: a coin where it does not differ.
            **{n: float(np.where(differ[:, k], alone[:, k], 0.5).mean()) for k, n in enumerate(INVARIANTS)},
        },
    )


def _rate(guesses: Array, among: Array) -> float:
    """Return the rate of guesses of 1 in some games, a coin's without any."""
    return float(guesses[among].mean()) if among.any() else 0.5


ATTACK = Attack(
    name="lemma-6-distinguisher",
    title="finds out which of two models an obfuscated one was made from",
    severity="protocol",
    role="silo",
    source="signs, ranks and canonical forms; contradicts Definition 2 and Lemma 6 of Feng et al.",
    protocols=frozenset({"pbpfl"}),
    fits=first_of(no_head, no_training),
    given=gather,
    attack=attack,
    score=score,
)
