"""Masks as files beside images: which class a pixel is of, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from moretta.data.datasets import load
from moretta.data.images.folder import read_labelled
from moretta.data.images.pixels import ImageForm
from moretta.data.reading import ExpectedRows, Source, read
from moretta.data.rows import as_positions
from moretta.data.settings import Data
from moretta.data.tables import schema
from moretta.errors import ParameterError

MASK = np.array([[0, 255, 128], [255, 0, 0]], np.uint8)


def table(values: Any = (0, 255), ignored: int | None = 128) -> schema.Schema:
    target = {"kind": "target", "mask-values": list(values)} | ({} if ignored is None else {"mask-ignored": ignored})
    return schema.of({"columns": {"file": {"kind": "file"}, "mask": target}})


def folder(at: Path, mask: Any = MASK, count: int = 1) -> Path:
    lines = ["file,mask"]
    for number in range(count):
        Image.fromarray(np.full((2, 3), 50, np.uint8)).save(at / f"i{number}.png")
        (mask if isinstance(mask, Image.Image) else Image.fromarray(mask)).save(at / f"m{number}.png")
        lines.append(f"i{number}.png,m{number}.png")
    (at / "labels.csv").write_text("\n".join([*lines, ""]))
    return at


def masks(at: Path, told: schema.Schema, form: ImageForm | None = None) -> np.ndarray:
    return as_positions(read_labelled(at, at / "labels.csv", form or ImageForm(size=2), told).y, "masks")


def test_pixels_are_classes_by_their_values(tmp_path: Path) -> None:
    y = masks(folder(tmp_path), table(), ImageForm(size=6))
    assert y.shape == (1, 36, 2)
    classes, weights = y[0].reshape(6, 6, 2).transpose(2, 0, 1)
    assert (weights == 0).sum() == 6  # of the pixel that does not count, made six
    assert classes[0].tolist() == [0, 0, 1, 1, 0, 0]
    assert classes[5].tolist() == [1, 1, 0, 0, 0, 0]


def test_a_palette_s_places_and_sixteen_bits_are_numbers(tmp_path: Path) -> None:
    palette = Image.fromarray(np.array([[0, 2, 1], [1, 1, 0]], np.uint8)).convert("P")
    palette.putdata([0, 2, 1, 1, 1, 0])
    assert masks(folder(tmp_path, palette), table((0, 1, 2), None), ImageForm(size=6))[0, 2, 0] == 2
    deep = np.array([[0, 1000, 0], [0, 0, 0]], np.uint16)
    assert masks(folder(tmp_path, deep), table((0, 1000), None), ImageForm(size=6))[0, 2, 0] == 1


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.float32])
def test_a_plane_of_a_volume_is_a_mask(tmp_path: Path, kind: Any) -> None:
    nibabel = pytest.importorskip("nibabel")
    volume = np.zeros((4, 4, 1), kind)
    volume[3, 3, 0] = 7
    image = nibabel.Nifti1Image(np.full((4, 4, 1), 9, np.uint8), np.eye(4))
    image.to_filename(tmp_path / "i.nii")
    nibabel.Nifti1Image(volume, np.eye(4)).to_filename(tmp_path / "m.nii")
    (tmp_path / "labels.csv").write_text("file,mask\ni.nii,m.nii\n")
    y = masks(tmp_path, table((0, 7), None), ImageForm())
    assert y[0, :, 0].tolist() == [1.0] + [0.0] * 15  # the patient's right and front stand first
    if kind is not np.uint8:
        volume[0, 0, 0] = -1
        nibabel.Nifti1Image(volume, np.eye(4)).to_filename(tmp_path / "m.nii")
        with pytest.raises(ParameterError, match="the mask has pixels of -1"):
            masks(tmp_path, table((0, 7), None), ImageForm())


@pytest.mark.parametrize(
    ("mask", "told", "form", "said"),
    [
        (MASK, table(ignored=None), {"size": 2}, r"row 1: the mask has pixels of 128; expected those of mask-val"),
        (np.zeros((3, 3), np.uint8), table(), {"size": 2}, "row 1: the mask has 3 x 3 pixels, and its image 3 x 2"),
        (np.zeros((2, 3, 3), np.uint8), table(), {"size": 2}, "the mask has colours; save it grey"),
        (MASK, table(), {"size": 2, "spacing": 1.0}, "spacing"),
    ],
)  # fmt: skip
def test_masks_that_do_not_fit_are_refused(
    tmp_path: Path, mask: np.ndarray, told: schema.Schema, form: dict[str, Any], said: str
) -> None:
    with pytest.raises(ParameterError, match=said):
        masks(folder(tmp_path, mask), told, ImageForm(**form))


@pytest.mark.parametrize(
    ("tags", "said"),
    [
        ({274: 3}, "row 1: the mask is a TIFF with an orientation tag; save it upright, without the tag"),
        ({339: 2}, "row 1: the mask is a TIFF with signed numbers of 8 bits; save it with unsigned ones"),
        ({262: 0}, "row 1: the mask is a TIFF whose 0 is white; save it with 0 as black"),
    ],
)
def test_a_tiff_whose_numbers_pillow_would_change_is_refused(tmp_path: Path, tags: dict[int, int], said: str) -> None:
    """Pillow turns a mask with the tag and not its image, so that they were a mirrored pair."""
    folder(tmp_path)
    (tmp_path / "labels.csv").write_text("file,mask\ni0.png,m0.tif\n")
    for given in ({}, tags):
        Image.fromarray(MASK).save(tmp_path / "m0.tif", tiffinfo=given)
        if not given:
            assert masks(tmp_path, table(), ImageForm(size=6))[0, 2, 0] == 1
    with pytest.raises(ParameterError, match=said):
        masks(tmp_path, table())


def test_a_file_that_is_no_mask_is_refused(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "m0.png").write_bytes(b"\xff\xd8\xff no mask")
    with pytest.raises(ParameterError, match="row 1: the mask is not a readable PNG, TIFF, NIfTI or DICOM file"):
        masks(tmp_path, table())


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ({"mask-values": [0]}, "mask-values: expected two or more different numbers"),
        ({"mask-values": [0, 1], "mask-ignored": 1}, "mask-ignored another one"),
        ({"mask-values": [0, 1], "classes": ["a", "b"]}, "and no classes or range"),
        ({"mask-ignored": 1}, "mask-ignored needs mask-values"),
    ],
)
def test_a_schema_says_what_pixels_hold(target: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        schema.of({"columns": {"file": {"kind": "file"}, "mask": {"kind": "target"} | target}})


def test_masks_need_images() -> None:
    with pytest.raises(ParameterError, match="mask-values are for masks of images"):
        schema.of({"columns": {"a": {"kind": "number"}, "mask": {"kind": "target", "mask-values": [0, 1]}}})


def test_a_run_and_a_site_read_masks(tmp_path: Path) -> None:
    folder(tmp_path, count=5)
    data = Data(source="image-folder", path=Path("."), labels=Path("labels.csv"), image_size=4, silos=2)
    split = load(data, table(), base=tmp_path)
    assert (split.task, split.classes, split.outputs, split.train.y.shape) == ("regression", None, 2, (4, 16, 2))
    expected = ExpectedRows.of_table(table(), image=ImageForm(size=4))
    assert expected.outputs == 2  # for the model that a site builds
    rows = read(Source("image-folder", path=Path("."), labels=Path("labels.csv"), base=tmp_path), expected, "site")
    assert rows.y.shape == (5, 16, 2)


def test_a_mask_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path)
    read_bytes = Path.read_bytes

    def refusing(path: Path) -> bytes:
        if path.name == "m0.png":
            raise PermissionError(13, "Permission denied")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refusing)
    with pytest.raises(ParameterError, match="row 1: the mask: the file cannot be read"):
        masks(tmp_path, table())
