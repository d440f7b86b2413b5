"""What may happen once in a role's life is on disk whole, or it does not happen."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moretta.contract.messages import Stamp
from moretta.engines.journal import HelpedFile, Journal
from moretta.errors import ParameterError, RunFailed, SumSpent
from moretta.secure_aggregation.sums import Query

LOST = "restore it"


def journal_at(path: Path) -> Journal:
    return Journal(path, "the record of a test", LOST)


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Let no file of this process grow past a size: the system takes what fits, and says so at the next write."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_lines_come_back_and_only_their_owner_may_read_them(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lines"
    journal = journal_at(path)
    assert journal.open(begun=False) == []
    journal.append("one")
    journal.append("two", "three", force=False)
    assert journal_at(path).open(begun=True) == ["one", "two", "three"]
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("more", range(1, 9))
def test_on_a_full_disk_a_line_is_written_whole_or_not_at_all(tmp_path: Path, more: int) -> None:
    path = tmp_path / "lines"
    journal = journal_at(path)
    journal.append("first")
    with room_for(path.stat().st_size + more), pytest.raises(RunFailed, match="lines cannot be written"):
        journal.append("the second")
    assert path.read_bytes() == b"first\n"
    journal.append("third")
    assert path.read_bytes() == b"first\nthird\n"


def test_half_a_line_is_no_record_wherever_it_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    journal = journal_at(path)
    journal.append("first")
    with path.open("ab") as stream:
        stream.write(b"hal")
    journal.append("second")
    assert path.read_bytes() == b"first\nsecond\n"
    with path.open("ab") as stream:
        stream.write(b"hal")
    assert journal_at(path).lines() == ["first", "second"]
    assert path.read_bytes() == b"first\nsecond\n"


def test_a_journal_that_is_gone_is_the_operators_to_restore(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with pytest.raises(ParameterError, match=f"lines is missing: expected the record of a test; {LOST}"):
        journal_at(path).open(begun=True)
    assert not path.exists()
    journal = journal_at(path)
    journal.open(begun=False)
    path.unlink()
    with pytest.raises(RunFailed, match="No such file"):
        journal.append("one")
    assert not path.exists()


def test_a_folder_that_may_not_be_written_to_is_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "lines").mkdir()
    with pytest.raises(RunFailed, match="make room on that disk, or grant"):
        journal_at(tmp_path / "lines").append("one")


@pytest.mark.parametrize("room", range(0, 400, 7))
def test_a_sum_that_cannot_be_recorded_is_not_helped_to_open(tmp_path: Path, room: int) -> None:
    """Whatever fits on the disk: what a silo helped to open before, it still knows after a restart."""
    path, asked = str(tmp_path / "helped.jsonl"), Query(b"a" * 32)
    bound = []
    helped = HelpedFile(path, forces=True).opened
    with room_for(room):
        for number in range(1, 4):
            try:
                helped.bind(Stamp("run", number, 0), asked, ("a", "b", "c"), gives=True)
            except RunFailed:
                continue
            bound.append(number)
    again = HelpedFile(path, forces=True, begun=os.path.exists(path)).opened
    for number in bound:
        with pytest.raises(SumSpent):
            again.bind(Stamp("run", number, 0), asked, ("a", "b"), gives=True)
