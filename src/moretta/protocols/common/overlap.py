"""No silo trains on a row whose subject is in the server's test rows: the set-up compares keyed digests.

    server                                                        silo
      AskApart(key, digests of its test rows' ids and groups) -->
                                                              <-- Apart, or a refusal

Nothing is sent where the server's test rows have neither ids nor groups (`moretta.data.rows.Subjects`).

Who learns what: a silo holds the key. So it learns which of its own ids and groups are among the server's, how many the
server has, and of any id that it guesses whether it is among them. The server learns from a refusal that the silo has
some of them, neither which nor how many. A silo cannot distinguish test rows from a list that the server makes up,
perhaps of one person. So it answers one list, and records it first. A site answers one list in all runs together
([privacy] repeat-statistics allows one in each run). The key follows from the list, so that the same test rows are the
same question in every session and run. Parties with neither key nor rows learn nothing: digests are pseudorandom
without the key.
"""

import hashlib
import hmac
import logging
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array, Message, Stamp, length, message
from moretta.contract.roles import Aborted, Ask, Exchange
from moretta.data.rows import Subjects
from moretta.errors import PeerError, RowsError
from moretta.secure_aggregation.keystream import KEY_BYTES, encode_parts, encode_purpose
from moretta.secure_aggregation.one_sum import Answers
from moretta.secure_aggregation.sums import message_digest

log = logging.getLogger("moretta")

COMPARISON = "comparison with test rows"  # an entry among the answers that a silo gives once
DIGEST_BYTES = 16  # of HMAC-SHA256: two of a million ids and a million others agree by chance once in 2^88 runs
_KIND = f"S{DIGEST_BYTES}"


@message("enrolment/ask-apart")
class AskApart(Message):
    """Report whether you train on a row whose subject is among my test rows'.

    Args:
        ids, groups: uint8[distinct values, 16], the sorted first bytes of each value's HMAC-SHA256.
    """

    key: Annotated[bytes, length(KEY_BYTES)]
    ids: Array
    groups: Array

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` for other digests."""
        both = self.ids, self.groups
        if any(digests.ndim != 2 or digests.shape[1] != DIGEST_BYTES or digests.dtype != np.uint8 for digests in both):
            raise PeerError(f"{self.TAG}: expected digests uint8[ids or groups, {DIGEST_BYTES}]")
        if any((listed[:-1] >= listed[1:]).any() for listed in map(_listed, both)):
            raise PeerError(f"{self.TAG}: expected digests in ascending order, each once")


@message("enrolment/apart")
class Apart(Message):
    """No training row of mine has a subject of yours."""


MESSAGES = (AskApart, Apart)


class Comparison:
    """The server's half. tested: the subjects of its test rows."""

    def __init__(self, tested: Subjects) -> None:
        names = {
            what: [] if of is None else [str(subject) for subject in np.unique(of)]
            for what, of in tested.named().items()
        }
        whole = (encode_parts(what, len(of), *map(_text, of)) for what, of in names.items())
        self._key = hashlib.sha256(encode_purpose("key of test rows", *whole)).digest()
        self._ids, self._groups = (_sorted(self._key, what, of) for what, of in names.items())
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


def compared(ask: AskApart, own: Subjects, answers: Answers) -> Apart:
    """Compare the silo's training rows with the digests, and return that no subject is shared.

    Args:
        own: the subjects of the silo's training rows.
        answers: the silo's earlier answers; it answers one list, perhaps repeatedly.

    Raises:
        moretta.errors.RowsError: some subjects are shared.
        moretta.errors.PeerError: another list was compared before.
    """
    run = ask.stamp.run.rpartition("/")[2]  # without a group that a server names before it
    if not answers.hold(run, COMPARISON, message_digest(ask), lasting=True):
        raise PeerError(
            "a silo compares its rows with one list of test rows, but was sent another; use the earlier test rows, or "
            "allow one list a run at each site ([privacy] repeat-statistics = true in silo.toml), and begin anew"
        )
    for (what, values), theirs in zip(own.named().items(), (ask.ids, ask.groups), strict=True):
        if values is None or not len(theirs):
            continue
        different, row = np.unique(values, return_inverse=True)
        listed, digests = _listed(theirs), np.array([_digest(ask.key, what, str(value)) for value in different], _KIND)
        places = np.searchsorted(listed, digests)  # a set of a million digests takes 80 MiB
        among = listed[np.minimum(places, len(listed) - 1)] == digests
        if count := int(among[row].sum()):
            log.warning("%d of %d training rows have %s that the server's test rows have too", count, len(row), what)
            raise RowsError(
                f"some of its training rows are about {what} that the server's test rows ([data] test) are about too, "
                "so test figures would not be those of new rows; take those rows out of one of the two"
            )
    return Apart(stamp=ask.stamp)


def _listed(digests: Array) -> NDArray[np.bytes_]:
    """Return digests as values that compare, bytes[digests]."""
    return np.ascontiguousarray(digests).view(_KIND).reshape(-1)


def _digest(key: bytes, what: str, value: str) -> bytes:
    purpose = encode_purpose("test rows", what, _text(value))
    return hmac.digest(key, purpose, hashlib.sha256)[:DIGEST_BYTES]


def _sorted(key: bytes, what: str, values: Sequence[str]) -> NDArray[np.uint8]:
    """Return the digest of each distinct value, in an order independent of the rows'."""
    digests = sorted(_digest(key, what, value) for value in values)
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)


def _text(value: str) -> bytes:
    return value.encode(errors="surrogatepass")  # a file's text may be invalid Unicode
