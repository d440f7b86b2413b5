import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moretta.data.tables.table import Table, fill_missing, read_table
from moretta.errors import ParameterError

PLAIN = "age,job,score\n31,cook,0\n45,nurse,1\n28,cook,1\n"


def write(folder: Path, text: str, name: str = "t.csv") -> Path:
    path = folder / name
    data = text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def assert_plain(table: Table) -> None:
    assert table.names == ("age", "job=cook", "job=nurse")
    np.testing.assert_array_equal(table.x, np.array([[31, 1, 0], [45, 0, 1], [28, 1, 0]], np.float32))
    assert table.x.dtype == np.float32
    assert table.y.tolist() == [0, 1, 1]
    assert table.missing_columns == ()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (PLAIN, "t.csv"),
        (PLAIN, "t.csv.gz"),
        (PLAIN.replace(",", ";"), "t.csv"),
        (PLAIN.replace("\n", "\r\n"), "t.csv"),
        ("\ufeff" + PLAIN, "t.csv"),
        (PLAIN + "\n\n", "t.csv"),
        ('"age";"job";"score"\r\n31;"cook";"0"\r\n45;"nurse";1\r\n28;"cook";1', "t.csv"),
        (PLAIN.replace(",", " , "), "t.csv"),
    ],
)
def test_every_dialect_gives_the_same_table(tmp_path: Path, text: str, name: str) -> None:
    assert_plain(read_table(write(tmp_path, text, name)))


def test_a_quoted_cell_may_hold_the_delimiter_and_a_line_end(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, 'a,b,y\n"x,\n""z",1,0\nw,2,1\n'))
    assert table.names == ("a=w", 'a=x,\n"z', "b")


def test_ordinal_codes_follow_the_sorted_order(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, PLAIN), encoding="ordinal")
    assert table.names == ("age", "job")
    assert table.x[:, 1].tolist() == [0, 1, 0]


def test_the_target_may_be_any_column(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, PLAIN), target="job")
    assert table.names == ("age", "score")
    assert (table.y.tolist(), table.class_names) == ([0, 1, 0], ("cook", "nurse"))


@pytest.mark.parametrize(
    ("cells", "task", "y", "names"),
    [
        (["3", "1", "3"], None, [1, 0, 1], ("1", "3")),
        (["3", "1", "3"], "regression", [3.0, 1.0, 3.0], ()),
        (["0.5", "1", "2"], None, [0.5, 1.0, 2.0], ()),
        (["1.0", "0.0", "1.0"], None, [1.0, 0.0, 1.0], ()),
        (["1.0", "0.0", "1.0"], "classification", [1, 0, 1], ("0", "1")),
        (["yes", "no", "yes"], None, [1, 0, 1], ("no", "yes")),
    ],
)
def test_targets(tmp_path: Path, cells: list[str], task: str, y: list[float], names: tuple[str, ...]) -> None:
    text = "x,y\n" + "".join(f"{i},{cell}\n" for i, cell in enumerate(cells))
    table = read_table(write(tmp_path, text), task=task)  # type: ignore[arg-type]
    assert table.y.tolist() == y
    assert table.class_names == names


@pytest.mark.parametrize("mark", ["", "NA", "NaN", "nan", "?", '""', " "])
def test_an_absent_value_is_refused_by_name_or_kept_as_nan(tmp_path: Path, mark: str) -> None:
    path = write(tmp_path, f"age,job,y\n1,a,0\n{mark},b,1\n{mark},{mark},1\n")
    with pytest.raises(
        ParameterError, match=r"t\.csv lacks values: column 'age' in 2 of 3 rows, column 'job' in 1 of 3"
    ):
        read_table(path)
    table = read_table(path, missing="median")
    assert table.names == ("age", "job=a", "job=b", "job=missing")
    assert table.missing_columns == (0,)
    assert np.isnan(table.x).sum() == 2


def test_unknown_is_a_category_of_its_own(tmp_path: Path) -> None:
    assert read_table(write(tmp_path, "job,y\nunknown,0\ncook,1\n")).names == ("job=cook", "job=unknown")


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (PLAIN, {"target": "scores"}, 'no column "scores" for the target; did you mean "score"'),
        (PLAIN, {"encoding": "onehot"}, 'encoding = "onehot" is unknown; did you mean "one-hot"'),
        (PLAIN, {"missing": "mean"}, 'missing = "mean" is unknown; did you mean "median"'),
        (PLAIN, {"target": "job", "task": "regression"}, "regression needs numbers, but the target 'job' holds 'cook'"),
        (PLAIN + "1,2\n", {}, "line 5 has 2 cells, but the header has 3"),
        ("a,a,y\n1,2,0\n", {}, "the header repeats the column 'a'"),
        (",a,y\n1,2,0\n", {}, "has a column without a name"),
        ("", {}, "has no rows"),
        ("a,y\n", {}, "has no rows"),
        ("y\n1\n0\n", {}, "no column beside the target 'y'"),
        ("a,y\n1,0\n2,0\n", {}, "the target 'y' is always 0"),
        ("a,y\n1,no\n2,no\n", {}, "the target 'y' is always 'no'"),
        ("a,y\n1,0\n2,\n", {"missing": "median"}, "'y' in 1 of 2 rows; remove those rows, a target cannot be filled"),
        ("a,y\n1,0\n2,inf\n", {"task": "classification"}, "the target 'y' is infinite"),
        ('a,y\n1,0\n"2,1\n', {}, "not readable as CSV near line"),
        (
            "a,y\n" + "".join(f"id-{i},{i % 2}\n" for i in range(1001)),
            {},
            "1001 different strings, such as 'id-0', too many",
        ),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        read_table(write(tmp_path, text), **arguments)  # type: ignore[arg-type]


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"there is no file .*none\.csv"):
        read_table(tmp_path / "none.csv")
    (tmp_path / "latin.csv").write_bytes("a,y\nmalmö,1\n".encode("latin-1"))
    with pytest.raises(ParameterError, match="not UTF-8 text"):
        read_table(tmp_path / "latin.csv")
    (tmp_path / "bad.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(ParameterError, match="cannot be read"):
        read_table(tmp_path / "bad.csv.gz")
    whole = gzip.compress(PLAIN.encode() * 50)
    (tmp_path / "cut.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ParameterError, match="cannot be read"):
        read_table(tmp_path / "cut.csv.gz")


cells = st.one_of(st.just(np.float32(np.nan)), st.floats(-1e6, 1e6, width=32))


@settings(deadline=None)  # a busy machine is no failure
@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 12), st.integers(1, 4)), elements=cells))
def test_filling_uses_only_the_owners_own_median(x: np.ndarray) -> None:
    x[0] = 1.0  # a value in every column
    before = x.copy()
    filled, names = fill_missing(x, "median", ("a", "b", "c", "d")[: x.shape[1]], "silo-1")
    np.testing.assert_array_equal(x, before)
    assert np.isfinite(filled).all()
    assert len(names) == x.shape[1]
    absent = np.isnan(x)
    np.testing.assert_array_equal(filled[~absent], x[~absent])
    for j in range(x.shape[1]):
        assert (filled[absent[:, j], j] == np.float32(np.nanmedian(x[:, j].astype(np.float64)))).all()


def test_indicator_columns_come_from_the_whole_table() -> None:
    x = np.array([[1, np.nan], [3, 5]], np.float32)
    filled, names = fill_missing(x, "indicator", ("a", "b"), "silo-1", columns=(0, 1))
    assert names == ("a", "b", "a=missing", "b=missing")
    np.testing.assert_array_equal(filled, [[1, 5, 0, 1], [3, 5, 0, 0]])
    assert fill_missing(x, "indicator", ("a", "b"), "silo-1")[1] == ("a", "b", "b=missing")
    assert fill_missing(x[:0], "indicator", ("a", "b"), "x", columns=(0,))[0].shape == (0, 3)


def test_a_wholly_absent_column_names_the_owner_and_itself() -> None:
    x = np.array([[1, np.nan], [3, np.nan]], np.float32)
    with pytest.raises(ParameterError, match="silo-2 has no value at all in column 'b'"):
        fill_missing(x, "median", ("a", "b"), "silo-2")
