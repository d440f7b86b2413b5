"""Gamma from the rows of all silos but one, on a recorded run."""

import dataclasses

import numpy as np
from recorded import claimed, recorded

from moretta.audit.attacks.pbpfl.head_offset import TOGETHER as ATTACK
from moretta.audit.attacks.pbpfl.head_offset import SeenHead, joined


def test_more_rows_and_keys_of_other_rounds(tmp_path):
    truth = recorded(tmp_path, run={"rounds": 12}, protocol={"name": "pbpfl", "rho": 3.0, "partitions": 10})
    claim = dict(claimed(ATTACK, truth))
    found = ATTACK.score(claim, truth)
    assert found.succeeded
    assert found.figures["relative_error"] < 0.1
    assert found.figures["relative_error_alone"] < 0.2
    # Signs of ten parts are drawn anew each round, so that another round's gamma is sqrt(2) away, not less than 1.
    assert not ATTACK.score(claim | {"gamma": np.roll(claim["gamma"], 1, axis=0)}, truth).succeeded
    assert "two silos" in ATTACK.fits(dataclasses.replace(truth.run, silos=("a", "b")))


def test_rounds_that_a_silo_missed_are_left_out():
    def of(*rounds):
        count = len(rounds)
        at = np.array(rounds, dtype=np.float64)
        return SeenHead(np.ones((count, 2, 1)) * at[:, None, None], np.ones((count, 2)), np.ones((count, 1, 1)), at)

    found = joined([of(1, 2, 4), of(2, 3, 4)])
    assert found.rounds.tolist() == [2, 4]
    assert found.noisy[:, :, 0].tolist() == [[2, 2, 2, 2], [4, 4, 4, 4]]
