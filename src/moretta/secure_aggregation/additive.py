"""Additive shares: each silo splits its part of a sum among all silos, and only sums of shares are put together.

**Theory** (CGD's paper, appendix A, over Z_2^b; b = 32 there). Silo i's weight N_i and tensors 2^f N_i x_i form one
vector v_i of d ring elements (`moretta.secure_aggregation.encoding`). It is split into n shares::

    E_i^1 + E_i^2 + ... + E_i^n = v_i   mod 2^b

For each other silo j, E_i^j is uniform, expanded from a fresh key of the operating system; E_i^i is the remainder. Any
n - 1 of them are uniform and say nothing of v_i. Silo j adds the shares it holds to E^j = sum_i E_i^j, and

    E^1 + E^2 + ... + E^n = v_1 + v_2 + ... + v_n   mod 2^b

exactly, in any order: the same ring elements as by `moretta.secure_aggregation.pairwise`.

    server                              silo i
      a protocol's own ask      -->       computes x_i, N_i; splits v_i
                                <--     SealedShares(E_i^j, sealed for j)
      AddShares(E_j^i of all j) -->       opens and adds them
                                <--     AddedShares(E^i)                     sum -> means, N

Set-up is that of `moretta.secure_aggregation.agreement`, with the complete graph. A share is sealed under a key that
only its maker and holder can derive, for this sum alone, and is bound to the tensors' shapes.

**Threat model.** That of `moretta.secure_aggregation`: server and up to n - 2 silos together learn the sum over the
others and nothing else of them. The server relays sealed shares and sees E^i; a silo sees one uniform share of each
other silo. With a roster keys are signed. The only set of survivors is the complete cohort. A silo adds shares once for
each upload, and only if it has one from every silo that it agreed on keys with.

**Dropouts.** All silos must stay. One that is missing in either step aborts the sum and is named. Those present begin
again with a fresh set-up; if sums of shares may have been sent, as the next take, with other rows. A silo whose E^i
arrives only after that completes the first take's sum, and reveals nothing of the next.

The holder of a share that does not open reports it. Nobody can tell whether its maker, the holder or the server is at
fault. So of each such pair one silo is left out: the one in most pairs, or the maker where they are even. That costs a
round. A silo that accuses one honest silo alone may so cost it its place.

**Cost.** A silo sends n times its vector (n - 1 shares up, a sum) and receives n - 1 times. So the server moves about
2 n^2 vectors in a round, where pairwise masks cost n.

Differs from the paper: shares go by way of the server, sealed, as silos have no channels to each other; and uniform
means pseudorandom, by AES-128 in counter mode.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from moretta.contract.messages import Array, Message, Stamp, Tensors, message
from moretta.contract.roles import Aborted, Ask, Exchange
from moretta.errors import MisuseError, ParameterError, PeerError
from moretta.secure_aggregation.agreement import AdvertiseKey, SetUp, agree_on_keys
from moretta.secure_aggregation.cohort import Cohort, Credentials, Rules, complete
from moretta.secure_aggregation.encoding import Range, Ring, Words, add_up, decode, encode, plan, shapes_of, unpacked
from moretta.secure_aggregation.keystream import Keystream, SecretRoot, derive
from moretta.secure_aggregation.masks import Label, add_masks, blind_key, label_of, read
from moretta.secure_aggregation.one_sum import HelpedSums
from moretta.secure_aggregation.sums import (
    Query,
    Relayed,
    Shapes,
    Sum,
    Wanted,
    again,
    check_digest,
    gather,
    stamp_of,
    to_leave_out,
)

TAG_BYTES = 16  # of a seal
NONCE = bytes(12)  # of a key that seals one share and nothing else
MOST_BYTES = 2**31 - 1  # that the cipher's library seals at once


@message("secure-aggregation/sealed-shares")
class SealedShares(Message):
    """A silo's shares of its part, by holder: E_i^j as little-endian bytes, sealed, uint8[d b/8 + 16].

    weight: N_i if weights are public, else 0. asked: the digest of what this answers.
    """

    shares: Tensors
    weight: int
    asked: bytes

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless shares, digest and weight can be valid."""
        _check_sealed(self.shares)
        check_digest(self.TAG, self.asked)
        if self.weight < 0:
            raise PeerError(f"{self.TAG}: expected a weight, or 0 where it is hidden, got {self.weight}")


@message("secure-aggregation/add-shares")
class AddShares(Message):
    """Add these shares to your own of the same upload. shares: as in `SealedShares`, but by maker."""

    shares: Tensors

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless shares can be valid."""
        _check_sealed(self.shares)


@message("secure-aggregation/added-shares")
class AddedShares(Message):
    """E^i, uint32[d] or uint64[d]: the weight, if it is hidden, and the tensors in the order of their names.

    unopened: the makers of shares that could not be opened, sorted; words is then empty.
    """

    words: Array
    unopened: tuple[str, ...]

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless there is either a vector of ring elements or names, each once."""
        if self.words.dtype.name not in ("uint32", "uint64") or self.words.ndim != 1:
            raise PeerError(f"{self.TAG}: expected a vector of ring elements")
        if list(self.unopened) != sorted(set(self.unopened)):
            raise PeerError(f"{self.TAG}: expected silos in the order of their names, each once")
        if self.unopened and self.words.size:
            raise PeerError(f"{self.TAG}: expected either a sum or the silos whose shares are not in it, got both")


MESSAGES = (SealedShares, AddShares, AddedShares)


def _check_sealed(shares: Tensors) -> None:
    sizes = {share.size for share in shares.values() if share.dtype == np.uint8 and share.ndim == 1}
    if not all(share.dtype == np.uint8 and share.ndim == 1 for share in shares.values()) or len(sizes) != 1:
        raise PeerError("expected sealed shares, bytes of one length for every silo")
    if min(sizes) < TAG_BYTES:
        raise PeerError(f"expected sealed shares of at least {TAG_BYTES} bytes, got {min(sizes)}")


def _seal(seed: bytes, label: Label, maker: str, holder: str) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(derive(seed, "additive share", *label, maker, holder))


def _check_size(size: int) -> None:
    if size > MOST_BYTES - TAG_BYTES:
        raise ParameterError(
            f"expected shares of at most {MOST_BYTES - TAG_BYTES} bytes, got a model that takes {size}; "
            'use scheme = "pairwise"'
        )


@dataclass(frozen=True, repr=False)
class _Kept:
    """What a silo keeps of its upload until shares are added. share: secret; E_i^i, and later the sum of shares."""

    stamp: Stamp
    label: Label
    share: Words
    asked: Query


class AdditiveContributor:
    """A silo's half. From `credentials` on see `moretta.secure_aggregation.schemes.contributor`."""

    def __init__(
        self,
        name: str,
        ring: Ring,
        rules: Rules,
        credentials: Credentials | None,
        insecure: SecretRoot | None,
        session: int,
        helped: HelpedSums,
        run: str,
    ) -> None:
        self._name, self._ring, self._rules = name, ring, complete(rules)
        self._insecure, self._session, self._helped, self._all = insecure, session, helped, rules
        self._keys = SetUp(name, self._rules, credentials, insecure, session, run)
        self._range = Range(rules.limit, one_weight=rules.participation is not None)
        self._kept: _Kept | None = None
        self._added: tuple[AddShares, AddedShares] | None = None  # what was asked last, and what was answered

    @property
    def members(self) -> Sequence[str]:
        """Who agreed on keys in the last set-up."""
        return self._keys.members

    def answer(self, message: Message) -> Message | None:
        """Answer the messages of set-up, and add shares. A new set-up forgets the last one's seeds and shares."""
        match message:
            case AddShares():
                return self._add(message)
            case AdvertiseKey():
                self._kept = self._added = None
        return self._keys.answer(message)

    def check(self, stamp: Stamp, asked: Query, *, answers: bool = False) -> None:
        """Raise `moretta.errors.SumSpent` or `moretta.errors.PeerError` where an upload would be refused."""
        self._keys.check_run(stamp)
        if not asked.once:
            self._all.check_playing(stamp, self.members)
        self._helped.ask(stamp, asked, self.members)
        if answers:
            self._helped.answer(stamp, asked)

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
        """Return the others' shares, sealed. Raises as `moretta.secure_aggregation.sums.Contributor`.

        Also raises `moretta.errors.MisuseError` for a second upload under the same stamp and name,
        `moretta.errors.PeerError` for an encoding of other tensors, and `moretta.errors.ParameterError` for shares of
        2 GiB or more.
        """
        agreement, labels = self._keys.agreed
        self.check(stamp, asked)
        self._range.check(self._ring, encoding, len(agreement.cohort.names), least, once=bool(asked.once))
        whole, words = encode(self._ring, tensors, weight, encoding, len(agreement.cohort.names))
        rest = whole[1:] if self._rules.public_weights else whole
        _check_size(rest.nbytes)
        labels.use(stamp, words)
        label = label_of(stamp, agreement.cohort.digest, shapes_of(words), encoding, asked.digest)
        if blind is not None:
            add_masks(rest, [(True, blind_key(blind, label, self._name))])
        sealed = dict[str, Array]()
        for holder, seed in agreement.seeds.items():
            key = os.urandom(32)
            if self._insecure is not None:
                key = self._insecure.derive("additive share", *label, holder, self._session)
            share = Keystream(key).integers(rest.size, self._ring.bits)
            np.subtract(rest, share, out=rest)
            content = share.astype(share.dtype.newbyteorder("<"), copy=False).view(np.uint8).data
            sealed[holder] = np.frombuffer(
                _seal(seed, label, self._name, holder).encrypt(NONCE, content, None), dtype=np.uint8
            )
        self._kept, self._added = _Kept(stamp, label, rest, asked), None
        public = weight if self._rules.public_weights else 0
        return SealedShares(stamp=stamp, shares=sealed, weight=public, asked=asked.digest)

    def read(
        self,
        stamp: Stamp,
        relayed: Relayed,
        encoding: Mapping[str, int],
        blind: bytes | None = None,
        *,
        asked: Query,
    ) -> Sum:
        """Return what a relayed sum came to. Raises as `moretta.secure_aggregation.sums.Contributor`."""
        agreement, _ = self._keys.agreed
        label = label_of(stamp, agreement.cohort.digest, shapes_of(relayed.tensors), encoding, asked.digest)
        return read(self._ring, relayed, encoding, blind, label, public_weights=self._rules.public_weights)

    def _add(self, asked: AddShares) -> AddedShares:
        if self._added is not None and _same(self._added[0], asked):
            return self._added[1]
        if self._kept is None:
            raise MisuseError(
                "was asked to add shares without an upload before, or twice; they are added once for each"
            )
        (agreement, _), kept = self._keys.agreed, self._kept
        if asked.stamp != kept.stamp:
            raise PeerError(f"expected the shares of {kept.stamp}, got those of {asked.stamp}")
        if asked.shares.keys() != agreement.seeds.keys():
            different = sorted(asked.shares.keys() ^ agreement.seeds.keys())
            raise PeerError(
                f"expected one share of each other silo of the cohort, and of nobody else; {different!r:.200} differ"
            )
        self._helped.bind(kept.stamp, kept.asked, agreement.cohort.names, gives=True)
        self._kept, unopened = None, []
        for maker, sealed in sorted(asked.shares.items()):
            share = self._opened(kept, maker, agreement.seeds[maker], sealed)
            if share is None:
                unopened.append(maker)
            else:
                np.add(kept.share, share, out=kept.share)
        # Where some do not open, the partial sum is dropped: nobody may see it without the rest.
        words = np.empty(0, self._ring.dtype) if unopened else kept.share
        self._added = asked, AddedShares(stamp=asked.stamp, words=words, unopened=tuple(unopened))
        return self._added[1]

    def _opened(self, kept: _Kept, maker: str, seed: bytes, sealed: Array) -> Words | None:
        """Return a share; None where it is not one that its maker sealed for this sum."""
        if sealed.size != kept.share.nbytes + TAG_BYTES:
            return None
        try:
            content = _seal(seed, kept.label, maker, self._name).decrypt(NONCE, np.ascontiguousarray(sealed).data, None)
        except InvalidTag:
            return None
        return np.frombuffer(content, dtype=self._ring.dtype.newbyteorder("<"))

    def __repr__(self) -> str:
        return f"AdditiveContributor({self._name!r}, {self._ring}, <redacted>)"


class AdditiveAggregator:
    """The server's half: relays public keys and sealed shares, and adds the silos' sums of shares."""

    scheme: ClassVar[str] = "additive-shares"

    def __init__(self, ring: Ring, rules: Rules) -> None:
        self._ring, self._rules, self._all = ring, complete(rules), rules
        self._agreed: Cohort | None = None
        self.cohort: Sequence[str] = ()

    @property
    def parties(self) -> int:
        """How many silos' entries a sum has at most."""
        return self._all.parties(len(self.cohort))

    def setup(self, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
        """Relay public keys among the cohort. Raises `moretta.errors.ParameterError` for fewer than 2 silos."""
        self._agreed, self.cohort = None, ()
        agreed = yield from agree_on_keys(now, cohort, self._rules)
        if isinstance(agreed, Aborted):
            return agreed
        self._agreed, self.cohort = agreed, tuple(cohort)
        return None

    def want(self, shapes: Shapes, limits: Mapping[str, float], most_weight: int) -> Wanted:
        """Choose the fraction bits of each tensor from its limit (`moretta.secure_aggregation.encoding`).

        Also raises `moretta.errors.ParameterError` for shares of 2 GiB or more.
        """
        _check_size(self._length(shapes) * self._ring.dtype.itemsize)
        return plan(self._ring, self.parties, shapes, limits, most_weight)

    def sum(
        self,
        ask: Message | Mapping[str, Message],
        wanted: Wanted,
        expected: bytes | None = None,
        *,
        whole: bool = False,
    ) -> Exchange[Sum | Aborted]:
        """Ask for shares, have silos add them, and add the sums. Aborts where any silo is missing, whatever `whole`."""
        relayed = yield from self.relay(ask, wanted, expected)
        if isinstance(relayed, Aborted):
            return relayed
        return decode(self._ring, relayed.tensors, int(relayed.weight), relayed.silos, wanted)

    def relay(
        self, ask: Message | Mapping[str, Message], wanted: Wanted, expected: bytes | None = None
    ) -> Exchange[Relayed | Aborted]:
        """Ask and add up as `sum` does, without decoding the sum."""
        cohort = self._agreed
        if cohort is None:
            raise MisuseError("a sum was asked for without a set-up; expected `setup` to have succeeded")
        length = self._length(wanted.shapes)
        sealed_bytes = length * self._ring.dtype.itemsize + TAG_BYTES

        def check(silo: str, upload: SealedShares) -> None:
            if upload.shares.keys() != cohort.neighbours[silo]:
                raise PeerError(f"expected a sealed share for each of {len(cohort.names) - 1} other silos")
            if {share.size for share in upload.shares.values()} != {sealed_bytes}:
                raise PeerError(f"expected sealed shares of {sealed_bytes} bytes for each silo, got other lengths")
            least, most = (1, wanted.most_weight) if self._rules.public_weights else (0, 0)
            if not least <= upload.weight <= most:
                raise PeerError(
                    f"expected a weight from {least} to {most} in the clear, got {upload.weight}; set public-weights "
                    "alike for every role"
                )

        gathered = yield from gather(self.cohort, ask, SealedShares, check, wanted, expected)
        if isinstance(gathered, Aborted):
            return gathered
        replies, _ = gathered
        if replies.missing:
            return Aborted(replies.missing)
        uploads: Mapping[str, SealedShares] = replies.answers
        stamp = stamp_of(ask)
        added = yield from self._added(cohort, stamp, uploads, length)
        if isinstance(added, Aborted):
            return added
        weight = np.array(sum(upload.weight for upload in uploads.values()), dtype=self._ring.dtype)
        if not self._rules.public_weights:
            weight, added = added[:1].reshape(()), added[1:]
        return Relayed(unpacked(added, wanted.shapes), weight, cohort.names)

    def _added(
        self, cohort: Cohort, stamp: Stamp, uploads: Mapping[str, SealedShares], length: int
    ) -> Exchange[Words | Aborted]:
        """Return v_1 + ... + v_n, a new array of the ring."""

        def check(silo: str, reply: AddedShares) -> None:
            if not cohort.neighbours[silo].issuperset(reply.unopened):
                raise PeerError("expected names of other silos whose shares did not open, got others")
            if reply.words.dtype != self._ring.dtype or (not reply.unopened and reply.words.size != length):
                raise PeerError(
                    f"expected {length} elements of Z_2^{self._ring.bits}, got {reply.words.dtype}[{reply.words.size}]"
                )

        asks = {
            holder: AddShares(
                stamp=stamp, shares={maker: uploads[maker].shares[holder] for maker in cohort.names if maker != holder}
            )
            for holder in cohort.names
        }
        ask = Ask(asks, AddedShares, check)
        replies = yield ask
        replies = yield from again(ask, replies)
        unopened = {holder: reply.unopened for holder, reply in replies.answers.items()}
        if missing := {**to_leave_out(unopened), **replies.missing}:
            return Aborted(missing, opened=sorted(missing))
        return add_up([reply.words for reply in replies.answers.values()])

    def _length(self, shapes: Shapes) -> int:
        return sum(map(math.prod, shapes.values())) + (not self._rules.public_weights)


def _same(one: AddShares, other: AddShares) -> bool:
    shares = (one.shares, other.shares)
    return (
        one.stamp == other.stamp
        and shares[0].keys() == shares[1].keys()
        and all(np.array_equal(shares[0][maker], shares[1][maker]) for maker in shares[0])
    )
