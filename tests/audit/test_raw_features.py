"""Raw features from differences of z, in float64 exactly, and not with D of other rounds."""

import dataclasses

import numpy as np
import pytest
from recorded import attacked, recorded

from moretta.audit.attacks.cgd.joint_rows import FEATURES as ATTACK
from moretta.audit.evidence.case import Case
from moretta.errors import ParameterError

GRID = {"source": "wdbc", "silos": 4, "partition": "grid", "grid": [2, 2], "batch-size": 0}
CGD = {"name": "cgd", "delta": 0.1, "loss": "cross-entropy", "learning-rate": 0.5}


def test_features_come_out(tmp_path):
    truth = recorded(tmp_path, protocol=CGD, data=GRID, run={"rounds": 12, "dtype": "float64"})
    found = attacked(ATTACK, truth)
    assert found.succeeded
    assert found.figures["columns"] == 15
    assert found.figures["relative_error"] < 0.01
    shuffled = ATTACK.given(truth)
    moved = {name: value for name, value in shuffled.arrays.items() if name.startswith("moved/")}
    wrong = dict(zip(moved, [value[np.roll(np.arange(len(value)), 3)] for value in moved.values()], strict=True))
    case = truth.case(shuffled.views, {**shuffled.arrays, **wrong}, thorough=False)
    assert not ATTACK.score(ATTACK.attack(Case.unpack(case.pack())), truth).succeeded


def test_mini_batches_and_three_holders(tmp_path):
    data = {**GRID, "silos": 6, "grid": [2, 3], "batch-size": 120}
    truth = recorded(tmp_path, protocol=CGD, data=data, run={"rounds": 16, "dtype": "float64"})
    assert attacked(ATTACK, truth).succeeded


def test_one_row_has_no_helper(tmp_path):
    data = {**GRID, "silos": 3, "grid": [1, 3]}
    truth = recorded(tmp_path, protocol=CGD, data=data, run={"rounds": 2})
    with pytest.raises(ParameterError, match="one row"):
        ATTACK.given(truth)


def test_the_printed_form_sends_no_z(tmp_path):
    truth = recorded(tmp_path, protocol={"name": "cgd"}, run={"rounds": 1})
    protocol = {**truth.run.settings["protocol"], "vertical": "independent"}
    assert ATTACK.fits(dataclasses.replace(truth.run, settings={"protocol": protocol}))
    with pytest.raises(ParameterError, match="no columns are split"):
        ATTACK.given(truth)
