"""What the scorer takes for true is what the roles used."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from recorded import recorded
from torch import nn

from moretta.audit.attacks.pbpfl.head_offset import key_of
from moretta.audit.evidence.truth import Truth
from moretta.audit.evidence.uploads import rows_of
from moretta.contract.roles import under
from moretta.errors import ParameterError
from moretta.protocols.fedsgd.messages import TrainOn
from moretta.protocols.pbpfl.messages import TrainOn as TrainOnNoisy
from moretta.secure_aggregation.plain import PlainUpload


def with_dropout(hidden=()):
    """A network with dropout for digits; hidden layers are of the helper's own model."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10))


def test_sizes_of_batches_are_those_of_the_run(tmp_path):
    truth = recorded(tmp_path, run={"rounds": 2}, data={"source": "wdbc", "batch-size": 151})
    used = {silo: [len(truth.batch(silo, number)) for number in truth.recorded] for silo in truth.run.silos}
    assert used == {silo: [rows_of(truth.run, silo, number) for number in truth.recorded] for silo in truth.run.silos}
    assert [150, 2] in used.values()  # where one row would be left over


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_key_is_the_one_of_the_round(tmp_path, loss):
    truth = recorded(tmp_path, run={"rounds": 4}, protocol={"name": "pbpfl", "loss": loss})
    for number in (1, 3):  # before the first round the server's own state lacks what the set-up agreed on
        key, held = key_of(truth, number), under("model/", truth.states(number)["server"])
        perturbation = truth.roles(number).server._perturbation
        noisy = perturbation.perturb({name: torch.tensor(value) for name, value in held.items()}, key, truth.dtype)
        for silo in truth.run.silos:
            heard = [one.message for one in truth.heard(silo, number) if isinstance(one.message, TrainOnNoisy)]
            sent = heard[-1].parameters
            assert sent.keys() == noisy.keys()
            for name, value in sent.items():
                np.testing.assert_array_equal(noisy[name], value)
            assert any(np.any(value != held[name]) for name, value in sent.items())


@pytest.fixture(scope="module")
def clear(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("clear"), secure_aggregation={"scheme": "none"})


def test_gradient_is_the_upload(clear):
    for number in (1, 5):
        for silo in clear.run.silos:
            heard = [one.message for one in clear.heard(silo, number)]
            upload = next(one for one in heard if isinstance(one, PlainUpload))
            found = clear.gradient(silo, number)
            for name, value in found.items():
                np.testing.assert_allclose(upload.tensors[f"gradient/{name}"], value, rtol=1e-5, atol=1e-7)
            sent = next(one for one in heard if isinstance(one, TrainOn)).parameters
            for name, value in clear.parameters(number).items():
                np.testing.assert_array_equal(sent[name], value)


def test_gradient_is_the_upload_with_dropout_too(tmp_path):
    run = {"rounds": 2, "base": str(Path(__file__).parent)}
    model, clear = {"source": "test_truth:with_dropout"}, {"scheme": "none"}
    truth = recorded(tmp_path, run=run, model=model, secure_aggregation=clear)
    before = torch.get_rng_state()
    for silo in truth.run.silos:
        heard = [one.message for one in truth.heard(silo, 2)]
        upload = next(one for one in heard if isinstance(one, PlainUpload))
        for name, value in truth.gradient(silo, 2).items():
            np.testing.assert_allclose(upload.tensors[f"gradient/{name}"], value, rtol=1e-5, atol=1e-7)
    assert torch.equal(torch.get_rng_state(), before)


def test_batch_is_what_silos_used(clear):
    for silo in clear.run.silos:
        for number in (1, 6):
            rows = clear.rows(silo).of(clear.batch(silo, number))
            # The role itself, as it stood before the round, takes its batch.
            x, y = clear.roles(number).clients[silo].rows.batch(number)
            np.testing.assert_array_equal(x.numpy(), rows.x)
            np.testing.assert_array_equal(y.numpy(), rows.y)
    first, later = (clear.batch("silo-1", number) for number in (1, 2))
    assert not set(first) & set(later)  # of one epoch


def test_batches_in_order_are_what_silos_used(tmp_path):
    truth = recorded(
        tmp_path, protocol={"name": "cgd", "batches": "in-order"}, data={"batch-size": 7}, run={"rounds": 2}
    )
    for number in (1, 2):
        batch = truth.batch("silo-1", number).tolist()
        assert batch == list(range(7 * (number - 1), 7 * number))
        assert batch == truth.roles(number).clients["silo-1"]._rows.batches.of_round(number).tolist()


def test_background_and_others_are_nobodys_training_rows(clear):
    trained = {row.tobytes() for silo in clear.run.silos for row in clear.rows(silo).x}
    background, others = ({row.tobytes() for row in rows.x} for rows in (clear.background, clear.others))
    assert background
    assert others
    assert not trained & background
    assert not trained & others
    assert not background & others


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: shutil.rmtree(folder / "truth" / "round-000002"), "the states before round 3 in truth/"),
        (lambda folder: (folder / "inputs.json").unlink(), r"expected inputs\.json"),
    ],
)
def test_a_run_that_is_not_whole_is_refused(tmp_path, damage, says):
    whole = recorded(tmp_path, run={"rounds": 4})
    damage(whole.folder)
    with pytest.raises(ParameterError, match=says):
        Truth(whole.folder, whole.federation, 4, 5)


@pytest.mark.parametrize("name", ["inputs.json", "model.safetensors"])
def test_what_the_run_did_not_write_is_not_taken_for_true(tmp_path, name):
    truth = recorded(tmp_path, run={"rounds": 2}, anew=True)
    truth.final()
    content = (truth.folder / name).read_bytes()
    old, new = (b"\n", b"\n\n") if name.endswith("json") else (content[-4:], b"\0\0\0\0")
    (truth.folder / name).write_bytes(content.replace(old, new))
    with pytest.raises(ParameterError, match=f"{name} is not what the run wrote"):
        truth.rows(truth.run.silos[0]) if name.endswith("json") else truth.final()


def test_the_truth_of_another_run_is_refused(tmp_path):
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    one, other = (recorded(folder, run={"rounds": 2}, anew=True) for folder in folders)
    shutil.rmtree(one.folder / "truth")
    shutil.copytree(other.folder / "truth", one.folder / "truth")
    with pytest.raises(ParameterError, match="got those of"):
        Truth(one.folder, one.federation, 2, 5)
