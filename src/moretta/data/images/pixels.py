"""One image file as pixels in [0, 1]: PNG, JPEG and TIFF by Pillow, DICOM (`dicom`), planes of NIfTI volumes (`nifti`).

Nothing else in a file is read, such as EXIF tags (orientation included), text and thumbnails. A TIFF with an
orientation tag is refused, because Pillow would turn it.
"""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from moretta.contract.memory import check_memory, within_memory
from moretta.data.images.scans import MOST_PIXELS, GreyWindow, is_dicom, is_nifti, read_dicom, read_nifti, refused
from moretta.errors import MissingExtra, ParameterError

Pixels = NDArray[np.float32]  # [channels, height, width]

FORMATS = ("PNG", "JPEG", "TIFF")  # the formats that Pillow may read
UNREAD = "PNG, JPEG, TIFF, DICOM or NIfTI image; save it again or remove it"
IN_MEMORY = 28  # bytes a pixel while it is read: four bytes of the file, and two arrays of three colours
MOST_ACROSS = 1 << 14  # pixels of a side, after resampling
ORIENTATION, BITS_PER_SAMPLE, PHOTOMETRIC, SAMPLE_FORMAT = 274, 258, 262, 339  # tags of TIFF
GREYS = np.array([0.299, 0.587, 0.114], np.float32)  # of red, green and blue, as in Pillow


@dataclass(frozen=True)
class ImageForm:
    """The form that images take.

    Args:
        size: pixels a side; None keeps square images of one size.
        channels: 1 or 3; None takes images that are all grey or all coloured.
        window: center and width, for DICOM and NIfTI images.
        spacing: mm from pixel to pixel, to which DICOM and NIfTI images are resampled, then cropped or padded with 0
            around their middle; None squeezes images to a square.
        plane: the middle plane to take of a NIfTI volume (`moretta.data.images.scans.PLANES`).
        channel_mean, channel_deviation: pixels of each channel become (pixel - mean) / deviation; None keeps them.
    """

    size: int | None = None
    channels: int | None = None
    window: tuple[float, float] | None = None
    spacing: float | None = None
    channel_mean: tuple[float, ...] | None = None
    channel_deviation: tuple[float, ...] | None = None
    plane: str | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            GreyWindow(*self.window)
        if self.spacing is not None and self.size is None:
            raise ParameterError("spacing needs image-size, the side in pixels that images are cut to; set both")
        mean, deviation = self.channel_mean or (), self.channel_deviation or ()
        positive = all(0 < value < math.inf for value in deviation)
        blank = () in (self.channel_mean, self.channel_deviation)
        if blank or len(mean) != len(deviation) or not all(map(math.isfinite, mean)) or not positive:
            raise ParameterError(
                "channel-mean and channel-deviation: expected a number of each for every channel, deviations above 0; "
                f"got {list(mean)} and {list(deviation)}"
            )

    def plain(self) -> dict[str, Any]:
        """Return the fields that are set, for JSON."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def of(cls, plain: Mapping[str, Any], shape: Sequence[int]) -> Self:
        """Return the form of `plain`, of images that become this shape. Raises ValueError for another content."""
        form: Self = TypeAdapter(cls).validate_python({**plain})
        if len(shape) == 3 and (form.channels or shape[0], form.size or shape[2]) != (shape[0], shape[2]):
            raise ValueError("image")
        return form

    def scales(self, shape: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the channels' means and deviations for samples of a shape, which may be flat."""
        mean, deviation = (np.array(values, np.float64) for values in (self.channel_mean, self.channel_deviation))
        if len(shape) == 3:
            return mean[:, None, None], deviation[:, None, None]
        return np.repeat(mean, shape[0] // len(mean)), np.repeat(deviation, shape[0] // len(mean))

    def standardised(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return images by the channels' means and deviations, in their own memory.

        Args:
            x: Images [..., channels, height, width], which are written to.

        Raises:
            ParameterError: The images have another number of channels.
        """
        if self.channel_mean is None or self.channel_deviation is None:
            return x
        if x.shape[-3] != len(self.channel_mean):
            raise ParameterError(
                f"channel-mean has {len(self.channel_mean)} numbers; expected {x.shape[-3]}, one for each channel of "
                "the images"
            )
        x -= np.array(self.channel_mean, np.float32)[:, None, None]
        x /= np.array(self.channel_deviation, np.float32)[:, None, None]
        return x


def read_image(content: bytes, where: str, form: ImageForm) -> tuple[Pixels, tuple[float, float] | None]:
    """Return a file's own pixels, float32[1 or 3, height, width] in [0, 1], and mm between them if known.

    Args:
        where: The start of each error's sentence.

    Raises:
        ParameterError: The file is not an image or does not suit the form.
        MissingExtra: The package that reads it is not installed.
    """
    with within_memory(where):
        if is_dicom(content):
            return read_dicom(content, where, form.window)
        if is_nifti(content):
            return read_nifti(content, where, form.window, form.plane)
        if form.window is not None or form.spacing is not None or form.plane is not None:
            raise ParameterError(
                f"{where} is not a DICOM or NIfTI file, and window, spacing and plane need one; remove them"
            )
        with opened(content, where, FORMATS, IN_MEMORY, UNREAD) as image:
            return _fractions(image, where), None


def formed(pixels: Pixels, spacing: tuple[float, float] | None, form: ImageForm, where: str) -> Pixels:
    """Return pixels in this form.

    Args:
        spacing: The mm between pixels, down and across, if known.
        where: The start of each error's sentence.

    Raises:
        ParameterError: The pixels cannot have this form.
    """
    pixels = _in_channels(pixels, form.channels)
    if form.spacing is not None and form.size is not None:
        pixels = _cut(_spaced(pixels, spacing, form.spacing, where), form.size)
    elif form.size is not None:
        pixels = _resized(pixels, form.size, form.size)
    return pixels if form.channel_mean is None else form.standardised(pixels.copy())


def squares(x: NDArray[np.uint8], size: int | None) -> NDArray[np.uint8]:
    """Return images [n, channels, height, width] as squares of another size, as `_resized`; None: unchanged."""
    if size is None or x.shape[2:] == (size, size):
        return x
    library = pillow()
    made = np.empty((*x.shape[:2], size, size), np.uint8)
    for place in np.ndindex(x.shape[:2]):
        made[place] = library.fromarray(x[place]).resize((size, size), library.Resampling.BILINEAR)
    return made


def pillow(whose: str = "folders of images need", extra: str = "images") -> Any:
    """Return Pillow. whose, extra: the start of the error without Pillow, and the extra that installs it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra(f'{whose} Pillow; run: pip install "moretta[{extra}]"') from error
    return Image


@contextmanager
def opened(content: bytes, where: str, formats: Sequence[str], in_memory: int, unread: str) -> Iterator[Any]:
    """Open a file of one image by Pillow.

    Args:
        content: The file.
        where: Begins the sentence of an error.
        formats: The formats that Pillow may read.
        in_memory: Bytes a pixel while it is read.
        unread: Ends the sentence about a file that cannot be read.

    Raises:
        ParameterError: for several pages, too many pixels, pixels that Pillow changes, and any error of Pillow.
    """
    library = pillow()
    with refused(where, f"is not a readable {unread}"), library.open(io.BytesIO(content), formats=formats) as image:
        if image.format in formats and getattr(image, "n_frames", 1) > 1:
            raise ParameterError(f"{where} has several pages; save each that is to be a sample as a file")
        if math.prod(image.size) > MOST_PIXELS:
            raise ParameterError(f"{where} has more than {MOST_PIXELS:,} pixels; save it smaller")
        check_memory(in_memory * math.prod(image.size), f"{where} takes")
        _check_whole(image, where)
        yield image


def _check_whole(image: Any, where: str) -> None:
    """Raise ParameterError for an image whose bits Pillow would drop, or a TIFF that it would turn or misread."""
    tiff = image.format == "TIFF"
    if tiff and image.getexif().get(ORIENTATION, 1) != 1:
        raise ParameterError(f"{where} is a TIFF with an orientation tag; save it upright, without the tag")
    if tiff and image.mode == "L" and 2 in image.tag_v2.get(SAMPLE_FORMAT, ()):
        raise ParameterError(f"{where} is a TIFF with signed numbers of 8 bits; save it with unsigned ones")
    read_as = [str(tile[3]) for tile in image.tile]  # such as RGB;16B
    deep = max(image.tag_v2.get(BITS_PER_SAMPLE, (1,))) > 8 if tiff else any(";16" in kind for kind in read_as)
    if deep and image.mode in ("RGB", "RGBA", "RGBX", "LA", "CMYK", "YCbCr", "LAB"):
        raise ParameterError(f"{where} has 16 bits a colour, of which 8 would be read; save it with 8, or grey with 16")


def _fractions(image: Any, where: str) -> Pixels:
    """Return a PNG, JPEG or TIFF image as fractions of the most that its bits hold, without transparency."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        tags = getattr(image, "tag_v2", {})  # of TIFF: Pillow ignores both in more than 8 bits
        fractions = np.asarray(image).astype(np.float32) / np.float32(2 ** tags.get(BITS_PER_SAMPLE, (16,))[0] - 1)
        return (1 - fractions if tags.get(PHOTOMETRIC) == 0 else fractions)[None]
    if image.mode in ("I", "F"):
        raise ParameterError(f"{where} has 32 bits a pixel, of no known range; save it with 8 or 16")
    grey = image.mode in ("1", "L", "LA")
    pixels = np.asarray(image.convert("L" if grey else "RGB"), np.float32) / np.float32(255)
    return pixels[None] if grey else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _in_channels(pixels: Pixels, channels: int | None) -> Pixels:
    if channels is None or len(pixels) == channels:
        return pixels
    if channels == 3:
        return np.repeat(pixels, 3, axis=0)
    return np.clip(np.tensordot(GREYS, pixels, 1), 0, 1)[None]


def _spaced(pixels: Pixels, spacing: tuple[float, float] | None, asked: float, where: str) -> Pixels:
    """Return an image whose pixels are `asked` mm apart. spacing: theirs, down and across."""
    if spacing is None:
        raise ParameterError(
            f"{where} lacks PixelSpacing, which spacing = {asked:g} needs; leave the image out, or remove spacing"
        )
    ratios = [distance / asked for distance in spacing]
    height, width = (ratio * length for ratio, length in zip(ratios, pixels.shape[1:], strict=True))
    if not (0 < height < MOST_ACROSS and 0 < width < MOST_ACROSS):
        raise ParameterError(
            f"{where} would have {width:.0f} x {height:.0f} pixels at spacing = {asked:g}; correct spacing"
        )
    return _resized(pixels, max(1, round(height)), max(1, round(width)))


def _resized(pixels: Pixels, height: int, width: int) -> Pixels:
    """Resize an image, bilinear over all pixels that become one, like Pillow."""
    if pixels.shape[1:] == (height, width):
        return pixels
    library = pillow()
    planes = [library.fromarray(plane).resize((width, height), library.Resampling.BILINEAR) for plane in pixels]
    return np.clip(np.stack([np.asarray(plane, np.float32) for plane in planes]), 0, 1)


def _cut(pixels: Pixels, size: int) -> Pixels:
    """Return the square around the middle, with 0 outside the image."""
    made = np.zeros((len(pixels), size, size), np.float32)
    (into, outof), (into_across, outof_across) = (_middle(length, size) for length in pixels.shape[1:])
    made[:, into, into_across] = pixels[:, outof, outof_across]
    return made


def _middle(length: int, size: int) -> tuple[slice, slice]:
    """Return the place of the middle of a side in one of another length, and its own place."""
    kept = min(length, size)
    into, outof = (size - kept) // 2, (length - kept) // 2
    return slice(into, into + kept), slice(outof, outof + kept)
