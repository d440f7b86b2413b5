"""Masks: keystreams that are added to uploads in the ring, and the labels that they are bound to.

An upload is masked in one pass over its weight and then its tensors in the order of their names, by one stream of
AES-128-CTR for each neighbour and one for the silo itself. Every stream's key is bound to the sum's `Label`: run,
round, attempt, take, the cohort's digest (names, keys and graph), the names, shapes and encoding of all tensors, and
the digest of what was asked (`moretta.secure_aggregation.asked`). A server might ask one silo for another encoding, so
that the others' parts round to nothing beside it, or send it another model. Its masks then do not cancel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from moretta.contract.messages import Stamp
from moretta.errors import MisuseError
from moretta.secure_aggregation.keystream import Keystream, derive, encode_purpose
from moretta.secure_aggregation.ring import CHUNK, Words

Label = tuple[str, int, int, int, bytes, bytes]
"""What one sum is about: run, round, attempt, take, cohort digest, SHA-256 of its tensors and of what was asked."""

Mask = tuple[bool, bytes]
"""Whether a mask is added (or subtracted), and the secret key of its keystream."""

ZEROS = bytes(8 * CHUNK)


def label_of(
    stamp: Stamp, cohort: bytes, shapes: Mapping[str, tuple[int, ...]], encoding: Mapping[str, int], asked: bytes
) -> Label:
    """Return the label of a sum. shapes: by tensor. encoding: as the ask carries it. asked: its digest."""
    parts: list[int | str | bytes] = [asked]
    for name in sorted(shapes):
        parts += [name, len(shapes[name]), *shapes[name]]
    for name in sorted(encoding):
        parts += [name, encoding[name]]
    summed = hashlib.sha256(encode_purpose("sum", *parts)).digest()
    return stamp.run, stamp.round, stamp.attempt, stamp.take, cohort, summed


def pair_key(seed: bytes, label: Label, one: str, other: str) -> bytes:
    """Return the key of the mask that two silos share in one sum; it reveals nothing of their other sums."""
    lower, higher = sorted((one, other))
    return derive(seed, "mask", *label, lower, higher)


def self_key(secret: bytes, label: Label, silo: str) -> bytes:
    """Return the key of the mask that a silo alone knows, from its fresh secret."""
    return derive(secret, "self-mask", *label, silo)


def blind_key(secret: bytes, label: Label, silo: str) -> bytes:
    """Return the key of the keystream by which a silo hides its part of one sum from whoever adds it up."""
    return derive(secret, "blind", *label, silo)


def add_masks(words: Sequence[Words], masks: Sequence[Mask]) -> None:
    """Add masks to arrays of one ring, in place, as if the arrays were one.

    words: contiguous uint32 or uint64, of any shapes. It works by chunks that fit a processor's cache, so each mask
    costs the cipher and one addition.
    """
    streams = [(np.add if adds else np.subtract, Keystream(key)) for adds, key in masks]
    buffer = np.empty(CHUNK, dtype=words[0].dtype)
    for array in words:
        flat = array.reshape(-1)
        for start in range(0, flat.size, CHUNK):
            part = flat[start : start + CHUNK]
            mask = buffer[: part.size]
            for combine, stream in streams:
                stream.fill(mask, ZEROS)
                combine(part, mask, out=part)


class Labels:
    """The tensors that were masked since a set-up; each may be masked once under a stamp.

    Stamps only go forward, so it keeps the tensors of the latest stamp alone.
    """

    def __init__(self, setup: Stamp) -> None:
        self._stamp, self._used = setup, set[str]()

    def use(self, stamp: Stamp, tensors: Iterable[str]) -> None:
        """Mark tensors as used. Raises `moretta.errors.MisuseError`, and marks nothing, if one is not fresh.

        The difference of two uploads under one mask, or of two sums of one tensor over different silos, is bare data.
        """
        if stamp.run != self._stamp.run or stamp < self._stamp:
            raise MisuseError(f"expected an upload of this run, not before {self._stamp}; got {stamp}")
        used, names = (self._used if stamp == self._stamp else set()), set(tensors)
        if again := sorted(used & names):
            raise MisuseError(f"{stamp}: {again!r:.200} was uploaded before; a second upload would reveal the first")
        self._stamp, self._used = stamp, used | names
