"""The server's half of the engine: asks become submissions and polls, and sites' answers become replies.

A site that is dead, hangs or sends nonsense is missing from the replies with its reason. It is greeted again whenever
something is asked of it, at most once in `AGAIN` seconds, so that it can come back. A greeting is two steps: the site
gives its process id, and then gets a hello that is signed over it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moretta.contract.codec import LARGEST, Codec
from moretta.contract.messages import Message
from moretta.contract.roles import Ask, Missing, Reason, Replies
from moretta.engines.checkpoint import CheckpointId
from moretta.engines.delivery import TrafficCounter, replies_of, valid
from moretta.engines.flare.envelope import (
    Awake,
    Busy,
    Denied,
    Failed,
    Hello,
    Knock,
    Poll,
    Refused,
    Reply,
    Signed,
    SiteReady,
    Stranger,
    Submit,
    Work,
    WorkDone,
    pack,
    reply_of,
)
from moretta.engines.flare.signing import Bytes, ServerSession
from moretta.engines.usage import Clock
from moretta.engines.views import Recorder
from moretta.errors import CodecError, ParameterError, PeerError
from moretta.secure_aggregation.identity import Identity

log = logging.getLogger("moretta")

PATIENCE = 3.0  # seconds in which a living site begins to answer; of a stream none count in which bytes move
FIRST = 0.5  # the same before it is asked again; each time twice as long, so that a killed one is soon known for gone
WAIT = 0.25  # seconds that a poll waits at the site
MISSES = 4  # requests in a row without an answer until a site counts as gone
PLAIN_LIMIT = 1 << 18  # bytes of an envelope's body that is no stream: what moves within `FIRST` at 5 Mbit/s
LONGEST = 600.0  # seconds in which a silo is to answer where no deadline is given
AGAIN = 0.5  # seconds from one attempt to reach a site that is gone to the next
LATER = 10.0  # the same for one that refused, and may be mended, and the most for one that answers nothing
BACK = 600.0  # seconds that a round waits for sites without which it cannot go on
KEEPING = 60.0  # seconds in which a site is to have kept its state, or taken the run's end

Send = Callable[[Mapping[str, bytes], float, bool], Iterable[tuple[str, "bytes | memoryview | Missing"]]]
"""Sends each silo its bytes, waits so many seconds for all replies, and yields each one's or why there is none.

Long ones are yielded as they come, so that one is opened, and laid into a file, while others are on their way. Its
last argument: whether bytes may be long, there or back."""


NOT_YET = Missing(Reason.DISCONNECTED, "has not come yet")


@dataclass
class _Site:
    """What is known of a site.

    process_id: None until it has answered; last: the last one that was known. fresh: whether that process has replaced
    an earlier one in the run and has done nothing yet. refusal: why it takes no part. gone: why it is not there.
    tried: when it was last greeted. pause: seconds until it is greeted again. overdue: the number of the work that it
    was late with, 0 for none.
    """

    process_id: str | None = None
    last: str = ""
    fresh: bool = False
    refusal: str | None = None
    gone: Missing = NOT_YET
    tried: float = float("-inf")
    pause: float = 0.0
    overdue: int = 0


@dataclass
class _Asked:
    """One site's part of an exchange.

    until: when its time is over. taken: whether it has said that it has the work. misses: requests in a row that it
    has not answered, or has denied. denied: whether it has denied one. long: whether its answer is too long for a plain
    reply.
    """

    until: float
    taken: bool = False
    misses: int = 0
    denied: bool = False
    long: bool = False
    outcome: tuple[WorkDone, Bytes] | Missing | None = field(default=None)


class Sites:
    """Delivers asks to sites through what a FLARE server job can send.

    names: of all silos. hello: the first request to each, with the run's place and session. identity: the server's own,
    which sites have pinned. keys: of the silos' identities, by name, where there is a roster. recorder: keeps what the
    server saw. deadline: seconds from a question to its answer. largest: the most bytes of a message from a site.
    absent: silos that never come, as FLARE adds none to a job. aborted: raises when the job is to end. waiting: called
    with a sentence about what the server waits for.
    """

    def __init__(
        self,
        names: Iterable[str],
        send: Send,
        codec: Codec,
        hello: Hello,
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
        self._sites = {name: _Site() for name in names}
        self._session = ServerSession(identity, hello)
        self._send, self._codec, self._hello, self._recorder = send, codec, self._session.hello, recorder
        self._keys, self._largest = keys or {}, largest
        self._deadline, self._aborted, self._waiting = deadline or LONGEST, aborted, waiting
        for name in absent:
            site = self._sites[name]
            site.refusal, site.pause = (
                "was not connected when the job began; it takes part in the next one",
                float("inf"),
            )
            site.tried = time.monotonic()
        self._traffic = TrafficCounter()
        self._number = 0
        self._peak: float | None = None
        self._renewed = False

    def gather(self, least: int, wait: float) -> None:
        """Greet all sites until each has come or refused, for at most so many seconds.

        Raises `moretta.errors.ParameterError`, with who is missing and why, where fewer than `least` have come.
        """
        until = time.monotonic() + wait
        while True:
            waited_for = [
                name for name, site in self._sites.items() if site.process_id is None and site.refusal is None
            ]
            if not waited_for or time.monotonic() > until:
                break
            self._aborted()
            self._greet(waited_for)
            time.sleep(0.1)
        missing = {name: self._why(site) for name, site in self._sites.items() if site.process_id is None}
        for name, why in missing.items():
            log.warning("site `%s` is missing, %s: %s", name, why.reason, why.detail)
        if len(self._sites) - len(missing) < least:
            said = "; ".join(f"{name}: {why.detail}" for name, why in missing.items())
            raise ParameterError(
                f"{len(self._sites) - len(missing)} of {len(self._sites)} sites take part after waiting up to "
                f"{wait:g} s, at least {least} are needed ({said}); mend them and serve again"
            )

    def deliver(self, ask: Ask) -> Replies:
        """Hand each silo its message; return the valid answers and why the others are missing."""
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

    def take_traffic(self) -> Mapping[tuple[str, str], int]:
        """Return the bytes since the last call, by direction ("up", "down", "shares": also up) and ask tag."""
        return self._traffic.take()

    @property
    def peak_mib(self) -> float | None:
        """The most memory that any edge client has taken so far; None without such silos."""
        return self._peak

    def back(self, silos: Sequence[str], least: int) -> Sequence[str]:
        """Wait until so many of some sites that are gone have come back, for `BACK` seconds at most; return who has."""
        until = time.monotonic() + BACK
        self._waiting(f"waiting up to {BACK:g} s for {least} of {', '.join(silos)} to come back")
        free: list[str] = []
        while time.monotonic() < until:
            self._aborted()
            self._greet(silos)
            free = [name for name in self._processes(silos) if name not in self._still_busy([name])]
            if len(free) >= least:
                break
            time.sleep(0.1)
        return free

    def speak(self) -> None:
        """Send all sites that are there a sign of life from the server."""
        there = self._processes(list(self._sites))
        self._requests(dict.fromkeys(there, Poll(number=0, wait=0.0)), there, {}, PATIENCE)

    def away(self, silos: Sequence[str]) -> Mapping[str, Missing]:
        """Return who of some silos cannot be asked now, and why; those that may be back are greeted first."""
        self._greet(silos)
        return {name: self._why(site) for name in silos if (site := self._sites[name]).process_id is None}

    def renewed(self) -> bool:
        """Return whether, since this was last called, a site's process is another than it was."""
        renewed, self._renewed = self._renewed, False
        return renewed

    def keep(self, place: CheckpointId) -> None:
        """Have all sites that are there keep their states; name those that cannot, as they would resume from less."""
        self._hello = self._hello.model_copy(update={"round": place.round})
        there = {name: b"" for name, site in self._sites.items() if site.process_id is not None}
        self._tell("keep", there, place.round, "did not keep its state")

    def end(self, released: bytes) -> None:
        """Tell all sites that the run has ended, and give them what it released, as safetensors; nothing if empty."""
        there = {name: released for name, site in self._sites.items() if site.process_id is not None}
        self._tell("end", there, self._hello.round, "did not take what the run released")

    def close(self) -> None:
        """Do nothing: the sites' jobs end with the server's."""

    def _tell(self, work: Work, bodies: Mapping[str, bytes], round: int, otherwise: str) -> None:
        for name, outcome in self._exchange(work, bodies, KEEPING, round).items():
            if isinstance(outcome, Missing):
                log.warning("round %d: silo `%s` %s: %s", round, name, otherwise, outcome.detail)

    def _answer(
        self, silo: str, ask: Ask, message: Message, outcome: tuple[WorkDone, Bytes] | Missing
    ) -> Message | Missing:
        if isinstance(outcome, Missing):
            return outcome
        done, body = outcome
        for phase, seconds in done.seconds.items():
            self.clock.charge(phase, seconds)
        if done.peak_mib is not None:
            self._peak = max(self._peak or 0.0, done.peak_mib)
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

    # Who is there

    def _greet(self, names: Iterable[str]) -> None:
        """Say hello to sites of which nothing is known, but for those that were tried a moment ago."""
        now = time.monotonic()
        wanted = [
            name for name in names if (site := self._sites[name]).process_id is None and now - site.tried >= site.pause
        ]
        woken = self._knock(wanted)
        awake = {name: reply.process_id for name, reply in woken.items() if isinstance(reply, Awake)}
        replies = self._requests(dict.fromkeys(awake, self._hello), awake, {}, PATIENCE)
        # Another addressee may have handed on its copy before ours came. One that is for it alone, nobody else has.
        alone = {name: self._hello.model_copy() for name, reply in replies.items() if _is_denied(reply)}
        replies |= self._requests(alone, awake, {}, PATIENCE)
        asleep = {name: reply for name, reply in woken.items() if isinstance(reply, Missing)}
        for name, reply in (asleep | replies).items():
            self._note(self._sites[name], name, reply, awake.get(name, ""))

    def _knock(self, names: Sequence[str]) -> dict[str, Awake | Missing]:
        """Ask sites for their process ids; whoever forges one has it greeted in vain."""
        replies = dict[str, Awake | Missing]()
        for name, data in self._send(dict.fromkeys(names, pack(Knock())), PATIENCE, True) if names else ():
            try:
                reply = data if isinstance(data, Missing) else reply_of(data, self._largest)[0]
                replies[name] = reply if isinstance(reply, (Awake, Missing)) else _nonsense()
            except CodecError as error:
                replies[name] = Missing(Reason.MALFORMED, str(error))
        return replies

    def _note(self, site: _Site, name: str, reply: tuple[Reply, Bytes] | Missing, process_id: str) -> None:
        """Note what came of a greeting."""
        match reply:
            case Missing(Reason.REFUSED):
                site.refusal, site.pause = reply.detail, LATER
            case Missing(Reason.LATE):  # a round waits for each greeting of a machine that is frozen or unplugged
                site.gone, site.pause = reply, min(LATER, max(AGAIN, 2 * site.pause))
            case Missing():
                site.gone, site.pause = reply, AGAIN
            case (SiteReady() as here, _):
                self._welcome(name, here, process_id)
            case (Refused() as refused, _):
                site.refusal, site.pause = refused.sentence, LATER
            case (Denied() as denied, _):
                site.refusal, site.pause = f"does not take this server's hello: {denied.sentence}", LATER
            case (Busy(), _):
                site.gone, site.pause = Missing(Reason.DISCONNECTED, "is still loading its data and model"), 0.0
            case _:
                site.gone, site.pause = _nonsense(), AGAIN
        site.tried = time.monotonic()

    def _welcome(self, name: str, here: SiteReady, process_id: str) -> None:
        site = self._sites[name]
        if here.name != name:
            site.refusal = f"calls itself `{here.name}`; expected `{name}`, whose certificate it has"
        else:
            if process_id != site.last:
                site.fresh, site.overdue = bool(site.last), 0
                site.last, self._renewed = process_id, True
            site.process_id, site.refusal = process_id, None

    def _why(self, site: _Site) -> Missing:
        return site.gone if site.refusal is None else Missing(Reason.REFUSED, site.refusal)

    def _lost(self, name: str, why: Missing) -> Missing:
        """Mark a site as gone until it is greeted again."""
        site = self._sites[name]
        site.process_id, site.gone, site.tried, site.pause = None, why, time.monotonic(), AGAIN
        return why

    # Exchanges

    def _exchange(
        self, work: Work, bodies: Mapping[str, bytes], seconds: float, round: int = 0
    ) -> Mapping[str, tuple[WorkDone, Bytes] | Missing]:
        """Submit work to silos, and poll until each has done it, failed, or run out of time."""
        self._greet(bodies)
        outcomes: dict[str, tuple[WorkDone, Bytes] | Missing] = {}
        asked = dict[str, _Asked]()
        self._number += 1
        for name in bodies:
            if self._sites[name].process_id is None:
                outcomes[name] = self._why(self._sites[name])
            else:
                asked[name] = _Asked(time.monotonic() + seconds)
        for name in self._still_busy(asked):
            asked[name].outcome = Missing(Reason.LATE, "is still busy with what it was asked before")
        submit = Submit(number=self._number, work=work, round=round)
        while waiting := {name: one for name, one in asked.items() if one.outcome is None}:
            self._aborted()
            self._ask_once(waiting, submit, bodies, seconds)
        return outcomes | {name: one.outcome for name, one in asked.items() if one.outcome is not None}

    def _ask_once(
        self, waiting: Mapping[str, _Asked], submit: Submit, bodies: Mapping[str, bytes], seconds: float
    ) -> None:
        """Hand the work to those that have not taken it, and ask the others whether it is done."""
        now = time.monotonic()
        for name, one in waiting.items():
            if now >= one.until:
                late = f"expected an answer in {seconds:g} s, and it was still busy"
                one.outcome, self._sites[name].overdue = Missing(Reason.LATE, late), submit.number
        left = {name: one for name, one in waiting.items() if one.outcome is None}
        wait = max(0.0, min((WAIT, *(one.until - now for one in left.values()))))
        # Some submitted to and some polled at once is rare, and who is polled then waits for nobody.
        wait = wait if all(one.taken for one in left.values()) else 0.0
        poll = Poll(number=submit.number, wait=wait)
        requests: dict[str, Signed] = {name: poll if one.taken else submit for name, one in left.items()}
        # Another addressee may have handed on its copy before ours came. One that is for it alone, nobody else has.
        requests |= {name: requests[name].model_copy() for name, one in left.items() if one.denied}
        handed = {name: bodies[name] for name, one in left.items() if not one.taken}
        long = any(one.long for one in left.values()) or any(len(body) > PLAIN_LIMIT for body in handed.values())
        misses = max((one.misses for one in left.values()), default=0)
        seconds = wait + (PATIENCE if long else min(PATIENCE, FIRST * 2**misses))
        # FLARE lets a plain request to a process that is gone wait in vain; a stream to it fails at once.
        long = long or misses > 0
        for name, reply in self._requests(requests, self._processes(left), handed, seconds, long).items():
            self._take(name, left[name], reply)

    def _still_busy(self, names: Iterable[str]) -> list[str]:
        """Return the sites that are still busy with work they were late with: they would only be late again."""
        overdue = {name: self._sites[name].overdue for name in names if self._sites[name].overdue}
        polls: dict[str, Signed] = {name: Poll(number=number, wait=WAIT) for name, number in overdue.items()}
        busy = list[str]()
        for name, reply in self._requests(polls, self._processes(polls), {}, WAIT + PATIENCE, True).items():
            if isinstance(reply, tuple) and isinstance(reply[0], Busy) and not reply[0].long:
                busy.append(name)
            else:
                self._sites[name].overdue = 0
        return busy

    def _processes(self, names: Iterable[str]) -> dict[str, str]:
        return {name: its for name in names if (its := self._sites[name].process_id) is not None}

    def _take(self, name: str, one: _Asked, reply: tuple[Reply, Bytes] | Missing) -> None:
        """Note what a site said about its work."""
        match reply:
            case Missing():
                one.misses += 1
                if reply.reason is not Reason.LATE:
                    one.outcome = self._lost(name, reply)
                elif one.misses >= MISSES:
                    one.outcome = self._lost(name, Missing(Reason.DISCONNECTED, "no longer says that it is at work"))
                return
            case (Denied() as denied, _):
                one.misses, one.denied = one.misses + 1, True
                if one.misses >= MISSES:
                    why = f"does not take what this server sends: {denied.sentence}"
                    one.outcome = self._lost(name, Missing(Reason.REFUSED, why))
                return
            case (Busy() as busy, _):
                one.taken, one.long = True, busy.long
            case (WorkDone() as done, body):
                one.outcome, self._sites[name].fresh = (done, body), False
            case (Failed() as failed, _) if self._sites[name].fresh and failed.reason == "refused":
                # It was asked to go on with what its process before had agreed on.
                one.outcome = Missing(Reason.DISCONNECTED, f"was restarted: {failed.sentence}")
            case (Failed() as failed, _):
                one.outcome = Missing(Reason(failed.reason), failed.sentence)
            case (Stranger(), _):
                # What it had agreed on is lost with its process, so it takes part again from the next set-up on.
                one.outcome = self._lost(name, Missing(Reason.DISCONNECTED, "was restarted"))
                self._sites[name].pause = 0.0
            case _:
                one.outcome = _nonsense()
        one.misses = 0

    def _requests(
        self,
        headers: Mapping[str, Signed],
        processes: Mapping[str, str],
        bodies: Mapping[str, bytes],
        seconds: float,
        long: bool = False,
    ) -> dict[str, tuple[Reply, Bytes] | Missing]:
        """Send sites their requests, signed once for all who are sent the same, and return what each replied."""
        if not headers:
            return {}
        same = dict[tuple[int, int], list[str]]()
        for name, header in headers.items():
            same.setdefault((id(header), id(bodies.get(name, b""))), []).append(name)
        packed, serials = dict[str, bytes](), dict[str, int]()
        for names in same.values():
            header, body = headers[names[0]], bodies.get(names[0], b"")
            data, serial = self._session.pack(header, {name: processes[name] for name in names}, body)
            packed |= dict.fromkeys(names, data)
            serials |= dict.fromkeys(names, serial)
        found = {
            name: self._opened(name, data, processes[name], serials[name])
            for name, data in self._send(packed, seconds, long)
        }
        return {name: found[name] for name in headers}

    def _opened(
        self, name: str, data: bytes | memoryview | Missing, process_id: str, serial: int
    ) -> tuple[Reply, Bytes] | Missing:
        if isinstance(data, Missing):
            return data
        try:
            return self._session.open(data, process_id, serial, self._keys.get(name), self._largest)
        except CodecError as error:
            return Missing(Reason.MALFORMED, str(error))
        except PeerError as error:
            return Missing(Reason.REFUSED, str(error))


def _is_denied(reply: tuple[Reply, Bytes] | Missing) -> bool:
    return isinstance(reply, tuple) and isinstance(reply[0], Denied)


def _nonsense() -> Missing:
    return Missing(Reason.MALFORMED, "sent a reply that belongs to no request of its kind")
