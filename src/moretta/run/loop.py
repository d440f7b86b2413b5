"""The loop of rounds: one call of `Federation.train`, from its first round to the result, and its engine."""

import copy
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from moretta.contract.codec import Codec
from moretta.contract.messages import Stamp, Tensors
from moretta.contract.roles import Outcome, State
from moretta.engines import views
from moretta.engines.checkpoint import CheckpointId, begin_session
from moretta.engines.delivery import Delivery
from moretta.engines.driver import Driver, DroppedSilo
from moretta.engines.in_process import Injector, InProcess
from moretta.engines.run_folder import RunFolder
from moretta.engines.settings import FaultPhase
from moretta.engines.takes import OpenedSum
from moretta.engines.views import Recorder
from moretta.errors import ParameterError, RunFailed
from moretta.models.hooks import standardises, takes_arrays
from moretta.protocols.common import modules
from moretta.protocols.common.roles import Roles
from moretta.protocols.common.scoring import CONFUSION, RELIABILITY
from moretta.protocols.common.specification import Specification
from moretta.protocols.common.stacked import LARGEST
from moretta.protocols.registry import entry_of
from moretta.run.evaluation import MANY, Evaluator
from moretta.run.inputs import Trainable, doubts
from moretta.run.metrics import metrics_of_counts, of_counts, tables_of_counts
from moretta.run.persistence import BestRound, RunFiles, inputs_of, recorder_of, restore_states, states_of
from moretta.run.preview import look_of_sums
from moretta.run.progress import EVERY, Progress, Rhythm, round_line
from moretta.run.raw_rows import Prepared
from moretta.run.record import (
    KEY_TAGS,
    SCALED,
    SET_UP_TAGS,
    UNMASKING_TAGS,
    Line,
    OnRound,
    PlayedRun,
    StopTraining,
    line_of,
    record_of,
    round_of,
    spent,
    versions,
)
from moretta.run.result import Result
from moretta.run.trackers import TrackedRun, Tracker, following


def best_round(history: Sequence[Mapping[str, Any]]) -> int:
    """Return the evaluated round of the lowest validation loss, the earliest of several.

    A loss that is not finite, null in a history on disk, is higher than any other.
    """
    tested = [line for line in history if "validation_loss" in line]
    losses: dict[int, float] = {
        line["round"]: np.nan if (loss := line["validation_loss"]) is None else loss for line in tested
    }
    return min(losses, key=lambda number: (losses[number] if math.isfinite(losses[number]) else math.inf, number))


class EarlyStopping:
    """Keeps the best round, and stops the run when too many rounds have passed since.

    Args:
        patience: The number of rounds without a lower validation loss; None never stops. Only evaluated rounds are
            judged (`evaluate_every`).
        best: The best round of an earlier session, if any.
    """

    def __init__(self, patience: int | None, best: BestRound | None = None) -> None:
        self._patience, self.best = patience, best

    def stops(self, history: Sequence[Mapping[str, Any]], states: Callable[[], Mapping[str, State]]) -> bool:
        """Keep the states if the last round is the best; return whether the run stops after it.

        Args:
            history: A line a round, the last one included.
            states: Returns all roles' present states.
        """
        last = history[-1]
        if self._patience is None or "validation_loss" not in last:
            return False
        best = best_round(history)
        if best == last["round"]:
            self.best = BestRound(best, states())
        return bool(last["round"] - best >= self._patience)


log = logging.getLogger("moretta")


class Session:
    """One session of a run: its remaining rounds, and its end.

    Args:
        silos: The names of the silos that take part.
        place: The run's id, its last finished round (0 at the beginning), its session and its settings' digest.
        folder: None writes nothing.
        transport: Makes the engine of remote silos; None asks silos of this machine.
    """

    def __init__(
        self,
        federation: Trainable,
        players: Roles,
        silos: Sequence[str],
        place: CheckpointId,
        folder: RunFolder | None,
        rounds: int,
        seed: int,
        progress: Progress | None,
        transport: "Transport | None",
        on_round: OnRound | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self._of, self._players, self._silos, self._place = federation, players, list(silos), place
        self._rounds, self._seed, self._progress, self._on_round = rounds, seed, progress, on_round
        self._rhythm, self._stopped = Rhythm(EVERY), False
        spec = federation.spec
        self._evaluates = spec.lasting(rounds, seed).run.evaluates
        settings = {
            f"{of}.{key}": value for of in ("model", "protocol") for key, value in spec.settings.get(of, {}).items()
        }
        arguments = {"run.seed": seed, **settings}, None if folder is None else folder.path
        tracked = TrackedRun(spec.run.name, place.run, rounds, place.round, *arguments)
        self._unplayed = list[str]()  # the reasons for rounds that were not run
        self._untracked = list[str]()  # trackers that failed, a sentence each
        self._tracking = following(trackers, tracked, self._untracked)
        recorder = recorder_of(spec, folder, place)
        # Of a resumed run, without the rounds that it repeats.
        self._history: list[Line] = [] if folder is None else folder.history(up_to=place.round)
        codec = Codec(players.messages, spec.engine.message_mib << 20)
        if folder is not None and place.session > 0:
            # Before the first message: a site accepts a session's number only once.
            begin_session(folder.path / "checkpoint", place)
        if transport is None:
            local = in_process(federation, players, codec, recorder, rounds - place.round)
            self._players = players = replace(players, gather=local.gather, spread=local.spread, scores=local.scores)
        self._engine: Delivery = local if transport is None else transport(codec, place, recorder)
        players.server.phase = self._engine.clock.phase
        self._evaluator = Evaluator(
            federation.model, spec.protocol, spec.task, players.preparation, spec.metrics, federation.class_names
        )
        self._stopping = EarlyStopping(spec.run.early_stopping)
        self._files = None if folder is None else RunFiles(federation, players, self._engine, folder, place, recorder)

    @property
    def has_begun(self) -> bool:
        """Whether a round has been finished."""
        return bool(self._history)

    def play(self) -> Result:
        """Run all remaining rounds, and conclude."""
        threads = torch.get_num_threads()
        if computes_on_one_thread(self._of):
            torch.set_num_threads(1)
        try:
            with self._tracking as self._track:  # after workers are forked, because it may start threads
                played = self._play()
            return self._conclude(*played)
        finally:
            self.close()
            torch.set_num_threads(threads)

    def close(self) -> None:
        """End the processes that were started for silos; repeated calls do nothing."""
        self._engine.close()

    def _play(self) -> tuple[Outcome, Sequence[DroppedSilo], Sequence[OpenedSum]]:
        """Return the release after the last round or the best one, with its missing silos and its sums."""
        if self._files is not None:
            self._stopping.best = self._files.begin()
        driver = self._driver()
        stopped = bool(self._history) and self._stopping.stops(self._history, lambda: states_of(self._players))
        try:
            for line in () if stopped or self._is_spent() else self._lines(driver):
                stopped = self._ends_with(line)
                if stopped or self._is_spent():
                    break
            noise, number = self._players.accountant, self._history[-1]["round"] if self._history else 0
            if noise is not None and not stopped and number < self._rounds:
                most = noise.privacy.most
                self._unplayed.append(
                    f"the run ended after round {number} of {self._rounds}, as another would pass dp-epsilon = {most:g}"
                )
            if self._stopping.best is not None:
                restore_states(self._players, self._stopping.best.states)
            outcome, dropped = driver.finish(self._rounds + 1)
            self._players.gather()
            return outcome, dropped, driver.take_sums()
        finally:
            if self._files is not None:
                self._files.flush_views()  # also the messages of a failed round

    def _driver(self) -> Driver:
        """Return the driver of the rounds. If only some silos take part, the public training seed draws them."""
        spec = self._of.spec
        some = spec.run.participation < 1
        rows = [spec.data.least_rows or 0 if silo.remote else len(silo.x) for silo in self._of.silos]
        lot = spec.protocol.lot(spec.data.batch_size)  # lots of over half of a silo's rows overlap
        return Driver(
            self._players.server,
            self._silos,
            self._place.run,
            self._engine,
            self._players.least,
            spec.playing(self._silos, self._seed).of_round if some else None,
            None if self._files is None else self._files.asked_takes(),
            draws=spec.protocol.privacy is not None or 0 < 2 * lot <= min(rows),
        )

    def _lines(self, driver: Driver) -> Iterator[Line]:
        """Yield each round's line; if a round fails for good, save the result of the last good one."""
        scaled = self._of.spec.data.standardise_targets
        private = self._of.spec.protocol.privacy is not None  # a silo's seconds reveal the number of rows in its lot
        began = time.perf_counter()
        noise = self._players.accountant
        counts = None if noise is None else noise.releases
        released = 0 if counts is None else counts.count
        try:
            for end in driver.rounds(self._place.round + 1, self._rounds):
                if counts is not None and end.lost and counts.count == released:
                    counts.add(Stamp(self._place.run, end.number, end.attempt, end.take), "lost")
                released = 0 if counts is None else counts.count
                traffic, phases = self._engine.take_traffic(), self._engine.clock.take()
                seconds = time.perf_counter() - began
                line = line_of(end, traffic, {} if private else phases, self._engine.peak_mib, seconds)
                spent = {} if noise is None else {"epsilon": noise.spent(released)}
                yield {SCALED if scaled and key == "loss" else key: value for key, value in line.items()} | spent
                began = time.perf_counter()
        except (RunFailed, ParameterError):
            if self._files is not None and self._history:
                self._files.save(self._history[-1]["round"], self._stopping.best)
            raise

    def _ends_with(self, line: Line) -> bool:
        """Score the model, and keep a round's line and its files; return whether the run stops."""
        test, validation = self._of.test, self._of.validation
        last = line["round"] == self._rounds or self._is_spent()
        if (test is not None or validation is not None) and (last or self._evaluates(line["round"])):
            # Not within `_lines`: on failure that saves the last round of `_history`, and the roles are past it.
            self._players.gather()
            line = line | self._evaluator.on_the_way(self._players.models(), test, validation)
        self._history.append(line)
        stops = self._stopping.stops(self._history, lambda: states_of(self._players))
        if self._files is not None:
            self._files.add(line, self._stopping.best, last=last)
        if self._rhythm.due(last=last or stops):
            log.info("%s", round_line(line["round"], self._rounds, line))
        self._track(line)
        if self._progress is not None:
            self._progress(line["round"], self._rounds, line)
        try:
            if self._on_round is not None:
                self._on_round(round_of(line, self._rounds))
        except BaseException as error:  # a checkpoint is kept, whatever a callback raises
            if self._files is not None:
                self._files.save(line["round"], self._stopping.best)
            self._stopped = isinstance(error, StopTraining)
            if not self._stopped:
                raise
        return self._stopped or stops

    def _is_spent(self) -> bool:
        """Return whether dp-epsilon does not allow one more sum."""
        noise = self._players.accountant
        return noise is not None and not noise.allows(noise.releases.count + 1)

    def _conclude(self, outcome: Outcome, dropped: Sequence[DroppedSilo], sums: Sequence[OpenedSum]) -> Result:
        """Score the outcome, write it and return it."""
        record = record_of(self._played(outcome, dropped, sums), versions())
        for sentence in record["warnings"]:
            log.warning("%s", sentence)
        for sentence in spent(record):
            log.info("%s", sentence)
        threshold = self._evaluator.threshold(outcome.parameters, self._of.validation)
        inputs = inputs_of(self._of, self._players.preparation()) | (
            {} if threshold is None else {"threshold": threshold}
        )
        if self._files is not None:
            self._files.end(outcome, record, inputs)
        models = outcome.models
        if self._players.displacement is not None:  # only a simulation has all confined models
            confined = self._players.models()
            models = confined if len(confined) <= MANY else {}
        return Result(
            record=record,
            history=self._history,
            model=self._module(outcome.parameters) if outcome.parameters else None,
            released=None if outcome.released is None else self._module(outcome.released),
            models={name: self._module(tensors) for name, tensors in models.items()},
            folder=None if self._files is None else self._files.folder.path,
            inputs=inputs,
        )

    def _played(self, outcome: Outcome, dropped: Sequence[DroppedSilo], sums: Sequence[OpenedSum]) -> PlayedRun:
        # The silos' common scores, which the server or the local participants learn.
        by_silos = {**(outcome.scores or self._players.scores()), **self._tables(outcome)}
        counts, names = self._players.counted(), (self._of.feature_names, self._of.class_names)
        of = len(self._of.silos), *names, self._of.spec.table
        return PlayedRun(
            spec=self._of.spec,
            rounds=self._rounds,
            silos=[silo.name for silo in self._of.silos],
            parameters=modules.size(self._of.model),
            scheme=self._players.scheme,
            has_test_rows=self._of.test is not None,
            doubts=list(doubts(self._of.spec, self._of.model, self._of.silos, self._of.outputs, self._of.test)),
            run=self._place.run,
            sessions=self._place.session + 1,
            history=self._history,
            outcome=outcome,
            dropped=dropped,
            scores=self._scores(outcome, by_silos),
            has_scores_of_silos=bool(by_silos),
            best_round=None if self._stopping.best is None else self._stopping.best.number,
            views="" if self._files is None else views.digest(self._files.folder.path / "views"),
            warnings=[*self._players.warnings, *self._unplayed, *self._untracked],
            data=None if counts is None else look_of_sums(counts, *of),
            stopped=self._stopped,
            sums=sums,
        )

    def _tables(self, outcome: Outcome) -> dict[str, Any]:
        """Return the metrics and tables of the silos' rows, if they were requested."""
        if not outcome.tables:
            return {}
        counts, bins = (outcome.tables[name] for name in (CONFUSION, RELIABILITY))
        tables = tables_of_counts(counts, bins, self._of.class_names)
        return {"metrics": metrics_of_counts(counts, bins), "classes": tables}

    def _scores(self, outcome: Outcome, by_silos: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scores of the outcome. by_silos: on the rows that silos hold back, if known here."""
        models = outcome.models or ({"": outcome.parameters} if outcome.parameters else self._players.models())
        local = [silo for silo in self._of.silos if not silo.remote]
        noised = getattr(self._of.spec.protocol, "dp_noise", None)  # a score on training rows would have no noise
        training = [] if noised or any(silo.columns for silo in local) else local
        scores = {**by_silos, **self._sure(outcome, by_silos), "by": "silos"} if by_silos else {}
        subjects = self._of.test_groups
        return self._evaluator.at_the_end(models, self._of.test, self._players.displacement, scores, training, subjects)

    def _sure(self, outcome: Outcome, by_silos: Mapping[str, Any]) -> dict[str, Any]:
        """Return intervals of the silos' summed scores; none if rows may share a person, which sums do not show."""
        table = self._of.spec.table
        if self._of.test is not None or "accuracy" not in by_silos or table is None or table.name_of("group"):
            return {}
        rows, right = int(by_silos["rows"]), round(by_silos["accuracy"] * by_silos["rows"])
        counts = outcome.tables[CONFUSION] if outcome.tables else np.array([[right, rows - right], [0, 0]])
        known = {"accuracy", *by_silos.get("metrics", {})}
        return {"intervals": {name: list(sure) for name, sure in of_counts(counts).items() if name in known}}

    def _module(self, tensors: Tensors) -> nn.Module:
        """Return a model that takes the silos' rows, several arrays by keyword."""
        module, preparation = copy.deepcopy(self._of.model), self._players.preparation()
        modules.load(module, tensors)
        plain = preparation.changes_nothing and not preparation.scales_targets
        if plain and not self._of.column_rules.may_lack:
            return takes_arrays(module).eval()
        if self._of.layout is not None:
            return standardises(takes_arrays(module), self._of.layout, preparation).eval()
        return Prepared(module, preparation, self._of.column_rules.fills > 0).eval()


Transport = Callable[[Codec, CheckpointId, Recorder | None], Delivery]
"""Makes the delivery of messages to remote silos."""


# By chance `SMALL` equals `LARGEST`, the size up to which silos are stacked; that compares calls with arithmetic.
SMALL = 100_000  # parameters; with fewer, threads wait for each other longer than they work
GAINS = 2_000_000_000  # products of rows and parameters in a run; with fewer, workers cost more than they save
BESIDE = 2_000_000  # such products that take as long as a silo's other work of a round


def in_process(of: Trainable, roles: Roles, codec: Codec, recorder: Recorder | None, rounds: int) -> InProcess:
    """Return the engine of local silos. rounds: the remaining ones."""
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
    """Return whether a run computes on one thread: with a small model, or with `workers` set."""
    return modules.size(of.model) < SMALL or of.spec.engine.workers is not None


def workers_of(of: Trainable, silos: int, rounds: int) -> int:
    """Return the number of processes that silos run in.

    Args:
        rounds: The number of remaining rounds.

    Raises:
        ParameterError: Several are requested, and this machine or device cannot fork.
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
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _prepare() -> None:
    """Compute on one thread in a forked process, which has no other thread of PyTorch; raise if that fails."""
    torch.set_num_threads(1)
    tensor = torch.ones(1, requires_grad=True)
    torch.autograd.grad(tensor.sum(), tensor)  # fails if a GPU's threads were started before the fork


def _injector(spec: Specification) -> Injector | None:
    """Return the injector of the set faults; none for centralised training, which has no silos."""
    faults, entry = spec.engine.faults, entry_of(spec.protocol)
    if faults is None or entry.pooled:
        return None
    phases: dict[str, FaultPhase] = dict.fromkeys(KEY_TAGS | SET_UP_TAGS, "set-up")
    # If silos train alone, only the set-up's statistics are summed, and random faults depend on that.
    masked = spec.secure_aggregation.scheme != "none" and entry.summed
    phases |= dict.fromkeys(UNMASKING_TAGS, "unmasking" if masked else "set-up")
    return Injector(faults, phases)
