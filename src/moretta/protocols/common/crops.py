"""Random crops and mirror images for silos without torch, whose rows must not vary within a round.

`moretta.protocols.common.augmentation` does the same to tensors, and draws from torch's global generator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

PADDING = 4  # pixels
CROPS = ("crop-flip", "reflect-crop-flip")


def cropped(images: NDArray[Any], how: str, rng: np.random.Generator) -> NDArray[Any]:
    """Shift each image by up to 4 pixels either way, and mirror half of them left to right.

    images: [B, C, H, W]. how: one of `CROPS`; edges are filled with zeros, or with what lies before them, mirrored.
    """
    rows, _, height, width = images.shape
    sides = ((0, 0), (0, 0), (PADDING, PADDING), (PADDING, PADDING))
    padded = np.pad(images, sides, mode="reflect" if how == "reflect-crop-flip" else "constant")
    down, right = rng.integers(0, 2 * PADDING + 1, (2, rows, 1))
    mirrored = rng.random((rows, 1)) < 0.5
    down_to, right_to = down + np.arange(height), right + np.arange(width)
    right_to = np.where(mirrored, right_to[:, ::-1], right_to)
    row = np.arange(rows)[:, None, None]
    return np.ascontiguousarray(padded[row, :, down_to[:, :, None], right_to[:, None, :]].transpose(0, 3, 1, 2))
