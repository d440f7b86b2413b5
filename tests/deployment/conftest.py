"""Runs of which each silo is a machine of its own, joined by a loopback and not by FLARE."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback import Machines

from moretta.engines.flare import delivery, liveness, site_worker


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all sites live in this process, and lose no time."""
    monkeypatch.setattr(site_worker, "AT_ONCE", 20.0)  # however busy this machine is, a site is there when it is asked
    monkeypatch.setattr(liveness, "AGAIN", 0.0)
    monkeypatch.setattr(delivery, "BACK", 5.0)


@pytest.fixture
def machines(tmp_path: Path, one_process: None) -> Iterator[Callable[..., Machines]]:
    made: list[Machines] = []

    def make(*given: Any, **settings: Any) -> Machines:
        folder = tmp_path / f"machines-{len(made)}"
        folder.mkdir()
        made.append(Machines(folder, *given, **settings))
        return made[-1]

    yield make
    for one in made:
        one.stop()
