"""One plane of a NIfTI volume as pixels in [0, 1], by nibabel.

    stored values  --slope, intercept-->  values  --window-->  [0, 1]

A sample is one plane: the middle one across the axis that `plane` names, or that of a volume of a single slice. It is
turned as DICOM has it, with the patient's right on the left (of sagittal planes the front), and the front or the head
above. The window is the one asked for, else the file's own (cal_min, cal_max), else of whole numbers of 8 bits all that
these hold. Of other values the range is not known, so they are refused. Texts of the header are not used.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.contract.memory import check_memory
from moretta.data.images.dicom import IN_MEMORY, MOST_PIXELS, GreyWindow, inflated
from moretta.errors import MissingExtra, ParameterError

PLANES = ("sagittal", "coronal", "axial")  # across the axes to the right, the front and the head
_GZIP, _SECOND = b"\x1f\x8b", b"n+2\0"
_GZIPPED = 31  # zlib's window bits of such a file
_MILLIMETRES = {"meter": 1000.0, "micron": 0.001}


def is_nifti(content: bytes) -> bool:
    """Return whether a file begins as a NIfTI volume does, or is compressed as only these are."""
    return content[:2] == _GZIP or content[344:348] == b"n+1\0" or content[4:8] == _SECOND


def read_nifti(
    content: bytes, where: str, window: tuple[float, float] | None, plane: str | None
) -> tuple[NDArray[np.float32], tuple[float, float] | None]:
    """Return pixels float32[1, height, width] in [0, 1], and the mm from one to the next, down and across.

    window: center and width in rescaled values. plane: of `PLANES`. where: begins each error's sentence. Raises
    ParameterError for several volumes, colours, an unknown orientation or range, and where no plane is named;
    MissingExtra without nibabel.
    """
    try:
        import nibabel
    except ImportError as error:
        raise MissingExtra('NIfTI volumes need nibabel; run: pip install "moretta[images]"') from error
    try:
        data = b"".join(inflated(content, _GZIPPED, where)) if content[:2] == _GZIP else content
        image = (nibabel.Nifti2Image if data[4:8] == _SECOND else nibabel.Nifti1Image).from_bytes(data)
        _refuse(image, where)
        orientation: Any = nibabel.io_orientation  # which has no types
        return _plane(image, orientation(image.affine), where, window, plane)
    except (ParameterError, MemoryError):
        raise
    except Exception:  # noqa: BLE001  # nibabel's own words may quote the file
        raise ParameterError(f"{where} is no NIfTI volume that can be read; export it again or remove it") from None


def _refuse(image: Any, where: str) -> None:
    """Raise ParameterError for a file of which no plane can be made."""
    wrong = ""
    if (volumes := math.prod(image.shape[3:])) != 1:
        wrong = f"holds {volumes} volumes; export the one that is to be a sample as a file of its own"
    elif image.get_data_dtype().kind not in "iuf":
        wrong = "has colours or complex values; save it as grey values"
    elif not (image.header["sform_code"] or image.header["qform_code"]):
        wrong = "does not say how it lies in the patient (sform, qform); export it again with that"
    if wrong:
        raise ParameterError(f"{where} {wrong}")


def _plane(
    image: Any, turn: NDArray[np.float64], where: str, window: tuple[float, float] | None, plane: str | None
) -> tuple[NDArray[np.float32], tuple[float, float] | None]:
    """Return a plane's pixels and spacing. turn: of each axis, along which of the patient's it is, and whether up."""
    shape = (*image.shape, 1, 1)[:3]
    single = [axis for axis in range(3) if shape[axis] == 1]
    if plane is None and len(single) != 1:
        raise ParameterError(
            f"{where} is a volume of {' x '.join(map(str, shape))}, and a sample is one plane; name that in its middle "
            'by [data] plane = "axial", "coronal" or "sagittal", or export the slices that are to be samples'
        )
    across = single[0] if len(single) == 1 else turn[:, 0].tolist().index(PLANES.index(plane or ""))
    found = PLANES[int(turn[across, 0])]
    if plane not in (None, found):
        raise ParameterError(f"{where} is one {found} slice, and plane is {plane}; take it out, or export it anew")
    columns, rows = sorted({0, 1, 2} - {across}, key=lambda axis: turn[axis, 0])
    if shape[rows] * shape[columns] > MOST_PIXELS:
        raise ParameterError(f"{where} has more than {MOST_PIXELS:,} pixels; export it smaller")
    check_memory(IN_MEMORY * shape[rows] * shape[columns], f"{where} takes")
    middle = shape[across] // 2
    middle = middle if turn[across, 1] > 0 else shape[across] - 1 - middle
    place = [middle if axis == across else slice(None, None, -1 if turn[axis, 1] > 0 else 1) for axis in range(3)]
    values = np.asarray(image.dataobj[(*place, *[0] * 4)[: len(image.shape)]], np.float64)
    pixels = _shown(image, values if rows < columns else values.T, window, where)
    zooms = np.abs((*image.header.get_zooms(), 0.0)[:3]) * _MILLIMETRES.get(image.header.get_xyzt_units()[0], 1.0)
    apart = float(zooms[rows]), float(zooms[columns])
    return pixels, apart if min(apart) > 0 else None


def _shown(
    image: Any, values: NDArray[np.float64], window: tuple[float, float] | None, where: str
) -> NDArray[np.float32]:
    if not np.isfinite(values).all():
        raise ParameterError(f"{where} has values that are not finite; save it with numbers in their place")
    kind, low, high = image.get_data_dtype(), float(image.header["cal_min"]), float(image.header["cal_max"])
    if window is None and not low < high:
        if kind.itemsize > 1:
            raise ParameterError(
                f"{where} has values of no known range; give [data] window, their center and width, such as [40, 400]"
            )
        ends = [end * image.dataobj.slope + image.dataobj.inter for end in (np.iinfo(kind).min, np.iinfo(kind).max)]
        low, high = min(ends), max(ends)
    center, width = window or ((low + high) / 2, high - low)
    return np.ascontiguousarray(GreyWindow(center, width, "LINEAR_EXACT").of(values), np.float32)[None]
