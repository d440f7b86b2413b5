"""Checks of a public key and its signature before anybody uses them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from moretta.errors import PeerError

PUBLIC_KEY_BYTES = 32
PROBE = X25519PrivateKey.from_private_bytes(bytes(PUBLIC_KEY_BYTES))  # no secret: it only probes public keys
SIGNATURE_BYTES = 64


def check_public_key(key: bytes) -> None:
    """Raise `moretta.errors.PeerError` for a key that is not 32 bytes, or of low order.

    With a point of low order the shared secret is all zero for any private key (RFC 7748, section 6.1), so a constant
    one is tried.
    """
    if len(key) != PUBLIC_KEY_BYTES:
        raise PeerError(f"expected a public key of {PUBLIC_KEY_BYTES} bytes, got {len(key)}")
    shared_secret(PROBE, key)


def check_signature_length(signature: bytes) -> None:
    """Raise `moretta.errors.PeerError` unless the bytes have a signature's length, or none."""
    if len(signature) not in (0, SIGNATURE_BYTES):
        raise PeerError(f"expected a signature of {SIGNATURE_BYTES} bytes or none, got {len(signature)}")


def check_keys(keys: Mapping[str, bytes], signatures: Mapping[str, bytes]) -> None:
    """Raise `moretta.errors.PeerError` unless at least two silos have valid keys, all different."""
    if len(keys) < 2:
        raise PeerError(f"expected keys of at least 2 silos, got {len(keys)}")
    if set(signatures) != set(keys):
        raise PeerError("expected a signature, or no bytes, with each silo's key")
    for name, key in keys.items():
        try:
            check_public_key(key)
            check_signature_length(signatures[name])
        except PeerError as error:
            raise PeerError(f"silo `{name}`: {error}") from None
    if twins := sharing_a_key(keys):
        raise PeerError(f"expected a key of its own for each silo; {twins} have the same")


def sharing_a_key(keys: Mapping[str, bytes]) -> list[str]:
    """Return the names of silos that share a key with another."""
    uses = Counter(keys.values())
    return sorted(name for name, key in keys.items() if uses[key] > 1)


def shared_secret(private: X25519PrivateKey, public_key: bytes) -> bytes:
    """Return the X25519 shared secret. Raises `moretta.errors.PeerError` for a point of low order."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public_key))
    except ValueError:  # cryptography's way to say that the shared secret is all zero
        raise PeerError("expected a public key with a secret of its own, got a point of low order") from None
