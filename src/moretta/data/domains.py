"""Several image domains from one source: each row is assigned to one domain, which changes its image.

    plain       the image unchanged
    rotated     by 30 degrees about its centre, counter-clockwise, bilinear, edge pixels continued outwards
    blurred     Gaussian of sigma 1 pixel, cut off at 4 pixels, edge pixels continued outwards
    recoloured  the channels moved on by one (red gets what green was) and the values inverted between the image's own
                minimum and maximum; a grey image becomes its negative

The classes stay while the inputs differ: with the partition "by-domain", silos are non-iid in their features. It needs
numpy alone, and only the assignment of rows is random.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moretta.contract.lazy_rows import loaded
from moretta.contract.messages import Array
from moretta.contract.wording import did_you_mean
from moretta.data.rows import Rows, Split, class_of
from moretta.data.split import generator
from moretta.errors import ParameterError

Pictures = NDArray[np.float32]  # [rows, channels, height, width]

DEGREES = 30.0
SIGMA = 1.0
_RADIUS = 4  # of the blur, in pixels: beyond 4 sigma lies less than 1e-4 of the weight


def check_domains(names: Sequence[str]) -> None:
    """Raise ParameterError unless these are one or more different names of domains; needs no data."""
    if not names:
        raise ParameterError(f"domains is empty; name at least one of {', '.join(DOMAINS)}")
    for place, name in enumerate(names):
        if name not in DOMAINS:
            raise ParameterError(f'domains: "{name}" is unknown; {did_you_mean(name, DOMAINS)}')
        if name in names[:place]:
            raise ParameterError(f'domains names "{name}" twice; name every domain once')


def into_domains(source: Split, names: Sequence[str], seed: int) -> Split:
    """Return the same rows with every image in one of the named domains, and the names in each part's `domain`.

    Training, test and validation rows are each divided equally, to within one row, and so is each of their classes. The
    same seed has the same assignment. The arguments are not written to.

    Raises:
        ParameterError: Samples are not images, the source has domains already, or `check_domains` refuses the names.
    """
    check_domains(names)
    x = source.train.x
    if x.ndim != 4 or x.dtype.kind != "f":
        raise ParameterError(
            f"domains is for images [rows, channels, height, width], but samples of {source.name} have the shape "
            f"{list(source.inputs)} and type {x.dtype}; remove it"
        )
    if source.train.domain is not None or source.test.domain is not None:
        raise ParameterError(f"domains would replace the domains of {source.name}; remove it")

    def moved(rows: Rows, key: int) -> Rows:
        domain = _deal(rows.y, names, seed, key)
        return replace(rows, x=_changed(loaded(rows.x), domain), domain=domain)

    train, test, validation = (moved(rows, key) for key, rows in enumerate(source.parts().values(), 1))
    return replace(source, train=train, test=test, validation=validation)


def _deal(y: Array, names: Sequence[str], seed: int, key: int) -> NDArray[np.str_]:
    """Return the domain of each row of targets y: shuffle rows, sort them by class, and assign them in turn."""
    # A stream of its own: with the partition's stream, "iid" might shuffle alike and assign whole domains.
    order = generator(seed, key).permutation(len(y))
    labels = class_of(y)
    if labels is not None:
        order = order[np.argsort(labels[order], kind="stable")]
    domain = np.empty(len(y), np.array(names).dtype)
    domain[order] = np.array(names)[np.arange(len(y)) % len(names)]
    return domain


def _changed(x: Pictures, domain: NDArray[np.str_]) -> Pictures:
    changed = x.copy()
    for name in np.unique(domain):
        rows = domain == name
        changed[rows] = DOMAINS[str(name)](x[rows])
    return changed


def _rotated(x: Pictures) -> Pictures:
    """Look each pixel up at its origin: at most four neighbours, weighted by distance."""
    height, width = x.shape[2:]
    down, across = (height - 1) / 2, (width - 1) / 2
    angle = np.deg2rad(DEGREES)
    i, j = np.mgrid[:height, :width]
    i, j = i - down, j - across
    row = np.clip(np.cos(angle) * i + np.sin(angle) * j + down, 0, height - 1)
    column = np.clip(np.cos(angle) * j - np.sin(angle) * i + across, 0, width - 1)
    top, left = np.floor(row).astype(np.int64), np.floor(column).astype(np.int64)
    pixels, rotated = x.reshape(*x.shape[:2], height * width), np.zeros_like(x)
    for a, row_weight in ((top, top + 1 - row), (np.minimum(top + 1, height - 1), row - top)):
        for b, weight in ((left, left + 1 - column), (np.minimum(left + 1, width - 1), column - left)):
            rotated += pixels.take(a * width + b, axis=2) * (row_weight * weight).astype(np.float32)
    return rotated


def _blurred(x: Pictures) -> Pictures:
    weights = np.exp(-0.5 * (np.arange(-_RADIUS, _RADIUS + 1) / SIGMA) ** 2)
    weights = (weights / weights.sum()).astype(np.float32)
    for _ in range(2):  # along rows, then, turned over, along columns; the second turn undoes the first
        length = x.shape[3]
        padded = np.pad(x, [(0, 0), (0, 0), (0, 0), (_RADIUS, _RADIUS)], mode="edge")
        along = sum(weight * padded[..., shift : shift + length] for shift, weight in enumerate(weights))
        x = np.ascontiguousarray(np.swapaxes(along, 2, 3))
    return x


def _recoloured(x: Pictures) -> Pictures:
    # the image's own bounds and not 0 and 1, as a source may scale its pixels differently
    least, greatest = (bound(x, axis=(1, 2, 3), keepdims=True) for bound in (np.min, np.max))
    recoloured: Pictures = least + greatest - np.roll(x, -1, axis=1)
    return recoloured


DOMAINS: Mapping[str, Callable[[Pictures], Pictures]] = {
    "plain": lambda x: x,
    "rotated": _rotated,
    "blurred": _blurred,
    "recoloured": _recoloured,
}
"""Each domain's function by its name; it returns changed images and does not write to its argument."""
