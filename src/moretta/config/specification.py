"""Makes the specification of a run (`moretta.protocols.common.specification`).

It is made from a run file (`of_run_file`) or from what Python gave (`moretta.run.python_arguments`). A mark on each key
of a run file says whose it is: the server's own (`SERVER`), each site's own (`SITE`), or else shared with all sites
(`shared`).
"""

from __future__ import annotations

import tomllib

from moretta.config import run_files
from moretta.config.run_files import RunFile
from moretta.contract.settings import SERVER, SITE, Section, mark_of
from moretta.data.tables.schema import Schema
from moretta.engines.settings import Run
from moretta.protocols.common.own_loss import found
from moretta.protocols.common.specification import Specification
from moretta.protocols.common.training import Training
from moretta.secure_aggregation.settings import SecureAggregation


def of_run_file(
    run_file: RunFile,
    run: Run,
    *,
    task: str,
    standardise: bool,
    table: Schema | None = None,
    aggregation: SecureAggregation | None = None,
    imports: bool = True,
) -> Specification:
    """Return the specification of a run file, with its files found beside it.

    Args:
        run: its section, with what is this machine's own: a site takes no seed of secrets but its own, as all of its
            secrets follow from it.
        task, standardise: of the rows, where the run file leaves them open.
        table: the schema of the rows.
        aggregation: a site's own, in the place of the run file's.
        imports: whether what the run file names of code is imported; an edge site imports none.
    """
    data, text = run_file.data, run_files.dump(run_file)
    return Specification(
        run,
        data if data.standardise is not None else data.model_copy(update={"standardise": standardise}),
        _found_start(run_file) if imports else run_file.protocol,
        _found_keys(run_file) if aggregation is None else aggregation,
        run_file.engine,
        task=task,
        table=table,
        metrics=tuple(found(name, run_file.base, run_file.agreed) for name in run.metrics) if imports else (),
        model_source=run_file.model_source if imports else "",
        text=text,
        digest=run_files.digest(run_file),
        given=tomllib.loads(text),
    )


def _found_start(run_file: RunFile) -> Training:
    """Return the protocol's settings with its warm start and its own code found beside the run file."""
    protocol = run_file.protocol
    if protocol.own_code:
        protocol = protocol.with_own_code(run_file.base, run_file.agreed)
    if protocol.warm_start is not None:
        protocol = protocol.model_copy(update={"warm_start": run_file.resolve(protocol.warm_start)})
    return protocol


def _found_keys(run_file: RunFile) -> SecureAggregation:
    """Return [secure-aggregation] with its roster and identities found beside the run file."""
    secure = run_file.secure_aggregation
    if secure.roster is None:
        return secure
    identity = None if secure.identity is None else str(run_file.resolve(secure.identity))
    return secure.model_copy(update={"roster": run_file.resolve(secure.roster), "identity": identity})


def shared(run_file: RunFile) -> RunFile:
    """Return the run file as sites are sent it: each key that is the server's or a site's own is at its default."""
    sections = dict[str, Section]()
    for name in type(run_file).model_fields:
        if isinstance(part := getattr(run_file, name), Section):
            own = (field for field in type(part).model_fields.items() if mark_of(field[1]) in (SERVER, SITE))
            sections[name] = part.model_copy(update={key: known.get_default() for key, known in own})
    return run_file.model_copy(update=sections)
