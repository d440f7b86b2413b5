"""What a Python user calls: what is refused before anything is written, and what a run leaves."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import perceptron
from safetensors.numpy import load_file
from sklearn.metrics import accuracy_score
from torch import nn

from moretta import BAFFLE, PBPFL, Centralised, Engine, FedAvg, Federation, FedSGD, Local, SecureAggregation, Silo
from moretta.data.tables.schema import Number, Schema
from moretta.engines.run_folder import FORMAT, RunFolder, read_json, read_model
from moretta.errors import ParameterError
from moretta.protocols.common import modules

Rows = tuple[np.ndarray, np.ndarray]


def rows(seed: int, count: int) -> Rows:
    x = np.random.default_rng(seed).normal(1, 2, (count, 4)).astype(np.float32)
    return x, (x[:, 0] > 1).astype(np.int64) + (x[:, 1] > 1)


def silos() -> list[Silo]:
    return [Silo(name, *rows(seed, count)) for seed, (name, count) in enumerate([("north", 20), ("south", 33)])]


def network(outputs: int = 3) -> nn.Module:
    return perceptron(4, 6, outputs, between=nn.ReLU)


def make(**settings: Any) -> Federation:
    chosen: dict[str, Any] = {"model": network(), "silos": silos(), "protocol": FedSGD(), "test": rows(9, 40)}
    return Federation(**(chosen | settings))


def test_what_an_audit_plays_again_without_edge_processes_keeps_all_names() -> None:
    names = {"feature_names": ("age", "bmi", "pulse", "dose"), "class_names": ("well", "ill", "worse")}
    federation = make(protocol=BAFFLE(), engine=Engine(edge=("north",)), **names)
    again = federation.without_edge_processes()
    assert (federation.spec.engine.edge, again.spec.engine.edge) == (("north",), ())
    assert {name: tuple(getattr(again, name)) for name in names} == names


def test_a_table_says_what_is_filled_in_whatever_missing_says() -> None:
    table = Schema(columns={name: Number(blanks="median", range=(-50, 50)) for name in ("age", "bmi", "pulse", "dose")})
    given, default = (make(table=table, **more).column_rules.fills for more in ({"missing": "mean"}, {}))
    assert list(given) == list(default)


def test_rounds_that_are_given_when_it_trains_are_checked_whoever_made_the_settings(tmp_path: Path) -> None:
    for read in (None, ('[run]\nname = "read"\n', "0" * 64)):
        federation = make(record_views=(9,), out=tmp_path / "run", run_file=read)
        for play in (federation.train, federation.rehearse):
            with pytest.raises(ParameterError, match="begins after the last round"):
                play(3)
    assert not (tmp_path / "run").exists()


WRONG: Mapping[str, tuple[dict[str, Any], str]] = {
    "no silo": ({"silos": []}, "at least one silo"),
    "a name with a slash": ({"silos": [Silo("a/b", *rows(0, 3))]}, "silo name 'a/b'"),
    "a name of dots": ({"silos": [Silo("..", *rows(0, 3))]}, r"silo name '\.\.'"),
    "an empty name": ({"silos": [Silo("", *rows(0, 3))]}, "silo name ''"),
    "a long name": ({"silos": [Silo("a" * 65, *rows(0, 3))]}, "1 to 64 letters"),
    "a name with a newline": ({"silos": [Silo("a\n", *rows(0, 3))]}, "silo name"),
    "the server's name": ({"silos": [Silo("server", *rows(0, 3))]}, 'not "server"'),
    "twins": ({"silos": [Silo("a", *rows(0, 3)), Silo("a", *rows(1, 3))]}, "two silos have the name `a`"),
    "no rows": ({"silos": [*silos(), Silo("c", *rows(0, 0))]}, "silo `c`: .*got 0 rows"),
    "fewer targets": ({"silos": [Silo("c", rows(0, 3)[0], rows(0, 3)[1][:2])]}, "`c`: .*3 rows and 2 targets"),
    "a NaN": (
        {"silos": [Silo("c", np.array([[1, 2, np.nan, 4.0]]), np.array([0]))]},
        "silo `c`: column '2' is NaN or infinite in 1 row",
    ),
    "a named NaN": (
        {"silos": [Silo("c", np.array([[1, np.inf, 3, 4.0]]), np.array([0]))], "feature_names": ["a", "bmi", "c", "d"]},
        "silo `c`: column 'bmi' is NaN or infinite in 1 row",
    ),
    "other columns": (
        {"silos": [*silos(), Silo("c", np.zeros((2, 5)), np.zeros(2, np.int64))]},
        r"`c`: expected rows of shape \[4\], as `north` has, got \[5\]",
    ),
    "a model of other rows": ({"model": nn.Linear(7, 3)}, r"the model cannot take rows of shape \[4\]"),
    "a model of one number": (
        {"model": nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))},
        "for a model with 1 outputs, got 0 to 2",
    ),
    "no test rows": ({"test": rows(9, 0)}, "test: .*at least one"),
    "fewer test targets": ({"test": (rows(9, 4)[0], rows(9, 3)[1])}, "test: .*3 targets"),
    "other test columns": ({"test": (np.zeros((2, 5)), np.zeros(2, np.int64))}, "test: "),
    "a NaN in the test": (
        {"test": (np.full((2, 4), np.nan), np.zeros(2, np.int64))},
        "test: column '0' is NaN or infinite in 2 rows",
    ),
    "a test class too many": ({"test": (np.zeros((2, 4)), np.array([0, 3]))}, "`test`: expected classes 0 to 2"),
}


@pytest.mark.parametrize(("settings", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_cannot_work_is_refused_in_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
        make(**settings)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"silos": silos()[:1]}, 'one silo needs scheme="none"'),
        ({"silos": [*silos(), Silo("c", rows(0, 3)[0], np.array([0, 1, 3]))]}, "silo `c`: expected classes 0 to 2"),
        ({"protocol": PBPFL(partitions=4)}, "partitions"),
    ],
)
def test_what_the_protocol_cannot_take_is_refused_when_the_run_begins(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        make(**settings, out=tmp_path / "run").train(2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("rounds", "seed"), [(0, 0), (-1, 0), (3, -1)])
def test_rounds_and_seeds_that_are_none_are_refused(rounds: int, seed: int) -> None:
    with pytest.raises(ParameterError, match="expected at least"):
        make().train(rounds, seed)


def test_a_folder_with_something_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(ParameterError, match=r"exists and is not empty; .* resume=True, or .*out=\.\."):
        make(out=tmp_path).train(2)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]
    file = tmp_path / "note.txt"
    with pytest.raises(ParameterError, match="exists and is not empty"):
        make(out=file).train(2)
    assert file.read_text() == "mine"
    (tmp_path / "empty").mkdir()
    make(out=tmp_path / "empty").train(2)
    before = {path: path.read_bytes() for path in (tmp_path / "empty").rglob("*") if path.is_file()}
    with pytest.raises(ParameterError, match="by resume=True"):
        make(out=tmp_path / "empty").train(2)
    assert before == {path: path.read_bytes() for path in (tmp_path / "empty").rglob("*") if path.is_file()}


def test_the_run_folder_holds_what_the_result_says(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"
    result = make(out=out, standardise=True, feature_names=["a", "b", "c", "d"], record_views=(2,)).train(4, seed=3)
    assert result.folder == out
    record = read_json(out / "result.json")
    assert record == {"format": FORMAT, **json.loads(json.dumps(result.record))}
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert history == json.loads(json.dumps(result.history))
    assert [line["round"] for line in history] == [1, 2, 3, 4]
    assert result.model is not None
    for name, value in modules.arrays(result.model.model).items():  # without what prepares its inputs
        assert read_model(out, "model.safetensors")[name].tobytes() == value.tobytes()
        assert load_file(out / "released.safetensors")[name].tobytes() == value.tobytes()
    inputs, pooled = read_json(out / "inputs.json"), np.concatenate([silo.x for silo in silos()]).astype(np.float64)
    np.testing.assert_allclose(inputs["mean"], pooled.mean(0), rtol=1e-13)
    np.testing.assert_allclose(inputs["deviation"], pooled.std(0), rtol=1e-13)
    assert (inputs["columns"], inputs["outputs"], inputs["task"]) == (["a", "b", "c", "d"], 3, "classification")
    assert sorted(path.name for path in (out / "views" / "north").iterdir()) == ["round-000002.0.bin"]
    assert sorted(path.name for path in (out / "checkpoint").iterdir()) == ["round-000000", "round-000004"]
    assert not (out / "run.toml").exists()
    line, exposed = (out / "log.txt").read_text().splitlines()
    assert "WARNING a silo: can work out the other’s gradient in rounds of fewer than three silos" in exposed
    assert " INFO round 4 of 4: loss " in line


def test_each_silos_own_model_is_kept(tmp_path: Path) -> None:
    result = make(out=tmp_path / "run", protocol=Local()).train(2)
    assert result.model is result.released is None
    assert not (tmp_path / "run" / "model.safetensors").exists()
    for name, model in result.models.items():
        kept = read_model(tmp_path / "run", f"models/{name}.safetensors")
        assert all(kept[key].tobytes() == value.tobytes() for key, value in modules.arrays(model).items())
    assert set(result.models) == set(result.test["per_silo"]) == {"north", "south"}
    assert result.training == {}
    accuracies = [score["accuracy"] for score in result.test["per_silo"].values()]
    assert result.test["accuracy"] == pytest.approx(np.mean(accuracies), abs=1e-15)


@pytest.mark.parametrize("standardise", [False, True])
@pytest.mark.parametrize("protocol", [FedSGD(), PBPFL(), Centralised()])
def test_the_test_score_is_that_of_the_model_on_the_test_rows(protocol: Any, standardise: bool) -> None:
    result = make(protocol=protocol, standardise=standardise).train(12)
    x, y = rows(9, 40)
    assert result.model is not None
    with torch.no_grad():
        said = result.model(torch.tensor(x)).argmax(1).numpy()
    assert result.test["accuracy"] == pytest.approx(accuracy_score(y, said), abs=1e-15)
    assert result.test["rows"] == 40
    assert result.history[-1]["test_accuracy"] == result.test["accuracy"]
    assert not result.model.training


def test_without_test_rows_a_run_says_so() -> None:
    result = make(test=None).train(2)
    assert result.test == {}
    assert set(result.training) == {"north", "south"}
    assert any("no test rows" in warning for warning in result.record["warnings"])


def test_an_insecure_run_says_so_and_the_seed_is_in_no_repr() -> None:
    federation = make(insecure_secret_seed=90210777)
    assert "90210777" not in repr(federation)
    assert "array(" not in repr(federation)  # nor is anybody's data
    result = federation.train(2)
    assert result.record["insecure_secret_seed"] is True
    assert any("insecure-secret-seed" in warning for warning in result.record["warnings"])
    assert "90210777" not in json.dumps(result.record)


def test_training_leaves_the_model_and_the_rows_that_were_given() -> None:
    model, given, test = network(), silos(), rows(9, 40)
    before = [model.state_dict()["0.weight"].clone(), *(array.copy() for silo in given for array in (silo.x, silo.y))]
    make(model=model, silos=given, test=test, standardise=True).train(3)
    after = [model.state_dict()["0.weight"], *(array for silo in given for array in (silo.x, silo.y))]
    assert all((one == two).all() for one, two in zip(before, after, strict=True))


def test_one_federation_trains_as_often_as_it_is_asked() -> None:
    federation = make(insecure_secret_seed=1)
    one, two, other = federation.train(3, seed=1), federation.train(3, seed=1), federation.train(3, seed=2)
    assert one.model is not None
    assert two.model is not None
    assert other.model is not None
    assert torch.equal(one.model[0].weight, two.model[0].weight)
    assert not torch.equal(one.model[0].weight, other.model[0].weight)


def test_secrets_are_drawn_afresh_and_the_result_of_a_masked_run_does_not_depend_on_them() -> None:
    one, two = make().train(3), make().train(3)
    assert one.record["run"] != two.record["run"]
    assert one.model is not None
    assert two.model is not None
    assert torch.equal(one.model[0].weight, two.model[0].weight)


def test_progress_is_told_each_round() -> None:
    told: list[tuple[int, int]] = []
    make().train(3, progress=lambda number, rounds, line: told.append((number, rounds)) or None)
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_a_report_needs_a_folder() -> None:
    with pytest.raises(ParameterError, match="out=FOLDER"):
        make().train(1).report("page.html")


def test_regression_is_scored_by_its_error() -> None:
    def plane(seed: int, count: int) -> Rows:
        x = np.random.default_rng(seed).normal(0, 1, (count, 4))
        return x, x @ np.array([1.0, -1.0, 0.5, 0.0])

    result = make(
        silos=[Silo("a", *plane(0, 40)), Silo("b", *plane(1, 40))], test=plane(2, 30), model=nn.Linear(4, 1),
        dtype="float64",
    ).train(150)  # fmt: skip
    assert result.record["task"] == "regression"
    assert result.test["mse"] < 1e-6
    assert result.test["loss"] == pytest.approx(result.test["mse"] / 2, rel=1e-12)


@pytest.mark.parametrize("aggregation", [SecureAggregation(), SecureAggregation(scheme="none")])
@pytest.mark.parametrize("protocol", [FedSGD(learning_rate=1e4), FedAvg(learning_rate=1e4), Local(learning_rate=1e4)])
def test_a_run_that_diverges_ends_in_one_sentence_or_in_numbers(
    tmp_path: Path, protocol: Any, aggregation: SecureAggregation
) -> None:
    from moretta.errors import MorettaError

    try:
        result = make(protocol=protocol, aggregation=aggregation, out=tmp_path / "run").train(20)
    except MorettaError as error:
        sentences = str(error).splitlines()
        assert len(sentences) == 1
    else:
        assert np.isfinite(result.test["loss"])


def test_warnings_go_to_the_runs_log_and_the_programs_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("moretta")
    handlers, propagate = list(logger.handlers), logger.propagate
    folder = RunFolder(tmp_path)

    def work() -> None:
        with folder.logging():
            logger.warning("silo `%s` is missing", "north")
            logger.info("round 1 of 2")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert "WARNING silo `north` is missing" in (tmp_path / "log.txt").read_text()
    assert "INFO round 1 of 2" in (tmp_path / "log.txt").read_text()
    assert [record.getMessage() for record in caplog.records] == ["silo `north` is missing"]
    assert (logger.handlers, logger.propagate) == (handlers, propagate)


def test_a_history_that_was_cut_short_is_read_up_to_the_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for number in (1, 2, 3, 4):
        folder.append({"round": number, "loss": 0.5})
    with (tmp_path / "history.jsonl").open("a") as stream:
        stream.write('{"round": 5, "lo')
    assert [line["round"] for line in folder.history(up_to=3)] == [1, 2, 3]
    folder.append({"round": 4})
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 2}', '"text"'])
def test_a_damaged_file_of_a_run_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "result.json").write_text(content)
    (tmp_path / "model.safetensors").write_text(content)
    for name in ("result.json", "none.json"):
        with pytest.raises(ParameterError, match=name):
            read_json(tmp_path / name)
    with pytest.raises(ParameterError, match=r"result\.json"):
        read_model(tmp_path, "model.safetensors")
    (tmp_path / "result.json").unlink()
    with pytest.raises(ParameterError, match=r"model\.safetensors"):
        read_model(tmp_path, "model.safetensors")


def test_a_file_of_a_run_is_no_link_and_no_pipe(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text('{"format": 1, "what": "secret"}')
    (tmp_path / "inputs.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(
        ParameterError, match=r"inputs\.json: expected a file .*it is a link, which may lead out of"
    ) as refused:
        read_json(tmp_path / "inputs.json")
    assert "secret" not in str(refused.value)
    os.mkfifo(tmp_path / "result.json")
    with pytest.raises(
        ParameterError, match=r"result\.json: expected a file of a finished run; it is not a plain file"
    ):
        read_json(tmp_path / "result.json")
