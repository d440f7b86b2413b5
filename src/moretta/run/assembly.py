"""From a run file to a federation: load the data, distribute it, build the model."""

from dataclasses import replace
from pathlib import Path

from moretta.config import run_files
from moretta.config.run_files import RunFile
from moretta.data.rows import Subjects
from moretta.data.silo import row_shape
from moretta.models import catalogue
from moretta.run.federation import Federation
from moretta.run.inputs import RunRows
from moretta.run.preview import load


def federation_of(run_file: RunFile, out: Path | None) -> Federation:
    """Return the federation that a run file describes; its ``rounds`` and ``seed`` are for `Federation.train`.

    Raises:
        ParameterError: Data, model or settings cannot work. Nothing has been written.
    """
    loaded = load(run_file)
    joint = getattr(run_file.protocol, "vertical", "joint") == "joint"  # otherwise each silo of a row needs its labels
    silos = [
        replace(silo, y=silo.y if silo.labelled or not joint else silo.y[:0], layout=loaded.layout, labelled=True)
        for silo in loaded.silos
    ]
    test, validation = (None if part is None else (part.x, part.y) for part in (loaded.test, loaded.validation))
    # Two classes need one output under the squared error (the papers' own form), and one each under cross-entropy.
    single = run_file.protocol.loss == "mse" and loaded.classes == 2 and silos[0].y.ndim == 1
    model = catalogue.build(
        run_file.model.source,
        inputs=row_shape(silos),
        outputs=1 if single else loaded.outputs,
        base=run_file.base,
        seed=run_file.run.seed,
        layout=loaded.layout,
        agreed=run_file.agreed,
        **run_file.model.arguments,
    )
    task = "regression" if loaded.classes is None else "classification"
    spec = run_files.specification_of(
        run_file, run_file.run, task=task, standardise=loaded.standardise, table=loaded.table
    )
    groups = None if loaded.test is None else Subjects(loaded.test.ids, loaded.test.groups).whom
    names, rules = (loaded.feature_names, loaded.class_names), loaded.column_rules
    rows = RunRows(silos, test, validation, *names, rules, test_groups=groups)
    return Federation.of(spec, model, rows, out)
