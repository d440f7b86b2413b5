"""A participant without labels clusters the rows of CGD's Delta, and has the labels but for their names.

Derivation: in a joint row the head sends Delta_i = d(sum of losses)/dz to the holders of other columns, so that they
take X_ij' Delta_i. By the chain rule a row's Delta is (dloss/dy) U with the upper layers' Jacobian U, and dloss/dy is
y^ - t (mse) or softmax(y^) - t: while outputs are much alike for all rows, Delta depends on the label and on which
units are active, and little else. So k-means on its rows at length 1 finds the labels up to their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.heads import classes
from moretta.audit.evidence.intervals import SIDE, Interval
from moretta.audit.evidence.public_run import PublicRun
from moretta.contract.messages import Array
from moretta.errors import ParameterError

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import Truth

STARTS = 10  # of k-means
SWEEPS = 100
DRAWS = 300  # of halves, for the interval, and of clusters dealt to rows anew


def fits(run: PublicRun) -> str:
    """Say why not."""
    if run.setting("vertical") != "joint":
        return 'no Delta travels under vertical = "independent"'
    if run.task != "classification":
        return "targets are numbers, which have no clusters"
    return "" if run.recorded else "no round of training was recorded"


def given(truth: Truth) -> Given:
    """Give a holder without labels the Delta that it opens, of the first recorded rounds until all rows were used."""
    from moretta.audit.attacks.cgd import confined

    row = confined.JointRow.first(truth)
    if not row.others:
        raise ParameterError("nobody in the first row is without labels")
    arrays, seen = dict[str, Array](), set[int]()
    for number in truth.recorded:
        batch = row.batch(number)
        if set(batch.tolist()) <= seen:
            continue
        seen |= set(batch.tolist())
        arrays[f"delta/{number}"], arrays[f"batch/{number}"] = row.delta(number), batch
        if len(seen) == len(row.rows.x):
            break
    count = len(arrays) // 2
    return Given(
        views={row.others[0]: ()},
        arrays=arrays,
        view=f"Delta of {count} round{'s' * (count > 1)}, as {row.others[0]} opens it",
        knowledge="how many classes there are",
    )


def attack(case: Case) -> Claim:
    """Claim a cluster for each row that was used, and which rows these are."""
    rounds = sorted(int(name.removeprefix("delta/")) for name in case.arrays if name.startswith("delta/"))
    first = dict[int, Array]()  # Delta of a row when it was first used
    for number in rounds:
        delta = case.arrays[f"delta/{number}"].astype(np.float64)
        for row, found in zip(case.arrays[f"batch/{number}"].tolist(), delta, strict=True):
            first.setdefault(row, found)
    deltas = np.stack(list(first.values()))
    unit = deltas / np.maximum(np.linalg.norm(deltas, axis=1, keepdims=True), 1e-300)
    clusters = min(max(case.run.outputs, 2), len(unit))
    generator = np.random.default_rng(0)
    _, found = min((_k_means(unit, clusters, generator) for _ in range(STARTS)), key=lambda one: one[0])
    return {"rows": np.array(list(first), dtype=np.int64), "cluster": found}


def _k_means(rows: Array, clusters: int, generator: np.random.Generator) -> tuple[float, NDArray[np.int64]]:
    """Return the squared distances in all, and clusters, by Lloyd's algorithm from k-means++.

    Not scikit-learn's, which asks the system for its threads: an attacker's process may open no such file.
    """
    centers = rows[[generator.integers(len(rows))]]
    while len(centers) < clusters:
        nearest = _squares(rows, centers).min(axis=1) + 1e-12
        centers = np.concatenate([centers, rows[[generator.choice(len(rows), p=nearest / nearest.sum())]]])
    for _ in range(SWEEPS):
        found = _squares(rows, centers).argmin(axis=1)
        moved = np.stack([rows[found == one].mean(axis=0) if (found == one).any() else old
                          for one, old in enumerate(centers)])  # fmt: skip
        if np.array_equal(moved, centers):
            break
        centers = moved
    distances = _squares(rows, centers)
    return float(distances.min(axis=1).sum()), distances.argmin(axis=1)


def _squares(rows: Array, centers: Array) -> NDArray[np.float64]:
    cross = rows @ centers.T
    squares = np.square(rows).sum(axis=1)[:, None] + np.square(centers).sum(axis=1) - 2 * cross
    return np.asarray(np.maximum(squares, 0.0))


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare clusters with labels by the adjusted Rand index, which is 0 of clusters at random and 1 of the labels."""
    from sklearn.metrics import adjusted_rand_score

    from moretta.audit.attacks.cgd import confined

    row = confined.JointRow.first(truth)
    labels = classes(row.rows.y[claim["rows"]])
    pairs = np.stack([labels, claim["cluster"]], axis=1)
    found = float(adjusted_rand_score(*pairs.T))
    return AttackResult(
        measure="adjusted Rand index of clusters and labels",
        score=found,
        chance=0.0,
        interval=_spread(pairs, lambda some: float(adjusted_rand_score(*some.T))),
        sentence=f"A participant without labels clusters {len(pairs)} rows of Delta by label to an adjusted Rand index "
        f"of {found:.2f}",
        figures={"rows": float(len(pairs)), "classes": float(len(np.unique(labels)))},
    )


def _spread(pairs: NDArray[np.int64], statistic: Callable[[NDArray[np.int64]], float]) -> Interval:
    """Return an interval of 95 % by halves of the rows, which scatter about all of them as all do about the truth.

    Rows are not drawn with replacement, as a row drawn twice agrees with itself. Halves of few rows, or of rows nearly
    all of one label, agree by luck: where clusters dealt to rows at random do as well in more than 2.5 % of deals, the
    interval holds 0 too.
    """
    generator, half, whole = np.random.default_rng(0), max(len(pairs) // 2, 1), statistic(pairs)
    found = [statistic(pairs[generator.permutation(len(pairs))[:half]]) for _ in range(DRAWS)]
    low, high = (float(end) for end in np.quantile(found, [SIDE, 1 - SIDE]))
    if low > 0.0:
        labels, clusters = pairs.T
        deals = [statistic(np.stack([labels, generator.permutation(clusters)], axis=1)) for _ in range(DRAWS)]
        if (1 + np.sum(np.array(deals) >= whole)) / (1 + DRAWS) > SIDE:
            low = 0.0
    return min(low, whole), max(high, whole)


ATTACK = Attack(
    name="labels-from-delta",
    title="groups rows by their labels without holding the labels",
    severity="labels",
    role="silo",
    source="Delta = d loss / d z as joint rows of Confined Gradient Descent send it; docs/cgd.md",
    protocols=frozenset({"cgd"}),
    fits=fits,
    given=given,
    attack=attack,
    score=score,
)
