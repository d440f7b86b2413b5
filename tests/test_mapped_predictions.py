"""`moretta predict` and `evaluate` with `--silo-file`: a site's own table, read as the site read it for training."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_cli import call, patients
from test_prediction import Train, train  # noqa: F401  # a fixture

SILO = """
[silo]
name = "north"

[data]
source = "eigene.csv"
separator = ";"
decimal = ","
absent = ["-"]

[mapping]
drop = ["Telefon"]
rename = { Alter = "age", Station = "ward", Druck = "pressure", krank = "ill" }
recode = { Station = { Ost = "east", Nord = "north", West = "west" }, krank = { nein = "0", ja = "1" } }
[mapping.units.Druck]
factor = 0.5
unit = "mmHg"
"""
WORDS = {"east": "Ost", "north": "Nord", "west": "West"}
Change = Callable[[list[str]], list[str]]


def tables(change: Change = lambda rows: rows, *, labelled: bool = True) -> None:
    """Write others.csv as the run has it, eigene.csv with the same rows as the site writes them, and its silo.toml."""
    Path("others.csv").write_text(patients(40, seed=9))
    rows = list(csv.DictReader(Path("others.csv").read_text().splitlines()))
    lines = []
    for number, row in enumerate(rows):
        age, pressure = row["age"].replace(".", ","), repr(2 * float(row["pressure"])).replace(".", ",")
        cells = [f"0{number % 2}", WORDS[row["ward"]], f"{pressure} mmHg", age, ("nein", "ja")[int(row["ill"])]]
        lines.append(";".join(cells[: 5 if labelled else 4]))
    head = "Telefon;Station;Druck;Alter" + ";krank" * labelled
    Path("eigene.csv").write_text("\n".join([head, *change(lines)]) + "\n")
    Path("silo.toml").write_text(SILO)


@pytest.mark.parametrize("labelled", [True, False])
def test_a_site_s_own_table_is_predicted_as_if_it_were_written_as_the_schema_says(
    train: Train,  # noqa: F811
    labelled: bool,
) -> None:
    run = train()
    # A target that is there is not looked at: of rows to predict it may hold what no mapping has.
    tables(lambda rows: [row.replace(";ja", ";unbekannt") for row in rows], labelled=labelled)
    for data, more in (("others.csv", ()), ("eigene.csv", ("--silo-file", "silo.toml"))):
        done = call("predict", run, "--data", data, "--out", f"of-{data}", *more)
        assert done.code == 0, done.err
    assert Path("of-eigene.csv").read_bytes() == Path("of-others.csv").read_bytes()
    assert call("predict", run, "--data", "eigene.csv", "--out", "p.csv").code == 2  # and not without it


def test_a_model_is_judged_on_it_in_all_and_by_the_schema_s_columns_or_the_file_s_own(train: Train) -> None:  # noqa: F811
    run = train()
    tables()
    plain = call("evaluate", run, "--data", "others.csv", "--by", "ward", "--json")
    own = ("--data", "eigene.csv", "--silo-file", "silo.toml")
    assert call("evaluate", run, *own, "--by", "ward", "--json").told == plain.told
    assert set(call("evaluate", run, *own, "--by", "Station", "--json").told["parts"]) == set(WORDS.values())
    parts = call("evaluate", run, *own, "--by", "Telefon", "--json").told["parts"]  # dropped, and a column all the same
    assert {value: part["rows"] for value, part in parts.items()} == {"00": 20, "01": 20}
    assert (
        'has no column "Statio" for --by; did you mean "Station"?' in call("evaluate", run, *own, "--by", "Statio").err
    )


def test_rows_that_do_not_fit_the_mapping_or_the_schema_are_left_out_by_their_numbers_in_the_file(
    train: Train,  # noqa: F811
) -> None:
    run = train()

    def change(rows: list[str]) -> list[str]:
        rows[1] = rows[1].replace("Nord", "Geheim")
        rows[4] = rows[4].replace(" mmHg", " kPa")
        rows[7] = ";".join([*rows[7].split(";")[:3], "alt", "ja"])
        return rows

    tables(change)
    words = ("--data", "eigene.csv", "--silo-file", "silo.toml")
    done = call("predict", run, *words, "--out", "p.npy", "--json")
    assert done.code == 3
    for said in (
        "mapping.recode.Station",
        "[mapping.units] converts column 'Druck'",
        "column 'age' has something other than a number",
    ):
        assert said in done.out
    assert "Geheim" not in done.out
    assert np.flatnonzero(np.isnan(np.load("p.npy")).any(1)).tolist() == [1, 4, 7]
    judged = call("evaluate", run, *words, "--by", "Telefon", "--json")
    assert judged.code == 3
    assert '"rows": 37' in judged.out.replace('":37', '": 37')
    tables(lambda rows: [row.replace("Ost", "O").replace("Nord", "N").replace("West", "W") for row in rows])
    refused = call("predict", run, *words, "--out", "none.csv")
    assert refused.code == 2
    assert "[mapping.recode.Station] of silo.toml does not map in" in refused.sentence
    assert not Path("none.csv").exists()


def test_what_options_say_comes_before_silo_toml_and_what_cannot_be_mapped_is_refused(train: Train) -> None:  # noqa: F811
    run = train()
    tables()
    Path("eigene.csv").write_text(Path("eigene.csv").read_text().replace(";", "|"))
    words = ("predict", run, "--out", "p.csv", "--silo-file", "silo.toml", "--data")
    assert call(*words, "eigene.csv").code == 2
    assert call(*words, "eigene.csv", "--separator", "|").code == 0
    np.savez("rows.npz", x=np.zeros((2, 5), np.float32))
    sentence = call(*words, "rows.npz").sentence
    assert sentence == "rows.npz: [mapping] of silo.toml is for tables, and this is another file; leave out --silo-file"
    Path("silo.toml").write_text(SILO.split("[mapping]")[0])
    assert call(*words, "rows.npz").code == 0
    Path("silo.toml").write_text(SILO.replace("drop =", "dorp ="))
    assert "silo.toml: [mapping] dorp is not known; did you mean drop?" in call(*words, "eigene.csv").sentence
    Path("silo.toml").unlink()
    assert "silo.toml" in call(*words, "eigene.csv").sentence
