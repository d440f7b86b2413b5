"""`moretta evaluate`: a run's model on labelled rows of somebody else, with intervals, and by a column."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, r2_score, roc_auc_score
from test_cli import call, patients
from test_prediction import Train, train  # noqa: F401  # a fixture
from torch import nn

from moretta import Federation, FedSGD, Silo, load
from moretta.errors import ParameterError
from moretta.protocols.common.targets import probabilities
from moretta.run.metrics import best_threshold, judged


def others(rows: int = 40, change: Callable[[list[str]], list[str]] = lambda lines: lines) -> Path:
    Path("others.csv").write_text("\n".join(change(patients(rows, seed=9).splitlines())) + "\n")
    return Path("others.csv")


def test_figures_are_scikit_learn_s_with_intervals_around_them(train: Train) -> None:  # noqa: F811
    run = train()
    done = call("evaluate", str(run), "--data", str(others()), "--json")
    assert done.code == 0, done.err
    assert call("predict", str(run), "--data", "others.csv", "--out", "p.csv").code == 0
    predictions = np.genfromtxt("p.csv", delimiter=",", names=True)
    truth = np.arange(40) % 2
    figures = done.told["figures"]
    assert done.told["rows"] == 40
    assert figures["accuracy"]["value"] == pytest.approx((predictions["prediction"] == truth).mean())
    assert figures["auc"]["value"] == pytest.approx(roc_auc_score(truth, predictions["probability_1"]))
    expected = balanced_accuracy_score(truth, predictions["prediction"])
    assert figures["balanced_accuracy"]["value"] == pytest.approx(expected)
    assert set(figures.pop("calibration_error")) == {"value"}
    for figure in figures.values():
        assert figure["low"] < figure["value"] < figure["high"]
    shown = call("evaluate", str(run), "--data", "others.csv").out
    assert re.search(r"(?m)^    calibration_error 0\.\d+ \(no interval: resampling rows only raises it\)$", shown)
    assert done.told["baseline"] == 0.5
    again = call("evaluate", str(run), "--data", "others.csv", "--json").told
    assert again == done.told  # intervals are drawn by a fixed seed


def test_a_threshold_is_chosen_on_validation_rows_alone(train: Train) -> None:  # noqa: F811
    assert "threshold" not in call("evaluate", str(train()), "--data", str(others()), "--json").told
    run = train("data.validation-fraction=0.3", folder="other")
    told = call("evaluate", str(run), "--data", "others.csv", "--json").told
    assert call("predict", str(run), "--data", "others.csv", "--out", "p.csv").code == 0
    truth, chance = np.arange(40) % 2, np.genfromtxt("p.csv", delimiter=",", names=True)["probability_1"]
    taken, figures = chance >= told["threshold"] - 1e-9, told["figures"]
    assert figures["sensitivity_at_threshold"]["value"] == pytest.approx(taken[truth == 1].mean())
    assert figures["specificity_at_threshold"]["value"] == pytest.approx(1 - taken[truth == 0].mean())
    expected = balanced_accuracy_score(truth, taken)
    assert figures["balanced_accuracy_at_threshold"]["value"] == pytest.approx(expected)
    assert (
        figures["balanced_accuracy_at_threshold"]["low"]
        <= expected
        <= figures["balanced_accuracy_at_threshold"]["high"]
    )
    assert "(by validation rows)" in call("evaluate", str(run), "--data", "others.csv").out


def test_the_best_threshold_is_where_balanced_accuracy_is_highest() -> None:
    outputs, y = np.zeros((5, 2)), np.array([0, 1, 0, 1, 1])
    outputs[:, 1] = [-2.0, -1.0, 0.5, 1.0, 3.0]
    chances = probabilities(outputs, "cross-entropy")[:, 1]
    best = best_threshold(outputs, y, "cross-entropy")
    assert best == chances[3]  # both 0s below it, two of three 1s at it or above
    assert best_threshold(outputs, np.ones(5, np.int64), "cross-entropy") is None
    assert best_threshold(np.eye(3)[[0, 1, 2]], np.arange(3), "cross-entropy") is None


def test_an_interval_covers_what_it_says() -> None:
    """Over 200 draws of 100 rows of which each is right with probability 0.8, as an interval of 95 per cent does."""
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(60):
        y = random.integers(0, 2, 100)
        right = random.random(100) < 0.8
        outputs = np.eye(2)[np.where(right, y, 1 - y)]
        accuracy = judged(outputs, y, "classification", "cross-entropy")["figures"]["accuracy"]
        inside += accuracy["low"] <= 0.8 <= accuracy["high"]
    assert inside >= 51  # of 60 at 95 per cent less than 51 has probability 0.002; the bootstrap is a little narrow


def test_rows_of_one_patient_are_drawn_together(train: Train) -> None:  # noqa: F811
    model = load(train())
    rows = np.random.default_rng(1).normal(size=(30, 5)).astype(np.float32)
    y, people = np.arange(30) % 2, np.array([f"p{number}" for number in range(30)])
    once = model.evaluate(rows, y, people)
    twice = model.evaluate(np.repeat(rows, 3, axis=0), np.repeat(y, 3), np.repeat(people, 3))
    assert (once["units"], twice["units"], twice["rows"]) == (30, 30, 90)
    for name, figure in once["figures"].items():
        assert twice["figures"][name] == pytest.approx(figure), name  # copies of rows make no interval narrower
    alone = model.evaluate(np.repeat(rows, 3, axis=0), np.repeat(y, 3))
    apart, together = (found["figures"]["accuracy"] for found in (alone, once))
    assert apart["high"] - apart["low"] < 0.8 * (together["high"] - together["low"])


def test_parts_by_a_column_and_those_too_small_to_show(train: Train) -> None:  # noqa: F811
    run = train()
    sites = ["site", *("s" if row >= 37 else "ab"[row % 2] for row in range(40))]  # a column that no run has seen
    rare = others(40, lambda lines: [f"{line},{site}" for line, site in zip(lines, sites, strict=True)])
    told = call("evaluate", str(run), "--data", str(rare), "--by", "site", "--json").told
    assert {name: part["rows"] for name, part in told["parts"].items()} == {"a": 19, "b": 18}
    assert told["parts_withheld"] == 1
    plain = call("evaluate", str(run), "--data", str(rare), "--by", "site")
    assert "1 values of site have too few rows to be shown" in plain.out
    assert "    the commonest class alone: 0.5" in plain.out


def test_rows_that_do_not_fit_are_left_out_by_number(train: Train) -> None:  # noqa: F811
    run = train()
    wrong = others(40, lambda lines: [lines[0], "x,east,1.0,0", *lines[2:]])
    done = call("evaluate", str(run), "--data", str(wrong), "--json")
    assert done.code == 3
    told = json.loads(done.out)
    assert (told["rows"], list(told["left_out"])) == (39, ["1"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: [line.rpartition(",")[0] for line in lines], "ill"),
        (lambda lines: [lines[0], *(line[:-1] + "7" for line in lines[1:])], "ill"),
        (lambda lines: lines[:1], "no rows|has no"),
    ],
)
def test_what_is_wrong_with_labels_is_one_sentence(
    train: Train,  # noqa: F811
    change: Callable[[list[str]], list[str]],
    said: str,
) -> None:
    run = train()
    done = call("evaluate", str(run), "--data", str(others(40, change)))
    assert done.code == 2, done.err
    assert any(word in done.sentence for word in said.split("|"))


def test_a_column_that_is_not_there(train: Train) -> None:  # noqa: F811
    done = call("evaluate", str(train()), "--data", str(others()), "--by", "wards")
    assert done.code == 2
    assert 'has no column "wards" for --by; did you mean "ward"?' in done.sentence


def test_arrays_of_numbers_and_targets_that_do_not_fit() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 3)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5], np.float32))[:, None]
    silos = [Silo(name, x[k::3], y[k::3]) for k, name in enumerate(("a", "b", "c"))]
    result = Federation(nn.Linear(3, 1), silos, FedSGD(loss="mse", learning_rate=0.1)).train(30, progress=False)
    told = result.evaluate(x, y)
    assert told["figures"]["r2"]["value"] == pytest.approx(r2_score(y, result.predict(x)), abs=1e-6)
    assert told["baseline"] == pytest.approx(y.var(), rel=1e-5)
    with pytest.raises(ParameterError, match="y: expected one target a row, 60; got 59"):
        result.evaluate(x, y[1:])
