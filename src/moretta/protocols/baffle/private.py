"""Noise on a silo's K scalars: what one row adds to them is bounded, and noise hides whether it was there.

One round, silo c with lot S_c (`moretta.protocols.lots`), L_c its expected size:

    i in S_c   x_i = the row's own x_1 .. x_K;   x_i <- x_i / max(1, |x_i| / C)
    upload     (sum_i x_i + N(0, z^2 C^2 / S)) / L_c, with the weight L_c

z is dp-noise, C dp-clip, and S the fewest silos whose sum may be revealed. The directions are known to all and follow
from what was released before, so the round is the sampled Gaussian mechanism of K numbers, whatever K
(`moretta.protocols.accountant`). No loss is uploaded.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from moretta.keystream import SecretRoot
from moretta.protocol import State
from moretta.protocols.accountant import Privacy
from moretta.protocols.lots import Lots


class PrivateScalars:
    """Draws a silo's lots, clips its rows' scalars, sums and adds its share of the noise.

    rows: of the silo. batch_size: the expected lot, 0 for all rows. root: what lots and noise derive from, kept in the
    silo's checkpoint. sharers: S.
    """

    def __init__(self, privacy: Privacy, rows: int, batch_size: int, root: SecretRoot, sharers: int = 1) -> None:
        self._clip, self._root = privacy.clip, root
        self._deviation = privacy.noise * privacy.clip / math.sqrt(sharers)
        self._lots = Lots(rows, batch_size)
        self.lot, self.rate = self._lots.expected, self._lots.rate

    def rows_of_lot(self, *purpose: int | str | bytes) -> NDArray[np.int64]:
        """Return the numbers of the rows in the lot of one purpose, perhaps none."""
        return self._lots.draw(self._root, *purpose)

    def noised_mean(self, derivatives: NDArray[np.float64], *purpose: int | str | bytes) -> NDArray[np.float64]:
        """Return what is uploaded, float64[K], of the rows' scalars [K, rows].

        A row whose scalars are not finite counts as 0: that it makes the model overflow is not to be told either.
        """
        exact = np.where(np.isfinite(derivatives).all(axis=0), derivatives, 0.0)
        clipped = exact / np.maximum(1.0, np.linalg.norm(exact, axis=0) / self._clip)
        noise = self._deviation * self._root.stream("dp noise", *purpose).normal(len(derivatives))
        return np.asarray((clipped.sum(axis=1) + noise) / self.lot)

    def state(self) -> State:
        """Return the secret root, from which lots and noise follow."""
        return {"secret_root": self._root.reveal()}

    def restore(self, state: State) -> None:
        """Take up what `state` returned."""
        self._root = SecretRoot(state["secret_root"])
