"""The silos' roles in one process: what each of them answers, or why it does not."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from moretta.contract.codec import Codec
from moretta.contract.messages import Message
from moretta.contract.roles import Client, Missing, Reason, answered
from moretta.engines.child import ChildClient
from moretta.errors import Disconnected, MorettaError, ParameterError

log = logging.getLogger("moretta")


@dataclass(frozen=True)
class Answered:
    """What a silo answered, or why it did not, and the seconds that it took."""

    answer: Message | Missing
    seconds: float


class SilosHere:
    """Asks the clients of this process.

    codec: through which each message passes before a silo has it, as over a network; None hands over the object.
    """

    def __init__(self, clients: Mapping[str, Client], codec: Codec | None = None) -> None:
        self._clients, self._codec = clients, codec

    def answers(self, messages: Mapping[str, Message]) -> Mapping[str, Answered]:
        """Return what each silo answers to its message, in their order."""
        return {silo: self._answered(silo, message) for silo, message in messages.items()}

    def _answered(self, silo: str, message: Message) -> Answered:
        client, began = self._clients.get(silo), time.perf_counter()
        if client is None:
            return Answered(Missing(Reason.DISCONNECTED, f"no silo `{silo}` is here"), 0.0)
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
