"""Which rows of a silo are in a round's lot, drawn in secret: Poisson sampling, as differential privacy wants it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moretta.keystream import SecretRoot


class Lots:
    """Each of a silo's rows by itself with chance q = L / rows.

    rows: how many there are. batch_size: the expected lot, 0 for all rows.
    expected: L. rate: q.
    """

    def __init__(self, rows: int, batch_size: int) -> None:
        self._rows = rows
        self.expected = min(batch_size, rows) or rows
        self.rate = self.expected / rows

    def draw(self, root: SecretRoot, *purpose: int | str | bytes) -> NDArray[np.int64]:
        """Return the numbers of the rows in the lot of one purpose, ascending; perhaps none. root: the silo's own."""
        return np.flatnonzero(root.stream("dp lot", *purpose).uniform(self._rows) < self.rate)
