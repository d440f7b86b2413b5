"""What silo.toml's [mapping] does to a table's columns, counts of it, and one sentence for what it does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

from moretta.data.reading import ExpectedRows, Source, read  # noqa: E402
from moretta.data.tables import schema as schemas  # noqa: E402
from moretta.data.tables.files import Format, read_columns  # noqa: E402
from moretta.data.tables.mapping import ColumnMapping, Conversion  # noqa: E402
from moretta.errors import ParameterError, RowsError  # noqa: E402

GERMAN = """Fall;Alter;Station;Kreatinin;Telefon
F1;71;Innere;88,5;0123
F2;64;OPS;<44,25;0124
F3;58;n/a;;0125
F4;60;medicine;177;0126
"""
FORM = Format(";", ",", absent=("n/a",))
MAPPING: dict[str, Any] = {
    "drop": ("Telefon",),
    "rename": {"Fall": "patient", "Alter": "age", "Station": "ward", "Kreatinin": "creatinine"},
    "recode": {"Station": {"Innere": "medicine", "OPS": "surgery"}},
    "units": {"Kreatinin": Conversion(factor=0.25, offset=1.0)},
}
SCHEMA = schemas.of(
    {
        "columns": {
            "patient": {"kind": "group"},
            "age": {"kind": "number"},
            "ward": {"kind": "category", "categories": ["medicine", "surgery"], "blanks": "category"},
            "creatinine": {"kind": "number", "range": [0, 90], "blanks": "median", "censored": "half"},
        }
    }
)
EXPECTED = ExpectedRows.of_table(SCHEMA, labelled=False)


def mapped(folder: Path, text: str, form: Format | None = FORM, **changed: Any) -> tuple[dict[str, Any], str]:
    (folder / "rows.csv").write_text(text)
    columns = read_columns(folder / "rows.csv", form)
    found, effect = ColumnMapping(**{**MAPPING, **changed}).applied(columns, "rows.csv", form)
    return found, effect.sentence()


def test_columns_are_renamed_recoded_converted_and_dropped(tmp_path: Path) -> None:
    found, said = mapped(tmp_path, GERMAN)
    assert {name: column.tolist() for name, column in found.items()} == {
        "patient": ["F1", "F2", "F3", "F4"],
        "age": ["71", "64", "58", "60"],
        "ward": ["medicine", "surgery", "", "medicine"],
        "creatinine": ["23,125", "<12,0625", "", "45,25"],
    }
    assert said == (
        "of 4 rows: 4 columns renamed, 1 dropped, 2 cells recoded (Station 2), 3 cells converted (Kreatinin 3)"
    )


def test_a_file_is_read_as_if_it_had_been_written_by_the_schema(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(GERMAN)
    plain = (
        "patient,age,ward,creatinine\nF1,71,medicine,23.125\nF2,64,surgery,<12.0625\nF3,58,,\nF4,60,medicine,45.25\n"
    )
    (tmp_path / "plain.csv").write_text(plain)
    ours = read(Source("rows.csv", FORM, base=tmp_path, mapping=ColumnMapping(**MAPPING)), EXPECTED, "silo `a`")
    theirs = read(Source("plain.csv", Format(), base=tmp_path), EXPECTED, "silo `a`")
    assert ours.x.tobytes() == theirs.x.tobytes()
    assert ours.groups is not None
    assert theirs.groups is not None
    assert ours.groups.tolist() == theirs.groups.tolist()


def test_columns_with_types_and_marks_of_the_files_own(tmp_path: Path) -> None:
    table = pyarrow.table(
        {"sex": [1, 2, None], "mass": [1.5, None, 2.0], "count": ["1,250 k", "", "7 k"], "in": [True] * 3}
    )
    parquet.write_table(table, tmp_path / "rows.parquet")
    mapping = ColumnMapping(
        recode={"sex": {"1": "male", "2": "female"}, "in": {"true": "yes", "false": "no"}},
        units={"mass": Conversion(factor=1000), "count": Conversion(factor=2, unit="k", thousands=",")},
    )
    found, effect = mapping.applied(read_columns(tmp_path / "rows.parquet"), "rows.parquet", None)
    assert [found["sex"].tolist(), found["in"].tolist()] == [["male", "female", ""], ["yes"] * 3]
    np.testing.assert_array_equal(found["mass"], [1500.0, np.nan, 2000.0])
    np.testing.assert_array_equal(found["count"], [2500.0, np.nan, 14.0])
    assert effect.sentence().startswith(
        "of 3 rows: 0 columns renamed, 0 dropped, 5 cells recoded (sex 2, in 3), 4 cells conv"
    )


def test_what_is_dropped_is_not_looked_at() -> None:
    mapping = ColumnMapping(drop=("a",), rename={"b": "remark", "age": "years"})
    assert mapping.unread(("remark", "age", "c")) == {"a", "b", "c", "remark"}  # the file's age is another column


@pytest.mark.parametrize(
    ("text", "changed", "said"),
    [
        (
            GERMAN.replace("OPS", "Geheim"),
            {},
            "rows.csv: column 'Station' has a word that [mapping.recode.Station] of silo.toml does not map in 1 of 4 "
            'rows (the first is row 2); add it there, as itself where it stays, or as "" where it is no value',
        ),
        (
            GERMAN.replace("Alter", "Altr"),
            {},
            "rows.csv: [mapping] of silo.toml names a column 'Alter', which is not among its 5; did you mean \"Altr\"?",
        ),
        (
            GERMAN,
            {"drop": ()} | {"rename": {**MAPPING["rename"], "Fall": "Telefon"}},
            "rows.csv: [mapping.rename] of silo.toml makes a second column 'Telefon'; drop or rename the other",
        ),
        (
            GERMAN,
            {"recode": {}, "units": {"Station": Conversion(factor=2)}},
            "rows.csv: [mapping.units] converts column 'Station', which has something other than a number in 3 of 4 "
            "rows (the first is row 1); remove it there if the column is of words; else",
        ),
        (
            GERMAN.replace("177", "177.5"),
            {},
            "rows.csv: [mapping.units] converts column 'Kreatinin', which has",
        ),
        (
            GERMAN,
            {"units": {"Kreatinin": Conversion(thousands=",")}},
            "rows.csv: [mapping.units] converts column 'Kreatinin': the mark between thousands and the decimal sign "
            'are both ","; expected two signs: correct thousands or decimal, or convert',
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence_without_a_cell(
    tmp_path: Path, text: str, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ParameterError) as error:
        mapped(tmp_path, text, **changed)
    assert str(error.value).startswith(said)
    assert not any(cell in str(error.value) for cell in ("Geheim", "F2", "0123", "177"))


def test_dates_have_no_unit_and_arrays_no_columns(tmp_path: Path) -> None:
    days = np.array(["2020-01-01"], "datetime64[D]")
    with pytest.raises(ParameterError, match="converts column 'day', which has dates; remove it there"):
        ColumnMapping(units={"day": Conversion(factor=2)}).applied({"day": days}, "rows.parquet", None)
    mapping = ColumnMapping(drop=("a",))
    with pytest.raises(RowsError, match=r"\[mapping\] of silo.toml is for tables, not for source = 'rows.npz'; remove"):
        read(Source("rows.npz", base=tmp_path, mapping=mapping), ExpectedRows((2,), False, 2, None), "silo `a`")
