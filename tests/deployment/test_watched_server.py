"""`moretta serve --watch`: the page hears whom the server waits for, each round, and the end."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from hospitals import Hospitals, wait_for
from test_cli_watch import ADDRESS, heard

pytestmark = pytest.mark.slow


def test_a_page_follows_a_server_from_its_wait_to_its_end(tmp_path: Path) -> None:
    hospital = Hospitals(tmp_path, rounds=6)
    events: list[tuple[str, object]] = []
    try:
        hospital.serve("--watch", "--json")
        wait_for(lambda: bool(ADDRESS.search(hospital.said())), "the page has an address", hospital.said)
        (address,) = ADDRESS.findall(hospital.said())
        browser = threading.Thread(target=lambda: events.extend(heard(address)))
        browser.start()
        wait_for(lambda: "waiting up to" in hospital.said(), "the server waits", hospital.said)
        hospital.join_all()
        assert hospital.ends() == 0, hospital.said()
        browser.join(60)
    finally:
        hospital.end()
    states = [data for kind, data in events if kind == "state"]
    assert any(re.search("waiting up to .* for north", state["sentence"]) for state in states)  # type: ignore[index]
    assert (states[-1]["state"], states[-1]["sentence"]) == ("ended", "")  # type: ignore[index]
    rounds = [one["round"] for kind, data in events if kind == "rounds" for one in data["rounds"]]  # type: ignore[index]
    assert rounds == list(range(1, 7))
    assert events[-1][0] == "bye"
