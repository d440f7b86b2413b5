"""FedSAM by itself, and by every command: collected where it is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from fedsam import ideal
from fedsam.attacks import ATTACK
from fedsam.params import FedSAM
from recorded import attacked, claimed
from test_cli import Called, call, prepare
from test_contract import MORE, federation_of, network, silos

from moretta import FedAvg, Federation, SecureAggregation
from moretta.audit.evidence.truth import Truth
from moretta.engines.run_folder import read_json, read_model
from moretta.protocols.common import modules
from moretta.protocols.common.enrolment import targets
from moretta.protocols.common.modules import first_weights
from moretta.protocols.common.training import Training

CLEAR = SecureAggregation(scheme="none")


def trained(protocol: Training, **settings: object) -> dict[str, np.ndarray]:
    """The weights after four rounds of batches of eight rows."""
    chosen: dict[str, object] = {"batch_size": 8, "insecure_secret_seed": 5} | settings
    model = Federation(network(), silos(MORE), protocol, **chosen).train(4, 7).model  # type: ignore[arg-type]
    assert model is not None
    return modules.arrays(model)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scheme", ["pairwise", "none"])
def test_without_a_radius_it_is_fedavg_bit_for_bit(scheme: str, dtype: str) -> None:
    given = {"learning_rate": 0.05, "momentum": 0.5, "weight_decay": 0.01, "clip_norm": 1.0, "local_epochs": 3}
    aggregation = SecureAggregation(scheme=scheme)  # type: ignore[arg-type]
    ours = trained(FedSAM(radius=0, **given), aggregation=aggregation, dtype=dtype)  # type: ignore[arg-type]
    theirs = trained(FedAvg(**given), aggregation=aggregation, dtype=dtype)  # type: ignore[arg-type]
    assert {name: value.tobytes() for name, value in ours.items()} == {
        name: value.tobytes() for name, value in theirs.items()
    }
    moved = trained(FedSAM(radius=0.5, **given), aggregation=aggregation, dtype=dtype)  # type: ignore[arg-type]
    assert any((moved[name] != value).any() for name, value in ours.items())


def test_it_is_plain_training_from_a_little_uphill() -> None:
    protocol = FedSAM(learning_rate=0.05, local_epochs=5, radius=0.2)
    ours = trained(protocol, batch_size=0, aggregation=CLEAR, dtype="float64", standardise=False)
    model = first_weights(network()).double()
    rows = [
        (torch.tensor(silo.x, dtype=torch.float64), targets(silo.y, 3, "mse", silo.name, torch.float64))
        for silo in silos(MORE)
    ]
    ideal.train(model, rows, rounds=4, epochs=5, loss="mse", learning_rate=0.05, radius=0.2)
    for name, value in modules.arrays(model).items():
        np.testing.assert_allclose(ours[name], value, rtol=0, atol=1e-12)


def test_a_run_of_the_contract_suite_is_of_fedsam() -> None:
    assert federation_of("fedsam").train(2).record["protocol"] == "fedsam"


SETTINGS = '[protocol]\nname = "fedsam"\nradius = 0.1\nlocal-epochs = 2\nlearning-rate = 0.1\n'


def run(*words: object) -> Called:
    """Call a command that succeeds."""
    done = call(*words)
    assert done.code == 0, done.err
    return done


def test_fedsam_by_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = prepare(tmp_path)
    file.write_text(file.read_text().partition("[protocol]")[0] + SETTINGS)
    told = run("train", file, "--out", "alone", "--set", "run.record-views=true", "--json").told
    assert (told["protocol"], told["rounds"]) == ("fedsam", 3)
    assert told["settings"]["protocol"]["radius"] == 0.1

    compared = run("compare", file, "--protocols", "fedsgd,fedsam", "--out", "both")
    assert "FedSAM" in compared.out
    assert read_json(tmp_path / "both" / "fedsam" / "result.json")["settings"]["protocol"]["radius"] == 0.1
    ours, theirs = (read_model(tmp_path / place, "model.safetensors") for place in ("alone", "both/fedsam"))
    assert set(ours) == set(theirs)
    assert "FedSAM" in (tmp_path / "both" / "report.html").read_text()

    run("report", "alone")
    page = (tmp_path / "alone" / "report.html").read_text()
    assert "with FedSAM" in page
    assert "not the weight change of any one silo" in page
    assert "no sentence about" not in page

    audit = run("audit", "alone", "--json").told  # its own attack, and one of Moretta's that it is exposed to
    found = {one["attack"]: one for one in audit["attacks"]}
    assert (set(found), audit["not_run"]) == ({"model-in-the-clear", "membership-inference"}, [])
    assert found["model-in-the-clear"]["sentence"] == "A silo holds the true model before round 3 exactly."

    assert run("predict", "alone", "--data", "patients.csv", "--out", "outputs.csv", "--json").told["rows"] == 60


def test_the_attack_knows_the_run_that_it_was_made_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def truth(name: str) -> Truth:
        made = federation_of("fedsam", tmp_path / name, record_views=True)
        made.train(2)
        return Truth(tmp_path / name, made, 2, 0)

    def mirrored() -> torch.nn.Module:
        """Start elsewhere: two runs from one start are within a few percent of each other after a round."""
        model = network()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.neg_()
        return model

    one = truth("one")
    monkeypatch.setattr("test_contract.network", mirrored)
    other = truth("other")
    assert attacked(ATTACK, one).figures["relative_error"] == 0.0
    assert not ATTACK.score(claimed(ATTACK, other), one).succeeded


def test_a_run_file_of_fedsam_is_checked_as_any(tmp_path: Path) -> None:
    file = prepare(tmp_path)
    file.write_text(file.read_text().partition("[protocol]")[0] + SETTINGS.replace("radius =", "raduis ="))
    failed = call("train", file)
    assert failed.code == 2
    assert "[protocol] raduis" in failed.sentence
    assert "radius" in failed.sentence
