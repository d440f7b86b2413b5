"""The server's half of the engine: asks become submissions and polls, and sites' answers become replies.

`moretta.engines.flare.liveness` knows which sites are available.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from moretta.contract.codec import LARGEST, Codec
from moretta.contract.messages import Message
from moretta.contract.roles import Ask, Missing, Reason, Replies
from moretta.engines.checkpoint import CheckpointId
from moretta.engines.delivery import TrafficCounter, replies_of, valid
from moretta.engines.flare import envelope as wire
from moretta.engines.flare.liveness import NONSENSE, PATIENCE, PLAIN_LIMIT, Liveness, Send
from moretta.engines.flare.signing import Bytes
from moretta.engines.usage import Clock
from moretta.engines.views import Recorder
from moretta.errors import CodecError, ParameterError
from moretta.secure_aggregation.identity import Identity

log = logging.getLogger("moretta")

FIRST = 0.5  # seconds until a site is asked again, doubled each time, so that a killed site soon counts as gone
WAIT = 0.25  # seconds that a poll waits at the site
MISSES = 4  # requests in a row without an answer until a site counts as gone
LONGEST = 600.0  # seconds for a silo to answer without a deadline
BACK = 600.0  # seconds that a round waits for sites that it needs
KEEPING = 60.0  # seconds for a site to save its state, or to accept the run's end

Outcome = tuple[wire.WorkDone, Bytes] | Missing


@dataclass
class _Part:
    """One site's part of an exchange.

    `until`: its deadline. `taken`: whether it has accepted the work. `misses`: successive requests that it has not
    answered, or has denied. `denied`: whether it has denied one. `long`: whether its answer needs a stream.
    """

    until: float
    taken: bool = False
    misses: int = 0
    denied: bool = False
    long: bool = False
    outcome: Outcome | None = None


class Sites:
    """Deliver asks to sites by the messages that a FLARE server job can send.

    Args:
        names: Of all silos.
        send: Sends bytes to them.
        codec: Of the run's messages.
        hello: The first request to each, with the run's place and session.
        identity: The server's own, which sites have pinned.
        keys: Of the silos' identities, by name, if there is a roster.
        recorder: Records the server's view.
        deadline: Seconds from a question to its answer.
        largest: The most bytes of a message from a site.
        absent: Silos that never appear, because FLARE adds none to a running job.
        aborted: Raises when the job is to end.
        waiting: Called with a sentence when the server waits.
    """

    def __init__(
        self,
        names: Iterable[str],
        send: Send,
        codec: Codec,
        hello: wire.Hello,
        identity: Identity,
        *,
        keys: Mapping[str, bytes] | None = None,
        recorder: Recorder | None = None,
        deadline: float | None = None,
        largest: int = LARGEST,
        absent: Iterable[str] = (),
        aborted: Callable[[], None] = lambda: None,
        waiting: Callable[[str], None] = log.warning,
    ) -> None:
        self.clock = Clock()
        self._live = Liveness(names, send, hello, identity, keys or {}, largest, absent)
        self._codec, self._recorder = codec, recorder
        self._deadline, self._aborted, self._waiting = deadline or LONGEST, aborted, waiting
        self._traffic = TrafficCounter()
        self.take_traffic = self._traffic.take
        self._number = 0
        self.peak_mib: float | None = None
        self.renewed, self.speak = self._live.renewed, self._live.speak

    def gather(self, least: int, wait: float) -> None:
        """Greet all sites until each has appeared or refused, for at most `wait` seconds.

        Raises:
            ParameterError: Fewer than `least` sites have appeared; the sentence names the missing ones and the reasons.
        """
        until, sites = time.monotonic() + wait, self._live.sites
        while waited_for := [name for name in self._live.away() if sites[name].refusal is None]:
            if time.monotonic() > until:
                break
            self._aborted()
            self._live.greet(waited_for)
            time.sleep(0.1)
        missing = self._live.away()
        for name, why in missing.items():
            log.warning("site `%s` is missing, %s: %s", name, why.reason, why.detail)
        if len(sites) - len(missing) < least:
            reasons = "; ".join(f"{name}: {why.detail}" for name, why in missing.items())
            raise ParameterError(
                f"{len(sites) - len(missing)} of {len(sites)} sites take part after waiting up to {wait:g} s, at least "
                f"{least} are needed ({reasons}); fix them and serve again"
            )

    def deliver(self, ask: Ask) -> Replies:
        """Send each silo its message; return the valid answers and the reasons of the missing ones."""
        encoded: dict[int, bytes] = {}  # the same message often goes to every silo
        bodies: dict[str, bytes] = {}
        for silo, message in ask.messages.items():
            if id(message) not in encoded:
                encoded[id(message)] = self._codec.encode(message)
            bodies[silo] = encoded[id(message)]
            self._traffic.down(message, len(bodies[silo]))
            self._record("sent", silo, message, bodies[silo])
        outcomes = self._exchange("answer", bodies, self._deadline)
        return replies_of(ask, lambda silo, message: self._answer(silo, ask, message, outcomes[silo]))

    def back(self, silos: Sequence[str], least: int) -> Sequence[str]:
        """Wait until `least` of some absent sites have returned, for `BACK` seconds at most; return those."""
        until = time.monotonic() + BACK
        some = f"{least} of " if least < len(silos) else ""
        self._waiting(f"waiting up to {BACK:g} s for {some}{', '.join(silos)} to come back")
        free: list[str] = []
        while time.monotonic() < until:
            self._aborted()
            self._live.greet(silos)
            free = [name for name in self._live.processes(silos) if name not in self._still_busy([name])]
            if len(free) >= least:
                break
            time.sleep(0.1)
        self._log_returned()
        return free

    def away(self, silos: Sequence[str]) -> Mapping[str, Missing]:
        """Return which silos are unavailable now, and why; those that may have returned are greeted first."""
        self._live.greet(silos)
        self._log_returned()
        return self._live.away(silos)

    def _log_returned(self) -> None:
        if returned := ", ".join(self._live.returned):
            self._live.returned = []
            self._waiting(f"restarted, and back: {returned}; all get new keys by a set-up, and continue together")

    def keep(self, place: CheckpointId) -> None:
        """Have all available sites save their states; name those that fail, which would resume from older ones."""
        self._live.hello = self._live.hello.model_copy(update={"round": place.round})
        self._order("keep", b"", place.round, "did not keep its state")

    def end(self, released: bytes) -> None:
        """Report the end of the run to all sites, with its release as safetensors; nothing if empty."""
        self._order("end", released, self._live.hello.round, "did not take what the run released")

    def close(self) -> None:
        """Do nothing: the sites' jobs end with the server's."""

    def _order(self, work: wire.Work, body: bytes, round: int, otherwise: str) -> None:
        bodies = dict.fromkeys(self._live.processes(), body)
        for name, outcome in self._exchange(work, bodies, KEEPING, round).items():
            if isinstance(outcome, Missing):
                log.warning("round %d: silo `%s` %s: %s", round, name, otherwise, outcome.detail)

    def _answer(self, silo: str, ask: Ask, message: Message, outcome: Outcome) -> Message | Missing:
        if isinstance(outcome, Missing):
            return outcome
        done, body = outcome
        for phase, seconds in done.seconds.items():
            self.clock.charge(phase, seconds)
        if done.peak_mib is not None:
            self.peak_mib = max(self.peak_mib or 0.0, done.peak_mib)
        try:
            answer = self._codec.decode(body)
        except CodecError as error:
            return Missing(Reason.MALFORMED, str(error))
        self._traffic.up(message, answer)
        self._record("received", silo, answer, body)
        return valid(silo, ask, message, answer)

    def _record(self, direction: str, silo: str, message: Message, data: bytes | memoryview) -> None:
        if self._recorder is not None and self._recorder.wants(message.stamp.round):
            self._recorder.saw("server", direction, silo, bytes(data))

    def _exchange(
        self, work: wire.Work, bodies: Mapping[str, bytes], seconds: float, round: int = 0
    ) -> Mapping[str, Outcome]:
        """Submit work to silos, and poll until each has done it, failed, or run out of time."""
        self._live.greet(bodies)
        self._number += 1
        outcomes: dict[str, Outcome] = dict(self._live.away(bodies))
        parts = {name: _Part(time.monotonic() + seconds) for name in bodies if name not in outcomes}
        for name in self._still_busy(parts):
            parts[name].outcome = Missing(Reason.LATE, "is still busy with what it was asked before")
        submit = wire.Submit(number=self._number, work=work, round=round)
        while waiting := {name: asking for name, asking in parts.items() if asking.outcome is None}:
            self._aborted()
            self._ask_once(waiting, submit, bodies, seconds)
        return outcomes | {name: asking.outcome for name, asking in parts.items() if asking.outcome is not None}

    def _ask_once(
        self, waiting: Mapping[str, _Part], submit: wire.Submit, bodies: Mapping[str, bytes], seconds: float
    ) -> None:
        """Send the work to sites that have not accepted it, and ask the others whether it is done."""
        now = time.monotonic()
        for name, asking in waiting.items():
            if now >= asking.until:
                late = f"expected an answer in {seconds:g} s, and it was still busy"
                asking.outcome, self._live.sites[name].overdue = Missing(Reason.LATE, late), submit.number
        left = {name: asking for name, asking in waiting.items() if asking.outcome is None}
        wait = max(0.0, min((WAIT, *(asking.until - now for asking in left.values()))))
        # Submitting to some and polling others at once is rare; then a poll does not wait.
        wait = wait if all(asking.taken for asking in left.values()) else 0.0
        poll = wire.Poll(number=submit.number, wait=wait)
        requests: dict[str, wire.Signed] = {name: poll if asking.taken else submit for name, asking in left.items()}
        # Another addressee may have forwarded its copy before ours arrived. A copy for this site alone can not.
        requests |= {name: requests[name].model_copy() for name, asking in left.items() if asking.denied}
        handed = {name: bodies[name] for name, asking in left.items() if not asking.taken}
        long = any(asking.long for asking in left.values()) or any(len(body) > PLAIN_LIMIT for body in handed.values())
        misses = max((asking.misses for asking in left.values()), default=0)
        seconds = wait + (PATIENCE if long else min(PATIENCE, FIRST * 2**misses))
        # A plain request to a dead process waits in vain; a stream to it fails at once.
        long = long or misses > 0
        for name, reply in self._live.requests(requests, handed, seconds, long).items():
            self._take(name, left[name], reply)

    def _still_busy(self, names: Iterable[str]) -> list[str]:
        """Return the sites that are busy with overdue work, because they would be late again."""
        sites = self._live.sites
        polls: dict[str, wire.Signed] = {
            name: wire.Poll(number=sites[name].overdue, wait=WAIT) for name in names if sites[name].overdue
        }
        busy = list[str]()
        for name, reply in self._live.requests(polls, {}, WAIT + PATIENCE, True).items():
            if isinstance(reply, tuple) and isinstance(reply[0], wire.Busy) and not reply[0].long:
                busy.append(name)
            else:
                sites[name].overdue = 0
        return busy

    def _take(self, name: str, asking: _Part, reply: tuple[wire.Reply, Bytes] | Missing) -> None:
        site = self._live.sites[name]
        match reply:
            case Missing():
                asking.misses += 1
                if reply.reason is not Reason.LATE:
                    asking.outcome = site.lose(reply)
                elif asking.misses >= MISSES:
                    asking.outcome = site.lose(Missing(Reason.DISCONNECTED, "no longer says that it is at work"))
                return
            case (wire.Denied() as denied, _):
                asking.misses, asking.denied = asking.misses + 1, True
                if asking.misses >= MISSES:
                    why = f"does not take what this server sends: {denied.sentence}"
                    asking.outcome = site.lose(Missing(Reason.REFUSED, why))
                return
            case (wire.Busy() as busy, _):
                asking.taken, asking.long = True, busy.long
            case (wire.WorkDone() as done, body):
                asking.outcome, site.fresh = (done, body), False
            case (wire.Failed() as failed, _) if site.fresh and failed.reason == "refused":
                # It was asked to continue with the keys of its earlier process.
                asking.outcome = Missing(Reason.DISCONNECTED, f"was restarted: {failed.sentence}")
            case (wire.Failed() as failed, _):
                asking.outcome = Missing(Reason(failed.reason), failed.sentence)
            case (wire.Stranger(), _):
                # Its keys are lost with its process, so it takes part again from the next set-up on.
                asking.outcome = site.lose(Missing(Reason.DISCONNECTED, "was restarted"))
                site.pause = 0.0
            case _:
                asking.outcome = NONSENSE
        asking.misses = 0
