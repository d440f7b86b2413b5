"""How labels are balanced at the other silos, against the best that is guessed without a model."""

import numpy as np
import pytest
from recorded import attacked, recorded

from moretta.audit.attacks.silo_property import ATTACK
from moretta.audit.truth import Truth

SKEWED = {"partition": "dirichlet", "alpha": 0.3}


def with_background_of_few_labels(truth):
    """Return the same run, where the attacker's background rows have few of the labels 0 to 4, and so mislead it."""
    x, y = truth.federation.test
    kept = (y >= 5) | (np.arange(len(y)) % 5 == 0)
    return Truth(truth.folder, truth.federation, truth.run.rounds, 5, (x[kept], y[kept]))


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_balance_of_labels_is_found(tmp_path, loss):
    truth = recorded(tmp_path, run={"rounds": 12}, data=SKEWED, protocol={"loss": loss})
    found = attacked(ATTACK, with_background_of_few_labels(truth))
    assert found.succeeded
    assert found.figures["error"] < found.figures["error_of_guess"] / 1.5
    # Background rows that are as all silos' rows leave little to learn: what the silo's own rows leave of them is a
    # good guess, and better than that others are as the silo itself.
    plain = attacked(ATTACK, truth)
    assert "own rows leave of the background" in plain.sentence
    assert plain.figures["error_of_guess"] < plain.figures["error_of_own"] / 2
    assert plain.chance == pytest.approx(1 - plain.figures["error_of_guess"])
    assert not plain.succeeded


@pytest.mark.parametrize(
    "protocol",
    [
        {"name": "cgd", "learning-rate": 0.1},
        {"name": "baffle", "optimizer": "sgd", "k": 600, "learning-rate": 0.02, "ema": 0.0, "loss": "mse"},
    ],
)
def test_balance_is_found_by_way_of_other_protocols(tmp_path, protocol):
    truth = recorded(tmp_path, run={"rounds": 12}, data=SKEWED, protocol=protocol)
    found = attacked(ATTACK, truth)
    assert found.figures["error"] < found.figures["error_of_own"]


@pytest.mark.parametrize(
    "protocol",
    [
        {"loss": "mse", "partitions": 1},
        {"loss": "cross-entropy", "variant": "probabilities", "partitions": 1},
        {"loss": "cross-entropy", "variant": "paper", "partitions": 10},  # with one batch of 4 rows
    ],
)
def test_balance_is_found_under_an_offset(tmp_path, protocol):
    truth = recorded(tmp_path, run={"rounds": 12}, data=SKEWED, protocol={"name": "pbpfl", "rho": 3.0, **protocol})
    assert not [name for name in ATTACK.given(truth).arrays if name.startswith("model/")]
    found = attacked(ATTACK, with_background_of_few_labels(truth))
    assert found.succeeded
    assert found.figures["error"] < found.figures["error_of_guess"] / 3


def test_silos_that_are_alike_gain_little(tmp_path):
    truth = recorded(tmp_path, run={"rounds": 4}, data={"batch-size": 8})
    found = attacked(ATTACK, truth)
    assert not found.succeeded
    assert found.interval[0] == 0.0  # of three differences of rounds


def test_momentum_hides_gradients(tmp_path):
    truth = recorded(tmp_path, run={"rounds": 3}, protocol={"momentum": 0.9})
    assert "plain gradient steps" in ATTACK.fits(truth.run)


def test_mean_target_of_numbers(tmp_path):
    generator = np.random.Generator(np.random.PCG64(4))
    x = generator.standard_normal((200, 4))
    rows = np.column_stack([x, x @ [1.0, -2.0, 0.5, 0.0] + 0.1 * generator.standard_normal(200) + 3.0])
    np.savetxt(tmp_path / "rows.csv", rows, delimiter=",", header="a,b,c,d,target", comments="")
    data = {"source": str(tmp_path / "rows.csv"), "batch-size": 0}
    truth = recorded(tmp_path, run={"rounds": 8}, data=data, protocol={"learning-rate": 0.01})
    found = attacked(ATTACK, truth)
    assert found.measure.endswith("mean target")
