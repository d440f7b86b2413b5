"""What tests of more than one room stand on."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Yield the processes of edge clients that were started; at the end none of them may be left."""
    from moretta.engines import child

    found: list[Any] = []

    class Seen(subprocess.Popen):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            found.append(self)

    monkeypatch.setattr(child.subprocess, "Popen", Seen)
    yield found
    assert all(process.returncode is not None for process in found)
