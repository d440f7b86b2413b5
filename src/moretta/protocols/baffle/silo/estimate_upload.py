"""A silo's own estimate of the gradient, of all parameters or of some, through the masked sum.

    server       shapes     plans the sum; the encoding of each tensor travels in the message that asks
    silo c       tensors    g_c, as long as the parts, beside what else it says of its batch (its mean loss)
    masked sum              sum_c N_c g_c / N: fixed point in the ring, each entry within [-limit, limit]
    server       read       the mean, float64, in its places of the flat parameters

The scalars of `moretta.protocols.baffle.silo.estimate` say what the losses differ by along directions that all roles
know. This is for estimates that nobody could put together from scalars: their directions are the silo's own, or they
are made without any. The server then learns the weighted mean of the silos' estimates, as of gradients under FedSGD.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.errors import MisuseError, ParameterError
from moretta.protocols.baffle.silo.forward import Layout
from moretta.secure_aggregation.sums import Shapes, Sum

ESTIMATE, SPOKEN = "estimate", "spoken"


@dataclass(frozen=True)
class Parts:
    """Which entries of the flat parameters are estimated.

    slices: of the flat array, in its order, without overlap. length: of the whole flat array, n.
    """

    slices: tuple[slice, ...]
    length: int

    @classmethod
    def of(cls, layout: Layout, names: Collection[str] | None = None) -> Parts:
        """Return those of some trained tensors, or of all. names: of `Layout.shapes`."""
        unknown = set(names or ()) - set(layout.shapes)
        if unknown:
            raise MisuseError(f"expected names of trained tensors, got {sorted(unknown)!r:.200}")
        slices, start = list[slice](), 0
        for name, shape in layout.shapes.items():
            end = start + math.prod(shape)
            if names is None or name in names:
                slices.append(slice(start, end))
            start = end
        return cls((slice(0, start),) if names is None else tuple(slices), start)

    @property
    def size(self) -> int:
        """How many entries are estimated."""
        return sum(part.stop - part.start for part in self.slices)

    def shapes(self, spoken: int) -> Shapes:
        """Return the shapes of an upload. spoken: how many numbers a silo says beside its estimate, perhaps none."""
        return {ESTIMATE: (self.size,)} | ({SPOKEN: (spoken,)} if spoken else {})

    def taken(self, flat: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the parts of a flat array [n], one behind the other."""
        return np.concatenate([flat[part] for part in self.slices])

    def tensors(self, silo: str, estimate: NDArray[np.floating], spoken: NDArray[np.float64]) -> dict[str, Array]:
        """Return what a silo uploads.

        estimate: of the parts one behind the other, float32 or float64 [size]; not copied. spoken: beside it, [any].
        Raises `moretta.errors.ParameterError` where a number is not finite: nothing is sent then.
        """
        if estimate.shape != (self.size,):
            raise MisuseError(f"expected an estimate of {self.size} parameters, got shape {list(estimate.shape)}")
        if not np.isfinite(estimate).all() or not np.isfinite(spoken).all():
            raise ParameterError(
                f"the estimate of silo `{silo}` is NaN or infinite in some of {self.size} parameters; look at its "
                "rows, or lower learning-rate or sigma"
            )
        return {ESTIMATE: estimate} | ({SPOKEN: spoken} if spoken.size else {})

    def read(self, total: Sum) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
        """Return the silos' mean estimate, float64[n], what they said, and the sum's step.

        The estimate is 0 where nothing was estimated. The step bounds the error that fixed point adds to an entry.
        """
        mean = total.means[ESTIMATE]
        if self.size < self.length:
            found, start = np.zeros(self.length), 0
            for part in self.slices:
                end = start + part.stop - part.start
                found[part] = mean[start:end]
                start = end
            mean = found
        return mean, total.means.get(SPOKEN, np.zeros(0)), total.steps[ESTIMATE]
