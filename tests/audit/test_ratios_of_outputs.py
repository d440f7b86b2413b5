"""What blinded ratios hide and do not, on recorded runs: from the server, and from the silo that sent them."""

import numpy as np
import pytest
from recorded import attacked, claimed, recorded

from moretta.audit.attacks.common.silo_property import ATTACK as SILO_PROPERTY
from moretta.audit.attacks.pbpfl import exposure, server_softmax, softmax
from moretta.errors import ParameterError
from moretta.secure_aggregation.plain import PlainUpload

RATIOS = {
    "name": "pbpfl", "loss": "cross-entropy", "variant": "paper", "exchange": "ratios", "partitions": 2, "rho": 3.0
}  # fmt: skip
ROUNDS = {"rounds": 4, "record-views": [2, 3, 4]}
TWO = {"source": "wdbc"}  # classes; digits has ten


def test_from_three_classes_on_the_server_has_every_samples_softmax(tmp_path):
    truth = recorded(tmp_path, run=ROUNDS, protocol=RATIOS)
    found = attacked(server_softmax.ATTACK, truth)
    assert found.succeeded
    assert found.figures["relative_error"] < 1e-5  # of float32 outputs: lambda hides nothing of them


def test_of_two_classes_it_has_none(tmp_path):
    truth = recorded(tmp_path, run=ROUNDS, data=TWO, protocol=RATIOS)
    found = attacked(server_softmax.ATTACK, truth)
    assert not found.succeeded
    assert "guesses the softmax" in found.sentence
    # The same run without blinds: the server has it.
    (tmp_path / "plain").mkdir()
    plain = recorded(tmp_path / "plain", run=ROUNDS, data=TWO, protocol=RATIOS | {"exchange": "outputs"})
    assert attacked(server_softmax.ATTACK, plain).succeeded


@pytest.mark.parametrize("batch", [1, 32])
def test_a_silo_has_its_softmax_and_the_offset_from_batches_of_any_size(tmp_path, batch):
    truth = recorded(tmp_path, run=ROUNDS, data={"batch-size": batch}, protocol=RATIOS | {"partitions": 5})
    claim = claimed(softmax.SOFTMAX, truth)
    found = softmax.SOFTMAX.score(claim, truth)
    assert found.succeeded
    assert found.figures["max_error"] < 1e-4
    assert all(np.allclose(p.sum(axis=1), 1.0, atol=1e-4) for p in claim.values())
    assert attacked(softmax.OFFSET, truth).figures["relative_error_of_differences"] < 1e-2


def test_uploads_are_told_as_they_were_and_models_need_outputs(tmp_path):
    truth = recorded(tmp_path, run=ROUNDS, protocol=RATIOS, secure_aggregation={"scheme": "none"})
    silo = truth.run.silos[0]
    seen = exposure.uploaded(truth, silo, 3)
    heard = [one.message for one in truth.heard("server", 3) if one.peer == silo]
    (sent,) = (one for one in heard if isinstance(one, PlainUpload))
    for name, wanted in seen.items():
        assert np.abs(sent.tensors[f"noisy/{name}"] - wanted).max() < 1e-4 * np.abs(wanted).max()
    with pytest.raises(ParameterError, match="a silo's view has no outputs"):
        claimed(SILO_PROPERTY, truth)
