"""What a participant's groups keep among themselves: keys that whoever relays does not have.

All participants agree on seeds in pairs (`moretta.secure_aggregation.agreement`), everybody with everybody, at every
set-up. For each group one member draws a fresh key and seals it for the others. Under a row's key go Delta and the ids
of its rows; under a group's key D for those who missed some, and the keystreams that blind its sums.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from moretta.errors import MisuseError, PeerError
from moretta.keystream import SecretRoot, derive, encode_parts
from moretta.protocol import Array, Message, Stamp
from moretta.secure_aggregation.agreement import SetUp
from moretta.secure_aggregation.masks import Mask, label_of, pair_key

NAME = "everybody"
"""The group of everybody, in the run ids of its messages."""

NONCE = bytes(12)  # of keys that seal one thing and nothing else
KEY_BYTES = 32


def at(now: Stamp, group: str) -> Stamp:
    """Return a group's stamp of the same time."""
    return Stamp(f"{group}/{now.run}", now.round, now.attempt, now.take)


def row_group(row: str) -> str:
    """Return the name of the group that a row of the grid is, unlike that of any other."""
    return f"row={row}"


def group_of(stamp: Stamp) -> str:
    """Return the group that a message is about."""
    return stamp.run.partition("/")[0]


class Keyring:
    """One participant's keys.

    set_up: its half of the agreement with everybody. insecure: for tests only, a root from which groups' keys follow.
    """

    def __init__(self, me: str, set_up: SetUp, insecure: SecretRoot | None, session: int) -> None:
        self._me, self._set_up, self._insecure, self._session = me, set_up, insecure, session
        self._keys = dict[str, bytes]()
        self._sealed = dict[tuple[Stamp, str], bytes]()  # digests of what was sealed under keys used once

    def answer(self, message: Message) -> Message | None:
        """Answer a message of the agreement on seeds, None to any other. Groups' keys are then of the past."""
        reply = self._set_up.answer(message)
        if reply is not None:
            self._keys.clear()
            self._sealed.clear()
        return reply

    def draw(self, stamp: Stamp, members: Sequence[str]) -> dict[str, bytes]:
        """Draw the key of the stamp's group; return it sealed for each of the others.

        Raises `moretta.errors.PeerError` for members that did not agree on seeds.
        """
        agreement, _ = self._set_up.agreed
        if self._me not in members or not set(members) - {self._me} <= agreement.seeds.keys():
            raise PeerError(f"expected a key for members that agreed on seeds, got {sorted(members)!r:.200}")
        key = os.urandom(KEY_BYTES)
        if self._insecure is not None:
            key = self._insecure.derive("group key", stamp.run, stamp.round, stamp.attempt, self._session)
        self._keys[group_of(stamp)] = key
        return {
            name: self._seal(stamp, self._me, name).encrypt(NONCE, key, None) for name in members if name != self._me
        }

    def take(self, stamp: Stamp, maker: str, sealed: bytes) -> bool:
        """Open and keep the key of the stamp's group; return whether `maker` sealed it so."""
        try:
            key = self._seal(stamp, maker, self._me).decrypt(NONCE, sealed, None)
        except InvalidTag:
            return False
        if len(key) == KEY_BYTES:
            self._keys[group_of(stamp)] = key
        return len(key) == KEY_BYTES

    def key(self, group: str) -> bytes:
        """Return a group's key. Raises `moretta.errors.MisuseError` before there is one."""
        if group not in self._keys:
            raise MisuseError(f"group `{group}` has no key yet; expected a set-up before")
        return self._keys[group]

    def seal(self, stamp: Stamp, what: str, maker: str, content: bytes) -> Array:
        """Return bytes that only the group's members open, uint8[...].

        Raises `moretta.errors.MisuseError` for other content under the same stamp and `what`: the key serves once.
        """
        digest = hashlib.sha256(content).digest()
        if self._sealed.setdefault((stamp, what), digest) != digest:
            raise MisuseError(f"{stamp}: `{what}` of `{group_of(stamp)}` was sealed before; it is sealed once")
        return np.frombuffer(self._cipher(stamp, what, maker).encrypt(NONCE, content, None), dtype=np.uint8)

    def open(self, stamp: Stamp, what: str, maker: str, sealed: Array) -> bytes:
        """Return what was sealed. Raises `moretta.errors.PeerError` if it was not sealed so."""
        try:
            return self._cipher(stamp, what, maker).decrypt(NONCE, np.ascontiguousarray(sealed).data, None)
        except InvalidTag:
            raise PeerError(
                f"`{what}` of group `{group_of(stamp)}` is not as `{maker}` sealed it for {stamp}"
            ) from None

    def row_masks(self, stamp: Stamp, peers: Sequence[str], shape: tuple[int, ...], fraction_bits: int) -> list[Mask]:
        """Return the masks that this participant shares with others of its row in one sum of z."""
        agreement, _ = self._set_up.agreed
        label = label_of(stamp, agreement.cohort.digest, {"z": shape}, {"z": fraction_bits}, b"")
        me = self._me
        return [(me < peer, pair_key(agreement.seeds[peer], label, me, peer)) for peer in peers]

    def digest(self, stamp: Stamp, ids: Sequence[str]) -> bytes:
        """Return HMAC-SHA256 of ids in order under the group's key.

        Whoever relays it learns whether two are equal and nothing else; members could test a guess of all ids.
        """
        content = encode_parts(stamp.run, stamp.round, stamp.attempt, *ids)
        return hmac.new(derive(self.key(group_of(stamp)), "ids"), content, hashlib.sha256).digest()

    def _seal(self, stamp: Stamp, maker: str, holder: str) -> ChaCha20Poly1305:
        agreement, _ = self._set_up.agreed
        peer = holder if maker == self._me else maker
        if peer not in agreement.seeds:
            raise PeerError(f"expected a key by a participant that agreed on seeds, got one by `{peer:.64}`")
        seed = agreement.seeds[peer]
        return ChaCha20Poly1305(derive(seed, "group key", stamp.run, stamp.round, stamp.attempt, maker, holder))

    def _cipher(self, stamp: Stamp, what: str, maker: str) -> ChaCha20Poly1305:
        secret = self.key(group_of(stamp))
        return ChaCha20Poly1305(derive(secret, what, stamp.run, stamp.round, stamp.attempt, maker))

    def __repr__(self) -> str:
        return f"Keyring({self._me!r}, <redacted>)"
