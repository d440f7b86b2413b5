"""No row that a silo trains on is about whom the server's test rows are about: compared in the set-up by keyed digests.

    server                                                        silo
      AskApart(key, digests of its test rows' ids and groups) -->
                                                              <-- Apart, or a refusal

Nothing is sent where the server's test rows have neither ids nor groups (`moretta.data.silo.Subjects`).

Who learns what: a silo holds the key, so it learns which of its own ids and groups are among the server's, how many the
server has, and of any id that it guesses whether it is among them. The server learns, of a silo that refuses, that some
of its rows are concerned, neither which nor how many. A silo cannot tell test rows from a list that the server makes
up, of one person perhaps, so it answers one list in a session (`OneList`); each session that the server begins, under a
fresh key, is one more. Who has neither key nor rows learns nothing: digests are pseudorandom without the key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array, Message, Stamp, message
from moretta.contract.roles import Aborted, Ask, Exchange
from moretta.data.silo import Subjects
from moretta.errors import MisuseError, ParameterError, PeerError
from moretta.secure_aggregation.keystream import KEY_BYTES, digest_of, encode_purpose

log = logging.getLogger("moretta")

DIGEST_BYTES = 16  # of HMAC-SHA256: two of a million ids and a million others agree by chance once in 2^88 runs


@message("enrolment/ask-apart")
class AskApart(Message):
    """Say whether a row that you train on is about whom my test rows are about.

    key: 32 bytes. ids, groups: uint8[different ones, 16], the first bytes of HMAC-SHA256 of each, sorted.
    """

    key: bytes
    ids: Array
    groups: Array

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` for another key or other digests."""
        if len(self.key) != KEY_BYTES:
            raise PeerError(f"{self.TAG}: expected a key of {KEY_BYTES} bytes")
        if any(one.ndim != 2 or one.shape[1] != DIGEST_BYTES or one.dtype != np.uint8 for one in self._both()):
            raise PeerError(f"{self.TAG}: expected digests uint8[ids or groups, {DIGEST_BYTES}]")

    def _both(self) -> tuple[Array, Array]:
        return self.ids, self.groups


@message("enrolment/apart")
class Apart(Message):
    """None of my training rows is."""


MESSAGES = (AskApart, Apart)


class Comparison:
    """The server's half. tested: whom its test rows are about. key: 32 bytes, fresh in each session."""

    def __init__(self, tested: Subjects, key: bytes) -> None:
        self._key = key
        self._ids, self._groups = (_sorted(key, what, of) for what, of in tested.named().items())
        self._apart = set[str]()  # the silos that have been compared

    def run(self, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
        """Ask each silo once in a session of the run; those that refuse are missing."""
        new = [name for name in cohort if name not in self._apart]
        if not new or not len(self._ids) + len(self._groups):
            return None
        ask = AskApart(stamp=now, key=self._key, ids=self._ids, groups=self._groups)
        replies = yield Ask.all(new, ask, Apart)
        self._apart.update(replies.answers)
        return Aborted(replies.missing) if replies.missing else None


class OneList:
    """The silo's half: it answers one list as often as it is asked, and no other as long as its role lives."""

    def __init__(self) -> None:
        self._listed = b""  # the digest of the list

    def answer(self, ask: AskApart, own: Subjects) -> Apart:
        """Return that no row is shared. own: whom the silo's training rows are about.

        Raises `moretta.errors.ParameterError` where some are, and `moretta.errors.MisuseError` for another list.
        """
        listed = digest_of({"key": np.frombuffer(ask.key, np.uint8), "ids": ask.ids, "groups": ask.groups})
        if self._listed not in (b"", listed):
            raise MisuseError(
                "a silo compares its rows with one list of test rows in a session, was asked of another; begin the run "
                "anew with these test rows"
            )
        self._listed = listed
        return _compared(ask, own)


def _compared(ask: AskApart, own: Subjects) -> Apart:
    for (what, values), theirs in zip(own.named().items(), (ask.ids, ask.groups), strict=True):
        if values is None or not len(theirs):
            continue
        different, row = np.unique(values, return_inverse=True)
        listed = {digest.tobytes() for digest in theirs}
        among = np.array([_digest(ask.key, what, str(value)) in listed for value in different])
        if count := int(among[row].sum()):
            log.warning("%d of %d training rows have %s that the server's test rows have too", count, len(row), what)
            raise ParameterError(
                f"some of its training rows are about {what} that the server's test rows ([data] test) are about too, "
                "so test figures would not be those of new rows; take those rows out of one of the two"
            )
    return Apart(stamp=ask.stamp)


def _digest(key: bytes, what: str, value: str) -> bytes:
    purpose = encode_purpose("test rows", what, value.encode(errors="surrogatepass"))  # a file's text may be no Unicode
    return hmac.digest(key, purpose, hashlib.sha256)[:DIGEST_BYTES]


def _sorted(key: bytes, what: str, values: NDArray[np.str_] | None) -> NDArray[np.uint8]:
    """Return the digest of each different value, in an order that says nothing of the rows'."""
    digests = sorted(_digest(key, what, str(value)) for value in np.unique(() if values is None else values))
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)
