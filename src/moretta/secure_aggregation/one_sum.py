"""One sum of a round: the sums that a silo has helped to open, and its answers to others of the same uploads.

**Why.** Two sums of the same uploads over different silos can be subtracted, and the difference is a silo's own
numbers. A server may ask for a round again because it was killed and resumes from a checkpoint, because it repeats a
failed step, or because it wants to subtract. A silo cannot distinguish these, so it treats them alike: of the uploads
of one round and take it helps to open one sum, over one set S of survivors, once in its life.

**A silo's record** for each (run, what is summed, round): the highest take that it was bound in, SHA-256 of the query
(`moretta.secure_aggregation.sums`) and of what only this silo received, S, and whether it gave shares. A sum's name is
"" for the upload of a round; statistics and scores have names, belong to no round, and are of all rows. The silo also
records its answers before an upload (cross-entropy under PBPFL), without an S: in a take it answers one question. In a
run of a CGD group, the run id contains the group's name.

**States** of one such sum:

    FREE     the silo has helped to open nothing of it
    BOUND    the silo has confirmed its silos: with a roster by its signature of S, without one by giving shares
    GIVEN    shares may have been sent

**An ask** relates in one of four ways to the record: a LOWER take; the SAME take, digest and (once known) S; the same
take but OTHER than that; or a HIGHER take. Where all rows are used (a batch of more than half of them, local epochs),
all takes have the same rows, so any further take is OTHER too. A sum once a run (statistics, scores) is the SAME over
the same S alone. One of them may stand `beside` another: then both are over one S in a run, as their difference would
be of the silos in one of them alone. So are all statistics, each of which has the number of rows.

`TABLE` has all moves. Any other move raises `moretta.errors.SumSpent`, changes nothing, and costs no silo the round:
the server continues with the take that the silo names, with other rows, or where all rows are used repeats its ask to
S.

    event   the silo is about to
    ASKED   compute an upload; its survivors are not known yet
    BINDS   confirm the silos of the sum
    GIVES   give shares, which confirms them too

**On disk.** A line is written, and not only buffered, before its content leaves the silo, so a killed process forgets
nothing. One force to the disk reserves `AHEAD` rounds: after a loss of power, reserved rounds without a record count as
spent, and have a further take. Where all rows are used there is no further take, so each round is forced separately,
and none is reserved. Every line is forced at a site that cannot detect a loss of power
(`moretta.engines.journal.UNKNOWN`). ``docs/one-sum.md`` lists what all this does not stop: the server alone names round
number and model. ``apart = m`` protects against sums of nearly the same model over several sets. The sets that a silo
has helped cut their silos into parts: two silos are in one part where each set has both or neither. In any linear
combination of these sums the silos of a part have one factor. The silo helps no set that makes a part of fewer than m.
This bounds what the sums of one silo's record isolate. It does not bound combinations with sums of other silos alone,
which no record of this silo has (``tests/adversary``: ``test_known_limit_sums_that_no_one_silo_knows``).

**Answers that a silo gives once** (`Answers`): the inputs of each are recorded before it leaves. Some questions may be
asked once, because two answers together reveal what neither does: two z of one take (CGD), the comparison with two
lists of ids, the sums of squares around two centers, the scores of two models. A restart and an earlier checkpoint do
not change that, and neither do another session, attempt, cohort or group. The same question is answered again: its
answer reveals nothing new.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from moretta.contract.messages import Stamp
from moretta.errors import PeerError, SumSpent
from moretta.secure_aggregation.keystream import encode_parts
from moretta.secure_aggregation.sums import STATISTICS, Query

DIGEST = 16  # bytes of each recorded digest
LINE = "answer"  # the start of an answer's line


class Answers:
    """What one silo has answered, by run.

    Args:
        keep: takes a line, and returns when the disk has it; raises if that fails.
        over_runs: whether an answer from rows alone is given once in all runs together, or once in each.
    """

    def __init__(self, keep: Callable[[str], None] = lambda line: None, *, over_runs: bool = False) -> None:
        self._keep, self._over_runs = keep, over_runs
        self._held = dict[tuple[str, str], str]()  # by run and the answer's name
        self.scored: Mapping[str, float] = {}  # the last model's scores on the silo's own rows; neither kept nor sent

    def hold(self, run: str, name: str, *content: int | str | bytes, lasting: bool = False) -> bool:
        """Record an answer before it is given, unless another one was.

        Args:
            run: the id in the question's stamp.
            name: of the answer, one for all questions of which one is answered.
            content: the inputs of the answer.
            lasting: whether it follows from rows alone, and so would reveal something new in another run.

        Returns:
            Whether this is the first such answer, or the same again. Nothing is recorded otherwise.
        """
        key = ("" if lasting and self._over_runs else run), name
        digest = hashlib.sha256(encode_parts(*content)).digest()[:DIGEST].hex()
        if key not in self._held:
            self._keep(json.dumps([LINE, *key, digest]))
            self._held[key] = digest
        return self._held[key] == digest

    def names(self, run: str) -> list[str]:
        """Return the names of answers in a run, its groups, or all runs together; "" for any run."""
        return [name for held, name in self._held if not run or held.rpartition("/")[2] in (run, "")]

    def read(self, run: object, name: object, digest: object) -> None:
        """Restore a recorded line. Raises ValueError for anything else."""
        if not (isinstance(run, str) and isinstance(name, str) and isinstance(digest, str)):
            raise ValueError("expected the record of an answer")
        self._held[run, name] = digest

    def __repr__(self) -> str:
        return f"Answers({len(self._held)} answers)"


AHEAD = 16  # rounds that one force to the disk reserves
BEFORE = "before the upload"  # the name of an answer before the upload

Survivors = tuple[str, ...]


class State(Enum):
    """The state of one sum at one silo."""

    FREE = auto()
    BOUND = auto()
    GIVEN = auto()


class Relation(Enum):
    """The relation of an ask to the sums that the silo has helped to open."""

    LOWER = auto()
    SAME = auto()
    OTHER = auto()
    HIGHER = auto()


class Event(Enum):
    """The silo's next action."""

    ASKED = auto()
    BINDS = auto()
    GIVES = auto()


TABLE: Mapping[tuple[State, Relation, Event], State] = {
    (State.FREE, Relation.HIGHER, Event.ASKED): State.FREE,
    (State.FREE, Relation.HIGHER, Event.BINDS): State.BOUND,
    (State.FREE, Relation.HIGHER, Event.GIVES): State.GIVEN,
    # The same again, under any attempt or session, reveals nothing new.
    (State.BOUND, Relation.SAME, Event.ASKED): State.BOUND,
    (State.BOUND, Relation.SAME, Event.BINDS): State.BOUND,
    (State.BOUND, Relation.SAME, Event.GIVES): State.GIVEN,
    (State.GIVEN, Relation.SAME, Event.ASKED): State.GIVEN,
    (State.GIVEN, Relation.SAME, Event.BINDS): State.GIVEN,
    (State.GIVEN, Relation.SAME, Event.GIVES): State.GIVEN,
    # A further take has other rows.
    (State.BOUND, Relation.HIGHER, Event.ASKED): State.BOUND,
    (State.BOUND, Relation.HIGHER, Event.BINDS): State.BOUND,
    (State.BOUND, Relation.HIGHER, Event.GIVES): State.GIVEN,
    (State.GIVEN, Relation.HIGHER, Event.ASKED): State.GIVEN,
    (State.GIVEN, Relation.HIGHER, Event.BINDS): State.BOUND,
    (State.GIVEN, Relation.HIGHER, Event.GIVES): State.GIVEN,
}
"""The next state, by the state, the relation of the ask to it, and the silo's next action."""


@dataclass(frozen=True)
class Helped:
    """The record of one sum. survivors: empty if a loss of power has lost them."""

    state: State
    take: int
    digest: bytes
    survivors: Survivors


_FREE = Helped(State.FREE, -1, b"", ())
Key = tuple[str, str, int]  # run, what is summed, round


class HelpedSums:
    """All sums that one silo has helped to open.

    Args:
        lines: The lines of `keep` in earlier processes, in order.
        keep: Takes a line, and whether the disk must have it before it returns.
        powered: A name for the time since the machine was started; under another name, lines that were not forced may
            be lost; "" where that does not matter.
        over_runs: Whether a statistic is over one set in all runs together (where a silo is a site of its own), or in
            each run.
        apart: The fewest silos that its sums may isolate together; see the module.
        repeats: Whether the silo's owner allows rounds of all its rows over other sets too.
        fewest: The fewest silos that it helps to sum.

    Attributes:
        answers: The rest of the record.

    Raises:
        PeerError: A line is not its own.
    """

    def __init__(
        self,
        lines: Iterable[str] = (),
        keep: Callable[[str, bool], None] = lambda line, force: None,  # of a run without a folder
        *,
        powered: str = "",
        over_runs: bool = False,
        apart: int = 1,
        repeats: bool = False,
        fewest: int = 1,
    ) -> None:
        self._fewest = fewest
        self._keep, self._powered = keep, powered
        self.answers = Answers(lambda line: keep(line, True), over_runs=over_runs)
        self._over_runs, self._apart, self._repeats = over_runs, apart, repeats
        self._helped = dict[Key, Helped]()
        self._last = dict[tuple[str, str], int]()  # the latest bound round
        self._reserved = dict[tuple[str, str], int]()
        self._lost = dict[tuple[str, str], int]()  # the last round that a loss of power may have lost
        self._sets = dict[Survivors, int]()
        self._read(lines)

    def ask(self, stamp: Stamp, asked: Query, cohort: Iterable[str]) -> None:
        """Raise `moretta.errors.SumSpent` if an upload could be in no sum that this silo may help to open."""
        for query in _sums_of(asked):
            helped = self._kept_of(self._key(stamp, query))
            self._next(helped, stamp, query, Event.ASKED, None)
            same = self._relation(helped, stamp, query, None) is Relation.SAME
            if same and not set(helped.survivors) <= set(cohort):
                raise _spent(helped, stamp, query)

    def answer(self, stamp: Stamp, asked: Query) -> None:
        """Record a question before this silo answers it ahead of an upload; in a take, one question alone.

        Raises:
            SumSpent: It has answered another question in this take, or one of a later take. Nothing is recorded then.
        """
        key = stamp.run, BEFORE, stamp.round
        helped = self._kept_of(key)
        state = self._next(helped, stamp, asked, Event.BINDS, ())
        record = Helped(state, max(stamp.take, helped.take), _kept(asked), ())
        if record != helped:
            self._write(key, record, whole=asked.whole)

    def bind(self, stamp: Stamp, asked: Query, survivors: Survivors, *, gives: bool) -> None:
        """Record the silos of a sum before this silo confirms them.

        Args:
            gives: Whether it gives shares.

        Raises:
            SumSpent: It has helped to open another sum of the round. Nothing is recorded then.
            PeerError: The set has fewer than `fewest` silos, or with the earlier sets could isolate fewer than `apart`.
        """
        event = Event.GIVES if gives else Event.BINDS
        records = dict[Key, Helped]()
        for query in _sums_of(asked):
            key = self._key(stamp, query)
            helped = self._kept_of(key)
            state = self._next(helped, stamp, query, event, survivors)
            records[key] = Helped(state, max(stamp.take, helped.take), _kept(query), survivors)
        self._check_floors(survivors)
        for key, one_found in records.items():
            if one_found != self._kept_of(key):
                self._write(key, one_found, whole=asked.whole)

    def _kept_of(self, key: Key) -> Helped:
        if key not in self._helped and key[2] <= self._lost.get(key[:2], -1):
            return Helped(State.GIVEN, 0, b"", ())
        return self._helped.get(key, _FREE)

    def _key(self, stamp: Stamp, asked: Query) -> Key:
        if asked.lasting and self._over_runs:  # a run's id may begin with a group's name
            return stamp.run.rpartition("/")[0], asked.once, 0
        return (stamp.run, asked.once, 0) if asked.once else (stamp.run, "", stamp.round)

    def _next(self, helped: Helped, stamp: Stamp, asked: Query, event: Event, survivors: Survivors | None) -> State:
        relation = self._relation(helped, stamp, asked, survivors)
        try:
            return TABLE[helped.state, relation, event]
        except KeyError:
            raise _spent(helped, stamp, asked) from None

    def _relation(self, helped: Helped, stamp: Stamp, asked: Query, survivors: Survivors | None) -> Relation:
        if helped.state is State.FREE or (asked.whole and not asked.once and self._repeats):
            return Relation.HIGHER
        if stamp.take < helped.take and not asked.once:
            return Relation.LOWER
        if stamp.take > helped.take and not asked.whole:
            return Relation.HIGHER
        # At the first ask, the content for this silo alone is not known yet.
        same = asked.once or (stamp.take == helped.take and helped.digest.startswith(_kept(asked)))
        return Relation.SAME if same and survivors in (None, helped.survivors) else Relation.OTHER

    def _check_floors(self, survivors: Survivors) -> None:
        if len(survivors) < self._fewest:
            raise PeerError(
                f"expected a sum of at least {self._fewest} silos ([privacy] fewest-silos), got one of {len(survivors)}"
            )
        if self._apart == 1 or survivors in self._sets:
            return
        earlier = list(filter(None, self._sets))
        if any(len(atom) < self._apart for atom in _atoms([*earlier, survivors]) - _atoms(earlier)):
            raise PeerError(
                f"expected sets of silos that together isolate no fewer than {self._apart} ([privacy] apart = "
                f"{self._apart}); wait for the silos that are away, or lower it at each site"
            )

    # Lines

    def _write(self, key: Key, helped: Helped, *, whole: bool) -> None:
        run, what, number = key
        if helped.survivors not in self._sets:
            self._keep(json.dumps(["set", *helped.survivors]), self._apart > 1)  # no reserved round covers it
            self._sets[helped.survivors] = len(self._sets)
        line = [
            "sum",
            run,
            what,
            number,
            helped.state.name,
            helped.take,
            helped.digest.hex(),
            self._sets[helped.survivors],
        ]
        # Else it is a repetition, of a round that counts as spent already, or of a further take, which a reserved round
        # does not count as spent: all are rare, and are forced at once. So are rounds of whole rows, which are long.
        ordinary = what in ("", BEFORE) and not whole
        ahead = ordinary and not helped.take and number > max(self._last.get(key[:2], -1), self._lost.get(key[:2], -1))
        reserves = not ahead or number > self._reserved.get(key[:2], -1)
        given_only = replace(self._helped.get(key, _FREE), state=helped.state) == helped  # S is kept
        self._keep(json.dumps(line), reserves and not ahead and not given_only)
        if ahead and reserves:
            self._keep(json.dumps(["reserved", run, what, number + AHEAD - 1, self._powered]), True)
            self._reserved[key[:2]] = number + AHEAD - 1
        self._take_up(key, helped)

    def _take_up(self, key: Key, helped: Helped) -> None:
        self._helped[key] = helped
        self._last[key[:2]] = max(key[2], self._last.get(key[:2], -1))

    def _read(self, lines: Iterable[str]) -> None:
        powered = dict[tuple[str, str], str]()
        sets = list[Survivors]()
        for line in lines:
            try:
                match json.loads(line):
                    case [str(kind), run, name, digest] if kind == LINE:
                        self.answers.read(run, name, digest)
                    case ["set", *names]:
                        sets.append(tuple(names))
                        self._sets[sets[-1]] = len(sets) - 1
                    case ["reserved", run, what, number, since]:
                        self._reserved[run, what], powered[run, what] = number, since
                    case ["sum", run, what, number, state, take, digest, index]:
                        helped = Helped(State[state], take, bytes.fromhex(digest), sets[index])
                        self._take_up((run, what, number), helped)
                    case _:
                        raise ValueError
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise PeerError("expected the record of sums that this silo has helped to open, got other lines") from (
                    error
                )
        if self._powered:
            self._lost = {key: last for key, last in self._reserved.items() if powered[key] != self._powered}

    def __repr__(self) -> str:
        return f"HelpedSums({len(self._helped)} sums)"


def _atoms(sets: Iterable[Survivors]) -> set[frozenset[str]]:
    """Return the silos of these sets in parts: two silos are in one part where each set has both, or neither."""
    atoms = dict[tuple[bool, ...], set[str]]()
    for silo in set[str]().union(*sets):
        atoms.setdefault(tuple(silo in each for each in sets), set()).add(silo)
    return set(map(frozenset, atoms.values()))


def _sums_of(asked: Query) -> list[Query]:
    """Return the query of an upload, and the sum of the run that it stands beside, if any."""
    lasting = asked.beside == STATISTICS
    return [asked, replace(asked, once=asked.beside, lasting=lasting)] if asked.beside else [asked]


def _kept(asked: Query) -> bytes:
    return asked.digest[:DIGEST] + asked.own[:DIGEST]


def _spent(helped: Helped, stamp: Stamp, asked: Query) -> SumSpent:
    again = stamp.take if asked.once else helped.take
    return SumSpent(again if asked.whole else helped.take + 1, helped.survivors, asked.whole)
