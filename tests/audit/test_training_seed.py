"""Initial weights from the run file's seed, on recorded runs."""

import dataclasses

import pytest
from recorded import attacked, claimed, recorded

from moretta.audit.attacks.training_seed import ATTACK
from moretta.audit.case import Case
from moretta.errors import ParameterError


def run(folder):
    return recorded(folder, run={"rounds": 2}, protocol={"name": "pbpfl"})


def test_the_seed_gives_the_first_model(tmp_path):
    found = attacked(ATTACK, run(tmp_path))
    assert found.succeeded
    assert found.figures["relative_error"] == 0.0


def test_another_seed_does_not(tmp_path):
    truth = run(tmp_path)
    given = ATTACK.given(truth)
    case = Case.unpack(truth.case(given.views, {"seed": given.arrays["seed"] + 1}, thorough=False).pack())
    found = ATTACK.score(ATTACK.attack(case), truth)
    assert not found.succeeded
    assert found.score == 0.0


def test_a_model_made_in_python_has_none(tmp_path):
    truth = run(tmp_path)
    truth.__dict__["architecture"] = dataclasses.replace(truth.architecture, source="", program=b"made elsewhere")
    with pytest.raises(ParameterError, match="made in Python"):
        claimed(ATTACK, truth)


def test_a_warm_start_has_none(tmp_path):
    truth = run(tmp_path)
    truth.federation.spec.settings["protocol"]["warm-start"] = "a file"
    with pytest.raises(ParameterError, match="warm"):
        claimed(ATTACK, truth)
