"""The measured rate beside Lemma 7's bound, on recorded runs."""

import numpy as np
import pytest
from recorded import attacked, claimed, recorded

from moretta.audit.attacks.pbpfl.head_offset import LEMMA_SEVEN as ATTACK


def test_rate_is_far_above_the_bound(tmp_path):
    truth = recorded(tmp_path, run={"rounds": 12}, protocol={"name": "pbpfl", "rho": 3.0, "partitions": 5})
    found = attacked(ATTACK, truth)
    assert found.succeeded
    assert found.interval[0] > 2 * found.figures["lemma_bound"]
    assert found.chance >= found.figures["lemma_bound"]
    assert found.figures["rounds"] == 12


def test_before_anything_is_learned_labels_say_little_and_afterwards_nearly_all(tmp_path):
    """Labels stand in for predictions, so they have to resemble them; m = 10, means over two starts."""
    rates = {}
    for first, views in (("before", [1]), ("after", [120])):
        found = []
        for seed in range(2):
            folder = tmp_path / f"{first}-{seed}"
            folder.mkdir()
            run = {"rounds": views[-1], "record-views": views, "seed": seed}
            truth = recorded(folder, run=run, protocol={"name": "pbpfl", "rho": 3.0, "partitions": 10})
            found.append(attacked(ATTACK, truth).score)
        rates[first] = np.mean(found)
    assert rates["before"] < 0.5
    assert rates["after"] > 0.9


def test_ignoring_gamma_and_other_rows_do_not(tmp_path):
    truth = recorded(tmp_path, run={"rounds": 12}, protocol={"name": "pbpfl", "rho": 10.0})
    claim = dict(claimed(ATTACK, truth))
    assert ATTACK.score(claim, truth).succeeded
    naive = ATTACK.score(claim | {"predicted": claim["naive"]}, truth)
    assert naive.score == pytest.approx(naive.figures["without_gamma"])
    assert not naive.succeeded
    # Rows at random agree with a rate of sum_c p_c^2, which is at most the share of the most frequent class.
    shuffled = np.random.Generator(np.random.PCG64(1)).permutation(claim["predicted"], axis=1)
    assert not ATTACK.score(claim | {"predicted": shuffled}, truth).succeeded


def test_one_output_predicts_no_class(tmp_path):
    truth = recorded(tmp_path, run={"rounds": 1}, data={"source": "wdbc"}, protocol={"name": "pbpfl"})
    assert "one output" in ATTACK.fits(truth.run)


def test_one_round_is_one_draw_of_gamma(tmp_path):
    run = {"rounds": 3, "record-views": [3]}
    found = attacked(ATTACK, recorded(tmp_path, run=run, protocol={"name": "pbpfl", "rho": 3.0}))
    assert found.interval == pytest.approx((0.0, 1.0))  # however many rows there are
    assert not found.succeeded
