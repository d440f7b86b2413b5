"""A seed that was chosen is told, and one that was agreed on is not."""

import dataclasses
import hashlib

import numpy as np
import pytest
from recorded import attacked, claimed, recorded

from moretta.audit.attacks.baffle import seed_choosing_server
from moretta.audit.attacks.baffle.estimates import forward_at, recipe_of, seed_of, seeded_rounds
from moretta.audit.attacks.baffle.seed_choosing_server import ATTACK, gain, in_order
from moretta.contract.messages import Message
from moretta.protocols.baffle.silo.messages import Agree, Agreed, Revealed

BAFFLE = {"name": "baffle", "k": 32, "loss": "mse"}


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("run"), run={"rounds": 2, "insecure-secret-seed": 3}, protocol=BAFFLE)


def heard(truth):
    given = ATTACK.given(truth)
    return truth.case(given.views, given.arrays, thorough=False).heard("server", Message)


def test_agreed_seed_is_like_any(truth):
    found = attacked(ATTACK, truth)
    assert not found.succeeded
    assert found.figures["in_order"] == 1
    # the best of 1024 of a mean of 32 squares lies about sqrt(2 / 32) sqrt(2 log 1024) = 0.93 above 1
    assert 1.4 < found.figures["gain_by_choosing"] < 3.0


def test_chosen_seed_is_told(truth):
    given = ATTACK.given(truth)
    case = truth.case(given.views, given.arrays, thorough=False)
    forward = forward_at(truth)
    seen = seeded_rounds(case.run, case.heard("server", Message), forward)[1]
    target = seed_choosing_server._target(case, seen, forward.layout)
    purpose = (seen.ask.stamp.run, 1, seen.ask.parameter_hash)

    def gain_of(seed):
        return gain(recipe_of(case.run).directions(seen.ask.k, seen.directions.size, seed, *purpose), target)

    # A server that shows its contribution last, without a commitment, tries a thousand of them.
    others = next(one.message.contributions for one in case.heard("server", Agree))
    tried = [seed_of({**others, "server": number.to_bytes(32, "big")}) for number in range(1000)]
    claim = claimed(ATTACK, truth)
    found = ATTACK.score({**claim, "recorded": np.array(max(gain_of(seed) for seed in tried))}, truth)
    assert found.succeeded


def test_seed_is_the_one_that_roles_agreed_on(truth):
    seen = seeded_rounds(truth.run, heard(truth), forward_at(truth))[1]
    contributions = next(one.message.contributions for one in heard(truth) if isinstance(one.message, Agree))
    # a silo's digest of its seed is in the view
    digests = {one.message.digest for one in heard(truth) if isinstance(one.message, Agreed)}
    assert digests == {hashlib.sha256(seed_of(contributions)).digest()}
    assert seen.directions.count == 32


def test_late_commitments_are_seen(truth):
    messages = list(heard(truth))
    assert in_order(messages)
    last = max(place for place, one in enumerate(messages) if isinstance(one.message, Revealed))
    early = [messages[last], *messages[:last], *messages[last + 1 :]]
    assert not in_order(early)
    # a server that shows another contribution than it was committed to
    swapped = [
        dataclasses.replace(
            one,
            message=dataclasses.replace(
                one.message, contributions={**one.message.contributions, "server": b"\x01" * 32}
            ),
        )
        if isinstance(one.message, Agree)
        else one
        for one in messages
    ]
    assert not in_order(swapped)


def test_a_broken_order_is_a_success_whatever_the_seed_shows(truth):
    given = ATTACK.given(truth)
    case = truth.case(given.views, given.arrays, thorough=False)
    claim = claimed(ATTACK, truth)
    first = case.heard("server", Message)
    last = max(place for place, one in enumerate(first) if isinstance(one.message, Revealed))
    # A doctored view, in which a silo shows its contribution before the others are committed.
    doctored = [first[last], *first[:last], *first[last + 1 :]]
    found = ATTACK.score({**claim, "in_order": np.array(in_order(doctored))}, truth)
    assert found.succeeded
    assert found.score == 1.0
    assert "not in order" in found.sentence
    assert not ATTACK.score(claim, truth).succeeded


def test_place_is_counted_in_seeds(truth):
    claim = {"recorded": np.array(1.0), "in_order": np.array(True), "k": np.array(32)}
    # Of uniform places of an agreed seed 2.5 % lie above 0.975, and of those few are far enough above it to tell.
    for below, succeeds in ((500, False), (975, False), (995, True)):
        others = np.where(np.arange(1000) < below, 0.5, 1.5)
        found = ATTACK.score({**claim, "others": others}, truth)
        assert found.figures["place"] == below / 1000
        assert found.interval[0] < below / 1000 < found.interval[1]
        assert found.succeeded == succeeds
