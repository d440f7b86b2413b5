"""DICOM images as pixels in [0, 1], by pydicom.

    stored values  --rescale slope, intercept-->  values  --window-->  [0, 1]  --MONOCHROME1: inverted-->  pixels

The window is the one asked for, else the file's first (its function LINEAR, LINEAR_EXACT or SIGMOID, DICOM PS3.3
C.11.2), else all that the stored bits can hold. Colours are fractions of all that their bits can hold.

**What is read** are `TAGS` alone, by which pixels are described, and the file's own header for the transfer syntax.
Names, ids, dates and whatever else says who a patient is are skipped unparsed. So are look-up tables (modality and
VOI), overlays and padding values: a modality table is refused, as pixels without it mean something else.
"""

from __future__ import annotations

import io
import math
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import suppress
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
    "PixelData",
)  # fmt: skip
MOST_PIXELS = 89_478_485  # of an image, Pillow's own bound
IN_MEMORY = 24  # bytes a value while it is read: as stored, rescaled and as a fraction
DEFLATED = b"1.2.840.10008.1.2.1.99"  # the transfer syntax
GREY = ("MONOCHROME1", "MONOCHROME2")


@dataclass(frozen=True)
class GreyWindow:
    """The values that become 0 to 1. function: of DICOM's VOILUTFunction."""

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
        """Return the fractions of the window that values are at, in [0, 1]."""
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

    channels: 1 of grey images, 3 of coloured ones. window: center and width in rescaled values, of grey images.
    where: begins each error's sentence. Raises ParameterError for a file without pixels, with several frames, with a
    palette or a modality table, or compressed in a way that cannot be decoded here; MissingExtra without pydicom.
    """
    try:
        import pydicom
        from pydicom.pixels.utils import pixel_array
    except ImportError as error:
        raise MissingExtra('DICOM images need pydicom; run: pip install "moretta[images]"') from error
    _check_inflated(content, where)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning would quote the file
        wrong = "is no DICOM file that can be read; export it again or remove it"
        try:
            found = pydicom.dcmread(io.BytesIO(content), specific_tags=list(TAGS))
            wrong = "does not describe its pixels as it should; export it again or remove it"
            _refuse(found, where)
            wrong = _undecoded(found)
            stored = pixel_array(found)
            wrong = "does not describe its values as it should; export it again or remove it"
            return _pixels(found, stored, window, where), _spacing(found)
        except (ParameterError, MemoryError):
            raise
        except Exception:  # noqa: BLE001  # pydicom's own words may quote the file
            raise ParameterError(f"{where} {wrong}") from None


def _check_inflated(content: bytes, where: str) -> None:
    """Raise ParameterError for a deflated file that takes more memory than is free, which pydicom inflates at once."""
    (length,) = struct.unpack_from("<I", content.ljust(144, b"\0"), 140)  # of the header, behind (0002,0000) UL
    body = 144 + length
    with suppress(zlib.error):  # refused by pydicom
        for _ in inflated(content[body:], -zlib.MAX_WBITS, where) if DEFLATED in content[:body] else ():
            pass


def inflated(data: bytes, bits: int, where: str) -> Iterator[bytes]:
    """Inflate in parts. Raises ParameterError where the whole would take more memory than is free, and zlib.error."""
    inflater, size, most = zlib.decompressobj(bits), 0, free_memory() // 2
    while data and not inflater.eof:
        part = inflater.decompress(data, 1 << 20)
        yield part
        size, data = size + len(part), inflater.unconsumed_tail
        check_memory(2 * size if size > most else 0, f"{where} takes")


def _refuse(found: Any, where: str) -> None:
    """Raise ParameterError for a file of which no single plain image can be made."""
    kind, wrong = str(found.get("PhotometricInterpretation", "")), ""
    if "PixelData" not in found:
        wrong = "has no pixels; take it out of the table of labels, or export it with its image"
    elif int(found.get("NumberOfFrames") or 1) != 1:
        wrong = "has several frames; export each that is to be a sample as a file of its own"
    elif int(found.Rows) * int(found.Columns) > MOST_PIXELS:
        wrong = f"has more than {MOST_PIXELS:,} pixels; export it smaller"
    elif "ModalityLUTSequence" in found:
        wrong = "has a modality look-up table, which is not applied here; export it with rescale slope and intercept"
    elif kind not in GREY and kind != "RGB" and not kind.startswith("YBR"):
        wrong = f"has the photometric interpretation {kind[:20] or 'none'}; export it as MONOCHROME2 or RGB"
    if wrong:
        raise ParameterError(f"{where} {wrong}")
    samples = int(found.get("SamplesPerPixel") or 1)
    check_memory(IN_MEMORY * samples * int(found.Rows) * int(found.Columns), f"{where} takes")


def _undecoded(found: Any) -> str:
    """Return what is said where the pixels cannot be decoded."""
    syntax = found.file_meta.TransferSyntaxUID
    if not syntax.is_compressed:
        return "has pixels that cannot be decoded; export it again or remove it"
    return (
        f"has pixels that are compressed as {syntax.name[:60]} and cannot be decoded here; decompress the file "
        "(dcmconv, gdcmconv --raw), or install pylibjpeg"
    )


def _pixels(found: Any, stored: NDArray[Any], window: tuple[float, float] | None, where: str) -> NDArray[np.float32]:
    bits, signed = int(found.BitsStored), bool(found.PixelRepresentation)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    if stored.ndim == 3:  # [height, width, 3]
        return np.ascontiguousarray(np.clip(stored / high, 0, 1).transpose(2, 0, 1), np.float32)
    slope, intercept = (_first(found.get(name)) for name in ("RescaleSlope", "RescaleIntercept"))
    slope, intercept = 1.0 if slope is None else slope, intercept or 0.0
    values = stored * slope + intercept
    if not np.isfinite(values).all() or slope == 0:
        raise ParameterError(f"{where} has a rescale slope and intercept that give no values; export it again")
    ends = low * slope + intercept, high * slope + intercept
    try:
        made = _window(found, window, min(ends), max(ends)).of(values)
    except ParameterError as error:
        raise ParameterError(f"{where}: {error}") from None
    inverted = found.PhotometricInterpretation == "MONOCHROME1"
    return (1 - made if inverted else made).astype(np.float32)[None]


def _window(found: Any, asked: tuple[float, float] | None, low: float, high: float) -> GreyWindow:
    """Return the window asked for, else the file's first, else all from low to high."""
    if asked is not None:
        return GreyWindow(*asked)
    center, width = (_first(found.get(name)) for name in ("WindowCenter", "WindowWidth"))
    if center is None or width is None:
        return GreyWindow((low + high) / 2, high - low, "LINEAR_EXACT")
    function = str(found.get("VOILUTFunction") or "LINEAR")
    if function not in ("LINEAR", "LINEAR_EXACT", "SIGMOID"):
        raise ParameterError("its window has an unknown function; give [data] window, or export it again")
    return GreyWindow(center, width, function)


def _first(value: Any) -> float | None:
    """Return a number, or the first of several; None where there is none."""
    if value is None or value == "":
        return None
    several = not isinstance(value, str) and hasattr(value, "__len__")
    return float(value[0]) if several and len(value) else None if several else float(value)


def _spacing(found: Any) -> tuple[float, float] | None:
    spacing = found.get("PixelSpacing")
    return None if not spacing or len(spacing) != 2 else (float(spacing[0]), float(spacing[1]))
