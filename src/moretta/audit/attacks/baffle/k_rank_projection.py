"""BAFFLE's K-rank gradient estimate: how much of the true gradient the server learns, and a row from it.

With x_k = d_k . g the estimate is g^ = 1/K sum_k x_k d_k = D' D g / K, with D of shape [K, n]. As E[D' D] = K I and |D'
D g|^2 / K^2 ~ |g|^2 (1 + n / K), of which n / K lies outside of g,

    cos(g^, g)  ~  sqrt(K / (K + n)),         for a random direction E|cos|  ~  sqrt(2 / (pi n))

so what the server learns of a gradient in one round grows as sqrt(K / n) while K is below n (Feng et al., Theorem 3.1).

The K numbers themselves can be matched as gradients are by DLG (Zhu et al., NeurIPS 2019): a made-up row and label
whose own x_k come closest to those uploaded,

    min over (x, t)   |D grad L(x, t) - x_1..K|^2 / |x_1..K|^2

These are K equations in as many unknowns as a row has inputs and outputs. For a batch of one row, with K a few times
that number, they may be solved; for many rows one row can at best be an average.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moretta.audit.attacks.baffle.estimates import (
    FIXED,
    OPENED,
    Round,
    fits,
    fixed_of,
    forward_of,
    opened,
    partly_trained,
    recipe_of,
    rounds_seen,
    seeded_rounds,
    used,
)
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, Reconstruction
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.intervals import of_mean, relative_error
from moretta.audit.evidence.uploads import rows_of
from moretta.contract.messages import Array, Message
from moretta.errors import ParameterError
from moretta.protocols.baffle.silo.estimate import gradient as estimated
from moretta.protocols.baffle.silo.forward import Layout

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import PartyRows, Truth

MOST_ENTRIES = 1 << 24  # of all estimates together, and of D
STARTS, STEPS = 100, 150  # of made-up rows, and of each one's L-BFGS
SECONDS, SECONDS_THOROUGH = 2.5, 600.0  # of an idle core, about, by which starts are counted
SEED = 13


def given(truth: Truth) -> Given:
    """Give the server its view, what its sums opened to, and what a mean row is like."""
    rounds = rounds_seen(truth)
    arrays = {f"{FIXED}{name}": value for name, value in fixed_of(truth).items()}
    arrays |= opened(truth, rounds) if truth.run.masked else {}
    arrays["tokens"] = np.array(truth.run.has_tokens or truth.rows(truth.run.silos[0]).x.dtype.kind in "iu")
    return Given(
        views={"server": rounds},
        arrays=arrays,
        view=f"{len(rounds)} rounds of the server, and the sums that it opened in them",
        knowledge="nothing",
    )


def attack(case: Case) -> Claim:
    """Claim estimates [uploads, n] of rounds and silos (-1 for their sum), and one row for the smallest upload."""
    seen, recipe = seeded_rounds(case.run, case.heard("server", Message)), recipe_of(case.run)
    uploads = [one for number in seen for one in _uploads(case, number, seen[number])]
    size = next(iter(seen.values())).directions.size
    uploads = uploads[-max(1, MOST_ENTRIES // size) :]
    found = [estimated(recipe.form, x, seen[number].directions) for number, _, x in uploads]
    best = min(range(len(uploads)), key=lambda place: _rows(case, *uploads[place][:2], seen))
    row, misfit = _row(case, recipe.form, seen[uploads[best][0]], uploads[best][2])
    return {
        "rounds": np.array([number for number, _, _ in uploads]),
        "silos": np.array([silo for _, silo, _ in uploads]),
        "estimates": np.array(found, dtype=np.float32),
        "best": np.array(best),
        "row": row,
        "misfit": np.array(misfit),
    }


def _uploads(case: Case, number: int, seen: Round) -> list[tuple[int, int, NDArray[np.float64]]]:
    if case.run.masked:
        return [(number, -1, np.asarray(case.arrays[f"{OPENED}{number}"]))]
    return [(number, case.run.silos.index(silo), found) for silo, found in seen.uploads.items()]


def _rows(case: Case, number: int, silo: int, seen: Any) -> int:
    names = seen[number].silos if silo < 0 else (case.run.silos[silo],)
    return sum(rows_of(case.run, name, number) for name in names)


def _row(case: Case, form: str, seen: Round, found: NDArray[np.float64]) -> tuple[Array, float]:
    """Return the row whose own x_k come closest to those found, empty where D is too large, and by how much."""
    import torch

    # Tokens cannot be moved a little, and a program's operations may be bound to float32.
    large = seen.directions.size * seen.directions.count > MOST_ENTRIES
    if large or case.arrays["tokens"] or case.architecture.program:
        return np.zeros(0), 1.0
    known = {name.removeprefix(FIXED): torch.tensor(v) for name, v in case.arrays.items() if name.startswith(FIXED)}
    model = partly_trained(case.model(), case.run)
    layout = forward_of(case.model(), case.run, {name: value.numpy() for name, value in known.items()}).layout
    at = layout.split(np.array(seen.ask.parameters))
    held = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in at.items()}
    return matched(case, model.double(), held, known, _matrix(seen, form), torch.tensor(found))


def _matrix(seen: Round, form: str) -> Any:
    """Return D, float64[K, n]; of the form "mean" with the mean direction taken off, as its x_k have it."""
    import torch

    flat = np.zeros(seen.directions.size)
    rows = np.concatenate([part.copy() for part in seen.directions.perturbed(flat, 1.0)])
    return torch.tensor(rows - rows.mean(axis=0) if form == "mean" else rows)


def matched(case: Case, model: Any, held: Any, known: Any, matrix: Any, wanted: Any) -> tuple[Array, float]:
    """Return the made-up row that fits best, and its misfit, of several starts."""
    import torch
    from scipy.optimize import minimize

    generator = np.random.Generator(np.random.PCG64(SEED))
    best: tuple[Array, float] = np.zeros(0), np.inf
    fixed = {name: value.double() if value.is_floating_point() else value for name, value in known.items()}
    entries = int(np.prod(case.run.shape))

    def misfit(point: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        made = torch.tensor(point, requires_grad=True)
        x, label = made[:entries].reshape(1, *case.run.shape), made[None, entries:]
        outputs = torch.func.functional_call(model, {**fixed, **held}, (x,))
        value = _loss(case.run.loss, outputs, label if case.run.loss == "mse" else label.softmax(dim=1))
        slopes = torch.autograd.grad(value, list(held.values()), create_graph=True, materialize_grads=True)
        miss = (matrix @ torch.cat([one.ravel() for one in slopes]) - wanted).square().sum() / wanted.square().sum()
        (slope,) = torch.autograd.grad(miss, [made], materialize_grads=True)
        return float(miss.detach()), slope.numpy()

    for _ in range(_starts(case, model, matrix)):
        point = np.concatenate([generator.standard_normal(entries), np.zeros(case.run.outputs)])
        found = minimize(misfit, point, jac=True, method="L-BFGS-B", options={"maxiter": STEPS, "maxcor": 20})
        if found.fun < best[1]:
            best = found.x[:entries].reshape(1, *case.run.shape), float(found.fun)
    return best


def _starts(case: Case, model: Any, matrix: Any) -> int:
    from moretta.audit.evidence import work

    step = work.of_passes(model, work.of_row(model, case.run.shape), 1, work.SEARCHED) + 4.0 * matrix.numel()
    return work.times(SECONDS_THOROUGH if case.thorough else SECONDS, STEPS * step, 1, STARTS)


def _loss(name: str, outputs: Any, targets: Any) -> Any:
    if name == "mse":
        return (outputs - targets).square().sum() / 2
    return -(targets * outputs.log_softmax(dim=1)).sum()


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare the estimates with the true gradients of the rows in them; and the row with the rows of its batch."""
    seen = seeded_rounds(truth.run, [one for number in rounds_seen(truth) for one in truth.heard("server", number)])
    layout, cosines = _layout(truth), list[float]()
    units = list(zip(claim["rounds"], claim["silos"], claim["estimates"], strict=True))
    for number, silo, estimate in units:
        rows = _batch(truth, seen[int(number)], int(silo))
        cosines.append(_cosine(estimate, _true(truth, layout, seen[int(number)].ask.parameters, rows)))
    number, silo, _ = units[int(claim["best"])]
    mean, count = float(np.mean(cosines)), next(iter(seen.values())).directions.count
    figures = {
        "directions": float(count),
        "parameters": float(layout.size),
        "cosine_expected": float(np.sqrt(count / (count + layout.size))),
        "uploads": float(len(units)),
    }
    rows = _batch(truth, seen[int(number)], int(silo))
    extra, pictures = _compared(claim["row"], rows, truth)
    low, high = of_mean(np.array(cosines), -1.0, 1.0)
    return AttackResult(
        measure="cosine between the server's K-rank estimate and the true gradient",
        score=mean,
        chance=float(np.sqrt(2 / (np.pi * layout.size))),
        interval=(low, high),
        sentence=f"The server learns the silos' gradient by {count} of {layout.size} directions a round, at a cosine "
        f"of {mean:.2f} with the true one" + _said(extra, len(rows.x)),
        figures=figures | extra,
        pictures=pictures,
    )


def _said(figures: dict[str, float], rows: int) -> str:
    if not figures:
        return ""
    return (
        f", and the row that fits its numbers best is off by {figures['row_error']:.2f} of the nearest of {rows} rows, "
        f"the mean background row by {figures['mean_row_error']:.2f}"
    )


def _compared(row: Array, rows: PartyRows, truth: Truth) -> tuple[dict[str, float], list[Reconstruction]]:
    """Return the relative error of a row against the nearest in the batch, beside that of the mean background row."""
    if not row.size:
        return {}, []
    errors = [relative_error(row, one) for one in rows.x]
    mean = _mean_row(truth, rows.x.shape[1:])
    nearest = int(np.argmin(errors))
    pictures = []
    if len(truth.run.shape) == 3:
        pictures = [Reconstruction("the row that fits the uploaded numbers best", rows.x[[nearest]], row)]
    figures = {
        "row_error": errors[nearest],
        "mean_row_error": min(relative_error(mean, one) for one in rows.x),
        "rows_in_upload": float(len(rows.x)),
    }
    return figures, pictures


def _mean_row(truth: Truth, shape: tuple[int, ...]) -> Array:
    """Return the mean of the background rows, zeros where there are none."""
    try:
        return np.asarray(truth.background.x.mean(axis=0))
    except ParameterError:
        return np.zeros(shape)


def _batch(truth: Truth, seen: Round, silo: int) -> PartyRows:
    from moretta.audit.evidence.truth import PartyRows

    names = seen.silos if silo < 0 else (truth.run.silos[silo],)
    parts = [truth.rows(name).part(used(truth, seen, name)) for name in names]
    return PartyRows(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))


def _layout(truth: Truth) -> Layout:
    return forward_of(_model(truth), truth.run, {}).layout


def _model(truth: Truth) -> Any:
    import copy

    return copy.deepcopy(truth.federation.model)


def _true(truth: Truth, layout: Layout, at: Array, rows: PartyRows) -> NDArray[np.float64]:
    from moretta.audit.evidence.truth import gradient
    from moretta.protocols.common import modules

    model = _model(truth)
    tensors = {**modules.arrays(model), **layout.split(np.asarray(at))}
    for tied, name in modules.ties(model).items():
        tensors[tied] = tensors[name]
    found = gradient(model, tensors, rows, truth.loss)
    return np.concatenate([found[name].ravel() for name in layout.shapes]).astype(np.float64)


def _cosine(a: Array, b: NDArray[np.float64]) -> float:
    scale = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(np.dot(a.astype(np.float64), b)) / scale if scale else 0.0


ATTACK = Attack(
    name="k-rank-projection",
    role="server",
    source="Feng et al. (BAFFLE), Theorem 3.1; the K numbers matched as in Zhu et al., NeurIPS 2019",
    protocols=frozenset({"baffle"}),
    fits=fits,
    given=given,
    attack=attack,
    score=score,
)
