"""The server of PBPFL learns the softmax of every sample under cross-entropy, and something of its features.

Derivation: each silo sends z = y^ - max y^ and alpha of every row of its batch in the clear, not through the secure sum
(`practical.md`, Eq. 21). The server knows r, so softmax(z - alpha r) is the true softmax of the row; its largest entry
is a guess of the label. Here alpha is the sum of the perturbed features s o h. The server itself sent W^ = W / s + r
with permuted columns. With its own head W, b it has, for the penultimate features h of the row and a constant c,

    W h - c 1 = z - alpha r - b,     s . h = alpha (- 1 where the head has a bias),

which are outputs + 1 equations in inputs + 1 unknowns. They are exact if the head has no more inputs than outputs; else
the claim is the solution of least norm, the projection of h on what the equations see.

With ``exchange = "ratios"`` the server receives ratios of exponentials under one lambda per class. From three classes
on their differences contain no lambda, and give z up to a constant (`moretta.protocols.pbpfl.ratios.from_differences`).
With two classes there is no difference, and the only claim left is equal chances.

**Masks** (`SEGMENTATION`). The exchange is row by row, and at a dense head a position of an image is a row, z_p = W h_p
+ b (`moretta.protocols.pbpfl.head`). So the softmax at each position would be a segmentation of each silo's image. Such
a run is refused by name (`refuse_dense`), unless all its secrets follow from `[run] insecure-secret-seed`; this attack
is tried on such a run. Under the squared error nothing is exchanged position by position.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.audit.attacks.pbpfl import softmax
from moretta.audit.attacks.pbpfl.head_offset import key_of
from moretta.audit.attacks.pbpfl.softmax import ROUNDS, scores, squares
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, augmented, first_of, no_head, rounds_of
from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.intervals import Floats, bootstrapped, of_rate, relative_error, to_error
from moretta.audit.evidence.network import head_inputs, head_weight
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Array
from moretta.protocols.common.targets import classes_of, counts_at_positions, probabilities
from moretta.protocols.pbpfl.messages import Predictions, Ratios, TrainOn
from moretta.protocols.pbpfl.ratios import from_differences
from moretta.protocols.pbpfl.softmax import TrueSoftmax, true_softmax

TINY = 1e-30  # of a column's norm, a divisor


fits = first_of(no_head, augmented, softmax.fits)


def gather(truth: Truth) -> Given:
    """Return the server's view, its keys' offsets and its own heads."""
    rounds, arrays = truth.recorded[-ROUNDS:], {}
    for number in rounds:
        held = truth.parameters(number)
        arrays[f"offset/{number}"] = key_of(truth, number).offset
        arrays[f"weight/{number}"] = head_weight(truth.run, held)
        if truth.run.head_bias:
            arrays[f"bias/{number}"] = held[truth.run.head_bias]
    return Given(
        views={"server": rounds},
        arrays=arrays,
        view=f"{rounds_of(len(rounds))} of the server's messages",
        knowledge="its own offset and its own true head in these rounds",
    )


def attack(case: Case) -> Claim:
    """Claim p/ROUND/SILO, [rows, outputs], and h/ROUND/SILO, [rows, inputs]."""
    claim, asks = {}, case.last_of_each_round("server", TrainOn, "sent")
    heard = (*case.heard("server", Predictions), *case.heard("server", Ratios))
    sent: dict[tuple[int, str], Any] = {(entry.round, entry.peer): entry.message for entry in heard}  # the last counted
    for (number, silo), predictions in sent.items():
        offset = np.asarray(case.arrays[f"offset/{number}"])
        true = _seen(predictions, offset)
        weight, bias = case.arrays[f"weight/{number}"], case.arrays.get(f"bias/{number}")
        scales = scales_of(weight, asks[number].parameters[case.run.head], offset)
        claim[f"p/{number}/{silo}"] = true.p
        claim[f"h/{number}/{silo}"] = features(true, weight, bias, scales)
    return claim


def _seen(sent: Predictions | Ratios, offset: Floats) -> TrueSoftmax:
    """Return the server's result of a silo's batch. From ratios of two classes it has equal outputs."""
    if isinstance(sent, Predictions):
        return true_softmax(sent, offset)
    shares, alpha = from_differences(sent.words), sent.alpha.astype(np.float64)
    z = np.outer(alpha, offset) if shares is None else np.log(np.maximum(shares, TINY))
    return true_softmax(Predictions(stamp=sent.stamp, z=z - z.max(axis=1, keepdims=True), alpha=alpha), offset)


def scales_of(weight: Array, noisy: Array, offset: Floats) -> Floats:
    """Return s by column of W, where W^ - r has the columns of W / s in some order, [inputs]; 1 for columns of 0."""
    held, scaled = np.asarray(weight, dtype=np.float64), np.asarray(noisy, dtype=np.float64) - offset[:, None]
    sizes, others = (np.maximum(np.linalg.norm(matrix, axis=0), TINY) for matrix in (held, scaled))
    place = ((held / sizes).T @ (scaled / others)).argmax(axis=1)  # of columns along each other
    return np.where(sizes > TINY, sizes / others[place], 1.0)


def features(true: TrueSoftmax, weight: Array, bias: Array | None, scales: Floats) -> Floats:
    """Return h by row, of least norm where the head has more inputs than equations, [rows, inputs]."""
    outputs, inputs = weight.shape
    matrix = np.zeros((outputs + 1, inputs + 1))
    matrix[:outputs, :inputs], matrix[:outputs, inputs], matrix[outputs, :inputs] = weight, -1.0, scales
    b = 0.0 if bias is None else np.asarray(bias, dtype=np.float64)
    right = np.concatenate([true.y - b, (true.alpha - (bias is not None))[:, None]], axis=1)
    solution: Floats = np.linalg.lstsq(matrix, right.T, rcond=None)[0].T[:, :inputs]
    return solution


def truth_of(truth: Truth, number: int, silo: str) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Return softmax, features and labels of a silo's batch of a round, by the true model."""
    rows = truth.rows(silo).of(truth.batch(silo, number))
    h, outputs = head_inputs(truth.network(), truth.run, truth.parameters(number), rows.x)
    return probabilities(outputs, "cross-entropy"), h, classes_of(rows.y)


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the true softmax, features and labels, beside the mean softmax. Rounds are the units."""
    names = sorted(name.removeprefix("p/") for name in claim if name.startswith("p/"))
    split = [name.split("/", 1) for name in names]
    true, h, labels = (np.concatenate(v) for v in zip(*(truth_of(truth, int(n), s) for n, s in split), strict=True))
    p, features_found = (np.concatenate([claim[f"{kind}/{name}"] for name in names]) for kind in ("p", "h"))
    rounds = np.repeat([int(number) for number, _ in split], [len(claim[f"p/{name}"]) for name in names])
    by_round = (
        np.array([squares(softmax, true)[rounds == number].sum(axis=0) for number in np.unique(rounds)])
        for softmax in (p, np.broadcast_to(true.mean(axis=0), true.shape))
    )
    hidden = truth.run.setting("exchange") == "ratios" and truth.run.outputs == 2
    who = "Behind ratios of two classes the server guesses" if hidden else "The server learns"
    rows = len(p)
    hits = int(np.sum(p.argmax(axis=1) == labels))
    low, high = of_rate(hits, rows)
    error, miss = relative_error(p, true), relative_error(features_found, h)
    return AttackResult(
        "1 - relative error of each sample's softmax, median over rounds",
        *scores(*by_round),
        sentence=f"{who} the softmax of each of {rows} samples {to_error(error)} and "
        f"guesses {100 * (hits / rows):.1f} % of their labels by it",
        figures={
            "relative_error": error,
            "mean_error": float(np.abs(p - true).mean()),
            "label_rate": hits / rows,
            "label_rate_low": low,
            "label_rate_high": high,
            "label_chance": float(np.bincount(labels).max() / rows),
            "features_r2": 1.0 - miss**2,  # about 0, not the mean, which the server does not know
            "head_inputs": float(h.shape[1]),
            "rows": float(rows),
        },
    )


ATTACK = Attack(
    name="server-softmax",
    title="obtains the prediction for each training row, and guesses its label",
    severity="labels",
    role="server",
    source="the exchange of practical.md, Eq. 21, as the server sees it",
    protocols=frozenset({"pbpfl"}),
    fits=fits,
    given=gather,
    attack=attack,
    score=score,
)


def _masks(run: PublicRun) -> str:
    return "" if run.mask else "targets are not masks, so no row is a position of an image"


fits_masks = first_of(_masks, softmax.fits, augmented)


def gather_masks(truth: Truth) -> Given:
    """Return the server's view of the last round and its offset there."""
    number = truth.recorded[-1]
    return Given(
        views={"server": (number,)},
        arrays={"offset": key_of(truth, number).offset},
        view=f"round {number} of the server's messages",
        knowledge="its own offset in this round",
    )


def attack_masks(case: Case) -> Claim:
    """Claim p/SILO, the softmax at each position of each image, [rows, positions * classes]."""
    sent: dict[str, Any] = {
        heard.peer: heard.message for heard in case.heard("server", Predictions)
    }  # the last counted
    offset = np.asarray(case.arrays["offset"])
    return {f"p/{silo}": true_softmax(z, offset).p.reshape(-1, case.run.outputs) for silo, z in sent.items()}


def _balanced(counts: Floats) -> float:
    """Return the claimed share of each class's positions, mean over classes. counts: [images, true, claimed]."""
    whole = counts.sum(axis=0)
    there = whole.sum(axis=1) > 0
    return float((np.diag(whole)[there] / whole.sum(axis=1)[there]).mean())


def score_masks(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the masks of the images, over positions that count, and with the true model's own."""
    number, counts, same = truth.recorded[-1], list[Floats](), list[Floats]()
    for name, p in claim.items():
        silo = name.removeprefix("p/")
        rows = truth.rows(silo).of(truth.batch(silo, number))
        own = truth.outputs(truth.parameters(number), rows.x)
        counts.append(counts_at_positions(p, rows.y).astype(np.float64))
        same.append((p.reshape(rows.y.shape).argmax(axis=2) == own.reshape(rows.y.shape).argmax(axis=2)).mean(axis=1))
    images = np.concatenate(counts)
    agree, classes = float(np.concatenate(same).mean()), int((images.sum(axis=(0, 2)) > 0).sum())
    return AttackResult(
        "share of each class's positions that are found in silos' images, mean over classes",
        _balanced(images),
        1.0 / classes,
        bootstrapped(images, _balanced),
        sentence=f"The server sees a segmentation of each of {len(images)} images, the true model's own at "
        f"{100 * agree:.1f} % of their positions",
        figures={"model_agreement": agree, "images": float(len(images)), "classes": float(classes)},
        constant=1.0 / classes,
    )


SEGMENTATION = Attack(
    name="server-segmentation",
    title="obtains a segmentation of each training image",
    severity="labels",
    role="server",
    source="the exchange of practical.md, Eq. 21, at each position of a dense head",
    protocols=frozenset({"pbpfl"}),
    fits=fits_masks,
    given=gather_masks,
    attack=attack_masks,
    score=score_masks,
)
