"""Unmasking: how the sum over the survivors is completed, and how a silo guards each step.

A silo's upload hides behind its pair masks and its self-mask. The server may learn either, never both: the pair masks
of a silo that dropped out, whose upload is not counted; the self-mask of a survivor.

    server                                      silo k, a survivor
      (a silo dropped out, or there is a roster)
      Survivors(S)                        -->     S fits the earlier sets; signs it
                                          <--   Confirmed(signature, mask keys with k's neighbours outside S)
      ... again with a smaller S while a silo fails to answer, unless there is a roster
      Unmask(S, signatures, sealed shares) -->    S is the same; all of S signed it; opens the shares
                                          <--   SelfMaskShares(a share of each neighbour's secret in S;
                                                               with a roster its own secret too)

Each upload has a fresh secret for the self-mask. Shamir's scheme (`moretta.secure_aggregation.shamir`) splits it into a
share for each neighbour, sealed to it. The server relays the shares when it asks to unmask.

Differs from the paper (Bonawitz et al., CCS 2017, figure 4): there, silos share their key-agreement keys at set-up, so
that a lost silo's pair masks can be computed. That silo needs new keys after that, and so do all silos in every round.
Here one set-up serves many rounds: to reveal a silo's key would reveal the pair masks of all its earlier uploads, whose
self-masks are known by then. So the survivors reveal the keys of the masks that they share with the lost silo in this
one sum, which are one-way from the seed. The price: a silo that uploads while another is already lost, and vanishes
before it has confirmed, is left out too, and the exchange repeats.

With a roster silos do not trust the server to follow this. A silo then signs one S in a sum and gives shares only once
all of S have signed it, so two unmasked sets have no honest silo in common. The price: when a silo vanishes between
uploading and confirming, the round is repeated as its next take. As all of S have signed, each also reveals its own
secret, so if a silo withholds its shares, only its own secret can be missing.

Where silos add noise, the seeds of its removable parts travel with the self-masks' shares, in `NoisedUpload`,
`UnmaskNoised` and `NoisedShares` (`moretta.secure_aggregation.removable_noise`).

Before a silo signs S, or without a roster before it gives shares, it records that it has helped to open this sum; it
helps to open no other of the same uploads (`moretta.secure_aggregation.one_sum`). It answers a repeated question, equal
word for word, by the same bytes.
"""

import hashlib
import os
from collections.abc import Collection, Mapping
from functools import lru_cache
from operator import lt
from typing import Annotated, Any

from cryptography.exceptions import InvalidTag

from moretta.contract.messages import Message, Stamp, length, message
from moretta.errors import MisuseError, PeerError
from moretta.secure_aggregation import shamir
from moretta.secure_aggregation.identity import Roster, Signature, Signatures, verify
from moretta.secure_aggregation.keyed_sums import Summand
from moretta.secure_aggregation.keystream import encode_purpose
from moretta.secure_aggregation.masks import Label, Mask, pair_key, self_key
from moretta.secure_aggregation.sums import same

KEY_BYTES = 32
DIGEST_BYTES = 32
MOST_LEVELS = 256  # of noise; levels of ratio 1.05 that cover the loss of all silos but one are fewer
SEALED_BYTES = shamir.SHARE_BYTES + 16  # with the seal's tag


def check_names(names: tuple[str, ...]) -> None:
    """Raise `moretta.errors.PeerError` unless the names are sorted and all different, and at least one."""
    if not names or not all(map(lt, names, names[1:])):
        raise PeerError("expected survivors in the order of their names, each once")


Names = Annotated[tuple[str, ...], check_names]


@message("secure-aggregation/survivors")
class Survivors(Message):
    """These silos are in the sum: confirm, and reveal the keys of masks shared with the others, which dropped out."""

    survivors: Names


@message("secure-aggregation/confirmed")
class Confirmed(Message):
    """The silo's signature of the survivors (no bytes without a roster), and mask keys by lost neighbour."""

    signature: Signature
    keys: Annotated[Mapping[str, bytes], length(KEY_BYTES)]


@message("secure-aggregation/unmask")
class Unmask(Message):
    """Give your shares of the self-masks of the survivors in your circle.

    Args:
        signatures: Of the survivors, by signer; empty without a roster.
        sealed: The shares for this silo, of all its neighbours among the survivors in the order of their names.
        digests: Likewise, the `share_digest` of each opened share.
    """

    survivors: Names
    signatures: Signatures
    sealed: bytes
    digests: bytes

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless each share has a digest."""
        if count_of(self.sealed, SEALED_BYTES) != count_of(self.digests, DIGEST_BYTES):
            raise PeerError(f"{self.TAG}: expected a digest with each sealed share")


@message("secure-aggregation/self-mask-shares")
class SelfMaskShares(Message):
    """Shares of self-masks' secrets, one for each of `makers`, without those that could not be opened.

    Args:
        secret: Of the silo's own self-mask, once all survivors have signed the set; no bytes without a roster.
    """

    makers: tuple[str, ...]
    shares: bytes
    secret: Annotated[bytes, length(0, shamir.SHARE_BYTES)]

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` for makers out of order, or a share of a wrong length."""
        if self.makers:
            check_names(self.makers)
        if len(self.shares) != len(self.makers) * shamir.SHARE_BYTES:
            raise PeerError(f"{self.TAG}: expected a share of {shamir.SHARE_BYTES} bytes of each of its makers")

    @property
    def by_maker(self) -> Mapping[str, bytes]:
        """The shares by their makers."""
        return dict(zip(self.makers, pieces(self.shares, shamir.SHARE_BYTES), strict=True))


@message("secure-aggregation/unmask-noised")
class UnmaskNoised(Unmask):
    """The same with removable noise. levels: the number of shares of seeds sealed, and digested, with each."""

    levels: int

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless there are as many digests as sealed shares."""
        check_levels(self.levels)
        shares = count_of(self.sealed, sealed_bytes(self.levels))
        if shares * (self.levels + 1) != count_of(self.digests, DIGEST_BYTES):
            raise PeerError(f"{self.TAG}: expected a digest with each sealed share")


@message("secure-aggregation/noised-shares")
class NoisedShares(SelfMaskShares):
    """The same, with shares of the seeds of removable noise.

    Args:
        noise: Of each maker, a share of the seed from which on its noise is removed; no bytes if no noise is removed.
        seed: The silo's own, once all survivors have signed the set.
    """

    noise: bytes
    seed: Annotated[bytes, length(0, shamir.SHARE_BYTES)]

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` for shares of a wrong length."""
        SelfMaskShares.check(self)
        if self.noise and len(self.noise) != len(self.shares):
            raise PeerError(
                f"{self.TAG}: expected a share of {shamir.SHARE_BYTES} bytes of each maker's seed, or of none"
            )

    @property
    def noise_by_maker(self) -> Mapping[str, bytes]:
        """The shares of seeds by their makers."""
        return dict(zip(self.makers, pieces(self.noise, shamir.SHARE_BYTES), strict=True)) if self.noise else {}


MESSAGES = (Survivors, Confirmed, Unmask, SelfMaskShares, UnmaskNoised, NoisedShares)


def check_levels(levels: int) -> None:
    """Raise `moretta.errors.PeerError` for an impossible number of seeds."""
    if not 1 <= levels <= MOST_LEVELS:
        raise PeerError(f"expected 1 to {MOST_LEVELS} seeds of noise, got {levels}")


def sealed_bytes(levels: int) -> int:
    """Return the length of a silo's sealed bytes: a share of the self-mask's secret, and of each seed of noise."""
    return SEALED_BYTES + levels * shamir.SHARE_BYTES


def count_of(content: bytes, length: int) -> int:
    """Return the number of pieces of this length in bytes. Raises `moretta.errors.PeerError` if one is shorter."""
    if len(content) % length:
        raise PeerError(f"expected pieces of {length} bytes each, got {len(content)} bytes")
    return len(content) // length


def pieces(content: bytes, length: int) -> list[bytes]:
    """Return bytes cut into pieces of this length."""
    return [content[start : start + length] for start in range(0, len(content), length)]


def commitment(secret: bytes, label: Label, silo: str, level: int = 0) -> bytes:
    """Return the SHA-256 of a silo's own secret, by which shares are checked. level: 0 its self-mask's, j seed_j's."""
    what: tuple[int | str, ...] = ("noise seed", level) if level else ("self-mask secret",)
    return hashlib.sha256(encode_purpose(*what, *label, silo, secret)).digest()


@lru_cache(maxsize=4)
def shares_of(label: Label) -> bytes:
    """Return the 32 bytes that bind shares to one sum: short, as shares are thousands."""
    return hashlib.sha256(encode_purpose("self-mask shares", *label)).digest()


def share_digest(share: bytes, summed: bytes) -> bytes:
    """Return the SHA-256 that proves that a share is the one its maker sealed.

    The share's place in the maker's upload identifies it: no two shares are alike, as the field is large.

    Args:
        summed: `shares_of` the sum's label.
    """
    return hashlib.sha256(summed + share).digest()


def share_digests(shares: bytes, summed: bytes) -> bytes:
    """Return the concatenated digests of shares that were sealed together."""
    return b"".join([share_digest(share, summed) for share in pieces(shares, shamir.SHARE_BYTES)])


def check_confirmation(
    roster: Roster | None, silo: str, signature: bytes, label: Label, names: tuple[str, ...]
) -> None:
    """Raise `moretta.errors.PeerError` unless a silo signed these survivors, or no roster is in use."""
    if roster is not None and not (
        silo in roster.keys and verify(roster.keys[silo], signature, *_statement(roster, label, names))
    ):
        raise PeerError(f"`{silo}` did not sign these survivors of this sum; the server may have named others to it")


def _statement(roster: Roster, label: Label, names: tuple[str, ...]) -> tuple[int | str | bytes, ...]:
    return "survivors", roster.digest, *label, *names


class SelfMask:
    """The fresh secret of one upload, in shares: of the operating system's bytes, or a test's.

    The seeds of removable noise are shared with it.

    Attributes:
        committed: The concatenated commitments to these seeds.
    """

    def __init__(self, of: Summand) -> None:
        agreement, label, me, cohort = of.agreement, of.label, of.agreement.me, of.agreement.cohort
        stream = None if (root := of.origin.insecure) is None else root.stream("self-mask", *label, of.origin.session)
        random = os.urandom if stream is None else lambda count: stream.octets(count).tobytes()
        self.secret = secret = shamir.random_secret(random)
        self.mask: Mask = True, self_key(secret, label, me)
        self.commitment = commitment(secret, label, me)
        holders = cohort.holders(me)
        self.noise = of.noise
        seeds = () if of.noise is None else of.noise.seeds
        self.committed = b"".join([commitment(seed, label, me, level) for level, seed in enumerate(seeds, 1)])
        points = list(map(cohort.point, holders))
        made = [shamir.share(each, cohort.plan.threshold, points, random).values() for each in (secret, *seeds)]
        self._shares = dict(zip(holders, map(b"".join, zip(*made, strict=True)), strict=True))
        self.own_share, self._summed, self._agreement = self._shares[me], shares_of(label), agreement

    @property
    def digests(self) -> bytes:
        """Of the shares of the silo and its neighbours, in the order of their names."""
        return b"".join([share_digests(share, self._summed) for share in self._shares.values()])

    @property
    def sealed(self) -> bytes:
        """The shares of the silo's neighbours, each sealed for it, in the order of their names."""
        seals, others = self._agreement.seals, self._shares.keys() - {self._agreement.me}
        return b"".join([seals[name].encrypt(self._shares[name], [self._summed]) for name in sorted(others)])

    def __repr__(self) -> str:
        return "SelfMask(<redacted>)"


class OpenSum:
    """A silo's last upload until it is unmasked: the survivors that it received, and all that it may still reveal.

    Args:
        of: The upload, without its numbers.
    """

    def __init__(self, of: Summand, own: SelfMask) -> None:
        self._agreement, self._stamp, self._label, self._asked = of.agreement, of.stamp, of.label, of.asked
        self._own, self._helped, self._credentials = own, of.helped, of.origin.credentials
        self._survivors = of.agreement.cohort.names  # a later message can only remove some
        self._confirmed = False
        self._answered: tuple[Unmask, SelfMaskShares] | None = None  # the last ask for shares, and its answer

    def answer(self, message: Survivors | Unmask) -> Message:
        """Answer either message. Raises as `confirm` and `unmask`."""
        return self.confirm(message) if isinstance(message, Survivors) else self.unmask(message)

    def confirm(self, message: Survivors) -> Confirmed:
        """Return the keys of masks shared with lost silos.

        Raises:
            PeerError: Survivors are outside the last set (a lost silo stays lost), or with a roster are another set. Or
                the sum lacks this silo, or has too few.
            SumSpent: With a roster, the silo has helped to open another sum.
        """
        self._check_time(message.stamp)
        agreement, cohort = self._agreement, self._agreement.cohort
        self._check_survivors(message.survivors)
        if self._credentials is not None and self._confirmed and message.survivors != self._survivors:
            raise PeerError("expected the survivors that were signed before; a silo signs one set of them in a sum")
        if self._credentials is not None:
            self._helped.bind(self._stamp, self._asked, message.survivors, gives=False)
        self._survivors, self._confirmed = message.survivors, True
        lost = cohort.neighbours[agreement.me] - set(message.survivors)
        keys = {name: pair_key(agreement.extracted[name], self._label, agreement.me, name) for name in sorted(lost)}
        signature = b""
        if self._credentials is not None:
            statement = _statement(self._credentials.roster, self._label, message.survivors)
            signature = self._credentials.identity.sign(*statement)
        return Confirmed(stamp=message.stamp, signature=signature, keys=keys)

    def unmask(self, asked: Unmask) -> SelfMaskShares:
        """Return the shares of the survivors' secrets; a repeated question gets the same answer.

        Raises:
            PeerError: The survivors are not those confirmed, or the shares or signatures do not fit them.
            SumSpent: The silo has helped to open another sum of this round.
            MisuseError: Another question was answered before.
        """
        if self._answered is not None and same(self._answered[0], asked):
            return self._answered[1]
        self._check_time(asked.stamp)
        agreement, cohort = self._agreement, self._agreement.cohort
        if asked.survivors != self._survivors:
            raise PeerError(
                "expected to unmask the sum of the survivors that were confirmed; with others both masks of a silo "
                "could fall"
            )
        left, noise = cohort.neighbours[agreement.me] & set(asked.survivors), self._own.noise
        levels = 0 if noise is None else noise.levels.removable
        if (asked.levels if isinstance(asked, UnmaskNoised) else 0) != levels:
            raise PeerError(
                f"expected shares of {levels} seeds of noise beside those of each self-mask, as this upload has"
            )
        sealed = pieces(asked.sealed, sealed_bytes(levels))
        if len(sealed) != len(left):
            raise PeerError("expected one share of each neighbour among the survivors, and of nobody else")
        if self._credentials is not None:
            self._check_signatures(asked, self._credentials.roster)
        # No message names a seed by its number: the survivors determine it.
        first = 0 if noise is None else noise.levels.first_removed(len(cohort.names) - len(asked.survivors))
        self._helped.bind(self._stamp, self._asked, asked.survivors, gives=True)
        parts = zip(sorted(left), sealed, pieces(asked.digests, DIGEST_BYTES * (levels + 1)), strict=True)
        opened = {maker: self._opened(maker, share, digest) for maker, share, digest in parts}
        opened[agreement.me] = self._own.own_share
        makers = tuple(maker for maker in sorted(opened) if opened[maker])
        each = [pieces(opened[maker], shamir.SHARE_BYTES) for maker in makers]
        signed = self._credentials is not None
        fields: dict[str, Any] = {
            "makers": makers,
            "shares": b"".join([shares[0] for shares in each]),
            "secret": self._own.secret if signed else b"",
        }
        reply = SelfMaskShares(stamp=asked.stamp, **fields)
        if noise is not None:
            taken = b"".join([shares[first] for shares in each if first <= levels])
            seed = noise.seeds[first - 1] if signed and first <= levels else b""
            reply = NoisedShares(stamp=asked.stamp, **fields, noise=taken, seed=seed)
        self._answered = asked, reply
        return reply

    def _opened(self, maker: str, sealed: bytes, digest: bytes) -> bytes:
        """Return shares; no bytes if they differ from what their maker published, which is not this silo's fault."""
        summed = shares_of(self._label)
        try:
            shares = self._agreement.opens[maker].decrypt(sealed, [summed])
        except InvalidTag:
            return b""
        return shares if share_digests(shares, summed) == digest else b""

    def _check_time(self, stamp: Stamp) -> None:
        if stamp != self._stamp:
            raise PeerError(f"expected to unmask the upload of {self._stamp}, was asked for {stamp}")
        if self._answered is not None:
            raise MisuseError(f"{stamp}: the shares of this sum were sent before; expected one request for them")

    def _check_survivors(self, names: tuple[str, ...]) -> None:
        me, cohort = self._agreement.me, self._agreement.cohort
        if strangers := set(names) - set(cohort.names):
            raise PeerError(f"expected survivors of the cohort, got {sorted(strangers)!r:.200}")
        if back := set(names) - set(self._survivors):
            raise PeerError(
                f"expected {sorted(back)!r:.200} to stay out of this sum, because they were given up before; both "
                "masks of a silo are never revealed"
            )
        if me not in names:
            raise PeerError(f"`{me}` received its own name among the lost silos; its upload is not to be unmasked")
        if shortage := cohort.shortage(names):
            raise PeerError(shortage)

    def _check_signatures(self, asked: Unmask, roster: Roster) -> None:
        if different := set(asked.signatures) ^ set(asked.survivors):
            raise PeerError(
                f"expected a signature of each survivor and of nobody else; {sorted(different)!r:.200} differ"
            )
        for silo, signature in asked.signatures.items():
            check_confirmation(roster, silo, signature, self._label, asked.survivors)

    def __repr__(self) -> str:
        return f"OpenSum({self._stamp}, <redacted>)"


def recovered_masks(
    label: Label,
    survivors: Collection[str],
    keys: Mapping[str, Mapping[str, bytes]],
    secrets: Mapping[str, bytes],
) -> list[Mask]:
    """Return the masks to add to the sum of the survivors' uploads to remove all masks.

    Args:
        keys: Of masks, by revealing survivor and lost neighbour.
        secrets: Of self-masks, by survivor.
    """
    own = [(False, self_key(secrets[silo], label, silo)) for silo in survivors]
    return own + [(silo > lost, key) for silo in survivors for lost, key in keys.get(silo, {}).items()]


def put_together(
    shares: Mapping[int, bytes], threshold: int, label: Label, maker: str, committed: bytes, level: int = 0
) -> bytes | None:
    """Return a survivor's secret from shares by point, None if not the committed one. level: see `commitment`."""
    try:
        secret = shamir.reconstruct(shares, threshold)
    except PeerError:
        return None
    return secret if commitment(secret, label, maker, level) == committed else None
