"""Augmentation of training images at each use: random crops and mirror images (He et al., CVPR 2016)."""

from __future__ import annotations

import torch
from torch import Tensor

PADDING = 4  # pixels


def crop_and_flip(images: Tensor) -> Tensor:
    """Shift each image by up to 4 pixels either way, with zeros at its edges, and mirror half of them left to right.

    images: [B, C, H, W]. Draws from torch's global generator of the CPU, so that every device varies alike.
    """
    rows, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, [PADDING] * 4)
    down, right = torch.randint(0, 2 * PADDING + 1, (2, rows, 1))
    mirrored = torch.rand(rows, 1) < 0.5
    down_to, right_to = down + torch.arange(height), right + torch.arange(width)
    right_to = torch.where(mirrored, right_to.flip(1), right_to)
    row = torch.arange(rows)[:, None, None]
    return padded[row, :, down_to[:, :, None], right_to[:, None, :]].permute(0, 3, 1, 2).contiguous()
