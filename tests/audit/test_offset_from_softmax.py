"""The head's offset from the softmax of a batch, on recorded runs."""

import pytest
from recorded import attacked, recorded

from moretta.audit.attacks.pbpfl.softmax import OFFSET as ATTACK

PAPER = {"name": "pbpfl", "loss": "cross-entropy", "variant": "paper", "rho": 3.0}
ROUNDS = {"rounds": 5, "record-views": [2, 3, 4, 5]}


@pytest.mark.parametrize("variant", ["paper", "probabilities"])
def test_fewer_parts_than_outputs_give_all_of_gamma(tmp_path, variant):
    truth = recorded(tmp_path, run=ROUNDS, protocol=PAPER | {"partitions": 5, "variant": variant})
    found = attacked(ATTACK, truth)
    assert found.succeeded
    # z and alpha are the very numbers that the server formed p of, in float64 from there on.
    assert found.figures["relative_error"] < 1e-9
    assert found.figures["relative_error_of_differences"] < 1e-9


def test_a_part_for_each_output_leaves_the_common_part_open(tmp_path):
    truth = recorded(tmp_path, run=ROUNDS, protocol=PAPER | {"partitions": 10})
    found = attacked(ATTACK, truth)
    assert found.figures["relative_error_of_differences"] < 1e-9
    # One of ten directions of gamma is unknown: what lies along it, about 1 / sqrt(10) of gamma drawn freely, is lost.
    assert found.figures["relative_error"] > 1e-6


def test_unsolved_softmax_gives_no_exact_offset(tmp_path):
    protocol = PAPER | {"partitions": 5}
    truth = recorded(tmp_path, run=ROUNDS, data={"batch-size": 2}, protocol=protocol)
    assert attacked(ATTACK, truth).figures["relative_error"] > 1e-3
