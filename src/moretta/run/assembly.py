"""From a run file to a federation: load the data, deal it out, build the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from moretta.config import specification
from moretta.config.run_files import RunFile
from moretta.data.grid import GRIDS
from moretta.data.layout import SampleLayout
from moretta.data.tables.rows import expansion_of, rules_of
from moretta.data.tables.schema import Schema
from moretta.models import catalogue
from moretta.run.federation import Federation
from moretta.run.inputs import RunRows
from moretta.run.rows import load_columns, load_rows, table_of


class _Found(NamedTuple):
    """What a run file's rows came to. inputs: the shape of a whole sample. classes: how many, None for numbers."""

    rows: RunRows
    inputs: tuple[int, ...]
    outputs: int
    classes: int | None
    table: Schema | None
    standardise: bool
    layout: SampleLayout | None


def federation_of(run_file: RunFile, out: Path | None) -> Federation:
    """Return the federation that a run file describes; its ``rounds`` and ``seed`` are for `Federation.train`.

    Raises `moretta.errors.ParameterError` for data, a model or settings that cannot work, before anything is written.
    """
    in_columns = run_file.data.in_files and run_file.data.partition in GRIDS
    found = _of_columns(run_file) if in_columns else _of_rows(run_file)
    # Two classes need one output under the squared error (the papers' own form), a class each under cross-entropy.
    one_hot = found.rows.silos[0].y.ndim > 1
    single = run_file.protocol.loss == "mse" and found.classes == 2 and not one_hot
    model = catalogue.build(
        run_file.model.source,
        inputs=found.inputs,
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
    return Federation.of(spec, model, found.rows, out)


def _of_rows(run_file: RunFile) -> _Found:
    """Return rows that are dealt out, or in a file for each silo."""
    dataset, dealt = load_rows(run_file)
    joint = getattr(run_file.protocol, "vertical", "joint") == "joint"  # else each silo of a row needs its labels
    silos = [
        replace(silo, y=silo.y if silo.labelled or not joint else silo.y[:0], layout=dataset.layout, labelled=True)
        for silo in dealt.silos
    ]
    rows = RunRows(
        silos,
        (dealt.test.x, dealt.test.y) if len(dealt.test) else None,
        None if dealt.validation is None else (dealt.validation.x, dealt.validation.y),
        dealt.feature_names,
        dataset.class_names,
        dataset.column_rules,
        test_groups=dealt.test.groups if len(dealt.test) else None,
    )
    inputs, classes, table = dealt.test.x.shape[1:], dataset.classes, dataset.table
    return _Found(rows, inputs, dataset.outputs, classes, table, dataset.standardise, dataset.layout)


def _of_columns(run_file: RunFile) -> _Found:
    """Return rows whose columns are in different silos' files."""
    silos, test = load_columns(run_file)
    table = table_of(run_file)
    names, classes = expansion_of(table).names, len(table.classes) or None
    held = None if test is None else (test.x, test.y)
    groups = None if test is None else test.groups
    rows = RunRows(silos, held, None, names, table.classes, rules_of(table), test_groups=groups)
    return _Found(rows, (len(names),), classes or 1, classes, table, True, None)
