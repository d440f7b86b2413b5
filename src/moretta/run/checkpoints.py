"""The states of a run's roles, in memory and in the folders ``checkpoint`` and ``best`` of a run.
The truth of a run lies in ``truth``, apart from the views: by all roles' states and a digest of all rows an audit
scores what attacks claim. A run with remote silos has none, as nobody has all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moretta.contract.roles import State
from moretta.data.silo import Silo, rows_digest
from moretta.engines.checkpoint import CheckpointId, last_checkpoint, save_checkpoint
from moretta.engines.files import write_atomically
from moretta.engines.journal import Journal
from moretta.engines.run_folder import ROWS
from moretta.engines.takes import AskedTakes
from moretta.protocols.common.releases import Releases
from moretta.protocols.common.roles import Roles

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
        found = last_checkpoint(self.folder / "best", up_to=self.place.round) if self.place.session else None
        return None if found is None else BestRound(found[0].round, found[1])

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
