"""Validation rows that silos hold back: what scores on them come to, over whom, and what a server may ask of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_contract import ADDITIVE, LOSSY, MORE, dropping, federation_of, silos
from test_scoring import HeldOut, contributor

from moretta import Engine, Federation, SecureAggregation, Silo
from moretta.config import run_files
from moretta.config.silo_file import load
from moretta.contract.messages import Stamp
from moretta.data.silo import holding_back
from moretta.deployment import shared_settings as told
from moretta.engines.in_process import InProcess
from moretta.engines.journal import HelpedFile
from moretta.errors import ParameterError, PeerError
from moretta.protocols.common import modules
from moretta.protocols.common.scoring import Score, Validate
from moretta.run import federation as federations
from moretta.run.evaluation import evaluate
from moretta.run.result import Result

NAMES = ["fedsgd", "fedavg", "fedprox", "baffle", "baffle-epochs"]
PART = 0.25


def validating(name: str, **settings: Any) -> Federation:
    given: dict[str, Any] = {
        "silos": silos(MORE),
        "validation_fraction": PART,
        "evaluate_every": 2,
        "engine": Engine(strict=True),
    }
    return federation_of(name, **given | settings)


def validated(result: Result) -> dict[int, dict[str, float]]:
    """The scores on validation rows by round."""
    return {
        line["round"]: {key: value for key, value in line.items() if key.startswith("validation_")}
        for line in result.history
        if "validation_loss" in line
    }


def in_the_clear(federation: Federation, result: Result) -> dict[str, float]:
    """What the last model scores on all validation rows, in one place."""
    parts = [silo.validation for silo in federation.silos if silo.validation is not None]
    x, y = (np.concatenate([part[place] for part in parts]) for place in (0, 1))
    assert result.model is not None
    loss, task = federation.spec.protocol.loss, str(federation.spec.task)
    found = evaluate(result.model, torch.tensor(x), y, loss, task, metrics=False)
    return {f"validation_{key}": found[key] for key in ("rows", "loss", "accuracy", "mse") if key in found}


@pytest.mark.parametrize("aggregation", [SecureAggregation(), ADDITIVE, SecureAggregation(scheme="none")])
@pytest.mark.parametrize("name", NAMES)
def test_a_score_is_the_mean_over_all_validation_rows(name: str, aggregation: SecureAggregation) -> None:
    federation = validating(name, aggregation=aggregation)
    result = federation.train(4)
    found = validated(result)
    assert list(found) == [2, 4]
    assert found[4] == pytest.approx(in_the_clear(federation, result), rel=1e-5)
    assert "validation" not in result.test


def test_rows_are_trained_on_or_validated_on_and_groups_stay_whole() -> None:
    x = np.arange(40, dtype=np.float32).reshape(20, 2)
    groups = np.repeat([f"p{number}" for number in range(10)], 2)
    whole = Silo("north", x, np.arange(20) % 2, groups=groups, held_out=(x[:1] + 100, np.zeros(1, np.int64)))
    made = holding_back(whole, 0.3, "validation-fraction", 1, "validation")
    assert made.validation is not None
    validation, train = ({tuple(row) for row in part} for part in (made.validation[0], made.x))
    assert validation | train == {tuple(row) for row in x}
    assert not validation & train
    by_patient = {groups[number] for number, row in enumerate(x) if tuple(row) in validation}
    assert len(validation) == 2 * len(by_patient)
    assert made.held_out == whole.held_out
    again = holding_back(whole, 0.3, "validation-fraction", 1, "validation").validation
    assert again is not None
    np.testing.assert_array_equal(again[0], made.validation[0])


def test_early_stopping_goes_back_to_the_best_round_and_resumes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"early_stopping": 4, "evaluate_every": 1, "insecure_secret_seed": 5}
    result = validating("fedsgd", out=tmp_path / "whole", **settings).train(60)
    losses = {number: line["validation_loss"] for number, line in validated(result).items()}
    best = min(losses, key=lambda number: (losses[number], number))
    assert result.record["facts"]["best_round"] == best
    federation = validating("fedsgd", **settings)
    shorter = federation.train(best)
    assert result.model is not None
    assert shorter.model is not None
    for name, value in modules.arrays(shorter.model).items():
        np.testing.assert_array_equal(modules.arrays(result.model)[name], value)


# -- all evaluations of a run are over one set -------------------------------------------------------------------------


def test_an_evaluation_that_lacks_a_silo_is_left_out_and_never_shrunk(caplog: pytest.LogCaptureFixture) -> None:
    faults = dropping([(4, "south", "upload")])
    federation = validating("fedsgd", aggregation=LOSSY, engine=Engine(faults=faults))
    result = federation.train(6)
    found = validated(result)
    assert list(found) == [2, 6]  # in round 4 the rest train on without it
    assert {line["validation_rows"] for line in found.values()} == {found[2]["validation_rows"]}
    assert re.search(r"round 4.*the model is not validated", caplog.text)


# -- a silo's half -----------------------------------------------------------------------------------------------------


def upload(number: int, parameters: dict[str, Any], held: HeldOut) -> object:
    ask = Validate(stamp=Stamp("run", number, 0), parameters=parameters, encoding={})
    return held.upload(ask, contributor("none", "north"), np.zeros((2, 2), np.float32))


def test_a_silo_validates_one_model_a_round_in_the_run_s_rounds_alone() -> None:
    held = HeldOut(np.zeros((2, 1), np.float32), np.array([0, 1]), "cross-entropy", ("loss",), 3, validates=True)
    one, other = {"w": np.zeros(1)}, {"w": np.ones(1)}
    upload(1, one, held)
    upload(1, one, held)  # the same again tells nothing new
    with pytest.raises(PeerError, match="expected the model of the validation in round 1 that was scored before"):
        upload(1, other, held)
    upload(2, other, held)
    for number in (0, 4):
        with pytest.raises(PeerError, match="expected to be asked to validate a model of rounds 1 to 3"):
            upload(number, one, held)


def test_a_score_is_not_of_validation_rows_nor_the_other_way_round() -> None:
    held = HeldOut(np.zeros((2, 1), np.float32), np.array([0, 1]), "cross-entropy", ("loss",), 3, validates=True)
    asked = Score(stamp=Stamp("run", 4, 0), parameters={}, encoding={})
    with pytest.raises(PeerError, match="expected to be asked to validate"):
        held.upload(asked, contributor("none", "north"), np.zeros((2, 2), np.float32))


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("pbpfl", {}, "under pbpfl they hold none that is everybody's; remove it, or choose"),
        ("cgd", {}, "under cgd they hold none that is everybody's; remove it, or choose"),
        ("local", {}, "under local they hold none that is everybody's"),
        ("baffle-private", {}, r"a score would be a release without noise; remove it, or BAFFLE\(dp_noise=..\)"),
        (
            "fedsgd",
            {"participation": 0.8},
            "at all silos or at none, and participation = 0.8 leaves some out",
        ),
        ("fedsgd", {"validation_fraction": 1.0}, "validation_fraction"),
        ("fedsgd", {"validation_fraction": 0.01}, "silo `.*` cannot be split|every part needs a row"),
        (
            "fedsgd",
            {"validation": (silos()[0].x, silos()[0].y)},
            "validation and validation_fraction exclude each other",
        ),
    ],
)
def test_what_is_refused(name: str, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said) as refused:
        validating(name, **changed).train(1)
    assert len(str(refused.value).splitlines()) == 1


# -- sites -------------------------------------------------------------------------------------------------------------

RUN = """
[run]
rounds = 6
early-stopping = 4
evaluate-every = 1
[data]
source = "sites"
inputs = [4]
classes = 3
validation-fraction = 0.25
[model]
source = "mlp"
[protocol]
name = "fedsgd"
loss = "cross-entropy"
[engine]
name = "flare"
sites = ["north", "south", "east"]
"""
SITE = '[silo]\nname = "{silo}"\n[data]\nsource = "{silo}.npz"\n'


def sites(folder: Path, more: str = "") -> dict[str, Federation]:
    (folder / "run.toml").write_text(RUN)
    text, found = told.shared_text(run_files.load(folder / "run.toml")), dict[str, Federation]()
    for silo in silos():
        np.savez(folder / f"{silo.name}.npz", x=silo.x, y=silo.y)
        (folder / "silo.toml").write_text(SITE.format(silo=silo.name) + more)
        found[silo.name] = told.site_side(run_files.loads(text, folder / "told.toml"), load(folder / "silo.toml"))
    return found


def test_sites_hold_rows_back_and_the_server_stops_early(tmp_path: Path) -> None:
    made = sites(tmp_path, "test-fraction = 0.2")
    clients = {
        name: one.client(name, 6, 0, federations.NOWHERE, HelpedFile(str(tmp_path / f"{name}.jsonl")))[0]
        for name, one in made.items()
    }
    own = {name: next(silo for silo in one.silos if silo.name == name) for name, one in made.items()}
    for silo in own.values():
        assert silo.validation is not None
        assert silo.held_out is not None
        parts = [silo.x, silo.validation[0], silo.held_out[0]]
        assert len(np.unique(np.concatenate(parts), axis=0)) == sum(map(len, parts))
    server = told.server_side(run_files.load(tmp_path / "run.toml"), tmp_path / "run")
    result = server.train(6, transport=lambda codec, place, recorder: InProcess(clients, codec, strict=True))
    rows = sum(len(silo.validation[0]) for silo in own.values() if silo.validation is not None)
    assert {line["validation_rows"] for line in validated(result).values()} == {rows}


# -- edge clients ------------------------------------------------------------------------------------------------------


def test_an_edge_client_validates_too() -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    federation = validating("baffle", silos=silos(), engine=Engine(edge=("south",)))
    result = federation.train(2)
    assert validated(result)[2] == pytest.approx(in_the_clear(federation, result), rel=1e-5)


def test_the_report_draws_the_loss_on_validation_rows(tmp_path: Path) -> None:
    result = validating("fedsgd", out=tmp_path / "run").train(6)
    page = result.report(tmp_path / "report.html").read_text()
    assert "Loss on validation rows over rounds" in page
    assert "was not evaluated" not in page
    plain = validating("fedsgd", validation_fraction=None, out=tmp_path / "plain").train(6)
    assert "validation rows" not in plain.report(tmp_path / "plain.html").read_text()
