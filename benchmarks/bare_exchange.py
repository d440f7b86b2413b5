"""Moretta's jobs, and after each round one exchange of bare FLARE aux messages between the same processes.

    python benchmarks/bare_exchange.py serve|join ...       as `moretta serve|join ...`

Beside the history the server writes bare.jsonl, a line a round: the milliseconds of an aux request to the sites that
carries as many bytes as the largest envelope of the round before, and is answered by as many as the largest reply. So
what Moretta adds to FLARE is measured in the same run, under the same load.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TOPIC, BYTES, SIZE = "bare", "bytes", "size"


def _patched() -> None:
    """Let jobs be made of the classes below. Before Moretta's own job module is imported, which copies these names."""
    from moretta.deployment import provisioning

    provisioning.CONTROLLER, provisioning.EXECUTOR = "bare_exchange.Controller", "bare_exchange.Executor"


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    )
    _patched()
    from moretta.commands.main import main

    sys.argv[0] = "moretta"
    main()
else:
    from nvflare.apis.event_type import EventType
    from nvflare.apis.fl_constant import ReturnCode
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable, make_reply
    from nvflare.apis.signal import Signal

    from moretta.contract.roles import Missing
    from moretta.deployment import controller, executor
    from moretta.engines.flare.liveness import Send
    from moretta.run.federation import Federation

    class Executor(executor.Executor):
        """Also answers bare requests."""

        def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
            """Take bare requests from the job's start on."""
            super().handle_event(event_type, fl_ctx)
            if event_type == EventType.START_RUN:
                fl_ctx.get_engine().register_aux_message_handler(TOPIC, _bare_reply)

    def _bare_reply(topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        reply = make_reply(ReturnCode.OK)
        reply[BYTES] = bytes(request[SIZE])
        return reply

    class Controller(controller.Controller):
        """Also sends a bare request after each round."""

        def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
            """Play the run, with an exchange after each round."""
            sizes, bare = [0, 0], Path(self._out) / "bare.jsonl"
            engine, send_of, train = fl_ctx.get_engine(), controller.sender, Federation.train

            def sized(*given: Any) -> Send:
                send = send_of(*given)

                def noting(
                    packed: Mapping[str, bytes], seconds: float, long: bool
                ) -> Iterator[tuple[str, bytes | memoryview | Missing]]:
                    sizes[0] = max(sizes[0], *map(len, packed.values()))
                    for silo, reply in send(packed, seconds, long):
                        sizes[1] = max(sizes[1], 0 if isinstance(reply, Missing) else len(reply))
                        yield silo, reply

                return noting

            def exchange(number: int, rounds: int, line: Mapping[str, Any]) -> None:
                request = Shareable({BYTES: bytes(sizes[0]), SIZE: sizes[1]})
                targets = [client.name for client in engine.get_clients()]
                began = time.perf_counter()
                with engine.new_context() as context:
                    engine.send_aux_request(
                        targets=targets, topic=TOPIC, request=request, timeout=60.0, fl_ctx=context, optional=True
                    )
                ms = 1e3 * (time.perf_counter() - began)
                with bare.open("a") as file:
                    file.write(json.dumps({"round": number, "ms": ms, "down": sizes[0], "up": sizes[1]}) + "\n")
                sizes[:] = 0, 0

            controller.sender = sized
            Federation.train = lambda *given, **named: train(*given, **{**named, "progress": exchange})
            super().control_flow(abort_signal, fl_ctx)
