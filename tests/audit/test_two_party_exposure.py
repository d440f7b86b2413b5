"""The sum of two less one's own part is the other's gradient; of three it is not."""

import numpy as np
import pytest
from recorded import attacked, recorded

from moretta.audit.attacks.cgd.others_gradient import TWO_PARTIES as ATTACK


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_of_two_each_learns_the_others_gradient(tmp_path, loss):
    truth = recorded(tmp_path, data={"silos": 2}, protocol={"name": "cgd", "delta": 0.1, "loss": loss})
    found = attacked(ATTACK, truth)
    assert found.succeeded
    assert found.figures["relative_error"] < 1e-5  # the sum is of float32 gradients in fixed point


def test_batches_and_a_decaying_rate_are_followed(tmp_path):
    truth = recorded(
        tmp_path,
        data={"silos": 2, "batch-size": 500},
        protocol={"name": "cgd", "schedule": "inverse-square", "mu": 0.5},
    )
    assert attacked(ATTACK, truth).figures["relative_error"] < 1e-5


def test_of_three_it_fails(tmp_path):
    truth = recorded(tmp_path, protocol={"name": "cgd", "delta": 0.1})
    found = attacked(ATTACK, truth)
    assert not found.succeeded
    assert found.figures["relative_error"] > 0.5
    assert np.isfinite(found.score)
