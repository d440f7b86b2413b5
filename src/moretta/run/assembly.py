"""From a run file to a federation: load the data, deal it out, build the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from moretta.config import specification
from moretta.config.run_files import RunFile
from moretta.contract.messages import Array
from moretta.data.grid import GRIDS
from moretta.data.layout import SampleLayout
from moretta.data.rows import SiloData
from moretta.data.silo import Silo
from moretta.data.tables.preparation import ColumnRules
from moretta.data.tables.rows import expansion_of, rules_of
from moretta.data.tables.schema import Schema
from moretta.models import catalogue
from moretta.protocols.common.training import Training
from moretta.run.federation import Federation
from moretta.run.rows import load_columns, load_rows, table_of


class _Rows(NamedTuple):
    """What a run file's rows came to. inputs: the shape of a whole sample. classes: how many, None for numbers."""

    silos: list[Silo]
    test: tuple[Array, Array] | None
    validation: tuple[Array, Array] | None
    inputs: tuple[int, ...]
    outputs: int
    classes: int | None
    feature_names: tuple[str, ...]
    class_names: tuple[str, ...]
    column_rules: ColumnRules | None
    table: Schema | None
    standardise: bool
    layout: SampleLayout | None


def federation_of(run_file: RunFile, out: Path | None) -> Federation:
    """Return the federation that a run file describes; its ``rounds`` and ``seed`` are for `Federation.train`.

    Raises `moretta.errors.ParameterError` for data, a model or settings that cannot work, before anything is written.
    """
    in_columns = run_file.data.in_files and run_file.data.partition in GRIDS
    rows = _of_columns(run_file) if in_columns else _of_rows(run_file)
    # Two classes need one output under the squared error (the papers' own form), a class each under cross-entropy.
    one_hot = rows.test is not None and rows.test[1].ndim > 1
    single = run_file.protocol.loss == "mse" and rows.classes == 2 and not one_hot
    model = catalogue.build(
        run_file.model.source,
        inputs=rows.inputs,
        outputs=1 if single else rows.outputs,
        base=run_file.base,
        seed=run_file.run.seed,
        layout=rows.layout,
        agreed=run_file.agreed,
        **run_file.model.arguments,
    )
    spec = specification.of_run_file(
        run_file,
        task="regression" if rows.classes is None else "classification",
        standardise=rows.standardise,
        table=rows.table,
        insecure_secret_seed=run_file.run.insecure_secret_seed,
    )
    return Federation.of(
        spec,
        model,
        rows.silos,
        test=rows.test,
        validation=rows.validation,
        out=out,
        feature_names=rows.feature_names,
        class_names=rows.class_names,
        table=rows.table,
        column_rules=rows.column_rules,
    )


def _of_rows(run_file: RunFile) -> _Rows:
    """Return rows that are dealt out, or in a file for each silo."""
    dataset, dealt = load_rows(run_file)
    return _Rows(
        [replace(_silo(silo, run_file.protocol), layout=dataset.layout) for silo in dealt.silos],
        (dealt.test.x, dealt.test.y),
        None if dealt.validation is None else (dealt.validation.x, dealt.validation.y),
        dealt.test.x.shape[1:],
        dataset.outputs,
        dataset.classes,
        dealt.feature_names,
        dataset.class_names,
        dataset.column_rules,
        dataset.table,
        dataset.standardise,
        dataset.layout,
    )


def _of_columns(run_file: RunFile) -> _Rows:
    """Return rows whose columns are in different silos' files."""
    silos, test = load_columns(run_file)
    table = table_of(run_file)
    names, classes, rules = expansion_of(table).names, len(table.classes) or None, rules_of(table)
    return _Rows(
        silos, test, None, (len(names),), classes or 1, classes, names, table.classes, rules, table, True, None
    )


def _silo(given: SiloData, protocol: Training) -> Silo:
    """Return a silo with the labels only where it holds them, or where each silo of a row needs them by itself.

    Its rows are in the order of the others' of its row of the grid, as all were dealt from one table.
    """
    joint = getattr(protocol, "vertical", "joint") == "joint"
    y = given.y if given.holds_labels or not joint else given.y[:0]
    aligned = bool(given.columns)
    return Silo(given.name, given.x, y, given.row, given.columns, given.ids, groups=given.groups, aligned=aligned)
