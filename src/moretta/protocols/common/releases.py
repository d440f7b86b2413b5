"""The count of noised sums that a run may have opened; epsilon follows from it.

**What counts.** A take of a round (`moretta.contract.messages.Stamp`), whether or not its sum was opened or the round
repeated.

- The server counts it before it requests what may open the sum: survivors, shares of their masks, sums of additive
  shares, or under ``scheme = "none"`` the uploads themselves. The count is on disk first (`Releases.write`).
- A silo counts its upload before that leaves, as others' shares may open the sum without it. It also counts an upload
  that it then refuses to send because a value is out of range: the refusal reveals something about it.

**What does not count.** A repetition. Lots and noise follow from the take and from all that an upload depends on
(`moretta.protocols.common.batches.purpose_of`), and noise from the cohort too. So the same ask to the same silos gives
the same sum, which reveals nothing new. A digest of the ask and its silos identifies a repetition. Where the unit is a
silo, noise follows from the update, which may differ when it is recomputed, as on a GPU. So the server counts every
ask.

**What that rests on.** Noise is drawn once for a take and cohort. Two such sums over different silos would have the
same noise: their difference is the upload of the silos in one sum alone, with only these silos' noise. The secure sum
ensures that a silo helps to open one sum of a take, and that the next take has other noise.
"""

import hashlib
from collections.abc import Callable
from typing import TypeVar

from moretta.contract.messages import Stamp
from moretta.contract.roles import Ask, Exchange, Replies, State
from moretta.errors import ParameterError
from moretta.secure_aggregation.keystream import encode_purpose

KEY_BYTES = 16
KNOWN = 1024  # the last releases, whose repetitions are recognised; an older one counts again: too many, not too few

R = TypeVar("R")


class Releases:
    """Counts releases; a repeated one is counted once.

    Attributes:
        write: Called with a line of text for each, returns once it is on disk; set by the owner of the files.
    """

    def __init__(self) -> None:
        self.count = 0
        self.write: Callable[[str], None] = lambda line: None
        self._known = dict[bytes, None]()  # the last `KNOWN`, oldest first

    def has(self, now: Stamp, *of: int | str | bytes) -> bool:
        """Return whether a release is known, so that another ask for it counts nothing."""
        return _key(now, *of) in self._known

    def add(self, now: Stamp, *of: int | str | bytes) -> None:
        """Count the release of a take. of: what its sum follows from beside the take, and the silos asked."""
        if (key := _key(now, *of)) not in self._known:
            self._take(key)
            self.write(f"{self.count} {now.round} {now.take} {key.hex()}")

    def _take(self, key: bytes) -> None:
        self.count += 1
        self._known[key] = None
        if len(self._known) > KNOWN:
            del self._known[next(iter(self._known))]

    def read(self, line: str) -> None:
        """Restore a written line: number, round, take, key. Raises ParameterError for a wrong or missing one."""
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


def _key(now: Stamp, *of: int | str | bytes) -> bytes:
    return hashlib.sha256(encode_purpose("release", now.run, now.round, now.take, *of)).digest()[:KEY_BYTES]


def watched(exchange: Exchange[R], note: Callable[[Ask], None]) -> Exchange[R]:
    """Run an exchange, and pass each ask to `note` before it is made."""
    replies: Replies | None = None
    while True:
        try:
            ask = exchange.send(replies)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        note(ask)
        replies = yield ask
