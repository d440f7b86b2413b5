"""The silos' roles in one process: what each of them answers, or why it does not."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moretta.contract.codec import Codec
from moretta.contract.messages import Message
from moretta.contract.roles import Client, Missing, Reason, State, answered
from moretta.engines.child import ChildClient
from moretta.engines.clock import Clock
from moretta.errors import Disconnected, MorettaError, ParameterError

log = logging.getLogger("moretta")


@dataclass(frozen=True)
class Answered:
    """What a silo answered, or why it did not, and the seconds that it took.

    lengths: as of `moretta.engines.delivery.lengths_of`, where another process has found them.
    """

    answer: Message | Missing
    seconds: float
    lengths: tuple[int, int] | None = None


def absent(silo: str) -> Answered:
    """Return what is known of a silo that nobody plays."""
    return Answered(Missing(Reason.DISCONNECTED, f"no silo `{silo}` is here"), 0.0)


class SilosHere:
    """Asks the clients of this process.

    codec: through which each message passes before a silo has it, as over a network; None hands over the object.
    deadline: of silos with a process of their own. clock: takes the seconds of the silos' phases. scores: as silos have
    read them. slots: silos that may compute together; None is each by itself.
    """

    def __init__(
        self,
        clients: Mapping[str, Client],
        codec: Codec | None = None,
        *,
        deadline: float | None = None,
        clock: Clock | None = None,
        scores: Callable[[], Mapping[str, float]] = dict,
        slots: Sequence[Sequence[str]] | None = None,
    ) -> None:
        self._clients, self._codec, self.scores = clients, codec, scores
        self.slots = [[silo] for silo in clients] if slots is None else slots
        self.between: Callable[[], None] = lambda: None  # called before each silo is asked
        self.clock = Clock() if clock is None else clock
        for client in clients.values():
            client.phase = self.clock.phase
        self._children = [client for client in clients.values() if isinstance(client, ChildClient)]
        for child in self._children:
            child.charge = self.clock.charge
            if deadline is not None:
                child.deadline = deadline

    def answers(self, messages: Mapping[str, Message]) -> Mapping[str, Answered]:
        """Return what each silo answers to its message, in their order."""
        return {silo: self._answered(silo, message) for silo, message in messages.items()}

    @property
    def peak_mib(self) -> float | None:
        """The most memory that any silo with a process of its own has taken so far; None without such silos."""
        return max((child.peak_mib for child in self._children), default=None)

    @property
    def ends(self) -> int:
        """How often the process of a silo has ended."""
        return sum(child.ends for child in self._children)

    def only(self, silos: Sequence[str]) -> SilosHere:
        """Return the same for some of the silos, with a clock of its own."""
        return SilosHere({silo: self._clients[silo] for silo in silos}, self._codec, scores=self.scores)

    def states(self) -> Mapping[str, State]:
        """Return the state of each silo."""
        return {silo: client.state() for silo, client in self._clients.items()}

    def gather(self) -> None:
        """Do nothing: whoever built the silos' roles has the very ones that answer."""

    def spread(self, states: Mapping[str, State]) -> None:
        """Do nothing, as `gather`."""

    def restore(self, states: Mapping[str, State]) -> None:
        """Give silos their states."""
        for silo, state in states.items():
            self._clients[silo].restore(state)

    def close(self) -> None:
        """End the processes of silos."""
        for child in self._children:
            child.close()

    def _answered(self, silo: str, message: Message) -> Answered:
        self.between()
        client, began = self._clients.get(silo), time.perf_counter()
        if client is None:
            return absent(silo)
        answer = self._answer(silo, client, message)
        took = time.perf_counter() - began
        return Answered(answer, took - client.starting if isinstance(client, ChildClient) else took)

    def _answer(self, silo: str, client: Client, message: Message) -> Message | Missing:
        try:
            wired = message if self._codec is None else self._codec.decode(self._codec.encode(message))
            answer = answered(client, wired)
        except ParameterError as error:
            return Missing(Reason.BAD_INPUT, str(error))
        except Disconnected as error:
            return Missing(Reason.DISCONNECTED, str(error))
        except MorettaError as error:
            return Missing(Reason.REFUSED, str(error))
        except Exception as error:  # a silo's failure, whatever it is, costs the round only itself
            log.exception("silo `%s` failed", silo)
            return Missing(Reason.FAILED, f"{type(error).__name__}: {error}")
        if not isinstance(answer, Message):  # what a silo runs need not be ours, whatever its types say
            return Missing(Reason.MALFORMED, f"expected a message, got {type(answer).__name__}")
        return answer
