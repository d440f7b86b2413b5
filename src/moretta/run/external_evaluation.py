"""External validation: how good a finished run's model is on labelled rows that nobody trained on.

Figures are those of a run's own test rows (`moretta.run.metrics`), beside what the commonest class or the mean alone
gets. Each has an interval of 95 per cent by the bootstrap (Efron, 1979): percentiles over rows drawn again, or over
whole groups, as rows of one patient are not independent. It says nothing of how other training would have gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.contract.wording import LEAST_SHOWN, did_you_mean
from moretta.data.rows import check_fit
from moretta.data.split import generator, units_of
from moretta.data.tables.files import is_table, read_columns
from moretta.errors import ParameterError
from moretta.run import trained_model
from moretta.run.metrics import figures_of_classes
from moretta.run.prediction import rows_of
from moretta.run.trained_model import TrainedModel

RESAMPLES = 1000
MOST_DRAWN = 20_000_000  # rows in all resamples together; of larger files there are fewer, 100 at least
INTERVAL = (2.5, 97.5)  # percentiles


def evaluate(
    folder: Path,
    data: Path,
    *,
    by: str | None = None,
    form: Mapping[str, Any] | None = None,
    true_model: bool = False,
    silo: str | None = None,
    model: str | None = None,
    allow_code: bool = False,
) -> dict[str, Any]:
    """Return how good a run's model is on the rows of a table or an .npz file with targets, as `judged` has it.

    Rows that are not as the schema says are left out, `left_out` by number. by: a column of the table, any, by whose
    values rows are judged apart too. The rest: as `moretta.run.prediction.predict`.
    Raises `moretta.errors.ParameterError` where the run has no such model, and where rows or targets do not fit.
    """
    found = trained_model.read(folder, true_model=true_model, silo=silo, model=model, allow_code=allow_code)
    written = replace(found.form, **(form or {}))
    rows, _ = rows_of(data, found, written, labelled=True)
    together = rows.ids if rows.groups is None else rows.groups
    result = judged(found.outputs(rows.x, str(data)), rows.y, found, together, str(data))
    if rows.left_out:
        result["left_out"] = {str(row): why for row, why in rows.left_out.items()}
    if by is None:
        return result
    if not is_table(data.name):
        raise ParameterError(f"--by {by}: {data} has no columns with names; give a table")
    columns = read_columns(data, written)
    if by not in columns:
        raise ParameterError(f'{data} has no column "{by}" for --by; {did_you_mean(by, columns)}')
    kept = np.setdiff1d(np.arange(len(columns[by])), [row - 1 for row in rows.left_out])
    values, which = np.unique(columns[by][kept].astype(str), return_inverse=True)
    outputs, parts = found.outputs(rows.x, str(data)), dict[str, Any]()
    for number, value in enumerate(values):
        chosen = np.flatnonzero(which == number)
        if len(chosen) >= LEAST_SHOWN:
            some = None if together is None else together[chosen]
            parts[str(value)] = judged(outputs[chosen], rows.y[chosen], found, some, str(data))
    return result | {"by": by, "parts": parts, "parts_withheld": len(values) - len(parts)}


def judged(
    outputs: Array, y: Array, model: TrainedModel, together: NDArray[np.str_] | None = None, where: str = "rows"
) -> dict[str, Any]:
    """Return `rows`; `figures`, each with `value`, `low` and `high`; `baseline`; and of classes their tables.

    outputs: [rows, outputs], as the model has them; y: int64[rows] of classes, or numbers [rows, outputs]. together:
    whom rows are about. baseline: the accuracy of the commonest class here, or the squared error of the mean here.
    """
    check_fit(y, outputs.shape[1], where)
    outputs, classes = outputs.astype(np.float64), model.task == "classification"
    y = y if classes else y.reshape(outputs.shape)
    tables = figures_of_classes(outputs, y, model.loss, model.classes)["classes"] if classes else None

    def measure(of: NDArray[np.int64]) -> dict[str, float]:
        return _of_classes(outputs[of], y[of], model.loss) if classes else _of_numbers(outputs[of], y[of])

    figures = measure(np.arange(len(y)))
    drawn = {name: list[float]() for name in figures}
    units, random = units_of(len(y), together, where), generator(0)
    members = np.split(np.argsort(units.of, kind="stable"), np.cumsum(units.sizes)[:-1])
    for _ in range(int(np.clip(MOST_DRAWN // max(1, len(y)), 100, RESAMPLES))):
        chosen = random.integers(0, len(members), len(members))
        found = measure(np.concatenate([members[number] for number in chosen]))
        for name in figures.keys() & found.keys():
            drawn[name].append(found[name])
    told = {}
    for name, value in figures.items():
        low, high = np.percentile(drawn[name], INTERVAL) if drawn[name] else (np.nan, np.nan)
        told[name] = {"value": value, "low": float(low), "high": float(high)}
    alone = float(np.bincount(y).max() / len(y)) if classes else float(np.square(y - y.mean(axis=0)).mean())
    result: dict[str, Any] = {"rows": len(y), "units": len(members), "figures": told, "baseline": alone}
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
