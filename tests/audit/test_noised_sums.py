"""What the server had of a noised sum is rebuilt from its view, with the noise that it took off taken off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import recorded

from moretta.audit.evidence.uploads import from_heard, gradient_of


@pytest.mark.parametrize("lost", [(), ("silo-5",)])
def test_a_noised_sum_is_the_one_that_the_server_stepped_along(lost: tuple[str, ...], tmp_path: Path) -> None:
    """Of five silos, one of which may be lost: with none lost, each silo's further noise is taken off."""
    drop: list[Any] = [{"round": 1, "silo": silo, "phase": "upload"} for silo in lost]
    engine: dict[str, Any] = {"engine": {"faults": {"drop": drop}}} if lost else {}
    truth = recorded(
        tmp_path,
        run={"rounds": 2},
        data={"silos": 5},
        protocol={"dp-noise": 1.0, "dp-clip": 1.0, "learning-rate": 0.5},
        **engine,
    )
    first, second = (from_heard(truth.run, truth.heard("server", number), number) for number in (1, 2))
    total = first.total()
    assert len(total.silos) == 5 - len(lost)
    for name, value in gradient_of(total.means).items():
        moved = np.asarray(first.parameters[name], np.float64) - np.asarray(second.parameters[name], np.float64)
        assert np.abs(moved - 0.5 * value).max() < 1e-6  # weights are float32
