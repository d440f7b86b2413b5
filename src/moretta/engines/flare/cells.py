"""Transport of envelopes between the cells of FLARE's jobs: short ones as plain requests, long ones as streams.

FLARE's aux messages are streams of the same cells, whatever their length: another message acknowledges each, threads of
two pools handle it, and a timer remembers it for seconds. That suits long messages; of a round with three sites and
1,000 numbers it takes 16 ms, where plain requests take 5. A plain request counts all the time in which it travels, and
a stream only the time in which no byte moves, so long messages are streams.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from nvflare.fuel.f3.cellnet.core_cell import TargetMessage
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message

from moretta.contract.roles import Missing, Reason
from moretta.engines.flare.liveness import PLAIN_LIMIT, Send

CHANNEL = "moretta"
PLAIN, STREAM = "plain", "stream"  # topics
BYTES = (bytes, bytearray, memoryview)  # as a cell may hand them out
Answer = Callable[[memoryview, int | None], bytes]
"""Returns the reply to an envelope. Its second argument is the most bytes of a reply's body, None for any number."""


def sender(cell: Any, targets: Mapping[str, str]) -> Send:
    """Return a function that sends envelopes to silos by a cell of FLARE. targets: their cells' names, by silo."""
    pool = ThreadPoolExecutor(max(2, len(targets)), thread_name_prefix="moretta send")

    def plain(packed: Mapping[str, bytes], seconds: float) -> Mapping[str, Message]:
        messages = {
            targets[silo]: TargetMessage(targets[silo], CHANNEL, PLAIN, Message(payload=data))
            for silo, data in packed.items()
        }
        replies = cell.broadcast_multi_requests(messages, seconds, optional=True)
        return {silo: replies[targets[silo]] for silo in packed if targets[silo] in replies}

    def streamed(packed: Mapping[str, bytes], seconds: float) -> Iterator[tuple[str, Message]]:
        def ask(silo: str) -> Message:
            options = {"channel": CHANNEL, "topic": STREAM, "target": targets[silo], "timeout": seconds}
            return cell.send_request(request=Message(payload=packed[silo]), optional=True, **options)

        asked = {pool.submit(ask, silo): silo for silo in packed}
        for reply in as_completed(asked):
            yield asked.pop(reply), reply.result()  # which nobody else holds then

    def send(packed: Mapping[str, bytes], seconds: float, long: bool) -> Iterator[tuple[str, memoryview | Missing]]:
        if long:
            yield from ((silo, _received(reply)) for silo, reply in streamed(packed, seconds))
        else:
            replies = plain(packed, seconds)
            yield from ((silo, _received(replies.get(silo))) for silo in packed)

    return send


def receive(cell: Any, answer: Answer) -> None:
    """Have a site's cell pass envelopes to `answer`, and send back its result."""

    def replied(request: Message, limit: int | None) -> Message:
        data = request.payload if isinstance(request.payload, BYTES) else b""  # which is no envelope
        return make_reply(ReturnCode.OK, body=answer(memoryview(data), limit))

    cell.register_request_cb(channel=CHANNEL, topic=PLAIN, cb=replied, limit=PLAIN_LIMIT)
    cell.register_request_cb(channel=CHANNEL, topic=STREAM, cb=replied, limit=None)


def _received(reply: Message | None) -> memoryview | Missing:
    code = ReturnCode.COMM_ERROR if reply is None else reply.get_header(MessageHeaderKey.RETURN_CODE, ReturnCode.OK)
    if reply is not None and code == ReturnCode.OK:
        return memoryview(reply.payload) if isinstance(reply.payload, BYTES) else _NO_ENVELOPE
    if code == ReturnCode.TIMEOUT:
        return Missing(Reason.LATE, "has not answered in time")
    if code == ReturnCode.PROCESS_EXCEPTION:  # its job has begun, and takes no envelopes yet
        return Missing(Reason.DISCONNECTED, "is starting, and is not ready yet")
    return Missing(Reason.DISCONNECTED, f"cannot be reached ({code})")


_NO_ENVELOPE = Missing(Reason.MALFORMED, "sent no envelope")
