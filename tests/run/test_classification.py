"""F1, the confusion matrix and calibration: by hand, and as scikit-learn has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.calibration import calibration_curve
from sklearn.metrics import (
    average_precision_score,
    confusion_matrix,
    f1_score,
    precision_recall_fscore_support,
    roc_curve,
)
from torch import Tensor, nn

from moretta import CGD, FedSGD
from moretta.data.tables.preparation import Preparation
from moretta.run.evaluation import Evaluator, evaluate
from moretta.run.metrics import CONFUSION_UP_TO, _of_classes, curves


class Known(nn.Module):
    """A model whose outputs are its inputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


def scores(outputs: Any, y: Any, loss: str = "mse", task: str = "classification", **more: Any) -> dict[str, Any]:
    return evaluate(Known(), torch.as_tensor(outputs, dtype=torch.float64), np.asarray(y), loss, task, **more)


def drawn(rows: int, classes: int, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Outputs, and classes that they say something about."""
    random = np.random.default_rng(seed)
    outputs = random.normal(size=(rows, classes))
    return outputs, (outputs + random.normal(size=(rows, classes))).argmax(axis=1)


def test_two_classes_by_hand() -> None:
    # Of class 1 two are found and one is missed; of class 0 one is taken for class 1, and one is not.
    found = scores([[0.9], [0.75], [0.2], [0.6], [0.1]], [1, 1, 1, 0, 0])
    assert found["classes"]["confusion"] == [[1, 1], [1, 2]]
    assert found["metrics"]["f1"] == pytest.approx(2 / 3)  # precision 2/3, recall 2/3
    assert found["metrics"]["f1_macro"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert found["classes"]["by_class"] == [
        {"class": "0", "rows": 2, "predicted": 2, "precision": 0.5, "recall": 0.5, "f1": 0.5},
        {"class": "1", "rows": 3, "predicted": 3, "precision": 2 / 3, "recall": 2 / 3, "f1": pytest.approx(2 / 3)},
    ]
    # How sure: 0.9 (right), 0.75 (right), 0.8 (wrong), 0.6 (wrong), 0.9 (right).
    table = found["classes"]["reliability"]
    assert [(one["from"], one["rows"], one["accuracy"]) for one in table] == [
        (0.6, 1, 0.0), (0.7, 1, 1.0), (0.8, 1, 0.0), (0.9, 2, 1.0),
    ]  # fmt: skip
    assert [one["probability"] for one in table] == pytest.approx([0.6, 0.75, 0.8, 0.9])
    assert found["metrics"]["calibration_error"] == pytest.approx((0.6 + 0.25 + 0.8 + 2 * 0.1) / 5)


def test_several_classes_by_hand_with_one_that_nobody_has() -> None:
    said = np.eye(4)[[0, 0, 1, 3, 1]]
    found = scores(said, [0, 1, 1, 0, 1], names=["ash", "birch", "cedar", "fir"])
    assert found["classes"]["confusion"] == [[1, 0, 0, 1], [1, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    by_class = {one["class"]: (one["precision"], one["recall"], one["f1"]) for one in found["classes"]["by_class"]}
    assert by_class == {
        "ash": (0.5, 0.5, 0.5),
        "birch": (1.0, 2 / 3, 0.8),
        "cedar": (None, None, None),  # neither had nor predicted, so it is in no mean
        "fir": (0.0, None, 0.0),
    }
    assert found["metrics"]["f1_macro"] == pytest.approx((0.5 + 0.8 + 0.0) / 3)
    assert "f1" not in found["metrics"]  # of which class, with more than two?


@pytest.mark.parametrize(("loss", "classes"), [("cross-entropy", 2), ("cross-entropy", 7), ("mse", 3), ("mse", 1)])
def test_all_is_as_scikit_learn_has_it(loss: str, classes: int) -> None:
    outputs, y = drawn(400, max(classes, 2))
    outputs = outputs[:, -classes:]
    chosen = (outputs[:, 0] > 0.5).astype(int) if classes == 1 else outputs.argmax(axis=1)
    found = scores(outputs, y, loss)
    assert found["classes"]["confusion"] == confusion_matrix(y, chosen).tolist()
    assert found["metrics"]["f1_macro"] == pytest.approx(f1_score(y, chosen, average="macro"), abs=1e-15)
    if classes <= 2:
        assert found["metrics"]["f1"] == pytest.approx(f1_score(y, chosen), abs=1e-15)
    by_class = found["classes"]["by_class"]
    expected = precision_recall_fscore_support(y, chosen)
    for name, column in zip(("precision", "recall", "f1", "rows"), expected, strict=True):
        assert [one[name] for one in by_class] == pytest.approx(column.tolist(), abs=1e-15)


def test_the_reliability_table_is_scikit_learns_curve() -> None:
    outputs, y = drawn(500, 4)
    chances = torch.tensor(outputs).softmax(1).numpy()
    right = (chances.argmax(axis=1) == y).astype(int)
    fraction, mean = calibration_curve(right, chances.max(axis=1), n_bins=10)
    table = scores(outputs, y, "cross-entropy")["classes"]["reliability"]
    assert [one["accuracy"] for one in table] == pytest.approx(fraction.tolist(), abs=1e-12)
    assert [one["probability"] for one in table] == pytest.approx(mean.tolist(), abs=1e-12)
    assert sum(one["rows"] for one in table) == 500


def test_classes_clipped_to_one_probability_are_right_where_the_accuracy_has_them_right() -> None:
    """Row by row the first of such classes counted as predicted: 0 of these 3 rows, in a run with an accuracy of 1."""
    found = scores([[1.2, 1.5, 0.0], [-0.3, -0.1, -0.2], [-0.3, -0.2, -0.1]], [1, 1, 2])
    assert found["accuracy"] == 1.0
    assert [one["accuracy"] for one in found["classes"]["reliability"]] == [1.0, 1.0]
    assert found["metrics"]["calibration_error"] == pytest.approx((0.5 + 2 * 2 / 3) / 3)


def test_soft_labels_count_as_their_likeliest_class() -> None:
    outputs, y = drawn(60, 3)
    soft = 0.6 * np.eye(3)[y] + 0.4 / 3
    hard, found = scores(outputs, y, "cross-entropy"), scores(outputs, soft, "cross-entropy")
    assert {key: found[key] for key in ("accuracy", "metrics", "classes")} == {
        key: hard[key] for key in ("accuracy", "metrics", "classes")
    }
    of_one = scores([[0.9], [0.2], [0.8]], np.array([0.7, 0.4, 0.3]))  # a probability of class 1 a row
    assert of_one["classes"]["confusion"] == [[1, 1], [0, 1]]
    assert of_one["accuracy"] == pytest.approx(2 / 3)


def test_numbers_have_none_of_it() -> None:
    found = scores(np.zeros((5, 2)), np.ones((5, 2)), task="regression")
    assert found["metrics"] == {}
    assert "classes" not in found


def test_a_model_that_diverged_has_no_calibration() -> None:
    found = scores([[np.nan, 0.0], [1.0, 0.0], [0.0, 1.0]], [0, 0, 1], "cross-entropy")
    assert found["classes"]["confusion"] == [[2, 0], [0, 1]]
    assert "reliability" not in found["classes"]
    assert {"brier", "calibration_error", "auc"}.isdisjoint(found["metrics"])


def test_of_very_many_classes_there_is_no_matrix() -> None:
    outputs, y = drawn(200, CONFUSION_UP_TO + 1)
    found = scores(outputs, y, "cross-entropy")["classes"]
    assert "confusion" not in found
    assert len(found["by_class"]) == CONFUSION_UP_TO + 1


def test_tables_are_of_one_model() -> None:
    x, y = np.eye(3)[[0, 1, 2, 2]], np.array([0, 1, 2, 1])
    good, bad = ({"weight": one, "bias": np.zeros(3)} for one in (np.eye(3), -np.eye(3)))
    model = nn.Linear(3, 3).double()
    confined = Evaluator(model, CGD(), "classification", Preparation.nothing).of_models({"a": good, "b": bad}, (x, y))
    assert confined["worst"]["silo"] == "b"
    assert confined["classes"]["confusion"][0][0] == 0
    common = Evaluator(model, FedSGD(loss="mse"), "classification", Preparation.nothing, names=["x", "y", "z"])
    one = common.of_models({"": good}, (x, y))
    assert [row["class"] for row in one["classes"]["by_class"]] == ["x", "y", "z"]
    several = common.of_models({"a": good, "b": bad}, (x, y))
    assert "classes" not in several
    assert all("classes" not in score for score in several["per_silo"].values())


@pytest.mark.parametrize(("loss", "classes"), [("cross-entropy", 2), ("cross-entropy", 7), ("mse", 3), ("mse", 1)])
def test_rows_that_are_drawn_again_are_measured_as_their_copies(loss: str, classes: int) -> None:
    outputs, y = drawn(300, max(classes, 2))
    outputs = np.round(outputs[:, -classes:], 1)  # with ties
    times = np.random.default_rng(1).integers(0, 3, (4, 300))
    found = _of_classes(outputs, y, loss)(times.astype(float))
    for place, each in enumerate(times):
        copied = scores(np.repeat(outputs, each, axis=0), np.repeat(y, each), loss)
        expected = {"accuracy": copied["accuracy"], **copied["metrics"]}
        expected.pop("calibration_error", None)  # it has no interval
        assert {name: values[place] for name, values in found.items()} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("classes", [1, 4])
def test_average_precision_and_curves_are_scikit_learns(classes: int) -> None:
    outputs, y = drawn(400, max(classes, 2))
    outputs = np.round(outputs[:, -classes:], 1)
    ranks = [(y == 1, outputs[:, 0])] if classes == 1 else [(y == k, outputs[:, k]) for k in range(classes)]
    expected = np.mean([average_precision_score(*one) for one in ranks])
    assert scores(outputs, y)["metrics"]["average_precision"] == pytest.approx(expected, abs=1e-12)
    found = curves(outputs, y, "mse")
    at = np.linspace(0, 1, len(found["roc"]))
    roc = [np.interp(at, *roc_curve(*one, drop_intermediate=False)[:2]) for one in ranks]
    assert found["roc"] == pytest.approx(np.mean(roc, axis=0), abs=1e-4)
    assert np.trapezoid(found["roc"], at) == pytest.approx(scores(outputs, y)["metrics"]["auc"], abs=0.02)
    assert np.mean(found["precision_recall"]) == pytest.approx(expected, abs=0.03)
    assert curves(outputs, np.zeros(400, int), "mse") == {}


def test_a_run_s_last_figures_have_intervals_over_people() -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(40, 3)), np.arange(40) % 3
    weights = {"weight": np.eye(3), "bias": np.zeros(3)}
    evaluator = Evaluator(nn.Linear(3, 3).double(), FedSGD(loss="mse"), "classification", Preparation.nothing)

    def ended(copies: int, whom: Any = None) -> dict[str, Any]:
        rows = np.repeat(x, copies, axis=0), np.repeat(y, copies)
        return evaluator.at_the_end({"": weights}, rows, None, {}, [], whom)

    once, thrice = ended(1), ended(3, np.repeat([f"p{number}" for number in range(40)], 3))
    assert (once["units"], thrice["units"], thrice["rows"]) == (40, 40, 120)
    assert set(once["intervals"]) == {"accuracy", *once["metrics"]} - {"calibration_error"}
    for name, (low, high) in once["intervals"].items():
        assert low < high
        assert thrice["intervals"][name] == pytest.approx([low, high])  # copies of people make none narrower
    low, high = once["intervals"]["accuracy"]
    assert low < once["accuracy"] < high
    low, high = ended(3)["intervals"]["accuracy"]
    assert high - low < 0.8 * (once["intervals"]["accuracy"][1] - once["intervals"]["accuracy"][0])
    assert once["baseline"] == pytest.approx(14 / 40)
    several = evaluator.at_the_end({"a": weights, "b": weights}, (x, y), None, {}, [])
    assert "intervals" not in several  # they would be of no one model
    numbers = Evaluator(nn.Linear(3, 3).double(), FedSGD(), "regression", Preparation.nothing)
    varied = numbers.at_the_end({"": weights}, (x, x + np.arange(40)[:, None] / 40), None, {}, [])
    low, high = varied["intervals"]["mse"]
    assert low < varied["mse"] < high
    found = numbers.at_the_end({"": weights}, (x, x + 1.0), None, {}, [])
    assert "mse" not in found["intervals"]  # it is 1 in each resample
    assert found["baseline"] == pytest.approx(x.var(axis=0).mean())
    assert "curves" not in found
