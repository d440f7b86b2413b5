"""The arrows of an alignment. Lists are points of 32 bytes each, or sealed for the partners (`exchange.Channel`)."""

from __future__ import annotations

import numpy as np

from moretta.contract.messages import Array, Message, message
from moretta.errors import PeerError
from moretta.secure_aggregation.asked import check_digest


@message("alignment/blind")
class Blind(Message):
    """Begin an exchange with this partner: list your ids under a fresh secret.

    onward: whether rows that you share with earlier partners are to be listed alone.
    """

    peer: str
    onward: bool


@message("alignment/blinded")
class Blinded(Message):
    """The list, and SHA-256 of the rules by which its ids were normalised."""

    points: Array
    rules: bytes

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless these are bytes and a digest."""
        check_bytes(self.TAG, self.points)
        check_digest(self.TAG, self.rules)


@message("alignment/blind-again")
class BlindAgain(Message):
    """Put your secret on this partner's list too. Fields: see `Blinded`."""

    peer: str
    points: Array
    rules: bytes

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless these are bytes and a digest."""
        check_bytes(self.TAG, self.points)
        check_digest(self.TAG, self.rules)


@message("alignment/blinded-again")
class BlindedAgain(Message):
    """The partner's list under both secrets, in the order that it came in."""

    points: Array

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless these are bytes."""
        check_bytes(self.TAG, self.points)


@message("alignment/match")
class Match(Message):
    """Your list under both secrets, as this partner sent it back: find which rows are shared."""

    peer: str
    points: Array

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless these are bytes."""
        check_bytes(self.TAG, self.points)


@message("alignment/matched")
class Matched(Message):
    """The shared rows are known. kept: for earlier partners, what is left and a digest; bytes as `points` are."""

    kept: Array

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless these are bytes."""
        check_bytes(self.TAG, self.kept)


@message("alignment/narrow")
class Narrow(Message):
    """Keep only these rows of those that you share with `maker`. kept: see `Matched`."""

    maker: str
    kept: Array

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` unless these are bytes."""
        check_bytes(self.TAG, self.kept)


@message("alignment/narrowed")
class Narrowed(Message):
    """The partner keeps only those."""


MESSAGES = (Blind, Blinded, BlindAgain, BlindedAgain, Match, Matched, Narrow, Narrowed)


def check_bytes(tag: str, content: Array) -> None:
    """Raise `moretta.errors.PeerError` unless an array is bytes."""
    if content.dtype != np.uint8 or content.ndim != 1:
        raise PeerError(f"{tag}: expected bytes, got {content.dtype}{list(content.shape)}")
