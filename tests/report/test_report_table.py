"""Tables of runs, in a terminal and on a page: side by side, over seeds, by class and by silo."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moretta.errors import ParameterError
from moretta.report.folder import ClassTables, RunRecord, read_run
from moretta.report.page import page
from moretta.report.table import (
    SHOWN,
    OverSeeds,
    Table,
    by_silo,
    classes,
    comparison,
    human_bytes,
    human_seconds,
    labels,
    mean_to_digits,
    plain,
    spread,
    to_digits,
)

TABLES = {
    "by_class": [
        {"class": "benign", "rows": 1_003, "predicted": 1_000, "precision": 0.99, "recall": 0.98, "f1": 0.985},
        {"class": "<malign>", "rows": 40, "predicted": 0, "precision": None, "recall": 0.0, "f1": 0.0},
    ],
    "confusion": [[1_000, 3], [40, 0]],
    "reliability": [{"from": 0.9, "to": 1.0, "rows": 1_043, "probability": 0.97, "accuracy": 0.95}],
}


def printed(table: Table, width: int = 100, most: int | None = None) -> str:
    console = Console(width=width, force_terminal=False, no_color=True, file=io.StringIO())
    with console.capture() as captured:
        console.print(table.rich(most))
    return captured.get()


def cells_of(table: Table) -> dict[str, tuple[str, ...]]:
    return {row.header: row.cells for row in table.rows}


def classified(make_run: Any, tables: Any = TABLES) -> Path:
    folder: Path = make_run("fedsgd", folder="classified")
    record = json.loads((folder / "result.json").read_text())
    record["test"] |= {"classes": tables, "metrics": {"f1": 0.5, "f1_macro": 0.75, "calibration_error": 0.02}}
    for score in record["test"]["per_silo"].values():
        score["metrics"] = {"f1_macro": 0.625, "calibration_error": 0.03}
    (folder / "result.json").write_text(json.dumps(record))
    return folder


def test_four_runs_fit_a_terminal_and_show_every_measure(make_run: Any) -> None:
    records = [read_run(make_run(protocol)) for protocol in ("pbpfl", "fedsgd", "local", "centralised")]
    text = printed(comparison(records, {"pbpfl": 3.2e-7, "fedsgd": 0.0}), width=90)
    for words in ("PBPFL", "FedSGD", "Local only", "Centralised", "Accuracy", "AUC", "Balanced accuracy", "0.9737",
                  "Up, per silo and round (kB)", "26.2", "Local backward (s)", "3.2e-07"):  # fmt: skip
        assert words in text
    assert "Mean squared error" not in text


def test_differences_go_by_folder_or_protocol_and_their_row_needs_them(make_run: Any) -> None:
    records = [read_run(make_run("pbpfl")), read_run(make_run("fedsgd"))]
    assert all(row.group != "Final weights" for row in comparison(records).rows)
    assert comparison(records, {"wdbc-pbpfl": 1e-6}).rows[-1].cells == ("1.0e-06", "–")
    named = {str(records[1].folder): 2e-6, "pbpfl": 1e-6}
    assert comparison(records, named).rows[-1].cells == ("1.0e-06", "2.0e-06")
    assert comparison(records, {"wdbc-pbpfl": math.inf}).rows[-1].cells == ("diverged", "–")


def test_runs_of_one_protocol_have_distinct_names_which_are_no_markup(make_run: Any) -> None:
    first, second = read_run(make_run(folder="a")), read_run(make_run(folder="b"))
    assert labels([first, second]) == ("PBPFL (a)", "PBPFL (b)")
    assert labels([first, first]) == ("PBPFL (a) (1)", "PBPFL (a) (2)")
    assert "[red]odd[/red]" in printed(comparison([read_run(make_run(protocol="[red]odd[/red]", folder="odd"))]))


def test_a_regression_has_mse_and_unknown_phases_and_metrics_are_shown(make_run: Any) -> None:
    rows = cells_of(comparison([read_run(make_run(regression=True, seconds={"total": 5, "sealing_wax": 2.5}))]))
    assert rows["Mean squared error"] == ("0.0171",)
    assert rows["Sealing wax (s)"] == ("2.50",)
    assert rows["In no phase (s)"] == ("2.50",)
    assert "Accuracy" not in rows


def test_mean_and_deviation_over_seeds_by_hand(make_run: Any) -> None:
    records: list[RunRecord] = []
    for number, accuracy in enumerate((0.9, 0.8, 0.85)):
        folder = make_run("fedsgd", folder=f"seed-{number}")
        record = json.loads((folder / "result.json").read_text())
        record["test"] |= {"accuracy": accuracy, "metrics": {"auc": 0.5} if number else {}}
        (folder / "result.json").write_text(json.dumps(record))
        records.append(read_run(folder))
    found = OverSeeds("FedSGD", (0, 1, 2), tuple(records))
    told = found.as_json()
    assert told["accuracy"] == {
        "mean": pytest.approx(0.85),
        "deviation": pytest.approx(0.05),  # sqrt((0.05^2 + 0.05^2 + 0) / 2)
        "values": [0.9, 0.8, 0.85],
    }
    assert told["auc"] == {"mean": None, "deviation": None, "values": [None, 0.5, 0.5]}  # one run has none
    assert {"loss", "rounds", "seconds", "up_per_silo_per_round", "down_per_silo_per_round"} < set(told)
    rows = cells_of(spread([found]))
    assert (rows["Accuracy"], rows["AUC"]) == (("0.850 ± 0.050",), ("–",))
    assert rows["Rounds"] == (f"{records[0].rounds} ± 0",)
    assert [mean_to_digits(one, 0.0) for one in (50.2536, 0.95614, 4000.0)] == ["50.25 ± 0", "0.9561 ± 0", "4000 ± 0"]
    one = OverSeeds("FedSGD", (0,), tuple(records[:1]))
    assert one.as_json()["accuracy"]["deviation"] is None
    assert cells_of(spread([one]))["Accuracy"] == ("0.9000",)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0.81234, 0.0123, "0.812"),
        (0.81234, 0.00123, "0.8123"),
        (12.3456, 3.2, "12.3"),
        (1234.5, 32.0, "1234"),  # a whole number, as tens are not sure
        (0.81234, None, "0.8123"),
        (0.81234, 0.0, "0.8123"),
        (0.81234, 1e-9, "0.8123"),
    ],
)
def test_digits_are_those_that_the_error_leaves(value: float, error: float | None, text: str) -> None:
    assert to_digits(value, error) == text
    assert to_digits(value, error, sign="+") == f"+{text}"
    assert to_digits(-value, error, sign="+") == f"-{text}"


def test_the_page_has_classes_confusion_calibration_and_each_silos(make_run: Any) -> None:
    written = page([read_run(classified(make_run))])
    found = [re.findall(r"<t[hd].*?</t[hd]>", row, re.S) for row in re.findall(r"<tr>(.*?)</tr>", written, re.S)]
    rows = [[re.sub(r"<.*?>", "", cell).strip() for cell in some] for some in found]
    for row in (
        ["Class", "Rows", "Precision", "Recall", "F1", "as benign", "as &lt;malign&gt;"],
        ["benign", "1,003", "0.9900", "0.9800", "0.9850", "1,000", "3"],
        ["&lt;malign&gt;", "40", "–", "0.0000", "0.0000", "40", "0"],
        ["0.9 to 1.0", "1,043", "0.9700", "0.9500"],
        ["F1, mean of classes", "0.7500"],
        ["Accuracy", "Loss", "F1, mean of classes", "Calibration error"],
        ["silo-1", "152", "0.9737", "0.0300", "0.6250", "0.0300"],
    ):
        assert row in rows


def test_a_run_without_tables_has_no_section(make_run: Any) -> None:
    for regression in (True, False):
        record = read_run(make_run("fedsgd", folder=str(regression), regression=regression))
        assert "Classes and calibration" not in page([record])
        assert by_silo([record]).heads[2:] == ("MSE" if regression else "Accuracy", "Loss")
        assert not any("F1" in row.measure for row in comparison([record]).rows)


def test_a_terminal_has_the_classes(make_run: Any) -> None:
    tables = read_run(classified(make_run)).test.classes
    assert tables is not None
    lines = [line.split() for line in printed(classes(tables)).splitlines()]
    assert ["benign", "1,003", "0.9900", "0.9800", "0.9850", "1,000", "3"] in lines
    many = classes(ClassTables(by_class=tables.by_class * 12, confusion=()), narrow=True)
    assert many.rich(SHOWN).row_count == SHOWN + 1
    assert "and 4 more in result.json" in printed(many, most=SHOWN)


def test_a_matrix_that_does_not_fit_its_classes_is_refused(make_run: Any) -> None:
    with pytest.raises(ParameterError, match="expected a confusion matrix of 2 classes"):
        read_run(classified(make_run, TABLES | {"confusion": [[1, 2]]}))


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (640, "640 bytes"), (26224, "26.2 kB"), (9.1e6, "9.10 MB"), (2.5e9, "2.50 GB")],
)
def test_human_bytes(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_plain_numbers() -> None:
    numbers = [plain(x) for x in (None, 0.97368, 0.0, 3e-7, 1234567.0)]
    assert numbers == ["–", "0.9737", "0.0000", "3.00e-07", "1.23e+06"]
    assert [human_seconds(x) for x in (0.002, 8.1, 75.04, 4012.3)] == ["0.002 s", "8.10 s", "75.0 s", "4012 s"]
