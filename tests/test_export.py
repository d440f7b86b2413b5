"""A finished run's model elsewhere: the same predictions from ONNX, the same bytes as safetensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import moretta
from moretta.config import run_files
from moretta.errors import MissingExtra, ParameterError
from moretta.run.assembly import federation_of
from moretta.run.export import export, export_history
from moretta.run.prediction import predict
from moretta.run.trained_model import ModelChoice

RUN = """
[run]
rounds = 3
[data]
source = "wdbc"
[model]
source = "mlp"
hidden = [4]
[protocol]
name = "{protocol}"
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for protocol in ("pbpfl", "local"):
        (folder / f"{protocol}.toml").write_text(RUN.format(protocol=protocol))
        run_file = run_files.load(folder / f"{protocol}.toml")
        federation_of(run_file, folder / protocol).train(run_file.run.rounds, run_file.run.seed)
    return folder


def test_weights_that_the_run_did_not_write_are_not_given_on(runs: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(runs / "pbpfl", tmp_path / "mine")
    model = load_file(mine / "released.safetensors")
    save_file({name: tensor + 1 for name, tensor in model.items()}, mine / "released.safetensors")
    for out in ("out.safetensors", "out.onnx"):
        with pytest.raises(
            ParameterError, match=r"released\.safetensors is not what the run wrote, .*; restore it"
        ) as no:
            export(mine, tmp_path / out)
        assert len(str(no.value).splitlines()) == 1
        assert not (tmp_path / out).exists()
    export(mine, tmp_path / "true.safetensors", ModelChoice(true_model=True))
    with pytest.raises(ParameterError, match="not what the run wrote"):
        moretta.load(mine)
    (mine / "result.json").unlink()
    export(mine, tmp_path / "out.safetensors")


def test_inputs_that_the_run_did_not_write_are_not_gone_by(runs: Path, tmp_path: Path) -> None:
    """With its classes in another order a model says yes for no."""
    mine = shutil.copytree(runs / "pbpfl", tmp_path / "mine")
    told = json.loads((mine / "inputs.json").read_text())
    (mine / "inputs.json").write_text(json.dumps(told | {"classes": told["classes"][::-1]}))
    for out in ("out.safetensors", "out.onnx"):
        with pytest.raises(ParameterError, match=r"inputs\.json is not what the run wrote, .*; restore it"):
            export(mine, tmp_path / out)
        assert not (tmp_path / out).exists()
    with pytest.raises(ParameterError, match="not what the run wrote"):
        moretta.load(mine)
    (mine / "result.json").unlink()
    moretta.load(mine)
    (mine / "run.toml").unlink()
    with pytest.raises(ParameterError, match=r"has neither run\.toml nor model\.json, .*restore it"):
        moretta.load(mine)


@pytest.mark.parametrize("true_model", [False, True])
def test_onnx_predicts_raw_rows_as_predict_does(runs: Path, tmp_path: Path, true_model: bool) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    from sklearn.datasets import load_breast_cancer

    rows = load_breast_cancer().data[:40].astype(np.float32)
    np.savez(tmp_path / "rows.npz", x=rows)
    predict(runs / "pbpfl", tmp_path / "rows.npz", tmp_path / "outputs.npy", ModelChoice(true_model=true_model))
    export(runs / "pbpfl", tmp_path / "model.onnx", ModelChoice(true_model=true_model))
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    for part in (rows, rows[:1]):  # any number of rows
        (outputs,) = session.run(["outputs"], {"x": part})
        np.testing.assert_allclose(outputs, np.load(tmp_path / "outputs.npy")[: len(part)], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("true_model", "name"), [(False, "released"), (True, "model")])
def test_safetensors_is_the_state_dict(runs: Path, tmp_path: Path, true_model: bool, name: str) -> None:
    export(runs / "pbpfl", tmp_path / "out.safetensors", ModelChoice(true_model=true_model))
    ours, kept = load_file(tmp_path / "out.safetensors"), load_file(runs / "pbpfl" / f"{name}.safetensors")
    assert set(ours) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all(np.array_equal(ours[key], kept[key]) for key in kept)


def test_the_released_model_is_not_the_true_one(runs: Path) -> None:
    released, true = (load_file(runs / "pbpfl" / f"{name}.safetensors") for name in ("released", "model"))
    assert not np.allclose(released["0.weight"], true["0.weight"])


@pytest.mark.parametrize(
    ("run", "out", "sentence"),
    [
        ("pbpfl", "model.pt", r"expected a file that ends in \.safetensors or \.onnx"),
        ("pbpfl", "nowhere/model.onnx", r"in an existing folder"),
        ("local", "model.onnx", r"here each silo has its own"),
        ("nothing", "model.onnx", r"expected a file of a finished run"),
    ],
)
def test_what_cannot_be_exported_is_one_sentence(runs: Path, tmp_path: Path, run: str, out: str, sentence: str) -> None:
    with pytest.raises(ParameterError, match=sentence):
        export(runs / run, tmp_path / out)
    assert not (tmp_path / out).exists()


def test_a_missing_extra_is_named(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(MissingExtra, match=r"pip install 'moretta\[onnx\]'"):
        export(runs / "pbpfl", tmp_path / "model.onnx")


def test_a_history_is_what_tensorboard_reads(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert export_history(runs / "pbpfl", tmp_path / "events") == 3
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    lines = [json.loads(text) for text in (runs / "pbpfl" / "history.jsonl").read_text().splitlines()]
    for tag, value in (
        ("loss", [line["loss"] for line in lines]),
        ("bytes/up", [line["bytes"]["up"] for line in lines]),
    ):
        assert [event.step for event in events.Scalars(tag)] == [1, 2, 3]
        np.testing.assert_allclose([event.value for event in events.Scalars(tag)], value, rtol=1e-6)  # float32 there
    assert [event.value for event in events.Scalars("dropped")] == [0, 0, 0]
    with pytest.raises(ParameterError, match="exists already"):
        export_history(runs / "pbpfl", tmp_path / "events")
    with pytest.raises(ParameterError, match=r"expected a run folder with its history\.jsonl"):
        export_history(tmp_path, tmp_path / "more")
    for broken in ("{", "[]", "3", '{"loss": 1}', '{"round": "x"}'):
        (tmp_path / "history.jsonl").write_text(broken + "\n")
        with pytest.raises(ParameterError, match=r"history\.jsonl is damaged"):
            export_history(tmp_path, tmp_path / "more")
