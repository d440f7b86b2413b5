import pytest
from rich.console import Console

from moretta.report.folder import read_run
from moretta.report.table import comparison_rows, comparison_table, human_bytes, human_seconds, labels, plain


def printed(table, width=100):
    console = Console(width=width, force_terminal=False, no_color=True)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_four_runs_fit_a_terminal_and_show_every_measure(make_run):
    records = [read_run(make_run(protocol)) for protocol in ("pbpfl", "fedsgd", "local", "centralised")]
    text = printed(comparison_table(records, {"pbpfl": 3.2e-7, "fedsgd": 0.0}), width=90)
    for words in ("PBPFL", "FedSGD", "Local only", "Centralised", "Accuracy", "AUC", "Balanced accuracy", "0.9737"):
        assert words in text
    assert "Up, per silo and round (kB)" in text
    assert "26.2" in text
    assert "Local backward (s)" in text
    assert "3.2e-07" in text
    assert "Mean squared error" not in text


def test_differences_go_by_folder_or_protocol_and_their_row_needs_them(make_run):
    records = [read_run(make_run("pbpfl")), read_run(make_run("fedsgd"))]
    assert all(row.group != "Final weights" for row in comparison_rows(records))
    assert comparison_rows(records, {"wdbc-pbpfl": 1e-6})[-1].cells == ("1.0e-06", "–")
    assert comparison_rows(records, {str(records[1].folder): 2e-6, "pbpfl": 1e-6})[-1].cells == ("1.0e-06", "2.0e-06")


def test_runs_of_one_protocol_are_told_apart(make_run, tmp_path):
    first, second = read_run(make_run(folder="a")), read_run(make_run(folder="b"))
    assert labels([first, second]) == ("PBPFL (a)", "PBPFL (b)")
    assert labels([first, first]) == ("PBPFL (a) (1)", "PBPFL (a) (2)")


def test_names_are_not_read_as_markup(make_run):
    table = comparison_table([read_run(make_run(protocol="[red]odd[/red]", folder="odd"))])
    assert "[red]odd[/red]" in printed(table)


def test_a_regression_has_mse_and_unknown_phases_and_metrics_are_shown(make_run):
    folder = make_run(regression=True, seconds={"total": 5, "sealing_wax": 2.5})
    rows = {row.header: row.cells for row in comparison_rows([read_run(folder)])}
    assert rows["Mean squared error"] == ("0.0171",)
    assert rows["Sealing wax (s)"] == ("2.50",)
    assert rows["In no phase (s)"] == ("2.50",)
    assert "Accuracy" not in rows


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (640, "640 bytes"), (26224, "26.2 kB"), (9.1e6, "9.10 MB"), (2.5e9, "2.50 GB")],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


def test_plain_numbers():
    assert [plain(x) for x in (None, 0.97368, 0.0, 3e-7, 1234567.0)] == [
        "–",
        "0.9737",
        "0.0000",
        "3.00e-07",
        "1.23e+06",
    ]
    assert [human_seconds(x) for x in (0.002, 8.1, 75.04, 4012.3)] == ["0.002 s", "8.10 s", "75.0 s", "4012 s"]
