"""The rows of a run file, loaded and dealt to silos; no model is built, and no torch is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moretta.config.run_files import RunFile
from moretta.data import datasets, domains, partition
from moretta.data.layout import SampleLayout
from moretta.data.rows import Rows
from moretta.data.settings import GRIDS
from moretta.data.silo import Silo
from moretta.data.tables.preparation import ColumnRules
from moretta.data.tables.rows import expansion_of, rules_of
from moretta.data.tables.schema import Schema
from moretta.errors import ParameterError


class LoadedRows(NamedTuple):
    """What a run file's rows came to. test, validation: None for none. classes: how many, None for numbers."""

    silos: Sequence[Silo]
    test: Rows | None
    validation: Rows | None
    feature_names: tuple[str, ...]
    class_names: tuple[str, ...]
    column_rules: ColumnRules | None
    table: Schema | None
    classes: int | None
    outputs: int
    standardise: bool = True
    layout: SampleLayout | None = None


def load(run_file: RunFile) -> LoadedRows:
    """Return the rows of a run file over its silos: dealt out, or in a file for each.

    Of silos that hold different columns, each in a file of its own, they may be in any order.
    Raises `moretta.errors.ParameterError` for data that cannot work.
    """
    seed, data, base = run_file.run.seed, run_file.data, run_file.base
    if data.source == "sites":
        raise ParameterError(
            "the rows of this run are at its sites, and none are here; train over many machines by moretta serve and "
            "join, or give [data] a source that is on this one"
        )
    if data.in_files and data.partition in GRIDS:
        table, joint = table_of(run_file), getattr(run_file.protocol, "vertical", "joint") == "joint"
        silos, test = datasets.load_columns(data, table, joint=joint, base=base)
        names, classes = expansion_of(table).names, len(table.classes) or None
        return LoadedRows(silos, test, None, names, table.classes, rules_of(table), table, classes, classes or 1)
    if data.in_files:
        found = datasets.load_files(data, table_of(run_file), seed=seed, base=base)
        dealt = partition.by_owner(found, list(data.files))
    else:
        found = datasets.load(data, run_file.table, seed=seed, base=base)
        found = found if data.domains is None else domains.into_domains(found, data.domains, seed)
        dealt = partition.distribute(found, data, seed)
    return LoadedRows(
        dealt.silos,
        dealt.test if len(dealt.test) else None,
        dealt.validation,
        dealt.feature_names,
        found.class_names,
        found.column_rules,
        found.table,
        found.classes,
        found.outputs,
        found.standardise,
        found.layout,
    )


def table_of(run_file: RunFile) -> Schema:
    """Return the schema of a run file that has one."""
    if run_file.table is None:
        raise ParameterError("[data] schema is missing; name the file that says what columns mean")
    return run_file.table
