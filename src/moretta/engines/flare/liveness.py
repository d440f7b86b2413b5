"""The availability of sites: the server's requests to them, greetings of absent ones, and the reasons of absence.

A site that is dead, hangs or sends malformed bytes is gone, with its reason. Each later request greets it again, at
most once in `AGAIN` seconds, so that it can return. A greeting has two steps: the site sends its process id, and then
receives a hello that is signed over it.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from moretta.contract.roles import Missing, Reason
from moretta.engines.flare import envelope as wire
from moretta.engines.flare.signing import Bytes, ServerSession
from moretta.errors import CodecError, PeerError
from moretta.secure_aggregation.identity import Identity

PATIENCE = 3.0  # seconds in which a living site begins to answer; seconds of a stream's transfer do not count
PLAIN_LIMIT = 1 << 18  # bytes of an envelope's body without a stream: half a second at 5 Mbit/s
AGAIN = 0.5  # seconds between two attempts to reach a site that is gone
LATER = 10.0  # the same for a site that refused and may be corrected; the maximum for a silent one

Send = Callable[[Mapping[str, bytes], float, bool], Iterable[tuple[str, "bytes | memoryview | Missing"]]]
"""Sends each silo its bytes, waits these seconds for all replies, and yields each one's reply or why it is missing.

Long replies are yielded as they arrive, so that one is decoded while others are on their way. The last argument:
whether bytes may be long, in either direction.
"""

NOT_YET = Missing(Reason.DISCONNECTED, "has not come yet")
NONSENSE = Missing(Reason.MALFORMED, "sent a reply that belongs to no request of its kind")
ABSENT = "was not connected when the job began; it takes part in the next one"


@dataclass
class RemoteSite:
    """The server's knowledge of a site.

    Args:
        process_id: None until it has answered.
        last: The last known process id.
        fresh: Whether that process has replaced an earlier one in the run and has done nothing yet.
        refusal: Why it takes no part.
        gone: Why it is absent.
        tried: When it was last greeted.
        pause: Seconds until the next greeting.
        overdue: The number of its late work, 0 for none.
    """

    process_id: str | None = None
    last: str = ""
    fresh: bool = False
    refusal: str | None = None
    gone: Missing = NOT_YET
    tried: float = float("-inf")
    pause: float = 0.0
    overdue: int = 0

    def lose(self, why: Missing) -> Missing:
        """Count the site as gone until the next greeting."""
        self.process_id, self.gone, self.tried, self.pause = None, why, time.monotonic(), AGAIN
        return why

    def note(self, name: str, reply: tuple[wire.Reply, Bytes] | Missing, process_id: str) -> bool:
        """Record a greeting's outcome; return whether it came from another process of the site than before."""
        self.tried = time.monotonic()
        match reply:
            case Missing(Reason.REFUSED):
                self.refusal, self.pause = reply.detail, LATER
            case Missing(Reason.LATE):  # each greeting of a frozen or unplugged machine delays a round
                self.gone, self.pause = reply, min(LATER, max(AGAIN, 2 * self.pause))
            case Missing():
                self.gone, self.pause = reply, AGAIN
            case (wire.SiteReady() as ready, _) if ready.name == name:
                return self._welcome(process_id)
            case (wire.SiteReady() as ready, _):
                self.refusal = f"calls itself `{ready.name}`; expected `{name}`, whose certificate it has"
            case (wire.Refused() as refused, _):
                self.refusal, self.pause = refused.sentence, LATER
            case (wire.Denied() as denied, _):
                self.refusal, self.pause = f"does not take this server's hello: {denied.sentence}", LATER
            case (wire.Busy(), _):
                self.gone, self.pause = Missing(Reason.DISCONNECTED, "is still loading its data and model"), 0.0
            case _:
                self.gone, self.pause = NONSENSE, AGAIN
        return False

    def _welcome(self, process_id: str) -> bool:
        renewed = process_id != self.last
        if renewed:
            self.fresh, self.overdue, self.last = bool(self.last), 0, process_id
        self.process_id, self.refusal = process_id, None
        return renewed


class Liveness:
    """The sites of a run, by name, and one session's requests to them. Arguments: see `delivery.Sites`."""

    def __init__(
        self,
        names: Iterable[str],
        send: Send,
        hello: wire.Hello,
        identity: Identity,
        keys: Mapping[str, bytes],
        largest: int,
        absent: Iterable[str],
    ) -> None:
        self.sites = {name: RemoteSite() for name in names}
        for name in absent:
            site = self.sites[name]
            site.refusal, site.pause, site.tried = ABSENT, float("inf"), time.monotonic()
        self._session = ServerSession(identity, hello)
        self.hello = self._session.hello
        self._send, self._keys, self._largest = send, keys, largest
        self._renewed = False
        self.returned = list[str]()  # the sites with another process than before, for the log

    def processes(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Return the process ids of the available sites among some, or all."""
        names = self.sites if names is None else names
        return {name: its for name in names if (its := self.sites[name].process_id) is not None}

    def away(self, names: Iterable[str] | None = None) -> dict[str, Missing]:
        """Return why the absent sites among some, or all, are absent."""
        names = self.sites if names is None else names
        gone = {name: site for name in names if (site := self.sites[name]).process_id is None}
        return {
            name: site.gone if site.refusal is None else Missing(Reason.REFUSED, site.refusal)
            for name, site in gone.items()
        }

    def renewed(self) -> bool:
        """Return whether any site's process has changed since the last call."""
        renewed, self._renewed = self._renewed, False
        return renewed

    def speak(self) -> None:
        """Send all available sites a sign of life from the server."""
        processes = self.processes()
        self.requests(dict.fromkeys(processes, wire.Poll(number=0, wait=0.0)), {}, PATIENCE, processes=processes)

    def greet(self, names: Iterable[str]) -> None:
        """Greet sites without a known process, except those greeted a moment ago."""
        now = time.monotonic()
        unknown = [
            name for name in names if (site := self.sites[name]).process_id is None and now - site.tried >= site.pause
        ]
        woken = self._knock(unknown)
        awake = {name: reply.process_id for name, reply in woken.items() if isinstance(reply, wire.Awake)}
        replies = self.requests(dict.fromkeys(awake, self.hello), {}, PATIENCE, processes=awake)
        # Another addressee may have forwarded its copy before ours arrived. A copy for this site alone can not.
        denied = (
            name for name, reply in replies.items() if isinstance(reply, tuple) and isinstance(reply[0], wire.Denied)
        )
        alone = {name: self.hello.model_copy() for name in denied}
        replies |= self.requests(alone, {}, PATIENCE, processes=awake)
        asleep = {name: reply for name, reply in woken.items() if isinstance(reply, Missing)}
        for name, reply in (asleep | replies).items():
            if self.sites[name].note(name, reply, awake.get(name, "")):
                self._renewed = True
                self.returned += [name] if self.sites[name].fresh else []

    def _knock(self, names: Sequence[str]) -> dict[str, wire.Awake | Missing]:
        """Ask sites for their process ids; a forged id only makes a greeting fail."""
        replies = dict[str, wire.Awake | Missing]()
        for name, data in self._send(dict.fromkeys(names, wire.pack(wire.Knock())), PATIENCE, True) if names else ():
            try:
                reply = data if isinstance(data, Missing) else wire.reply_of(data, self._largest)[0]
                replies[name] = reply if isinstance(reply, (wire.Awake, Missing)) else NONSENSE
            except CodecError as error:
                replies[name] = Missing(Reason.MALFORMED, str(error))
        return replies

    def requests(
        self,
        headers: Mapping[str, wire.Signed],
        bodies: Mapping[str, bytes],
        seconds: float,
        long: bool = False,
        *,
        processes: Mapping[str, str] | None = None,
    ) -> dict[str, tuple[wire.Reply, Bytes] | Missing]:
        """Send sites requests, equal ones signed once; return each reply. processes: addressees, None to ask."""
        if not headers:
            return {}
        processes = self.processes(headers) if processes is None else processes
        same = dict[tuple[int, int], list[str]]()
        for name, header in headers.items():
            same.setdefault((id(header), id(bodies.get(name, b""))), []).append(name)
        packed, serials = dict[str, bytes](), dict[str, int]()
        for names in same.values():
            header, body = headers[names[0]], bodies.get(names[0], b"")
            data, serial = self._session.pack(header, {name: processes[name] for name in names}, body)
            packed |= dict.fromkeys(names, data)
            serials |= dict.fromkeys(names, serial)
        outcomes = {
            name: self._opened(name, data, processes[name], serials[name])
            for name, data in self._send(packed, seconds, long)
        }
        return {name: outcomes[name] for name in headers}

    def _opened(
        self, name: str, data: bytes | memoryview | Missing, process_id: str, serial: int
    ) -> tuple[wire.Reply, Bytes] | Missing:
        if isinstance(data, Missing):
            return data
        try:
            return self._session.open(data, process_id, serial, self._keys.get(name), self._largest)
        except CodecError as error:
            return Missing(Reason.MALFORMED, str(error))
        except PeerError as error:
            return Missing(Reason.REFUSED, str(error))
