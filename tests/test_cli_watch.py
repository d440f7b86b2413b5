"""`moretta watch`, and `--watch` of commands that play a run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_cli import call, prepare

from moretta.commands import train
from moretta.engines.run_folder import RunFolder
from moretta.report.page_server import listening

COMMAND = (sys.executable, "-c", "from moretta.commands.main import main; main()")
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/[\w-]{43}/")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def heard(address: str) -> Iterator[tuple[str, object]]:
    """Yield what a browser hears, until it is told that nothing more will come."""
    with urllib.request.urlopen(f"{address}events", timeout=60) as stream:
        kind = ""
        for line in stream:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                yield kind, json.loads(value)


def test_a_run_is_watched_to_its_end_and_json_is_alone_on_stdout(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    events: list[tuple[str, object]] = []
    connected = threading.Event()

    def listen() -> None:
        for event in heard(ADDRESS.findall(told[0])[0]):
            events.append(event)
            connected.set()

    def tell(sentence: str) -> None:
        if not ADDRESS.search(sentence):  # what it trains on
            return
        told.append(sentence)
        browser.start()
        connected.wait(60)  # so short a run may end before a page was asked for

    browser = threading.Thread(target=listen)
    monkeypatch.setattr(train, "tell", tell)
    done = call("train", "run.toml", "--out", "mine", "--watch", "--json")
    browser.join(60)
    assert not browser.is_alive()
    assert done.told == json.loads((here / "mine" / "result.json").read_text())
    rounds = [one["round"] for kind, data in events if kind == "rounds" for one in data["rounds"]]  # type: ignore[index]
    assert rounds == [1, 2, 3]
    states = [data["state"] for kind, data in events if kind == "state"]  # type: ignore[index]
    assert states[-1] == "ended"
    assert set(states) <= {"waiting", "running", "ended"}
    assert events[-1][0] == "bye"
    assert not ADDRESS.search(done.out)


def test_a_run_that_is_refused_is_one_sentence_more(here: Path) -> None:
    refused = call("train", "run.toml", "--out", ".", "--watch", "--json")
    assert refused.code == json.loads(refused.out)["exit_code"] == 2
    lines = refused.err.strip().splitlines()
    assert len(lines) == 2
    assert ADDRESS.search(lines[0])
    assert "exists and is not empty" in lines[1]


def test_a_port_in_use_is_one_sentence_and_nothing_is_begun(here: Path) -> None:
    with listening(0) as found:
        port = found.getsockname()[1]
        done = call("train", "run.toml", "--out", "mine", "--watch-port", port)
        assert done.code == 2
        assert done.sentence.startswith(
            f"the page cannot be served at port {port} of 127.0.0.1: Address already in use"
        )
        assert not (here / "mine").exists()
        folder(here / "old")
        assert call("watch", "old", "--port", port).sentence == done.sentence


def test_a_folder_that_is_none_is_one_sentence(here: Path) -> None:
    assert "there is no such directory" in call("watch", "nowhere").sentence
    assert "is not a run folder: it has no run.toml" in call("watch", "..").sentence
    assert call("watch", "nowhere").code == 2


def folder(path: Path) -> RunFolder:
    made = RunFolder(path)
    made.begin('[run]\nname = "old"\nrounds = 2\n')
    made.append({"round": 1, "dropped": []})
    return made


def test_a_folder_is_watched_until_ctrl_c(here: Path) -> None:
    run = folder(here / "old")
    words = [*COMMAND, "watch", "old", "--json"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert process.stderr is not None
    address = ADDRESS.findall(process.stderr.readline())[0]
    events = heard(address)
    assert [kind for kind, _ in (next(events) for _ in range(5))] == ["begin", "plan", "rounds", "result", "state"]
    run.append({"round": 2, "dropped": []})
    kind, data = next(events)
    assert (kind, [one["round"] for one in data["rounds"]]) == ("rounds", [2])  # type: ignore[index]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out) == {"format": 1, "folder": "old", "state": "running", "sentence": "", "here": False}
    assert [kind for kind, _ in events][-1:] == ["bye"]


def test_ctrl_c_ends_a_run_and_its_page(here: Path) -> None:
    words = [*COMMAND, "train", "run.toml", "--out", "mine", "--watch", "--set", "run.rounds=100000"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    events = heard(ADDRESS.findall(process.stderr.readline())[0])
    for kind, _ in events:
        if kind == "rounds":
            break
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it, to the page's process too
    states = [data for kind, data in events if kind == "state"]
    assert process.wait(60) == 1
    process.communicate()
    assert states[-1]["state"] == "failed"  # type: ignore[index]
    assert "interrupted" in states[-1]["sentence"]  # type: ignore[index]
    assert "interrupted" in (here / "mine" / "log.txt").read_text().splitlines()[-1]
