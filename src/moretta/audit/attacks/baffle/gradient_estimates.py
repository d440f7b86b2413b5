"""BAFFLE's K-rank gradient estimate: how much of the true gradient the server learns, and a row from it.

With x_k = d_k . g the estimate is g^ = 1/K sum_k x_k d_k = D' D g / K, with D of shape [K, n]. As E[D' D] = K I and |D'
D g|^2 / K^2 ~ |g|^2 (1 + n / K), of which n / K lies outside of g,

    cos(g^, g)  ~  sqrt(K / (K + n)),         for a random direction E|cos|  ~  sqrt(2 / (pi n))

so what the server learns of a gradient in one round grows as sqrt(K / n) while K is below n (Feng et al., Theorem 3.1).

With moves of blocks the estimate is assembled block by block, and its cosine is of the parameters that have moves:
E|g^|^2 of each kind of block is in `moretta.protocols.baffle.silo.blocks`.

The K numbers themselves can be matched as DLG matches gradients (Zhu et al., NeurIPS 2019): a made-up row and label
whose own x_k are closest to the uploaded ones,

    min over (x, t)   |D grad L(x, t) - x_1..K|^2 / |x_1..K|^2

These are K equations in as many unknowns as a row has inputs and outputs. For a batch of one row, with K a few times
that number, they may be solved; for many rows one row can at best be an average.

**Whole estimates** (`OWN`). With `directions = "own"` silo c uploads g^_c = D_c' D_c g_c / K along K directions that it
alone knows. The server has the mean over C silos of a sum, or each g^_c where uploads are in the clear. Directions of
different silos are independent, so that, for silos of equal gradients,

    cos(g^, g)  ~  sqrt(C K / (C K + n))

as of C K shared directions. Secret directions do not lower this: the estimate is unbiased, and its noise lies in all n
parameters alike. With `linear = "activations"` silos upload linear layers' gradients, exact up to the finite
differences' error: the cosine is 1.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from moretta.audit.attacks.baffle import estimates
from moretta.audit.attacks.baffle.estimates import Moves, cosine_expected
from moretta.audit.evidence import network
from moretta.audit.evidence.attack import (
    Attack,
    AttackResult,
    Claim,
    Given,
    Reconstruction,
    augmented,
    no_training,
    rounds_of,
)
from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.intervals import Floats, of_mean, relative_error
from moretta.audit.evidence.inversion import Effort, Gradients, Inputs, invert
from moretta.audit.evidence.truth import Truth
from moretta.audit.evidence.uploads import first_rounds, of_round
from moretta.contract.messages import Array, Message
from moretta.contract.roles import under
from moretta.data.rows import Rows
from moretta.errors import ParameterError
from moretta.protocols.baffle.silo.directions import Directions
from moretta.protocols.baffle.silo.estimate import ESTIMATE, Parts, directions_of, gradient
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.baffle.silo.messages import Estimate

MOST_ENTRIES = 1 << 24  # of all estimates together, and of D
STARTS, STEPS = 100, 150  # of made-up rows, and of L-BFGS for each
SECONDS, SECONDS_THOROUGH = 2.5, 600.0  # of an idle core, approximately; they set the number of starts
SEED = 13


def gather(truth: Truth) -> Given:
    """Return the server's view, its opened sums, and a mean row."""
    tokens = truth.run.has_tokens or truth.rows(truth.run.silos[0]).x.dtype.kind in "iu"
    return estimates.gather_numbers(truth, {"tokens": np.array(tokens)}, "nothing")


def attack(case: Case) -> Claim:
    """Claim estimates [uploads, n] of rounds and silos (-1 for their sum), and one row for the smallest upload."""
    forward = estimates.forward_in(case, tokens=bool(case.arrays["tokens"]))
    seen = estimates.seeded_rounds(case.run, case.heard("server", Message), forward)
    form = estimates.recipe_of(case.run).form
    uploads = estimates.uploads_of(case, seen)
    size = next(iter(seen.values())).directions.size
    uploads = uploads[-max(1, MOST_ENTRIES // size) :]
    values = [
        of.estimate(x) if isinstance(of := seen[number].directions, Moves) else gradient(form, x, of)
        for number, _, x, _ in uploads
    ]
    best = min(range(len(uploads)), key=lambda place: uploads[place][3])
    row, misfit = _row(case, form, forward.layout, seen[uploads[best][0]], uploads[best][2])
    return {
        "rounds": np.array([number for number, *_ in uploads]),
        "silos": np.array([silo for _, silo, *_ in uploads]),
        "estimates": np.array(values, dtype=np.float32),
        "best": np.array(best),
        "row": row,
        "misfit": np.array(misfit),
    }


def _row(case: Case, form: str, layout: Layout, seen: estimates.Round, uploaded: Floats) -> tuple[Array, float]:
    """Return the row whose own x_k are closest to those seen, and their distance; empty where D is too large."""
    of = seen.directions
    entries = of.products if isinstance(of, Moves) else of.size * of.count
    # Tokens have no small changes, and a program's operations may be bound to float32.
    if entries > MOST_ENTRIES or case.arrays["tokens"] or case.architecture.program:
        return np.zeros(0), 1.0
    model, at = estimates.partly_trained(case.model(), case.run), layout.split(np.array(seen.ask.parameters))
    linear, tensors = (list(at), _numbers(of, form, list(at))), {**under(estimates.FIXED, case.arrays), **at}
    gradients = Gradients(model, tensors, {"x": uploaded}, case.run.loss, linear=linear)
    row = network.cost_of_passes(model, network.cost_of_row(model, case.run.shape), 1, network.SEARCHED)
    seconds = SECONDS_THOROUGH if case.thorough else SECONDS
    starts = network.times(seconds, STEPS * (row + 4.0 * entries), 1, STARTS)
    anywhere = Inputs(*(np.full(case.run.shape, value) for value in (0.0, 1.0, -np.inf, np.inf)))
    best = invert(gradients, anywhere, 1, case.run.outputs, effort=Effort(starts, STEPS), seed=SEED)
    return best.x, best.distance


def _numbers(of: Directions | Moves, form: str, names: Sequence[str]) -> Callable[[Sequence[Any]], Any]:
    """Return a function to D g, float64[K], from the gradients of these tensors, in the flat array's order.

    For the form "mean" the mean direction is subtracted from D, as in its x_k.
    """
    if isinstance(of, Moves):
        return lambda slopes: of.along(dict(zip(names, slopes, strict=True)))
    rows = np.concatenate([part.copy() for part in of.perturbed(np.zeros(of.size), 1.0)])
    matrix = torch.tensor(rows - rows.mean(axis=0) if form == "mean" else rows)
    return lambda slopes: matrix @ torch.cat([slope.ravel() for slope in slopes])


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare the estimates with the true gradients of the rows in them; and the row with the rows of its batch."""
    forward, heard = estimates.forward_at(truth), truth.heard("server", *estimates.rounds_seen(truth))
    seen, layout = estimates.seeded_rounds(truth.run, heard, forward), forward.layout
    of = next(iter(seen.values())).directions
    count, covered = of.count, of.covered if isinstance(of, Moves) else np.ones(layout.size, bool)
    units = list(zip(claim["rounds"], claim["silos"], claim["estimates"], strict=True))
    size, cosines, expected = int(covered.sum()), list[float](), list[float]()
    for number, silo, estimate in units:
        rows = _batch(truth, seen[int(number)], int(silo))
        true = estimates.true_gradient(truth, layout, seen[int(number)].ask.parameters, rows) * covered
        cosines.append(estimates.cosine(estimate, true))
        blocks = of.recipe.blocks if isinstance(of, Moves) else ()
        expected.append(cosine_expected(blocks, layout, true) if blocks else np.sqrt(count / (count + size)))
    number, silo, _ = units[int(claim["best"])]
    mean = float(np.mean(cosines))
    rows = _batch(truth, seen[int(number)], int(silo))
    extra, pictures = _compared(claim["row"], rows, truth)
    sentence = f"The server learns the silos' gradient along {count} of {size} directions a round"
    sentence += ", each of one block of layers" * isinstance(of, Moves)
    return _finding(
        cosines,
        {"directions": count, "parameters": size, "cosine_expected": np.mean(expected)},
        extra,
        measure="cosine between the server's K-rank estimate and the true gradient",
        sentence=f"{sentence}, at a cosine of {mean:.2f} with the true one{_figures_of(extra, len(rows.x))}",
        pictures=pictures,
    )


def _finding(
    cosines: Sequence[float],
    figures: Mapping[str, Any],
    extra: Mapping[str, float],
    *,
    measure: str,
    sentence: str,
    pictures: Sequence[Reconstruction] = (),
) -> AttackResult:
    """Return the mean cosine, beside a random direction's. cosines: by upload. figures, extra: before and after."""
    return AttackResult(
        measure=measure,
        score=float(np.mean(cosines)),
        chance=float(np.sqrt(2 / (np.pi * figures["parameters"]))),
        interval=of_mean(np.array(cosines), -1.0, 1.0),
        sentence=sentence,
        figures={name: float(value) for name, value in figures.items()} | {"uploads": float(len(cosines)), **extra},
        pictures=pictures,
    )


def _figures_of(figures: dict[str, float], rows: int) -> str:
    if not figures:
        return ""
    return (
        f". The row that fits its numbers best has a relative error of {figures['row_error']:.2f} to the nearest of "
        f"{rows} rows, the mean background row one of {figures['mean_row_error']:.2f}"
    )


def _compared(row: Array, rows: Rows, truth: Truth) -> tuple[dict[str, float], list[Reconstruction]]:
    """Return the relative error of a row against the nearest in the batch, beside that of the mean background row."""
    if not row.size:
        return {}, []
    errors = [relative_error(row, true) for true in rows.x]
    mean = _mean_row(truth, rows.x.shape[1:])
    nearest = int(np.argmin(errors))
    pictures = []
    if len(truth.run.shape) == 3:
        pictures = [Reconstruction("the row that fits the uploaded numbers best", rows.x[[nearest]], row)]
    figures = {
        "row_error": errors[nearest],
        "mean_row_error": min(relative_error(mean, true) for true in rows.x),
        "rows_in_upload": float(len(rows.x)),
    }
    return figures, pictures


def _mean_row(truth: Truth, shape: tuple[int, ...]) -> Array:
    """Return the mean of the background rows, zeros without such rows."""
    try:
        return np.asarray(truth.background.x.mean(axis=0))
    except ParameterError:
        return np.zeros(shape)


def _batch(truth: Truth, seen: estimates.Round, silo: int) -> Rows:
    names = seen.silos if silo < 0 else (truth.run.silos[silo],)
    return truth.joined({name: estimates.used(truth, seen, name) for name in names})


K_RANK = Attack(
    name="k-rank-projection",
    title="learns part of the silos' update from the few numbers that they upload",
    severity="protocol",
    role="server",
    source="Feng et al. (BAFFLE), Theorem 3.1; the K numbers matched as in Zhu et al., NeurIPS 2019",
    protocols=frozenset({"baffle"}),
    fits=estimates.fits,
    given=gather,
    attack=attack,
    score=score,
)


FIRST = 12  # only the first ones


def fits_own(run: PublicRun) -> str:
    """Return why the attack cannot be tried; empty if it can."""
    if not (estimates.draws_own(run) or estimates.uploads_layers(run)) or run.setting("local-epochs"):
        return (
            'silos upload whole estimates with directions = "own", and of layers with linear = "activations", at the '
            "batch level alone"
        )
    if run.setting("batch-statistics"):
        return "with batch-statistics a gradient is of a whole batch, and is not computed again here"
    if run.scheme == "additive-shares" and not run.augmented:
        return "the sums that the server opened are not put together from shares again here"
    return augmented(run) or no_training(run)


def gather_own(truth: Truth) -> Given:
    """Return the server's view of the first rounds."""
    rounds, layers = list(first_rounds(truth, FIRST)), not estimates.draws_own(truth.run)
    if layers and not estimates.recipe_of(truth.run, estimates.forward_at(truth)).units:
        raise ParameterError("no linear layer of this model moves unit by unit, and no estimate was uploaded")
    return Given(
        views={"server": tuple(number for number in truth.run.recorded if number <= rounds[-1])},
        arrays={"rounds": np.array(rounds)},
        view=f"{rounds_of(len(rounds))} of the server's messages",
        knowledge="nothing",
    )


def attack_own(case: Case) -> Claim:
    """Claim estimates [uploads, n] of rounds and silos (-1 for their sum)."""
    claims = list[tuple[int, int, Array]]()
    for number in case.arrays["rounds"].tolist():
        held = of_round(case, number)
        if case.run.masked:
            claims.append((number, -1, held.total().means[ESTIMATE]))
        else:
            silos = case.run.silos
            claims += [(number, silos.index(silo), held.bare(silo, 1)[ESTIMATE]) for silo in held.counted]
    rounds, silos_of, values = zip(*claims, strict=True)
    return {"rounds": np.array(rounds), "silos": np.array(silos_of), "estimates": np.array(values, np.float32)}


def score_own(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the true gradients of the rows in each upload or sum: the mean cosine."""
    forward, own = estimates.forward_at(truth), estimates.draws_own(truth.run)
    counted, silos = first_rounds(truth, FIRST), 1
    layout, recipe = forward.layout, estimates.recipe_of(truth.run, forward)
    parts, cosines, expected = Parts.of(layout, None if own else recipe.units), list[float](), list[float]()
    for number, silo, estimate in zip(claim["rounds"], claim["silos"], claim["estimates"], strict=True):
        names = counted[int(number)] if silo < 0 else (truth.run.silos[int(silo)],)
        (ask,) = truth.messages("server", int(number), Estimate, names[0])
        rows = truth.joined({name: truth.batch(name, int(number)) for name in names})
        true, silos = estimates.true_gradient(truth, layout, ask.parameters, rows), len(names)
        cosines.append(estimates.cosine(estimate, parts.taken(true)))
        compared = [block for block in recipe.blocks if own or block.kind == "units"]
        if compared:
            expected.append(cosine_expected(compared, layout, true, silos))
    at_once = directions_of(recipe.form, estimates.settings_of(truth.run).directions_at_once)
    k = (recipe.scalars if recipe.blocks else at_once) if own else 0
    size, mean = parts.size, float(np.mean(cosines))
    if own:
        sentence = f"Of {silos * k} directions that the server does not know, in {size} parameters, it opens an "
        sentence += f"estimate of the silos' gradient at a cosine of {mean:.2f} with the true one"
    else:
        sentence = f"Of {size} of {layout.size} parameters, those of linear layers, the server opens the silos' "
        sentence += f"gradient at a cosine of {mean:.4f} with the true one"
    likely = np.mean(expected or np.sqrt(silos * k / (silos * k + size)))
    figures = {"directions": k * silos, "parameters": size, "cosine_expected": likely}
    return _finding(
        cosines,
        figures,
        {},
        measure="cosine between what the server opened and the true gradient",
        sentence=sentence,
    )


OWN = Attack(
    name="own-estimate",
    title="learns part of the silos' update from the estimates that they upload",
    severity="protocol",
    role="server",
    source="Feng et al. (BAFFLE), Theorem 3.1, of directions that the authors' code draws at each client",
    protocols=frozenset({"baffle"}),
    fits=fits_own,
    given=gather_own,
    attack=attack_own,
    score=score_own,
)
