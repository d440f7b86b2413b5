"""Folders of images with a table of labels: what becomes of files, and one sentence for each that does not fit."""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splits import distribute, load
from test_dicom import dicom

from moretta.contract.lazy_rows import LazyRows
from moretta.data.images import folder as folders
from moretta.data.images.folder import read_labelled, read_unlabelled
from moretta.data.images.pixels import ImageForm, read_image
from moretta.data.reading import ExpectedRows, Source
from moretta.data.reading import read as read_rows
from moretta.data.rows import Rows, Split
from moretta.data.silo import Silo
from moretta.data.tables import schema
from moretta.errors import MissingExtra, ParameterError

Image = pytest.importorskip("PIL.Image")
RANDOM = np.random.default_rng(0)
GREY = RANDOM.integers(0, 256, (6, 6), np.uint8)
COLOURED = RANDOM.integers(0, 256, (6, 6, 3), np.uint8)
LABELS = schema.of({"columns": {"file": {"kind": "file"}, "label": {"kind": "target", "classes": ["fine", "ill"]}}})
NAMED = schema.of({"columns": LABELS.plain()["columns"] | {"patient": {"kind": "group"}, "row": {"kind": "id"}}})


def save(path: Path, pixels: np.ndarray = GREY, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)


def table(folder: Path, *lines: str, header: str = "file,label") -> Path:
    (folder / "labels.csv").write_text("\n".join([header, *lines, ""]))
    return folder / "labels.csv"


def one(folder: Path, name: str, form: ImageForm | None = None) -> np.ndarray:
    """Return the pixels of one file."""
    return read(folder, table(folder, f"{name},ill"), form).x[0]


def read(folder: Path, labels: Path, form: ImageForm | None = None, **options: Any) -> Rows:
    return rows_of(folder, labels, form or ImageForm(), LABELS, **options)


def rows_of(*args: Any, **options: Any) -> Rows:
    found = read_labelled(*args, **options)
    return Rows(found.x, found.y, found.ids, found.groups)


def scans(folder: Path, rows: int = 20) -> Path:
    """Write images whose grey is their number, with their labels; return the table."""
    for number in range(rows):
        save(folder / "scans" / f"{number:03}.png", np.full((4, 4), number, np.uint8))
    lines = (f"{number:03}.png,{'ill' if number % 2 else 'fine'},p{number // 2},r{number}" for number in range(rows))
    return table(folder, *lines, header="file,label,patient,row")


def dataset(folder: Path, **settings: Any) -> Split:
    scans(folder)
    return load("image-folder", path="scans", labels="labels.csv", target="label", base=folder, **settings)


# -- what becomes of a file --------------------------------------------------------------------------------------------


def test_files_of_any_kind_become_fractions(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    save(tmp_path / "a.tif")
    save(tmp_path / "c.png", COLOURED)
    save(tmp_path / "deep.png", GREY.astype(np.uint16) * 257)
    save(tmp_path / "deep.tiff", GREY.astype(np.uint16) * 257)
    (tmp_path / "scan.dcm").write_bytes(dicom(GREY))
    for name in ("a.png", "a.tif", "deep.png", "deep.tiff", "scan.dcm"):
        found = one(tmp_path, name)
        assert (found.dtype, found.shape) == (np.float32, (1, 6, 6))
        np.testing.assert_allclose(found[0], GREY / 255, atol=1e-6)
    np.testing.assert_allclose(one(tmp_path, "c.png"), COLOURED.transpose(2, 0, 1) / 255, atol=1e-6)
    smooth = np.add.outer(np.arange(8, dtype=np.uint8), np.arange(8, dtype=np.uint8)) * 10
    save(tmp_path / "a.jpg", smooth, quality=100)
    np.testing.assert_allclose(one(tmp_path, "a.jpg")[0], smooth / 255, atol=0.02)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 12, 16])
@pytest.mark.parametrize("white_is_zero", [False, True])
def test_greys_of_a_tiff_are_fractions_of_its_bits(bits: int, *, white_is_zero: bool) -> None:
    most = 2**bits - 1
    stored = np.array([[0, most, most // 2, most // 3], [most, 0, most // 5, 0]])
    digits = (stored[..., None] >> np.arange(bits)[::-1] & 1).reshape(2, -1)
    packed = stored.astype("<u2").tobytes() if bits == 16 else np.packbits(digits.astype(bool), axis=1).tobytes()
    tags = [(256, 4), (257, 2), (258, bits), (259, 1), (262, 0 if white_is_zero else 1), (273, 8), (277, 1), (278, 2)]
    tags.append((279, len(packed)))
    entries = b"".join(struct.pack("<HHII", tag, 3, 1, value) for tag, value in tags)
    start = 8 + len(packed)
    content = b"II*\0" + struct.pack("<I", start) + packed + struct.pack("<H", len(tags)) + entries + bytes(4)
    if white_is_zero and bits == 12:  # which Pillow does not read
        with pytest.raises(ParameterError, match="is not a readable"):
            read_image(content, "a.tif", ImageForm())
        return
    found = read_image(content, "a.tif", ImageForm())[0][0]
    np.testing.assert_allclose(found, 1 - stored / most if white_is_zero else stored / most, atol=1e-6)


@pytest.mark.parametrize(("mode", "channels"), [("1", 1), ("LA", 1), ("P", 3), ("RGBA", 3), ("CMYK", 3)])
def test_other_modes_are_grey_or_coloured(tmp_path: Path, mode: str, channels: int) -> None:
    Image.fromarray(COLOURED).convert(mode).save(tmp_path / "a.tiff")
    found = one(tmp_path, "a.tiff")
    assert found.shape == (channels, 6, 6)
    assert 0 <= found.min() < found.max() <= 1


def test_channels_and_size_are_made_as_asked(tmp_path: Path) -> None:
    save(tmp_path / "grey.png")
    save(tmp_path / "coloured.png", COLOURED)
    three = one(tmp_path, "grey.png", ImageForm(channels=3))
    np.testing.assert_array_equal(three, np.repeat(one(tmp_path, "grey.png"), 3, axis=0))
    luminance = np.asarray(Image.fromarray(COLOURED).convert("L"))
    np.testing.assert_allclose(one(tmp_path, "coloured.png", ImageForm(channels=1))[0], luminance / 255, atol=1 / 255)
    save(tmp_path / "wide.png", np.repeat(GREY, 4, axis=1))
    squeezed = one(tmp_path, "wide.png", ImageForm(size=3))
    reference = Image.fromarray(np.repeat(GREY, 4, axis=1)).resize((3, 3), Image.Resampling.BILINEAR)
    np.testing.assert_allclose(squeezed[0], np.asarray(reference) / 255, atol=1 / 255)


def test_spacing_keeps_the_scale_and_the_middle(tmp_path: Path) -> None:
    marked = np.zeros((8, 8), np.uint8)
    marked[2:6, 2:6] = 255  # 4 mm across at 1 mm a pixel
    (tmp_path / "fine.dcm").write_bytes(dicom(np.kron(marked, np.ones((2, 2), np.uint8)), PixelSpacing=["0.5", "0.5"]))
    (tmp_path / "coarse.dcm").write_bytes(dicom(marked, PixelSpacing=["1", "1"]))
    (tmp_path / "uneven.dcm").write_bytes(dicom(np.repeat(marked, 2, axis=0), PixelSpacing=["0.5", "1"]))
    for name in ("fine.dcm", "coarse.dcm", "uneven.dcm"):
        for size in (4, 8, 12):
            found = one(tmp_path, name, ImageForm(size=size, spacing=1.0))[0]
            assert found.shape == (size, size)
            # mm^2 that are marked, whatever the file's own pixels; halved pixels give an eighth to the one beyond an
            # edge of 4, and two edges may be cut off on each axis
            assert 16 * (7 / 8) ** 2 <= found.sum() <= 16 + 1e-5
            assert found[size // 2 - 1 : size // 2 + 1, size // 2 - 1 : size // 2 + 1].min() == 1


def test_a_window_is_applied_to_all(tmp_path: Path) -> None:
    stored = np.array([[0, 40], [100, 1000]], np.int16)
    (tmp_path / "a.dcm").write_bytes(dicom(stored))
    np.testing.assert_allclose(
        one(tmp_path, "a.dcm", ImageForm(window=(40, 400)))[0], np.clip((stored - 39.5) / 399 + 0.5, 0, 1), atol=1e-6
    )


# -- as rows of a run --------------------------------------------------------------------------------------------------


def test_rows_classes_and_ids_are_those_of_the_table(tmp_path: Path) -> None:
    data = dataset(tmp_path, id_column="row", test_fraction=0.2)
    assert (data.inputs, data.classes, data.class_names, data.standardise) == ((1, 4, 4), 2, ("fine", "ill"), False)
    assert data.train.ids is not None
    for x, y, of in zip(data.train.x, data.train.y, data.train.ids, strict=True):
        number = int(of[1:])
        np.testing.assert_allclose(x, number / 255, rtol=1e-6)
        assert y == number % 2
    assert (len(data.train.x), len(data.test.x)) == (16, 4)


def test_a_patient_is_on_one_side(tmp_path: Path) -> None:
    data = dataset(tmp_path, group_column="patient", test_fraction=0.3)
    assert data.train.groups is not None
    trained = {round(float(x[0, 0, 0]) * 255) // 2 for x in data.train.x}
    assert {f"p{patient}" for patient in trained} == set(data.train.groups)
    assert not trained & {round(float(x[0, 0, 0]) * 255) // 2 for x in data.test.x}


def test_more_than_memory_is_lazy_and_the_same(tmp_path: Path) -> None:
    args = tmp_path / "scans", scans(tmp_path), ImageForm(), NAMED
    there, lazy = (rows_of(*args, in_memory=size) for size in (20 * 64, 20 * 64 - 1))
    assert isinstance(there.x, np.ndarray)
    assert isinstance(lazy.x, LazyRows)
    np.testing.assert_array_equal(np.asarray(lazy.x), there.x)
    assert lazy.y.tolist() == there.y.tolist() == [0, 1] * 10
    assert lazy.groups is not None
    assert lazy.groups.tolist() == [f"p{number // 2}" for number in range(20)]


def test_lazy_rows_stay_so_until_they_are_dealt_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = distribute(dataset(tmp_path, validation_fraction=0.1), 3, seed=2)
    monkeypatch.setattr(folders, "IN_MEMORY", 0)
    lazy = distribute(dataset(tmp_path, validation_fraction=0.1), 3, seed=2)
    assert there.test is not None
    assert there.validation is not None
    assert lazy.test is not None
    assert lazy.validation is not None
    mine_of: list[Silo | Rows] = [*there.silos, there.test, there.validation]
    others: list[Silo | Rows] = [*lazy.silos, lazy.test, lazy.validation]
    for mine, other in zip(mine_of, others, strict=True):
        assert isinstance(other.x, LazyRows)
        np.testing.assert_array_equal(np.asarray(other.x), mine.x)
        np.testing.assert_array_equal(other.y, mine.y)
    grid = distribute(dataset(tmp_path), 2, "grid", grid=[1, 2])  # columns are dealt out in memory
    assert grid.silos[0].x.shape == (16, 8)


def test_numbers_are_regression_where_asked(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    save(tmp_path / "b.png", GREY[::-1].copy())
    table(tmp_path, "a.png,1.5", "b.png,2", header="file,age")
    data = load("image-folder", path=".", labels="labels.csv", task="regression", test_fraction=0.5, base=tmp_path)
    assert sorted([*data.train.y, *data.test.y]) == [1.5, 2]


def test_a_given_schema_numbers_the_classes_and_names_the_columns(tmp_path: Path) -> None:
    scans(tmp_path)
    told = NAMED.plain()["columns"] | {"label": {"kind": "target", "classes": ["ill", "fine"]}}
    data = load("image-folder", path="scans", labels="labels.csv", schema=schema.of({"columns": told}), base=tmp_path)
    assert data.class_names == ("ill", "fine")
    assert data.train.ids is not None
    assert data.train.y.tolist() == [1 - int(of[1:]) % 2 for of in data.train.ids]


def own_rows(folder: Path, wanted: ExpectedRows, **changes: Any) -> Rows:
    scans(folder)
    named = {"path": Path("scans"), "labels": Path("labels.csv")} | changes
    return read_rows(Source("image-folder", base=folder, **named), wanted, "silo `north`")


WANTED = ExpectedRows((3, 8, 8), False, 2, None, table=NAMED, image=ImageForm(8, 3))


def test_one_site_s_rows_are_as_the_run_wants_them(tmp_path: Path) -> None:
    read = own_rows(tmp_path, WANTED)
    assert (read.x.shape, read.y.tolist(), read.names) == ((20, 3, 8, 8), [0, 1] * 10, ())
    assert read.ids is not None
    assert read.groups is not None
    assert (read.ids[3], read.groups[3]) == ("r3", "p1")


@pytest.mark.parametrize(
    ("wanted", "changes", "sentence"),
    [
        (WANTED, {"labels": None}, 'source = "image-folder" needs path, the folder of images, and labels'),
        (replace(WANTED, table=LABELS), {}, "labels.csv: the schema lacks the column 'patient'"),
        (replace(WANTED, table=None), {}, r'needs a run whose \[data\] schema has a column of kind "file"'),
        (replace(WANTED, image=ImageForm()), {}, r"expected samples of shape \[3, 8, 8\]"),
    ],
)
def test_what_a_site_s_folder_lacks(
    tmp_path: Path, wanted: ExpectedRows, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ParameterError, match=f"silo `north`: .*{sentence}"):
        own_rows(tmp_path, wanted, **changes)


def test_a_site_with_other_rows_is_told_what_the_run_wants(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", x=np.zeros((2, 3, 8, 8)), y=[0, 1])
    with pytest.raises(ParameterError, match=r'rows are images that a table names; expected source = "image-fold'):
        read_rows(Source("rows.npz", base=tmp_path), WANTED, "silo `north`")
    with pytest.raises(ParameterError, match='path and labels are for "image-folder", not for source = '):
        read_rows(Source("rows.npz", path=Path("scans"), base=tmp_path), WANTED, "silo `north`")


# -- what does not fit -------------------------------------------------------------------------------------------------


def deep_png() -> bytes:
    """One red pixel of 16 bits a colour."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0" + struct.pack(">HHH", 200, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def deep_tiff() -> bytes:
    """The same: tags of one number each, but for three bits a colour, which lie behind them."""
    after = 8 + 2 + 9 * 12 + 4
    tags = [(256, 1, 1), (257, 1, 1), (258, 3, after), (259, 1, 1), (262, 1, 2), (273, 1, after + 6), (277, 1, 3)]
    tags += [(278, 1, 1), (279, 1, 6)]
    entries = b"".join(struct.pack("<HHII", tag, 3, count, value) for tag, count, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, 9) + entries + struct.pack("<IHHHHHH", 0, 16, 16, 16, 200, 0, 0)


def prepare(folder: Path) -> None:
    save(folder / "a.png")
    save(folder / "b.png", GREY[::-1].copy())
    save(folder / "coloured.png", COLOURED)
    save(folder / "large.png", np.zeros((9, 9), np.uint8))
    save(folder / "wide.png", np.zeros((3, 9), np.uint8))
    save(folder / "pages.tif", save_all=True, append_images=[Image.fromarray(GREY)])
    Image.fromarray(GREY.astype(np.float32)).save(folder / "floats.tif")
    save(folder / "turned.tif", tiffinfo={274: 6})
    save(folder / "signed.tif", tiffinfo={339: 2})
    (folder / "deep.png").write_bytes(deep_png())
    (folder / "deep.tif").write_bytes(deep_tiff())
    (folder / "text.png").write_text("no image at all")
    (folder / "half.png").write_bytes((folder / "a.png").read_bytes()[:60])
    (folder / "none.dcm").write_bytes(dicom(PixelData=None))
    (folder / "nospace.dcm").write_bytes(dicom())
    (folder / "far.dcm").write_bytes(dicom(PixelSpacing=["100000", "1"]))
    (folder / "folder.png").mkdir()
    (folder.parent / "outside.png").write_bytes((folder / "a.png").read_bytes())
    (folder / "link.png").symlink_to(folder.parent / "outside.png")
    (folder / "inner.png").symlink_to(folder / "a.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    os.mkfifo(folder / "pipe.png")


@pytest.mark.parametrize(
    ("second", "sentence", "form"),
    [
        ("gone.png", "this file is not in the folder of images; put it there, or remove the row", {}),
        ("folder.png", "this file is not in the folder of images", {}),
        ("pipe.png", "this file is not in the folder of images", {}),
        ("loop.png", "this file is not in the folder of images", {}),
        ("x" * 5000, "this file is not in the folder of images", {}),
        ("", "names no file; write the path of one below the folder, or remove the row", {}),
        ("../outside.png", "leads out of the folder of images; write the path of a file below it", {}),
        ("b/../../outside.png", "leads out of the folder of images", {}),
        ("..\\outside.png", "leads out of the folder of images", {}),
        ("C:\\outside.png", "leads out of the folder of images", {}),
        ("/etc/passwd", "leads out of the folder of images", {}),
        ("link.png", "leads out of the folder of images by a link; put the file itself there", {}),
        ("a.png", "names the same file as labels.csv row 1; keep one of them", {}),
        ("./a.png", "names the same file as labels.csv row 1", {}),
        ("inner.png", "names the same file as labels.csv row 1", {}),
        ("text.png", "is not a readable PNG, JPEG, TIFF, DICOM or NIfTI image; save it again or remove it", {}),
        ("half.png", "is not a readable PNG, JPEG, TIFF, DICOM or NIfTI image", {}),
        ("pages.tif", "has several pages; save each that is to be a sample as a file", {}),
        ("turned.tif", "is a TIFF with an orientation tag; save it upright, without the tag", {}),
        ("signed.tif", "is a TIFF with signed numbers of 8 bits; save it with unsigned ones", {}),
        ("deep.png", "has 16 bits a colour, of which 8 would be read; save it with 8, or grey with 16", {}),
        ("deep.tif", "has 16 bits a colour, of which 8 would be read; save it with 8, or grey with 16", {}),
        ("floats.tif", "has 32 bits a pixel, of no known range; save it with 8 or 16", {}),
        (
            "coloured.png",
            "is coloured, and the first image is grey; make all alike by channels = 1 or channels = 3",
            {},
        ),
        ("large.png", r"has 9 x 9 pixels; without image-size .*\(the first has 6 x 6\); set image-size", {}),
        ("wide.png", "has 9 x 3 pixels; without image-size all images must be squares of one size", {}),
        ("none.dcm", "has no pixels; take it out of the table of labels", {}),
        (
            "b.png",
            "is not a DICOM or NIfTI file, and window, spacing and plane need one; remove them",
            {"window": (1, 2)},
        ),
    ],
)
def test_a_bad_second_row_is_named_and_nothing_more(
    tmp_path: Path, second: str, sentence: str, form: dict[str, Any]
) -> None:
    folder = tmp_path / "images"
    prepare(folder)
    first = "none.dcm" if form else "a.png"
    if form:
        (folder / "none.dcm").write_bytes(dicom(GREY))
    labels = table(tmp_path, f"{first},ill", f'"{second}",fine')
    with pytest.raises(ParameterError, match=f"^labels.csv row 2:? {sentence}") as caught:
        read(folder, labels, ImageForm(**form))
    assert "\n" not in str(caught.value)
    if second not in ("a.png", "./a.png", ""):
        assert second not in str(caught.value)  # a name may say whom the image shows


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "nospace.dcm",
            r"row 1 lacks PixelSpacing, which spacing = 2 needs",
        ),
        ("far.dcm", "row 1 would have 2 x 150000 pixels at spacing = 2; correct spacing"),
        ("a.png", "row 1 is not a DICOM or NIfTI file, and window, spacing and plane"),
    ],
)
def test_spacing_that_cannot_be_made(tmp_path: Path, name: str, sentence: str) -> None:
    prepare(tmp_path / "images")
    with pytest.raises(ParameterError, match=sentence):
        read(tmp_path / "images", table(tmp_path, f"{name},ill"), ImageForm(size=8, spacing=2.0))


@pytest.mark.parametrize(
    ("header", "lines", "settings", "sentence"),
    [
        ("file,label", [], {}, "labels.csv has no rows; expected column names and at least one row"),
        ("name,label", ["a.png,1"], {}, 'labels.csv has no column "file" for file'),
        ("file,file,label", ["a.png,b.png,1"], {}, "labels.csv: the first line has the name of column 2 of 3 twice"),
        (
            "file,label",
            ["a.png,1"],
            {"target": "lable"},
            'labels.csv has no column "lable" for the target; did you mean',
        ),
        ("file,label", ["a.png,", "b.png,1", "c.png,2"], {}, "column 'label' is the target and lacks values in 1 of 3"),
        ("file,who,label", ["a.png,,1", "b.png,b,2"], {"group_column": "who"}, "column 'who' has no value in 1 of 2"),
        ("label,file", ["1,a.png"], {}, "file, id-column, group-column and the target must be different columns"),
        ("file,label", ["a.png,1"], {"id_column": "label"}, 'must be different columns, and "label" is the target'),
        ("file,label", ["a.png,1", "b.png,1"], {}, "column 'label' is the target and has the same value in every row"),
        ("file,label", ["a.png,1", "b.png,unknown"], {}, "column 'label' is the target"),
    ],
)
def test_tables_that_lack_something(
    tmp_path: Path, header: str, lines: list[str], settings: dict[str, Any], sentence: str
) -> None:
    prepare(tmp_path / "images")
    table(tmp_path, *lines, header=header)
    with pytest.raises(ParameterError, match=sentence):
        load("image-folder", path="images", labels="labels.csv", base=tmp_path, **settings)


def test_a_schema_has_images_or_columns_as_inputs() -> None:
    with pytest.raises(ParameterError, match="the images that file names are the inputs, so age cannot be one"):
        schema.of({"columns": LABELS.plain()["columns"] | {"age": {"kind": "number"}}})
    with pytest.raises(ParameterError, match="a and b are both of kind file"):
        schema.of({"columns": {"a": {"kind": "file"}, "b": {"kind": "file"}}})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, 'source = "image-folder" needs path, the folder of images, and labels'),
        ({"path": "scans"}, "needs path, the folder of images, and labels"),
        ({"path": "none", "labels": "labels.csv", "target": "label"}, "the folder of images .*none does not exist"),
        ({"path": "scans", "labels": "none.csv"}, "there is no file .*none.csv"),
        (
            {"path": "scans", "labels": "labels.csv", "task": "regression"},
            "is the target and holds words where a regression needs",
        ),
        ({"path": "scans", "labels": "labels.csv", "channels": 2}, "channels: expected 1 or 3, got 2"),
        ({"path": "scans", "labels": "labels.csv", "window": (1, 0)}, "expected a finite window center and a width of"),
        ({"path": "scans", "labels": "labels.csv", "spacing": 1.0}, "spacing needs image-size"),
        ({"path": "scans", "labels": "labels.csv", "encoding": "ordinal"}, "encoding is for a table of features"),
    ],
)
def test_settings_that_lack_something(tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    scans(tmp_path)
    with pytest.raises(ParameterError, match=sentence):
        load("image-folder", base=tmp_path, **settings)


@pytest.mark.parametrize("key", ["labels", "group_column", "channels", "window", "spacing", "plane"])
def test_keys_of_image_folders_are_for_them_alone(tmp_path: Path, key: str) -> None:
    value = {
        "labels": "a.csv",
        "group_column": "who",
        "channels": 1,
        "window": (1.0, 2.0),
        "spacing": 1.0,
        "plane": "axial",
    }[key]
    with pytest.raises(ParameterError, match=f"{key.replace('_', '-')} is for image-folder"):
        load("mnist", path=tmp_path, **{key: value})  # type: ignore[arg-type]


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    found = rows_of(tmp_path / "scans", scans(tmp_path), ImageForm(), NAMED, in_memory=0)
    (tmp_path / "scans" / "003.png").write_bytes((tmp_path / "scans" / "004.png").read_bytes())
    assert len(found.x[:3]) == 3
    with pytest.raises(ParameterError, match=r"labels.csv row 4: the file has changed since the run began; restore it"):
        found.x[2:5]
    (tmp_path / "scans" / "003.png").unlink()
    with pytest.raises(ParameterError, match=r"labels.csv row 4: the file cannot be read \(No such file"):
        found.x[2:5]


# -- without labels ----------------------------------------------------------------------------------------------------


def test_a_folder_by_itself_is_all_its_images_in_order(tmp_path: Path) -> None:
    save(tmp_path / "b" / "2.PNG")
    save(tmp_path / "b" / "1.tif", GREY[::-1].copy())
    save(tmp_path / ".hidden" / "0.png")
    save(tmp_path / ".0.png")
    (tmp_path / "a.dcm").write_bytes(dicom(GREY))
    (tmp_path / "notes.txt").write_text("no image")
    x, names = read_unlabelled(tmp_path, ImageForm())
    assert names == ("a.dcm", "b/1.tif", "b/2.PNG")
    np.testing.assert_allclose(x[:, 0], np.stack([GREY, GREY[::-1], GREY]) / 255, atol=1e-6)
    (tmp_path / "some.csv").write_text("file\nb/2.PNG\na.dcm\n")
    x, names = read_unlabelled(tmp_path, ImageForm(size=3, channels=3), tmp_path / "some.csv")
    assert (x.shape, names) == ((2, 3, 3, 3), ("b/2.PNG", "a.dcm"))


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="holds no images"):
        read_unlabelled(tmp_path, ImageForm())
    with pytest.raises(ParameterError, match=r"the folder of images .* does not exist"):
        read_unlabelled(tmp_path / "none", ImageForm())


@pytest.mark.parametrize(("package", "name"), [("PIL", "a.png"), ("pydicom", "scan.dcm")])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str) -> None:
    save(tmp_path / "a.png")
    (tmp_path / "scan.dcm").write_bytes(dicom(GREY))
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(MissingExtra, match=r'run: pip install "moretta\[images\]"'):
        one(tmp_path, name)
