"""The doors of `doors.py` without a fuzzer: what covers most of each, and every input that one of them fell over."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from door import Door
from doors import DOORS
from fuzz import CORPUS, HERE, KEPT, Count, kept, lines_of

from moretta.contract import framing
from moretta.errors import CodecError, ParameterError


@pytest.mark.parametrize("name", DOORS)
def test_what_was_played_and_found_is_taken_or_refused_by_one_error(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for data in [*kept(name), *kept(name, HERE / "finds")]:
        wrong = DOORS[name].find(data)
        assert wrong is None, f"{data[:80]!r}: {type(wrong).__name__}: {wrong}"
    assert capfd.readouterr().out == ""  # a peer has no say in what is printed


@pytest.mark.parametrize("name", DOORS)
def test_a_door_takes_some_and_refuses_some(name: str) -> None:
    """A corpus of which all is refused, or nothing, would say little."""
    taken, corpus = 0, kept(name)
    for data in corpus:
        with suppress(DOORS[name].error):
            DOORS[name].opened(data)
            taken += 1
    assert 0 < taken < len(corpus)


def test_a_corpus_is_small_and_belongs_to_a_door() -> None:
    for home in (CORPUS, HERE / "finds"):
        assert {path.stem for path in home.iterdir()} <= set(DOORS)
    assert all(sum(map(len, kept(name))) <= KEPT for name in DOORS)


def raises(error: Exception) -> Door:
    def opened(data: bytes) -> None:
        raise error

    return Door(opened, ParameterError, list, peer=True)


@pytest.mark.parametrize(
    ("error", "is_find"),
    [
        (ParameterError("expected a number"), False),
        (CodecError("another door's"), True),
        (MemoryError(), True),
        (ParameterError("\x1b[2J"), True),
        (ParameterError("a" * 4000), True),
    ],
)
def test_what_a_find_is(error: Exception, is_find: bool) -> None:
    assert (raises(error).find(b"") is not None) == is_find


def test_inputs_are_counted_whatever_ends_the_process(tmp_path: Path) -> None:
    Count(tmp_path / "count").add(3)
    assert Count(tmp_path / "count").value == 3


def test_lines_are_those_of_the_package() -> None:
    short, whole, cut = (lines_of(lambda data: framing.find(data, width=1), data) for data in (b"\0", b"\1a", b"\1"))
    assert short == whole != cut
    assert ("taken", 0) in whole
    assert ("refused", 0) in cut


def test_the_command_plays_goes_on_and_prints_one_object(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="pip install 'moretta[fuzz]'")
    told = []
    for inputs in (200, 300):
        words = [sys.executable, str(HERE / "fuzz.py"), "framing", "--inputs", str(inputs), "--out", str(tmp_path)]
        done = subprocess.run([*words, "--json"], capture_output=True, text=True, check=True)
        told.append(json.loads(done.stdout.splitlines()[-1])["doors"]["framing"])
    assert [(one["inputs"], one["finds"]) for one in told] == [(200, []), (300, [])]
