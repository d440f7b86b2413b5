"""Which rounds' states an audit needs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moretta import Silo
from moretta.run.persistence import needs_truth

SILO = Silo("north", np.zeros((1, 2)), np.zeros(1))


@pytest.mark.parametrize(
    ("recorded", "numbers"), [(True, [0, 1, 2, 3, 4]), (False, []), ((), []), ((2, 3), [1, 2, 3]), ((1,), [0, 1])]
)
def test_states_before_and_after_each_recorded_round(recorded: bool | tuple[int, ...], numbers: list[int]) -> None:
    assert [number for number in range(5) if needs_truth(recorded, [SILO], number)] == numbers


def test_nobody_has_the_truth_of_silos_elsewhere() -> None:
    assert not needs_truth(True, [SILO, replace(SILO, name="south", remote=True)], 1)
