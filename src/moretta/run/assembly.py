"""From a run file to a federation: load the data, deal it out, build the model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from moretta.config import specification
from moretta.config.run_files import RunFile
from moretta.config.sections import Data
from moretta.contract.messages import Array
from moretta.data import domains, partition, silo_files, sources
from moretta.data.assemble import Wish
from moretta.data.dataset import Dataset, SiloData
from moretta.data.grid import GRIDS, check_grid
from moretta.data.partition import Distributed
from moretta.data.silo import Silo
from moretta.data.silo_files import TableFile
from moretta.data.tables.files import Format
from moretta.data.tables.preparation import ColumnRules
from moretta.data.tables.rows import expansion_of, rules_of
from moretta.data.tables.schema import Schema
from moretta.errors import ParameterError
from moretta.models import catalogue
from moretta.protocols.common.training import Training
from moretta.run.federation import Federation


class _Rows(NamedTuple):
    """What a run file's rows came to."""

    silos: list[Silo]
    test: tuple[Array, Array] | None
    validation: tuple[Array, Array] | None
    task: str
    inputs: tuple[int, ...]
    outputs: int
    feature_names: tuple[str, ...]
    class_names: tuple[str, ...]
    column_rules: ColumnRules | None
    table: Schema | None
    standardise: bool


def federation_of(run_file: RunFile, out: Path | None) -> Federation:
    """Return the federation that a run file describes; its ``rounds`` and ``seed`` are for `Federation.train`.

    Raises `moretta.errors.ParameterError` for data, a model or settings that cannot work, before anything is written.
    """
    in_columns = run_file.data.in_files and run_file.data.partition in GRIDS
    rows = _rows_of_columns(run_file) if in_columns else _rows(run_file)
    model = catalogue.build(
        run_file.model.source,
        inputs=rows.inputs,
        outputs=rows.outputs,
        base=run_file.base,
        seed=run_file.run.seed,
        **run_file.model.arguments,
    )
    spec = specification.of_run_file(
        run_file,
        task=rows.task,
        standardise=rows.standardise,
        model_source=catalogue.source_digest(run_file.model.source, run_file.model.arguments, run_file.base),
        table=rows.table,
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


def _rows(run_file: RunFile) -> _Rows:
    """Return rows that are dealt out, or in a file for each silo."""
    dataset, dealt = _files(run_file) if run_file.data.in_files else _dealt(run_file)
    one = dataset.classes == 2 and dealt.test.y.ndim == 1
    return _Rows(
        [_silo(silo, run_file.protocol) for silo in dealt.silos],
        (dealt.test.x, dealt.test.y),
        None if dealt.validation is None else (dealt.validation.x, dealt.validation.y),
        dataset.task,
        dealt.test.x.shape[1:],
        _outputs(run_file.protocol, dataset.outputs, one=one),
        dealt.feature_names,
        dataset.class_names,
        dataset.column_rules,
        dataset.table,
        dataset.standardise,
    )


def _outputs(protocol: Training, outputs: int, *, one: bool) -> int:
    """Return how many outputs the model has. one: whether two classes could be told by one output."""
    # Two classes need one output under the squared error (the papers' own form), a class each under cross-entropy.
    return 1 if protocol.loss == "mse" and one else outputs


def _dealt(run_file: RunFile) -> tuple[Dataset, Distributed]:
    """Load a source and deal it out."""
    run, wanted = run_file.run, run_file.data
    dataset = sources.load(
        wanted.source,
        path=wanted.path,
        target=wanted.target,
        task=wanted.task,
        test_fraction=wanted.test_fraction,
        validation_fraction=wanted.validation_fraction,
        encoding=wanted.encoding,
        id_column=wanted.id_column,
        schema=run_file.table,
        form=None if wanted.form == Format() else wanted.form,
        image_size=wanted.image_size,
        missing=wanted.missing,
        seed=run.seed,
        base=run_file.base,
    )
    if wanted.domains is not None:
        dataset = domains.into_domains(dataset, wanted.domains, run.seed)
    return dataset, partition.distribute(
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


def _files(run_file: RunFile) -> tuple[Dataset, Distributed]:
    """Read a file for each silo, of whole rows."""
    wanted, fractions = run_file.data, (run_file.data.test_fraction, run_file.data.validation_fraction)
    test, validation = (default if one is None else one for one, default in zip(fractions, (0.2, 0.0), strict=True))
    wish = Wish("the silos' files", wanted.task, test, validation, "error", run_file.run.seed)
    return silo_files.load_rows(_named(wanted), _table(run_file), wish, run_file.base)


def _rows_of_columns(run_file: RunFile) -> _Rows:
    """Return the rows of silos that hold different columns, each in a file of its own, in whatever order."""
    wanted, table = run_file.data, _table(run_file)
    _, count = check_grid(wanted.partition, wanted.silos, wanted.grid, wanted.columns, wanted.label_holder)
    parts = silo_files.table_parts(table, wanted.columns, count)
    given = wanted.label_holder or 1
    holders = [given] * (wanted.silos // count) if isinstance(given, int) else list(given)
    joint = getattr(run_file.protocol, "vertical", "joint") == "joint"
    labelled = [number - 1 for number in holders] if joint else []
    silos = silo_files.load_columns(_named(wanted), table, parts, labelled, run_file.base)
    test = None
    if wanted.test is not None:
        rows = silo_files.read_file(TableFile(wanted.test, wanted.form), table, "[data] test", run_file.base)
        test = rows.x, rows.y if table.classes else rows.y.astype(np.float32)
    task, expansion = "classification" if table.classes else "regression", expansion_of(table)
    outputs = _outputs(run_file.protocol, len(table.classes) or 1, one=len(table.classes) == 2)
    inputs, rules = (len(expansion.names),), rules_of(table)
    return _Rows(silos, test, None, task, inputs, outputs, expansion.names, table.classes, rules, table, True)


def _named(data: Data) -> dict[str, TableFile]:
    """Return each silo's file, and how it is written."""
    return {
        name: TableFile(file, data.form) if isinstance(file, str) else TableFile(file.source, file.form, file.alignment)
        for name, file in data.files.items()
    }


def _table(run_file: RunFile) -> Schema:
    if run_file.table is None:  # `RunFile` has seen to it
        raise ParameterError("[data] schema is missing; name the file that says what columns mean")
    return run_file.table


def _silo(given: SiloData, protocol: Training) -> Silo:
    """Return a silo with the labels only where it holds them, or where each silo of a row needs them by itself.

    Its rows are in the order of the others' of its row of the grid, as all were dealt from one table.
    """
    joint = getattr(protocol, "vertical", "joint") == "joint"
    y = given.y if given.holds_labels or not joint else given.y[:0]
    aligned = bool(given.columns)
    return Silo(given.name, given.x, y, given.row, given.columns, given.ids, groups=given.groups, aligned=aligned)
