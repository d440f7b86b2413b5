"""What every engine does alike: play rounds, repeat what was cut short, set up anew when the cohort changes.

The driver decides; an engine only delivers. A silo that is late, refuses, fails or sends what was not asked for is
named and costs the round only itself: the round is repeated with the rest, as the next attempt, after a new set-up,
so no mask is used twice. It is asked again in the next round.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from moretta.errors import MisuseError, ParameterError, RunFailed
from moretta.protocol import Aborted, Ask, Exchange, Missing, Outcome, Phase, Reason, Replies, Report, Server, Stamp
from moretta.protocol import no_phase as no_phase

R = TypeVar("R")
Deliver = Callable[[Ask], Replies]


@dataclass(frozen=True)
class Dropped:
    """A silo that missed a round, and why."""

    round: int
    silo: str
    reason: str


@dataclass(frozen=True)
class RoundEnd:
    """A finished round: which attempt succeeded, what it came to, who missed it."""

    number: int
    attempt: int
    report: Report
    dropped: Sequence[Dropped]


class Driver:
    """Plays a server against silos that an engine delivers to.

    run: the id that all stamps carry. least: the fewest silos a round may have. phase: the engine's clock.
    chosen: which silos take part in a round, by its number; all of them if None.
    """

    def __init__(
        self,
        server: Server,
        silos: Sequence[str],
        run: str,
        deliver: Deliver,
        least: int,
        phase: Phase = no_phase,
        chosen: Callable[[int], Sequence[str]] | None = None,
    ) -> None:
        self._server, self._silos, self._run = server, list(silos), run
        self._deliver, self._least, self._phase, self._chosen = deliver, least, phase, chosen
        self._cohort: list[str] | None = None  # none until a set-up has succeeded

    def rounds(self, first: int, last: int) -> Iterator[RoundEnd]:
        """Play rounds `first` to `last`. Raises `moretta.errors.RunFailed` when too few silos are left."""
        for number in range(first, last + 1):
            present = self._silos if self._chosen is None else list(self._chosen(number))
            report, attempt, dropped = self._repeat(number, present, self._server.round)
            yield RoundEnd(number, attempt, report, dropped)

    def finish(self, number: int) -> tuple[Outcome, Sequence[Dropped]]:
        """Let the server release, with round number `number`, one past the last."""
        outcome, _, dropped = self._repeat(number, self._silos, self._server.finish)
        return outcome, dropped

    def _repeat(
        self, number: int, present: list[str], begin: Callable[[Stamp], Exchange[R | Aborted]]
    ) -> tuple[R, int, Sequence[Dropped]]:
        gone = dict[str, Missing]()
        for attempt in itertools.count():
            ended = self._attempt(Stamp(self._run, number, attempt), present, begin)
            if not isinstance(ended, Aborted):
                dropped = [Dropped(number, silo, f"{why.reason}: {why.detail}") for silo, why in gone.items()]
                return ended, attempt, dropped
            gone |= ended.missing
            rest = [silo for silo in present if silo not in gone]
            if len(rest) == len(present):
                raise MisuseError(
                    f"round {number} was aborted without naming a silo; a protocol must name who is missing"
                )
            if len(rest) < self._least:
                raise _too_few(number, gone, len(rest), self._least)
            present = rest
        raise AssertionError("unreachable: the attempts are counted without end")

    def _attempt(self, now: Stamp, present: list[str], begin: Callable[[Stamp], Exchange[R | Aborted]]) -> R | Aborted:
        if present != self._cohort:
            self._cohort = None
            aborted = self._play(self._server.setup(now, present))
            if aborted is not None:
                return aborted
            self._cohort = present
        return self._play(begin(now))

    def _play(self, exchange: Exchange[R]) -> R:
        """Drive one generator to its end; what the server computes outside its own phases is aggregation."""
        replies: Replies | None = None
        while True:
            try:
                with self._phase("aggregation"):
                    ask = exchange.send(replies)  # type: ignore[arg-type]  # None starts a generator
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            replies = self._deliver(ask)


def _too_few(number: int, missing: Mapping[str, Missing], left: int, least: int) -> ParameterError | RunFailed:
    reasons = "; ".join(f"{silo}: {why.detail}" for silo, why in missing.items())
    if all(why.reason is Reason.BAD_INPUT for why in missing.values()):
        return ParameterError(f"round {number}: {reasons}")
    return RunFailed(
        f"round {number} cannot be completed by {left} of {left + len(missing)} silos, at least {least} are needed "
        f"({reasons}); the last checkpoint is whole, so mend the silos and go on with --resume"
    )
