"""A site whose record of sums is gone, or cannot be written, does not help to open a sum."""

from __future__ import annotations

import json
import logging
import resource
from pathlib import Path
from typing import Any

import pytest
from loopback import NAMES, Machines, hello_of
from stopped import Killed, killed_after

from moretta.config import silo_file
from moretta.deployment import shared_settings as told
from moretta.deployment.site import Site
from moretta.engines.checkpoint import CheckpointId
from moretta.errors import ParameterError, RunFailed

pytestmark = pytest.mark.usefixtures("one_process")
RECORD = "helped.jsonl"


def records(many: Machines) -> list[Path]:
    return [many.folder / name / "kept" / RECORD for name in many.names]


def test_no_second_sum_opens_where_sites_have_lost_their_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A round of three silos again, of two: the third one's upload would be the difference."""
    many = Machines(tmp_path, extra="[secure-aggregation]\nthreshold = 2", run="checkpoint-every = 3")
    many.start()
    with pytest.raises(Killed):
        many.serve(tmp_path / "out", progress=killed_after(2))
    many.stop()
    before = [path.read_bytes() for path in records(many)]
    assert all(before)
    for path in records(many):
        path.unlink()
    many.start(*NAMES[:2])
    with pytest.raises((ParameterError, RunFailed)), caplog.at_level(logging.INFO, "moretta"):
        many.serve(tmp_path / "out", resume=True, least=2, wait=1.0)
    assert f"{RECORD} is missing: expected the record of which sums this silo has helped to open" in caplog.text
    assert not any(path.exists() for path in records(many))
    many.stop()
    for path, content in zip(records(many), before, strict=True):
        path.write_bytes(content)
    many.start()
    many.serve(tmp_path / "out", resume=True)
    many.stop()


def test_a_site_that_was_stopped_before_its_first_sum_has_lost_nothing(tmp_path: Path) -> None:
    many = Machines(tmp_path)
    federation = told.server_side(many.run_file, tmp_path / "out")
    hello = hello_of(federation, many.run_file, many.text, CheckpointId("run", 0, 0, ""))
    path = tmp_path / NAMES[0] / "silo.toml"
    for _ in range(2):
        Site(silo_file.load(path), many.text, NAMES[0]).enter(hello)
    (line,) = (tmp_path / NAMES[0] / "kept" / RECORD).read_text().splitlines()
    assert json.loads(line)[:3] == ["answer", "run", "settings"]  # which it began the run with, and no sum


def test_on_a_full_disk_a_site_helps_to_open_no_sum(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    many = Machines(tmp_path, extra="[secure-aggregation]\nthreshold = 2")
    full, *others = records(many)
    full.parent.mkdir()
    earlier = "".join(f'["set", "site-{number:05}", "site-{number + 1:05}"]\n' for number in range(10_000))
    full.write_text(earlier)  # so much that this file alone reaches the limit
    before, sizes = resource.getrlimit(resource.RLIMIT_FSIZE), list[int]()

    def progress(number: int, rounds: int, line: Any) -> None:
        if number == 1:
            sizes.append(full.stat().st_size)
            resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[0] + 10, before[1]))

    many.start()
    try:
        with caplog.at_level(logging.INFO, "moretta"):
            many.serve(tmp_path / "out", progress=progress)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        many.stop()
    assert full.stat().st_size == sizes[0]
    assert f"{RECORD} cannot be written (File too large), and what it should record first was not done" in caplog.text
    assert [last_round(path) for path in (full, *others)] == [1, 3, 3]


def last_round(path: Path) -> int:
    """Return the round of the last record, all of which are whole."""
    return int([line for line in map(json.loads, path.read_text().splitlines()) if line[0] == "sum"][-1][3])
