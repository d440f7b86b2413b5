"""From losses to a gradient: the paper's finite differences (Eqs. 1, 2, 6) and the mean form.

    form            x_k, a silo's upload                           gradient                        forwards
    mean            (L(w + s d_k) - mean_j L(w + s d_j)) / s       1/(K-1) sum_k x_k d_k           K
    base            (L(w + s d_k) - L(w)) / s                      1/K     sum_k x_k d_k           K + 1
    twice-forward   as base, with 2K directions                    1/(2K)  sum_k x_k d_k           2K + 1
    central         (L(w + s d_k) - L(w - s d_k)) / (2 s)          1/K     sum_k x_k d_k           2K

s is sigma. All are linear in the losses, so the silos' mean of x_k is the x_k of all their rows. The mean form is
unbiased through second order: the trace of the Hessian, which all d_k share, cancels with the mean.
Differs from the paper: x_k is the difference over sigma, an estimate of the derivative along d_k, so that one range of
fixed point fits every sigma.

**A silo's own estimate**, of all parameters or of some, goes through the masked sum::

    server       shapes     plans the sum; the encoding of each tensor travels in the message that asks
    silo c       tensors    g_c, as long as the parts, with its other numbers about the batch (its mean loss)
    masked sum              sum_c N_c g_c / N: fixed point in the ring, each entry within [-limit, limit]
    server       read       the mean, float64, in its places of the flat parameters

The scalars above are the losses' differences along directions that all roles know. Own estimates are those that no
other role can compute from scalars: their directions are the silo's own, or they have none. The server then learns the
weighted mean of the silos' estimates, as of gradients under FedSGD.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.errors import MisuseError, ParameterError
from moretta.protocols.baffle.silo.directions import Directions
from moretta.protocols.baffle.silo.forward import Forward, Layout, Perturbs
from moretta.protocols.common.targets import RowLosses
from moretta.secure_aggregation.sums import Shapes, Sum

Form = Literal["mean", "base", "twice-forward", "central"]


Combine = Callable[[Directions, NDArray[np.float64]], NDArray[np.float64]]


def directions_of(form: Form, k: int) -> int:
    """Return the number of directions, and of uploaded scalars, for K."""
    return 2 * k if form == "twice-forward" else k


def forwards_of(form: Form, k: int) -> int:
    """Return the number of a batch's forward passes."""
    return {"mean": k, "base": k + 1, "twice-forward": 2 * k + 1, "central": 2 * k}[form]


Derivatives = tuple[NDArray[np.float64], NDArray[np.float64]]
"""x_k of each row, float64[K, rows], and the rows' own losses (those of w, or their mean over k), [rows]."""


def differences(
    form: Form, sigma: float, directions: Directions, forward: Forward, loss: RowLosses, at: Array, x: Array, y: Array
) -> Derivatives:
    """Return a batch's derivatives. at: w, flat. x, y: the batch, as of `Forward.outputs` and `RowLosses`."""
    return differences_together(form, sigma, directions, forward, loss, at, [(x, y)])[0]


def differences_together(
    form: Form,
    sigma: float,
    directions: Directions,
    forward: Forward,
    loss: RowLosses,
    at: Array,
    batches: Sequence[tuple[Array, Array]],
) -> list[Derivatives]:
    """Return the same for several silos' batches, with directions made once: bit for bit as one by one.

    Args:
        batches: x and y of each, of sizes for which the forward pass runs equally many directions at once.
    """

    def losses(distance: float) -> list[NDArray[np.float64]]:
        """Return the losses of each batch's rows, [K, rows], at all perturbed parameters."""
        parts_of: list[list[NDArray[np.float64]]] = [[] for _ in batches]
        rows = len(batches[0][0])
        if isinstance(forward, Perturbs):
            perturbed = forward.perturbed(directions, at, distance, rows)
        else:
            perturbed = directions.perturbed(at, distance, forward.at_once(rows))
        for vectors in perturbed:
            for parts, (x, y) in zip(parts_of, batches, strict=True):
                parts.append(loss(forward.outputs(vectors, x), y))
        return [np.concatenate(parts) for parts in parts_of]

    with np.errstate(invalid="ignore", over="ignore"):  # the caller checks that losses are finite
        ahead = losses(sigma)
        if form == "mean":
            middles = [each.mean(axis=0) for each in ahead]
            return [((each - middle) / sigma, middle) for each, middle in zip(ahead, middles, strict=True)]
        if form == "central":
            pairs = zip(ahead, losses(-sigma), strict=True)
            return [
                ((ahead_losses - two) / (2 * sigma), (ahead_losses.mean(axis=0) + two.mean(axis=0)) / 2)
                for ahead_losses, two in pairs
            ]
        own_losses = [loss(forward.outputs(at[None], x), y)[0] for x, y in batches]
        return [((each - own) / sigma, own) for each, own in zip(ahead, own_losses, strict=True)]


def gradient(
    form: Form, derivatives: NDArray[np.float64], directions: Directions, combine: Combine = Directions.combine
) -> NDArray[np.float64]:
    """Return the estimate of the gradient from x_1 .. x_K, float64[n]. combine: adds directions up."""
    return combine(directions, derivatives / (len(derivatives) - (form == "mean")))


def check_sigma(sigma: float, at: Array) -> None:
    """Refuse a sigma that vanishes in the parameters' rounding.

    It works if, of 100 parameters, 99 move by sigma to a quarter's precision.

    Raises:
        ParameterError: It does not work; the sentence has a sigma that does, if one exists.
    """
    if _moves(sigma, at):
        return
    tries = 10.0 ** np.arange(-38, 39)
    works = next((tried for tried in tries[tries > sigma] if _moves(tried, at)), None)
    if works is None:
        raise ParameterError(
            f"sigma = {sigma:g} cannot move {at.dtype} parameters of which {np.count_nonzero(~np.isfinite(at))} are "
            "NaN or infinite; set sigma from 1e-5 to 1e-2, or go back to finite parameters"
        )
    raise ParameterError(
        f"sigma = {sigma:g} is lost in the rounding of {at.dtype} parameters as large as {np.abs(at).max():.3g}; "
        f"sigma = {works:g} works"
    )


def _moves(sigma: float, at: Array) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        step = at.dtype.type(sigma)
        moved = (at + step) - at
        return bool((np.abs(moved - step) <= step / 4).mean() >= 0.99) and 0 < step < np.inf


ESTIMATE, SPOKEN = "estimate", "spoken"


@dataclass(frozen=True)
class Parts:
    """The estimated entries of the flat parameters. slices: of these, in order, disjoint. length: of all, n."""

    slices: tuple[slice, ...]
    length: int

    @classmethod
    def of(cls, layout: Layout, names: Collection[str] | None = None) -> Parts:
        """Return the parts of some trained tensors, or of all. names: of `Layout.shapes`."""
        unknown = set(names or ()) - set(layout.shapes)
        if unknown:
            raise MisuseError(f"expected names of trained tensors, got {sorted(unknown)!r:.200}")
        if names is None:
            return cls((slice(0, layout.size),), layout.size)
        return cls(tuple(place for name, place in layout.places.items() if name in names), layout.size)

    @property
    def size(self) -> int:
        """The number of estimated entries."""
        return sum(part.stop - part.start for part in self.slices)

    def shapes(self, spoken: int) -> Shapes:
        """Return the shapes of an upload. spoken: the numbers beside a silo's estimate, may be 0."""
        return {ESTIMATE: (self.size,)} | ({SPOKEN: (spoken,)} if spoken else {})

    def taken(self, flat: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the parts of a flat array [n], concatenated."""
        return np.concatenate([flat[part] for part in self.slices])

    def tensors(self, silo: str, estimate: NDArray[np.floating], spoken: NDArray[np.float64]) -> dict[str, Array]:
        """Return a silo's upload.

        Args:
            estimate: Of the concatenated parts, float32 or float64 [size]; not copied.
            spoken: The numbers beside it, [any].

        Raises:
            ParameterError: A number is not finite; nothing is sent then.
            MisuseError: The estimate has another shape.
        """
        if estimate.shape != (self.size,):
            raise MisuseError(f"expected an estimate of {self.size} parameters, got shape {list(estimate.shape)}")
        if not np.isfinite(estimate).all() or not np.isfinite(spoken).all():
            raise ParameterError(
                f"the estimate of silo `{silo}` is NaN or infinite in some of {self.size} parameters; look at its "
                "rows, or lower learning-rate or sigma"
            )
        return {ESTIMATE: estimate} | ({SPOKEN: spoken} if spoken.size else {})

    def read(self, total: Sum) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
        """Return the silos' mean estimate, their further numbers, and the sum's step.

        Returns:
            The estimate, float64[n], is 0 outside the parts. The step bounds the error that fixed point adds to an
            entry.
        """
        mean = total.means[ESTIMATE]
        if self.size < self.length:
            mean = np.zeros(self.length)
            mean[np.r_[self.slices]] = total.means[ESTIMATE]
        return mean, total.means.get(SPOKEN, np.zeros(0)), total.steps[ESTIMATE]
