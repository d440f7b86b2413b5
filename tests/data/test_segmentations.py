"""Masks as DICOM segmentations: whose pixels a frame has, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_cli import call
from test_dicom import dicom

from moretta.contract import memory
from moretta.data.images import scans
from moretta.data.images.folder import read_labelled
from moretta.data.images.masks import Segmentation
from moretta.data.images.pixels import ImageForm
from moretta.data.reading import ExpectedRows, Source, read
from moretta.data.tables import schema
from moretta.errors import ParameterError

pydicom = pytest.importorskip("pydicom")
from pydicom.dataset import Dataset, FileMetaDataset  # noqa: E402
from pydicom.encaps import encapsulate  # noqa: E402
from pydicom.pixels.utils import pack_bits  # noqa: E402
from pydicom.uid import UID, ExplicitVRLittleEndian  # noqa: E402

A, B = "2.25.10", "2.25.11"  # images
LEFT = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
RIGHT = np.array([[0, 0, 1], [0, 0, 1], [0, 0, 0]])
BOTTOM = np.array([[0, 0, 0], [0, 0, 0], [1, 1, 1]])
NUMBERS = LEFT + 2 * RIGHT
Frame = tuple[int | None, str | None, np.ndarray]  # segment, image, pixels
PAIR: list[Frame] = [(1, A, LEFT), (2, A, RIGHT)]
MAP: list[Frame] = [(None, A, NUMBERS)]
SEQUENCES = {
    "ImagePositionPatient": "PlanePositionSequence",
    "ImageOrientationPatient": "PlaneOrientationSequence",
    "PixelSpacing": "PixelMeasuresSequence",
}


def described(**tags: Any) -> Dataset:
    """Return an item; a list is a sequence, and None is left out."""
    item = Dataset()
    for name, value in tags.items():
        if value is not None:
            setattr(item, name, value)
    return item


def frame_of(segment: int | None, image: str | None, **place: Any) -> Dataset:
    source = image and [described(ReferencedSOPInstanceUID=image)]
    return described(
        SegmentIdentificationSequence=segment and [described(ReferencedSegmentNumber=segment)],
        DerivationImageSequence=source and [described(SourceImageSequence=source)],
        **{SEQUENCES[name]: [described(**{name: value})] for name, value in place.items()},
    )


def segmentation(frames: list[Frame] = PAIR, kind: str = "BINARY", bits: int = 1, **tags: Any) -> bytes:
    """Return a file of segments; a tag of None is left out."""
    stored = np.stack([pixels for *_, pixels in frames])
    data = pack_bits(stored) if bits == 1 else stored.astype(f"<u{bits // 8}").tobytes()
    images = sorted({image for _, image, _ in frames if image})
    place = tags.pop("place", {})
    file = described(**{
        "SOPClassUID": f"1.2.840.10008.5.1.4.1.1.66.{7 if kind == 'LABELMAP' else 4}", "SegmentationType": kind,
        "PatientName": "Rossi^Lucia", "NumberOfFrames": len(frames), "Rows": stored.shape[1],
        "Columns": stored.shape[2], "SamplesPerPixel": 1, "PhotometricInterpretation": "MONOCHROME2",
        "BitsAllocated": bits, "BitsStored": bits, "HighBit": bits - 1, "PixelRepresentation": 0,
        "SegmentSequence": [described(SegmentNumber=number, SegmentLabel="tumour") for number in (1, 2, 3)],
        "ReferencedSeriesSequence": [
            described(ReferencedInstanceSequence=[described(ReferencedSOPInstanceUID=image) for image in images])
        ] if images else None,
        "PerFrameFunctionalGroupsSequence": [frame_of(segment, image, **place) for segment, image, _ in frames],
        "PixelData": data + b"\0" * (len(data) % 2),
    } | tags)  # fmt: skip
    file.file_meta = FileMetaDataset()
    file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file.file_meta.MediaStorageSOPClassUID, file.file_meta.MediaStorageSOPInstanceUID = UID("1.2.840.1"), UID("2.25.1")
    if "PixelData" in file:
        file["PixelData"].VR = "OW" if bits > 8 else "OB"
    stream = io.BytesIO()
    pydicom.dcmwrite(stream, file, enforce_file_format=True)
    return stream.getvalue()


def resaved(content: bytes, syntax: str, frame: bytes | None = None) -> bytes:
    """Return a file in another transfer syntax. frame: its only frame, where that is compressed already."""
    file, uid = pydicom.dcmread(io.BytesIO(content)), getattr(pydicom.uid, syntax)
    if syntax == "RLELossless":
        file.compress(uid)
    file.file_meta.TransferSyntaxUID = uid
    if frame is not None:
        file.PixelData = encapsulate([frame])
    stream = io.BytesIO()
    pydicom.dcmwrite(stream, file, enforce_file_format=True)
    return stream.getvalue()


def compressed(kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(NUMBERS.astype(np.uint8)).save(stream, kind, **options)
    return stream.getvalue()


def table(*values: int) -> schema.Schema:
    target = {"kind": "target", "mask-values": list(values or (0, 1, 2, 3))}
    return schema.of({"columns": {"file": {"kind": "file"}, "mask": target}})


def folder(at: Path, *rows: tuple[str, bytes, str]) -> Path:
    """Write images and the masks that a table names for them. rows: an image's name, its file, and its mask's name."""
    for name, content, _ in rows:
        (at / name).write_bytes(content)
    (at / "labels.csv").write_text("\n".join(["file,mask", *(f"{name},{mask}" for name, _, mask in rows), ""]))
    return at


def image(instance: str | None = A, **tags: Any) -> bytes:
    return dicom(np.arange(9, dtype=np.uint8).reshape(3, 3), SOPInstanceUID=instance, **tags)


def png() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((3, 3), 50, np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def masks(at: Path, *values: int) -> np.ndarray:
    return np.asarray(read_labelled(at, at / "labels.csv", ImageForm(), table(*values)).y)


def mask(at: Path, content: bytes, shown: bytes | None = None) -> np.ndarray:
    """Return the mask of one image."""
    (at / "s.dcm").write_bytes(content)
    return masks(folder(at, ("a.dcm", image() if shown is None else shown, "s.dcm")))[0]


def test_images_of_one_file_have_the_frames_that_refer_to_them(tmp_path: Path) -> None:
    frames: list[Frame] = [
        (1, A, LEFT),
        (3, B, BOTTOM),
        (2, A, RIGHT),
    ]  # of 9 bits: none begins with a byte but the first
    (tmp_path / "s.dcm").write_bytes(segmentation(frames))
    at = folder(tmp_path, ("b.dcm", image(B), "s.dcm"), ("a.dcm", image(A), "s.dcm"))
    np.testing.assert_array_equal(masks(at), [3 * BOTTOM, NUMBERS])


def test_an_image_without_frames_is_outside_of_all_segments(tmp_path: Path) -> None:
    series = [described(ReferencedInstanceSequence=[described(ReferencedSOPInstanceUID=name) for name in (A, B)])]
    assert not mask(tmp_path, segmentation(ReferencedSeriesSequence=series), image(B)).any()


@pytest.mark.parametrize("bits", [8, 16])
def test_the_pixels_of_a_label_map_are_numbers_of_segments(tmp_path: Path, bits: int) -> None:
    (tmp_path / "s.dcm").write_bytes(segmentation([(None, A, NUMBERS), (None, B, 3 * BOTTOM)], "LABELMAP", bits))
    at = folder(tmp_path, ("b.dcm", image(B), "s.dcm"), ("a.dcm", image(A), "s.dcm"))
    np.testing.assert_array_equal(masks(at), [3 * BOTTOM, NUMBERS])


@pytest.mark.parametrize("shown", [image(), image(None), png()])
def test_frames_that_refer_to_no_image_are_those_of_one(tmp_path: Path, shown: bytes) -> None:
    np.testing.assert_array_equal(mask(tmp_path, segmentation([(1, None, LEFT), (2, None, RIGHT)]), shown), NUMBERS)


def test_what_all_frames_share_is_said_once(tmp_path: Path) -> None:
    own = [described()]
    content = segmentation(
        [(1, A, LEFT)], SharedFunctionalGroupsSequence=[frame_of(2, A)], PerFrameFunctionalGroupsSequence=own
    )
    np.testing.assert_array_equal(mask(tmp_path, content), 2 * LEFT)


@pytest.mark.parametrize(
    ("name", "value", "near", "far"),
    [
        ("ImagePositionPatient", [0.0, 0.0, 5.0], [0.0, 0.0, 5.004], [0.0, 0.0, 5.02]),
        ("ImageOrientationPatient", [1.0, 0.0, 0, 0, 1, 0], [1.0, 2e-5, 0, -2e-5, 1, 0], [1.0, 0.005, 0, -0.005, 1, 0]),
        ("PixelSpacing", [0.703125, 0.703125], [0.7031, 0.7031], [0.703125, 0.709]),
        ("PixelSpacing", [0.07, 0.07], [0.070001, 0.07], [0.07005, 0.07]),
    ],
)
def test_a_frame_lies_where_its_image_lies(tmp_path: Path, name: str, value: Any, near: Any, far: Any) -> None:
    content = segmentation(place={name: value})
    np.testing.assert_array_equal(mask(tmp_path, content, image(**{name: near})), NUMBERS)
    with pytest.raises(ParameterError, match=rf"row 1: the mask is placed differently from its image \({name}\)"):
        mask(tmp_path, content, image(**{name: far}))


@pytest.mark.parametrize(
    "content",
    [
        resaved(segmentation(), "DeflatedExplicitVRLittleEndian"),
        resaved(segmentation(), "ImplicitVRLittleEndian"),
        resaved(segmentation(MAP, "LABELMAP", 8), "DeflatedExplicitVRLittleEndian"),
        resaved(segmentation([*MAP, (None, B, 3 * BOTTOM)], "LABELMAP", 8), "RLELossless"),
        resaved(segmentation([*MAP, (None, B, 3 * BOTTOM)], "LABELMAP", 16), "RLELossless"),
        resaved(segmentation(MAP, "LABELMAP", 8), "JPEG2000Lossless", compressed("JPEG2000", no_jp2=True)),
        segmentation(MAP, "LABELMAP", 8, LossyImageCompression="00"),
        segmentation(LossyImageCompression="01"),  # of the images on which its segments were drawn
    ],
)
def test_files_whose_compression_loses_nothing_are_read(tmp_path: Path, content: bytes) -> None:
    np.testing.assert_array_equal(mask(tmp_path, content), NUMBERS)


def test_a_file_takes_no_more_memory_than_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = segmentation([(1, None, LEFT)])
    read = Segmentation(plain, "row 1")
    monkeypatch.setattr(memory, "CHECKED_BYTES", 0)
    for module in (memory, scans):
        monkeypatch.setattr(module, "free_memory", lambda: 200)  # 24 bytes for each of 9 pixels are 216
    with pytest.raises(ParameterError, match=r"row 1 takes .* GiB of memory"):
        read.pixels(None, "row 1")
    with pytest.raises(ParameterError, match=r"row 1 takes .* GiB of memory"):
        Segmentation(resaved(plain, "DeflatedExplicitVRLittleEndian"), "row 1")


WIDE = np.zeros((3, 4), np.int64)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (segmentation(kind="FRACTIONAL", bits=8), "has fractions of segments; export it as binary segments"),
        (segmentation([(1, A, LEFT), (2, A, LEFT)]), "has pixels of two segments"),
        (segmentation([(1, A, WIDE)]), "has 4 x 3 pixels, and its image 3 x 3"),
        (segmentation(SegmentSequence=[]), "has no segments"),
        (segmentation(SegmentSequence=None), "has no segments"),
        (segmentation([(4, A, LEFT)]), "has frames of segments that it does not declare"),
        (segmentation([(1, B, LEFT)]), "refers to other images"),
        (segmentation([(1, A, LEFT), (1, A, RIGHT)]), "has several frames that may be its image's"),
        (segmentation([(1, None, LEFT), (1, None, RIGHT)]), "has several frames that may be its image's"),
        (segmentation([(None, A, NUMBERS)] * 2, "LABELMAP", 8), "has several frames that may be its image's"),
        (segmentation([(1, A, LEFT), (2, None, RIGHT)]), "has frames that refer to none of its images"),
        (segmentation([(None, A, LEFT)]), "does not describe its frames as a DICOM segmentation should"),
        (segmentation(PerFrameFunctionalGroupsSequence=[frame_of(1, A)]), "does not describe each of its frames"),
        (segmentation(NumberOfFrames=1 << 15), "has more than 89,478,485 pixels or 16,384 frames"),
        (segmentation(Rows=65535, Columns=65535), "has more than 89,478,485 pixels"),
        (segmentation(kind="SURFACE"), "has the segmentation type SURFACE"),
        (segmentation(bits=8), "has the segmentation type BINARY, BitsAllocated 8 and SamplesPerPixel 1;"),
        (segmentation(SamplesPerPixel=3), "has the segmentation type BINARY, BitsAllocated 1 and SamplesPerPixel 3;"),
        *(
            (
                resaved(segmentation(MAP, "LABELMAP", 8), syntax, frame),
                rf"has numbers that compression may have changed \(transfer syntax {syntax}\)",
            )
            for syntax, frame in (
                ("JPEGBaseline8Bit", compressed("JPEG", quality=50)),
                ("JPEGLSNearLossless", b"\0\0"),
                ("JPEG2000", compressed("JPEG2000", no_jp2=True)),
            )
        ),
        (
            segmentation(MAP, "LABELMAP", 8, LossyImageCompression="01"),
            r"has numbers that compression may have changed \(LossyImageCompression is 01\)",
        ),
        (segmentation(PixelData=b"\1\2"), "has pixels that cannot be decoded"),
        (segmentation(PixelData=None), "has pixels that cannot be decoded"),
        (segmentation(Rows=None), "does not describe its frames as a DICOM segmentation should"),
        (segmentation(place={"ImagePositionPatient": [0.0, 1.0]}), "does not describe where its frames lie"),
        (image(), "is not a DICOM segmentation; save the mask as one"),
        (segmentation()[:200], "is not a (readable )?DICOM"),
        (bytes(128) + b"DICM" + b"\xff" * 300, "is not a (readable )?DICOM"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused_by_one_sentence(tmp_path: Path, content: bytes, problem: str) -> None:
    with pytest.raises(ParameterError, match=f"labels.csv row 1: the mask {problem}") as error:
        mask(tmp_path, content, image(ImagePositionPatient=[0, 0, 5]))
    assert not any(word in str(error.value) for word in ("\n", "Rossi", "tumour", A, B))


def test_frames_of_several_images_need_images_that_say_which(tmp_path: Path) -> None:
    content = segmentation([(1, A, LEFT), (2, B, RIGHT)])
    with pytest.raises(ParameterError, match="has several frames that may be its image's"):
        mask(tmp_path, content, png())


def test_a_segment_that_is_no_class_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.dcm").write_bytes(segmentation())
    with pytest.raises(ParameterError, match="row 1: the mask has pixels of 2; expected those of mask-values"):
        masks(folder(tmp_path, ("a.dcm", image(), "s.dcm")), 0, 1)


@pytest.mark.parametrize(
    ("refers", "first", "second"),
    [
        (None, png(), png()),
        (None, image(None), image(None)),
        (None, image(A), image(B)),
        (A, image(A), image(A)),
        (A, png(), image(A)),
        (A, image(A), png()),
    ],
)
def test_one_mask_for_two_images_needs_images_that_differ(
    tmp_path: Path, refers: str | None, first: bytes, second: bytes
) -> None:
    (tmp_path / "s.dcm").write_bytes(segmentation([(1, refers, LEFT)]))
    at = folder(tmp_path, ("a.dcm", first, "s.dcm"), ("b.dcm", second, "s.dcm"))
    with pytest.raises(ParameterError, match=r"row 2: the mask names the same file as labels\.csv row 1: the mask"):
        masks(at)


RUN = """[run]
seed = 5
rounds = 1
[data]
source = "image-folder"
path = "scans"
labels = "labels.csv"
schema = "schema.toml"
image-size = 4
test-fraction = 0.25
silos = 3
batch-size = 2
[model]
source = "segmenter:net"
[protocol]
name = "pbpfl"
loss = "mse"
"""


def test_a_run_a_site_and_an_evaluation_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scans").mkdir()
    rows = [(f"{number}.dcm", image(f"2.25.{20 + number}"), "s.dcm") for number in range(12)]
    frames: list[Frame] = [(1 + number % 2, f"2.25.{20 + number}", LEFT) for number in range(12)]
    (folder(tmp_path / "scans", *rows) / "s.dcm").write_bytes(segmentation(frames))
    (tmp_path / "scans" / "labels.csv").rename("labels.csv")
    (tmp_path / "schema.toml").write_text(
        '[columns.file]\nkind = "file"\n[columns.mask]\nkind = "target"\nmask-values = [0, 1, 2]\n'
    )
    (tmp_path / "segmenter.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Conv2d(1, 3, 3, padding=1)\n"
    )
    (tmp_path / "run.toml").write_text(RUN)
    done = call("train", "run.toml", "--out", "mine")
    assert done.code == 0, done.err
    (tmp_path / "labels.csv").rename(tmp_path / "scans" / "labels.csv")
    scored = call("evaluate", "mine", "--data", "scans/labels.csv", "--json")
    assert scored.code == 0, scored.err
    assert {"dice_1", "dice_2"} <= set(scored.told["figures"])
    assert call("predict", "mine", "--data", "scans/labels.csv", "--out", "masks.npz").code == 0
    assert np.load("masks.npz")["prediction"].shape == (12, 4, 4)
    source = Source("image-folder", path=Path("scans"), labels=Path("scans/labels.csv"), base=tmp_path)
    site = read(source, ExpectedRows.of_table(schema.load(Path("schema.toml")), image=ImageForm(size=4)), "site")
    assert site.y.shape == (12, 16, 2)
    assert set(np.unique(site.y[::2, :, 0])) == {0, 1}
    assert set(np.unique(site.y[1::2, :, 0])) == {0, 2}
