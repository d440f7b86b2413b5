"""Plays a list of operations, and says what the coalition learned."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from coalition import Coalition, Operation
from silos import World
from wiretap import Wiretap


def played(world: World, operations: Sequence[Operation]) -> Coalition:
    """Play a list; return the coalition with all that it has seen."""
    tap = Wiretap(world.allies)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        tap.install(patch)
        coalition = Coalition(world, Path(folder), tap)
        for operation in operations:
            coalition.play(operation)
    return coalition
