"""Figures of a model, built-in ones and the user's own, each a number by its name, with intervals.

They are figures of a run's test rows, beside the score of the most frequent class or the mean alone. Each has a 95 %
interval by the bootstrap: percentiles over resampled rows, or over whole groups, because rows of one patient are not
independent. It does not cover the randomness of training.

The calibration error has no interval. It is a mean of absolute values, which a small sample makes large even if
probabilities are calibrated, and resampled rows make larger still. Such an interval would lie above the value.

Source: Efron, "Bootstrap Methods: Another Look at the Jackknife", 1979.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moretta.contract.messages import Array
from moretta.data.references import cause
from moretta.data.rows import check_fit
from moretta.data.split import generator, units_of
from moretta.errors import ParameterError
from moretta.protocols.common.targets import (
    BINS,
    CONFUSION_UP_TO,
    classes_of,
    confusion,
    counts_at_positions,
    encode,
    estimates_of,
    overlaps,
    predicted,
    probabilities,
    reliability,
)

Metric = Callable[[Tensor, Tensor], Any]
"""Maps outputs [rows, outputs] and targets, int64[rows] of classes or [rows, outputs] of numbers, to one number."""

SCORES = ("loss", "accuracy", "mse")
BUILT_IN = (
    *SCORES,
    *(f"{of}_{score}" for of in ("mean", "slices") for score in SCORES),  # of several models, in a round's line
    "top5",
    "rows",
    "auc",
    "average_precision",
    "brier",
    "calibration_error",
    "balanced_accuracy",
    "f1",
    "f1_macro",
)
ROWS = 64  # made-up rows for the trial of a metric


def name_of(metric: Metric) -> str:
    """Return the name of a metric's function."""
    return str(getattr(metric, "__name__", type(metric).__name__))


def check(metrics: Sequence[Metric], outputs: int, task: str, dtype: torch.dtype) -> None:
    """Try metrics on made-up rows of all classes. Raises `moretta.errors.ParameterError` for one that fails."""
    names = [name_of(metric) for metric in metrics]
    for name in names:
        if not name.isidentifier() or name in BUILT_IN or names.count(name) > 1:
            raise ParameterError(
                f"metric `{name}`: expected a function with a name of its own, which names its figure and no built-in "
                "one; define it by def, and rename it"
            )
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, outputs, generator=drawn, dtype=dtype)
    y = torch.randn(ROWS, outputs, generator=drawn, dtype=dtype)
    if task == "classification":
        y = torch.arange(ROWS) % max(outputs, 2)
    scores(metrics, x, y)


def scores(metrics: Sequence[Metric], outputs: Tensor, targets: Tensor) -> Mapping[str, float]:
    """Return each metric's figure by its name. Raises `moretta.errors.ParameterError` for one that fails."""
    return {name_of(metric): _score(metric, outputs, targets) for metric in metrics}


def _score(metric: Metric, outputs: Tensor, targets: Tensor) -> float:
    shapes = f"outputs {list(outputs.shape)} and targets {list(targets.shape)}"
    try:
        with torch.no_grad():
            figure = float(metric(outputs.detach().clone(), targets.clone()))
    except Exception as error:
        raise ParameterError(
            f"metric `{name_of(metric)}` of {shapes}: expected one number, and it failed with {cause(error)}; fix it"
        ) from error
    return figure if math.isfinite(figure) else math.nan


TOP5_FROM = 20  # classes


def figures_of_classes(
    outputs: NDArray[np.float64], classes: NDArray[np.int64], loss: str | None, names: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the accuracy and, under a loss, further figures: `metrics`, numbers, and `classes`, tables.

    Args:
        outputs: [rows, outputs].
        classes: The true classes, [rows].
        loss: "mse" or "cross-entropy"; None returns the accuracy alone.
        names: The names of the classes, for the tables; without names they are numbered.
    """
    chosen = predicted(outputs)
    figures: dict[str, Any] = {"accuracy": float((chosen == classes).mean())}
    if loss is None:
        return figures
    if outputs.shape[1] >= TOP5_FROM:
        best = np.argsort(-outputs, axis=1)[:, :5]
        figures["top5"] = float((best == classes[:, None]).any(axis=1).mean())
    count = max(outputs.shape[1], 2)
    counts = confusion(chosen, classes, count)
    brier, bins = None, None
    if np.isfinite(outputs).all():
        chances = probabilities(outputs, loss)
        bins = reliability(chances, chosen == classes)
        brier = float(np.square(chances - np.eye(count)[classes]).sum(axis=1).mean())
    ranks = ranked(rankings(outputs, classes, loss), np.ones((1, len(classes))))
    metrics = {name: float(value[0]) for name, value in ranks.items()} | ({} if brier is None else {"brier": brier})
    metrics |= metrics_of_counts(counts, bins)
    return figures | {"metrics": metrics, "classes": tables_of_counts(counts, bins, names)}


def metrics_of_counts(counts: NDArray[np.int64], bins: NDArray[np.float64] | None) -> dict[str, float]:
    """Return the metrics of `by_counts` of a confusion matrix, and `calibration_error` of a reliability table.

    The latter is the mean over rows of |mean probability - accuracy| of their bin, 0 at best and 1 at worst.

    Source: Guo, Pleiss, Sun, Weinberger, "On Calibration of Modern Neural Networks", 2017.
    """
    metrics = by_counts(np.diag(counts), counts.sum(axis=1), counts.sum(axis=0))
    if bins is not None:
        metrics["calibration_error"] = np.abs(bins[1] - bins[2]).sum() / bins[0].sum()
    return {name: float(value) for name, value in metrics.items() if not np.isnan(value)}


def by_counts(right: Array, rows: Array, chosen: Array) -> dict[str, NDArray[np.float64]]:
    """Return the metrics that follow from counts of classes, NaN if undefined.

    `f1` is of class 1 of two classes. `f1_macro` is the mean over classes that have a row or a prediction.
    `balanced_accuracy` is the mean recall over classes that have a row.

    Args:
        right: [.., classes], a class's correct predictions.
        rows: [.., classes], its rows.
        chosen: [.., classes], its predictions.
    """
    has, counted = rows > 0, rows + chosen > 0
    f1, recall = _f1(right, rows, chosen), right / np.maximum(rows, 1)
    several = np.where(has.sum(axis=-1) > 1, 1.0, np.nan)
    metrics = {"balanced_accuracy": several * _mean_where(has, recall), "f1_macro": several * _mean_where(counted, f1)}
    if rows.shape[-1] == 2:
        metrics["f1"] = several * f1[..., 1]
    return metrics


def _mean_where(mask: NDArray[np.bool_], values: Array) -> NDArray[np.float64]:
    return np.asarray(np.where(mask, values, 0.0).sum(axis=-1) / np.maximum(mask.sum(axis=-1), 1))


def tables_of_counts(
    counts: NDArray[np.int64], bins: NDArray[np.float64] | None, names: Sequence[str] = ()
) -> dict[str, Any]:
    """Return `by_class`, a mapping a class; `confusion`, unless classes are too many; `reliability`, a mapping a bin.

    A class has precision None without predictions, recall None without rows, F1 None without either. Empty bins are
    omitted.

    Args:
        counts: The confusion matrix, [classes, classes], with rows by true class.
        bins: The bins of `reliability`; None omits them.
        names: The names of the classes; without names they are numbered.
    """
    named = list(names) if len(names) == len(counts) else [str(number) for number in range(len(counts))]
    right, rows, chosen = np.diag(counts), counts.sum(axis=1), counts.sum(axis=0)
    f1 = _f1(right, rows, chosen)
    by_class = [
        {
            "class": name,
            "rows": int(rows[k]),
            "predicted": int(chosen[k]),
            "precision": float(right[k] / chosen[k]) if chosen[k] else None,
            "recall": float(right[k] / rows[k]) if rows[k] else None,
            "f1": float(f1[k]) if rows[k] or chosen[k] else None,
        }
        for k, name in enumerate(named)
    ]
    tables: dict[str, Any] = {"by_class": by_class}
    if len(counts) <= CONFUSION_UP_TO:
        tables["confusion"] = counts.tolist()
    return tables if bins is None else tables | {"reliability": _filled_bins(bins)}


def _filled_bins(bins: NDArray[np.float64]) -> list[dict[str, float]]:
    """Return each bin that has rows: its range, the number of its rows, their mean probability and their accuracy."""
    return [
        {
            "from": k / BINS,
            "to": (k + 1) / BINS,
            "rows": int(rows),
            "probability": sure / rows,
            "accuracy": right / rows,
        }
        for k, (rows, sure, right) in enumerate(bins.T.tolist())
        if rows
    ]


def _f1(right: Array, rows: Array, chosen: Array) -> NDArray[np.float64]:
    """Return each class's F1, 2 precision recall / (precision + recall); 0 without a correct prediction."""
    return np.asarray(2 * right / np.maximum(rows + chosen, 1))


Ranking = tuple[NDArray[np.bool_], NDArray[np.float64]]
"""The rows that should have the higher scores, as flags, and all rows' scores."""


def rankings(outputs: NDArray[np.float64], classes: NDArray[np.int64], loss: str) -> list[Ranking]:
    """Return the rankings of a classifier: of rows of class 1 or, with several classes, of each against the rest.

    Empty if a class has no row, or the model diverged.
    """
    count = max(outputs.shape[1], 2)
    if len(np.unique(classes)) < count or not np.isfinite(outputs).all():
        return []
    if outputs.shape[1] <= 2:
        return [(classes == 1, outputs[:, -1] - outputs[:, 0] * (outputs.shape[1] == 2))]
    # One class against the rest needs an order of rows for each class: probabilities under cross-entropy.
    scores = torch.softmax(torch.from_numpy(outputs), 1).numpy() if loss == "cross-entropy" else outputs
    return [(classes == number, scores[:, number]) for number in range(count)]


def at_thresholds(ranking: Ranking, weights: Array) -> tuple[Array, Array]:
    """Return the numbers of those rows, and of the others, that score at least each threshold, the highest first.

    Args:
        ranking: Whether each row is one of those, and its score.
        weights: The number of times that a row counts, [draws, rows].

    Returns:
        Both numbers, [draws, thresholds]; equal scores share one threshold.
    """
    positives, scores = ranking
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))
    of, labels = weights[:, order], positives[order]
    return np.cumsum(of * labels, axis=1)[:, ends], np.cumsum(of * ~labels, axis=1)[:, ends]


def ranked(orders: Sequence[Ranking], weights: Array) -> dict[str, NDArray[np.float64]]:
    """Return the area under the ROC curve and the average precision, means over rankings; empty without any.

    Args:
        weights: The number of times that a row counts, [draws, rows].

    Returns:
        float64[draws] each. The area is Mann and Whitney's U over pairs. Both are NaN in a draw that lacks a class.
    """
    areas, precisions = list[Array](), list[Array]()
    for order in orders:
        true, false = at_thresholds(order, weights)
        hits, passed = (np.diff(side, axis=1, prepend=0.0) for side in (true, false))
        below = false[:, -1:] - false + passed / 2  # a tie counts half
        with np.errstate(invalid="ignore"):
            areas.append((hits * below).sum(axis=1) / (true[:, -1] * false[:, -1]))
            precisions.append((hits * true / np.maximum(true + false, 1.0)).sum(axis=1) / true[:, -1])
    return {"auc": np.mean(areas, axis=0), "average_precision": np.mean(precisions, axis=0)} if orders else {}


RESAMPLES = 1000
MOST_DRAWN = 20_000_000  # outputs in all resamples together; larger files have fewer resamples, 100 at least
AT_ONCE = 2_000_000  # resampled rows that are measured together
INTERVAL = (2.5, 97.5)  # percentiles
UNSURE = "calibration_error"  # the figure without an interval
POINTS = 50  # of a curve, without its beginning

Measure = Callable[[Array], Mapping[str, NDArray[np.float64]]]
"""Maps weights [draws, rows], how often a row was drawn, to each figure, [draws], NaN in a draw that lacks it."""


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
    """Return `rows`; `figures`, each with `value`, `low` and `high`; `baseline`; and tables of classes.

    The calibration error has a `value` only. So has a figure that all resampled rows agree on, such as the accuracy of
    a model without an error, or of rows of one person. Its interval would claim certainty. `baseline` is the accuracy
    of the most frequent class, or the squared error of the mean, of these rows.

    Args:
        outputs: [rows, outputs], from the model.
        y: int64[rows] of classes, numbers [rows, outputs], or masks [rows, positions, 2], whose figures are over all
            positions that count.
        task: "classification" or "regression".
        loss: "mse" or "cross-entropy".
        names: Of the classes; None omits the tables.
        together: The subjects of rows, which are resampled together.
        where: The rows' name in errors.
        threshold: The least probability for class 1 of two, for the figures ``.._at_threshold`` (`best_threshold`).
    """
    check_fit(y, outputs.shape[1], where)
    outputs, classes, size = outputs.astype(np.float64), task == "classification", outputs.size
    scores: dict[str, Any] = {"metrics": {}}
    if y.ndim == 3:
        counts = counts_at_positions(outputs, encode(y, outputs.shape[1], loss, where, np.float64))
        measure, size, totals = _of_masks(counts), counts.size, counts.sum(axis=(0, 2))
        alone = float(totals.max() / max(totals.sum(), 1))
    elif classes:
        y = classes_of(y)
        scores = figures_of_classes(outputs, y, loss, names or ())
        measure, alone = _of_classes(outputs, y, loss, threshold), float(np.bincount(y).max() / len(y))
    else:
        y = y.reshape(outputs.shape)
        outputs = estimates_of(outputs, loss)
        measure, alone = _of_numbers(outputs, y), float(np.square(y - y.mean(axis=0)).mean())
    figures = {
        name: float(values[0]) for name, values in measure(np.ones((1, len(y)))).items() if not np.isnan(values[0])
    }
    units, random = units_of(len(y), together, where), generator(0)
    count, drawn = len(units.sizes), {name: list[Array]() for name in figures}
    draws = int(np.clip(MOST_DRAWN // max(1, size), 100, RESAMPLES))
    each = max(1, AT_ONCE // max(1, len(y)))
    for start in range(0, draws, each):
        batch = range(min(each, draws - start))
        times = [np.bincount(random.integers(0, count, count), minlength=count) for _ in batch]
        measured = measure(np.array(times, np.float64)[:, units.of])
        for name, values in drawn.items():
            values.append(measured[name][np.isfinite(measured[name])])
    estimates = dict[str, dict[str, float]]()
    for name, value in figures.items():
        low, high = _interval(np.concatenate(drawn[name]))
        estimates[name] = {"value": value} | ({"low": low, "high": high} if low < high else {})
    if UNSURE in scores["metrics"]:
        estimates[UNSURE] = {"value": scores["metrics"][UNSURE]}
    result: dict[str, Any] = {"rows": len(y), "units": count, "figures": estimates, "baseline": alone}
    result |= {} if threshold is None else {"threshold": threshold}
    return result | ({} if names is None or not classes else {"classes": scores["classes"]})


def _interval(finite: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.percentile(finite, INTERVAL) if len(finite) else (np.nan, np.nan)
    return float(low), float(high)


def of_counts(counts: NDArray[np.int64]) -> dict[str, tuple[float, float]]:
    """Return intervals of the figures of a confusion matrix, without the rows.

    Resampled counts of its cells are multinomial, so these are `judged`'s intervals over rows.

    Args:
        counts: [classes, classes].
    """
    rows = int(counts.sum())
    drawn = generator(0).multinomial(rows, counts.ravel() / rows, RESAMPLES).reshape(-1, *counts.shape)
    right = np.diagonal(drawn, axis1=1, axis2=2)
    drawn_figures = {
        "accuracy": right.sum(axis=1) / rows,
        **by_counts(right, drawn.sum(axis=2), drawn.sum(axis=1)),
    }
    sure = {name: _interval(values[np.isfinite(values)]) for name, values in drawn_figures.items()}
    return {name: (low, high) for name, (low, high) in sure.items() if low < high}


def best_threshold(outputs: Array, y: Array, loss: str) -> float | None:
    """Return the least probability for class 1 with the best balanced accuracy, the highest of several.

    None unless there are two classes, if rows lack one of them, or if the model diverged.

    Source: Youden, "Index for Rating Diagnostic Tests", 1950.
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
    """Return the measure of resampled rows of classes, by `figures_of_classes`."""
    chosen, count, every = predicted(outputs), max(outputs.shape[1], 2), np.ones(len(y))
    orders, counted = rankings(outputs, y, loss), [(y, chosen == y, count), (y, every, count), (chosen, every, count)]
    distances, at_threshold = None, None
    if threshold is not None:
        at_threshold = _at_threshold(outputs, y, loss, threshold)
    if np.isfinite(outputs).all():
        distances = np.square(probabilities(outputs, loss) - np.eye(count)[y]).sum(axis=1)

    def measure(weights: Array) -> Mapping[str, NDArray[np.float64]]:
        right, rows, taken = (
            np.stack([np.bincount(place, values * draw, most) for draw in weights]) for place, values, most in counted
        )
        total = weights.sum(axis=1)
        brier = {} if distances is None else {"brier": weights @ distances / total}
        by_class = by_counts(right, rows, taken)
        further = {} if at_threshold is None else at_threshold(weights)
        return {"accuracy": right.sum(axis=1) / total, **ranked(orders, weights), **brier, **by_class, **further}

    return measure


def _of_masks(counts: NDArray[np.int64]) -> Measure:
    """Return the measure of resampled rows of masks. counts: as of `counts_at_positions`."""
    flat = counts.reshape(len(counts), -1)
    return lambda weights: overlaps((weights @ flat).reshape(len(weights), *counts.shape[1:]))


def _of_numbers(outputs: Array, y: Array) -> Measure:
    wrong, deviation = outputs - y, y - y.mean(axis=0)
    parts = [errors.mean(axis=1) for errors in (np.square(wrong), np.abs(wrong), np.square(deviation))]

    def measure(weights: Array) -> Mapping[str, NDArray[np.float64]]:
        total = weights.sum(axis=1)
        mse, mae, spread = (weights @ part / total for part in parts)
        spread = spread - np.square(weights @ deviation / total[:, None]).mean(axis=1)  # around the draw's mean
        explained = 1 - mse / np.where(spread > 0, spread, np.nan)
        return {"mse": mse, "rmse": np.sqrt(mse), "mae": mae, "r2": explained}

    return measure


def curves(outputs: Array, y: Array, loss: str) -> dict[str, list[float]]:
    """Return `roc`, recall by false alarm rate, and `precision_recall`, precision by recall, means over rankings.

    Each has its values at equal steps from 0 to 1. Empty without rankings (`rankings`).
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
