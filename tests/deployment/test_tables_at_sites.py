"""Sites whose tables are written in their own ways: they train as one machine does, or are refused by column."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loopback import SEED, SERVER, Machines
from test_cli import call

from moretta import Federation, Silo
from moretta.config import run_files, silo_file
from moretta.data.tables.rows import read_table
from moretta.deployment import shared_settings as told
from moretta.engines.flare.site_worker import UNFIT
from moretta.engines.run_folder import read_model
from moretta.errors import ParameterError
from moretta.models import catalogue
from moretta.secure_aggregation.identity import public_line

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import feather, parquet  # noqa: E402

NAMES = ("north", "south", "west")
COLUMNS = ("patient", "age", "ward", "crp", "outcome")
SCHEMA = """
[columns.patient]
kind = "group"
[columns.age]
kind = "number"
[columns.ward]
kind = "category"
categories = ["A", "B", "C"]
blanks = "category"
[columns.crp]
kind = "number"
range = [0, 400]
blanks = "median"
[columns.outcome]
kind = "target"
classes = ["no", "yes"]
"""
RUN = """
[run]
name = "run"
rounds = 3
seed = 7
insecure-secret-seed = 3
[data]
source = "sites"
schema = "schema.toml"
test = "test.csv"
batch-size = 8
[model]
source = "mlp"
hidden = [5]
[protocol]
name = "pbpfl"
loss = "cross-entropy"
learning-rate = 0.1
[engine]
name = "flare"
sites = ["north", "south", "west"]
"""
SILO = """
[silo]
name = "{name}"
out = "kept"
insecure-secret-seed = 3
server-key = "{key}"
[data]
source = "{source}"
{written}
"""
Values = dict[str, list[Any]]


def values_of(seed: int, rows: int = 40) -> Values:
    random = np.random.default_rng(seed)
    age, crp = random.integers(20, 90, rows), random.integers(1, 800, rows) / 8
    return {
        "patient": [f"P{seed}-{number // 2}" for number in range(rows)],
        "age": age.tolist(),
        "ward": [None if not number % 9 else "ABC"[number % 3] for number in range(rows)],
        "crp": [None if not number % 7 else float(one) for number, one in enumerate(crp)],
        "outcome": ["yes" if one > 50 else "no" for one in age],
    }


def write(path: Path, values: Values, names: Sequence[str], separator: str = ",", decimal: str = ".") -> None:
    if path.suffix == ".csv":
        cells = {
            name: ["" if one is None else str(one).replace(".", decimal) for one in values[name]] for name in names
        }
        lines = [separator.join(names), *map(separator.join, zip(*(cells[name] for name in names), strict=True))]
        path.write_text("\n".join(lines) + "\n")
        return
    table = pyarrow.table({name: values[name] for name in names})
    (parquet.write_table if path.suffix == ".parquet" else feather.write_feather)(table, path)


class Hospitals(Machines):
    """Three sites: one has semicolons and decimal commas, one Parquet, one Arrow, each another order of columns."""

    def __init__(self, folder: Path, run: str = RUN, rounds: int = 3) -> None:
        self.folder, self.rounds, self.names = folder, rounds, list(NAMES)
        (folder / "schema.toml").write_text(SCHEMA)
        (folder / "many.toml").write_text(run)
        write(folder / "test.csv", values_of(9), COLUMNS)
        orders = (COLUMNS, COLUMNS[::-1], (*COLUMNS[2:], *COLUMNS[:2]))
        files = ("rows.csv", "rows.parquet", "rows.arrow")
        for number, (name, file, order) in enumerate(zip(NAMES, files, orders, strict=True)):
            (folder / name).mkdir()
            write(folder / name / file, values_of(number), order, ";", ",")
            written = 'separator = ";"\ndecimal = ","' if file == "rows.csv" else ""
            text = SILO.format(name=name, key=public_line(SERVER.public_key), source=file, written=written)
            (folder / name / "silo.toml").write_text(text)
        self.read()


@pytest.fixture
def hospitals(tmp_path: Path, one_process: None) -> Hospitals:
    return Hospitals(tmp_path)


def test_three_sites_train_as_one_machine_does_whatever_their_files(hospitals: Hospitals, tmp_path: Path) -> None:
    hospitals.start()
    try:
        hospitals.serve(tmp_path / "many", least=3)
    finally:
        hospitals.stop()
    check_predictions(hospitals, tmp_path)
    run_file = hospitals.run_file
    assert run_file.table is not None
    for ending in ("csv", "parquet", "arrow"):  # and on one machine: all in one kind of file, in the schema's order
        silos = []
        for number, name in enumerate(NAMES):
            path = tmp_path / f"{name}.{ending}"
            write(path, values_of(number), COLUMNS)
            rows = read_table(path, run_file.table)
            silos.append(Silo(name, rows.x, rows.y, groups=rows.groups))
        test = read_table(tmp_path / "test.csv", run_file.table)
        model = catalogue.build("mlp", inputs=(6,), outputs=2, seed=SEED, hidden=[5])
        Federation(
            model,
            silos,
            run_file.protocol,
            test=(test.x, test.y),
            out=tmp_path / ending,
            batch_size=8,
            standardise=True,
            table=run_file.table,
            insecure_secret_seed=3,
        ).train(3, SEED)
        for file in ("model.safetensors", "released.safetensors"):
            ours, theirs = (read_model(tmp_path / place, file) for place in ("many", ending))
            assert {name: one.tobytes() for name, one in ours.items()} == {
                name: one.tobytes() for name, one in theirs.items()
            }
        assert (tmp_path / ending / "inputs.json").read_text() == (tmp_path / "many" / "inputs.json").read_text()


VALIDATED = RUN.replace("rounds = 3\n", "rounds = 30\nearly-stopping = 4\nevaluate-every = 2\n").replace(
    "batch-size = 8", "batch-size = 8\nvalidation-fraction = 0.25"
)


def test_sites_validate_on_whole_patients_and_the_run_ends_at_its_best_round(
    tmp_path: Path, one_process: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "moretta")
    text = VALIDATED.replace('"pbpfl"', '"fedsgd"').replace("learning-rate = 0.1", "learning-rate = 1.5")
    hospitals = Hospitals(tmp_path, text, 30)
    hospitals.start()
    try:
        hospitals.serve(tmp_path / "many", least=3)
    finally:
        hospitals.stop()
    logged = [one.getMessage() for one in caplog.records if one.getMessage().startswith("round 3 of 30, ")]
    own = {
        re.sub(r"^round 3 of 30, \d+ s; on its own rows held back: loss \S+ accuracy \S+$", "", one) for one in logged
    }
    assert (len(logged), len(set(logged)), own) == (3, 3, {""})  # each site's own score, in its own log
    run_file = hospitals.run_file
    assert run_file.table is not None
    silos = []
    for number, name in enumerate(NAMES):
        write(tmp_path / f"{name}.csv", values_of(number), COLUMNS)
        rows = read_table(tmp_path / f"{name}.csv", run_file.table)
        silos.append(Silo(name, rows.x, rows.y, groups=rows.groups))
    federation = Federation(
        catalogue.build("mlp", inputs=(6,), outputs=2, seed=SEED, hidden=[5]),
        silos,
        run_file.protocol,
        batch_size=8,
        standardise=True,
        table=run_file.table,
        insecure_secret_seed=3,
        early_stopping=4,
        evaluate_every=2,
        validation_fraction=0.25,
    )
    for silo, whole in zip(federation.silos, silos, strict=True):  # each patient has two rows
        assert silo.groups is not None
        assert silo.validation is not None
        assert len(silo.x) + len(silo.validation[0]) == len(whole.x)
        assert set(np.unique(silo.groups, return_counts=True)[1]) == {2}
    alone = federation.train(30, SEED)
    lines = [json.loads(line) for line in (tmp_path / "many" / "history.jsonl").read_text().splitlines()]
    figures = ("validation_rows", "validation_loss", "validation_accuracy")
    ours, theirs = ([[line.get(key) for key in figures] for line in found] for found in (lines, alone.history))
    assert ours == theirs
    result = json.loads((tmp_path / "many" / "result.json").read_text())
    assert result["facts"]["best_round"] == alone.record["facts"]["best_round"] < result["rounds"] < 30
    released = read_model(tmp_path / "many", "released.safetensors")
    assert alone.released is not None
    module = {name: value.numpy() for name, value in alone.raw_model().network.state_dict().items()}
    assert {name: one.tobytes() for name, one in released.items()} == {
        name: one.tobytes() for name, one in module.items()
    }


def check_predictions(hospitals: Hospitals, folder: Path) -> None:
    """Each site predicts a table with what it was released to it, and all predict the same."""
    write(folder / "new.csv", values_of(20), ("crp", "ward", "age", "patient"))
    found = set()
    for name in NAMES:
        out = folder / f"{name}-predicted.csv"
        done = call("predict", hospitals.kept(name), "--data", folder / "new.csv", "--out", out)
        assert done.code == 0, done.err
        found.add(out.read_text())
    (text,) = found
    assert text.startswith("patient,prediction,probability_no,probability_yes\nP20-0,")


def doctor(hospitals: Hospitals, name: str) -> dict[str, Any]:
    """What `moretta doctor` finds of a site's rows."""
    run, silo = hospitals.folder / "many.toml", hospitals.folder / name / "silo.toml"
    findings = call("doctor", "--silo", silo, "--run", run, "--json").told["findings"]
    return next(dict(one) for one in findings if one["what"] == "data")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("no crp", "the column 'crp' of the schema is missing"),
        ("other words", "column 'ward' has a word that the schema does not have in 35 of 40 rows"),
        ("points", "column 'crp' has numbers with a point, and the file has decimal = \",\""),
        ("line breaks", "column 'patient' has line breaks or control characters in 40 of 40 rows"),
        ("one more", "the schema lacks the column 'weight'"),
    ],
)
def test_a_site_whose_columns_mean_something_else_says_which(hospitals: Hospitals, change: str, said: str) -> None:
    values, names, decimal = values_of(0), list(COLUMNS), ","
    if change == "no crp":
        names.remove("crp")
    elif change == "one more":
        values["weight"], names = values["age"], [*names, "weight"]
    elif change == "other words":
        values["ward"] = [one and f"Station {one}" for one in values["ward"]]
    elif change == "line breaks":
        values["patient"] = [f'"{one}\nx"' for one in values["patient"]]
    else:
        decimal = "."
    write(hospitals.folder / "north" / "rows.csv", values, names, ";", decimal)
    run_file = run_files.loads(hospitals.text, Path("run.toml"))
    with pytest.raises(ParameterError) as error:
        told.site_side(run_file, silo_file.load(hospitals.folder / "north" / "silo.toml"))
    assert said in str(error.value)
    assert "silo `north`: rows.csv" in str(error.value)
    assert not any(one in str(error.value) for one in ("P0-", "Station"))
    found = doctor(hospitals, "north")
    assert (found["passes"], found["sentence"]) == (False, str(error.value))
    assert doctor(hospitals, "west")["passes"]


def test_a_table_that_changes_during_a_run_is_refused(
    hospitals: Hospitals, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hospitals.start()

    def progress(number: int, rounds: int, line: object) -> None:
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hospitals.serve(tmp_path / "many", least=3, progress=progress)
    hospitals.stop()
    values = values_of(0)
    values["age"][3] += 1
    write(hospitals.folder / "north" / "rows.csv", values, COLUMNS, ";", ",")
    hospitals.start()
    try:
        with pytest.raises(ParameterError, match=UNFIT) as error:
            hospitals.serve(tmp_path / "many", least=3, resume=True, wait=2.0)
    finally:
        hospitals.stop()
    assert "the rows of north have changed since" in caplog.text
    assert not any(one in str(error.value) for one in ("P0-", str(tmp_path)))  # neither a patient nor a site's folder
