"""The next take of a round, and its silos, after silos have helped to open a sum of it; and the opened sums.

A silo reports this by `moretta.contract.messages.Spent`, and no other role can check it. So a report costs others
little:

- A next take is accepted up to one past the highest that the server has asked for, which is on its disk first
  (`AskedTakes`). An honest silo helped only with takes that were asked for. So it names no higher one, even to a server
  that returned to an older checkpoint.
- A set of silos that alone may repeat the round is accepted if it has all silos of the round, or if most of the present
  silos name it. Without these the round could not run anyway. Otherwise the silos that name it are left out of the
  round.

`OpenedSum` is what an attempt's messages show. A report's statements on the silos of a sum follow from these. A silo
that was missing for a moment may still be in the round's sum, and one that was lost before the sum is not.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moretta.contract.messages import Spent, Stamp
from moretta.contract.roles import Aborted, Ask, Missing, Reason, Replies
from moretta.engines.journal import Journal
from moretta.errors import ParameterError
from moretta.secure_aggregation.additive import AddShares
from moretta.secure_aggregation.plain import PlainUpload
from moretta.secure_aggregation.unmasking import Unmask

MOST_REPORTS = 3  # the most reports of a spent take by one silo in a round; an honest silo makes fewer

_OFTEN = Missing(
    Reason.REFUSED, f"it has reported more than {MOST_REPORTS} times in this round that the take was spent"
)
_BOUND = Missing(
    Reason.REFUSED, "it repeats this round only with the same silos as before, and some of them are missing"
)
_ALONE = Missing(
    Reason.REFUSED,
    "it reports that only the same silos as before may repeat this round, which most of the others do not report",
)


class AskedTakes:
    """The highest take of each round that was asked for, in all sessions of a run.

    Args:
        journal: It has a line for each take after the first of a round, written before the ask. Without lines, as in a
            run of an earlier version, takes are accepted one by one. None for a run without a folder.

    Raises:
        ParameterError: The journal has other lines.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal, self._highest = journal, dict[int, int]()
        for line in [] if journal is None else journal.lines():
            try:
                number, take = map(int, line.split())
            except ValueError:
                raise ParameterError(
                    f"expected a round and a take in the record of the takes that were asked for, got {line!r:.80}; "
                    "restore the file, or delete it"
                ) from None
            self._highest[number] = max(take, self._highest.get(number, 0))

    def ask(self, now: Stamp) -> None:
        """Record a take before it is asked for. Raises `moretta.errors.RunFailed` if that fails."""
        if now.take > self._highest.get(now.round, 0):
            if self._journal is not None:
                self._journal.append(f"{now.round} {now.take}")
            self._highest[now.round] = now.take

    def believed(self, spent: Spent) -> Spent:
        """Return a silo's report, with its take lowered to a possible one."""
        limit = self._highest.get(spent.stamp.round, 0) + (not spent.whole)
        return spent if spent.next_take <= limit else replace(spent, next_take=limit)


class RoundTakes:
    """The takes of one round.

    Args:
        cohort: The silos that run it.

    Attributes:
        only: The silos that alone may run it; empty for all.
    """

    def __init__(self, cohort: Sequence[str]) -> None:
        self.take = 0
        self.only: Sequence[str] = ()
        self._cohort = cohort
        self._bound = list[str]()  # the silos that report that only some may run the round
        self._named_by = list[str]()  # those of them that name the accepted set
        self._alone = dict[str, Spent]()  # the silos left out, because most others do not report the same
        self._claimed = Counter[str]()

    def playing(self, lost: Mapping[str, Missing]) -> list[str]:
        """Return the silos of the next take."""
        return [silo for silo in self.only or self._cohort if silo not in lost and silo not in self._alone]

    @property
    def names_silos(self) -> bool:
        """Whether a silo reports that only some silos may repeat the round, because it uploads all its rows."""
        return bool(self.only or self._alone)

    def others(self) -> dict[str, Missing]:
        """Return the silos of the cohort that may not take part, and why."""
        why = Missing(
            Reason.SPENT,
            f"{', '.join(self._named_by):.300} reported that only {', '.join(self.only):.300} may repeat this round, "
            "having helped to open a sum of theirs",
        )
        excluded = {silo: why for silo in self._cohort if self.only and silo not in self.only}
        return excluded | dict.fromkeys(self._alone, _ALONE)

    def after(self, ended: Aborted, lost: Collection[str]) -> dict[str, Missing]:
        """Record why an attempt was aborted; return silos with too many reports. lost: those already left out."""
        spent = {silo: why.spent for silo, why in ended.missing.items() if why.spent is not None}
        # After a try with the named set, a silo that names another set is at fault, not the silos that answer.
        self._claimed.update({silo for silo, claim in spent.items() if claim.whole and self.only} or spent.keys())
        often = [silo for silo in spent if self._claimed[silo] > MOST_REPORTS]
        reports = {silo: claim for silo, claim in spent.items() if silo not in often}
        whole = {silo: claim for silo, claim in reports.items() if claim.whole}
        claims = self._alone | whole
        believed = self._believed(claims, {*lost, *often})
        self._bound = list(whole)
        if believed is None:
            self.only, self._alone = (), claims
            others = [claim.next_take for claim in reports.values() if not claim.whole]
            self.take = max([self.take + bool(ended.opened), *others])
        else:
            self.only, self.take = believed.survivors, believed.next_take
            self._alone, self._named_by = {}, [name for name, claim in claims.items() if claim.survivors == self.only]
        return dict.fromkeys(often, _OFTEN)

    def without_repeaters(self) -> dict[str, Missing]:
        """Let all silos run the next take except those that would only repeat the last one; return those."""
        left_out = dict.fromkeys(self._bound, _BOUND)
        self.take, self.only, self._bound = self.take + bool(left_out), (), []
        return left_out

    def _believed(self, claims: Mapping[str, Spent], lost: Collection[str]) -> Spent | None:
        """Return the accepted claim that most silos make, among several the one of the largest set; or None.

        Silos that no longer know their set cannot repeat it, and do not count.
        """
        named = {silo: (claim.survivors, claim.next_take) for silo, claim in claims.items() if claim.survivors}
        if not named:
            return None
        counts = Counter(named.values())
        most = max(counts, key=lambda claim: (counts[claim], len(claim[0]), claim))
        present = [silo for silo in self._cohort if silo not in lost and (silo in named or silo not in claims)]
        waits_for_the_lost = set(most[0]) == set(self._cohort) != set(present)
        if not waits_for_the_lost and 2 * counts[most] <= len(present):
            return None
        return next(claims[silo] for silo in named if named[silo] == most)


def can_play(spent: Spent, silo: str, cohort: Sequence[str], least: int) -> bool:
    """Return whether a silo names a set that may repeat the round; it names none if it no longer knows it."""
    named = set(spent.survivors)
    least = 1 if "/" in spent.stamp.run else least  # a group of CGD has its own minimum
    return not (spent.whole and named) or (silo in named and named <= set(cohort) and len(named) >= least)


@dataclass(frozen=True)
class OpenedSum:
    """A sum that silos helped to open; under the scheme ``none`` the server sees each part of it.

    Args:
        round, take: Of its messages' stamps.
        silos: Those in the sum, sorted.
        group: A group of CGD, else empty.
        set_up: Whether it belongs to a set-up, as statistics do.
        used: Whether a result is made of it; otherwise its attempt was aborted, and only the server may know it.
    """

    round: int
    take: int
    silos: tuple[str, ...]
    group: str = ""
    set_up: bool = False
    used: bool = True


def opens(ask: Ask) -> bool:
    """Return whether an answer to an ask helps to open a masked sum, even if the answer is lost."""
    return any(isinstance(message, Unmask | AddShares) for message in ask.messages.values())


def opened_by(ask: Ask, replies: Replies) -> Iterator[tuple[Stamp, tuple[str, ...]]]:
    """Yield the stamp and the silos of each sum that these replies help to open, perhaps repeatedly."""
    plain = dict[Stamp, list[str]]()
    for silo, answer in replies.answers.items():
        match ask.messages[silo]:
            case Unmask() as message:
                yield message.stamp, tuple(sorted(message.survivors))
            case AddShares() as message:
                yield message.stamp, tuple(sorted({silo, *message.shares}))
            case message if isinstance(answer, PlainUpload):
                plain.setdefault(message.stamp, []).append(silo)
    for stamp, silos in plain.items():
        yield stamp, tuple(sorted(silos))
