"""Office-Home: everyday objects in four domains, read from the folder in the publisher's layout.

    Art/<category>/*.jpg   Clipart/...   Product/...   Real World/...   (or Real_World, RealWorld)

The publisher makes no split, so one is drawn (`moretta.data.sources`). The domain of a row is the name of its folder,
"Real World" in whatever spelling.
"""

from pathlib import Path
from types import ModuleType

import numpy as np

from moretta.data.images.sets import Images, Pixels, existing_folder
from moretta.errors import MissingExtra, ParameterError

SIZE = 64  # pixels, unless the run file says
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


def load_office_home(folder: Path | None, size: int = SIZE) -> Images:
    """Every image as pixels uint8[n, 3, size, size], squeezed to a square, with its category and its domain.

    Classes are the category names in sorted order, hidden folders left out. Files of other endings than .jpg, .jpeg
    and .png are not read.
    Raises ParameterError for a folder that is missing or lacks a domain, for one without images and, by its name, for
    an image that cannot be read; MissingExtra without Pillow.
    """
    if size < 1:
        raise ParameterError(f"image-size: expected 1 or more pixels, got {size}")
    folder = existing_folder("office-home", folder, _EXPECTED, _WHERE)
    places = _places(folder if not (folder / _ARCHIVE).is_dir() else folder / _ARCHIVE)
    categories = sorted({path.name for place in places.values() for path in _folders(place)})
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
    pillow = _pillow()
    x = np.empty((len(files), 3, size, size), np.uint8)
    for row, (path, _, _) in enumerate(files):
        x[row] = _pixels(pillow, path, size)
    y = np.array([label for _, label, _ in files], np.int64)
    domain = np.array([domain for _, _, domain in files])
    return Images(x, y, class_names=tuple(categories), domain=domain)


def _places(folder: Path) -> dict[str, Path]:
    """The folder of each domain."""
    found = {
        domain: next((folder / name for name in names if (folder / name).is_dir()), None)
        for domain, names in _DOMAINS.items()
    }
    lacking = [domain for domain, place in found.items() if place is None]
    if lacking:
        raise ParameterError(
            f'source = "office-home": {folder} lacks the folder {", ".join(lacking)}; expected {_EXPECTED}, '
            f"from {_WHERE}"
        )
    return {domain: place for domain, place in found.items() if place is not None}


def _folders(place: Path) -> list[Path]:
    return [path for path in place.iterdir() if path.is_dir() and not path.name.startswith(".")]


def _images_in(place: Path) -> list[Path]:
    """The images of a folder by name, so that rows have the same order everywhere; none if there is no folder."""
    if not place.is_dir():
        return []
    images = (p for p in place.iterdir() if p.suffix.lower() in _ENDINGS and not p.name.startswith("."))
    return sorted(images, key=lambda path: path.name)


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra('source = "office-home" needs Pillow; run: pip install "moretta[torch]"') from error
    return Image


def _pixels(pillow: ModuleType, path: Path, size: int) -> Pixels:
    """uint8[3, size, size]; bilinear over all pixels that become one, as Pillow does it."""
    try:
        with pillow.open(path) as image:
            small = image.convert("RGB").resize((size, size), pillow.Resampling.BILINEAR)
    # SyntaxError is what Pillow says of a broken PNG
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise ParameterError(f"{path} is no image that can be read ({error}); get it again or remove it") from error
    return np.asarray(small, np.uint8).transpose(2, 0, 1)
