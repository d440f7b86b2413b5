"""The source of secret randomness: one root per role, named derivations, and a stream cipher.

    root (32 bytes of the operating system)
      └─ HKDF-SHA256(root, purpose) ── a key of 32 bytes for one purpose
           └─ AES-128-CTR ── pseudorandom bytes of any number, the same on every machine

A purpose is a list of whole numbers, texts and bytes, encoded without ambiguity and bound to this format's version, so
that keys for two purposes are independent. Nothing here is ever derived from a training seed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from moretta.contract.lazy_rows import blocks
from moretta.errors import ParameterError

VERSION = b"moretta/1"
KEY_BYTES = 32
BLOCK_BYTES = 64  # of SHA-256's input
PADDED = tuple(bytes(byte ^ pad for byte in range(256)) for pad in (0x36, 0x5C))  # HMAC's inner and outer pad


def encode_purpose(*purpose: int | str | bytes) -> bytes:
    """Encode a purpose so that different purposes have different encodings.

    Each part is a letter for its type, its length as 4 bytes big-endian, and its bytes; numbers are 8 bytes
    big-endian, signed.
    """
    return VERSION + encode_parts(*purpose)


def encode_parts(*purpose: int | str | bytes) -> bytes:
    """Encode the parts of a purpose, which follow the version."""
    return b"".join(map(_part, purpose))


@lru_cache(maxsize=1 << 14)
def encode_names(*names: str) -> bytes:
    """Encode silos' names as `encode_parts` does, once: a round uses them often. No name may be secret."""
    return encode_parts(*names)


def _part(part: int | str | bytes) -> bytes:
    if isinstance(part, int):
        return b"i\x00\x00\x00\x08" + part.to_bytes(8, "big", signed=True)
    kind, content = (b"s", part.encode()) if isinstance(part, str) else (b"b", part)
    return kind + len(content).to_bytes(4, "big") + content


def digest_of(tensors: Mapping[str, NDArray[Any]]) -> bytes:
    """Return SHA-256 over named arrays in the order of their names: names, dtypes, shapes and values, as a purpose."""
    digest = hashlib.sha256()
    for name, array in sorted(tensors.items()):
        digest.update(encode_parts(name, array.dtype.str, str(array.shape)))
        for block in blocks(array):
            digest.update(np.ascontiguousarray(block).data)
    return digest.digest()


def derive(secret: bytes, *purpose: int | str | bytes) -> bytes:
    """Derive a key of 32 bytes for one purpose by HKDF-SHA256 without salt.

    Args:
        secret: At least 16 bytes with the entropy of a key (a root, or the output of a key agreement).

    Source: RFC 5869.
    """
    return derive_once(secret, encode_purpose(*purpose))


def derive_once(secret: bytes, purpose: bytes) -> bytes:
    """Return what `derive` does, for an encoded purpose."""
    extracted = hmac.digest(bytes(KEY_BYTES), secret, "sha256")
    return hmac.digest(extracted, purpose + b"\x01", "sha256")


class Extracted:
    """A secret after the first of HKDF's two steps, extract and expand, from which many keys are derived.

    A masked round of 100 silos derives 4,000 keys of masks from as many seeds. So HMAC (RFC 2104) is kept as its two
    begun digests: half the time of an object of `hmac`. The representation is redacted.
    """

    def __init__(self, secret: bytes) -> None:
        key = hmac.digest(bytes(KEY_BYTES), secret, "sha256").ljust(BLOCK_BYTES, b"\0")
        self._inner, self._outer = (hashlib.sha256(key.translate(padded)) for padded in PADDED)

    def derive_for(self, purpose: bytes) -> bytes:
        """Return what `derive` does, for an encoded purpose."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(purpose + b"\x01")  # the first block of output, which is all of it
        outer.update(inner.digest())
        return outer.digest()

    def __repr__(self) -> str:
        return "Extracted(<redacted>)"


class SecretRoot:
    """The 32 bytes from which a role derives all secret randomness that its run's result depends on.

    They are drawn from the operating system and kept only in the role's own checkpoint. The representation is redacted.
    """

    def __init__(self, root: bytes) -> None:
        if len(root) != KEY_BYTES:
            raise ParameterError(f"secret root: expected {KEY_BYTES} bytes, got {len(root)}")
        self._root = root

    @classmethod
    def fresh(cls) -> SecretRoot:
        """Draw a root from the operating system."""
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def insecure(cls, seed: int, role: str) -> SecretRoot:
        """Return a root that follows from a seed: for tests that compare transcripts."""
        return cls(derive(b"insecure secret seed", seed, role))

    def derive(self, *purpose: int | str | bytes) -> bytes:
        """Return the key of 32 bytes for one purpose."""
        return derive(self._root, *purpose)

    def stream(self, *purpose: int | str | bytes) -> Keystream:
        """Return the pseudorandom stream for one purpose."""
        return Keystream(self.derive(*purpose))

    def reveal(self) -> bytes:
        """Return the root itself, for the role's own checkpoint only."""
        return self._root

    def __repr__(self) -> str:
        return "SecretRoot(<redacted>)"


class Keystream:
    """AES-128 in counter mode under a derived key: bytes 0-15 are the AES key, 16-31 the first counter block.

    Integers are little-endian on every machine. A stream is read once, from front to back.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ParameterError(f"keystream key: expected {KEY_BYTES} bytes, got {len(key)}")
        self._cipher = Cipher(algorithms.AES(key[:16]), modes.CTR(key[16:])).encryptor()

    def octets(self, count: int) -> NDArray[np.uint8]:
        """Return the next `count` bytes, uint8[count]."""
        stream = np.zeros(count, dtype=np.uint8)
        self._cipher.update_into(stream.data, stream.data)
        return stream

    def fill(self, octets: memoryview, zeros: memoryview) -> None:
        """Overwrite bytes with the next of the stream: `octets` without an allocation. zeros: as many zero bytes."""
        self._cipher.update_into(zeros, octets)

    def integers(self, count: int, bits: int) -> NDArray[np.unsignedinteger]:
        """Return `count` uniform integers of 8, 16, 32 or 64 bits, uint<bits>[count]."""
        little = np.dtype(f"<u{bits // 8}")
        return self.octets(count * little.itemsize).view(little).astype(little.newbyteorder("="), copy=False)

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Return `count` uniform numbers in [0, 1) with 53 random bits each, float64[count]."""
        return (self.integers(count, 64) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def normal(self, count: int) -> NDArray[np.float64]:
        """Return `count` standard normal numbers by Box and Muller's transform, float64[count]."""
        pairs = -(-count // 2)
        radius = np.sqrt(-2.0 * np.log1p(-self.uniform(pairs)))  # log1p(-u): u may be 0, 1 - u may not
        angle = 2.0 * np.pi * self.uniform(pairs)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]

    def permutation(self, count: int) -> NDArray[np.int64]:
        """Return a uniform permutation of range(count), int64[count]: the order of `count` random 64-bit integers.

        Two equal integers (chance below count^2 / 2^65) keep their order, an invisible bias.
        """
        return np.argsort(self.integers(count, 64), kind="stable")

    def __repr__(self) -> str:
        return "Keystream(<redacted>)"
