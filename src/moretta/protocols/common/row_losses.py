"""The loss of each row from the model's outputs, in float64 and without torch: every client computes it alike.

Losses of perturbed models differ in their last digits, so nothing is rounded to float32 on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array


@dataclass(frozen=True)
class RowLosses:
    """`moretta.protocols.common.losses.Loss` row by row, with the same name, smoothing and class_weights.

    The mean loss of a batch is the sum of these over the sum of `weights`. own: the same of one model's outputs,
    [rows, outputs], and targets, in the place of all this (`moretta.protocols.common.own_loss.of_arrays`).
    """

    name: str
    smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()
    own: Callable[[Array, Array], Array] | None = None

    def __call__(self, outputs: Array, targets: Array) -> NDArray[np.float64]:
        """Return the rows' losses, class weights included, float64[m, rows].

        outputs: [m, rows, outputs]; targets: [rows, outputs] or, of cross-entropy, int64[rows].
        """
        if self.own is not None:
            return np.stack([self.own(one, targets) for one in outputs]).astype(np.float64)
        if self.name == "mse":
            return np.asarray(np.square(outputs.astype(np.float64) - targets).sum(axis=2) / 2)
        logits = np.moveaxis(outputs, 2, 0).astype(np.float64, order="C")  # reductions over a short last axis are slow
        logits -= logits.max(axis=0)
        totals = np.log(np.exp(logits).sum(axis=0))
        if targets.ndim == 1 and not self.smoothing:
            picked = logits[targets, :, np.arange(len(targets))].T
            return np.asarray((totals - picked) * self.weights(targets))
        count = len(logits)
        soft = np.eye(count)[targets] if targets.ndim == 1 else targets.astype(np.float64)
        soft = soft * (1.0 - self.smoothing) + self.smoothing / count
        if self.class_weights:
            soft = soft * np.asarray(self.class_weights)
        return np.asarray(np.einsum("omb,bo->mb", totals - logits, soft))

    def weights(self, targets: Array) -> NDArray[np.float64]:
        """Return each row's weight in the mean, float64[rows]: 1, or for whole-number targets the class's weight."""
        if not self.class_weights or targets.dtype.kind == "f":
            return np.ones(len(targets))
        return np.asarray(self.class_weights)[targets]
