"""Attacks on BAFFLE, on recorded runs: what the server has of its sums, of K directions, and of the seed."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import attacked, check, claimed, recorded

from moretta.audit.attacks.baffle import gradient_estimates, loss_differences, seed_choosing_server
from moretta.audit.attacks.baffle.estimates import (
    OPENED,
    forward_at,
    opened,
    recipe_of,
    scalars,
    seeded_rounds,
    used,
)
from moretta.audit.attacks.baffle.gradient_estimates import K_RANK, OWN
from moretta.audit.attacks.baffle.loss_differences import uniformity
from moretta.audit.attacks.baffle.seed_choosing_server import gain, in_order
from moretta.audit.evidence import uploads
from moretta.audit.evidence.case import Heard
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Message
from moretta.protocols.baffle.silo.messages import Agree, Agreed, Revealed
from moretta.protocols.baffle.silo.seeds import seed_of

LOSSES = loss_differences.ATTACK
SEED = seed_choosing_server.ATTACK
WDBC = {"source": "wdbc"}
SGD = {"loss": "mse", "optimizer": "sgd", "learning-rate": 0.01}
BAFFLE = {**SGD, "k": 64, "learning-rate": 0.02}
ITS_OWN = {**SGD, "k": 64, "directions": "own"}


def baffle(folder: Path, protocol: dict[str, Any], rounds: int = 4, scheme: str = "pairwise", **sections: Any) -> Truth:
    """A run with the same directions each time, so that no test fails by chance."""
    run, secure = {"rounds": rounds, "insecure-secret-seed": 3}, {"scheme": scheme}
    return recorded(folder, run=run, protocol={"name": "baffle", **protocol}, secure_aggregation=secure, **sections)


@pytest.fixture(autouse=True)
def _few_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_estimates, "STARTS", 1)


# -- what sums open to -------------------------------------------------------------------------------------------------


def check_opened(truth: Truth) -> None:
    """Hold what sums open to to what the server's messages come to, up to the ring's steps and float32's rounding."""
    heard = [one for number in truth.recorded for one in truth.heard("server", number)]
    found = opened(truth, truth.recorded)
    for number in truth.recorded:
        sums = uploads.from_heard(truth.run, heard, number).total().means["scalars"]
        np.testing.assert_allclose(found[f"{OPENED}{number}"], sums[:8], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("phase", ["upload", "unmasking"])
def test_a_lost_silo_is_not_in_what_was_opened(tmp_path: Path, phase: str) -> None:
    # Where one is missing, survivors are asked once more, and who is gone by then is not in the sum.
    drops = [{"round": 1, "silo": "silo-1"}, {"round": 1, "silo": "silo-2", "phase": phase}]
    truth = baffle(tmp_path, {"k": 8}, 2, data={"silos": 7}, engine={"faults": {"drop": drops}})
    heard = [one for number in truth.recorded for one in truth.heard("server", number)]
    seen = seeded_rounds(truth.run, heard, forward_at(truth))
    assert (seen[1].silos, seen[2].silos) == (truth.run.silos[2:], truth.run.silos)
    check_opened(truth)


def test_the_scalars_of_additive_shares_are_all_there(tmp_path: Path) -> None:
    check_opened(baffle(tmp_path, {"k": 8}, 2, "additive-shares"))


def test_noised_sums_are_opened_from_messages(tmp_path: Path) -> None:
    truth = baffle(tmp_path, {**BAFFLE, "dp-noise": 1e-6, "dp-clip": 1e3}, 2, data={"batch-size": 0})
    sums = opened(truth, (1, 2))
    # All rows are in a lot and none is clipped: but for a little noise they are the mean of all rows' numbers.
    heard, forward = [one for at in (1, 2) for one in truth.heard("server", at)], forward_at(truth)
    seen = seeded_rounds(truth.run, heard, forward)[2]
    rows = truth.joined({silo: slice(None) for silo in truth.run.silos})
    wanted = scalars(recipe_of(truth.run), forward, seen, rows.x, rows.y)
    # noise of sigma C sqrt(3 / 2) / 1400 rows = 9e-7
    np.testing.assert_allclose(sums["opened/2"], wanted, rtol=1e-4, atol=1e-4)
    assert list(used(truth, seen, "silo-1")) == list(range(truth.run.rows["silo-1"]))
    assert LOSSES.fits(truth.run) == ""


# -- loss differences --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["none", "pairwise"])
def test_data_are_told_from_noise(tmp_path: Path, scheme: str) -> None:
    found = check(attacked(LOSSES, baffle(tmp_path, BAFFLE, 12, scheme)), score=(0.9, 1), p=(0, 1e-3))
    if scheme == "pairwise":  # one silo's words are uniform, whatever their sum tells
        assert found.figures["masked_words_p"] > 1e-3


def test_noise_is_not_told_from_noise(tmp_path: Path) -> None:
    generator = np.random.Generator(np.random.PCG64(3))
    rows = np.column_stack([generator.standard_normal((600, 8)), generator.integers(0, 2, 600)])
    header = ",".join([*"abcdefgh", "label"])
    np.savetxt(tmp_path / "noise.csv", rows, delimiter=",", header=header, comments="", fmt="%.6g")
    # A model that is not trained on them: of rows that it has learnt by heart it would have other slopes.
    source = {"source": str(tmp_path / "noise.csv"), "batch-size": 16}
    found = attacked(LOSSES, baffle(tmp_path, {**BAFFLE, "learning-rate": 1e-9}, 12, "none", data=source))
    # 36 uploads: Hanley and McNeil's deviation at 0.5 is 0.05, and three of it
    check(found, succeeds=False, score=(0.35, 0.65))


def test_words_are_tested_for_uniformity() -> None:
    words = np.random.Generator(np.random.PCG64(1)).integers(0, 2**64, 2000, dtype=np.uint64)
    assert uniformity([words]) > 1e-3
    assert uniformity([words >> np.uint64(8)]) < 1e-9
    assert uniformity([]) == 1.0


def test_additive_shares_have_a_sum_too(tmp_path: Path) -> None:
    claim = claimed(LOSSES, baffle(tmp_path, BAFFLE, 3, "additive-shares"))
    assert len(claim["data"]) == 3
    assert float(claim["words_p"]) == 1.0


# -- estimates of the gradient -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [8, 64, 512])
def test_cosine_grows_with_the_root_of_k(tmp_path: Path, k: int) -> None:
    found = check(attacked(K_RANK, baffle(tmp_path, {**SGD, "k": k}, data=WDBC)))
    # The K squared cosines of directions with g have the relative deviation sqrt(2 / K); of 4 rounds' mean, and half of
    # it in the root, it is 1 / sqrt(8 K) = 0.125 for K = 8. Three of it, and sigma's part:
    assert found.score == pytest.approx(found.figures["cosine_expected"], rel=3 / np.sqrt(8 * k) + 0.05)
    if k == 8:  # 8 equations for 30 inputs
        assert found.figures["row_error"] > 0.9 * found.figures["mean_row_error"]


def test_one_row_is_reconstructed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_estimates, "STARTS", 6)  # some end elsewhere; which one did not is seen by its misfit
    found = attacked(K_RANK, baffle(tmp_path, {**SGD, "k": 256}, 6, "none", data={**WDBC, "batch-size": 1}))
    assert found.figures["rows_in_upload"] == 1
    assert found.figures["row_error"] < 0.05 < found.figures["mean_row_error"]


@pytest.mark.parametrize(("scheme", "directions"), [("none", 64), ("pairwise", 3 * 64)])
def test_the_cosine_is_that_of_all_directions_in_the_sum(tmp_path: Path, scheme: str, directions: int) -> None:
    found = check(attacked(OWN, baffle(tmp_path, ITS_OWN, 4, scheme, data=WDBC)), directions=(directions, directions))
    assert found.figures["uploads"] == {"none": 12, "pairwise": 4}[scheme]
    # As for shared directions, and silos' gradients differ: a sum of unequal ones has less.
    assert found.score == pytest.approx(found.figures["cosine_expected"], rel=0.2)


@pytest.mark.parametrize(("attack", "protocol", "most"), [(K_RANK, {**SGD, "k": 64}, 0.15), (OWN, ITS_OWN, 1.0)])
def test_another_directions_estimate_is_at_chance(
    tmp_path: Path, attack: Any, protocol: dict[str, Any], most: float
) -> None:
    truth = baffle(tmp_path, protocol, 6, data=WDBC)
    generator = np.random.Generator(np.random.PCG64(5))
    claim = dict(claimed(attack, truth))
    claim["estimates"] = generator.permuted(claim["estimates"], axis=1)  # the same entries, of other parameters
    found = check(attack.score(claim, truth), succeeds=False, score=(-most, most))
    assert most < found.figures["cosine_expected"] or attack is OWN


def test_the_mean_row_is_that_of_the_background_that_was_declared(tmp_path: Path) -> None:
    truth = baffle(tmp_path, {**SGD, "k": 8}, 1, data=WDBC)
    assert truth.federation.test is not None
    x, y = truth.federation.test
    other = Truth(truth.folder, truth.federation, truth.run.rounds, 5, (x[:2], y[:2]))
    claim = claimed(K_RANK, truth)
    usual, few = (K_RANK.score(claim, one) for one in (truth, other))
    assert usual.figures["mean_row_error"] != few.figures["mean_row_error"]
    assert "the mean background row" in usual.sentence


@pytest.mark.parametrize(
    ("attacks", "protocol", "scheme", "said"),
    [
        ((LOSSES, K_RANK, SEED), ITS_OWN, "pairwise", 'directions = "own"'),
        ((OWN,), {**ITS_OWN, "directions": "shared"}, "pairwise", "whole estimates"),
        ((OWN,), {**ITS_OWN, "local-epochs": 1}, "pairwise", "batch level"),
        ((OWN,), ITS_OWN, "additive-shares", "from shares"),
        ((LOSSES, K_RANK), {**BAFFLE, "local-epochs": 1, "ema": 0.0}, "none", "local-epochs"),
    ],
)
def test_where_it_does_not_fit(
    tmp_path: Path, attacks: Sequence[Any], protocol: dict[str, Any], scheme: str, said: str
) -> None:
    run = baffle(tmp_path, protocol, 2, scheme, data=WDBC).run
    assert all(said in attack.fits(run) for attack in attacks)


# -- a seed that was chosen is told, and one that was agreed on is not -------------------------------------------------


@pytest.fixture(scope="module")
def agreed(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return baffle(tmp_path_factory.mktemp("run"), {"k": 32, "loss": "mse"}, 2)


def heard(agreed: Truth) -> Sequence[Heard]:
    given = SEED.given(agreed)
    return agreed.case(given.views, given.arrays, thorough=False).heard("server", Message)


def test_agreed_seed_is_like_any(agreed: Truth) -> None:
    found = attacked(SEED, agreed)
    assert not found.succeeded
    assert found.figures["in_order"] == 1
    # the best of 1024 of a mean of 32 squares lies about sqrt(2 / 32) sqrt(2 log 1024) = 0.93 above 1
    assert 1.4 < found.figures["gain_by_choosing"] < 3.0


def test_chosen_seed_is_told(agreed: Truth) -> None:
    given = SEED.given(agreed)
    case = agreed.case(given.views, given.arrays, thorough=False)
    forward = forward_at(agreed)
    seen = seeded_rounds(case.run, case.heard("server", Message), forward)[1]
    target = seed_choosing_server._target(case, seen, forward.layout)
    purpose = (seen.ask.stamp.run, 1, seen.ask.parameter_hash)

    def gain_of(seed: bytes) -> float:
        return gain(recipe_of(case.run).directions(seen.ask.k, seen.directions.size, seed, *purpose), target)

    # A server that shows its contribution last, without a commitment, tries a thousand of them.
    others = agreed.messages("server", 1, Agree)[0].contributions
    tried = [seed_of({**others, "server": number.to_bytes(32, "big")}) for number in range(1000)]
    claim = claimed(SEED, agreed)
    found = SEED.score({**claim, "recorded": np.array(max(gain_of(seed) for seed in tried))}, agreed)
    assert found.succeeded


def test_seed_is_the_one_that_roles_agreed_on(agreed: Truth) -> None:
    seen = seeded_rounds(agreed.run, heard(agreed), forward_at(agreed))[1]
    contributions = next(one.message.contributions for one in heard(agreed) if isinstance(one.message, Agree))
    # a silo's digest of its seed is in the view
    digests = {one.message.digest for one in heard(agreed) if isinstance(one.message, Agreed)}
    assert digests == {hashlib.sha256(seed_of(contributions)).digest()}
    assert seen.directions.count == 32


def test_late_commitments_are_seen(agreed: Truth) -> None:
    messages = list(heard(agreed))
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


def test_a_broken_order_is_a_success_whatever_the_seed_shows(agreed: Truth) -> None:
    given = SEED.given(agreed)
    case = agreed.case(given.views, given.arrays, thorough=False)
    claim = claimed(SEED, agreed)
    first = case.heard("server", Message)
    last = max(place for place, one in enumerate(first) if isinstance(one.message, Revealed))
    # A doctored view, in which a silo shows its contribution before the others are committed.
    doctored = [first[last], *first[:last], *first[last + 1 :]]
    found = SEED.score({**claim, "in_order": np.array(in_order(doctored))}, agreed)
    assert found.succeeded
    assert found.score == 1.0
    assert "not in order" in found.sentence
    assert not SEED.score(claim, agreed).succeeded


def test_place_is_counted_in_seeds(agreed: Truth) -> None:
    claim = {"recorded": np.array(1.0), "in_order": np.array(True), "k": np.array(32)}
    # Of uniform places of an agreed seed 2.5 % lie above 0.975, and of those few are far enough above it to tell.
    for below, succeeds in ((500, False), (975, False), (995, True)):
        others = np.where(np.arange(1000) < below, 0.5, 1.5)
        found = SEED.score({**claim, "others": others}, agreed)
        assert found.figures["place"] == below / 1000
        assert found.interval[0] < below / 1000 < found.interval[1]
        assert found.succeeded == succeeds
