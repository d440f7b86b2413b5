"""The server and all silos but one, on recorded runs."""

from pathlib import Path

import numpy as np
import pytest
from recorded import attacked, claimed, recorded

from moretta.audit.attacks.common.server_and_silos import ATTACK
from moretta.audit.evidence.exposure import exposure
from moretta.errors import ParameterError

HERE = str(Path(__file__).parent)  # what a run file names has to be importable: this folder is on the tests' path


@pytest.mark.parametrize("scheme", ["pairwise", "additive-shares"])
def test_what_is_left_is_the_last_silos_upload(tmp_path, scheme):
    found = attacked(ATTACK, recorded(tmp_path, secure_aggregation={"scheme": scheme}))
    assert found.succeeded
    assert found.figures["relative_error"] < 1e-6  # the ring's steps and float32
    # One colluder fewer: the mean of two uploads, far from either.
    assert found.figures["relative_error_with_one_silo_fewer"] > 0.05


@pytest.mark.parametrize("scheme", ["pairwise", "additive-shares"])
@pytest.mark.parametrize(
    "protocol",
    [
        {"loss": "mse"},
        {"loss": "mse", "partitions": 10},
        {"loss": "cross-entropy", "variant": "paper", "partitions": 3},
        {"loss": "cross-entropy", "variant": "probabilities", "label-smoothing": 0.1},
    ],
)
def test_under_pbpfl(tmp_path, scheme, protocol):
    protocol = {"name": "pbpfl", "rho": 3.0, **protocol}
    truth = recorded(tmp_path, run={"rounds": 2}, protocol=protocol, secure_aggregation={"scheme": scheme})
    found = attacked(ATTACK, truth)
    assert found.figures["relative_error"] < 1e-5
    assert found.figures["relative_error_with_one_silo_fewer"] > 0.01


@pytest.mark.parametrize(
    ("protocol", "data"),
    [
        ({}, {}),
        ({}, {"source": "test_gradient_inversion:digit_images", "augment": "crop-flip"}),
        ({"name": "pbpfl", "rho": 3.0}, {}),
        ({"name": "pbpfl", "rho": 3.0, "loss": "cross-entropy", "variant": "paper", "partitions": 3}, {}),
    ],
)
def test_what_silos_drew_is_drawn_again(tmp_path, protocol, data):
    model = {"source": "test_truth:with_dropout"}
    truth = recorded(tmp_path, run={"rounds": 2, "base": HERE}, model=model, protocol=protocol, data=data)
    assert attacked(ATTACK, truth).figures["relative_error"] < 1e-5


def test_two_silos_that_keep_out_are_not_told_apart(tmp_path):
    truth = recorded(tmp_path)
    claim = dict(claimed(ATTACK, truth))
    claim["alone"] = claim["pair"]
    assert ATTACK.score(claim, truth).figures["relative_error"] > 0.05


def test_needs_a_secure_sum(tmp_path):
    assert "in the clear" in ATTACK.fits(recorded(tmp_path, secure_aggregation={"scheme": "none"}).run)


def test_silo_lost_in_a_round(tmp_path):
    """A sum of the survivors is worked out from what they gave of their masks with the lost one.

    The victim is the first silo that was always there.
    """
    drops = [{"round": 2, "silo": "silo-4"}, {"round": 3, "silo": "silo-1"}]
    truth = recorded(tmp_path, data={"silos": 4}, engine={"faults": {"drop": drops}})
    claim = claimed(ATTACK, truth)
    assert (int(claim["victim"]), claim["others"].tolist()) == (1, [3, 2, 2, 3, 3, 3])
    found = ATTACK.score(claim, truth)
    assert found.figures["rounds"] == 6
    assert found.figures["relative_error"] < 1e-6
    assert found.sentence.startswith("The server and the other 2 to 3 silos of a round subtract what they know")


def test_first_silo_lost_in_all_rounds(tmp_path):
    drops = [{"round": number, "silo": "silo-1"} for number in range(1, 7)]
    truth = recorded(tmp_path, secure_aggregation={"threshold": 2}, engine={"faults": {"drop": drops}})
    found = attacked(ATTACK, truth)
    assert found.succeeded
    assert "The server and the other silo subtract what they know and have the upload of silo-2 " in found.sentence
    assert not [name for name in ATTACK.given(truth).arrays if "silo-1" in name]


def test_silos_that_take_part_by_turns(tmp_path):
    truth = recorded(tmp_path, run={"participation": 0.6}, data={"silos": 5})
    found = attacked(ATTACK, truth)
    assert found.figures["relative_error"] < 1e-6
    assert found.figures["rounds"] < 6  # those in which the victim took part
    assert "the other 2 silos of a round subtract" in found.sentence


def test_no_sum_of_two_silos_is_refused(tmp_path, monkeypatch):
    truth = recorded(tmp_path, run={"rounds": 1})
    monkeypatch.setattr(truth, "heard", lambda role, number: [])
    with pytest.raises(ParameterError, match="in no recorded round did the uploads of 2 silos count"):
        ATTACK.given(truth)


def test_no_error_at_all_is_said_as_exactly(tmp_path):
    truth = recorded(tmp_path, run={"rounds": 1}, secure_aggregation={"ring_bits": 64})
    claim = dict(claimed(ATTACK, truth))
    own = exposure(truth.run).uploaded(truth, "silo-1", 1)
    claim["alone"] = np.concatenate([np.asarray(own[name], np.float64).ravel() for name in sorted(own)])[None]
    assert (
        "have the upload of silo-1 exactly. With one silo fewer they have it to a relative error of "
        in ATTACK.score(claim, truth).sentence
    )
