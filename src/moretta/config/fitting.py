"""Whether the sections of a run file fit each other. Each check raises ParameterError, in one sentence."""

from __future__ import annotations

from moretta.contract.settings import kebab
from moretta.contract.wording import either, shown
from moretta.data.settings import Data
from moretta.data.tables.schema import Schema
from moretta.engines.settings import Engine, Run
from moretta.errors import ParameterError
from moretta.protocols.common.training import Training
from moretta.protocols.registry import ENTRIES, entry_of
from moretta.secure_aggregation.settings import ROSTER_AND_IDENTITY, SecureAggregation


def check_fit(
    run: Run, data: Data, protocol: Training, secure: SecureAggregation, engine: Engine, table: Schema | None
) -> None:
    """Check all sections. table: what the columns of the rows mean."""
    entry = entry_of(protocol)
    if engine.simulates and engine.name not in entry.simulations:
        raise ParameterError(f'[engine] name = "{engine.name}" simulates cgd alone; {protocol.name} needs "in-process"')
    if data.partition == "same-rows" and protocol.privacy is not None:
        raise ParameterError(
            '[data] partition = "same-rows" gives every silo the same rows, and epsilon is of rows that one silo '
            "has; remove it, or dp-noise and dp-clip"
        )
    _check_sites(run, data, protocol, secure, engine)
    _check_shape(data, table)
    if engine.edge and not entry.edge:
        raise ParameterError(
            f"[engine] edge: edge clients only run models forward, as baffle has it, and {protocol.name} has not; "
            "remove it"
        )
    if run.early_stopping is not None and not _has_validation(data):
        raise ParameterError(
            "[run] early-stopping needs rows to validate on; give [data] validation-fraction, for example 0.1"
        )
    faults = engine.faults
    for fault in () if faults is None else (*faults.drop, *faults.delay, *faults.corrupt):
        if fault.round > run.rounds + 1:
            raise ParameterError(
                f"[engine.faults] round = {fault.round} never comes: [run] rounds is {run.rounds}, and the "
                "release is one more"
            )
    if secure.least > data.silos > 1:
        raise ParameterError(
            f"[secure-aggregation] min-survivors = {secure.least}, and [data] silos is {data.silos}; "
            "give at most as many"
        )
    if not entry.summed or secure.scheme == "none" or engine.simulates:
        return  # nothing is summed in secret, so nothing below can go wrong
    if data.silos == 1:
        raise ParameterError(
            f'[secure-aggregation] scheme = "{secure.scheme}" needs two silos or more, and [data] silos is 1; '
            'one silo needs scheme = "none"'
        )
    if secure.ring_bits < entry.ring_bits:
        raise ParameterError(
            f"[secure-aggregation] ring-bits = {secure.ring_bits} is too coarse for {entry.name}, whose "
            f"corrections multiply the rounding; use ring-bits = {entry.ring_bits}"
        )


def _check_sites(run: Run, data: Data, protocol: Training, secure: SecureAggregation, engine: Engine) -> None:
    """Check that rows at sites and the engine that reaches them come together."""
    flare = engine.name == "flare"
    if flare != data.at_sites:
        raise ParameterError(
            '[engine] name = "flare" and [data] source = "sites" belong together: where silos are on machines of '
            f"their own, each one's silo.toml names its rows, and a run file never does; got name = "
            f'"{engine.name}" and source = {shown(data.source)}'
        )
    if secure.roster is not None and (secure.identity is None) != flare:
        raise ParameterError(
            "[secure-aggregation] identity is each site's own, in its silo.toml; remove it here"
            if flare
            else ROSTER_AND_IDENTITY
        )
    if not flare:
        return
    if not entry_of(protocol).many_machines:
        raise ParameterError(
            f"[protocol] {protocol.name} is a baseline for one machine, with nothing to do for many; choose "
            f"{either(name for name, entry in ENTRIES.items() if entry.many_machines)}"
        )
    if run.early_stopping is not None:
        raise ParameterError("[run] early-stopping goes back to the best round, which sites do not keep; remove it")
    if len(engine.sites) != data.silos:
        raise ParameterError(
            f"[engine] sites names {len(engine.sites)} silos and [data] silos is {data.silos}; make them alike"
        )


def _check_shape(data: Data, table: Schema | None) -> None:
    """Check that what the rows at sites are like is said once: by a schema, or by shapes."""
    if table is not None and table.name_of("file") is not None and data.at_sites:
        return _check_images(data)
    for name in ("window", "spacing", "channel_mean") if data.at_sites else ():
        if getattr(data, name) is not None:
            raise ParameterError(
                f"[data] {kebab(name)} is for images, which a schema names in a column of files; remove it"
            )
    if table is not None:
        if data.inputs or data.classes or data.outputs or data.missing != "error":
            raise ParameterError(
                "[data] inputs, classes, outputs and missing follow from the schema of the table; remove them"
            )
        return
    if data.in_files:
        raise ParameterError(
            '[data] source = "files" needs schema, which says what the columns of all files mean (moretta schema '
            "init FILE proposes one)"
        )
    if data.at_sites and (data.inputs is None or (data.classes is None) == (data.outputs is None)):
        raise ParameterError(
            '[data] source = "sites" needs schema, which says what a table\'s columns mean, or for arrays inputs, '
            "the shape of a sample, and either classes or outputs, for example inputs = [30] and classes = 2"
        )
    if data.at_sites and data.missing not in ("error", "mean"):
        raise ParameterError(
            f'[data] missing = "{data.missing}" of rows at sites needs a schema, which says of which columns; give '
            'schema, or missing = "mean"'
        )


def _check_images(data: Data) -> None:
    """Check that what images at sites become is said, and said once."""
    inputs = () if data.inputs is None or isinstance(data.inputs, dict) else data.inputs
    if len(inputs) != 3 or inputs[0] not in (1, 3) or inputs[1] != inputs[2]:
        raise ParameterError(
            "[data] inputs: expected the shape that images become, [1 or 3, size, size], as the schema names files "
            "of images; for example inputs = [1, 224, 224]"
        )
    if data.classes or data.outputs or data.tokens or data.missing != "error" or data.partition != "iid":
        raise ParameterError(
            "[data] classes, outputs, tokens, missing and partition are not for images whose classes the schema "
            "lists; remove them"
        )


def _has_validation(data: Data) -> bool:
    """Return whether there are rows for early stopping to judge by; bank-marketing brings its own."""
    return bool(data.validation_fraction) or (data.source == "bank-marketing" and data.validation_fraction is None)
