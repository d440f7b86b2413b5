"""Label counts from the head's gradient, on recorded runs."""

from pathlib import Path

import numpy as np
import pytest
from recorded import attacked, claimed, recorded

from moretta.audit.attacks.common.labels_from_head import ATTACK, _scores
from moretta.audit.evidence.heads import whole_numbers
from moretta.errors import ParameterError
from moretta.protocols.common.targets import classes_of

PLAIN = {"scheme": "none"}
WHO = ("silo-1", "silo-2", "silo-3")


def test_label_of_one_row_is_exact(tmp_path):
    truth = recorded(tmp_path, protocol={"loss": "cross-entropy"}, data={"batch_size": 1}, secure_aggregation=PLAIN)
    found = attacked(ATTACK, truth)
    assert found.succeeded
    assert found.score == found.figures["exact"] == 1.0


@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
def test_counts_of_a_batch(tmp_path, loss):
    truth = recorded(tmp_path, protocol={"loss": loss}, secure_aggregation=PLAIN)
    found = attacked(ATTACK, truth)
    assert found.succeeded
    # Of 32 rows at most two are counted into another class; a guess by the usual shares misses 7 or more.
    assert found.score > 0.93
    assert found.chance < 0.8


def test_counts_of_a_sum_but_not_of_masked_words(tmp_path):
    truth = recorded(tmp_path, protocol={"loss": "cross-entropy"})
    found = attacked(ATTACK, truth)
    assert found.succeeded
    # Words are uniform: whatever counts they give are no better than the usual shares of classes.
    assert found.figures["from_masked_words"] <= found.figures["chance_of_masked_words"]


def test_counts_under_pbpfl(tmp_path):
    found = attacked(ATTACK, recorded(tmp_path, protocol={"name": "pbpfl", "loss": "cross-entropy"}))
    assert found.succeeded
    assert found.score > 0.95


def test_counts_of_other_batches_are_at_chance(tmp_path):
    truth = recorded(tmp_path, run={"rounds": 12}, protocol={"loss": "cross-entropy"}, secure_aggregation=PLAIN)
    claim = dict(claimed(ATTACK, truth))
    claim["counts"] = np.roll(claim["counts"], 1, axis=0)  # of another round
    assert not ATTACK.score(claim, truth).succeeded


def test_counts_of_a_sum_of_additive_shares(tmp_path):
    truth = recorded(
        tmp_path, protocol={"loss": "cross-entropy"}, secure_aggregation={"scheme": "additive-shares", "ring_bits": 32}
    )
    assert attacked(ATTACK, truth).succeeded


def test_whole_numbers_sum_to_rows():
    assert whole_numbers(np.array([0.5, 0.26, 0.24]), 10).tolist() == [5, 3, 2]
    assert whole_numbers(np.array([np.nan, -1.0, 0.0]), 4).sum() == 4


def counted(truth, number):
    """Who uploaded in a round and was not given up, by the record alone."""
    return {one.peer for one in truth.heard("server", number) if type(one.message).__name__.endswith("Upload")}


def handed(given, number):
    return {name.split("/")[2] for name in given.arrays if name.startswith(f"gradient/{number}/")}


@pytest.mark.parametrize("protocol", ["fedsgd", "pbpfl"])
@pytest.mark.parametrize("scheme", ["none", "pairwise"])
def test_some_of_the_silos_take_part(tmp_path, protocol, scheme):
    truth = recorded(
        tmp_path,
        run={"rounds": 4, "participation": 0.6},
        data={"silos": 5},
        protocol={"name": protocol, "loss": "cross-entropy" if protocol == "pbpfl" else "mse"},
        secure_aggregation={"scheme": scheme},
    )
    given, claim = ATTACK.given(truth), claimed(ATTACK, truth)
    for at, number in enumerate(claim["rounds"].tolist()):
        there = counted(truth, number)
        assert len(there) == 3
        assert {silo for silo, one in zip(truth.run.silos, claim["present"][at], strict=True) if one} == there
        if protocol == "pbpfl":
            assert handed(given, number) == (there if scheme == "none" else {"sum"})
    found = ATTACK.score(claim, truth)
    assert found.score > 0.93
    assert ("From each upload" if scheme == "none" else "From the sum of 3 silos") in found.sentence


@pytest.mark.parametrize("protocol", ["fedsgd", "pbpfl"])
@pytest.mark.parametrize("scheme", ["none", "pairwise"])
def test_a_lost_silos_rows_are_not_counted(tmp_path, protocol, scheme):
    truth = recorded(
        tmp_path,
        run={"rounds": 3},
        protocol={"name": protocol, "loss": "mse"},
        secure_aggregation={"scheme": scheme, "threshold": None if scheme == "none" else 2},
        engine={"faults": {"drop": [{"round": 1, "silo": "silo-1"}]}},
    )
    given, claim = ATTACK.given(truth), claimed(ATTACK, truth)
    assert "silo-1" not in handed(given, 1)
    assert claim["present"][:2].tolist() == [[False, True, True], [True, True, True]]
    sizes = [32, 32] if scheme == "none" else [64]
    assert [one for one in claim["counts"][0].sum(axis=1).tolist() if one] == sizes
    found = ATTACK.score(claim, truth)
    assert found.score > 0.93
    assert scheme == "none" or "From sums of 2 to 3 silos the server" in found.sentence


def test_silo_lost_after_its_upload_is_not_in_the_sum(tmp_path):
    # Where one is missing, survivors are asked once more, and who is gone by then is not in the sum.
    drops = [{"round": 1, "silo": "silo-1"}, {"round": 1, "silo": "silo-2", "phase": "unmasking"}]
    truth = recorded(
        tmp_path,
        run={"rounds": 2},
        protocol={"name": "pbpfl", "loss": "mse"},
        data={"silos": 7},
        engine={"faults": {"drop": drops}},
    )
    assert "silo-2" in counted(truth, 1)  # its masked upload came
    claim = claimed(ATTACK, truth)
    assert claim["present"][0].tolist() == [False, False, *[True] * 5]
    assert claim["counts"][0].sum() == 5 * 32


def test_no_upload_in_any_recorded_round_is_refused(tmp_path, monkeypatch):
    truth = recorded(tmp_path, run={"rounds": 1}, protocol={"name": "pbpfl", "loss": "mse"})
    monkeypatch.setattr(truth, "heard", lambda role, number: [])
    with pytest.raises(ParameterError, match="in no recorded round did a silo's upload count"):
        ATTACK.given(truth)


def test_one_round_is_said_as_one(tmp_path):
    assert ATTACK.given(recorded(tmp_path, run={"rounds": 1})).view == "1 round of the server's messages"


@pytest.mark.parametrize("scheme", ["none", "pairwise"])
def test_the_same_rows_in_every_round_are_one_unit(tmp_path, scheme):
    truth = recorded(tmp_path, run={"rounds": 6}, data={"batch_size": 0}, secure_aggregation={"scheme": scheme})
    claim = dict(claimed(ATTACK, truth))
    # A guess that is a little luckier than the usual shares: in these rows, whatever the round.
    usual = np.bincount(classes_of(truth.background.y), minlength=10)
    true = sum(np.bincount(classes_of(truth.rows(who).y), minlength=10) for who in truth.run.silos)
    claim["counts"] = np.broadcast_to(usual / usual.sum() + 0.1 * true / true.sum(), claim["counts"].shape)
    found = ATTACK.score(claim, truth)
    assert found.figures["units"] == (3 if scheme == "none" else 1)
    if scheme == "pairwise":
        assert found.score > found.chance
        assert found.interval == (0.0, 1.0)
        assert not found.succeeded


@pytest.mark.parametrize("scheme", ["none", "pairwise"])
def test_a_guess_of_one_row_is_right_as_often_as_a_draw(tmp_path, scheme):
    # No batch has a row of the background's most frequent class, which a fixed guess always is.
    truth = recorded(tmp_path, run={"seed": 2}, data={"batch_size": 1}, secure_aggregation={"scheme": scheme})
    found = attacked(ATTACK, truth)
    usual = np.bincount(classes_of(truth.background.y), minlength=10) / len(truth.background.y)
    labels = np.array([classes_of(truth.rows(who).y[truth.batch(who, n)])[0] for n in range(1, 7) for who in WHO])
    assert usual.argmax() not in labels
    if scheme == "none":
        assert found.chance == pytest.approx(usual[labels].mean())
        return
    assert found.figures["chance_of_masked_words"] == pytest.approx(usual[labels[::3]].mean())
    assert f"where a guess has {100 * usual[labels[::3]].mean():.1f} %" in found.sentence


def test_a_drawn_guess_is_the_mean_over_draws():
    usual, true = np.array([5.0, 3.0, 2.0, 0.0]), np.array([1, 0, 4, 2])
    draws = np.random.Generator(np.random.PCG64(3)).multinomial(7, usual / usual.sum(), 20000)
    shared = 1.0 - 0.5 * np.abs(draws - true).sum(axis=1) / 7
    assert _scores(true, true, usual)[2] == pytest.approx(shared.mean(), abs=5 * shared.std() / np.sqrt(len(draws)))


def test_augmented_rows_under_pbpfl(tmp_path):
    # What the server recovers is computed again with the crops and flips of the round.
    truth = recorded(
        tmp_path,
        run={"rounds": 3, "base": str(Path(__file__).parent)},
        data={"source": "test_gradient_inversion:digit_images", "batch-size": 16, "augment": "crop-flip"},
        model={"source": "test_gradient_inversion:sigmoid_lenet"},
        protocol={"name": "pbpfl", "loss": "cross-entropy"},
    )
    assert attacked(ATTACK, truth).score > 0.9
