"""One owner's rows: as the run wants them, or one sentence that names the owner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moretta.data.reading import ExpectedRows, Source, read
from moretta.data.rows import Rows
from moretta.data.tables.schema import Category, Id, Number, Schema, Target
from moretta.errors import ParameterError

WHERE = "silo `north`"
CLASSES = ExpectedRows(inputs=(2,), tokens=False, classes=3, outputs=None)
UNLABELLED = ExpectedRows(inputs=(2,), tokens=False, classes=3, outputs=None, labelled=False)
NUMBERS = ExpectedRows(inputs=(2,), tokens=False, classes=None, outputs=1)
PAIRS = ExpectedRows(inputs=(2,), tokens=False, classes=None, outputs=2)
TOKENS = ExpectedRows(inputs=(2,), tokens=True, classes=3, outputs=None)
X = np.arange(8, dtype=np.float32).reshape(4, 2)
Y = np.array([0, 1, 2, 1])


def of_npz(folder: Path, wanted: ExpectedRows = CLASSES, **arrays: Any) -> Rows:
    np.savez(folder / "rows.npz", **arrays)
    return read(Source("rows.npz", base=folder), wanted, WHERE)


def of_csv(folder: Path, text: str, wanted: ExpectedRows = CLASSES, **settings: Any) -> Rows:
    (folder / "rows.csv").write_text(text)
    return read(Source("rows.csv", base=folder, **settings), wanted, WHERE)


@pytest.mark.parametrize("suffix", ["", "_train"])
def test_arrays_are_taken_as_they_are(tmp_path: Path, suffix: str) -> None:
    arrays = {f"x{suffix}": X, f"y{suffix}": Y, f"id{suffix}": np.array(list("abcd"))}
    rows = of_npz(tmp_path, **arrays)
    x, y, ids, names = rows.x, rows.y, rows.ids, rows.names
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)
    assert (x.dtype, y.dtype) == (np.float32, np.int64)
    assert ids.tolist() == list("abcd")
    assert names == ()


@pytest.mark.parametrize("y", [Y.astype(float), Y.astype(np.uint8), Y[:, None], Y == 1, np.zeros(4)])
def test_classes_are_whole_numbers_however_they_are_kept(tmp_path: Path, y: Any) -> None:
    found = of_npz(tmp_path, x=X, y=y).y
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, np.asarray(y).reshape(4))  # also where one class alone is there


def test_a_site_of_one_class_keeps_its_number(tmp_path: Path) -> None:
    assert of_npz(tmp_path, x=X, y=np.full(4, 2)).y.tolist() == [2] * 4


def test_one_hot_rows_are_as_wide_as_there_are_classes(tmp_path: Path) -> None:
    np.testing.assert_array_equal(of_npz(tmp_path, x=X, y=np.eye(3)[Y]).y, np.eye(3)[Y])
    with pytest.raises(
        ParameterError, match="targets have 2 entries a row; expected 3, one for each output of the model"
    ):
        of_npz(tmp_path, x=X, y=np.eye(2)[Y % 2])


def test_numbers_and_rows_of_numbers(tmp_path: Path) -> None:
    assert of_npz(tmp_path, NUMBERS, x=X, y=Y / 2).y.tolist() == [0, 0.5, 1, 0.5]
    assert of_npz(tmp_path, PAIRS, x=X, y=X).y.shape == (4, 2)


def test_tokens_are_whole_numbers(tmp_path: Path) -> None:
    assert of_npz(tmp_path, TOKENS, x=X.astype(np.int32), y=Y).x.dtype == np.int64
    with pytest.raises(ParameterError, match=r"expected samples of shape \[2\] as int64, .*; got \[2\] as float32"):
        of_npz(tmp_path, TOKENS, x=X, y=Y)


def test_an_unlabelled_part_needs_no_targets_and_keeps_none(tmp_path: Path) -> None:
    for arrays in ({"x": X}, {"x": X, "y": Y}, {"x": X, "y": np.full(4, np.nan)}):
        rows = of_npz(tmp_path, UNLABELLED, **arrays)
        x, y = rows.x, rows.y
        assert len(x) == 4
        assert len(y) == 0


REFUSED: list[tuple[ExpectedRows, dict[str, Any], str]] = [
    (CLASSES, {"x": X}, "expected arrays x and y; got x"),
    (CLASSES, {"y": Y}, "expected arrays x and y; got y"),
    (CLASSES, {"z": Y}, "expected arrays x and y; got z"),
    (CLASSES, {"x": X[:, :1], "y": Y}, r"expected samples of shape \[2\] as float32, .*; got \[1\]"),
    (CLASSES, {"x": X.reshape(4, 1, 2), "y": Y}, r"expected samples of shape \[2\] as float32, .*; got \[1, 2\]"),
    (CLASSES, {"x": X[:, 0], "y": Y}, r"expected samples of shape \[rows, columns or more\], got \[4\]"),
    (CLASSES, {"x": X.astype(int), "y": Y}, r"got \[2\] as int64"),
    (CLASSES, {"x": X.astype(str), "y": Y}, "expected an array of numbers"),
    (CLASSES, {"x": X[:0], "y": Y[:0]}, "has no rows; expected at least one"),
    (CLASSES, {"x": X, "y": Y[:3]}, "has 4 samples but 3 targets"),
    (CLASSES, {"x": np.where(X == 3, np.nan, X), "y": Y}, r"position \(1,\) of a sample is NaN or infinite in 1 row"),
    (CLASSES, {"x": np.where(X == 3, np.inf, X), "y": Y}, "infinite"),
    (CLASSES, {"x": X.astype(np.float64) * 1e300, "y": Y}, "infinite in 3 rows as float32"),
    (CLASSES, {"x": X, "y": Y + 1}, "label 3 does not fit 3 outputs; expected labels 0 to 2"),
    (CLASSES, {"x": X, "y": Y - 1}, "label -1 does not fit"),
    (CLASSES, {"x": X, "y": Y / 2}, "expected classes 0 to 2 as whole numbers"),
    (CLASSES, {"x": X, "y": np.where(Y == 2, np.nan, Y)}, "expected classes 0 to 2 as whole numbers"),
    (CLASSES, {"x": X, "y": np.array(list("abca"))}, "expected classes 0 to 2 as whole numbers"),
    (CLASSES, {"x": X, "y": np.ones((4, 3))}, "expected class targets"),
    (NUMBERS, {"x": X, "y": np.where(Y == 2, np.inf, Y)}, "1 targets are NaN or infinite"),
    (NUMBERS, {"x": X, "y": X}, "targets have 2 entries a row; expected 1, one for each output of the model"),
    (PAIRS, {"x": X, "y": Y}, "each target is one number, but the model has 2 outputs"),
]


@pytest.mark.parametrize(("wanted", "arrays", "sentence"), REFUSED)
def test_other_rows_are_refused_in_a_sentence_with_their_owner(
    tmp_path: Path, wanted: ExpectedRows, arrays: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ParameterError, match=sentence) as caught:
        of_npz(tmp_path, wanted, **arrays)
    assert str(caught.value).startswith(WHERE)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "y", [np.array(3), np.zeros((4, 2, 2)), np.zeros((4, 0)), np.where(Y == 2, np.inf, Y), np.where(Y == 2, 1e30, Y)]
)
def test_odd_targets_are_refused_in_a_sentence(tmp_path: Path, y: Any) -> None:
    with pytest.raises(ParameterError, match=WHERE):
        of_npz(tmp_path, x=X, y=y)


@pytest.mark.parametrize("ids", [np.arange(3), np.arange(8).reshape(4, 2), np.array(3)])
def test_there_is_one_id_a_row(tmp_path: Path, ids: Any) -> None:
    with pytest.raises(ParameterError, match=WHERE):
        of_npz(tmp_path, x=X, y=Y, id=ids)


COLUMNS = {"a": Number(), "b": Number(), "who": Id(), "y": Target(classes=("0", "1", "2"))}
TABLE = replace(CLASSES, table=Schema(columns=COLUMNS))
TABLE_OF_NUMBERS = replace(NUMBERS, table=Schema(columns={**COLUMNS, "y": Target()}))


def test_a_table_is_read_by_the_runs_schema(tmp_path: Path) -> None:
    text = "who,y,b,a\np1,0,2,1\np2,2,4,3\n"
    rows = of_csv(tmp_path, text, TABLE)
    assert rows.x.tolist() == [[1, 2], [3, 4]]
    assert rows.y.tolist() == [0, 2]
    assert rows.ids is not None
    assert rows.ids.tolist() == ["p1", "p2"]
    assert (rows.groups, rows.names) == (None, ("a", "b"))
    assert of_csv(tmp_path, "who,a,b,y\np,1,2,0.5\nq,3,4,1\n", TABLE_OF_NUMBERS).y.tolist() == [0.5, 1.0]


def test_a_site_of_one_class_and_one_category_has_the_columns_of_all(tmp_path: Path) -> None:
    ward = Category(categories=("A", "B"))
    wanted = replace(CLASSES, table=Schema(columns={"ward": ward, "y": Target(classes=("no", "maybe", "yes"))}))
    found = of_csv(tmp_path, "ward,y\nB,yes\nB,yes\n", wanted)
    assert found.x.tolist() == [[0, 1], [0, 1]]
    assert found.y.tolist() == [2, 2]


def test_absent_values_stay_absent_where_the_schema_fills_them_in(tmp_path: Path) -> None:
    text = "who,a,b,y\np,1,2,0\nq,3,,1\nr,5,8,2\n"
    with pytest.raises(ParameterError, match="column 'b' has no value in 1 of 3 rows"):
        of_csv(tmp_path, text, TABLE)
    filled = Schema(columns={**COLUMNS, "b": Number(blanks="mean")})
    found = of_csv(tmp_path, text, replace(TABLE, table=filled, may_lack=True))
    assert np.isnan(found.x).tolist() == [[False, False], [False, True], [False, False]]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a,b,y\n1,2,0\n", "the column 'who' of the schema is missing among its 3; does its first line"),
        ("who,a,y\np,1,0\n", "the column 'b' of the schema is missing"),
        ("who,a,b,c,y\np,1,2,3,0\n", "the schema lacks the column 'c'"),
        ("who,a,b,y\np,1,red,0\nq,2,blue,1\n", "column 'b' has something other than a number in 2 of 2 rows"),
        ("who,a,b,y\np,1,2,no\nq,3,4,yes\n", "column 'y' has a word that the schema does not have in 2 of 2 rows"),
        ("who,a,b,y\np,1,2,0.5\nq,3,4,1\n", "column 'y' has a word that the schema does not have in 1 of 2 rows"),
        ("who,a,b,y\np,1,2,0\np,3,4,1\n", "column 'who' has 1 rows whose id is repeated"),
        ("who,a,b,y\n", "has no rows"),
        ("", "has no rows"),
    ],
)
def test_a_table_that_others_would_read_otherwise_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ParameterError, match=sentence) as caught:
        of_csv(tmp_path, text, TABLE)
    assert len(str(caught.value).splitlines()) == 1


def test_without_a_schema_a_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"rows\.csv is a table, and the run has no schema"):
        of_csv(tmp_path, "a,b,y\n1,2,0\n")
    with pytest.raises(ParameterError, match=r"the run's rows are a table's; .* got 'rows\.npz'"):
        of_npz(tmp_path, TABLE, x=X, y=Y)


def test_a_table_of_an_unlabelled_part_has_features_only(tmp_path: Path) -> None:
    table = Schema(columns={"a": Number(), "b": Number()})
    assert of_csv(tmp_path, "a,b\n1,2\n3,4\n", replace(UNLABELLED, table=table)).x.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("none.npz", "there is no file .*none.npz"),
        ("rows.npy", 'expected a table .*, an .npz file or "module:function"'),
        ("wdbc", 'expected a table .*, an .npz file or "module:function"'),
        ("no_such_module_here:rows", 'importing "no_such_module_here"'),
    ],
)
def test_sources_that_are_none_are_refused(tmp_path: Path, source: str, sentence: str) -> None:
    with pytest.raises(ParameterError, match=sentence):
        read(Source(source, base=tmp_path), CLASSES, WHERE)


def test_groups_are_read_as_ids_are(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "x": np.zeros((4, 2)),
        "y": [0, 1, 2, 0],
        "id": [5, 6, 7, 8],
        "group": ["a", "a", "b", "a"],
    }
    rows = of_npz(tmp_path, **arrays)
    assert np.asarray(rows.ids).tolist() == ["5", "6", "7", "8"]
    assert np.asarray(rows.groups).tolist() == ["a", "a", "b", "a"]
    for groups, got in (
        (["a", "a", "b"], "expected 4 words or whole numbers, one a row; got 3 values"),
        ([1.0, 1.0, 2.0, np.nan], "expected 4 words or whole numbers, one a row; got 4 values of type float64"),
        ([b"a", b"a", b"b", b"a"], "expected 4 words or whole numbers"),
        (["a", "", "", "b"], "2 of 4 are empty, and would count as the same one"),
    ):
        for expected in (CLASSES, replace(CLASSES, training=False)):
            for name in ("group", "id"):
                with pytest.raises(ParameterError, match=f"{WHERE}: rows.npz: {name}: {got}"):
                    of_npz(tmp_path, expected, **{**arrays, name: groups})


def test_a_function_beside_silo_toml_gives_rows(tmp_path: Path) -> None:
    (tmp_path / "my_own_rows.py").write_text(
        "import numpy as np\n\ndef rows():\n    x = np.ones((4, 2), np.float32)\n\n"
        "    return x, [0, 1, 2, 0], x, [0] * 4\n"
    )
    rows = read(Source("my_own_rows:rows", base=tmp_path), CLASSES, WHERE)
    assert rows.x.shape == (4, 2)
    assert rows.y.tolist() == [0, 1, 2, 0]
