"""Scores of models on rows: of one model, of a run's current models, and of its last ones."""

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moretta.contract.messages import Tensors
from moretta.data.silo import Silo
from moretta.data.tables.preparation import Preparation
from moretta.models.checks import dtype_of
from moretta.protocols.common import modules
from moretta.protocols.common.enrolment import inputs_of
from moretta.protocols.common.enrolment import targets as encode_targets
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.modules import Inputs, outputs_of
from moretta.protocols.common.targets import classes_of, figures_at_positions
from moretta.protocols.common.training import Training
from moretta.protocols.registry import entry_of
from moretta.run.metrics import SCORES, Metric, best_threshold, curves, figures_of_classes, judged, name_of, scores

log = logging.getLogger("moretta")

MANY = 20  # models; of more, only a sample is tested during the run, and only plain scores are kept

LabelledRows = tuple[NDArray[np.generic], NDArray[np.generic]]
"""Inputs [rows, ...] and targets, in the form of the run's data."""


class Evaluator:
    """Score models of one architecture on rows, which it prepares as the silos do.

    Args:
        model: The architecture; it is copied.
        task: "classification" or "regression".
        own: The user's own metrics.
        names: The names of the classes, if known.
    """

    def __init__(
        self,
        model: nn.Module,
        protocol: Training,
        task: str,
        preparation: Callable[[], Preparation],
        own: Sequence[Metric] = (),
        names: Sequence[str] = (),
    ) -> None:
        self._module = copy.deepcopy(model)
        self._loss, self._judged_by = protocol.loss, entry_of(protocol).judged_by
        self._task, self._preparation, self._own, self._names = task, preparation, own, names
        self._undefined = set[str]()  # metrics without a number, each reported once

    def of_model(self, tensors: Tensors, rows: LabelledRows, *, own: bool = True) -> dict[str, Any]:
        """Return one model's scores, as `evaluate` does. own: include the user's metrics."""
        return self._scores(tensors, self._prepared(rows[0]), rows[1], own=own)

    def of_models(self, models: Mapping[str, Tensors], rows: LabelledRows) -> dict[str, Any]:
        """Return the scores of a run's models: of the common one, or the mean or the worst of silos' own models.

        Beside the worst are the means over models on all rows and, as `slices`, each model on its own part of the rows.
        `classes`, the tables of a classifier (`moretta.run.metrics`), are of the only model or the worst.

        Args:
            models: The models by silo; "" is the common one.
        """
        inputs, metrics, parts = self._prepared(rows[0]), len(models) <= MANY, list[dict[str, Any]]()
        scores, cuts = dict[str, dict[str, Any]](), slices(len(rows[0]), len(models))
        tables = dict[str, Any]()
        for number, (name, tensors) in enumerate(models.items()):
            scores[name] = self._scores(tensors, inputs, rows[1], metrics)
            tables[name] = scores[name].pop("classes", None)
            if self._judged_by == "worst" and cuts:
                cut = cuts[number]
                parts.append(self._evaluated(inputs[cut], rows[1][cut], metrics=False))
        summary, shown = mean_of(list(scores.values())), tables[name] if len(scores) == 1 else None
        if self._judged_by == "worst":
            # A loss that is not finite is the worst; else by accuracy if the scores have it, else by loss.
            order = {
                key: (not math.isfinite(of["loss"]), -of.get("accuracy", 0.0), of["loss"]) for key, of in scores.items()
            }
            name = max(order, key=lambda key: order[key])
            summary = {**scores[name], "worst": {"silo": name, **scores[name]}, "mean": summary}
            summary, shown = summary | ({"slices": mean_of(parts)} if parts else {}), tables[name]
        return summary | ({"classes": shown} if shown else {}) | ({"per_silo": scores} if len(scores) > 1 else {})

    def on_the_way(
        self, models: Mapping[str, Tensors], test: LabelledRows | None, validation: LabelledRows | None
    ) -> dict[str, float]:
        """Return the current models' scores on test and validation rows, for a round's line."""
        figures: dict[str, float] = {}
        sample = sample_of(models)
        for part, rows in (("test", test), ("validation", validation)):
            if rows is not None and sample:
                scores = self.of_models(sample, rows)
                figures |= {f"{part}_{key}": scores[key] for key in SCORES if key in scores}
                own = map(name_of, self._own)
                figures |= {f"{part}_{key}": scores["metrics"][key] for key in own if key in scores["metrics"]}
                for what in ("mean", "slices"):
                    of = scores.get(what, {})
                    figures |= {f"{part}_{what}_{key}": of[key] for key in SCORES if key in of}
        return figures

    def at_the_end(
        self,
        models: Mapping[str, Tensors],
        test: LabelledRows | None,
        displacement: Callable[[], Tensors] | None,
        by_silos: Mapping[str, Any],
        training: Sequence[Silo],
        subjects: NDArray[np.str_] | None = None,
    ) -> dict[str, Any]:
        """Return the scores of a run's last models for ``result.json``.

        Args:
            models: By silo; "" is the common one.
            displacement: Returns that of confined models, as a model of its own.
            by_silos: Silos' scores on their held-out rows.
            training: Silos on whose rows the common model is scored too, without the user's metrics, which may be
                undefined there, such as on rows of one class.
            subjects: The subjects of the test rows.
        """
        scores = self.of_models(models, test) if test is not None and models else {}
        shown = scores["worst"]["silo"] if "worst" in scores else next(iter(models)) if len(models) == 1 else None
        if test is not None and shown is not None:
            scores |= self._surely(models[shown], test, subjects, {**scores, **scores["metrics"]})
        if by_silos:
            scores |= by_silos if test is None else {"silos": by_silos}
        if test is not None and displacement is not None:
            scores["displacement"] = self.of_model(displacement(), test)
        if "" in models and training:
            # The tables are omitted, because they would count each silo's classes.
            of = {silo.name: self.of_model(models[""], (silo.x, silo.y), own=False) for silo in training}
            scores["per_silo"] = {
                name: {key: score[key] for key in score if key != "classes"} for name, score in of.items()
            }
        return scores

    def threshold(self, model: Tensors | None, validation: LabelledRows | None) -> float | None:
        """Return the best threshold on validation rows (`best_threshold`); None without a common model."""
        if validation is None or not model or self._task != "classification":
            return None
        return best_threshold(self._outputs(model, validation[0]), classes_of(validation[1]), self._loss)

    def _outputs(self, tensors: Tensors, x: NDArray[np.generic]) -> NDArray[np.floating[Any]]:
        modules.load(self._module, tensors)
        return self._preparation().unscaled(outputs_of(self._module, self._prepared(x)).cpu().numpy())

    def _surely(
        self, tensors: Tensors, rows: LabelledRows, subjects: NDArray[np.str_] | None, figures: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return intervals of one model's figures, the baseline of no model (not for masks), and its curves."""
        outputs, classified = self._outputs(tensors, rows[0]), self._task == "classification"
        y = classes_of(rows[1]) if classified else rows[1].astype(np.float64)
        judgement = judged(outputs, y, self._task, self._loss, None, subjects, "test")
        sure = {
            n: [figure["low"], figure["high"]]
            for n, figure in judgement["figures"].items()
            if n in figures and "low" in figure and n not in map(name_of, self._own)  # such as a `mae` in other units
        }
        own = {"units": judgement["units"], "intervals": sure}
        own |= {} if y.ndim == 3 else {"baseline": judgement["baseline"]}
        return own | ({"curves": drawn} if classified and (drawn := curves(outputs, y, self._loss)) else {})

    def _evaluated(self, inputs: Inputs, y: NDArray[np.generic], **options: Any) -> dict[str, Any]:
        return evaluate(self._module, inputs, y, self._loss, self._task, self._preparation(), **options)

    def _prepared(self, x: NDArray[np.generic]) -> Inputs:
        return inputs_of(x, self._preparation(), dtype_of(self._module))

    def _scores(
        self, tensors: Tensors, inputs: Inputs, y: NDArray[np.generic], metrics: bool = True, own: bool = True
    ) -> dict[str, Any]:
        modules.load(self._module, tensors)
        chosen = self._own if own else ()
        scores = self._evaluated(inputs, y, metrics=metrics, own=chosen, names=self._names)
        for name in map(name_of, chosen if metrics else ()):
            if math.isnan(scores["metrics"][name]) and name not in self._undefined:
                self._undefined.add(name)
                log.warning("metric `%s` was no finite number on %d rows; its figure is left empty there", name, len(y))
        return scores


def slices(rows: int, models: int) -> list[slice]:
    """Return each model's own part of the rows, neighbours, in sizes as equal as possible; none if rows are too few."""
    if not 1 < models <= rows:
        return []
    cuts = [number * rows // models for number in range(models + 1)]
    return [slice(*cut) for cut in pairwise(cuts)]


def sample_of(models: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """Return all models, or an evenly spaced sample if they are many."""
    names = list(models)
    step = max(1, len(names) / MANY)
    return {names[int(number * step)]: models[names[int(number * step)]] for number in range(int(len(names) / step))}


def mean_of(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of each figure that all scores have."""
    mean: dict[str, Any] = {}
    for key, value in scores[0].items():
        if isinstance(value, Mapping):
            mean[key] = mean_of([score[key] for score in scores])
        elif all(key in score for score in scores):
            mean[key] = value if len(scores) == 1 else float(np.mean([score[key] for score in scores]))
    return mean


def evaluate(
    model: nn.Module,
    inputs: Inputs,
    y: NDArray[np.generic],
    loss: str,
    task: str,
    preparation: Preparation | None = None,
    *,
    metrics: bool = True,
    own: Sequence[Metric] = (),
    names: Sequence[str] = (),
) -> dict[str, Any]:
    """Return `rows`, `loss`, `accuracy` for classes (and `mse` under that loss) or `mse` for numbers, and `metrics`.

    The loss is without label smoothing and class weights; mse is that of `torch.nn.MSELoss`, the mean over rows and
    outputs. Classes also have tables, `classes` (`moretta.run.metrics.tables_of_counts`).

    Args:
        inputs: [rows, ...], prepared as in training.
        y: Classes, or targets in the data's units, which all figures have.
        loss: "mse" or "cross-entropy".
        task: "classification" or "regression".
        preparation: The targets' scale in training, if they were scaled.
        metrics: Whether to compute metrics; false if many models are measured.
        own: Further metrics.
        names: Of the classes, for the tables.
    """
    outputs = outputs_of(model, inputs).cpu()
    if preparation is not None:
        outputs = torch.from_numpy(preparation.unscaled(outputs.numpy()))
    targets = encode_targets(y, outputs.shape[1], loss, "test", outputs.dtype)
    figures: dict[str, Any] = {"rows": len(outputs), "loss": float(Loss(loss)(outputs, targets))}
    classes = None
    if loss == "mse":
        of_masks = targets.ndim == 3
        figures["mse"] = (
            figures["loss"] * 2 / outputs.shape[1] if of_masks else float((outputs - targets).square().mean())
        )
    if task == "classification":
        classes = classes_of(y)
        figures |= figures_of_classes(outputs.double().numpy(), classes, loss if metrics else None, names)
    metrics_of_model = dict(figures.get("metrics", {}))
    if metrics and targets.ndim == 3:
        metrics_of_model |= figures_at_positions(outputs.double().numpy(), targets.numpy())
    if metrics:
        metrics_of_model |= scores(own, outputs, targets if classes is None else torch.from_numpy(classes))
    return figures | {"metrics": metrics_of_model}


def largest_relative_difference(
    ours: Mapping[str, NDArray[np.generic]], theirs: Mapping[str, NDArray[np.generic]]
) -> float:
    """Return the largest, over tensors, of max |a - b| / max |b|; infinity if a number in either is not finite."""
    largest = 0.0
    for name, reference in theirs.items():
        if reference.dtype.kind == "f" and reference.size:
            a, b = (tensor.astype(np.float64) for tensor in (ours[name], reference))
            if not (np.isfinite(a).all() and np.isfinite(b).all()):
                return math.inf
            largest = max(largest, float(np.abs(a - b).max()) / (float(np.abs(b).max()) or 1.0))
    return largest
