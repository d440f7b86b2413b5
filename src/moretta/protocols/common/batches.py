"""The rows that a silo uses in a round: a pure function of seed, silo, round and take, without state.

Two takes of a round draw rows independently (`moretta.secure_aggregation.one_sum`), unless a batch has more than half
of the rows. Any draw would then repeat most rows, so all takes have the same ones.

No batch has a single row unless one is requested: batch normalisation cannot train on one, and its gradient would be
one person's. The previous batch gives the last one a row, or takes its only one if one row would be left.

Under differential privacy a silo draws its rows in secret (`Lots`), by the Poisson sampling of the accountant.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moretta.contract.lazy_rows import blocks
from moretta.contract.messages import Array, Stamp
from moretta.errors import PeerError, RowsError
from moretta.secure_aggregation.keystream import SecretRoot, encode_purpose


def most_rows(size: int) -> int:
    """Return the most rows of a batch for batches of `size` rows."""
    return 3 if size == 2 else size


class Batches:
    """The mini-batches of one silo: a fresh permutation each epoch; the last partial batch is kept.

    Args:
        rows: The silo's number of rows, 1 or more.
        size: Rows in a batch, 0 for all.
        seed: Of the training, not secret.
        run: The run's id, which changes the batches of equal seeds; empty if one machine runs all roles.
        in_order: Every epoch has the rows in their stored order.

    Raises:
        RowsError: The silo has no rows.
    """

    def __init__(self, rows: int, size: int, seed: int, silo: str, run: str = "", *, in_order: bool = False) -> None:
        if rows < 1:
            raise RowsError(f"silo `{silo}` has no rows; expected at least one")
        self.rows = rows
        self.size = min(size, rows) or rows
        bounds = [*range(0, rows, self.size), rows]
        if self.size > 1 and rows % self.size == 1:
            bounds[-2:-1] = [] if self.size == 2 else [rows - 2]
        self._bounds, self.per_epoch = np.array(bounds), len(bounds) - 1
        self.entropy = [seed, *(_number(name) for name in (silo, run) if name)]
        self.whole = 2 * int(np.diff(self._bounds).max()) > rows
        self._in_order = in_order
        self._epoch, self._order = -1, np.arange(0)

    def of_round(self, number: int, take: int = 0) -> NDArray[np.int64]:
        """Return the row numbers of round `number`, counted from 1, and of a take of it: `Stamp.drawn`.

        A take beyond the first draws from all rows, so the silo may see some of them twice in an epoch.

        Raises:
            PeerError: The round is before the first; only a server can name it.
        """
        if take and not self.whole:
            generator = np.random.Generator(np.random.PCG64([*self.entropy, number, take]))
            return generator.permutation(self.rows)[: self.size]
        epoch, position = divmod(number - 1, self.per_epoch)
        return self._in_epoch(epoch)[slice(*self._bounds[position : position + 2])]

    def of_epoch(self, epoch: int) -> list[NDArray[np.int64]]:
        """Return the batches of epoch `epoch`, counted from 0: each row once. Raises as `of_round`."""
        return np.split(self._in_epoch(epoch), self._bounds[1:-1])

    @property
    def fewest(self) -> int:
        """The rows of the smallest batch."""
        return int(np.diff(self._bounds).min())

    def _in_epoch(self, epoch: int) -> NDArray[np.int64]:
        if epoch < 0:
            raise PeerError("expected a round from 1 on, was asked to train in one before the first")
        if self._in_order:
            self._epoch, self._order = epoch, np.arange(self.rows)
        elif epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64([*self.entropy, epoch]))
            self._epoch, self._order = epoch, generator.permutation(self.rows)
        return self._order


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


class UnionBatches:
    """The batches of several silos with concatenated rows: in each round their union."""

    def __init__(self, parts: Sequence[Batches]) -> None:
        self._parts = parts
        self.entropy = parts[0].entropy
        self._starts = np.cumsum([0, *(part.rows for part in parts)])
        self.rows = int(self._starts[-1])
        self.whole = any(part.whole for part in parts)

    def of_epoch(self, epoch: int) -> list[NDArray[np.int64]]:
        """Return the batches of epoch `epoch`, silo by silo: each row once."""
        parts = zip(self._parts, self._starts, strict=False)
        return [index + start for part, start in parts for index in part.of_epoch(epoch)]

    def of_round(self, number: int, take: int = 0) -> NDArray[np.int64]:
        """Return the row numbers of round `number`, counted from 1, and of a take of it."""
        parts = zip(self._parts, self._starts, strict=False)
        return np.concatenate([part.of_round(number, take) + start for part, start in parts])


Purpose = tuple[str, int, int, bytes]
"""The purpose of a lot and its noise: run, round, take, and a digest of all that the upload follows from."""


def purpose_of(now: Stamp, *of: int | str | bytes) -> Purpose:
    """Return the purpose of one upload; all attempts at a take share it.

    Args:
        of: Digests of the settings, the rows, the model and the rest of the ask: everything that changes the sum of the
            lot's rows. Otherwise two sums would have the same noise, perhaps at another scale, and their difference
            would show rows.
    """
    return now.run, now.round, now.take, hashlib.sha256(encode_purpose("noised upload", *of)).digest()


def rows_by_group(groups: NDArray[np.str_], x: Array, y: Array) -> tuple[tuple[int, ...], ...]:
    """Return the indices of each group's rows; of equal rows only the first, so that a repeated row counts once.

    Args:
        groups: str[rows], the subject of each row.
        x, y: Inputs and targets, [rows, ...].
    """
    places = dict[str, dict[bytes, int]]()
    digests = (hashlib.sha256(np.ascontiguousarray(row).data) for block in blocks(x) for row in block)
    for place, (group, digest, target) in enumerate(zip(groups.tolist(), digests, y, strict=True)):
        digest.update(np.ascontiguousarray(target).data)
        places.setdefault(group, {}).setdefault(digest.digest(), place)
    return tuple(tuple(rows.values()) for rows in places.values())


class Lots:
    """Draws each of a silo's rows, or groups, independently with chance q = L / rows.

    Args:
        rows: The number of rows or groups.
        batch_size: The expected lot, 0 for all rows.

    Attributes:
        expected: L.
        rate: q, in (0, 1].
    """

    def __init__(self, rows: int, batch_size: int) -> None:
        self._rows = rows
        self.expected = min(batch_size, rows) or rows
        self.rate = self.expected / rows

    def draw(self, root: SecretRoot, *purpose: int | str | bytes) -> NDArray[np.int64]:
        """Return the ascending indices of the rows in the lot of one purpose; may be empty. root: the silo's own."""
        return np.flatnonzero(root.stream("dp lot", *purpose).uniform(self._rows) < self.rate)
