"""Runs that are stopped after a round as a kill stops them, and what a finished run leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moretta import Federation


class Killed(BaseException):
    """What no `except Exception` sees."""


def killed_after(last: int) -> Callable[[int, int, object], None]:
    """Return a `progress` that ends a run after a round."""

    def progress(number: int, of: int, line: object) -> None:
        if number == last:
            raise Killed

    return progress


def interrupted(federation: Federation, at: int, rounds: int, seed: int = 0, *, resume: bool = False) -> None:
    """Train, and be killed after round `at`."""
    with pytest.raises(Killed):
        federation.train(rounds, seed, resume=resume, progress=killed_after(at))


def left_by(folder: Path) -> dict[str, bytes]:
    """The bytes of all models of a finished run."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*.safetensors") if "checkpoint" not in path.parts
    }  # fmt: skip
