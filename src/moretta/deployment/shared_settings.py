"""The settings that sites receive of a run file, and both sides' federations: the server's without rows, a site's own.

A run file stays with the server. Sites receive what their role needs: the protocol, the model's name and arguments,
the shape of rows, the settings of sums. They do not receive the place of results, the server's test rows, a model to
start from, and secrets' seeds. Where a protocol hides the model, its first parameters do not follow from the shared
settings (`server_side`).
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tomli_w

from moretta.config import run_files
from moretta.config.run_files import RunFile, shared, specification_of
from moretta.config.silo_file import SiloFile
from moretta.data.alignment.partner import Alignment
from moretta.data.datasets import table_of_part, table_parts
from moretta.data.reading import ExpectedRows, Source, read
from moretta.data.rows import Rows, Subjects, check_apart
from moretta.data.settings import GRIDS, label_holders, shape_of_grid
from moretta.data.silo import Silo, aligned, holding_back
from moretta.data.split import cut
from moretta.deployment import site_policy
from moretta.errors import ParameterError
from moretta.models import catalogue
from moretta.protocols.common.own_loss import named
from moretta.protocols.common.specification import Specification
from moretta.protocols.registry import entry_of
from moretta.secure_aggregation.settings import SecureAggregation

if TYPE_CHECKING:
    from torch import nn

    from moretta.run.federation import Federation


def shared_text(run_file: RunFile) -> str:
    """Return the settings that sites receive, as TOML that `moretta.config.run_files.loads` reads."""
    return run_files.dumps(shared(run_file))


def shared_sums(secure: SecureAggregation, who: str) -> str:
    """Return the settings of sums, as TOML for another framework's sites (`site_policy.permitted_sums`).

    Args:
        who: The caller's name in errors.

    Raises:
        ParameterError: The scheme is not "pairwise", or an identity is set.
    """
    if secure.scheme != "pairwise" or secure.identity is not None:
        raise ParameterError(
            f'{who} needs scheme = "pairwise" and no identity, which sites name themselves; correct secure'
        )
    return tomli_w.dumps(secure.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"roster"}))


def server_side(run_file: RunFile, out: Path) -> Federation:
    """Return the server's federation: every silo remote.

    Unless `[protocol] warm-start` names initial weights, they are drawn from the operating system and not from `[run]
    seed`, which sites know. So if the protocol hides the model from silos (pbpfl), no silo can rebuild it. Two runs of
    one seed over other silos then do not begin with the same uploads. Confined starts (cgd) lie around a point that all
    sites compute, so it follows from the seed.

    Raises:
        ParameterError: The settings are invalid.
    """
    from moretta.run.federation import Federation  # it needs torch, which may be absent at a site
    from moretta.run.inputs import RunRows

    drawn = not entry_of(run_file.protocol).seeded_start and run_file.protocol.warm_start is None
    secret = (
        drawn and run_file.run.insecure_secret_seed is None
    )  # in tests all secrets are derived, and nothing is hidden
    seed = secrets.randbits(63) if secret else run_file.run.seed
    silos, model = silos_of(run_file), _model(run_file, seed)
    spec = _specification(run_file, {"device": "cpu"})
    test, tested = _test_rows(run_file)
    return Federation.of(spec, model, RunRows(silos, test, tested=tested), out)


def site_side(run_file: RunFile, site: SiloFile) -> Federation:
    """Return a site's federation: its own rows, and every other silo remote.

    Args:
        run_file: The result of `moretta.deployment.site_policy.admit`.

    Raises:
        ParameterError: The site's file, its rows and the run do not fit each other.
    """
    from moretta.run.federation import Federation
    from moretta.run.inputs import RunRows

    model = site_policy.fitting_model(site, lambda: _model(run_file, run_file.run.seed))
    silos, names = silos_at(run_file, site)
    spec = specification_at(run_file, site)
    return Federation.of(spec, model, RunRows(silos, feature_names=names))


def specification_at(run_file: RunFile, site: SiloFile) -> Specification:
    """Return a site's specification. An edge site imports no code that the run names."""
    own = {"device": site.limits.device, "insecure_secret_seed": site.silo.insecure_secret_seed}
    aggregation = site.with_keys(run_file.secure_aggregation)
    spec = _specification(run_file, own, aggregation, imports=not site.silo.edge)
    if site.limits.micro_batch is None:
        return spec
    return replace(spec, engine=spec.engine.model_copy(update={"micro_batch": site.limits.micro_batch}))


def silos_at(run_file: RunFile, site: SiloFile) -> tuple[list[Silo], tuple[str, ...]]:
    """Return the run's silos, the site's own with its rows and all others remote, and its columns' names.

    Raises:
        ParameterError: Its rows do not have the form that the run describes.
    """
    name, silos = site.silo.name, {silo.name: silo for silo in silos_of(run_file)}
    mine = silos[name]
    expected = _expected_rows(run_file)
    if expected.table is not None and mine.columns:
        expected = replace(expected, table=table_of_part(expected.table, mine.columns, labelled=mine.labelled))
    expected = replace(expected, inputs=mine.x.shape[1:], labelled=mine.labelled)
    of = site.data
    source = Source(of.source, of.form, of.path, of.labels, site.base, site.mapping)
    rows = read(source, expected, f"silo `{name}`")
    mine = replace(mine, x=rows.x, y=rows.y, ids=rows.ids, groups=rows.groups, remote=False, aligned=of.rows_in_order)
    if of.alignment is not None:
        mine = aligned(mine, Alignment.load(site.base / of.alignment))
    mine = holding_back(mine, of.test_fraction, "test-fraction")
    silos[name] = mine if of.test is None else _tested_on(mine, of.test, source, expected)
    return list(silos.values()), rows.names


def _tested_on(silo: Silo, test: str, source: Source, expected: ExpectedRows) -> Silo:
    """Return a silo with its own rows to score models on. source: of its training rows."""
    where = f"silo `{silo.name}`: [data] test"
    if silo.columns:
        raise ParameterError(f"{where} would hold back other rows than the other holders of its row do; remove it")
    own = source._replace(source=test) if source.labels is None else source._replace(labels=Path(test))
    rows = read(own, expected, where)
    check_apart(Rows(silo.x, silo.y, silo.ids, silo.groups), rows, where)
    return replace(silo, held_out=(rows.x, rows.y))


def model_digest(federation: Federation, run_file: RunFile) -> str:
    """Return the SHA-256, in hex, by which server and sites check before round one that they have the same model.

    It covers the tensors' names, shapes and dtypes. For a model that is not built in, it also covers the file of its
    function, because layers that compute differently may have the same tensors. Other code of the run counts likewise.
    Versions of Moretta are compared separately.
    """
    from moretta.protocols.common import modules  # which needs torch

    code = catalogue.code_of(run_file.model.source, run_file.base, run_file.agreed)
    for own in run_file.protocol.own_code.values():
        code += b"\0" + catalogue.code_of(named(own), run_file.base, run_file.agreed)
    return hashlib.sha256(modules.schema(federation.model).encode() + code).hexdigest()


def silos_of(run_file: RunFile) -> list[Silo]:
    """Return the run's silos, all remote, with the form of their rows."""
    data, names = run_file.data, run_file.engine.sites
    kind = np.int64 if data.tokens is True else np.float32
    shape, layout = _expected_rows(run_file).inputs, data.layout
    if data.partition not in GRIDS:
        x, y = np.empty((0, *(shape or ())), kind), np.empty(0, np.int64)
        if run_file.masks is not None:
            y = np.empty((0, math.prod(run_file.masks.shape), 2), np.float32)  # a class and a weight at each position
        return [Silo(name, x, y, remote=True, layout=layout) for name in names]
    parts, holders = _column_parts(run_file), label_holders(data)
    joint = getattr(run_file.protocol, "vertical", "joint") == "joint"
    silos = []
    for number, name in enumerate(names):
        row, part = divmod(number, len(parts))
        labelled = not joint or holders[row] == part + 1
        x = np.empty((0, len(parts[part])), kind)
        silo = Silo(name, x, np.empty(0, np.int64), f"row-{row + 1}", parts[part], None, True, labelled)
        silos.append(silo)
    return silos


def _expected_rows(run_file: RunFile) -> ExpectedRows:
    data, table, masks = run_file.data, run_file.table, run_file.masks
    if table is not None:
        if table.target is None:
            raise ParameterError('[data] schema: expected a column of kind "target", which the run learns to predict')
        if data.inputs is None:
            return ExpectedRows.of_table(table)
        of_table = ExpectedRows.of_table(table, image=data.image)
        return replace(of_table, inputs=data.shape, mask=masks and masks.shape)
    if data.inputs is None:  # `RunFile` has checked it
        raise ParameterError("[data] inputs is missing; set it to the shape of a sample")
    tokens, may_lack = data.tokens is True, data.missing != "error"
    expected = ExpectedRows(data.shape, tokens, data.classes, data.outputs, may_lack=may_lack, layout=data.layout)
    return expected if masks is None else replace(expected, classes=None, outputs=masks.classes, mask=masks.shape)


def _column_parts(run_file: RunFile) -> list[tuple[int, ...]]:
    """Return the indices of each column part's columns."""
    data = run_file.data
    _, count = shape_of_grid(data)
    if run_file.table is not None:
        return table_parts(run_file.table, data.columns, count)
    total = int(np.prod(_expected_rows(run_file).inputs or ()))
    if data.columns is None:
        return [tuple(map(int, part)) for part in cut(np.arange(total), count, None)]
    parts = []
    for part in data.columns:
        if not all(isinstance(column, int) for column in part):
            raise ParameterError(
                "[data] columns: without a schema expected indices from 0, because names are the sites' own"
            )
        parts.append(tuple(column for column in part if isinstance(column, int)))
    return parts


def _model(run_file: RunFile, seed: int) -> nn.Module:
    """Build the model. seed: of its weights."""
    expected = _expected_rows(run_file)
    classes = 1 if run_file.protocol.loss == "mse" and expected.classes == 2 else expected.classes
    return catalogue.build(
        run_file.model.source,
        inputs=expected.inputs or (),
        outputs=classes or expected.outputs or 1,
        base=run_file.base,
        seed=seed,
        layout=expected.layout,
        agreed=run_file.agreed,
        **run_file.model.arguments,
    )


def _specification(
    run_file: RunFile,
    own: Mapping[str, object],
    aggregation: SecureAggregation | None = None,
    *,
    imports: bool = True,
) -> Specification:
    """Return the specification of a run whose rows are at sites. own: this machine's own settings of [run]."""
    expected = _expected_rows(run_file)
    return specification_of(
        run_file,
        run_file.run.model_copy(update=dict(own)),
        task="regression" if expected.classes is None else "classification",
        table=run_file.table,
        standardise=len(expected.inputs or ()) == 1 and not expected.tokens and expected.layout is None,
        aggregation=aggregation,
        imports=imports,
    )


def _test_rows(run_file: RunFile) -> tuple[tuple[np.ndarray, np.ndarray] | None, Subjects | None]:
    """Return the server's test rows, with their ids and groups."""
    data = run_file.data
    if data.test is None:
        return None, None
    expected = _expected_rows(run_file)
    if expected.image is not None:  # a server's own images are arrays that it prepared
        expected = replace(expected, table=None, image=None)
    rows = read(Source(data.test, data.form, base=run_file.base), expected, "[data] test")
    return (rows.x, rows.y), Subjects(rows.ids, rows.groups)
