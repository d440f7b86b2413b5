"""One site sends to another through FLARE's own relay, with mutual TLS: it is refused and named, and the run goes on.

FLARE's server hands messages of one site's job on to another's, and says of the sender what the sender says. South
is a real site whose job process has a thread more, which knows all that its process knows: what the server sends it.
Before there were keys, north answered it as it does the server, and gave it its gradient.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

from hospitals import Hospitals, models_of, wait_for

pytestmark = pytest.mark.slow

PLAYS_THE_SERVER = """
import os

if "MORETTA_PLAYS" in os.environ:
    import json
    import threading
    import time

    from moretta.deployment.executor import Executor
    from moretta.engines.flare import cells, envelope, signing
    from moretta.engines.flare.site_worker import SiteWorker
    from moretta.secure_aggregation.identity import Identity

    got, answer, handle = [], SiteWorker.answer, Executor.handle_event

    def noted(self, data, limit):
        got.append(bytes(data))
        return answer(self, data, limit)

    def begun(self, event, context):
        handle(self, event, context)
        if event == "_start_run":
            north = "north." + context.get_job_id()
            threading.Thread(target=play, args=(context.get_engine().get_cell(), north), daemon=True).start()

    def play(cell, north):
        send = cells.sender(cell, {"north": north})

        def ask(what, data):
            long = what in ("altered work", "work again")  # by either way
            reply = envelope.reply_of(dict(send({"north": data}, 10.0, long))["north"])[0]
            with open(os.environ["MORETTA_PLAYS"], "a") as sink:
                sink.write(json.dumps({"what": what, **reply.model_dump(mode="json")}) + "\\n")
            return reply

        def heard(kind):
            while True:
                for data in list(got):
                    request, parts = envelope.request_of(data)
                    if isinstance(request, kind) and (parts.body or kind is not envelope.Submit):
                        return data, request, parts.body
                time.sleep(0.01)

        theirs, hello, _ = heard(envelope.Hello)
        work, submit, body = heard(envelope.Submit)
        there = {"north": ask("knock", envelope.pack(envelope.Knock())).process_id}
        for what, to in (("this session", hello), ("the next", hello.model_copy(update={"session": 1}))):
            forged = signing.ServerSession(Identity.fresh(), to)
            ask(f"a hello of its own for {what}", forged.pack(forged.hello, there)[0])
            ask(f"work of its own for {what}", forged.pack(submit, there, body)[0])
        unsigned = submit.model_copy(update={"processes": there, "serial": 10**6})
        ask("work without a signature", envelope.pack(unsigned, body))
        ask("altered work", work[:-1] + bytes([work[-1] ^ 1]))
        ask("the hello again", theirs)
        ask("work again", work)
        alone = signing.ServerSession(Identity.fresh(), hello).pack(submit, {"south": "0" * 64}, body)[0]
        ask("work for itself alone", alone)
        while len(got) < 100:
            time.sleep(0.01)
        ask("work that it held back", work)
        ask("end", envelope.pack(envelope.Knock()))

    SiteWorker.answer, Executor.handle_event = noted, begun
"""
EXPECTED: dict[str, str | tuple[str, ...]] = {
    "a hello of its own for this session": "its session is not signed by the server's key",
    "work of its own for this session": "it is not signed by the key of session 0",
    "a hello of its own for the next": "its session is not signed by the server's key",
    "work of its own for the next": "it is not signed by the key of session 0",
    "work without a signature": "it is not signed by the key of session 0",
    "altered work": "it is not signed by the key of session 0",
    "the hello again": ("it was replayed", "it was addressed to south, not to north"),  # that of both, or south's alone
    "work again": "it was replayed",
    "work for itself alone": "it was addressed to south, not to north: passed on by another than the server",
    "work that it held back": "it was replayed",
}


@pytest.fixture
def hospital(tmp_path: Path) -> Iterator[Hospitals]:
    made = Hospitals(tmp_path / "h", protocol="fedsgd", sites=("north", "south"), rounds=120, secure='scheme = "none"')
    yield made
    made.end()


def test_a_site_that_plays_the_server_to_another_is_refused_and_named(hospital: Hospitals, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLAYS_THE_SERVER)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    told = tmp_path / "told.jsonl"
    hospital.pace("north", 0.02)
    hospital.serve()
    hospital.join("north")
    hospital.join("south", {"MORETTA_PLAYS": str(told), "PYTHONPATH": path})
    wait_for(lambda: bool(lines(told)) and lines(told)[-1]["what"] == "end", "the attacks", hospital.said)
    assert hospital.ends() == 0, hospital.said()
    knock, *attacks, _ = lines(told)
    assert knock["kind"] == "awake"
    assert {one["what"] for one in attacks} == EXPECTED.keys()
    log = (hospital.site("north") / "moretta" / "log.txt").read_text()
    assert "an envelope was not taken: its session is not signed by the server's key" in log
    for one in attacks:
        assert one["kind"] == "denied", one
        expected = EXPECTED[one["what"]]
        assert any(said in one["sentence"] for said in ([expected] if isinstance(expected, str) else expected)), one
    assert not any(line["dropped"] for line in hospital.history())
    assert models_of(hospital.out) == models_of(hospital.in_process(tmp_path / "alone"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
