"""In a sparse graph: the graph follows from random parts that silos commit to before they see keys.

    server                                     silo k
      AdvertiseCommitted             -->         fresh key pair, and 32 random bytes s_k
                                     <--       CommittedAdvert(public key, H(s_k), signature of both)
      CommittedKeys(all adverts)     -->         checks them
                                     <--       GraphPart(s_k), once for a key pair
      GraphParts(all s_j)            -->         checks each against its H(s_j); seeds with its neighbours
                                     <--       KeysAccepted(cohort digest)

The graph follows from the cohort's digest, which covers all names, keys and parts
(`moretta.secure_aggregation.cohort`). When silo k shows its part, the keys and commitments of its cohort are fixed, and
the part was random and known to nobody. So whoever speaks last, server or silo, can choose nothing: the graph is a fair
draw.

A party that does not like the graph can still vanish, so that the set-up fails and another one begins: another draw.
But each draw takes a set-up of all honest silos. Their logs show it, as each silo shows one part at a stamp, and with a
roster the others' adverts are signed for that stamp. Redrawing keys alone would have taken nobody's help. Without a
roster keys are taken on trust, and a server that makes up silos needs no graph to read an upload.

Differs from the paper: there, the server draws the graph, or, against an active server, each silo draws neighbours of
its own once all have committed to their keys. Here all know one graph, which every mask is bound to.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping

from moretta.contract.messages import Message, Stamp, message
from moretta.errors import PeerError
from moretta.secure_aggregation.keystream import SecretRoot, encode_purpose
from moretta.secure_aggregation.public_keys import check_keys, check_public_key, check_signature_length

PART_BYTES = 32


@message("secure-aggregation/advertise-committed")
class AdvertiseCommitted(Message):
    """Draw a fresh key pair and a part of the graph's seed; send the public key, and commit to the part."""


@message("secure-aggregation/committed-advert")
class CommittedAdvert(Message):
    """As `moretta.secure_aggregation.agreement.KeyAdvert`, with H(s_k), which the signature covers too."""

    public_key: bytes
    signature: bytes
    commitment: bytes

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` for a bad key or signature length, or without a commitment."""
        check_public_key(self.public_key)
        check_signature_length(self.signature)
        _check_lengths("commitment", {"": self.commitment})


@message("secure-aggregation/committed-keys")
class CommittedKeys(Message):
    """The public keys of the whole cohort, their signatures and commitments, by silo."""

    keys: Mapping[str, bytes]
    signatures: Mapping[str, bytes]
    commitments: Mapping[str, bytes]

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless two silos or more have valid, different keys and commitments."""
        check_keys(self.keys, self.signatures)
        if set(self.commitments) != set(self.keys):
            raise PeerError("expected a commitment with each silo's key")
        _check_lengths("commitment", self.commitments)


@message("secure-aggregation/graph-part")
class GraphPart(Message):
    """A silo's part of the graph's seed, 32 bytes."""

    part: bytes

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` for another length."""
        _check_lengths("part", {"": self.part})


@message("secure-aggregation/graph-parts")
class GraphParts(Message):
    """All parts, by silo."""

    parts: Mapping[str, bytes]

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` for a part of another length."""
        _check_lengths("part", self.parts)


MESSAGES = (AdvertiseCommitted, CommittedAdvert, CommittedKeys, GraphPart, GraphParts)


def draw_part(setup: Stamp, me: str, insecure: SecretRoot | None, session: int) -> bytes:
    """Return s_k from the operating system, or from the insecure root that a test gives."""
    if insecure is None:
        return os.urandom(PART_BYTES)
    return insecure.derive("graph part", setup.run, setup.round, setup.attempt, setup.take, me, session)


def commitment(setup: Stamp, silo: str, part: bytes) -> bytes:
    """Return H(s_k), SHA-256 of the set-up, the silo's name and its part, whose 32 random bytes hide it."""
    purpose = "graph commitment", setup.run, setup.round, setup.attempt, setup.take, silo, part
    return hashlib.sha256(encode_purpose(*purpose)).digest()


def check_part(setup: Stamp, silo: str, part: bytes, committed: bytes) -> None:
    """Raise `moretta.errors.PeerError` unless a part is the one that its silo committed to."""
    if not hmac.compare_digest(commitment(setup, silo, part), committed):
        raise PeerError(f"the part of `{silo}` in the graph's seed is not the one it was committed to")


def check_parts(setup: Stamp, parts: Mapping[str, bytes], commitments: Mapping[str, bytes]) -> None:
    """Raise `moretta.errors.PeerError` unless there is each silo's part, and it is the one committed to."""
    if set(parts) != set(commitments):
        raise PeerError("expected the part in the graph's seed of each silo that has committed itself, and no other")
    for silo, part in parts.items():
        check_part(setup, silo, part, commitments[silo])


def _check_lengths(what: str, values: Mapping[str, bytes]) -> None:
    for silo, value in values.items():
        if len(value) != PART_BYTES:
            raise PeerError(
                f"expected a {what} of {PART_BYTES} bytes, got {len(value)}" + (f" of `{silo}`" * bool(silo))
            )
