"""Deep leakage from gradients on recorded runs: one image in the clear, under masks, and in a sum."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recorded import attacked, claimed, recorded
from sklearn.datasets import load_digits
from torch import nn

from moretta.audit.attacks.common.gradient_inversion import ATTACK, OF_SUM, compared

HERE = str(Path(__file__).parent)


def digit_images():
    """Training and test images [rows, 1, 8, 8] of grey levels 0 to 1, and their classes."""
    found = load_digits()
    x, y = found.images[:, None].astype(np.float32) / 16.0, found.target.astype(np.int64)
    return x[:300], y[:300], x[300:400], y[300:400]


def sigmoid_lenet(hidden=()):
    """The network that DLG was shown on, for these images; hidden layers are of the helper's own model."""
    layers = [nn.Conv2d(1, 12, 5, padding=2, stride=2), nn.Sigmoid(), nn.Conv2d(12, 12, 5, padding=2), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(192, 10))


def run(tmp_path, scheme, **protocol):
    # What a run file names has to be importable: this file's folder is on the path of the tests.
    return recorded(
        tmp_path,
        run={"rounds": 1, "base": HERE},
        data={"source": "test_gradient_inversion:digit_images", "batch_size": 1},
        model={"source": "test_gradient_inversion:sigmoid_lenet"},
        protocol={"loss": "cross-entropy", **protocol},
        secure_aggregation={"scheme": scheme},
    )


@pytest.fixture(scope="module")
def in_the_clear(tmp_path_factory):
    return run(tmp_path_factory.mktemp("clear"), "none")


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    return run(tmp_path_factory.mktemp("masked"), "pairwise")


def test_image_in_the_clear_is_found(in_the_clear):
    found = attacked(ATTACK, in_the_clear)
    assert found.succeeded
    assert found.figures["mean_squared_error"] <= 1e-4
    assert found.figures["labels_right"] == 1.0
    assert found.pictures[0].claimed.shape == (1, 1, 8, 8)
    assert "the sum" not in found.sentence
    assert OF_SUM.fits(in_the_clear.run)


def test_masked_upload_gives_no_more_than_the_mean_image(masked):
    found = attacked(ATTACK, masked)
    assert not found.succeeded
    assert found.figures["mean_squared_error"] >= found.figures["of_the_mean_row"]


def test_sum_of_few_images_still_gives_images(masked):
    """Masks hide who uploaded what, not what the sum of three images is."""
    found = attacked(OF_SUM, masked)
    assert found.succeeded
    assert found.figures["rows"] == 3


def test_rows_of_another_batch_are_not_those_found(in_the_clear):
    claim = dict(claimed(ATTACK, in_the_clear))
    claim["silos"] = np.array([1])  # scored as another silo's image
    assert not ATTACK.score(claim, in_the_clear).succeeded


def few_rows():
    """Two table rows for each of three silos, and others."""
    x, y, tests, classes = digit_images()
    return x[:6].reshape(6, -1)[:, 20:50], y[:6], tests.reshape(len(tests), -1)[:, 20:50], classes


@pytest.mark.parametrize("protocol", [{"name": "fedavg"}, {"name": "fedprox", "mu": 1.0}], ids=["fedavg", "fedprox"])
def test_rows_of_a_table_under_federated_averaging(tmp_path, protocol):
    truth = recorded(
        tmp_path,
        run={"rounds": 1, "base": HERE},
        data={"source": "test_gradient_inversion:few_rows", "batch_size": 0},
        protocol=protocol | {"loss": "mse"},
        secure_aggregation={"scheme": "none"},
    )
    assert attacked(ATTACK, truth).succeeded
    assert "several steps" in ATTACK.fits(
        replace(truth.run, settings={**truth.run.settings, "data": {"batch-size": 1}})
    )


@pytest.mark.parametrize(
    ("scheme", "noise", "known"), [("none", 1e-6, True), ("pairwise", 1e-6, True), ("none", 5.0, False)]
)
def test_noised_gradients_are_attacked_as_they_are(tmp_path, scheme, noise, known):
    truth = recorded(
        tmp_path,
        run={"rounds": 1, "base": HERE},
        data={"source": "test_gradient_inversion:few_rows", "batch_size": 0},
        protocol={"loss": "mse", "dp-noise": noise, "dp-clip": 100.0},
        secure_aggregation={"scheme": scheme},
    )
    attack = OF_SUM if scheme == "pairwise" else ATTACK
    found = attacked(attack, truth)
    # Which rows of a sum a search finds hangs on the noise, drawn in secret, so that no interval is asked for here.
    assert (found.score >= found.chance + 0.25) == known
    # Lots of all rows: the scorer draws them again from the silo's secret.
    assert found.figures["rows"] == (6 if scheme == "pairwise" else 2)


def test_fewer_rows_than_the_true_ones_are_made_up_by_the_mean(in_the_clear):
    claim = dict(claimed(ATTACK, in_the_clear))
    claim["silos"] = np.array([0, 1])
    found = compared(claim, in_the_clear, "two uploads")
    assert found.figures["rows"] == 2
    assert found.figures["labels_right"] <= 0.5


def table(tmp_path, scheme, drops, **changes):
    engine = {"faults": {"drop": [{"round": number, "silo": silo} for number, silo in drops]}}
    data = {"source": "test_gradient_inversion:few_rows", "batch_size": 0}
    threshold = 2 if drops and scheme == "pairwise" else None  # by default three silos cannot lose one
    secure = {"secure_aggregation": {"scheme": scheme, "threshold": threshold}, "engine": engine}
    return recorded(tmp_path, **{"run": {"rounds": 2, "base": HERE}, "data": data, **secure, **changes})


@pytest.mark.parametrize("protocol", ["fedsgd", "pbpfl"])
def test_silo_that_was_lost_is_not_the_victim(tmp_path, protocol):
    truth = table(tmp_path, "none", [(1, "silo-1")], protocol={"name": protocol, "loss": "mse"})
    given = ATTACK.given(truth)
    assert given.view == "the upload of silo-2 in round 1"
    assert not [name for name in given.arrays if "silo-1" in name]
    found = attacked(ATTACK, truth)
    assert found.succeeded
    assert found.sentence.startswith("From the upload of silo-2 the server finds the 2 rows in it with ")


@pytest.mark.parametrize("protocol", ["fedsgd", "pbpfl"])
def test_sum_has_the_survivors_rows(tmp_path, protocol):
    truth = table(tmp_path, "pairwise", [(1, "silo-1")], protocol={"name": protocol, "loss": "mse"})
    assert OF_SUM.given(truth).view == "the sum of 2 silos in round 1"
    found = attacked(OF_SUM, truth)
    assert found.figures["rows"] == 4
    assert "From the sum of 2 silos the server " in found.sentence


def test_failed_search_does_not_say_that_rows_were_found(masked):
    assert "the server looks for the row in it and reaches a mean squared error of" in attacked(ATTACK, masked).sentence


def uneven_rows():
    """Many rows of the first kind of inputs, and few of the second, which make silos of other sizes."""
    found = load_digits()
    x, y = found.images.reshape(-1, 64).astype(np.float32) / 16.0, found.target.astype(np.int64)
    return x[:1000], y[:1000], x[1000:1100], y[1000:1100]


def test_batches_that_are_too_large_are_refused_by_who_uploaded(tmp_path):
    data = {"source": "test_gradient_inversion:uneven_rows", "batch_size": 0, "silos": 3}
    truth = table(tmp_path, "none", [], data=data, run={"rounds": 1, "base": HERE})
    assert "every batch has more rows" in ATTACK.fits(truth.run)
    # Were one silo's batch small, that silo would be the victim.
    rows = {**truth.run.rows, "silo-3": 20}
    truth.run = replace(truth.run, rows=rows)
    assert ATTACK.fits(truth.run) == ""
    assert ATTACK.given(truth).view == "the upload of silo-3 in round 1"
