"""The scripts beside CGD's tables, on tiny data: features of a frozen network, participants that train alone, and
clipped gradients added up quickly.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from moretta.config.run_files import load
from moretta.data.images.sets import load_images
from moretta.errors import ParameterError
from moretta.models import catalogue
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.lattice import Privacy
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.noise import SiloNoise
from moretta.protocols.common.silo_rows import TrainingRows
from moretta.protocols.fedsgd.private import PrivateGradient
from moretta.run import prediction, trained_model
from moretta.run.assembly import federation_of
from moretta.secure_aggregation.keystream import SecretRoot

CGD_EXPERIMENTS = Path(__file__).parents[1] / "experiments" / "cgd"


def script(name: str) -> ModuleType:
    """Import a script of the folder by its path."""
    spec = importlib.util.spec_from_file_location(f"cgd_experiments_{name}", CGD_EXPERIMENTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def residuals(pixels: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """What the residual form of an image set holds: differences of green, red - green and blue - green."""
    red, green, blue = pixels.transpose(1, 0, 2, 3)
    planes = np.stack([green, red - green, blue - green])
    across = np.diff(planes, axis=3, prepend=np.uint8(0))
    return {"r": np.diff(across, axis=2, prepend=np.uint8(0)), "y": labels}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder with twelve images to train on and four to test, in the form of CIFAR-10."""
    folder, random = tmp_path / "data" / "cifar10", np.random.default_rng(3)
    folder.mkdir(parents=True)
    for name, rows in (("train_1", 12), ("test", 4)):
        pixels = random.integers(0, 256, (rows, 3, 32, 32), dtype=np.uint8)
        np.savez(folder / f"{name}.npz", **residuals(pixels, np.arange(rows) % 10))
    return folder


@pytest.fixture
def backbone(images: Path, tmp_path: Path) -> Path:
    """The run folder of a network that was trained for one batch."""
    (tmp_path / "run.toml").write_text(
        f'[run]\nrounds = 1\n[data]\nsource = "cifar10"\npath = "{images}"\nsilos = 1\n'
        '[model]\nsource = "resnet"\ndepth = 8\n[protocol]\nname = "centralised"\nloss = "cross-entropy"\n'
    )
    federation_of(load(tmp_path / "run.toml"), tmp_path / "backbone").train(1)
    return tmp_path / "backbone"


def test_features_are_what_the_last_layer_reads(
    images: Path, backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = script("features")
    monkeypatch.setattr(features, "CACHE", tmp_path / "features.npz")
    with pytest.raises(ParameterError, match=r"features\.py"):
        features.cifar10()
    assert features.main([str(backbone), "--data", str(images.parent), "--out", str(tmp_path / "features.npz")]) == 0
    x_train, y_train, x_test, y_test = features.cifar10()
    assert x_train.shape == (12, 64)
    assert list(y_train) == [*range(10), 0, 1]
    assert x_test.shape == (4, 64)

    prediction.predict(backbone, _as_npz(images, tmp_path), tmp_path / "out.npy")
    head = list(trained_model.read(backbone).network.children())[-1]
    outputs = x_test @ head.weight.detach().numpy().T + head.bias.detach().numpy()
    np.testing.assert_allclose(outputs, np.load(tmp_path / "out.npy"), rtol=1e-4, atol=1e-5)
    assert list(y_test) == [0, 1, 2, 3]


def _as_npz(images: Path, tmp_path: Path) -> Path:
    path = tmp_path / "rows.npz"
    np.savez(path, x=load_images("cifar10", images).x_test)
    return path


def test_features_of_a_run_that_is_not_there_are_a_sentence(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script("features").main(["nowhere", "--data", str(images.parent)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


RUN = """
[run]
rounds = 12
seed = 2
insecure-secret-seed = 2
[data]
source = "digits"
partition = "grid"
grid = [1, 1]
batch-size = 0
[model]
source = "mlp"
hidden = [8]
[protocol]
name = "cgd"
learning-rate = 0.5
delta = 0.1
[engine]
name = "fused"
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run file of CGD on scikit-learn's digits."""
    (tmp_path / "tiny.toml").write_text(RUN)
    return tmp_path / "tiny.toml"


def test_a_participant_alone_is_cgd_with_one_participant(run_file: Path, tmp_path: Path) -> None:
    ours = script("local").run(str(run_file), ["1x1"], 30, tmp_path / "local.json")["rows"][0]["cells"]
    theirs = federation_of(load(run_file), None).train(12, 2).record["test"]
    assert len(ours) == 1
    assert ours[0]["accuracy"] == theirs["accuracy"]
    assert ours[0]["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def test_a_sample_of_participants_is_drawn_kept_and_told(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    local = script("local")
    words = [str(run_file), "2x4", "3x1", "--sample", "3", "--out", str(tmp_path), "--rounds", "4"]
    assert local.main(words) == 0
    path = tmp_path / "cgd-local-tiny.json"
    first = json.loads(path.read_text())
    rows = {row["row"]: row for row in first["rows"]}
    assert {(cell["rows"], cell["columns"]) for cell in rows["2x4"]["cells"]} <= {(718, 16), (719, 16)}
    told = dict(zip(first["columns"], rows["2x4"]["ours"], strict=True))
    assert told["Trained"] == len(rows["2x4"]["cells"]) == 3
    assert told["Of"] == 8
    assert told["Worst %"] <= told["Mean %"]
    accuracies = [100 * cell["accuracy"] for cell in rows["2x4"]["cells"]]
    assert told["Standard error"] == pytest.approx(np.std(accuracies, ddof=1) / np.sqrt(3))

    monkeypatch.setattr(local, "train_alone", None)  # nothing is trained a second time
    assert local.main(words) == 0
    assert json.loads(path.read_text()) == first
    assert local.main([str(run_file), "2by4", "--out", str(tmp_path)]) == 2
    assert "expected a grid such as 100x49" in capsys.readouterr().err


@pytest.mark.parametrize(("shape", "hidden", "clip"), [((1, 4, 4), [5], 0.3), ((6,), [7, 3], 1e9), ((6,), [], 0.01)])
def test_the_quick_sum_of_clipped_gradients_is_the_general_one(
    shape: tuple[int, ...], hidden: list[int], clip: float
) -> None:
    dp, random = script("dp"), np.random.default_rng(4)
    model = catalogue.build("mlp", inputs=shape, outputs=3, seed=1, hidden=hidden)
    x, y = random.normal(size=(40, *shape)).astype(np.float32), np.arange(40) % 3
    rows = SiloRows(TrainingRows(x, y, Batches(40, 10, 0, "silo")), torch.float32)
    root = SecretRoot.insecure(0, "silo")
    noise = SiloNoise(Privacy(1.0, clip, 1e-5), 40, 10, root, b"")
    private = PrivateGradient(noise, rows, Loss("cross-entropy"))
    for lot in (np.arange(0, 40, 3), np.arange(0)):
        slow, quick = dp.general(private, model, lot), dp.clipped_sum(private, model, lot)
        assert list(quick) == list(slow)
        for name, value in slow.items():
            np.testing.assert_allclose(quick[name], value, rtol=1e-4, atol=1e-6)


def test_a_row_answers_together_by_the_parts_of_its_holders() -> None:
    """A third reading: models trained apart, whose first layers are added up, and whose outputs are."""
    reading, x = script("third_reading"), torch.randn(5, 6)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    whole = {name: value.numpy() for name, value in model.state_dict().items()}
    left, right = (
        dict(whole, **{"0.weight": whole["0.weight"] * mask}) for mask in (np.arange(6) < 2, np.arange(6) >= 2)
    )
    found = reading.of_row(model, {"a": left, "b": right}, x)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in whole.items()})
    torch.testing.assert_close(found["first layers added"][0], model(x).double().log_softmax(1), rtol=1e-5, atol=1e-6)
    assert len(found["by itself"]) == 2
    for way in ("outputs added", "mean of softmax"):
        torch.testing.assert_close(found[way][0].exp().sum(1), torch.ones(5).double())
    told = reading.figures(torch.log(torch.tensor([[0.7, 0.3], [0.6, 0.4]])), torch.tensor([0, 1]))
    assert told["accuracy"] == 0.5
