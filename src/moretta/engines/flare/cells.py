"""Transport of envelopes between the cells of FLARE's jobs: short ones as plain requests, long ones as streams.

FLARE's aux messages are streams of the same cells, whatever their length. Another message acknowledges each, threads of
two pools handle it, and a timer remembers it for seconds. That suits long messages. A round with three sites and 1,000
numbers takes 16 ms by streams and 5 ms by plain requests. The timeout of a plain request includes its transfer, and
that of a stream only the time in which no byte moves, so long messages are streams.

FLARE's server checks the sender of messages that it relays from site to site (`ORIGIN`), and each cell answers any
sender. So a site's cells refuse requests that only the server or the site's own client may send (`guard`,
`guard_stream`).
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from nvflare.fuel.f3.cellnet import net_agent
from nvflare.fuel.f3.cellnet.core_cell import TargetMessage
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.stream_const import STREAM_CHANNEL, STREAM_DATA_TOPIC, StreamHeaderKey

from moretta.contract.roles import Missing, Reason
from moretta.engines.flare.liveness import PLAIN_LIMIT, Send

CHANNEL = "moretta"
PLAIN, STREAM = "plain", "stream"  # topics
BYTES = (bytes, bytearray, memoryview)  # the types in which a cell delivers them
ENDING = ("stop", "stop_cell", "heartbeat")  # requests of FLARE's network by which a server or a client ends a cell
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
            yield asked.pop(reply), reply.result()  # the last reference to it

    def send(packed: Mapping[str, bytes], seconds: float, long: bool) -> Iterator[tuple[str, memoryview | Missing]]:
        if long:
            yield from ((silo, _received(reply)) for silo, reply in streamed(packed, seconds))
        else:
            replies = plain(packed, seconds)
            yield from ((silo, _received(replies.get(silo))) for silo in packed)

    return send


def guard(cell: Any) -> None:
    """Make a site's cell refuse FLARE's requests about its process and network, and commands to its job.

    They report its memory, which depends on its rows, set its log's level, and make it send any amount of data.
    Requests that end the cell are accepted from the server and the site's own client.
    """
    core = getattr(cell, "core_cell", cell)
    own = core.my_info.fqcn

    def refused(message: Message) -> Message | None:
        origin, topic = message.get_header(MessageHeaderKey.ORIGIN, ""), message.get_header(MessageHeaderKey.TOPIC)
        ours = FQCN.is_ancestor(origin, own)
        if message.get_header(MessageHeaderKey.CHANNEL) == CellChannel.CLIENT_COMMAND:
            return None if ours else make_reply(ReturnCode.INVALID_REQUEST)
        return None if topic in ENDING and (ours or _is_server(origin)) else make_reply(ReturnCode.INVALID_REQUEST)

    for channel in (net_agent._CHANNEL, CellChannel.CLIENT_COMMAND):
        core.add_incoming_request_filter(channel, "*", refused)


def guard_stream(cell: Any, channel: str, topic: str) -> None:
    """Make a site's cell drop streams of a topic from any sender but the server."""

    def dropped(message: Message) -> Message | None:
        target = message.get_header(StreamHeaderKey.CHANNEL), message.get_header(StreamHeaderKey.TOPIC)
        origin = message.get_header(MessageHeaderKey.ORIGIN, "")
        return Message() if target == (channel, topic) and not _is_server(origin) else None

    cell.core_cell.add_incoming_request_filter(STREAM_CHANNEL, STREAM_DATA_TOPIC, dropped)


def _is_server(origin: str) -> bool:
    return origin.partition(".")[0] == str(FQCN.ROOT_SERVER)


def receive(cell: Any, answer: Answer) -> None:
    """Make a site's cell pass envelopes to `answer`, and return its result."""
    guard(cell)

    def replied(request: Message, limit: int | None) -> Message:
        data = request.payload if isinstance(request.payload, BYTES) else b""  # empty, which is not an envelope
        return make_reply(ReturnCode.OK, body=answer(memoryview(data), limit))

    cell.register_request_cb(channel=CHANNEL, topic=PLAIN, cb=replied, limit=PLAIN_LIMIT)
    cell.register_request_cb(channel=CHANNEL, topic=STREAM, cb=replied, limit=None)


def _received(reply: Message | None) -> memoryview | Missing:
    code = ReturnCode.COMM_ERROR if reply is None else reply.get_header(MessageHeaderKey.RETURN_CODE, ReturnCode.OK)
    if reply is not None and code == ReturnCode.OK:
        return memoryview(reply.payload) if isinstance(reply.payload, BYTES) else _NO_ENVELOPE
    if code == ReturnCode.TIMEOUT:
        return Missing(Reason.LATE, "has not answered in time")
    if code == ReturnCode.PROCESS_EXCEPTION:  # its job has begun, and does not accept envelopes yet
        return Missing(Reason.DISCONNECTED, "is starting, and is not ready yet")
    return Missing(Reason.DISCONNECTED, f"cannot be reached ({code})")


_NO_ENVELOPE = Missing(Reason.MALFORMED, "sent no envelope")
