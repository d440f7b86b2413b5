"""`moretta schema`, and a run from a raw table to predictions of new rows by the shell, Python and ONNX."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from test_cli import call

from moretta import Federation, FedSGD, Schema, Silo, read_table
from moretta.models import catalogue
from moretta.run.export import export
from moretta.run.prediction import predict

RUN = """
[run]
rounds = 8
seed = 3

[data]
source = "raw.csv"
schema = "schema.toml"
silos = 3

[model]
source = "mlp"
hidden = [4]

[protocol]
name = "pbpfl"
loss = "cross-entropy"
"""


def raw(rows: int = 120) -> str:
    """Visits of patients, with words, blanks, dates and <5, whose outcome follows from age and crp."""
    random = np.random.default_rng(5)
    lines = ["visit,patient,ward,age,crp,seen,note,died"]
    for number in range(rows):
        age, crp = int(random.integers(20, 95)), float(random.gamma(2.0, 8.0))
        said = "<5" if crp < 5 else f"{crp:.1f}"
        day = np.datetime64("2024-01-01") + int(random.integers(0, 300))
        died = "yes" if age / 95 + crp / 60 + random.normal() * 0.1 > 1 else "no"
        ward = ("north", "south", "")[int(random.integers(0, 3))]
        shown = "" if number % 9 == 0 else str(age)
        lines.append(f"v{number},p{number // 2},{ward},{shown},{said},{day},free {number},{died}")
    return "\n".join(lines) + "\n"


SCHEMA = """
[columns.visit]
kind = "id"
[columns.patient]
kind = "group"
[columns.ward]
kind = "category"
categories = ["north", "south"]
blanks = "category"
[columns.age]
kind = "number"
range = [0, 120]
blanks = "median"
[columns.crp]
kind = "number"
censored = "half"
[columns.seen]
kind = "date"
[columns.note]
kind = "drop"
[columns.died]
kind = "target"
classes = ["no", "yes"]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (("raw.csv", raw()), ("schema.toml", SCHEMA), ("run.toml", RUN)):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_init_proposes_and_says_what_to_decide(folder: Path) -> None:
    done = call("schema", "init", "raw.csv", "--out", "proposed.toml", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    kinds = {"visit": "id", "patient": "group", "ward": "category", "age": "number", "crp": "number"}
    assert told["columns"] == {**kinds, "seen": "date", "note": "drop", "died": "target"}
    assert told["decide"].keys() == {"visit", "patient", "crp", "seen", "note"}
    assert not any(cell in done.out + done.err for cell in ("v17", "p17", "free 3", "2024-"))
    again = call("schema", "init", "raw.csv", "--out", "proposed.toml")
    assert again.code == 2
    assert "exists already" in again.err


def test_check_reads_a_table_by_a_schema(folder: Path) -> None:
    done = call("schema", "check", "raw.csv", "--schema", "schema.toml", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["inputs"] == 6  # two wards and none, age, crp, seen
    (folder / "raw.csv").write_text(raw().replace("north", "notrh", 1))
    wrong = call("schema", "check", "raw.csv", "--schema", "schema.toml")
    assert wrong.code == 2
    assert "column 'ward' has a word that the schema does not have in 1 of 120 rows" in " ".join(wrong.err.split())
    assert "notrh" not in wrong.err


def test_without_a_schema_the_raw_table_is_refused_and_leaves_nothing(folder: Path) -> None:
    (folder / "run.toml").write_text(RUN.replace('schema = "schema.toml"\n', ""))
    done = call("train", "run.toml", "--out", "mine")
    assert done.code == 2
    assert "column 'visit' looks like ids" in " ".join(done.err.split())
    assert not (folder / "mine").exists()


def test_raw_rows_are_predicted_alike_by_the_shell_python_and_onnx(folder: Path) -> None:
    done = call("train", "run.toml", "--out", "mine")
    assert done.code == 0, done.err
    assert "target: died, classes no, yes" in done.err
    run, schema = folder / "mine", Schema.load("schema.toml")
    lines = raw().splitlines()
    new = [lines[0].replace(",died", ""), *(line.rpartition(",")[0] for line in lines[1:])]
    Path("new.csv").write_text("\n".join(new) + "\n")
    assert call("predict", "mine", "--data", "new.csv", "--out", "predicted.csv").code == 0
    assert Path("predicted.csv").stat().st_mode & 0o777 == 0o600  # it has ids
    with Path("predicted.csv").open() as stream:
        said = list(csv.DictReader(stream))
    assert list(said[0]) == ["visit", "prediction", "probability_no", "probability_yes"]
    assert [row["visit"] for row in said] == [f"v{k}" for k in range(120)]
    assert {row["prediction"] for row in said} <= {"no", "yes"}
    chances = np.array([[float(row["probability_no"]), float(row["probability_yes"])] for row in said])
    predict(run, Path("new.csv"), Path("outputs.npy"))
    outputs = np.load("outputs.npy")
    np.testing.assert_allclose(torch.softmax(torch.tensor(outputs).double(), 1).numpy(), chances, atol=1e-12)
    rows = read_table("new.csv", schema, labelled=False)
    export(run, Path("model.onnx"))
    session = onnxruntime.InferenceSession("model.onnx")
    (found,) = session.run(None, {"x": rows.coded})
    np.testing.assert_allclose(found, outputs, rtol=0, atol=1e-6)
    # What predictions refuse comes to NaN: a number or a category that may not be absent, a place that is none.
    names, bad = list(schema.features), rows.coded[:5].copy()
    bad[0, names.index("ward")], bad[1, names.index("ward")] = 2, 0.5
    bad[2, names.index("seen")], bad[3, names.index("age")] = np.nan, np.inf
    (wrong,) = session.run(None, {"x": bad})
    assert np.isnan(wrong[:4]).all()
    np.testing.assert_allclose(wrong[4:], outputs[4:5], rtol=0, atol=1e-6)
    told = json.loads(session.get_modelmeta().custom_metadata_map["moretta.inputs"])
    assert told["table"]["columns"]["ward"]["categories"] == ["north", "south"]
    export(run, Path("model.safetensors"))
    with safe_open("model.safetensors", "numpy") as opened:
        assert json.loads(opened.metadata()["inputs"]) == told
    for name in ("inputs.json", "run.toml", "result.json", "history.jsonl", "log.txt"):  # no id, no cell
        text = (run / name).read_text()
        assert not any(cell in text for cell in ("v17", "p17", "free 3"))
    Path("one.csv").write_text("\n".join(new[:2]) + "\n")  # whoever else is in the file
    predict(run, Path("one.csv"), Path("one.npy"))
    np.testing.assert_allclose(np.load("one.npy"), outputs[:1], rtol=0, atol=1e-6)


def test_from_python_the_model_takes_the_rows_that_the_silos_have(folder: Path) -> None:
    schema = Schema.load("schema.toml")
    rows = read_table("raw.csv", schema)
    model = catalogue.build("mlp", inputs=(6,), outputs=2, hidden=[4], seed=1)
    parts = np.array_split(np.arange(120), 3)
    assert rows.groups is not None
    silos = [Silo(f"silo-{k}", rows.x[part], rows.y[part], groups=rows.groups[part]) for k, part in enumerate(parts)]
    federation = Federation(
        model, silos, FedSGD(loss="cross-entropy"), (rows.x, rows.y), standardise=True, table=schema, out="python"
    )
    result = federation.train(6)
    assert result.released is not None
    with torch.no_grad():
        said = result.released(torch.tensor(rows.x))
    assert (said.argmax(1).numpy() == rows.y).mean() == pytest.approx(result.test["accuracy"])
    bad = rows.x[:3].copy()
    bad[0, 5] = np.nan
    with torch.no_grad():
        assert torch.isnan(result.released(torch.tensor(bad))).any(1).tolist() == [True, False, False]
    refused = call("predict", "python", "--data", "raw.csv", "--out", "p.csv")
    assert refused.code == 2
    assert "name that by --model" in " ".join(refused.err.split())
    Path("nets.py").write_text(
        "from moretta.models import catalogue\n"
        "def build(): return catalogue.build('mlp', inputs=(6,), outputs=2, hidden=[4])\n"
    )
    done = call("predict", "python", "--data", "raw.csv", "--out", "p.npy", "--model", "nets:build")
    assert done.code == 0, done.err
    np.testing.assert_allclose(np.load("p.npy"), said.numpy(), rtol=0, atol=1e-6)


def test_what_is_not_said_of_a_file_to_predict_is_as_in_the_run(folder: Path) -> None:
    Path("run.toml").write_text(RUN.replace('schema = "schema.toml"', 'schema = "schema.toml"\nabsent = ["unbekannt"]'))
    lines = raw().splitlines()
    lines[1] = lines[1].replace(",south,", ",unbekannt,").replace(",north,", ",unbekannt,")
    Path("raw.csv").write_text("\n".join(lines) + "\n")
    assert call("train", "run.toml", "--out", "mine").code == 0
    assert call("predict", "mine", "--data", "raw.csv", "--out", "a.npy").code == 0
    Path("new.csv").write_text("\n".join(lines).replace(",", "|") + "\n")
    done = call("predict", "mine", "--data", "new.csv", "--separator", "|", "--out", "b.npy")
    assert done.code == 0, done.err
    assert Path("a.npy").read_bytes() == Path("b.npy").read_bytes()
    np.savez("new.npz", x=np.full((2, 6), np.nan, np.float32))  # some columns have no blanks
    assert call("predict", "mine", "--data", "new.npz", "--out", "c.npy").code == 2
