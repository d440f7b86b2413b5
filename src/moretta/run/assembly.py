"""From a run file to a federation: load the data, deal it out, build the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moretta.config import specification
from moretta.config.run_files import RunFile
from moretta.data.dataset import SiloData
from moretta.data.silo import Silo
from moretta.models import catalogue
from moretta.protocols.common.training import Training
from moretta.run.federation import Federation
from moretta.run.rows import load_rows


def federation_of(run_file: RunFile, out: Path | None) -> Federation:
    """Return the federation that a run file describes; its ``rounds`` and ``seed`` are for `Federation.train`.

    Raises `moretta.errors.ParameterError` for data, a model or settings that cannot work, before anything is written.
    """
    run, protocol = run_file.run, run_file.protocol
    dataset, dealt = load_rows(run_file)
    # Two classes need one output under the squared error (the papers' own form), a class each under cross-entropy.
    outputs = 1 if protocol.loss == "mse" and dataset.classes == 2 and dealt.test.y.ndim == 1 else dataset.outputs
    model = catalogue.build(
        run_file.model.source,
        inputs=dealt.test.x.shape[1:],
        outputs=outputs,
        base=run_file.base,
        seed=run.seed,
        layout=dataset.layout,
        **run_file.model.arguments,
    )
    spec = specification.of_run_file(
        run_file,
        task=dataset.task,
        standardise=dataset.standardise,
        model_source=catalogue.source_digest(run_file.model.source, run_file.model.arguments, run_file.base),
        table=dataset.table,
    )
    return Federation.of(
        spec,
        model,
        [replace(_silo(silo, protocol), layout=dataset.layout) for silo in dealt.silos],
        test=(dealt.test.x, dealt.test.y),
        validation=None if dealt.validation is None else (dealt.validation.x, dealt.validation.y),
        out=out,
        feature_names=dealt.feature_names,
        class_names=dataset.class_names,
        table=dataset.table,
        column_rules=dataset.column_rules,
    )


def _silo(given: SiloData, protocol: Training) -> Silo:
    """Return a silo with the labels only where it holds them, or where each silo of a row needs them by itself.

    Its rows are in the order of the others' of its row of the grid, as all were dealt from one table.
    """
    joint = getattr(protocol, "vertical", "joint") == "joint"
    y = given.y if given.holds_labels or not joint else given.y[:0]
    aligned = bool(given.columns)
    return Silo(given.name, given.x, y, given.row, given.columns, given.ids, groups=given.groups, aligned=aligned)
