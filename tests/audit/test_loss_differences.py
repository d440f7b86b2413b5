"""Loss differences of data and of noise, told apart."""

import numpy as np
import pytest
from recorded import attacked, claimed, recorded

from moretta.audit.attacks.baffle.estimates import forward_at, opened, recipe_of, scalars, seeded_rounds, used
from moretta.audit.attacks.baffle.loss_differences import ATTACK, uniformity

FIXED = {"insecure-secret-seed": 3}  # the same directions each time, so that no test fails by chance
BAFFLE = {"name": "baffle", "k": 64, "loss": "mse", "optimizer": "sgd", "learning-rate": 0.02}


@pytest.mark.parametrize("scheme", ["none", "pairwise"])
def test_data_are_told_from_noise(tmp_path, scheme):
    truth = recorded(tmp_path, run={**FIXED, "rounds": 12}, protocol=BAFFLE, secure_aggregation={"scheme": scheme})
    found = attacked(ATTACK, truth)
    assert found.succeeded
    assert found.score > 0.9
    assert found.figures["p"] < 1e-3
    if scheme == "pairwise":  # one silo's words are uniform, whatever their sum tells
        assert found.figures["masked_words_p"] > 1e-3


def test_noise_is_not_told_from_noise(tmp_path):
    generator = np.random.Generator(np.random.PCG64(3))
    rows = np.column_stack([generator.standard_normal((600, 8)), generator.integers(0, 2, 600)])
    np.savetxt(
        tmp_path / "noise.csv", rows, delimiter=",", header=",".join([*"abcdefgh", "label"]), comments="", fmt="%.6g"
    )
    # A model that is not trained on them: of rows that it has learnt by heart it would have other slopes.
    still = {**BAFFLE, "learning-rate": 1e-9}
    source = {"source": str(tmp_path / "noise.csv"), "batch-size": 16}
    truth = recorded(
        tmp_path, run={**FIXED, "rounds": 12}, data=source, protocol=still, secure_aggregation={"scheme": "none"}
    )
    found = attacked(ATTACK, truth)
    assert not found.succeeded
    # 36 uploads: Hanley and McNeil's deviation at 0.5 is 0.05, and three of it
    assert abs(found.score - 0.5) < 0.15


def test_words_are_tested_for_uniformity(tmp_path):
    words = np.random.Generator(np.random.PCG64(1)).integers(0, 2**64, 2000, dtype=np.uint64)
    assert uniformity([words]) > 1e-3
    assert uniformity([words >> np.uint64(8)]) < 1e-9
    assert uniformity([]) == 1.0


def test_epoch_level_is_another_upload(tmp_path):
    protocol = {**BAFFLE, "local-epochs": 1, "ema": 0.0}
    truth = recorded(tmp_path, run={"rounds": 2}, protocol=protocol, secure_aggregation={"scheme": "none"})
    assert "local-epochs" in ATTACK.fits(truth.run)


def test_additive_shares_have_a_sum_too(tmp_path):
    scheme = {"scheme": "additive-shares"}
    truth = recorded(tmp_path, run={**FIXED, "rounds": 3}, protocol=BAFFLE, secure_aggregation=scheme)
    claim = claimed(ATTACK, truth)
    assert len(claim["data"]) == 3
    assert float(claim["words_p"]) == 1.0


def test_noised_sums_are_opened_from_messages(tmp_path):
    noised = {**BAFFLE, "dp-noise": 1e-6, "dp-clip": 1e3}
    truth = recorded(tmp_path, run={**FIXED, "rounds": 2}, protocol=noised, data={"batch-size": 0})
    number, sums = 2, opened(truth, (1, 2))
    # All rows are in a lot and none is clipped: but for a little noise they are the mean of all rows' numbers.
    heard, forward = [one for at in (1, 2) for one in truth.heard("server", at)], forward_at(truth)
    seen = seeded_rounds(truth.run, heard, forward)[number]
    parts = [truth.rows(silo) for silo in truth.run.silos]
    x, y = (np.concatenate([getattr(part, key) for part in parts]) for key in ("x", "y"))
    wanted = scalars(recipe_of(truth.run), forward, seen, x, y)
    # noise of sigma C sqrt(3 / 2) / 1400 rows = 9e-7
    np.testing.assert_allclose(sums[f"opened/{number}"], wanted, rtol=1e-4, atol=1e-4)
    assert list(used(truth, seen, "silo-1")) == list(range(truth.run.rows["silo-1"]))
    assert ATTACK.fits(truth.run) == ""
