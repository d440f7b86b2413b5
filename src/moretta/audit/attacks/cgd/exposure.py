"""Participants of CGD hold the displacement D, by which all have moved, in their own states; no model travels."""

from collections.abc import Sequence

import numpy as np

from moretta.audit.attacks.cgd import confined
from moretta.audit.evidence.case import PublicRun
from moretta.audit.evidence.exposure import Exposure, Holding
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Array, Tensors

SEED = 23


def displaced(truth: Truth, silo: str, number: int) -> dict[str, Array]:
    """Return c + D as a model: D on the public centre of the starts, with the participant's buffers."""
    confined.check_whole(truth)
    held = confined.participant(truth, silo, number).displaced()
    return {name: value.astype(truth.run.dtype) for name, value in held.items()}


def counted(truth: Truth, silo: str, number: int) -> Sequence[str]:
    """Return the silos in the sum that a participant stepped by."""
    return confined.summed_silos(truth, silo, number)


def start(begin: Tensors, held: Tensors, run: PublicRun) -> dict[str, Array]:
    """Return a start as participants draw theirs: near zero, or near the model's start."""
    size = confined.deviation(run)
    generator = np.random.Generator(np.random.PCG64(SEED))
    around = {name: value if run.setting("around") == "model" else 0 * value for name, value in begin.items()}
    noise = {n: (size * generator.standard_normal(v.shape)).astype(v.dtype) for n, v in held.items() if v.ndim}
    return {name: around[name] + noise[name] if name in noise else begin[name] for name in begin}


EXPOSED = {
    "cgd": Exposure(
        frozenset({"membership-inference", "silo-property"}),
        holding=Holding("the displacement", displaced, counted, start),
    )
}
