"""The states of a run's roles, in memory and in the folders ``checkpoint`` and ``best`` of a run.
The truth of a run lies in ``truth``, apart from the views: by all roles' states and a digest of all rows an audit
scores what attacks claim. A run with remote silos has none, as nobody has all of it.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from moretta.contract.roles import State
from moretta.data.layout import SampleLayout
from moretta.data.silo import Silo, rows_digest
from moretta.engines.checkpoint import CheckpointId, last_checkpoint, save_checkpoint
from moretta.engines.files import write_atomically
from moretta.engines.journal import Journal
from moretta.engines.run_folder import ROWS
from moretta.engines.takes import AskedTakes
from moretta.errors import ParameterError
from moretta.protocols.common import modules
from moretta.protocols.common.releases import Releases
from moretta.protocols.common.roles import Roles
from moretta.protocols.common.specification import Specification
from moretta.secure_aggregation.agreement import run_mark
from moretta.secure_aggregation.identity import Roster
from moretta.secure_aggregation.keystream import derive

RELEASES, TAKES = "releases.txt", "takes.txt"  # in checkpoint/


@dataclass(frozen=True)
class BestRound:
    """The round of the lowest validation loss, and all roles' states at its end."""

    number: int
    states: Mapping[str, State]


def states_of(roles: Roles) -> dict[str, State]:
    """Return the states of the server and of all silos that are here, by the names of their files."""
    roles.gather()
    states: dict[str, State] = {"server": roles.server.state()}
    return states | {f"silo-{name}": client.state() for name, client in roles.clients.items()}


def restore_states(roles: Roles, states: Mapping[str, State]) -> None:
    """Give the server and all silos that are here the states that `states_of` returned."""
    roles.server.restore(states["server"])
    own = {name: states[f"silo-{name}"] for name in roles.clients}
    for name, state in own.items():
        roles.clients[name].restore(state)
    roles.spread(own)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one session of a run. folder: the run's. place: where the session began."""

    folder: Path
    place: CheckpointId

    def at(self, number: int) -> CheckpointId:
        """Return where the session stands at the end of a round."""
        return replace(self.place, round=number)

    def save(self, number: int, states: Mapping[str, State]) -> None:
        """Save the roles' states of a round's end."""
        save_checkpoint(self.folder / "checkpoint", self.at(number), states)

    def save_best(self, best: BestRound | None) -> None:
        """Save the best round's states, if there are any, before a checkpoint is saved.

        As two are kept of each, every checkpoint then has a best round that is not younger.
        """
        if best is not None:
            save_checkpoint(self.folder / "best", self.at(best.number), best.states)

    def best(self) -> BestRound | None:
        """Return the best round up to where the session began; None in a run that was not resumed."""
        checkpoint = last_checkpoint(self.folder / "best", up_to=self.place.round) if self.place.session else None
        return None if checkpoint is None else BestRound(checkpoint[0].round, checkpoint[1])

    def asked_takes(self) -> AskedTakes:
        """Return the takes that all sessions of the run have asked for; a further one is on disk before it is asked."""
        return AskedTakes(Journal(self.folder / "checkpoint" / TAKES))

    def record_releases(self, releases: Releases) -> None:
        """Write each noised sum to disk before it is asked for, and count those that a killed session had asked for."""
        journal = Journal(
            self.folder / "checkpoint" / RELEASES,
            "the record of what this run has released, without which its epsilon cannot be stated",
            "restore it, or begin another run",
        )
        for line in journal.open(begun=self.place.session > 0):
            releases.read(line)
        releases.write = journal.append


def needs_truth(recorded: bool | tuple[int, ...], silos: Sequence[Silo], number: int) -> bool:
    """Return whether an audit needs the states at a round's end: those before and after each recorded round.

    recorded: the rounds whose views are recorded, True for all.
    """
    if not recorded or any(silo.remote for silo in silos):
        return False
    return isinstance(recorded, bool) or number in recorded or number + 1 in recorded


def save_truth(folder: Path, place: CheckpointId, states: Mapping[str, State], silos: Sequence[Silo]) -> None:
    """Save the roles' states at `place`, and once a digest of all rows. folder: the run's ``truth``."""
    save_checkpoint(folder, place, states, kept=None)
    rows = folder / ROWS
    if not rows.exists():
        write_atomically(rows, rows_digest(silos).encode(), mode=0o600)


def run_id(spec: Specification, roster: Roster | None, seed: int) -> str:
    """Return the id of a new run: random, but of tests with insecure secrets."""
    run = secrets.token_hex(16)
    if spec.run.insecure_secret_seed is not None:
        derived = derive(b"insecure run id.", spec.run.insecure_secret_seed, seed, type(spec.protocol).__name__)
        run = derived.hex()[:32]
    return f"{run}.{run_mark(roster)}".removesuffix(".")


def digest_of(
    spec: Specification, silos: Sequence[Silo], model: nn.Module, layout: SampleLayout | None, seed: int, rounds: int
) -> str:
    """Return what a resumed run must agree on: the run file, or without one what was given from Python."""
    if spec.digest:
        return spec.digest
    settings = [
        {name: section for name, section in spec.settings.items() if name != "engine"},
        {silo.name: len(silo.x) for silo in silos},
        modules.schema(model),
        _printed(model),
        seed,
        rounds if spec.protocol.rate_depends_on_rounds else 0,
        *([layout.dump()] if layout else []),
        *([sorted(set(spec.engine.edge)), spec.engine.edge_precision] if spec.engine.edge else []),
    ]
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


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
    checkpoint = last_checkpoint(folder / "checkpoint")
    if checkpoint is None:
        raise ParameterError(f"{folder} holds no checkpoint to resume from; start without --resume, in an empty folder")
    place, states = checkpoint
    if place.digest != digest:
        file = f" ({folder / 'run.toml'})" if (folder / "run.toml").exists() else ""  # a run from Python has none
        raise ParameterError(
            f"{folder} was begun with another run file or other settings; resume with those it was begun "
            f"with{file}, or name another folder by --out"
        )
    if place.run.partition(".")[2] != run_mark(roster):
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
