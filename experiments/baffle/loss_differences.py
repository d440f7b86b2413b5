"""Figure 5: can what BAFFLE uploads be told from what noise in the place of images would give? Tests, not a plot.

    python experiments/baffle/loss_differences.py --data DIR

The paper's appendix D puts Gaussian and Laplacian noise through the network instead of images and finds the K loss
differences hard to tell apart by eye. Here ten silos a round have MNIST's images or noise of the same mean and
deviation a pixel, with classes drawn evenly; all have the round's directions. Asked, of what one silo uploads (without
a secure sum), of the mean over ten silos (what the server sees with one), and of that mean with one silo of noise:

    KS            two-sample Kolmogorov-Smirnov test of the K numbers of one upload beside K of another kind. How often
                  p < 0.05, and as a control how often between two uploads of images. 5 % is chance.
    by shape      a logistic regression on the deviation, skewness and kurtosis of a K-vector: an observer that does
                  not know the directions. Trained on even rounds, accuracy on odd ones, p of a one-sided binomial test.
    by direction  the same on the K-vector's correlation with that of other images, and its slope on it: an observer
                  with images of its own that knows the directions, as the server does.
"""

import argparse
import sys
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from records import SEED, Record, Row, images, name_of, parser, run
from scipy import stats
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from moretta.models import catalogue
from moretta.protocols.baffle.silo.directions import Directions, keys_of
from moretta.protocols.baffle.silo.estimate import differences
from moretta.protocols.baffle.torch_forward import TorchForward, layout_of
from moretta.protocols.common import modules
from moretta.protocols.common.targets import RowLosses

Vectors = NDArray[np.float64]  # [rounds, uploads a round, K]
Kinds = Mapping[str, tuple[NDArray[np.float32], NDArray[np.int64]]]
SILOS = 10
COLUMNS = ("KS statistic", "KS p", "p < 0.05, %", "control, %", "by shape, %", "p", "by direction, %", "p")


def kinds(x: NDArray[np.float32], y: NDArray[np.int64], rows: int) -> Kinds:
    """Return `rows` rows of each kind: images, other images, and noise of the images' mean and deviation."""
    random, (mean, deviation) = np.random.default_rng(SEED), (float(x.mean()), float(x.std()))
    shape = (rows, *x.shape[1:])
    noise = {
        "Gaussian": random.normal(mean, deviation, shape).astype(np.float32),
        "Laplacian": random.laplace(mean, deviation / np.sqrt(2), shape).astype(np.float32),
    }
    told = {name: (pixels, random.integers(0, 10, rows)) for name, pixels in noise.items()}
    return {"images": (x[:rows], y[:rows]), "others": (x[rows : 2 * rows], y[rows : 2 * rows]), **told}


def uploads(model: nn.Module, x: NDArray[np.float32], y: NDArray[np.int64], rounds: int, batch: int, k: int) -> Vectors:
    """Return what ten silos upload in each round, [rounds, 10, K]; a round's directions are the same for every call."""
    layout = layout_of(model)
    forward, at = TorchForward(model, layout), layout.flat(modules.arrays(model))
    found = np.empty((rounds, SILOS, k))
    for number in range(rounds):
        directions = Directions(keys_of(bytes(32), k, "figure 5", number), k, layout.size)
        part = slice(number * SILOS * batch, (number + 1) * SILOS * batch)
        rowwise, _ = differences("mean", 1e-3, directions, forward, RowLosses("cross-entropy"), at, x[part], y[part])
        found[number] = rowwise.reshape(k, SILOS, batch).mean(axis=2).T
    return found


def shape_of(vectors: Vectors) -> Vectors:
    """Return what can be seen of K-vectors without their directions, [rounds, uploads, 3]."""
    spread = np.log(vectors.std(axis=2) + 1e-30)
    return np.stack([spread, stats.skew(vectors, axis=2), stats.kurtosis(vectors, axis=2)], axis=2)


def direction_of(vectors: Vectors, reference: Vectors) -> Vectors:
    """Return how K-vectors lie along one of other images in the same directions, [rounds, uploads, 2]."""
    other = reference.mean(axis=1, keepdims=True)
    inner, size = (vectors * other).sum(axis=2), np.linalg.norm(other, axis=2)
    return np.stack([inner / size / np.linalg.norm(vectors, axis=2), inner / size**2], axis=2)


def told_apart(ones: Vectors, others: Vectors) -> tuple[float, float]:
    """Return a classifier's accuracy on odd rounds, trained on even ones, and p of guessing as well."""
    parts = [part[start::2].reshape(-1, part.shape[2]) for start in (0, 1) for part in (ones, others)]
    x = np.concatenate(parts)
    sizes = [len(part) for part in parts]
    y, trained = np.repeat([0, 1, 0, 1], sizes), sizes[0] + sizes[1]
    classifier = make_pipeline(StandardScaler(), LogisticRegression()).fit(x[:trained], y[:trained])
    right = int((classifier.predict(x[trained:]) == y[trained:]).sum())
    return right / (len(y) - trained), float(stats.binomtest(right, len(y) - trained, alternative="greater").pvalue)


def compared(of: str, real: Vectors, fake: Vectors, reference: Vectors) -> Row:
    """Return the row of one comparison: uploads of images beside uploads of noise."""
    pairs = [(real[r, s], fake[r, s]) for r in range(len(real)) for s in range(real.shape[1])]
    tests = [stats.ks_2samp(one, other) for one, other in pairs]
    controls = [stats.ks_2samp(real[r, s], real[r - 1, s]) for r in range(len(real)) for s in range(real.shape[1])]
    shape = told_apart(shape_of(real), shape_of(fake))
    direction = told_apart(direction_of(real, reference), direction_of(fake, reference))
    figures = (
        float(np.median([test.statistic for test in tests])),
        float(np.median([test.pvalue for test in tests])),
        100 * float(np.mean([test.pvalue < 0.05 for test in tests])),
        100 * float(np.mean([test.pvalue < 0.05 for test in controls])),
    )
    facts = {"uploads_of_each_kind": len(pairs), "p_values": [round(float(test.pvalue), 6) for test in tests]}
    return Row(of, (*figures, 100 * shape[0], shape[1], 100 * direction[0], direction[1]), None, facts)


def rows_of(model: nn.Module, data: Kinds, where: str, batch: int, k: int) -> list[Row]:
    """Return all comparisons at one state of the model."""
    rounds = len(data["images"][0]) // (SILOS * batch)
    seen = {name: uploads(model, x, y, rounds, batch, k) for name, (x, y) in data.items()}
    found = []
    for noise in ("Gaussian", "Laplacian"):
        real, fake, reference = seen["images"], seen[noise], seen["others"]
        found.append(compared(f"{where}, {noise}, one silo", real, fake, reference))
        summed, faked = (part.mean(axis=1, keepdims=True) for part in (real, fake))
        found.append(compared(f"{where}, {noise}, sum of ten", summed, faked, reference))
        mixed = np.concatenate([fake[:, :1], real[:, 1:]], axis=1).mean(axis=1, keepdims=True)
        found.append(compared(f"{where}, {noise}, sum with one of them", summed, mixed, reference))
    return found


def trained(model: nn.Module, x: NDArray[np.float32], y: NDArray[np.int64], steps: int) -> None:
    """Train by Adam, 32 rows a step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for number in range(steps):
        part = np.random.default_rng(number).permutation(len(x))[:32]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.from_numpy(x[part])), torch.from_numpy(y[part])).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def measure(given: argparse.Namespace) -> Record:
    """Compare at the start and after some steps."""
    rounds, batch, k, steps = (8, 4, 64, 50) if given.quick else (20, 8, 100, 200)
    settings = {"model": "lenet", "rounds": rounds, "batch": batch, "k": k, "steps": steps, "silos": SILOS}
    notes = [
        "The paper has a plot and no test. Which noise it means is lost in the text that we have: ours has the mean "
        "and deviation of the images' pixels."
    ]
    title = "Figure 5: loss differences of images beside those of noise, LeNet on MNIST"
    record = Record(name_of(given, "baffle-figure-5"), title, COLUMNS, settings, notes)
    rows = rounds * SILOS * batch
    x, y = images(given, "mnist", 2 * rows + 2000)
    data, model = kinds(x, y, rows), catalogue.build("lenet", inputs=x.shape[1:], outputs=10, seed=SEED)
    for where in ("start", f"after {steps} steps"):
        for row in rows_of(model, data, where, batch, k):
            record.add(row)
        trained(model, x[2 * rows :], y[2 * rows :], steps)
    return record


if __name__ == "__main__":
    sys.exit(run(measure, parser("Measure Figure 5.").parse_args()))
