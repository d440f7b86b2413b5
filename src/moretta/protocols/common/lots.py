"""The rows of a silo in a round's lot, drawn in secret: Poisson sampling, as differential privacy needs it."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Stamp
from moretta.secure_aggregation.keystream import SecretRoot, encode_purpose

Purpose = tuple[str, int, int, bytes]
"""What a lot and its noise are drawn for: run, round, take, and a digest of all that the upload follows from."""


def purpose_of(now: Stamp, *of: int | str | bytes) -> Purpose:
    """Return the purpose of one upload. of: digests of the settings, the rows, the model and what else was asked.

    All attempts at a take have the same. `of` must have everything that would change the sum of the lot's rows: two
    sums under the same noise, or the same noise at another scale, would show their difference.
    """
    return now.run, now.round, now.take, hashlib.sha256(encode_purpose("noised upload", *of)).digest()


class Lots:
    """Draws each of a silo's rows independently with chance q = L / rows.

    rows: how many there are. batch_size: the expected lot, 0 for all rows.
    expected: L. rate: q.
    """

    def __init__(self, rows: int, batch_size: int) -> None:
        self._rows = rows
        self.expected = min(batch_size, rows) or rows
        self.rate = self.expected / rows

    def draw(self, root: SecretRoot, *purpose: int | str | bytes) -> NDArray[np.int64]:
        """Return the indices of the rows in the lot of one purpose, ascending; perhaps none. root: the silo's own."""
        return np.flatnonzero(root.stream("dp lot", *purpose).uniform(self._rows) < self.rate)
