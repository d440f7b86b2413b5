"""Images of noise for `table-5.toml`, where only time is measured: 256 to train on and 32 to test, seven classes."""

import numpy as np
from numpy.typing import NDArray

Arrays = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]


def of_32() -> Arrays:
    """32 x 32 pixels."""
    return _images(32)


def of_64() -> Arrays:
    """64 x 64 pixels."""
    return _images(64)


def of_224() -> Arrays:
    """224 x 224 pixels, as in the paper."""
    return _images(224)


def _images(side: int) -> Arrays:
    random = np.random.default_rng(side)
    x = random.random((288, 3, side, side), dtype=np.float32)
    y = np.arange(288) % 7
    return x[:256], y[:256], x[256:], y[256:]
