"""Directions on the device that a model runs on, the same bits as `Directions` has them on the CPU.

The keystream is the processor's. A block of eight Rademacher directions goes over in one copy of a byte a parameter,
and is unpacked there; a Gaussian direction in two bytes an entry. Each entry of a perturbed vector is one rounded
addition, and a sum over directions is made of integers, so where it is computed does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moretta.contract.messages import Array
from moretta.protocols.baffle.silo.directions import BLOCK, GAUSSIAN_BITS, STEP, Directions, scaled_back


def perturbed(directions: Directions, at: Array, distance: float, device: torch.device) -> Iterator[Tensor]:
    """Yield parameters + distance d_k for k = 1 .. K, a block together, [m, n]; they are overwritten.

    at: the parameters, float32[n] or float64[n] of the CPU.
    """
    here = torch.from_numpy(at).to(device)
    together = torch.empty((BLOCK, len(at)), dtype=here.dtype, device=device)
    for block in range(-(-directions.count // BLOCK)):
        found = together[: directions.count - block * BLOCK]
        if directions.gaussian:
            _add_gaussian(directions, block, here, float(at.dtype.type(distance * 2.0**-GAUSSIAN_BITS)), found)
        else:
            step = float(at.dtype.type(distance))  # rounded as on the CPU, as the Gaussian's scale is
            _add_signs(_octets(directions, block).to(device), here + step, here - step, found)
        yield found


def combine(directions: Directions, coefficients: NDArray[np.float64], device: torch.device) -> NDArray[np.float64]:
    """Return `Directions.combine`, summed on a device."""
    whole, bits = directions.rounded(coefficients)
    total = torch.zeros(directions.size, dtype=torch.int64, device=device)
    if directions.gaussian:
        for number, entries in enumerate(_each_gaussian(directions)):
            total += int(whole[number]) * entries.to(device).long()
        return scaled_back(total.cpu().numpy(), bits + GAUSSIAN_BITS)
    tables = torch.from_numpy(directions.tables(whole)).to(device)  # of all blocks in one copy
    for block, table in enumerate(tables):
        octets = _octets(directions, block).to(device)
        for start in range(0, directions.size, STEP_ON_DEVICE):
            total[start : start + STEP_ON_DEVICE] += table[octets[start : start + STEP_ON_DEVICE].long()]
    return scaled_back(total.cpu().numpy(), bits)


STEP_ON_DEVICE = 256 * STEP  # parameters whose indices and terms take memory at a time


def _octets(directions: Directions, block: int) -> Tensor:
    return torch.from_numpy(np.concatenate(list(directions.octets(block))))


def _add_signs(octets: Tensor, ahead: Tensor, behind: Tensor, found: Tensor) -> None:
    for bit, vector in enumerate(found):
        torch.where((octets >> bit & 1).bool(), behind, ahead, out=vector)


def _add_gaussian(directions: Directions, block: int, here: Tensor, scale: float, found: Tensor) -> None:
    for entries, vector in zip(directions.quantiles(block), found, strict=True):
        product = torch.from_numpy(entries.astype(np.int16)).to(here.device).to(here.dtype).mul_(scale)
        torch.add(here, product, out=vector)


def _each_gaussian(directions: Directions) -> Iterator[Tensor]:
    for block in range(-(-directions.count // BLOCK)):
        yield from (torch.from_numpy(entries.astype(np.int16)) for entries in directions.quantiles(block))
