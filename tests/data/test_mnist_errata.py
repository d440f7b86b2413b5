"""What docs/errata.md says of MNIST's blank pixels, where the data are at hand."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest


def test_two_of_112_column_parts_of_mnist_are_blank_in_every_image(public: Path) -> None:
    if not (folder := public / "mnist").is_dir():
        pytest.skip("MNIST is not at hand")
    files = ("train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte.gz")
    pixels = [np.frombuffer(gzip.decompress((folder / file).read_bytes()), np.uint8, offset=16) for file in files]
    used = np.concatenate(pixels).reshape(70_000, 784).any(axis=0)
    assert {parts: int((~used.reshape(parts, -1).any(axis=1)).sum()) for parts in (7, 49, 112)} == {7: 0, 49: 1, 112: 2}
    labels = np.frombuffer(gzip.decompress((folder / "t10k-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    assert np.bincount(labels).max() == 1135
