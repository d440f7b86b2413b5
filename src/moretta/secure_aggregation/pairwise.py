"""Pairwise masks and self-masks: `moretta.secure_aggregation` has the equation and what it hides.

`moretta.secure_aggregation.masks` expands the masks; `moretta.secure_aggregation.unmasking` has the steps that complete
the sum over the survivors.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from moretta.contract.messages import Array, Digest, Message, Tensors, message
from moretta.contract.roles import Aborted, Ask, Exchange, Missing, Reason, Replies
from moretta.errors import PeerError
from moretta.secure_aggregation import unmasking
from moretta.secure_aggregation.cohort import Cohort
from moretta.secure_aggregation.encoding import Ring, Words, add_up, room_for, shapes_of, unpacked
from moretta.secure_aggregation.keyed_sums import Answer, PlannedSum, Scheme, Summand
from moretta.secure_aggregation.masks import Label, Mask, add_masks, label_of, pair_key
from moretta.secure_aggregation.removable_noise import Levels, removable_noise
from moretta.secure_aggregation.sums import Relayed, Shapes, Wanted, again, check_tensors, spent_of, to_leave_out
from moretta.secure_aggregation.unmasking import Confirmed, NoisedShares, SelfMaskShares, Survivors, Unmask

RINGS = frozenset({np.dtype(np.uint32), np.dtype(np.uint64)})


@message("secure-aggregation/masked")
class MaskedUpload(Message):
    """y_k by tensor and the weight, uint32 or uint64, masked; and the self-mask's secret in sealed shares.

    Args:
        maker: Its silo, so that another's is detected before masks are opened.
        asked: The digest of the query.
        committed: `moretta.secure_aggregation.unmasking.commitment`.
        sealed, digests: Concatenated, in the order of the holders' names; the silo's own share has only a digest.
    """

    SHARES: ClassVar[frozenset[str]] = frozenset({"committed", "sealed", "digests"})

    maker: str
    tensors: Tensors
    weight: Array
    asked: Digest
    committed: Digest
    sealed: bytes
    digests: bytes

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless all are elements of one ring, and the weight is one number."""
        dtypes = {array.dtype for array in (self.weight, *self.tensors.values())}
        if len(dtypes) != 1 or not dtypes <= RINGS or self.weight.shape != ():
            named = sorted(dtype.name for dtype in dtypes)
            raise PeerError(f"{self.TAG}: expected elements of one ring and one weight, got {named}")
        shares = unmasking.count_of(self.sealed, unmasking.sealed_bytes(self.levels))
        if shares + 1 != unmasking.count_of(self.digests, unmasking.DIGEST_BYTES * (self.levels + 1)):
            raise PeerError(f"{self.TAG}: expected a digest of each sealed share, and one of the own share")

    @property
    def levels(self) -> int:
        """The number of seeds of noise shared with the self-mask's secret."""
        return 0


@message("secure-aggregation/noised")
class NoisedUpload(MaskedUpload):
    """The same with removable noise, whose shares are sealed with the others. noise: concatenated commitments."""

    SHARES: ClassVar[frozenset[str]] = MaskedUpload.SHARES | {"noise"}

    noise: bytes

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` as above, or for an impossible number of seeds."""
        unmasking.check_levels(self.levels)
        MaskedUpload.check(self)

    @property
    def levels(self) -> int:
        """The number of seeds of noise shared with the self-mask's secret."""
        return unmasking.count_of(self.noise, unmasking.DIGEST_BYTES)


MESSAGES = (MaskedUpload, NoisedUpload)


def _mask(part: Summand) -> tuple[MaskedUpload, Answer]:
    """Return y_k = 2^f N_k x_k + self(k) + sum_{j > k} mask(k, j) - sum_{j < k} mask(j, k), and what unmasks it."""
    own, label, me = unmasking.SelfMask(part), part.label, part.agreement.me
    pairs = [(me < peer, pair_key(seed, label, me, peer)) for peer, seed in part.agreement.extracted.items()]
    add_masks(part.hidden, [own.mask, *pairs, *part.blinds])
    fields: dict[str, Any] = {
        "stamp": part.stamp,
        "maker": me,
        "tensors": part.tensors,
        "weight": part.weight,
        "asked": part.asked.digest,
        "committed": own.commitment,
        "sealed": own.sealed,
        "digests": own.digests,
    }
    upload = NoisedUpload(**fields, noise=own.committed) if own.committed else MaskedUpload(**fields)
    return upload, unmasking.OpenSum(part, own).answer


def _check(planned: PlannedSum, silo: str, upload: MaskedUpload) -> None:
    ring, request, cohort = planned.ring, planned.request, planned.cohort
    if upload.maker != silo:
        raise PeerError("expected the silo's own upload, got another's")
    check_tensors(request.shapes, upload.tensors)
    if upload.weight.dtype != ring.dtype:
        raise PeerError(f"expected elements of Z_2^{ring.bits}, got {upload.weight.dtype}")
    if planned.rules.public_weights and not 1 <= int(upload.weight) <= request.most_weight:
        raise PeerError(f"expected a weight of 1 to {request.most_weight}, got {int(upload.weight)}")
    levels = 0 if planned.levels is None else planned.levels.removable
    if upload.levels != levels:
        raise PeerError(f"expected commitments to {levels} seeds of noise, got {upload.levels}")
    if len(upload.digests) != len(cohort.circle(silo)) * unmasking.DIGEST_BYTES * (levels + 1):
        raise PeerError(f"expected a sealed share for each of {len(cohort.neighbours[silo])} neighbours")


def _unmasked(planned: PlannedSum, replies: Replies, asked: bytes) -> Exchange[Relayed | Aborted]:
    """Agree on the survivors, collect their shares, and add up."""
    request = planned.request
    label = label_of(planned.stamp, planned.cohort.digest, request.shapes, request.fraction_bits, asked)
    confirmed = yield from _confirmed(planned, label, replies)
    if isinstance(confirmed, Aborted):
        return confirmed
    uploads = {silo: replies.answers[silo] for silo in sorted(confirmed)}
    opened = yield from _secrets(planned, label, uploads, confirmed)
    if isinstance(opened, Aborted):
        return opened
    secrets, replied = opened
    keys = {silo: reply.keys for silo, reply in confirmed.items() if reply is not None}
    masks = unmasking.recovered_masks(label, tuple(uploads), keys, secrets)
    total = summed(planned.ring, uploads, masks, request.shapes, replies.empty, public=planned.rules.public_weights)
    if planned.levels is None or request.noise is None:
        return total
    points = {silo: planned.cohort.point(silo) for silo in planned.cohort.names}
    first = planned.levels.first_removed(len(points) - len(uploads))
    if first > planned.levels.removable:
        return total
    seeds = seeds_of(label, uploads, replied, points, planned.cohort.plan.threshold, first)
    take_off_excess(total.tensors, request, planned.levels, first, seeds.values())
    return replace(total, excess=[silo for silo in uploads if silo not in seeds])


def _confirmed(
    planned: PlannedSum, label: Label, replies: Replies
) -> Exchange[Mapping[str, Confirmed | None] | Aborted]:
    """Return the survivors and their confirmations, each None if no silo is missing and none signs."""
    cohort, roster = planned.cohort, planned.rules.roster
    survivors, gone, because = tuple(sorted(replies.answers)), dict(replies.missing), ""
    while not (because := cohort.shortage(survivors) or ""):
        if not gone and roster is None:
            return dict.fromkeys(survivors)
        names = survivors

        def check(silo: str, reply: Confirmed, names: tuple[str, ...] = names) -> None:
            if set(reply.keys) != cohort.neighbours[silo] - set(names):
                raise PeerError("expected the keys of the masks shared with the lost neighbours")
            unmasking.check_confirmation(roster, silo, reply.signature, label, names)

        ask = Ask.all(survivors, Survivors(stamp=planned.stamp, survivors=survivors), Confirmed, check)
        responses = yield ask
        if roster is not None:
            responses = yield from again(ask, responses)
        if not responses.missing:
            return responses.answers
        if spent := spent_of(responses):
            return Aborted(spent)
        gone |= responses.missing
        if roster is not None:
            because = "silos were lost while the others signed who is left, who sign no other set in this take"
            return Aborted(gone, because, opened=sorted(responses.missing))
        survivors = tuple(sorted(responses.answers))
    return Aborted(gone, because)


def _secrets(
    planned: PlannedSum, label: Label, uploads: Mapping[str, MaskedUpload], confirmed: Mapping[str, Confirmed | None]
) -> Exchange[tuple[Mapping[str, bytes], Mapping[str, SelfMaskShares]] | Aborted]:
    """Return the survivors' self-mask secrets and their replies; abort if too few holders gave valid shares."""
    cohort, survivors, summed = planned.cohort, tuple(uploads), unmasking.shares_of(label)
    signed = {silo: reply.signature for silo, reply in confirmed.items() if reply and reply.signature}
    circles = {silo: cohort.circle(silo) & uploads.keys() for silo in survivors}
    sealed, digests = dict[tuple[str, str], bytes](), dict[tuple[str, str], bytes]()  # by maker and holder
    levels = 0 if planned.levels is None else planned.levels.removable
    first = 0 if planned.levels is None else planned.levels.first_removed(len(cohort.names) - len(survivors))
    for maker, upload in uploads.items():
        published = iter(unmasking.pieces(upload.digests, unmasking.DIGEST_BYTES * (levels + 1)))
        shares = iter(unmasking.pieces(upload.sealed, unmasking.sealed_bytes(levels)))
        for holder in cohort.holders(maker):
            digests[maker, holder] = next(published)
            sealed[maker, holder] = b"" if holder == maker else next(shares)
    asks = dict[str, Message]()
    for silo in survivors:
        places = [(maker, silo) for maker in sorted(circles[silo]) if maker != silo]
        fields: dict[str, Any] = {
            "stamp": planned.stamp,
            "survivors": survivors,
            "signatures": signed,
            "sealed": b"".join(map(sealed.__getitem__, places)),
            "digests": b"".join(map(digests.__getitem__, places)),
        }
        asks[silo] = unmasking.UnmaskNoised(**fields, levels=levels) if levels else Unmask(**fields)

    def check(silo: str, reply: SelfMaskShares) -> None:
        if not circles[silo].issuperset(reply.makers):
            raise PeerError("expected shares of its neighbours among the survivors, and of nobody else")
        parts = [(0, reply.by_maker)]
        if isinstance(reply, NoisedShares):
            if bool(reply.noise) != (first <= levels and bool(reply.makers)):
                raise PeerError("expected shares of seeds where some noise is taken off, and only there")
            parts.append((first, reply.noise_by_maker))
        for place, shares in parts:
            for maker, share in shares.items():
                published = unmasking.pieces(digests[maker, silo], unmasking.DIGEST_BYTES)
                if unmasking.share_digest(share, summed) != published[place]:
                    raise PeerError(f"the share of `{maker}` is not the one that `{silo}` was sent")
        if bool(reply.secret) != bool(signed):
            raise PeerError("expected the own mask's secret where there is a roster, and nowhere else")
        if reply.secret and unmasking.commitment(reply.secret, label, silo) != uploads[silo].committed:
            raise PeerError("expected the own mask's secret that it committed to")

    ask = Ask(asks, NoisedShares if levels else SelfMaskShares, check)
    replies = yield ask
    secrets, failed = _put_together(cohort, label, uploads, circles, replies)
    if len(secrets) < len(survivors):
        replies = yield from again(ask, replies)
        secrets, failed = _put_together(cohort, label, uploads, circles, replies)
    if len(secrets) < len(survivors):
        because = f"expected shares of at least {cohort.plan.threshold} silos to unmask each survivor, got fewer"
        missing = {**failed, **replies.missing}
        return Aborted(missing, because, opened=sorted(missing))
    return secrets, replies.answers


def seeds_of(
    label: Label,
    uploads: Mapping[str, MaskedUpload],
    replies: Mapping[str, SelfMaskShares],
    points: Mapping[str, int],
    threshold: int,
    first: int,
) -> dict[str, bytes]:
    """Return the seeds from which on noise is removed, by silo, without those that cannot be reconstructed.

    Args:
        replies: By holder.
        points: Of the holders' shares.
        first: The seeds' number.
    """
    held = {name: reply for name, reply in replies.items() if isinstance(reply, NoisedShares)}
    shares = {name: reply.noise_by_maker for name, reply in held.items()}
    seeds = dict[str, bytes]()
    for maker, upload in uploads.items():
        if not isinstance(upload, NoisedUpload):
            continue
        committed = unmasking.pieces(upload.noise, unmasking.DIGEST_BYTES)[first - 1]
        own = held[maker].seed if maker in held else b""
        if own and unmasking.commitment(own, label, maker, first) == committed:
            seeds[maker] = own
            continue
        mine = {points[holder]: held_by[maker] for holder, held_by in shares.items() if maker in held_by}
        seed = unmasking.put_together(mine, threshold, label, maker, committed, first)
        if seed is not None:
            seeds[maker] = seed
    return seeds


def take_off_excess(
    tensors: Mapping[str, Words], plan: Wanted, levels: Levels, first: int, seeds: Collection[bytes]
) -> None:
    """Subtract the components from `first` on, which follow from these seeds, from a sum in place."""
    count = sum(words.size for words in tensors.values())
    for seed in seeds:
        drawn = removable_noise(seed, first, levels, count).view(np.uint64)  # modulo 2^64, of which 2^b is a part
        for name, part in unpacked(drawn, shapes_of(tensors)).items():
            step = np.uint64(math.ldexp(plan.noise.step, plan.fraction_bits[name]) if plan.noise else 0)
            np.subtract(tensors[name], (part * step).astype(tensors[name].dtype), out=tensors[name])


def _put_together(
    cohort: Cohort,
    label: Label,
    uploads: Mapping[str, MaskedUpload],
    circles: Mapping[str, Collection[str]],
    replies: Replies,
) -> tuple[dict[str, bytes], dict[str, Missing]]:
    """Return the self-masks' secrets from the replies, and the silos to leave out if some secrets are missing.

    circles: by survivor, the survivors that hold shares of its secret.
    """
    opened: Mapping[str, SelfMaskShares] = replies.answers
    held, unopened = dict[str, Mapping[str, bytes]](), dict[str, Collection[str]]()
    for silo, reply in opened.items():
        held[silo] = reply.by_maker
        unopened[silo] = set(circles[silo]) - held[silo].keys()
    secrets, failed = dict[str, bytes](), dict[str, Missing]()
    for maker in uploads:
        if maker in opened and opened[maker].secret:
            secrets[maker] = opened[maker].secret
            continue
        shares = {
            cohort.point(holder): held[holder][maker]
            for holder in circles[maker]
            if holder in opened and maker not in unopened[holder]
        }
        secret = unmasking.put_together(shares, cohort.plan.threshold, label, maker, uploads[maker].committed)
        if secret is not None:
            secrets[maker] = secret
        elif len(shares) >= cohort.plan.threshold:
            failed[maker] = Missing(Reason.MALFORMED, "the shares it made do not give the secret it committed to")
    return secrets, {} if len(secrets) == len(uploads) else {**to_leave_out(unopened), **failed}


def summed(
    ring: Ring,
    uploads: Mapping[str, MaskedUpload],
    masks: Sequence[Mask],
    shapes: Shapes,
    empty: Callable[..., Words] = np.empty,
    *,
    public: bool,
) -> Relayed:
    """Add uploads in the ring, where masks between survivors cancel, and subtract the others.

    Args:
        masks: By `recovered_masks`.
        empty: Makes the vector of the sum, as `numpy.empty` does.
        public: Whether weights are, and have no mask.
    """
    words, tensors = room_for(shapes, ring, empty)
    weight = add_up([upload.weight for upload in uploads.values()], words[:1].reshape(()))
    for name, total in tensors.items():
        add_up([upload.tensors[name] for upload in uploads.values()], total)
    add_masks(words[public:], masks)
    return Relayed({name: tensors[name] for name in shapes}, weight, tuple(uploads))


PAIRWISE = Scheme(
    "pairwise",
    MaskedUpload,
    opens=(Survivors, Unmask),
    early="was asked to unmask before there was an upload in this set-up",
    hide=_mask,
    reopen=lambda part: unmasking.OpenSum(part, unmasking.SelfMask(part)).answer,
    check=_check,
    add_up=_unmasked,
    noised=NoisedUpload,
)
