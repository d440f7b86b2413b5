"""One z a take: in a take of a round a participant repeats its answer, or refuses.

A row's z is masked by keystreams of its stamp. Two z under one stamp would give their difference, X_ij (D - D'), to
whoever relays them; two under two attempts would give it to the row's head. Whoever can choose D then has X_ij. So all
that z follows from (rows, weights and encoding), what is joined to it, and Delta stay as they first were in a take.
"""

from __future__ import annotations

import hashlib

from moretta.contract.messages import Stamp
from moretta.errors import PeerError

Take = tuple[int, int]


def take_of(stamp: Stamp) -> Take:
    """Return the round, and which take of it: rows follow both, where an attempt renews masks alone."""
    return stamp.round, stamp.take


class Takes:
    """Digests of what was answered in the latest take."""

    def __init__(self) -> None:
        self._take: Take = 0, 0
        self._held = dict[str, bytes]()

    def hold(self, stamp: Stamp, what: str, content: bytes) -> None:
        """Hold a take to this content. Raises `moretta.errors.PeerError` for other content, or an earlier take."""
        take, digest = take_of(stamp), hashlib.sha256(content).digest()
        if take < self._take:
            raise PeerError(f"{stamp}: expected a take no earlier than {self._take} (round, take)")
        if take > self._take:
            self._take, self._held = take, {}
        if self._held.setdefault(what, digest) != digest:
            raise PeerError(f"{stamp}: {what} was another before in this take; expected the same, as a take has one")
