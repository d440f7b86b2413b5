"""Masks: keystreams that are added to uploads in the ring, and the labels that they are bound to.

An upload is masked in one pass over its weight and then its tensors in the order of their names, by one stream of
AES-128-CTR for each neighbour and one for the silo itself. Every stream's key is bound to the sum's `Label`: run,
round, attempt, take, the cohort's digest (names, keys and graph), the names, shapes and encoding of all tensors, and
the digest of the query (`moretta.secure_aggregation.sums`). A server might ask one silo for another encoding, so that
the others' parts round to nothing beside it, or send it another model. Its masks then do not cancel.

**Blinded sums.** The role that adds up blinded uploads reads nothing, but could add numbers of its own: keystreams are
malleable. So each silo also uploads a tag of its integers x, from keystreams of a secret that this role does not have:

    t = sum_j c_j x_j  mod  p,    c_j uniform in [0, 2^64),    p = 2^89 - 1

x are the weight and the entries before masks, as signed integers, whose sum does not wrap (`encoding`). So the tags'
sum is the tag of the sum. A change e != 0 of the sum has |e_j| < 2^65 < p, so it passes for one value of c_j at most:
with a chance of 2^-64, whatever is added to the tag. A member of the sum knows c, and can change it.

The tag is masked and blinded like the other tensors, so no role sees one silo's. It travels as t + r p in half words, r
of 64 random bits. So neither their sums, nor what a relay learns by moving them until members refuse, depend on t.
"""

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from moretta.contract.messages import Stamp
from moretta.errors import MisuseError, PeerError
from moretta.secure_aggregation.encoding import CHUNK, EXPONENTS, MOST_WEIGHT, Ring, Words, decode, room_for, shapes_of
from moretta.secure_aggregation.keystream import Extracted, Keystream, derive, derive_once, encode_names, encode_purpose
from moretta.secure_aggregation.sums import Relayed, Sum, Wanted

Label = tuple[str, int, int, int, bytes, bytes]
"""The purpose of one sum: run, round, attempt, take, cohort digest, SHA-256 of its tensors and of the query."""

Mask = tuple[bool, bytes]
"""Whether a mask is added (or subtracted), and the secret key of its keystream."""

ZEROS = bytes(8 * CHUNK)  # also the number of mask bytes that are expanded at once
BLOCK = 4  # multiple of those bytes of an upload that stays in the cache until all masks are added

TAG = "blind tag"
"""The tensor of blinded sums that has the tag; no other may have this name."""

PRIME = 2**89 - 1
TAG_BITS = 160  # of t + r p
CHANGED = "the sum is not that of its silos' uploads: its relay, or a silo, did not follow the protocol; find out which"


def label_of(
    stamp: Stamp, cohort: bytes, shapes: Mapping[str, tuple[int, ...]], encoding: Mapping[str, int], asked: bytes
) -> Label:
    """Return the label of a sum. shapes: by tensor. encoding: from the ask. asked: the query's digest."""
    summed = _summed(tuple(sorted(shapes.items())), tuple(sorted(encoding.items())), asked)
    return stamp.run, stamp.round, stamp.attempt, stamp.take, cohort, summed


@lru_cache(maxsize=8)
def _summed(
    shapes: tuple[tuple[str, tuple[int, ...]], ...], encoding: tuple[tuple[str, int], ...], asked: bytes
) -> bytes:
    """Return the digest of the summands' description, the same for all silos of a sum."""
    parts: list[int | str | bytes] = [asked]
    for name, shape in shapes:
        parts += [name, len(shape), *shape]
    for name, bits in encoding:
        parts += [name, bits]
    return hashlib.sha256(encode_purpose("sum", *parts)).digest()


@lru_cache(maxsize=8)
def begun(kind: str, label: tuple[int | str | bytes, ...]) -> bytes:
    """Return the common start of a sum's or set-up's encoded purposes of one kind, which a silo has per neighbour."""
    return encode_purpose(kind, *label)


def pair_key(seed: Extracted, label: Label, first: str, other: str) -> bytes:
    """Return the key of the mask that two silos share in one sum; it reveals nothing of their other sums."""
    lower, higher = (first, other) if first < other else (other, first)
    return seed.derive_for(begun("mask", label) + encode_names(lower, higher))


def self_key(secret: bytes, label: Label, silo: str) -> bytes:
    """Return the key of the mask that a silo alone knows, from its fresh secret."""
    return derive_once(secret, begun("self-mask", label) + encode_names(silo))


def blind_key(secret: bytes, label: Label, silo: str) -> bytes:
    """Return the key of the keystream by which a silo hides its part of one sum from the role that adds it up."""
    return derive(secret, "blind", *label, silo)


def tag_shape(ring: Ring) -> tuple[int]:
    """Return the shape of `TAG`: half words of the ring, so that the sum of a cohort's does not wrap."""
    return (TAG_BITS // (ring.bits // 2),)


def tag_of(secret: bytes, label: Label, weight: int, tensors: Mapping[str, Words]) -> int:
    """Return the tag of a weight and of tensors but `TAG`, in the order of their names."""
    stream, total = Keystream(derive(secret, "tag", *label)), 0
    for name in ("", *sorted(tensors.keys() - {TAG})):
        words = tensors[name] if name else np.array([weight], dtype=np.uint64)
        flat = words.reshape(-1).view(f"int{8 * words.itemsize}")
        for start in range(0, flat.size, CHUNK):
            integers = flat[start : start + CHUNK].astype("<i8")
            factors = stream.integers(integers.size, 64).astype("<u8", copy=False)
            # Both in limbs of 16 bits, whose products sum exactly in float64. An integer's highest limb has its sign.
            limbs = integers.view("<u2").reshape(-1, 4).astype(np.float64)
            limbs[:, 3] = integers >> 48
            products = limbs.T @ factors.view("<u2").reshape(-1, 4).astype(np.float64)
            total += sum(int(product) << 16 * (i + j) for (i, j), product in np.ndenumerate(products))
    return total % PRIME


def tag_words(ring: Ring, tag: int, secret: bytes) -> Words:
    """Return a tag as `TAG`, its lowest half word first. secret: 32 bytes of the silo's, used once."""
    half, sent = ring.bits // 2, tag + PRIME * int.from_bytes(secret[:8], "little")
    return np.array([sent >> half * i & (1 << half) - 1 for i in range(*tag_shape(ring))], dtype=ring.dtype)


def tag_in(ring: Ring, words: Words | None, silos: int) -> int:
    """Return the tag of a sum of `TAG`. Raises `moretta.errors.PeerError` for what so many silos' cannot be."""
    half = ring.bits // 2
    if words is None or words.shape != tag_shape(ring) or any(int(word) > silos * ((1 << half) - 1) for word in words):
        raise PeerError(CHANGED)
    return sum(int(word) << half * i for i, word in enumerate(words)) % PRIME


def add_masks(words: Words, masks: Sequence[Mask]) -> None:
    """Add masks to an array of the ring, in place.

    It works by blocks that fit a processor's cache, so each mask costs the cipher and one addition.

    Args:
        words: Contiguous uint32 or uint64, of any shape.
    """
    flat, chunk = words.reshape(-1), len(ZEROS) // words.itemsize
    opened = ((np.add if adds else np.subtract, Keystream(key)) for adds, key in masks)
    # Those of a single block are opened one after the other, so that caches stay warm.
    streams = opened if flat.size <= BLOCK * chunk else list(opened)
    mask = np.empty(min(flat.size, chunk), dtype=words.dtype)
    for block in range(0, flat.size, BLOCK * chunk):
        chunks = list[tuple[Words, Words, memoryview, memoryview]]()  # with a mask part of equal length, and its bytes
        for start in range(block, min(block + BLOCK * chunk, flat.size), chunk):
            part = flat[start : start + chunk]
            over = mask[: part.size]
            chunks.append((part, over, over.view(np.uint8).data, memoryview(ZEROS)[: part.nbytes]))
        for combine, stream in streams:
            for part, over, octets, zeros in chunks:
                stream.fill(octets, zeros)
                if sys.byteorder == "big":  # streams are of little-endian numbers
                    over.byteswap(inplace=True)
                combine(part, over, part)


class Labels:
    """The tensors masked since a set-up, once under a stamp; stamps rise, so only the latest one's are kept."""

    def __init__(self, setup: Stamp) -> None:
        self._stamp, self._used = setup, set[str]()

    def use(self, stamp: Stamp, tensors: Iterable[str]) -> None:
        """Mark tensors as used.

        The difference of two uploads under one mask, or of two sums of one tensor over different silos, is bare data.

        Raises:
            MisuseError: A tensor is not fresh, or the stamp is of another run or earlier. Nothing is marked then.
        """
        if stamp.run != self._stamp.run or stamp < self._stamp:
            raise MisuseError(f"expected an upload of this run, not before {self._stamp}; got {stamp}")
        used, names = (self._used if stamp == self._stamp else set()), set(tensors)
        if again := sorted(used & names):
            raise MisuseError(f"{stamp}: {again!r:.200} was uploaded before; a second upload would reveal the first")
        self._stamp, self._used = stamp, used | names


def read(
    ring: Ring,
    relayed: Relayed,
    encoding: Mapping[str, int],
    blind: bytes | None,
    label: Label,
    *,
    public_weights: bool,
) -> Sum:
    """Return the result of a relayed sum: remove the blinds of all silos in it, and decode.

    Raises:
        PeerError: The sum has elements of another ring, other tensors, or an impossible encoding or weight; or it is
            blinded, and its tag is not that of its tensors.
    """
    everything = [relayed.weight, *relayed.tensors.values()]
    if any(words.dtype != ring.dtype for words in everything) or relayed.weight.shape != ():
        raise PeerError(f"expected a sum of elements of Z_2^{ring.bits}")
    if set(encoding) != {*relayed.tensors, MOST_WEIGHT}:
        raise PeerError(f"expected a sum of the tensors {sorted(relayed.tensors)!r:.200}")
    if any(not -EXPONENTS - 60 <= encoding[name] <= EXPONENTS + 64 for name in relayed.tensors):
        raise PeerError("expected fraction bits that a limit leads to")  # others leave float64's range
    whole, tensors = room_for(shapes_of(relayed.tensors), ring)
    whole[0], weight = relayed.weight, whole[0:1].reshape(())
    for name, words in tensors.items():
        words[...] = relayed.tensors[name]
    if blind is not None:
        add_masks(whole[public_weights:], [(False, blind_key(blind, label, silo)) for silo in relayed.silos])
        tag = tag_in(ring, tensors.pop(TAG, None), len(relayed.silos))
        if tag != tag_of(blind, label, int(weight), tensors):
            raise PeerError(CHANGED)
    elif TAG in tensors:
        raise PeerError("expected a sum that is not blinded")
    request = Wanted(shapes_of(tensors), encoding, encoding[MOST_WEIGHT])
    if not len(relayed.silos) <= int(weight) <= request.most_weight:
        raise PeerError(
            f"expected weights that sum to {len(relayed.silos)} to {request.most_weight}, got {int(weight)}; some silo "
            "did not follow the protocol"
        )
    return decode(ring, tensors, int(weight), relayed.silos, request)
