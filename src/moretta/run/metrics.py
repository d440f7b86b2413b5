"""Metrics of the user's own: functions of a model's outputs and the targets of rows, each a number by its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moretta.data.references import said
from moretta.errors import ParameterError

Metric = Callable[[Tensor, Tensor], Any]
"""Of outputs [rows, outputs] and targets, int64[rows] of classes and [rows, outputs] of numbers; gives one number."""

BUILT_IN = ("loss", "accuracy", "mse", "top5", "rows", "auc", "brier", "calibration_error", "balanced_accuracy")
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
