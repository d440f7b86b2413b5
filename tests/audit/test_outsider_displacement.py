"""One's own start and D that was given away are a model; a start without D is none."""

import numpy as np
from recorded import attacked, claimed, recorded

from moretta.audit.attacks.cgd.displacement import OUTSIDER as ATTACK

CGD = {"name": "cgd", "learning-rate": 0.5, "loss": "cross-entropy", "delta": 0.05}
WDBC = {"source": "wdbc", "batch-size": 0}
LONG = {"rounds": 25, "insecure-secret-seed": 0}


def test_whoever_reads_the_sums_adds_d_up(tmp_path):
    truth = recorded(tmp_path, protocol={**CGD, "blind": False}, run=LONG, data=WDBC)
    given = ATTACK.given(truth)
    assert list(given.views) == ["server"]
    assert not any(name.startswith("moved/") for name in given.arrays)
    found = attacked(ATTACK, truth)
    assert found.succeeded
    assert found.sentence.startswith("Whoever is given D by the relay")
    # Both are means over starts of the same law, of 10 and 3; a start moves the accuracy by a few hundredths.
    assert abs(found.score - found.figures["confined_mean"]) < 0.1


def test_under_a_blind_relay_d_has_to_be_let_out(tmp_path):
    truth = recorded(tmp_path, protocol=CGD, run=LONG, data=WDBC)
    assert not ATTACK.given(truth).views
    found = attacked(ATTACK, truth)
    assert found.succeeded
    assert found.sentence.startswith("Whoever is given D by a participant")


def test_a_start_without_d_fails(tmp_path):
    truth = recorded(tmp_path, protocol=CGD)
    claim = claimed(ATTACK, truth)
    starts = {name: value - value.mean(axis=0) for name, value in claim.items()}
    assert not ATTACK.score(starts, truth).succeeded
    assert all(len(np.unique(value.reshape(len(value), -1), axis=0)) == len(value) for value in starts.values())
