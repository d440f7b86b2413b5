"""Trackers: what they are told, that it is no more than the history has, and that one that fails costs a warning."""

from __future__ import annotations

import json
import logging
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_cli import call, here  # noqa: F401  # a fixture
from test_contract import CASES, federation_of, weights

from moretta import Engine, Faults, SecureAggregation
from moretta.errors import ParameterError
from moretta.run import trackers
from moretta.run.trackers import OnLine, TrackedRun, Tracker, mlflow, tensorboard

FAULTS = Engine(faults=Faults.model_validate({"drop": [{"round": 2, "silo": "south"}]}))


class Notes:
    """Keeps what it is told; called, it is a tracker."""

    def __init__(self) -> None:
        self.run: TrackedRun | None = None
        self.lines: list[Mapping[str, Any]] = []
        self.figures: list[Mapping[str, float]] = []
        self.ends: list[str] = []

    @contextmanager
    def __call__(self, run: TrackedRun) -> Iterator[OnLine]:
        self.run = run
        try:
            yield self.tell
        except BaseException as error:
            self.ends.append(type(error).__name__)
            raise
        self.ends.append("whole")

    def tell(self, line: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        self.lines.append(line)
        self.figures.append(figures)


@pytest.mark.parametrize("name", CASES)
def test_a_tracker_is_told_what_the_history_has_and_no_more(name: str, tmp_path: Path) -> None:
    notes = Notes()
    result = federation_of(name, tmp_path / "run").train(3, 7, trackers=[notes], progress=False)
    kept = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert notes.lines == result.history
    assert json.loads(json.dumps(notes.lines)) == kept
    assert notes.ends == ["whole"]
    assert notes.run is not None
    assert (notes.run.name, notes.run.rounds, notes.run.after) == ("run", 3, 0)
    assert notes.run.settings["protocol.name"] == result.record["protocol"]
    assert notes.run.id == result.record["run"]
    assert all(isinstance(value, float) for told in notes.figures for value in told.values())
    assert notes.figures[0]["bytes/up"] == kept[0]["bytes"]["up"]
    assert {one.partition(".")[0] for one in notes.run.settings.keys() - {"run.seed"}} <= {"protocol", "model"}
    assert weights(result) == weights(federation_of(name).train(3, 7, progress=False))


def test_what_a_tracker_does_to_a_line_changes_nothing(tmp_path: Path) -> None:
    class Vandal(Notes):
        def tell(self, line: Mapping[str, Any], figures: Mapping[str, float]) -> None:
            line["bytes"].clear()
            line["dropped"].append("everybody")

    other = Notes()
    result = federation_of("fedsgd", tmp_path / "run").train(2, 7, trackers=[Vandal(), other], progress=False)
    assert all(line["bytes"] and not line["dropped"] for line in [*result.history, *other.lines])


def broken(where: str, failure: BaseException) -> Tracker:
    @contextmanager
    def tracker(run: TrackedRun) -> Iterator[OnLine]:
        def tell(line: Mapping[str, Any], figures: Mapping[str, float]) -> None:
            if where == "round" and line["round"] == 2:
                raise failure

        if where == "begin":
            raise failure
        yield tell
        if where == "end":
            raise failure

    return tracker


@pytest.mark.parametrize(
    "failure", [ValueError("http://me:hunter2@host"), SystemExit(3), ParameterError("give a place")]
)
@pytest.mark.parametrize("where", ["begin", "round", "end"])
def test_a_tracker_that_fails_costs_a_warning(where: str, failure: BaseException, tmp_path: Path, quiet: None) -> None:
    other = Notes()
    trackers: Any = [broken(where, failure), other]
    result = federation_of("fedsgd", tmp_path / "run").train(3, 7, trackers=trackers, progress=False)
    assert (len(other.lines), other.ends, result.record["rounds"]) == (3, ["whole"], 3)
    (warning,) = [one for one in result.record["warnings"] if "tracker" in one]
    why = "give a place" if isinstance(failure, ParameterError) else type(failure).__name__
    assert warning == f"the tracker tracker failed ({why}) and receives no more of the run"
    assert "hunter2" not in (tmp_path / "run" / "log.txt").read_text()  # the words of others may hold a password
    assert weights(result) == weights(federation_of("fedsgd").train(3, 7, progress=False))


def test_a_tracker_hears_that_a_run_failed_and_how_far_it_was(tmp_path: Path) -> None:
    first, second = Notes(), Notes()

    def stop(told: Any) -> None:
        if told.number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federation_of("fedsgd", tmp_path / "run").train(4, 7, trackers=[first], on_round=stop, progress=False)
    federation_of("fedsgd", tmp_path / "run").train(4, 7, trackers=[second], resume=True, progress=False)
    assert (first.ends, second.ends) == (["KeyboardInterrupt"], ["whole"])
    assert first.run is not None
    assert second.run is not None
    assert (second.run.after, second.run.id) == (2, first.run.id)
    assert [line["round"] for line in second.lines] == [3, 4]


def test_who_is_missing_is_a_count_among_the_figures() -> None:
    notes, summed = Notes(), SecureAggregation(threshold=2)
    federation_of("fedsgd", engine=FAULTS, aggregation=summed).train(3, 7, trackers=[notes], progress=False)
    assert [told["dropped"] for told in notes.figures] == [0, 1, 0]


def test_a_figure_that_is_no_number_is_left_out() -> None:
    line = {"round": 3, "loss": float("nan"), "bytes": {"up": 3}, "dropped": [], "note": "text", "seconds_total": 0.5}
    assert dict(trackers.figures(line)) == {"bytes/up": 3.0, "dropped": 0.0, "seconds_total": 0.5}


OWN = """
from contextlib import contextmanager
from pathlib import Path

@contextmanager
def lines(run):
    Path("begun.txt").write_text(f"{run.name} {run.settings['protocol.learning-rate']} {run.settings['model.hidden']}")
    with open("lines.txt", "w") as file:
        yield lambda line, figures: print(line["round"], figures["loss"], file=file)
"""


def test_a_run_file_names_trackers_and_only_training_imports_them(here: Path) -> None:  # noqa: F811
    (here / "track.py").write_text(OWN)
    named = ("--set", 'run.trackers=["track:lines"]')
    done = call("train", "run.toml", "--out", "mine", *named, "--json")
    assert done.code == 0, done.err
    assert (here / "begun.txt").read_text() == "run 0.2 [4]"
    assert len((here / "lines.txt").read_text().splitlines()) == 3
    (here / "track.py").write_text("raise SystemExit('nobody asked')")
    for words in (
        ("predict", "mine", "--data", "patients.csv", "--out", "out.csv"),
        ("export", "mine", "--out", "out.safetensors"),
        ("report", "mine"),
    ):
        assert call(*words).code == 0
    assert call("train", "run.toml", "--out", "mine", "--resume", "--set", "run.rounds=4").code == 0  # without them


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ('["trak:Lines"]', 'importing "trak" (for "trak:Lines"'),
        ('["track:none"]', 'module "track" has no function "none"'),
        ('["tensorbord"]', 'did you mean "tensorboard"?'),
        ('"tensorboard"', '[run] trackers: expected a list, got "tensorboard"'),
    ],
)
def test_trackers_that_cannot_be_are_refused_before_training(here: Path, given: str, says: str) -> None:  # noqa: F811
    (here / "track.py").write_text(OWN)
    done = call("train", "run.toml", "--out", "mine", "--set", f"run.trackers={given}")
    assert done.code == 2
    assert says in done.sentence
    assert not (here / "mine").exists()


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_what_is_not_installed_is_named_before_training(
    here: Path,  # noqa: F811
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda wanted: None)
    done = call("train", "run.toml", "--out", "mine", "--set", f'run.trackers=["{name}"]')
    assert done.sentence == f"tracking by {name} needs it; run: pip install 'moretta[trackers]'"
    assert not (here / "mine").exists()


def test_tensorboard_goes_on_where_a_run_is_resumed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    for rounds in (2, 4):
        federation_of("fedsgd", tmp_path / "run").train(
            rounds, 7, trackers=["tensorboard"], resume=rounds == 4, progress=False
        )
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    kept = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([line["loss"] for line in kept])


def test_tensorboard_needs_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard")
    with caplog.at_level(logging.ERROR):
        result = federation_of("fedsgd").train(1, 7, trackers=["tensorboard"], progress=False)
    assert any("pass partial(tensorboard, folder=..)" in one for one in result.record["warnings"])
    federation_of("fedsgd").train(1, 7, trackers=[partial(tensorboard, folder=tmp_path / "events")], progress=False)
    assert any((tmp_path / "events").iterdir())


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Client:
    """MLflow's client as far as it is called, one server a process."""

    server: dict[str, Any] = {}  # noqa: RUF012  # one for all

    def __init__(self, uri: str | None) -> None:
        self.kept: Any = Client.server.setdefault(str(uri), {"experiments": {}, "runs": {}})

    def get_experiment_by_name(self, name: str) -> Any:
        found = self.kept["experiments"].get(name)
        return None if found is None else types.SimpleNamespace(experiment_id=found)

    def create_experiment(self, name: str) -> Any:
        return self.kept["experiments"].setdefault(name, str(len(self.kept["experiments"])))

    def search_runs(self, experiments: list[str], filter_string: str, max_results: int) -> list[Any]:
        wanted = filter_string.partition("'")[2].rstrip("'")
        found = [run for run in self.kept["runs"].values() if run.tags == {"moretta.run": wanted}]
        return found[:max_results]

    def create_run(self, experiment: str, tags: Mapping[str, str], run_name: str) -> Any:
        run = types.SimpleNamespace(
            tags=tags,
            name=run_name,
            params={},
            metrics=[],
            status="RUNNING",
            info=types.SimpleNamespace(run_id=run_name),
        )
        return self.kept["runs"].setdefault(run_name, run)

    def log_param(self, run: str, key: str, value: Any) -> None:
        assert key not in self.kept["runs"][run].params  # MLflow refuses another value
        self.kept["runs"][run].params[key] = value

    def log_batch(self, run: str, metrics: list[Any]) -> None:
        self.kept["runs"][run].metrics += metrics

    def set_terminated(self, run: str, status: str) -> None:
        self.kept["runs"][run].status = status


def test_mlflow_has_settings_and_figures_and_a_resumed_run_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Client.server = {}
    of: dict[str, dict[str, Any]] = {"mlflow.entities": {"Metric": Metric}, "mlflow.tracking": {"MlflowClient": Client}}
    for name, content in of.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for rounds in (2, 4):
        tracker = partial(mlflow, experiment="wards", uri="here")
        federation_of("fedsgd", tmp_path / "run").train(
            rounds, 7, trackers=[tracker], resume=rounds == 4, progress=False
        )
    (run,) = Client.server["here"]["runs"].values()
    assert run.status == "FINISHED"
    assert run.params["protocol.name"] == "fedsgd"
    assert run.params["protocol.optimizer"] == "sgd"
    losses = [one for one in run.metrics if one.key == "loss"]
    kept = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert [(one.step, one.value) for one in losses] == [(line["round"], line["loss"]) for line in kept]


def test_mlflow_itself_takes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # else version 3.17 wants a database or a server
    from mlflow.tracking import MlflowClient

    uri = (tmp_path / "mlruns").as_uri()
    tracker = partial(mlflow, experiment="wards", uri=uri)
    for rounds in (2, 4):
        federation_of("fedsgd", tmp_path / "run").train(
            rounds, 7, trackers=[tracker], resume=rounds == 4, progress=False
        )
    client = MlflowClient(uri)
    found = client.get_experiment_by_name("wards")
    assert found is not None
    (run,) = client.search_runs([found.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["protocol.name"] == "fedsgd"
    losses = client.get_metric_history(run.info.run_id, "loss")
    kept = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert [(one.step, one.value) for one in losses] == [(line["round"], line["loss"]) for line in kept]
