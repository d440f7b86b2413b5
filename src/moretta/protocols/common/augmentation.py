"""Augmentation of training images at each use: random crops and mirror images (He et al., CVPR 2016), or turns.

`cropped` is for silos without torch, whose rows must not vary within a round. `varied` takes tensors and draws from
torch's global generator. Importing this module needs no torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moretta.errors import RowsError

if TYPE_CHECKING:
    from torch import Tensor

SHIFT, SCALE, LIGHT = 0.1, 0.1, 0.2


def varied(images: Tensor, how: str) -> Tensor:
    """Return images [B, C, H, W] varied as `[data] augment` says: "crop-flip", "reflect-crop-flip" or "turn".

    Draws from torch's global generator of the CPU, so that every device varies alike.
    """
    return turned(images) if how == "turn" else crop_and_flip(images, reflect=how == "reflect-crop-flip")


def crop_and_flip(images: Tensor, *, reflect: bool = False) -> Tensor:
    """Shift images [B, C, H, W] by up to 4 pixels and mirror half of them; zeros or mirrored pixels fill edges."""
    import torch

    rows, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, [PADDING] * 4, mode="reflect" if reflect else "constant")
    down, right = torch.randint(0, 2 * PADDING + 1, (2, rows, 1))
    mirrored = torch.rand(rows, 1) < 0.5
    down_to, right_to = down + torch.arange(height), right + torch.arange(width)
    right_to = torch.where(mirrored, right_to.flip(1), right_to)
    row = torch.arange(rows)[:, None, None]
    return padded[row, :, down_to[:, :, None], right_to[:, None, :]].permute(0, 3, 1, 2).contiguous()


def turned(images: Tensor) -> Tensor:
    """Turn each image by any angle about its middle, shift and scale it by up to a tenth, and change its light.

    Contrast and brightness change by up to a fifth. Mirrored pixels fill edges.

    Args:
        images: [B, C, H, W] in [0, 1], like the result.

    Raises:
        RowsError: A pixel is outside [0, 1], and would be cut off.
    """
    import torch

    if images.numel() and (float(images.min()) < 0 or float(images.max()) > 1):
        raise RowsError(
            'augment = "turn" is for pixels in [0, 1], and some here are not; remove it, or what scales them otherwise'
        )
    draw = (torch.rand(6, len(images)) * 2 - 1).to(images)
    angle, scale = math.pi * draw[0], 1 + SCALE * draw[1]
    cosine, sine, ratio = angle.cos() / scale, angle.sin() / scale, images.shape[2] / images.shape[3]
    rows = torch.stack([cosine, -sine * ratio, 2 * SHIFT * draw[2], sine / ratio, cosine, 2 * SHIFT * draw[3]], dim=1)
    grid = torch.nn.functional.affine_grid(rows.view(-1, 2, 3), list(images.shape), align_corners=False)
    moved = torch.nn.functional.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    contrast, brightness = ((1 + LIGHT * draw[4]), LIGHT * draw[5])
    return (moved * contrast[:, None, None, None] + brightness[:, None, None, None]).clamp(0, 1)


PADDING = 4  # pixels
CROPS = ("crop-flip", "reflect-crop-flip")


def cropped(images: NDArray[Any], how: str, rng: np.random.Generator) -> NDArray[Any]:
    """Shift each image by up to 4 pixels either way, and mirror half of them left to right.

    Args:
        images: [B, C, H, W].
        how: One of `CROPS`: zeros fill edges, or mirrored pixels under "reflect-crop-flip".
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
