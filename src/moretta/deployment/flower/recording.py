"""A mod that keeps what a client receives and sends, for ``moretta audit --views``."""

from pathlib import Path

import numpy as np
from flwr.app import Context, MessageType
from flwr.app import Message as FlowerMessage
from flwr.clientapp.typing import ClientAppCallable, Mod

from moretta.contract.messages import Message, Spent, Stamp, Tensors
from moretta.deployment.flower.messages import ARRAY, MESSAGES, METRICS
from moretta.deployment.flower.records import RECORD, unpacked
from moretta.deployment.flower.site import log, silo_of
from moretta.engines import views
from moretta.errors import MorettaError
from moretta.secure_aggregation.plain import PlainUpload
from moretta.secure_aggregation.secure_sum import CODEC, AskSum

NOT_AUDITED = (*MESSAGES, Spent)  # they contain no numbers


def record_views(folder: str | Path, weighted_by: str = "num-examples") -> Mod:
    """Return a mod that records a client's view: ``ClientApp(mods=[record_views("recorded"), ...])``.

    It works with any strategy, and sees messages as they travel if it is the first mod. A view has models and, without
    `secure_sum`, the client's own weights in the clear: it is for runs with rows that an auditor may know.

    Args:
        folder: for the views of all clients of one run, which `moretta audit --views` reads.
        weighted_by: the metric that counts a client's examples.
    """
    where = Path(folder) / "views"

    def mod(message: FlowerMessage, context: Context, call_next: ClientAppCallable) -> FlowerMessage:
        asked, trains = unpacked(message.content), message.metadata.message_type == MessageType.TRAIN
        model = _arrays(message) if trains and (not asked or isinstance(asked[-1], AskSum)) else {}
        numbers = [record.get("server-round", 0) for record in message.content.config_records.values()]
        reply = call_next(message, context)
        try:
            now = asked[-1].stamp if asked else Stamp(f"flower-{context.run_id}", max([0, *numbers]), 0)
            sent = [] if reply.has_error() else unpacked(reply.content)
            if model:
                asked = [PlainUpload.unasked(now, model), *(asked or [AskSum(stamp=now, encoding={})])]
            if model and not sent and not reply.has_error():
                sent = [_own(now, reply, weighted_by)]
            kept = [(way, part) for way, some in (("received", asked), ("sent", sent)) for part in some]
            seen = [
                views.Seen(way, "server", CODEC.encode(part)) for way, part in kept if not isinstance(part, NOT_AUDITED)
            ]
            views.note(where, silo_of(context).silo.name, now.round, seen)
        except MorettaError as error:  # the run continues without it
            log.error("Moretta: this message is in no view: %s", error)
        return reply

    return mod


def _arrays(message: FlowerMessage) -> Tensors:
    own = [held for key, held in message.content.array_records.items() if key != RECORD]
    return {ARRAY + name: array.numpy() for held in own for name, array in held.items()}


def _own(now: Stamp, reply: FlowerMessage, weighted_by: str) -> Message:
    metrics = {name: value for held in reply.content.metric_records.values() for name, value in held.items()}
    numbers = np.array([value for value in metrics.values() if not isinstance(value, list)], np.float64)
    return PlainUpload.unasked(now, {**_arrays(reply), METRICS: numbers}, int(metrics.get(weighted_by, 1)))
