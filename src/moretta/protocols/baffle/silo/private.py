"""Noise on a silo's K scalars: what one row adds to them is bounded, and noise hides whether it was there.

One round, silo c with lot S_c (`moretta.protocols.common.batches`), L_c its expected size:

    i in S_c   x_i = the row's own x_1 .. x_K;   x_i <- x_i / max(1, |x_i| / C)
    upload     (sum_i x_i + N(0, z^2 C^2 / S)) / L_c, with the weight L_c

z is dp-noise, C dp-clip, and S the fewest silos whose sum is ever opened
(`moretta.secure_aggregation.settings.SecureAggregation.sharing_noise`). All roles know the directions, which follow
from what was released before. So a round is the sampled Gaussian mechanism of K numbers, whatever K
(`moretta.protocols.common.accountant`). No loss is uploaded. Lot and noise follow from the secret root and from all
that the scalars depend on, as in `moretta.protocols.fedsgd.private`; here also the model's graph, the seed of the
directions, and K.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Stamp
from moretta.contract.roles import State
from moretta.protocols.common.accountant import Accountant, Privacy
from moretta.protocols.common.batches import Lots, Purpose, purpose_of
from moretta.protocols.common.releases import OwnReleases
from moretta.protocols.common.silo_setup import SiloSetup
from moretta.secure_aggregation.keystream import SecretRoot


class PrivateScalars:
    """Draws a silo's lots, clips its rows' scalars, sums and adds its share of the noise.

    rows: of the silo. batch_size: the expected lot, 0 for all rows. root: lots and noise derive from it; kept in the
    silo's checkpoint. settings: a digest of all settings of uploads. sharers: S. releases: those the silo helped to
    open.
    """

    def __init__(
        self, privacy: Privacy, rows: int, batch_size: int, root: SecretRoot, settings: bytes, sharers: int = 1
    ) -> None:
        self._privacy, self._root, self._settings, self._sharers = privacy, root, settings, sharers
        self._clip, self._deviation = privacy.clip, privacy.share(sharers)
        self._lots = Lots(rows, batch_size)
        self.lot, self.rate, self.releases = self._lots.expected, self._lots.rate, OwnReleases()

    @classmethod
    def of(cls, setup: SiloSetup, root: SecretRoot) -> PrivateScalars | None:
        """Return what adds the noise of a silo; None where it adds none."""
        if setup.privacy is None:
            return None
        return cls(setup.privacy, len(setup.x), setup.batch_size, root, setup.bound, setup.sharers)

    def purpose(self, now: Stamp, *of: int | str | bytes) -> Purpose:
        """Return the purpose for which one upload's lot and noise are drawn. of: see `purpose_of`."""
        return purpose_of(now, self._settings, *of)

    def rows_of_lot(self, *purpose: int | str | bytes) -> NDArray[np.int64]:
        """Return the indices of the rows in the lot of one purpose, perhaps none."""
        return self._lots.draw(self._root, *purpose)

    def check_steps(self, encoding: Mapping[str, int]) -> None:
        """Check that the sum is not rounded so that the noise is lost; raises as `Privacy.check_steps`."""
        self._privacy.check_steps(encoding, self._sharers)

    def noised_mean(self, derivatives: NDArray[np.float64], *purpose: int | str | bytes) -> NDArray[np.float64]:
        """Return what is uploaded, float64[K], of the rows' scalars [K, rows].

        A row whose scalars are not finite counts as 0, so that nobody learns that it makes the model overflow.
        """
        exact = np.where(np.isfinite(derivatives).all(axis=0), derivatives, 0.0)
        clipped = exact / np.maximum(1.0, np.linalg.norm(exact, axis=0) / self._clip)
        noise = self._deviation * self._root.stream("dp noise", *purpose).normal(len(derivatives))
        return np.asarray((clipped.sum(axis=1) + noise) / self.lot)

    def facts(self, left_out: str = "") -> dict[str, float | str]:
        """Return the privacy of the silo's own rows, by its own count and rate (`Accountant.facts`).

        left_out: where its rows were used beside its uploads.
        """
        return Accountant(self._privacy, self.rate, self._sharers, left_out).facts(self.releases.count)

    def state(self) -> State:
        """Return the secret root, from which lots and noise follow, and what was released."""
        return {"secret_root": self._root.reveal(), **self.releases.state()}

    def restore(self, state: State) -> None:
        """Take up what `state` returned."""
        self._root = SecretRoot(state["secret_root"])
        self.releases.restore(state)
