"""What K directions tell of a gradient, and K numbers of a row."""

import numpy as np
import pytest
from recorded import attacked, claimed, recorded

from moretta.audit.attacks.baffle import gradient_estimates
from moretta.audit.attacks.baffle.gradient_estimates import K_RANK as ATTACK
from moretta.audit.evidence.truth import Truth

FIXED = {"insecure-secret-seed": 3}  # the same directions each time, so that no test fails by chance


@pytest.fixture(autouse=True)
def _few_starts(monkeypatch):
    monkeypatch.setattr(gradient_estimates, "STARTS", 1)


def baffle(k):
    return {"name": "baffle", "k": k, "loss": "mse", "optimizer": "sgd", "learning-rate": 0.01}


@pytest.mark.parametrize("k", [8, 64, 512])
def test_cosine_grows_with_the_root_of_k(tmp_path, k):
    truth = recorded(tmp_path, data={"source": "wdbc"}, run={**FIXED, "rounds": 4}, protocol=baffle(k))
    found = attacked(ATTACK, truth)
    # The K squared cosines of directions with g have the relative deviation sqrt(2 / K); of 4 rounds' mean, and half of
    # it in the root, it is 1 / sqrt(8 K) = 0.125 for K = 8. Three of it, and sigma's part:
    assert found.score == pytest.approx(found.figures["cosine_expected"], rel=3 / np.sqrt(8 * k) + 0.05)
    assert found.succeeded
    if k == 8:  # 8 equations for 30 inputs
        assert found.figures["row_error"] > 0.9 * found.figures["mean_row_error"]


def test_one_row_is_reconstructed(tmp_path, monkeypatch):
    monkeypatch.setattr(gradient_estimates, "STARTS", 6)  # some end elsewhere; which one did not is seen by its misfit
    truth = recorded(
        tmp_path,
        run=FIXED,
        data={"source": "wdbc", "batch-size": 1},
        protocol=baffle(256),
        secure_aggregation={"scheme": "none"},
    )
    found = attacked(ATTACK, truth)
    assert found.figures["rows_in_upload"] == 1
    assert found.figures["row_error"] < 0.05 < found.figures["mean_row_error"]


def test_another_directions_estimate_is_at_chance(tmp_path):
    truth = recorded(tmp_path, data={"source": "wdbc"}, run={**FIXED, "rounds": 6}, protocol=baffle(64))
    claim = dict(claimed(ATTACK, truth))
    generator = np.random.Generator(np.random.PCG64(5))
    claim["estimates"] = generator.permuted(claim["estimates"], axis=1)  # the same entries, of other parameters
    found = ATTACK.score(claim, truth)
    assert abs(found.score) < 0.15 < found.figures["cosine_expected"]
    assert not found.succeeded


def test_the_mean_row_is_that_of_the_background_that_was_declared(tmp_path):
    truth = recorded(tmp_path, data={"source": "wdbc"}, run={**FIXED, "rounds": 1}, protocol=baffle(8))
    x, y = truth.federation.test
    other = Truth(truth.folder, truth.federation, truth.run.rounds, 5, (x[:2], y[:2]))
    claim = claimed(ATTACK, truth)
    usual, few = (ATTACK.score(claim, one) for one in (truth, other))
    assert usual.figures["mean_row_error"] != few.figures["mean_row_error"]
    assert "the mean background row" in usual.sentence
