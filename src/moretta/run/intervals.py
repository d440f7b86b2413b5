"""How sure figures of a model are: each with an interval of 95 per cent, over rows or over whole groups of them.

Figures are those of a run's own test rows (`moretta.run.metrics`), beside what the commonest class or the mean alone
gets. Intervals are by the bootstrap (Efron, 1979): percentiles over rows drawn again, or over whole groups, as rows of
one patient are not independent. They say nothing of how other training would have gone.

The calibration error has none. It is a mean of absolute values, which few rows make large also where probabilities are
calibrated, and rows drawn again make larger still: such an interval lies above the value that it is about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.data.rows import check_fit
from moretta.data.split import generator, units_of
from moretta.protocols.common.targets import counts_at_positions, encode, overlaps, predicted, probabilities
from moretta.run.metrics import at_thresholds, by_counts, figures_of_classes, ranked, rankings

RESAMPLES = 1000
MOST_DRAWN = 20_000_000  # outputs in all resamples together; of larger files there are fewer, 100 at least
AT_ONCE = 2_000_000  # rows of resamples that are measured together
INTERVAL = (2.5, 97.5)  # percentiles
UNSURE = "calibration_error"  # the figure without an interval
POINTS = 50  # of a curve, beside its beginning

Measure = Callable[[Array], Mapping[str, NDArray[np.float64]]]
"""Of weights [draws, rows], how often a row was drawn: each figure, [draws], NaN where a draw has none."""


def judged(
    outputs: Array,
    y: Array,
    task: str,
    loss: str,
    names: Sequence[str] | None = (),
    together: NDArray[np.str_] | None = None,
    where: str = "rows",
    threshold: float | None = None,
) -> dict[str, Any]:
    """Return `rows`; `figures`, each with `value`, `low` and `high`; `baseline`; and of classes their tables.

    The calibration error has a `value` alone.

    outputs: [rows, outputs], as the model has them; y: int64[rows] of classes, numbers [rows, outputs], or masks
    [rows, positions, 2], of which figures are over all positions that count. names: of the classes; None leaves their
    tables out. together: whom rows are about. baseline: the accuracy of the commonest class here, or the squared error
    of the mean here. threshold: the probability from which on a row is taken for class
    1 of two, for the figures ``.._at_threshold`` (`best_threshold`).
    """
    check_fit(y, outputs.shape[1], where)
    outputs, classes, size = outputs.astype(np.float64), task == "classification", outputs.size
    scores: dict[str, Any] = {"metrics": {}}
    if y.ndim == 3:
        counts = counts_at_positions(outputs, encode(y, outputs.shape[1], loss, where, np.float64))
        measure, size, there = _of_masks(counts), counts.size, counts.sum(axis=(0, 2))
        alone = float(there.max() / max(there.sum(), 1))
    elif classes:
        scores = figures_of_classes(outputs, y, loss, names or ())
        measure, alone = _of_classes(outputs, y, loss, threshold), float(np.bincount(y).max() / len(y))
    else:
        y = y.reshape(outputs.shape)
        measure, alone = _of_numbers(outputs, y), float(np.square(y - y.mean(axis=0)).mean())
    figures = {
        name: float(values[0]) for name, values in measure(np.ones((1, len(y)))).items() if not np.isnan(values[0])
    }
    units, random = units_of(len(y), together, where), generator(0)
    count, drawn = len(units.sizes), {name: list[Array]() for name in figures}
    draws = int(np.clip(MOST_DRAWN // max(1, size), 100, RESAMPLES))
    each = max(1, AT_ONCE // max(1, len(y)))
    for start in range(0, draws, each):
        some = range(min(each, draws - start))
        times = [np.bincount(random.integers(0, count, count), minlength=count) for _ in some]
        measured = measure(np.array(times, np.float64)[:, units.of])
        for name, values in drawn.items():
            values.append(measured[name][np.isfinite(measured[name])])
    figures_told = dict[str, dict[str, float]]()
    for name, value in figures.items():
        low, high = _interval(np.concatenate(drawn[name]))
        figures_told[name] = {"value": value, "low": low, "high": high}
    if UNSURE in scores["metrics"]:
        figures_told[UNSURE] = {"value": scores["metrics"][UNSURE]}
    result: dict[str, Any] = {"rows": len(y), "units": count, "figures": figures_told, "baseline": alone}
    result |= {} if threshold is None else {"threshold": threshold}
    return result | ({} if names is None or not classes else {"classes": scores["classes"]})


def _interval(finite: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.percentile(finite, INTERVAL) if len(finite) else (np.nan, np.nan)
    return float(low), float(high)


def of_counts(counts: NDArray[np.int64]) -> dict[str, tuple[float, float]]:
    """Return intervals of the figures that follow from a confusion matrix, [classes, classes], where rows are unknown.

    How often each cell comes up among rows drawn again is multinomial, so these are `judged`'s intervals over rows.
    """
    rows = int(counts.sum())
    drawn = generator(0).multinomial(rows, counts.ravel() / rows, RESAMPLES).reshape(-1, *counts.shape)
    right = np.diagonal(drawn, axis1=1, axis2=2)
    drawn_figures = {
        "accuracy": right.sum(axis=1) / rows,
        **by_counts(right, drawn.sum(axis=2), drawn.sum(axis=1)),
    }
    return {name: _interval(values[np.isfinite(values)]) for name, values in drawn_figures.items()}


def best_threshold(outputs: Array, y: Array, loss: str) -> float | None:
    """Return from which probability on a row is best taken for class 1, by balanced accuracy; None but for two classes.

    It is the highest of several (Youden, 1950). Where rows lack a class, or the model diverged, there is none.
    """
    if outputs.shape[1] > 2 or not rankings(outputs, y, loss):
        return None
    of_class_1 = probabilities(outputs.astype(np.float64), loss)[:, 1]
    true, false = (side[0] for side in at_thresholds((y == 1, of_class_1), np.ones((1, len(y)))))
    return float(np.unique(of_class_1)[::-1][np.argmax(true / true[-1] - false / false[-1])])


def _at_threshold(outputs: Array, y: Array, loss: str, threshold: float) -> Measure:
    hits = (probabilities(outputs, loss)[:, 1] >= threshold) == (y == 1)

    def measure(weights: Array) -> Mapping[str, NDArray[np.float64]]:
        right, rows = ([weights @ (values & (y == of)) for of in (1, 0)] for values in (hits, np.ones_like(hits)))
        with np.errstate(invalid="ignore"):
            sensitivity, specificity = right[0] / rows[0], right[1] / rows[1]
        both = {"sensitivity": sensitivity, "specificity": specificity}
        both["balanced_accuracy"] = (sensitivity + specificity) / 2
        return {f"{name}_at_threshold": values for name, values in both.items()}

    return measure


def _of_classes(outputs: Array, y: Array, loss: str, threshold: float | None = None) -> Measure:
    """Return what measures drawn rows of classes, as `figures_of_classes` does rows that each count once."""
    chosen, count, every = predicted(outputs), max(outputs.shape[1], 2), np.ones(len(y))
    orders, counted = rankings(outputs, y, loss), [(y, chosen == y, count), (y, every, count), (chosen, every, count)]
    distances, at_threshold = None, None
    if threshold is not None:
        at_threshold = _at_threshold(outputs, y, loss, threshold)
    if np.isfinite(outputs).all():
        distances = np.square(probabilities(outputs, loss) - np.eye(count)[y]).sum(axis=1)

    def measure(weights: Array) -> Mapping[str, NDArray[np.float64]]:
        right, rows, taken = (
            np.stack([np.bincount(place, values * some, most) for some in weights]) for place, values, most in counted
        )
        total = weights.sum(axis=1)
        brier = {} if distances is None else {"brier": weights @ distances / total}
        by_class = by_counts(right, rows, taken)
        further = {} if at_threshold is None else at_threshold(weights)
        return {"accuracy": right.sum(axis=1) / total, **ranked(orders, weights), **brier, **by_class, **further}

    return measure


def _of_masks(counts: NDArray[np.int64]) -> Measure:
    """Return what measures drawn rows of masks. counts: as of `counts_at_positions`."""
    flat = counts.reshape(len(counts), -1)
    return lambda weights: overlaps((weights @ flat).reshape(len(weights), *counts.shape[1:]))


def _of_numbers(outputs: Array, y: Array) -> Measure:
    wrong, deviation = outputs - y, y - y.mean(axis=0)
    parts = [errors.mean(axis=1) for errors in (np.square(wrong), np.abs(wrong), np.square(deviation))]

    def measure(weights: Array) -> Mapping[str, NDArray[np.float64]]:
        total = weights.sum(axis=1)
        mse, mae, spread = (weights @ part / total for part in parts)
        spread = spread - np.square(weights @ deviation / total[:, None]).mean(axis=1)  # around the draw's own mean
        explained = 1 - mse / np.where(spread > 0, spread, np.nan)
        return {"mse": mse, "rmse": np.sqrt(mse), "mae": mae, "r2": explained}

    return measure


def curves(outputs: Array, y: Array, loss: str) -> dict[str, list[float]]:
    """Return `roc`, recall by rate of false alarms, and `precision_recall`, precision by recall, means over rankings.

    Each has so many values, at equal steps from 0 to 1. Empty where nothing is ranked (`rankings`).
    """
    at, drawn = np.linspace(0.0, 1.0, POINTS + 1), list[Any]()
    for ranking in rankings(outputs.astype(np.float64), y, loss):
        true, false = (side[0] for side in at_thresholds(ranking, np.ones((1, len(y)))))
        recall = true / true[-1]
        precision = (true / (true + false))[np.searchsorted(recall, at - 1e-12)]
        drawn.append([np.interp(at, [0.0, *(false / false[-1])], [0.0, *recall]), precision])
    return (
        dict(zip(("roc", "precision_recall"), np.mean(drawn, axis=0).round(4).tolist(), strict=True)) if drawn else {}
    )
