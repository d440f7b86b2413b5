"""Masks as files beside images: PNG and TIFF by Pillow, planes of NIfTI volumes.

A mask has the size of its image, and its pixels are the numbers in the file: of a palette the places in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.contract.memory import within_memory
from moretta.data.images.nifti import is_nifti, read_nifti
from moretta.data.images.pixels import ImageForm, opened
from moretta.data.tables.schema import Target
from moretta.errors import ParameterError

FORMATS = ("PNG", "TIFF")  # of which no number is changed to save it
UNREAD = "PNG, TIFF or NIfTI file that can be read; save the mask as one of these"
IN_MEMORY = 16  # bytes a pixel while it is read
MOST = 65535  # of a number in a NIfTI volume


def read_mask(content: bytes, where: str, form: ImageForm, size: tuple[int, ...]) -> NDArray[np.int64]:
    """Return a mask's pixels in the form of its image, int64[height, width].

    Args:
        content: The file.
        where: Begins each error's sentence.
        form: What images become; a mask's nearest pixels are taken.
        size: The height and width of the image in its file.

    Raises:
        ParameterError: for another kind of file, another size, and a form that changes the spacing.
        MissingExtra: without Pillow, or for NIfTI nibabel.
    """
    if form.spacing is not None:
        raise ParameterError(f"{where}: spacing is not available for masks; resample both, and remove spacing")
    with within_memory(where):
        pixels = _of_nifti(content, where, form.plane) if is_nifti(content) else _by_pillow(content, where)
    if pixels.shape != size:
        told = [" x ".join(map(str, one[::-1])) for one in (pixels.shape, size)]
        raise ParameterError(f"{where} has {told[0]} pixels, and its image {told[1]}; expected the same")
    if form.size is None:
        return pixels
    down, across = ((np.arange(form.size) + 0.5) * length // form.size for length in pixels.shape)
    return pixels[np.ix_(down.astype(np.int64), across.astype(np.int64))]


def classes_of(pixels: NDArray[np.int64], target: Target, said: Sequence[str]) -> NDArray[np.int64]:
    """Return the class of each pixel, -1 where it does not count.

    Args:
        pixels: int64[masks, height, width].
        target: What pixels of each class hold.
        said: What sentences call each mask's row.

    Raises:
        ParameterError: for a pixel that holds another number.
    """
    found = np.full(pixels.shape, -2)
    for number, value in enumerate(target.mask_values or ()):
        found[pixels == value] = number
    if target.mask_ignored is not None:
        found[pixels == target.mask_ignored] = -1
    if (found == -2).any():
        first = tuple(np.argwhere(found == -2)[0])
        raise ParameterError(
            f"{said[first[0]]}: the mask has pixels of {pixels[first]}; expected those of mask-values "
            f"({', '.join(map(str, target.mask_values or ()))}), or mask-ignored for pixels that do not count"
        )
    return found


def _by_pillow(content: bytes, where: str) -> NDArray[np.int64]:
    with opened(content, where, FORMATS, IN_MEMORY, UNREAD) as image:
        if image.mode.split(";1")[0] not in ("1", "L", "P", "I"):
            raise ParameterError(f"{where} has colours; save it grey or with a palette, a number a pixel")
        found: NDArray[np.int64] = np.asarray(image).astype(np.int64)
        return found


def _of_nifti(content: bytes, where: str, plane: str | None) -> NDArray[np.int64]:
    window: tuple[float, float] = (0.0, 2.0 * MOST)  # wide enough that each whole number comes back
    shown: Any = read_nifti(content, where, window, plane)[0][0].astype(np.float64)
    values = (shown - 0.5) * (2.0 * MOST)
    whole: NDArray[np.int64] = np.rint(values).astype(np.int64)
    if (np.abs(values - whole) > 0.05).any():
        raise ParameterError(f"{where} has fractions; expected a whole number a pixel")
    return whole
