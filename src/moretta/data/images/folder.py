"""A user's own images: a folder of files, and a table that names the samples among them and their targets.

    labels.csv       file,patient,label           one line a sample; `file` is a path below the folder
    images/          a/0001.png, a/0002.dcm ...   see `moretta.data.images.pixels`

A file becomes float32[channels, size, size] in [0, 1]. Files that the table does not name are not read. Errors give an
image's row in the table, without the header, because its name may identify a person.

A mask is a file too, of the size of its image: PNG, TIFF, a plane of a NIfTI volume or a DICOM segmentation
(`moretta.data.images.masks`).

Every file is read and decoded once before training, and its SHA-256 is kept. Images of more than `IN_MEMORY` bytes
together are decoded again for each batch (`moretta.contract.lazy_rows`), from files that must not have changed.
"""

import hashlib
import math
import os
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
from numpy.typing import NDArray

from moretta.contract.lazy_rows import LazyRows, as_array
from moretta.contract.messages import Array
from moretta.contract.wording import did_you_mean
from moretta.data.images.masks import Segmentation, classes_of, identity_of, read_mask
from moretta.data.images.pixels import ImageForm, Pixels, formed, read_image
from moretta.data.images.scans import is_dicom
from moretta.data.tables.files import Column, Format, read_columns
from moretta.data.tables.mapping import ColumnMapping
from moretta.data.tables.rows import TableRows, encode, words_of
from moretta.data.tables.schema import Schema
from moretta.errors import ParameterError, UnreadableRow

FOLDER = "image-folder"  # the source's name
FILE = "file"  # the column of paths, where no schema names another
# For images in a folder without a table.
ENDINGS = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".dcm", ".nii", ".nii.gz")
IN_MEMORY = 1 << 28  # bytes of decoded images: fewer are loaded at once


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

    Targets of masks are the classes of their pixels, int64[rows, height, width], -1 where a pixel does not count.

    Args:
        written: the form of a .csv table.
        labelled: whether the table must have targets.
        where: the name of the table in errors.
        in_memory: bytes above which images are read by batch, None for `IN_MEMORY`.
        mapping: changes of the table's columns before the schema reads them.

    Raises:
        ParameterError: the table does not fit the schema, or a file is named twice, missing, outside the folder or
            unreadable; the sentence names the row.
        MissingExtra: the package that reads the table or an image is missing.
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
    return replace(rows, x=x, y=classes_of(np.stack(images.masks(folder, masks)), target, places))


def read_unlabelled(
    folder: Path, form: ImageForm, table: Path | None = None, written: Format | None = None, name: str = FILE
) -> tuple[Array, tuple[str, ...]]:
    """Return images [rows, channels, size, size], lazy like those to train on, and the path of each below the folder.

    Args:
        table: A file with the paths in the column `name`. None takes all images (`ENDINGS`) in the folder and below
            that are not hidden, sorted by path.
        written: The form of that file.

    Raises:
        ParameterError: The folder has no images, or the table lacks the column. Further errors are those of
            `read_labelled`.
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
    """Return the paths that a table names, and the name of each in errors."""
    paths = [str(word) for word in words_of(column)]
    return paths, [f"{where} row {number}" for number in range(1, len(paths) + 1)]


class _Images:
    """Image files as samples; the first decides what the form leaves open. sizes: each height and width, once read."""

    def __init__(self, files: Sequence[Path], places: Sequence[str], form: ImageForm) -> None:
        _check_different(files, places)
        self._files, self._places, self._form = files, places, form
        self.sizes = list[tuple[int, ...]]()
        self._digests = list[bytes]()
        self._like: tuple[int, ...] | None = None

    def read(self, in_memory: int | None) -> Array:
        """Return the samples, float32[files, channels, size, size] in [0, 1]; lazy if they take more memory.

        in_memory: bytes above which they are lazy, None for `IN_MEMORY`. Raises ParameterError for a file that is not a
        readable image, and for images that differ where the form is open.
        """
        count, shape = len(self._files), self.decoded(0, _content(self._files[0], self._places[0])).shape
        rows: Array | None = None
        if count * math.prod(shape) * 4 <= (IN_MEMORY if in_memory is None else in_memory):
            rows = np.empty((count, *shape), np.float32)
        for number in range(count):
            sample = self.first(number)
            if rows is not None:
                rows[number] = sample
        return as_array(LazyRows(self.again, shape, np.arange(count))) if rows is None else rows

    def masks(self, folder: Path, names: Sequence[str]) -> list[NDArray[np.int64]]:
        """Return the pixels of each image's mask, int64[height, width], once the images are read.

        Args:
            folder: Where the masks are.
            names: The path of each below it; DICOM images may name one segmentation together.

        Raises:
            ParameterError: for masks that cannot be read or do not fit their images.
        """
        places = [f"{place}: the mask" for place in self._places]
        sharing, made = dict[Path, list[int]](), dict[int, NDArray[np.int64]]()
        for number, file in enumerate(_files(folder, names, places)):
            sharing.setdefault(file, []).append(number)
        for file, numbers in sharing.items():
            content, where = _content(file, places[numbers[0]]), places[numbers[0]]
            segments = Segmentation(content, where) if is_dicom(content) else None
            images = [
                segments and identity_of(_content(self._files[number], self._places[number]), self._places[number])
                for number in numbers
            ]
            instances = [segments and segments.instance_of(image) for image in images]
            if None in instances:  # an image takes all frames, so that none are left for others
                instances = [None for _ in instances]
            _check_different(instances, [places[number] for number in numbers])
            for number, image in zip(numbers, images, strict=True):
                made[number] = read_mask(segments or content, places[number], self._form, self.sizes[number], image)
        return [made[number] for number in range(len(places))]

    def first(self, number: int) -> Pixels:
        """Return a sample, read for the first time; call it once for each number in turn."""
        content = _content(self._files[number], self._places[number])
        self._digests.append(hashlib.sha256(content).digest())
        return self.decoded(number, content, self.sizes)

    def again(self, number: int) -> Pixels:
        """Return a sample of a file that must not have changed. Raises UnreadableRow if it has."""
        try:
            content = _content(self._files[number], self._places[number])
        except ParameterError as error:
            raise UnreadableRow(str(error)) from None
        if hashlib.sha256(content).digest() != self._digests[number]:
            raise UnreadableRow(
                f"{self._places[number]}: the file has changed since the run began; restore it, or begin the run again"
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
        """Raise ParameterError if an image differs from the first and the form is open."""
        if self._form.channels is None and shape[0] != first[0]:
            kinds = {1: "grey", 3: "coloured"}
            raise ParameterError(
                f"{where} is {kinds[shape[0]]}, and the first image is {kinds[first[0]]}; make all alike by channels = "
                "1 or channels = 3"
            )
        if self._form.size is None and (shape[1:] != first[1:] or shape[1] != shape[2]):
            raise ParameterError(
                f"{where} has {shape[2]} x {shape[1]} pixels; without image-size all images must be squares of one "
                f"size (the first has {first[2]} x {first[1]}); set image-size"
            )


def _content(file: Path, where: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ParameterError(
            f"{where}: the file cannot be read ({error.strerror}); grant read permission, or remove it"
        ) from None


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ParameterError(
            f"the folder of images {folder} does not exist; correct its path, which in a run file starts at the "
            "file's folder"
        )


def _files(folder: Path, names: Sequence[str], places: Sequence[str]) -> list[Path]:
    """Return the files of names below a folder."""
    _check_folder(folder)
    root, files = os.path.realpath(folder), list[Path]()
    for name, where in zip(names, places, strict=True):
        if not name:
            raise ParameterError(f"{where} names no file; write the path of one below the folder, or remove the row")
        ways = (PurePosixPath(name), PureWindowsPath(name))
        if "\0" in name or any(way.anchor or ".." in way.parts for way in ways):
            raise ParameterError(f"{where} leads out of the folder of images; write the path of a file below it")
        path = os.path.realpath(folder / name)
        if not Path(path).is_relative_to(root):
            raise ParameterError(f"{where} leads out of the folder of images by a link; put the file itself there")
        if not os.path.isfile(path):
            raise ParameterError(f"{where}: this file is not in the folder of images; put it there, or remove the row")
        files.append(Path(path))
    return files


def _check_different(files: Iterable[Hashable], places: Sequence[str]) -> None:
    """Raise ParameterError if a row names a file again."""
    seen = dict[Hashable, str]()
    for file, where in zip(files, places, strict=True):
        if (first := seen.setdefault(file, where)) != where:
            raise ParameterError(f"{where} names the same file as {first}; keep one of them")
