"""DICOM images: what becomes of stored values, what is refused, and that nothing is read of the patient."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cli import call

from moretta.data.images.scans import TAGS, is_dicom, read_dicom
from moretta.errors import ParameterError

pydicom = pytest.importorskip("pydicom")
from pydicom.data import get_testdata_file  # noqa: E402
from pydicom.dataset import Dataset, FileMetaDataset  # noqa: E402
from pydicom.pixels.processing import apply_windowing  # noqa: E402
from pydicom.uid import UID, ExplicitVRLittleEndian  # noqa: E402

PATIENT = "Rossi^Lucia"
CT = np.array([[-1024, -100, 0], [30, 40, 50], [400, 1000, 3071]], np.int16)


def dicom(stored: np.ndarray = CT, **tags: Any) -> bytes:
    """Return a DICOM file of stored values; a tag of None is left out."""
    image = Dataset()
    image.file_meta = FileMetaDataset()
    image.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    image.file_meta.MediaStorageSOPClassUID = UID("1.2.840.1")
    image.file_meta.MediaStorageSOPInstanceUID = UID("2.25.1")
    image.PatientName, image.PatientID, image.PatientBirthDate = PATIENT, "PAT-0042", "19420131"
    bits = 8 * stored.dtype.itemsize
    given_tags = {
        "Rows": stored.shape[0], "Columns": stored.shape[1], "SamplesPerPixel": 1 if stored.ndim == 2 else 3,
        "PhotometricInterpretation": "MONOCHROME2" if stored.ndim == 2 else "RGB", "BitsAllocated": bits,
        "BitsStored": bits, "HighBit": bits - 1, "PixelRepresentation": int(stored.dtype.kind == "i"),
        "PlanarConfiguration": None if stored.ndim == 2 else 0,
        "PixelData": stored.tobytes() + b"\0" * (stored.nbytes % 2),
    } | tags  # fmt: skip
    for name, value in given_tags.items():
        if value is not None:
            setattr(image, name, value)
    if "PixelData" in image:
        image["PixelData"].VR = "OW" if bits > 8 else "OB"
    stream = io.BytesIO()
    pydicom.dcmwrite(stream, image, enforce_file_format=True)
    return stream.getvalue()


def pixels(content: bytes, window: tuple[float, float] | None = None) -> np.ndarray:
    found, _ = read_dicom(content, "row 3", window)
    assert (found.dtype, found.ndim) == (np.float32, 3)
    assert 0 <= found.min() <= found.max() <= 1
    return found


def test_a_file_is_known_by_its_beginning() -> None:
    assert is_dicom(dicom())
    assert not is_dicom(b"\x89PNG" + bytes(200))


def test_without_a_window_all_that_bits_hold_is_the_range() -> None:
    np.testing.assert_allclose(pixels(dicom())[0], (CT + 2.0**15) / (2**16 - 1), rtol=1e-6)
    twelve = np.array([[0, 1000, 4095]], np.uint16)
    np.testing.assert_allclose(pixels(dicom(twelve, BitsStored=12, HighBit=11))[0], twelve / 4095, rtol=1e-6)
    falling = dicom(twelve, BitsStored=12, HighBit=11, RescaleSlope="-2", RescaleIntercept="7")
    np.testing.assert_allclose(pixels(falling)[0], 1 - twelve / 4095, rtol=1e-6)


def test_rescaling_comes_before_the_window() -> None:
    stored = (CT + 1024).astype(np.uint16)
    rescaled = dicom(stored, RescaleSlope="1", RescaleIntercept="-1024")
    np.testing.assert_array_equal(pixels(rescaled, (40, 400)), pixels(dicom(CT), (40, 400)))
    expected = np.clip((CT - 39.5) / 399 + 0.5, 0, 1)  # PS3.3 C.11.2.1.2.1
    np.testing.assert_allclose(pixels(rescaled, (40, 400))[0], expected, atol=1e-6)


@given(
    st.floats(-2000, 2000).map(lambda v: round(v, 3)),
    st.floats(1, 4000).map(lambda v: round(v, 3)),
    st.sampled_from(["LINEAR", "LINEAR_EXACT", "SIGMOID", None]),
)
def test_a_file_s_own_first_window_is_as_pydicom_has_it(center: float, width: float, function: str | None) -> None:
    content = dicom(WindowCenter=[center, 1.0], WindowWidth=[width, 2.0], VOILUTFunction=function)
    image = pydicom.dcmread(io.BytesIO(content))
    with np.errstate(over="ignore"):
        reference = (apply_windowing(CT, image) + 2.0**15) / (2**16 - 1)
    np.testing.assert_allclose(pixels(content)[0], reference, atol=1e-6)


def test_a_window_asked_for_is_taken_before_the_files_own() -> None:
    own = dicom(WindowCenter="0", WindowWidth="2")
    np.testing.assert_array_equal(pixels(own, (40, 400)), pixels(dicom(), (40, 400)))
    assert not np.array_equal(pixels(own), pixels(own, (40, 400)))


def test_monochrome1_is_inverted() -> None:
    np.testing.assert_allclose(
        pixels(dicom(PhotometricInterpretation="MONOCHROME1"), (40, 400)), 1 - pixels(dicom(), (40, 400)), atol=1e-7
    )


def test_colours_are_fractions_of_their_bits() -> None:
    colours = np.random.default_rng(0).integers(0, 256, (4, 5, 3), np.uint8)
    np.testing.assert_allclose(pixels(dicom(colours)), colours.transpose(2, 0, 1) / 255, rtol=1e-6)


@pytest.mark.parametrize("name", ["MR_small_RLE.dcm", "MR_small_jp2klossless.dcm", "MR_small_bigendian.dcm"])
def test_lossless_files_are_the_plain_one(name: str) -> None:
    read = [pixels(Path(str(get_testdata_file(each))).read_bytes()) for each in ("MR_small.dcm", name)]
    np.testing.assert_array_equal(read[0], read[1])


def test_spacing_is_said_where_it_is_known() -> None:
    assert read_dicom(dicom(PixelSpacing=["0.5", "0.25"]), "row 3")[1] == (0.5, 0.25)
    assert read_dicom(dicom(), "row 3")[1] is None


MANY = np.stack([CT, CT])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (dicom(PixelData=None), "row 3 has no pixels; take it out"),
        (dicom(NumberOfFrames=2, PixelData=MANY.tobytes()), "row 3 has several frames; export each"),
        (dicom(PhotometricInterpretation="PALETTE COLOR"), "row 3 has the photometric interpretation PALETTE COLOR"),
        (dicom(ModalityLUTSequence=[Dataset()]), "row 3 has a modality look-up table"),
        *((dicom(CT, **{f"{of}FunctionalGroupsSequence": [Dataset()]}), "row 3 is an enhanced DICOM file, whose slope")
          for of in ("Shared", "PerFrame")),
        (dicom(Rows=30000, Columns=30000), "row 3 has more than 89,478,485 pixels"),
        (dicom(RescaleSlope="0", RescaleIntercept="1"), "row 3 has a rescale slope and intercept that give no values"),
        (dicom(WindowCenter="1", WindowWidth="0"), "row 3: expected a finite window center and a width of 1 or more"),
        (dicom(WindowCenter="1", WindowWidth="9", VOILUTFunction="ODD"), "row 3: its window has an unknown function"),
        (dicom(BitsStored=None), "row 3 has an invalid description of its values|row 3 has pixels that cannot be"),
        (dicom(Rows=None), "row 3 has an invalid description of its pixels"),
        (dicom(PixelData=b"\1\2"), "row 3 has pixels that cannot be decoded; export it again or remove it"),
        (dicom()[:400], "row 3 has no pixels|row 3 has an invalid|row 3 is not a readable DICOM file"),
        (b"\0" * 128 + b"DICM" + b"\xff" * 60, "row 3 is not a readable DICOM file|row 3 has no pixels"),
    ],
)  # fmt: skip
def test_bad_files_are_one_sentence(content: bytes, sentence: str) -> None:
    with pytest.raises(ParameterError, match=sentence) as caught:
        read_dicom(content, "row 3")
    assert "\n" not in str(caught.value)
    assert "Rossi" not in str(caught.value)


def test_a_compression_that_cannot_be_decoded_is_named() -> None:
    content = Path(str(get_testdata_file("MR_small_jpeg_ls_lossless.dcm"))).read_bytes()
    sentence = "row 3 has pixels that are compressed as JPEG-LS Lossless .*decompress the file"
    with pytest.raises(ParameterError, match=sentence):
        read_dicom(content, "row 3")


@given(st.lists(st.tuples(st.integers(132, 900), st.integers(0, 255)), min_size=1, max_size=6))
def test_any_broken_file_is_pixels_or_one_sentence(changes: list[tuple[int, int]]) -> None:
    content = bytearray(dicom(WindowCenter="40", WindowWidth="400", PixelSpacing=["1", "1"]))
    for place, value in changes:
        content[place % len(content)] = value
    said = ""
    try:
        pixels(bytes(content))
    except ParameterError as error:
        said = str(error)
    assert said == "" or said.startswith("row 3")
    assert "Rossi" not in said


def test_tags_of_the_patient_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    read = pydicom.dcmread

    def spied(*given: Any, **named: Any) -> Any:
        seen.append(read(*given, **named))
        return seen[-1]

    monkeypatch.setattr(pydicom, "dcmread", spied)
    pixels(dicom(PixelSpacing=["1", "1"]))
    (found,) = seen
    assert {element.keyword for element in found} <= {*TAGS, "SpecificCharacterSet"}
    assert PATIENT not in str(found)
    assert "PAT-0042" not in repr(found)


RUN = """
[run]
rounds = 2
record-views = true
[data]
source = "image-folder"
path = "scans"
labels = "labels.csv"
window = [40, 400]
silos = 2
batch-size = 2
[model]
source = "mlp"
hidden = [3]
[protocol]
name = "fedsgd"
"""


@pytest.mark.parametrize("broken", [False, True])
def test_nothing_of_the_patient_is_in_what_a_run_says_or_writes(tmp_path: Path, broken: bool) -> None:
    (tmp_path / "scans").mkdir()
    for number in range(12):
        (tmp_path / "scans" / f"{number}.dcm").write_bytes(dicom(CT + np.int16(50 * number)))
    if broken:
        (tmp_path / "scans" / "7.dcm").write_bytes(dicom(PixelData=b"\1\2"))
    lines = (f"{number}.dcm,{number % 2}" for number in range(12))
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *lines, ""]))
    (tmp_path / "run.toml").write_text(RUN)
    done = call("train", tmp_path / "run.toml", "--out", tmp_path / "out", "--json")
    assert done.code == (2 if broken else 0), done.err
    said = [(done.out + done.err).encode(), *(p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file())]
    assert len(said) == 1 if broken else len(said) > 5
    for content in said:
        assert not any(word in content for word in (b"Rossi", b"Lucia", b"PAT-0042", b"19420131"))
