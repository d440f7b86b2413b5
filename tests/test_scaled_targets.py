"""Targets that are brought to scale for training: what comes out is in their own units, wherever it comes out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import seeded
from sklearn.linear_model import LinearRegression
from test_cli import call
from torch import Tensor, nn

import moretta
from moretta import BAFFLE, CGD, PBPFL, Engine, FedAvg, Federation, FedSGD, SecureAggregation, Silo
from moretta.engines.run_folder import read_inputs, read_model
from moretta.errors import ParameterError
from moretta.protocols.common import modules
from moretta.protocols.common.training import Training
from moretta.run.export import export
from moretta.run.prediction import predict
from moretta.run.result import Result
from moretta.run.trained_model import ModelChoice

Rows = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
SGD = FedSGD(learning_rate=0.1)
ALL_BUT_ONE, CLEAR = SecureAggregation(threshold=2), SecureAggregation(scheme="none")


def rows(count: int, seed: int) -> Rows:
    """Costs of about 50,000, and shares of about 0.01."""
    drawn = np.random.default_rng(seed)
    x = drawn.normal(size=(count, 4)).astype(np.float32)
    costs = 50_000 + 9_000 * (x[:, 0] - x[:, 1] / 2) + 2_000 * drawn.normal(size=count)
    return x, np.stack([costs, 0.01 + 0.001 * x[:, 2]], axis=1).astype(np.float32)


PARTS: Mapping[str, Rows] = {
    name: rows(count, seed) for seed, (name, count) in enumerate({"a": 20, "b": 33, "c": 27}.items())
}
TEST = rows(40, 9)
POOLED = np.concatenate([y for _, y in PARTS.values()]).astype(np.float64)
MEAN, DEVIATION = POOLED.mean(axis=0), POOLED.std(axis=0)


def network(outputs: int = 2) -> nn.Module:
    with seeded():
        return nn.Sequential(nn.Linear(4, outputs))


def federation(protocol: Training = SGD, outputs: int = 2, **settings: Any) -> Federation:
    silos = [Silo(name, x, y[:, :outputs]) for name, (x, y) in PARTS.items()]
    chosen: dict[str, Any] = {
        "model": network(outputs), "silos": silos, "protocol": protocol, "test": (TEST[0], TEST[1][:, :outputs]),
        "batch_size": 8, "insecure_secret_seed": 5, "standardise_targets": True,
    } | settings  # fmt: skip
    return Federation(**chosen)


def in_units(model: nn.Module, x: np.ndarray[Any, Any], outputs: int = 2) -> np.ndarray[Any, Any]:
    """What a network gives, in the targets' own units."""
    return modules.outputs_of(model, torch.tensor(x)).numpy() * DEVIATION[:outputs] + MEAN[:outputs]


def of_costs(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets)[:, 0].abs().mean()


def test_predictions_and_scores_are_in_the_targets_own_units(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = federation(out=out, metrics=[of_costs], missing="mean").train(5, progress=False)
    assert result.model is not None
    expected = in_units(result.raw_model().network, TEST[0])
    near: dict[str, Any] = {"rtol": 1e-6, "atol": 0}
    np.testing.assert_allclose(np.asarray(result.predict(TEST[0]), np.float64), expected, **near)
    np.testing.assert_allclose(result.model(torch.tensor(TEST[0])).detach().numpy(), expected, **near)
    np.testing.assert_allclose(result.raw_model()(torch.tensor(TEST[0])).detach().numpy(), expected, **near)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its own TorchScript old
        scripted = torch.jit.script(result.model)
    np.testing.assert_allclose(scripted(torch.tensor(TEST[0])).numpy(force=True), expected, **near)
    result.save(tmp_path / "saved")
    for folder in (tmp_path / "saved", result.save()):
        np.testing.assert_allclose(np.asarray(moretta.load(folder).predict(TEST[0]), np.float64), expected, **near)
    np.savez(tmp_path / "x.npz", x=TEST[0])
    predict(out, tmp_path / "x.npz", tmp_path / "predicted.npy")
    np.testing.assert_allclose(np.load(tmp_path / "predicted.npy"), expected, **near)
    errors = expected - TEST[1]
    assert result.test["mse"] == pytest.approx((errors**2).mean(), rel=1e-5)
    assert result.test["loss"] == pytest.approx((errors**2).sum(axis=1).mean() / 2, rel=1e-5)
    assert result.test["metrics"]["of_costs"] == pytest.approx(np.abs(errors[:, 0]).mean(), rel=1e-5)
    assert result.training["a"]["mse"] > 1e5
    assert result.history[-1]["test_mse"] == result.test["mse"]
    # What rounds are trained by is a loss of scaled targets, which its name says.
    assert all("loss" not in line and 0 < line["scaled_loss"] < 3 for line in result.history)
    assert "scaled targets" in result.report(tmp_path / "report.html").read_text()


def test_an_exported_graph_gives_the_targets_own_units(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    result = federation(standardise=True).train(2, progress=False)
    export(result.save(tmp_path / "saved"), tmp_path / "model.onnx", ModelChoice(allow_code=True))
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(["outputs"], {"x": TEST[0]})
    np.testing.assert_allclose(found, np.asarray(result.predict(TEST[0]), np.float64), rtol=1e-6)


def test_a_model_that_takes_arrays_by_name_gives_the_targets_own_units() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, table: Tensor) -> Tensor:
            found: Tensor = self.layer(table)
            return found

    silos = [Silo(name, {"table": x}, y) for name, (x, y) in PARTS.items()]
    for standardise in (False, True):
        given: dict[str, Any] = {"silos": silos, "model": Named(), "test": ({"table": TEST[0]}, TEST[1])}
        result = federation(standardise=standardise, **given).train(2, progress=False)
        assert result.model is not None
        found = result.model(table=torch.tensor(TEST[0])).detach().numpy()
        np.testing.assert_allclose(found, np.asarray(result.predict({"table": TEST[0]}), np.float64), rtol=1e-6)
        assert abs(found[:, 0].mean() - 50_000) < 9_000
        with pytest.raises(ParameterError, match="pass its network"):
            federation(**given | {"model": result.model})


@pytest.mark.parametrize(
    "protocol", [SGD, CGD(loss="mse", learning_rate=0.1), PBPFL(learning_rate=0.1)], ids=lambda one: one.name
)
def test_a_resumed_run_ends_with_the_same_bytes(protocol: Training, tmp_path: Path) -> None:
    federation(protocol, out=tmp_path / "whole").train(4, progress=False)
    federation(protocol, out=tmp_path / "parts").train(2, progress=False)
    federation(protocol, out=tmp_path / "parts").train(4, resume=True, progress=False)
    assert read_inputs(tmp_path / "whole") == read_inputs(tmp_path / "parts")
    np.testing.assert_allclose(read_inputs(tmp_path / "whole")["target_mean"], MEAN, rtol=1e-12)
    for path in (tmp_path / "whole").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "parts" / path.name).read_bytes()


@pytest.mark.parametrize("scheme", ["pairwise", "additive-shares"])
def test_the_scale_is_that_of_all_silos_though_one_drops_out(scheme: Any, tmp_path: Path) -> None:
    drops = Engine(faults={"drop": [{"round": 2, "silo": "c"}]})  # type: ignore[arg-type]  # pydantic reads it
    sums = ALL_BUT_ONE if scheme == "pairwise" else SecureAggregation(scheme=scheme)
    result = federation(aggregation=sums, engine=drops, out=tmp_path / "out").train(3, progress=False)
    assert [gone["silo"] for gone in result.record["dropped"]] == ["c"]
    inputs = read_inputs(tmp_path / "out")
    np.testing.assert_allclose(inputs["target_mean"], MEAN, rtol=1e-12)
    np.testing.assert_allclose(inputs["target_deviation"], DEVIATION, rtol=1e-12)


@pytest.mark.parametrize(
    "protocol", [SGD, CGD(loss="mse", learning_rate=0.1), BAFFLE(learning_rate=0.02, k=16)], ids=lambda one: one.name
)
def test_silos_score_in_the_targets_own_units(protocol: Training) -> None:
    silos = [Silo(name, x[6:], y[6:], held_out=(x[:6], y[:6])) for name, (x, y) in PARTS.items()]
    result = federation(protocol, silos=silos, test=None, score_at_silos=True).train(2, progress=False)
    assert result.test["by"] == "silos"
    if result.model is None:  # each silo has its own
        assert result.test["mse"] > 1e5
        return
    errors = [result.predict(x[:6]) - y[:6] for x, y in PARTS.values()]
    assert result.test["mse"] == pytest.approx((np.concatenate(errors).astype(np.float64) ** 2).mean(), rel=1e-5)


# -- remedies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "protocol",
    [FedSGD(learning_rate=1.0), FedAvg(learning_rate=0.1, local_epochs=2), PBPFL(learning_rate=1.0)],
    ids=lambda one: one.name,
)
def test_a_run_that_large_targets_end_names_the_remedy_which_works(protocol: Training) -> None:
    options: dict[str, Any] = {"outputs": 1, "batch_size": 0}
    with pytest.raises(moretta.errors.MorettaError, match="targets that are numbers by standardise-targets"):
        federation(protocol, **options, standardise_targets=False).train(2, progress=False)
    quick = protocol.model_copy(update={"learning_rate": 0.3})
    result = federation(quick, **options).train(40, progress=False)
    x = np.concatenate([x for x, _ in PARTS.values()])
    best = LinearRegression().fit(x, POOLED[:, :1]).predict(TEST[0])
    assert result.test["mse"] == pytest.approx(np.square(best - TEST[1][:, :1]).mean(), rel=0.02)


RUN = """
[run]
rounds = 60
[data]
source = "costs.csv"
[model]
source = "mlp"
hidden = []
[protocol]
name = "fedsgd"
learning-rate = 0.3
"""


def test_the_remedy_works_from_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x, y = rows(200, 3)
    table = np.concatenate([x, y[:, :1]], axis=1)
    np.savetxt("costs.csv", table, "%.6f", ",", header="age,beds,days,share,cost", comments="")
    Path("run.toml").write_text(RUN)
    failed = call("train", "run.toml", "--out", "failed")
    assert failed.code != 0
    assert "targets that are numbers by standardise-targets" in " ".join(failed.err.split())
    done = call("train", "run.toml", "--out", "out", "--set", "data.standardise-targets=true")
    assert done.code == 0, done.err
    assert call("predict", "out", "--data", "costs.csv", "--out", "predicted.csv").code == 0
    found = np.loadtxt("predicted.csv", skiprows=1)
    best = LinearRegression().fit(x, y[:, 0]).predict(x)
    assert np.square(found - y[:, 0]).mean() == pytest.approx(np.square(best - y[:, 0]).mean(), rel=0.15)
    assert "standardise-targets = true" in Path("out/run.toml").read_text()
    assert call("train", "run.toml", "--out", "cls", "--set", "data.task=classification",
                "--set", "data.standardise-targets=true").code != 0  # fmt: skip


def test_what_cannot_be_scaled_is_refused_by_name() -> None:
    same = [Silo(name, x, np.stack([y[:, 0], np.full(len(y), 7, np.float32)], 1)) for name, (x, y) in PARTS.items()]
    for protocol in (SGD, CGD(loss="mse", learning_rate=0.1)):
        with pytest.raises(ParameterError, match=r"standardise-targets: target 1 .* is the same number in all rows"):
            federation(protocol, silos=same).train(1, progress=False)
    classes = [Silo(name, x, (y[:, 0] > 50_000).astype(np.int64)) for name, (x, y) in PARTS.items()]
    with pytest.raises(
        ParameterError, match=r"standardise_targets is for targets that are numbers, .* not for classes"
    ):
        federation(silos=classes, test=None)


def test_a_model_of_such_a_run_goes_on_as_the_refusal_says() -> None:
    first = federation().train(20, progress=False)
    assert first.model is not None
    still = FedSGD(learning_rate=1e-9)
    for model in (first.model, first.raw_model()):
        with pytest.raises(ParameterError, match=r"pass its network, result\.raw_model\(\)\.network"):
            federation(still, model=model)
    again: Result = federation(still, model=first.raw_model().network).train(1, progress=False)
    assert again.test["mse"] == pytest.approx(first.test["mse"], rel=1e-4)


def test_the_released_weights_are_those_of_the_network(tmp_path: Path) -> None:
    """A run without scaled targets keeps the files that it had."""
    federation(out=tmp_path / "out").train(1, progress=False)
    assert list(read_model(tmp_path / "out", "released.safetensors")) == ["0.bias", "0.weight"]
    plain = federation(FedSGD(learning_rate=1e-9), out=tmp_path / "plain", aggregation=CLEAR, standardise_targets=False)
    plain.train(1, progress=False)
    assert not {"target_mean", "target_deviation"} & set(read_inputs(tmp_path / "plain"))
