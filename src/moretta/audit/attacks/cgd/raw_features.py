"""The head of a joint row of CGD, and participants that know D of the other columns, work out the row's raw features.

Derivation: z_i(k) = sum_j X_ij W1_ij(k) and W1_ij(k) = W1_ij(1) + D1_j(k), so

    z_i(k) - z_i(k') = X_i (D1(k) - D1(k')):

differences of z are linear in the features, and the secret starts cancel. H1 units give H1 equations per row and round,
so d unknown columns take ceil(d / H1) + 1 rounds. The head has z of its row. D1_j is held by all who hold columns j, so
by members of another row. Rounding of z is noise against features of deviation about 1, hence a ridge with that noise
for its weight. docs/cgd.md discusses the paper's bound t <= m - 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, rounds_of
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.intervals import kept, recovered, to_error
from moretta.audit.evidence.public_run import PublicRun
from moretta.errors import ParameterError

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import Truth

ROUNDS = 40  # the first so many
MOST_ROWS = 300  # of which features are worked out, unless thorough


def fits(run: PublicRun) -> str:
    """Say why not."""
    if run.setting("vertical") != "joint":
        return 'no values of a first layer travel under vertical = "independent"'
    return "" if len(run.recorded) > 1 else "it takes two recorded rounds or more"


def given(truth: Truth) -> Given:
    """Give the head's z of the others by round, and D1 of their columns by a member of another row each."""
    from moretta.audit.attacks.cgd import confined

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
    """Claim features of the others' columns, [rows, columns], and which rows these are."""
    rounds = sorted(int(name.removeprefix("z/")) for name in case.arrays if name.startswith("z/"))
    places = {number: {int(row): place for place, row in enumerate(case.arrays[f"batch/{number}"])}
              for number in rounds}  # fmt: skip
    used: dict[tuple[int, ...], list[int]] = {}  # rows by the rounds that they are in
    for row in sorted(set().union(*places.values())):
        used.setdefault(tuple(number for number in rounds if row in places[number]), []).append(row)
    rows, found = list[int](), list[NDArray[np.float64]]()
    for of, members in used.items():
        room = len(members) if case.thorough else min(len(members), MOST_ROWS - len(rows))
        if len(of) < 2 or not room:
            continue
        members = members[:room]
        z = np.stack([case.arrays[f"z/{k}"][[places[k][row] for row in members]] for k in of])
        moved = np.stack([case.arrays[f"moved/{k}"] for k in of])
        rows += members
        found.append(solved(z, moved, _noise(case, z)))
    width = case.arrays[f"moved/{rounds[0]}"].shape[1]
    return {"rows": np.array(rows, dtype=np.int64), "x": np.concatenate([np.zeros((0, width)), *found])}


def _noise(case: Case, z: NDArray[np.float64]) -> float:
    """Return how far z is off by rounding: of the run's dtype, and of the ring's fixed point."""
    return max(float(np.finfo(case.run.dtype).eps * np.sqrt(np.mean(z**2))), float(case.arrays["step"]))


def solved(z: NDArray[np.float64], moved: NDArray[np.float64], noise: float) -> NDArray[np.float64]:
    """Solve z(k) - z(1) = X (D1(k) - D1(1))' for X by a ridge. z: [K, rows, H1]; moved: [K, H1, columns]."""
    right = np.concatenate(list(z[1:] - z[0]), axis=1)  # [rows, (K - 1) H1]
    left = np.concatenate(list(moved[1:] - moved[0]))  # [(K - 1) H1, columns]
    u, sizes, v = np.linalg.svd(left, full_matrices=False)
    return np.asarray(right @ u * (sizes / (sizes**2 + max(noise, 1e-300) ** 2)) @ v)


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the features, beside the mean row of the helpers, who have such rows. The interval is over rows."""
    from moretta.audit.attacks.cgd import confined

    row = confined.JointRow.first(truth)
    if not len(claim["rows"]):
        raise ParameterError("no row was used in two recorded rounds, so that there are no differences of z")
    columns = [column for name in row.others for column in row.columns(name)]
    true = row.rows.x[claim["rows"]][:, columns].astype(np.float64)
    other = confined.JointRow(truth, row.grid, row.grid.parts[row.holders_in_other_rows()[0]].row)
    mean = np.broadcast_to(other.rows.x[:, columns].mean(axis=0), true.shape)
    error, interval = confined.compared(claim["x"], true)
    guess, _ = confined.compared(mean, true)
    return AttackResult(
        measure="1 - relative error of raw features of others' columns",
        score=float(recovered(error)),
        chance=float(recovered(guess)),
        interval=kept(interval),
        sentence=f"The head of a row, with D of the other columns, works out {true.shape[1]} raw features of "
        f"{len(true)} rows {to_error(error)}, where the mean row is off by {guess:.1e}",
        figures={"relative_error": error, "mean_row": guess, "rows": float(len(true)), "columns": float(len(columns))},
    )


ATTACK = Attack(
    name="raw-features",
    title="works out the columns that a partner holds of the rows that they share",
    severity="rows",
    role="silos together",
    source="z(k) - z(1) = X (D1(k) - D1(1)); contradicts t <= m - 2 of Confined Gradient Descent for joint rows",
    protocols=frozenset({"cgd"}),
    fits=fits,
    given=given,
    attack=attack,
    score=score,
)
