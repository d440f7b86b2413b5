"""D alone is a model, and without steps it is none."""

import numpy as np
import pytest
from recorded import attacked, claimed, recorded

from moretta.audit.attacks.cgd.displacement import ALONE as ATTACK
from moretta.errors import ParameterError

CGD = {"name": "cgd", "learning-rate": 0.5, "loss": "cross-entropy"}
WDBC = {"source": "wdbc", "batch-size": 0}


def test_d_is_as_good_as_confined_models(tmp_path):
    last = {"rounds": 25, "record-views": [25], "insecure-secret-seed": 0}
    truth = recorded(tmp_path, protocol={**CGD, "delta": 0.1}, run=last, data=WDBC)
    found = attacked(ATTACK, truth)
    assert found.succeeded
    # A rate of 57 rows has a deviation of 0.03 at 0.95, and D has none of the starts' noise.
    assert found.score > found.figures["confined_mean"] - 0.1
    assert found.figures["confined_worst"] <= found.figures["confined_mean"] <= found.figures["confined_best"]


def test_without_what_all_have_moved_by_it_fails(tmp_path):
    truth = recorded(tmp_path, protocol={**CGD, "delta": 0.1})
    claim = claimed(ATTACK, truth)
    nothing = {name: 0 * value for name, value in claim.items()}
    assert not ATTACK.score(nothing, truth).succeeded


def test_numbers_score_by_r_squared(tmp_path):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((300, 3))
    y = x @ [1.0, -2.0, 0.5] + 0.1 * generator.standard_normal(300)
    lines = [",".join(f"{value:.6f}" for value in (*row, target)) for row, target in zip(x, y, strict=True)]
    (tmp_path / "rows.csv").write_text("\n".join(["a,b,c,y", *lines]) + "\n")
    truth = recorded(
        tmp_path,
        protocol={"name": "cgd", "delta": 0.01, "loss": "mse", "learning-rate": 0.2},
        model={"hidden": []},
        data={"source": "rows.csv", "target": "y", "batch-size": 0},
        run={"rounds": 15, "record-views": [15]},
    )
    found = attacked(ATTACK, truth)
    assert found.chance == 0.0
    assert found.succeeded
    assert "R^2" in found.sentence


def test_it_is_not_for_split_columns(tmp_path):
    grid = {"source": "wdbc", "silos": 6, "partition": "grid", "grid": [2, 3]}
    truth = recorded(tmp_path, protocol={"name": "cgd"}, run={"rounds": 2}, data=grid)
    with pytest.raises(ParameterError, match="columns are split"):
        ATTACK.given(truth)
