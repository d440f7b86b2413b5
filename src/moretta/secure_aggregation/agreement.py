"""Key agreement: a secret seed for every two silos of a cohort, by X25519 (RFC 7748) and HKDF-SHA256 (RFC 5869).

    server                              silo
      AdvertiseKey              -->       fresh key pair
                                <--     KeyAdvert(public_key)
      PeerKeys(keys by name)    -->       checks them; one shared secret with every peer
                                <--     KeysAccepted

Keys are fresh at each set-up, come from the operating system, live in memory only, and never follow from a role's
root: a resumed run cannot repeat a mask. The server relays public keys and learns no seed; being active, it could put
its own keys in their place. Identities that sign keys will enter in `Offer.agree`.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from moretta.errors import PeerError
from moretta.keystream import SecretRoot, derive, encode_purpose
from moretta.protocol import Message, Stamp, message

PUBLIC_KEY_BYTES = 32


@message("secure-aggregation/advertise-key")
class AdvertiseKey(Message):
    """Draw a fresh key pair and say its public key."""


@message("secure-aggregation/key-advert")
class KeyAdvert(Message):
    """A silo's public key of this set-up, 32 bytes of X25519."""

    public_key: bytes

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless the key is one that hides something."""
        check_public_key(self.public_key)


@message("secure-aggregation/peer-keys")
class PeerKeys(Message):
    """The public keys of the whole cohort, by silo."""

    keys: Mapping[str, bytes]

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless two silos or more have good keys, all different."""
        if len(self.keys) < 2:
            raise PeerError(f"expected keys of at least 2 silos, got {len(self.keys)}")
        for name, key in self.keys.items():
            try:
                check_public_key(key)
            except PeerError as error:
                raise PeerError(f"silo `{name}`: {error}") from None
        if twins := sharing_a_key(self.keys):
            raise PeerError(f"expected a key of its own for each silo; {twins} have the same")


@message("secure-aggregation/keys-accepted")
class KeysAccepted(Message):
    """The silo has a seed with each of its peers."""


MESSAGES = (AdvertiseKey, KeyAdvert, PeerKeys, KeysAccepted)


def check_public_key(key: bytes) -> None:
    """Raise `moretta.errors.PeerError` for a key that is not 32 bytes, or of low order.

    With a point of low order the shared secret is all zero whatever the other side's key (RFC 7748, section 6.1).
    Any private key shows that, so a constant one is tried.
    """
    if len(key) != PUBLIC_KEY_BYTES:
        raise PeerError(f"expected a public key of {PUBLIC_KEY_BYTES} bytes, got {len(key)}")
    _exchange(X25519PrivateKey.from_private_bytes(bytes(PUBLIC_KEY_BYTES)), key)


def sharing_a_key(keys: Mapping[str, bytes]) -> list[str]:
    """Return the names of silos whose key is another's too."""
    uses = Counter(keys.values())
    return sorted(name for name, key in keys.items() if uses[key] > 1)


def cohort_digest(keys: Mapping[str, bytes]) -> bytes:
    """Return SHA-256 of the names and keys in the order of names, encoded without ambiguity (`encode_purpose`)."""
    parts = [part for name in sorted(keys) for part in (name, keys[name])]
    return hashlib.sha256(encode_purpose("cohort", *parts)).digest()


def pair_seed(secret: bytes, setup: Stamp, cohort: bytes, one: str, other: str) -> bytes:
    """Return HKDF(shared secret, "pair", run, round, attempt, cohort digest, lower name, higher name)."""
    lower, higher = sorted((one, other))
    return derive(secret, "pair", setup.run, setup.round, setup.attempt, cohort, lower, higher)


@dataclass(frozen=True, repr=False)
class Agreement:
    """What a silo holds after a set-up.

    setup: the set-up's stamp. me: the silo's name. cohort: the digest of names and keys. seeds: by peer; secret.
    """

    setup: Stamp
    me: str
    cohort: bytes
    seeds: Mapping[str, bytes]

    @property
    def parties(self) -> int:
        """The number of silos in the cohort."""
        return len(self.seeds) + 1

    def __repr__(self) -> str:
        return f"Agreement({self.me!r}, {self.setup}, {len(self.seeds)} seeds <redacted>)"


class Offer:
    """A silo's key pair of one set-up, until the peers' keys come.

    insecure, session: see `moretta.secure_aggregation.contributor`; None takes the key from the operating system.
    """

    def __init__(self, setup: Stamp, me: str, insecure: SecretRoot | None, session: int) -> None:
        self._setup, self._me = setup, me
        private = os.urandom(32)
        if insecure is not None:
            private = insecure.derive("key agreement", setup.run, setup.round, setup.attempt, me, session)
        self._private = X25519PrivateKey.from_private_bytes(private)
        self.public_key = self._private.public_key().public_bytes_raw()

    def agree(self, peers: PeerKeys) -> Agreement:
        """Return the seeds with all peers. Raises `moretta.errors.PeerError` where the keys are not this set-up's."""
        if peers.stamp != self._setup:
            raise PeerError(f"expected the keys of {self._setup}, got those of {peers.stamp}")
        if peers.keys.get(self._me) != self.public_key:
            raise PeerError(f"expected the own key of `{self._me}` among the cohort's, unchanged")
        digest = cohort_digest(peers.keys)
        others = {name: key for name, key in peers.keys.items() if name != self._me}
        seeds = {
            name: pair_seed(_exchange(self._private, key), self._setup, digest, self._me, name)
            for name, key in others.items()
        }
        return Agreement(self._setup, self._me, digest, seeds)

    def __repr__(self) -> str:
        return f"Offer({self._me!r}, {self._setup}, <redacted>)"


def _exchange(private: X25519PrivateKey, public_key: bytes) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public_key))
    except ValueError:  # cryptography's way to say that the shared secret is all zero
        raise PeerError("expected a public key with a secret of its own, got a point of low order") from None
