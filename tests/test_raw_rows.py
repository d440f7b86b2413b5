"""Rows as people have them, through the shell: each failure of a raw table is refused by one sentence, or works.

Each case ran with exit code 0 and no warning before tables were read by a schema.
"""

from __future__ import annotations

import csv
import json
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from test_cli import Called, call
from torch import nn

import moretta
from moretta import PBPFL, Federation, FedSGD, Silo
from moretta.config import run_files
from moretta.data.tables import schema as schemas
from moretta.data.tables.rows import read_table
from moretta.engines.run_folder import read_json, read_model
from moretta.errors import ParameterError
from moretta.run.assembly import federation_of

ROWS = 240
NAMES = ("patient", "admitted", "age", "crp", "bmi", "ward", "outcome")
FEATURES = ("age", "crp", "bmi", "ward", "outcome")
RUN = """
[run]
rounds = 2
seed = 7

[data]
source = "patients.csv"
batch-size = 0

[model]
source = "mlp"
hidden = [4]

[protocol]
name = "pbpfl"
loss = "cross-entropy"
learning-rate = 0.1
"""
SCHEMA = """
[columns.patient]
kind = "group"
[columns.admitted]
kind = "date"
[columns.age]
kind = "number"
[columns.crp]
kind = "number"
censored = "half"
blanks = "indicator"
[columns.bmi]
kind = "number"
range = [10, 60]
blanks = "median"
[columns.ward]
kind = "category"
categories = ["A", "B", "C"]
blanks = "category"
[columns.outcome]
kind = "target"
classes = ["no", "yes"]
"""
Row = dict[str, str]
Change = Callable[[list[Row]], None]


def table(seed: int = 0, rows: int = ROWS) -> list[Row]:
    """Return rows of a clinic, each patient with one or several visits."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(rows):
        age, crp, bmi = random.normal(60, 12), random.gamma(2, 15), random.normal(26, 3)
        found.append(
            {
                "patient": f"MRN-{40_000 + number:06}",
                "admitted": str(np.datetime64("2024-01-01") + int(random.integers(300))),
                "age": f"{age:.0f}",
                "crp": f"{crp:.1f}",
                "bmi": f"{bmi:.1f}",
                "ward": "ABC"[int(random.integers(3))],
                "outcome": "yes" if age / 12 + crp / 20 + random.normal() > 6.5 else "no",
            }
        )
    return found


def write(path: Path, rows: Sequence[Row], names: Sequence[str] = FEATURES, separator: str = ",") -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore", delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "schema.toml").write_text(SCHEMA)
    return tmp_path


def train(*sets: str, run: str = "run.toml") -> Called:
    return call("train", run, "--out", "mine", *(word for one in sets for word in ("--set", one)))


def refused(done: Called, rows: Sequence[Row], *said: str) -> None:
    """Check that one sentence says what is wrong, that nothing is left, and that no id and no cell is told."""
    assert done.code == 2, done.out
    for part in said:
        assert part in done.sentence
    assert not Path("mine").exists()
    for row in rows:
        assert row["patient"] not in done.err
        if row["crp"] not in ("<5", "n/a"):  # which the remedies have as examples
            assert not re.search(rf"(?<![\w.,-]){re.escape(row['crp'])}(?![\w.,])", done.err)


# -- Each line of what went wrong --------------------------------------------------------------------------------------


def decimal_commas(rows: list[Row]) -> None:
    for row in rows:
        row["crp"], row["bmi"] = row["crp"].replace(".", ","), row["bmi"].replace(".", ",")


def below_five(rows: list[Row]) -> None:
    rows[17]["crp"] = "<5"


def not_available(rows: list[Row]) -> None:
    for row in rows[::9]:
        row["crp"] = "n/a"


def no_outcome(rows: list[Row]) -> None:
    for row in rows[:4]:
        row["outcome"] = "unknown"


def nothing(rows: list[Row]) -> None:
    """Change nothing."""


@pytest.mark.parametrize(
    ("change", "names", "separator", "said"),
    [
        (decimal_commas, FEATURES, ";", ("patients.csv: column 'crp'", 'decimal = ","')),
        (below_five, FEATURES, ",", ("patients.csv: column 'crp'", "1 of 240 rows", 'censored = "limit"')),
        (not_available, FEATURES, ",", ("patients.csv: column 'crp'", "27 of 240 rows", 'absent = ["n/a"]')),
        (no_outcome, FEATURES, ",", ("patients.csv: column 'outcome'", "is the target", "remove those rows")),
        (nothing, NAMES, ",", ("patients.csv: column 'patient'", "looks like ids", "id-column")),
        (nothing, NAMES[1:], ",", ("patients.csv: column 'admitted'", "holds dates", 'kind = "date"')),
    ],
    ids=["decimal commas", "<5", "n/a", "unknown outcome", "an id", "a date"],
)
def test_without_a_schema_what_is_not_sure_is_refused(
    here: Path, change: Change, names: Sequence[str], separator: str, said: tuple[str, ...]
) -> None:
    rows = table()
    change(rows)
    write(here / "patients.csv", rows, names, separator)
    refused(train(), rows, *said)


def test_each_remedy_is_taken(here: Path) -> None:
    rows = table()
    decimal_commas(rows)
    not_available(rows)
    write(here / "patients.csv", rows, NAMES, ";")
    sets = ('data.decimal=","', 'data.absent=["n/a"]', 'data.schema="schema.toml"')
    assert train(*sets).code == 0
    told = read_json(here / "mine" / "inputs.json")
    assert told["columns"][1:4] == ["age", "crp", "crp=missing"]
    assert len(told["columns"]) == 9  # and not the 1,273 of then


def readable(folder: Path) -> str:
    """The text of all files that anybody may read."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_mode & stat.S_IROTH]
    return "".join(path.read_bytes().decode("latin-1") for path in files)


def test_ids_are_in_no_file_that_others_read(here: Path) -> None:
    rows = table()
    write(here / "patients.csv", rows, ("patient", *FEATURES))
    done = train('data.id-column="patient"', "run.record-views=true")
    assert done.code == 0
    said = readable(here / "mine") + done.out + done.err
    assert '"age"' in said
    assert "MRN-" not in said


def test_what_columns_were_taken_for_is_printed_before_round_one(here: Path) -> None:
    write(here / "patients.csv", table())
    done = train()
    assert done.code == 0
    told, _, rest = done.err.partition("0/2")
    assert "target: outcome, classes no, yes" in done.err
    assert "categories: ward (A, B, C)" in done.err
    if rest:
        assert "target: outcome" in told


def test_another_order_of_columns_is_another_target_and_says_so(here: Path) -> None:
    write(here / "patients.csv", table(), ("outcome", "age", "crp", "bmi", "ward"))
    done = train()
    assert done.code == 0
    assert "target: ward, classes A, B, C" in done.err


# -- Predictions -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `mine`, and new.csv: patients with blanks, `<5`, in another order of columns."""
    home = tmp_path_factory.mktemp("raw")
    rows = table()
    for number in range(0, ROWS, 7):
        rows[number]["bmi"] = rows[number]["crp"] = ""
        rows[number + 1]["patient"] = rows[number]["patient"]
    write(home / "patients.csv", rows, NAMES)
    (home / "schema.toml").write_text(SCHEMA)
    (home / "run.toml").write_text(RUN.replace('"patients.csv"', '"patients.csv"\nschema = "schema.toml"'))
    assert call("train", home / "run.toml", "--out", home / "mine").code == 0
    fresh = table(seed=1, rows=24)
    for number, row in enumerate(fresh):
        row["crp"] = ("<5", "", row["crp"])[number % 3]
        row["bmi"] = ("", row["bmi"])[number % 2]
        row["ward"] = ("", row["ward"])[number % 4 > 0]
    write(home / "new.csv", fresh, [name for name in reversed(NAMES) if name != "outcome"])
    return home


def predicted(home: Path, data: Path, out: Path) -> list[dict[str, str]]:
    done = call("predict", home / "mine", "--data", data, "--out", out)
    assert done.code == 0, done.err
    with out.open() as file:
        return list(csv.DictReader(file))


def test_a_prediction_does_not_depend_on_who_else_is_in_the_file(trained: Path, tmp_path: Path) -> None:
    together = predicted(trained, trained / "new.csv", tmp_path / "all.csv")
    header, *lines = (trained / "new.csv").read_text().splitlines()
    for count in (6, 20):
        (tmp_path / "some.csv").write_text("\n".join([header, *lines[:count]]) + "\n")
        assert predicted(trained, tmp_path / "some.csv", tmp_path / "some_out.csv") == together[:count]
    alone = []
    for line in lines[:8]:
        (tmp_path / "one.csv").write_text(f"{header}\n{line}\n")
        alone += predicted(trained, tmp_path / "one.csv", tmp_path / "one_out.csv")
    assert alone == together[:8]  # to the last digit


def test_predictions_carry_who_the_class_and_probabilities(trained: Path, tmp_path: Path) -> None:
    found = predicted(trained, trained / "new.csv", tmp_path / "all.csv")
    assert list(found[0]) == ["patient", "prediction", "probability_no", "probability_yes"]
    assert [row["patient"] for row in found] == [row["patient"] for row in table(seed=1, rows=24)]
    for row in found:
        chances = float(row["probability_no"]), float(row["probability_yes"])
        assert sum(chances) == pytest.approx(1)
        assert row["prediction"] == ("yes" if chances[1] > chances[0] else "no")


def test_shell_python_and_onnx_predict_alike_from_raw_rows(trained: Path, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    result = federation_of(run_files.load(trained / "run.toml"), tmp_path / "mine").train(2, 7)
    shell = predicted(tmp_path, trained / "new.csv", tmp_path / "all.csv")
    wanted = np.array([[float(row["probability_no"]), float(row["probability_yes"])] for row in shell])
    # Python takes rows as the silos have them: NaN where a value is absent, nothing scaled or filled in.
    schema = schemas.load(trained / "schema.toml")
    rows = read_table(trained / "new.csv", schema, labelled=False)
    assert np.isnan(rows.x).any()
    assert result.model is not None
    assert result.released is not None
    with torch.no_grad():
        for model in (result.released, result.model):  # another model of the same function
            ours = torch.softmax(model(torch.tensor(rows.x)).double(), 1).numpy()
            assert np.abs(ours - wanted).max() < 1e-6
    # The graph takes coded rows; its own metadata says what they mean.
    assert call("export", tmp_path / "mine", "--out", tmp_path / "model.onnx").code == 0
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    told = json.loads(session.get_modelmeta().custom_metadata_map["moretta.inputs"])
    assert told["table"] == schema.plain()
    (outputs,) = session.run(None, {"x": rows.coded})
    graph = torch.softmax(torch.tensor(outputs).double(), 1).numpy()
    assert np.abs(graph - wanted).max() < 1e-6


def test_a_run_file_has_the_columns_of_embeddings_from_its_schema(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(SCHEMA)
    text = RUN.replace("[data]", '[data]\nschema = "schema.toml"').replace('"mlp"', '"embeddings"')
    (tmp_path / "run.toml").write_text(text)
    run_file = run_files.load(tmp_path / "run.toml")
    assert run_file.model.arguments["categories"] == [[5, 4]]  # three words and ward=missing
    kept = tmp_path / "kept.toml"
    kept.write_text(run_files.dump(run_file))
    assert run_files.load(kept).model == run_file.model
    (tmp_path / "run.toml").write_text(text.replace('schema = "schema.toml"', ""))
    with pytest.raises(ParameterError, match='model "embeddings" needs a schema'):
        run_files.load(tmp_path / "run.toml")


def test_python_loads_a_run_of_the_shell_and_saves_one(trained: Path, tmp_path: Path) -> None:
    shell = predicted(trained, trained / "new.csv", tmp_path / "all.csv")
    wanted = [row["prediction"] for row in shell]
    with (trained / "new.csv").open() as file:
        rows = list(csv.DictReader(file))
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    result = federation_of(run_files.load(trained / "run.toml"), None).train(2, 7)
    for model in (moretta.load(trained / "mine"), moretta.load(result.save(tmp_path / "saved")), result.raw_model()):
        assert model.predict(columns).tolist() == wanted
        chances = [float(row["probability_yes"]) for row in shell]
        assert np.abs(model.predict_proba(columns)[:, 1] - chances).max() < 1e-6


def test_a_model_from_python_takes_raw_rows(trained: Path) -> None:
    random = np.random.default_rng(3)
    x = (random.normal(0, 1, (300, 3)) * [1, 100, 0.01] + [60, 4000, 3]).astype(np.float32)
    y = (x[:, 0] - 60 + (x[:, 1] - 4000) / 100 > 0).astype(np.int64)
    silos = [Silo("north", x[:100], y[:100]), Silo("south", x[100:200], y[100:200])]
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    protocol = PBPFL(loss="cross-entropy", learning_rate=0.3)
    result = Federation(model, silos, protocol, test=(x[200:], y[200:]), standardise=True).train(80, seed=7)
    assert result.test is not None
    for one in (result.model, result.released):
        assert one is not None
        with torch.no_grad():
            accuracy = float((one(torch.tensor(x[200:])).argmax(1).numpy() == y[200:]).mean())
        assert accuracy == result.test["accuracy"] > 0.9


def test_a_run_from_python_predicts_by_the_shell(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = schemas.load(trained / "schema.toml")
    rows = read_table(trained / "patients.csv", schema)
    half = np.arange(ROWS) % 2 == 0
    silos = [Silo("north", rows.x[half], rows.y[half]), Silo("south", rows.x[~half], rows.y[~half])]
    protocol = PBPFL(loss="cross-entropy", learning_rate=0.1)
    federation = Federation(nn.Linear(9, 2), silos, protocol, standardise=True, table=schema, out=tmp_path / "run")
    result = federation.train(3, seed=7)
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text("from torch import nn\n\ndef build(**_):\n    return nn.Linear(9, 2)\n")
    words = ("predict", "run", "--data", trained / "new.csv", "--out", "out.npy")
    assert "--model" in call(*words).sentence
    done = call(*words, "--model", "nets:build")
    assert done.code == 0, done.err
    fresh = read_table(trained / "new.csv", schema, labelled=False)
    assert result.released is not None
    with torch.no_grad():
        ours = result.released(torch.tensor(fresh.x)).numpy()
    assert np.abs(np.load("out.npy") - ours).max() < 1e-6


@pytest.mark.parametrize("wards", [["A"], ["A", "B"]])
def test_coded_rows_are_expanded_though_a_category_has_one_word(wards: list[str]) -> None:
    """With one word each, rows have as many columns coded as expanded: its place is 0, and its column is of ones."""
    columns = {"age": np.arange(20.0), "ward": [*wards * 20][:20], "outcome": ["no", "yes"] * 10}
    kinds = {"age": {"kind": "number"}, "ward": {"kind": "category", "categories": wards}}
    schema = schemas.of({"columns": kinds | {"outcome": {"kind": "target", "classes": ["no", "yes"]}}})
    rows = read_table(columns, schema)
    silos = [Silo(name, rows.x, rows.y) for name in ("north", "south")]
    model = nn.Linear(rows.x.shape[1], 2)
    result = Federation(model, silos, FedSGD(loss="cross-entropy"), standardise=True, table=schema).train(2)
    expected = result.predict_proba(columns)
    with torch.no_grad():
        for one in (rows.x, rows.coded):
            assert np.abs(result.predict_proba(one) - expected).max() < 1e-6
            outputs = result.raw_model()(torch.tensor(one))
            assert np.abs(torch.softmax(outputs, 1).numpy() - expected).max() < 1e-6
    impossible = np.array([[3.0, 0.5]], np.float32)
    with pytest.raises(ParameterError, match="ward=A"):
        result.predict(impossible)


def test_columns_that_no_prediction_reads_may_be_anything() -> None:
    hours = np.arange(20).astype("timedelta64[h]")
    columns = {"age": np.arange(20.0), "stay": hours, "outcome": ["no", "yes"] * 10}
    kinds = {"age": {"kind": "number"}, "stay": {"kind": "drop"}}
    schema = schemas.of({"columns": kinds | {"outcome": {"kind": "target", "classes": ["no", "yes"]}}})
    rows = read_table(columns, schema)
    silos = [Silo(name, rows.x, rows.y) for name in ("north", "south")]
    result = Federation(nn.Linear(1, 2), silos, FedSGD(loss="cross-entropy"), table=schema).train(1)
    assert (result.predict(columns) == result.predict(rows.x)).all()


# -- What sites and silos have -----------------------------------------------------------------------------------------

FILES = """
[run]
rounds = 2
seed = 7

[data]
source = "files"
schema = "schema.toml"
batch-size = 0

[data.files]
north = "north.csv"
south = "south.csv"

[model]
source = "mlp"
hidden = [4]

[protocol]
name = "fedsgd"
learning-rate = 0.1
"""


@pytest.fixture
def files(here: Path) -> list[Row]:
    rows = table()
    write(here / "north.csv", rows[:120], NAMES)
    write(here / "south.csv", rows[120:], NAMES[::-1])
    (here / "files.toml").write_text(FILES)
    return rows


def test_a_column_missing_at_one_silo(here: Path, files: list[Row]) -> None:
    write(here / "south.csv", files[120:], ("patient", "admitted", "age", "bmi", "ward", "outcome"))
    refused(train(run="files.toml"), files, "silo `south`: south.csv: the column 'crp' of the schema is missing")


def test_another_hospitals_categories_are_named_by_column(here: Path, files: list[Row]) -> None:
    for row in files[120:]:
        row["ward"] = "Ward " + row["ward"]
    write(here / "south.csv", files[120:], NAMES)
    done = train(run="files.toml")
    refused(done, files, "silo `south`: south.csv: column 'ward'", "120 of 120 rows", "A, B, C")
    assert "Ward A" not in done.err


def test_ids_with_line_breaks(here: Path, files: list[Row]) -> None:
    files[130]["patient"] = "MRN-1\nMRN-2"
    write(here / "south.csv", files[120:], NAMES)
    refused(train(run="files.toml"), files, "silo `south`: south.csv: column 'patient' has line breaks", "remove them")


def test_repeat_visits_are_on_one_side(here: Path, files: list[Row]) -> None:
    for number, row in enumerate(files):
        row["patient"] = f"MRN-{number % 40:06}"  # everybody six times, and in both files
    write(here / "north.csv", files[:120], NAMES)
    write(here / "south.csv", files[120:], NAMES)
    federation = federation_of(run_files.load(here / "files.toml"), None)
    assert [silo.name for silo in federation.silos] == ["north", "south"]
    training = {one for silo in federation.silos if silo.groups is not None for one in silo.groups}
    assert federation.test is not None
    count = sum(len(silo.x) for silo in federation.silos)
    assert count + len(federation.test[0]) == ROWS
    assert len(training) * 6 == count  # whole patients, wherever they went
    assert 36 <= len(federation.test[0]) <= 60


def test_files_in_any_order_of_columns_train_to_the_same_bytes(here: Path, files: list[Row]) -> None:
    assert train(run="files.toml").code == 0
    write(here / "north.csv", files[:120], NAMES[::-1])
    again = call("train", "files.toml", "--out", "again")
    assert again.code == 0
    first, second = (read_model(here / name, "model.safetensors") for name in ("mine", "again"))
    assert all((first[name] == second[name]).all() for name in first)
