"""How good a model is on rows that somebody holds: loss, accuracy or mean squared error, and what goes beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moretta.protocols.common.enrolment import targets as encode_targets
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.modules import outputs_of

TOP5_FROM = 20  # classes


def evaluate(
    model: nn.Module, inputs: Tensor, y: NDArray[np.generic], loss: str, task: str, *, metrics: bool = True
) -> dict[str, Any]:
    """Return `rows`, `loss`, then `accuracy` for classes (and `mse` under that loss) or `mse` for numbers, `metrics`.

    inputs: [rows, ...], standardised as in training; y: classes or targets as the run's data has them.
    loss is plain, without label smoothing and class weights; mse is that of `torch.nn.MSELoss`, the mean over rows and
    outputs. metrics: false leaves them out, where many models are measured.
    """
    outputs = outputs_of(model, inputs).cpu()
    wanted = encode_targets(y, outputs.shape[1], loss, "test", outputs.dtype)
    figures: dict[str, Any] = {"rows": len(outputs), "loss": float(Loss(loss)(outputs, wanted))}
    if loss == "mse":
        figures["mse"] = float((outputs - wanted).square().mean())
    if task == "classification":
        flat = y.reshape(len(y)) if y.size == len(y) else y
        classes = flat.astype(np.int64) if flat.ndim == 1 else np.argmax(flat, axis=1)
        figures |= _classification(outputs.double().numpy(), classes, loss if metrics else None)
    return figures | ({"metrics": {}} if "metrics" not in figures else {})


def _classification(outputs: NDArray[np.float64], classes: NDArray[np.int64], loss: str | None) -> dict[str, Any]:
    """Return accuracy and the like; `metrics` too under a loss, none without."""
    single = outputs.shape[1] == 1
    predicted = (outputs[:, 0] > 0.5).astype(np.int64) if single else outputs.argmax(axis=1)
    figures: dict[str, Any] = {"accuracy": float((predicted == classes).mean())}
    if loss is None:
        return figures
    present = np.unique(classes)
    metrics = {"auc": _auc(outputs, classes, loss)}
    if len(present) > 1:
        recalls = [float((predicted[classes == number] == number).mean()) for number in present]
        metrics["balanced_accuracy"] = float(np.mean(recalls))
    if outputs.shape[1] >= TOP5_FROM:
        best = np.argsort(-outputs, axis=1)[:, :5]
        figures["top5"] = float((best == classes[:, None]).any(axis=1).mean())
    return figures | {"metrics": {name: value for name, value in metrics.items() if value is not None}}


def _auc(outputs: NDArray[np.float64], classes: NDArray[np.int64], loss: str) -> float | None:
    """Return the area under the ROC curve: of class 1, or one class against the rest averaged over classes."""
    from sklearn.metrics import roc_auc_score

    count = max(outputs.shape[1], 2)
    if len(np.unique(classes)) < count or not np.isfinite(outputs).all():
        return None  # a class without a row has no curve, and neither has a model that diverged
    if outputs.shape[1] <= 2:
        return float(roc_auc_score(classes, outputs[:, -1] - outputs[:, 0] * (outputs.shape[1] == 2)))
    # One class against the rest needs an order of rows for each class, so under cross-entropy probabilities.
    scores = torch.softmax(torch.from_numpy(outputs), 1).numpy() if loss == "cross-entropy" else outputs
    per_class = [roc_auc_score(classes == number, scores[:, number]) for number in range(count)]
    return float(np.mean(per_class))


def largest_relative_difference(
    ours: Mapping[str, NDArray[np.generic]], theirs: Mapping[str, NDArray[np.generic]]
) -> float:
    """Return the largest, over tensors, of max |a - b| / max |b|."""
    largest = 0.0
    for name, reference in theirs.items():
        if reference.dtype.kind == "f" and reference.size:
            scale = float(np.abs(reference.astype(np.float64)).max()) or 1.0
            largest = max(
                largest, float(np.abs(ours[name].astype(np.float64) - reference.astype(np.float64)).max()) / scale
            )
    return largest
