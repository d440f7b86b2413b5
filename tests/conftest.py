"""What tests of more than one room stand on."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# `make test` tries few examples of each property, `make test-all` many.
settings.register_profile("quick", max_examples=20, deadline=None)
settings.register_profile("thorough", max_examples=60, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# A shell lets background jobs ignore ctrl-c, and what they start inherits it: what tests interrupt would never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `thorough.toml` and `measured.txt` leave to `make test-all` as slow."""
    here = Path(__file__).parent
    lines = (here / "measured.txt").read_text().splitlines()[1:]
    keeps = {name: int(keep) for keep, _, name in (line.partition(" ") for line in lines)}
    families = tomllib.loads((here / "thorough.toml").read_text())["family"]
    keeps |= {name: family["keep"] for name, family in families.items()}
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        found.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, keep in keeps.items():
        cases = found.get(name, [])
        kept = {round(number * len(cases) / keep) for number in range(keep)}
        for number, item in enumerate(cases):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Yield the processes of edge clients that were started; at the end none of them may be left."""
    from moretta.engines import process

    found: list[Any] = []

    class Seen(subprocess.Popen):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            found.append(self)

    monkeypatch.setattr(process.subprocess, "Popen", Seen)
    yield found
    assert all(one.returncode is not None for one in found)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Keep what a run says of silos that fail from where tests are shown."""
    logger = logging.getLogger("moretta")
    level, logger.level = logger.level, logging.CRITICAL
    yield
    logger.level = level


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what training notes out of the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _logs_are_seen() -> None:
    """Have each test see Moretta's log, whatever one before it left: a site keeps it to its own file."""
    log = logging.getLogger("moretta")
    log.propagate, log.disabled = True, False
    log.setLevel(logging.NOTSET)
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def _default_dtype_is_float32() -> None:
    """Give each test PyTorch's own default dtype, whatever a thread of a test before it left behind."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_default_dtype() != torch.float32:
        torch.set_default_dtype(torch.float32)
