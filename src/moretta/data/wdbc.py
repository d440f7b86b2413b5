"""The Wisconsin Diagnostic Breast Cancer records, from the file that scikit-learn brings with it.

That file is read as `sklearn.datasets.load_breast_cancer` reads it, without importing scikit-learn, which takes nearly
as long as PyTorch.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from moretta.contract.messages import Array

MEASURES = "radius texture perimeter area smoothness compactness concavity concave_points symmetry fractal_dimension"
NAMES = tuple(
    form.format(measure.replace("_", " "))
    for form in ("mean {}", "{} error", "worst {}")
    for measure in MEASURES.split()
)
CLASSES = ("malignant", "benign")


def read_wdbc() -> tuple[Array, Array]:
    """Return inputs, float64[569, 30] in the order of `NAMES`, and int64[569], 0 malignant or 1 benign.

    Raises ImportError without scikit-learn.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    table = np.loadtxt(Path(package.origin).parent / "datasets/data/breast_cancer.csv", delimiter=",", skiprows=1)
    return table[:, :-1], table[:, -1].astype(np.int64)
