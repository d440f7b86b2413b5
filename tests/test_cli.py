"""Each command as a shell user calls it: what goes to stdout, what to stderr, and the exit code."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import moretta
from moretta import __version__
from moretta.commands import main as cli
from moretta.config import run_files
from moretta.contract.roles import Missing, Reason
from moretta.engines.checkpoint import last_checkpoint
from moretta.engines.run_folder import RunFolder, read_json, read_model
from moretta.engines.silos_here import Answered, SilosHere
from moretta.run import persistence
from moretta.run.federation import Federation

RUN = """
[run]
rounds = 3
seed = 7

[data]
source = "patients.csv"
batch-size = 16

[model]
source = "mlp"
hidden = [4]

[protocol]
name = "pbpfl"
learning-rate = 0.2
"""


@dataclass(frozen=True)
class Called:
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def told(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        assert self.code in (0, 1), self.err
        told = json.loads(self.out)
        assert isinstance(told, dict)
        return told

    @property
    def sentence(self) -> str:
        """The failure: all of stderr, in one line, and under --json in the object on stdout."""
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("moretta: ")
        sentence = lines[0].removeprefix("moretta: ")
        assert not self.out or json.loads(self.out) == {"format": 1, "error": sentence, "exit_code": self.code}
        return sentence


def call(*arguments: object) -> Called:
    """Call `moretta` in this process, as its console script does."""
    out, err = io.StringIO(), io.StringIO()
    words = ["moretta", *map(str, arguments)]
    with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
            code: object = 0
        except SystemExit as end:
            code = end.code or 0
    assert isinstance(code, int)
    return Called(code, out.getvalue(), err.getvalue())


def patients(rows: int = 60, seed: int = 0) -> str:
    """A table with two columns of numbers, one of text, and classes; half of the classes each."""
    random = np.random.default_rng(seed)
    lines = ["age,ward,pressure,ill"]
    for number in range(rows):
        age, pressure = random.normal(size=2)
        ward = ("east", "north", "west")[number % 3]
        lines.append(f"{age:.3f},{ward},{pressure:.3f},{number % 2}")
    return "\n".join(lines) + "\n"


def prepare(folder: Path) -> Path:
    """Write the table and its run file; return the run file."""
    (folder / "patients.csv").write_text(patients())
    (folder / "run.toml").write_text(RUN)
    return folder / "run.toml"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs `fedsgd` and `pbpfl`."""
    home = tmp_path_factory.mktemp("runs")
    run = prepare(home)
    for name in ("fedsgd", "pbpfl"):
        done = call("train", run, "--set", f"protocol.name={name}", "--out", home / name, "--json")
        assert done.code == 0, done.err
    return home


def test_train_prints_the_result_and_shows_progress_on_stderr(here: Path) -> None:
    done = call("train", "run.toml", "--out", "mine", "--json")
    assert done.code == 0
    assert done.out.count("\n") == 1
    assert done.told == json.loads((here / "mine" / "result.json").read_text())
    assert "pbpfl" in done.err
    assert "pbpfl: round 3 of 3: loss " in done.err


def test_train_without_json_prints_a_table_and_the_folder(here: Path) -> None:
    done = call("train", "run.toml")
    assert done.code == 0
    assert "PBPFL" in done.out
    assert "Accuracy" in done.out
    assert "runs/run" in done.out  # runs/NAME, and the name is the file's
    assert (here / "runs" / "run" / "result.json").exists()


@pytest.mark.parametrize("flag", [False, True])
def test_the_folder_is_the_flag_else_the_run_files(here: Path, flag: bool) -> None:
    extra = ["--out", "flag"] if flag else []
    assert call("train", "run.toml", "--set", "run.out=said", *extra, "--json").code == 0
    assert (here / "flag" / "result.json").exists() == flag
    assert (here / "said" / "result.json").exists() != flag


def test_resume_goes_on_to_more_rounds(here: Path) -> None:
    assert call("train", "run.toml", "--out", "mine", "--json").code == 0
    done = call("train", "run.toml", "--out", "mine", "--resume", "--set", "run.rounds=5", "--json")
    assert done.told["rounds"] == 5
    assert done.told["sessions"] == 2
    lines = (here / "mine" / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4, 5]


def test_compare_folders(runs: Path) -> None:
    told = call("compare", runs / "fedsgd", runs / "pbpfl", "--json").told
    assert set(told) == {"format", "runs", "weight_difference_from_fedsgd", "report"}
    assert told["runs"] == [json.loads((runs / name / "result.json").read_text()) for name in ("fedsgd", "pbpfl")]
    assert told["weight_difference_from_fedsgd"].keys() == {"pbpfl"}
    assert told["weight_difference_from_fedsgd"]["pbpfl"] < 1e-5
    assert told["report"] is None


def test_compare_folders_in_a_table_and_a_page(runs: Path, tmp_path: Path) -> None:
    done = call("compare", runs / "fedsgd", runs / "pbpfl", "--out", tmp_path / "both")
    assert done.code == 0
    assert done.err == ""
    for words in ("FedSGD", "PBPFL", "Largest relative difference from", str(tmp_path / "both")):
        assert words in done.out
    assert (tmp_path / "both" / "report.html").read_text().startswith("<!")


def test_runs_of_one_protocol_are_told_apart(runs: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    further = ("--set", "run.rounds=4", "--out", other, "--json")
    assert call("train", runs / "run.toml", *further).code == 0
    folders = [runs / "fedsgd", runs / "pbpfl", other]
    told = call("compare", *folders, "--json").told["weight_difference_from_fedsgd"]
    assert told.keys() == {str(runs / "pbpfl"), str(other)}
    assert told[str(runs / "pbpfl")] < 1e-5 < told[str(other)]


def test_compare_leaves_a_run_its_report(runs: Path, here: Path) -> None:
    before = sorted((runs / "fedsgd").iterdir())
    for given in (["run.toml", "--protocols", "fedsgd"], [runs / "fedsgd", runs / "pbpfl"]):
        done = call("compare", *given, "--out", runs / "fedsgd")
        assert done.code == 2
        assert done.err.endswith(
            "fedsgd is the folder of a run, with a report of its own; name another folder by --out\n"
        )
    assert sorted((runs / "fedsgd").iterdir()) == before


def test_compare_runs_each_protocol_with_its_own_settings_and_the_shared_ones(here: Path) -> None:
    wanted = ("--protocols", "centralised,local,fedsgd,pbpfl", "--set", "protocol.rho=2")
    told = call("compare", "run.toml", *wanted, "--out", "all", "--json").told
    assert [run["protocol"] for run in told["runs"]] == ["centralised", "local", "fedsgd", "pbpfl"]
    assert told["weight_difference_from_fedsgd"].keys() == {"centralised", "pbpfl"}
    assert Path(told["report"]) == Path("all/report.html")
    assert (here / "all" / "report.html").exists()
    settings = {run["protocol"]: run["settings"] for run in told["runs"]}
    assert {run["run"]["seed"] for run in settings.values()} == {7}
    assert {run["protocol"]["learning-rate"] for run in settings.values()} == {0.2}
    assert settings["pbpfl"]["protocol"]["rho"] == 2
    assert "rho" not in settings["fedsgd"]["protocol"]
    assert run_files.load(here / "all" / "fedsgd" / "run.toml").protocol.name == "fedsgd"


def test_compare_has_null_for_what_is_no_number_of_runs_that_diverged(here: Path) -> None:
    """The comparison ended with "result.json is broken", because a loss was null."""
    sets = ("run.rounds=1", "data.test-fraction=0.3", "protocol.learning-rate=1e38")
    wanted = ("--protocols", "centralised,fedsgd", *(word for key in sets for word in ("--set", key)))
    done = call("compare", "run.toml", *wanted, "--out", "gone", "--json")
    assert not re.search("NaN|Infinity", done.out)
    assert [run["test"]["loss"] for run in done.told["runs"]] == [None, None]
    assert [run["test"]["accuracy"] is None for run in done.told["runs"]] == [False, False]
    assert "no finite loss, because training diverged" in (here / "gone" / "report.html").read_text()
    assert call("compare", here / "gone" / "fedsgd", here / "gone" / "centralised").code == 0


def test_compare_a_run_file_without_json(here: Path) -> None:
    done = call("compare", "run.toml", "--protocols", "fedsgd, pbpfl")
    assert done.code == 0
    assert "Largest relative difference from" in done.out
    assert "report: runs/run/report.html" in done.out
    assert done.err.count("round 3 of 3") == 2
    assert sorted(path.name for path in (here / "runs" / "run").iterdir()) == ["fedsgd", "pbpfl", "report.html"]


def test_report_goes_into_the_first_folder_or_where_it_is_told(runs: Path, tmp_path: Path) -> None:
    plain = call("report", runs / "pbpfl")
    assert (plain.code, plain.err) == (0, "")
    assert plain.out.strip() == str(runs / "pbpfl" / "report.html")
    page = tmp_path / "new" / "page.html"
    told = call("report", runs / "pbpfl", runs / "fedsgd", "--out", page, "--json").told
    assert told == {"format": 1, "report": str(page)}
    assert "Largest relative difference from" in page.read_text()


def test_predict_says_how_many_rows(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "outputs.csv"
    plain = call("predict", runs / "pbpfl", "--data", runs / "patients.csv", "--out", out)
    assert (plain.code, plain.err) == (0, "")
    assert plain.out.strip() == f"60 rows, 1 outputs each: {out}"
    told = call("predict", runs / "pbpfl", "--data", runs / "patients.csv", "--out", out, "--json").told
    assert told == {"format": 1, "rows": 60, "outputs": 1, "out": str(out)}


def test_version_and_help() -> None:
    assert call("--version") == Called(0, f"{__version__}\n", "")
    for arguments in (("--help",), ("train", "--help")):
        shown = call(*arguments)
        assert (shown.code, shown.err) == (0, "")
    assert all(name in call("--help").out for name in ("train", "compare", "report", "predict", "check"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["trian"],
        ["train"],
        ["train", "run.toml", "--bogus"],
        ["train", "run.toml", "extra"],
        ["compare"],
        ["report"],
        ["predict", "folder"],
        ["check", "--model", "mlp", "--classes", "2"],
        ["check", "--model", "mlp", "--input", "4", "--classes", "none"],
        ["check", "--model", "mlp", "--input", "4", "--classes", "0"],
    ],
)
def test_bad_usage_is_exit_code_2(arguments: list[str], here: Path) -> None:
    done = call(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("moretta: ")
    assert done.err.endswith(" --help\n") or arguments[-1] == "0"
    assert len(done.err.splitlines()) == 1


def test_a_run_that_fails_is_exit_code_1_and_leaves_a_whole_checkpoint(here: Path) -> None:
    done = call("train", "run.toml", "--out", "mine", "--set", "engine.deadline=1e-9", "--json")
    assert done.code == 1
    sentence = done.err.splitlines()[-1]  # after what it trains on
    assert "go on with --resume" in sentence
    assert "silo-1" in sentence
    assert last_checkpoint(here / "mine" / "checkpoint") is not None
    assert not (here / "mine" / "result.json").exists()
    assert call("train", "run.toml", "--out", "mine", "--resume", "--json").told["rounds"] == 3


def test_a_silo_that_misses_a_round_is_named_on_stderr(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = SilosHere.answers

    def late(self: SilosHere, messages: Any) -> Any:
        found = dict(answers(self, messages))
        if "silo-2" in messages and messages["silo-2"].stamp.round == 2:
            found["silo-2"] = Answered(Missing(Reason.LATE, "[bold]no answer"), 0.0)
        return found

    monkeypatch.setattr(SilosHere, "answers", late)
    done = call("train", "run.toml", "--out", "mine", "--set", "secure-aggregation.threshold=2", "--json")
    assert done.told["dropped"] == [{"round": 2, "silo": "silo-2", "reason": "late: [bold]no answer"}]
    assert "round 2: silo-2 late: [bold]no answer" in done.err


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize("there", ["patients.csv/mine", "run.toml"])
def test_a_folder_that_cannot_be_made_is_bad_input(here: Path, there: str, command: str) -> None:
    extra = ["--protocols", "fedsgd"] if command == "compare" else []
    done = call(command, "run.toml", *extra, "--out", there)
    assert done.code == 2
    assert there in done.sentence


def test_a_full_disk_is_a_failure_and_not_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "mine/result.json")

    monkeypatch.setattr(run_files, "load", full)
    done = call("train", "run.toml")
    assert (done.code, done.sentence) == (1, "mine/result.json: No space left on device")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_disk_that_is_full_while_training_is_one_sentence(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the log has no room: its handler has no traceback of its own."""
    append, lines = RunFolder.append, list[Any]()

    def full(self: RunFolder, line: Any) -> None:
        lines.append(line)
        if len(lines) < 3:
            return append(self, line)
        with open("/dev/full", "w") as stream:
            stream.write("a line")

    monkeypatch.setattr(RunFolder, "append", full)
    monkeypatch.setattr(logging.FileHandler, "_open", lambda self: open("/dev/full", "w"))  # noqa: SIM115
    words = ("train", "run.toml", "--out", "mine", "--set", "run.rounds=6", "--set", "run.checkpoint-every=1")
    done = call(*words)
    assert done.code == 1
    assert done.err.splitlines()[-1] == (
        "moretta: mine: No space left on device; make room there; the last checkpoint is whole, so then go on with "
        "--resume"
    )
    assert "Traceback" not in done.err
    assert "Logging error" not in done.err
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert call(*words, "--resume").code == 0


def test_a_disk_that_is_full_before_the_first_checkpoint_has_nothing_to_resume(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(persistence, "save_checkpoint", full)
    done = call("train", "run.toml", "--out", "mine")
    assert done.code == 1
    assert re.search(r"no checkpoint yet, so then remove \S*mine and begin again$", done.err.splitlines()[-1])
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert call("train", "run.toml", "--out", "mine", "--resume").code == 2


def test_an_interrupt_before_training_is_a_sentence_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(run_files, "load", interrupted)
        done = call("train", "run.toml", "--out", "mine", "--json")
    assert (done.code, done.sentence) == (1, "interrupted")
    monkeypatch.setattr(Federation, "train", interrupted)
    done = call("train", "run.toml", "--out", "mine", "--quiet")
    assert (done.code, done.sentence) == (1, "interrupted; nothing was written")
    assert not (here / "mine").exists()


def test_what_a_model_prints_does_not_stand_beside_the_object(here: Path) -> None:
    (here / "loud.py").write_text(
        "from torch import nn\nprint('imported')\ndef built(hidden):\n    print('built')\n    return nn.Linear(5, 2)\n"
    )
    done = call("train", "run.toml", "--json", "--set", "model.source=loud:built")
    assert done.told["rounds"] == 3
    assert {"imported", "built"} <= set(done.err.splitlines())
    assert "built" in call("train", "run.toml", "--out", "again", "--set", "model.source=loud:built").out


def test_a_lazy_layer_of_a_function_is_refused(here: Path) -> None:
    (here / "lazy.py").write_text("from torch import nn\ndef built(hidden):\n    return nn.LazyLinear(2)\n")
    refused = call("train", "run.toml", "--set", "model.source=lazy:built")
    assert refused.code == 2
    assert "`weight` belongs to a lazy layer, and has no numbers yet; call the model once on a row" in refused.err


def test_the_console_script(here: Path) -> None:
    def script(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", "-c", "from moretta.commands.main import main; main()", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = script("train", "run.toml", "--json", "--set", "run.rounds=1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == read_json(here / "runs" / "run" / "result.json")
    assert read_model(here / "runs" / "run", "model.safetensors")
    again = script("train", "run.toml", "--json", "--set", "run.rounds=none")
    assert (again.returncode, json.loads(again.stdout)["exit_code"]) == (2, 2)
    assert again.stderr == 'moretta: run.toml: [run] rounds: expected a whole number, got "none"\n'


def test_probabilities_as_targets_train_are_reported_by_their_loss_and_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under cross-entropy such rows have neither an accuracy nor an mse, and outputs are probabilities by softmax."""
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    y = np.exp(x[:, :3])
    y /= y.sum(axis=1, keepdims=True)
    np.savez("rows.npz", x=x, y=y)
    Path("run.toml").write_text(
        '[run]\nrounds = 2\n[data]\nsource = "rows.npz"\ntest-fraction = 0.2\n[model]\nsource = "mlp"\nhidden = [5]\n'
        '[protocol]\nname = "fedsgd"\nloss = "cross-entropy"\n'
    )
    for words in (["train", "run.toml", "--out", "out"], ["report", "out"], ["dossier", "out"], ["compare", "out"]):
        assert call(*words).code == 0, words
    scores = json.loads(Path("out/result.json").read_text())["test"]
    assert "accuracy" not in scores
    assert "mse" not in scores
    assert f"reaches a loss of {scores['loss']:.3g}" in Path("out/report.html").read_text()
    assert call("predict", "out", "--data", "rows.npz", "--out", "said.csv").code == 0
    said = np.loadtxt("said.csv", delimiter=",", skiprows=1)
    np.testing.assert_allclose(said.sum(axis=1), 1.0)
    probabilities: Any = moretta.load("out").predict(x)
    np.testing.assert_allclose(probabilities, said, rtol=1e-6)
    judged = json.loads(call("evaluate", "out", "--data", "rows.npz", "--json").out)
    assert judged["figures"]["mse"]["value"] == pytest.approx(np.square(said - y).mean())
