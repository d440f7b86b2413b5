"""What the server opens where silos draw their own directions."""

import numpy as np
import pytest
from recorded import attacked, claimed, recorded

from moretta.audit.attacks.baffle import loss_differences, seed_choosing_server
from moretta.audit.attacks.baffle.gradient_estimates import K_RANK
from moretta.audit.attacks.baffle.gradient_estimates import OWN as ATTACK

FIXED = {"insecure-secret-seed": 3}  # the same directions each time, so that no test fails by chance
OWN = {"name": "baffle", "loss": "mse", "optimizer": "sgd", "learning-rate": 0.01, "directions": "own"}


def own(tmp_path, k=64, scheme="pairwise", **protocol):
    run, data = {**FIXED, "rounds": 4}, {"source": "wdbc"}
    return recorded(tmp_path, run=run, data=data, protocol={**OWN, "k": k, **protocol},
                    secure_aggregation={"scheme": scheme})  # fmt: skip


@pytest.mark.parametrize(("scheme", "directions"), [("none", 64), ("pairwise", 3 * 64)])
def test_the_cosine_is_that_of_all_directions_in_the_sum(tmp_path, scheme, directions):
    found = attacked(ATTACK, own(tmp_path, scheme=scheme))
    assert found.figures["directions"] == directions
    assert found.figures["uploads"] == {"none": 12, "pairwise": 4}[scheme]
    # As for shared directions (test_k_rank_projection), and silos' gradients differ: a sum of unequal ones has less.
    assert found.score == pytest.approx(found.figures["cosine_expected"], rel=0.2)
    assert found.succeeded


def test_other_parameters_estimate_is_at_chance(tmp_path):
    truth = own(tmp_path)
    claim = dict(claimed(ATTACK, truth))
    claim["estimates"] = np.random.Generator(np.random.PCG64(5)).permuted(claim["estimates"], axis=1)
    assert not ATTACK.score(claim, truth).succeeded


def test_attacks_on_shared_directions_say_why_they_do_not_fit(tmp_path):
    run = own(tmp_path).run
    for attack in (loss_differences.ATTACK, K_RANK, seed_choosing_server.ATTACK):
        assert 'directions = "own"' in attack.fits(run)
    assert not ATTACK.fits(run)


@pytest.mark.parametrize(("protocol", "scheme", "said"), [
    ({"directions": "shared"}, "pairwise", "whole estimates"),
    ({"local-epochs": 1}, "pairwise", "batch level"),
    ({}, "additive-shares", "from shares"),
])  # fmt: skip
def test_where_it_does_not_fit(tmp_path, protocol, scheme, said):
    assert said in ATTACK.fits(own(tmp_path, scheme=scheme, **protocol).run)
