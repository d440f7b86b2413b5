"""An alignment as an exchange of the contract: its relay, and the partners' answers.

A relay cannot read the lists: their points are under secrets that it does not have. Where the partners share a key
(`Channel`), it does not even see the points.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array, Digest, Message, Octets, Stamp, message
from moretta.contract.roles import Aborted, Ask, Exchange, Replies
from moretta.data.alignment.curve import Points, as_points
from moretta.data.alignment.partner import Alignment, IdRules, Listing, Partner, left_of, narrowed
from moretta.errors import MisuseError, ParameterError, PeerError
from moretta.secure_aggregation.keystream import SecretRoot
from moretta.secure_aggregation.one_sum import Answers


class Channel(Protocol):
    """The partners' means of writing to each other through a relay."""

    def seal(self, stamp: Stamp, what: str, maker: str, content: bytes, /) -> Array:
        """Return bytes for the partners, uint8[bytes]."""

    def open(self, stamp: Stamp, what: str, maker: str, sealed: Array, /) -> bytes:
        """Return the content of sealed bytes. Raises `moretta.errors.PeerError` if no partner sealed them for this."""

    def seal_for(self, stamp: Stamp, what: str, peer: str, content: bytes, /) -> Array:
        """Return bytes for one partner, which no other opens, uint8[bytes]."""

    def open_from(self, stamp: Stamp, what: str, peer: str, sealed: Array, /) -> bytes:
        """Return content that a partner sealed for this one. Raises `moretta.errors.PeerError` as `open` does."""


class InClear:
    """A channel that seals nothing, for partners without a relay, or all in one process."""

    def seal(self, stamp: Stamp, what: str, maker: str, content: bytes) -> Array:
        """Return the bytes unchanged."""
        return np.frombuffer(content, dtype=np.uint8)

    def open(self, stamp: Stamp, what: str, maker: str, sealed: Array) -> bytes:
        """Return the bytes unchanged."""
        return sealed.tobytes()

    seal_for, open_from = seal, open


def relay(now: Stamp, names: Sequence[str]) -> Exchange[Aborted | None]:
    """Relay the alignment of two or more partners: the first with the second, the rest with the third, and so on.

    All then have an `Alignment` of the same rows (`Aligner.alignment`).
    """
    first, *others = names
    for place, other in enumerate(others):
        matched = yield from _pair(now, first, other, onward=place > 0)
        if isinstance(matched, Aborted):
            return matched
        if place:
            narrow = Narrow(stamp=now, maker=first, kept=matched.kept)
            replies = yield Ask.all(others[:place], narrow, Narrowed)
            if replies.missing:
                return Aborted(replies.missing)
    return None


def _pair(now: Stamp, first: str, other: str, *, onward: bool) -> Exchange[Matched | Aborted]:
    peers = {first: other, other: first}
    lists = yield Ask(
        {name: Blind(stamp=now, peer=peer, onward=onward and name == first) for name, peer in peers.items()}, Blinded
    )
    if lists.missing:
        return Aborted(lists.missing)
    seen = lists.answers
    again = yield Ask(
        {
            name: BlindAgain(stamp=now, peer=peer, points=seen[peer].points, rules=seen[peer].rules)
            for name, peer in peers.items()
        },
        BlindedAgain,
    )
    if again.missing:
        return Aborted(again.missing)
    matched = yield Ask(
        {name: Match(stamp=now, peer=peer, points=again.answers[peer].points) for name, peer in peers.items()}, Matched
    )
    if matched.missing:
        return Aborted(matched.missing)
    reply: Matched = matched.answers[first]
    return reply


class Aligner:
    """Answers for one partner of an alignment.

    An exchange with a partner may be repeated when answers get lost, but only with the same secrets and lists.
    Otherwise a partner could send list after list, and test as many ids as it likes.

    Args:
        me: The partner's name.
        ids: The ids of its rows, [rows].
        rules, pad_to: As in `IdRules` and `Partner`.
        where: The rows' owner, for errors.
        channel: Writes to partners; None writes in the clear.
        root: The root of its secrets; None draws one from the operating system.
        answers: The lists of earlier exchanges, for an aligner that continues later; it needs the same root.
    """

    def __init__(
        self,
        me: str,
        ids: Sequence[str] | NDArray[np.generic],
        rules: IdRules,
        pad_to: int | None,
        where: str,
        channel: Channel | None = None,
        root: SecretRoot | None = None,
        answers: Answers | None = None,
    ) -> None:
        self._me, self._ids, self.rules, self._pad_to, self._where = me, ids, rules, pad_to, where
        self._answers = answers or Answers()
        self._channel: Channel = InClear() if channel is None else channel
        self.root = SecretRoot.fresh() if root is None else root
        self._running: tuple[Stamp, str, Partner, bool] | None = None
        self.alignment: Alignment | None = None  # of the latest exchanges

    def answer(self, message: Message) -> Message | None:
        """Answer one message of an alignment; None to any other."""
        match message:
            case Blind():
                return self._blind(message)
            case BlindAgain():
                return self._again(message)
            case Match():
                return self._match(message)
            case Narrow():
                return self._narrow(message)
        return None

    def _blind(self, ask: Blind) -> Blinded:
        if ask.onward and self.alignment is None:
            raise MisuseError("expected an earlier alignment to continue from, got none")
        earlier = self.alignment if ask.onward else None
        self.alignment = earlier
        listing = Listing(self._ids, self.rules, self._where, earlier)
        partner = Partner(listing, self._pad_to, SecretRoot(self.root.derive("alignment", ask.peer)))
        own = partner.blind()
        self._hold(ask, "own", own)
        self._running = ask.stamp, ask.peer, partner, ask.onward
        points = self._sealed(ask.stamp, "ids", ask.peer, own)
        return Blinded(stamp=ask.stamp, points=points, rules=self.rules.digest)

    def _again(self, ask: BlindAgain) -> BlindedAgain:
        partner = self._exchange(ask.stamp, ask.peer)
        check_rules(self.rules, ask.rules, ask.peer)
        theirs = self._opened(ask.stamp, "ids", ask.peer, ask.points)
        self._hold(ask, "theirs", theirs)
        return BlindedAgain(
            stamp=ask.stamp, points=self._sealed(ask.stamp, "ids under both", ask.peer, partner.again(theirs))
        )

    def _match(self, ask: Match) -> Matched:
        partner = self._exchange(ask.stamp, ask.peer)
        own = self._opened(ask.stamp, "ids under both", ask.peer, ask.points)
        self._hold(ask, "again", own)
        earlier, onward = self.alignment, self._running is not None and self._running[3]
        self._running = None  # also after an error
        self.alignment = partner.match(own)
        if not onward or earlier is None:
            return Matched(stamp=ask.stamp, kept=np.empty(0, np.uint8))
        left = left_of(earlier, self.alignment)
        return Matched(stamp=ask.stamp, kept=self._channel.seal(ask.stamp, "rows that are left", self._me, left))

    def _narrow(self, ask: Narrow) -> Narrowed:
        if self.alignment is None or ask.maker == self._me:
            raise MisuseError("expected an alignment with that partner to narrow, got none")
        left = self._channel.open(ask.stamp, "rows that are left", ask.maker, ask.kept)
        self.alignment = narrowed(self.alignment, left)
        return Narrowed(stamp=ask.stamp)

    def _exchange(self, stamp: Stamp, peer: str) -> Partner:
        if self._running is None or self._running[:2] != (stamp, peer):
            raise PeerError(f"expected a list of the partner whose exchange was begun; got one of `{peer:.64}`")
        return self._running[2]

    def _hold(self, ask: Blind | BlindAgain | Match, step: str, points: Points) -> None:
        """Raise `moretta.errors.PeerError` for a list other than this step's earlier one."""
        digest = hashlib.sha256(points.tobytes()).digest()
        if not self._answers.hold(ask.stamp.run, f"alignment, {step}, {ask.peer}", digest):
            raise PeerError(
                f"{self._where}: the exchange with `{ask.peer:.64}` ran before with other lists, and a second "
                "would test further ids; restore that partner's earlier state and rows, or begin another run"
            )

    def _sealed(self, stamp: Stamp, what: str, peer: str, points: Points) -> Array:
        return self._channel.seal_for(stamp, what, peer, points.tobytes())

    def _opened(self, stamp: Stamp, what: str, peer: str, sealed: Array) -> Points:
        return as_points(self._channel.open_from(stamp, what, peer, sealed))


def check_rules(own: IdRules, theirs: bytes, peer: str) -> None:
    """Raise `moretta.errors.ParameterError` if a partner normalises ids by other rules."""
    if own.digest != theirs:
        raise ParameterError(f"`{peer:.64}` normalises ids by other rules; declare the same rules at both partners")


def align(
    ids: Mapping[str, Sequence[str] | NDArray[np.generic]],
    rules: IdRules | None = None,
    pad_to: int | None = None,
) -> dict[str, Alignment]:
    """Align partners in this process, by the same exchange as over a network.

    Args:
        ids: Each partner's ids, one per row, by the partner's name; in the order of the chain.
        rules: How ids are normalised; None is `IdRules()`.
        pad_to: The length to which each list of ids is filled; None pads nothing.

    Returns:
        dict: Each partner's alignment, by its name.

    Raises:
        ParameterError: Fewer than two partners, ids that cannot be compared, or no id in common.
    """
    if len(ids) < 2:
        raise ParameterError(f"expected two partners or more to align, got {len(ids)}")
    rules = IdRules() if rules is None else rules
    aligners = {name: Aligner(name, own, rules, pad_to, f"`{name}`") for name, own in ids.items()}
    exchange, replies = relay(Stamp("align", 0, 0), list(ids)), None
    while True:
        try:
            ask = exchange.send(replies)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration:
            return {name: _done(aligner) for name, aligner in aligners.items()}
        replies = Replies({name: aligners[name].answer(message) for name, message in ask.messages.items()})


def _done(aligner: Aligner) -> Alignment:
    if aligner.alignment is None:
        raise MisuseError("expected every partner to have an alignment after the exchange")
    return aligner.alignment


@message("alignment/blind")
class Blind(Message):
    """Begin an exchange: list your ids, if `onward` those shared with earlier partners, under a fresh secret."""

    peer: str
    onward: bool


@message("alignment/blinded")
class Blinded(Message):
    """The list, and SHA-256 of the rules by which its ids were normalised."""

    points: Octets
    rules: Digest


@message("alignment/blind-again")
class BlindAgain(Message):
    """Put your secret on this partner's list too. Fields: see `Blinded`."""

    peer: str
    points: Octets
    rules: Digest


@message("alignment/blinded-again")
class BlindedAgain(Message):
    """The partner's list under both secrets, in the received order."""

    points: Octets


@message("alignment/match")
class Match(Message):
    """Your list under both secrets, as this partner returned it: compute which rows are shared."""

    peer: str
    points: Octets


@message("alignment/matched")
class Matched(Message):
    """Report that the shared rows are known. kept: for earlier partners, the remaining rows and a digest, as bytes."""

    kept: Octets


@message("alignment/narrow")
class Narrow(Message):
    """Keep only these rows of those that you share with `maker`. kept: see `Matched`."""

    maker: str
    kept: Octets


@message("alignment/narrowed")
class Narrowed(Message):
    """Report that the partner keeps only those rows."""


MESSAGES = (Blind, Blinded, BlindAgain, BlindedAgain, Match, Matched, Narrow, Narrowed)
