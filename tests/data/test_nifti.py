"""NIfTI volumes as planes: which one, how it is turned, what its values are, and what is refused."""

from __future__ import annotations

import gzip
import io
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_cli import call

from moretta.data.images import scans
from moretta.data.images.folder import read_unlabelled
from moretta.data.images.pixels import ImageForm, read_image
from moretta.data.settings import Data
from moretta.errors import MissingExtra, ParameterError

nibabel = pytest.importorskip("nibabel")

# Values by the patient's axes: to the right, the front and the head.
VALUES: NDArray[np.float32] = np.arange(4 * 5 * 6, dtype=np.float32).reshape(4, 5, 6)
HALF = np.eye(4)
MIDDLE = {"sagittal": VALUES[2], "coronal": VALUES[:, 2], "axial": VALUES[:, :, 3]}


def volume(values: NDArray[Any], affine: NDArray[np.float64] = HALF, kind: Any = None, **header: Any) -> bytes:
    image = (kind or nibabel.Nifti1Image)(values, affine)
    for key, value in header.items():
        image.header[key] = value
    return bytes(image.to_bytes())


def plane(content: bytes, name: str | None = "axial", window: tuple[float, float] = (60, 120)) -> NDArray[np.float32]:
    return read_image(content, "row 1", ImageForm(window=window, plane=name))[0][0]


def as_shown(across: NDArray[np.float32]) -> NDArray[np.float64]:
    """Turn a plane [one axis, a higher one] as DICOM has it: the higher one up, the other to the left."""
    return np.clip(across.T[::-1, ::-1] / 120.0, 0, 1)


@pytest.mark.parametrize("name", MIDDLE)
@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))))
def test_a_plane_is_the_same_however_a_volume_is_stored(name: str, axes: tuple[int, ...]) -> None:
    for flips in itertools.product((1, -1), repeat=3):
        stored, affine = VALUES, np.zeros((4, 4))
        for axis, flip in enumerate(flips):
            stored = np.flip(stored, axis) if flip < 0 else stored
        affine[3, 3] = 1
        for place, axis in enumerate(axes):
            affine[axis, place] = flips[axis]
        found = plane(volume(np.ascontiguousarray(stored.transpose(axes)), affine), name)
        np.testing.assert_allclose(found, as_shown(MIDDLE[name]), atol=1e-6)


def test_nibabel_itself_has_the_same_canonical_plane() -> None:
    turned = np.array([[0.1, -0.9, 0.2, 3], [0.8, 0.2, 0.1, -2], [0.1, 0.3, -1.1, 7], [0, 0, 0, 1]])
    image = nibabel.Nifti1Image(VALUES, turned)
    canonical = np.asarray(nibabel.as_closest_canonical(image).dataobj)
    found = plane(volume(VALUES, turned))
    np.testing.assert_allclose(found, as_shown(canonical[:, :, canonical.shape[2] // 2]), atol=1e-6)


@pytest.mark.parametrize("kind", ["Nifti1Image", "Nifti2Image"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_either_version_and_compressed(kind: str, pack: Any) -> None:
    found = plane(pack(volume(VALUES, kind=getattr(nibabel, kind))))
    np.testing.assert_allclose(found, as_shown(MIDDLE["axial"]), atol=1e-6)


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "u2", "i4", "f4", "f8", "i8"])
def test_values_are_rescaled_and_windowed(dtype: str) -> None:
    values = VALUES.astype(dtype)
    image = nibabel.Nifti1Image(values, HALF, dtype=values.dtype)
    image.header.set_slope_inter(2.0, -10.0)
    stream = io.BytesIO()
    image.header.set_data_offset(352)
    stream.write(image.header.binaryblock + b"\0" * 4 + values.tobytes(order="F"))
    found = plane(stream.getvalue(), window=(100, 50))
    wanted = np.clip((MIDDLE["axial"] * 2.0 - 10 - 75) / 50, 0, 1).T[::-1, ::-1]
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_the_window_is_the_files_own_or_that_of_8_bits() -> None:
    own = read_image(volume(VALUES, cal_min=20, cal_max=80), "row 1", ImageForm(plane="axial"))[0]
    np.testing.assert_allclose(own[0], np.clip((MIDDLE["axial"] - 20) / 60, 0, 1).T[::-1, ::-1], atol=1e-6)
    bytes_ = read_image(volume(VALUES.astype(np.uint8)), "row 1", ImageForm(plane="axial"))[0]
    np.testing.assert_allclose(bytes_[0], MIDDLE["axial"].T[::-1, ::-1] / 255, atol=1e-6)


@pytest.mark.parametrize(("unit", "factor"), [("mm", 1.0), ("micron", 0.001), ("unknown", 1.0)])
def test_pixels_are_as_far_apart_as_the_header_says(unit: str, factor: float) -> None:
    image = nibabel.Nifti1Image(VALUES, np.diag([2.0, 3.0, 4.0, 1.0]))
    image.header.set_xyzt_units(unit)
    for name, wanted in (("axial", (3, 2)), ("coronal", (4, 2)), ("sagittal", (4, 3))):
        found = read_image(image.to_bytes(), "row 1", ImageForm(window=(60, 120), plane=name))[1]
        assert found == pytest.approx([one * factor for one in wanted])


def test_a_single_slice_needs_no_plane() -> None:
    for shape in ((4, 5), (4, 5, 1), (4, 5, 1, 1)):
        found = plane(volume(VALUES[:, :, 0].reshape(shape)), None)
        np.testing.assert_allclose(found, as_shown(VALUES[:, :, 0]), atol=1e-6)
    side = plane(volume(VALUES[:1]), None)
    np.testing.assert_allclose(side, as_shown(VALUES[0]), atol=1e-6)


@pytest.mark.parametrize(
    ("content", "form", "said"),
    [
        (volume(VALUES), {}, 'is a volume of 4 x 5 x 6, but a sample is one plane; .* [data] plane = "axial"'),
        (volume(np.stack([VALUES] * 3, 3)), {"plane": "axial"}, "holds 3 volumes; export the one that is to be"),
        (volume(VALUES), {"plane": "axial"}, "has values of an unknown range; set [data] window"),
        (volume(VALUES.astype(np.int16)), {"plane": "axial"}, "has values of an unknown range; set [data] window"),
        (volume(VALUES[:1]), {"plane": "axial"}, "is one sagittal slice, and plane is axial; leave it out"),
        (volume(VALUES.astype(np.complex64)), {"plane": "axial"}, "has colours or complex values"),
        (volume(VALUES)[:252] + bytes(4) + volume(VALUES)[256:], {"plane": "axial"}, "does not say how it lies"),
        (volume(np.where(VALUES > 50, np.nan, VALUES)), {"plane": "axial", "window": (1, 2)}, "has values that are no"),
        (volume(VALUES)[:400], {"plane": "axial", "window": (1, 2)}, "is not a readable NIfTI volume"),
        (gzip.compress(volume(VALUES))[:200], {"plane": "axial"}, "is not a readable NIfTI volume"),
        (gzip.compress(b"a table", mtime=0), {"plane": "axial"}, "is not a readable NIfTI volume"),
    ],
)  # fmt: skip
def test_what_has_no_one_right_reading_is_refused(content: bytes, form: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError) as error:
        read_image(content, "row 1", ImageForm(**form))
    first, _, last = said.partition(" .* ")
    assert str(error.value).startswith("row 1 " + first)
    assert last in str(error.value)


def test_planes_are_three_and_not_of_pictures(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"plane.*axial"):
        Data(source="image-folder", plane="axal")
    with pytest.raises(ParameterError, match="is not a DICOM or NIfTI file, and window, spacing and plane"):
        read_image(b"\x89PNG", "row 1", ImageForm(plane="axial"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nibabel", None)
    with pytest.raises(MissingExtra, match=r'NIfTI volumes need nibabel; run: pip install "moretta\[images\]"'):
        plane(volume(VALUES))


RUN = """
[run]
rounds = 1
[data]
source = "image-folder"
path = "scans"
labels = "labels.csv"
silos = 2
window = [60, 120]
image-size = 4
[model]
source = "mlp"
hidden = [2]
[protocol]
name = "fedsgd"
"""


def test_a_run_is_refused_until_it_names_the_plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scans").mkdir()
    lines = ["file,ill"]
    for number in range(20):
        name = f"{number}.nii{'.gz' * (number % 2)}"
        content = volume(VALUES + 10 * (number % 2))
        (Path("scans") / name).write_bytes(gzip.compress(content, mtime=0) if number % 2 else content)
        lines.append(f"{name},{('no', 'yes')[number % 2]}")
    Path("labels.csv").write_text("\n".join(lines))
    Path("run.toml").write_text(RUN)
    done = call("train", "run.toml", "--out", "mine")
    assert done.code == 2
    assert '[data] plane = "axial", "coronal" or "sagittal"' in " ".join(done.err.split())
    done = call("train", "run.toml", "--out", "mine", "--set", 'data.plane="axial"')
    assert done.code == 0, done.err
    assert read_unlabelled(Path("scans"), ImageForm(4, window=(60, 120), plane="axial"))[0].shape == (20, 1, 4, 4)
    done = call("predict", "mine", "--data", "scans", "--out", "p.csv")
    assert done.code == 0, done.err
    assert len(Path("p.csv").read_text().splitlines()) == 21


def test_names_of_files_that_the_reader_takes() -> None:
    assert scans.is_nifti(volume(VALUES))
    assert not scans.is_nifti(b"\x89PNG")
