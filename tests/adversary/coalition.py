"""A server and silos that work together and deviate, as a list of operations says.

The server is the protocol's own: it makes the asks, so they are what honest silos expect. In between stands the
coalition: it gives the server any round, model and cohort, leaves messages out, changes them, keeps answers from the
server and sends old messages again. Its own silos follow the protocol, and it has all their secrets.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import silos
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray
from silos import World
from wiretap import Wiretap

from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Aborted, Ask, Exchange, Missing, Reason, Replies, State
from moretta.errors import MorettaError
from moretta.protocols.pbpfl.messages import Predictions, Softmax, TrainOn
from moretta.secure_aggregation.additive import AddShares, SealedShares
from moretta.secure_aggregation.agreement import KeysAccepted, PeerKeys
from moretta.secure_aggregation.pairwise import MaskedUpload
from moretta.secure_aggregation.unmasking import Survivors, Unmask

KEY = X25519PrivateKey.from_private_bytes(bytes(range(32))).public_key().public_bytes_raw()
GONE = Missing(Reason.DISCONNECTED, "the coalition says so")


@dataclass(frozen=True, repr=False)
class Sum:
    """Play a round, after a new set-up, as if it were asked for the first time.

    model: its number; equal numbers are the same model, and halves nearly that of the number below.
    lost: are not asked to upload. late: are, and what they answer is kept from the server. unsigned: are not asked to
    sign who is left. mute: are not asked for their shares. told: (who, S): these are told another set of survivors.
    odd: are asked with another model.
    fooled: (who, n): under PBPFL's cross-entropy these are sent another softmax, that of the nth other offset.
    """

    round: int
    silos: str
    model: float
    take: int = 0
    lost: str = ""
    late: str = ""
    unsigned: str = ""
    mute: str = ""
    told: tuple[str, str] = ("", "")
    odd: str = ""
    fooled: tuple[str, int] = ("", 0)

    def __repr__(self) -> str:
        said = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
        return f"Sum({', '.join(f'{name}={value!r}' for name, value in said.items())})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print a failing list as it would be written; Hypothesis would fill in all defaults."""
        printer.text(repr(self))


@dataclass(frozen=True)
class SetUp:
    """Agree on keys and ask for the common statistics again, as at a run's start. mute: as of `Sum`."""

    round: int
    silos: str
    mute: str = ""


@dataclass(frozen=True)
class Resend:
    """Send the `nth` last message again, to a silo of the coalition's choice and, if it says so, of another time."""

    nth: int
    to: str
    round: int | None = None
    attempt: int | None = None


@dataclass(frozen=True)
class Resume:
    """The silos are killed, and go on from what they had saved `sums` sums ago."""

    silos: str
    sums: int


@dataclass(frozen=True)
class Swap:
    """Put a key of the coalition's own in the place of a silo's, in a set-up."""

    of: str
    silos: str


@dataclass(frozen=True)
class Job:
    """Begin another run over the same silos and rows."""

    number: int


Operation = Sum | SetUp | Resend | Resume | Swap | Job


class Coalition:
    """The server's knowledge, the coalition's silos, and the honest ones, which are there to be asked."""

    def __init__(self, world: World, folder: Path, tap: Wiretap) -> None:
        self.world, self.tap = world, tap
        self._folder, self._session = folder, 0
        self._sent = list[tuple[Message, float]]()  # with the number of the model that each is about
        self._attempt = 0
        self._swapped = ""
        self._direction, self._alphas = np.zeros(0), dict[str, NDArray[np.float64]]()
        self.refusals, self.deceived = list[str](), list[str]()  # sentences, and who took a swapped key
        self._begin(Job(1))

    def play(self, operation: Operation) -> None:
        match operation:
            case Sum():
                self._sum(operation)
            case SetUp():
                self._server.restore(self._begun)
                self._set_up(operation)
            case Resend():
                self._resend(operation)
            case Resume():
                self._resume(operation)
            case Swap():
                self._swap(operation)
            case Job():
                self._begin(operation)

    def _begin(self, job: Job) -> None:
        self._run = self.world.run(job.number)
        cast = silos.play_roles(self.world, self._folder, self._run, self._session)
        self._server, self._clients = cast.server, dict(cast.clients)
        self._begun = cast.server.state()
        self._saved = [self._states()]
        self._set_up(SetUp(0, self.world.names))
        self._ready = self._server.state()

    def _states(self) -> dict[str, State]:
        return {name: client.state() for name, client in self._clients.items()}

    def _sum(self, one: Sum) -> None:
        self._server.restore(_with_model(self._ready, one.model))
        if self._set_up(SetUp(one.round, one.silos), one.take):
            self._exchange(self._server.round(self._now(one.round, one.take)), one)
        self._saved.append(self._states())

    def _set_up(self, one: SetUp, take: int = 0) -> bool:
        """Return whether the silos agreed. Every set-up is an attempt of its own."""
        self._attempt += 1
        now = self._now(one.round, take)
        return self._exchange(self._server.setup(now, list(one.silos)), Sum(one.round, one.silos, 0, mute=one.mute))

    def _now(self, round: int, take: int) -> Stamp:
        return Stamp(self._run, round, self._attempt, take)

    def _exchange(self, exchange: Exchange[Any], how: Sum) -> bool:
        """Play a part of the server's, with the coalition in between; return whether it ended well."""
        replies: Replies | None = None
        try:
            while True:
                replies = self._deliver(exchange.send(replies), how)  # type: ignore[arg-type]
        except StopIteration as end:
            return not isinstance(end.value, Aborted)
        except MorettaError as error:  # the server's: it would not go on
            self.refusals.append(str(error))
            return False

    def _deliver(self, ask: Ask, how: Sum) -> Replies:
        answers, missing = dict[str, Message](), dict[str, Missing]()
        for silo, message in ask.messages.items():
            uploads = issubclass(ask.reply, MaskedUpload | SealedShares)
            hidden = how.late if uploads else ""
            unasked = how.lost if uploads else how.mute if isinstance(message, Unmask | AddShares) else ""
            unasked = how.unsigned if isinstance(message, Survivors) else unasked
            try:
                changed, self.tap.model = self._changed(silo, message, how)
                reply = GONE if silo in unasked else self.ask(silo, changed)
                if isinstance(reply, Missing) or silo in hidden:
                    missing[silo] = GONE
                elif not isinstance(reply, ask.reply):
                    missing[silo] = Missing(Reason.REFUSED, reply.TAG)
                else:
                    ask.check(silo, reply)
                    answers[silo] = reply
            except MorettaError as error:
                missing[silo] = Missing(Reason.MALFORMED, str(error))
        return Replies(answers, missing)

    def _changed(self, silo: str, message: Message, how: Sum) -> tuple[Message, float]:
        """Return what is sent in a message's place, and the number of the model that it is about."""
        model = how.model // 1
        if silo in how.odd:
            message, model = _odd(message), model + 0.5
        who, row = how.fooled
        if silo in who and isinstance(message, Softmax):
            message = replace(message, y=self._of_another_offset(silo, message.y, 0.2 * (row + 1)))
            model += 0.01 * (row + 1)
        if isinstance(message, TrainOn):
            self._direction = message.direction
        if self._swapped not in ("", silo) and isinstance(message, PeerKeys):
            message = replace(message, keys={**message.keys, self._swapped: KEY})
        return _told(message, silo, how.told), model

    def _of_another_offset(self, silo: str, y: NDArray[np.float64], size: float) -> NDArray[np.float64]:
        """Return the softmax of a silo's predictions less a further offset: no silo distinguishes it from the true."""
        changed = y * np.exp(-size * np.outer(self._alphas[silo], self._direction))
        return np.asarray(changed / changed.sum(axis=1, keepdims=True))

    def ask(self, silo: str, message: Message) -> Message | Missing:
        """Send a message to a silo; return what it answers. The judge hears it."""
        self._sent.append((message, self.tap.model))
        try:
            with self.tap.listening(silo, message):
                reply = self._clients[silo].answer(message)
        except MorettaError as error:
            self.refusals.append(f"{silo}: {error}")
            return Missing(Reason.REFUSED, str(error))
        self.tap.heard(silo, message, reply)
        if isinstance(reply, Predictions):
            self._alphas[silo] = reply.alpha
        if isinstance(reply, KeysAccepted) and self._swapped not in ("", silo) and silo not in self.world.allies:
            self.deceived.append(silo)
        return reply

    def _resend(self, one: Resend) -> None:
        message, self.tap.model = self._sent[-1 - one.nth % len(self._sent)]
        changes = {name: value for name in ("round", "attempt") if (value := getattr(one, name)) is not None}
        self.ask(one.to, replace(message, stamp=replace(message.stamp, **changes)))

    def _resume(self, one: Resume) -> None:
        self._session += 1
        cast = silos.play_roles(self.world, self._folder, self._run, self._session)
        older = self._saved[-1 - min(one.sums, len(self._saved) - 1)]
        for name in one.silos:
            self._clients[name] = cast.clients[name]
            self._clients[name].restore(older[name])

    def _swap(self, one: Swap) -> None:
        self._swapped = one.of
        self._set_up(SetUp(0, one.silos))
        self._swapped = ""


def _told(message: Message, silo: str, told: tuple[str, str]) -> Message:
    """Return the message with another set of survivors, for those who are to be told one."""
    who, survivors = told
    if silo not in who or not isinstance(message, Survivors | Unmask) or not survivors:
        return message
    names = tuple(sorted(set(survivors)))
    if isinstance(message, Survivors):
        return replace(message, survivors=names)
    signatures = {name: part for name, part in message.signatures.items() if name in names}
    makers, left = [name for name in message.survivors if name != silo], dict[str, bytes]()  # all are neighbours here
    for field in ("sealed", "digests"):
        whole = getattr(message, field)
        size = len(whole) // len(makers)
        parts = (whole[size * place : size * (place + 1)] for place, name in enumerate(makers) if name in names)
        left[field] = b"".join(parts)
    return replace(message, survivors=names, signatures=signatures, **left)


def _odd(message: Message) -> Message:
    if not isinstance(parameters := getattr(message, "parameters", None), dict):
        return message
    return replace(message, parameters={name: value * 1.5 for name, value in parameters.items()})


def _with_model(state: State, model: float) -> State:
    """Return the server's state with another model: of another number another, of a half nearly the same."""
    whole, near = divmod(model, 1)
    factor = 1.0 + whole / 8 + near * 1e-9
    changed = {
        name: value * factor
        for name, value in state.items()
        if name.startswith("model/") and isinstance(value, np.ndarray) and value.dtype.kind == "f"
    }
    return {**state, **changed}
