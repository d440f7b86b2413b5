"""The engine of a run: what delivers messages to silos, here or on machines of their own."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from moretta.contract.codec import Codec
from moretta.engines.checkpoint import CheckpointId
from moretta.engines.delivery import Delivery
from moretta.engines.in_process import Injector, InProcess
from moretta.engines.settings import FaultPhase
from moretta.engines.views import Recorder
from moretta.errors import ParameterError
from moretta.protocols.common import modules
from moretta.protocols.common.roles import Roles
from moretta.protocols.common.specification import Specification
from moretta.protocols.common.stacked import LARGEST
from moretta.protocols.registry import entry_of
from moretta.run.inputs import Trainable
from moretta.run.record import KEY_TAGS, SET_UP_TAGS, UNMASKING_TAGS

Transport = Callable[[Codec, CheckpointId, Recorder | None], Delivery]
"""Makes what delivers messages to remote silos."""


# `LARGEST`, up to which silos are stacked, is the same number by chance: it weighs calls against arithmetic.
SMALL = 100_000  # parameters; below, threads wait for each other longer than they work
GAINS = 2_000_000_000  # passes of a row by a parameter in a run; below, starting workers takes longer than they save
BESIDE = 2_000_000  # such passes that take as long as what a silo does in a round beside them


def in_process(of: Trainable, roles: Roles, codec: Codec, recorder: Recorder | None, rounds: int) -> InProcess:
    """Return the engine of silos that are on this machine. rounds: that are left."""
    spec, workers, stacks = of.spec, workers_of(of, len(roles.clients), rounds), modules.size(of.model) <= LARGEST
    return InProcess(
        roles.clients,
        codec,
        strict=spec.engine.strict,
        recorder=recorder,
        deadline=spec.engine.deadline,
        injector=_injector(spec),
        workers=workers,
        prepare=_prepare,
        scores=roles.scores,
        stacks=stacks,
    )


def computes_on_one_thread(of: Trainable) -> bool:
    """Return whether a run computes on one thread: with a small model, and wherever workers are asked for."""
    return modules.size(of.model) < SMALL or of.spec.engine.workers is not None


def workers_of(of: Trainable, silos: int, rounds: int) -> int:
    """Return in how many processes silos play. rounds: that are left.

    Raises `moretta.errors.ParameterError` where more than one is asked for and this machine or device has no fork.
    """
    setting, can = of.spec.engine.workers, hasattr(os, "fork") and of.spec.run.device == "cpu"
    if not can and (setting or 1) > 1:
        raise ParameterError(
            f"[engine] workers = {setting}: silos run in other processes on the CPU of Linux and macOS alone; use 1"
        )
    if setting is None:
        work = rounds * (silos * BESIDE + sum(len(silo.y) for silo in of.silos) * modules.size(of.model))
        setting = cores() if can and work >= GAINS and computes_on_one_thread(of) else 1
    return min(setting, silos)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _prepare() -> None:
    """Compute on one thread, in a process that was forked: others of PyTorch's were not. Raises where that fails."""
    torch.set_num_threads(1)
    tensor = torch.ones(1, requires_grad=True)
    torch.autograd.grad(
        tensor.sum(), tensor
    )  # which fails if there is a GPU whose threads were started before the fork


def _injector(spec: Specification) -> Injector | None:
    """Return what injects the faults that are asked for; the one pool of centralised training is no silo."""
    faults, entry = spec.engine.faults, entry_of(spec.protocol)
    if faults is None or entry.pooled:
        return None
    phases: dict[str, FaultPhase] = dict.fromkeys(KEY_TAGS | SET_UP_TAGS, "set-up")
    # Where silos train alone only the set-up's statistics are summed, and random faults must know it.
    masked = spec.secure_aggregation.scheme != "none" and entry.summed
    phases |= dict.fromkeys(UNMASKING_TAGS, "unmasking" if masked else "set-up")
    return Injector(faults, phases)
