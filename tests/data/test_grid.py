from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from splits import distribute, load, split_of

from moretta.data.partition import Distributed, partition
from moretta.data.rows import Rows, Split
from moretta.data.silo import Silo
from moretta.errors import ParameterError

TABLE = "patient,age,job,balance,y\n" + "".join(
    f"P{i:02},{20 + 2 * (i % 12)},{('cook', 'nurse', 'smith')[i % 3]},{(i % 15) ** 2},{i % 2}\n" for i in range(20)
)


def dataset(rows: int = 12, shape: tuple[int, ...] = (5,), **changes: Any) -> Split:
    """Rows whose entries are all different, so that every one says where it came from."""
    x = np.arange((rows + 2) * int(np.prod(shape)), dtype=np.float32).reshape(rows + 2, *shape)
    y = np.arange(rows + 2, dtype=np.int64) % 2
    arguments: dict[str, Any] = {
        "name": "toy", "task": "classification", "x_train": x[:rows], "y_train": y[:rows], "x_test": x[rows:],
        "y_test": y[rows:], "classes": 2, "ids": np.array([f"P{i}" for i in range(rows)]),
        "feature_names": tuple("abcdefghij"[: shape[0]]) if len(shape) == 1 else (),
    }  # fmt: skip
    return split_of(**(arguments | changes))


def table(folder: Path, text: str = TABLE, **arguments: Any) -> Split:
    (folder / "t.csv").write_text(text)
    return load("t.csv", base=folder, **({"id_column": "patient"} | arguments))


def ids_of(rows: Rows | Silo) -> list[str]:
    assert rows.ids is not None
    return [str(name) for name in rows.ids]


def whole(dealt: Distributed) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """The matrix that the participants hold together, its targets and its ids, in the order of the row parts."""
    blocks, targets, ids = [], [], []
    for row in dict.fromkeys(silo.row for silo in dealt.silos):
        beside = [silo for silo in dealt.silos if silo.row == row]
        assert dealt.test is not None
        block = np.full((len(beside[0].x), dealt.test.x.shape[1]), np.nan, np.float32)
        for silo in beside:
            assert np.isnan(block[:, silo.columns]).all()  # no column is held twice
            block[:, silo.columns] = silo.x
            assert silo.y.tolist() == beside[0].y.tolist()
            assert ids_of(silo) == ids_of(beside[0])
        blocks.append(block)
        targets.append(beside[0].y)
        ids += ids_of(beside[0])
    return np.concatenate(blocks), np.concatenate(targets), ids


@settings(deadline=None)  # a busy machine is no failure
@given(st.data())
def test_the_parts_make_the_whole(data: st.DataObject) -> None:
    rows, shape = data.draw(st.integers(1, 12)), tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    width = int(np.prod(shape))
    m_h, m_v = data.draw(st.integers(1, rows)), data.draw(st.integers(1, width))
    seed = data.draw(st.integers(0, 2**40))
    order = data.draw(st.permutations(range(width)))
    named = data.draw(st.booleans())
    columns = [part.tolist() for part in np.array_split(np.array(order), m_v)]
    source = dataset(rows, shape)
    if named:
        dealt = distribute(source, m_h * m_v, "by-feature", seed, columns=columns)
        assert [set(silo.columns) for silo in dealt.silos] == [set(part) for part in columns] * m_h
    else:
        dealt = distribute(source, m_h * m_v, "grid", seed, grid=[m_h, m_v])
    assert [silo.name for silo in dealt.silos] == [f"silo-{i + 1}-{j + 1}" for i in range(m_h) for j in range(m_v)]
    assert [silo.row for silo in dealt.silos] == [f"row-{i + 1}" for i in range(m_h) for _ in range(m_v)]
    x, y, ids = whole(dealt)
    back = np.argsort([int(name[1:]) for name in ids])
    assert sorted(ids) == sorted(f"P{i}" for i in range(rows))
    np.testing.assert_array_equal(x[back], source.train.x.reshape(rows, width))
    np.testing.assert_array_equal(y[back], source.train.y)
    assert dealt.test is not None
    np.testing.assert_array_equal(dealt.test.x, source.test.x.reshape(2, width))
    assert dealt.feature_names == source.feature_names


def test_uneven_parts_and_their_names() -> None:
    dealt = distribute(dataset(11), 6, "grid", 3, grid=(3, 2), sizes=[2, 1, 1])
    assert [silo.x.shape for silo in dealt.silos] == [(6, 3), (6, 2), (2, 3), (2, 2), (3, 3), (3, 2)]
    assert [silo.columns for silo in dealt.silos[:2]] == [(0, 1, 2), (3, 4)]
    assert [silo.names for silo in dealt.silos[:2]] == [("a", "b", "c"), ("d", "e")]
    assert dealt.feature_names == ("a", "b", "c", "d", "e")


def test_rows_are_those_of_iid_and_follow_the_seed() -> None:
    def held(seed: int) -> list[list[float]]:
        return [silo.x.ravel().tolist() for silo in distribute(dataset(), 6, "grid", seed, grid=[3, 2]).silos]

    assert held(4) == held(4)
    assert held(4) != held(5)
    source = dataset()
    rows = partition(source.train.y, 3, "iid", 4)
    plain = distribute(source, 3, "iid", 4).silos
    for i, silo in enumerate(distribute(source, 3, "grid", 4, grid=[3, 1]).silos):
        np.testing.assert_array_equal(silo.x, source.train.x[rows[i]])
        np.testing.assert_array_equal(silo.x, plain[i].x)
        assert ids_of(plain[i]) == ids_of(silo) == [f"P{row}" for row in rows[i]]  # without a grid they have ids too
    assert (plain[0].row, plain[0].columns, plain[0].labelled) == ("", (), True)


@pytest.mark.parametrize(
    ("holder", "expected"),
    [(None, [1, 1, 1]), (2, [2, 2, 2]), ([1, 2, 1], [1, 2, 1])],
)
def test_one_participant_of_a_row_holds_its_labels(holder: Any, expected: list[int]) -> None:
    silos = distribute(dataset(), 6, "grid", grid=[3, 2], label_holder=holder).silos
    assert [silo.name for silo in silos if silo.labelled] == [f"silo-{i}-{j}" for i, j in enumerate(expected, 1)]
    assert all(len(silo.y) == len(silo.x) for silo in silos)  # the others' targets are the caller's to keep from them


def test_images_are_flattened_everywhere() -> None:
    images = dataset(8, (1, 4, 4), x_validation=np.ones((2, 1, 4, 4), np.float32), y_validation=np.array([0, 1]))
    dealt = distribute(images, 4, "grid", grid=[2, 2])
    assert dealt.test is not None
    assert dealt.validation is not None
    assert [part.x.shape for part in (dealt.silos[0], dealt.test, dealt.validation)] == [(4, 8), (2, 16), (2, 16)]
    assert dealt.feature_names == ()
    assert dealt.silos[1].columns == tuple(range(8, 16))
    tokens = dataset(8, x_train=np.ones((8, 5), np.int64), x_test=np.ones((2, 5), np.int64))
    assert distribute(tokens, 2, "grid", grid=[1, 2]).silos[1].x.dtype == np.int64


def test_a_text_column_is_named_by_its_own_name(tmp_path: Path) -> None:
    source = table(tmp_path)
    assert source.feature_names == ("age", "job=cook", "job=nurse", "job=smith", "balance")
    left, right = distribute(source, 2, "by-feature", columns=[["job", "age"], ["balance"]]).silos
    assert left.names == ("age", "job=cook", "job=nurse", "job=smith")  # in the order of the table
    assert (left.columns, right.columns) == ((0, 1, 2, 3), (4,))
    columns: list[list[str | int]] = [["job=nurse", 4], ["age", "job=cook", "job=smith"]]
    assert [s.columns for s in distribute(source, 2, "by-feature", columns=columns).silos] == [(2, 4), (0, 1, 3)]
    ordinal = table(tmp_path, encoding="ordinal")
    assert distribute(ordinal, 2, "by-feature", columns=[["job"], ["age", "balance"]]).silos[0].columns == (1,)


def test_a_name_that_looks_like_a_category_is_not_one(tmp_path: Path) -> None:
    text = "job,job=hours,y\n" + "".join(f"{('cook', 'nurse')[i % 2]},{3 * (i % 7)},{i % 5 % 2}\n" for i in range(10))
    source = table(tmp_path, text, id_column=None)
    assert source.feature_names == ("job=cook", "job=nurse", "job=hours")
    one, two = distribute(source, 2, "by-feature", columns=[["job"], ["job=hours"]]).silos
    assert (one.columns, two.columns) == ((0, 1), (2,))


def test_absent_values_and_their_marks_stay_with_the_participant_that_has_the_column(tmp_path: Path) -> None:
    lines = TABLE.splitlines()
    for i in (3, 7, 12):
        cells = lines[i].split(",")
        lines[i] = ",".join([*cells[:3], "", cells[4]])
    source = table(tmp_path, "\n".join(lines), missing="indicator")
    dealt = distribute(source, 4, "by-feature", 1, columns=[["balance"], ["age", "job"]])
    assert dealt.feature_names[-1] == "balance=missing"
    assert dealt.silos[0].names == ("balance", "balance=missing")
    assert [silo.columns for silo in dealt.silos[:2]] == [(4, 5), (0, 1, 2, 3)]
    for silo, rows in zip(dealt.silos[::2], partition(source.train.y, 2, "iid", 1), strict=True):
        own = source.train.x[rows, 4]
        np.testing.assert_array_equal(silo.x[:, 0], own)
        np.testing.assert_array_equal(silo.x[:, 1], np.isnan(own))
    mean = table(tmp_path, "\n".join(lines), missing="mean")
    assert distribute(mean, 2, "by-feature", columns=[["balance"], ["age", "job"]]).silos[0].columns == (4,)
    with pytest.raises(ParameterError, match="a median needs a range, which a schema declares"):
        table(tmp_path, "\n".join(lines), missing="median")


def test_a_participant_with_an_infinite_value_is_named() -> None:
    source = dataset()
    source.train.x[:, 3] = np.inf
    with pytest.raises(ParameterError, match="silo-1-2: column 'd' is NaN or infinite in 6 rows"):
        distribute(source, 4, "grid", grid=[2, 2])


def test_ids_travel_with_their_rows(tmp_path: Path) -> None:
    source = table(tmp_path, validation_fraction=0.2)
    dealt = distribute(source, 6, "grid", 2, grid=[3, 2])
    for silo in dealt.silos:
        if "age" in silo.names:
            assert [int(age - 20) // 2 for age in silo.x[:, 0]] == [int(name[1:]) % 12 for name in ids_of(silo)]
    assert len(whole(dealt)[2]) == 12
    assert "patient" not in dealt.feature_names
    assert set(ids_of(table(tmp_path, TABLE.replace("P", "0")).train)) <= {f"0{i:02}" for i in range(20)}  # as written
    without = "\n".join(line.partition(",")[2] for line in TABLE.splitlines())
    assert distribute(table(tmp_path, without, id_column=None), 2, "grid", grid=[1, 2]).silos[0].ids is None


def test_arrays_bring_ids_as_an_array(tmp_path: Path) -> None:
    x, y = np.arange(60.0).reshape(20, 3), np.arange(20) % 2
    np.savez(tmp_path / "two.npz", x=x, y=y, id=100 + np.arange(20))
    two = load("two.npz", base=tmp_path)
    assert ids_of(two.train) == [str(int(100 + row[0] / 3)) for row in two.train.x]
    names = np.array([f"p-{i}" for i in range(20)])
    np.savez(tmp_path / "four.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2], id_train=names)
    four = load("four.npz", base=tmp_path, validation_fraction=0.25)
    assert ids_of(four.train) == [f"p-{int(row[0] / 3)}" for row in four.train.x]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.arange(19), r"d\.npz: expected one id per row \(20\), integers or strings, got an array of shape \(19,\)"),
        (np.arange(20.0), r"expected one id per row .* type float64"),
        (np.minimum(np.arange(20), 18), r"20 rows have 19 different ids; expected an id of its own for each row"),
    ],
)
def test_bad_arrays_of_ids(tmp_path: Path, ids: np.ndarray, message: str) -> None:
    np.savez(tmp_path / "d.npz", x=np.ones((20, 2)), y=np.arange(20) % 2, id=ids)
    with pytest.raises(ParameterError, match=message):
        load("d.npz", base=tmp_path)


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (TABLE, {"id_column": "pateint"}, 'no column "pateint" for id-column; did you mean "patient"'),
        (
            TABLE.replace("P07", "P06"),
            {},
            "column 'patient' has 1 rows whose id is repeated; expected an id of its own for each row",
        ),
        (TABLE.replace("P07", ""), {"missing": "median"}, "'patient' in 1 of 20 rows; give every row its id"),
        (TABLE, {"id_column": "y"}, 'id-column "y" is the last column, which is the target by default; name'),
        (TABLE, {"id_column": "y", "target": "y"}, 'id-column "y" is the target too; name another column as target'),
    ],
)
def test_bad_id_columns(tmp_path: Path, text: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        table(tmp_path, text, **arguments)


def test_only_a_table_has_an_id_column() -> None:
    with pytest.raises(
        ParameterError, match=r'id-column is for a table without a schema, not for source = "rows[.]npz"; remove'
    ):
        load("rows.npz", id_column="patient")


def test_ids_must_be_as_many_as_rows() -> None:
    with pytest.raises(
        ParameterError, match=r"toy: the training part: expected one id per row \(12\), .* shape \(3,\)"
    ):
        dataset(ids=np.array(["a", "b", "c"]))
    with pytest.raises(ParameterError, match=r"silo `silo-1`: ids: expected 2 words or whole numbers, one a row"):
        Silo("silo-1", np.ones((2, 1), np.float32), np.array([0, 1]), ids=np.array(["a"]))


ALL = [["a", "b"], ["c", "d", "e"]]


@pytest.mark.parametrize(
    ("silos", "how", "arguments", "message"),
    [
        # what belongs to a partition
        (2, "iid", {"grid": [1, 2]}, 'grid belongs to partition = "by-feature" or "grid", not to "iid"; remove it'),
        (2, "grid", {"grid": [1, 2], "columns": ALL}, 'columns belongs to partition = "by-feature", not to "grid"'),
        (2, "by-label", {"label_holder": 1}, 'label-holder belongs to .* not to "by-label"; remove it'),
        (2, "grid", {}, "grid is missing; .* for example grid = "),
        (2, "by-feature", {}, "columns is missing; .* for example columns = "),
        (2, "gird", {}, 'partition: .*"gird"'),
        # silos
        (3, "grid", {"grid": [2, 2]}, r"silos = 3 and grid = \[2, 2\] differ: that grid has 4 participants; remove"),
        (
            3,
            "by-feature",
            {"columns": ALL},
            "silos = 3 is not a multiple of the 2 column parts; .* set a multiple of 2",
        ),
        (
            6,
            "by-feature",
            {"columns": ALL, "grid": [2, 3]},
            "has 3 column parts, but columns has 2; make them the same",
        ),
        # row parts
        (26, "grid", {"grid": [13, 2]}, "12 training rows cannot be cut into 13 row parts; use at most 12 row parts"),
        (4, "grid", {"grid": [2, 2], "sizes": [1, 1e-9]}, r"row-2 would have no rows \(12 rows\); use fewer row parts"),
        (4, "grid", {"grid": [2, 2], "sizes": [1]}, r"expected a positive size for each of 2 row parts, got \[1\.0\]"),
        # column parts
        (6, "grid", {"grid": [1, 6]}, "5 columns cannot be cut into 6 column parts; use at most 5 column parts"),
        (2, "grid", {"grid": [2]}, "how many row parts and column parts"),
        (2, "grid", {"grid": [0, 2]}, "how many row parts and column parts"),
        (2, "by-feature", {"columns": []}, "a list of columns for each part"),
        (2, "by-feature", {"columns": [["a"], []]}, "columns: part 2 is empty; add a column to it, or remove it"),
        (
            2,
            "by-feature",
            {"columns": [["a", "b"], ["c", "a"]]},
            "columns overlap: 'a' is in part 1 and again in part 2",
        ),
        (2, "by-feature", {"columns": [["a", 0], ["b"]]}, "columns overlap: 'a' is in part 1 and again in part 1"),
        (
            2,
            "by-feature",
            {"columns": [["a"], ["b", "c"]]},
            "columns are missing: 'd', 'e' would be in no part; add them",
        ),
        (2, "by-feature", {"columns": [["a"], ["c"]]}, "missing: 'b', 'd', 'e' would"),
        (1, "by-feature", {"columns": [["a"]]}, "missing: 'b', 'c', 'd' and 1 more would be in no part"),
        (2, "by-feature", {"columns": [["a"], ["dose"]]}, 'columns: there is no column "dose"; Known: a, b, c, d, e'),
        (2, "by-feature", {"columns": [[0], [5]]}, "columns: there is no column 5; expected 0 to 4"),
        (2, "by-feature", {"columns": [[0], [-1]]}, "columns: there is no column -1; expected 0 to 4"),
        # label holders
        (2, "grid", {"grid": [1, 2], "label_holder": 3}, "label-holder: expected the number of a column part, 1 to 2"),
        (4, "grid", {"grid": [2, 2], "label_holder": [1, 0]}, "label-holder: expected .* 1 to 2, got 0"),
        (4, "grid", {"grid": [2, 2], "label_holder": [1]}, "label-holder has 1 numbers for 2 row parts; set one"),
    ],
)
def test_bad_grids(silos: int, how: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        distribute(dataset(), silos, how, **arguments)


def test_columns_are_called_what_the_source_calls_them(tmp_path: Path) -> None:
    with pytest.raises(
        ParameterError, match=r'there is no column "balence"; did you mean "balance"[?] Known: age, balance, job'
    ):
        distribute(table(tmp_path), 2, "by-feature", columns=[["age", "job"], ["balence"]])
    with pytest.raises(ParameterError, match="columns are missing: 'job', 'balance' would be in no part"):
        distribute(table(tmp_path), 1, "by-feature", columns=[["age"]])
    with pytest.raises(ParameterError, match="columns are missing: 'job=cook', 'job=smith', 'balance' would"):
        distribute(table(tmp_path), 2, "by-feature", columns=[["age"], ["job=nurse"]])
    with pytest.raises(ParameterError, match="missing: 1, 2, 3 and 12 more would be"):
        distribute(dataset(8, (1, 4, 4)), 1, "by-feature", columns=[[0]])
    with pytest.raises(
        ParameterError, match='"ink" is a name, but these columns have no names; use indices from 0 to 15'
    ):
        distribute(dataset(8, (1, 4, 4)), 1, "by-feature", columns=[["ink"]])
