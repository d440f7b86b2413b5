"""The softmax of a silo's batch from the server's answers, on recorded runs."""

import copy

import numpy as np
import torch
from recorded import attacked, claimed, recorded

from moretta.audit.attacks.pbpfl import softmax
from moretta.audit.attacks.pbpfl.softmax import SOFTMAX as ATTACK
from moretta.audit.evidence.network import outputs_at, tensors

PAPER = {"name": "pbpfl", "loss": "cross-entropy", "variant": "paper", "partitions": 5, "rho": 3.0}
ROUNDS = {"rounds": 5, "record-views": [2, 3, 4, 5]}


def test_batch_of_more_rows_than_parts(tmp_path):
    truth = recorded(tmp_path, run=ROUNDS, protocol=PAPER)
    claim = claimed(ATTACK, truth)
    found = ATTACK.score(claim, truth)
    assert found.succeeded
    assert found.figures["max_error"] <= 1e-6
    # It is the softmax of the true model on the very rows of the batch; the silo's outputs were float32 and noisy.
    silo, model = truth.run.silos[0], copy.deepcopy(truth.federation.model).double()
    for number in truth.recorded:
        x = torch.tensor(truth.rows(silo).part(truth.batch(silo, number)).x, dtype=torch.float64)
        held = {name: value.double() for name, value in tensors(truth.parameters(number)).items()}
        softmax = outputs_at(model, held, x).softmax(dim=1).detach().numpy()
        np.testing.assert_allclose(claim[f"p/{number}"], softmax, atol=1e-5)


def test_batch_of_fewer_rows_than_parts_is_not_solved(tmp_path):
    truth = recorded(tmp_path, run=ROUNDS, data={"batch-size": 2}, protocol=PAPER)
    claim = claimed(ATTACK, truth)
    found = ATTACK.score(claim, truth)
    # The solution of least norm sums to 1 and is not the softmax: two equations tell something of five unknowns.
    assert found.figures["max_error"] > 1e-3
    assert all(np.allclose(p.sum(axis=1), 1.0) for p in claim.values())
    # The answers themselves, brought to sum 1, are what it is to be compared with.
    naive = softmax.naive_by_round(truth, truth.run.silos[0], list(truth.recorded))
    read = ATTACK.score({f"p/{number}": p for number, p in naive.items()}, truth)
    assert read.score == read.chance
    assert not read.succeeded


def test_cheaper_form_hands_it_over(tmp_path):
    truth = recorded(tmp_path, run=ROUNDS, protocol=PAPER | {"variant": "probabilities"})
    found = attacked(ATTACK, truth)
    assert found.figures["max_error"] == 0.0
    assert "is handed" in found.sentence


def test_squared_error_has_no_softmax(tmp_path):
    truth = recorded(tmp_path, run={"rounds": 1}, protocol={"name": "pbpfl"})
    assert "cross-entropy" in ATTACK.fits(truth.run)
