"""PBPFL's Table IV and Fig. 3, the row "defendability": what DLG finds under each way of hiding a gradient.

    python experiments/audit/table4.py --data DIR [--images 10] [--steps 400] [--json] [--out FILE] [--picture FILE]

DIR (or the environment variable MORETTA_DATA) has `cifar100_subset/`, as for `moretta reproduce`. Under ten minutes on
one core. Each image is one silo's batch of one row, in the first round of training. Its gradient is hidden by

    plain            nothing
    dp 1e-4 .. 1e-1  Gaussian noise of that variance on every entry, as the paper has it: no clipping, no accountant
    floats +-10      a mask of real numbers, uniform in +-10: what secret sharing over the reals leaves of one upload
    ring             the run's own encoding in Z_2^64 under a uniform mask, read back as if there were none

and then DLG (`moretta.audit.evidence.inversion`: L-BFGS on x) looks for the image in what is left. The label is read
off the head's gradient first (iDLG), which makes it stronger than the paper's.

Two figures for each. The paper's is the L2 distance of the gradient of what was found from the image's own true
gradient, |g(found) - g(true)|: higher is better hidden. It says little by itself, as every image far from the true one
has about the same, so beside it stands what an eye sees: the mean squared error of pixels in [0, 1], next to that of
the mean image of other images, which takes no gradient at all. An image counts as found below 1e-3.

Differs from the paper: the network is LeNet with sigmoids, as DLG was shown on, with the weights that a run begins
with; where the paper's ResNet20 bends, at its ReLUs, the derivative of the gradient that DLG descends along is 0. It
gives one figure without a number of images; here are means over images drawn with a fixed seed. Variances are taken as
they stand, and gradients of other networks and losses are of other sizes, so columns of DP are not the paper's. The row
"accuracy" is not reproduced: it takes 200 epochs of ResNet20 for each of six settings. Of the paper's own mechanism the
row "ring" is what Moretta runs, and "floats" near what is printed.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn

from moretta.audit.evidence.inversion import Effort, Gradients, Inputs, invert
from moretta.contract.messages import Array, Tensors
from moretta.data import datasets
from moretta.data.settings import Data
from moretta.protocols.common import modules
from moretta.protocols.common.losses import Loss
from moretta.secure_aggregation.encoding import Ring

sys.path.append(str(Path(__file__).resolve().parents[1]))
from provenance import provenance
from reproduction import as_json

SEED, CLASSES = 0, 100
VARIANCES = (1e-4, 1e-3, 1e-2, 1e-1)
BOUND = 10.0  # of float masks
LIMIT = 1e3  # of an upload's entries in the ring
FOUND = 1e-3  # mean squared error below which an eye sees the image
SHOWN = 6  # images in the picture


def sigmoid_lenet() -> nn.Module:
    """Return DLG's network for 3 x 32 x 32 (Zhu et al., NeurIPS 2019), with the weights that PyTorch begins with."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        layers: list[nn.Module] = [nn.Conv2d(3, 12, 5, padding=2, stride=2), nn.Sigmoid()]
        layers += [nn.Conv2d(12, 12, 5, padding=2, stride=2), nn.Sigmoid(), nn.Conv2d(12, 12, 5, padding=2)]
        return nn.Sequential(*layers, nn.Sigmoid(), nn.Flatten(), nn.Linear(768, CLASSES))


def images(folder: Path, count: int) -> tuple[Array, Array, Array]:
    """Return images [count, 3, 32, 32] in [0, 1] of different test rows, their classes, and other images."""
    dataset = datasets.load(Data(source="cifar100", path=str(folder / "cifar100_subset")), seed=SEED)
    x, y = dataset.test.x, dataset.test.y
    order = np.random.Generator(np.random.PCG64(SEED)).permutation(len(x))
    pixels = np.asarray(x, np.float32)
    pixels = pixels / 255.0 if pixels.max() > 1.5 else pixels
    return pixels[order[:count]], y[order[:count]], pixels[order[count:]]


def gradient(model: nn.Module, x: Array, label: int) -> dict[str, Array]:
    """Return the gradient of one image's loss, by parameter."""
    value = Loss("cross-entropy")(model(torch.tensor(x)[None].to(next(model.parameters()))), torch.tensor([label]))
    trained = modules.trainable(model)
    found = torch.autograd.grad(value, list(trained.values()))
    return {name: one.numpy() for name, one in zip(trained, found, strict=True)}


def hidden(clear: Tensors, how: str, generator: np.random.Generator) -> dict[str, Array]:
    """Return what the server has of an upload that is hidden in one of these ways."""
    if how == "plain":
        return dict(clear)
    if how.startswith("dp"):
        deviation = float(how.removeprefix("dp ")) ** 0.5
        return {n: g + deviation * generator.standard_normal(g.shape) for n, g in clear.items()}
    if how == "floats +-10":
        return {n: g + generator.uniform(-BOUND, BOUND, g.shape) for n, g in clear.items()}
    ring, seen = Ring(64), dict[str, Array]()
    for name, values in clear.items():
        bits = ring.fraction_bits(name, LIMIT, 1, 2)
        words = ring.encode(name, values, 1, bits, 1, 2) + generator.integers(0, 2**64, values.shape, np.uint64)
        seen[name] = ring.decode(words, bits)
    return seen


def tried(model: nn.Module, x: Array, label: int, how: str, inputs: Inputs, steps: int, seed: int) -> dict[str, object]:
    """Return what DLG finds of one image, hidden in one way."""
    clear = gradient(model, x, label)
    seen = hidden(clear, how, np.random.Generator(np.random.PCG64([SEED, seed])))
    guess = int(seen[list(seen)[-1]].argmin())  # the last is the head's bias
    at = Gradients(copy.deepcopy(model), modules.arrays(model), seen, "cross-entropy")
    effort = Effort(starts=1, steps=steps)
    found = invert(at, inputs, 1, CLASSES, labels=np.array([guess]), effort=effort, seed=seed)
    image = np.clip(np.nan_to_num(found.x[0]), 0.0, 1.0)
    again = gradient(model, image.astype(np.float32), guess)
    distance = np.sqrt(sum(float(np.square(again[n] - clear[n]).sum()) for n in clear))
    scale = np.sqrt(sum(float(np.square(one).sum()) for one in clear.values()))
    return {
        "distance": float(distance),
        "relative": float(distance / scale),
        "error": float(np.square(image - x).mean()),
        "label": guess == label,
        "image": image,
    }


def measured(folder: Path, count: int, steps: int, say: bool) -> tuple[dict[str, object], Mapping[str, list[Array]]]:
    """Return the table, and the images shown: the true ones, and those found by each way of hiding."""
    began, model = time.perf_counter(), sigmoid_lenet()
    x, y, others = images(folder, count)
    inputs = Inputs.of(others)
    rows, pictures = [], {"true": list(x[:SHOWN])}
    for how in ("plain", *(f"dp {variance:.0e}" for variance in VARIANCES), "floats +-10", "ring"):
        found = [tried(model, x[n], int(y[n]), how, inputs, steps, n) for n in range(count)]
        pictures[how] = [np.asarray(one["image"]) for one in found[:SHOWN]]
        each = {
            name: np.array([one[name] for one in found], float) for name in ("distance", "relative", "error", "label")
        }
        rows.append(
            {
                "hidden_by": how,
                "gradient_distance": float(each["distance"].mean()),
                "relative_distance": float(each["relative"].mean()),
                "image_error": float(each["error"].mean()),
                "image_error_median": float(np.median(each["error"])),
                "images_found": int(np.sum(each["error"] < FOUND)),
                "labels_right": int(each["label"].sum()),
            }
        )
        if say:
            print(f"{how}: {rows[-1]} ({time.perf_counter() - began:.0f} s)", file=sys.stderr, flush=True)
    mean = float(np.square(x - others.mean(axis=0)).mean())
    table = {"images": count, "steps": steps, "mean_image_error": mean, "rows": rows}
    return table | {"seconds": time.perf_counter() - began}, pictures


def draw(pictures: Mapping[str, list[Array]], file: Path) -> None:
    """Write the images side by side, the way of Fig. 3: a row for each way of hiding."""
    from matplotlib.figure import Figure

    columns = len(pictures["true"])
    figure = Figure(figsize=(1.1 * columns + 1.2, 1.1 * len(pictures)))
    for row, (name, shown) in enumerate(pictures.items()):
        for column, image in enumerate(shown):
            axes = figure.add_subplot(len(pictures), columns, row * columns + column + 1)
            axes.imshow(np.moveaxis(image, 0, -1))
            axes.set_xticks([])
            axes.set_yticks([])
            if not column:
                axes.set_ylabel(name, rotation=0, ha="right", va="center")
    figure.savefig(file, bbox_inches="tight", dpi=120)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("MORETTA_DATA"))
    parser.add_argument("--images", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400, help="of L-BFGS")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="write the same JSON there")
    parser.add_argument("--picture", type=Path, help="write a PNG or SVG there")
    asked = parser.parse_args()
    if asked.data is None:
        parser.error("expected --data DIR, or the environment variable MORETTA_DATA")
    torch.set_num_threads(1)
    table, pictures = measured(Path(asked.data), asked.images, asked.steps, not asked.json)
    if asked.picture:
        draw(pictures, asked.picture)
    if asked.out:
        asked.out.write_text(as_json({**table, **provenance()}))
    if asked.json:
        print(as_json(table), end="")
        return
    print(f"{'hidden by':14}{'|g - g*|':>12}{'relative':>10}{'image error':>13}{'found':>8}{'labels':>8}")
    for row in table["rows"]:  # type: ignore[attr-defined]
        print(
            f"{row['hidden_by']:14}{row['gradient_distance']:12.3g}{row['relative_distance']:10.3g}"
            f"{row['image_error']:13.3g}{row['images_found']:8d}{row['labels_right']:8d}"
        )
    print(f"{'mean image':14}{'':22}{table['mean_image_error']:13.3g}   of {asked.images} images")


if __name__ == "__main__":
    main()
