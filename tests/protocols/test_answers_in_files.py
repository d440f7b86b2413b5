"""Every protocol takes answers that lie in read-only files, and ends with the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from test_devices import CASES, played

from moretta.engines import mapped


@pytest.mark.parametrize("case", ["fedsgd", "fedsgd, dp", "pbpfl, cross-entropy", "cgd", "baffle"])
def test_answers_in_files_give_the_same_bits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    protocol, model, _, _ = CASES[case]
    wanted, _ = played(protocol, model(), "cpu")
    monkeypatch.setattr(mapped, "LARGE", 1)
    found, _ = played(protocol, model(), "cpu")
    for name, tensors in wanted.items():
        for key, value in tensors.items():
            np.testing.assert_array_equal(found[name][key], value)
