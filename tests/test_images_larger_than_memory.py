"""A folder that comes to far more than a batch takes the memory of a batch; the benchmark of this name takes 4 GB."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")
SIDE, IMAGES = 256, 256  # 64 MiB in float32

PROGRAM = """
import sys
from pathlib import Path
import torch
from torch import nn
from moretta import Federation, FedSGD, Silo
from moretta.contract import lazy_rows
from moretta.data.images import folder
from moretta.data.images.pixels import ImageForm
from moretta.data.tables import schema
from moretta.engines.usage import status
from moretta.protocols.common import modules

folder.IN_MEMORY = 0
table = schema.of({"columns": {"file": {"kind": "file"}, "label": {"kind": "target", "classes": ["0", "1"]}}})
found = folder.read_labelled(Path("scans"), Path("labels.csv"), ImageForm(), table)
model = nn.Sequential(nn.Conv2d(1, 2, 9, stride=8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 2))

def peak(rows):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    parts = [lazy_rows.taken(found.x, slice(start, rows, 2)) for start in range(2)]
    silos = [Silo(f"silo-{k}", part, found.y[k:rows:2]) for k, part in enumerate(parts)]
    test = lazy_rows.taken(found.x, slice(0, rows)), found.y[:rows]
    Federation(model, silos, FedSGD(), test=test, batch_size=8, standardise=True).train(2)
    return status("VmHWM")

peak(64)  # code is loaded once
few, all = peak(64), peak(len(found.x))
print(all - few)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of memory begin anew on Linux alone")
def test_memory_grows_by_blocks_and_not_by_the_folder(tmp_path: Path) -> None:
    (tmp_path / "scans").mkdir()
    random, lines = np.random.default_rng(0), ["file,label"]
    for number in range(IMAGES):
        pixels = np.kron(random.integers(0, 256, (8, 8)), np.ones((SIDE // 8, SIDE // 8))).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "scans" / f"{number}.png", compress_level=1)
        lines.append(f"{number}.png,{number % 2}")
    (tmp_path / "labels.csv").write_text("\n".join([*lines, ""]))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # so that the peak is what was held
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    # 64 images are 16 MiB, the most of the test rows that is read at once, and the silos read blocks of 4 MiB. So more
    # images take no more memory, but for less than a block of small objects. All at once they would take 48 MiB more.
    growth = float(done.stdout)
    assert growth < 4
