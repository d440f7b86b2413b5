"""No command, and nothing from Python, writes over the user's own files: one sentence, exit code 2, nothing changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from test_cli import call

from moretta.config import run_files
from moretta.engines.files import check_replaced
from moretta.errors import ParameterError
from moretta.run import project
from moretta.run.assembly import federation_of
from moretta.run.export import export
from moretta.run.prediction import HEADER, _are_predictions, predict
from moretta.run.result import Result
from moretta.run.trained_model import ModelChoice

TABLE = "age,prediction\n61,0.5\n"  # no features but an age, and a target of that name
REPORT, LOOK = ("report", "runs/proj"), ("look", "run.toml")
PREDICT = ("predict", "runs/proj", "--allow-code", "--data")
EXPORT = ("export", "runs/proj")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run of the project of `moretta new`, beside tables that are linked and predictions that are data."""
    home = tmp_path_factory.mktemp("work") / "proj"
    project.create(home)
    (home / "new.csv").write_bytes((home / "data" / "north.csv").read_bytes())
    (home / "linked.csv").symlink_to("data/east.csv")
    os.link(home / "data" / "south.csv", home / "hard.csv")
    (home / "other.csv").write_text(TABLE.replace("prediction", "pressure"))
    (home / "ages.csv").write_text(TABLE)
    (home / "dates.csv").write_text("patient,prediction_date\n1,2020-01-01\n")
    (home / "weeks.csv").write_text("patient,prediction_week_4,probability_of_icu\n1,2,3\n")
    (home / "other.onnx").write_bytes(b"a model of somebody else's")
    (home / "signed.signatures.json").write_text("{}")
    run_file = run_files.load(home / "run.toml", ["run.rounds=1"])
    result = federation_of(run_file, home / "runs" / "proj").train(1, run_file.run.seed)
    kept = home / "runs" / "proj" / "run.toml"
    kept.write_text(run_files.dump(run_file).replace("data/east.csv", "ages.csv"))
    return result


@pytest.fixture
def home(finished: Result, monkeypatch: pytest.MonkeyPatch) -> Path:
    assert finished.folder is not None
    monkeypatch.chdir(finished.folder.parent.parent)
    return Path()


def contents(home: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}


PAGE = "expected a file that ends in .html or .htm, got .{}; name another file"
THERE = "exists already, and only {} may be replaced; name another file"
PREDICTIONS = THERE.format("earlier predictions that are no input")
EXPORTED = THERE.format("an earlier export")


@pytest.mark.parametrize(("words", "out", "says"), [
    (REPORT, "data/north.csv", PAGE.format("csv")),
    (REPORT, "run.toml", PAGE.format("toml")),
    (LOOK, "schema.toml", PAGE.format("toml")),
    (LOOK, "run.toml", PAGE.format("toml")),
    (REPORT, "signed.html", "signed.signatures.json beside it signs a dossier of that name; name another file"),
    (LOOK, "signed.html", "signed.signatures.json beside it signs a dossier of that name; name another file"),
    (("dossier", "write", "runs/proj"), "data/north.csv", "expected a file that ends in .html or .json, got .csv"),
    (("dossier", "write", "runs/proj"), "runs/proj/result.json", "exists already: expected the JSON of a dossier"),
    (("compare", "runs/proj", "runs/proj"), "data/north.csv", "cannot be written to"),
    (("compare", "runs/proj", "runs/proj"), "runs/proj", "is the folder of a run, with a report of its own"),
    ((*PREDICT, "data/north.csv"), "data/north.csv", PREDICTIONS),  # its --data, and a silo's rows
    ((*PREDICT, "new.csv"), "new.csv", PREDICTIONS),  # its --data
    ((*PREDICT, "new.csv"), "data/../data/east.csv", PREDICTIONS),  # another silo's rows
    ((*PREDICT, "new.csv"), "linked.csv", PREDICTIONS),
    ((*PREDICT, "new.csv"), "hard.csv", PREDICTIONS),
    ((*PREDICT, "new.csv"), "other.csv", PREDICTIONS),  # a table that the run does not name
    ((*PREDICT, "new.csv"), "ages.csv", PREDICTIONS),  # a silo's rows, whose columns could be predictions
    ((*PREDICT, "new.csv"), "dates.csv", PREDICTIONS),
    ((*PREDICT, "new.csv"), "weeks.csv", PREDICTIONS),
    ((*PREDICT, "new.csv"), "run.toml", "expected a file that ends in .csv or .npy, got .toml"),
    ((*PREDICT, "new.csv"), "runs/proj/result.json", "expected a file that ends in .csv or .npy, got .json"),
    (EXPORT, "runs/proj/released.safetensors", EXPORTED),
    (EXPORT, "runs/proj/model.safetensors", EXPORTED),
    (EXPORT, "other.onnx", EXPORTED),
    (EXPORT, "data/north.csv", "expected a file that ends in .safetensors or .onnx, got .csv"),
    ((*EXPORT, "--history"), "data/north.csv", "exists already"),
    (("schema", "init", "new.csv"), "schema.toml", "exists already"),
    (("keys", "new"), "data", "is not empty"),
    (("keys", "new"), "run.toml", "run.toml"),
    (("train", "run.toml"), "data", "exists and is not empty"),
    (("align", "begin", "--rows", "new.csv", "--id-column", "patient", "--secret", "s"), "data/north.csv", " exists"),
])  # fmt: skip
def test_a_command_leaves_what_is_there(home: Path, words: tuple[str, ...], out: str, says: str) -> None:
    before = contents(home)
    done = call(*words, "--out", out)
    assert done.code == 2
    assert says in done.sentence
    assert out in done.sentence
    assert contents(home) == before


@pytest.mark.parametrize(("words", "out"), [
    (EXPORT, "folder.safetensors"), (EXPORT, "folder.onnx"), ((*PREDICT, "new.csv"), "folder.csv"),
])  # fmt: skip
def test_a_folder_in_the_place_of_a_file_is_told(home: Path, words: tuple[str, ...], out: str) -> None:
    Path(out).mkdir()
    done = call(*words, "--out", out)
    assert done.code == 2
    assert f"{out}: expected the name of a file, got a folder" in done.sentence
    Path(out).rmdir()


def test_python_leaves_what_is_there(home: Path, finished: Result) -> None:
    before, run = contents(home), Path("runs/proj")
    for name in ("rows.csv", "data/north.csv", "report"):
        with pytest.raises(ParameterError, match=r"expected a file that ends in \.html or \.htm, got "):
            finished.report(name)
    for rows, out in (("data/north.csv", "data/north.csv"), ("new.csv", "hard.csv"), ("new.csv", "linked.csv")):
        with pytest.raises(ParameterError, match="only earlier predictions that are no input"):
            predict(run, Path(rows), Path(out), ModelChoice(allow_code=True))
    with pytest.raises(ParameterError, match="only an earlier export"):
        export(run, run / "released.safetensors")
    assert contents(home) == before


@pytest.mark.parametrize(("words", "out"), [
    (REPORT, "page.html"),
    (LOOK, "page.html"),
    ((*PREDICT, "new.csv"), "predictions.csv"),
    (REPORT, "PAGE.HTML"),
    (EXPORT, "out.safetensors"),
    ((*EXPORT, "--allow-code"), "OUT.ONNX"),
    (("dossier", "write", "runs/proj"), "dossier.html"),
    (("dossier", "write", "runs/proj"), "dossier.json"),
])  # fmt: skip
def test_what_the_same_command_wrote_is_written_again(
    home: Path, tmp_path: Path, words: tuple[str, ...], out: str
) -> None:
    (tmp_path / out).touch()  # as mktemp leaves it
    for _ in range(2):
        done = call(*words, "--out", tmp_path / out, "--quiet")
        assert (done.code, done.err) == (0, "")


def test_earlier_predictions_are_kept_where_they_are_what_is_predicted(home: Path, tmp_path: Path) -> None:
    told = tmp_path / "told.csv"
    assert call(*PREDICT, "new.csv", "--out", told).code == 0
    before = told.read_bytes()
    assert PREDICTIONS in call(*PREDICT, told, "--out", told).sentence
    assert told.read_bytes() == before
    shutil.copy(told, tmp_path / "other.csv")
    assert call(*PREDICT, "new.csv", "--out", tmp_path / "other.csv").code == 0


def test_predictions_are_known_by_their_header(tmp_path: Path) -> None:
    there, classes = tmp_path / "told.csv", [f"probability_class{number:06}" for number in range(9000)]
    for header in (
        "prediction",
        "id,prediction",
        "prediction_0,prediction_1",
        ",".join(["id", "prediction", *classes]),
    ):
        there.write_text(f"{header}\n1,2\n")
        assert _are_predictions(there, [])
    assert len(",".join(classes)) > HEADER  # the last name that is read is cut
    for header in ("id", "prediction_1", "id,prediction,age", "id,age,prediction", "prediction_0,prediction_2"):
        there.write_text(f"{header}\n1,2\n")
        assert not _are_predictions(there, [])


def test_tables_that_cannot_be_reached_are_no_predictions(tmp_path: Path) -> None:
    (tmp_path / "told.csv").write_text("prediction\n1\n")
    assert _are_predictions(tmp_path / "told.csv", [tmp_path / ("long" * 2000)])  # whatever the system says of it


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    def unreadable(there: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "there").write_text("something")
    with pytest.raises(ParameterError, match=r"exists already and cannot be read: Permission denied; name another"):
        check_replaced(tmp_path / "there", "an earlier one", unreadable)
