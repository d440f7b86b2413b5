"""Additive shares: each silo splits its part of a sum among all silos, and only sums of shares are joined.

**Theory** (CGD's paper, appendix A, over Z_2^b; b = 32 there). Silo i's weight N_i and tensors 2^f N_i x_i form one
vector v_i of d ring elements (`moretta.secure_aggregation.encoding`). It is split into n shares::

    E_i^1 + E_i^2 + ... + E_i^n = v_i   mod 2^b

For each other silo j, E_i^j is uniform, expanded from a fresh key of the operating system; E_i^i is the remainder. Any
n - 1 of them are uniform and independent of v_i. Silo j adds the shares it holds to E^j = sum_i E_i^j, and

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

The holder of a share that does not open reports it. No role can tell whether its maker, the holder or the server is at
fault. So of each such pair one silo is left out: the one in most pairs, or the maker where they are even. That costs a
round. A silo that accuses one honest silo alone may so cost it its place.

**Cost.** A silo sends n times its vector (n - 1 shares up, a sum) and receives n - 1 times. So the server moves about 2
n^2 vectors in a round, where pairwise masks cost n.

Differs from the paper: shares pass through the server, sealed, as silos have no channels to each other; and uniform
means pseudorandom, by AES-128 in counter mode.
"""

from collections.abc import Mapping
from typing import Annotated

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from moretta.contract.messages import Array, Digest, Message, Tensors, message, shaped, within
from moretta.contract.roles import Aborted, Ask, Exchange, Replies
from moretta.errors import MisuseError, ParameterError, PeerError
from moretta.secure_aggregation.cohort import complete
from moretta.secure_aggregation.encoding import Words, add_up, unpacked
from moretta.secure_aggregation.keyed_sums import Answer, PlannedSum, Scheme, Summand
from moretta.secure_aggregation.keystream import Keystream, derive
from moretta.secure_aggregation.masks import Label, add_masks
from moretta.secure_aggregation.sums import Relayed, again, same, to_leave_out

TAG_BYTES = 16  # of a seal
NONCE = bytes(12)  # of a key that seals one share and nothing else
MOST_BYTES = 2**31 - 1  # sealed at once by the cipher's library
TWICE = "was asked to add shares without an upload before, or twice; they are added once for each"


def _check_sealed(shares: Tensors) -> None:
    sizes = {share.size for share in shares.values() if share.dtype == np.uint8 and share.ndim == 1}
    if not all(share.dtype == np.uint8 and share.ndim == 1 for share in shares.values()) or len(sizes) != 1:
        raise PeerError("expected sealed shares, bytes of one length for every silo")
    if min(sizes) < TAG_BYTES:
        raise PeerError(f"expected sealed shares of at least {TAG_BYTES} bytes, got {min(sizes)}")


Sealed = Annotated[Tensors, _check_sealed]


@message("secure-aggregation/sealed-shares")
class SealedShares(Message):
    """A silo's shares of its part, by holder: E_i^j as little-endian bytes, sealed, uint8[d b/8 + 16].

    Args:
        weight: N_i if weights are public, else 0.
        asked: The digest of the query.
    """

    shares: Sealed
    weight: Annotated[int, within(0)]
    asked: Digest


@message("secure-aggregation/add-shares")
class AddShares(Message):
    """Add these shares to your own of the same upload. shares: as in `SealedShares`, but by maker."""

    shares: Sealed


@message("secure-aggregation/added-shares")
class AddedShares(Message):
    """The sum of the shares that a silo holds, E^i.

    Args:
        words: uint32[d] or uint64[d]: the weight, if it is hidden, and the tensors in the order of their names. Empty
            if some shares could not be opened.
        unopened: The makers of those shares, sorted.
    """

    words: Annotated[Array, shaped(1, "uint32", "uint64")]
    unopened: tuple[str, ...]

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless it has either ring elements or names, each once."""
        if list(self.unopened) != sorted(set(self.unopened)):
            raise PeerError(f"{self.TAG}: expected silos in the order of their names, each once")
        if self.unopened and self.words.size:
            raise PeerError(f"{self.TAG}: expected either a sum or the silos whose shares are not in it, got both")


MESSAGES = (SealedShares, AddShares, AddedShares)


def _seal(seed: bytes, label: Label, maker: str, holder: str) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(derive(seed, "additive share", *label, maker, holder))


def _check_size(size: int) -> None:
    if size > MOST_BYTES - TAG_BYTES:
        raise ParameterError(
            f"expected shares of at most {MOST_BYTES - TAG_BYTES} bytes, got a model that takes {size}; "
            'use scheme = "pairwise"'
        )


def _split(part: Summand) -> tuple[SealedShares, Answer]:
    """Return E_i^j of every other silo j, uniform and sealed for it, and the holder of E_i^i, v_i's remainder."""
    rest, sealed = part.hidden, dict[str, Array]()
    if part.blinds:
        add_masks(rest, part.blinds)
    for holder, seed in part.agreement.seeds.items():
        key = part.origin.key("additive share", *part.label, holder)
        share = Keystream(key).integers(rest.size, 8 * rest.itemsize)
        np.subtract(rest, share, out=rest)
        content = share.astype(share.dtype.newbyteorder("<"), copy=False).view(np.uint8).data
        sealed[holder] = np.frombuffer(
            _seal(seed, part.label, part.agreement.me, holder).encrypt(NONCE, content, None), dtype=np.uint8
        )
    weight = int(part.weight) if part.public else 0
    upload = SealedShares(stamp=part.stamp, shares=sealed, weight=weight, asked=part.asked.digest)
    return upload, SplitSum(part).answer


class SplitSum:
    """A silo's last upload until shares are added. of: the remainder E_i^i, secret."""

    def __init__(self, of: Summand) -> None:
        self._of: Summand | None = of  # None once shares were added to it
        self._added: tuple[AddShares, AddedShares] | None = None  # the question, and its answer

    def answer(self, asked: AddShares) -> AddedShares:
        """Return E^i; a repeated question gets the same answer. Raises `moretta.errors.PeerError` to refuse."""
        if self._added is not None and same(self._added[0], asked):
            return self._added[1]
        of = self._of
        if of is None:
            raise MisuseError(TWICE)
        if asked.stamp != of.stamp:
            raise PeerError(f"expected the shares of {of.stamp}, got those of {asked.stamp}")
        if different := sorted(asked.shares.keys() ^ of.agreement.seeds.keys()):
            raise PeerError(
                f"expected one share of each other silo of the cohort, and of nobody else; {different!r:.200} differ"
            )
        of.helped.bind(of.stamp, of.asked, of.agreement.cohort.names, gives=True)
        self._of, words, unopened = None, of.hidden, list[str]()
        for maker, sealed in sorted(asked.shares.items()):
            share = _opened(of, maker, sealed)
            if share is None:
                unopened.append(maker)
            else:
                np.add(words, share, out=words)
        if unopened:  # the partial sum is dropped: no role may see it without the rest
            words = np.empty(0, words.dtype)
        self._added = asked, AddedShares(stamp=asked.stamp, words=words, unopened=tuple(unopened))
        return self._added[1]

    def __repr__(self) -> str:
        return "SplitSum(<redacted>)"


def _opened(of: Summand, maker: str, sealed: Array) -> Words | None:
    """Return a share; None if its maker did not seal it for this sum."""
    if sealed.size != of.hidden.nbytes + TAG_BYTES:
        return None
    seal = _seal(of.agreement.seeds[maker], of.label, maker, of.agreement.me)
    try:
        content = seal.decrypt(NONCE, np.ascontiguousarray(sealed).data, None)
    except InvalidTag:
        return None
    return np.frombuffer(content, dtype=of.hidden.dtype.newbyteorder("<"))


def _check(planned: PlannedSum, silo: str, upload: SealedShares) -> None:
    cohort, request = planned.cohort, planned.request
    sealed_bytes = planned.length * planned.ring.dtype.itemsize + TAG_BYTES
    if upload.shares.keys() != cohort.neighbours[silo]:
        raise PeerError(f"expected a sealed share for each of {len(cohort.names) - 1} other silos")
    if {share.size for share in upload.shares.values()} != {sealed_bytes}:
        raise PeerError(f"expected sealed shares of {sealed_bytes} bytes for each silo, got other lengths")
    least, most = (1, request.most_weight) if planned.rules.public_weights else (0, 0)
    if not least <= upload.weight <= most:
        raise PeerError(
            f"expected a weight from {least} to {most} in the clear, got {upload.weight}; set public-weights "
            "alike for every role"
        )


def _added(planned: PlannedSum, replies: Replies, asked: bytes) -> Exchange[Relayed | Aborted]:
    """Have silos add the shares they hold, and add those sums to v_1 + ... + v_n. All silos must stay."""
    if replies.missing:
        return Aborted(replies.missing)
    uploads: Mapping[str, SealedShares] = replies.answers
    cohort, ring, length = planned.cohort, planned.ring, planned.length

    def check(silo: str, reply: AddedShares) -> None:
        if not cohort.neighbours[silo].issuperset(reply.unopened):
            raise PeerError("expected names of other silos whose shares did not open, got others")
        if reply.words.dtype != ring.dtype or (not reply.unopened and reply.words.size != length):
            raise PeerError(
                f"expected {length} elements of Z_2^{ring.bits}, got {reply.words.dtype}[{reply.words.size}]"
            )

    asks = dict[str, Message]()
    for holder in cohort.names:
        shares = {maker: uploads[maker].shares[holder] for maker in cohort.names if maker != holder}
        asks[holder] = AddShares(stamp=planned.stamp, shares=shares)
    ask = Ask(asks, AddedShares, check)
    responses = yield ask
    responses = yield from again(ask, responses)
    unopened = {holder: reply.unopened for holder, reply in responses.answers.items()}
    if missing := {**to_leave_out(unopened), **responses.missing}:
        return Aborted(missing, opened=sorted(missing))
    total = add_up([reply.words for reply in responses.answers.values()])
    weight = np.array(sum(upload.weight for upload in uploads.values()), dtype=ring.dtype)
    if not planned.rules.public_weights:
        weight, total = total[:1].reshape(()), total[1:]
    return Relayed(unpacked(total, planned.request.shapes), weight, cohort.names)


ADDITIVE = Scheme(
    "additive-shares",
    SealedShares,
    opens=(AddShares,),
    early=TWICE,
    hide=_split,
    check=_check,
    add_up=_added,
    keys=complete,
    check_size=_check_size,
)
