import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splits import load

from moretta.errors import MissingExtra, ParameterError

BANK_HEADER = '"age";"job";"duration";"y"\r\n'


def bank(folder: Path, rows: int = 100) -> Path:
    path = folder / "bank-additional-full.csv"
    jobs = ["admin.", "unknown", "student"]
    lines = [f'{20 + i % 50};"{jobs[i % 3]}";{5 * i};"{"yes" if i % 10 == 0 else "no"}"\r\n' for i in range(rows)]
    path.write_bytes((BANK_HEADER + "".join(lines)).encode())
    return path


def test_data_needs_neither_torch_nor_sklearn() -> None:
    script = "import sys, moretta.data; sys.exit(any(m in sys.modules for m in ('torch', 'sklearn')))"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_missing_sklearn_says_which_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingExtra, match=r'source = "wdbc" needs scikit-learn; run: pip install "moretta\[torch\]"'):
        load("wdbc")


def test_wdbc() -> None:
    pytest.importorskip("sklearn")
    data = load("wdbc", seed=7)
    assert (data.train.x.shape, data.test.x.shape) == ((455, 30), (114, 30))
    assert data.class_names == ("malignant", "benign")
    assert data.feature_names[0] == "mean radius"
    assert data.standardise
    assert abs(data.train.y.mean() - data.test.y.mean()) < 0.01  # stratified
    again, other = load("wdbc", seed=7), load("wdbc", seed=8)
    np.testing.assert_array_equal(again.test.x, data.test.x)
    assert not np.array_equal(other.test.x, data.test.x)


def test_digits() -> None:
    pytest.importorskip("sklearn")
    data = load("digits", validation_fraction=0.1)
    assert (data.inputs, data.classes, len(data.validation.x)) == ((64,), 10, 180)
    assert (data.train.x.min(), data.train.x.max()) == (0, 1)
    assert not data.standardise
    assert load("digits", task="regression").train.y.dtype == np.float32


def test_bank_marketing_in_the_publishers_format(tmp_path: Path) -> None:
    bank(tmp_path)
    data = load("bank-marketing", path=".", base=tmp_path)
    assert data.feature_names == ("age", "job=admin.", "job=student", "job=unknown")  # no duration
    assert [len(part) for part in data.parts().values()] == [80, 10, 10]
    assert [int(part.y.sum()) for part in data.parts().values()] == [8, 1, 1]
    assert data.class_names == ("no", "yes")
    every = load("bank-marketing", path="bank-additional-full.csv", base=tmp_path, encoding="ordinal")
    assert every.feature_names == ("age", "job", "duration")
    numbers = load("bank-marketing", path=".", base=tmp_path, task="regression")
    assert (numbers.classes, numbers.train.y.dtype, set(numbers.train.y.tolist())) == (None, np.float32, {0.0, 1.0})


def test_bank_marketing_as_published(public: Path) -> None:
    data = load("bank-marketing", path=public / "bank_marketing")
    assert [len(part) for part in data.parts().values()] == [32950, 4119, 4119]
    assert sum(int(part.y.sum()) for part in data.parts().values()) == 4640
    assert not any(name.startswith("duration") for name in data.feature_names)
    assert {"job=unknown", "default=unknown"} <= set(data.feature_names)
    full = load("bank-marketing", path=public / "bank_marketing" / "bank-full.csv.gz", encoding="ordinal")
    assert full.inputs == (16,)
    # PBPFL's released code takes 48 numbers: three columns of yes and no as one number each, the duration too
    yes_no = load("bank-marketing", path=public / "bank_marketing" / "bank-full.csv.gz", encoding="yes-no")
    assert yes_no.inputs == (48,)
    assert {"default", "housing", "loan", "duration", "month=may"} <= set(yes_no.feature_names)
    loan = yes_no.train.x[:, yes_no.feature_names.index("loan")]
    assert set(loan.tolist()) == {0.0, 1.0}
    assert sum(len(part) for part in full.parts().values()) == 45211


def test_only_columns_of_yes_and_no_become_one_number(tmp_path: Path) -> None:
    lines = [f"{('no', 'yes')[i % 2]},{'ab'[i % 2]},{i % 3}\n" for i in range(40)]
    (tmp_path / "t.csv").write_text("owns,kind,y\n" + "".join(lines))
    data = load("t.csv", base=tmp_path, encoding="yes-no")
    assert data.feature_names == ("owns", "kind=a", "kind=b")
    assert np.array_equal(data.train.x[:, 0], data.train.x[:, 2])


def test_csv_from_the_run_files_folder(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "a,b,y\n" + "".join(f"{2 * (i % 30)},{i % 3},{'no' if i % 4 else 'yes'}\n" for i in range(40))
    )
    data = load("t.csv", base=tmp_path)
    assert (data.inputs, data.classes, data.class_names) == ((2,), 2, ("no", "yes"))
    assert (len(data.train.x), len(data.test.x), int(data.test.y.sum())) == (32, 8, 2)
    other = load("t.csv", base=tmp_path, target="a", task="regression", test_fraction=0.5)
    assert (other.task, other.outputs, len(other.test.x)) == ("regression", 1, 20)
    assert other.feature_names == ("b", "y=no", "y=yes")


def test_csv_keeps_absent_values_until_training_fills_them_in(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "a,b,y\n" + "".join(f"{2 * (i % 30)},{'' if i % 5 == 0 else 3 * (i % 30)},{i % 2}\n" for i in range(40))
    )
    data = load("t.csv", base=tmp_path, missing="indicator")
    assert data.feature_names == ("a", "b", "b=missing")
    assert data.column_rules is not None
    assert data.column_rules.fills.tolist() == [0, 1, 0]
    assert np.isnan(data.train.x).any()
    with pytest.raises(ParameterError, match="column 'b' in 8 of 40 rows"):
        load("t.csv", base=tmp_path)


def test_npz_with_and_without_a_test_part(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(30, 4)), np.arange(30) % 3
    np.savez(tmp_path / "four.npz", x_train=x[:20], y_train=y[:20], x_test=x[20:], y_test=y[20:])
    np.savez(tmp_path / "two.npz", x=x, y=y, domain=y)
    domains = {"domain_train": x[:20, 0] > 0, "domain_test": np.array(["rome", "pisa"] * 5)}
    np.savez(tmp_path / "six.npz", x_train=x[:20], y_train=y[:20], x_test=x[20:], y_test=y[20:], **domains)
    four = load("four.npz", base=tmp_path, validation_fraction=0.25)
    np.testing.assert_array_equal(four.test.x, x[20:].astype(np.float32))
    assert (len(four.train.x), len(four.validation.x), four.classes) == (15, 5, 3)
    two = load("two.npz", base=tmp_path)
    assert (len(two.train.x), len(two.test.x), two.standardise) == (24, 6, True)
    np.testing.assert_array_equal(two.train.domain, two.train.y)
    assert {name: two.test.y[rows].tolist() for name, rows in two.test_rows_by_domain().items()} == {
        "0": [0, 0], "1": [1, 1], "2": [2, 2],
    }  # fmt: skip
    six = load("six.npz", base=tmp_path)
    assert six.test_rows_by_domain()["rome"].tolist() == [0, 2, 4, 6, 8]
    assert four.test_rows_by_domain() == {}
    assert np.bincount(two.test.y).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("y", "task", "classes", "outputs"),
    [
        (np.linspace(0, 1, 20), "regression", None, 1),
        (np.random.default_rng(0).normal(size=(20, 3)), "regression", None, 3),
        (np.eye(4)[np.arange(20) % 4], "classification", 4, 4),
        (np.arange(20) % 4, "classification", 4, 4),
    ],
)
def test_npz_targets(tmp_path: Path, y: np.ndarray, task: str, classes: int | None, outputs: int) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((20, 2, 3)), y=y)
    data = load("d.npz", base=tmp_path)
    assert (data.task, data.classes, data.outputs, data.inputs) == (task, classes, outputs, (2, 3))
    assert data.feature_names == ()


def test_tokens_stay_integers(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.ones((10, 5), np.int32), y=np.arange(10) % 2)
    assert load("d.npz", base=tmp_path).train.x.dtype == np.int64


FUNCTION = """
import numpy as np
import neighbour_of_{name}
def make():
    return np.ones((6, 2)), np.arange(6) % 2, np.ones((2, 2)), np.arange(2)
def torn():
    return 1 / 0
def three():
    return 1, 2, 3
def ragged():
    return [[1], [1, 2]], [0, 1], [[1]], [0]
"""


def test_module_function_beside_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "sales_source.py").write_text(FUNCTION.format(name="sales"))
    (tmp_path / "neighbour_of_sales.py").write_text("")
    before = list(sys.path)
    data = load("sales_source:make", base=tmp_path)
    assert (len(data.train.x), len(data.test.x), data.standardise) == (6, 2, False)
    assert sys.path == before
    with pytest.raises(ParameterError, match=r'"sales_source:torn" failed with ZeroDivisionError: division by zero'):
        load("sales_source:torn", base=tmp_path)
    with pytest.raises(ParameterError, match=r"must return \(x_train, y_train, x_test, y_test\), got 3 values"):
        load("sales_source:three", base=tmp_path)
    with pytest.raises(ParameterError, match=r"as arrays, but one is not"):
        load("sales_source:ragged", base=tmp_path)


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        ("wdcb", {}, 'source = "wdcb" is neither .* did you mean "wdbc"'),
        ("wdbc", {"validation_fraction": 0.9}, "fractions of 0 or more that leave rows for training, got 0.2, 0.9"),
        ("wdbc", {"test_fraction": 1e-6}, "569 rows cannot be split by fractions 1e-06, 0.0"),
        ("wdbc", {"target": "y"}, 'target is for a table without a schema, not for source = "wdbc"; remove target'),
        ("wdbc", {"path": "x"}, 'path is for a built-in set of files, not for source = "wdbc"'),
        ("wdbc", {"missing": "meidan"}, 'missing: expected .* got "meidan"; did you mean "median"'),
        ("wdbc", {"task": "regresion"}, 'task: expected .* got "regresion"; did you mean "regression"'),
        ("none.csv", {}, "there is no file"),
        ("none.npz", {}, "there is no file"),
        ("bank-marketing", {}, "needs path, .* got no path; get it at https"),
        ("bank-marketing", {"path": "."}, "got no such file in"),
        ("bank-marketing", {"path": "b.csv"}, "got no file"),
    ],
)
def test_bad_sources(tmp_path: Path, source: str, arguments: dict[str, Any], message: str) -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(ParameterError, match=message):
        load(source, base=tmp_path, **arguments)


def test_bad_npz(tmp_path: Path) -> None:
    def refused(message: str, **arrays: Any) -> None:
        np.savez(tmp_path / "d.npz", **arrays)
        with pytest.raises(ParameterError, match=message):
            load("d.npz", base=tmp_path)

    x, y = np.zeros((10, 2)), np.arange(10) % 2
    refused("expected arrays x_train, y_train, x_test, y_test, or x and y; got x, labels", x=x, labels=y)
    refused("not an .npz file of plain arrays", x=np.array([None, {}]), y=y)
    refused("has 10 samples and 9 targets", x=x, y=y[:9])
    refused(
        r"y_train has the shape \[10\] and y_test \[2, 2\]; expected the same",
        x_train=x,
        y_train=y,
        x_test=x[:2],
        y_test=np.eye(2),
    )
    refused(r"test part has samples of shape \(1,\)", x_train=x, y_train=y, x_test=x[:2, :1], y_test=y[:2])
    refused(r"one domain per row \(10\), got an array of shape \(3,\)", x=x, y=y, domain=y[:3])
    with (tmp_path / "d.npz").open("wb") as file:
        np.save(file, x)
    with pytest.raises(ParameterError, match="holds a single array without a name"):
        load("d.npz", base=tmp_path)
    (tmp_path / "d.npz").write_bytes(b"nothing of the kind")
    with pytest.raises(ParameterError, match=r"not an \.npz file of plain arrays"):
        load("d.npz", base=tmp_path)
