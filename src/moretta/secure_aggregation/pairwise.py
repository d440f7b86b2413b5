"""Pairwise masks: `moretta.secure_aggregation` has the equation and what it hides.

One mask for each uploaded tensor and each pair i < j (by name) of the cohort:

    mask(i, j) = AES-128-CTR(HKDF(seed(i, j), "mask", run, round, attempt, cohort digest, tensor, i, j))

Differs from the paper: no self-mask yet, and no shares of keys; they serve the sum of those who are left when a silo
drops out. Until that lands, `moretta.secure_aggregation.sums.gather` aborts and the engine begins again without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from moretta.errors import MisuseError, ParameterError, PeerError
from moretta.keystream import Keystream, SecretRoot, derive
from moretta.protocol import Aborted, Array, Ask, Exchange, Message, Missing, Reason, Stamp, Tensors, message
from moretta.secure_aggregation.agreement import (
    AdvertiseKey,
    Agreement,
    KeyAdvert,
    KeysAccepted,
    Offer,
    PeerKeys,
    sharing_a_key,
)
from moretta.secure_aggregation.ring import Ring, Words
from moretta.secure_aggregation.sums import (
    Shapes,
    Sum,
    Wanted,
    as_real,
    check_cohort,
    check_limits,
    check_tensors,
    check_weight,
    gather,
)

MOST_WEIGHT = "most weight"
"""The entry of an encoding that announces the upper bound W of the total weight; no tensor may have this name.

Each silo needs W to refuse what could wrap: it knows neither the others' weights nor the server's limits.
"""


@message("secure-aggregation/masked")
class MaskedUpload(Message):
    """y_k by tensor and the masked weight, uint32 or uint64: uniform in the ring to who lacks one seed."""

    tensors: Tensors
    weight: Array

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless all are elements of one ring, and the weight is one number."""
        dtypes = {array.dtype.name for array in (self.weight, *self.tensors.values())}
        if len(dtypes) != 1 or not dtypes <= {"uint32", "uint64"} or self.weight.shape != ():
            raise PeerError(f"{self.TAG}: expected elements of one ring and one weight, got {sorted(dtypes)}")


MESSAGES = (MaskedUpload,)


def add_masks(words: Words, agreement: Agreement, stamp: Stamp, use: str, tensor: str) -> Words:
    """Add the mask with each peer whose name sorts after one's own, subtract the others; in place.

    words: uint32 or uint64 of any shape. use: "mask" for a tensor. Returns `words`.
    """
    bits = words.dtype.itemsize * 8
    label = (use, stamp.run, stamp.round, stamp.attempt, agreement.cohort, tensor)
    for peer, seed in agreement.seeds.items():
        lower, higher = sorted((agreement.me, peer))
        mask = Keystream(derive(seed, *label, lower, higher)).integers(words.size, bits).reshape(words.shape)
        combine = np.add if agreement.me == lower else np.subtract
        combine(words, mask, out=words)
    return words


class Labels:
    """The mask labels that were used since a set-up; each is good for one upload.

    Stamps only go forward, so those of the latest are enough to know.
    """

    def __init__(self, setup: Stamp) -> None:
        self._stamp, self._used = setup, set[str]()

    def use(self, stamp: Stamp, tensors: Iterable[str]) -> None:
        """Mark labels as used. Raises `moretta.errors.MisuseError`, and marks nothing, if one is not fresh.

        Two uploads under one mask differ by the bare data.
        """
        if stamp.run != self._stamp.run or stamp < self._stamp:
            raise MisuseError(f"expected an upload of this run, not before {self._stamp}; got {stamp}")
        used, names = (self._used if stamp == self._stamp else set()), set(tensors)
        if again := sorted(used & names):
            raise MisuseError(f"{stamp}: {again!r:.200} was uploaded before; a second upload would reveal the first")
        self._stamp, self._used = stamp, used | names


class PairwiseContributor:
    """A silo's half. insecure, session: see `moretta.secure_aggregation.contributor`."""

    def __init__(self, name: str, ring: Ring, insecure: SecretRoot | None, session: int) -> None:
        self._name, self._ring, self._insecure, self._session = name, ring, insecure, session
        self._offer: Offer | None = None
        self._agreed: tuple[Agreement, Labels] | None = None

    def answer(self, message: Message) -> Message | None:
        """Answer the messages of the key agreement. A new set-up forgets the last one's seeds."""
        match message:
            case AdvertiseKey():
                self._agreed = None
                self._offer = Offer(message.stamp, self._name, self._insecure, self._session)
                return KeyAdvert(stamp=message.stamp, public_key=self._offer.public_key)
            case PeerKeys():
                if self._offer is None:
                    raise MisuseError("peers' keys came before the own key was asked for")
                self._agreed = self._offer.agree(message), Labels(message.stamp)
                self._offer = None  # a key pair agrees once
                return KeysAccepted(stamp=message.stamp)
        return None

    def upload(self, stamp: Stamp, tensors: Tensors, weight: int, encoding: Mapping[str, int]) -> Message:
        """Return the masked upload. Raises as `moretta.secure_aggregation.Contributor`.

        Also raises `moretta.errors.MisuseError` for a second upload under the same stamp and name, and
        `moretta.errors.PeerError` for an encoding of other tensors.
        """
        if self._agreed is None:
            raise MisuseError("an upload was asked for without a set-up; expected keys to be agreed on")
        agreement, labels = self._agreed
        words = self._encode(tensors, weight, encoding, agreement.parties)
        labels.use(stamp, words)
        for name, entries in words.items():
            add_masks(entries, agreement, stamp, "mask", name)
        # The weight's mask is named for the first tensor, so it is fresh whenever the tensors' are.
        total = add_masks(np.array(weight, dtype=self._ring.dtype), agreement, stamp, "mask of weight", min(words))
        return MaskedUpload(stamp=stamp, tensors=words, weight=total)

    def _encode(self, tensors: Tensors, weight: int, encoding: Mapping[str, int], parties: int) -> dict[str, Words]:
        check_weight(weight)
        most_weight = encoding.get(MOST_WEIGHT, 0)
        if not tensors or set(encoding) != {*tensors, MOST_WEIGHT} or not 0 < most_weight <= self._ring.most_weight:
            raise PeerError(f"expected an encoding of the tensors {sorted(tensors)!r:.200} and of a total weight")
        if weight > most_weight:
            raise ParameterError(f"expected a weight of at most {most_weight}, that of all silos; got {weight}")
        return {
            name: self._ring.encode(name, as_real(name, values), weight, encoding[name], most_weight, parties)
            for name, values in tensors.items()
        }

    def __repr__(self) -> str:
        return f"PairwiseContributor({self._name!r}, {self._ring}, <redacted>)"


class PairwiseAggregator:
    """The server's half: relays public keys, adds uploads."""

    scheme: ClassVar[str] = "pairwise"

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.cohort: Sequence[str] = ()

    def setup(self, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
        """Relay public keys among the cohort. Raises `moretta.errors.ParameterError` for fewer than 2 silos."""
        check_cohort(cohort)
        if len(cohort) < 2:
            raise ParameterError('one silo needs scheme = "none": its sum would be its own data')
        self.cohort = ()
        adverts = yield Ask.all(cohort, AdvertiseKey(stamp=now), KeyAdvert)
        keys = {name: advert.public_key for name, advert in adverts.answers.items()}
        twins = dict.fromkeys(sharing_a_key(keys), Missing(Reason.MALFORMED, "expected a key of its own"))
        if missing := {**adverts.missing, **twins}:
            return Aborted(missing)
        accepted = yield Ask.all(cohort, PeerKeys(stamp=now, keys=keys), KeysAccepted)
        if accepted.missing:
            return Aborted(accepted.missing)
        self.cohort = tuple(cohort)
        return None

    def want(self, shapes: Shapes, limits: Mapping[str, float], most_weight: int) -> Wanted:
        """Choose the fraction bits of each tensor from its limit (`moretta.secure_aggregation.ring`)."""
        check_limits(shapes, limits, most_weight)
        if MOST_WEIGHT in shapes:
            raise MisuseError(f"`{MOST_WEIGHT}` is reserved; expected another name of a tensor")
        parties = len(self.cohort)
        bits = {name: self._ring.fraction_bits(name, limits[name], most_weight, parties) for name in shapes}
        return Wanted(dict(shapes), bits | {MOST_WEIGHT: most_weight}, most_weight)

    def sum(self, ask: Message | Mapping[str, Message], wanted: Wanted) -> Exchange[Sum | Aborted]:
        """Ask for uploads and add them in the ring, where the masks cancel.

        Raises `moretta.errors.PeerError` where the sum of weights is impossible; masks hide whose fault it is.
        """

        def check(upload: MaskedUpload) -> None:
            check_tensors(wanted.shapes, upload.tensors)
            if upload.weight.dtype != self._ring.dtype:
                raise PeerError(f"expected elements of Z_2^{self._ring.bits}, got {upload.weight.dtype}")

        uploads = yield from gather(self.cohort, ask, MaskedUpload, check, wanted)
        if isinstance(uploads, Aborted):
            return uploads
        weight = int(_total([upload.weight for upload in uploads.values()]))
        if not len(uploads) <= weight <= wanted.most_weight:
            raise PeerError(
                f"expected weights that sum to {len(uploads)} to {wanted.most_weight}, got {weight}; "
                "some silo did not follow the protocol"
            )
        means, steps = dict[str, NDArray[np.float64]](), dict[str, float]()
        for name in wanted.shapes:
            bits = wanted.fraction_bits[name]
            mean = self._ring.decode(_total([upload.tensors[name] for upload in uploads.values()]), bits)
            means[name] = np.divide(mean, weight, out=mean)
            steps[name] = len(uploads) * 2.0 ** -(bits + 1) / weight
        return Sum(means, weight, steps)


def _total(words: Sequence[Words]) -> Words:
    """Return the sum modulo 2^b: the same for any order. What was received is never written to."""
    total = words[0].copy()
    for others in words[1:]:
        np.add(total, others, out=total)
    return total
