"""Masks of the ring against masks of real numbers, on recorded runs."""

from pathlib import Path

import numpy as np
import pytest
from recorded import attacked, claimed, recorded

from moretta.audit.attacks.float_masks import ATTACK, in_order, pairs


@pytest.mark.parametrize("scheme", ["pairwise", "additive-shares"])
def test_ring_masks_leave_a_coin(tmp_path, scheme):
    truth = recorded(tmp_path, secure_aggregation={"scheme": scheme})
    found = attacked(ATTACK, truth)
    tensors = found.figures["tensors"]
    assert tensors == 6 * 2 * 4  # of three silos a pair in each round
    # Keys come from the operating system, so hits differ from run to run: five deviations of a fair coin.
    assert abs(found.score - 0.5) < 5 * 0.5 / np.sqrt(tensors)
    assert found.figures["error_of_a_sum_under_gaussian_masks"] > 1e-3  # a ring's sum has 1e-9


def test_gradients_told_apart_are_scored_so(tmp_path):
    truth = recorded(tmp_path)
    claim = dict(claimed(ATTACK, truth))
    true = [[[one for one, _ in in_order(truth, n, pair)].index(silo) for silo in pair] for n, pair in pairs(truth)]
    claim["ring"] = np.broadcast_to(np.array(true)[..., None], claim["ring"].shape)
    found = ATTACK.score(claim, truth)
    assert found.succeeded
    assert found.score == 1.0


def test_uniform_masks_of_real_numbers_are_told_apart(tmp_path):
    """PBPFL's noisy gradients are large: those of two silos differ by far more than 20 over all entries."""
    run = {"insecure-secret-seed": 0}  # or of 12 fair coins all but one fall the same way in 0.3 % of runs
    found = attacked(ATTACK, recorded(tmp_path, run=run, protocol={"name": "pbpfl", "rho": 3.0}))
    assert found.figures["under_uniform_masks"] > 0.9
    assert found.figures["under_gaussian_masks"] < 0.9


def test_order_of_the_two_says_nothing_and_each_pair_is_given_once(tmp_path):
    drops = [{"round": 2, "silo": "silo-2"}]
    truth = recorded(
        tmp_path, engine={"faults": {"drop": drops}}, secure_aggregation={"min_survivors": 2, "threshold": 2}
    )
    given, games = ATTACK.given(truth), pairs(truth)
    assert all("silo-2" not in pair for number, pair in games if number == 2)
    # Who is left out turns with the rounds, and a case has the hashes' order, of which a run's id says nothing.
    assert len({pair for _, pair in games}) > 1
    for number, pair in games:
        held = [
            np.concatenate(
                [given.arrays[f"{number}/{'+'.join(pair)}/{side}/{n}"].ravel() for n in ("0.bias", "2.bias")]
            )
            for side in (0, 1)
        ]
        own = [np.concatenate([one["0.bias"], one["2.bias"]]) for _, one in in_order(truth, number, pair)]
        np.testing.assert_array_equal(held, own)
    assert ATTACK.score(claimed(ATTACK, truth), truth).figures["tensors"] == 6 * 2 * 4


@pytest.mark.parametrize("name", ["fedsgd", "pbpfl"])
def test_with_dropout_the_scorer_has_the_order_that_was_given(tmp_path, name):
    """Which gradient is first tells the truth from a claim, so that it must not be drawn anew between the two."""
    truth = recorded(
        tmp_path,
        run={"base": str(Path(__file__).parent)},
        model={"source": "test_truth:with_dropout"},
        protocol={"name": name},
    )
    given = ATTACK.given(truth).arrays
    for number, pair in pairs(truth):
        for side, (_, own) in enumerate(in_order(truth, number, pair)):
            for tensor, value in own.items():
                np.testing.assert_array_equal(given[f"{number}/{'+'.join(pair)}/{side}/{tensor}"], value)
