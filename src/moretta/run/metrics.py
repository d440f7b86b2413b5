"""Metrics of the user's own: functions of a model's outputs and the targets of rows, each a number by its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moretta.contract.messages import Array
from moretta.data.references import cause
from moretta.errors import ParameterError
from moretta.protocols.common.targets import BINS, CONFUSION_UP_TO, confusion, predicted, probabilities, reliability

Metric = Callable[[Tensor, Tensor], Any]
"""Of outputs [rows, outputs] and targets, int64[rows] of classes and [rows, outputs] of numbers; gives one number."""

BUILT_IN = (
    "loss",
    "accuracy",
    "mse",
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
ROWS = 64  # made up, on which a metric is tried


def name_of(metric: Metric) -> str:
    """Return the name of a metric's function."""
    return str(getattr(metric, "__name__", type(metric).__name__))


def check(metrics: Sequence[Metric], outputs: int, task: str, dtype: torch.dtype) -> None:
    """Try metrics on made-up rows of all classes. Raises `moretta.errors.ParameterError` for one that fails."""
    names = [name_of(metric) for metric in metrics]
    for name in names:
        if not name.isidentifier() or name in BUILT_IN or names.count(name) > 1:
            raise ParameterError(
                f"metric `{name}`: expected a function with a name of its own, by which its figure is called, and not "
                "one of the built-in figures; define it by def, and rename it"
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
            f"metric `{name_of(metric)}` of {shapes}: expected one number, and it failed with {cause(error)}; mend it"
        ) from error
    return figure if math.isfinite(figure) else math.nan


TOP5_FROM = 20  # classes


def figures_of_classes(
    outputs: NDArray[np.float64], classes: NDArray[np.int64], loss: str | None, names: Sequence[str] = ()
) -> dict[str, Any]:
    """Return accuracy and the like; under a loss `metrics` too, numbers, and `classes`, tables. None has neither.

    outputs: [rows, outputs]. names: of the classes, for the tables; without any they are numbered.
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
        bins = reliability(chances, classes)
        brier = float(np.square(chances - np.eye(count)[classes]).sum(axis=1).mean())
    ranks = ranked(rankings(outputs, classes, loss), np.ones((1, len(classes))))
    metrics = {name: float(value[0]) for name, value in ranks.items()} | ({} if brier is None else {"brier": brier})
    metrics |= metrics_of_counts(counts, bins)
    return figures | {"metrics": metrics, "classes": tables_of_counts(counts, bins, names)}


def metrics_of_counts(counts: NDArray[np.int64], bins: NDArray[np.float64] | None) -> dict[str, float]:
    """Return the metrics of `by_counts` that a confusion matrix has, and `calibration_error` of a reliability table.

    That is the mean over rows of the |mean probability - accuracy| of their bin, 0 at best and 1 at worst (Guo et al.,
    2017).
    """
    metrics = by_counts(np.diag(counts), counts.sum(axis=1), counts.sum(axis=0))
    if bins is not None:
        metrics["calibration_error"] = np.abs(bins[1] - bins[2]).sum() / bins[0].sum()
    return {name: float(value) for name, value in metrics.items() if not np.isnan(value)}


def by_counts(right: Array, rows: Array, chosen: Array) -> dict[str, NDArray[np.float64]]:
    """Return the metrics that follow from counts of classes, NaN where there is none.

    right, rows, chosen: [.., classes], how many rows of a class are found, have it, and are taken for it. f1: with two
    classes that of class 1. f1_macro: the mean over classes that some row has or that is predicted for one.
    balanced_accuracy: the mean recall over classes that some row has.
    """
    has, there = rows > 0, rows + chosen > 0
    f1, recall = _f1(right, rows, chosen), right / np.maximum(rows, 1)
    several = np.where(has.sum(axis=-1) > 1, 1.0, np.nan)
    metrics = {"balanced_accuracy": several * _mean_where(has, recall), "f1_macro": several * _mean_where(there, f1)}
    if rows.shape[-1] == 2:
        metrics["f1"] = several * f1[..., 1]
    return metrics


def _mean_where(those: NDArray[np.bool_], values: Array) -> NDArray[np.float64]:
    return np.asarray(np.where(those, values, 0.0).sum(axis=-1) / np.maximum(those.sum(axis=-1), 1))


def tables_of_counts(
    counts: NDArray[np.int64], bins: NDArray[np.float64] | None, names: Sequence[str] = ()
) -> dict[str, Any]:
    """Return `by_class`, a mapping a class; `confusion`, of not too many classes; and `reliability`, a mapping a bin.

    A class's precision is None where it is predicted for no row, its recall where it has no row, its F1 where neither.
    Bins without rows are left out.
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
    return tables if bins is None else tables | {"reliability": _told(bins)}


def _told(bins: NDArray[np.float64]) -> list[dict[str, float]]:
    """Return each bin that has rows: its range, its rows, their mean probability and their accuracy."""
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
    """Return each class's F1, 2 precision recall / (precision + recall); 0 where nothing is right."""
    return np.asarray(2 * right / np.maximum(rows + chosen, 1))


Ranking = tuple[NDArray[np.bool_], NDArray[np.float64]]
"""Which rows are to have the higher scores, and all rows' scores."""


def rankings(outputs: NDArray[np.float64], classes: NDArray[np.int64], loss: str) -> list[Ranking]:
    """Return what a classifier puts in order: rows of class 1 or, of several classes, those of each against the rest.

    There is nothing where a class has no row, or the model diverged.
    """
    count = max(outputs.shape[1], 2)
    if len(np.unique(classes)) < count or not np.isfinite(outputs).all():
        return []
    if outputs.shape[1] <= 2:
        return [(classes == 1, outputs[:, -1] - outputs[:, 0] * (outputs.shape[1] == 2))]
    # One class against the rest needs an order of rows for each class, so under cross-entropy probabilities.
    scores = torch.softmax(torch.from_numpy(outputs), 1).numpy() if loss == "cross-entropy" else outputs
    return [(classes == number, scores[:, number]) for number in range(count)]


def at_thresholds(ranking: Ranking, weights: Array) -> tuple[Array, Array]:
    """Return how many of those rows, and of the others, score at least each threshold, the highest first.

    weights: [draws, rows], how often a row counts. Both results are [draws, thresholds]; equal scores have one.
    """
    those, scores = ranking
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))
    of, there = weights[:, order], those[order]
    return np.cumsum(of * there, axis=1)[:, ends], np.cumsum(of * ~there, axis=1)[:, ends]


def ranked(orders: Sequence[Ranking], weights: Array) -> dict[str, NDArray[np.float64]]:
    """Return the area under the ROC curve and the average precision, means over rankings, [draws]; empty of none.

    The area is Mann and Whitney's U over pairs. Either is NaN in a draw that lacks a class.
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
