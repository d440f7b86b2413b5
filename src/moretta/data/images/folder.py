"""Images of one's own: a folder of files, and a table that says which of them are samples and what they show.

    labels.csv       file,patient,label           one line a sample; `file` is a path below the folder
    images/          a/0001.png, a/0002.dcm ...   see `moretta.data.images.pixels`

A file becomes float32[channels, size, size] in [0, 1]. Files that the table does not name are not read. Sentences about
an image give its row in the table, not counting the header, as its name may say whom it shows.

A mask is a file too, of the size of its image: PNG, TIFF or a plane of a NIfTI volume. Its pixels are the numbers in
the file, of a palette the places in it.

Every file is read and decoded once, before anything is trained, and its SHA-256 kept. Images that come to more than
`IN_MEMORY` bytes are then decoded again whenever a batch has them (`moretta.contract.lazy_rows`), from files that must
not have changed.
"""

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.contract.lazy_rows import LazyRows, as_array
from moretta.contract.memory import within_memory
from moretta.contract.messages import Array
from moretta.contract.wording import did_you_mean
from moretta.data.images.pixels import ImageForm, Pixels, formed, opened, read_image
from moretta.data.images.scans import is_nifti, read_nifti
from moretta.data.tables.files import Column, Format, read_columns
from moretta.data.tables.mapping import ColumnMapping
from moretta.data.tables.rows import TableRows, encode, words_of
from moretta.data.tables.schema import Schema, Target
from moretta.errors import ParameterError, UnreadableRow

FOLDER = "image-folder"  # the source's name
FILE = "file"  # the column of paths, where no schema names another
# Of images in a folder that comes without a table.
ENDINGS = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".dcm", ".nii", ".nii.gz")
IN_MEMORY = 1 << 28  # bytes of decoded images: fewer are simply loaded


def read_labelled(
    folder: Path,
    labels: Path,
    form: ImageForm,
    schema: Schema,
    *,
    written: Format | None = None,
    labelled: bool = True,
    where: str | None = None,
    in_memory: int | None = None,
    mapping: ColumnMapping | None = None,
) -> TableRows:
    """Read the images [rows, channels, size, size] that a table names, by its schema, with a column of kind "file".

    written: how a .csv table is written. labelled: whether targets are wanted.
    where: what sentences call the table.
    in_memory: bytes above which images are read by batch, None for `IN_MEMORY`.
    Of masks the targets are the classes of their pixels, int64[rows, height, width], -1 where one does not count.
    mapping: what becomes of the table's columns before the schema reads them.
    Raises ParameterError, naming the row, for a table that is not as the schema says, a file named twice, one that is
    not there or leads out of the folder, and as `_Images.read`; MissingExtra without what reads the table or an image.
    """
    where = where or labels.name
    columns, _ = (mapping or ColumnMapping()).read(labels, written, where, schema.dropped)
    rows = encode(columns, schema, where, written, labelled=labelled)
    name = schema.name_of("file")
    if name is None:
        raise ParameterError(f'{where}: expected a schema with a column of kind "file", the paths of images')
    paths, places = _paths(columns[name], where)
    images = _Images(_files(folder, paths, places), places, form)
    x, target = images.read(in_memory), schema.target
    if target is None or target.mask_values is None or not labelled:
        return replace(rows, x=x)
    masks, places = _paths(columns[schema.name_of("target") or ""], where)
    files = [path.read_bytes() for path in _files(folder, masks, [f"{place}: the mask" for place in places])]
    pixels = [
        read_mask(content, f"{place}: the mask", form, size)
        for content, place, size in zip(files, places, images.sizes, strict=True)
    ]
    return replace(rows, x=x, y=classes_of(np.stack(pixels), target, places))


def read_unlabelled(
    folder: Path, form: ImageForm, table: Path | None = None, written: Format | None = None, name: str = FILE
) -> tuple[Array, tuple[str, ...]]:
    """Return images [rows, channels, size, size], lazy as those to train on, and the path of each below the folder.

    table: has a column `name`, their paths; None takes all files of the folder and the folders in it that end as images
    do (`ENDINGS`) and are not hidden, sorted by their path. Raises as `read_labelled`.
    """
    _check_folder(folder)
    if table is not None:
        columns = read_columns(table, written)
        if name not in columns:
            raise ParameterError(
                f'{table.name} has no column "{name}", the paths of images; {did_you_mean(name, columns)}'
            )
        paths, places = _paths(columns[name], table.name)
    else:
        files = (path.relative_to(folder) for path in folder.rglob("*") if path.name.lower().endswith(ENDINGS))
        paths = sorted(path.as_posix() for path in files if not any(part.startswith(".") for part in path.parts))
        places = paths
    if not paths:
        raise ParameterError(f"{folder} holds no images ({', '.join(ENDINGS)}); name another folder")
    return _Images(_files(folder, paths, places), places, form).read(None), tuple(paths)


def _paths(column: Column, where: str) -> tuple[list[str], list[str]]:
    """Return the paths that a table names, and what sentences call each."""
    paths = [str(word) for word in words_of(column)]
    return paths, [f"{where} row {number}" for number in range(1, len(paths) + 1)]


class _Images:
    """Image files, and how they become samples. What the form leaves open follows from the first.

    sizes: the height and width of each in its file, once they are read.
    """

    def __init__(self, files: Sequence[Path], places: Sequence[str], form: ImageForm) -> None:
        self._files, self._places, self._form = files, places, form
        self.sizes = list[tuple[int, ...]]()
        self._digests = list[bytes]()
        self._like: tuple[int, ...] | None = None

    def read(self, in_memory: int | None) -> Array:
        """Return the samples, float32[files, channels, size, size] in [0, 1]; lazy if they take more memory.

        in_memory: bytes above which they are lazy, None for `IN_MEMORY`. Raises ParameterError for a file that cannot
        be read or is no image, and for images that differ in what the form leaves open.
        """
        count, shape = len(self._files), self.decoded(0, self.content(0)).shape
        rows: Array | None = None
        if count * math.prod(shape) * 4 <= (IN_MEMORY if in_memory is None else in_memory):
            rows = np.empty((count, *shape), np.float32)
        for number in range(count):
            sample = self.first(number)
            if rows is not None:
                rows[number] = sample
        return as_array(LazyRows(self.again, shape, np.arange(count))) if rows is None else rows

    def content(self, number: int) -> bytes:
        try:
            return self._files[number].read_bytes()
        except OSError as error:
            raise ParameterError(
                f"{self._places[number]}: the file cannot be read ({error.strerror}); allow to read it, or remove it"
            ) from None

    def first(self, number: int) -> Pixels:
        """Return a sample, read for the first time; call it once for each number in turn."""
        content = self.content(number)
        self._digests.append(hashlib.sha256(content).digest())
        return self.decoded(number, content, self.sizes)

    def again(self, number: int) -> Pixels:
        """Return a sample of a file that must be what it was. Raises UnreadableRow where it is not."""
        try:
            content = self.content(number)
        except ParameterError as error:
            raise UnreadableRow(str(error)) from None
        if hashlib.sha256(content).digest() != self._digests[number]:
            raise UnreadableRow(
                f"{self._places[number]}: the file has changed since the run began; put it back, or begin the run anew"
            )
        return self.decoded(number, content)

    def decoded(self, number: int, content: bytes, sizes: list[tuple[int, ...]] | None = None) -> Pixels:
        where = self._places[number]
        pixels, spacing = read_image(content, where, self._form)
        if sizes is not None:
            sizes.append(pixels.shape[1:])
        self._like = self._like or pixels.shape
        self._check_like(where, pixels.shape, self._like)
        return formed(pixels, spacing, self._form, where)

    def _check_like(self, where: str, shape: tuple[int, ...], first: tuple[int, ...]) -> None:
        """Raise ParameterError where an image differs from the first in what the form leaves open."""
        if self._form.channels is None and shape[0] != first[0]:
            kinds = {1: "grey", 3: "coloured"}
            raise ParameterError(
                f"{where} is {kinds[shape[0]]}, and the first image is {kinds[first[0]]}; make all alike by channels = "
                "1 or channels = 3"
            )
        if self._form.size is None and (shape[1:] != first[1:] or shape[1] != shape[2]):
            raise ParameterError(
                f"{where} has {shape[2]} x {shape[1]} pixels, and without image-size all images must be squares of one "
                f"size (the first has {first[2]} x {first[1]}); give image-size"
            )


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ParameterError(
            f"there is no folder {folder} of images; a relative path in a run file starts at its folder"
        )


def _files(folder: Path, names: Sequence[str], places: Sequence[str]) -> list[Path]:
    """Return the files that names below a folder stand for, each another one."""
    _check_folder(folder)
    root, seen = os.path.realpath(folder), dict[str, str]()
    for name, where in zip(names, places, strict=True):
        if not name:
            raise ParameterError(f"{where} names no file; give the path of one below the folder, or remove the row")
        ways = (PurePosixPath(name), PureWindowsPath(name))
        if "\0" in name or any(way.anchor or ".." in way.parts for way in ways):
            raise ParameterError(f"{where} leads out of the folder of images; give the path of a file below it")
        path = os.path.realpath(folder / name)
        if not Path(path).is_relative_to(root):
            raise ParameterError(f"{where} leads out of the folder of images by a link; put the file itself there")
        if not os.path.isfile(path):
            raise ParameterError(
                f"{where}: there is no such file in the folder of images; put it there, or remove the row"
            )
        if path in seen:
            raise ParameterError(f"{where} names the same file as {seen[path]}; keep one of them")
        seen[path] = where
    return [Path(path) for path in seen]


MASKS = ("PNG", "TIFF")  # of which no number is changed to save it
UNREAD_MASK = "PNG, TIFF or NIfTI file that can be read; save the mask as one of these"
MASK_PIXEL = 16  # bytes while it is read
MOST_IN_MASK = 65535  # of a number in a NIfTI volume


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
        target: What pixels of each class hold.
        places: What sentences call each mask's row.

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
        pixels: NDArray[np.int64] = np.asarray(image).astype(np.int64)
        return pixels


def _of_nifti(content: bytes, where: str, plane: str | None) -> NDArray[np.int64]:
    window: tuple[float, float] = (0.0, 2.0 * MOST_IN_MASK)  # wide enough that each whole number comes back
    shown: Any = read_nifti(content, where, window, plane)[0][0].astype(np.float64)
    values = (shown - 0.5) * (2.0 * MOST_IN_MASK)
    whole: NDArray[np.int64] = np.rint(values).astype(np.int64)
    if (np.abs(values - whole) > 0.05).any():
        raise ParameterError(f"{where} has fractions; expected a whole number a pixel")
    return whole
