"""External validation: how good a finished run's model is on labelled rows that nobody trained on.

Figures and intervals are those of `moretta.run.intervals`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moretta.contract.wording import LEAST_SHOWN, did_you_mean
from moretta.data.tables.files import is_table, read_columns
from moretta.errors import ParameterError
from moretta.run import trained_model
from moretta.run.intervals import judged
from moretta.run.prediction import rows_of


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
) -> tuple[dict[str, Any], Mapping[int, str]]:
    """Return how good a run's model is on the rows of a table or an .npz file with targets, as `judged` has it.

    Beside it stand the rows that are left out, from 1, as they are not as the schema says, and why. by: a column of the
    table, any, by whose values rows are judged apart too. The rest: as `moretta.run.prediction.predict`.
    Raises `moretta.errors.ParameterError` where the run has no such model, and where rows or targets do not fit.
    """
    found = trained_model.read(folder, true_model=true_model, silo=silo, model=model, allow_code=allow_code)
    written = replace(found.form, **(form or {}))
    rows, _ = rows_of(data, found, written, labelled=True)
    of = found.task, found.loss, found.classes
    together = rows.ids if rows.groups is None else rows.groups
    outputs = found.outputs(rows.x, str(data))
    result = judged(outputs, rows.y, *of, together, str(data))
    if by is None:
        return result, rows.left_out
    if not is_table(data.name):
        raise ParameterError(f"--by {by}: {data} has no columns with names; give a table")
    columns = read_columns(data, written)
    if by not in columns:
        raise ParameterError(f'{data} has no column "{by}" for --by; {did_you_mean(by, columns)}')
    kept = np.setdiff1d(np.arange(len(columns[by])), [row - 1 for row in rows.left_out])
    values, which = np.unique(columns[by][kept].astype(str), return_inverse=True)
    parts = dict[str, Any]()
    for number, value in enumerate(values):
        chosen = np.flatnonzero(which == number)
        if len(chosen) >= LEAST_SHOWN:
            some = None if together is None else together[chosen]
            parts[str(value)] = judged(outputs[chosen], rows.y[chosen], *of, some, str(data))
    return result | {"by": by, "parts": parts, "parts_withheld": len(values) - len(parts)}, rows.left_out
