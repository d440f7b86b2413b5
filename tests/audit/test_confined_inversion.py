"""Rows from the others' sum, with one's own model for theirs: near starts let it, far ones do not, a bias does."""

import numpy as np
from recorded import attacked, recorded

from moretta.audit.attacks.confined_inversion import ATTACK

ONE_ROW = {"silos": 2, "batch-size": 1}
NO_BIAS = {"hidden": [32], "bias": False}
SHORT = {"rounds": 6, "insecure-secret-seed": 0}


def cgd(delta, loss="cross-entropy"):
    # A rate at which networks with large weights do not diverge.
    return {"name": "cgd", "around": "model", "delta": delta, "learning-rate": 0.002, "loss": loss}


def test_near_starts_let_rows_be_found(tmp_path):
    truth = recorded(tmp_path, protocol=cgd(0.001), data=ONE_ROW, model=NO_BIAS, run=SHORT)
    found = attacked(ATTACK, truth)
    assert found.succeeded
    assert found.score > 0.5


def test_far_starts_do_not(tmp_path):
    truth = recorded(tmp_path, protocol=cgd(0.5), data=ONE_ROW, model=NO_BIAS, run=SHORT)
    found = attacked(ATTACK, truth)
    assert not found.succeeded
    assert found.score < 0.5


def test_one_row_at_a_layer_with_a_bias_comes_out_whatever_the_starts(tmp_path):
    truth = recorded(tmp_path, protocol=cgd(0.5, "mse"), data=ONE_ROW, run=SHORT)
    found = attacked(ATTACK, truth)
    assert found.succeeded
    assert found.figures["mse"] < 1e-10  # float32's rounding


def test_large_sums_are_not_tried_for_long(tmp_path):
    truth = recorded(tmp_path, protocol={"name": "cgd"}, data={"batch-size": 16}, run={**SHORT, "rounds": 1})
    assert attacked(ATTACK, truth).score < 0.5


def test_pairing_noise_with_many_rows_is_luck(tmp_path):
    draw = np.random.Generator(np.random.PCG64(4))
    rows = np.column_stack([draw.standard_normal((800, 4)), draw.integers(0, 2, 800)])
    np.savetxt(tmp_path / "rows.csv", rows, delimiter=",", header="a,b,c,d,target", comments="")
    data = {"source": str(tmp_path / "rows.csv"), "batch-size": 12}
    truth = recorded(tmp_path, protocol={"name": "cgd", "loss": "mse"}, data=data, run=SHORT)
    for seed in range(5):
        draw = np.random.Generator(np.random.PCG64(seed))
        noise = {f"found/{number}": draw.standard_normal((24, 4)) for number in truth.recorded}
        noise["mean"] = truth.rows("silo-1").x.mean(axis=0)
        found = ATTACK.score(noise, truth)
        # 24 rows of 4 columns: the nearest of as many noise rows is nearer than the mean row.
        assert found.score > 0.2
        assert found.chance > 0.2
        assert not found.succeeded
