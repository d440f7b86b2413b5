"""The head of a joint row of CGD, and participants that know D of the other columns, compute the row's raw features.

Derivation: z_i(k) = sum_j X_ij W1_ij(k) and W1_ij(k) = W1_ij(1) + D1_j(k), so

    z_i(k) - z_i(k') = X_i (D1(k) - D1(k')):

differences of z are linear in the features, and the secret starts cancel. H1 units give H1 equations per row and round,
so d unknown columns take ceil(d / H1) + 1 rounds. The head has z of its row. All holders of columns j have D1_j, so
members of another row do. Rounding of z is noise against features of deviation about 1, hence a ridge weighted by that
noise. docs/cgd.md discusses the paper's bound t <= m - 2.

**Labels** (`LABELS`). A participant without labels clusters the rows of Delta, and has the labels up to their names. In
a joint row the head sends Delta_i = d(sum of losses)/dz to the holders of other columns for X_ij' Delta_i. By the chain
rule a row's Delta is (dloss/dy) U with the upper layers' Jacobian U, and dloss/dy is y^ - t (mse) or softmax(y^) - t.
While outputs are much alike for all rows, Delta depends on little but the label and the active units. So k-means on its
rows at length 1 yields the labels up to their names.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moretta.audit.attacks.cgd import confined
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, no_training, rounds_of
from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.intervals import SIDE, Floats, Interval, to_error
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Array
from moretta.errors import ParameterError
from moretta.protocols.common.targets import classes_of

ROUNDS = 40  # only the first ones
MOST_ROWS = 300  # whose features are computed, unless thorough


def fits(run: PublicRun) -> str:
    """Return why the attack cannot be tried; empty if it can."""
    if run.setting("vertical") != "joint":
        return 'no values of a first layer travel under vertical = "independent"'
    return "" if len(run.recorded) > 1 else "it takes two recorded rounds or more"


def gather(truth: Truth) -> Given:
    """Return the head's z of the others by round, and D1 of their columns by a member of another row each."""
    row, rounds = confined.JointRow.first(truth), truth.recorded[:ROUNDS]
    helpers, weight = row.holders_in_other_rows(), row.layers.weight
    arrays = {"step": np.array(2.0 ** -row.fraction_bits(rounds[0]))}
    for number in rounds:
        arrays[f"z/{number}"] = row.others_z(number)
        arrays[f"batch/{number}"] = row.batch(number)
        arrays[f"moved/{number}"] = np.concatenate(
            [confined.displacement(truth, name, number)[weight] for name in helpers], axis=1
        )
    return Given(
        views={},
        arrays=arrays,
        view=f"z of {rounds_of(len(rounds))}, as {row.head} opens it",
        knowledge=f"D of the first layer for the row's other columns, from {' and '.join(helpers)} of another row",
    )


def attack(case: Case) -> Claim:
    """Claim features of the others' columns, [rows, columns], and the numbers of these rows."""
    rounds = sorted(int(name.removeprefix("z/")) for name in case.arrays if name.startswith("z/"))
    places = {number: {int(row): place for place, row in enumerate(case.arrays[f"batch/{number}"])}
              for number in rounds}  # fmt: skip
    used: dict[tuple[int, ...], list[int]] = {}  # rows by the rounds that they are in
    for row in sorted(set().union(*places.values())):
        used.setdefault(tuple(number for number in rounds if row in places[number]), []).append(row)
    rows, features = list[int](), list[Floats]()
    for of, members in used.items():
        room = len(members) if case.thorough else min(len(members), MOST_ROWS - len(rows))
        if len(of) < 2 or not room:
            continue
        members = members[:room]
        z = np.stack([case.arrays[f"z/{k}"][[places[k][row] for row in members]] for k in of])
        moved = np.stack([case.arrays[f"moved/{k}"] for k in of])
        rows += members
        rounding = float(np.finfo(case.run.dtype).eps * np.sqrt(np.mean(z**2)))
        features.append(solved(z, moved, max(rounding, float(case.arrays["step"]))))  # of the dtype, and of the ring
    width = case.arrays[f"moved/{rounds[0]}"].shape[1]
    return {"rows": np.array(rows, dtype=np.int64), "x": np.concatenate([np.zeros((0, width)), *features])}


def solved(z: Floats, moved: Floats, noise: float) -> Floats:
    """Solve z(k) - z(1) = X (D1(k) - D1(1))' for X, [rows, columns], by a ridge.

    Args:
        z: [K, rows, H1].
        moved: D1 of each round, [K, H1, columns].
        noise: The square root of the ridge.
    """
    right = np.concatenate(list(z[1:] - z[0]), axis=1)  # [rows, (K - 1) H1]
    left = np.concatenate(list(moved[1:] - moved[0]))  # [(K - 1) H1, columns]
    u, sizes, v = np.linalg.svd(left, full_matrices=False)
    return np.asarray(right @ u * (sizes / (sizes**2 + max(noise, 1e-300) ** 2)) @ v)


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the features, beside the mean row of the helpers, who have such rows. The interval is over rows."""
    row = confined.JointRow.first(truth)
    if not len(claim["rows"]):
        raise ParameterError("no row was used in two recorded rounds, so there are no differences of z")
    columns = [column for name in row.others for column in row.columns(name)]
    true = row.rows.x[claim["rows"]][:, columns].astype(np.float64)
    other = confined.JointRow(truth, row.grid, row.grid.parts[row.holders_in_other_rows()[0]].row)
    mean = np.broadcast_to(other.rows.x[:, columns].mean(axis=0), true.shape)
    scores, error, guess = confined.compared(claim["x"], true, mean)
    return AttackResult(
        "1 - relative error of raw features of others' columns",
        *scores,
        sentence=f"The head of a row, with D of the other columns, works out {true.shape[1]} raw features of "
        f"{len(true)} rows {to_error(error)}, where the mean row is off by {guess:.1e}",
        figures={"relative_error": error, "mean_row": guess, "rows": float(len(true)), "columns": float(len(columns))},
    )


FEATURES = Attack(
    name="raw-features",
    title="works out a partner's columns of the rows that both hold",
    severity="rows",
    role="silos together",
    source="z(k) - z(1) = X (D1(k) - D1(1)); contradicts t <= m - 2 of Confined Gradient Descent for joint rows",
    protocols=frozenset({"cgd"}),
    fits=fits,
    given=gather,
    attack=attack,
    score=score,
)


STARTS = 10  # of k-means
SWEEPS = 100
DRAWS = 300  # of halves, for the interval, and of clusters assigned to random rows


def fits_labels(run: PublicRun) -> str:
    """Return why the attack cannot be tried; empty if it can."""
    if run.setting("vertical") != "joint":
        return 'no Delta travels under vertical = "independent"'
    if run.task != "classification":
        return "targets are numbers, which have no clusters"
    return no_training(run)


def gather_labels(truth: Truth) -> Given:
    """Return the Delta that a holder without labels opens, of the first recorded rounds until all rows were used."""
    row = confined.JointRow.first(truth)
    if not row.others:
        raise ParameterError("every participant in the first row holds labels; this attack needs one that does not")
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


def attack_labels(case: Case) -> Claim:
    """Claim a cluster for each used row, and the numbers of these rows."""
    rounds = sorted(int(name.removeprefix("delta/")) for name in case.arrays if name.startswith("delta/"))
    first = dict[int, Array]()  # Delta of a row when it was first used
    for number in rounds:
        delta = case.arrays[f"delta/{number}"].astype(np.float64)
        for row, value in zip(case.arrays[f"batch/{number}"].tolist(), delta, strict=True):
            first.setdefault(row, value)
    deltas = np.stack(list(first.values()))
    unit = deltas / np.maximum(np.linalg.norm(deltas, axis=1, keepdims=True), 1e-300)
    clusters = min(max(case.run.outputs, 2), len(unit))
    generator = np.random.default_rng(0)
    _, assigned = min((_k_means(unit, clusters, generator) for _ in range(STARTS)), key=lambda result: result[0])
    return {"rows": np.array(list(first), dtype=np.int64), "cluster": assigned}


def _k_means(rows: Array, clusters: int, generator: np.random.Generator) -> tuple[float, NDArray[np.int64]]:
    """Return the squared distances in all, and clusters, by Lloyd's algorithm from k-means++.

    scikit-learn's would ask the system for its threads: an attacker's process may open no such file.
    """
    centers = rows[[generator.integers(len(rows))]]
    while len(centers) < clusters:
        nearest = _squares(rows, centers).min(axis=1) + 1e-12
        centers = np.concatenate([centers, rows[[generator.choice(len(rows), p=nearest / nearest.sum())]]])
    for _ in range(SWEEPS):
        assigned = _squares(rows, centers).argmin(axis=1)
        moved = np.stack([rows[assigned == cluster].mean(axis=0) if (assigned == cluster).any() else old
                          for cluster, old in enumerate(centers)])  # fmt: skip
        if np.array_equal(moved, centers):
            break
        centers = moved
    distances = _squares(rows, centers)
    return float(distances.min(axis=1).sum()), distances.argmin(axis=1)


def _squares(rows: Array, centers: Array) -> Floats:
    cross = rows @ centers.T
    squares = np.square(rows).sum(axis=1)[:, None] + np.square(centers).sum(axis=1) - 2 * cross
    return np.asarray(np.maximum(squares, 0.0))


def score_labels(claim: Claim, truth: Truth) -> AttackResult:
    """Compare clusters with labels by the adjusted Rand index: 0 for random clusters, 1 for the labels."""
    from sklearn.metrics import adjusted_rand_score

    row = confined.JointRow.first(truth)
    labels = classes_of(row.rows.y[claim["rows"]])
    pairs = np.stack([labels, claim["cluster"]], axis=1)
    index = float(adjusted_rand_score(*pairs.T))
    return AttackResult(
        measure="adjusted Rand index of clusters and labels",
        score=index,
        chance=0.0,
        constant=0.0,
        interval=_spread(pairs, lambda some: float(adjusted_rand_score(*some.T))),
        sentence=f"A participant without labels clusters {len(pairs)} rows of Delta by label to an adjusted Rand index "
        f"of {index:.2f}",
        figures={"rows": float(len(pairs)), "classes": float(len(np.unique(labels)))},
    )


def _spread(pairs: NDArray[np.int64], statistic: Callable[[NDArray[np.int64]], float]) -> Interval:
    """Return an interval of 95 % by halves of the rows, which scatter about all of them as all do about the truth.

    Rows are not drawn with replacement, as a row drawn twice agrees with itself. Halves of few rows, or of rows nearly
    all of one label, agree by luck: where clusters assigned to random rows do as well in more than 2.5 % of draws, the
    interval includes 0.
    """
    generator, half, whole = np.random.default_rng(0), max(len(pairs) // 2, 1), statistic(pairs)
    values = [statistic(pairs[generator.permutation(len(pairs))[:half]]) for _ in range(DRAWS)]
    low, high = (float(end) for end in np.quantile(values, [SIDE, 1 - SIDE]))
    if low > 0.0:
        labels, clusters = pairs.T
        deals = [statistic(np.stack([labels, generator.permutation(clusters)], axis=1)) for _ in range(DRAWS)]
        if (1 + np.sum(np.array(deals) >= whole)) / (1 + DRAWS) > SIDE:
            low = 0.0
    return min(low, whole), max(high, whole)


LABELS = Attack(
    name="labels-from-delta",
    title="groups rows by their labels without holding the labels",
    severity="labels",
    role="silo",
    source="Delta = d loss / d z as joint rows of Confined Gradient Descent send it; docs/cgd.md",
    protocols=frozenset({"cgd"}),
    fits=fits_labels,
    given=gather_labels,
    attack=attack_labels,
    score=score_labels,
)
