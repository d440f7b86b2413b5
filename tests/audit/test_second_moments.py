"""X'X of all rows from the sums of linear regression, and not from sums of other rounds."""

import numpy as np
import pytest
from recorded import attacked, recorded

from moretta.audit.attacks.cgd.second_moments import ATTACK
from moretta.audit.evidence.case import Case
from moretta.errors import ParameterError

LINEAR = {"hidden": []}
FULL = {"batch-size": 0, "silos": 3}
CGD = {"name": "cgd", "loss": "mse", "learning-rate": 0.2}
LONG = {"rounds": 25, "dtype": "float64"}


def test_moments_come_out(tmp_path):
    truth = recorded(tmp_path, protocol=CGD, data=FULL, model=LINEAR, run=LONG)
    found = attacked(ATTACK, truth)
    assert found.succeeded
    assert found.figures["relative_error"] < 0.01
    given = ATTACK.given(truth)
    mixed = {**given.arrays, "sums": np.random.default_rng(0).permutation(given.arrays["sums"])}
    case = truth.case(given.views, mixed, thorough=False)
    assert not ATTACK.score(ATTACK.attack(Case.unpack(case.pack())), truth).succeeded


def test_only_linear_models_are_tried(tmp_path):
    truth = recorded(tmp_path, protocol=CGD, data=FULL, run={"rounds": 3})
    with pytest.raises(ParameterError, match="more than one linear layer"):
        ATTACK.given(truth)


def test_batches_do_not_compare(tmp_path):
    truth = recorded(tmp_path, protocol=CGD, model=LINEAR, run={"rounds": 3})
    assert "other rows" in ATTACK.fits(truth.run)
