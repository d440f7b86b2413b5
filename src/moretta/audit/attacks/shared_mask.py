"""The server looks for one mask on several tensors of an upload, as the papers print it.

`practical.md`, section III-B, prints uploads G + phi, sigma + phi, beta + phi and psi + phi with one phi of a layer for
all of them, and adds that these "can be different". With one phi, G^ - sigma^ = G - sigma is bare in every layer; and
beta is 0 at the head, so that beta^ is phi there, and G and sigma follow to the step of the ring. Under masks of their
own a difference of two tensors is uniform in the ring, and the share of its entries within 1/8 of the ring around 0 is
1/8. Under the same mask these entries are what was encoded, far below the ring's width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moretta.audit.evidence.attack import Attack, Claim, Finding, Given, rounds_of
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.intervals import of_rate
from moretta.audit.evidence.public_run import Run
from moretta.contract.messages import Array, Tensors
from moretta.errors import ParameterError
from moretta.protocols.pbpfl.messages import Softmax, TrainOn
from moretta.secure_aggregation.pairwise import MaskedUpload
from moretta.secure_aggregation.ring import Ring

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import Truth

ROUNDS = 5  # the last so many
NARROW = 1 / 8  # of the ring, around 0
UNLIKELY = 1e-9  # that so many entries of a uniform difference lie there
FEWEST = 16  # entries of a pair of tensors: fewer could not be as unlikely


def fits(run: Run) -> str:
    """Say why not."""
    if run.scheme != "pairwise":
        return f'scheme = "{run.scheme}" has no masks that silos add to their uploads'
    return "" if run.training else "no round of training was recorded"


def given(truth: Truth) -> Given:
    """Give the server its view."""
    rounds = truth.recorded[-ROUNDS:]
    return Given({"server": rounds}, {}, view=f"{rounds_of(len(rounds))} of the server", knowledge="nothing")


def attack(case: Case) -> Claim:
    """Claim of each pair of gradients in an upload how many entries of its difference are near 0, and of how many.

    Besides, by name ``opened/..``, what an upload gives away where beta of the head is among it.
    """
    uploads: dict[tuple[int, str], MaskedUpload] = {}
    for one in case.heard("server", MaskedUpload, "received"):
        if isinstance(one.message, MaskedUpload):
            uploads[one.round, one.peer] = one.message  # the last, of the attempt that counted
    near, entries, found = [], [], dict[str, Array]()
    for (number, silo), upload in uploads.items():
        for difference in differences(upload.tensors):
            near.append(_near(difference))
            entries.append(difference.size)
        encoding = _encoding(case, number, silo)
        for name, value in opened(upload.tensors, encoding, case.run.head, case.run.head_bias).items():
            found[f"opened/{number}/{silo}/{name}"] = value
    return {"near": np.array(near, np.int64), "entries": np.array(entries, np.int64), **found}


def _encoding(case: Case, number: int, silo: str) -> Mapping[str, int]:
    """Return how a silo's upload of a round was to be encoded."""
    found: Mapping[str, int] = {}
    for one in (*case.heard("server", TrainOn, "sent"), *case.heard("server", Softmax, "sent")):
        if (one.round, one.peer) == (number, silo) and isinstance(one.message, TrainOn | Softmax):
            found = one.message.encoding  # under cross-entropy the later message has it
    return found


def differences(tensors: Tensors) -> Iterator[NDArray[np.unsignedinteger]]:
    """Yield G^ - sigma^_s, G^ - beta^ and so on, all layers of each end to end, in the ring."""
    found: dict[str, list[Array]] = {}
    for name in sorted(tensors):
        if name.startswith("noisy/"):
            layer = name.removeprefix("noisy")
            for other in sorted(tensors):
                if other != name and other.endswith(layer) and tensors[other].shape == tensors[name].shape:
                    found.setdefault(other.removesuffix(layer), []).append((tensors[name] - tensors[other]).ravel())
    for parts in found.values():
        joined = np.concatenate(parts)
        if joined.size >= FEWEST:
            yield joined


def _near(difference: NDArray[np.unsignedinteger]) -> int:
    """Return how many entries are near 0."""
    bits = 8 * difference.dtype.itemsize
    signed, bound = difference.view(f"int{bits}"), int(NARROW * 2 ** (bits - 1))
    return int(((signed > -bound) & (signed < bound)).sum())


def opened(tensors: Tensors, encoding: Mapping[str, int], *head: str) -> dict[str, NDArray[np.float64]]:
    """Return N_k times the head's tensors, by name, if beta of the head is the mask of them all. head: parameters."""
    found = {}
    for parameter in head:
        mask = tensors.get(f"beta/{parameter}") if parameter else None
        if mask is not None:
            ring = Ring(8 * mask.dtype.itemsize)
            for name, words in tensors.items():
                if name.endswith(f"/{parameter}") and words.shape == mask.shape and not name.startswith("beta/"):
                    found[name] = ring.decode(np.ascontiguousarray(words - mask), encoding[name])
    return found


def score(claim: Claim, truth: Truth) -> Finding:
    """Count the pairs whose difference cannot be uniform in the ring."""
    from scipy import stats

    near, entries = claim["near"], claim["entries"]
    pairs = len(near)
    if not pairs:
        raise ParameterError("no upload has two tensors of one shape that could share a mask")
    bare = int((stats.binom.sf(near - 1, entries, NARROW) < UNLIKELY).sum())
    said = f"In {bare} of {pairs} pairs of gradients of single uploads both have one mask, so that the server has their"
    none = f"The server finds no mask that two gradients of one upload share, in {pairs} pairs"
    return Finding(
        measure="share of pairs of gradients of one upload that are seen to have the same mask",
        score=bare / pairs,
        chance=0.0,
        interval=of_rate(bare, pairs),
        sentence=f"{said} bare difference" if bare else none,
        figures={
            "pairs": float(pairs),
            "near_0": float(near.sum() / entries.sum()),
            "near_0_of_uniform": NARROW,
            "opened": float(sum(name.startswith("opened/") for name in claim)),
        },
    )


ATTACK = Attack(
    name="shared-mask",
    role="server",
    source="Feng et al., section III-B, local gradients perturbation: one phi for G, sigma, beta and psi",
    protocols=frozenset({"pbpfl"}),
    fits=fits,
    given=given,
    attack=attack,
    score=score,
)
