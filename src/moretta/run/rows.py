"""The rows of a run file, loaded and dealt to silos; no model is built, and no torch is needed."""

from __future__ import annotations

from moretta.config.run_files import RunFile
from moretta.data import domains, partition, sources
from moretta.data.dataset import Dataset
from moretta.data.partition import Distributed
from moretta.data.tables.files import Format


def load_rows(run_file: RunFile) -> tuple[Dataset, Distributed]:
    """Return the data set of a run file, and the same over its silos.

    Raises `moretta.errors.ParameterError` for data that cannot work.
    """
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
        labels=wanted.labels,
        group_column=wanted.group_column,
        schema=run_file.table,
        form=None if wanted.form == Format() else wanted.form,
        image_size=wanted.image_size,
        channels=wanted.channels,
        window=wanted.window,
        spacing=wanted.spacing,
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
