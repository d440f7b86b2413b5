"""One call of `Federation.train`: play the rounds, keep the folder, test on the way, conclude."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moretta.contract.codec import Codec
from moretta.contract.messages import Message, Tensors
from moretta.contract.roles import Outcome, State
from moretta.data.silo import row_shape, rows_digest
from moretta.engines import views
from moretta.engines.checkpoint import Place, begin_session, last_checkpoint, save_checkpoint
from moretta.engines.delivery import Delivery
from moretta.engines.driver import Driver, DroppedSilo, RoundEnd
from moretta.engines.faults import Injector
from moretta.engines.files import write_atomically
from moretta.engines.in_process import InProcess
from moretta.engines.run_folder import ROWS, RunFolder
from moretta.engines.settings import FaultPhase
from moretta.engines.views import Recorder
from moretta.engines.write_ahead import WriteAhead
from moretta.errors import ParameterError, RunFailed
from moretta.protocols.common import modules, silo_rows
from moretta.protocols.common.enrolment import standardised
from moretta.protocols.common.players import Roles
from moretta.protocols.registry import ENTRIES, entry_of
from moretta.run import result
from moretta.run.evaluation import evaluate
from moretta.run.result import Result
from moretta.secure_aggregation import agreement, statistics, unmasking

if TYPE_CHECKING:
    from moretta.run.federation import Federation


def _tags(*groups: Iterable[type[Message]]) -> frozenset[str]:
    return frozenset(kind.TAG for kinds in groups for kind in kinds)


KEY_TAGS = _tags(agreement.MESSAGES, *(entry.key_messages() for entry in ENTRIES.values()))
UNMASKING_TAGS = _tags(unmasking.MESSAGES)
SET_UP_TAGS = _tags(statistics.MESSAGES, silo_rows.MESSAGES, *(entry.set_up_messages() for entry in ENTRIES.values()))
SMALL = 100_000  # parameters; below, threads wait for each other longer than they work
EVALUATIONS = 50  # about so many times a run is the model tested on the way, unless it says how often
SCORES = ("loss", "accuracy", "mse")
RELEASES = "releases.txt"  # in checkpoint/
MANY = 20  # models; with more, a sample of them is tested on the way, and only their plain scores are kept
Progress = Callable[[int, int, Mapping[str, Any]], None]
"""Called after each round with its number, the number of rounds, and its line of the history."""
Through = Callable[[Codec, Place, Recorder | None], Delivery]
"""Makes what delivers messages to silos that are elsewhere."""


class Session:
    """One call of `Federation.train`. silos: who is asked. through: makes what reaches them; None, they are here."""

    def __init__(
        self,
        federation: Federation,
        players: Roles,
        silos: Sequence[str],
        place: Place,
        folder: RunFolder | None,
        rounds: int,
        seed: int,
        progress: Progress | None,
        through: Through | None,
    ) -> None:
        self._of, self._players, self._place, self._folder = federation, players, place, folder
        self._silos = list(silos)
        self._rounds, self._seed, self._progress = rounds, seed, progress
        recorder = None
        if folder is not None and federation.spec.record_views:
            recorder = Recorder(folder.path / "views", federation.spec.record_views, place.session, place.run)
        self._recorder = recorder
        # Of a resumed run, without the rounds that will be played again.
        self._history: list[dict[str, Any]] = [] if folder is None else folder.history(up_to=place.round)
        codec = Codec(players.messages, federation.spec.engine.message_mib << 20)
        if folder is not None and place.session > 0:
            # Before anybody hears of it: a site takes a session's number from one beginning of it alone.
            begin_session(folder.path / "checkpoint", place)
        self._engine: Delivery = (
            through(codec, place, recorder)
            if through is not None
            else InProcess(
                players.clients,
                codec,
                strict=federation.spec.engine.strict,
                recorder=recorder,
                deadline=federation.spec.engine.deadline,
                injector=_injector(federation),
            )
        )
        players.server.phase = self._engine.clock.phase
        self._scratch = copy.deepcopy(federation.model)
        self._best: tuple[int, dict[str, State]] | None = None  # the round of the lowest validation loss, its states

    @property
    def has_begun(self) -> bool:
        """Whether a round has been finished."""
        return bool(self._history)

    def play(self) -> Result:
        """Play all rounds that are left, and conclude."""
        threads = torch.get_num_threads()
        if sum(parameter.numel() for parameter in self._scratch.parameters()) < SMALL:
            torch.set_num_threads(1)
        try:
            return self._play()
        finally:
            self._engine.close()
            torch.set_num_threads(threads)

    def _play(self) -> Result:
        if self._folder is not None:
            if self._place.session == 0:
                self._save(self._place.round)
            else:
                self._find_best(self._folder)
            self._keep_releases(self._folder)
            self._keep_truth(self._place.round)
        driver = Driver(
            self._players.server,
            self._silos,
            self._place.run,
            self._engine,
            self._players.least,
            self._chosen if self._of.spec.participation < 1 else None,
        )
        try:
            for line in self._rounds_kept(driver):
                if self._keep(line):
                    break
            if self._best is not None:
                self._restore(self._best[1])
            outcome, dropped = driver.finish(self._rounds + 1)
        finally:
            if self._recorder is not None:  # also what was seen in a round that failed
                self._recorder.flush()
        return self._conclude(outcome, dropped)

    def _keep(self, line: dict[str, Any]) -> bool:
        """Keep a round's line and what belongs to it; return whether the run stops here."""
        self._history.append(line)
        stops = self._has_stopped_improving(line)
        if self._folder is not None:
            if self._recorder is not None:  # first, so that no round is in the history without its views
                self._recorder.flush()
            self._folder.append(line)
            if line["round"] % self._of.spec.checkpoint_every == 0 or line["round"] == self._rounds:
                self._save(line["round"])
            self._keep_truth(line["round"])
        if self._progress is not None:
            self._progress(line["round"], self._rounds, line)
        return stops

    def _rounds_kept(self, driver: Driver) -> Iterator[dict[str, Any]]:
        """Yield each round's line; where a round fails for good, keep what the last good one came to."""
        try:
            yield from self._lines(driver)
        except (RunFailed, ParameterError):
            if self._history:
                self._save(self._history[-1]["round"])
            raise

    def _lines(self, driver: Driver) -> Iterator[dict[str, Any]]:
        every = self._of.spec.evaluate_every or max(1, self._rounds // EVALUATIONS)
        began = time.perf_counter()
        for end in driver.rounds(self._place.round + 1, self._rounds):
            line = self._line(end) | {"seconds_total": time.perf_counter() - began}
            if end.number % every == 0 or end.number == self._rounds:
                line |= self._tested()
            yield line
            began = time.perf_counter()

    def _line(self, end: RoundEnd) -> dict[str, Any]:
        traffic = self._engine.take_traffic()
        # Bytes went to, and partly came from, those too who then were missing.
        asked = {*end.cohort, *(gone.silo for gone in end.dropped if gone.round == end.number)}
        sums: dict[str, float] = {"up": 0.0, "down": 0.0, "secure_aggregation": 0.0, "set_up": 0.0}
        for (way, tag), size in traffic.items():  # relayed additive shares are the upload itself: up and down
            if way == "shares" or tag in KEY_TAGS | UNMASKING_TAGS:
                sums["secure_aggregation"] += size
            elif tag in SET_UP_TAGS:
                sums["set_up"] += size
            else:
                sums[way] += size / len(asked)
        peak, seconds = self._engine.peak_mib, dict(self._engine.clock.take())
        return {
            "round": end.number,
            "attempt": end.attempt,
            **({"take": end.take} if end.take else {}),
            **end.report.figures,
            **({} if peak is None else {"edge_peak_mib": peak}),
            "seconds": {} if self._is_private else seconds,
            "bytes": sums,
            "dropped": [asdict(gone) for gone in end.dropped],
        }

    @property
    def _is_private(self) -> bool:
        """Whether noise hides rows: then no phase's seconds are kept, as silos' depend on how many their lots had."""
        return self._of.spec.protocol.privacy is not None

    def _chosen(self, number: int) -> list[str]:
        """Return the silos of a round, drawn from the training seed: who takes part is no secret."""
        return self._of.spec.playing(self._silos, self._seed).of_round(number)

    def _has_stopped_improving(self, line: dict[str, Any]) -> bool:
        """Keep the best round's states; return whether `early_stopping` rounds have passed since.

        Patience is counted in rounds and judged where the model was evaluated (`evaluate_every`), nowhere between.
        """
        if self._of.spec.early_stopping is None or "validation_loss" not in line:
            return False
        losses = {one["round"]: one["validation_loss"] for one in self._history if "validation_loss" in one}
        best = min(losses, key=lambda number: (losses[number], number))
        if best == line["round"]:
            self._best = best, self._states()
        return bool(line["round"] - best >= self._of.spec.early_stopping)

    def _find_best(self, folder: RunFolder) -> None:
        """Take up the best round so far of a resumed run."""
        found = last_checkpoint(folder.path / "best", up_to=self._place.round)
        if found is not None:
            self._best = found[0].round, found[1]

    def _keep_releases(self, folder: RunFolder) -> None:
        """Have each noised sum on disk before it is asked for; take up those that a killed session had asked for."""
        releases = self._players.releases
        if releases is None:
            return
        ahead = WriteAhead(folder.path / "checkpoint" / RELEASES)
        if self._place.session == 0:
            ahead.begin()
        for line in ahead.lines():
            releases.read(line)
        releases.write = ahead.append

    def _states(self) -> dict[str, State]:
        states: dict[str, State] = {"server": self._players.server.state()}
        return states | {f"silo-{name}": client.state() for name, client in self._players.clients.items()}

    def _restore(self, states: Mapping[str, State]) -> None:
        self._players.server.restore(states["server"])
        for name, client in self._players.clients.items():
            client.restore(states[f"silo-{name}"])

    def _tested(self) -> dict[str, float]:
        """Return the scores on test and validation rows, as far as there are any."""
        found: dict[str, float] = {}
        models = _some(self._players.models())
        for part, rows in (("test", self._of.test), ("validation", self._of.validation)):
            if rows is not None and models:
                scores = self._scores_of_all(models, *rows)
                found |= {f"{part}_{key}": scores[key] for key in SCORES if key in scores}
                found |= {f"{part}_mean_{key}": scores["mean"][key] for key in SCORES if key in scores.get("mean", ())}
        return found

    def _scores_of_all(
        self, models: Mapping[str, Tensors], x: NDArray[np.generic], y: NDArray[np.generic]
    ) -> dict[str, Any]:
        """Return the scores on some rows; where silos have models of their own the mean, or the worst of them."""
        many = len(models) > MANY
        inputs = self._prepared(x)
        scores = {name: self._scores(tensors, inputs, y, metrics=not many) for name, tensors in models.items()}
        summary = result.mean_of(list(scores.values()))
        if entry_of(self._of.spec.protocol).judged_by == "worst":
            summary = result.worst_of(scores) | {"mean": summary}
        return summary | ({"per_silo": scores} if len(scores) > 1 else {})

    def _prepared(self, x: NDArray[np.generic]) -> torch.Tensor:
        agreed = self._players.standardisation
        return standardised(x, agreed.mean, agreed.deviation, self._scratch_dtype())

    def _scores(
        self, tensors: Tensors, inputs: torch.Tensor, y: NDArray[np.generic], *, metrics: bool = True
    ) -> dict[str, Any]:
        modules.load(self._scratch, tensors)
        return evaluate(self._scratch, inputs, y, self._of.spec.protocol.loss, str(self._of.spec.task), metrics=metrics)

    def _scratch_dtype(self) -> torch.dtype:
        return next(self._scratch.parameters()).dtype

    def _save(self, number: int) -> None:
        if self._folder is None:
            return
        place = Place(self._place.run, number, self._place.session, self._place.digest)
        if self._best is not None:  # first, and two are kept: each checkpoint has a best that is not younger
            save_checkpoint(self._folder.path / "best", replace(place, round=self._best[0]), self._best[1])
        self._engine.keep(place)  # first, so that every silo elsewhere can go on from where the server does
        save_checkpoint(self._folder.path / "checkpoint", place, self._states())

    def _keep_truth(self, number: int) -> None:
        """Keep the roles' states before and after each recorded round apart from the views, for an audit's scorer.

        Where silos are elsewhere there is no such place: nobody has all of it.
        """
        wanted, folder = self._of.spec.record_views, self._folder
        if folder is None or not wanted or any(silo.elsewhere for silo in self._of.silos):
            return
        if isinstance(wanted, bool) or number in wanted or number + 1 in wanted:
            place = replace(self._place, round=number)
            save_checkpoint(folder.path / "truth", place, self._states(), kept=None)
            rows = folder.path / "truth" / ROWS
            if not rows.exists():
                write_atomically(rows, rows_digest(self._of.silos).encode(), mode=0o600)

    def _conclude(self, outcome: Outcome, dropped: Sequence[DroppedSilo]) -> Result:
        of = self._of
        models = outcome.models or ({"": outcome.parameters} if outcome.parameters else self._players.models())
        record = self._record(outcome, dropped, models)
        if self._folder is not None:
            self._write(outcome, record)
        return Result(
            record=record,
            history=self._history,
            model=self._module(outcome.parameters) if outcome.parameters else None,
            released=None if outcome.released is None else self._module(outcome.released),
            models={name: self._module(tensors) for name, tensors in outcome.models.items()},
            folder=None if of.out is None else Path(of.out),
            played=(of, self._rounds, self._seed),
        )

    def _record(
        self, outcome: Outcome, dropped: Sequence[DroppedSilo], models: Mapping[str, Tensors]
    ) -> dict[str, Any]:
        of, history = self._of, self._history
        test: dict[str, Any] = self._scores_of_all(models, *of.test) if of.test is not None and models else {}
        if scores := self._scores_at_silos(outcome):
            test |= scores if of.test is None else {"silos": scores}
        if of.test is not None and self._players.displacement is not None:
            test["displacement"] = self._scores(self._players.displacement(), self._prepared(of.test[0]), of.test[1])
        noised = getattr(of.spec.protocol, "dp_noise", None)  # scores on training rows would be a release without noise
        here = [silo for silo in of.silos if not silo.elsewhere]
        if "" in models and not noised and here and not any(silo.columns for silo in here):
            test["per_silo"] = {silo.name: self._scores(models[""], self._prepared(silo.x), silo.y) for silo in here}
        scheme = self._players.scheme
        return {
            "name": of.spec.name,
            "run": self._place.run,
            "protocol": getattr(of.spec.protocol, "name", ""),
            "rounds": history[-1]["round"] if history else 0,
            "silos": len(of.silos),
            "silo_names": [silo.name for silo in of.silos],
            "parameters": sum(parameter.numel() for parameter in of.model.parameters()),
            "task": of.spec.task,
            "test": test,
            "bytes": result.traffic(history),
            "seconds": result.seconds(history),
            "dropped": [entry for line in history for entry in line["dropped"]] + [asdict(entry) for entry in dropped],
            "sessions": self._place.session + 1,
            "secure_aggregation": {
                "scheme": scheme,
                "ring_bits": None if scheme == "none" else of.spec.aggregation.ring_bits,
            },
            "facts": self._facts(outcome),
            "forced_to_one": [{"tensor": name, "because": why} for name, why in outcome.unperturbed.items()],
            "warnings": self._warnings(outcome),
            "settings": dict(of.spec.settings),
            "insecure_secret_seed": of.spec.insecure_secret_seed is not None,
            "views": "" if self._folder is None else views.digest(self._folder.path / "views"),
            "versions": result.versions(),
        }

    def _scores_at_silos(self, outcome: Outcome) -> dict[str, Any]:
        """Return what silos score on the rows they hold back, as the server learns it or the participants here do."""
        scores = outcome.scores or self._players.scores()
        return {**scores, "by": "silos"} if scores else {}

    def _facts(self, outcome: Outcome) -> dict[str, float | str]:
        ring = result.ring_facts(self._history, self._of.spec.protocol, outcome.parameters, self._rounds)
        best = {} if self._best is None else {"best_round": float(self._best[0])}
        peaks = [line["edge_peak_mib"] for line in self._history if "edge_peak_mib" in line]
        return {**outcome.facts, **ring, **best, **({"edge_peak_mib": max(peaks)} if peaks else {})}

    def _warnings(self, outcome: Outcome) -> list[str]:
        warnings = list(self._players.warnings)
        if outcome.facts.get("free_scales") == 0.0:
            warnings.append(
                "no scale of this model is free, so silos see its true parameter values but for the head's offset; "
                "moretta check says why"
            )
        if self._of.spec.insecure_secret_seed is not None:
            warnings.append("every secret of this run follows from insecure-secret-seed; it hides nothing")
        if self._of.spec.engine.faults is not None:
            warnings.append("faults were injected into this run ([engine.faults]); the silos it dropped may be well")
        clipped = [str(line["round"]) for line in self._history if {"clipped", "clipped_buffers"} & line.keys()]
        if clipped:
            warnings.append(
                f"the silos' sum was clipped in rounds {', '.join(clipped[:20])}{' ..' * (len(clipped) > 20)}, being "
                "out of proportion to the rounds before: some silo diverged or did not follow the protocol"
            )
        asked = getattr(self._of.spec.protocol, "rho", 0.0)
        lowered = [line["rho"] for line in self._history if line.get("rho", asked) < asked]
        if lowered:
            warnings.append(
                f"rho was lowered in {len(lowered)} rounds, to {min(lowered):.3g} at the lowest: more would cost "
                f'accuracy in {self._of.spec.dtype}; with dtype = "float64" it stays as set'
            )
        if self._of.spec.score_at_silos and not self._scores_at_silos(outcome):
            warnings.append(
                "the participants alone know what their models score together on the rows they hold back (blind), each "
                "has it in its scores.json"
            )
        elif self._of.test is None and not self._of.spec.score_at_silos:
            warnings.append("no test rows were given, so nothing says how good the model is")
        return warnings

    def _write(self, outcome: Outcome, record: Mapping[str, Any]) -> None:
        folder, agreed = self._folder, self._players.standardisation
        if folder is None:
            return
        if outcome.parameters:
            folder.write_model("model.safetensors", outcome.parameters)
        if outcome.released is not None:
            folder.write_model("released.safetensors", outcome.released, mode=0o644)
        for name, tensors in outcome.models.items():
            folder.write_model(f"models/{name}.safetensors", tensors)
        if self._players.displacement is not None:
            folder.write_confined(self._players.displacement(), self._players.models(), MANY)
        inputs = {
            "shape": list(row_shape(self._of.silos)),
            "outputs": self._of.outputs,
            "columns": list(self._of.feature_names),
            "mean": agreed.mean.tolist(),
            "deviation": agreed.deviation.tolist(),
            "task": self._of.spec.task,
            "dtype": self._of.spec.dtype,
        }
        folder.write_json("inputs.json", inputs)
        folder.write_json("result.json", record)  # last: a folder with a result is a finished run

    def _module(self, tensors: Tensors) -> nn.Module:
        module = copy.deepcopy(self._of.model)
        modules.load(module, tensors)
        return module.eval()


def _some(models: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """Return all models, or where they are many a sample of them, evenly spaced."""
    names = list(models)
    step = max(1, len(names) / MANY)
    return {names[int(number * step)]: models[names[int(number * step)]] for number in range(int(len(names) / step))}


def _injector(federation: Federation) -> Injector | None:
    """Return what injects the faults that are asked for; the one pool of centralised training is no silo."""
    faults, entry = federation.spec.engine.faults, entry_of(federation.spec.protocol)
    if faults is None or entry.pooled:
        return None
    phases: dict[str, FaultPhase] = dict.fromkeys(KEY_TAGS | SET_UP_TAGS, "set-up")
    # Where silos train alone, statistics of the set-up are all that is summed, and chance must know it.
    masked = federation.spec.aggregation.scheme != "none" and entry.summed
    phases |= dict.fromkeys(UNMASKING_TAGS, "unmasking" if masked else "set-up")
    return Injector(faults, phases)
