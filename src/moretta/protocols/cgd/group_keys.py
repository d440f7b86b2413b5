"""The keys of a participant's groups, which the relaying aggregator does not have.

At every set-up all participants agree on seeds in pairs (`moretta.secure_aggregation.agreement`). For each group one
member draws a fresh key and seals it for the others. A row's key seals Delta and the digest of its rows' ids; the seed
of two members seals the lists by which they align. A group's key seals D for members that missed steps, and gives the
keystreams that blind its sums.

A group's members follow from the grid that a participant received at the start (`Membership`), never from a request. A
key is for exactly those of the grid's group who agreed on seeds, and the first of them draws it, once a set-up. A
participant refuses all other names that are relayed to it. The grid's digest is in all that follows from a pair's seed,
so two with different grids open no key of each other and share no mask.

No two contents are sealed with one nonce: a sealing key is for one purpose, time and maker, and the nonce follows from
the content. So the same content gives the same bytes, and other content another keystream.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from moretta.contract.messages import Array, Message, Stamp
from moretta.data.holders import Grid
from moretta.errors import MisuseError, PeerError
from moretta.protocols.cgd.layers import Group
from moretta.secure_aggregation.agreement import SetUp
from moretta.secure_aggregation.keystream import Extracted, derive, encode_parts
from moretta.secure_aggregation.masks import Mask, label_of, pair_key

NAME = "everybody"
"""The group of all participants, in the run ids of its messages."""

NONCE_BYTES = 12
KEY_BYTES = 32


def at(now: Stamp, group: str) -> Stamp:
    """Return the stamp of a group at the same round, attempt and take."""
    return replace(now, run=run_of(group, now.run))


def run_of(group: str, run: str) -> str:
    """Return the run id of a group's messages."""
    return f"{group}/{run}"


def row_group(row: str) -> str:
    """Return the name of a grid row's group, which no other group has."""
    return f"row={row}"


def row_groups(grid: Grid) -> dict[str, tuple[str, ...]]:
    """Return the rows of a joint grid as groups. The head comes first, because it draws the row's key."""
    return {
        row_group(row): (grid.heads[row], *(name for name in names if name != grid.heads[row]))
        for row, names in grid.rows.items()
    }


def group_of(stamp: Stamp) -> str:
    """Return the group of a message."""
    return stamp.run.rpartition("/")[0]  # a run's own id has no slash, a row's name may


@dataclass(frozen=True)
class Membership:
    """The members of each group, as every participant received them at the start; public.

    Args:
        grid: Its digest.
        groups: Those with a key, and that of all participants, by name. The first member present draws the key.
    """

    grid: bytes
    groups: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, grid: Grid, groups: Mapping[str, Group], *, joint: bool) -> Membership:
        """Return the membership of groups that share layers, and of a joint grid's rows."""
        sharing = {name: group.members for name, group in groups.items()}
        rows = row_groups(grid) if joint else {}
        return cls(grid.digest(joint=joint), {NAME: tuple(grid.parts), **sharing, **rows})

    def check(self, group: str, names: Collection[str]) -> None:
        """Raise `moretta.errors.PeerError` unless all of these are members of the group."""
        if strangers := set(names) - set(self.groups.get(group, ())):
            raise PeerError(f"expected members of group `{group:.80}`, got {sorted(strangers)!r:.200} too")


class GroupKeys:
    """One participant's keys. set_up: its half of the agreement with all. membership: who may have a key."""

    def __init__(self, me: str, set_up: SetUp, membership: Membership) -> None:
        self._me, self._set_up, self.membership = me, set_up, membership
        self._keys = dict[str, bytes]()  # by group, of this set-up

    def answer(self, message: Message) -> Message | None:
        """Answer a message of the agreement on seeds, which ends the groups' keys; None for any other message."""
        reply = self._set_up.answer(message)
        if reply is not None:
            self._keys.clear()
        return reply

    def draw(self, stamp: Stamp, members: Sequence[str]) -> dict[str, bytes]:
        """Draw the key of the stamp's group, once a set-up; return it sealed for each other member.

        Raises:
            PeerError: The members are not those of the grid's group who agreed on seeds, in order, or another of them
                must draw.
        """
        present = self._present(stamp)
        if tuple(members) != present:
            raise PeerError(
                f"expected a key of group `{group_of(stamp)}` for {list(present)!r:.200}, its members of the grid that "
                f"agreed on seeds; was asked to draw it for {list(members)!r:.200}"
            )
        self._check_maker(stamp, self._me, present)
        if group_of(stamp) not in self._keys:
            about = stamp.run, stamp.round, stamp.attempt, stamp.take
            self._keys[group_of(stamp)] = self._set_up.origin.key("group key", *about)
        key = self._keys[group_of(stamp)]
        return {
            name: _sealed(self._seed(name), key, *_purpose(stamp, "group key", self._me, name)) for name in present[1:]
        }

    def take(self, stamp: Stamp, maker: str, sealed: bytes) -> bool:
        """Open and keep the key of the stamp's group; return whether `maker` sealed it, and no other before.

        Raises:
            PeerError: The maker must not draw it, or is this participant.
        """
        self._check_maker(stamp, maker, self._present(stamp))
        if maker == self._me:
            raise PeerError(f"`{maker}` draws the key of group `{group_of(stamp)}` itself; was handed one")
        try:
            key = _opened(self._seed(maker), sealed, *_purpose(stamp, "group key", maker, self._me))
        except InvalidTag:
            return False
        return len(key) == KEY_BYTES and self._keys.setdefault(group_of(stamp), key) == key

    def key(self, group: str) -> bytes:
        """Return a group's key. Raises `moretta.errors.MisuseError` without one."""
        if group not in self._keys:
            raise MisuseError(f"group `{group}` has no key yet; expected a set-up before")
        return self._keys[group]

    def seal(self, stamp: Stamp, what: str, maker: str, content: bytes) -> Array:
        """Return bytes that only the group's members open, uint8[...]: nonce, content and tag."""
        sealed = _sealed(self.key(group_of(stamp)), content, *_purpose(stamp, what, maker))
        return np.frombuffer(sealed, dtype=np.uint8)

    def open(self, stamp: Stamp, what: str, maker: str, sealed: Array) -> bytes:
        """Return sealed bytes. Raises `moretta.errors.PeerError` if no member sealed them for this purpose."""
        self.membership.check(group_of(stamp), [maker])
        try:
            return _opened(self.key(group_of(stamp)), np.ascontiguousarray(sealed).data, *_purpose(stamp, what, maker))
        except InvalidTag:
            raise PeerError(
                f"`{what}` of group `{group_of(stamp)}` is not as `{maker}` sealed it for {stamp}"
            ) from None

    def seal_for(self, stamp: Stamp, what: str, peer: str, content: bytes) -> Array:
        """Return bytes that only this participant and a peer can open, uint8[...], under their own seed."""
        sealed = _sealed(self._seed(peer), content, *_purpose(stamp, what, self._me, peer))
        return np.frombuffer(sealed, dtype=np.uint8)

    def open_from(self, stamp: Stamp, what: str, peer: str, sealed: Array) -> bytes:
        """Return a peer's sealed bytes. Raises `moretta.errors.PeerError` if it did not seal them for this."""
        try:
            return _opened(self._seed(peer), np.ascontiguousarray(sealed).data, *_purpose(stamp, what, peer, self._me))
        except InvalidTag:
            raise PeerError(f"`{what}` is not as `{peer:.64}` sealed it for `{self._me}` and {stamp}") from None

    def row_masks(self, stamp: Stamp, peers: Sequence[str], shape: tuple[int, ...], fraction_bits: int) -> list[Mask]:
        """Return this participant's masks with others of its row in one sum of z."""
        agreement, _ = self._set_up.agreed
        label = label_of(stamp, agreement.cohort.digest, {"z": shape}, {"z": fraction_bits}, b"")
        return [(self._me < peer, pair_key(Extracted(self._seed(peer)), label, self._me, peer)) for peer in peers]

    def digest(self, stamp: Stamp, ids: Sequence[str]) -> bytes:
        """Return HMAC-SHA256 of ordered ids under the group's key. A relay sees equality, members can guess ids."""
        content = encode_parts(stamp.run, stamp.round, stamp.attempt, stamp.take, *ids)
        return hmac.new(derive(self.key(group_of(stamp)), "ids"), content, hashlib.sha256).digest()

    def _present(self, stamp: Stamp) -> tuple[str, ...]:
        """Return the members of the stamp's group who agreed on seeds, in order; all of them compute the same list.

        Raises `moretta.errors.PeerError` for a stamp of another set-up, or for a group without this one.
        """
        agreement, _ = self._set_up.agreed
        group, setup = group_of(stamp), agreement.setup
        members = self.membership.groups.get(group, ())
        if group == NAME or self._me not in members:
            raise PeerError(f"`{self._me}` is in no group `{group:.80}` that has a key")
        if stamp != replace(setup, run=run_of(group, setup.run.rpartition("/")[2])):
            raise PeerError(f"expected a key of the set-up of {setup}, was asked for one of {stamp} or another run")
        return tuple(name for name in members if name in agreement.cohort.names)

    def _check_maker(self, stamp: Stamp, maker: str, present: Sequence[str]) -> None:
        if maker != present[0]:
            raise PeerError(
                f"expected `{present[0]}` to draw the key of group `{group_of(stamp)}`, the first of its members that "
                f"agreed on seeds; got `{maker:.64}`"
            )

    def _seed(self, peer: str) -> bytes:
        """Return a secret of this participant and a peer, from their seed and the grid."""
        agreement, _ = self._set_up.agreed
        if peer not in agreement.seeds:
            raise PeerError(f"`{self._me}` has agreed on no seed with `{peer:.64}` in this set-up")
        return derive(agreement.seeds[peer], "grid", self.membership.grid)

    def __repr__(self) -> str:
        return f"GroupKeys({self._me!r}, <redacted>)"


def _purpose(stamp: Stamp, what: str, *names: str) -> tuple[int | str, ...]:
    return what, stamp.run, stamp.round, stamp.attempt, stamp.take, *names


def _sealed(secret: bytes, content: bytes, *purpose: int | str) -> bytes:
    """Return the nonce and the content sealed for one purpose. The nonce follows from the content."""
    nonce = derive(secret, "nonce", *purpose, hashlib.sha256(content).digest())[:NONCE_BYTES]
    return nonce + ChaCha20Poly1305(derive(secret, *purpose)).encrypt(nonce, content, None)


def _opened(secret: bytes, sealed: bytes | memoryview, *purpose: int | str) -> bytes:
    """Return what `_sealed` sealed. Raises `cryptography.exceptions.InvalidTag` for other bytes or purposes."""
    if len(sealed) < NONCE_BYTES:
        raise InvalidTag
    cipher = ChaCha20Poly1305(derive(secret, *purpose))
    return cipher.decrypt(bytes(sealed[:NONCE_BYTES]), sealed[NONCE_BYTES:], None)
