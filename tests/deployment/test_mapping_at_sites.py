"""A site that maps its columns plays as one whose file is as the schema has it, and no server learns that it does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hospitals import seen
from loopback import SERVER
from test_cli import call
from test_tables_at_sites import RUN, SILO, Hospitals, Values, values_of, write

from moretta.config import silo_file
from moretta.deployment import shared_settings, site_policy
from moretta.engines.flare.site_worker import UNFIT
from moretta.errors import ParameterError, PolicyError
from moretta.secure_aggregation.identity import public_line

GERMAN = {"Fall": "patient", "Alter": "age", "Station": "ward", "CRP": "crp", "Ausgang": "outcome"}
MAPPING = """
[mapping]
drop = ["Telefon"]
rename = { Fall = "patient", Alter = "age", Station = "ward", CRP = "crp", Ausgang = "outcome" }
recode = { Station = { Innere = "A", OPS = "B", ICU = "C" }, Ausgang = { ja = "yes", nein = "no" } }
[mapping.units.CRP]
factor = 4
"""
WORDS = {"A": "Innere", "B": "OPS", "C": "ICU", "yes": "ja", "no": "nein"}


class German(Hospitals):
    """The same three sites, of which north has its rows in other names, words and units."""

    def __init__(self, folder: Path, run: str = RUN, mapping: str = MAPPING) -> None:
        super().__init__(folder, run)
        values = values_of(0)
        found: Values = {name: [WORDS.get(one, one) for one in values[ours]] for name, ours in GERMAN.items()}
        found["CRP"] = [None if one is None else one / 4 for one in found["CRP"]]
        found["Telefon"] = [f"0{number}" for number in range(len(found["CRP"]))]
        write(folder / "north" / "rows.csv", found, list(found), ";", ",")
        written = f'separator = ";"\ndecimal = ","{mapping}'
        text = SILO.format(name="north", key=public_line(SERVER.public_key), source="rows.csv", written=written)
        (folder / "north" / "silo.toml").write_text(text)


def played(hospitals: Hospitals, out: Path) -> Path:
    hospitals.start()
    try:
        hospitals.serve(out, least=3)
    finally:
        hospitals.stop()
    return out


def test_the_server_sees_to_the_last_byte_what_it_would_without(tmp_path: Path, one_process: None) -> None:
    run = RUN.replace("rounds = 3", "rounds = 3\nrecord-views = true")
    (tmp_path / "plain").mkdir()
    (tmp_path / "german").mkdir()
    outs = [
        played(made, tmp_path / name)
        for made, name in ((Hospitals(tmp_path / "plain", run), "one"), (German(tmp_path / "german", run), "other"))
    ]
    one, other = (seen(out) for out in outs)
    assert one["north"]
    assert one == other
    results = [json.loads((out / "result.json").read_text())["test"] for out in outs]
    assert results[0] == results[1]


def test_a_word_that_is_not_mapped_is_told_once_at_the_site_and_by_a_ticket_to_the_server(
    tmp_path: Path, one_process: None, caplog: pytest.LogCaptureFixture
) -> None:
    hospitals = German(tmp_path, mapping=MAPPING.replace('ICU = "C"', 'IMC = "C"'))
    hospitals.start()
    try:
        with pytest.raises(ParameterError, match=UNFIT) as error:
            hospitals.serve(tmp_path / "many", least=3, wait=2.0)
    finally:
        hospitals.stop()
    assert not any(word in str(error.value) for word in ("mapping", "Station", "ICU", "ward"))
    (record,) = (one for one in caplog.records if "[mapping.recode.Station]" in one.getMessage())
    assert "takes no part in such runs until moretta accept" in record.getMessage()
    silo = tmp_path / "north" / "silo.toml"
    for given in (("--silo", silo), ("--silo", silo, "--run", tmp_path / "many.toml")):
        called = call("doctor", *given, "--json")
        assert called.code == 1
        wrong = {one["what"]: one["sentence"] for one in called.told["findings"] if not one["passes"]}
        (silo.parent / "kept" / "agreed.json").unlink(missing_ok=True)  # closed by now, as the sentence says
        assert "does not map in 13 of 40 rows" in wrong.pop("mapping")
        assert set(wrong) <= {"agreed"}


def test_doctor_counts_what_a_mapping_does(tmp_path: Path) -> None:
    hospitals = German(tmp_path)
    silo = tmp_path / "north" / "silo.toml"
    called = call("doctor", "--silo", silo, "--run", hospitals.folder / "many.toml")
    assert called.code == 0, called.out
    assert (
        "ok   mapping: rows.csv: of 40 rows: 5 columns renamed, 1 dropped, 75 cells recoded (Station 35, Ausgang 40), "
        "34 cells converted (CRP 34)"
    ) in called.out.splitlines()
    silo.write_text(silo.read_text().replace('"rows.csv"', '"rows.npz"'))
    wrong = [line for line in call("doctor", "--silo", silo).out.splitlines() if line.startswith("FAIL mapping")]
    assert wrong == ["FAIL mapping: [mapping] needs tables, got [data] source = 'rows.npz'; remove it"]


@pytest.mark.parametrize(
    "more", ['[mapping]\ndrop = ["age"]', '[mapping.rename]\nage = "crp"', '[data]\nmapping = { drop = ["age"] }']
)
def test_no_server_sets_one(tmp_path: Path, more: str) -> None:
    hospitals = German(tmp_path)
    file = silo_file.load(tmp_path / "north" / "silo.toml")
    assert site_policy.permitted(hospitals.text, file)
    assert "mapping" not in shared_settings.shared_text(hospitals.run_file)
    text = hospitals.text.replace("[data]", more) if more.startswith("[data]") else f"{hospitals.text}\n{more}\n"
    with pytest.raises(PolicyError, match="mapping"):
        site_policy.permitted(text, file)
