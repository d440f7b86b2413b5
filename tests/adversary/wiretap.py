"""What honest silos say, as equations, and what the coalition makes of them.

The judge of the lists listens inside the silos: which upload went under which masks and shares, and which bytes make
these up. So he has a true equation of everything that a silo sent. The coalition takes off the masks that it knows: by
the bytes that honest silos gave away, and by what its own silos hold. What is left without masks is checked against
the uploads, number by number, so no row that the judge counts is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import pytest
from equations import MODULUS, Equation, alone, without
from numpy.typing import NDArray

from moretta.contract.messages import Message, Stamp
from moretta.protocols.common.batches import Batches
from moretta.protocols.pbpfl.messages import Predictions
from moretta.secure_aggregation import additive, keyed_sums, pairwise, shamir, unmasking
from moretta.secure_aggregation.agreement import KeysAccepted, PeerKeys
from moretta.secure_aggregation.masks import TAG, add_masks
from moretta.secure_aggregation.unmasking import SelfMaskShares

ALIKE = 1e-6  # uploads that differ by less of their largest entry tell each other
Words = NDArray[np.uint64]


@dataclass(frozen=True)
class Unknown:
    """What a silo uploads of the same rows and the same model, whenever it does: the `number`th of its uploads."""

    silo: str
    number: int

    def __repr__(self) -> str:
        return f"upload {self.number} of {self.silo}"


@dataclass(eq=False)
class Upload:
    """One upload. words: before it was hidden. hidden: and after, under masks, which are keys with their signs.

    passed: what was predicted before, under PBPFL's cross-entropy; it tells the forward pass.
    """

    unknown: Unknown
    words: Words
    hidden: Words
    asked: Message
    passed: bytes
    masks: dict[bytes, int] = field(default_factory=dict)


class Wiretap:
    """allies: the silos whose secrets the coalition has."""

    def __init__(self, allies: str) -> None:
        self.allies, self._speaking = allies, ""
        self._agreed = dict[tuple[str, str], list[str]]()  # with whom a silo has keys, by silo and run (or its group)
        self.equations = list[Equation]()  # of uploads, masks and shares, as honest silos sent them
        self.model = 0.0  # the number of the model that is asked about
        self._drawn = dict[str, NDArray[np.int64]]()  # the rows of the batch that a silo took last
        self._passed = dict[str, bytes]()
        self.predicted = dict[tuple[str, str], set[bytes]]()  # by silo, and by run, round and take
        self._upload: Upload | None = None  # that is being made
        self._tag = slice(0)  # where its tag is, which comes after its other words
        self._split = dict[tuple[str, Stamp], Upload]()  # into additive shares
        self._alike = dict[str, list[tuple[NDArray[np.float64], ...]]]()
        self._ends = dict[bytes, set[str]]()  # of a mask, by key
        self._secrets = dict[bytes, bytes]()  # of a self-mask, by key
        self._shares = dict[bytes, tuple[int, dict[str, bytes]]]()  # threshold, and shares by holder, by secret
        self._opened = dict[bytes, Words]()  # additive shares as they travel, and what is in them
        self._said = set[bytes]()  # by honest silos

    @contextmanager
    def listening(self, silo: str, asked: Message) -> Iterator[None]:
        """What is made in here is this silo's answer."""
        self._speaking, self._asked, self._upload = silo, asked, None
        try:
            yield
        finally:
            self._speaking = ""

    def heard(self, silo: str, asked: Message, reply: Message) -> None:
        """Take down what a reply says: of an honest silo, as the coalition knows the others' secrets anyway."""
        if isinstance(asked, PeerKeys) and isinstance(reply, KeysAccepted):
            self._agreed[silo, asked.stamp.run] = sorted(asked.keys)
        if silo in self.allies:
            return
        self._said |= set(_octets(reply))
        if isinstance(reply, Predictions):
            self._passed[silo] = reply.z.round(5).tobytes()
            self.predicted.setdefault((silo, _without_attempt(asked.stamp)), set()).add(self._passed[silo])
        when = frozenset([(asked.stamp.run, asked.stamp.round)])
        if isinstance(reply, additive.AddedShares) and reply.words.size:
            made = self._split[silo, asked.stamp]
            given = {share.tobytes(): 1 for share in asked.shares.values()}
            self.equations.append(Equation({made: 1, **made.masks, **given}, reply.words, when))
        elif (made := self._upload) is not None and isinstance(reply, additive.SealedShares):
            made.masks |= {share.tobytes(): MODULUS - 1 for share in reply.shares.values()}
            self._split[silo, asked.stamp] = made
        elif made is not None and isinstance(reply, pairwise.MaskedUpload):
            self.equations.append(Equation({made: 1, **made.masks}, made.hidden, when))

    # What the coalition makes of it

    def sums(self) -> list[Equation]:
        """Return equations of uploads alone, all that follow; each is checked against the uploads themselves."""
        bare = [self._unmasked(one) for one in self.equations]
        masks = dict.fromkeys(name for one in bare for name in one.coefficients if isinstance(name, bytes))
        found = without(bare, masks)
        for one in found:
            true = sum((made.words * np.uint64(c) for made, c in one.coefficients.items()), np.zeros(1, np.uint64))
            assert np.array_equal(one.data, true), "the coalition's arithmetic is wrong, and with it this test"
        return found

    def rows(self) -> list[Equation]:
        """Return the sums as equations of what is unknown: equal uploads are one unknown."""
        found = []
        for one in self.sums():
            row = Equation({}, None, one.of)
            for made, coefficient in one.coefficients.items():
                row = row.plus(Equation({made.unknown: coefficient}))
            found.append(row)
        return found

    def _unmasked(self, one: Equation) -> Equation:
        """Return an equation less the masks that the coalition knows."""
        assert one.data is not None
        for name, coefficient in one.coefficients.items():
            if isinstance(name, bytes) and (mask := self._mask(name, one.data.size)) is not None:
                one = one.plus(Equation({name: 1}, mask).times(-coefficient))
        return one

    def _mask(self, name: bytes, size: int) -> Words | None:
        """Return a mask, or what is in a share, where the coalition knows it."""
        if not self._knows(name):
            return None
        if name in self._opened:
            return self._opened[name]
        mask = np.zeros(size, np.uint64)
        add_masks(mask, [(True, name)])
        return mask

    def _knows(self, name: bytes) -> bool:
        if name in self._said or self._ends.get(name, set()) & set(self.allies):
            return True
        secret = self._secrets.get(name)
        if secret is None or secret in self._said:
            return secret is not None
        threshold, shares = self._shares[secret]
        return sum(holder in self.allies or share in self._said for holder, share in shares.items()) >= threshold

    # Where the judge listens

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Listen until the patch is undone."""
        patch.setattr(keyed_sums, "encode", self._on_encode(keyed_sums.encode))
        patch.setattr(keyed_sums, "tag_words", self._on_tag(keyed_sums.tag_words))
        patch.setattr(keyed_sums, "blind_key", self._on_key(keyed_sums.blind_key, lambda *_: set(self._members())))
        for scheme in (pairwise, additive):
            patch.setattr(scheme, "add_masks", self._on_masks(scheme.add_masks))
        patch.setattr(pairwise, "pair_key", self._on_key(pairwise.pair_key, lambda *parts: set(parts[-2:])))
        patch.setattr(unmasking, "self_key", self._on_self_key(unmasking.self_key))
        patch.setattr(shamir, "share", self._on_share(shamir.share))
        patch.setattr(additive, "_seal", self._on_seal(additive._seal))
        patch.setattr(Batches, "of_round", self._on_batch(Batches.of_round))

    def _members(self) -> list[str]:
        """Return who agreed on keys with the silo that is speaking, in the run or group that it speaks of."""
        return self._agreed[self._speaking, self._asked.stamp.run]

    def _on_encode(self, real: Any) -> Any:
        def encode(ring: Any, tensors: Mapping[str, Any], weight: int, *rest: Any) -> Any:
            encoded = real(ring, tensors, weight, *rest)
            _, words = encoded
            if self._speaking:
                parts = (words[name].reshape(-1) for name in sorted(words))
                whole, passed = np.concatenate([[np.uint64(weight)], *parts]), self._passed.get(self._speaking, b"")
                self._upload = Upload(self._unknown(weight, tensors), whole, whole, self._asked, passed)
                begin = 1 + sum(words[name].size for name in words if name < TAG)
                self._tag = slice(begin, begin + words[TAG].size) if TAG in words else slice(0)
            return encoded

        return encode

    def _on_tag(self, real: Any) -> Any:
        def tag_words(*parts: Any) -> Words:
            made: Words = real(*parts)
            if self._upload is not None:
                self._upload.words[self._tag] = made
            return made

        return tag_words

    def _unknown(self, weight: int, tensors: Mapping[str, Any]) -> Unknown:
        """Return the silo's unknown that is nearly the same, or a new one.

        PBPFL's uploads are under a key, and the server knows the keys: they are the same if rows and model are.
        """
        parts: tuple[NDArray[Any], ...] = (
            np.atleast_1d(weight), *(np.asarray(tensors[name]) * float(weight) for name in sorted(tensors))
        )  # fmt: skip
        if self._asked.TAG.startswith("pbpfl/"):
            parts = (np.array([self.model]), self._drawn[self._speaking])
        earlier = self._alike.setdefault(self._speaking, [])
        number = next((number for number, other in enumerate(earlier) if _alike(parts, other)), len(earlier))
        if number == len(earlier):
            earlier.append(tuple(np.array(part, dtype=np.float64) for part in parts))
        return Unknown(self._speaking, number)

    def _on_batch(self, real: Any) -> Any:
        def of_round(batches: Batches, *parts: int) -> NDArray[np.int64]:
            rows: NDArray[np.int64] = real(batches, *parts)
            self._drawn[self._speaking] = rows
            return rows

        return of_round

    def _on_masks(self, real: Any) -> Any:
        def add_masks(words: Words, masks: Sequence[tuple[bool, bytes]]) -> None:
            real(words, masks)
            if self._upload is not None:
                self._upload.masks = {key: 1 if adds else MODULUS - 1 for adds, key in masks}
                self._upload.hidden = words.reshape(-1).copy()

        return add_masks

    def _on_key(self, real: Any, ends: Any) -> Any:
        def key(*parts: Any) -> bytes:
            made: bytes = real(*parts)
            self._ends[made] = ends(*parts)
            return made

        return key

    def _on_self_key(self, real: Any) -> Any:
        def self_key(secret: bytes, *parts: Any) -> bytes:
            made: bytes = real(secret, *parts)
            self._secrets[made] = secret
            return made

        return self_key

    def _on_share(self, real: Any) -> Any:
        def share(secret: bytes, threshold: int, points: Sequence[int], *random: Any) -> dict[int, bytes]:
            made: dict[int, bytes] = real(secret, threshold, points, *random)
            names = self._members()
            self._shares[secret] = threshold, {names[point - 1]: share for point, share in made.items()}
            return made

        return share

    def _on_seal(self, real: Any) -> Any:
        tap = self

        class Seal:
            def __init__(self, *parts: Any) -> None:
                self.real, self.ends = real(*parts), set(parts[-2:])
                self.decrypt = self.real.decrypt

            def encrypt(self, nonce: bytes, content: Any, more: None) -> bytes:
                sealed: bytes = self.real.encrypt(nonce, content, more)
                tap._ends[sealed], tap._opened[sealed] = self.ends, np.frombuffer(bytes(content), dtype="<u8")
                return sealed

        return Seal


def leaks(rows: Sequence[Equation], *, within_rounds: bool = False) -> dict[Any, list[Equation]]:
    """Return what is one honest silo's alone, by silo: one upload of its, or several against each other.

    within_rounds: that follows from sums of one round, and not only of several together.
    """
    found = dict[Any, list[Equation]]()
    for when in {one.of for one in rows} if within_rounds else [None]:
        together = [one for one in rows if when in (None, one.of)]
        found |= alone(together, lambda unknown: unknown.silo)  # type: ignore[attr-defined]
    return found


def _alike(parts: tuple[NDArray[Any], ...], others: tuple[NDArray[Any], ...]) -> bool:
    if [part.shape for part in parts] != [part.shape for part in others]:
        return False
    pairs = zip(parts, others, strict=True)
    return all(np.abs(one - other).max(initial=0) <= ALIKE * np.abs(other).max(initial=0) for one, other in pairs)


def _without_attempt(stamp: Stamp) -> str:
    return str({**asdict(stamp), "attempt": None})


def _octets(reply: Message) -> Iterator[bytes]:
    if isinstance(reply, SelfMaskShares):
        yield from reply.by_maker.values()
    for one in fields(reply):
        value = getattr(reply, one.name)
        if isinstance(value, bytes):
            yield value
        elif isinstance(value, Mapping):
            yield from (part for part in value.values() if isinstance(part, bytes))
