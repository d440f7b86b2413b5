"""Noise on a silo's K scalars: what one row adds to them is bounded, and noise hides whether it was there.

One round, silo c with lot S_c (`moretta.protocols.common.batches`), L_c its expected size:

    i in S_c   x_i = the row's own x_1 .. x_K;   x_i <- x_i / max(1, |x_i| / C)
    upload     (sum_i x_i + whole steps of noise, of variance z^2 C^2 / S) / L_c, with the weight L_c

z is dp-noise, C dp-clip, and S the fewest silos whose sum is ever opened
(`moretta.secure_aggregation.settings.SecureAggregation.sharing_noise`); `moretta.protocols.common.lattice` has the
steps. All roles know the directions, which follow from what was released before. So a round is the sampled Gaussian
mechanism of K numbers, whatever K (`moretta.protocols.common.accountant`). No loss is uploaded. Lot and noise follow
from the secret root and from all that the scalars depend on, as in `moretta.protocols.fedsgd.private`; here also the
model's graph, the seed of the directions, and K.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from moretta.protocols.common.noise import SiloNoise, Sums
from moretta.protocols.common.silo_setup import SiloSetup
from moretta.secure_aggregation.keystream import SecretRoot


def noise_of(setup: SiloSetup, root: SecretRoot) -> SiloNoise | None:
    """Return what adds the noise of a silo; None where it adds none. root: what lots and noise derive from."""
    if setup.privacy is None:
        return None
    return SiloNoise(setup.privacy, len(setup.x), setup.batch_size, root, setup.bound, setup.groups)


def noised_mean(
    noise: SiloNoise,
    derivatives: NDArray[np.float64],
    encoding: Mapping[str, int],
    *purpose: int | str | bytes,
    sizes: Sequence[int] = (),
    sums: Sums | None = None,
) -> NDArray[np.float64]:
    """Return what is uploaded, float64[K], of the rows' scalars [K, rows]. encoding: how the sum will be rounded.

    sizes: how many rows each contribution has, one after the other, whose mean is clipped; () is one row each. sums: as
    of `moretta.protocols.common.noise.SiloNoise.noised`.
    A row whose scalars are not finite counts as 0, so that nobody learns that it makes the model overflow.
    """
    exact = np.where(np.isfinite(derivatives).all(axis=0), derivatives, 0.0)
    if len(sizes) < exact.shape[1]:
        exact = np.add.reduceat(exact, np.cumsum([0, *sizes[:-1]]), axis=1) / sizes if sizes else exact
    clipped = exact / np.maximum(1.0, np.linalg.norm(exact, axis=0) / noise.privacy.clip)
    return noise.noised({"scalars": clipped.sum(axis=1)}, encoding, *purpose, sums=sums)["scalars"]
