"""The sums that silos helped to open, as the messages of an attempt show them.

What a run's report says of who takes part follows from these, as a silo that was missing for a moment may be in the
round's sum all the same, and one that was lost before the sum is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moretta.contract.messages import Stamp
from moretta.contract.roles import Ask, Replies
from moretta.secure_aggregation.additive import AddShares
from moretta.secure_aggregation.plain import PlainUpload
from moretta.secure_aggregation.unmasking import Unmask


@dataclass(frozen=True)
class OpenedSum:
    """A sum that silos helped to open; under the scheme ``none`` the server sees each part of it.

    round, take: as its messages are stamped. silos: those in the sum, sorted. group: a group of CGD's, else empty.
    set_up: whether it belongs to a set-up, as statistics do. used: whether a result is made of it; otherwise its
    attempt was aborted, and the server alone may know it.
    """

    round: int
    take: int
    silos: tuple[str, ...]
    group: str = ""
    set_up: bool = False
    used: bool = True

    @classmethod
    def of(cls, now: Stamp, silos: tuple[str, ...], *, set_up: bool, used: bool) -> OpenedSum:
        """Return the sum of a stamp, whose run id begins with the name of a group where there is one."""
        return cls(now.round, now.take, silos, now.run.rpartition("/")[0], set_up, used)


def opened_by(ask: Ask, replies: Replies) -> Iterator[tuple[Stamp, tuple[str, ...]]]:
    """Yield the stamp and the silos of each sum that these replies help to open; the same sum perhaps repeatedly."""
    plain = dict[Stamp, list[str]]()
    for silo, answer in replies.answers.items():
        match ask.messages[silo]:
            case Unmask() as message:
                yield message.stamp, tuple(sorted(message.survivors))
            case AddShares() as message:
                yield message.stamp, tuple(sorted({silo, *message.shares}))
            case message if isinstance(answer, PlainUpload):
                plain.setdefault(message.stamp, []).append(silo)
    yield from ((stamp, tuple(sorted(silos))) for stamp, silos in plain.items())
