"""Rows of several silos in files of their own: by rows, by columns, and what does not go with that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_cli import call

from moretta.config import run_files
from moretta.data.tables.preparation import MARK
from moretta.data.tables.rows import expansion_of
from moretta.errors import ParameterError
from moretta.run.assembly import federation_of

SCHEMA = """
[columns.person]
kind = "id"
[columns.age]
kind = "number"
[columns.ward]
kind = "category"
categories = ["A", "B"]
blanks = "category"
[columns.note]
kind = "drop"
[columns.claims]
kind = "number"
[columns.outcome]
kind = "target"
classes = ["no", "yes"]
"""
RUN = """
[run]
rounds = 3
seed = 7
[data]
source = "files"
schema = "schema.toml"
batch-size = 0
{data}
[data.files]
{files}
[model]
source = "mlp"
hidden = [4]
[protocol]
{protocol}
"""
COLUMNS = 'partition = "by-feature"\ncolumns = [["ward", "age"], ["claims"]]\n'
CGD = 'name = "cgd"\nlearning-rate = 0.5\nloss = "cross-entropy"'
FEDSGD = 'name = "fedsgd"\nlearning-rate = 0.1'
BOTH = 'clinic = "clinic.csv"\ninsurer = "insurer.csv"'


def people(count: int = 60) -> list[dict[str, str]]:
    random = np.random.default_rng(4)
    found = []
    for number in range(count):
        age, claims = int(random.integers(20, 90)), int(random.integers(0, 9))
        found.append(
            {
                "person": f"P-{number:04}",
                "age": str(age),
                "ward": ("A", "B", "")[number % 3],
                "note": "free text",
                "claims": str(claims),
                "outcome": "yes" if age / 10 + claims > 9 else "no",
            }
        )
    return found


def write(path: Path, rows: list[dict[str, str]], *names: str) -> None:
    lines = [",".join(names), *(",".join(row[name] for name in names) for row in rows)]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.toml").write_text(SCHEMA)
    rows = people()
    order = np.random.default_rng(1).permutation(len(rows))
    write(tmp_path / "clinic.csv", rows, "note", "outcome", "age", "person", "ward")
    write(tmp_path / "insurer.csv", [rows[place] for place in order], "claims", "person")
    others = [row | {"person": f"T-{number}"} for number, row in enumerate(rows)]
    write(tmp_path / "whole.csv", others, "person", "age", "ward", "claims", "outcome")
    return tmp_path


def run(data: str, protocol: str, files: str = BOTH) -> Path:
    Path("run.toml").write_text(RUN.format(data=data, files=files, protocol=protocol))
    return Path("run.toml")


def test_partners_columns_go_where_the_run_file_says(here: Path) -> None:
    path = run(COLUMNS + 'test = "whole.csv"', CGD)
    federation = federation_of(run_files.load(path), None)
    clinic, insurer = federation.silos
    assert federation.table is not None
    expansion = expansion_of(federation.table)
    assert [expansion.names[column] for column in clinic.columns] == ["age", "ward=A", "ward=B", "ward=missing"]
    assert (expansion.kinds[3], insurer.columns) == (MARK, (4,))
    assert (clinic.holds_labels, insurer.holds_labels) == (True, False)
    assert not clinic.aligned
    assert federation.test is not None
    assert federation.test[0].shape == (60, 5)


@pytest.mark.parametrize("form", ["clinic.csv", "insurer.csv"])
def test_a_run_folders_file_keeps_the_order_of_silos(form: str, here: Path) -> None:
    """TOML lists plain values before tables: partners' columns went by position to the other one."""
    files = "\n".join(
        f'{name} = {{source = "{name}.csv", separator = ","}}' if f"{name}.csv" == form else f'{name} = "{name}.csv"'
        for name in ("clinic", "insurer")
    )
    given = run_files.load(run(COLUMNS + 'test = "whole.csv"\nabsent = ["none"]', CGD, files))
    (here / "kept.toml").write_text(run_files.dump(given))
    kept = run_files.load(here / "kept.toml")
    assert list(kept.data.files) == ["clinic", "insurer"] == list(given.data.files)
    assert run_files.digest(kept) == run_files.digest(given)
    first, again = federation_of(given, None).silos, federation_of(kept, None).silos
    assert [silo.name for silo in first] == [silo.name for silo in again]
    assert all(
        (one.x == other.x).all() and one.columns == other.columns for one, other in zip(first, again, strict=True)
    )


def test_no_test_row_is_of_whom_a_silo_trains_on(here: Path) -> None:
    others = [row | {"person": f"T-{number}"} for number, row in enumerate(people())]
    others[3]["person"] = "P-0003"
    write(here / "whole.csv", others, "person", "age", "ward", "claims", "outcome")
    done = call("train", run(COLUMNS + 'test = "whole.csv"', CGD + "\nalign = true"), "--out", "mine")
    assert done.code == 2
    assert "silo `clinic`: id: 1 of 60 test rows share one with training rows" in done.sentence
    assert "P-0" not in done.err
    assert not (here / "mine").exists()


OWN = 'north = {source = "north.csv", test = "held.csv"}\nsouth = {source = "south.csv", test = "other.csv"}'


def test_each_silo_may_have_test_rows_of_its_own(here: Path) -> None:
    rows, names = people(), ("person", "age", "ward", "claims", "outcome")
    for name, own in (("north", rows[:25]), ("south", rows[25:50]), ("held", rows[50:57]), ("other", rows[57:])):
        write(here / f"{name}.csv", own, *names)
    done = call("train", run("", FEDSGD, OWN), "--out", "mine", "--json")
    assert done.code == 0, done.err
    federation = federation_of(run_files.load("mine/run.toml"), None)
    assert [len(silo.x) for silo in federation.silos] == [25, 25]
    assert federation.test is not None
    assert len(federation.test[0]) == 10
    write(here / "other.csv", rows[30:], *names)
    with pytest.raises(ParameterError, match="silo `south`: id: 20 of 30 test rows share one with training rows"):
        federation_of(run_files.load("run.toml"), None)
    write(here / "other.csv", rows[:5], *names)  # ids are a hospital's own; its neighbour's may be the same words
    assert federation_of(run_files.load("run.toml"), None).test is not None
    (here / "schema.toml").write_text(SCHEMA.replace('"id"', '"group"'))
    with pytest.raises(ParameterError, match="group: 5 of 12 test rows share one with training rows"):
        federation_of(run_files.load("run.toml"), None)


@pytest.mark.parametrize("kind", ["id", "group"])
@pytest.mark.parametrize("part", ["test", "validation"])
def test_a_person_of_two_files_is_on_one_side(kind: str, part: str, here: Path) -> None:
    """Ids were lost where files were joined: most test rows were about people whom a silo trained on."""
    (here / "schema.toml").write_text(SCHEMA.replace('"id"', f'"{kind}"'))
    rows, names = people(), ("person", "age", "ward", "claims", "outcome")
    for place, row in enumerate(rows):
        row["age"] = str(place)  # tells who somebody is
    write(here / "north.csv", rows, *names)
    write(here / "south.csv", rows[::-1][:40], *names)
    data = "test-fraction = 0\nvalidation-fraction = 0.2" if part == "validation" else "test-fraction = 0.2"
    federation = federation_of(run_files.load(run(data, FEDSGD, 'north = "north.csv"\nsouth = "south.csv"')), None)
    held = getattr(federation, part)
    assert 16 <= len(held[0]) <= 24
    trained = np.concatenate([silo.x[:, 0] for silo in federation.silos])
    assert not np.isin(held[0][:, 0], trained).any()
    assert len(trained) + len(held[0]) == 100


def test_nobody_is_in_a_silos_file_and_in_the_table_of_test_rows(here: Path) -> None:
    path = run('test = "whole.csv"', FEDSGD, 'a = "a.csv"\nb = "whole.csv"')
    write(here / "a.csv", people(), "person", "age", "ward", "claims", "outcome")
    with pytest.raises(ParameterError, match="silo `b`: id: 60 of 60 test rows"):
        federation_of(run_files.load(path), None)


@pytest.fixture
def trained(here: Path) -> Path:
    """What comes of rows that `[protocol] align = true` puts in order."""
    done = call("train", run(COLUMNS + 'test = "whole.csv"', CGD + "\nalign = true"), "--out", "mine")
    assert done.code == 0, done.err
    return here


def test_rows_in_another_order_are_aligned_or_refused(trained: Path) -> None:
    done = call("train", run(COLUMNS, CGD), "--out", "again")
    assert done.code == 2
    assert "row `row-1`" in done.err.splitlines()[-1]
    assert "P-0" not in done.err
    assert not (trained / "again").exists()


def test_a_look_needs_rows_in_one_order(here: Path) -> None:
    path = run(COLUMNS, CGD + "\nalign = true")
    assert "are not in one order" in call("look", path).sentence
    done = call("train", path, "--out", "mine")
    assert done.code == 0
    assert "insurer: 60 rows, to be put in order" in done.err
    rows = run("test-fraction = 0.2", FEDSGD, 'a = "whole.csv"\nb = "whole.csv"')
    found = call("look", rows, "--withhold", "0", "--by-silo")
    assert (found.code, "a" in found.out) == (0, True)


def test_without_ids_nothing_says_that_rows_are_in_order(here: Path) -> None:
    schema = SCHEMA.replace('kind = "id"', 'kind = "drop"')
    (here / "schema.toml").write_text(schema)
    done = call("train", run(COLUMNS, CGD), "--out", "mine")
    assert done.code == 2
    assert "silo `clinic`" in done.err.splitlines()[-1]
    assert "moretta align" in done.err
    assert not (here / "mine").exists()


def test_partners_with_nobody_in_common(here: Path) -> None:
    rows = people()
    for row in rows:
        row["person"] = row["person"].replace("P", "Q")
    write(here / "insurer.csv", rows, "claims", "person")
    done = call("train", run(COLUMNS, CGD + "\nalign = true"), "--out", "mine")
    assert done.code in (1, 2)
    assert "in common" in done.err or "share" in done.err
    assert not any(one in done.err for one in ("P-0", "Q-0"))


@pytest.mark.parametrize(
    ("data", "files", "said"),
    [
        ('target = "outcome"', BOTH, '[data] target is not supported by source = "files"'),
        ("silos = 3", BOTH, "[data] files names 2 silos, expected silos = 3"),
        (
            'partition = "by-label"',
            BOTH,
            '[data] partition = "by-label" splits one set of rows, but each silo has its own file',
        ),
        (COLUMNS + "test-fraction = 0.2", BOTH, "[data] test-fraction would hold back rows that other holders"),
        (COLUMNS.replace('"age"', '"height"'), BOTH, "[data] columns: expected each input column of the schema"),
        ("", "north = 3", "[data.files] north: expected a path in quotes, got 3"),
        ("", 'north = {source = "a.csv", seperator = ";"}', "seperator is not known; did you mean separator?"),
        ("", 'a = "clinic.csv"\nb = {source = "b.csv", alignment = "b.json"}', "[data.files.b] alignment is for silos"),
        (COLUMNS, OWN, "[data.files.north] test: expected one for each silo of whole rows"),
        ('test = "whole.csv"', OWN, "name all test rows in [data] test"),
        ("", OWN.replace('{source = "south.csv", test = "other.csv"}', '"south.csv"'), "set it for each silo, or"),
        ("test-fraction = 0.2", OWN, "[data] test names the test rows, and test-fraction 0.2 would hold others back"),
        ("", "", "needs a table for each silo there"),
        ("", BOTH, "silo `clinic`: clinic.csv: the column 'claims' of the schema is missing"),
    ],
)
def test_what_does_not_go_with_files_is_one_sentence(here: Path, data: str, files: str, said: str) -> None:
    with pytest.raises(ParameterError) as error:
        federation_of(run_files.load(run(data, CGD if "by-feature" in data else FEDSGD, files)), None)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_files_need_a_schema(here: Path) -> None:
    text = run("", FEDSGD).read_text().replace('schema = "schema.toml"\n', "")
    Path("run.toml").write_text(text)
    with pytest.raises(ParameterError, match="needs schema"):
        run_files.load("run.toml")


def test_a_run_file_says_the_same_after_it_was_resolved(here: Path) -> None:
    files = 'clinic = {source = "clinic.csv", separator = ",", absent = ["n/a"]}\ninsurer = "insurer.csv"'
    first = run_files.load(run(COLUMNS, CGD, files))
    Path("resolved.toml").write_text(run_files.dump(first))
    again = run_files.load("resolved.toml")
    assert again.data == first.data
    assert run_files.digest(again) == run_files.digest(first)
