"""One mask on several tensors of an upload: where there is one, and where there are several."""

import numpy as np
import pytest
from recorded import attacked, recorded

from moretta.audit.attacks.shared_mask import ATTACK, differences, opened
from moretta.secure_aggregation import pairwise
from moretta.secure_aggregation.ring import Ring

PBPFL = {"name": "pbpfl", "rho": 3.0}


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_runs_mask_each_tensor_by_itself(tmp_path, loss):
    found = attacked(ATTACK, recorded(tmp_path, run={"rounds": 3}, protocol={**PBPFL, "loss": loss}))
    assert not found.succeeded
    assert found.score == 0.0
    # So many entries of independent differences: four deviations of their mean.
    assert abs(found.figures["near_0"] - 1 / 8) < 0.02


def test_one_mask_for_all_tensors_is_seen(tmp_path, monkeypatch):
    apart = pairwise.add_masks

    def add_masks(words, masks):
        for array in words:  # each begins the keystreams anew, as one phi would do for tensors of one shape
            apart([array], masks)

    monkeypatch.setattr(pairwise, "add_masks", add_masks)
    found = attacked(ATTACK, recorded(tmp_path, run={"rounds": 3}, protocol=PBPFL))
    assert found.succeeded
    assert found.score == 1.0


def test_beta_of_the_head_gives_all_of_it_away():
    # As the papers print it: every tensor of the head is uploaded, beta too, which is 0 there, all plus one phi.
    ring, generator = Ring(64), np.random.default_rng(1)
    shape, weight, bits = (3, 5), 32, 40
    true = {"noisy/h.weight": generator.normal(size=shape), "sigma/0/h.weight": generator.normal(size=shape)}
    phi = generator.integers(0, 2**64, shape, dtype=np.uint64)
    words = {
        name: ring.encode(name, value, weight, bits, 100, 3) + phi
        for name, value in {**true, "beta/h.weight": np.zeros(shape)}.items()
    }
    found = opened(words, dict.fromkeys(words, bits), "h.weight", "")
    assert set(found) == set(true)
    for name, value in true.items():
        np.testing.assert_allclose(found[name] / weight, value, rtol=0, atol=2.0 ** -(bits + 1) / weight * 1.01)


def test_small_tensors_say_nothing():
    few = {name: np.zeros(4, np.uint64) for name in ("noisy/b", "beta/b")}
    assert not list(differences(few))


def test_other_schemes_have_no_such_masks(tmp_path):
    truth = recorded(tmp_path, run={"rounds": 1}, protocol=PBPFL, secure_aggregation={"scheme": "none"})
    assert "none" in ATTACK.fits(truth.run)
