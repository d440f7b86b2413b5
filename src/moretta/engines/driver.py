"""What every engine does alike: play rounds, repeat what was cut short, set up anew when the cohort changes.

The driver decides; an engine only delivers. A silo that is late, refuses, fails or sends what was not asked for is
named and costs the round only itself. Where the protocol cannot do without it, the round is repeated with the rest, as
the next attempt, after a new set-up, so no mask is used twice. It is asked again in the next round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from moretta.errors import MisuseError, MorettaError, ParameterError, PeerError, RunFailed
from moretta.protocol import (
    Aborted,
    Ask,
    Exchange,
    Missing,
    Outcome,
    Phase,
    Reason,
    Replies,
    Report,
    Server,
    Stamp,
    no_phase,
)

log = logging.getLogger("moretta")

WAITS = 3  # times that a round waits for silos to come back, before the run fails

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
    """A finished round: which attempt succeeded, with which silos, what it came to, who missed some of it.

    cohort: of the set-up that the successful attempt stood on. dropped: everyone who was missing from any answer of the
    round, in its cohort or not, each with the first reason.
    """

    number: int
    attempt: int
    cohort: Sequence[str]
    report: Report
    dropped: Sequence[Dropped]


class Driver:
    """Plays a server against silos that an engine delivers to.

    run: the id that all stamps carry. least: the fewest silos a round may have. phase: the engine's clock.
    chosen: which silos take part in a round, by its number; all of them if None. back: waits until so many of some
    silos that are gone can be reached again, as long as it sees fit, and returns who can. renewed: whether, since it
    was last called, a silo has come as another process, which knows nothing of what was agreed on in a set-up. away:
    who of some silos is known not to answer now, and why; a round begins without them if the rest are enough.
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
        back: Callable[[Sequence[str], int], Sequence[str]] = lambda silos, least: (),
        renewed: Callable[[], bool] = lambda: False,
        away: Callable[[Sequence[str]], Mapping[str, Missing]] = lambda silos: {},
    ) -> None:
        self._server, self._silos, self._run = server, list(silos), run
        self._deliver, self._least, self._phase, self._chosen, self._back = deliver, least, phase, chosen, back
        self._renewed, self._away = renewed, away
        self._cohort: list[str] | None = None  # none until a set-up has succeeded

    def rounds(self, first: int, last: int) -> Iterator[RoundEnd]:
        """Play rounds `first` to `last`. Raises `moretta.errors.RunFailed` when too few silos are left."""
        before: Sequence[Dropped] = ()
        if self._chosen is not None:  # statistics are of all silos, whoever is chosen first
            _, _, before = self._repeat(first - 1, self._silos, _nothing)
        for number in range(first, last + 1):
            present = self._silos if self._chosen is None else list(self._chosen(number))
            report, attempt, dropped = self._repeat(number, present, self._server.round)
            yield RoundEnd(number, attempt, self._cohort or (), report, [*before, *dropped])
            before = ()

    def finish(self, number: int) -> tuple[Outcome, Sequence[Dropped]]:
        """Let the server release, with round number `number`, one past the last."""
        outcome, _, dropped = self._repeat(number, self._silos, self._server.finish)
        return outcome, dropped

    def _repeat(
        self, number: int, present: list[str], begin: Callable[[Stamp], Exchange[R | Aborted]]
    ) -> tuple[R, int, Sequence[Dropped]]:
        gone = dict[str, Missing]()  # everyone who was missing so far, also where the protocol did without
        wanted, lost = present, dict[str, Missing]()  # who is to play, and who of them is left out by now
        away = self._away(present)
        if len(present) - len(away) >= self._least:
            lost |= away
            present = [silo for silo in present if silo not in away]
        attempt = waits = 0
        while True:
            failure: MorettaError | None = None
            try:
                ended = self._attempt(Stamp(self._run, number, attempt), present, begin, lost)
            except RunFailed as error:  # where the protocol cannot do without those who are missing
                ended, failure = Aborted({}), error
            else:
                if isinstance(ended, Aborted):
                    if not ended.missing.keys() & set(present):
                        raise MisuseError(
                            f"round {number} was aborted without naming a silo; a protocol must name who is missing"
                        )
                    _note(lost, ended.missing)
            _note(gone, lost)
            if isinstance(ended, Report):
                _note(gone, ended.left_out)
            if not isinstance(ended, Aborted):
                dropped = [Dropped(number, silo, f"{why.reason}: {why.detail}") for silo, why in gone.items()]
                return ended, attempt, dropped
            if ended.because:
                log.warning("round %d, attempt %d is repeated: %s", number, attempt, ended.because)
            rest = [silo for silo in wanted if silo not in lost]
            if failure is None and len(rest) < self._least:
                failure = _too_few(number, lost, len(rest), self._least)
            if failure is not None:
                waits += 1
                back = self._wait_for(lost, self._least - len(rest)) if waits <= WAITS else []
                if not back:
                    raise failure
                lost = {silo: why for silo, why in lost.items() if silo not in back}
                rest = [silo for silo in wanted if silo not in lost]
                if len(rest) < self._least:
                    raise failure
            present, attempt = rest, attempt + 1

    def _wait_for(self, lost: Mapping[str, Missing], least: int) -> Sequence[str]:
        """Wait for silos that cannot be reached, where the engine can; return who is back.

        least: how many have to be; where that is none, the round cannot do without any.
        """
        away = [silo for silo, why in lost.items() if why.reason in (Reason.DISCONNECTED, Reason.LATE)]
        return self._back(away, least if least > 0 else len(away)) if away else []

    def _attempt(
        self,
        now: Stamp,
        present: list[str],
        begin: Callable[[Stamp], Exchange[R | Aborted]],
        gone: dict[str, Missing],
    ) -> R | Aborted:
        try:
            renewed = self._renewed()
            if present != self._cohort or renewed:
                self._cohort = None
                aborted = self._play(self._server.setup(now, present), gone)
                if aborted is not None:
                    return aborted
                self._cohort = present
            return self._play(begin(now), gone)
        except PeerError as error:  # masks hide whose fault it is, so there is nobody to go on without
            raise RunFailed(f"{now}: {error}; the last checkpoint is whole, so go on with --resume") from error

    def _play(self, exchange: Exchange[R], gone: dict[str, Missing]) -> R:
        """Drive one generator to its end, and note who is missing in `gone`.

        What the server computes outside its own phases is aggregation.
        """
        replies: Replies | None = None
        while True:
            try:
                with self._phase("aggregation"):
                    ask = exchange.send(replies)  # type: ignore[arg-type]  # None starts a generator
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            replies = self._deliver(ask)
            _note(gone, replies.missing)


def _note(gone: dict[str, Missing], missing: Mapping[str, Missing]) -> None:
    """Add who is missing; the first reason is the one that led to the others."""
    for silo, why in missing.items():
        gone.setdefault(silo, why)


def _too_few(number: int, missing: Mapping[str, Missing], left: int, least: int) -> ParameterError | RunFailed:
    if all(why.reason is Reason.BAD_INPUT for why in missing.values()):
        (silo, why), *others = missing.items()
        like = f" (and likewise {', '.join(name for name, _ in others)})" if others else ""
        if number <= 1:
            return ParameterError(f"round {number}: {silo}: {why.detail}{like}")
        return RunFailed(
            f"round {number}: {silo}: {why.detail}{like}; earlier rounds went well, so the run has probably diverged: "
            "a lower learning rate helps, and the last checkpoint is whole"
        )
    reasons = "; ".join(f"{silo}: {why.detail}" for silo, why in missing.items())
    return RunFailed(
        f"round {number} cannot be completed by {left} of {left + len(missing)} silos, at least {least} are needed "
        f"({reasons}); the last checkpoint is whole, so mend the silos and go on with --resume"
    )


def _nothing(now: Stamp) -> Exchange[None]:
    """Ask nothing: what is wanted is the set-up before it."""
    yield from ()
