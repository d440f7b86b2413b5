"""Cells that a spreadsheet would compute: written as text, read back as they were."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moretta.data.tables.files import escaped, read_columns, unescaped, written

FORMULAS = ('=HYPERLINK("http://example.org","x")', "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "'=1", "＝1")
INSIDE = ("a;=1+1", "a;  @SUM(A1)", "a\t=1", 'a;"=1+1"', "a\n=1+1", "a|-1+1", "\ufeff=1+1", "a;'=1")
PLAIN = ("benign", "", "it's", "'quoted'", "a=b", "-0.5", "+1e-5", "-.5", "1", "nan")


@pytest.mark.parametrize("cell", FORMULAS)
def test_a_formula_is_a_quoted_text(cell: str) -> None:
    line = written(["prediction"], [[cell]]).decode().split("\n", 1)[1]
    assert line.startswith("\"'")
    assert unescaped(escaped(cell)) == cell


@pytest.mark.parametrize("cell", INSIDE)
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_no_formula_begins_behind_another_separator(cell: str, separator: str) -> None:
    """A spreadsheet takes semicolons for separators where a decimal comma is usual, and heeds no quotes then."""
    line = written(["id", "prediction"], [["p1"], [cell]]).decode().split("\n", 1)[1]
    cells = [one.strip('" \ufeff') for row in csv.reader(io.StringIO(line), delimiter=separator) for one in row]
    cells += [one.strip('" \ufeff') for one in re.split(f"[{separator}\r\n]", line)]
    assert not any(one.startswith(("=", "+", "-", "@")) for one in cells), cells
    assert unescaped(escaped(cell)) == cell


@pytest.mark.parametrize("cell", PLAIN)
def test_other_cells_and_numbers_stay(cell: str) -> None:
    assert escaped(cell) == unescaped(cell) == cell


@given(st.text() | st.text(alphabet="=-+'\";|\t\r\n 1a"))
def test_every_text_comes_back(cell: str) -> None:
    assert unescaped(escaped(cell)) == cell


def test_predictions_are_read_back_unchanged(tmp_path: Path) -> None:
    names = [cell for cell in FORMULAS if cell == cell.strip()]
    header = ["=id", "prediction", *(f"probability_{name}" for name in names)]
    columns: list[Any] = [names, names, *([-0.25] * len(names) for _ in names)]
    (tmp_path / "predictions.csv").write_bytes(written(header, columns))
    with (tmp_path / "predictions.csv").open(encoding="utf-8", newline="") as stream:
        cells = list(csv.reader(stream))
    assert not any(cell.startswith(("=", "+", "@", "\t", "\r")) for row in cells for cell in row)
    assert all(row[2:] == ["-0.25"] * len(names) for row in cells[1:])
    read = read_columns(tmp_path / "predictions.csv")
    assert list(read) == header
    assert read["=id"].tolist() == read["prediction"].tolist() == names


def test_a_table_of_somebody_else_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("name,y\n'=a,1\n")
    assert read_columns(tmp_path / "table.csv")["name"].tolist() == ["'=a"]
