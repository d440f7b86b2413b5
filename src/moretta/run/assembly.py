"""From a run file to a federation: load the data, deal it out, build the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moretta.config import specification
from moretta.config.run_files import RunFile
from moretta.data.rows import Subjects
from moretta.data.silo import row_shape
from moretta.models import catalogue
from moretta.run.federation import Federation
from moretta.run.inputs import RunRows
from moretta.run.rows import load


def federation_of(run_file: RunFile, out: Path | None) -> Federation:
    """Return the federation that a run file describes; its ``rounds`` and ``seed`` are for `Federation.train`.

    Raises `moretta.errors.ParameterError` for data, a model or settings that cannot work, before anything is written.
    """
    found = load(run_file)
    joint = getattr(run_file.protocol, "vertical", "joint") == "joint"  # else each silo of a row needs its labels
    silos = [
        replace(silo, y=silo.y if silo.labelled or not joint else silo.y[:0], layout=found.layout, labelled=True)
        for silo in found.silos
    ]
    test, validation = (None if one is None else (one.x, one.y) for one in (found.test, found.validation))
    # Two classes need one output under the squared error (the papers' own form), a class each under cross-entropy.
    single = run_file.protocol.loss == "mse" and found.classes == 2 and silos[0].y.ndim == 1
    model = catalogue.build(
        run_file.model.source,
        inputs=row_shape(silos),
        outputs=1 if single else found.outputs,
        base=run_file.base,
        seed=run_file.run.seed,
        layout=found.layout,
        agreed=run_file.agreed,
        **run_file.model.arguments,
    )
    task = "regression" if found.classes is None else "classification"
    spec = specification.of_run_file(
        run_file, run_file.run, task=task, standardise=found.standardise, table=found.table
    )
    groups = None if found.test is None else Subjects(found.test.ids, found.test.groups).whom
    names, rules = (found.feature_names, found.class_names), found.column_rules
    rows = RunRows(silos, test, validation, *names, rules, test_groups=groups)
    return Federation.of(spec, model, rows, out)
