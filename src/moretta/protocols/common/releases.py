"""The count of noised sums that a run may have opened; epsilon follows from it.

**What counts.** A take of a round (`moretta.contract.messages.Stamp`), from the moment at which the opening of its sum
is asked for: shares of the survivors' masks, sums of additive shares, or under ``scheme = "none"`` the uploads
themselves. It counts whether or not an answer came back, the sum was put together or the round was repeated, as a share
that was asked for may have left.

**What does not count.** A repetition. Lots and noise follow from the take and from all that an upload depends on
(`moretta.protocols.common.batches.purpose_of`). So asking the same silos for the same gives the same sum, which says
nothing new. A digest of what was asked and of who is in the sum identifies a repetition.

**What that rests on.** Noise is drawn once a take. Two sums of one take over different silos count as two here, but
have the same noise: their difference is the upload of the silos in one sum alone, with only these silos' noise. The
secure sum sees to it that a silo helps to open one sum of a take, and that the next take has other noise.

A silo that refuses to send a noised upload, as a value is out of range, says something of it, and counts that too.

The server's count is on disk before anything is asked (`Releases.write`). A silo counts what it helped to open.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Ask, Exchange, Replies, State
from moretta.errors import ParameterError, RangeError
from moretta.secure_aggregation.additive import AddedShares, AddShares
from moretta.secure_aggregation.keystream import encode_purpose
from moretta.secure_aggregation.plain import PlainUpload
from moretta.secure_aggregation.unmasking import SelfMaskShares, Unmask

KEY_BYTES = 16
KNOWN = 1024  # the last releases, of which a repetition is known; an older one counts anew: too many, not too few

R = TypeVar("R")


class Releases:
    """Counts releases; a repeated one is counted once.

    write: called with a line of text for each, returns once it is on disk; set by the owner of the files.
    """

    def __init__(self) -> None:
        self.count = 0
        self.write: Callable[[str], None] = lambda line: None
        self._known = dict[bytes, None]()  # the last `KNOWN`, oldest first

    def add(self, now: Stamp, *of: int | str | bytes) -> None:
        """Count the release of a take. of: what its sum follows from beside the take, and its silos."""
        parts = encode_purpose("release", now.run, now.round, now.take, *of)
        key = hashlib.sha256(parts).digest()[:KEY_BYTES]
        if key not in self._known:
            self._take(key)
            self.write(f"{self.count} {now.round} {now.take} {key.hex()}")

    def _take(self, key: bytes) -> None:
        self.count += 1
        self._known[key] = None
        if len(self._known) > KNOWN:
            del self._known[next(iter(self._known))]

    def read(self, line: str) -> None:
        """Restore a written line: the release's number, round, take and key.

        Raises `moretta.errors.ParameterError` for anything else, or if an earlier one is missing.
        """
        words = line.split()
        try:
            number, key = int(words[0]), bytes.fromhex(words[3])
        except (ValueError, IndexError):
            number, key = 0, b""
        if len(words) != 4 or len(key) != KEY_BYTES or not 1 <= number <= self.count + 1:
            raise ParameterError(
                f"expected the record of release {self.count + 1}, got {line!r:.80}: epsilon cannot be stated of a run "
                "whose releases are not all known; restore the file, or begin another run"
            )
        if number > self.count:
            self._take(key)

    def state(self) -> State:
        """Return the count and the last keys."""
        return {"releases": self.count.to_bytes(8, "big") + b"".join(self._known)}

    def restore(self, state: State) -> None:
        """Restore what `state` returned, unless more was released since, which a return does not undo."""
        kept = bytes(state["releases"])
        if int.from_bytes(kept[:8], "big") >= self.count:
            self.count = int.from_bytes(kept[:8], "big")
            keys = (kept[start : start + KEY_BYTES] for start in range(8, len(kept), KEY_BYTES))
            self._known = dict.fromkeys(keys)


def counted(exchange: Exchange[R], releases: Releases, now: Stamp, *of: int | str | bytes) -> Exchange[R]:
    """Play the exchange of a sum, and count its take before the ask that opens it.

    of: what the uploads follow from, as the server knows it. The sum's silos are added, except if each upload is seen
    by itself: then the other silos do not matter.
    """

    def note(ask: Ask) -> None:
        if issubclass(ask.reply, SelfMaskShares | AddedShares):
            releases.add(now, *of, *sorted(ask.messages))
        elif ask.reply is PlainUpload:
            releases.add(now, *of)

    return watched(exchange, note)


def watched(exchange: Exchange[R], note: Callable[[Ask], None]) -> Exchange[R]:
    """Run an exchange, and note each ask before it is made."""
    replies: Replies | None = None
    while True:
        try:
            ask = exchange.send(replies)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        note(ask)
        replies = yield ask


class OwnReleases:
    """A silo's count of the sums of its noised uploads that it helped to open: `counted`."""

    def __init__(self) -> None:
        self.counted = Releases()
        self.run = ""  # of the last message
        self._upload: tuple[Stamp, tuple[int | str | bytes, ...]] | None = None  # the last one, as long as it is closed

    def uploaded(self, now: Stamp, *of: int | str | bytes) -> None:
        """Note an upload before it is sent. of: see `Releases.add`."""
        self._upload = now, of

    def is_last(self, now: Stamp, *of: int | str | bytes) -> bool:
        """Return whether this upload is the last one, in any attempt."""
        return self._upload is not None and (self._upload[0].drawn, self._upload[1]) == (now.drawn, of)

    @contextmanager
    def sent(self) -> Iterator[None]:
        """Count the last upload if its range is refused: others see the refusal, which depends on noised values."""
        try:
            yield
        except RangeError:
            if self._upload is not None:
                self.counted.add(self._upload[0], *self._upload[1], "refused")
            raise

    def answered(self, asked: Message, answer: Message) -> None:
        """Count the last upload if the answer helps to open its sum.

        Statistics have no noise to count: the silo records each by name (`moretta.secure_aggregation.one_sum`), and its
        stated epsilon names what it leaves out (`moretta.protocols.common.statistics.without_noise`).
        """
        self.run = asked.stamp.run
        if self._upload is None or asked.stamp != self._upload[0]:
            return
        match asked, answer:
            case Unmask(), SelfMaskShares():
                silos = list(asked.survivors)
            case AddShares(), AddedShares(unopened=()):
                silos = sorted(asked.shares)
            case _, PlainUpload():
                silos = []
            case _:
                return
        self.counted.add(self._upload[0], *self._upload[1], *silos)
