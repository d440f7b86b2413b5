"""How much memory it takes to train on a folder of images that come to more than that, and how long reading takes.

A folder is generated, and `moretta train` runs on it in a process of its own; measured is that process's peak of
resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import figure, main
from PIL import Image

SIDE, CHANNELS = 224, 3
TRAIN = "from moretta.commands.main import main; main()"
NETS = """
from torch import nn


def build():
    down = [nn.Conv2d(3, 8, 7, stride=4), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*down, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 2))
"""
RUN = """
[run]
rounds = {rounds}
evaluate-every = {rounds}
[data]
source = "image-folder"
path = "scans"
labels = "labels.csv"
silos = 3
batch-size = 16
[model]
source = "nets:build"
[protocol]
name = "fedsgd"
learning-rate = 0.05
"""


def generate(folder: Path, images: int) -> int:
    """Write PNG files of smooth patterns, whose brightness tells the class; return how many bytes they take."""
    (folder / "scans").mkdir()
    random, size, lines = np.random.default_rng(0), 0, ["file,label"]
    for number in range(images):
        ill = number % 2
        coarse = random.integers(0, 160, (8, 8, CHANNELS)) + 60 * ill
        image = Image.fromarray(coarse.astype(np.uint8)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        path = folder / "scans" / f"{number:06}.png"
        image.save(path, compress_level=1)
        size += path.stat().st_size
        lines.append(f"{path.name},{'ill' if ill else 'fine'}")
    (folder / "labels.csv").write_text("\n".join([*lines, ""]))
    return size


def train(folder: Path, rounds: int, threads: int) -> tuple[float, float, dict[str, Any]]:
    """Train in a process of its own; return the seconds, the peak of its memory in MiB, and its result."""
    (folder / "nets.py").write_text(NETS)
    (folder / "run.toml").write_text(RUN.format(rounds=rounds))
    began, path = time.perf_counter(), [str(Path(__file__).parents[1] / "src"), *sys.path]
    subprocess.run(
        [sys.executable, "-c", TRAIN, "train", "run.toml", "--out", "out"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(path)},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return time.perf_counter() - began, peak, json.loads((folder / "out" / "result.json").read_text())


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Generate, train and measure."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        folder = Path(place)
        size = generate(folder, arguments.images)
        seconds, peak, result = train(folder, arguments.rounds, arguments.threads)
    decoded = arguments.images * CHANNELS * SIDE * SIDE * 4
    return {
        "images": arguments.images,
        "pixels": SIDE,
        "rounds": arguments.rounds,
        "rows_a_round": 3 * 16,
        "accuracy": round(result["test"]["accuracy"], 4),
        "decoded_mib": figure(decoded / 2**20, "MiB"),
        "files_mib": figure(size / 2**20, "MiB"),
        "peak_mib": figure(peak, "MiB"),
        "decoded_over_peak_ratio": figure(decoded / 2**20 / peak, "times"),
        "seconds": figure(seconds, "s"),
    }


if __name__ == "__main__":
    main(
        __doc__ or "",
        run,
        ("--images", {"type": int, "default": 7200}),
        ("--rounds", {"type": int, "default": 60}),
        ("--folder", {"help": "where the files are generated, and removed again; the system's by default"}),
    )
