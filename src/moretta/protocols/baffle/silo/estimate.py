"""From losses to a gradient: the paper's finite differences (Eqs. 1, 2, 6) and the mean form.

    form            x_k, what a silo uploads                       gradient                        forwards
    mean            (L(w + s d_k) - mean_j L(w + s d_j)) / s       1/(K-1) sum_k x_k d_k           K
    base            (L(w + s d_k) - L(w)) / s                      1/K     sum_k x_k d_k           K + 1
    twice-forward   as base, with 2K directions                    1/(2K)  sum_k x_k d_k           2K + 1
    central         (L(w + s d_k) - L(w - s d_k)) / (2 s)          1/K     sum_k x_k d_k           2K

s is sigma. All are linear in the losses, so the silos' mean of x_k is the x_k of all their rows. The mean form is
unbiased through second order: the trace of the Hessian, which all d_k share, cancels with the mean.

Differs from the paper: x_k is the difference over sigma, an estimate of the derivative along d_k, so that one range of
fixed point fits every sigma.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.errors import ParameterError
from moretta.protocols.baffle.silo.directions import Directions
from moretta.protocols.baffle.silo.forward import Forward, Perturbs
from moretta.protocols.common.row_losses import RowLosses

Form = Literal["mean", "base", "twice-forward", "central"]


Combine = Callable[[Directions, NDArray[np.float64]], NDArray[np.float64]]


def directions_of(form: Form, k: int) -> int:
    """Return how many directions K stands for: as many as there are scalars to upload."""
    return 2 * k if form == "twice-forward" else k


def forwards_of(form: Form, k: int) -> int:
    """Return how many times a batch goes through the model."""
    return {"mean": k, "base": k + 1, "twice-forward": 2 * k + 1, "central": 2 * k}[form]


Derivatives = tuple[NDArray[np.float64], NDArray[np.float64]]
"""x_k of each row, float64[K, rows], and the rows' own losses (those of w, or their mean over k), [rows]."""


def differences(
    form: Form, sigma: float, directions: Directions, forward: Forward, loss: RowLosses, at: Array, x: Array, y: Array
) -> Derivatives:
    """Return those of a batch. at: w, flat. x, y: the batch, as `Forward.outputs` and `RowLosses` take them."""
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
    """Return the same of several silos' batches, all in directions that are made once: bit for bit as one by one.

    batches: of which each has so many rows that the forward pass runs as many directions at once.
    """

    def losses(distance: float) -> list[NDArray[np.float64]]:
        return _losses(directions, distance, forward, loss, at, batches)

    with np.errstate(invalid="ignore", over="ignore"):  # the caller looks for losses that are not finite
        ahead = losses(sigma)
        if form == "mean":
            middles = [each.mean(axis=0) for each in ahead]
            return [((each - middle) / sigma, middle) for each, middle in zip(ahead, middles, strict=True)]
        if form == "central":
            pairs = zip(ahead, losses(-sigma), strict=True)
            return [((one - two) / (2 * sigma), (one.mean(axis=0) + two.mean(axis=0)) / 2) for one, two in pairs]
        here = [loss(forward.outputs(at[None], x), y)[0] for x, y in batches]
        return [((each - own) / sigma, own) for each, own in zip(ahead, here, strict=True)]


def gradient(
    form: Form, derivatives: NDArray[np.float64], directions: Directions, combine: Combine = Directions.combine
) -> NDArray[np.float64]:
    """Return the estimate of the gradient from x_1 .. x_K, float64[n]. combine: adds directions up."""
    return combine(directions, derivatives / (len(derivatives) - (form == "mean")))


def check_sigma(sigma: float, at: Array) -> None:
    """Raise `moretta.errors.ParameterError` where sigma vanishes in the parameters' rounding; says which sigma works.

    It works where, of 100 parameters, 99 move by sigma to a quarter's precision.
    """
    if _moves(sigma, at):
        return
    tries = 10.0 ** np.arange(-38, 39)
    works = next((tried for tried in tries[tries > sigma] if _moves(tried, at)), None)
    if works is None:
        raise ParameterError(
            f"sigma = {sigma:g} cannot move {at.dtype} parameters of which {np.count_nonzero(~np.isfinite(at))} are "
            "NaN or infinite; give a sigma from 1e-5 to 1e-2, or go back to finite parameters"
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


def _losses(
    directions: Directions,
    distance: float,
    forward: Forward,
    loss: RowLosses,
    at: Array,
    batches: Sequence[tuple[Array, Array]],
) -> list[NDArray[np.float64]]:
    """Return the losses of each batch's rows, [K, rows], at all perturbed parameters."""
    found: list[list[NDArray[np.float64]]] = [[] for _ in batches]
    rows = len(batches[0][0])
    if isinstance(forward, Perturbs):
        perturbed = forward.perturbed(directions, at, distance, rows)
    else:
        perturbed = directions.perturbed(at, distance, forward.at_once(rows))
    for vectors in perturbed:
        for parts, (x, y) in zip(found, batches, strict=True):
            parts.append(loss(forward.outputs(vectors, x), y))
    return [np.concatenate(parts) for parts in found]
