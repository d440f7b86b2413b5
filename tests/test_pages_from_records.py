"""`python experiments/tables.py`: the pages have what the records have, and a changed digit in either is found."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import tables
from printed import Table
from printed.commands import SCRIPTS
from records_of_pages import Record, Records, UnknownPlace

ROOT = Path(__file__).parents[1]
OWN, QUICK = "baffle-own", "baffle-table-1-mnist-quick"


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """The pages, and of experiments what they are made from."""
    (tmp_path / "docs").mkdir()
    for page in tables.PAGES:
        shutil.copy(ROOT / "docs" / page, tmp_path / "docs")
    kept = ("*/results/**/*.json", "*/*.toml", "records.sha256")
    for path in (path for pattern in kept for path in (ROOT / "experiments").glob(pattern)):
        (tmp_path / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    return tmp_path


def check(folder: Path, *words: str) -> tuple[int, list[str]]:
    """The script on copies: what it exits with, and what it says."""
    said: list[str] = []
    given = ["--records", str(folder / "experiments"), *words]
    return tables.main(given, folder / "docs", said.append), said


def changed(path: Path, old: str, new: str) -> None:
    """Change what stands once, or first, in a file."""
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_the_pages_have_what_the_records_have() -> None:
    said: list[str] = []
    assert tables.main(["--check"], say=said.append) == 0, "\n".join(said)
    pages = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in tables.PAGES)
    assert set(re.findall(r"<!-- table (\S+) -->", pages)) == {*tables.TABLES, tables.PLAN}


def test_a_changed_digit_is_found_in_a_table_and_in_a_sentence(copies: Path) -> None:
    page = copies / "docs" / "reproduction-baffle-choices.md"
    changed(page, "| own, K = 40 | 65.38", "| own, K = 40 | 65.39")
    changed(page, "**A falling K loses**: 2.33 points", "**A falling K loses**: 2.34 points")
    changed(page, "**They are worth 2 points here", "**They are worth 2.1 points here")
    found, said = check(copies, "--check")
    assert found == 1
    assert any("Own directions: table baffle-own differs" in line for line in said)
    assert any("2.34 is in no table" in line for line in said)
    assert any("2.33 is in the comment and in no sentence" in line for line in said)
    assert any("2.1 is in no table" in line for line in said)


def test_a_changed_record_is_found_and_written_into_tables(copies: Path) -> None:
    path = copies / "experiments" / "baffle" / "results" / f"{QUICK}.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    (cell,) = (one for one in record["cells"] if one["levels"][0] == "Central")
    cell["figures"]["accuracy"] -= 1
    path.write_text(json.dumps(record), encoding="utf-8")
    _, said = check(copies, "--check")
    assert len(said) == 4
    assert "table baffle-1-quick differs" in said[0]
    assert "11 is not baffle-table-1-mnist-quick[K = 100, LeNet] -" in said[1]
    assert f"{QUICK}.json is not the record of records.sha256" in said[2]
    assert f"{QUICK}: rows, Central, LeNet: ours is 64.05" in said[3]
    check(copies)
    found, said = check(copies, "--check")  # the table is written, the sentence and the rows are for a person to fix
    assert (found, len(said)) == (1, 2)
    assert "| Central | 63.05 (76.02) |" in (copies / "docs" / "reproduction-baffle.md").read_text(encoding="utf-8")


def test_a_changed_row_or_curve_point_of_a_record_is_found(copies: Path) -> None:
    """Rows follow from cells. Nothing follows from a curve's middle, so the digest has to notice."""
    path = copies / "experiments" / "baffle" / "results" / f"{QUICK}.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    (row,) = (one for one in record["rows"] if one["row"] == "w/o EMA")
    row["ours"][0] += 1
    path.write_text(json.dumps(record), encoding="utf-8")
    check(copies)  # with a digest of its own
    assert check(copies, "--check")[1] == [f"{QUICK}: rows, w/o EMA, LeNet: ours is 72.26, its cells have 71.26"]
    row["ours"][0] -= 1
    record["cells"][0]["curve"][3][1] += 0.01
    path.write_text(json.dumps(record), encoding="utf-8")
    assert [line for line in check(copies, "--check")[1] if "records.sha256" in line]


def test_a_changed_figure_of_a_paper_is_found(copies: Path) -> None:
    """In an experiment, in a record's rows, in a sentence, and in a sum of a sentence."""
    changed(copies / "experiments" / "pbpfl" / "tables.toml", "[0.048, 0.085, 0.117]", "[0.048, 0.085, 0.116]")
    path = copies / "experiments" / "cgd" / "results" / "cgd-table-3.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    record["rows"][0]["paper"][0] = 97.55
    path.write_text(json.dumps(record), encoding="utf-8")
    page = copies / "docs" / "reproduction-baffle.md"
    changed(page, "all non-iid).", "all non-iid; 35.31).")
    changed(page, "35.21 and 44.41: paper", "35.21 and 44.41 and 35.31: paper")
    changed(copies / "docs" / "reproduction-cgd-baselines.md", "3.61: 95.62 - 92.01", "3.61: 95.63 - 92.02")
    said = check(copies, "--check")[1]
    assert any("pbpfl-table-1-abd-authors: printed, FedAvg: [0.048, 0.085, 0.116] is no row" in line for line in said)
    assert any("cgd-table-3: rows, centralised: [97.55, 97.54, 0.081] is no row" in line for line in said)
    assert any("35.31 is said to be a paper's, and is not" in line for line in said)
    assert any("95.63 in 95.63 - 92.02 is not in printed/papers.toml" in line for line in said)


def test_a_slip_in_a_marker_is_found(copies: Path) -> None:
    page = copies / "docs" / "reproduction-baffle-choices.md"
    changed(page, "<!-- end of baffle-own -->", "<!-- end of bafle-own -->")
    changed(page, "| own, K = 40 | 65.38", "| own, K = 40 | 65.39")
    found, said = check(copies, "--check")
    assert found == 1
    assert any("<!-- table NAME --> has no partner" in line for line in said)
    assert any("<!-- end of NAME --> has no partner" in line for line in said)


def test_the_plan_is_a_table_like_others(copies: Path) -> None:
    changed(copies / "docs" / "reproduction.md", "| BAFFLE 4 | 9 | 9 |", "| BAFFLE 4 | 9 | 8 |")
    found, said = check(copies, "--check")
    assert found == 1
    assert any("The plan: table plan differs" in line for line in said)


def test_cells_of_other_settings_and_failures_are_told_below_a_table(copies: Path) -> None:
    path = copies / "experiments" / "baffle" / "results" / f"{OWN}.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    number = len(record["cells"])
    record["cells"][0]["settings"] |= {"protocol.learning-rate": "9", "length": {"rounds": 4}}
    record["cells"][1] |= {"failed": "diverged", "figures": {}}
    path.write_text(json.dumps(record), encoding="utf-8")
    assert Records(copies / "experiments").apart(OWN) == [
        f"1 of its {number} cells differ from the command in length (4 rounds), protocol.learning-rate",
        f"1 of its {number} cells failed, without which the means are",
    ]
    assert any("table baffle-own differs" in line for line in check(copies, "--check")[1])


def test_a_record_of_another_length_in_a_folder_of_its_own_is_told_as_such(copies: Path) -> None:
    told = Records(copies / "experiments").apart("pbpfl-table-1-40-epochs")
    assert "18 of its 18 cells differ from the command in length (40 epochs)" in told
    assert "18 of its rows have fewer seeds than the command" in told


def test_cells_of_a_level_that_is_no_more_are_told(copies: Path) -> None:
    path = copies / "experiments" / "baffle" / "results" / f"{OWN}.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    before = Records(copies / "experiments").apart(OWN)
    record["cells"][0]["levels"] = ["a level that was renamed"]
    path.write_text(json.dumps(record), encoding="utf-8")
    number = len(record["cells"])
    told = Records(copies / "experiments").apart(OWN)
    assert f"1 of its {number} cells have levels that the command has no more" in set(told) - set(before)


def test_fewer_seeds_than_the_command_has_are_told(copies: Path) -> None:
    path = copies / "experiments" / "baffle" / "results" / "baffle-blocks-mnist.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    assert Records(copies / "experiments").apart("baffle-blocks-mnist") == []
    record["cells"] = [cell for cell in record["cells"] if (cell["seed"], cell["levels"][0]) != (2, "activations")]
    path.write_text(json.dumps(record), encoding="utf-8")
    assert Records(copies / "experiments").apart("baffle-blocks-mnist") == [
        "1 of its rows have fewer seeds than the command"
    ]


def test_a_cell_that_is_not_there_yet_stands_with_its_command(copies: Path) -> None:
    (copies / "experiments" / "baffle" / "results" / f"{OWN}.json").unlink()
    found = tables.table("baffle-own", Records(copies / "experiments"))
    assert "| own, K = 40 | not run |" in found
    assert "Not run ([hours](reproduction.md#the-plan)): `moretta reproduce baffle-own --data DIR`." in found.replace(
        "\n", " "
    )


@pytest.mark.parametrize(
    "reference", ["baffle-own[own, K = 41, LeNet]", "baffle-owm[own, K = 40, LeNet]", "table4[rows; 9]"]
)
def test_a_slip_in_a_declaration_is_no_missing_cell(reference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tables.TABLES, "slip", Table("a | b", [f"x | {{{reference}:.1f}}"]))
    with pytest.raises(UnknownPlace, match=re.escape(reference)):
        tables.table("slip", Records())


def test_places_of_a_record(tmp_path: Path) -> None:
    settings = {"figures": {"accuracy": ""}, "protocol.name": "baffle", "protocol.k": "10", "protocol.form": "central"}
    settings |= {"data.silos": "3", "data.batch-size": "4", "run.evaluate-every": "5"}
    cell = {
        "levels": ["a", "b"],
        "rounds": 10,
        "epochs": 2.0,
        "parameters": 7,
        "settings": settings,
        "wall_seconds": 2.0,
    }
    runs = [
        {**cell, "seed": seed, "figures": {"accuracy": 50.0 + seed}, "curve": [[1.0, 0.5], [2.0, 0.6]]}
        for seed in (1, 3)
    ]
    record = Record(
        tmp_path, {"cells": [*runs, {**cell, "levels": ["c", "b"], "seed": 1, "figures": {}, "failed": "!"}]}
    )
    found = record.figures
    assert (found["a, b"], found["a, b; accuracy"], found["a, b; seed 3"]) == (52.0, 52.0, 53.0)
    assert (found["a, b; rows"], found["a, b; row-forwards"]) == (120.0, 120.0 * 20)
    assert (found["a, b; round 5"], found["a, b; seed 1; round 10"]) == (0.5, 0.6)
    assert found["c, b"] != found["c, b"]  # it failed
    secret = "not replayable: secret seed not recorded"
    assert record.told == f"seeds 1, 3; 6 s by the clock; {secret}"
    timed = cell | {"seed": 1, "core_seconds": 1.0, "figures": {}}
    assert Record(tmp_path, {"cells": [timed | {"public_secret_seed": 1}]}).told == "seed 1; 1 s"
    mixed = [timed | {"public_secret_seed": 1}, timed]
    assert Record(tmp_path, {"cells": mixed}).told == f"seed 1; 2 s; 1 of 2 cells {secret}"


def test_every_script_that_a_page_names_is_there() -> None:
    for name, command in SCRIPTS.items():
        assert (ROOT / command.split()[1]).exists(), name


def test_differences_are_paired_over_seeds_with_their_interval() -> None:
    def cell(level: str, seed: int, value: float) -> dict[str, object]:
        return {"levels": [level], "seed": seed, "figures": {"accuracy": value}}

    values = {"a": {1: 5.0, 2: 7.0, 3: 9.0}, "b": {1: 4.0, 2: 5.0, 3: 6.0, 4: 100.0}}  # 1, 2 and 3 apart
    cells = [cell(level, seed, value) for level, of in values.items() for seed, value in of.items()]
    record = Record(Path("mine.json"), {"cells": cells})
    assert record.paired("a less b") == record.paired("a less b; accuracy") == 2.0
    assert record.paired("a less b; seeds") == 3
    assert record.paired("a less b; accuracy; 95 %") == pytest.approx(4.303 / 3**0.5)  # their deviation is 1
    alone = Record(Path("mine.json"), {"cells": [cells[0], cells[3]]})
    assert (alone.paired("a less b"), alone.paired("a less b; 95 %")) == (1.0, float("inf"))


def test_a_table_says_which_figures_are_of_one_play() -> None:
    records = Records()
    assert "| MNIST, accuracy, per cent | paper |" in tables.table("baffle-1-mnist", records)
    assert "| w/o EMA | 85.06 | not run | 90.82 † |" in tables.table("baffle-1-mnist", records)
    assert "† one run." in tables.table("baffle-1-mnist", records)
    assert "| accuracy, per cent, one run each | MNIST | CIFAR-10 |" in tables.table("baffle-1-quick", records)
    assert "one run" not in tables.table("baffle-forms", records)
