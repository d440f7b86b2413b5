"""Metrics of the user's own: by their names in the result, the history, the folder and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refused_rows import Row, refused
from test_contract import network, silos
from torch import Tensor

from moretta import CGD, Federation, FedSGD, FinishedRound, Silo
from moretta.engines.run_folder import read_json
from moretta.errors import ParameterError
from moretta.report.folder import read_run
from moretta.report.table import comparison
from moretta.run.metrics import judged, of_counts


def recall_of_two(outputs: Tensor, targets: Tensor) -> float:
    assert targets.dtype == torch.int64
    those = targets == 2
    return float((outputs.argmax(dim=1) == 2)[those].double().mean())


def worst_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().max()


def federation(**settings: Any) -> Federation:
    held = silos()
    chosen: dict[str, Any] = {
        "protocol": FedSGD(loss="cross-entropy"),
        "test": (held[1].x, held[1].y),
        "silos": held,
    } | settings
    return Federation(network(), **chosen)


def test_it_is_in_result_history_folder_report_and_callback(tmp_path: Path) -> None:
    told: list[FinishedRound] = []
    made = federation(metrics=[recall_of_two], out=tmp_path / "run")
    result = made.train(3, on_round=told.append, progress=False)
    x, y = made.test  # type: ignore[misc]
    outputs = result.model(torch.tensor(x))  # type: ignore[misc]
    expected = recall_of_two(outputs, torch.tensor(y))
    assert result.test["metrics"]["recall_of_two"] == pytest.approx(expected)
    assert result.history[-1]["test_recall_of_two"] == pytest.approx(expected)
    assert told[-1].metrics["test_recall_of_two"] == pytest.approx(expected)
    assert read_json(tmp_path / "run" / "result.json")["test"]["metrics"]["recall_of_two"] == pytest.approx(expected)
    from rich.console import Console

    console = Console(record=True, width=120)
    console.print(comparison([read_run(tmp_path / "run")], {}).rich())
    assert "Recall of two" in console.export_text()


def test_numbers_come_as_they_are() -> None:
    held = [Silo(one.name, one.x, one.x[:, :3].astype(np.float32)) for one in silos()]
    result = federation(silos=held, protocol=FedSGD(), test=(held[0].x, held[0].y), metrics=[worst_error]).train(
        2, progress=False
    )
    error = np.abs(result.model(torch.tensor(held[0].x)).detach().numpy() - held[0].y).max()  # type: ignore[misc]
    assert result.test["metrics"]["worst_error"] == pytest.approx(error)


def mae(outputs: Tensor, targets: Tensor) -> Tensor:
    return 1000 * (outputs - targets).abs().mean()


def test_a_name_of_ours_gets_no_interval_of_ours() -> None:
    held = [Silo(one.name, one.x, one.x[:, :3].astype(np.float32)) for one in silos()]
    settings: dict[str, Any] = {"silos": held, "protocol": FedSGD(), "test": (held[0].x, held[0].y)}
    result = federation(**settings, metrics=[mae]).train(1, progress=False)
    assert result.test["metrics"]["mae"] > 100
    assert set(result.test["intervals"]) == {"mse"}


def test_of_models_a_silo_it_is_the_mean_or_the_worst_models() -> None:
    protocol = CGD(loss="cross-entropy", delta=0.1)
    result = federation(protocol=protocol, metrics=[recall_of_two]).train(2, progress=False)
    assert "recall_of_two" in result.test["metrics"]
    assert "test_recall_of_two" in result.history[-1]


@pytest.mark.parametrize(("groups", "sure"), [(["ann"] * 8, False), (["ann"] * 4 + ["bo"] * 4, True), (None, True)])
def test_rows_about_one_person_have_no_interval(groups: list[str] | None, sure: bool) -> None:
    outputs, y = np.random.default_rng(1).random((8, 2)), np.arange(8) % 2
    together = None if groups is None else np.array(groups)
    figures = judged(outputs, y, "classification", "mse", together=together)["figures"]
    assert [name for name in ("accuracy", "brier") if ("low" in figures[name]) != sure] == []


def test_a_model_without_an_error_has_no_interval_that_says_it_is_certain() -> None:
    y = np.arange(12) % 2
    figures = judged(np.eye(2)[y], y, "classification", "mse")["figures"]
    assert figures["accuracy"] == {"value": 1.0}
    assert "accuracy" not in of_counts(np.diag([6, 6]))
    assert "accuracy" in of_counts(np.array([[6, 1], [0, 6]]))


def test_a_figure_that_is_not_finite_is_none_in_the_folder(tmp_path: Path) -> None:
    def empty(outputs: Tensor, targets: Tensor) -> float:
        return float("nan")

    federation(metrics=[empty], out=tmp_path / "run").train(2, progress=False)
    said = [one for one in (tmp_path / "run" / "log.txt").read_text().splitlines() if "metric" in one]
    assert len(said) == 1
    assert said[0].endswith("metric `empty` was no finite number on 33 rows; its figure is left empty there")
    assert read_json(tmp_path / "run" / "result.json")["test"]["metrics"]["empty"] is None


def test_a_metric_that_fails_on_the_way_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    calls: list[int] = []

    def tired(outputs: Tensor, targets: Tensor) -> float:
        calls.append(len(outputs))
        if len(calls) == 4:  # made-up rows, and the first two rounds, went well
            raise OSError("a disk")
        return 1.0

    settings: dict[str, Any] = {"checkpoint_every": 2, "insecure_secret_seed": 3}
    with pytest.raises(ParameterError, match=r"metric `tired`.*OSError"):
        federation(metrics=[tired], out=tmp_path / "run", **settings).train(4, 7, progress=False)
    resumed = federation(metrics=[tired], out=tmp_path / "run", **settings).train(4, 7, resume=True, progress=False)
    whole = federation(**settings).train(4, 7, progress=False)
    assert [line["round"] for line in resumed.history] == [1, 2, 3, 4]
    for name, value in whole.model.state_dict().items():  # type: ignore[union-attr]
        torch.testing.assert_close(resumed.model.state_dict()[name], value, rtol=0, atol=0)  # type: ignore[union-attr]


def test_rows_that_silos_train_on_are_not_scored_by_it() -> None:
    held = silos()

    def of_two_classes(outputs: Tensor, targets: Tensor) -> float:
        assert len(targets.unique()) > 1, "one class has no curve"
        return 1.0

    one = [Silo(held[0].name, held[0].x, np.zeros_like(held[0].y)), *held[1:]]
    result = federation(silos=one, metrics=[of_two_classes]).train(1, progress=False)
    assert result.test["metrics"]["of_two_classes"] == 1.0
    assert "of_two_classes" not in result.training[held[0].name]["metrics"]


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    return 1.0


def two(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean(dim=0)


def breaks(outputs: Tensor, targets: Tensor) -> float:
    raise KeyError("a row")


@pytest.mark.parametrize("score", ["loss", "accuracy", "mse"])
@pytest.mark.parametrize("of", ["", "mean_", "slices_"])
def test_a_metric_replaces_no_score_of_the_history(of: str, score: str) -> None:
    def metric(outputs: Tensor, targets: Tensor) -> float:
        return 77.0

    metric.__name__ = of + score
    with pytest.raises(ParameterError, match=f"metric `{of}{score}`: expected a function with a name of its own"):
        federation(metrics=[metric])


@refused("metrics.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())
