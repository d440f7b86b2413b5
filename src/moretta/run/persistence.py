"""The files that a run writes into its folder, and when; `moretta.engines.run_folder` lists them.

The states of a run's roles are in memory and in the folders ``checkpoint`` and ``best``. The run's truth is in
``truth``, separate from the views: all roles' states and a digest of all rows, by which an audit scores attacks. A run
with remote silos has no truth, because no role has all of it.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from moretta.contract.roles import Outcome, State
from moretta.data.layout import SampleLayout
from moretta.data.silo import Silo, row_shape, rows_digest
from moretta.data.tables.preparation import Preparation
from moretta.engines.checkpoint import CheckpointId, last_checkpoint, save_checkpoint
from moretta.engines.delivery import Delivery
from moretta.engines.files import write_atomically
from moretta.engines.journal import Journal
from moretta.engines.run_folder import ROWS, RunFolder
from moretta.engines.takes import AskedTakes
from moretta.engines.views import Recorder
from moretta.errors import ParameterError
from moretta.models.hooks import OneTensor, hook_of
from moretta.protocols.common import modules
from moretta.protocols.common.releases import Releases
from moretta.protocols.common.roles import Roles
from moretta.protocols.common.specification import Specification
from moretta.run.evaluation import MANY
from moretta.run.inputs import Trainable
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
    """Return the states of the server and of all local silos, by the names of their files."""
    roles.gather()
    states: dict[str, State] = {"server": roles.server.state()}
    return states | {f"silo-{name}": client.state() for name, client in roles.clients.items()}


def restore_states(roles: Roles, states: Mapping[str, State]) -> None:
    """Restore the states of `states_of`. Raises `moretta.errors.ParameterError` for those of other roles."""
    expected = {"server", *(f"silo-{name}" for name in roles.clients)}
    if set(states) != expected:
        raise ParameterError(f"the checkpoint is of other roles; expected {sorted(expected)}, got {sorted(states)}")
    roles.server.restore(states["server"])
    own = {name: states[f"silo-{name}"] for name in roles.clients}
    for name, state in own.items():
        roles.clients[name].restore(state)
    roles.spread(own)


def needs_truth(recorded: bool | tuple[int, ...], silos: Sequence[Silo], number: int) -> bool:
    """Return whether an audit needs the states at a round's end: those before and after each recorded round.

    Args:
        recorded: The rounds whose views are recorded, True for all.
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
    """Return the id of a new run: random, except in tests with insecure secrets."""
    run = secrets.token_hex(16)
    if spec.run.insecure_secret_seed is not None:
        derived = derive(b"insecure run id.", spec.run.insecure_secret_seed, seed, type(spec.protocol).__name__)
        run = derived.hex()[:32]
    return f"{run}.{run_mark(roster)}".removesuffix(".")


def digest_of(
    spec: Specification, silos: Sequence[Silo], model: nn.Module, layout: SampleLayout | None, seed: int, rounds: int
) -> str:
    """Return the digest that a resumed run must match: of the run file, or else of the arguments from Python."""
    if spec.digest:
        return spec.digest
    settings = [
        {name: section for name, section in spec.settings.items() if name != "engine"},
        {silo.name: len(silo.x) for silo in silos},
        modules.schema(model),
        # PyTorch's text distinguishes models with equal shapes of tensors; the addresses of objects are removed.
        re.sub(r" at 0x[0-9a-fA-F]+", "", repr(model)),
        seed,
        rounds if spec.protocol.rate_depends_on_rounds else 0,
        *([layout.dump()] if layout else []),
        *([sorted(set(spec.engine.edge)), spec.engine.edge_precision] if spec.engine.edge else []),
    ]
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def last_session(
    folder: Path | None, digest: str, roster: Roster | None, rounds: int
) -> tuple[CheckpointId, dict[str, State]]:
    """Return the place to resume from, and all states. Raises ParameterError without this run's checkpoint."""
    if folder is None:
        raise ParameterError("resuming needs the run's folder; name it by out")
    checkpoint = last_checkpoint(folder / "checkpoint")
    if checkpoint is None:
        raise ParameterError(f"{folder} holds no checkpoint to resume from; start without --resume, in an empty folder")
    place, states = checkpoint
    if place.digest != digest:
        file = f" ({folder / 'run.toml'})" if (folder / "run.toml").exists() else ""  # a run from Python has no file
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
        raise ParameterError(f"{folder} is at round {place.round} already, past the {rounds} asked for")
    return CheckpointId(place.run, place.round, place.session + 1, place.digest), states


def recorder_of(spec: Specification, folder: RunFolder | None, place: CheckpointId) -> Recorder | None:
    """Return the recorder of views; None if they are not recorded, or the run has no folder."""
    if folder is None or not spec.run.record_views:
        return None
    return Recorder(folder.path / "views", spec.run.record_views, place.session, place.run)


@dataclass(frozen=True)
class RunFiles:
    """Write the files of one session of a run, in the order of its methods.

    Args:
        place: The beginning of the session.
        recorder: Records the views; None if they are not recorded.
    """

    of: Trainable
    roles: Roles
    engine: Delivery
    folder: RunFolder
    place: CheckpointId
    recorder: Recorder | None

    def begin(self) -> BestRound | None:
        """Save the state in which a run begins, or return the best round so far of a resumed one."""
        best = None
        if self.place.session == 0:
            self.save(self.place.round, None)
        elif (checkpoint := last_checkpoint(self.folder.path / "best", up_to=self.place.round)) is not None:
            best = BestRound(checkpoint[0].round, checkpoint[1])
        if self.roles.accountant is not None:
            self._record_releases(self.roles.accountant.releases)
        self._save_truth(self.place.round)
        return best

    def _record_releases(self, releases: Releases) -> None:
        """Write each noised sum to disk before it is requested, and count those that a killed session had requested."""
        journal = Journal(
            self.folder.path / "checkpoint" / RELEASES,
            "the record of what this run has released, without which its epsilon cannot be stated",
            "restore it, or begin another run",
        )
        for line in journal.open(begun=self.place.session > 0):
            releases.read(line)
        releases.write = journal.append

    def asked_takes(self) -> AskedTakes:
        """Return the takes that all sessions of the run have requested; a further one is on disk before its request."""
        return AskedTakes(Journal(self.folder.path / "checkpoint" / TAKES))

    def add(self, line: Mapping[str, Any], best: BestRound | None, *, last: bool) -> None:
        """Write the files of a finished round, or of a lost one.

        Args:
            line: The round's line of the history.
            last: Whether no round can follow.
        """
        number = line["round"]
        self.flush_views()  # first, so that every round in the history has its views
        self.folder.append(line)
        # A lost round is never repeated, because the next one asked for sums under the same model.
        if number % self.of.spec.run.checkpoint_every == 0 or last or "lost" in line:
            self.save(number, best)
        self._save_truth(number)

    def save(self, number: int, best: BestRound | None) -> None:
        """Save a checkpoint of the end of a round, and the best round's states."""
        if best is not None:  # first: two are kept of each, so every checkpoint has a best round that is not later
            save_checkpoint(self.folder.path / "best", replace(self.place, round=best.number), best.states)
        place = replace(self.place, round=number)
        self.engine.keep(place)  # first, so that every remote silo can continue from the same round
        save_checkpoint(self.folder.path / "checkpoint", place, states_of(self.roles))

    def flush_views(self) -> None:
        """Write the messages recorded so far."""
        if self.recorder is not None:
            self.recorder.flush()

    def end(self, outcome: Outcome, record: dict[str, Any], inputs: Mapping[str, Any]) -> None:
        """Write a run's models, the meaning of their inputs, and its record with the digests of both."""
        if outcome.parameters:
            self.folder.write_model("model.safetensors", outcome.parameters)
        if outcome.released is not None:
            self.folder.write_model("released.safetensors", outcome.released, mode=0o644)
        for name, tensors in outcome.models.items():
            self.folder.write_model(f"models/{name}.safetensors", tensors)
        if self.roles.displacement is not None:
            self.folder.write_confined(self.roles.displacement(), self.roles.models(), MANY)
        record["models"] = dict(self.folder.models)
        record["inputs"] = self.folder.write_json("inputs.json", inputs)
        self.folder.write_json("result.json", record)  # last, because a folder with a result is a finished run

    def _save_truth(self, number: int) -> None:
        if needs_truth(self.of.spec.run.record_views, self.of.silos, number):
            place = replace(self.place, round=number)
            save_truth(self.folder.path / "truth", place, states_of(self.roles), self.of.silos)


def inputs_of(of: Trainable, agreed: Preparation) -> dict[str, Any]:
    """Return the content of ``inputs.json``: what a model's inputs and outputs mean."""
    hook = hook_of(of.model) or OneTensor()
    return {
        "shape": list(row_shape(of.silos)),
        **({} if of.layout is None else {"arrays": of.layout.dump()}),
        **({"image": of.spec.data.image.plain()} if of.spec.data.has_images(of.spec.table) else {}),
        **({"absent": list(of.spec.data.absent)} if of.spec.data.absent else {}),
        "outputs": of.outputs,
        **({"output": hook.name} if hook.name else {}),
        **({"mask": list(hook.mask)} if hook.mask else {}),
        "columns": list(of.feature_names),
        **{name: value.tolist() for name, value in agreed.figures.items()},
        "table": None if of.spec.table is None else of.spec.table.plain(),
        "fills_absent": of.column_rules.may_lack,
        "may_lack": (of.column_rules.fills > 0).tolist() or [False],
        "task": of.spec.task,
        "loss": of.spec.protocol.loss,
        "classes": list(of.class_names),
        "dtype": of.spec.run.dtype,
        "integers": of.silos[0].x.dtype.kind in "iu",
    }
