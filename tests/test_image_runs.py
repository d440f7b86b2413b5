"""Runs on folders of images: by a run file on one machine, and as the server's and a site's side of many."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_cli import call

import moretta
from moretta.config import run_files, silo_file
from moretta.contract.lazy_rows import LazyRows
from moretta.data.images import folder as folders
from moretta.data.images.folder import read_unlabelled
from moretta.data.images.pixels import ImageForm
from moretta.data.tables.preparation import Preparation
from moretta.deployment import shared_settings
from moretta.engines.run_folder import read_model
from moretta.errors import ParameterError
from moretta.protocols.common.targets import probabilities
from moretta.run.assembly import federation_of
from moretta.run.export import export
from moretta.run.persistence import inputs_of
from moretta.run.prediction import predict

Image = pytest.importorskip("PIL.Image")
ROWS = 24
RUN = """
[run]
rounds = 2
seed = 7
[data]
source = "image-folder"
path = "scans"
labels = "labels.csv"
target = "finding"
group-column = "patient"
id-column = "scan"
image-size = 8
channels = 1
silos = 2
batch-size = 4
[model]
source = "mlp"
hidden = [4]
[protocol]
name = "fedsgd"
learning-rate = 0.2
"""
SCHEMA = """
[columns.file]
kind = "file"
[columns.patient]
kind = "group"
[columns.scan]
kind = "id"
[columns.finding]
kind = "target"
classes = ["clear", "nodule"]
"""
SITES = """
[run]
rounds = 2
seed = 7
[data]
source = "sites"
schema = "schema.toml"
inputs = [1, 8, 8]
silos = 2
batch-size = 4
[model]
source = "mlp"
hidden = [4]
[protocol]
name = "fedsgd"
[engine]
name = "flare"
sites = ["north", "south"]
"""
SILO = """
[silo]
name = "north"
[data]
source = "image-folder"
path = "scans"
labels = "labels.csv"
test-fraction = 0.25
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write images, of which those with a finding are brighter, with a table and the run files."""
    random, lines = np.random.default_rng(0), ["file,patient,scan,finding"]
    (tmp_path / "scans").mkdir()
    for number in range(ROWS):
        pixels = random.integers(0, 120, (12, 12)) + 100 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "scans" / f"{number}.png")
        lines.append(f"{number}.png,Rossi-{number // 2},scan-{number},{('clear', 'nodule')[number % 2]}")
    (tmp_path / "labels.csv").write_text("\n".join([*lines, ""]))
    for name, text in (("run", RUN), ("sites", SITES), ("silo", SILO), ("schema", SCHEMA)):
        (tmp_path / f"{name}.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_larger_than_memory_trains_to_the_same_bytes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("there", folders.IN_MEMORY), ("read", 0)):
        monkeypatch.setattr(folders, "IN_MEMORY", most)
        done = call("train", "run.toml", "--out", name, "--json")
        assert done.code == 0, done.err
    there, read = (read_model(here / name, "released.safetensors") for name in ("there", "read"))
    assert there.keys() == read.keys()
    for name, tensor in there.items():
        np.testing.assert_array_equal(read[name], tensor)


def test_nothing_that_a_run_writes_says_whom_images_are_about(here: Path) -> None:
    done = call("train", "run.toml", "--out", "out", "--json")
    assert done.code == 0, done.err
    assert "images (file): file" in done.err
    assert "target: finding, classes clear, nodule" in done.err
    assert "Rossi" not in done.out + done.err
    written = [path for path in (here / "out").rglob("*") if path.is_file()]
    assert len(written) > 5
    for path in written:
        content = path.read_bytes()
        assert b"Rossi" not in content, path
        assert b"scan-" not in content, path


def test_one_broken_image_is_one_sentence_and_nothing_is_trained(here: Path) -> None:
    (here / "scans" / "5.png").write_bytes(b"no image")
    done = call("train", "run.toml", "--out", "out")
    assert done.code == 2
    assert done.sentence == (
        "labels.csv row 6 is not a readable PNG, JPEG, TIFF, DICOM or NIfTI image; save it again or remove it"
    )
    assert not (here / "out").exists()


@pytest.mark.parametrize("most", [folders.IN_MEMORY, 0])
def test_a_site_has_its_images_as_the_run_wants_them(here: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(folders, "IN_MEMORY", most)
    run_file = run_files.load(here / "sites.toml")
    server = shared_settings.server_side(run_file, here / "out")
    told = run_files.loads(shared_settings.shared_text(run_file), here / "told.toml")
    site = shared_settings.site_side(told, silo_file.load(here / "silo.toml"))
    assert shared_settings.model_digest(site, told) == shared_settings.model_digest(server, run_file)
    mine = next(silo for silo in site.silos if not silo.remote)
    assert isinstance(mine.x, LazyRows) == (most == 0)
    assert (len(mine.x), mine.x.shape[1:]) == (18, (1, 8, 8))
    assert mine.held_out is not None
    assert len(mine.held_out[0]) == 6
    brightness = np.asarray(mine.x).mean(axis=(1, 2, 3))
    np.testing.assert_array_equal(brightness > 0.4, mine.y == 1)
    assert mine.groups is not None
    assert all((np.unique(mine.groups, return_counts=True)[1] == 2).tolist())  # both scans of a patient


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("inputs = [1, 8, 8]\n", "", r"\[data\] inputs: expected the shape that images become, \[1 or 3, size, size\]"),
        ("[1, 8, 8]", "[2, 8, 8]", r"\[data\] inputs: expected the shape that images become"),
        ("[1, 8, 8]", "[1, 8, 9]", r"\[data\] inputs: expected the shape that images become"),
        (
            "silos = 2",
            "silos = 2\nclasses = 2",
            r"\[data\] classes, outputs, mask, tokens, missing and partition are not for",
        ),
        ("silos = 2", "silos = 2\nchannels = 1", r"\[data\] channels is about rows, which with source = .sites. each"),
        ("silos = 2", "silos = 2\nwindow = [40]", r"\[data\] window: expected the center and the width of the values"),
    ],
)
def test_a_run_says_once_what_images_become(here: Path, old: str, new: str, sentence: str) -> None:
    (here / "sites.toml").write_text(SITES.replace(old, new))
    with pytest.raises(ParameterError, match=sentence):
        run_files.load(here / "sites.toml")


def test_window_and_spacing_are_the_same_at_all_sites(here: Path) -> None:
    (here / "sites.toml").write_text(SITES.replace("silos = 2", "silos = 2\nwindow = [40, 400]\nspacing = 0.7"))
    run_file = run_files.load(here / "sites.toml")
    told = run_files.loads(shared_settings.shared_text(run_file), here / "told.toml")
    assert (told.data.window, told.data.spacing) == ((40, 400), 0.7)
    with pytest.raises(
        ParameterError, match=r"labels.csv row 1 is not a DICOM or NIfTI file, and window, spacing and plane"
    ):
        shared_settings.site_side(told, silo_file.load(here / "silo.toml"))


def test_new_images_are_predicted_as_those_to_train_on(here: Path) -> None:
    done = call("train", "run.toml", "--out", "mine")
    assert done.code == 0, done.err
    done = call("predict", "mine", "--data", "scans", "--out", "all.csv", "--json")
    assert done.code == 0, done.err
    lines = [line.split(",") for line in (here / "all.csv").read_text().splitlines()]
    assert lines[0][:2] == ["file", "prediction"]
    assert len(lines) == ROWS + 1
    chosen = [lines[3][0], lines[1][0]]
    (here / "scans" / "new.csv").write_text("file\n" + "\n".join(chosen) + "\n")
    done = call("predict", "mine", "--data", "scans/new.csv", "--out", "some.csv")
    assert done.code == 0, done.err
    some = [line.split(",") for line in (here / "some.csv").read_text().splitlines()[1:]]
    assert [line[:2] for line in some] == [lines[3][:2], lines[1][:2]]
    (here / "empty").mkdir()
    assert "holds no images" in call("predict", "mine", "--data", "empty", "--out", "none.csv").sentence


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("image-size = 8\nchannels = 1\n", ""),
        ("image-size = 8\nchannels = 1\n", "channel-mean = [0.3]\nchannel-deviation = [0.2]\n"),
        (
            "channels = 1",
            "channels = 3\nstandardise = true\nchannel-mean = [0.3, 0, 1]\nchannel-deviation = [0.2, 1, 2]",
        ),
    ],
)
def test_an_image_is_predicted_alike_through_every_door(here: Path, old: str, new: str) -> None:
    (here / "run.toml").write_text(RUN.replace(old, new))
    result = federation_of(run_files.load(here / "run.toml"), here / "mine").train(2)
    result.save(here / "saved")
    form = ImageForm(8, 3) if "channels = 3" in new else ImageForm()
    pixels = read_unlabelled(here / "scans", form)[0]
    trained = read_unlabelled(here / "scans", run_files.load(here / "run.toml").data.image)[0]
    assert result.released is not None
    with torch.no_grad():
        wanted = probabilities(result.released(torch.tensor(trained)).numpy(), "mse")
    arrays = {"floats": pixels} | ({} if form.size else {"bytes": (pixels * 255).round().astype(np.uint8)})
    for name, x in arrays.items():
        np.savez(here / f"{name}.npz", x=x)
    for model in (result, moretta.load(here / "mine"), moretta.load(here / "saved")):
        for x in arrays.values():
            np.testing.assert_allclose(model.predict_proba(x), wanted, atol=1e-5)
        with pytest.raises(ParameterError, match="expected pixels from 0 to 1, or bytes"):
            model.predict(pixels * 255)
    for folder in ("mine", "saved"):
        with torch.no_grad():
            outputs = moretta.load(here / folder, allow_code=True)(torch.tensor(pixels)).numpy()
        np.testing.assert_allclose(probabilities(outputs, "mse"), wanted, atol=1e-5)
        for rows in ("scans", *(f"{name}.npz" for name in arrays)):
            predict(here / folder, here / rows, here / "out.npy")
            np.testing.assert_allclose(probabilities(np.load(here / "out.npy"), "mse"), wanted, atol=1e-5)
    onnxruntime = pytest.importorskip("onnxruntime")
    export(here / "mine", here / "model.onnx")
    (outputs,) = onnxruntime.InferenceSession(str(here / "model.onnx")).run(None, {"x": pixels})
    np.testing.assert_allclose(probabilities(outputs, "mse"), wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "sentence"), [((48, 12), "12 x 48 pixels"), ((12, 12, 3), "coloured"), ((24, 24), "24")]
)
def test_what_training_refuses_is_not_predicted(here: Path, shape: tuple[int, ...], sentence: str) -> None:
    (here / "run.toml").write_text(RUN.replace("image-size = 8\nchannels = 1\n", ""))
    federation_of(run_files.load(here / "run.toml"), here / "mine").train(1)
    for alone in (True, False):
        new = here / f"new-{alone}"
        new.mkdir()
        Image.fromarray(np.full((12, 12), 9, np.uint8)).save(new / "a.png")
        Image.fromarray(np.full(shape, 9, np.uint8)).save(new / "b.png")
        if alone:
            (new / "a.png").unlink()
        with pytest.raises(ParameterError, match=f"{sentence}|expected rows of shape"):
            predict(here / "mine", new, here / "out.csv")


def test_a_site_s_own_table_of_images_is_read_as_its_silo_toml_says(here: Path) -> None:
    assert call("train", "run.toml", "--out", "mine").code == 0
    table = (here / "labels.csv").read_text()
    (here / "scans" / "plain.csv").write_text(table)
    own = table.replace("file,", "Datei,").replace("finding", "Befund").replace("clear", "frei").replace(",", ";")
    (here / "scans" / "eigene.csv").write_text(own)
    mapping = 'rename = { Datei = "file", Befund = "finding" }\nrecode.Befund = { frei = "clear", nodule = "nodule" }'
    (here / "silo.toml").write_text(f'{SILO}separator = ";"\n[mapping]\n{mapping}')
    told = []
    for name, more in (("plain", ()), ("eigene", ("--silo-file", "silo.toml"))):
        words = ("mine", "--data", f"scans/{name}.csv", *more)
        done = call("predict", *words, "--out", f"{name}.csv")
        assert done.code == 0, done.err
        told.append(call("evaluate", *words, "--json").told)
    assert (here / "plain.csv").read_text() == (here / "eigene.csv").read_text()
    assert told[0] == told[1]
    folder = call("predict", "mine", "--data", "scans", "--out", "all.csv", "--silo-file", "silo.toml")
    assert (
        folder.sentence
        == "scans: [mapping] of silo.toml is for tables, and this is another file; leave out --silo-file"
    )


def test_a_server_of_sites_knows_the_shape_of_masks_by_the_schema(here: Path) -> None:
    (here / "schema.toml").write_text(
        '[columns.file]\nkind = "file"\n[columns.mask]\nkind = "target"\nmask-values = [0, 255]\n'
    )
    (here / "segmenter.py").write_text("from torch import nn\ndef net():\n    return nn.Conv2d(1, 2, 3, padding=1)\n")
    model = 'source = "segmenter:net"\n[protocol]\nname = "pbpfl"\nloss = "mse"'
    text = SITES.replace('source = "mlp"\nhidden = [4]\n[protocol]\nname = "fedsgd"', model)
    (here / "sites.toml").write_text(text)
    lines = ["file,mask"]
    for number in range(ROWS):
        pixels = np.random.default_rng(number).integers(0, 2, (12, 12)) * 255
        Image.fromarray(pixels.astype(np.uint8)).save(here / "scans" / f"mask-{number}.png")
        lines.append(f"{number}.png,mask-{number}.png")
    (here / "labels.csv").write_text("\n".join([*lines, ""]))
    run_file = run_files.load(here / "sites.toml")
    server = shared_settings.server_side(run_file, here / "out")
    told = run_files.loads(shared_settings.shared_text(run_file), here / "told.toml", ["segmenter:net"])
    site = shared_settings.site_side(told, silo_file.load(here / "silo.toml"))
    said = [inputs_of(one, Preparation.nothing())["mask"] for one in (server, site)]
    assert said == [[8, 8], [8, 8]]
    assert next(silo for silo in site.silos if not silo.remote).y.shape == (18, 64, 2)
