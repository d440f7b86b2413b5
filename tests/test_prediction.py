"""`moretta predict`: the outputs that the model has, for rows however they come; and data from end to end."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from test_cli import RUN, call, patients
from torch import nn

from moretta import Federation, FedSGD, Silo
from moretta.data import datasets
from moretta.data.settings import Data
from moretta.engines.run_folder import read_json, read_model
from moretta.errors import ParameterError, RowsError
from moretta.protocols.common.targets import probabilities
from moretta.run.export import export
from moretta.run.prediction import predict
from moretta.run.trained_model import ModelChoice, load

Train = Callable[..., Path]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """train("section.key=value", ...): a run file beside the test's data, run; the run's folder."""
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "patients.csv").write_text(patients())
    monkeypatch.chdir(tmp_path)

    def trained(*changes: str, folder: str = "mine") -> Path:
        sets = [word for change in changes for word in ("--set", change)]
        done = call("train", "run.toml", *sets, "--out", folder, "--json")
        assert done.code == 0, done.err
        return tmp_path / folder

    return trained


def outputs(run: Path, rows: str, **options: Any) -> np.ndarray:
    shape = predict(run, Path(rows), Path("outputs.npy"), ModelChoice(**options))
    found: np.ndarray = np.load("outputs.npy")
    assert found.shape == shape[:2]
    return found


def by_hand(run: Path, x: np.ndarray, model: str = "model.safetensors") -> np.ndarray:
    """The outputs of the two-layer network in a run folder, with nothing but torch."""
    inputs, tensors = read_json(run / "inputs.json"), read_model(run, model)
    x = (np.where(np.isnan(x), inputs["fill"], x.astype(np.float64)) - inputs["mean"]) / inputs["deviation"]
    weights = {name: torch.tensor(array, dtype=torch.float64) for name, array in tensors.items()}
    h = torch.relu(torch.tensor(x) @ weights["0.weight"].T + weights["0.bias"])
    return (h @ weights["2.weight"].T + weights["2.bias"]).numpy()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-12)])
@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_the_released_model_predicts_what_the_true_one_does(
    train: Train, dtype: str, tolerance: float, loss: str
) -> None:
    run = train("data.target=ward", f"protocol.loss={loss}", f"run.dtype={dtype}")
    true, released = outputs(run, "patients.csv", true_model=True), outputs(run, "patients.csv")
    assert true.shape == (60, 3)
    assert true.dtype == dtype
    assert np.abs(true - released).max() <= tolerance * np.abs(true).max()
    tensors = [read_model(run, f"{name}.safetensors") for name in ("model", "released")]
    assert np.abs(tensors[0]["0.weight"] - tensors[1]["0.weight"]).max() > 0.01  # and the numbers are others


def test_a_table_is_read_by_its_columns_in_any_order(train: Train) -> None:
    run = train()
    assert read_json(run / "inputs.json")["columns"] == ["age", "ward=east", "ward=north", "ward=west", "pressure"]
    found = outputs(run, "patients.csv", true_model=True)
    rows = list(csv.DictReader(patients().splitlines()))
    x = [
        [float(r["age"]), *(float(r["ward"] == w) for w in ("east", "north", "west")), float(r["pressure"])]
        for r in rows
    ]
    assert found == pytest.approx(by_hand(run, np.array(x)), abs=1e-6)
    # no target, another order, spaces, another delimiter, a byte order mark
    lines = ["pressure; ward ;further;age", *(f"{r['pressure']}; {r['ward']};?;{r['age']}" for r in rows)]
    Path("other.csv").write_text("\r\n".join([*lines, ""]), encoding="utf-8-sig")
    assert np.array_equal(outputs(run, "other.csv", true_model=True), found)
    # one row at a time, with a single category in it
    Path("one.csv").write_text("\n".join(lines[:2]) + "\n")
    assert outputs(run, "one.csv", true_model=True) == pytest.approx(found[:1], abs=1e-6)


def test_names_with_an_equals_sign_are_no_categories(train: Train) -> None:
    text = patients().replace("age,ward", "age=years,ward=1").replace("north", "a=b")
    Path("patients.csv").write_text(text)
    run = train()
    assert read_json(run / "inputs.json")["columns"][:2] == ["age=years", "ward=1=a=b"]
    assert outputs(run, "patients.csv").shape == (60, 1)


def test_outputs_as_a_table_hold_every_digit(train: Train) -> None:
    run = train("data.target=ward")
    predict(run, Path("patients.csv"), Path("outputs.csv"))
    header, *lines = Path("outputs.csv").read_text().splitlines()
    assert header == "prediction,probability_east,probability_north,probability_west"
    cells = [line.split(",") for line in lines]
    given = outputs(run, "patients.csv")
    table = np.array([[float(cell) for cell in line[1:]] for line in cells])
    assert np.array_equal(table, probabilities(given, "mse"))
    assert table.sum(axis=1) == pytest.approx(1.0)
    assert [line[0] for line in cells] == [("east", "north", "west")[k] for k in given.argmax(axis=1)]


def test_probabilities_are_the_softmax_or_what_the_squared_error_estimates() -> None:
    given = np.array([[2.0, 0.0, -1.0], [0.0, 0.0, 0.0]])
    expected = torch.softmax(torch.tensor(given), 1).numpy()
    np.testing.assert_allclose(probabilities(given, "cross-entropy"), expected, rtol=1e-15)
    single = probabilities(np.array([[0.25], [1.5], [-0.5]]), "mse")
    np.testing.assert_array_equal(single, [[0.75, 0.25], [0.0, 1.0], [1.0, 0.0]])
    several = probabilities(np.array([[0.5, 0.5, -3.0], [-1.0, -1.0, -1.0]]), "mse")
    np.testing.assert_allclose(several, [[0.5, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3]])


def with_gaps(every: int = 5) -> list[dict[str, str]]:
    rows = list(csv.DictReader(patients().splitlines()))
    for number, row in enumerate(rows):
        if number % every == 0:
            row["age"] = ("", "NA", "?")[number % 3]
        if number % 11 == 0:
            row["ward"] = ""
    write("gaps.csv", rows)
    return rows


def write(name: str, rows: list[dict[str, str]]) -> None:
    with Path(name).open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize("missing", ["mean", "indicator"])
def test_absent_values_from_end_to_end(train: Train, missing: str) -> None:
    rows = with_gaps()
    run = train("data.source=gaps.csv", f"data.missing={missing}")
    marked = ["age=missing"] * (missing == "indicator")
    columns = ["age", *marked, "ward=east", "ward=north", "ward=west", "ward=missing", "pressure"]
    inputs = read_json(run / "inputs.json")
    assert inputs["columns"] == columns
    assert np.isfinite(read_json(run / "result.json")["test"]["loss"])
    absent = np.array([row["age"] in ("", "NA", "?") for row in rows])
    ages = np.array([np.nan if gone else float(row["age"]) for row, gone in zip(rows, absent, strict=True)])
    trained = datasets.load(Data(source="gaps.csv", missing=missing), seed=7).train.x[:, 0]  # type: ignore[arg-type]
    trained = trained[~np.isnan(trained)]
    assert inputs["fill"][0] == pytest.approx(trained.mean(), abs=1e-5)
    wards = [[float((row["ward"] or "missing") == w) for w in ("east", "north", "west", "missing")] for row in rows]
    blocks = [ages, *([absent] if marked else []), wards, [float(row["pressure"]) for row in rows]]
    x = np.column_stack(blocks)
    found = outputs(run, "gaps.csv", true_model=True)
    assert found == pytest.approx(by_hand(run, x), abs=1e-6)
    write("one.csv", rows[:1])  # what is filled in does not depend on who else is in the file
    assert outputs(run, "one.csv", true_model=True) == pytest.approx(found[:1], abs=1e-6)
    whole = [row | {"age": row["age"] or "1"} for row in rows if row["age"] not in ("NA", "?")]
    write("whole.csv", [row for row in whole if row["ward"]])
    assert np.isfinite(outputs(run, "whole.csv")).all()  # a file without gaps has the same columns


@pytest.mark.parametrize("missing", ["mean", "indicator"])
def test_absent_values_in_arrays(train: Train, missing: str) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 4)).astype(np.float32)
    x[::7, 2] = np.nan
    np.savez("rows.npz", x=x, y=random.integers(0, 2, 60))
    run = train("data.source=rows.npz", f"data.missing={missing}")
    marked = [np.isnan(x[:, 2])] if missing == "indicator" else []
    given = np.column_stack([x[:, :3], *marked, x[:, 3]])
    found = outputs(run, "rows.npz", true_model=True)
    assert found == pytest.approx(by_hand(run, given), abs=1e-6)
    lines = ["x0,x1,x2,x3", *(",".join("" if np.isnan(v) else repr(float(v)) for v in row) for row in x)]
    Path("rows.csv").write_text("\n".join(lines) + "\n")
    assert np.array_equal(outputs(run, "rows.csv", true_model=True), found)


def test_classes_are_scored_by_area_and_balance_and_by_silo(train: Train) -> None:
    run = train("run.rounds=20")
    test = read_json(run / "result.json")["test"]
    dataset = datasets.load(Data(source="patients.csv"), seed=7)
    found = by_hand(run, dataset.test.x)[:, 0]
    assert test["rows"] == len(dataset.test.x) == 12
    assert test["accuracy"] == pytest.approx(((found > 0.5) == dataset.test.y).mean())
    assert test["metrics"]["auc"] == pytest.approx(roc_auc_score(dataset.test.y, found))
    assert test["metrics"]["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(dataset.test.y, found > 0.5))
    assert test["mse"] == pytest.approx(np.square(found - dataset.test.y).mean(), rel=1e-5)
    assert test["loss"] == pytest.approx(test["mse"] / 2)
    assert test["per_silo"].keys() == {"silo-1", "silo-2", "silo-3"}
    for scores in test["per_silo"].values():
        assert scores["rows"] == 16
        assert {"loss", "accuracy", "metrics"} <= scores.keys()
        named = {"auc", "average_precision", "balanced_accuracy", "f1", "f1_macro", "brier", "calibration_error"}
        assert named == scores["metrics"].keys()


def test_regression_from_a_table(train: Train) -> None:
    run = train("data.target=pressure")
    record = read_json(run / "result.json")
    dataset = datasets.load(Data(source="patients.csv", target="pressure"), seed=7)
    found = by_hand(run, dataset.test.x)[:, 0]
    assert record["task"] == "regression"
    assert record["test"]["mse"] == pytest.approx(np.square(found - dataset.test.y).mean(), rel=1e-5)
    assert "accuracy" not in record["test"]
    assert record["test"]["metrics"] == {}
    assert outputs(run, "patients.csv").shape == (60, 1)


@pytest.fixture
def large_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The saved model of a run whose weights are large, so that outputs of large numbers are infinite."""
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
    network = nn.Linear(2, 2)
    nn.init.constant_(network.weight, 30.0)
    silos = [Silo(name, x, np.arange(12) % 2) for name in ("a", "b", "c")]
    made = Federation(network, silos, FedSGD(loss="cross-entropy"), feature_names=["age", "pressure"])
    return made.train(1, progress=False).save(tmp_path / "saved")


def test_rows_whose_outputs_are_not_finite_have_no_prediction(large_weights: Path) -> None:
    Path("some.csv").write_text("age,pressure\nold,1\n1e38,0\n1,0\n0,1\n0,-1e38\n1,1\n")
    Path("good.csv").write_text("age,pressure\n1,0\n0,1\n1,1\n")
    Path("none.csv").write_text("age,pressure\n1e38,0\n0,-1e38\n")
    done = call("predict", large_weights, "--allow-code", "--data", "some.csv", "--out", "p.csv", "--json")
    assert done.code == 3
    why = json.loads(done.out)["left_out"]
    assert list(why) == ["1", "2", "5"]
    assert {why["2"], why["5"]} == {"the model's outputs are not finite"}
    assert [line.partition(",")[0] for line in Path("p.csv").read_text().splitlines()] == ["row", "3", "4", "6"]
    choice = ModelChoice(allow_code=True)
    for name in ("some", "good"):
        predict(large_weights, Path(f"{name}.csv"), Path(f"{name}.npy"), choice)
    whole = np.load("some.npy")
    np.testing.assert_array_equal(np.isnan(whole).all(axis=1), [True, True, False, False, True, False])
    np.testing.assert_array_equal(whole[[2, 3, 5]], np.load("good.npy"))
    with pytest.raises(
        RowsError, match=r"^none.csv: the model's outputs are not finite in 2 of 2 rows, first in row 1 "
    ):
        predict(large_weights, Path("none.csv"), Path("none.csv.npy"), choice)
    assert not Path("none.csv.npy").exists()


def test_rows_whose_outputs_are_not_finite_are_not_scored(large_weights: Path) -> None:
    x = np.array([[1, 0], [0, 1], [1e38, 0]], np.float32)
    np.savez("three.npz", x=x, y=[0, 1, 1])
    refused = call("evaluate", large_weights, "--allow-code", "--data", "three.npz")
    assert refused.code == 2
    said = "the model's outputs are not finite in 1 of 3 rows, first in row 3 (counted from 1)"
    assert f"three.npz: {said}" in refused.sentence
    model = load(large_weights, allow_code=True)
    for method in (model.predict, model.predict_proba, lambda rows: model.evaluate(rows, [0, 1, 1])):
        with pytest.raises(RowsError, match=re.escape(f"x: {said}")):
            method(x)


def arrays(outputs: int = 3, rows: int = 60) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(rows, 4)).astype(np.float32), random.integers(0, outputs, rows)
    return {"x_train": x[20:], "y_train": y[20:], "x_test": x[:20], "y_test": y[:20]}


def test_arrays_with_a_test_part_are_scored_on_it(train: Train) -> None:
    given = arrays()
    np.savez("four.npz", **given)
    run = train("data.source=four.npz")
    np.savez("test.npz", x=given["x_test"])
    found = outputs(run, "test.npz")
    assert found == pytest.approx(by_hand(run, given["x_test"]), abs=1e-6)
    accuracy = (found.argmax(1) == given["y_test"]).mean()
    assert read_json(run / "result.json")["test"]["accuracy"] == pytest.approx(accuracy)


MODULE = """
import numpy as np
from torch import nn

def rows():
    given = np.load("four.npz")
    return [given[name] for name in ("x_train", "y_train", "x_test", "y_test")]

def network(width=3):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))

def words():
    return nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(8, 3))
"""


def test_data_and_model_of_a_module_beside_the_run_file(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arrays()
    np.savez("four.npz", **given)
    Path("prediction_mine.py").write_text(MODULE)
    Path("run.toml").write_text(RUN.replace("hidden = [4]\n", ""))
    run = train("data.source=prediction_mine:rows", "model.source=prediction_mine:network", "model.width=6")
    assert read_model(run, "model.safetensors")["0.weight"].shape == (6, 4)
    assert read_json(run / "inputs.json")["mean"] == [0]  # what a function prepared is not standardised
    np.savez("test.npz", x=given["x_test"])
    expected = by_hand(run, given["x_test"])
    with pytest.raises(ParameterError, match=r"names code that would be run as you: network of .*--allow-code"):
        outputs(run, "test.npz")
    assert outputs(run, "test.npz", allow_code=True) == pytest.approx(expected, abs=1e-6)
    elsewhere = Path("elsewhere").absolute()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)  # the run remembers where its module is
    assert outputs(run, "../test.npz", allow_code=True) == pytest.approx(expected, abs=1e-6)


def test_tokens_stay_whole_numbers(train: Train) -> None:
    random = np.random.default_rng(0)
    words, classes = random.integers(0, 9, (60, 4)), random.integers(0, 3, 60)
    np.savez("words.npz", x=words, y=classes)
    Path("prediction_words.py").write_text(MODULE)
    Path("run.toml").write_text(RUN.replace("hidden = [4]\n", ""))
    run = train("data.source=words.npz", "model.source=prediction_words:words", "protocol.name=fedsgd")
    tensors = {name: torch.tensor(array) for name, array in read_model(run, "model.safetensors").items()}
    expected = tensors["0.weight"][words].flatten(1) @ tensors["2.weight"].T + tensors["2.bias"]
    assert outputs(run, "words.npz", allow_code=True) == pytest.approx(expected.numpy(), abs=1e-6)
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    export(run, Path("words.onnx"), ModelChoice(allow_code=True))
    (found,) = runtime.InferenceSession("words.onnx").run(None, {"x": words})
    assert found == pytest.approx(expected.numpy(), abs=1e-6)
    np.savez("floats.npz", x=words.astype(np.float32))
    with pytest.raises(ParameterError, match="save numbers as floats, and tokens as the integers"):
        outputs(run, "floats.npz", allow_code=True)


def test_whole_numbers_below_0_are_numbers_where_the_run_has_floats() -> None:
    x = np.array([[-3, 2], [1, -4], [2, 2], [-1, -1]])
    silos = [Silo(name, x.astype(np.float32), np.array([0, 1, 1, 0])) for name in "ab"]
    result = Federation(nn.Linear(2, 2), silos, FedSGD(loss="cross-entropy")).train(1)
    for rows in (x, x.tolist(), torch.tensor(x), x.astype(np.int8)):
        assert (result.predict_proba(rows) == result.predict_proba(x.astype(np.float32))).all()


def test_pixels_are_scaled_as_in_training(train: Train) -> None:
    random = np.random.default_rng(0)
    Path("mnist").mkdir()
    for part, rows in (("train", 40), ("t10k", 20)):
        pixels, labels = random.integers(0, 256, (rows, 28, 28), np.uint8), np.arange(rows, dtype=np.uint8) % 10
        for what, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
            Path(f"mnist/{part}-{what}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))
    run = train("data.source=mnist", "data.path=mnist")
    np.savez("bytes.npz", x=pixels[:, None])
    np.savez("floats.npz", x=pixels[:, None].astype(np.float32) / 255)
    assert np.array_equal(outputs(run, "bytes.npz"), outputs(run, "floats.npz"))
    accuracy = (outputs(run, "bytes.npz").argmax(1) == labels).mean()
    assert read_json(run / "result.json")["test"]["accuracy"] == pytest.approx(accuracy)


def test_the_model_is_in_eval_mode(train: Train) -> None:
    Path("prediction_noisy.py").write_text(
        "from torch import nn\ndef network(): return nn.Sequential(nn.Linear(5, 4), nn.Dropout(), nn.Linear(4, 1))\n"
    )
    Path("run.toml").write_text(RUN.replace("hidden = [4]\n", ""))
    run = train("model.source=prediction_noisy:network")
    once, twice = (outputs(run, "patients.csv", allow_code=True) for _ in range(2))
    assert np.array_equal(once, twice)
