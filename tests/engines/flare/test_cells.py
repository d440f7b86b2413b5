"""Envelopes between real cells of FLARE, over this machine's loopback."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("nvflare")

from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.core_cell import TargetMessage
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.message import Message

from moretta.contract.roles import Missing, Reason
from moretta.engines.flare import cells
from moretta.engines.flare.liveness import PLAIN_LIMIT, Send

TARGETS = {"n": "north", "s": "south", "g": "gone"}  # south's job has begun, and takes no envelopes yet
SECONDS = 20.0  # in which anything must have happened; nothing waits for them
IN_VAIN = 2.0  # where FLARE may wait for all of them: a reply may come before it has noted who cannot be reached


SITE = """
import sys, threading
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.net_agent import NetAgent
from nvflare.fuel.f3.message import Message
from moretta.engines.flare import cells

def answer(data, limit):
    if data == b"wait":
        threading.Event().wait()
    return bytes(data) + f" {limit}".encode()

given = {"root_url": sys.argv[1], "secure": False, "credentials": {}}
north, south = (Cell(fqcn=name, **given) for name in ("north", "south"))
for cell in (north, south):
    NetAgent(cell)
cells.receive(north, answer)
north.register_request_cb(channel="client_command", topic="*", cb=lambda _: Message(payload=b"done"))
cells.guard_stream(north, "aux_communication", "moretta.sum")
north.register_request_cb(channel="aux_communication", topic="moretta.sum", cb=lambda _: Message(payload=b"a sum"))
for cell in (north, south):
    cell.start()
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """Yield the server's cell. The sites' are in another process: cells of one process call each other directly."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    cell = Cell(fqcn="server", root_url=url, secure=False, credentials={})
    cell.start()
    words = [sys.executable, "-c", SITE, url]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as site:
        yield cell
        site.kill()
    cell.stop()


@pytest.fixture
def send(server: Any) -> Send:
    send = cells.sender(server, TARGETS)
    for _ in range(1000):  # until north has connected
        if not isinstance(dict(send({"n": b""}, SECONDS, False))["n"], Missing):
            return send
        time.sleep(0.01)
    raise AssertionError("north never answered")


def heard(reply: bytes | memoryview | Missing) -> bytes | Missing:
    return reply if isinstance(reply, Missing) else bytes(reply)


def test_a_plain_request_says_how_much_its_reply_may_be_and_a_stream_takes_any(send: Send) -> None:
    assert heard(dict(send({"n": b"short"}, SECONDS, False))["n"]) == f"short {PLAIN_LIMIT}".encode()
    long = bytes(range(256)) * (1 << 14)  # 4 MiB, several pieces
    assert heard(dict(send({"n": long}, SECONDS, True))["n"]) == long + b" None"


@pytest.mark.parametrize("long", [False, True])
def test_who_cannot_be_reached_is_named_and_the_others_answer(long: bool, send: Send) -> None:
    replies = dict(send(dict.fromkeys("ng", b"x"), IN_VAIN, long))
    assert heard(replies["n"]) == (b"x None" if long else f"x {PLAIN_LIMIT}".encode())
    gone = replies["g"]
    assert isinstance(gone, Missing)
    assert gone.reason is Reason.DISCONNECTED
    assert gone.detail.startswith("cannot be reached (")


def test_a_job_that_takes_no_envelopes_yet_is_starting(send: Send) -> None:
    for _ in range(1000):  # until south has connected
        reply = dict(send({"s": b"x"}, SECONDS, False))["s"]
        if reply == Missing(Reason.DISCONNECTED, "is starting, and is not ready yet"):
            return
        time.sleep(0.01)
    raise AssertionError(f"south was never starting, but {reply!r}")


@pytest.mark.parametrize("long", [False, True])
def test_who_does_not_answer_in_time_is_late(long: bool, send: Send) -> None:
    assert dict(send({"n": b"wait"}, 0.1, long))["n"] == Missing(Reason.LATE, "has not answered in time")


def test_what_is_no_bytes_is_no_envelope(send: Send, server: Any) -> None:
    request = TargetMessage("north", cells.CHANNEL, cells.PLAIN, Message(payload={"an": "object"}))
    reply = server.broadcast_multi_requests({"north": request}, SECONDS)["north"]
    assert bytes(reply.payload) == f" {PLAIN_LIMIT}".encode()


def test_a_stream_that_has_come_is_handed_on_while_another_is_on_its_way(send: Send) -> None:
    replies = iter(send({"n": b"wait", "g": b"x"}, 2.0, True))
    assert next(replies)[0] == "g"
    assert next(replies) == ("n", Missing(Reason.LATE, "has not answered in time"))


@pytest.mark.parametrize("topic", ["process_info", "config_vars", "msg_stats", "stress", "bulk_test", "cells"])
def test_a_site_s_cell_tells_and_does_nothing_about_its_process(topic: str, send: Send, server: Any) -> None:
    """The memory of a site's job depends on its rows, and `bulk_test` sends as many messages as it is asked for."""
    request = {"request": Message(payload={"mode": ""}), "timeout": SECONDS}
    reply = server.core_cell.send_request(channel="_net_manager", topic=topic, target="north", **request)
    assert reply.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.INVALID_REQUEST
    assert reply.payload is None


def test_a_sum_is_the_server_s_to_ask_for(send: Send, server: Any) -> None:
    """FLARE's server relays what another site sends, which without a roster could make up all other silos of a sum."""
    options: dict[str, Any] = {"channel": "aux_communication", "topic": "moretta.sum", "target": "north"}
    assert server.send_request(request=Message(payload=b"x"), timeout=SECONDS, **options).payload == b"a sum"
    west = Cell(fqcn="west", root_url=server.core_cell.root_url, secure=False, credentials={})
    west.start()
    try:
        reply = west.send_request(request=Message(payload=b"x"), timeout=IN_VAIN, **options)
        assert reply.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.TIMEOUT
        for channel, topic in (("client_command", "configure_job_log"), ("_net_manager", "stop_cell")):
            options = {"channel": channel, "topic": topic, "target": "north", "timeout": SECONDS}
            reply = west.core_cell.send_request(request=Message(), **options)
            assert reply.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.INVALID_REQUEST
    finally:
        west.stop()
    assert not isinstance(dict(send({"n": b"x"}, SECONDS, False))["n"], Missing)
