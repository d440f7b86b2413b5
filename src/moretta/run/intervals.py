"""How sure figures of a model are: each with an interval of 95 per cent, over rows or over whole groups of them.

Figures are those of a run's own test rows (`moretta.run.metrics`), beside what the commonest class or the mean alone
gets. Intervals are by the bootstrap (Efron, 1979): percentiles over rows drawn again, or over whole groups, as rows of
one patient are not independent. They say nothing of how other training would have gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.data.rows import check_fit
from moretta.data.split import generator, units_of
from moretta.run.metrics import figures_of_classes

RESAMPLES = 1000
MOST_DRAWN = 20_000_000  # rows in all resamples together; of larger files there are fewer, 100 at least
INTERVAL = (2.5, 97.5)  # percentiles


def judged(
    outputs: Array,
    y: Array,
    task: str,
    loss: str,
    names: Sequence[str] = (),
    together: NDArray[np.str_] | None = None,
    where: str = "rows",
) -> dict[str, Any]:
    """Return `rows`; `figures`, each with `value`, `low` and `high`; `baseline`; and of classes their tables.

    outputs: [rows, outputs], as the model has them; y: int64[rows] of classes, or numbers [rows, outputs]. names: of
    the classes. together: whom rows are about. baseline: the accuracy of the commonest class here, or the squared error
    of the mean here.
    """
    check_fit(y, outputs.shape[1], where)
    outputs, classes = outputs.astype(np.float64), task == "classification"
    y = y if classes else y.reshape(outputs.shape)
    tables = figures_of_classes(outputs, y, loss, names)["classes"] if classes else None

    def measure(of: NDArray[np.int64]) -> dict[str, float]:
        return _of_classes(outputs[of], y[of], loss) if classes else _of_numbers(outputs[of], y[of])

    figures = measure(np.arange(len(y)))
    drawn = {name: list[float]() for name in figures}
    units, random = units_of(len(y), together, where), generator(0)
    order, ends, count = np.argsort(units.of, kind="stable"), np.cumsum(units.sizes), len(units.sizes)
    for _ in range(int(np.clip(MOST_DRAWN // max(1, len(y)), 100, RESAMPLES))):
        chosen = random.integers(0, count, count)
        sizes = units.sizes[chosen]  # each unit's rows lie behind each other in `order`
        found = measure(order[np.arange(sizes.sum()) + np.repeat(ends[chosen] - np.cumsum(sizes), sizes)])
        for name in figures.keys() & found.keys():
            drawn[name].append(found[name])
    told = {}
    for name, value in figures.items():
        low, high = np.percentile(drawn[name], INTERVAL) if drawn[name] else (np.nan, np.nan)
        told[name] = {"value": value, "low": float(low), "high": float(high)}
    alone = float(np.bincount(y).max() / len(y)) if classes else float(np.square(y - y.mean(axis=0)).mean())
    result: dict[str, Any] = {"rows": len(y), "units": count, "figures": told, "baseline": alone}
    return result | ({"classes": tables} if tables else {})


def _of_classes(outputs: Array, y: Array, loss: str) -> dict[str, float]:
    found = figures_of_classes(outputs, y, loss)
    return {"accuracy": found["accuracy"], **found["metrics"]}


def _of_numbers(outputs: Array, y: Array) -> dict[str, float]:
    wrong = outputs - y
    spread = float(np.square(y - y.mean(axis=0)).mean())
    mse = float(np.square(wrong).mean())
    explained = {"r2": 1 - mse / spread} if spread else {}
    return {"mse": mse, "rmse": float(np.sqrt(mse)), "mae": float(np.abs(wrong).mean()), **explained}
