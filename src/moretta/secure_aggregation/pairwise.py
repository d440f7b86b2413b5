"""Pairwise masks and self-masks: `moretta.secure_aggregation` has the equation and what it hides.

`moretta.secure_aggregation.masks` expands the masks; `moretta.secure_aggregation.unmasking` has the steps that
complete the sum over the survivors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar

import numpy as np

from moretta.contract.messages import Array, Message, Stamp, Tensors, message
from moretta.contract.roles import Aborted, Ask, Exchange, Missing, Reason, Replies
from moretta.errors import MisuseError, PeerError
from moretta.secure_aggregation.agreement import AdvertiseKey, SetUp, agree_on_keys
from moretta.secure_aggregation.cohort import Cohort, Credentials, Rules
from moretta.secure_aggregation.encoding import Range, Ring, Words, add_up, decode, encode, plan, room_for, shapes_of
from moretta.secure_aggregation.keystream import SecretRoot
from moretta.secure_aggregation.masks import Label, Mask, add_masks, blind_key, label_of, pair_key, read
from moretta.secure_aggregation.one_sum import HelpedSums
from moretta.secure_aggregation.sums import (
    Query,
    Relayed,
    Shapes,
    Sum,
    Wanted,
    again,
    check_lengths,
    check_tensors,
    gather,
    spent_of,
    stamp_of,
    to_leave_out,
)
from moretta.secure_aggregation.unmasking import (
    DIGEST_BYTES,
    SEALED_BYTES,
    Confirmed,
    OpenSum,
    SelfMask,
    SelfMaskShares,
    Survivors,
    Unmask,
    check_confirmation,
    commitment,
    count_of,
    pieces,
    put_together,
    recovered_masks,
    share_digest,
    shares_of,
)

RINGS = frozenset({np.dtype(np.uint32), np.dtype(np.uint64)})


@message("secure-aggregation/masked")
class MaskedUpload(Message):
    """y_k by tensor and the weight, uint32 or uint64, masked; and the self-mask's secret in sealed shares.

    maker: whose upload it is, so that another's is noticed before masks are opened. asked: the digest of what this
    answers. committed: `moretta.secure_aggregation.unmasking.commitment`. sealed, digests: one behind the other, in the
    order of the holders' names; the silo's own share has only a digest.
    """

    SHARES: ClassVar[frozenset[str]] = frozenset({"committed", "sealed", "digests"})

    maker: str
    tensors: Tensors
    weight: Array
    asked: bytes
    committed: bytes
    sealed: bytes
    digests: bytes

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless all are elements of one ring, and the weight is one number."""
        dtypes = {array.dtype for array in (self.weight, *self.tensors.values())}
        if len(dtypes) != 1 or not dtypes <= RINGS or self.weight.shape != ():
            named = sorted(dtype.name for dtype in dtypes)
            raise PeerError(f"{self.TAG}: expected elements of one ring and one weight, got {named}")
        if count_of(self.sealed, SEALED_BYTES) + 1 != count_of(self.digests, DIGEST_BYTES):
            raise PeerError(f"{self.TAG}: expected a digest of each sealed share, and one of the own share")
        check_lengths("a digest", {"committed": self.committed, "asked": self.asked}, DIGEST_BYTES)


MESSAGES = (MaskedUpload,)


class PairwiseContributor:
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
        self._name, self._ring, self._rules, self._credentials = name, ring, rules, credentials
        self._insecure, self._session, self._helped = insecure, session, helped
        self._keys = SetUp(name, rules, credentials, insecure, session, run)
        self._range = Range(rules.limit, one_weight=rules.participation is not None)
        self._open: OpenSum | None = None

    @property
    def members(self) -> Sequence[str]:
        """Who agreed on keys in the last set-up."""
        return self._keys.members

    def answer(self, message: Message) -> Message | None:
        """Answer the messages of set-up and unmasking. A new set-up forgets the last one's seeds."""
        match message:
            case Survivors() | Unmask():
                if self._open is None:
                    raise MisuseError("was asked to unmask before there was an upload in this set-up")
                return self._open.confirm(message) if isinstance(message, Survivors) else self._open.unmask(message)
            case AdvertiseKey():
                self._open = None
        return self._keys.answer(message)

    def check(self, stamp: Stamp, asked: Query, *, answers: bool = False) -> None:
        """Raise `moretta.errors.SumSpent` or `moretta.errors.PeerError` where an upload would be refused."""
        self._keys.check_run(stamp)
        if not asked.once:
            self._rules.check_playing(stamp, self.members)
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
        """Return the masked upload. Raises as `moretta.secure_aggregation.sums.Contributor`.

        Also raises `moretta.errors.MisuseError` for a second upload under the same stamp and name, and
        `moretta.errors.PeerError` for an encoding of other tensors.
        """
        agreement, labels = self._keys.agreed
        self.check(stamp, asked)
        self._range.check(self._ring, encoding, len(agreement.cohort.names), least, once=bool(asked.once))
        whole, words = encode(self._ring, tensors, weight, encoding, len(agreement.cohort.names))
        labels.use(stamp, words)
        label = label_of(stamp, agreement.cohort.digest, shapes_of(words), encoding, asked.digest)
        own = SelfMask(agreement, label, self._random(label))
        pairs: list[Mask] = [
            (self._name < peer, pair_key(seed, label, self._name, peer)) for peer, seed in agreement.extracted.items()
        ]
        if blind is not None:
            pairs.append((True, blind_key(blind, label, self._name)))
        add_masks(whole[self._rules.public_weights :], [own.mask, *pairs])
        self._open = OpenSum(agreement, stamp, label, own, asked, self._helped, self._credentials)
        return MaskedUpload(
            stamp=stamp,
            maker=self._name,
            tensors=words,
            weight=whole[:1].reshape(()),
            asked=asked.digest,
            committed=own.commitment,
            sealed=own.sealed,
            digests=own.digests,
        )

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

    def _random(self, label: Label) -> Callable[[int], bytes]:
        if self._insecure is None:
            return os.urandom
        stream = self._insecure.stream("self-mask", *label, self._session)
        return lambda count: stream.octets(count).tobytes()

    def __repr__(self) -> str:
        return f"PairwiseContributor({self._name!r}, {self._ring}, <redacted>)"


def summed(
    ring: Ring,
    uploads: Mapping[str, MaskedUpload],
    masks: Sequence[Mask],
    shapes: Shapes,
    empty: Callable[..., Words] = np.empty,
    *,
    public: bool,
) -> Relayed:
    """Add uploads in the ring, where masks between survivors cancel, and take off the others.

    masks: by `recovered_masks`. empty: makes the vector of the sum. public: whether weights are, and have no mask.
    """
    words, tensors = room_for(shapes, ring, empty)
    weight = add_up([upload.weight for upload in uploads.values()], words[:1].reshape(()))
    for name, total in tensors.items():
        add_up([upload.tensors[name] for upload in uploads.values()], total)
    add_masks(words[public:], masks)
    return Relayed({name: tensors[name] for name in shapes}, weight, tuple(uploads))


def _put_together(
    cohort: Cohort,
    label: Label,
    uploads: Mapping[str, MaskedUpload],
    circles: Mapping[str, Collection[str]],
    replies: Replies,
) -> tuple[dict[str, bytes], dict[str, Missing]]:
    """Return the self-masks' secrets that the replies give, and whom to leave out where some secrets are missing.

    circles: by survivor, the survivors that hold shares of its secret.
    """
    given: Mapping[str, SelfMaskShares] = replies.answers
    held, unopened = dict[str, Mapping[str, bytes]](), dict[str, Collection[str]]()
    for silo, reply in given.items():
        held[silo] = reply.by_maker
        unopened[silo] = set(circles[silo]) - held[silo].keys()
    secrets, failed = dict[str, bytes](), dict[str, Missing]()
    for maker in uploads:
        if maker in given and given[maker].secret:
            secrets[maker] = given[maker].secret
            continue
        shares = {
            cohort.point(holder): held[holder][maker]
            for holder in circles[maker]
            if holder in given and maker not in unopened[holder]
        }
        secret = put_together(shares, cohort.plan.threshold, label, maker, uploads[maker].committed)
        if secret is not None:
            secrets[maker] = secret
        elif len(shares) >= cohort.plan.threshold:
            failed[maker] = Missing(Reason.MALFORMED, "the shares it made do not give the secret it committed to")
    return secrets, {**to_leave_out(unopened), **failed}


class PairwiseAggregator:
    """The server's half: relays public keys and sealed shares, adds uploads, removes the masks of their sum."""

    scheme: ClassVar[str] = "pairwise"

    def __init__(self, ring: Ring, rules: Rules) -> None:
        self._ring, self._rules = ring, rules
        self._agreed: Cohort | None = None
        self.cohort: Sequence[str] = ()

    @property
    def parties(self) -> int:
        """How many silos' entries a sum has at most."""
        return self._rules.parties(len(self.cohort))

    def setup(self, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
        """Relay public keys among the cohort. Raises `moretta.errors.ParameterError` for fewer than 2 silos."""
        self._agreed, self.cohort = None, ()
        agreed = yield from agree_on_keys(now, cohort, self._rules)
        if isinstance(agreed, Aborted):
            return agreed
        self._agreed, self.cohort = agreed, tuple(cohort)
        return None

    def want(self, shapes: Shapes, limits: Mapping[str, float], most_weight: int) -> Wanted:
        """Choose the fraction bits of each tensor from its limit (`moretta.secure_aggregation.encoding`)."""
        return plan(self._ring, self.parties, shapes, limits, most_weight)

    def sum(
        self,
        ask: Message | Mapping[str, Message],
        wanted: Wanted,
        expected: bytes | None = None,
        *,
        whole: bool = False,
    ) -> Exchange[Sum | Aborted]:
        """Ask for uploads, agree on the survivors, collect the shares, and add up."""
        relayed = yield from self.relay(ask, wanted, expected, whole=whole)
        if isinstance(relayed, Aborted):
            return relayed
        return decode(self._ring, relayed.tensors, int(relayed.weight), relayed.silos, wanted)

    def relay(
        self,
        ask: Message | Mapping[str, Message],
        wanted: Wanted,
        expected: bytes | None = None,
        *,
        whole: bool = False,
    ) -> Exchange[Relayed | Aborted]:
        """Ask and add up as `sum` does, without decoding the sum."""
        cohort = self._agreed
        if cohort is None:
            raise MisuseError("a sum was asked for without a set-up; expected `setup` to have succeeded")

        def check(silo: str, upload: MaskedUpload) -> None:
            if upload.maker != silo:
                raise PeerError("expected the silo's own upload, got another's")
            check_tensors(wanted.shapes, upload.tensors)
            if upload.weight.dtype != self._ring.dtype:
                raise PeerError(f"expected elements of Z_2^{self._ring.bits}, got {upload.weight.dtype}")
            if self._rules.public_weights and not 1 <= int(upload.weight) <= wanted.most_weight:
                raise PeerError(f"expected a weight of 1 to {wanted.most_weight}, got {int(upload.weight)}")
            if len(upload.digests) != len(cohort.circle(silo)) * DIGEST_BYTES:
                raise PeerError(f"expected a sealed share for each of {len(cohort.neighbours[silo])} neighbours")

        gathered = yield from gather(self.cohort, ask, MaskedUpload, check, wanted, expected)
        if isinstance(gathered, Aborted):
            return gathered
        replies, asked = gathered
        if whole and replies.missing:
            return Aborted(replies.missing)
        stamp = stamp_of(ask)
        label = label_of(stamp, cohort.digest, wanted.shapes, wanted.fraction_bits, asked)
        confirmed = yield from self._confirm(cohort, stamp, label, replies.answers, replies.missing)
        if isinstance(confirmed, Aborted):
            return confirmed
        uploads = {silo: replies.answers[silo] for silo in sorted(confirmed)}
        secrets = yield from self._secrets(cohort, stamp, label, uploads, confirmed)
        if isinstance(secrets, Aborted):
            return secrets
        keys = {silo: reply.keys for silo, reply in confirmed.items() if reply is not None}
        masks = recovered_masks(label, tuple(uploads), keys, secrets)
        return summed(self._ring, uploads, masks, wanted.shapes, replies.empty, public=self._rules.public_weights)

    def _confirm(
        self,
        cohort: Cohort,
        stamp: Stamp,
        label: Label,
        uploads: Mapping[str, MaskedUpload],
        missing: Mapping[str, Missing],
    ) -> Exchange[Mapping[str, Confirmed | None] | Aborted]:
        """Return the survivors and their confirmations, each None where no silo is missing and none signs."""
        survivors, gone, because = tuple(sorted(uploads)), dict(missing), ""
        while not (because := cohort.shortage(survivors) or ""):
            if not gone and self._rules.roster is None:
                return dict.fromkeys(survivors)
            names = survivors

            def check(silo: str, reply: Confirmed, names: tuple[str, ...] = names) -> None:
                if set(reply.keys) != cohort.neighbours[silo] - set(names):
                    raise PeerError("expected the keys of the masks shared with the lost neighbours")
                check_confirmation(self._rules.roster, silo, reply.signature, label, names)

            ask = Ask.all(survivors, Survivors(stamp=stamp, survivors=survivors), Confirmed, check)
            replies = yield ask
            if self._rules.roster is not None:
                replies = yield from again(ask, replies)
            if not replies.missing:
                return replies.answers
            if spent := spent_of(replies):
                return Aborted(spent)
            gone |= replies.missing
            if self._rules.roster is not None:
                because = "silos were lost while the others signed who is left, who sign no other set in this take"
                return Aborted(gone, because, opened=sorted(replies.missing))
            survivors = tuple(sorted(replies.answers))
        return Aborted(gone, because)

    def _secrets(
        self,
        cohort: Cohort,
        stamp: Stamp,
        label: Label,
        uploads: Mapping[str, MaskedUpload],
        confirmed: Mapping[str, Confirmed | None],
    ) -> Exchange[Mapping[str, bytes] | Aborted]:
        """Return the survivors' self-mask secrets; aborted where too few holders gave valid shares."""
        survivors, summed = tuple(uploads), shares_of(label)
        signed = {silo: reply.signature for silo, reply in confirmed.items() if reply and reply.signature}
        circles = {silo: cohort.circle(silo) & uploads.keys() for silo in survivors}
        sealed, digests = dict[tuple[str, str], bytes](), dict[tuple[str, str], bytes]()  # by maker and holder
        for maker, upload in uploads.items():
            published, shares = iter(pieces(upload.digests, DIGEST_BYTES)), iter(pieces(upload.sealed, SEALED_BYTES))
            for holder in cohort.holders(maker):
                digests[maker, holder] = next(published)
                sealed[maker, holder] = b"" if holder == maker else next(shares)
        asks = dict[str, Message]()
        for silo in survivors:
            places = [(maker, silo) for maker in sorted(circles[silo]) if maker != silo]
            asks[silo] = Unmask(
                stamp=stamp,
                survivors=survivors,
                signatures=signed,
                sealed=b"".join(map(sealed.__getitem__, places)),
                digests=b"".join(map(digests.__getitem__, places)),
            )

        def check(silo: str, reply: SelfMaskShares) -> None:
            if not circles[silo].issuperset(reply.makers):
                raise PeerError("expected shares of its neighbours among the survivors, and of nobody else")
            for maker, share in reply.by_maker.items():
                if share_digest(share, summed) != digests[maker, silo]:
                    raise PeerError(f"the share of `{maker}` is not the one that `{silo}` was sent")
            if bool(reply.secret) != bool(signed):
                raise PeerError("expected the own mask's secret where there is a roster, and nowhere else")
            if reply.secret and commitment(reply.secret, label, silo) != uploads[silo].committed:
                raise PeerError("expected the own mask's secret that it committed to")

        ask = Ask(asks, SelfMaskShares, check)
        replies = yield ask
        secrets, failed = _put_together(cohort, label, uploads, circles, replies)
        if len(secrets) < len(survivors):
            replies = yield from again(ask, replies)
            secrets, failed = _put_together(cohort, label, uploads, circles, replies)
        if len(secrets) < len(survivors):
            because = f"expected shares of at least {cohort.plan.threshold} silos to unmask each survivor, got fewer"
            missing = {**failed, **replies.missing}
            return Aborted(missing, because, opened=sorted(missing))
        return secrets
