"""The driver that all engines share: it runs rounds, repeats failed ones, and repeats the set-up if the cohort changes.

The driver decides; an engine only delivers. A silo that is late, refuses, fails or sends an invalid answer is named and
misses only this round; the next round asks it again. If the protocol needs it, the others repeat the round as the next
attempt after a new set-up, so no mask is used twice.

A silo helps to open one sum of a take (`moretta.secure_aggregation.one_sum`). Silos may have been bound to a sum before
the attempt failed, or report that they were (`Reason.SPENT`). Then the next take follows, with other rows. If silos
upload all their rows, the same silos repeat the same take, and the driver waits for them: the set that most of them
name (`moretta.engines.takes`). A silo that names an impossible set counts as malformed. A silo that was silent when
others were bound has cost a take. After two it is left out of the next round, and then admitted again by a new set-up,
`READMITS` times in a session.

A round with too few silos is lost if the absent ones would complete it. The next round follows with a new set-up if it
draws other rows, or if no silo was asked to open a sum of the lost one. If all rows are used and a sum may be open, the
next round would sum the same rows under the same model over other silos. So the run fails with an error.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeVar

from moretta.contract.messages import Stamp
from moretta.contract.roles import Aborted, Exchange, Missing, Outcome, Reason, Replies, Report, Server
from moretta.contract.wording import LARGE_TARGETS
from moretta.engines.delivery import Delivery
from moretta.engines.takes import AskedTakes, OpenedSum, RoundTakes, can_play, opened_by, opens
from moretta.errors import MisuseError, MorettaError, ParameterError, PeerError, RunFailed

log = logging.getLogger("moretta")

WAITS = 3  # times that a round waits for absent silos before the run fails
COSTS = 2  # takes that a silo may cost before it is left out
READMITS = 5  # times in a session that it is admitted again after that
LOSSES = 3  # rounds in a row that may be lost before the run fails

R = TypeVar("R")


@dataclass(frozen=True)
class DroppedSilo:
    """A silo that missed an answer of a round, and why."""

    round: int
    silo: str
    reason: str


@dataclass(frozen=True)
class RoundEnd:
    """A finished round.

    Args:
        attempt, take: Of the successful try; of the last one in a lost round, as is `cohort`.
        cohort: The silos of that attempt's set-up.
        dropped: Every silo that missed an answer of the round, in its cohort or not, with the first reason.
        sums: Those opened since the previous round, also in aborted attempts.
        lost: Why the round was lost, else empty.
    """

    number: int
    attempt: int
    cohort: Sequence[str]
    report: Report
    dropped: Sequence[DroppedSilo]
    take: int = 0
    sums: Sequence[OpenedSum] = ()
    lost: str = ""


class RoundLost(RunFailed):
    """Too few silos are left for a round, and the next round may follow. end: the lost round."""

    def __init__(self, end: RoundEnd) -> None:
        super().__init__(end.lost)
        self.end = end


class Driver:
    """Run a server against the silos of an engine.

    Args:
        run: The id of all stamps.
        least: The fewest silos of a round.
        chosen: Returns the silos of a round by its number; None for all.
        asked: The takes that earlier sessions asked for.
        draws: Whether each round draws other rows than the previous one.
        only: Whether this is the run's only session, so that no earlier one can have opened a sum.
    """

    def __init__(
        self,
        server: Server,
        silos: Sequence[str],
        run: str,
        engine: Delivery,
        least: int,
        chosen: Callable[[int], Sequence[str]] | None = None,
        asked: AskedTakes | None = None,
        *,
        draws: bool = False,
        only: bool = False,
    ) -> None:
        self._server, self._silos, self._run = server, list(silos), run
        self._engine, self._least, self._chosen, self._draws, self._only = engine, least, chosen, draws, only
        self._asked = asked or AskedTakes()
        self._cohort: list[str] | None = None  # none until a set-up has succeeded
        self._present: Sequence[str] = ()  # the silos of the round
        self._cost = Counter[str]()  # lost takes, by the silo that was silent when the others were bound
        self._out = dict[str, float]()  # the last round that a silo is left out of for its costs
        self._opens = False  # whether any silo was asked to open a sum of the round
        self._sums = list[OpenedSum]()

    def rounds(self, first: int, last: int) -> Iterator[RoundEnd]:
        """Run rounds `first` to `last`. Raises `moretta.errors.RunFailed` when too few silos are left."""
        before: Sequence[DroppedSilo] = ()
        if self._chosen is not None:  # statistics are over all silos, even if only some run the first round
            _, _, before = self._repeat(first - 1, self._silos, _nothing)
        row = 0  # the number of lost rounds in a row
        for number in range(first, last + 1):
            present = self._silos if self._chosen is None else list(self._chosen(number))
            try:
                report, now, dropped = self._repeat(number, present, self._server.round)
                end, row = RoundEnd(number, now.attempt, self._cohort or (), report, dropped, now.take), 0
            except RoundLost as lost:
                if row == LOSSES:
                    raise RunFailed(f"{lost}; the {LOSSES} rounds before it were lost too") from None
                if number == last and row == number - first:  # the run would have no round
                    raise
                log.warning("round %d is lost: %s", number, lost)
                end, row = lost.end, row + 1
                self._cohort = None  # silos in the middle of the lost round begin with new keys
            yield replace(end, dropped=[*before, *end.dropped], sums=self.take_sums())
            before = ()

    def finish(self, number: int) -> tuple[Outcome, Sequence[DroppedSilo]]:
        """Let the server release its result, in round `number`, one past the last."""
        outcome, _, dropped = self._repeat(number, self._silos, self._server.finish)
        return outcome, dropped

    def take_sums(self) -> Sequence[OpenedSum]:
        """Return the sums opened since the last call: after `finish`, those of the release."""
        taken, self._sums = self._sums, []
        return taken

    def _repeat(
        self, number: int, present: list[str], begin: Callable[[Stamp], Exchange[R | Aborted]]
    ) -> tuple[R, Stamp, Sequence[DroppedSilo]]:
        gone = dict[str, Missing]()  # every silo that was missing so far, also if the protocol continued without it
        # The silos of the round, and those of them that are already left out.
        self._present, self._opens, lost = present, False, self._left_out(number, present)
        away = {silo: why for silo, why in self._engine.away(present).items() if silo not in lost}
        if len(present) - len(lost) - len(away) >= self._least:
            lost |= away
        takes, attempt, waits = RoundTakes(present), 0, 0
        while True:
            now, present = Stamp(self._run, number, attempt, takes.take), takes.playing(lost)
            self._asked.ask(now)
            ended, failure = self._tried(now, present, begin, lost)
            if not isinstance(ended, Aborted):
                for missing in (lost, ended.left_out if isinstance(ended, Report) else {}, takes.others()):
                    _note(gone, missing)
                return ended, now, _dropped(number, gone)
            _note(lost, takes.after(ended, lost))
            _note(gone, lost)
            if ended.because:
                log.warning("round %d, attempt %d is repeated: %s", number, attempt, ended.because)
            shortage = None if failure else self._shortage(number, takes, lost)
            if (failure := failure or shortage) is not None:
                waits += 1
                named = takes.names_silos
                try:
                    lost = self._after_waiting(failure, waits, takes, lost)
                except MorettaError as raised:
                    if raised is not shortage or (named and not self._only) or not self._may_be_lost(takes, lost):
                        raise
                    end = RoundEnd(number, attempt, present, Report({}), _dropped(number, gone), now.take)
                    raise RoundLost(replace(end, lost=str(raised))) from None
            attempt += 1

    def _tried(
        self,
        now: Stamp,
        present: list[str],
        begin: Callable[[Stamp], Exchange[R | Aborted]],
        lost: dict[str, Missing],
    ) -> tuple[R | Aborted, MorettaError | None]:
        """Return an attempt's result, and the failure if the protocol needs missing silos, which `lost` receives."""
        ended: R | Aborted | None = None
        try:
            renewed = self._engine.renewed()
            if present != self._cohort or renewed:
                self._cohort = None
                ended = self._play(self._server.setup(now, present), lost, set_up=True)
            if ended is None:
                self._cohort = present
                ended = self._play(begin(now), lost)
        except PeerError as error:  # masks hide whose fault it is, so no silo can be left out
            failure = RunFailed(f"{now}: {error}")
            failure.__cause__ = error
            return Aborted({}), failure
        except RunFailed as error:
            return Aborted({}), error
        if isinstance(ended, Aborted):
            if not ended.missing.keys() & set(present):
                raise MisuseError(
                    f"round {now.round} was aborted without naming a silo; a protocol must name who is missing"
                )
            _note(lost, ended.missing)
            self._charge(now.round, [silo for silo in ended.opened if ended.missing[silo].spent is None])
        return ended, None

    def _shortage(self, number: int, takes: RoundTakes, lost: Mapping[str, Missing]) -> MorettaError | None:
        """Return why the remaining silos cannot run a round; None if they can."""
        rest = takes.playing(lost)
        if len(rest) < len(takes.only):
            return RunFailed(_only_by(number, takes.only, lost))
        return _too_few(number, {**lost, **takes.others()}, len(rest), self._least) if len(rest) < self._least else None

    def _after_waiting(
        self,
        failure: MorettaError,
        waits: int,
        takes: RoundTakes,
        lost: Mapping[str, Missing],
    ) -> dict[str, Missing]:
        """Wait for silos that are away; return those still left out. Raises the failure if too few come back."""
        needed = len(takes.only) or self._least
        away = [silo for silo, why in lost.items() if why.reason in AWAY]
        least = needed - len(takes.playing(lost))  # 0 or less means all, because the round needs each
        back = self._engine.back(away, least if least > 0 else len(away)) if away and waits <= WAITS else []
        left = {silo: why for silo, why in lost.items() if silo not in back}
        if not back:
            left |= takes.without_repeaters()
        elif len(takes.playing(left)) < needed:
            raise failure
        if len(left) == len(lost) or len(takes.playing(left)) < self._least:
            raise failure
        return left

    def _may_be_lost(self, takes: RoundTakes, lost: Mapping[str, Missing]) -> bool:
        """Return whether only absent silos keep the round from its end, and the next round reveals nothing.

        It reveals nothing if it sums other rows, or if no sum of this round can be open.
        """
        away = [silo for silo, why in lost.items() if why.reason in AWAY]
        return len(takes.playing(lost)) + len(away) >= self._least and (self._draws or not self._opens)

    def _charge(self, number: int, silos: Sequence[str]) -> None:
        """Record which silos have cost a take of a round, and how long those with too many are left out."""
        for silo in silos:
            self._cost[silo] += 1
            times, rest = divmod(self._cost[silo], COSTS)
            if not rest:
                self._out[silo] = number + 1 if times <= READMITS else inf

    def _left_out(self, number: int, present: Sequence[str]) -> dict[str, Missing]:
        """Return the silos that are left out of this round for their costs, unless too few would remain."""
        out = [silo for silo in present if self._out.get(silo, -1) >= number]
        if len(present) - len(out) < self._least:
            return {}
        return {
            silo: Missing(Reason.DISCONNECTED, _COSTLY + (_FOR_GOOD if self._out[silo] == inf else _ONCE))
            for silo in out
        }

    def _play(self, exchange: Exchange[R], gone: dict[str, Missing], *, set_up: bool = False) -> R:
        """Drive one generator to its end; add missing silos to `gone`, and record the opened sums.

        The server's work outside its own phases counts as aggregation.
        """
        replies: Replies | None = None
        opened, used = dict[tuple[Stamp, tuple[str, ...]], None](), False
        try:
            while True:
                try:
                    with self._engine.clock.phase("aggregation"):
                        ask = exchange.send(replies)  # type: ignore[arg-type]  # None starts a generator
                except StopIteration as end:
                    used = not isinstance(end.value, Aborted)
                    return end.value  # type: ignore[no-any-return]
                self._opens |= not set_up and opens(ask)
                received = self._engine.deliver(ask)
                # A silo that reports this has helped to open a sum of this round, perhaps in an earlier session.
                spent = any(why.spent is not None for why in received.missing.values())
                self._opens |= spent and not set_up and not self._only
                replies = self._believed(received)
                _note(gone, replies.missing)
                opened |= dict.fromkeys(opened_by(ask, replies))
        finally:
            self._sums += [
                OpenedSum(at.round, at.take, silos, at.run.rpartition("/")[0], set_up, used) for at, silos in opened
            ]

    def _believed(self, replies: Replies) -> Replies:
        """Return replies with credible claims of spent takes; a set unable to repeat the round is malformed."""
        claims = dict[str, Missing]()
        for silo, why in replies.missing.items():
            if why.spent is None:
                continue
            if can_play(why.spent, silo, self._present, self._least):
                claims[silo] = replace(why, spent=self._asked.believed(why.spent))
                continue
            detail = (
                f"it reports that only {list(why.spent.survivors)!r:.200} may repeat this round; expected at least "
                f"{self._least} silos of the round, itself among them; if others took part before, bring them back, "
                "or allow sums over other sets at each silo ([privacy] repeat-whole-rows)"
            )
            log.warning("%s: silo `%s` is missing, %s: %s", why.spent.stamp, silo, Reason.MALFORMED, detail)
            claims[silo] = Missing(Reason.MALFORMED, detail)
        return replace(replies, missing={**replies.missing, **claims}) if claims else replies


AWAY = (Reason.DISCONNECTED, Reason.LATE)  # of silos that may return without help

_COSTLY = f"it was silent {COSTS} times when the others had said who is in a sum, and "
_ONCE = "sits this round out; it is set up anew in the next"
_FOR_GOOD = f"has been let in again {READMITS} times, so it is left out until the run is resumed"


def _dropped(number: int, gone: Mapping[str, Missing]) -> list[DroppedSilo]:
    return [DroppedSilo(number, silo, f"{why.reason}: {why.detail}") for silo, why in gone.items()]


def _only_by(number: int, only: Sequence[str], lost: Mapping[str, Missing]) -> str:
    missing = ", ".join(silo for silo in only if silo in lost)
    return (
        f"round {number} can only be repeated by the same silos as before, {', '.join(only):.300}, because sums of all "
        f"rows over others could be subtracted; missing: {missing:.300}; bring them back, or allow it at each silo "
        "([privacy] repeat-whole-rows in silo.toml)"
    )


def _note(gone: dict[str, Missing], missing: Mapping[str, Missing]) -> None:
    """Add missing silos with their first reasons, which led to the others. A silo of another take is present."""
    for silo, why in missing.items():
        if why.spent is None:
            gone.setdefault(silo, why)


def _too_few(number: int, missing: Mapping[str, Missing], left: int, least: int) -> ParameterError | RunFailed:
    if missing and all(why.reason is Reason.BAD_INPUT for why in missing.values()):
        (silo, why), *others = missing.items()
        like = f" (and likewise {', '.join(name for name, _ in others)})" if others else ""
        if number <= 1:
            return ParameterError(f"round {number}: {silo}: {why.detail}{like}")
        return RunFailed(
            f"round {number}: {silo}: {why.detail}{like}; earlier rounds went well, so the run has probably diverged: "
            f"a lower learning rate helps, or {LARGE_TARGETS}"
        )
    reasons = "; ".join(f"{silo}: {why.detail}" for silo, why in missing.items()) or "nobody is missing"
    return RunFailed(
        f"round {number} cannot be completed by {left} of {left + len(missing)} silos, at least {least} are needed "
        f"({reasons}); {_way_out(missing, left)}"
    )


def _way_out(missing: Mapping[str, Missing], left: int) -> str:
    """Return the remedy, by the cause: an absent machine, the model, or a silo."""
    reasons = {why.reason for why in missing.values()}
    if reasons <= {*AWAY}:
        return "bring the others back"
    if reasons == {Reason.FAILED} and len({why.detail for why in missing.values()}) == 1 and not left:
        return "each silo reports the same, so the cause is the model or a setting, and no silo's rows: fix that"
    return "fix what these silos report"


def _nothing(now: Stamp) -> Exchange[None]:
    """Ask nothing, after a set-up."""
    yield from ()
