"""What a run writes into its folder, and when; `moretta.engines.run_folder` lists the files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moretta.contract.roles import Outcome
from moretta.data.silo import row_shape
from moretta.data.tables.preparation import Preparation
from moretta.engines.checkpoint import CheckpointId
from moretta.engines.delivery import Delivery
from moretta.engines.run_folder import RunFolder
from moretta.engines.views import Recorder
from moretta.models.one_tensor import OneTensor, hook_of
from moretta.protocols.common.roles import Roles
from moretta.protocols.common.specification import Specification
from moretta.run.checkpoints import BestRound, Checkpoints, needs_truth, save_truth, states_of
from moretta.run.evaluation import MANY
from moretta.run.inputs import Trainable


def recorder_of(spec: Specification, folder: RunFolder | None, place: CheckpointId) -> Recorder | None:
    """Return what records views; None where nobody asked for it, or there is no folder for them."""
    if folder is None or not spec.run.record_views:
        return None
    return Recorder(folder.path / "views", spec.run.record_views, place.session, place.run)


@dataclass(frozen=True)
class RunFiles:
    """Writes the files of one session of a run, in the order in which its methods stand here.

    place: where the session began. recorder: of the views, None where they are not recorded. rounds: the last one's
    number.
    """

    of: Trainable
    roles: Roles
    engine: Delivery
    folder: RunFolder
    place: CheckpointId
    recorder: Recorder | None
    rounds: int

    def begin(self) -> BestRound | None:
        """Save where a run begins, or return the best round so far of one that is resumed."""
        if self.place.session == 0:
            self.save(self.place.round, None)
        best = self.checkpoints.best()
        if self.roles.accountant is not None:
            self.checkpoints.record_releases(self.roles.accountant.releases)
        self._save_truth(self.place.round)
        return best

    def add(self, line: Mapping[str, Any], best: BestRound | None) -> None:
        """Write what belongs to a finished round, or to a lost one. line: of the history."""
        number = line["round"]
        self.flush_views()  # first, so that no round is in the history without its views
        self.folder.append(line)
        # A lost round is behind the run for good: what followed it was asked under the same model.
        if number % self.of.spec.run.checkpoint_every == 0 or number == self.rounds or "lost" in line:
            self.save(number, best)
        self._save_truth(number)

    def save(self, number: int, best: BestRound | None) -> None:
        """Save a checkpoint of the end of a round, and the best round's states."""
        self.checkpoints.save_best(best)
        self.engine.keep(self.checkpoints.at(number))  # first: every remote silo can go on from where we do
        self.checkpoints.save(number, states_of(self.roles))

    def flush_views(self) -> None:
        """Write what has been seen so far."""
        if self.recorder is not None:
            self.recorder.flush()

    def end(self, outcome: Outcome, record: dict[str, Any], inputs: Mapping[str, Any]) -> None:
        """Write a run's models, what their inputs mean, and its record, which is given the digests of both."""
        self._write_models(outcome)
        record["models"] = dict(self.folder.models)
        record["inputs"] = self.folder.write_json("inputs.json", inputs)
        self.folder.write_json("result.json", record)  # last: a folder with a result is a finished run

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of this session."""
        return Checkpoints(self.folder.path, self.place)

    def _save_truth(self, number: int) -> None:
        if needs_truth(self.of.spec.run.record_views, self.of.silos, number):
            place = self.checkpoints.at(number)
            save_truth(self.folder.path / "truth", place, states_of(self.roles), self.of.silos)

    def _write_models(self, outcome: Outcome) -> None:
        if outcome.parameters:
            self.folder.write_model("model.safetensors", outcome.parameters)
        if outcome.released is not None:
            self.folder.write_model("released.safetensors", outcome.released, mode=0o644)
        for name, tensors in outcome.models.items():
            self.folder.write_model(f"models/{name}.safetensors", tensors)
        if self.roles.displacement is not None:
            self.folder.write_confined(self.roles.displacement(), self.roles.models(), MANY)


def inputs_of(of: Trainable, agreed: Preparation) -> dict[str, Any]:
    """Return the content of ``inputs.json``: what a model's inputs and outputs mean."""
    hook = hook_of(of.model) or OneTensor()
    return {
        "shape": list(row_shape(of.silos)),
        **({} if of.layout is None else {"arrays": of.layout.dump()}),
        "outputs": of.outputs,
        **({"output": hook.name} if hook.name else {}),
        **({"mask": list(hook.mask)} if hook.mask else {}),
        "columns": list(of.feature_names),
        **{name: value.tolist() for name, value in agreed.figures.items()},
        "table": None if of.spec.table is None else of.spec.table.told(),
        "fills_absent": of.column_rules.may_lack,
        "may_lack": (of.column_rules.fills > 0).tolist() or [False],
        "task": of.spec.task,
        "loss": of.spec.protocol.loss,
        "classes": list(of.class_names),
        "dtype": of.spec.run.dtype,
        "integers": of.silos[0].x.dtype.kind in "iu",
    }
