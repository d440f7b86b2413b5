"""Scores on rows that somebody holds, against scikit-learn and torch called directly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    brier_score_loss,
    roc_auc_score,
    top_k_accuracy_score,
)
from torch import Tensor, nn

from moretta import CGD, FedSGD
from moretta.data.tables.preparation import Preparation
from moretta.errors import ParameterError
from moretta.protocols.common.modules import CHUNK, outputs_of
from moretta.protocols.common.targets import predicted, probabilities
from moretta.run.evaluation import Evaluator, evaluate, largest_relative_difference, slices


class Known(nn.Module):
    """A model whose outputs are its inputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


def drawn(rows: int, outputs: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, outputs, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def classes_of(outputs: Tensor, classes: int, seed: int = 1) -> np.ndarray:
    """Classes that the outputs say something about, each there at least once."""
    noise = drawn(len(outputs), classes, seed)
    wanted = (outputs + noise).argmax(1).numpy() if classes == outputs.shape[1] else (outputs + noise)[:, 0].numpy() > 0
    wanted = wanted.astype(np.int64)
    wanted[:classes] = np.arange(classes)
    return wanted


def test_a_single_output_is_class_1_above_a_half() -> None:
    outputs = drawn(200, 1)
    y = classes_of(outputs, 2)
    scores = evaluate(Known(), outputs, y, "mse", "classification")
    predicted = (outputs[:, 0].numpy() > 0.5).astype(int)
    assert scores["rows"] == 200
    assert scores["accuracy"] == pytest.approx(accuracy_score(y, predicted), abs=1e-15)
    assert scores["metrics"]["auc"] == pytest.approx(roc_auc_score(y, outputs[:, 0].numpy()), abs=1e-15)
    assert scores["metrics"]["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(y, predicted), abs=1e-15)
    assert scores["mse"] == pytest.approx(float(nn.MSELoss()(outputs, torch.tensor(y)[:, None])), rel=1e-14)
    assert scores["loss"] == pytest.approx(scores["mse"] / 2, rel=1e-14)


def test_exactly_a_half_is_class_0() -> None:
    scores = evaluate(Known(), torch.tensor([[0.5], [0.5]]), np.array([0, 1]), "mse", "classification")
    assert scores["accuracy"] == 0.5


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_two_outputs_are_ranked_by_their_difference(loss: str) -> None:
    outputs = drawn(300, 2)
    y = classes_of(outputs, 2)
    scores = evaluate(Known(), outputs, y, loss, "classification")
    assert scores["accuracy"] == pytest.approx(accuracy_score(y, outputs.argmax(1)), abs=1e-15)
    assert scores["metrics"]["auc"] == pytest.approx(roc_auc_score(y, outputs[:, 1] - outputs[:, 0]), abs=1e-15)
    # which under cross-entropy is the order of class 1's probability
    assert scores["metrics"]["auc"] == pytest.approx(roc_auc_score(y, outputs.softmax(1)[:, 1]), abs=1e-15)


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_many_classes_are_one_against_the_rest(loss: str) -> None:
    outputs = drawn(400, 5)
    y = classes_of(outputs, 5)
    scores = evaluate(Known(), outputs, y, loss, "classification")
    probabilities = outputs.softmax(1).numpy()
    ranked = probabilities if loss == "cross-entropy" else outputs.numpy()
    by_class = [roc_auc_score(y == number, ranked[:, number]) for number in range(5)]
    assert scores["metrics"]["auc"] == pytest.approx(np.mean(by_class), abs=1e-15)
    if loss == "cross-entropy":
        assert scores["metrics"]["auc"] == pytest.approx(roc_auc_score(y, probabilities, multi_class="ovr"), abs=1e-15)
    predicted = outputs.argmax(1).numpy()
    assert scores["metrics"]["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(y, predicted), abs=1e-15)
    expected = nn.functional.cross_entropy(outputs, torch.tensor(y)) if loss == "cross-entropy" else (
        (outputs - nn.functional.one_hot(torch.tensor(y), 5)).square().sum(1).mean() / 2
    )  # fmt: skip
    assert scores["loss"] == pytest.approx(float(expected), rel=1e-14)
    assert ("mse" in scores) == (loss == "mse")


@pytest.mark.parametrize("outputs", [1, 2, 4])
def test_rows_of_equal_scores_share_their_rank(outputs: int) -> None:
    few = torch.tensor([-1.0, -0.0, 0.0, 0.5])[
        torch.randint(4, (90, outputs), generator=torch.Generator().manual_seed(3))
    ]
    y = classes_of(few.double(), max(outputs, 2))
    scores = few[:, -1] - few[:, 0] * (outputs == 2) if outputs < 3 else few
    by_class = (
        [roc_auc_score(y == k, scores[:, k]) for k in range(outputs)] if outputs > 2 else roc_auc_score(y, scores)
    )
    found = evaluate(Known(), few, y, "mse", "classification")["metrics"]["auc"]
    assert found == pytest.approx(np.mean(by_class), abs=1e-15)


@pytest.mark.parametrize(("classes", "there"), [(19, False), (20, True), (21, True)])
def test_top_5_comes_from_20_classes_on(classes: int, there: bool) -> None:
    outputs = drawn(500, classes)
    y = classes_of(outputs, classes)
    scores = evaluate(Known(), outputs, y, "cross-entropy", "classification")
    assert ("top5" in scores) == there
    if there:
        assert scores["top5"] == pytest.approx(top_k_accuracy_score(y, outputs.numpy(), k=5), abs=1e-15)
        assert scores["top5"] > scores["accuracy"]


def test_one_hot_rows_are_classes() -> None:
    outputs = drawn(60, 3)
    y = classes_of(outputs, 3)
    assert evaluate(Known(), outputs, np.eye(3)[y], "mse", "classification") == evaluate(
        Known(), outputs, y, "mse", "classification"
    )


def test_a_class_without_a_row_has_no_curve() -> None:
    outputs, y = drawn(30, 3), np.zeros(30, np.int64)
    scores = evaluate(Known(), outputs, y, "cross-entropy", "classification")
    assert set(scores["metrics"]) == {"brier", "calibration_error"}  # one class alone has neither of the others


def test_a_predicted_class_that_no_row_has_is_nothing_to_warn_of() -> None:
    outputs, y = drawn(30, 3), np.arange(30) % 2
    scores = evaluate(Known(), outputs, y, "cross-entropy", "classification")
    predicted = outputs.argmax(1).numpy()
    recalls = [(predicted[y == number] == number).mean() for number in (0, 1)]
    assert set(scores["metrics"]) == {"balanced_accuracy", "f1_macro", "brier", "calibration_error"}
    assert scores["metrics"]["balanced_accuracy"] == pytest.approx(np.mean(recalls), abs=1e-15)


@pytest.mark.parametrize(("loss", "outputs"), [("cross-entropy", 2), ("cross-entropy", 4), ("mse", 1), ("mse", 3)])
def test_probabilities_are_judged_by_brier_and_calibration(loss: str, outputs: int) -> None:
    said, y = drawn(400, outputs), np.random.default_rng(2).integers(0, max(outputs, 2), 400)
    metrics = evaluate(Known(), said, y, loss, "classification")["metrics"]
    chances = probabilities(said.numpy(), loss)
    assert metrics["brier"] == pytest.approx(brier_score_loss(y, chances, scale_by_half=False), rel=1e-12)
    sure, right = chances.max(axis=1), predicted(said.numpy()) == y
    error = 0.0
    for low in np.arange(10) / 10:
        inside = (sure >= low) & ((sure < low + 0.1) | (low == 0.9))
        if inside.any():
            error += inside.mean() * abs(sure[inside].mean() - right[inside].mean())
    assert metrics["calibration_error"] == pytest.approx(error, abs=1e-9)


def test_probabilities_that_are_right_are_calibrated() -> None:
    random = np.random.default_rng(0)
    chances = random.dirichlet(np.ones(3), 20_000)
    y = (chances.cumsum(axis=1) < random.random((20_000, 1))).sum(axis=1)
    metrics = evaluate(Known(), torch.tensor(np.log(chances)), y, "cross-entropy", "classification")["metrics"]
    # Each bin's gap has a deviation of at most 1/(2 sqrt(rows in it)); over ten bins the sum is below 4 of these.
    assert metrics["calibration_error"] < 4 * 0.5 * np.sqrt(10 / 20_000)
    overconfident = evaluate(Known(), torch.tensor(5 * np.log(chances)), y, "cross-entropy", "classification")[
        "metrics"
    ]
    assert overconfident["calibration_error"] > 0.2


@pytest.mark.parametrize("outputs", [1, 3])
def test_regression_is_torchs_mean_squared_error(outputs: int) -> None:
    said, wanted = drawn(50, outputs), drawn(50, outputs, 1)
    scores = evaluate(Known(), said, wanted.numpy(), "mse", "regression")
    assert set(scores) == {"rows", "loss", "mse", "metrics"}
    assert scores["mse"] == pytest.approx(float(nn.MSELoss()(said, wanted)), rel=1e-14)
    assert scores["loss"] == pytest.approx(scores["mse"] * outputs / 2, rel=1e-14)
    assert scores["metrics"] == {}
    flat = evaluate(Known(), drawn(50, 1), drawn(50, 1, 1).numpy()[:, 0], "mse", "regression")
    assert flat["mse"] == pytest.approx(float(nn.MSELoss()(drawn(50, 1), drawn(50, 1, 1))), rel=1e-14)


def test_rows_that_do_not_fit_are_the_test_rows() -> None:
    with pytest.raises(ParameterError, match="`test`: expected classes 0 to 2"):
        evaluate(Known(), drawn(3, 3), np.array([0, 1, 3]), "mse", "classification")


def test_a_model_is_asked_in_eval_mode_and_left_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.9)).double()
    inputs = drawn(CHUNK + 3, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    outputs = outputs_of(model, inputs)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert outputs.shape == inputs.shape  # also past one chunk
    assert not outputs.requires_grad
    assert torch.equal(outputs, outputs_of(model.eval(), inputs))
    assert not model.training


def test_the_largest_relative_difference_is_over_tensors() -> None:
    reference = {
        "a": np.array([1.0, -4.0]), "b": np.array([100.0]), "zero": np.zeros(2), "whole": np.array(7),
        "none": np.zeros(0),
    }  # fmt: skip
    assert largest_relative_difference(reference, reference) == 0
    ours = {**reference, "a": np.array([1.5, -4.0]), "b": np.array([101.0]), "whole": np.array(9)}
    assert largest_relative_difference(ours, reference) == 0.125  # 0.5 of 4, not 1 of 100
    assert largest_relative_difference({**ours, "zero": np.array([0.0, 0.25])}, reference) == 0.25


@pytest.mark.parametrize("lost", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_no_small_difference(lost: float) -> None:
    good, bad = {"a": np.array([1.0, 2.0]), "b": np.ones(1)}, {"a": np.array([lost, 2.0]), "b": np.ones(1)}
    for ours, theirs in ((good, bad), (bad, good), (bad, bad)):
        assert largest_relative_difference(ours, theirs) == np.inf


@pytest.mark.parametrize("lost", [np.nan, 3e38], ids=["NaN", "overflow"])
@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("order", [["good", "lost", "poor"], ["lost", "good", "poor"], ["good", "poor", "lost"]])
def test_the_worst_model_is_one_whose_loss_is_not_finite(lost: float, task: str, order: list[str]) -> None:
    scales = {"good": 1.0, "poor": -1.0, "lost": lost}
    models = {name: {"weight": np.full((1, 1), scales[name], np.float32)} for name in order}
    x = np.array([[1.0], [2.0], [0.0]], np.float32)
    y = x if task == "regression" else np.array([1, 1, 0])
    found = Evaluator(nn.Linear(1, 1, bias=False), CGD(loss="mse"), task, Preparation.nothing).of_models(models, (x, y))
    assert found["worst"]["silo"] == "lost"
    assert not np.isfinite(found["loss"])


def test_confined_models_have_a_figure_of_their_own_part_of_the_rows_each() -> None:
    """The authors' figure of CGD: model i of m sees the i-th m-th part of the test rows alone."""
    model, rows = nn.Linear(2, 3), 11
    x, y = drawn(rows, 2).numpy(), np.arange(rows) % 3
    models = {f"row-{i}": {"weight": drawn(3, 2, i).numpy(), "bias": drawn(1, 3, i)[0].numpy()} for i in range(4)}
    evaluator = Evaluator(model, CGD(), "classification", Preparation.nothing)
    found = evaluator.of_models(models, (x, y))
    cuts = [slice(0, 2), slice(2, 5), slice(5, 8), slice(8, 11)]
    each = [evaluator.of_model(one, (x[cut], y[cut])) for one, cut in zip(models.values(), cuts, strict=True)]
    for key in ("accuracy", "loss"):
        assert found["slices"][key] == pytest.approx(np.mean([one[key] for one in each]))
        assert found["mean"][key] == pytest.approx(np.mean([one[key] for one in found["per_silo"].values()]))
    line = evaluator.on_the_way(models, (x, y), None)
    assert line["test_slices_accuracy"] == found["slices"]["accuracy"]
    assert "slices" not in evaluator.of_models(models, (x[:3], y[:3]))  # fewer rows than models
    assert "slices" not in evaluator.of_models(dict(list(models.items())[:1]), (x, y))
    common = Evaluator(model, FedSGD(loss="cross-entropy"), "classification", Preparation.nothing)
    assert "slices" not in common.of_models({"": models["row-0"]}, (x, y))
    assert [slices(10, 3), slices(2, 3), slices(5, 1)] == [[slice(0, 3), slice(3, 6), slice(6, 10)], [], []]
