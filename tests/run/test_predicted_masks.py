"""Masks that a trained model predicts, from a run, its folder, a saved graph and ONNX, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_cli import call
from torch import Tensor, nn

import moretta
from moretta import PBPFL, Federation, FedSGD, Silo
from moretta.engines.run_folder import read_json
from moretta.errors import ParameterError
from moretta.protocols.common.targets import figures_at_positions
from moretta.secure_aggregation.settings import SecureAggregation

HEIGHT, WIDTH, CLASSES = 4, 6, 3
MODEL = '''"""A segmenter that returns a tuple, as libraries do."""

import torch
from torch import nn


class Segmenter(nn.Module):
    def __init__(self, last=False):
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 3, 1), last

    def forward(self, x):
        h = torch.relu(self.body(x))
        found = self.head(h)
        return h.mean((2, 3)), (found.movedim(1, -1) if self.last else found), h.std((2, 3))
'''
RUN = """
[run]
rounds = 2
[data]
source = "rows.npz"
silos = 2
standardise = false
[model]
source = "segmenter:Segmenter"
output = "1"
last = {last}
[protocol]
name = "{protocol}"
loss = "mse"
learning-rate = 0.01
[secure-aggregation]
scheme = "none"
"""


def images(seed: int, rows: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Return images, and masks in which some positions do not count."""
    random = np.random.default_rng(seed)
    y = random.integers(-1, CLASSES, (rows, HEIGHT, WIDTH))
    return random.normal(size=(rows, 1, HEIGHT, WIDTH)).astype("float32"), y


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "segmenter.py").write_text(MODEL)
    for name, seed in (("rows", 0), ("others", 1)):
        x, y = images(seed)
        np.savez(tmp_path / f"{name}.npz", x=x, y=y, id=np.array([f"scan {number}" for number in range(len(x))]))
    return tmp_path


def plain(weights: Path, last: bool) -> np.ndarray:
    """Return the argmax at each pixel of the network itself, built and run without Moretta."""
    from safetensors.torch import load_file

    scope: dict[str, type[nn.Module]] = {}
    exec(MODEL, scope)  # noqa: S102  # the text above
    model = scope["Segmenter"](last)
    model.load_state_dict(load_file(weights))
    with torch.no_grad():
        outputs: Tensor = model.eval()(torch.tensor(images(1)[0]))[1]
    return outputs.argmax(-1 if last else 1).numpy()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("protocol", ["fedsgd", "pbpfl"])
def test_a_run_a_folder_and_onnx_predict_the_network_s_own_masks(here: Path, protocol: str, last: bool) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    (here / "run.toml").write_text(RUN.format(protocol=protocol, last=str(last).lower()))
    assert call("train", "run.toml", "--out", "run").code == 0
    assert read_json(here / "run" / "inputs.json")["mask"] == [HEIGHT, WIDTH]
    wanted = plain(here / "run" / "released.safetensors", last)
    assert len(np.unique(wanted)) > 1
    loaded = moretta.load("run", allow_code=True)
    np.testing.assert_array_equal(loaded.predict(images(1)[0]), wanted)
    chances = loaded.predict_proba(images(1)[0])
    assert chances.shape == (10, HEIGHT, WIDTH, CLASSES)
    np.testing.assert_allclose(chances.sum(-1), 1)

    for out in ("masks.npz", "plain.npy", "masks.npz"):  # an earlier prediction may be replaced
        done = call("predict", "run", "--data", "others.npz", "--out", out, "--allow-code")
        assert done.code == 0, done.err
    with np.load("masks.npz") as found:
        np.testing.assert_array_equal(found["prediction"], wanted)
        assert found["id"][3] == "scan 3"
    np.testing.assert_array_equal(np.load("plain.npy").argmax(-1), wanted)

    done = call("export", "run", "--out", "model.onnx", "--allow-code")
    assert done.code == 0, done.err
    (outputs,) = onnxruntime.InferenceSession("model.onnx").run(None, {"x": images(1)[0]})
    np.testing.assert_array_equal(outputs.argmax(-1), wanted)


def test_a_fresh_run_and_its_saved_graph_predict_alike(here: Path) -> None:
    scope: dict[str, type[nn.Module]] = {}
    exec(MODEL.replace("h.mean((2, 3)), ", "").replace(", h.std((2, 3))", ""), scope)  # noqa: S102
    silos = [Silo(name, *images(seed)) for seed, name in enumerate("ab")]
    aggregation = SecureAggregation(scheme="none")
    made = Federation(scope["Segmenter"](), silos, PBPFL(learning_rate=0.01), aggregation=aggregation, test=images(7))
    result = made.train(2, progress=False)
    x, y = images(1)
    network = scope["Segmenter"]()
    network.load_state_dict(result.raw_model().network.state_dict())
    with torch.no_grad():
        outputs: Tensor = network.eval()(torch.tensor(x))
    np.testing.assert_array_equal(result.predict(x), outputs.argmax(1).numpy())
    result.save("saved")
    for allowed in (False, True):  # in a process of its own, and here
        np.testing.assert_array_equal(moretta.load("saved", allow_code=allowed).predict(x), result.predict(x))

    judged = result.evaluate(x, y)["figures"]
    hot = np.where(y[..., None] == np.arange(CLASSES), 1.0, 0.0).reshape(len(y), -1, CLASSES)
    by_hand = figures_at_positions(outputs.movedim(1, -1).numpy().reshape(len(y), -1), hot)
    assert {name: figure["value"] for name, figure in judged.items()} == pytest.approx(by_hand)
    counted = y >= 0
    right = (outputs.argmax(1).numpy() == y)[counted].mean()
    assert judged["position_accuracy"]["value"] == pytest.approx(right)
    assert judged["dice_1"]["low"] < judged["dice_1"]["value"] < judged["dice_1"]["high"]
    low, high = result.test["intervals"]["iou_2"]
    assert low <= result.test["metrics"]["iou_2"] <= high


def test_evaluate_judges_masks_and_refuses_others(here: Path) -> None:
    (here / "run.toml").write_text(RUN.format(protocol="fedsgd", last="false"))
    assert call("train", "run.toml", "--out", "run").code == 0
    done = call("evaluate", "run", "--data", "others.npz", "--allow-code")
    assert done.code == 0, done.err
    assert "dice_2" in done.out
    assert "the commonest class alone" in done.out
    x, y = images(1)
    found = moretta.load("run", allow_code=True).evaluate(x, y)
    assert found["baseline"] == pytest.approx(np.bincount(y[y >= 0]).max() / (y >= 0).sum())
    np.savez("narrow.npz", x=x, y=y[..., :2])  # 8 positions, which divide the 72 outputs
    np.savez("fourth.npz", x=x, y=np.full_like(y, 3))
    for data, said in (("narrow", "got 8 positions and class 2"), ("fourth", "got 24 positions and class 3")):
        done = call("evaluate", "run", "--data", f"{data}.npz", "--allow-code")
        assert done.code == 2
        assert f"expected masks of 4 x 6 positions with classes 0 to 2, as the run's; {said}" in done.err.replace(
            "\n", " "
        )
    done = call("predict", "run", "--data", "others.npz", "--out", "masks.csv", "--allow-code")
    assert done.code == 2
    assert ".npz" in done.err
    done = call("predict", "run", "--data", "others.npz", "--out", "rows.npz", "--allow-code")  # rows, and no masks
    assert done.code == 2
    assert "only earlier predictions that are no input may be replaced" in done.err.replace("\n", " ")


def test_a_folder_whose_masks_do_not_fit_its_outputs_is_refused(here: Path) -> None:
    import json

    silos = [Silo(name, *images(seed)) for seed, name in enumerate("ab")]
    scope: dict[str, type[nn.Module]] = {}
    exec(MODEL.replace("h.mean((2, 3)), ", "").replace(", h.std((2, 3))", ""), scope)  # noqa: S102
    made = Federation(scope["Segmenter"](), silos, FedSGD(), aggregation=SecureAggregation(scheme="none"))
    folder = made.train(1, progress=False).save("saved")
    inputs = read_json(folder / "inputs.json")
    for mask in ([5, 6], [0, 6], [True, 6], "46", [4.0, 6], [-4, -6], [10**9, 10**9]):
        (folder / "inputs.json").write_text(json.dumps(inputs | {"mask": mask}))
        with pytest.raises(ParameterError, match="is not as a run leaves it"):
            moretta.load(folder)
