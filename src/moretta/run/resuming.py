"""Which run a session belongs to: the run's id, what a resumed session must agree on, and where it goes on."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from moretta.config.specification import Specification
from moretta.contract.roles import State
from moretta.data.layout import SampleLayout
from moretta.data.silo import Silo
from moretta.engines.checkpoint import CheckpointId, last_checkpoint
from moretta.errors import ParameterError
from moretta.protocols.common import modules
from moretta.protocols.common.roles import Roles
from moretta.secure_aggregation.agreement import RUN_DIGEST
from moretta.secure_aggregation.identity import Roster
from moretta.secure_aggregation.keystream import derive


def run_id(spec: Specification, roster: Roster | None, seed: int) -> str:
    """Return the id of a new run: random, but of tests with insecure secrets."""
    run = secrets.token_hex(16)
    if spec.insecure_secret_seed is not None:
        derived = derive(b"insecure run id.", spec.insecure_secret_seed, seed, type(spec.protocol).__name__)
        run = derived.hex()[:32]
    return f"{run}.{_mark(roster)}".removesuffix(".")


def digest_of(
    spec: Specification, silos: Sequence[Silo], model: nn.Module, layout: SampleLayout | None, seed: int, rounds: int
) -> str:
    """Return what a resumed run must agree on: the run file, or without one what was given from Python."""
    if spec.digest:
        return spec.digest
    given = [
        {name: section for name, section in spec.settings.items() if name != "engine"},
        {silo.name: len(silo.x) for silo in silos},
        modules.schema(model),
        _printed(model),
        seed,
        rounds if spec.protocol.rate_depends_on_rounds else 0,
        *([layout.dump()] if layout else []),
        *([sorted(set(spec.engine.edge)), spec.engine.edge_precision] if spec.engine.edge else []),
    ]
    return hashlib.sha256(json.dumps(given, sort_keys=True, default=str).encode()).hexdigest()


def _printed(model: nn.Module) -> str:
    """Return a module as PyTorch prints it: its layers, by which models differ whose tensors have the same shapes.

    What `forward` does beside them, such as a call of `F.relu`, is not in it.
    """
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(model))  # where an object lies differs from process to process


def last_session(
    folder: Path | None, digest: str, roster: Roster | None, rounds: int
) -> tuple[CheckpointId, dict[str, State]]:
    """Return where the next session begins, and the roles' states there.

    Raises `moretta.errors.ParameterError` without a folder with a checkpoint, or with one of another run.
    """
    if folder is None:
        raise ParameterError("resuming needs the run's folder; name it by out")
    found = last_checkpoint(folder / "checkpoint")
    if found is None:
        raise ParameterError(f"{folder} holds no checkpoint to resume from; start without --resume, in an empty folder")
    place, states = found
    if place.digest != digest:
        file = f" ({folder / 'run.toml'})" if (folder / "run.toml").exists() else ""  # a run from Python has none
        raise ParameterError(
            f"{folder} was begun with another run file or other settings; resume with those it was begun "
            f"with{file}, or name another folder by --out"
        )
    if place.run.partition(".")[2] != _mark(roster):
        raise ParameterError(
            f"{folder} was begun with another roster; resume with the one it was begun with, or name another "
            "folder by --out"
        )
    if place.round > rounds:
        raise ParameterError(f"{folder} stands at round {place.round}, past the {rounds} asked for")
    return CheckpointId(place.run, place.round, place.session + 1, place.digest), states


def refuse_others(states: Mapping[str, State], players: Roles) -> None:
    """Raise `moretta.errors.ParameterError` where a checkpoint's states are of other roles than these."""
    expected = {"server", *(f"silo-{name}" for name in players.clients)}
    if set(states) != expected:
        raise ParameterError(f"the checkpoint is of other roles; expected {sorted(expected)}, got {sorted(states)}")


def _mark(roster: Roster | None) -> str:
    """Return what a run id ends with, so that silos with another roster refuse it."""
    return "" if roster is None else roster.digest[:RUN_DIGEST]
