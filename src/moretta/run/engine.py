"""The engine of a run: what delivers messages to silos, here or on machines of their own."""

from __future__ import annotations

from collections.abc import Callable

from moretta.config.specification import Specification
from moretta.contract.codec import Codec
from moretta.engines.checkpoint import CheckpointId
from moretta.engines.delivery import Delivery
from moretta.engines.faults import Injector
from moretta.engines.in_process import InProcess
from moretta.engines.settings import FaultPhase
from moretta.engines.views import Recorder
from moretta.protocols.common.players import Roles
from moretta.protocols.registry import entry_of
from moretta.run.history import KEY_TAGS, SET_UP_TAGS, UNMASKING_TAGS

Transport = Callable[[Codec, CheckpointId, Recorder | None], Delivery]
"""Makes what delivers messages to remote silos."""


def in_process(spec: Specification, roles: Roles, codec: Codec, recorder: Recorder | None) -> InProcess:
    """Return the engine of silos that are in this process."""
    return InProcess(
        roles.clients,
        codec,
        strict=spec.engine.strict,
        recorder=recorder,
        deadline=spec.engine.deadline,
        injector=_injector(spec),
    )


def _injector(spec: Specification) -> Injector | None:
    """Return what injects the faults that are asked for; the one pool of centralised training is no silo."""
    faults, entry = spec.engine.faults, entry_of(spec.protocol)
    if faults is None or entry.pooled:
        return None
    phases: dict[str, FaultPhase] = dict.fromkeys(KEY_TAGS | SET_UP_TAGS, "set-up")
    # Where silos train alone only the set-up's statistics are summed, and random faults must know it.
    masked = spec.aggregation.scheme != "none" and entry.summed
    phases |= dict.fromkeys(UNMASKING_TAGS, "unmasking" if masked else "set-up")
    return Injector(faults, phases)
