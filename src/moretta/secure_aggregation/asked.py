"""What a silo was asked when it uploaded: a digest that must be the same for all silos of a sum.

It is SHA-256 over the message that asked, as decoded, without its stamp and the addressee's own fields (`Message.OWN`),
and over what was agreed before: at the set-up, or under cross-entropy in the message before it. The digest is used
three times. In every mask's label, it keeps uploads to different questions from adding up. Beside the upload, it names
a difference before anything is opened. In the label, it stands under the survivors' signatures. It does not find one
question that is crafted for all silos alike.

The answer's encoding is part of it. If the server chose the rounding steps, sums of the same numbers under different
steps could reveal single ones. So the encoding follows from how many silos play a round, not from how many are present.
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

    digest: 32 bytes. once: the name of what is summed once a run; empty for the upload of a round. whole: whether the
    upload is of the same rows in every take of the round. lasting: whether it depends on rows alone, and so is the same
    in every run. beside: the name of another sum of the same rows, which has to be over the same silos in this run.
    own: a digest of what was sent to this silo alone and its upload depends on; empty where there is
    none, or while it is not known. It differs between silos, so no label has it; the silo keeps it.
    """

    digest: bytes
    once: str = ""
    whole: bool = False
    lasting: bool = False
    beside: str = ""
    own: bytes = b""


def asked(
    message: Message, *agreed: bytes, once: str = "", whole: bool = False, lasting: bool = False, beside: str = ""
) -> Asked:
    """Return the `Asked` of an upload that answers this message. agreed: digests of what was agreed on before."""
    digest = hashlib.sha256(encode_purpose("asked", message_digest(message), *agreed)).digest()
    return Asked(digest, once, whole, lasting, beside)


def message_digest(message: Message) -> bytes:
    """Return SHA-256 of a message's tag and fields, without its stamp and its addressee's own fields.

    It is computed once for a message that goes to all silos of a process.
    """
    found: bytes | None = getattr(message, "_digest", None)
    if found is None:
        digest = hashlib.sha256(encode_purpose("message", message.TAG))
        for name in sorted(set(message.KINDS) - message.OWN):
            digest.update(encode_parts(name))
            _add(digest, getattr(message, name))
        found = digest.digest()
        object.__setattr__(message, "_digest", found)  # the message is frozen, so its digest never changes
    return found


def check_digest(tag: str, digest: bytes) -> None:
    """Raise `moretta.errors.PeerError` for bytes that cannot be a digest by SHA-256."""
    if len(digest) != BYTES:
        raise PeerError(f"{tag}: expected a digest of {BYTES} bytes, got {len(digest)}")


def _add(digest: hashlib._Hash, value: Any) -> None:
    """Add a field's value: a prefix for its kind, then lengths before contents."""
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
