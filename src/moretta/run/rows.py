"""The rows of a run file, loaded and dealt to silos; no model is built, and no torch is needed."""

from __future__ import annotations

from moretta.config.run_files import RunFile
from moretta.data import datasets, domains
from moretta.data.partition import Distributed, by_owner, distribute
from moretta.data.settings import GRIDS
from moretta.data.tables.rows import expansion_of, rules_of
from moretta.data.tables.schema import Schema
from moretta.errors import ParameterError


def load(run_file: RunFile) -> Distributed:
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
        return Distributed(silos, test, None, names, table.classes, rules_of(table), table, classes, classes or 1)
    if data.in_files:
        rows = datasets.load_files(data, table_of(run_file), seed=seed, base=base)
        return by_owner(rows, list(data.files))
    rows = datasets.load(data, run_file.table, seed=seed, base=base)
    rows = rows if data.domains is None else domains.into_domains(rows, data.domains, seed)
    return distribute(rows, data, seed)


def table_of(run_file: RunFile) -> Schema:
    """Return the schema of a run file that has one."""
    if run_file.table is None:
        raise ParameterError("[data] schema is missing; name the file that says what columns mean")
    return run_file.table
