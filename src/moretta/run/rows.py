"""The rows of a run file, loaded and dealt to silos; no model is built, and no torch is needed."""

from __future__ import annotations

from moretta.config.run_files import RunFile
from moretta.data import datasets, domains, partition
from moretta.data.partition import Distributed
from moretta.data.rows import Rows, Split
from moretta.data.silo import Silo
from moretta.data.tables.schema import Schema
from moretta.errors import ParameterError


def load_rows(run_file: RunFile) -> tuple[Split, Distributed]:
    """Return the rows of a run file, and the same over its silos.

    Raises `moretta.errors.ParameterError` for data that cannot work.
    """
    seed, data = run_file.run.seed, run_file.data
    if data.source == "sites":
        raise ParameterError(
            "the rows of this run are at its sites, and none are here; train over many machines by moretta serve and "
            "join, or give [data] a source that is on this one"
        )
    if data.in_files:
        found = datasets.load_files(data, table_of(run_file), seed=seed, base=run_file.base)
        return found, partition.by_owner(found, list(data.files))
    found = datasets.load(data, run_file.table, seed=seed, base=run_file.base)
    if data.domains is not None:
        found = domains.into_domains(found, data.domains, seed)
    dealt = partition.distribute(
        found,
        data.silos,
        data.partition,
        seed,
        alpha=data.alpha,
        sizes=data.sizes,
        grid=data.grid,
        columns=data.columns,
        label_holder=data.label_holder,
    )
    return found, dealt


def load_columns(run_file: RunFile) -> tuple[list[Silo], Rows | None]:
    """Return silos that hold different columns, each in a file of its own in whatever order, and the test rows."""
    joint = getattr(run_file.protocol, "vertical", "joint") == "joint"
    return datasets.load_columns(run_file.data, table_of(run_file), joint=joint, base=run_file.base)


def table_of(run_file: RunFile) -> Schema:
    """Return the schema of a run file that has one."""
    if run_file.table is None:
        raise ParameterError("[data] schema is missing; name the file that says what columns mean")
    return run_file.table
