"""A silo's lots and its share of the noise, for differentially private uploads. Needs no torch.

Every draw follows from the silo's secret root, the take, and a digest of everything that the upload depends on. So
equal asks have equal answers, and no two sums have the same noise at another scale.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Message, Stamp, Tensors
from moretta.contract.roles import State
from moretta.errors import ParameterError
from moretta.protocols.common.accountant import Accountant
from moretta.protocols.common.batches import Lots, Purpose, purpose_of
from moretta.protocols.common.lattice import Lattice, Privacy
from moretta.protocols.common.releases import Releases
from moretta.secure_aggregation.discrete_gaussian import discrete_gaussian
from moretta.secure_aggregation.encoding import unpacked
from moretta.secure_aggregation.keyed_sums import Contributor
from moretta.secure_aggregation.keystream import SecretRoot, digest_of, encode_purpose
from moretta.secure_aggregation.removable_noise import Removable, removable_noise
from moretta.secure_aggregation.sums import Query, Shapes


@dataclass(frozen=True)
class Sums:
    """The sum of a noised upload: a silo's half of it, and the query that the upload answers."""

    contributor: Contributor
    asked: Query

    @classmethod
    def of(cls, contributor: Contributor, asked: Query) -> Self:
        """Return the same, with the cohort added to the silo's record of the query.

        The size of noise follows from the cohort. So the silo's record refuses another cohort's sum of a take that it
        has helped to open. It would be the same lot under other noise.
        """
        members = contributor.members
        own = hashlib.sha256(encode_purpose("cohort of noise", *members)).digest() if members else b""
        return cls(contributor, replace(asked, own=own))

    @property
    def bound(self) -> tuple[bytes, ...]:
        """The cohort and the query, to which noise is bound beside its purpose; empty if uploads are in the clear."""
        return (self.asked.own, self.asked.digest) if self.asked.own else ()


class SiloNoise:
    """Draws a silo's lots and its share of the noise, and counts its releases.

    Args:
        privacy: The settings of the noise.
        rows: The silo's number of rows.
        batch_size: The expected lot, 0 for all rows. If the unit is a silo, its whole update is the lot's one element.
        root: Lots and noise derive from it; it is kept in the silo's checkpoint.
        settings: A digest of all settings of uploads, to which lots and noise are bound.
        groups: The rows of each group, if the unit is a group; lots are then of groups.

    Attributes:
        lot: The expected lot, L_k.
        rate: q_k, the chance of a row, or a group, to be in it.
        releases: The silo's uploads.
        run: Of the last upload.
        removable: The removable parts of the last noise.
    """

    def __init__(
        self,
        privacy: Privacy,
        rows: int,
        batch_size: int,
        root: SecretRoot,
        settings: bytes,
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        self.privacy, self.root, self._settings = privacy, root, settings
        self.removable: Removable | None = None
        self._groups = [np.array(rows, dtype=np.int64) for rows in groups]
        self._lots = Lots(1, 1) if privacy.unit == "silo" else Lots(len(groups) or rows, batch_size)
        self.lot, self.rate = self._lots.expected, self._lots.rate
        self.releases, self.run = Releases(), ""

    def purpose(self, now: Stamp, *of: int | str | bytes) -> Purpose:
        """Return the purpose of one upload's lot and noise. of: see `purpose_of`."""
        return purpose_of(now, self._settings, *of)

    def rows_of_lot(self, *purpose: int | str | bytes) -> NDArray[np.int64]:
        """Return the indices of the rows in the lot of one purpose; perhaps none."""
        return self.lot_of(*purpose)[0]

    def lot_of(self, *purpose: int | str | bytes) -> tuple[NDArray[np.int64], list[int]]:
        """Return the indices of the rows in the lot, and the number of rows of each contribution to the sum, in order.

        A contribution is a row or a group. That of a group is the mean of at most `group_rows` of its rows, also drawn
        in secret. A group's draw depends on no other group.
        """
        drawn = self._lots.draw(self.root, *purpose)
        if not self._groups:
            return drawn, [1] * len(drawn)
        stream, most = self.root.stream("dp group rows", *purpose), self.privacy.group_rows
        parts = [rows[stream.permutation(len(rows))[:most]] for rows in (self._groups[index] for index in drawn)]
        return np.concatenate([drawn[:0], *parts]), list(map(len, parts))

    def uploading(self, now: Stamp, *of: int | str | bytes, sums: Sums | None = None) -> None:
        """Count an upload before it is sent.

        The silo's own count decides, not the server's; an upload may be sent again.

        Args:
            of: As for `moretta.protocols.common.releases.Releases.add`.

        Raises:
            ParameterError: The upload's sum would exceed the bound of epsilon.
        """
        of = (*of, *(() if sums is None else sums.bound))
        accountant = None if self.privacy.most is None else Accountant(self.privacy, self.rate)
        again = self.releases.has(now, *of)
        if accountant is not None and not again and not accountant.allows(self.releases.count + 1):
            raise ParameterError(
                f"dp-epsilon = {self.privacy.most:g} is spent by the uploads that this silo has sent; nothing was sent"
            )
        self.releases.add(now, *of)
        self.run = now.run

    def upload_update(
        self, now: Stamp, update: Tensors, encoding: Mapping[str, int], sums: Sums, *of: int | str | bytes
    ) -> Message:
        """Return the upload of a whole update, clipped and noised. Arguments and raises: `of_update`, `upload`."""
        return self.upload(now, self.of_update(now, update, encoding, *of, sums=sums), encoding, sums)

    def of_update(
        self,
        now: Stamp,
        update: Tensors,
        encoding: Mapping[str, int],
        *of: int | str | bytes,
        sums: Sums | None = None,
    ) -> dict[str, NDArray[np.float64]]:
        """Return a whole update, clipped to C over all its tensors, with the silo's share of the noise.

        Entries that are not finite count as 0. The noise is bound to the update too: a repeated take may step
        differently, as on a GPU, and two uploads under one noise would show the difference.

        Args:
            of: All that the update follows from.

        Raises:
            ParameterError: As `uploading` and `noised`.
        """
        clipped = {name: np.array(value, np.float64) for name, value in update.items()}
        with np.errstate(over="ignore"):  # an infinite norm leaves nothing of the update
            for value in clipped.values():
                np.nan_to_num(value, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
            norm = math.sqrt(sum(float(np.vdot(value, value)) for value in clipped.values()))
        for value in clipped.values():
            value /= max(1.0, norm / self.privacy.clip)
        purpose = self.purpose(now, *of, digest_of(clipped))
        self.uploading(now, purpose[-1], sums=sums)
        return self.noised(clipped, encoding, *purpose, sums=sums)

    def noised(
        self,
        totals: Mapping[str, NDArray[np.float64]],
        encoding: Mapping[str, int],
        *purpose: int | str | bytes,
        sums: Sums | None = None,
    ) -> dict[str, NDArray[np.float64]]:
        """Return the upload for clipped sums over the lot: (sum + noise) / lot, by name.

        Args:
            encoding: How the sum over silos will be rounded.
            sums: The upload's sum; None sizes noise for all silos of a round without losses.

        Raises:
            ParameterError, PeerError: As `Lattice.check`.
        """
        lattice = Lattice.of(self.privacy, sum(total.size for total in totals.values()))
        most, shapes = lattice.check(encoding, self.lot), {name: total.shape for name, total in totals.items()}
        if not lattice.deviation:
            return {name: total / self.lot for name, total in totals.items()}
        drawn = self._drawn(lattice, shapes, sums, *purpose)
        return {name: lattice.noised(total, most, drawn[name]) / self.lot for name, total in totals.items()}

    def _drawn(
        self, lattice: Lattice, shapes: Shapes, sums: Sums | None, *purpose: int | str | bytes
    ) -> Mapping[str, NDArray[np.int64]]:
        """Draw the noise of one upload, by name, and set `removable` to its removable parts."""
        levels = lattice.noise.levels(self.privacy.sharers + self.privacy.colluding, 0)
        if sums is not None:
            levels = sums.contributor.levels(lattice.noise)
            purpose = (*purpose, *sums.bound)
        stream, count = self.root.stream("discrete noise", *purpose), sum(map(math.prod, shapes.values()))
        base = discrete_gaussian(math.sqrt(levels.variances[0]))
        drawn = {name: base.draw(stream, math.prod(shape)) for name, shape in shapes.items()}
        self.removable = None
        if levels.removable:
            self.removable = Removable.of(levels, self.root.stream("noise seeds", *purpose))
            more = removable_noise(self.removable.seeds[0], 1, levels, count).view(np.uint64)
            parts = {name: part.reshape(-1).view(np.int64) for name, part in unpacked(more, shapes).items()}
            drawn = {name: drawn[name] + part for name, part in parts.items()}
        return drawn

    def upload(self, now: Stamp, tensors: Tensors, encoding: Mapping[str, int], sums: Sums) -> Message:
        """Return the upload of the last result of `noised`. Raises as `KeyedContributor.upload`."""
        part: dict[str, Any] = {} if self.removable is None else {"noise": self.removable}
        return sums.contributor.upload(now, tensors, self.lot, encoding, asked=sums.asked, **part)

    def facts(self, left_out: str = "") -> dict[str, float | str]:
        """Return the privacy of the silo's rows by its own count and rate. left_out: uses beside uploads."""
        return Accountant(self.privacy, self.rate, left_out).facts(self.releases.count)

    def state(self) -> State:
        """Return the secret root of lots and noise, and the releases."""
        return {"secret_root": self.root.reveal(), **self.releases.state()}

    def restore(self, state: State) -> None:
        """Restore what `state` returned."""
        self.root = SecretRoot(state["secret_root"])
        self.releases.restore(state)
