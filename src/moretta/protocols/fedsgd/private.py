"""A silo's half of differentially private SGD (Abadi et al., CCS 2016, Algorithm 1), the baseline "DP-FL".

One round of silo k, which has n_k rows. L_k is the batch size, or n_k if the batch size is 0 or above n_k:

    lot        each row independently with chance q_k = L_k / n_k, drawn in secret
    i in lot   g_i = gradient of the loss on row i alone;  g_i <- g_i / max(1, |g_i| / C)
    upload     x_k = (sum_i g_i + whole steps of noise, of variance sigma^2 C^2 / S) / L_k, with the weight L_k

so the mean that the server steps along is (sum of all lots' clipped gradients + noise) / (sum_k L_k). The sums are
rounded to steps first (`moretta.protocols.common.lattice`). S is the fewest silos of any opened sum
(`moretta.secure_aggregation.settings.SecureAggregation.sharing_noise`). So the noise in a sum has at least the
deviation sigma C, and sqrt(K / S) times that with all K silos. Under ``scheme = "none"`` each upload is seen, so S is 1
and each has all of the noise. An observer who knows the noise of some silos (its own, or a colluding silo's) faces
less: `moretta.protocols.common.accountant` states epsilon for some such cases too.

Every draw follows from the silo's secret root, the take, and a digest of everything that the gradient depends on: the
run's settings, the model's code and parameters, the silo's rows and their standardisation. If it followed from root and
round alone, a run with the same id and another dp-noise would have the same noise at another scale, and the two uploads
would give the gradient.

Where the unit is a group (`dp-unit`), such as a patient, the lot is of groups, each with chance L_k over the silo's
number of groups. Then g_i is the mean gradient over at most `dp-group-rows` different rows of group i, drawn in secret
for each lot. So one group moves the sum by at most C, whatever rows it has, and however often each.

The upload contains nothing else about the lot: not its size (the weight is the expected one), not its loss. Examples
go through the model in batches, by `torch.func.vmap`. None affects another's gradient, except by rounding in the last
place.

Differs from the paper: the sum over silos is one mechanism with several lots. Neighbouring data sets differ in one
silo's lot, so its own q_k counts. Differs from the paper: noise is of whole steps, so that no bits of it reveal the sum
that it hides, as those of floating-point noise do (Mironov, CCS 2012). The silo itself refuses a ring too coarse for
these steps. A row's gradient is still rounded in the model's dtype, so the other rows of its batch may change it by
some units in the last place.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from moretta.contract.messages import Array, Stamp, Tensors
from moretta.contract.roles import over
from moretta.errors import ParameterError
from moretta.protocols.common import modules
from moretta.protocols.common.batches import Purpose
from moretta.protocols.common.clipping import clipped_sum
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.noise import SiloNoise, Sums
from moretta.protocols.common.passes import refuse_mixing
from moretta.secure_aggregation.keystream import SecretRoot, digest_of

MOST_ENTRIES = 1 << 25  # of row gradients in memory at once, in the model's dtype and in float64: 400 MB
MOST_ROWS = 256  # in one pass through the model


class PrivateGradient:
    """Clips and sums the gradients of a silo's lot and adds its share of the noise. noise: draws both."""

    def __init__(self, noise: SiloNoise, rows: SiloRows, loss: Loss) -> None:
        self.noise, self._rows, self._loss = noise, rows, loss

    def upload(
        self, model: nn.Module, parameters: Tensors, now: Stamp, encoding: Mapping[str, int], sums: Sums | None = None
    ) -> dict[str, Array]:
        """Return x_k by parameter as ``gradient/<name>``, float64.

        A repeated take, in another attempt or after a resume, has the same upload, which reveals nothing new. Where the
        parameters differ, or anything else behind the gradient, the noise differs too: the same noise on two gradients
        would show their difference.

        Args:
            model: Holds `parameters`, as the server sent them.
            encoding: How the sum will be rounded (`moretta.protocols.common.lattice.Lattice.check`).
            sums: The upload's sum (`moretta.protocols.common.noise.SiloNoise.noised`).
        """
        purpose = self.purpose(parameters, now)
        self.noise.uploading(now, purpose[-1], sums=sums)
        with _seeded(model, self.noise.root, *purpose):
            total = self.clipped_sum(model, *self.noise.lot_of(*purpose))
        totals = over("gradient/", total)
        return dict(self.noise.noised(totals, encoding, *purpose, sums=sums))

    def purpose(self, parameters: Tensors, now: Stamp) -> Purpose:
        """Return the purpose of one upload's lot and noise."""
        return self.noise.purpose(now, self._rows.of.digest, digest_of(parameters))

    def clipped_sum(
        self, model: nn.Module, rows: NDArray[np.int64], sizes: Sequence[int] = ()
    ) -> dict[str, NDArray[np.float64]]:
        """Return sum_i g_i / max(1, |g_i| / C), by parameter; g_i is the mean over the rows of contribution i.

        At most `MOST_ENTRIES` entries of rows' gradients are in memory at once, or those of one contribution.

        Args:
            rows: Of all contributions, concatenated.
            sizes: The number of rows of each contribution; () is one row each.
        """
        trained = {name: parameter.detach() for name, parameter in modules.trainable(model).items()}

        def loss_of_row(parameters: Mapping[str, Tensor], inputs: Tensor, target: Tensor) -> Tensor:
            return self._loss(functional_call(model, dict(parameters), (inputs[None],)), target[None])

        gradients_of = vmap(grad(loss_of_row), in_dims=(None, 0, 0), randomness="different")
        total = {name: torch.zeros_like(parameter, dtype=torch.float64) for name, parameter in trained.items()}
        entries = sum(parameter.numel() for parameter in trained.values())
        passes = self._rows.passes
        step = max(1, min(MOST_ROWS, passes.rows or MOST_ROWS, MOST_ENTRIES // max(1, entries)))
        of, starts = list(sizes) or [1] * len(rows), np.cumsum([0, *(sizes or [1] * len(rows))])
        step = max(1, step // max(of, default=1))  # contributions
        for first in range(0, len(of), step):
            part = of[first : first + step]
            with passes.through(model):
                gradients = gradients_of(trained, *self._rows.rows(rows[starts[first] : starts[first + len(part)]]))
            if max(part) > 1:
                gradients = {
                    name: torch.stack([rows_of.mean(dim=0) for rows_of in value.split(part)])
                    for name, value in gradients.items()
                }
            for name, value in clipped_sum(gradients, self.noise.privacy.clip).items():
                total[name] += value
        return modules.on_host(total)

    def check(self, model: nn.Module) -> None:
        """Raise `moretta.errors.ParameterError` if a row has no gradient of its own in this model."""
        refuse_mixing(model, "dp-noise needs the gradient of each row alone", frozen=True)
        try:
            with _seeded(model, self.noise.root, "dp check"):
                self.clipped_sum(model, np.arange(1))
        except Exception as error:
            raise ParameterError(
                "dp-noise needs the gradient of each row alone, and torch.func cannot take it of this model; put other "
                f"modules in the place of those it names: {type(error).__name__}: {error}".split("\n")[0]
            ) from error


@dataclass(frozen=True)
class PrivateUpdate:
    """Noise on a silo's whole update, which hides the silo with all its rows. noise: clips the update, and draws."""

    noise: SiloNoise

    def check(self, model: nn.Module) -> None:
        """Raise `moretta.errors.ParameterError` if a model averages more than its parameters."""
        if buffers := modules.running_buffers(model):
            raise ParameterError(
                f"`{next(iter(buffers))}` is a running statistic of rows, and under dp-noise silos upload no more than "
                "their parameters' changes; use GroupNorm in the place of batch normalisation"
            )


@contextmanager
def _seeded(model: nn.Module, root: SecretRoot, *purpose: int | str | bytes) -> Iterator[None]:
    """Seed torch in secret, for dropout and the like, and restore its generators afterwards.

    `SiloRows.randomness` will not do, as anyone can repeat it: a row's draws depend on its place in the lot, so with
    known draws one more example would visibly change the gradients of those after it.
    """
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(root.stream("dp torch", *purpose).integers(1, 64)[0]) >> 1)
        yield
