"""Metrics of the user's own: functions of a model's outputs and the targets of rows, each a number by its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moretta.data.references import said
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
            f"metric `{name_of(metric)}` of {shapes}: expected one number, and it failed with {said(error)}; mend it"
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
    metrics = {"auc": _auc(outputs, classes, loss), "brier": brier, **metrics_of_counts(counts, bins)}
    said = {name: value for name, value in metrics.items() if value is not None}
    return figures | {"metrics": said, "classes": tables_of_counts(counts, bins, names)}


def metrics_of_counts(counts: NDArray[np.int64], bins: NDArray[np.float64] | None) -> dict[str, float | None]:
    """Return the metrics that follow from a confusion matrix and from a reliability table, None where there is none.

    f1: with two classes that of class 1. f1_macro: the mean over classes that some row has or that is predicted for
    one. balanced_accuracy: the mean recall over classes that some row has. calibration_error: the mean over rows of the
    |mean probability - accuracy| of their bin, 0 at best and 1 at worst (Guo et al., 2017).
    """
    of_class, there = counts.sum(axis=1) > 0, counts.sum(axis=1) + counts.sum(axis=0) > 0
    f1, recall = _f1(counts), np.diag(counts) / np.maximum(counts.sum(axis=1), 1)
    several = int(of_class.sum()) > 1
    return {
        "balanced_accuracy": float(recall[of_class].mean()) if several else None,
        "f1": float(f1[1]) if len(counts) == 2 and several else None,
        "f1_macro": float(f1[there].mean()) if several else None,
        "calibration_error": None if bins is None else float(np.abs(bins[1] - bins[2]).sum() / bins[0].sum()),
    }


def tables_of_counts(
    counts: NDArray[np.int64], bins: NDArray[np.float64] | None, names: Sequence[str] = ()
) -> dict[str, Any]:
    """Return `by_class`, a mapping a class; `confusion`, of not too many classes; and `reliability`, a mapping a bin.

    A class's precision is None where it is predicted for no row, its recall where it has no row, its F1 where neither.
    Bins without rows are left out.
    """
    named = list(names) if len(names) == len(counts) else [str(number) for number in range(len(counts))]
    right, rows, chosen, f1 = np.diag(counts), counts.sum(axis=1), counts.sum(axis=0), _f1(counts)
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


def _f1(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return each class's F1, 2 precision recall / (precision + recall); 0 where nothing is right."""
    return np.asarray(2 * np.diag(counts) / np.maximum(counts.sum(axis=1) + counts.sum(axis=0), 1))


def _auc(outputs: NDArray[np.float64], classes: NDArray[np.int64], loss: str) -> float | None:
    """Return the area under the ROC curve: of class 1, or one class against the rest averaged over classes."""
    count = max(outputs.shape[1], 2)
    if len(np.unique(classes)) < count or not np.isfinite(outputs).all():
        return None  # a class without a row has no curve, and neither has a model that diverged
    if outputs.shape[1] <= 2:
        return _area(classes == 1, outputs[:, -1] - outputs[:, 0] * (outputs.shape[1] == 2))
    # One class against the rest needs an order of rows for each class, so under cross-entropy probabilities.
    scores = torch.softmax(torch.from_numpy(outputs), 1).numpy() if loss == "cross-entropy" else outputs
    return float(np.mean([_area(classes == number, scores[:, number]) for number in range(count)]))


def _area(those: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    """Return the area under the ROC curve of scores that are to be higher for those: Mann and Whitney's U over pairs.

    By ranks, as importing scikit-learn for it takes longer than most runs of small models.
    """
    _, place, times = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(times) - (times - 1) / 2  # of equal scores the mean of their ranks
    chosen = int(those.sum())
    return float((ranks[place][those].sum() - chosen * (chosen + 1) / 2) / (chosen * (len(those) - chosen)))
