"""Scores of models on rows that silos hold back: one secure sum at the end of a run.

    server                                     silo k
      Score(the released model, or none)  -->
                                          <--  upload of its rows, and the sums over them of loss and of hits or error

The released model is scored, or where none is released each silo's own (`local`, `cgd`).

Who learns what: the server learns how many rows the silos hold back together, and loss, accuracy and mean squared error
over all of them. It learns nothing of one silo, and the silos learn nothing. With the scheme ``none`` the server sees
each silo's. Where sums are blind (`cgd`) the server relays this one too, and the participants alone read it
(`moretta.protocols.cgd.messages.Scored`); of two, each then knows the other's. A run that is killed after its sum and
resumed among other silos sums again, and the difference gives the scores of those who are in only one of the two sums.
An honest server asks only after the last round, and a silo refuses before, but it is the server that says which round
it is. With dp-noise nothing is asked, as a score would be a release without noise.

**Masks.** A mask is labelled with stamp, cohort, and names, shapes and encoding of all that is uploaded
(`moretta.secure_aggregation.masks.label_of`). Uploads here have names of their own, ``score/...``, so no other upload
under the stamp has their masks, neither the set-up's statistics nor anything that a protocol's `finish` may sum. A
contributor refuses a second upload of a name under one stamp (`moretta.secure_aggregation.masks.Labels`), and a
repeated attempt has another stamp and new keys.

**Numbers.** Sums have any scale, and the server knows no bound of them or of the rows. So they travel in limbs, like
those of `moretta.secure_aggregation.statistics`, each silo with weight 1: exact over silos.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array, Message, Stamp, Tensors, message
from moretta.contract.roles import Aborted, Exchange
from moretta.errors import ParameterError, PeerError
from moretta.protocols.common.row_losses import RowLosses
from moretta.secure_aggregation.asked import Asked, asked
from moretta.secure_aggregation.statistics import GRID_BITS, HALF, LARGEST, LIMBS, from_limbs, to_limbs
from moretta.secure_aggregation.sums import Aggregator, Contributor, Sum, Wanted

ROWS = "rows"


@message("scoring/score")
class Score(Message):
    """Upload what these parameters score on the rows you hold back; without parameters, your own model."""

    parameters: Tensors
    encoding: Mapping[str, int]


MESSAGES = (Score,)


def figures_of(loss: str, task: str | None) -> tuple[str, ...]:
    """Return the figures of a score beside its number of rows, each a mean over rows."""
    return ("loss", *(["mse"] if loss == "mse" else []), *(["accuracy"] if task == "classification" else []))


@dataclass(frozen=True)
class HeldOut:
    """The rows that a silo holds back, and the scores that it uploads of them.

    x: the inputs, [rows, ...]; y: the targets as the loss wants them (`moretta.protocols.common.targets.encode`).
    loss: its name; it is plain, without label smoothing and class weights. figures: as `figures_of` has them.
    after: the run's last round.
    """

    x: NDArray[np.generic]
    y: Array
    loss: str
    figures: Sequence[str]
    after: int

    def upload(
        self,
        ask: Score,
        contributor: Contributor,
        outputs: Array,
        agreed: Sequence[bytes] = (),
        blind: bytes | None = None,
    ) -> Message:
        """Return the upload that answers. outputs: of the model on x, [rows, outputs]. blind: as the contributor's.

        agreed: digests of what the set-up agreed on.
        Raises `moretta.errors.PeerError` where the run has not ended, and `moretta.errors.ParameterError` for scores
        that cannot be summed: those of a model that has diverged.
        """
        if ask.stamp.round <= self.after:
            raise PeerError(f"expected to be asked for a score after round {self.after}, the last; got {ask.stamp}")
        with np.errstate(all="ignore"):  # overflows are looked for below
            sums = {name: math.fsum(self._by_row(name, outputs)) for name in self.figures}
        for name, total in sums.items():
            if not abs(total) < LARGEST:
                raise ParameterError(f"the {name} on the rows held back is not finite or too large; nothing was sent")
        tensors = {_tensor(name): to_limbs([value])[:, 0] for name, value in {ROWS: float(len(self.x)), **sums}.items()}
        return contributor.upload(ask.stamp, tensors, 1, ask.encoding, blind, asked=asked_of(ask, agreed))

    def _by_row(self, figure: str, outputs: Array) -> NDArray[np.float64]:
        """Return a figure of each row, float64[rows]."""
        if figure == "loss":
            return np.asarray(RowLosses(self.loss)(outputs[None], self.y)[0])
        if figure == "mse":  # that of `torch.nn.MSELoss`
            return np.asarray(np.square(outputs.astype(np.float64) - self.y).mean(axis=1))
        return np.asarray(_classes(outputs) == _classes(self.y), dtype=np.float64)


def _classes(values: Array) -> Array:
    """Return each row's class, of outputs or of targets: whole numbers, one column for class 1, or one a class."""
    if values.ndim == 1:
        return values
    return values[:, 0] > 0.5 if values.shape[1] == 1 else values.argmax(axis=1)


def asked_of(ask: Score, agreed: Sequence[bytes]) -> Asked:
    """Return what a score answers. agreed: digests of what the set-up agreed on."""
    return asked(ask, *agreed, once="score", whole=True)


def ask_for(aggregator: Aggregator, now: Stamp, parameters: Tensors, figures: Sequence[str]) -> tuple[Score, Wanted]:
    """Return the ask of all silos, and the description of the sum of their uploads."""
    shapes = {_tensor(name): (LIMBS,) for name in (ROWS, *figures)}
    wanted = aggregator.want(shapes, dict.fromkeys(shapes, float(HALF)), len(aggregator.cohort))
    return Score(stamp=now, parameters=parameters, encoding=wanted.fraction_bits), wanted


def score(
    aggregator: Aggregator, now: Stamp, parameters: Tensors, figures: Sequence[str], agreed: Sequence[bytes]
) -> Exchange[Mapping[str, float] | Aborted]:
    """Return the score of a model, or of each silo's own, on the rows held back: rows, and the figures' means.

    agreed: digests of what the set-up agreed on.
    """
    ask, wanted = ask_for(aggregator, now, parameters, figures)
    total = yield from aggregator.sum(ask, wanted, asked_of(ask, agreed).digest)
    return total if isinstance(total, Aborted) else read(total, figures)


def read(total: Sum, figures: Sequence[str]) -> dict[str, float]:
    """Return the number of rows, and the means over them. Raises `moretta.errors.PeerError` for an impossible sum."""
    shapes = {name: mean.shape for name, mean in total.means.items()}
    if shapes != {_tensor(name): (LIMBS,) for name in (ROWS, *figures)}:
        raise PeerError(f"expected a sum of rows, {', '.join(figures)}, got one of {sorted(shapes)!r:.100}")
    # The mean of whole numbers below 2^31, times their count, is off by far less than 1/2.
    limbs = np.stack([np.rint(total.means[_tensor(name)] * total.weight) for name in (ROWS, *figures)], axis=1)
    counted, *sums = from_limbs(limbs)
    rows, odd = divmod(counted, 1 << GRID_BITS)
    if rows < len(total.silos) or odd:
        raise PeerError(f"expected at least one row a silo to be held back, got {rows} in all")
    return {ROWS: rows, **{name: value / counted for name, value in zip(figures, sums, strict=True)}}


def _tensor(name: str) -> str:
    """Return the name that a figure is uploaded under, which no other upload has: see "Masks" above."""
    return f"score/{name}"
