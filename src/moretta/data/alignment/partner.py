"""One partner's half of an alignment with one other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moretta.data.alignment import curve
from moretta.data.alignment.curve import POINT_BYTES, Points
from moretta.data.alignment.ids import IdRules, ids_digest, numbered
from moretta.data.alignment.result import Alignment, Disclosed
from moretta.errors import MisuseError, ParameterError, PeerError, RowsError
from moretta.secure_aggregation.keystream import SecretRoot, encode_purpose


class NothingShared(RowsError):
    """Partners have no id in common: the exchange is at its end."""


class Listing:
    """A partner's rows, as far as alignments need them: each a different (normalised id, number of the row with it).

    ids: of all rows, in the file's order. earlier: an alignment with others; its rows alone are listed then. where:
    whose rows they are, for errors. Raises `moretta.errors.ParameterError` for ids that cannot be compared, or other
    ids than `earlier` is of.
    """

    def __init__(
        self,
        ids: Sequence[str] | NDArray[np.generic],
        rules: IdRules,
        where: str,
        earlier: Alignment | None = None,
    ) -> None:
        self.rules, self.where, self.earlier = rules, where, earlier
        self.source = ids_digest(ids, where)
        written = rules.normalised(ids, where)
        if earlier is not None:
            earlier.check(ids, where)
            if earlier.rules != rules:
                raise ParameterError(f"{where}: the earlier alignment has other rules for ids; use the same")
        everything = list(zip(written, numbered(written), strict=True))
        self.rows = np.arange(len(written)) if earlier is None else earlier.order
        self.elements = [everything[row] for row in self.rows.tolist()]

    @property
    def messages(self) -> list[bytes]:
        """What is encoded as points. Ids have no control characters, so none holds the byte that ends it."""
        return [name.encode() + b"\0" + number.to_bytes(4, "big") for name, number in self.elements]


class Partner:
    """Answers for one partner in one exchange: `blind`, then `again`, then `match`, each once.

    pad_to: the length that its list is filled up to by random points, so that the other does not learn how many rows
    there are; None fills up nothing. root: its secrets; None draws them from the operating system.
    """

    def __init__(self, listing: Listing, pad_to: int | None = None, root: SecretRoot | None = None) -> None:
        count = len(listing.elements)
        if pad_to is not None and pad_to < count:
            raise RowsError(
                f"{listing.where}: a list of {pad_to} points was declared (pad-to), and there are more rows; declare "
                "more"
            )
        self._listing, self._listed = listing, pad_to or count
        self._root = SecretRoot.fresh() if root is None else root
        self._own: Points | None = None  # the own list, as it was sent
        self._theirs: Points | None = None  # the other's list, under both secrets
        self._matched = False

    @property
    def rules(self) -> IdRules:
        """How ids are written before they are compared."""
        return self._listing.rules

    def blind(self) -> Points:
        """Return the own list under the own secret, in an order that is secret too, uint8[points, 32]."""
        own = curve.blind(curve.encode(self._listing.messages), self._scalar)
        seeds = self._root.stream("padding").octets((self._listed - len(own)) * POINT_BYTES).reshape(-1, POINT_BYTES)
        padded = np.concatenate([own, curve.random_points(seeds)]) if len(seeds) else own
        self._own = padded[self._shuffled]
        return self._own

    def again(self, theirs: Points) -> Points:
        """Return the other's list under both secrets, in the order that it came in.

        Once: whoever could have many lists put under one secret could compare them.
        """
        if self._theirs is not None:
            raise MisuseError("this partner has put its secret on a list before; begin another exchange for another")
        if self._own is not None and np.isin(curve.keys(theirs), curve.keys(self._own)).any():
            raise PeerError("expected the other partner's own list, got points of the list that it was sent")
        self._theirs = curve.blind(theirs, self._scalar)
        return self._theirs

    def resume(self, theirs: Points) -> None:
        """Take up what `again` returned, in another process with the same root."""
        self._theirs = theirs

    def match(self, own_again: Points) -> Alignment:
        """Return the alignment, from the own list as the other put its secret on it.

        Once. Raises `moretta.errors.PeerError` for a list that is not the own one's, and `NothingShared`. A place that
        only filled up the list matches nothing, without an error of its own: partners could count rows by it.
        """
        if self._theirs is None:
            raise MisuseError("expected the other partner's list before the own one comes back")
        if self._matched:
            raise MisuseError("this partner has matched its list before; begin another exchange for another")
        self._matched = True
        if len(own_again) != self._listed:
            raise PeerError(f"expected the own list of {self._listed} points back, got {len(own_again)}")
        own, theirs = curve.keys(own_again), curve.keys(self._theirs)
        found = np.flatnonzero(np.isin(own, theirs))
        found = found[self._shuffled[found] < len(self._listing.elements)]
        places = self._shuffled[found]
        if not len(places):
            raise NothingShared(
                f"{self._listing.where}: the partners have no id in common under these rules; compare how both write "
                "ids, and declare rules that make them alike"
            )
        elements = self._listing.elements
        ranked = sorted(range(len(places)), key=lambda at: elements[places[at]])
        digest = hashlib.sha256(encode_purpose("alignment", self.rules.digest, own_again[found[ranked]].tobytes()))
        step = Disclosed(self._listed, len(self._theirs), len(places))
        before = () if self._listing.earlier is None else self._listing.earlier.steps
        order = self._listing.rows[places[ranked]]
        return Alignment(self.rules, order, digest.digest(), self._listing.source, (*before, step))

    @property
    def _scalar(self) -> bytes:
        return self._root.derive("scalar")

    @property
    def _shuffled(self) -> NDArray[np.int64]:
        return self._root.stream("order").permutation(self._listed)

    def __repr__(self) -> str:
        return f"Partner({self._listing.where!r}, <redacted>)"


def kept_of(earlier: Alignment, later: Alignment) -> NDArray[np.int64]:
    """Return which rows of an alignment are left in one that goes on from it: positions in its order, rising."""
    return np.flatnonzero(np.isin(earlier.order, later.order))


def narrowed(earlier: Alignment, kept: NDArray[np.int64], digest: bytes) -> Alignment:
    """Return what is left of an alignment after another partner aligned with the first one. digest: the later one's.

    Raises `moretta.errors.PeerError` for positions that are not of it.
    """
    if not len(kept) or kept.min() < 0 or kept.max() >= len(earlier.order) or (np.diff(kept) <= 0).any():
        raise PeerError(f"expected rising positions among the {len(earlier.order)} rows that were aligned")
    if len(digest) != len(earlier.digest):
        raise PeerError("expected the digest of the later alignment")
    return replace(earlier, order=earlier.order[kept], digest=digest)
