"""The server of PBPFL would see a segmentation of each silo's image if masks were trained under cross-entropy.

Derivation: the exchange (`practical.md`, Eq. 21) is row by row, and at a dense head a position is a row, z_p = W h_p +
b (`moretta.protocols.pbpfl.head`). A silo would send z = y^ - max y^ and alpha of each position. The server knows r, so
softmax(z - alpha r) is the true model's softmax there, and its largest entry names the class of each pixel.

So the run is refused by name (`refuse_dense`), but for one whose secrets all follow from `[run] insecure-secret-seed`
and are nobody's: this attack is tried on such a run. Under the squared error nothing is exchanged position by position.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moretta.audit.attacks.pbpfl import softmax
from moretta.audit.attacks.pbpfl.head_offset import key_of
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, augmented, first_of
from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.intervals import Floats, bootstrapped
from moretta.audit.evidence.truth import Truth
from moretta.protocols.common.targets import counts_at_positions
from moretta.protocols.pbpfl.messages import Predictions
from moretta.protocols.pbpfl.softmax import true_softmax


def _masks(run: PublicRun) -> str:
    return "" if run.mask else "targets are no masks, so that no row is a position of an image"


fits = first_of(_masks, softmax.fits, augmented)


def given(truth: Truth) -> Given:
    """Give the server its view of the last round and its offset there."""
    number = truth.recorded[-1]
    return Given(
        views={"server": (number,)},
        arrays={"offset": key_of(truth, number).offset},
        view=f"round {number} of the server",
        knowledge="its own offset in this round",
    )


def attack(case: Case) -> Claim:
    """Claim p/SILO, the softmax at each position of each image, [rows, positions * classes]."""
    sent: dict[str, Any] = {
        heard.peer: heard.message for heard in case.heard("server", Predictions)
    }  # the last counted
    offset = np.asarray(case.arrays["offset"])
    return {f"p/{silo}": true_softmax(z, offset).p.reshape(-1, case.run.outputs) for silo, z in sent.items()}


def _balanced(counts: Floats) -> float:
    """Return the share of each class's positions that are found, mean over classes. counts: [images, true, found]."""
    whole = counts.sum(axis=0)
    there = whole.sum(axis=1) > 0
    return float((np.diag(whole)[there] / whole.sum(axis=1)[there]).mean())


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the masks of the images, over positions that count, and with what the true model says itself."""
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
        sentence=f"The server sees a segmentation of each of {len(images)} images, the true model's own at {agree:.1%} "
        "of their positions",
        figures={"model_agreement": agree, "images": float(len(images)), "classes": float(classes)},
        constant=1.0 / classes,
    )


ATTACK = Attack(
    name="server-segmentation",
    title="obtains a segmentation of each training image",
    severity="labels",
    role="server",
    source="the exchange of practical.md, Eq. 21, at each position of a dense head",
    protocols=frozenset({"pbpfl"}),
    fits=fits,
    given=given,
    attack=attack,
    score=score,
)
