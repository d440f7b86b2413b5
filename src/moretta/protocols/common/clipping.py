"""Clipping of a round's sum: a server cannot see which silo spoiled a sum, but it can see that the sum is spoiled.

Masks hide each silo's part, so one silo can put any ring element into a sum. A mean of fixed point with room for 2^16
then moves a model of weights below 1 so far that it does not recover. So a round's sum is compared with earlier rounds:
a vector longer than `MULTIPLE` times the running median is shortened to the median.

    median_t = max(median of the last 11 rounds, median of all rounds so far),   from the sixth round on
    x_t -> x_t median_t / |x_t|   where |x_t| > 64 median_t
    recorded of round t: min(|x_t|, 2 median_t)

It is shortened to the median and not to 64 times it, as so large a sum is worth no more than an ordinary step. In a
direction that one silo chose, 64 ordinary steps are enough to spoil a small model for good.

The median is over rounds, so fewer than half of the rounds cannot move it. There are two medians. Once a run nearly
fits its rows, most batches leave a small gradient and a few a large one; the median of all rounds is then the larger.
In a run that leaves a plateau gradients grow for long; the median of the last rounds is then the larger. At most twice
the median is recorded, so a silo that spoils every round needs some six rounds to double the median.

Why 64: the largest ratio of a round's norm to that median was 2.4 in the demo, 1.5 and 4.0 in the examples of BAFFLE
and CGD, and 3 to 5 in runs with cross-entropy on WDBC and digits. It was 19 with batches of 4 rows, and 20 where the
learning rate was 15 times too high (docs/deviations.md has the table). It was 74 only in 1500 rounds of two
silos with batches of 4 rows, which they fit exactly. The first five rounds set the median and are not clipped; there
``clip-norm`` bounds a step.

What remains: up to 64 ordinary steps may go where one silo wants, and a silo that spoils every round stops the
training, as only spoiled sums are left. Masks hide which silo it is.
"""

import bisect
import logging
import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moretta.contract.messages import Array, Tensors
from moretta.contract.roles import State
from moretta.protocols.common import modules
from moretta.protocols.common.training import Training

log = logging.getLogger("moretta")

MULTIPLE = 64.0
RECENT = 11
SETTLED = 5  # rounds before the first clipping
GROWTH = 2.0  # the most by which a recorded value exceeds the median


class RunningMedian:
    """The positive figures of the rounds so far (`seen`), and their running median."""

    def __init__(self, seen: Sequence[float] = ()) -> None:
        self.seen = [float(value) for value in seen]
        self._ordered = sorted(self.seen)  # makes the median of all of them cheap

    def note(self, value: float) -> float:
        """Record a round's figure, at most twice the previous median; return that median.

        A figure of 0 is not recorded.

        Returns:
            The larger of the median of the last 11 rounds and that of all; infinity before the first figure.
        """
        median = math.inf
        if self.seen:  # for so few `numpy.median` takes 100 times as long
            median = max(statistics.median(self.seen[-RECENT:]), statistics.median(self._ordered))
        if value > 0:
            self.seen.append(float(min(value, GROWTH * median)))
            bisect.insort(self._ordered, self.seen[-1])
        return median


class Clip:
    """Shortens vectors longer than 64 times the running median of their kind, `what`, to that median."""

    def __init__(self, what: str, seen: Sequence[float] = ()) -> None:
        self._what, self._norms = what, RunningMedian(seen)

    def factor(self, values: Mapping[str, Array], number: int) -> float:
        """Record the norm of round `number`'s values; return their factor, 1.0 unless the sum is spoiled."""
        squares, settled = 0.0, len(self._norms.seen) >= SETTLED
        with np.errstate(over="ignore"):  # an overflow of float64 exceeds any bound
            for value in values.values():
                flat = np.asarray(value, dtype=np.float64).reshape(-1)
                # Not `flat @ flat`: BLAS would wake threads, which then wait for each other longer than they work.
                squares += float(np.einsum("i,i", flat, flat))
            norm = float(np.sqrt(squares))
        median = self._norms.note(norm)
        if not settled or norm <= MULTIPLE * median:
            return 1.0
        log.warning(
            "round %d: the silos' sum of %s has norm %.6g, more than %g times the running median of earlier rounds. "
            "It was clipped to %.6g; some silo has diverged or does not follow the protocol",
            number,
            self._what,
            norm,
            MULTIPLE,
            median,
        )
        return float(median / norm)

    def norms(self) -> NDArray[np.float64]:
        """Return the recorded norms, for a checkpoint."""
        return np.array(self._norms.seen, dtype=np.float64)


class SummedStep:
    """Steps a server's model by its silos' sums, each clipped as above. rounds: of the run, for the schedule."""

    def __init__(self, module: nn.Module, params: Training, rounds: int) -> None:
        self._module, self._optimizer = module, modules.Optimizer(module, params, rounds)
        self._gradient, self._buffers = Clip("gradients"), Clip("running statistics")

    def step(
        self, gradients: Mapping[str, NDArray[np.float64]], number: int, buffers: Tensors | None = None
    ) -> dict[str, float]:
        """Take the step of round `number`; return the factors by which sums were clipped, as figures for the history.

        Args:
            gradients: The silos' means, by parameter.
            buffers: The silos' means of running statistics, if the model has any; their change is clipped too.
        """
        factor = self._gradient.factor(gradients, number)
        if factor != 1.0:
            gradients = {name: np.asarray(gradient * factor) for name, gradient in gradients.items()}
        self._optimizer.step(gradients, number)
        clipped = {} if factor == 1.0 else {"clipped": factor}
        return clipped | self._take_buffers(buffers, number) if buffers else clipped

    def _take_buffers(self, means: Tensors, number: int) -> dict[str, float]:
        old = {name: buffer.numpy(force=True) for name, buffer in modules.running_buffers(self._module).items()}
        change = {name: means[name] - old[name].astype(np.float64) for name in old if name in means}
        factor = self._buffers.factor(change, number) if change else 1.0
        if factor != 1.0:
            means = {name: old[name] + value * factor for name, value in change.items()}
        modules.take_buffers(self._module, means)
        return {} if factor == 1.0 else {"clipped_buffers": factor}

    def state(self) -> State:
        """Return the optimizer's state and the norms so far."""
        norms = {"norms/gradient": self._gradient.norms(), "norms/buffers": self._buffers.norms()}
        return {**self._optimizer.state(), **norms}

    def restore(self, state: State) -> None:
        """Restore what `state` returned."""
        self._optimizer.restore(state)
        self._gradient = Clip("gradients", state["norms/gradient"])
        self._buffers = Clip("running statistics", state["norms/buffers"])


def clipped_sum(gradients: Mapping[str, Tensor], most: float) -> dict[str, Tensor]:
    """Return sum_i g_i / max(1, |g_i| / C), float64, by parameter; |g_i| is over all parameters together.

    Entries that are not finite count as 0, so that an example that makes the model overflow stays hidden.

    Args:
        gradients: [rows, ...] by parameter.
        most: C.
    """
    flat = {name: value.reshape(len(value), -1) for name, value in gradients.items()}
    exact = {name: value.double().nan_to_num(0.0, 0.0, 0.0) for name, value in flat.items()}
    norms = torch.stack([torch.linalg.vector_norm(value, dim=1) for value in exact.values()]).norm(dim=0)
    factors = 1.0 / (norms / most).clamp(min=1.0)
    return {name: (factors @ value).reshape(gradients[name].shape[1:]) for name, value in exact.items()}
