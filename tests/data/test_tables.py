"""Tables as files, as schemas and as rows: what is read and guessed, and what is refused without quoting a cell."""

from __future__ import annotations

import gzip
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moretta.commands.align import read_ids
from moretta.data.rows import Subjects
from moretta.data.tables import schema as schemas
from moretta.data.tables.doubts import Hints
from moretta.data.tables.files import Format, as_columns, read_columns
from moretta.data.tables.inference import Guess, as_toml, infer, lines_of, propose
from moretta.data.tables.preparation import Preparation
from moretta.data.tables.rows import TableRows, encode, expansion_of, read_table, rules_of
from moretta.data.tables.schema import Category, Date, Drop, Grouping, Id, Number, Schema, Target
from moretta.errors import ParameterError

PLAIN = "age,job,score\n31,cook,0\n45,nurse,1\n28,cook,1\n"


def write(folder: Path, text: str, name: str = "t.csv", encoding: str = "utf-8") -> Path:
    path = folder / name
    data = text.encode(encoding)
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def inferred(path: Path, form: Format | None = None, **wanted: Any) -> tuple[Schema, TableRows]:
    form = form or Format()
    columns = read_columns(path, form)
    found = infer(columns, Hints(**wanted), path.name, form)
    return found, encode(columns, found, path.name, form)


# Files


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (PLAIN, "t.csv"),
        (PLAIN, "t.csv.gz"),
        (PLAIN.replace(",", ";"), "t.csv"),
        (PLAIN.replace(",", "\t"), "t.csv"),
        (PLAIN.replace("\n", "\r\n"), "t.csv"),
        ("\ufeff" + PLAIN, "t.csv"),
        (PLAIN + "\n\n", "t.csv"),
        ('"age";"job";"score"\r\n31;"cook";"0"\r\n45;"nurse";1\r\n28;"cook";1', "t.csv"),
        (PLAIN.replace(",", " , "), "t.csv"),
    ],
)
def test_every_dialect_gives_the_same_rows(tmp_path: Path, text: str, name: str) -> None:
    schema, rows = inferred(write(tmp_path, text, name))
    assert expansion_of(schema).names == ("age", "job=cook", "job=nurse")
    np.testing.assert_array_equal(rows.x, np.array([[31, 1, 0], [45, 0, 1], [28, 1, 0]], np.float32))
    np.testing.assert_array_equal(rows.coded, np.array([[31, 0], [45, 1], [28, 0]], np.float32))
    assert rows.x.dtype == np.float32
    assert rows.y.tolist() == [0, 1, 1]
    assert schema.classes == ("0", "1")


def test_a_quoted_cell_may_hold_the_separator_and_a_line_end(tmp_path: Path) -> None:
    schema, _ = inferred(write(tmp_path, 'a,b,y\n"x,\n""z",1,0\nw,2,1\n'))
    assert expansion_of(schema).names == ("a=w", 'a=x,\n"z', "b")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_an_empty_line_is_a_row_where_there_is_one_column(tmp_path: Path, end: str) -> None:
    (tmp_path / "one.csv").write_text(end.join(["age", "1", "", "3", "", ""]), newline="")
    assert read_columns(tmp_path / "one.csv")["age"].tolist() == ["1", "", "3"]
    (tmp_path / "two.csv").write_text(end.join(["age,b", "1,2", "", "3,4", "", ""]), newline="")
    assert read_columns(tmp_path / "two.csv")["age"].tolist() == ["1", "3"]


def test_how_a_file_is_written_may_be_declared(tmp_path: Path) -> None:
    path = write(tmp_path, "größe|ort|y\n1,5|Malmö|0\nn/a|Köln|1\n2,25|Köln|1\n", encoding="latin-1")
    form = Format("|", ",", "latin-1", ("n/a",))
    schema, rows = inferred(path, form, missing="mean")
    assert expansion_of(schema).names == ("größe", "ort=Köln", "ort=Malmö")
    np.testing.assert_array_equal(rows.x[:, 0], np.array([1.5, np.nan, 2.25], np.float32))
    with pytest.raises(ParameterError, match=r't\.csv is not utf-8 text \(byte 2\); .* file-encoding = "latin-1"'):
        read_columns(path)
    with pytest.raises(ParameterError, match='file-encoding = "klingon" reads no text'):
        read_columns(path, Format(encoding="klingon"))
    path = write(tmp_path, "age,y\n31-,0\n45-,1\n")
    for codec in ("punycode", "undefined", "rot13"):  # Python has them, and they are none of such texts
        with pytest.raises(ParameterError, match=f'file-encoding = "{codec}" reads no text') as caught:
            read_columns(path, Format(encoding=codec))
        assert "31" not in str(caught.value)
    path = write(tmp_path, "age,y\n\\ud800,0\n45-,1\n")
    for codec in ("a\0b", "unicode_escape", "raw_unicode_escape"):  # the last two make half a character of the first
        with pytest.raises(ParameterError, match="reads no text in it"):
            read_columns(path, Format(encoding=codec))


def test_a_column_twice_in_parquet_is_said_as_in_csv(tmp_path: Path) -> None:
    twice = pyarrow.table([[1, 2], [3, 4], ["a", "b"]], names=["age", "age", "y"])
    pyarrow.parquet.write_table(twice, tmp_path / "t.parquet")
    with pytest.raises(ParameterError, match=r"t\.parquet: the first line has the name of column 2 of 3 twice"):
        read_columns(tmp_path / "t.parquet")
    with pytest.raises(ParameterError, match=r"run\.toml: expected a table, a file that ends in \.csv, "):
        read_columns(write(tmp_path, "x", "run.toml"))


def test_the_same_rows_as_csv_parquet_and_arrow_are_the_same_bytes(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    table = pyarrow.table(
        {
            "dose": generator.normal(size=40) * 1e-3,
            "count": generator.integers(0, 9, 40),
            "ward": generator.choice(["A", "B"], 40),
            "smokes": generator.random(40) < 0.5,
            "seen": np.datetime64("2024-01-01") + generator.integers(0, 99, 40),
            "y": generator.integers(0, 2, 40),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    pyarrow.feather.write_feather(table, tmp_path / "t.arrow")
    cells = [[str(value).lower() if value in (True, False) else str(value) for value in column.to_pylist()]
             for column in table.columns[3:4]]  # fmt: skip
    lines = [",".join(table.column_names)]
    for k in range(40):
        row = [column[k].as_py() for column in table.columns]
        row[3] = cells[0][k]
        lines.append(",".join(repr(v) if isinstance(v, float) else str(v) for v in row))
    write(tmp_path, "\n".join(lines) + "\n")
    columns = {"seen": Date(), "y": Target(classes=("0", "1"))}
    words = {"ward": Category(categories=("A", "B")), "smokes": Category(categories=("false", "true"))}
    schema = Schema(columns={"dose": Number(), "count": Number(), **words, **columns})
    found = [read_table(tmp_path / name, schema) for name in ("t.csv", "t.parquet", "t.arrow")]
    assert len({rows.x.tobytes() for rows in found}) == 1
    assert len({rows.y.tobytes() for rows in found}) == 1


def test_keywords_say_how_a_file_is_written_and_rows_are_taken_by_number(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("patient;crp;ill\nA;1,5;ja\nB;kein Wert;n\u00f6\nA;3,5;ja\n", encoding="latin-1")
    columns = {"patient": Grouping(), "crp": Number(blanks="mean"), "ill": Target(classes=("n\u00f6", "ja"))}
    schema = Schema(columns=columns)
    rows = read_table(path, schema, separator=";", decimal=",", encoding="latin-1", absent="kein Wert")
    same = read_table(path, schema, Format(";", ",", "latin-1", ("kein Wert",)))
    np.testing.assert_array_equal(rows.x[:, 0], np.array([1.5, np.nan, 3.5], np.float32))
    np.testing.assert_array_equal(rows.x, same.x)
    for places in ([2, 0], np.array([True, False, True])):
        some = rows[places]
        assert sorted(some.x[:, 0].tolist()) == [1.5, 3.5]
        assert some.y.tolist() == [1, 1]
        assert some.groups is not None
        assert some.groups.tolist() == ["A", "A"]
        assert some.ids is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PLAIN + "1,2\n", "line 5 has 2 cells, but the header has 3"),
        ("a,a,y\n1,2,0\n", "the first line has the name of column 2 of 3 twice"),
        ("a,,y\n1,2,0\n", "the first line has no name for column 2"),
        ("", "has no rows"),
        ("\n1,2\n", "has no rows"),
        ("a,y\n", "has no rows"),
        ('"a\n(x)",y\n1,0\n', "the first line has a name with a line break; expected each name in one line"),
        ('a,"y\r\n(x)"\r\n1,0\r\n', "the first line has a name with a line break"),
        ('a;"b\n(x)";y\n1;2;0\n', "the first line has a name with a line break"),
        ('"a,y\n1,0\n', "the first line has a name with a line break; .* or close its quotes"),
        ('a,y\n1,0\n"2,1\n', "line 3 has a quote that no other closes at the end of its cell"),
        ('a,y\n1,0\n"old,1\n2,0\n3,"1"\n', "line 3 has a quote that no other closes"),
        ('a,y\n1,0\n2,"fever\n3,0\n4,1\n', "line 3 has a quote that no other closes"),
        ('a,y\n1,0\n"old,1\n"new,0\n3,1\n', "line 3 has a quote that no other closes"),
        ('a,y\n"one\ntwo",0\n"a ""b"",1\n2,0\n', "line 4 has a quote that no other closes"),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        read_columns(write(tmp_path, text))


def test_quotes_that_close_are_part_of_no_cell(tmp_path: Path) -> None:
    path = write(tmp_path, 'a,y\n"one, and\ntwo",0\n5" long,1\n"5"" long",1\n"",0\n')
    assert list(read_columns(path)["a"]) == ["one, and\ntwo", '5" long', '5" long', ""]
    path = write(tmp_path, f'a,y\n"{"long," * 30_000}",0\n"blank behind" ,1\n "before",0\n')
    assert list(read_columns(path)["a"]) == ["long," * 30_000, "blank behind", '"before"']


def test_pandas_na_is_blank() -> None:
    pandas = pytest.importorskip("pandas")
    words = pandas.DataFrame({"ward": ["A", None, "B"]})
    for frame in (words.convert_dtypes(), words.astype("string"), words.replace({None: pandas.NA})):
        assert list(as_columns(frame, "rows")["ward"]) == ["A", "", "B"]


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"there is no file .*none\.csv"):
        read_columns(tmp_path / "none.csv")
    for name in ("bad.csv.gz", "bad.parquet", "bad.arrow"):
        (tmp_path / name).write_bytes(b"no such thing")
        with pytest.raises(ParameterError, match=r"cannot be read|is not readable as"):
            read_columns(tmp_path / name)
    whole = gzip.compress(PLAIN.encode() * 50)
    (tmp_path / "cut.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ParameterError, match="cannot be read"):
        read_columns(tmp_path / "cut.csv.gz")
    nested = pyarrow.table({"a": [[1], [2]], "y": [0, 1]})
    pyarrow.parquet.write_table(nested, tmp_path / "nested.parquet")
    with pytest.raises(ParameterError, match=r"column 'a' has the type list.*expected numbers"):
        read_columns(tmp_path / "nested.parquet")


# Guesses


@pytest.mark.parametrize(
    ("cells", "task", "y", "classes"),
    [
        (["3", "1", "3"], None, [1, 0, 1], ("1", "3")),
        (["10", "9", "10"], None, [1, 0, 1], ("9", "10")),
        (["3", "1", "3"], "regression", [3.0, 1.0, 3.0], ()),
        (["0.5", "1", "2"], None, [0.5, 1.0, 2.0], ()),
        (["1.0", "0.0", "1.0"], "regression", [1.0, 0.0, 1.0], ()),
        (["1.0", "0.0", "2.0"], None, [1.0, 0.0, 2.0], ()),
        (["1.0", "0.0", "1.0"], "classification", [1, 0, 1], ("0", "1")),
        (["yes", "no", "yes"], None, [1, 0, 1], ("no", "yes")),
    ],
)
def test_targets(tmp_path: Path, cells: list[str], task: str, y: list[float], classes: tuple[str, ...]) -> None:
    path = write(tmp_path, "x,y\n" + "".join(f"{2 * i},{cell}\n" for i, cell in enumerate(cells)))
    schema, rows = inferred(path, task=task)
    assert rows.y.tolist() == y
    assert schema.classes == classes


@pytest.mark.parametrize("cells", [["1.0", "0.0", "1.0"], ["1.00", "2.0", "1.0"], ["1e0", "0", "1"]])
def test_two_whole_numbers_written_as_fractions_are_asked_about(tmp_path: Path, cells: list[str]) -> None:
    """They were amounts without a question, and a regression of 0 and 1."""
    path = write(tmp_path, "x,y\n" + "".join(f"{2 * i},{cell}\n" for i, cell in enumerate(cells)))
    seen = "holds two whole numbers, written as fractions in 3 of 3 rows: classes .*regression"
    with pytest.raises(ParameterError, match=seen):
        inferred(path)


def column(cells: list[str]) -> str:
    return "x,y\n" + "".join(f"{cell},{i % 5 % 2}\n" for i, cell in enumerate(cells))


NAMES = [f"{chr(97 + i % 26)}{chr(98 + i % 25)}{chr(99 + i % 23)}" for i in range(59)] + ["abc"]


@pytest.mark.parametrize(
    ("text", "wanted", "message"),
    [
        (column([f"P{i:03}" for i in range(20)]), {}, "column 'x' looks like ids .*id-column, .* kind = \"id\""),
        (column([str(i) for i in range(1, 21)]), {}, "column 'x' looks like ids"),
        (column([str(9001234 + 7 * i) for i in range(20)]), {}, "column 'x' looks like ids"),
        (
            column([f"P{i % 4}" for i in range(200)]).replace("x,", "patient_id,"),
            {},
            "column 'patient_id' looks like ids",
        ),
        (column([str(i % 4) for i in range(200)]).replace("x,", "record_no,"), {}, "column 'record_no' looks like ids"),
        (column([f"202401{1 + i % 28:02}" for i in range(20)]), {}, 'dates .* format = "%Y%m%d"'),
        (column([f"0{1 + i % 9}/0{1 + i % 5}/2024" for i in range(20)]), {}, '"%m/%d/%Y".* or .*"%d/%m/%Y"'),
        (column([f"2024-01-{1 + i % 28:02} 10:20" for i in range(20)]), {}, 'format = "%Y-%m-%d %H:%M"'),
        (
            column(['"10,431"', '"7,250"', '"12,000"'] * 5),
            {},
            'before three digits .* thousands = ",".* decimal = ","',
        ),
        (column(["1.5", "", "2"] * 5), {"missing": "median"}, "a median needs a range"),
        ("P0012,63,yes\nP0013,64,no\n", {}, "the first line holds numbers, expected names of columns"),
        (column(["7", "9"] * 10).replace("x,", "patient_id,"), {}, None),  # two values are no ids
        (column([str(i // 2) for i in range(40)]).replace("x,", "patientId,"), {}, 'ids, .*kind = "group"'),
        (column([f"2024-01-{1 + i % 28:02}" for i in range(20)]), {}, 'holds dates in 20 of 20 rows: .*kind = "date"'),
        (column([f"{1 + i % 28}.11.2024" for i in range(20)]), {}, 'dates .* format = "%d.%m.%Y"'),
        (column([f"0{1 + i % 9}/0{1 + i % 5}/20" for i in range(20)]), {}, '"%m/%d/%y".* or .*"%d/%m/%y"'),
        (
            column([f"0{1 + i % 9}-0{1 + i % 5}-12" for i in range(20)]),
            {},
            '"%y-%m-%d".* or .*"%d-%m-%y".* or .*"%m-%d-%y"',
        ),
        (column([f"2024-01-{1 + i % 28:02}T10:20:30.5Z" for i in range(20)]), {}, 'dates .*"%Y-%m-%dT%H:%M:%S.%fZ"'),
        (
            column(["2024-01-05", "05.01.2024"] * 10),
            {},
            "holds dates in no single known form: .* write them in one form",
        ),
        (
            "x,y\n" + "".join(f"{i % 7}.5,{('NO', 'yes', 'no', 'yes')[i % 4]}\n" for i in range(40)),
            {},
            "by capitals alone",
        ),
        (column(["1", "2", "<5", "7"] * 5), {}, 'in 5 of 20 rows something else; .* censored = "limit" or "half"'),
        (column(["1", "2", "n/a", "7"] * 5), {}, r'something else; .* absent = \["n/a"\]'),
        (column(['"1,5"', '"2,25"', "7"] * 5), {}, 'decimal comma: set decimal = ","'),
        (column(NAMES), {}, "has .* different words in 60 of 60 rows, too many to be categories"),
        (column(["", ""] * 5), {}, "column 'x' has no values"),
        ("x,y\n" + "".join(f"{2 * i},{('dead', 'alive', 'unknown')[i % 3]}\n" for i in range(30)), {}, "`unknown`"),
        ("x,y\n" + "".join(f"{2 * i},{'ab'[i % 2] if i else 'c'}\n" for i in range(200)), {}, "in 1 of 200 rows"),
        ("a,y\n1,0\n2,0\n", {}, "'y' is the target and has the same value in every row"),
        ("a,y\n1,no\n2,no\n", {}, "'y' is the target and has the same value in every row"),
        (PLAIN, {"target": "scores"}, 'no column "scores" for the target; did you mean "score"'),
        (
            PLAIN,
            {"target": "job", "task": "regression"},
            "'job' is the target and holds words where a regression needs",
        ),
        ("y\n1\n0\n", {}, "no column beside the target"),
        (
            "a,y\n1,0\n2,\n",
            {"missing": "median"},
            "'y' is the target and lacks values in 1 of 2 rows; remove",
        ),
        ("a,b,y\n1,,0\n2,3,1\n", {}, "column 'b' in 1 of 2 rows; fill them in, or set missing"),
    ],
)
def test_what_is_not_sure_is_refused_and_quotes_no_cell(
    tmp_path: Path, text: str, wanted: dict[str, Any], message: str | None
) -> None:
    path = write(tmp_path, text)
    if message is None:
        inferred(path, **wanted)
        return
    with pytest.raises(ParameterError, match=message) as caught:
        inferred(path, **wanted)
    assert str(caught.value).startswith("t.csv")
    assert not any(cell in str(caught.value) for cell in ("P003", "abc", "alive", "2024-01-05"))


def test_a_proposal_is_a_schema_once_it_is_decided(tmp_path: Path) -> None:
    ids = [f"{i},{20 + 3 * (i % 7)},<5,2024-01-{i + 1:02},{i % 2}" for i in range(20)]
    path = write(tmp_path, "patient,age,crp,admitted,died\n" + "\n".join(ids) + "\n")
    guesses = propose(read_columns(path), Hints(), path.name, Format())
    assert [guess.column.kind for guess in guesses.values()] == ["id", "number", "number", "date", "target"]
    text = as_toml(guesses)
    assert text.count("# decide: it") == 3
    (tmp_path / "schema.toml").write_text(text)
    with pytest.raises(ParameterError, match=r"\[columns.patient\] is undecided"):
        schemas.load(tmp_path / "schema.toml")
    decided = re.sub(r'kind = "decide"  # perhaps (".*")', r"kind = \1", text)
    (tmp_path / "schema.toml").write_text(decided)
    schema = schemas.load(tmp_path / "schema.toml")
    rows = read_table(path, schema)
    assert rows.x[:2].tolist() == [[20, 2.5, 19723], [23, 2.5, 19724]]
    assert rows.ids is not None
    assert rows.ids[3] == "3"
    assert lines_of(schema) == [
        "numbers: age, crp",
        "dates: admitted",
        "not trained on (id): patient",
        "target: died, classes 0, 1",
    ]


# Schemas

FULL = """
[columns.stage]
kind = "ordered"
categories = ["I", "II", "III"]
blanks = "median"
unseen = "blank"

[columns.age]
kind = "number"
unit = "years"
range = [0, 120]
blanks = "indicator"

[columns.ward]
kind = "category"
categories = ["A", "B"]
blanks = "category"

[columns.seen]
kind = "date"
format = "%d.%m.%Y"
range = [2020-01-01, 2024-12-31]
blanks = "median"

[columns.patient]
kind = "group"

[columns.note]
kind = "drop"

[columns.died]
kind = "target"
classes = ["no", "yes"]
"""
ROWS = "patient;age;note;ward;seen;stage;died\np1;60;x;A;31.12.2021;II;yes\np1;;y;;;IV;no\np2;30;z;B;01.01.2020;I;no\n"


def full(tmp_path: Path, text: str = FULL) -> Schema:
    (tmp_path / "schema.toml").write_text(text)
    return schemas.load(tmp_path / "schema.toml")


def test_every_kind_of_column(tmp_path: Path) -> None:
    schema = full(tmp_path)
    rows = read_table(write(tmp_path, ROWS), schema)
    names = ("stage", "age", "age=missing", "ward=A", "ward=B", "ward=missing", "seen")
    assert expansion_of(schema).names == names
    assert expansion_of(schema).origins == ("stage", "age", "age", "ward", "ward", "ward", "seen")
    nan = np.nan
    expected = [[1, 60, 0, 1, 0, 0, 18992], [nan, nan, 1, 0, 0, 1, nan], [0, 30, 0, 0, 1, 0, 18262]]
    np.testing.assert_array_equal(rows.x, np.array(expected, np.float32))
    np.testing.assert_array_equal(rows.coded[0], np.array([1, 60, 0, 18992], np.float32))
    assert rows.y.tolist() == [1, 0, 0]
    assert rows.groups is not None
    assert rows.groups.tolist() == ["p1", "p1", "p2"]
    rules = rules_of(schema)
    assert rules.fills.tolist() == [2, 1, 0, 0, 0, 0, 2]
    assert rules.medians.tolist() == [0, 6]
    assert (rules.low[6], rules.high[6]) == (18262, 20088)
    found = Preparation(np.arange(7.0), np.ones(7), np.full(7, 2.0)).apply(rows.x, np.float64)
    np.testing.assert_array_equal(found[1], (np.array([0, 1, 1, 0, 0, 1, 6]) - 1) / 2)


def test_a_schema_says_the_same_after_it_was_written_down(tmp_path: Path) -> None:
    schema = full(tmp_path)
    text = as_toml({name: Guess(column) for name, column in schema.columns.items()})
    (tmp_path / "again.toml").write_text(text)
    again = schemas.load(tmp_path / "again.toml")
    assert again == schema
    assert again.digest == schema.digest
    assert schemas.of(schema.plain()).digest == schema.digest
    moved = {name: schema.columns[name] for name in reversed(schema.columns)}
    assert schema.model_copy(update={"columns": moved}).digest != schema.digest  # order is part of what is agreed


def test_the_order_of_a_files_columns_does_not_matter(tmp_path: Path) -> None:
    schema, lines = full(tmp_path), [line.split(";") for line in ROWS.splitlines()]
    whole = read_table(write(tmp_path, ROWS), schema)
    order = np.random.default_rng(1).permutation(7)
    other = "\n".join(";".join(line[k] for k in order) for line in lines) + "\n"
    assert read_table(write(tmp_path, other, "o.csv"), schema).x.tobytes() == whole.x.tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("60", "600"), "column 'age' has a value outside its range 0 to 120 in 1 of 3 rows .the first is row 1."),
        (("60", "sixty"), "column 'age' has something other than a number in 1 of 3 rows"),
        (("60", "<60"), 'censored = "limit" or "half"'),
        (("A;", "C;"), "column 'ward' has a word that the schema does not have in 1 of 3 rows"),
        (("31.12.2021", "2021-12-31"), "column 'seen' has no date of the form '%d.%m.%Y' in 1 of 3 rows"),
        (("31.12.2021", "31.12.2031"), "column 'seen' has a value outside its range"),
        ((";yes", ";maybe"), "column 'died' has a word that the schema does not have"),
        ((";yes", ";"), "column 'died' has no target in 1 of 3 rows"),
        (("p2", ""), "column 'patient' has no value in 1 of 3 rows .the first is row 3."),
        (("p2", '"p\n2"'), "column 'patient' has line breaks or control characters"),
        (("age", "agge"), "the column 'age' of the schema is missing among its 7; did you mean \"agge\""),
        (("patient;", "who;"), "the column 'patient' of the schema is missing"),
        (("note", "new"), "the schema lacks the column 'new'"),
    ],
)
def test_rows_that_are_not_as_the_schema_says(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = write(tmp_path, ROWS.replace(*change, 1))
    with pytest.raises(ParameterError, match=message) as caught:
        read_table(path, full(tmp_path))
    said = str(caught.value)
    assert said.startswith("t.csv")
    assert not any(cell in said for cell in ("600", "sixty", "maybe", "2031", "p2", "p1"))


def test_a_words_place_does_not_depend_on_the_files_other_words() -> None:
    grades = Category(categories=("1", "2"), blanks="category", unseen="blank")
    schema = Schema(columns={"g": grades, "t": Category(categories=("false", "true"))})
    columns = {"g": np.array(["1.0", "01", "2"], object), "t": np.array(["True", "false", "TRUE"], object)}
    alone = {name: words[:1] for name, words in columns.items()}
    mixed = encode({**columns, "g": np.array(["1.0", "IV", "2"], object)}, schema, "t", labelled=False)
    found = [encode(one, schema, "t", labelled=False).x[0].tolist() for one in (columns, alone)]
    assert found == [mixed.x[0].tolist()] * 2 == [[1, 0, 0, 0, 1]] * 2
    assert encode(columns, schema, "t", labelled=False).x[1].tolist() == [0, 0, 1, 1, 0]  # 01 is another code than 1


def test_parquet_ids_beyond_a_floats_digits_and_columns_left_out(tmp_path: Path) -> None:
    ids = [90071992547409931 + k for k in range(3)]
    table = pyarrow.table({"who": ids, "free": [[1], [2], [3]], "age": [50, 999, 70], "y": [0, 1, 0]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    kinds = {"who": Id(), "free": Drop(), "age": Number(blanks="mean"), "y": Target(classes=("0", "1"))}
    rows = read_table(tmp_path / "t.parquet", Schema(columns=kinds), Format(absent=("999",)))
    assert rows.ids is not None
    assert rows.ids.tolist() == [str(one) for one in ids]
    assert np.isnan(rows.x[:, 0]).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", ["int64", "float64", "float32", "object", "string"])
def test_a_column_means_the_same_in_every_kind_of_table(tmp_path: Path, dtype: str) -> None:
    pandas = pytest.importorskip("pandas")
    big = 2**60
    frame = pandas.DataFrame({"age": [-9, 50, 60], "who": [big + 1, big + 2, big + 3], "y": ["no", "yes", "no"]})
    frame["age"] = frame["age"].astype(dtype)
    frame["who"] = frame["who"].astype("object" if dtype == "object" else "int64")
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_csv(tmp_path / "comma.csv", index=False, sep=";", decimal=",")
    frame.to_parquet(tmp_path / "t.parquet")
    kinds = {"age": Number(blanks="mean"), "who": Id(), "y": Target(classes=("no", "yes"))}
    columns = {name: list(frame[name]) for name in frame}
    for absent in ("-9", "-9.0", "-9.00"):
        tables: list[tuple[Any, Format]] = [(table, Format(absent=(absent,))) for table in (frame, columns)]
        tables += [(tmp_path / f"t.{kind}", Format(absent=(absent,))) for kind in ("csv", "parquet")]
        tables.append((tmp_path / "comma.csv", Format(decimal=",", absent=(absent.replace(".", ","),))))
        for table, form in tables:
            rows = read_table(table, Schema(columns=kinds), form)
            assert rows.ids is not None
            assert np.isnan(rows.x[:, 0]).tolist() == [True, False, False], (table, absent)
            assert rows.ids.tolist() == [str(big + k) for k in (1, 2, 3)]


@pytest.mark.parametrize("kind", [Id(), Grouping()])
@pytest.mark.parametrize(
    ("cells", "ids"),
    [
        (["17.0", "18", "19.00", "20,0"], ["17", "18", "19", "20"]),
        (["17.0", "P9", "17.5", "017"], ["17", "P9", "17.5", "017"]),
        (["1.000", "1", "2,000", "v2.0"], ["1.000", "1", "2,000", "v2.0"]),  # perhaps thousands
    ],
)
def test_an_id_that_was_written_as_a_float_is_the_whole_number(
    tmp_path: Path, kind: Any, cells: list[str], ids: list[str]
) -> None:
    """pandas writes 17.0 where another id is blank: a patient of two files was two."""
    schema = Schema(columns={"who": kind, "x": Number(), "y": Target()})
    path = write(tmp_path, "who;x;y\n" + "".join(f"{cell};{k};0\n" for k, cell in enumerate(cells)))
    for columns in (read_columns(path), as_columns({"who": cells, "x": [*range(4)], "y": [0] * 4}, "t")):
        rows = encode(columns, schema, "t")
        assert Subjects(rows.ids, rows.groups).whom.tolist() == ids  # type: ignore[union-attr]
        kept = encode(columns, schema, "t", training=False)
        assert Subjects(kept.ids, kept.groups).whom.tolist() == cells  # type: ignore[union-attr]
    for place, cell in enumerate(cells):  # whatever other rows hold
        alone = encode({name: column[place : place + 1] for name, column in columns.items()}, schema, "t")
        assert Subjects(alone.ids, alone.groups).whom.tolist() == [ids[place]], cell  # type: ignore[union-attr]
    assert read_ids(path, "who", None, None).tolist() == ids
    with pytest.raises(ParameterError, match=r"column 'who' has na or nan, which may stand for no value, in 2 of 4"):
        encode({**columns, "who": np.array(["na", "NAN", "Nadia", "5"], object)}, schema, "t")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_number_means_the_same_in_32_bits(dtype: Any) -> None:
    """float32 made 0.1 a number above 0.1, another word, and no code for an absent value."""
    columns = {
        "a": Number(absent=(-99.9,), blanks="mean", range=(0, 0.1)),
        "b": Category(categories=("0.1", "0.5"), blanks="category", unseen="blank"),
        "y": Target(range=(0.1, 0.7)),
    }
    numbers = {name: np.array([0.1, -99.9, 0.05], dtype) for name in ("a", "b")} | {
        "y": np.array([0.1, 0.7, 0.5], dtype)
    }
    rows = read_table(numbers, Schema(columns=columns))
    np.testing.assert_array_equal(rows.x[:, 0], np.array([0.1, np.nan, 0.05], np.float32))
    assert rows.x[:, 1:].tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 1]]
    with pytest.raises(ParameterError, match=r"column 'a' has a value outside its range 0 to 0\.1 in 1 of 3 rows"):
        read_table(numbers | {"a": np.array([0.1, 0.10001, 0], dtype)}, Schema(columns=columns))


@pytest.mark.parametrize("kind", ["csv", "parquet", "columns"])
def test_numbers_beyond_32_bits_are_refused_or_left_out_in_every_kind_of_table(tmp_path: Path, kind: str) -> None:
    table: Any = {"a": [1.0, 1e39, 2.0], "y": [0.0, 1.0, 2.0]}
    if kind == "csv":
        table = write(tmp_path, "a,y\n1,0\n1e39,1\n2,2\n")
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "t.parquet")
        table = tmp_path / "t.parquet"
    schema = Schema(columns={"a": Number(), "y": Target()})
    with pytest.raises(ParameterError, match="column 'a' has numbers beyond what float32 holds in 1 of 3 rows"):
        read_table(table, schema)
    columns = read_columns(table) if isinstance(table, Path) else as_columns(table, "t")
    left = encode(columns, schema, "t", training=False, leave_out=True)
    assert left.x[:, 0].tolist() == [1, 2]
    assert left.left_out == {2: "column 'a' has numbers beyond what float32 holds"}
    turned = Schema(columns={"y": Number(), "a": Target()})
    with pytest.raises(ParameterError, match="column 'a' has numbers beyond what float32 holds in 1 of 3 rows"):
        read_table(table, turned)


def test_a_limit_is_no_code_for_an_absent_value() -> None:
    cells = np.array([">999", ">1000", "999", "120", "<1998", "999.0"], object)
    for censored, below in (("limit", 1998), ("half", 999)):
        schema = Schema(columns={"a": Number(censored=censored, absent=(999,), blanks="mean"), "y": Target()})
        found = encode({"a": cells, "y": np.zeros(6)}, schema, "t").x[:, 0]
        np.testing.assert_array_equal(found, np.array([999, 1000, np.nan, 120, below, np.nan], np.float32))
        plain = encode({"a": cells[2:4], "y": np.zeros(2)}, schema, "t").x[:, 0]
        np.testing.assert_array_equal(plain, np.array([np.nan, 120], np.float32))


def test_a_mark_between_thousands_is_no_decimal_sign_and_a_unit_alone_no_number(tmp_path: Path) -> None:
    """A comma for thousands in a file of decimal commas multiplied numbers by 1000."""
    path = write(tmp_path, "kg;y\n70,500;0\n4,120;1\n")
    schema = Schema(columns={"kg": Number(thousands=",", unit="%", blanks="mean"), "y": Target()})
    with pytest.raises(
        ParameterError, match=r"t.csv: column 'kg': the mark between thousands and the decimal sign are"
    ):
        read_table(path, schema, decimal=",")
    assert read_table(path, schema).x[:, 0].tolist() == [70_500, 4120]
    with pytest.raises(ParameterError, match="column 'kg' has something other than a number in 1 of 2 rows"):
        read_table(write(tmp_path, "kg;y\n45 %;0\n%;1\n"), schema)


def test_a_numeral_that_stands_for_no_value_is_no_other_code_and_no_other_number(tmp_path: Path) -> None:
    path = write(tmp_path, "a,b\n9,09\n9.0,90\n99.90,0.9\n-9,x\n9.01,9e0\n")
    columns = read_columns(path, Format(absent=("9", "99.9", "X")))
    assert columns["a"].tolist() == ["", "", "", "-9", "9.01"]
    assert columns["b"].tolist() == ["09", "90", "0.9", "", "9e0"]
    comma = write(tmp_path, 'a\n"9,0"\n9.0\n9.000\n').rename(tmp_path / "c.csv")
    assert read_columns(comma, Format(";", ",", absent=("9",)))["a"].tolist() == ["", "9.0", "9.000"]
    floats = pyarrow.table({"a": pyarrow.array([99.9, 1.0], pyarrow.float32())})
    pyarrow.parquet.write_table(floats, tmp_path / "f.parquet")
    assert np.isnan(read_columns(tmp_path / "f.parquet", Format(absent=("99.9",)))["a"]).tolist() == [True, False]


@pytest.mark.parametrize("zone", ["UTC", "Europe/Rome", "America/New_York", "+05:30"])
def test_a_time_with_a_zone_has_the_day_that_it_has_there(tmp_path: Path, zone: str) -> None:
    words = ["2020-06-01T00:00:00", "2020-06-01T23:59:59"]
    there = pyarrow.compute.assume_timezone(pyarrow.array(words).cast(pyarrow.timestamp("us")), zone)
    pyarrow.parquet.write_table(pyarrow.table({"born": there}), tmp_path / "t.parquet")
    assert [str(day) for day in read_columns(tmp_path / "t.parquet")["born"]] == ["2020-06-01"] * 2


def test_a_frame_has_no_times_with_a_zone_and_one_value_a_cell() -> None:
    """NumPy drops a zone: the first hour of a day in Rome became the day before."""
    schema = Schema(columns={"born": Date(), "y": Target()})
    naive = pyarrow.array(["2020-06-01T00:30:00"] * 2).cast(pyarrow.timestamp("us"))
    frame = pyarrow.table({"born": naive, "y": [0.0, 1.0]})
    days = read_table(frame, schema).coded[:, 0]
    rome = frame.set_column(0, "born", pyarrow.compute.assume_timezone(naive, "Europe/Rome"))
    for table in (rome, rome.to_pandas()):
        with pytest.raises(
            ParameterError, match=r"column 'born': got times of the zone Europe/Rome; expected days: give"
        ):
            read_table(table, schema)
    assert (
        read_table(rome.set_column(0, "born", pyarrow.compute.local_timestamp(rome["born"])), schema).coded[:, 0]
        == days
    ).all()
    for cells in ([[1.0], [2.0]], [[1.0, 2.0], [3.0]]):
        with pytest.raises(ParameterError, match="column 'born': expected one number, word or date a row; got several"):
            read_table(frame.set_column(0, "born", pyarrow.array(cells)), schema)


@pytest.mark.parametrize("kind", [Id(), Grouping()])
def test_ids_in_two_forms_of_unicode_are_one_and_predictions_keep_theirs(kind: Any) -> None:
    names = ["Zo\u00eb", "Zoe\u0308", "Ann"]
    schema = Schema(columns={"who": kind, "x": Number(), "y": Target()})
    columns = as_columns({"who": names, "x": [1.0, 2.0, 3.0], "y": [0.0, 1.0, 2.0]}, "t")
    kept = encode(columns, schema, "t", training=False)
    assert Subjects(kept.ids, kept.groups).whom.tolist() == names  # type: ignore[union-attr]
    if kind == Id():
        with pytest.raises(ParameterError, match="column 'who' has 1 rows whose id is repeated"):
            encode(columns, schema, "t")
    else:
        groups = encode(columns, schema, "t").groups
        assert groups is not None
        assert groups.tolist() == ["Zo\u00eb", "Zo\u00eb", "Ann"]


@pytest.mark.parametrize("form", ["%d.%m.%y", "%m/%d/%y", "%d-%b-%y", "%d.%m.%y %H:%M"])
def test_years_of_two_digits_are_asked_about_with_their_century(form: str) -> None:
    now = datetime.now()
    past = [now.replace(year=now.year - back, month=1, day=31) for back in range(1, 21)]
    ahead = [now.replace(year=now.year + 1 + later, month=1, day=31) for later in range(20)]

    def asked(days: list[datetime]) -> Guess:
        columns = {
            "born": np.array([day.strftime(form) for day in days], object),
            "y": np.array(["a", "b"] * 10, object),
        }
        return propose(columns, Hints(), "t.csv", Format())["born"]

    sure, doubtful = asked(past), asked([*ahead[:3], *past[3:]])
    assert str(sure.doubt).startswith("holds dates in 20 of 20 rows; years 69 to 99 become 19xx, and 00 to 68 20xx")
    assert "today" not in str(sure.doubt)
    assert isinstance(sure.column, Date)
    assert ", after today in 3 of 20 rows" in str(doubtful.doubt)
    assert doubtful.doubt is not None
    assert "write them" in doubtful.doubt.readings[0].what
    assert "19xx" not in str(asked_in_full(past))


def asked_in_full(days: list[datetime]) -> Guess:
    columns = {"born": np.array([f"{day:%d.%m.%Y}" for day in days], object), "y": np.array(["a", "b"] * 10, object)}
    return propose(columns, Hints(), "t.csv", Format())["born"]


def test_an_id_is_each_rows_own(tmp_path: Path) -> None:
    schema = full(tmp_path, FULL.replace('"group"', '"id"'))
    with pytest.raises(ParameterError, match=r"column 'patient' has 1 rows whose id is repeated; .* \"group\""):
        read_table(write(tmp_path, ROWS), schema)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a section for each column"),
        ("columns = 3", "expected a section for each column"),
        ("[columns.a]\nkind = 'numbr'", r"\[columns.a\] kind: got \"numbr\"; did you mean \"number\""),
        ("[columns.a]\nunit = 'kg'", r"\[columns.a\] kind: got"),
        ("[columns.a]\nkind = 'number'\nunits = 'kg'", r"\[columns.a\] units: this key is unknown"),
        ("[columns.a]\nkind = 'number'\nrange = [3, 1]", "range: expected the least and the greatest value"),
        ("[columns.a]\nkind = 'number'\nrange = [-1e308, 1e308]", "range: expected .* a finite distance apart"),
        ("[columns.a]\nkind = 'number'\nrange = [0, inf]", "range: input should be a finite number"),
        ("[columns.b]\nkind = 'target'\nrange = [nan, 1]", "range: input should be a finite number"),
        ("[columns.b]\nkind = 'target'\nrange = [2, 1]", "range: expected the least and the greatest value"),
        (
            "[columns.a]\nkind = 'date'\nrange = [2024-12-31, 2020-01-01]",
            "range: expected the first day",
        ),
        (
            "[columns.a]\nkind = 'date'\nrange = [2020-01-01, 2020-01-01]",
            "range: expected the first day",
        ),
        ("[columns.a]\nkind = 'number'\nblanks = 'median'", 'blanks = "median" needs a range'),
        ("[columns.a]\nkind = 'category'\ncategories = []", "categories"),
        ("[columns.a]\nkind = 'category'\ncategories = ['x', 'x']", "categories: expected each entry once"),
        ("[columns.a]\nkind = 'category'\ncategories = ['x']\nunseen = 'blank'", 'unseen = "blank" needs blanks'),
        ("[columns.a]\nkind = 'target'\nclasses = ['x']", "classes: expected two or more"),
        ("[columns.a]\nkind = 'id'", "at least one column of kind number"),
        ("[columns.a]\nkind = 'id'\n[columns.b]\nkind = 'id'", "a and b are both of kind id"),
        ("[columns.a", "this is not TOML"),
    ],
)
def test_bad_schemas(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
        full(tmp_path, text)
    assert len(str(caught.value).splitlines()) == 1
    assert "schema.toml" in str(caught.value)


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False, width=32, min_value=-(2.0**99), max_value=2.0**99), min_size=2, max_size=30))
def test_numbers_in_words_are_read_as_they_were_written(values: list[float]) -> None:
    words = np.array([repr(value) for value in values], object)
    targets = np.array([str(i % 2) for i in range(len(values))], object)
    schema = Schema(columns={"x": Number(), "y": Target(classes=("0", "1"))})
    found = encode({"x": words, "y": targets}, schema, "t")
    assert found.x[:, 0].tobytes() == np.array(values, np.float32).tobytes()
