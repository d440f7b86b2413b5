"""What a silo was asked when it uploaded: a digest that all silos of a sum must have alike.

SHA-256 goes over the message that asked, as it was decoded, without its stamp and without the fields that are the
addressee's own (`Message.OWN`), and over what was agreed on before: at the set-up, under cross-entropy in the message
before it. It is part of every mask's label, so that uploads to different questions do not add up; it travels beside
the upload, so that a difference is named before anything is opened; and it stands, in the label, under the survivors'
signatures. One question that is crafted for all silos alike is not found by it.

How the answer is encoded is part of it: of sums of the same numbers, rounded to steps of a server's choice, single ones
could be told. So an encoding follows from how many silos play a round, and not from how many are there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moretta.contract.messages import Message
from moretta.errors import PeerError
from moretta.secure_aggregation.keystream import encode_parts, encode_purpose

BYTES = 32


@dataclass(frozen=True)
class Asked:
    """What an upload answers.

    digest: 32 bytes. once: the name of what is summed once a run, and nothing for the upload of a round. whole: whether
    the upload is of the same rows in every take of the round. lasting: whether it is of rows alone, and so the same in
    every run. own: a digest of what was sent to this silo alone and its upload depends on; nothing where there is none,
    or while it is not known. No label may have it, as it differs from silo to silo; the silo keeps it.
    """

    digest: bytes
    once: str = ""
    whole: bool = False
    lasting: bool = False
    own: bytes = b""


def asked(message: Message, *agreed: bytes, once: str = "", whole: bool = False, lasting: bool = False) -> Asked:
    """Return what an upload that answers this message answers. agreed: digests of what was agreed on before."""
    digest = hashlib.sha256(encode_purpose("asked", message_digest(message), *agreed)).digest()
    return Asked(digest, once, whole, lasting)


def message_digest(message: Message) -> bytes:
    """Return SHA-256 of a message's tag and fields, without its stamp and what is its addressee's own.

    It is computed once for a message that goes to all silos of a process.
    """
    found: bytes | None = getattr(message, "_digest", None)
    if found is None:
        digest = hashlib.sha256(encode_purpose("message", message.TAG))
        for name in sorted(set(message.KINDS) - message.OWN):
            digest.update(encode_parts(name))
            _add(digest, getattr(message, name))
        found = digest.digest()
        object.__setattr__(message, "_digest", found)  # frozen: the fields it is of never change
    return found


def check_digest(tag: str, digest: bytes) -> None:
    """Raise `moretta.errors.PeerError` for what cannot be the digest of what was asked."""
    if len(digest) != BYTES:
        raise PeerError(f"{tag}: expected a digest of {BYTES} bytes of what was asked, got {len(digest)}")


def _add(digest: hashlib._Hash, value: Any) -> None:
    """Add a field's value. Kinds have different beginnings, and lengths stand before contents."""
    match value:
        case np.ndarray():
            little = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
            digest.update(encode_parts("array", little.dtype.str, str(value.shape)))
            digest.update(little.reshape(-1).view(np.uint8).data)
        case Mapping():
            digest.update(encode_parts("mapping", len(value)))
            for name in sorted(value):
                digest.update(encode_parts(name))
                _add(digest, value[name])
        case tuple():
            digest.update(encode_parts("names", len(value), *value))
        case float():
            digest.update(encode_parts("number", value.hex()))
        case _:  # a whole number, a boolean, text or bytes
            digest.update(encode_parts("plain", value))
