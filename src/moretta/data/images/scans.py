"""DICOM images by pydicom, and planes of NIfTI volumes by nibabel, as pixels in [0, 1]: see ``docs/images.md``.

    stored values  --rescale slope, intercept-->  values  --window-->  [0, 1]  --MONOCHROME1: inverted-->  pixels

Of DICOM the reader takes only `TAGS`, which describe pixels, and the file's own header for the transfer syntax. It
skips names, ids, dates and all else that identifies a patient without parsing it. A modality table is refused, because
pixels without it mean something else; so are grey files of the enhanced kinds, whose slope, intercept and window lie in
functional groups. Texts of a NIfTI header are not used.
"""

import io
import math
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.contract.memory import check_memory, free_memory
from moretta.errors import MissingExtra, ParameterError

TAGS = (
    "SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames", "Rows", "Columns",
    "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PixelSpacing",
    "RescaleIntercept", "RescaleSlope", "ModalityLUTSequence", "WindowCenter", "WindowWidth", "VOILUTFunction",
    "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence", "PixelData",
)  # fmt: skip
MOST_PIXELS = 89_478_485  # of an image, Pillow's own bound
IN_MEMORY = 24  # bytes of a value while it is read: stored, rescaled and as a fraction
DEFLATED = b"1.2.840.10008.1.2.1.99"  # the transfer syntax
GREY = ("MONOCHROME1", "MONOCHROME2")


@dataclass(frozen=True)
class GreyWindow:
    """The values that become 0 to 1. function: the value of DICOM's VOILUTFunction."""

    center: float
    width: float
    function: str = "LINEAR"

    def __post_init__(self) -> None:
        least = 1 if self.function == "LINEAR" else 0
        if not (math.isfinite(self.center) and math.isfinite(self.width) and self.width >= least and self.width > 0):
            raise ParameterError(
                f"expected a finite window center and a width of 1 or more, got {self.center:g} and {self.width:g}"
            )

    def of(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return values as fractions of the window, in [0, 1]."""
        center, width = self.center, self.width
        if self.function == "SIGMOID":
            with np.errstate(over="ignore"):  # far below the window exp is infinite, and the fraction 0
                return np.asarray(1 / (1 + np.exp(-4 * (values - center) / width)))
        if self.function == "LINEAR":  # between the middles of the first and the last value
            center, width = center - 0.5, width - 1
        if width == 0:
            return np.asarray(values > center, dtype=np.float64)
        return np.clip((values - center) / width + 0.5, 0.0, 1.0)


def is_dicom(content: bytes) -> bool:
    """Return whether a file begins as a DICOM file does."""
    return content[128:132] == b"DICM"


def read_dicom(
    content: bytes, where: str, window: tuple[float, float] | None = None
) -> tuple[NDArray[np.float32], tuple[float, float] | None]:
    """Return pixels float32[channels, height, width] in [0, 1], and the mm from one to the next, down and across.

    Grey images have 1 channel, coloured ones 3.

    Args:
        where: The start of each error's sentence.
        window: Center and width in rescaled values, for grey images.

    Raises:
        ParameterError: The file has no pixels, several frames, a palette or a modality table, or cannot be decoded
            here.
        MissingExtra: pydicom is not installed.
    """
    pydicom = pydicom_reader()
    check_inflated(content, where)
    with refused(where, "is not a readable DICOM file; export it again or remove it"):
        dataset = pydicom.dcmread(io.BytesIO(content), specific_tags=list(TAGS))
    with refused(where, "has an invalid description of its pixels; export it again or remove it"):
        _refuse(dataset, where)
        wrong = undecoded(dataset)
    with refused(where, wrong):
        stored = pydicom.pixels.pixel_array(dataset)
    with refused(where, "has an invalid description of its values; export it again or remove it"):
        distances = dataset.get("PixelSpacing")
        spacing = (float(distances[0]), float(distances[1])) if distances and len(distances) == 2 else None
        return _pixels(dataset, stored, window, where), spacing


def pydicom_reader() -> Any:
    """Return pydicom. Raises MissingExtra where it is not installed."""
    try:
        import pydicom.pixels
    except ImportError as error:
        raise MissingExtra('DICOM images need pydicom; run: pip install "moretta[images]"') from error
    return pydicom


@contextmanager
def refused(where: str, wrong: str) -> Iterator[None]:
    """Turn a library's errors within into one sentence, and drop its warnings: its own words may quote the file.

    Args:
        where: Begins the sentence.
        wrong: Ends it.

    Raises:
        ParameterError: for a library's errors; others raised within, and a MemoryError, pass unchanged.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except (ParameterError, MemoryError):
            raise
        except Exception:  # noqa: BLE001  # a broken file raises anything
            raise ParameterError(f"{where} {wrong}") from None


def check_inflated(content: bytes, where: str) -> None:
    """Raise ParameterError for a deflated file that takes more memory than is free, which pydicom inflates at once."""
    (length,) = struct.unpack_from("<I", content.ljust(144, b"\0"), 140)  # of the header, behind (0002,0000) UL
    body = 144 + length
    with suppress(zlib.error):  # refused by pydicom
        for _ in inflated(content[body:], -zlib.MAX_WBITS, where) if DEFLATED in content[:body] else ():
            pass


def inflated(data: bytes, bits: int, where: str) -> Iterator[bytes]:
    """Inflate in parts. Raises ParameterError if the whole would take more memory than is free, and zlib.error."""
    inflater, size, most = zlib.decompressobj(bits), 0, free_memory() // 2
    while data and not inflater.eof:
        part = inflater.decompress(data, 1 << 20)
        yield part
        size, data = size + len(part), inflater.unconsumed_tail
        check_memory(2 * size if size > most else 0, f"{where} takes")


def _refuse(dataset: Any, where: str) -> None:
    """Raise ParameterError for a file that is not a single plain image."""
    kind, wrong = str(dataset.get("PhotometricInterpretation", "")), ""
    if "PixelData" not in dataset:
        wrong = "has no pixels; take it out of the table of labels, or export it with its image"
    elif int(dataset.get("NumberOfFrames") or 1) != 1:
        wrong = "has several frames; export each that is to be a sample as a file of its own"
    elif int(dataset.Rows) * int(dataset.Columns) > MOST_PIXELS:
        wrong = f"has more than {MOST_PIXELS:,} pixels; export it smaller"
    elif "ModalityLUTSequence" in dataset:
        wrong = "has a modality look-up table, which is not applied here; export it with rescale slope and intercept"
    elif kind in GREY and any(name.endswith("GroupsSequence") and name in dataset for name in TAGS):
        wrong = (
            "is an enhanced DICOM file, whose slope and window lie in groups that are not read; export a classic one"
        )
    elif kind not in GREY and kind != "RGB" and not kind.startswith("YBR"):
        wrong = f"has the photometric interpretation {kind[:20] or 'none'}; export it as MONOCHROME2 or RGB"
    if wrong:
        raise ParameterError(f"{where} {wrong}")
    samples = int(dataset.get("SamplesPerPixel") or 1)
    check_memory(IN_MEMORY * samples * int(dataset.Rows) * int(dataset.Columns), f"{where} takes")


def undecoded(dataset: Any) -> str:
    """Return the error about pixels that cannot be decoded."""
    syntax = dataset.file_meta.TransferSyntaxUID
    if not syntax.is_compressed:
        return "has pixels that cannot be decoded; export it again or remove it"
    return (
        f"has pixels that are compressed as {syntax.name[:60]} and cannot be decoded here; decompress the file "
        "(dcmconv, gdcmconv --raw), or install pylibjpeg"
    )


def _pixels(dataset: Any, stored: NDArray[Any], window: tuple[float, float] | None, where: str) -> NDArray[np.float32]:
    bits, signed = int(dataset.BitsStored), bool(dataset.PixelRepresentation)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    if stored.ndim == 3:  # [height, width, 3]
        return np.ascontiguousarray(np.clip(stored / high, 0, 1).transpose(2, 0, 1), np.float32)
    slope, intercept = (_first(dataset.get(name)) for name in ("RescaleSlope", "RescaleIntercept"))
    slope, intercept = 1.0 if slope is None else slope, intercept or 0.0
    values = stored * slope + intercept
    if not np.isfinite(values).all() or slope == 0:
        raise ParameterError(f"{where} has a rescale slope and intercept that give no values; export it again")
    ends = low * slope + intercept, high * slope + intercept
    try:
        made = _window(dataset, window, min(ends), max(ends)).of(values)
    except ParameterError as error:
        raise ParameterError(f"{where}: {error}") from None
    inverted = dataset.PhotometricInterpretation == "MONOCHROME1"
    return (1 - made if inverted else made).astype(np.float32)[None]


def _window(dataset: Any, asked: tuple[float, float] | None, low: float, high: float) -> GreyWindow:
    """Return the requested window, else the file's first, else all from low to high."""
    if asked is not None:
        return GreyWindow(*asked)
    center, width = (_first(dataset.get(name)) for name in ("WindowCenter", "WindowWidth"))
    if center is None or width is None:
        return GreyWindow((low + high) / 2, high - low, "LINEAR_EXACT")
    function = str(dataset.get("VOILUTFunction") or "LINEAR")
    if function not in ("LINEAR", "LINEAR_EXACT", "SIGMOID"):
        raise ParameterError("its window has an unknown function; set [data] window, or export it again")
    return GreyWindow(center, width, function)


def _first(value: Any) -> float | None:
    """Return a number, or the first of several; None without one."""
    if value is None or value == "":
        return None
    several = not isinstance(value, str) and hasattr(value, "__len__")
    return float(value[0]) if several and len(value) else None if several else float(value)


PLANES = ("sagittal", "coronal", "axial")  # across the axes to the right, the front and the head
_GZIP, _SECOND = b"\x1f\x8b", b"n+2\0"
_GZIPPED = 31  # zlib's window bits of such a file
_MILLIMETRES = {"meter": 1000.0, "micron": 0.001}


def is_nifti(content: bytes) -> bool:
    """Return whether a file begins as a NIfTI volume does, or is compressed by gzip, as only these are."""
    return content[:2] == _GZIP or content[344:348] == b"n+1\0" or content[4:8] == _SECOND


def read_nifti(
    content: bytes, where: str, window: tuple[float, float] | None, plane: str | None
) -> tuple[NDArray[np.float32], tuple[float, float] | None]:
    """Return pixels float32[1, height, width] in [0, 1], and the mm from one to the next, down and across.

    Args:
        where: The start of each error's sentence.
        window: Center and width in rescaled values.
        plane: A key of `PLANES`.

    Raises:
        ParameterError: The file has several volumes, colours, or an unknown orientation or range, or no plane is named.
        MissingExtra: nibabel is not installed.
    """
    try:
        import nibabel
    except ImportError as error:
        raise MissingExtra('NIfTI volumes need nibabel; run: pip install "moretta[images]"') from error
    with refused(where, "is not a readable NIfTI volume; export it again or remove it"):
        data = b"".join(inflated(content, _GZIPPED, where)) if content[:2] == _GZIP else content
        image = (nibabel.Nifti2Image if data[4:8] == _SECOND else nibabel.Nifti1Image).from_bytes(data)
        _refuse_volume(image, where)
        orientation: Any = nibabel.io_orientation  # which has no types
        return _plane(image, orientation(image.affine), where, window, plane)


def _refuse_volume(image: Any, where: str) -> None:
    """Raise ParameterError for a file that has no usable plane."""
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
    """Return a plane's pixels and spacing. turn: for each axis the patient's axis along it, and whether upwards."""
    shape = (*image.shape, 1, 1)[:3]
    single = [axis for axis in range(3) if shape[axis] == 1]
    if plane is None and len(single) != 1:
        raise ParameterError(
            f"{where} is a volume of {' x '.join(map(str, shape))}, but a sample is one plane; set [data] plane = "
            '"axial", "coronal" or "sagittal" for the plane in its middle, or export the slices that are to be samples'
        )
    across = single[0] if len(single) == 1 else turn[:, 0].tolist().index(PLANES.index(plane or ""))
    actual = PLANES[int(turn[across, 0])]
    if plane not in (None, actual):
        raise ParameterError(f"{where} is one {actual} slice, and plane is {plane}; leave it out, or export it again")
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
    spacing = float(zooms[rows]), float(zooms[columns])
    return pixels, spacing if min(spacing) > 0 else None


def _shown(
    image: Any, values: NDArray[np.float64], window: tuple[float, float] | None, where: str
) -> NDArray[np.float32]:
    if not np.isfinite(values).all():
        raise ParameterError(f"{where} has values that are not finite; save it with numbers instead")
    kind, low, high = image.get_data_dtype(), float(image.header["cal_min"]), float(image.header["cal_max"])
    if window is None and not low < high:
        if kind.itemsize > 1:
            raise ParameterError(
                f"{where} has values of an unknown range; set [data] window to their center and width, such as [40, "
                "400]"
            )
        ends = [end * image.dataobj.slope + image.dataobj.inter for end in (np.iinfo(kind).min, np.iinfo(kind).max)]
        low, high = min(ends), max(ends)
    center, width = window or ((low + high) / 2, high - low)
    return np.ascontiguousarray(GreyWindow(center, width, "LINEAR_EXACT").of(values), np.float32)[None]
