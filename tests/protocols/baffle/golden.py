"""What the directions are on every machine: hashes of everything that two roles must compute alike.

Run as a program it prints them, so that a test can compute them where a processor's instructions are switched off.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
from numpy.typing import NDArray

from moretta.protocols.baffle.silo.directions import Directions, gaussian_table, keys_of

SECRET = bytes(range(32))
SIZE = 2**15 + 1003  # beyond one step, and no multiple of anything
COUNT = 19
KINDS = {"rademacher": ("rademacher", False), "gaussian": ("gaussian", False), "orthogonal": ("rademacher", True)}
POOL = 64


def directions(kind: str, count: int = COUNT, size: int = SIZE, number: int = 1, pool: int = 0) -> Directions:
    """Directions of one round, from the secret that all tests share."""
    distribution, orthogonal = KINDS[kind]
    keys = keys_of(SECRET, count, "run", number, b"hash", orthogonal=orthogonal, pool=pool)
    return Directions(keys, count, size, distribution, orthogonal=orthogonal)


def parameters(dtype: str) -> NDArray[np.floating]:
    """Numbers without transcendental functions, so that they are the same everywhere."""
    return (((np.arange(SIZE) * 7919) % 10007 - 5003) / 8192).astype(dtype)


def coefficients(count: int = COUNT) -> NDArray[np.float64]:
    """The same, of a round's scalars."""
    return ((np.arange(count) * 31) % 47 - 23) / 7.0


def hashes() -> dict[str, str]:
    """Return SHA-256 of little-endian bytes, by what they are of."""
    found: dict[str, bytes] = {"table": gaussian_table().astype("<i2").tobytes()}
    for pool in (0, POOL):
        found[f"keys/pool {pool}"] = b"".join(keys_of(SECRET, COUNT, "run", 1, b"hash", pool=pool))
    found["keys/orthogonal"] = b"".join(keys_of(SECRET, COUNT, "run", 1, b"hash", orthogonal=True))
    for kind in KINDS:
        found[f"combined/{kind}"] = directions(kind).combine(coefficients()).astype("<f8").tobytes()
        for dtype in ("float32", "float64"):
            for distance in (1e-3, -1e-3):
                vectors = [
                    vector.astype(f"<f{vector.itemsize}").tobytes()
                    for together in directions(kind).perturbed(parameters(dtype), distance)
                    for vector in together
                ]
                found[f"perturbed/{kind}/{dtype}/{distance:g}"] = b"".join(vectors)
    return {name: hashlib.sha256(content).hexdigest() for name, content in found.items()}


if __name__ == "__main__":
    print(json.dumps(hashes(), indent=1))
