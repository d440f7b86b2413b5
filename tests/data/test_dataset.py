import dataclasses
from typing import Any

import numpy as np
import pytest
from splits import split_of

from moretta.data.rows import Rows, Split, as_features, as_targets, check_fit, check_owned, class_of
from moretta.data.tables.preparation import ColumnRules
from moretta.errors import ParameterError

X = np.arange(12, dtype=np.float32).reshape(6, 2)
Y = np.array([0, 1, 2, 0, 1, 2], np.int64)


def good(**changes: Any) -> Split:
    arguments: dict[str, Any] = {
        "name": "toy", "task": "classification", "x_train": X, "y_train": Y, "x_test": X[:2], "y_test": Y[:2],
        "classes": 3, "feature_names": ("age", "dose"),
    }  # fmt: skip
    return split_of(**(arguments | changes))


def with_value(value: float) -> np.ndarray:
    x = X.copy()
    x[3:5, 1] = value
    return x


def test_a_good_one() -> None:
    dataset = good()
    assert (dataset.inputs, dataset.outputs) == ((2,), 3)
    assert dataset.validation.x.shape == (0, 2)
    assert dataset.validation.y.dtype == np.int64
    with pytest.raises(dataclasses.FrozenInstanceError):
        dataset.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_test": with_value(np.inf)[3:5]}, "test part: column 'dose' is NaN or infinite in 2 rows"),
        (
            {"column_rules": ColumnRules.alike(2, fill="mean"), "x_test": with_value(-np.inf)[3:5]},
            "column 'dose' is infinite in 2 rows",
        ),
        ({"x_train": X.astype(np.float64)}, "expected x as float32 or int64"),
        ({"x_train": X[:3]}, "has 3 samples but 6 targets"),
        ({"x_train": X[:0], "y_train": Y[:0]}, "the training part has no rows"),
        ({"x_test": X[:2, :1]}, r"samples of shape \(1,\)"),
        ({"domain": Y[:2]}, r"the training part: expected one domain per row \(6\)"),
        ({"domain_test": Y[:6]}, r"the test part: expected one domain per row \(2\)"),
    ],
)
def test_bad_ones(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        good(**changes)


def test_regression_and_one_hot() -> None:
    numbers = np.ones((6, 2), np.float32)
    dataset = good(task="regression", classes=None, y_train=numbers, y_test=numbers[:2])
    assert dataset.outputs == 2
    one_hot = np.eye(3, dtype=np.float32)[Y]
    assert good(y_train=one_hot, y_test=one_hot[:2]).outputs == 3
    numbers[2, 1] = np.nan
    with pytest.raises(ParameterError, match="the target is NaN or infinite"):
        good(task="regression", classes=None, y_train=numbers, y_test=numbers[:2])


def test_a_silo_names_itself_and_the_column() -> None:
    check_owned(Rows(X, Y), "silo-1", (), may_lack=False)
    with pytest.raises(ParameterError, match="silo-2: column 'dose' is NaN or infinite in 2 rows"):
        check_owned(Rows(with_value(np.nan), Y), "silo-2", ("age", "dose"), may_lack=False)
    images = np.zeros((2, 1, 3, 3), np.float32)
    images[1, 0, 2, 1] = np.inf
    with pytest.raises(ParameterError, match=r"silo-3: position \(0, 2, 1\) of a sample is NaN or infinite in 1 row"):
        check_owned(Rows(images, Y[:2]), "silo-3", (), may_lack=False)
    with pytest.raises(ParameterError, match="silo-4 has no rows"):
        check_owned(Rows(X[:0], Y[:0]), "silo-4", (), may_lack=False)


@pytest.mark.parametrize(
    ("y", "task", "kind", "expected", "classes"),
    [
        ([0, 2, 1], None, "i", "classification", 3),
        (np.array([0, 1], np.uint8), None, "i", "classification", 2),
        ([False, True], None, "i", "classification", 2),
        ([0, 2, 1], "regression", "f", "regression", None),
        ([0.0, 2.0], None, "f", "regression", None),
        ([0.0, 2.0], "classification", "i", "classification", 3),
        ([[0.5], [1.0]], None, "f", "regression", None),
        ([[0.5, 1], [1.0, 2]], None, "f", "regression", None),
        ([[0.0, 1], [1.0, 0]], None, "f", "classification", 2),
        ([[0, 1], [1, 0]], None, "f", "classification", 2),
        ([[0.0, 1], [1.0, 0]], "regression", "f", "regression", None),
    ],
)
def test_targets_by_the_rules_of_the_run_file(y: Any, task: Any, kind: str, expected: str, classes: int | None) -> None:
    array, found, count = as_targets(y, "toy", task)
    assert (array.dtype.kind, found, count) == (kind, expected, classes)
    assert array.dtype in (np.float32, np.int64)
    assert len(array) == len(y)


@pytest.mark.parametrize(
    ("y", "task", "message"),
    [
        (["a", "b"], None, "expected numbers as targets"),
        ([["a", "b"], ["c", "d"]], None, "expected numbers as targets"),
        ([0.5, 1.0], "classification", "needs whole numbers"),
        ([-1, 0], None, "numbered from 0, but the smallest is -1"),
        ([0, 5000], None, "class 5000 among 2 rows; number the classes from 0 without gaps, or set task"),
        ([[0.5, 1], [1, 1]], "classification", "expected class targets"),
        ([0.5, np.nan], None, "1 targets are NaN or infinite"),
    ],
)
def test_bad_targets(y: Any, task: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        as_targets(y, "toy", task)


def test_features() -> None:
    assert as_features(np.ones((2, 3)), "toy").dtype == np.float32
    assert as_features(np.ones((2, 3), np.uint8), "toy").dtype == np.float32
    assert as_features(np.ones((2, 3), np.int32), "toy").dtype == np.int64
    assert np.isinf(as_features([[1e300]], "toy")).all()
    with pytest.raises(ParameterError, match="token ids, but some are negative; save numbers as floats"):
        as_features([[-1]], "toy")
    with pytest.raises(ParameterError, match=r"shape \[rows, columns or more\], got \[2\]"):
        as_features([1.0, 2.0], "toy")
    with pytest.raises(ParameterError, match="expected an array of numbers"):
        as_features([["a"]], "toy")


def test_labels_and_outputs() -> None:
    check_fit(Y, 3, "silo-1")
    check_fit(Y % 2, 1, "silo-1")
    check_fit(np.zeros(3, np.float32), 1, "silo-1")
    with pytest.raises(ParameterError, match="silo-1: label 2 does not fit 1 outputs; expected labels 0 to 1"):
        check_fit(Y, 1, "silo-1")
    with pytest.raises(
        ParameterError, match="silo-1: targets have 2 entries a row; expected 3, one for each output of the model"
    ):
        check_fit(np.zeros((3, 2), np.float32), 3, "silo-1")
    with pytest.raises(ParameterError, match="each target is one number, but the model has 3 outputs"):
        check_fit(np.zeros(3, np.float32), 3, "silo-1")


def test_class_of() -> None:
    labels = class_of(np.eye(3, dtype=np.float32)[Y])
    assert labels is not None
    assert labels.tolist() == Y.tolist()
    assert class_of(np.array([0.5, 1.0], np.float32)) is None
