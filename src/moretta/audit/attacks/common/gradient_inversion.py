"""The server searches the rows of one silo's batch in that silo's upload, or of all batches in their sum.

`evidence.inversion` has the search: the parameters of the upload are known, as the server sent them, and so is the size
of the batch. Without a secure sum the upload is the gradient. With one, the attack uses the masked words as the
gradient, as the server has nothing else of that silo alone. Under PBPFL the server's own secret turns an upload in the
clear into the true gradient, which is attacked at the true parameters.

Masks hide each upload and not the sum, which is the mean gradient of all silos' rows together: one batch, of more rows.
It is searched likewise (`OF_SUM`), which does not reveal the silo of a row. The number of rows protects them, not the
masks: with few and small inputs beside many parameters there are more equations than unknowns.

Labels of a batch are read off the head first (`attacks.common.labels_from_head`); where the search with them ends far
from the seen gradient, a second search includes labels. Claimed rows are paired with the true ones at the least error.
Chance is 0, the score of the mean background row, or the claim's score on rows outside training if that is more,
because pairing flatters.

With dp-noise an upload is attacked as it is, clipped and noised, as if it were the gradient of as many rows as an
expected lot. The scorer knows the lot from the silo's own secret.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, Reconstruction, no_training
from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.exposure import exposure, fitting, gather_rounds, read, why_not
from moretta.audit.evidence.heads import counts_from_head
from moretta.audit.evidence.intervals import gain, of_gain
from moretta.audit.evidence.inversion import (
    Effort,
    Gradients,
    Inputs,
    Inverted,
    invert,
    matched,
    pairing,
    quotient_start,
    squares,
)
from moretta.audit.evidence.network import head_inputs
from moretta.audit.evidence.truth import Truth
from moretta.audit.evidence.uploads import rows_of, sum_of, survivors
from moretta.contract.messages import Array, Tensors
from moretta.data.rows import Rows
from moretta.errors import ParameterError
from moretta.protocols.common.targets import classes_of

FAR = 1e-6  # squared relative distance from the gradient above which labels are searched for too
SEARCH = {False: (8.0, 2, 600), True: (900.0, 8, 3000)}  # thorough: for all labels (`evidence.inversion.Effort.within`)
OTHERS = 20  # draws of rows outside training
MOST_ROWS = 256  # in a batch: pairing and search grow with them


def fits(run: PublicRun) -> str:
    """Return why the attack cannot be tried; empty if it can."""
    if exposure(run).recovered and run.masked:
        return "an upload is masked, and holds terms of an obfuscated model; the sum of all is attacked instead"
    if why := unsuited(run):
        return why
    many = "every batch has more rows than this search tries"
    return "" if any(suited(run, [silo], number) for number in run.training for silo in run.silos) else many


def unsuited(run: PublicRun) -> str:
    """Return why no batches can be searched for, of any silo; empty if they can."""
    if why := why_not(run):
        return why
    if run.augmented:
        return "rows are cropped and flipped afresh in each round, so there is no fixed row to find"
    if run.has_tokens:
        return "rows hold token ids, which cannot be moved a little towards those of the gradient"
    if run.loss not in ("mse", "cross-entropy") or run.setting("class-weights"):
        return "class weights make the rows of a batch count differently"
    if not any(_one_step(run, silo) for silo in run.silos):
        return "an upload is the difference of several steps, not of one gradient"
    return no_training(run)


def suited(run: PublicRun, silos: Sequence[str], number: int) -> bool:
    """Return whether the batches of these silos in a round, taken together, can be searched for."""
    few = sum(rows_of(run, silo, number) for silo in silos) <= MOST_ROWS
    return few and all(_one_step(run, silo) for silo in silos)


def _one_step(run: PublicRun, silo: str) -> bool:
    """Return whether an upload follows from one gradient; with local epochs it is a difference of several steps."""
    if not run.setting("local-epochs"):
        return True
    steps = int(run.setting("local-epochs")) * -(-run.rows[silo] // rows_of(run, silo, 1))
    plain = not run.setting("clip-norm") and not run.setting("weight-decay")
    same = run.setting("lr-schedule") in (None, "constant") and run.setting("first-rate") is None
    return steps == 1 and plain and same


def gather(truth: Truth) -> Given:
    """Return the server's view of the first round with an upload that can be searched, and background rows."""
    for number in truth.recorded:
        for silo in survivors(truth, number):
            if suited(truth.run, [silo], number):
                return gather_of(truth, number, [silo], f"the upload of {silo} in round {number}")
    raise ParameterError(f"no upload of at most {MOST_ROWS} rows was recorded")


def gather_of(truth: Truth, number: int, silos: Sequence[str], view: str) -> Given:
    """Return a round's gradients for the server, the attacked silos, and background rows."""
    places = np.array([truth.run.silos.index(silo) for silo in silos])
    return gather_rounds(truth, {number: silos}, {"round": np.array(number), "silos": places}, view)


def attack(case: Case) -> Claim:
    """Claim x [rows, ...] and y [rows, outputs] of a silo's batch, and the distance of their gradient.

    Args:
        case: Its arrays hold ``round``, the number of the attacked round, and ``silos``, the places of the attacked
            silos.
    """
    return found_rows(case, case.run.silos[int(case.arrays["silos"][0])])


def found_rows(case: Case, silo: str = "") -> Claim:
    """Claim as `attack`, of a silo's batch, or of all batches in the sum; labels by the head first."""
    run, inputs = case.run, Inputs.of(case.arrays["x"])
    parameters, gradient, rows = read(case, int(case.arrays["round"]), silo)
    if run.setting("local-epochs"):  # a step's difference is the gradient times the learning rate
        gradient = {name: value / float(run.setting("learning-rate")) for name, value in gradient.items()}
    model = case.model()
    names = [name for name, _ in model.named_parameters() if name in gradient] or sorted(gradient)
    in_order = {name: gradient[name] for name in names}  # the model's order
    seen = Gradients(model, parameters, in_order, run.loss, twice=bool(case.architecture.program))
    labelled, first = _labels(case, parameters, gradient, rows), quotient_start(in_order, inputs, rows)
    step = seen.step_cost(np.zeros((rows, *run.shape)))
    effort = Effort.within(SEARCH, step, len(labelled), thorough=case.thorough)
    best: Inverted | None = None
    for labels in labelled:
        inverted = invert(seen, inputs, rows, run.outputs, labels=labels, first=first, effort=effort)
        best = inverted if best is None or inverted.distance < best.distance else best
        if best.distance < FAR:
            break
    of = {name: case.arrays[name] for name in ("round", "silos")}
    if best is None:
        return of
    # Inputs of the run's kind lie in the background's range; a search's values outside it are cut off.
    x = np.clip(np.nan_to_num(best.x), inputs.low, inputs.high)
    return {**of, "x": x, "y": np.nan_to_num(best.y), "distance": np.array(best.distance)}


def _labels(case: Case, parameters: Tensors, gradient: Tensors, rows: int) -> Sequence[NDArray[np.int64] | None]:
    """Return the labels to try, one after the other; None searches for them."""
    run = case.run
    if run.task != "classification" or run.loss != "cross-entropy" or not run.head or run.setting("label-smoothing"):
        return [None]
    if (run.head_bias or run.head) not in gradient:
        return [None]

    h, outputs = head_inputs(case.model(), run, parameters, case.arrays["x"])
    counts = counts_from_head(run, gradient, h, outputs, classes_of(case.arrays["y"]), rows)
    return [np.repeat(np.arange(len(counts)), counts), None]


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the silo's batch: how much less the error is than that of the mean background row."""
    silo = truth.run.silos[int(claim["silos"][0])]
    return compared(claim, truth, f"{'the masked upload' if truth.run.masked else 'the upload'} of {silo}")


def compared(claim: Claim, truth: Truth, of: str) -> AttackResult:
    """Return the result of claimed rows; rows without a claim count as the mean row. of: their source, in words."""
    number, silos = int(claim["round"]), [truth.run.silos[at] for at in claim["silos"]]
    used = exposure(truth.run).used
    true = truth.joined({silo: used(truth, silo, number) for silo in silos})
    if not len(true.x):
        raise ParameterError("the lots that silos drew in this round were empty")
    inputs = Inputs.of(truth.background.x)
    missing = np.broadcast_to(inputs.mean, (max(0, len(true.x) - len(claim["x"])), *inputs.mean.shape))
    claim = {**claim, "x": np.concatenate([claim["x"], missing])}
    ordered = matched(claim["x"], true.x)
    pairs = squares(ordered, true.x, inputs.mean)
    error, usual = (float(value) for value in pairs.mean(axis=0))
    low, high = of_gain(pairs)
    chance = _by_luck(claim["x"], len(true.x), truth, inputs)
    rows = "the row" if len(pairs) == 1 else f"the {len(pairs)} rows"
    did = f"finds {rows} in it with" if low > chance else f"looks for {rows} in it and reaches"
    sentence = f"From {of} the server {did} a mean squared error of {error:.1e}"
    sentence += f". Guessing the mean background row gives {usual:.1e}"
    figures = {
        "mean_squared_error": error,
        "of_the_mean_row": usual,
        "rows": float(len(pairs)),
        "gradient_distance": float(claim["distance"]),
    }
    if truth.run.task == "classification":
        figures["labels_right"] = _labels_right(claim, true)
    pictures = []
    if true.x.ndim == 4 and true.x.shape[1] in (1, 3):
        pictures = [Reconstruction(f"Rows of {of}, and what was found", np.asarray(true.x), ordered)]
    return AttackResult(
        measure="1 - squared error of rows / that of the mean background row",
        score=gain(pairs),
        chance=chance,
        interval=(low, high),
        sentence=sentence,
        figures=figures,
        pictures=pictures,
    )


def _by_luck(claimed: Array, rows: int, truth: Truth, inputs: Inputs) -> float:
    """Return the claim's score on rows outside training, mean over draws; at least 0, the mean row's."""
    others, generator = truth.others.x, np.random.Generator(np.random.PCG64(0))
    gains = []
    for _ in range(OTHERS):
        drawn = others[generator.integers(0, len(others), rows)]
        gains.append(gain(squares(matched(claimed, drawn), drawn, inputs.mean)))
    return float(np.mean(gains))


def _labels_right(claim: Claim, true: Rows) -> float:
    """Return the share of rows with the right class, rows paired by x."""
    pairs, labels = pairing(claim["x"], true.x), claim["y"]
    named = np.rint(labels[:, 0]) if labels.shape[1] == 1 else labels.argmax(axis=1)
    named = np.concatenate([named, np.full(len(claim["x"]) - len(named), -1)])  # rows without a claim have none
    return float(np.mean(named[pairs] == classes_of(true.y)))


ATTACK = Attack(
    name="gradient-inversion",
    title="rebuilds one silo's training rows from what it uploads",
    severity="rows",
    role="server",
    source="Zhu et al., Deep Leakage from Gradients (NeurIPS 2019); Geiping et al. (NeurIPS 2020); pbpfl's Table IV",
    protocols=fitting("gradient-inversion"),
    fits=fits,
    given=gather,
    attack=attack,
    score=score,
)


def fits_sum(run: PublicRun) -> str:
    """Return why the attack cannot be tried; empty if it can."""
    if not run.masked:
        return "uploads are in the clear, and each is attacked by itself"
    return unsuited(run)


def gather_sum(truth: Truth) -> Given:
    """Return the server's view of the first round whose sum can be searched, and background rows."""
    for number in truth.recorded:
        silos = survivors(truth, number)
        if silos and suited(truth.run, silos, number):
            return gather_of(truth, number, silos, f"{sum_of(len(silos))} in round {number}")
    raise ParameterError(f"no sum of uploads of at most {MOST_ROWS} rows was recorded")


OF_SUM = replace(
    ATTACK,
    name="gradient-inversion-of-sum",
    title="rebuilds training rows from the sum of all silos' uploads",
    source="Zhu et al., Deep Leakage from Gradients (NeurIPS 2019), of the summed gradient",
    protocols=fitting("gradient-inversion-of-sum"),
    fits=fits_sum,
    given=gather_sum,
    attack=found_rows,
    score=lambda claim, truth: compared(claim, truth, sum_of(len(claim["silos"]))),
)
