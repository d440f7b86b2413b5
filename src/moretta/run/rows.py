"""The rows of a run file, loaded and dealt to silos; no model is built, and no torch is needed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moretta.config.run_files import RunFile
from moretta.data import domains, partition, silo_files, sources
from moretta.data.assemble import Wish, check_apart
from moretta.data.grid import check_grid
from moretta.data.partition import Distributed
from moretta.data.rows import Dataset, Subjects
from moretta.data.settings import Data
from moretta.data.silo import Silo
from moretta.data.silo_files import TableFile
from moretta.data.tables.files import Format
from moretta.data.tables.schema import Schema
from moretta.errors import ParameterError


def load_rows(run_file: RunFile) -> tuple[Dataset, Distributed]:
    """Return the data set of a run file, and the same over its silos.

    Raises `moretta.errors.ParameterError` for data that cannot work.
    """
    run, wanted = run_file.run, run_file.data
    if wanted.source == "sites":
        raise ParameterError(
            "the rows of this run are at its sites, and none are here; train over many machines by moretta serve and "
            "join, or give [data] a source that is on this one"
        )
    if wanted.in_files:
        return _load_files(run_file)
    dataset = sources.load(
        wanted.source,
        path=wanted.path,
        target=wanted.target,
        task=wanted.task,
        test_fraction=wanted.test_fraction,
        validation_fraction=wanted.validation_fraction,
        encoding=wanted.encoding,
        id_column=wanted.id_column,
        labels=wanted.labels,
        group_column=wanted.group_column,
        schema=run_file.table,
        form=None if wanted.form == Format() else wanted.form,
        image_size=wanted.image_size,
        channels=wanted.channels,
        window=wanted.window,
        spacing=wanted.spacing,
        channel_mean=wanted.channel_mean,
        channel_deviation=wanted.channel_deviation,
        missing=wanted.missing,
        seed=run.seed,
        base=run_file.base,
    )
    if wanted.domains is not None:
        dataset = domains.into_domains(dataset, wanted.domains, run.seed)
    dealt = partition.distribute(
        dataset,
        wanted.silos,
        wanted.partition,
        run.seed,
        alpha=wanted.alpha,
        sizes=wanted.sizes,
        grid=wanted.grid,
        columns=wanted.columns,
        label_holder=wanted.label_holder,
    )
    return dataset, dealt


def load_columns(run_file: RunFile) -> tuple[list[Silo], tuple[NDArray[np.float32], NDArray[np.generic]] | None]:
    """Return silos that hold different columns, each in a file of its own in whatever order, and the test rows.

    Raises `moretta.errors.ParameterError`, as for files that cannot work, where a test row has an id or a group that a
    silo's training rows have too.
    """
    wanted, table = run_file.data, table_of(run_file)
    _, count = check_grid(wanted.partition, wanted.silos, wanted.grid, wanted.columns, wanted.label_holder)
    parts = silo_files.table_parts(table, wanted.columns, count)
    given = wanted.label_holder or 1
    holders = [given] * (wanted.silos // count) if isinstance(given, int) else list(given)
    joint = getattr(run_file.protocol, "vertical", "joint") == "joint"
    labelled = [number - 1 for number in holders] if joint else []
    silos = silo_files.load_columns(_named(wanted), table, parts, labelled, run_file.base)
    if wanted.test is None:
        return silos, None
    rows = silo_files.read_file(TableFile(wanted.test, wanted.form), table, "[data] test", run_file.base)
    for silo in silos:
        for what, held in Subjects(rows.ids, rows.groups).named().items():
            check_apart(silo.subjects.named()[what], held, len(rows.x), f"silo `{silo.name}`, {what}", "test")
    return silos, (rows.x, rows.y if table.classes else rows.y.astype(np.float32))


def table_of(run_file: RunFile) -> Schema:
    """Return the schema of a run file that has one."""
    if run_file.table is None:
        raise ParameterError("[data] schema is missing; name the file that says what columns mean")
    return run_file.table


def _load_files(run_file: RunFile) -> tuple[Dataset, Distributed]:
    """Read a file for each silo, of whole rows."""
    wanted, fractions = run_file.data, (run_file.data.test_fraction, run_file.data.validation_fraction)
    test, validation = (default if one is None else one for one, default in zip(fractions, (0.2, 0.0), strict=True))
    wish = Wish("the silos' files", wanted.task, test, validation, "error", run_file.run.seed)
    return silo_files.load_rows(_named(wanted), table_of(run_file), wish, run_file.base)


def _named(data: Data) -> dict[str, TableFile]:
    """Return each silo's file, and how it is written."""
    return {
        name: TableFile(file, data.form) if isinstance(file, str) else TableFile(file.source, file.form, file.alignment)
        for name, file in data.files.items()
    }
