"""A classifier's tables on the page and in the terminal."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from moretta.errors import ParameterError
from moretta.report.folder import ClassTables, read_run
from moretta.report.page import page
from moretta.report.table import SHOWN, class_table, comparison_rows, silo_rows

TABLES = {
    "by_class": [
        {"class": "benign", "rows": 1_003, "predicted": 1_000, "precision": 0.99, "recall": 0.98, "f1": 0.985},
        {"class": "<malign>", "rows": 40, "predicted": 0, "precision": None, "recall": 0.0, "f1": 0.0},
    ],
    "confusion": [[1_000, 3], [40, 0]],
    "reliability": [{"from": 0.9, "to": 1.0, "rows": 1_043, "probability": 0.97, "accuracy": 0.95}],
}


def classified(make_run, tables=TABLES, **metrics) -> Path:
    folder = make_run("fedsgd", folder="classified")
    record = json.loads((folder / "result.json").read_text())
    record["test"] |= {"classes": tables, "metrics": {"f1": 0.5, "f1_macro": 0.75, "calibration_error": 0.02}}
    for score in record["test"]["per_silo"].values():
        score["metrics"] = {"f1_macro": 0.625, "calibration_error": 0.03}
    (folder / "result.json").write_text(json.dumps(record))
    return folder


def cells(written: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", written, re.S)
    cells = [re.findall(r"<t[hd].*?</t[hd]>", row, re.S) for row in rows]
    return [[re.sub(r"<.*?>", "", cell).strip() for cell in some] for some in cells]


def test_the_page_has_classes_confusion_calibration_and_each_silos(make_run) -> None:
    written = page([read_run(classified(make_run))])
    rows = cells(written)
    assert ["Class", "Rows", "Precision", "Recall", "F1", "as benign", "as &lt;malign&gt;"] in rows
    assert ["benign", "1,003", "0.9900", "0.9800", "0.9850", "1,000", "3"] in rows
    assert ["&lt;malign&gt;", "40", "–", "0.0000", "0.0000", "40", "0"] in rows
    assert ["0.9 to 1.0", "1,043", "0.9700", "0.9500"] in rows
    assert ["F1, mean of classes", "0.7500"] in rows
    assert ["Accuracy", "Loss", "F1, mean of classes", "Calibration error"] in rows
    assert ["silo-1", "152", "0.9737", "0.0300", "0.6250", "0.0300"] in rows


def test_a_run_without_tables_has_no_section(make_run) -> None:
    for regression in (True, False):
        record = read_run(make_run("fedsgd", folder=str(regression), regression=regression))
        assert "Classes and calibration" not in page([record])
        assert silo_rows([record])[0] == ["MSE" if regression else "Accuracy", "Loss"]
        assert not any("F1" in row.measure for row in comparison_rows([record]))


def test_a_terminal_has_the_classes(make_run) -> None:
    tables = read_run(classified(make_run)).test.classes
    assert tables is not None
    console = Console(width=100, record=True, quiet=False, file=io.StringIO())
    console.print(class_table(tables))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["benign", "1,003", "0.9900", "0.9800", "0.9850", "1,000", "3"] in lines
    many = ClassTables(by_class=tables.by_class * 12, confusion=())
    assert class_table(many).row_count == SHOWN + 1


def test_a_matrix_that_does_not_fit_its_classes_is_refused(make_run) -> None:
    folder = classified(make_run, TABLES | {"confusion": [[1, 2]]})
    with pytest.raises(ParameterError, match="expected a confusion matrix of 2 classes"):
        read_run(folder)
