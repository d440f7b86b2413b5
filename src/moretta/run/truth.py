"""The truth of a run, by which an audit scores what attacks claim: all roles' states, and a digest of all rows.

It lies in ``truth``, apart from the views. A run with remote silos has none, as nobody has all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from moretta.contract.roles import State
from moretta.data.silo import Silo, rows_digest
from moretta.engines.checkpoint import CheckpointId, save_checkpoint
from moretta.engines.files import write_atomically
from moretta.engines.run_folder import ROWS


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
