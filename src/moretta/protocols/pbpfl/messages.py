"""PBPFL's messages (figure: `moretta.protocols.pbpfl`); the last answer in a round is an upload of the secure sum."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np

from moretta.contract.messages import Array, Indices, Message, Tensors, Vector, message
from moretta.errors import PeerError

LARGEST = 1e30  # of predictions and their answers; its square still fits float64
RATIO_WORDS, TOTAL_WORDS, REST_WORDS = 11, 20, 10  # of 64 bits each; see `moretta.protocols.pbpfl.ratios`


def _bounded(value: Array) -> None:
    if value.dtype.kind != "f" or float(np.abs(value).max(initial=0)) > LARGEST:
        raise PeerError(f"expected floats up to {LARGEST:.0e}; did the sender diverge?")


Bounded = Annotated[Array, _bounded]


@message("pbpfl/train-on")
class TrainOn(Message):
    """The noisy model, the public half of its key, and the encoding of the answer.

    Attributes:
        parameters: W^ = R o W, with r_i added to all entries of the head's row i.
        parts: int64[outputs], the part I_s of each output, 0 to m - 1 without a gap.
        direction: float64[outputs], r_a.
        encoding: Fraction bits by the names of the uploads; empty under cross-entropy, where `Softmax` has them.
    """

    BESIDE_FROZEN: ClassVar[bool] = True

    parameters: Tensors
    parts: Indices
    direction: Vector
    encoding: Mapping[str, int]

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` if parts and direction differ in length, or parts have a gap."""
        if not self.direction.size or self.parts.shape != self.direction.shape:
            raise PeerError("pbpfl/train-on: expected a part and a direction of each output")
        numbers = np.unique(self.parts)  # sorted; no allocation follows the peer's numbers
        if numbers[0] != 0 or numbers[-1] != numbers.size - 1:
            raise PeerError("pbpfl/train-on: expected parts that number the outputs 0 to m - 1 without a gap")


@message("pbpfl/predictions")
class Predictions(Message):
    """A silo's outputs, from which the server forms the true softmax.

    Differs from the paper, which sends exp(y^_i - y^_j) for all pairs. That overflows float32 once 2 |alpha r| plus the
    gap of two outputs exceeds 88; z and alpha are the same in the log domain.

    Attributes:
        z: y^ - max y^ by row, floats [B, outputs], at most 1e30 in size.
        alpha: Floats [B], at most 1e30 in size.

    Source:
        `practical.md`, Eq. 21.
    """

    z: Bounded
    alpha: Bounded

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` if z and alpha have different rows, or an entry of z is above 0."""
        if self.z.ndim != 2 or self.alpha.shape != self.z.shape[:1] or self.z.size == 0:
            raise PeerError("pbpfl/predictions: expected one alpha for each row of outputs")
        if self.z.max() > 0:
            raise PeerError("pbpfl/predictions: expected outputs less their row's largest")


@message("pbpfl/softmax")
class Softmax(Message):
    """The server's answer to `Predictions`, and the encoding of the gradients.

    Attributes:
        y: [B, outputs], p o exp(-delta) in the paper's form, else p itself.
        k: [B, m], (1 - exp(delta)) / xi in the paper's form (printed as its reciprocal before Eq. 24), else [B, 0].
        encoding: Fraction bits by the names of the uploads.

    Source:
        `practical.md`, Eq. 24.
    """

    OWN: ClassVar[frozenset[str]] = frozenset({"y", "k"})

    y: Bounded
    k: Bounded
    encoding: Mapping[str, int]

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` if y and k have different rows."""
        if self.y.ndim != 2 or self.k.ndim != 2 or len(self.y) != len(self.k) or not self.y.size:
            raise PeerError("pbpfl/softmax: expected y and k of the same rows")


@message("pbpfl/ratios")
class Ratios(Message):
    """A silo's blinded ratios (`moretta.protocols.pbpfl.ratios`).

    Attributes:
        words: mu_ij, uint64[B, outputs, outputs - 1, 11], whole numbers lowest word first.
        alpha: [B].

    Source:
        `practical.md`, step 1 before Eq. 23.
    """

    words: Array
    alpha: Bounded

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` for other shapes."""
        _check_words(self.TAG, self.words, 4, RATIO_WORDS)
        if self.words.shape[1] != self.words.shape[2] + 1 or self.alpha.shape != self.words.shape[:1]:
            raise PeerError("pbpfl/ratios: expected for each row of alpha a ratio of each output to each other")


@message("pbpfl/blinded-softmax")
class BlindedSoftmax(Message):
    """The server's answer to `Ratios`, and the encoding of the gradients.

    Attributes:
        totals, rests: Y_i and R_i, uint64[B, outputs, 20] and [B, outputs, 10], lowest word first.
        k, encoding: As in `Softmax`.

    Source:
        `practical.md`, Eq. 23.
    """

    OWN: ClassVar[frozenset[str]] = frozenset({"totals", "rests", "k"})

    totals: Array
    rests: Array
    k: Bounded
    encoding: Mapping[str, int]

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` if totals, rests and k have different rows or outputs."""
        _check_words(self.TAG, self.totals, 3, TOTAL_WORDS)
        _check_words(self.TAG, self.rests, 3, REST_WORDS)
        if self.totals.shape[:2] != self.rests.shape[:2] or self.k.ndim != 2 or len(self.k) != len(self.totals):
            raise PeerError("pbpfl/blinded-softmax: expected totals, rests and k of the same rows")


MESSAGES = (TrainOn, Predictions, Softmax, Ratios, BlindedSoftmax)


def _check_words(tag: str, words: Array, axes: int, count: int) -> None:
    if words.dtype != np.uint64 or words.ndim != axes or words.shape[-1] != count or not words.size:
        raise PeerError(f"{tag}: expected whole numbers of {count} words of 64 bits, by row and output")
