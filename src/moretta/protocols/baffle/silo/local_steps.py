"""A silo's own steps at the epoch level: SGD, or Adam (Kingma and Ba, 2015) with moments of its own, without torch.

    m <- m + (1 - b1) (g - m),   v <- b2 v + (1 - b2) g^2,   w <- w - rate m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

The moments stay at the silo from one round to the next, while parameters are averaged in between, as in the authors'
code. Nobody is sent them. A round that is played again starts from the moments that it started from, so that its
difference does not depend on how often it was asked for.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.contract.roles import State

BETAS, EPS = (0.9, 0.999), 1e-8
COUNTS = struct.Struct("<4q")  # the round, steps before it, steps with it, bytes of a moment's entry


class LocalSteps:
    """Moves parameters along estimates. adam: else plain SGD. decay: L2 on all parameters. clip: the largest norm or 0.

    betas: of Adam.
    """

    def __init__(
        self, *, adam: bool, decay: float = 0.0, clip: float = 0.0, betas: tuple[float, float] = BETAS
    ) -> None:
        self._adam, self._decay, self._clip, self._betas = adam, decay, clip, betas
        self._round = self._before = self._done = 0
        self._start = self._now = np.zeros((2, 0), np.float32)  # both moments, [2, n] in the parameters' dtype

    def begin(self, number: int) -> None:
        """Begin round `number`, or begin it again."""
        if number == self._round:
            self._done, self._now = self._before, self._start.copy()
        else:
            self._round, self._before, self._start = number, self._done, self._now.copy()

    def step(self, at: Array, gradient: NDArray[np.float64], rate: float) -> None:
        """Move `at`, float32 or float64 [n], in place."""
        if self._clip:
            gradient = gradient * min(1.0, self._clip / (float(np.linalg.norm(gradient)) or 1.0))
        if self._decay:
            gradient = gradient + self._decay * at
        with np.errstate(over="ignore", invalid="ignore"):  # the caller looks whether parameters are still finite
            at -= (rate * (self._along(gradient, at) if self._adam else gradient)).astype(at.dtype)

    def _along(self, gradient: NDArray[np.float64], at: Array) -> NDArray[np.float64]:
        if self._now.shape[1] != len(at):
            self._now = np.zeros((2, len(at)), at.dtype)
        self._done += 1
        (mean, square), (one, two) = self._now, self._betas
        mean += (1 - one) * (gradient - mean)
        square += (1 - two) * (np.square(gradient) - square)
        return np.asarray(mean / (1 - one**self._done) / (np.sqrt(square / (1 - two**self._done)) + EPS))

    def state(self) -> State:
        """Return the moments and counts of Adam, bytes alone, as an edge client's state has them; else nothing."""
        if not self._adam:
            return {}
        counts = COUNTS.pack(self._round, self._before, self._done, self._now.itemsize)
        return {"counts": counts, "start": self._start.tobytes(), "now": self._now.tobytes()}

    def restore(self, state: State) -> None:
        """Take up what `state` returned."""
        if not self._adam:
            return
        self._round, self._before, self._done, itemsize = COUNTS.unpack(state["counts"])
        kept = (np.frombuffer(state[key], f"f{itemsize}") for key in ("start", "now"))
        self._start, self._now = (moments.reshape(2, -1).copy() for moments in kept)
