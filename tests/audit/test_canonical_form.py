"""The canonical form of the release, on recorded runs."""

import numpy as np
from recorded import attacked, claimed, recorded

from moretta.audit.attacks.pbpfl.canonical_form import RELEASED as ATTACK


def run(folder, seed):
    folder.mkdir()
    return recorded(folder, run={"rounds": 4, "seed": seed}, protocol={"name": "pbpfl", "loss": "cross-entropy"})


def test_the_release_is_the_true_model(tmp_path):
    found = attacked(ATTACK, run(tmp_path / "one", 5))
    assert found.succeeded
    assert found.score >= 0.999999
    # Each weight of the release is rounded to float32 once.
    assert found.figures["relative_error"] < 1e-6
    assert found.figures["outputs_relative_error"] < 1e-5


def test_another_release_is_not(tmp_path):
    one, other = run(tmp_path / "one", 5), run(tmp_path / "other", 6)
    found = ATTACK.score(claimed(ATTACK, other), one)
    assert not found.succeeded
    assert found.score < 0.6
    assert found.figures["outputs_relative_error"] > 0.1
    assert np.isfinite(found.chance)
