"""An alignment between files: three that partners exchange, and one of secrets that each keeps until its end.

    A: begin   -- step 1 -->  B: answer
    A: finish  <-- step 2 --
               -- step 3 -->  B: finish

If A then aligns the remaining rows with a third partner, it sends each earlier one a file of the rest (`narrow`). All
are messages of the contract, so bytes are either a valid message or refused.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from moretta.contract.codec import Codec
from moretta.contract.messages import Array, Digest, Message, Octets, Stamp, length, message
from moretta.data.alignment.curve import as_points
from moretta.data.alignment.exchange import check_rules
from moretta.data.alignment.partner import Alignment, IdRules, Listing, Partner, left_of, narrowed
from moretta.errors import CodecError, ParameterError, PeerError, RowsError
from moretta.secure_aggregation.keystream import SecretRoot

M = TypeVar("M", bound=Message)
OTHER = "the other partner"


@message("alignment/step")
class StepFile(Message):
    """The file from one partner to the other: its own list (steps 1 and 2), and the other's list again (2 and 3).

    Attributes:
        rules: SHA-256 of the rules that normalise ids.
        digest: The digest of the alignment, in step 3; empty before.
    """

    number: int
    rules: Digest
    own: Octets
    again: Octets
    digest: Annotated[bytes, length(0, 32)]

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` for the last step without a digest."""
        if self.number == 3 and not self.digest:
            raise PeerError(f"{self.TAG}: expected the digest of the alignment that was found, got none")


@message("alignment/secrets")
class Secrets(Message):
    """The secrets of a partner between its steps: its root, and the other's list under both secrets.

    Attributes:
        earlier: The digest of the alignment that it continues from; empty without one.
    """

    number: int
    root: bytes
    pad_to: int
    rules: Mapping[str, int]
    source: bytes
    earlier: bytes
    theirs: Array


@message("alignment/left")
class LeftFile(Message):
    """The rest of an earlier alignment: its digest, positions in its order, and the later alignment's digest."""

    earlier: bytes
    kept: Array


FILES = (StepFile, Secrets, LeftFile)
_CODEC = Codec(FILES)


class OtherRows(PeerError):
    """The other partner has other shared rows, and the exchange ends."""


class Finished(NamedTuple):
    """The result of `finish`.

    Attributes:
        step: The file for the other partner; None after step 3.
        left: The file for earlier partners; None without an earlier alignment.
        secrets: The own secrets, bound to the other's list. Keep them before you write the rest: they finish with no
            other.
    """

    alignment: Alignment
    step: bytes | None
    left: bytes | None
    secrets: bytes


def begin(
    ids: Sequence[str] | NDArray[np.generic],
    rules: IdRules,
    where: str,
    pad_to: int | None = None,
    earlier: Alignment | None = None,
) -> tuple[bytes, bytes]:
    """Return step 1 and the secrets of the partner that begins. Arguments: see `Listing` and `Partner`."""
    listing, root = Listing(ids, rules, where, earlier), SecretRoot.fresh()
    stamp = Stamp(f"align-{os.urandom(8).hex()}", 0, 0)  # identifies the files of one exchange
    own = Partner(listing, pad_to, root).blind()
    step = StepFile(stamp=stamp, number=1, rules=rules.digest, own=own.reshape(-1), again=_NOTHING, digest=b"")
    return _CODEC.encode(step), _kept(stamp, 1, root, listing, pad_to)


def answer(
    step: bytes, ids: Sequence[str] | NDArray[np.generic], rules: IdRules, where: str, pad_to: int | None = None
) -> tuple[bytes, bytes]:
    """Return step 2 and the secrets of the partner that answers step 1."""
    asked = _read(step, StepFile, 1)
    check_rules(rules, asked.rules, OTHER)
    listing, root = Listing(ids, rules, where), SecretRoot.fresh()
    partner = Partner(listing, pad_to, root)
    own = partner.blind()
    theirs = partner.again(as_points(asked.own.tobytes())).reshape(-1)
    reply = StepFile(stamp=asked.stamp, number=2, rules=rules.digest, own=own.reshape(-1), again=theirs, digest=b"")
    return _CODEC.encode(reply), _kept(asked.stamp, 2, root, listing, pad_to, theirs)


def finish(
    step: bytes,
    secrets: bytes,
    ids: Sequence[str] | NDArray[np.generic],
    where: str,
    earlier: Alignment | None = None,
) -> Finished:
    """Return the alignment from step 2 or 3 and the own secrets.

    Args:
        where: The rows' owner, for errors.
        earlier: The alignment that the exchange continues from.

    Raises:
        RowsError: The ids have changed since the exchange began.
        ParameterError: The exchange began with another earlier alignment.
        PeerError: The step belongs to another exchange, or has another list than an answered one.
        NothingShared: The partners share no id.
        OtherRows: The other partner found other shared rows.
    """
    own = _read(secrets, Secrets)
    got = _read(step, StepFile, own.number + 1)
    if got.stamp != own.stamp:
        raise PeerError(
            "expected a file of the exchange of these secrets, got another exchange's; name one exchange's files"
        )
    rules = IdRules.read({name: bool(value) for name, value in own.rules.items()})
    check_rules(rules, got.rules, OTHER)
    listing = Listing(ids, rules, where, earlier)
    if listing.source != own.source:
        raise RowsError(f"{where}: the ids have changed since the exchange began; begin again, or restore them")
    if own.earlier != (b"" if earlier is None else earlier.digest):
        raise ParameterError(
            f"{where}: the exchange began with another earlier alignment, or without one; name the same (--earlier)"
        )
    partner = Partner(listing, own.pad_to or None, SecretRoot(own.root))
    reply = None
    if own.number == 1:
        again = partner.again(as_points(got.own.tobytes())).reshape(-1)
        if own.theirs.size and not np.array_equal(own.theirs, again):
            raise PeerError("expected the list that was answered before, got another; begin another exchange for it")
        own = replace(own, theirs=again)
    else:
        partner.resume(as_points(own.theirs.tobytes()))
    alignment = partner.match(as_points(got.again.tobytes()))
    if own.number == 1:
        last = StepFile(
            stamp=own.stamp, number=3, rules=rules.digest, own=_NOTHING, again=again, digest=alignment.digest
        )
        reply = _CODEC.encode(last)
    elif got.digest != alignment.digest:
        raise OtherRows("the other partner found other shared rows; begin again, both with the current rows")
    left = None
    if earlier is not None:
        kept = np.frombuffer(left_of(earlier, alignment), np.uint8)
        left = _CODEC.encode(LeftFile(stamp=own.stamp, earlier=earlier.digest, kept=kept))
    return Finished(alignment, reply, left, _CODEC.encode(own))


def begins(secrets: bytes) -> bool:
    """Whether these are the secrets of the partner that began, whose `finish` makes another step."""
    return _read(secrets, Secrets).number == 1


def narrow(alignment: Alignment, left: bytes) -> Alignment:
    """Return the rest of an alignment after its first partner aligned on. Raises PeerError for another's rest."""
    file = _read(left, LeftFile)
    if file.earlier != alignment.digest:
        raise PeerError("expected the remaining rows of this alignment, got those of another")
    return narrowed(alignment, file.kept.tobytes())


_NOTHING = np.empty(0, dtype=np.uint8)


def _kept(
    stamp: Stamp, number: int, root: SecretRoot, listing: Listing, pad_to: int | None, theirs: Array = _NOTHING
) -> bytes:
    return _CODEC.encode(
        Secrets(
            stamp=stamp,
            number=number,
            root=root.reveal(),
            pad_to=pad_to or 0,
            rules={name: int(value) for name, value in asdict(listing.rules).items()},
            source=listing.source,
            earlier=b"" if listing.earlier is None else listing.earlier.digest,
            theirs=theirs,
        )
    )


def _read(data: bytes, kind: type[M], number: int | None = None) -> M:
    try:
        message = _CODEC.decode(data)
    except CodecError:
        message = None
    if not isinstance(message, kind) or (number is not None and getattr(message, "number", None) != number):
        expected = kind.TAG.replace("/", " ") + ("" if number is None else f" {number}")
        raise PeerError(f"expected a file of the {expected}, as `moretta align` writes it; got another")
    return message
