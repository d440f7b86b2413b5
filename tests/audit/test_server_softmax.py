"""What the server learns of each sample under cross-entropy, on recorded runs."""

import numpy as np
from recorded import attacked, claimed, recorded

from moretta.audit.attacks.pbpfl.server_softmax import ATTACK, features, scales_of
from moretta.audit.evidence.case import Case
from moretta.protocols.pbpfl.softmax import TrueSoftmax

PROTOCOL = {"name": "pbpfl", "loss": "cross-entropy", "variant": "paper", "partitions": 5, "rho": 3.0}


def test_softmax_and_labels_of_all_samples(tmp_path):
    run = {"rounds": 40, "record-views": [38, 39, 40]}
    truth = recorded(tmp_path, run=run, protocol=PROTOCOL | {"learning-rate": 0.5}, model={"hidden": [8]})
    found = attacked(ATTACK, truth)
    assert found.succeeded
    assert found.figures["rows"] == 3 * 3 * 32
    assert found.figures["relative_error"] < 1e-5  # of float32 outputs
    assert found.figures["label_rate_low"] > found.figures["label_chance"]
    # Eight inputs and a constant in eleven equations: exact, but for float32 and the head's condition.
    assert found.figures["features_r2"] > 0.99


def test_wrong_offset_teaches_nothing(tmp_path):
    run = {"rounds": 4, "record-views": [2, 3, 4]}
    truth = recorded(tmp_path, run=run, protocol=PROTOCOL)
    given = ATTACK.given(truth)
    other = {name: -array if name.startswith("offset/") else array for name, array in given.arrays.items()}
    claim = ATTACK.attack(Case.unpack(truth.case(given.views, other, thorough=False).pack()))
    assert not ATTACK.score(claim, truth).succeeded
    claim = claimed(ATTACK, truth)
    assert ATTACK.score(claim, truth).succeeded
    # The best that is said of all rows alike is their mean softmax, which is what is guessed without any offset.
    known = [name for name in claim if name.startswith("p/")]
    mean = np.concatenate([claim[name] for name in known]).mean(axis=0)
    alike = {name: np.tile(mean, (len(claim[name]), 1)) for name in known}
    found = ATTACK.score({**claim, **alike}, truth)
    assert abs(found.score - found.chance) < 1e-3
    assert not found.succeeded


def test_features_are_exact_where_the_head_allows():
    draw = np.random.Generator(np.random.PCG64(2))
    weight, bias, h = draw.normal(size=(6, 5)), draw.normal(size=6), draw.normal(size=(7, 5))
    scales, offset = np.exp(draw.normal(size=5)), draw.normal(size=6)
    np.testing.assert_allclose(scales_of(weight, (weight / scales)[:, ::-1] + offset[:, None], offset), scales)
    y = h @ weight.T + draw.normal(size=(7, 1))  # up to a constant a row
    for shift, one in ((bias, 1.0), (None, 0.0)):
        seen = TrueSoftmax(y, y + (0.0 if shift is None else shift), h @ scales + one, y[:, 0])
        np.testing.assert_allclose(features(seen, weight, shift, scales), h, atol=1e-9)


def test_squared_error_sends_no_predictions(tmp_path):
    truth = recorded(tmp_path, run={"rounds": 1}, protocol={"name": "pbpfl"})
    assert "cross-entropy" in ATTACK.fits(truth.run)
