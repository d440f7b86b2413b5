"""Image sets from a folder, in the publisher's own format or as lossless residuals (.npz); never a pickle.

    mnist      four IDX files, plain or .gz
    cifar10    "binary version": data_batch_1.bin .. data_batch_5.bin, test_batch.bin
    cifar100   "binary version": train.bin, test.bin (fine labels)
    ham10000   hmnist_28_28_RGB.csv, with HAM10000_metadata.csv beside it for the lesions
    office-home   Art/<category>/*.jpg   Clipart/...   Product/...   Real World/...   (or Real_World, RealWorld)

The residual form is an .npz with `r` uint8[3, N, H, W] and `y` [N]: horizontal and vertical differences modulo 256 of
green, red - green and blue - green. Cumulative sums along both axes give the pixels back.

Office-Home's publisher makes no split. The domain of a row is the name of its folder, "Real World" in any spelling.
"""

import io
import math
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.contract.memory import check_memory, within_memory
from moretta.data.images.pixels import pillow
from moretta.data.tables.files import read_bytes, read_columns
from moretta.errors import ParameterError

Pixels = NDArray[np.uint8]
Integers = NDArray[np.int64]

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
HAM10000 = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
_KAGGLE = np.array([0, 1, 2, 3, 5, 6, 4])  # hmnist_28_28_RGB.csv counts nv 4, vasc 5, mel 6


@dataclass(frozen=True, eq=False)
class Images:
    """Pixels uint8[n, channels, height, width] and labels int64[n].

    Attributes:
        x_test, y_test: None for a set without a split by the publisher.
        group: int64[n], the lesion that a row shows; None for a set without groups.
        domain: str[n], the domain of each row; None for a set without domains.
    """

    x: Pixels
    y: Integers
    x_test: Pixels | None = None
    y_test: Integers | None = None
    group: Integers | None = None
    class_names: tuple[str, ...] = ()
    domain: NDArray[np.str_] | None = None


def load_images(source: str, folder: Path | None) -> Images:
    """Read one of `SETS` from its folder. Raises ParameterError, saying where to get the files, if they are missing."""
    read, expected, where = SETS[source]
    folder = existing_folder(source, folder, expected, where)
    images = read(folder)
    if images is None:
        hint = ""
        if source.startswith("cifar") and any(folder.glob("**/*_batch*")) | any(folder.glob("**/meta")):
            hint = " (the python version is pickled, which is never loaded here: take the binary version)"
        raise ParameterError(f'source = "{source}": {folder} lacks {expected}; get them at {where}{hint}')
    return images


def existing_folder(source: str, folder: Path | None, expected: str, where: str) -> Path:
    """Return the folder of a set. Raises ParameterError, with its expected content and origin, if it does not exist."""
    if folder is None:
        raise ParameterError(f'source = "{source}" needs path, the folder with {expected}; get them at {where}')
    if not folder.is_dir():
        raise ParameterError(
            f'source = "{source}": the folder {folder} does not exist; it should hold {expected}, from {where}'
        )
    return folder


def scaled(x: Pixels) -> NDArray[np.float32]:
    """Bytes 0 to 255 as float32 in [0, 1]."""
    return np.divide(x, np.float32(255), dtype=np.float32)


def from_residuals(r: Pixels) -> Pixels:
    """uint8[3, N, H, W] residuals -> uint8[N, 3, H, W] red, green, blue; the arithmetic is modulo 256 on purpose."""
    c = r.cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
    return np.stack([c[1] + c[0], c[0], c[2] + c[0]], axis=1)


def _mnist(folder: Path) -> Images | None:
    def find(stem: str, kind: str) -> Path | None:
        names = (f"{stem}-{kind}-ubyte", f"{stem}.{kind}-ubyte")
        return next((p for n in names for p in (folder / f"{n}.gz", folder / n) if p.is_file()), None)

    files = [find(f"{part}-{what}", kind) for part in ("train", "t10k") for what, kind in _IDX]
    if None in files:
        return None
    x, y, x_test, y_test = (_idx(path) for path in files if path is not None)
    for name, pixels, labels in (("train", x, y), ("t10k", x_test, y_test)):
        if pixels.ndim != 3 or labels.shape != (len(pixels),):
            raise ParameterError(f"{folder}: the {name} files hold {pixels.shape} pixels and {labels.shape} labels")
    digits = tuple(str(d) for d in range(10))
    return Images(x[:, None], y.astype(np.int64), x_test[:, None], y_test.astype(np.int64), class_names=digits)


_IDX = (("images", "idx3"), ("labels", "idx1"))


def _idx(path: Path) -> Pixels:
    """An IDX file of bytes: 0, 0, 8 (unsigned byte), the number of axes, each length big-endian, the data."""
    data = read_bytes(path)
    axes = data[3] if len(data) > 3 else 0
    shape = tuple(int(n) for n in np.frombuffer(data[4 : 4 + 4 * axes], ">u4")) if len(data) >= 4 + 4 * axes else ()
    size = len(data) - 4 - 4 * axes
    if data[:3] != b"\x00\x00\x08" or not axes or size != int(np.prod(shape, dtype=np.int64)):
        raise ParameterError(f"{path} is not an IDX file of bytes (shape {shape}, {size} bytes of data); get it again")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _cifar(files: Sequence[str], label_bytes: int, inner: str, names: tuple[str, ...], folder: Path) -> Images | None:
    """The publisher's files, of which the last is the test part, or residuals train*.npz and test.npz."""
    residuals = [*sorted(folder.glob("train*.npz")), folder / "test.npz"]
    for place in (folder, folder / inner):
        if all((place / name).is_file() for name in files):
            parts = [_cifar_records(place / name, label_bytes) for name in files]
            break
    else:
        if len(residuals) == 1 or not residuals[-1].is_file():
            return None
        parts = [_residuals(path)[:2] for path in residuals]
    x, y = (np.concatenate([part[k] for part in parts[:-1]]) for k in (0, 1))
    return Images(x, y, *parts[-1], class_names=names)


def _cifar_records(path: Path, label_bytes: int) -> tuple[Pixels, Integers]:
    """Records of the label bytes (the last is the fine label) and 3072 pixels: red, green and blue planes."""
    data = np.frombuffer(read_bytes(path), np.uint8)
    if len(data) == 0 or len(data) % (label_bytes + 3072):
        raise ParameterError(f"{path} has {len(data)} bytes, not whole records of {label_bytes + 3072}; get it again")
    records = data.reshape(-1, label_bytes + 3072)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), records[:, label_bytes - 1].astype(np.int64)


def _residuals(path: Path) -> tuple[Pixels, Integers, Integers | None]:
    """(pixels, labels, lesion numbers if the file has them)."""
    arrays = read_npz(path)
    r, y = arrays.get("r"), arrays.get("y")
    if r is None or y is None or r.dtype != np.uint8 or r.ndim != 4 or len(r) != 3 or y.shape != (r.shape[1],):
        got = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in arrays.items())
        raise ParameterError(f"{path}: expected r as uint8[3, N, H, W] and y [N], got {got or 'nothing'}")
    group = arrays.get("lesion")
    return from_residuals(r), y.astype(np.int64), None if group is None else group.astype(np.int64)


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz file, never unpickled. Raises ParameterError if the file cannot be read so."""
    try:
        with within_memory(f"{path}"):
            check_npz(path)
            with path.open("rb") as file:  # numpy leaves what it opens and cannot read open
                if file.peek(6)[:6] == np.lib.format.MAGIC_PREFIX:
                    raise ParameterError(f"{path} holds a single array without a name; save arrays with numpy.savez")
                with np.load(file, allow_pickle=False) as arrays:
                    content = {name: arrays[name] for name in arrays.files}
            if not all(isinstance(array, np.ndarray) for array in content.values()):  # numpy has other files as bytes
                raise ParameterError(f"{path} holds files that are not arrays; save arrays with numpy.savez")
            return content
    except FileNotFoundError:
        raise ParameterError(
            f"there is no file {path}; check the path, which in a run file starts at its folder"
        ) from None
    except ParameterError:
        raise
    except Exception as error:  # zipfile, zlib, tokenize and numpy each raise several of their own
        reason = str(error).partition("\n")[0].partition(" If you trust")[0]  # which would advise pickle
        raise ParameterError(
            f"{path} is not an .npz file of plain arrays ({reason or type(error).__name__}); save it with numpy.savez"
        ) from error


def check_npz(path: Path) -> None:
    """Raise ParameterError where an .npz file takes more memory than is free, before any of it is allocated.

    Raises:
        ParameterError: The arrays are larger than the free memory, or one is declared larger than its member.
        OSError, ValueError, zipfile.BadZipFile, zlib.error: The file is not an .npz file.
    """
    if not zipfile.is_zipfile(path):
        return  # refused by numpy
    with zipfile.ZipFile(path) as pack:
        members = pack.infolist()
        check_memory(sum(member.file_size for member in members), f"{path} takes")
        for member in members:
            with pack.open(member) as stream:
                read = _HEADERS.get(np.lib.format.read_magic(stream)) if member.filename.endswith(".npy") else None
                shape, _, dtype = read(stream) if read is not None else ((), False, np.dtype(np.uint8))
            if math.prod(shape) * dtype.itemsize > member.file_size:
                raise ParameterError(
                    f"{path}: {member.filename} declares {dtype}{list(shape)} and holds {member.file_size:,} bytes; "
                    "save it again with numpy.savez"
                )


_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def _ham10000(folder: Path) -> Images | None:
    table = next((p for p in (folder / f"hmnist_28_28_RGB.csv{end}" for end in ("", ".gz")) if p.is_file()), None)
    if table is not None:
        return _kaggle(table)
    residuals = sorted(folder.glob("ham10000*.npz"))
    if not residuals:
        return None
    x, y, lesion = _residuals(residuals[0])
    return Images(x, y, group=lesion, class_names=HAM10000)


def _kaggle(path: Path) -> Images:
    """2352 bytes a row (height, width, colour) and the label, as published on Kaggle."""
    try:
        with within_memory(f"{path}"):
            cells = np.loadtxt(io.BytesIO(read_bytes(path)), np.uint8, delimiter=",", skiprows=1, ndmin=2)
    except ValueError as error:
        raise ParameterError(f"{path} is not a table of bytes ({error}); get it again") from error
    if cells.shape[1] != 28 * 28 * 3 + 1 or len(cells) == 0 or cells[:, -1].max() > 6:
        raise ParameterError(f"{path}: expected rows of 2352 pixels and a label 0 to 6, got shape {cells.shape}")
    x = np.ascontiguousarray(cells[:, :-1].reshape(-1, 28, 28, 3).transpose(0, 3, 1, 2))
    y = _KAGGLE[cells[:, -1]]
    return Images(x, y, group=_lesions(path.with_name("HAM10000_metadata.csv"), y), class_names=HAM10000)


def _lesions(path: Path, y: Integers) -> Integers | None:
    """The lesion of each row by the metadata, which must have the table's rows; None without metadata."""
    if not path.is_file():
        return None
    columns = read_columns(path)
    if "dx" not in columns or list(columns["dx"]) != [HAM10000[label] for label in y]:
        raise ParameterError(
            f"{path} does not list the rows of the image table in its order; "
            "remove it to split by image (then one lesion may be in both parts)"
        )
    lesions = columns.get("lesion_id", [""] * len(y))
    return np.unique([lesion or str(i) for i, lesion in enumerate(lesions)], return_inverse=True)[1]


_CIFAR = "https://www.cs.toronto.edu/~kriz/cifar.html"
_CIFAR10 = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
SETS: dict[str, tuple[Callable[[Path], Images | None], str, str]] = {
    "mnist": (
        _mnist,
        "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the same two for t10k",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
    ),
    "cifar10": (
        partial(_cifar, _CIFAR10, 1, "cifar-10-batches-bin", CIFAR10),
        "data_batch_1.bin to data_batch_5.bin and test_batch.bin",
        _CIFAR,
    ),
    "cifar100": (
        partial(_cifar, ("train.bin", "test.bin"), 2, "cifar-100-binary", ()),
        "train.bin and test.bin",
        _CIFAR,
    ),
    "ham10000": (
        _ham10000,
        "hmnist_28_28_RGB.csv (and HAM10000_metadata.csv)",
        "https://www.kaggle.com/datasets/kmader/skin-cancer-mnist-ham10000",
    ),
}
"""Each set: its reader, the files it expects, and where to get them."""


OFFICE_HOME, OFFICE_HOME_SIZE = "office-home", 64  # the source; pixels, unless the run file says
_DOMAINS = {
    "Art": ("Art",),
    "Clipart": ("Clipart",),
    "Product": ("Product",),
    "Real World": ("Real World", "Real_World", "RealWorld"),
}
_ENDINGS = (".jpg", ".jpeg", ".png")
_ARCHIVE = "OfficeHomeDataset_10072016"  # the folder in the publisher's archive
_EXPECTED = "the folders Art, Clipart, Product and Real World, each with a folder of images for every category"
_WHERE = "https://www.hemanthdv.org/officeHomeDataset.html"


def load_office_home(folder: Path | None, size: int = OFFICE_HOME_SIZE) -> Images:
    """Return all images as pixels uint8[n, 3, size, size], squeezed to a square, with categories and domains.

    Classes are the category names in sorted order, without hidden folders. Only .jpg, .jpeg and .png files are read.

    Raises:
        ParameterError: The folder is missing, lacks a domain or has no images, or an image is unreadable.
        MissingExtra: Pillow is not installed.
    """
    folder = existing_folder(OFFICE_HOME, folder, _EXPECTED, _WHERE)
    places = _places(folder if not (folder / _ARCHIVE).is_dir() else folder / _ARCHIVE)
    inside = (path for place in places.values() for path in place.iterdir())
    categories = sorted({path.name for path in inside if path.is_dir() and not path.name.startswith(".")})
    files = [
        (path, label, domain)
        for domain, place in places.items()
        for label, category in enumerate(categories)
        for path in _images_in(place / category)
    ]
    if not files:
        raise ParameterError(
            f'source = "office-home": {folder} holds no images ({", ".join(_ENDINGS)}); expected {_EXPECTED}'
        )
    library = pillow('source = "office-home" needs', "torch")
    x = np.empty((len(files), 3, size, size), np.uint8)
    for row, (path, _, _) in enumerate(files):
        x[row] = _pixels(library, path, size)
    y = np.array([label for _, label, _ in files], np.int64)
    domain = np.array([domain for _, _, domain in files])
    return Images(x, y, class_names=tuple(categories), domain=domain)


def _places(folder: Path) -> dict[str, Path]:
    """The folder of each domain."""
    places = {
        domain: next((folder / name for name in names if (folder / name).is_dir()), None)
        for domain, names in _DOMAINS.items()
    }
    lacking = [domain for domain, place in places.items() if place is None]
    if lacking:
        raise ParameterError(
            f'source = "office-home": {folder} lacks the folder {", ".join(lacking)}; expected {_EXPECTED}, '
            f"from {_WHERE}"
        )
    return {domain: place for domain, place in places.items() if place is not None}


def _images_in(place: Path) -> list[Path]:
    """The images of a folder by name, so that rows have the same order everywhere; none if there is no folder."""
    if not place.is_dir():
        return []
    images = (p for p in place.iterdir() if p.suffix.lower() in _ENDINGS and not p.name.startswith("."))
    return sorted(images, key=lambda path: path.name)


def _pixels(library: ModuleType, path: Path, size: int) -> Pixels:
    """uint8[3, size, size]; bilinear over all pixels that become one, like Pillow."""
    try:
        with library.open(path) as image:
            small = image.convert("RGB").resize((size, size), library.Resampling.BILINEAR)
    # SyntaxError is Pillow's error for a broken PNG
    except (OSError, ValueError, SyntaxError, library.DecompressionBombError) as error:
        raise ParameterError(f"{path} is not a readable image ({error}); get it again or remove it") from error
    return np.asarray(small, np.uint8).transpose(2, 0, 1)
