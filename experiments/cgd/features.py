"""CIFAR-10 seen through a frozen network: what Tables 5 and 6 train their last layers on (`cgd.txt`, section 7.1.2).

    moretta train experiments/cgd/backbone.toml --set data.path=DIR/cifar100_subset --out runs/backbone
    python experiments/cgd/features.py runs/backbone --data DIR

The first trains the network, the second puts all images through it up to the average pooling and writes
`features.npz` beside this file, where `source = "features:cifar10"` of a run file finds it. Both are done once.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from moretta.data.images.sets import load_images, read_npz, scaled
from moretta.errors import MorettaError, ParameterError
from moretta.protocols.common.enrolment import prepared
from moretta.run import trained_model
from moretta.run.evaluation import outputs_of

CACHE = Path(__file__).with_name("features.npz")
ROWS = 2000  # that are prepared at once: as pixels of float32 all of them are 700 MB
PARTS = ("x_train", "y_train", "x_test", "y_test")
Arrays = tuple[NDArray[np.generic], ...]


def cifar10() -> Arrays:
    """Return x_train [50000, 64], y_train, x_test and y_test, as `make` wrote them."""
    if not CACHE.is_file():
        raise ParameterError(
            f"{CACHE} is not there; make it by: python experiments/cgd/features.py runs/backbone --data DIR"
        )
    arrays = read_npz(CACHE)
    return tuple(arrays[part] for part in PARTS)


def make(backbone: Path, images: Path, out: Path = CACHE) -> Arrays:
    """Put the images of a folder (CIFAR-10) through the network of a finished run; write and return what comes out.

    Raises `moretta.errors.ParameterError` where the run has no model, or one that does not end in a linear layer.
    """
    network = trained_model.read(backbone)
    layers = list(network.network.children())
    if not isinstance(network.network, nn.Sequential) or not isinstance(layers[-1], nn.Linear):
        raise ParameterError(f"{backbone}: expected a network that ends in a linear layer, such as a resnet")
    trunk, found = nn.Sequential(*layers[:-1]).eval(), load_images("cifar10", images)
    if found.x_test is None or found.y_test is None:
        raise ParameterError(f"{images}: expected test images beside the training images")

    def transport(pixels: NDArray[np.uint8]) -> NDArray[np.generic]:
        chunks = np.array_split(pixels, max(1, len(pixels) // ROWS))
        inputs = (prepared(scaled(x), network.preparation, network.dtype) for x in chunks)
        return np.concatenate([outputs_of(trunk, x).numpy() for x in inputs])

    arrays = (transport(found.x), found.y, transport(found.x_test), found.y_test)
    np.savez(out, **dict(zip(PARTS, arrays, strict=True)))
    return arrays


def main(words: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Put CIFAR-10 through a trained network; write features.npz.")
    parser.add_argument("backbone", type=Path, help="the run folder of backbone.toml")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the folder that holds cifar10/")
    parser.add_argument("--out", type=Path, default=CACHE, help="the file to write; features.npz beside this script")
    given = parser.parse_args(words)
    try:
        x, _, x_test, _ = make(given.backbone, given.data / "cifar10", given.out)
    except MorettaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{given.out}: {len(x)} rows to train on and {len(x_test)} to test, {x.shape[1]} features")
    return 0


if __name__ == "__main__":
    sys.exit(main())
