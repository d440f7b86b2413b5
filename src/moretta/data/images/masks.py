"""A mask's file as a whole number a pixel: PNG and TIFF by Pillow, a plane of a NIfTI volume, DICOM segmentations.

**DICOM segmentations** (PS3.3 C.8.20; ``docs/masks.md``).

    BINARY     a frame is one segment in one image: 1 within
    LABELMAP   a frame is one image: the numbers of its segments

A frame belongs to the image to which it refers (its SOP instance), and must lie where that lies. A file that refers to
no image has the frames of one. Only `TAGS` are parsed, and of the image `PLACE`, with all that sequences among them
hold.
"""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.contract.memory import check_memory, within_memory
from moretta.data.images import scans
from moretta.data.images.pixels import PHOTOMETRIC, ImageForm, opened
from moretta.data.tables.schema import Target
from moretta.errors import ParameterError

TAGS = (
    "SOPClassUID", "SegmentationType", "SegmentSequence", "ReferencedSeriesSequence",
    "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence",
    "SamplesPerPixel", "PhotometricInterpretation", "NumberOfFrames", "Rows", "Columns",
    "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "LossyImageCompression", "PixelData",
)  # fmt: skip
CLASSES = ("1.2.840.10008.5.1.4.1.1.66.4", "1.2.840.10008.5.1.4.1.1.66.7")  # segmentation, label map segmentation
BITS = {"BINARY": (1,), "LABELMAP": (8, 16)}  # allocated for a pixel
LOSSLESS = (
    "ImplicitVRLittleEndian", "ExplicitVRLittleEndian", "DeflatedExplicitVRLittleEndian", "ExplicitVRBigEndian",
    "RLELossless", "JPEGLossless", "JPEGLosslessSV1", "JPEGLSLossless", "JPEG2000Lossless", "HTJ2KLossless",
    "HTJ2KLosslessRPCL",
)  # fmt: skip  # transfer syntaxes, as pydicom names them
# With the relative and the absolute difference that a frame may have: 0.01 mm at the first pixel. The other two grow
# with the number of pixels: 1e-4 is 0.4 pixels after 4096.
PLACE = {
    "PlanePositionSequence": ("ImagePositionPatient", 0.0, 0.01),
    "PlaneOrientationSequence": ("ImageOrientationPatient", 0.0, 1e-4),
    "PixelMeasuresSequence": ("PixelSpacing", 1e-4, 0.0),
}
MOST_FRAMES = 1 << 14
MASKS = ("PNG", "TIFF")  # no number is changed to save it
UNREAD_MASK = "PNG, TIFF, NIfTI or DICOM file; save the mask as one of these"
MASK_PIXEL = 24  # bytes while it is read
MOST_IN_MASK = 65535  # of a number in a NIfTI volume


def read_mask(
    content: "bytes | Segmentation", where: str, form: ImageForm, size: tuple[int, ...], image: Any | None = None
) -> NDArray[np.int64]:
    """Return a mask's pixels in the form of its image, int64[height, width].

    Args:
        content: The file; of segments as they were read.
        where: Begins each error's sentence.
        form: The form of images; masks take the nearest pixels.
        size: The height and width of the image in its file.
        image: Of segments the image's `identity_of`.

    Raises:
        ParameterError: for another kind of file, another size, and a form that changes the spacing.
        MissingExtra: without Pillow, or for NIfTI nibabel.
    """
    if form.spacing is not None:
        raise ParameterError(f"{where}: spacing is not available for masks; resample both, and remove spacing")
    with within_memory(where):
        if isinstance(content, Segmentation):
            pixels = content.pixels(image, where)
        else:
            pixels = _of_nifti(content, where, form.plane) if scans.is_nifti(content) else _by_pillow(content, where)
    if pixels.shape != size:
        sizes = [" x ".join(map(str, shape[::-1])) for shape in (pixels.shape, size)]
        raise ParameterError(f"{where} has {sizes[0]} pixels, and its image {sizes[1]}; expected the same")
    if form.size is None:
        return pixels
    down, across = ((np.arange(form.size) + 0.5) * length // form.size for length in pixels.shape)
    return pixels[np.ix_(down.astype(np.int64), across.astype(np.int64))]


def classes_of(pixels: NDArray[np.int64], target: Target, places: Sequence[str]) -> NDArray[np.int64]:
    """Return the class of each pixel, -1 where it does not count.

    Args:
        pixels: int64[masks, height, width].
        target: The values of the pixels of each class.
        places: The name of each mask's row in errors.

    Raises:
        ParameterError: for a pixel that holds another number.
    """
    classes = np.full(pixels.shape, -2)
    for number, value in enumerate(target.mask_values or ()):
        classes[pixels == value] = number
    if target.mask_ignored is not None:
        classes[pixels == target.mask_ignored] = -1
    if (classes == -2).any():
        first = tuple(np.argwhere(classes == -2)[0])
        raise ParameterError(
            f"{places[first[0]]}: the mask has pixels of {pixels[first]}; expected those of mask-values "
            f"({', '.join(map(str, target.mask_values or ()))}), or mask-ignored for pixels that do not count"
        )
    return classes


def _by_pillow(content: bytes, where: str) -> NDArray[np.int64]:
    with opened(content, where, MASKS, MASK_PIXEL, UNREAD_MASK) as image:
        if image.mode.split(";1")[0] not in ("1", "L", "P", "I"):
            raise ParameterError(f"{where} has colours; save it grey or with a palette, a number a pixel")
        if image.mode == "L" and getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == 0:  # which Pillow inverts
            raise ParameterError(f"{where} is a TIFF whose 0 is white; save it with 0 as black")
        pixels: NDArray[np.int64] = np.asarray(image).astype(np.int64)
        return pixels


def _of_nifti(content: bytes, where: str, plane: str | None) -> NDArray[np.int64]:
    window: tuple[float, float] = (0.0, 2.0 * MOST_IN_MASK)  # wide enough for each whole number to survive
    shown: Any = scans.read_nifti(content, where, window, plane)[0][0].astype(np.float64)
    values = (shown - 0.5) * (2.0 * MOST_IN_MASK)
    whole: NDArray[np.int64] = np.rint(values).astype(np.int64)
    if (np.abs(values - whole) > 0.05).any():
        raise ParameterError(f"{where} has fractions; expected a whole number a pixel")
    return whole


def identity_of(content: bytes, where: str) -> Any | None:
    """Return an image's SOP instance and place in the patient, as in pydicom; None if the file is not DICOM.

    Args:
        content: The image's file.
        where: The start of each error's sentence.
    """
    if not scans.is_dicom(content):
        return None
    with scans.refused(where, "is not a readable DICOM file; export it again or remove it"):
        tags = ["SOPInstanceUID", *(name for name, *_ in PLACE.values())]
        return scans.pydicom_reader().dcmread(io.BytesIO(content), specific_tags=tags, stop_before_pixels=True)


class Segmentation:
    """A DICOM file of segments.

    Args:
        content: The file.
        where: Begins each error's sentence.

    Raises:
        ParameterError: for a file that is no segmentation, has fractions, no segments, or frames that fit none of them.
        MissingExtra: without pydicom.
    """

    def __init__(self, content: bytes, where: str) -> None:
        pydicom = scans.pydicom_reader()
        scans.check_inflated(content, where)
        with within_memory(where), scans.refused(where, "is not a readable DICOM file; export it again or remove it"):
            self._file: Any = pydicom.dcmread(io.BytesIO(content), specific_tags=list(TAGS))
        with scans.refused(where, "does not describe its frames as a DICOM segmentation should; export it again"):
            if wrong := _fault(self._file):
                raise ParameterError(f"{where} {wrong}")
            shared, binary = self._file.get("SharedFunctionalGroupsSequence") or (), self._file.BitsAllocated == 1
            self._frames = [(own, *shared) for own in self._file.PerFrameFunctionalGroupsSequence]
            self._segments = [_segment(frame) if binary else None for frame in self._frames]
            declared = {None, *(int(segment.SegmentNumber) for segment in self._file.SegmentSequence)} - {0}
            if not declared.issuperset(self._segments):
                raise ParameterError(f"{where} has frames of segments that it does not declare; export it again")
            self._images = [_images(frame) for frame in self._frames]
            self._known = set[str]().union(*self._images) | {
                str(image.ReferencedSOPInstanceUID)
                for series in self._file.get("ReferencedSeriesSequence") or ()
                for image in series.ReferencedInstanceSequence
            }
            if self._known and not all(self._images):
                raise ParameterError(f"{where} has frames that refer to none of its images; export it again")

    def instance_of(self, image: Any | None) -> str | None:
        """Return the SOP instance of an image, None if all frames are of one image. image: see `identity_of`."""
        return str(image.get("SOPInstanceUID", "")) if image is not None and self._known else None

    def pixels(self, image: Any | None, where: str) -> NDArray[np.int64]:
        """Return the number of each pixel's segment in an image, int64[height, width].

        Args:
            image: The image's `identity_of`.
            where: Begins each error's sentence.

        Raises:
            ParameterError: for a file of other images, a frame that lies elsewhere, segments that overlap, and pixels
                that cannot be decoded.
        """
        pydicom, file = scans.pydicom_reader(), self._file
        instance = self.instance_of(image)
        if instance is not None and instance not in self._known:
            raise ParameterError(f"{where} refers to other images; expected the SOP instance of its row's image")
        chosen = [n for n, images in enumerate(self._images) if instance is None or instance in images]
        segments = [self._segments[n] for n in chosen]
        if len(set(segments)) < len(segments) or (instance is None and len(set(map(frozenset, self._images))) > 1):
            raise ParameterError(
                f"{where} has several frames that may be its image's; expected frames that refer to DICOM images, one "
                "of each segment to an image"
            )
        check_memory(MASK_PIXEL * int(file.Rows) * int(file.Columns), f"{where} takes")
        made = np.zeros((int(file.Rows), int(file.Columns)), np.int64)
        for number, segment in zip(chosen, segments, strict=True):
            with scans.refused(where, "does not describe where its frames lie; export it again"):
                _check_place(self._frames[number], image, where)
                wrong = scans.undecoded(file)
            with scans.refused(where, wrong):
                frame = pydicom.pixels.pixel_array(file, index=number, raw=True)
            within = frame != 0
            if made[within].any():
                raise ParameterError(f"{where} has pixels of two segments; export it without overlaps")
            made[within] = frame[within] if segment is None else segment
        return made


def _fault(file: Any) -> str:
    """Return what is wrong with a file, before its frames are read."""
    kind, count = str(file.get("SegmentationType", "")), int(file.get("NumberOfFrames") or 1)
    if file.get("SOPClassUID") not in CLASSES:
        return "is not a DICOM segmentation; save the mask as one, or as PNG, TIFF or NIfTI"
    if kind == "FRACTIONAL":
        return "has fractions of segments; export it as binary segments"
    bits, samples = int(file.BitsAllocated), int(file.get("SamplesPerPixel", 1))
    if bits not in BITS.get(kind, ()) or samples != 1:
        form = f"the segmentation type {kind[:20] or 'none'}, BitsAllocated {bits} and SamplesPerPixel {samples}"
        return f"has {form}; export it as BINARY of 1 bit or LABELMAP of 8 or 16, with 1 sample a pixel"
    syntax = file.file_meta.TransferSyntaxUID.keyword
    # The flag of binary segments is that of the images on which they were drawn: they have 1 bit, and loss needs more.
    flagged = kind == "LABELMAP" and file.get("LossyImageCompression") == "01"
    if flagged or syntax not in LOSSLESS:
        how = "LossyImageCompression is 01" if flagged else f"transfer syntax {syntax or 'unknown'}"
        return f"has numbers that compression may have changed ({how}); export it uncompressed from the original"
    if not file.get("SegmentSequence"):
        return "has no segments; export it again with them"
    if int(file.Rows) * int(file.Columns) > scans.MOST_PIXELS or count > MOST_FRAMES:
        return f"has more than {scans.MOST_PIXELS:,} pixels or {MOST_FRAMES:,} frames; export it smaller"
    if len(file.get("PerFrameFunctionalGroupsSequence") or ()) != count:
        return "does not describe each of its frames; export it again"
    return ""


def _item(groups: tuple[Any, ...], name: str) -> Any:
    """Return the item of a functional group, {} without such a group."""
    return next((group.get(name)[0] for group in groups if group.get(name)), {})


def _segment(groups: tuple[Any, ...]) -> int:
    return int(_item(groups, "SegmentIdentificationSequence").ReferencedSegmentNumber)


def _images(groups: tuple[Any, ...]) -> set[str]:
    """Return the SOP instances to which a frame refers."""
    derived = [step for group in groups for step in group.get("DerivationImageSequence") or ()]
    sources = [source for step in derived for source in step.get("SourceImageSequence") or ()]
    return {str(source.ReferencedSOPInstanceUID) for source in sources}


def _check_place(groups: tuple[Any, ...], image: Any, where: str) -> None:
    """Raise ParameterError if a frame and its image declare different places or spacings."""
    for sequence, (name, part, most) in PLACE.items() if image is not None else ():
        frame, expected = _item(groups, sequence).get(name), image.get(name)
        if frame and expected and not np.allclose(list(frame), list(expected), rtol=part, atol=most):
            raise ParameterError(
                f"{where} is placed differently from its image ({name}); export it on the image's pixels"
            )
