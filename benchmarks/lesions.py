"""A U-Net of MONAI segments made-up lesions at four silos: Dice under pbpfl and centralised, and seconds a step.

Images have 2-D lesions, ellipses on textured tissue, of other sizes and contrasts at each silo. Steps of pbpfl and of
fedsgd are timed in turn, in seconds of the process, so that other work of the machine counts little.

    python benchmarks/lesions.py --json benchmarks/records/lesions.json
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from moretta import PBPFL, Centralised, Engine, Federation, FedSGD, Silo

SILOS, ROWS, TEST, SIZE = 4, 16, 64, 32
ROUNDS, RATE, BATCH, PAIRS = 60, 1e-2, 8, 5
SETTINGS: dict[str, Any] = {"loss": "mse", "learning_rate": RATE, "optimizer": "adam"}


def lesions(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images float32[rows, 1, size, size], and masks int64[rows, size, size] of 0 and 1."""
    random = np.random.default_rng(seed)
    down, across = np.mgrid[:SIZE, :SIZE] / SIZE
    size, contrast = random.uniform(0.08, 0.14), random.uniform(0.5, 0.9)  # of a silo
    images, masks = np.empty((rows, 1, SIZE, SIZE), np.float32), np.zeros((rows, SIZE, SIZE), np.int64)
    for image, mask in zip(images, masks, strict=True):
        waves = random.uniform(3, 9, (3, 2))
        tissue = sum(np.sin(one * down * 6 + other * across * 6) for one, other in waves) / 8
        for _ in range(random.integers(1, 4)):
            centre, turn = random.uniform(0.2, 0.8, 2), random.uniform(0, np.pi)
            axes = size * random.uniform(0.6, 1.6, 2)
            y, x = down - centre[0], across - centre[1]
            u, v = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
            inside = (u / axes[0]) ** 2 + (v / axes[1]) ** 2 < 1
            mask |= inside
            tissue = tissue + inside * contrast * random.uniform(0.8, 1.2)
        image[0] = tissue + 0.15 * random.normal(size=tissue.shape)
    return images, masks


def network() -> nn.Module:
    """Return MONAI's U-Net with residual units and a 3 x 3 head."""
    from monai.networks.nets import UNet

    torch.manual_seed(0)
    found: nn.Module = UNet(2, 1, 2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1, norm="instance")
    return found


def federation(protocol: Any) -> Federation:
    """Return a run of a protocol on the silos' rows; centralised has them all, in batches of as many rows a step."""
    silos = [Silo(f"silo-{number}", *lesions(number, ROWS)) for number in range(SILOS)]
    batch = BATCH * SILOS if isinstance(protocol, Centralised) else BATCH
    parts = [lesions(100 + number, TEST // SILOS) for number in range(SILOS)]
    test = tuple(np.concatenate(part) for part in zip(*parts, strict=True))
    keywords: dict[str, Any] = {"test": test, "evaluate_every": ROUNDS, "engine": Engine(workers=1)}
    return Federation(network(), silos, protocol, batch_size=batch, **keywords)


def trained(protocol: Any) -> dict[str, Any]:
    """Return what a run's model scores on test rows."""
    result = federation(protocol).train(ROUNDS, seed=1, progress=False)
    found = result.test["metrics"]
    return {"loss": result.test["loss"], **{name: found[name] for name in ("dice_1", "iou_1", "position_accuracy")}}


def seconds() -> dict[str, Any]:
    """Return the seconds of a step of both protocols: medians, and of the ratios of neighbours."""
    pairs = list[tuple[float, float]]()
    runs = [federation(PBPFL(**SETTINGS)), federation(FedSGD(**SETTINGS))]
    for _ in range(PAIRS):
        taken = []
        for run in runs:
            marks = list[float]()
            run.train(4, seed=1, progress=False, on_round=lambda _, marks=marks: marks.append(time.process_time()))
            taken.append((marks[-1] - marks[0]) / 3)  # without set-up
        pairs.append((taken[0], taken[1]))
    ratios = sorted(one / other for one, other in pairs)
    pbpfl, fedsgd = (statistics.median(one) for one in zip(*pairs, strict=True))
    return {"pbpfl": pbpfl, "fedsgd": fedsgd, "ratio": statistics.median(ratios), "ratios": ratios}


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print or write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="the file to write")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    found: dict[str, Any] = {"step": seconds()}
    print(json.dumps(found), flush=True)
    found["centralised"] = trained(Centralised(**SETTINGS))
    print(json.dumps(found["centralised"]), flush=True)
    found["pbpfl"] = trained(PBPFL(**SETTINGS))
    found["dice_apart"] = found["pbpfl"]["dice_1"] - found["centralised"]["dice_1"]
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
