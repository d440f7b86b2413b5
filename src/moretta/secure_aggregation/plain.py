"""The scheme ``none``: the same sum in the clear. The server sees every silo's tensors and weight.

mean = sum_k (N_k / N) x_k in float64, over silos in the order of their names. For one silo that is x itself, bit for
bit, so that FedSGD of one silo is plain SGD.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import DIGEST_BYTES, Array, Digest, Message, Stamp, Tensors, message, within
from moretta.contract.roles import Aborted, Exchange
from moretta.errors import MisuseError, PeerError, RangeError
from moretta.secure_aggregation import sums
from moretta.secure_aggregation.removable_noise import Levels, Noise
from moretta.secure_aggregation.sums import Asks, Query, Relayed, Shapes, Sum, Wanted


@message("secure-aggregation/plain")
class PlainUpload(Message):
    """x_k by tensor, in a dtype of real numbers, N_k, and the digest of the query."""

    tensors: Tensors
    weight: Annotated[int, within(1)]
    asked: Digest

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless all tensors are real numbers."""
        if not all(array.dtype.kind in "fiu" for array in self.tensors.values()):
            raise PeerError(f"{self.TAG}: expected real numbers")

    @classmethod
    def unasked(cls, stamp: Stamp, tensors: Tensors, weight: int = 1) -> Self:
        """Return an upload that answers no message of ours, such as a model or a result in another framework."""
        return cls(stamp=stamp, tensors=tensors, weight=weight, asked=bytes(DIGEST_BYTES))


MESSAGES = (PlainUpload,)
IN_THE_CLEAR = 'scheme = "none" sums in the clear, so nothing can be blinded or relayed unread; use another scheme'


class PlainContributor:
    """A silo's half: uploads its input. run: the id of the run; empty for any."""

    def __init__(self, run: str = "") -> None:
        self._run = run

    @property
    def members(self) -> Sequence[str]:
        """Empty: the scheme has no key agreement."""
        return ()

    def levels(self, noise: Noise) -> Levels:
        """Return the components of the silo's noise: all of it, as its upload is in the clear."""
        return noise.levels(1, 0)

    def answer(self, message: Message) -> Message | None:
        """Return None: the scheme has no messages of its own."""
        return None

    def check(self, stamp: Stamp, asked: Query, *, answers: bool = False) -> None:
        """Raise `moretta.errors.PeerError` for another run. The server sees every upload, so no sum reveals more."""
        stamp.check_run(self._run)

    def upload(
        self,
        stamp: Stamp,
        tensors: Tensors,
        weight: int,
        encoding: Mapping[str, int],
        blind: bytes | None = None,
        *,
        asked: Query,
        least: float | None = None,
    ) -> Message:
        """Return the upload in the clear. Raises as `moretta.secure_aggregation.keyed_sums.KeyedContributor`."""
        self.check(stamp, asked)
        sums.check_weight(weight)
        if blind is not None:
            raise MisuseError(IN_THE_CLEAR)
        clear: dict[str, Array] = {name: sums.as_real(name, values) for name, values in tensors.items()}
        try:
            return PlainUpload(stamp=stamp, tensors=clear, weight=weight, asked=asked.digest)
        except PeerError as error:  # a message checks that its numbers are finite, and once is enough
            raise RangeError(f"{error}; nothing was sent") from None

    def read(
        self,
        stamp: Stamp,
        relayed: Relayed,
        encoding: Mapping[str, int],
        blind: bytes | None = None,
        *,
        asked: Query,
    ) -> Sum:
        """Raise `moretta.errors.MisuseError`: these sums are in the clear for the role that adds them up."""
        raise MisuseError(IN_THE_CLEAR)


class PlainAggregator:
    """The server's half: a weighted mean."""

    scheme: ClassVar[str] = "none"

    def __init__(self, min_survivors: int = 1) -> None:
        self.cohort: Sequence[str] = ()
        self._least = min_survivors

    @property
    def parties(self) -> int:
        """The number of silos."""
        return len(self.cohort)

    def setup(self, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
        """Record the cohort; no message is sent."""
        sums.check_cohort(cohort)
        yield from ()
        self.cohort = tuple(cohort)
        return None

    def want(self, shapes: Shapes, limits: Mapping[str, float], most_weight: int, *, blinded: bool = False) -> Wanted:
        """Return the plan; floats need no encoding."""
        if blinded:
            raise MisuseError(IN_THE_CLEAR)
        sums.check_limits(shapes, limits, most_weight)
        return Wanted(dict(shapes), {}, most_weight)

    def sum(
        self, ask: Asks, request: Wanted, expected: bytes | None = None, *, whole: bool = False
    ) -> Exchange[Sum | Aborted]:
        """Ask for uploads and average those that arrive."""

        def check(silo: str, upload: PlainUpload) -> None:
            sums.check_tensors(request.shapes, upload.tensors)
            if upload.weight > request.most_weight:
                raise PeerError(f"expected a weight of at most {request.most_weight}, got {upload.weight}")

        gathered = yield from sums.gather(self.cohort, ask, PlainUpload, check, request, expected)
        if isinstance(gathered, Aborted):
            return gathered
        replies, _ = gathered
        if len(replies.answers) < self._least or (whole and replies.missing):
            return Aborted(replies.missing)
        # Float sums must not depend on the order of arrival.
        ordered: list[PlainUpload] = [replies.answers[silo] for silo in sorted(replies.answers)]
        weight = sum(upload.weight for upload in ordered)
        shares = [upload.weight / weight for upload in ordered]
        means = {name: _mean([upload.tensors[name] for upload in ordered], shares) for name in request.shapes}
        return Sum(means, weight, dict.fromkeys(request.shapes, 0.0), tuple(sorted(replies.answers)))

    def relay(self, ask: Asks, request: Wanted, expected: bytes | None = None) -> Exchange[Relayed | Aborted]:
        """Raise `moretta.errors.MisuseError`: these sums are in the clear for the role that adds them up."""
        raise MisuseError(IN_THE_CLEAR)


def _mean(values: Sequence[Array], shares: Sequence[float]) -> NDArray[np.float64]:
    total, product = np.empty(values[0].shape), np.empty(values[0].shape)
    np.multiply(values[0], shares[0], dtype=np.float64, out=total)
    for array, share in zip(values[1:], shares[1:], strict=True):
        total += np.multiply(array, share, dtype=np.float64, out=product)
    return total
