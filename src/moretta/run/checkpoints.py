"""The states of a run's roles, in memory and in the folders ``checkpoint`` and ``best`` of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from moretta.contract.roles import State
from moretta.engines.checkpoint import CheckpointId, last_checkpoint, save_checkpoint
from moretta.engines.journal import Journal
from moretta.engines.takes import AskedTakes
from moretta.protocols.common.releases import Releases
from moretta.protocols.common.roles import Roles
from moretta.run.early_stopping import BestRound

RELEASES, TAKES = "releases.txt", "takes.txt"  # in checkpoint/


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
