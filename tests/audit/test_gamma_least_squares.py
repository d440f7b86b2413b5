"""Gamma by least squares, on recorded runs."""

import dataclasses

import numpy as np
from recorded import attacked, claimed, recorded

from moretta.audit.attacks.pbpfl import head_offset
from moretta.audit.attacks.pbpfl.head_offset import GAMMA as ATTACK
from moretta.audit.attacks.pbpfl.head_offset import SeenHead, fit


def test_digits_to_a_thousandth(tmp_path):
    # The bar is a relative error of 1e-3 after 20 rounds. Keys are drawn anew in every run: the median over rounds was
    # 1.0e-4 to 2.3e-4 in ten runs, that of the last round alone, which has one neighbour, 1.0e-4 to 8.3e-4.
    truth = recorded(tmp_path, run={"rounds": 20}, data={"silos": 5}, protocol={"name": "pbpfl", "rho": 3.0})
    found = attacked(ATTACK, truth)
    assert found.succeeded
    assert found.figures["relative_error"] <= 1e-3
    assert found.figures["last_round"] <= 5e-3


def test_a_part_for_each_output_and_keys_of_other_rounds(tmp_path):
    protocol = {"name": "pbpfl", "rho": 3.0, "partitions": 10}
    truth = recorded(tmp_path, run={"rounds": 8}, protocol=protocol)
    claim = claimed(ATTACK, truth)
    # One output for each unknown; the median was 2.6e-2 to 3.4e-2 in six runs of other keys.
    assert ATTACK.score(claim, truth).figures["relative_error"] < 0.1
    # Signs of ten parts are drawn anew each round, so that another round's gamma is sqrt(2) away, not less than 1.
    others = dict(claim) | {"gamma": np.roll(claim["gamma"], 1, axis=0)}
    assert not ATTACK.score(others, truth).succeeded


def test_table_of_one_output_with_gaps(tmp_path):
    # With keys of its own each run, one in some twenty misses the bar by a little; a test has the same ones.
    run = {"rounds": 12, "record-views": [2, 3, 4, 7, 11, 12], "insecure-secret-seed": 1}
    truth = recorded(tmp_path, run=run, data={"source": "wdbc"}, protocol={"name": "pbpfl", "rho": 3.0})
    found = attacked(ATTACK, truth)
    assert found.succeeded
    assert found.figures["relative_error"] < 0.1
    assert found.figures["rounds"] == 6


def test_one_round_has_the_labels_alone(tmp_path):
    run = {"rounds": 3, "record-views": [3]}
    truth = recorded(tmp_path, run=run, protocol={"name": "pbpfl", "rho": 3.0})
    found = attacked(ATTACK, truth)
    # The offset is three times as large as the outputs, and a label misses y by no more than y: Cauchy and Schwarz.
    assert found.figures["relative_error"] < 1 / 3
    assert head_offset.fits(dataclasses.replace(truth.run, recorded=())) != ""


def test_outputs_that_stand_still_give_gamma_exactly():
    # y is the same in all rounds and alpha is not proportional between them, so the equations hold without a rest.
    draw = np.random.Generator(np.random.PCG64(3))
    gamma, alpha, y = draw.normal(size=(4, 2)), draw.normal(size=(4, 30)), draw.normal(size=(30, 3))
    spread = draw.normal(size=(4, 1, 3)) * np.array([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    offset = np.einsum("tm,tmc->tc", gamma, spread)
    noisy = y + alpha[:, :, None] * offset[:, None, :]
    labels = y + 0.1 * draw.normal(size=y.shape)
    found = fit(SeenHead(noisy, alpha, spread, np.array([4, 5, 6, 7])), labels)
    np.testing.assert_allclose(found, gamma, atol=1e-6)
