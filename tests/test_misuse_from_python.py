"""Misuses from Python: each is refused in one sentence, which names the key and says what to do."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import seeded
from refused_calls import TENSORS, FollowedInTraining, Pairs, X, Y, make
from refused_rows import Row, refused
from torch import nn

import moretta
from moretta import (
    BAFFLE,
    PBPFL,
    FedSGD,
    Local,
    Result,
    Schema,
    Silo,
    read_table,
    split_rows,
)
from moretta.data.tables.schema import Number, Target
from moretta.errors import ParameterError
from moretta.run.inputs import count_outputs
from moretta.run.trained_model import TrainedModel

# -- Models that were trained ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("misuse") / "run"
    made = make(model={"source": "mlp", "hidden": [3]}, feature_names=["a", "b", "c", "d"], out=folder)
    return made.train(1), folder


def no_run(folder: Path) -> None:
    for file in folder.iterdir():
        if file.is_file():
            file.unlink()


def cut_weights(folder: Path) -> None:
    path = folder / "released.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def weights_of_16_bits(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "released.safetensors"
    save_file({name: value.bfloat16() for name, value in load_file(path).items()}, path)


def other_weights(folder: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"0.weight": np.zeros((2, 2), np.float32)}, folder / "released.safetensors")


def torn_json(folder: Path) -> None:
    (folder / "inputs.json").write_text('{"format": 1, "shape"')


def less_json(folder: Path) -> None:
    told = json.loads((folder / "inputs.json").read_text())
    (folder / "inputs.json").write_text(json.dumps({"format": 1, "shape": told["shape"]}))


def strange_dtype(folder: Path) -> None:
    told = json.loads((folder / "inputs.json").read_text())
    (folder / "inputs.json").write_text(json.dumps(told | {"dtype": "object"}))


def test_a_saved_folder_names_no_path_of_this_machine(run: tuple[Result, Path], tmp_path: Path) -> None:
    for folder in (run[1], run[0].save(tmp_path / "saved")):
        made = json.loads((folder / "model.json").read_text())
        assert made["base"] == "."


def vast_model(folder: Path) -> None:
    made = {"format": 1, "source": "mlp", "arguments": {"hidden": [10**7, 10**7]}, "base": "."}
    (folder / "model.json").write_text(json.dumps(made))
    (folder / "graph.safetensors").unlink(missing_ok=True)


def deep_json(folder: Path) -> None:
    (folder / "inputs.json").write_text('{"format": 1, "shape": ' + "[" * 100_000)


def deep_model(folder: Path) -> None:
    made = {"format": 1, "source": "mlp", "arguments": {"layers": 10**12}, "base": "."}
    (folder / "model.json").write_text(json.dumps(made))


def strange_record(folder: Path) -> None:
    (folder / "result.json").write_text(json.dumps({"format": 1, "models": ["released.safetensors"]}))


def pipe_for_weights(folder: Path) -> None:
    (folder / "released.safetensors").unlink()
    os.mkfifo(folder / "released.safetensors")


def link_for_weights(folder: Path) -> None:
    weights = (folder / "released.safetensors").rename(folder / "elsewhere")
    (folder / "released.safetensors").symlink_to(weights)


def code(folder: Path) -> None:
    told = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps(told | {"source": "os:system", "arguments": {"command": "true"}}))


TAMPERED: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "no run": (no_run, r"inputs\.json: expected a file of a finished run"),
    "weights that were cut": (cut_weights, r"released\.safetensors: expected a model of a finished run"),
    "weights in a dtype that NumPy has not": (weights_of_16_bits, r"NumPy has no BF16"),
    "weights of another model": (other_weights, r"expected arrays for the 4 tensors of the model"),
    "a file that was torn": (torn_json, r"inputs\.json: expected a file of a finished run"),
    "a file with less": (less_json, r"inputs\.json or model\.json is not as a run leaves it"),
    "a type that there is not": (strange_dtype, r"inputs\.json or model\.json is not as a run leaves it"),
    "a model of any size": (vast_model, r"what it says of its model does not fit the weights beside it"),
    "a file without end to its lists": (deep_json, r"inputs\.json: expected a file of a finished run"),
    "a model of any depth": (deep_model, r"model: layers must be 10,000 at most, got 1000000000000"),
    "a record without digests": (strange_record, r"result\.json: expected the models' SHA-256 by file"),
    "a pipe for weights": (pipe_for_weights, r"released\.safetensors: expected a model of a finished run"),
    "a link for weights": (
        link_for_weights,
        r"released\.safetensors: expected a model of a finished run; it is a link",
    ),
    "code in the place of a model": (code, r"names code that would be run as you: system of os .*allow_code=True"),
}


@pytest.mark.parametrize(("tamper", "said"), TAMPERED.values(), ids=TAMPERED.keys())
def test_folders_that_cannot_be_loaded(
    run: tuple[Result, Path], tamper: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    saved = run[0].save(tmp_path / "saved")
    tamper(saved)
    with pytest.raises(ParameterError, match=said) as caught:
        moretta.load(saved)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.filterwarnings("ignore")  # PyTorch's own of what it deprecates, and yet people have such models
@pytest.mark.parametrize("by", [torch.jit.script, torch.compile])
@pytest.mark.parametrize("protocol", [PBPFL(loss="cross-entropy"), BAFFLE(loss="cross-entropy", k=4)])
def test_layers_that_cannot_be_looked_into(by: Any, protocol: Any) -> None:
    for model, where in (
        (by(nn.Linear(4, 3)), "^model"),
        (nn.Sequential(by(nn.Linear(4, 4)), nn.Linear(4, 3)), "^`0`"),
    ):
        before = rf"{where}: expected a module of Python's, .* as it was before torch\.(jit|compile)"
        with pytest.raises(ParameterError, match=before):
            make(model=model, protocol=protocol).train(1)
        make(model=model).train(1)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_layer_may_write_to_its_input() -> None:
    layers = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    assert make(model=torch.jit.script(layers)).train(1).history


def test_a_gradient_that_is_there_in_training_is_enough() -> None:
    with torch.no_grad():
        federations = make(model=FollowedInTraining()), make(model=nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)))
    for federation in federations:
        before = torch.get_rng_state()
        assert count_outputs(federation.model, federation.silos, None, torch.float32) == 3
        assert (torch.get_rng_state() == before).all()
        assert federation.train(1).history


def test_a_layer_may_write_to_its_input_where_its_own_models_are_compared() -> None:
    """Each silo's model was tested on the rows that the one before had changed."""
    first = nn.Hardswish(inplace=True), nn.Hardswish()
    found = []
    for layer in first:
        with seeded():
            model = nn.Sequential(layer, nn.Linear(4, 3))
        x = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
        result = make(model=model, protocol=Local(loss="cross-entropy"), test=(x, np.arange(9) % 3)).train(2)
        found.append(result.test["per_silo"])
    assert found[0] == found[1]


@refused("misuse_from_python.txt")
def test_what_cannot_be_is_refused(row: Row, request: pytest.FixtureRequest) -> None:
    row.play(globals(), request)


def test_views_past_the_last_round(tmp_path: Path) -> None:
    recorded = make(out=tmp_path / "run", record_views=(7, 9))
    with pytest.raises(
        ParameterError,
        match=r"begins after the last round, and rounds is 5; name rounds from 1 to 5",
    ):
        recorded.train(5)
    assert not (tmp_path / "run").exists()


def test_a_run_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(
        ParameterError, match=r"file/run cannot be made: Not a directory; expected a folder that may be"
    ):
        make(out=tmp_path / "file" / "run").train(1)


CLASSES = np.array([0, 1, 2, 1])
ONE_HOT = np.eye(3, dtype=np.float32)[CLASSES]
SOFT_LABELS = 0.8 * ONE_HOT + 0.1 / 1.5


@pytest.mark.parametrize(
    ("loss", "first", "second", "task"),
    [
        ("cross-entropy", SOFT_LABELS, CLASSES, "classification"),
        ("cross-entropy", CLASSES, SOFT_LABELS, "classification"),
        ("cross-entropy", SOFT_LABELS, SOFT_LABELS, "classification"),
        ("mse", CLASSES, ONE_HOT, "classification"),
        ("mse", ONE_HOT, ONE_HOT, "classification"),
        ("mse", SOFT_LABELS, SOFT_LABELS, "regression"),
    ],
)
def test_the_task_is_that_of_all_silos(loss: Any, first: Any, second: Any, task: str) -> None:
    x = np.random.default_rng(0).normal(size=(4, 4))
    federation = make(silos=[Silo("a", x, first), Silo("b", x, second)], protocol=FedSGD(loss=loss))
    assert federation.spec.task == task


def test_classes_here_and_numbers_there() -> None:
    x = np.zeros((4, 4))
    mixed = [Silo("a", x, SOFT_LABELS), Silo("b", x, CLASSES)]
    for silos_in_order in (mixed, mixed[::-1]):
        with pytest.raises(ParameterError, match=r"of silo `b` are classes and those of `a` are numbers; .* task = "):
            make(silos=silos_in_order, protocol=FedSGD(loss="mse"))
    make(silos=mixed, protocol=FedSGD(loss="mse"), task="classification")


def test_names_of_classes_as_numpy_gives_them() -> None:
    names, _ = np.unique(["no", "yes", "perhaps"], return_inverse=True)
    assert list(make(class_names=names).class_names) == ["no", "perhaps", "yes"]


def test_errors_name_keywords_and_no_options_of_the_shell(run: tuple[Result, Path], tmp_path: Path) -> None:
    mlp: Any = {"source": "mlp", "hidden": [3]}
    with pytest.raises(ParameterError, match=r"go on .* by resume=True, or name another folder by out=\.\.$"):
        make(model=mlp, out=run[1]).train(1)
    with pytest.raises(
        ParameterError, match=r"resume with those it was begun with, or name another folder by out=\.\.$"
    ):
        make(model=mlp, out=run[1], batch_size=3).train(2, resume=True)
    with pytest.raises(ParameterError, match=r"start without resume=True, in an empty folder$"):
        make(model=mlp, out=tmp_path / "--out").train(2, resume=True)
    make(out=tmp_path / "own").train(1)
    with pytest.raises(ParameterError, match=r'name that by model="module:function" \(or a built-in name\), or write'):
        moretta.load(tmp_path / "own")
    alone = make(protocol=moretta.Local(loss="cross-entropy"), model=mlp, out=tmp_path / "local").train(1)
    assert alone.folder is not None
    with pytest.raises(ParameterError, match=r"each silo has its own, name one by silo=\.\. \(north, south\)"):
        moretta.load(alone.folder)


# -- What is taken -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        (X.tolist(), Y.tolist()), (torch.tensor(X), torch.tensor(Y)), (X.astype(np.float64), Y.astype(np.int8)),
        (TENSORS, None), (Pairs([(row, int(target)) for row, target in zip(X, Y, strict=True)]), None),
    ],
    ids=["lists", "tensors", "arrays of other types", "a TensorDataset", "a Dataset"],
)  # fmt: skip
def test_rows_in_another_form_are_the_same_rows(given: tuple[Any, Any]) -> None:
    silo = Silo("a", *given) if given[1] is not None else Silo("a", given[0])
    assert isinstance(silo.x, np.ndarray)
    assert (silo.x.astype(np.float32) == X).all()
    assert (silo.y == Y).all()
    federation = make(silos=[silo, Silo("b", X, Y)], test=given if given[1] is not None else given[0])
    assert federation.test is not None
    assert (federation.test[0].astype(np.float32) == X).all()


@pytest.mark.parametrize("kind", ["column of ints", "frame of one column", "one-hot ints", "table of pyarrow"])
def test_classes_in_two_axes_are_classes(kind: str) -> None:
    pandas, arrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    x: Any = X
    y: Any = {
        "column of ints": Y[:, None],
        "frame of one column": pandas.DataFrame({"y": Y}),
        "one-hot ints": np.eye(3, dtype=np.int64)[Y],
        "table of pyarrow": arrow.table({"y": Y}),
    }[kind]
    if kind == "table of pyarrow":
        x = arrow.table({name: X[:, column] for column, name in enumerate("abcd")})
    model, scores = nn.Linear(4, 3), []
    for rows in ((x, y), (X, Y)):
        federation = make(model=model, silos=[Silo("a", *rows), Silo("b", *rows)], test=rows)
        assert federation.spec.task == "classification"
        scores.append(federation.train(1, progress=False).test["accuracy"])
    assert scores[0] == scores[1]


def test_numbers_that_float32_cannot_keep_apart_are_refused() -> None:
    """Whole numbers from 2^24 on lose their last digit; the loss matters by how far a column's numbers lie apart."""
    pandas = pytest.importorskip("pandas")
    spread, seconds = X.astype(np.float64) * 1e9, 1_700_000_000 + np.arange(12)
    make(silos=[Silo("a", spread, Y), Silo("b", np.full((12, 4), 20240101.0), Y)]).rehearse(1)
    frame = pandas.DataFrame({"age": X[:, 0], "seen": seconds, "b": X[:, 1], "c": X[:, 2]})
    for x in (frame, frame.to_numpy()):
        with pytest.raises(ParameterError, match=r"`a`: x: column ('seen'|1): float32, in which rows are kept, moves"):
            make(silos=[Silo("a", x, Y), Silo("b", x, Y)])
    frame["seen"] -= 1_700_000_000
    make(silos=[Silo("a", frame, Y), Silo("b", frame, Y)]).rehearse(1)
    late = [Silo("a", X, seconds), Silo("b", X, seconds - seconds[0])]
    with pytest.raises(ParameterError, match="`a`: y: float32, in which rows are kept"):
        make(model=nn.Linear(4, 1), silos=late, protocol=FedSGD(loss="mse"), task="regression")
    with pytest.raises(ParameterError, match="the table: column 'seen': float32, in which rows are kept"):
        read_table({"seen": seconds}, Schema(columns={"seen": Number()}), labelled=False)


def test_whole_numbers_are_targets_of_a_regression() -> None:
    model, scores = nn.Linear(4, 1), []
    for y in (Y, Y.astype(np.float32), Y.astype(bool).astype(np.uint8) + (Y == 2)):
        held = [Silo(name, X, y, held_out=(X, y)) for name in "abc"]
        federation = make(
            model=model, silos=held, task="regression", test=(X, y), validation=(X, y),
            protocol=FedSGD(loss="mse"), standardise_targets=True, score_at_silos=True,
        )  # fmt: skip
        scores.append(federation.train(1, progress=False).test["mse"])
    assert scores[0] == scores[1] == scores[2]
    with pytest.raises(ParameterError, match=r'got 0 to 2; if they are numbers, set task = "regression"'):
        make(model=nn.Linear(4, 1), protocol=FedSGD(loss="mse")).rehearse(1)


@pytest.mark.parametrize("unit", ["s", "us", "ns"])
def test_durations_of_any_unit_are_no_numbers(unit: str) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"stay": pandas.to_timedelta(Y, unit="D").astype(f"m8[{unit}]")})
    with pytest.raises(ParameterError, match="column 'stay' holds words, dates or objects"):
        Silo("a", frame, Y)


def test_frames_agree_on_the_order_of_columns() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=["a", "b", "c", "d"])
    frame["d"] = pandas.array((X[:, 3] > 0), dtype="boolean")
    turned, y = frame[["c", "a", "d", "b"]], pandas.Series(Y)
    made = make(silos=[Silo("a", frame, y), Silo("b", turned, y)], test=(turned, y))
    assert made.feature_names == ("a", "b", "c", "d")
    assert made.test is not None
    assert (made.silos[0].x == made.silos[1].x).all()
    assert (made.test[0] == made.silos[0].x).all()
    result = made.train(2)
    assert (result.predict(turned) == result.predict(made.silos[0].x)).all()
    with pytest.raises(ParameterError, match=r"silo `b` lacks the column 'd' \(its 'dd'\?\), which `a` has; give all"):
        make(silos=[Silo("a", frame, y), Silo("b", turned.rename(columns={"d": "dd"}), y)])
    with pytest.raises(ParameterError, match=r"silo `b` has rows without names of columns, but `a` has a frame"):
        make(silos=[Silo("a", frame, y), Silo("b", X, Y)])
    with pytest.raises(ParameterError, match=r"silo `a`: column 'ward' holds words, .*moretta.read_table\(frame, sch"):
        Silo("a", frame.assign(ward="A"), y)
    with pytest.raises(ParameterError, match=r"x: expected a column 'c', as the run has; it has a, b, d"):
        result.predict(frame.drop(columns="c"))
    twice = pandas.concat([frame, frame[["a"]]], axis=1)
    with pytest.raises(
        ParameterError, match=r"silo `a`: column 'a' appears twice; expected each name once: rename one"
    ):
        Silo("a", twice, y)
    absent = Silo("a", frame.assign(a=pandas.array([None, *X[1:, 0]], dtype="Float64")), y)
    assert np.isnan(absent.x[0, 0])


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    return make(feature_names=list("abcd"), class_names=["no", "yes", "perhaps"]).train(1).raw_model()


def test_numbers_without_a_fraction_are_numbers_beside_others() -> None:
    model, scores = nn.Linear(4, 3), []
    for kind in (np.float32, np.int64):
        whole = np.round(X * 3).astype(kind)
        silos = [Silo("a", X, Y), Silo("b", whole, Y, held_out=(whole, Y)), Silo("c", X, Y, held_out=(X, Y))]
        above = np.greater(whole, 0)
        silos[0] = Silo("a", X, Y, held_out=(above if kind is np.int64 else above.astype(kind), Y))
        federation = make(model=model, silos=silos, test=(whole, Y), validation=(whole, Y), score_at_silos=True)
        scores.append(federation.train(1, progress=False).test)
    assert scores[0] == scores[1]


@pytest.mark.parametrize("kind", [np.int64, np.float32])
def test_one_hot_labels_are_scored_as_classes(kind: Any, named: TrainedModel) -> None:
    assert named.evaluate(X, np.eye(3, dtype=kind)[Y]) == named.evaluate(X, Y)


ROWS_TWICE: dict[str, Callable[[Any, Any, Any, TrainedModel], Any]] = {
    "y of a silo": lambda x, y, z, model: Silo("a", x, z),
    "ids of a silo": lambda x, y, z, model: Silo("a", x, y, ids=z),
    "groups of a silo": lambda x, y, z, model: Silo("a", x, y, groups=z),
    "groups beside labels alone": lambda x, y, z, model: Silo("a", x.to_numpy(), y, groups=z),
    "arrays by name": lambda x, y, z, model: Silo("a", {"a": x["a"], "b": z}, y.to_numpy()),
    "held_out": lambda x, y, z, model: Silo("a", x, y, held_out=(x, z)),
    "test": lambda x, y, z, model: make(test=(x, z)),
    "validation": lambda x, y, z, model: make(validation=(x, z)),
    "labels to score": lambda x, y, z, model: model.evaluate(x, z),
    "groups to score": lambda x, y, z, model: model.evaluate(x, y, z),
    "groups of an array to score": lambda x, y, z, model: model.evaluate(x.to_numpy(), y, z),
    "columns to predict": lambda x, y, z, model: model.predict({**dict(x), "d": z}),
    "columns to score": lambda x, y, z, model: model.evaluate({**dict(x), "d": z}, y),
    "groups to split": lambda x, y, z, model: split_rows(y * 1.0, 0.3, groups=z),
    "columns of a table": lambda x, y, z, model: read_table(
        {"a": x["a"], "b": z}, Schema(columns={"a": Number(), "b": Number()}), labelled=False
    ),
}


@pytest.mark.parametrize("call", ROWS_TWICE.values(), ids=ROWS_TWICE)
def test_columns_in_another_order_than_their_rows_are_refused(call: Any, named: TrainedModel) -> None:
    """Only targets of a silo were compared by index: groups, ids and labels to score were paired by position."""
    pandas = pytest.importorskip("pandas")
    frame, y = pandas.DataFrame(X, columns=list("abcd")), pandas.Series(Y)
    kept = frame["a"] > frame["a"].min()
    call(frame[kept], y[kept], y[kept], named)
    call(frame[kept], y[kept], y[kept].to_numpy(), named)
    with pytest.raises(ParameterError, match=r"the indices of .* and .* differ; .*pass .*\.to_numpy\(\)"):
        call(frame, y, y[::-1], named)


def test_frames_and_names_are_those_of_the_schema() -> None:
    """A model was trained on columns in the frames' order, and took them in the schema's afterwards."""
    pandas = pytest.importorskip("pandas")
    columns: dict[str, Any] = {name: Number() for name in "abcd"}
    table = Schema(columns=columns | {"y": Target(classes=("no", "yes", "perhaps"))})
    frame = pandas.DataFrame(X, columns=list("dbca"))
    turned, own = frame[list("cabd")], frame[list("abcd")].to_numpy()
    of: dict[str, Any] = {"table": table, "test": (frame, Y), "validation": (turned, Y)}
    framed = [Silo("a", frame, Y, held_out=(turned, Y)), Silo("b", turned, Y)]
    for silos in (framed, framed[::-1], [Silo("a", own, Y), Silo("b", own, Y)]):
        made = make(silos=silos, **of)
        assert made.feature_names == tuple("abcd")
        held = [part for part in (made.test, made.validation, *(silo.held_out for silo in made.silos)) if part]
        assert all((x == own).all() for x in (*(part[0] for part in held), *(silo.x for silo in made.silos)))
    result = make(silos=framed, feature_names=list("abcd"), class_names=["no", "yes", "perhaps"], **of).train(5)
    assert result.test is not None
    for x in (frame, turned, own):
        assert result.evaluate(x, Y)["figures"]["accuracy"]["value"] == result.test["accuracy"]
    with pytest.raises(
        ParameterError, match=r"silo `a` lacks the column 'a', which the table has; give its read_table"
    ):
        make(silos=[Silo("a", frame.rename(columns={"a": "age"}), Y), Silo("b", frame, Y)], table=table)
    with pytest.raises(ParameterError, match=r"silo `a` has the column 'e', which the table has not"):
        make(silos=[Silo("a", frame.assign(e=1.0), Y), Silo("b", frame.assign(e=1.0), Y)], table=table)
    with pytest.raises(
        ParameterError, match=r"feature_names: expected the table's own, .* \(a, b, c, d\); got d, b, c"
    ):
        make(silos=framed, table=table, feature_names=list(frame.columns))
    with pytest.raises(ParameterError, match=r"class_names: expected the table's own, .*; got yes, no, perhaps: leave"):
        make(silos=framed, table=table, class_names=["yes", "no", "perhaps"])


NUMBERED = {
    "the numbers of classes": ([0, 1, 2], [0, 1, 2]),
    "names": ([1, 2, 3], [0, 1, 2]),
    "names of some classes": ([3, 2], [2, 1]),
    "either": ([1, 2], None),
    "neither": ([0, 3], None),
}


@pytest.mark.parametrize("form", [np.int64, np.float32, np.uint8, object, "Int64", "category", str, "frame"])
@pytest.mark.parametrize(("labels", "classes"), NUMBERED.values(), ids=NUMBERED)
def test_labels_that_are_numbers_may_be_names(labels: list[int], classes: list[int] | None, form: Any) -> None:
    """Classes called 1, 2 and 3 had their labels taken for places from 0, and a model without a fault scored 0."""
    pandas = pytest.importorskip("pandas")
    y: Any = pandas.Series(labels).astype("int64" if form == "frame" else form)
    y = y.to_frame() if form == "frame" else y
    model = make(class_names=["1", "2", "3"]).train(1, progress=False).raw_model()
    if form is str:
        classes = None if 0 in labels else [label - 1 for label in labels]
    if classes is None:
        with pytest.raises(ParameterError, match=r"may be names of classes or count|does not fit|not a class"):
            model.evaluate(X[: len(labels)], y)
    else:
        assert model.evaluate(X[: len(labels)], y) == model.evaluate(X[: len(labels)], [str(k + 1) for k in classes])


@pytest.mark.parametrize(
    ("names", "labels", "classes"),
    [
        (("False", "True"), [False, True], [0, 1]),
        (("True", "False"), [False, True], None),
        (("1", "0"), [0, 1], None),
        (("1", "0"), [False, True], None),
        (("10", "20"), [20.0, 10.0], [1, 0]),
        (("0", "1"), [1, 0], [1, 0]),
        (("no", "yes"), [1, 0], [1, 0]),
    ],
)
def test_labels_of_two_classes(names: tuple[str, ...], labels: list[Any], classes: list[int] | None) -> None:
    model = make(model=nn.Linear(4, 2), silos=[Silo(n, X, Y % 2) for n in "ab"], class_names=names).train(1).raw_model()
    if classes is None:
        with pytest.raises(ParameterError, match="y: its numbers may be names of classes or count them from 0"):
            model.evaluate(X[:2], labels)
    else:
        assert model.evaluate(X[:2], labels)["figures"] == model.evaluate(X[:2], [names[k] for k in classes])["figures"]


def test_a_callback_may_be_wrapped_by_what_takes_more() -> None:
    def told(line: Mapping[str, Any]) -> None:
        lines.append(line)

    @functools.wraps(told)
    def adapted(number: int, of: int, line: Mapping[str, Any]) -> None:
        told(line)

    lines: list[Mapping[str, Any]] = []
    make().train(1, progress=adapted)
    assert lines
