"""The losses, their soft labels and class weights, in PBPFL's notation: u = w o t, U = sum u, and D.

The mean loss of a batch is the sum of its rows' losses over D. D is the number of rows, except under class weights with
whole-number targets, where `torch.nn.functional.cross_entropy` has D = sum of the rows' own class weights. Silos are
then weighted by D_k instead of their rows, and since D_k depends on labels, it travels inside the secure sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from moretta.errors import ParameterError
from moretta.protocols.common.own_loss import Function, of_rows
from moretta.secure_aggregation.sums import Sum


def density_of(total: Sum, class_weights: Sequence[float]) -> float:
    """Return the divisor of a sum's means, as `usable_density`; 1 if silos weigh by their rows."""
    if "density" not in total.means:
        return 1.0
    return usable_density(float(total.means["density"]), total.steps["density"], class_weights)


def usable_density(mean: float, step: float, class_weights: Sequence[float]) -> float:
    """Return the silos' mean of D_k / N_k, which divides sums, moved to the nearest possible value.

    The mean is of class weights, or of ones if targets are probabilities. A silo that causes another value could spoil
    every step.

    Args:
        step: The largest error of fixed point.

    Raises:
        ParameterError: The value cannot be a mean: it is not above 0, or not finite.
    """
    slack = step + 1e-9 * max(1.0, *class_weights)  # the mean itself is in float64
    mean = min(max(mean, min(1.0, *class_weights) - slack), max(1.0, *class_weights) + slack)
    if not (mean > 0 and np.isfinite(mean)):
        raise ParameterError(
            f"class-weights: the rows of a round weigh {mean:g} on average, by which nothing can be divided; set "
            "weights that the sum's fixed point can distinguish from 0, for example between 0.01 and 100"
        )
    return mean


def chances(targets: Tensor) -> Tensor:
    """Return weighted targets [..., classes] with sum 1 at each position, 0 at those that do not count."""
    shares: Tensor = targets / targets.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(targets.dtype).tiny)
    return shares


@dataclass(frozen=True)
class Loss:
    """One loss with its settings.

    Args:
        name: "mse", the mean over rows of |y - t|^2 / 2 (`practical.md`, section III-B; `torch.nn.MSELoss` is 2 /
            outputs times it), or "cross-entropy" of the softmax, in nats.
        smoothing: Of labels, 0 to 1.
        class_weights: One per output.
        own: The loss of each row, which replaces all this (`moretta.protocols.common.own_loss`).
    """

    name: str
    smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()
    own: Function | None = None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, a scalar. outputs: [B, outputs]; targets: [B, outputs] or int64[B].

        For masks, targets [B, positions, classes], a row's loss is the sum over positions under "mse", as over outputs.
        Under "cross-entropy" it is their mean, as in `torch.nn.functional.cross_entropy` without weights.
        """
        if self.own is not None:
            return of_rows(self.own, outputs, targets).mean()
        if targets.ndim == 3:
            return self._at_positions(outputs, targets).mean()
        if self.name == "mse":
            return (outputs - targets).square().sum(dim=1).mean() / 2
        weights = self._weights(outputs) if self.class_weights else None
        return nn.functional.cross_entropy(outputs, targets, weight=weights, label_smoothing=self.smoothing)

    def of_each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean losses of [batches, B, outputs] or int64[batches, B] targets, a batch each: [batches]."""
        if self.own is not None:
            rows = of_rows(self.own, outputs.flatten(0, 1), targets.flatten(0, 1))
            return rows.view(outputs.shape[:2]).mean(dim=1)
        if targets.ndim == 4:
            return self._at_positions(outputs, targets).mean(dim=1)
        if self.name == "mse":
            return (outputs - targets).square().sum(dim=2).mean(dim=1) / 2
        flat = outputs.flatten(0, 1)
        weights = self._weights(flat) if self.class_weights else None
        rows = nn.functional.cross_entropy(
            flat, targets.flatten(0, 1), weight=weights, reduction="none", label_smoothing=self.smoothing
        )
        rows = rows.view(outputs.shape[:2])
        if weights is None or targets.is_floating_point():
            return rows.mean(dim=1)
        return rows.sum(dim=1) / weights[targets].sum(dim=1)

    def _at_positions(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each row of masks. targets: [..., positions, classes], weights at the true classes."""
        z, weights = outputs.reshape(targets.shape), targets.sum(dim=-1, keepdim=True)
        if self.name == "mse":
            squares: Tensor = weights * (z - chances(targets)).square()
            return squares.sum(dim=(-1, -2)) / 2
        soft = targets * (1.0 - self.smoothing) + weights * (self.smoothing / targets.shape[-1])
        soft = soft * self._weights(z.flatten(0, -2)) if self.class_weights else soft
        entropies: Tensor = -(soft * z.log_softmax(dim=-1)).sum(dim=-1)
        return entropies.mean(dim=-1)

    def density(self, targets: Tensor) -> float:
        """Return D / B: 1 except for class weights with whole-number targets."""
        if not self.class_weights or targets.is_floating_point():
            return 1.0
        return float(torch.tensor(self.class_weights, dtype=torch.float64)[targets.cpu()].mean())

    def weighted_targets(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Return u = w o t, [B, outputs]: the smoothed targets of a cross-entropy times the class weights."""
        count = outputs.shape[1]
        soft = targets if targets.is_floating_point() else nn.functional.one_hot(targets, count).to(outputs)
        soft = soft * (1.0 - self.smoothing) + self.smoothing / count
        return soft * self._weights(outputs) if self.class_weights else soft

    def _weights(self, outputs: Tensor) -> Tensor:
        if len(self.class_weights) != outputs.shape[1]:
            raise ParameterError(
                f"class-weights: expected {outputs.shape[1]}, one an output, got {len(self.class_weights)}"
            )
        return torch.tensor(self.class_weights, dtype=outputs.dtype, device=outputs.device)
