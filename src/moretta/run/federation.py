"""What a Python user calls: silos, a protocol, a model, and `Federation.train`.

from moretta import PBPFL, Federation, Silo

silos = [Silo("north", x_north, y_north), Silo("south", x_south, y_south)]
result = Federation(model, silos, PBPFL(loss="mse", learning_rate=0.1), test=(x, y)).train(rounds=300, seed=7)
print(result.test, result.released)
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moretta.config.specification import Specification
from moretta.contract.keywords import names_keywords
from moretta.contract.lazy_rows import LazyRows, loaded
from moretta.contract.messages import Message
from moretta.contract.roles import Client, State
from moretta.contract.wording import nearest
from moretta.data.holders import grid_of
from moretta.data.layout import Samples, packed_as
from moretta.data.silo import Silo, Subjects, check_least, digests_by_silo, layout_of, row_shape
from moretta.data.tables.preparation import ColumnRules
from moretta.data.tables.rows import expansion_of, rules_of
from moretta.data.tables.schema import Schema
from moretta.engines.checkpoint import CheckpointId, last_checkpoint
from moretta.engines.kept_lines import HelpedFile
from moretta.engines.memory import give_back_heap
from moretta.engines.run_folder import RunFolder
from moretta.engines.settings import Engine, Faults
from moretta.errors import ParameterError
from moretta.models.by_keyword import takes_packed
from moretta.protocols.common import modules
from moretta.protocols.common.counted import counted_classes
from moretta.protocols.common.crops import CROPS, PADDING
from moretta.protocols.common.enrolment import targets
from moretta.protocols.common.own_loss import check as check_loss
from moretta.protocols.common.players import Roles
from moretta.protocols.common.scoring import figures_of
from moretta.protocols.common.setting import TABLES_TOO, Setting, check_look, check_scores, check_tables
from moretta.protocols.common.training import Training
from moretta.protocols.registry import build, entry_of
from moretta.run import given, saving
from moretta.run import metrics as own_metrics
from moretta.run.checkpoints import restore_states
from moretta.run.evaluation import LabelledRows
from moretta.run.loop import Session, Transport
from moretta.run.metrics import Metric
from moretta.run.progress import Display, Progress
from moretta.run.result import Result
from moretta.run.rounds import OnRound
from moretta.secure_aggregation.agreement import RUN_DIGEST
from moretta.secure_aggregation.identity import Roster
from moretta.secure_aggregation.keystream import derive
from moretta.secure_aggregation.settings import SecureAggregation

NOWHERE = CheckpointId("", 0, 0, "")  # of roles that are built and play no run

__all__ = ["Federation", "Progress", "Result", "Silo"]


class Federation:
    """Silos that train one model by one protocol, here all in this process.

    Silos may also be remote (`Silo.remote`). If all are, this is the server's side, which reaches them by the transport
    that `train` is given. If one is here, this is that silo's side, which plays its role (`client`).

    model: any PyTorch module (for PBPFL its last layer is linear); it is copied. Or a built-in name, "module:function",
    or a mapping with that as "source" and further arguments, as [model] of a run file: then others can build it without
    this process. silos: their names are 1 to 64 letters, digits, dots, dashes and underscores. test: inputs and targets
    on which the server measures, (x, y) or a Dataset, each as a `Silo` takes them. batch_size:
    rows a silo uses in a round, 0 for all. standardise: bring input columns to mean 0 and deviation 1 with statistics
    that come through the secure sum; of samples of several arrays (`Silo`) those of numbers in one axis that are no
    mask of 0 and 1, or those that are named. missing: "error", or "mean": NaN is an absent value, which becomes the
    column's mean over all silos' training rows. table: what the columns mean, of rows that were read by a schema
    (`moretta.data.tables.rows.read_table`); it says what is filled in, and names columns and classes. task: None takes
    whole-number targets for classes. validation: inputs and targets for early stopping: after `early_stopping` rounds
    that have not lowered the loss on them, the run stops and returns to its best round; patience is counted in rounds
    and judged at evaluations. participation: the part of the silos that takes part in a round. augment: vary training
    images each time they are used (`moretta.protocols.common.augmentation.varied`); true is "crop-flip".
    evaluate_every: rounds from one evaluation on test and validation rows to the next, None for about 50 in a run; the
    last round always is. metrics: functions of outputs and targets, each of which gives a number that stands in the
    result and the history under the function's name (`moretta.run.metrics`). insecure_secret_seed: for tests only, all
    secrets follow from it. run_file: the run file as resolved and its digest, kept in the run folder and compared on
    `resume`. least_rows: the fewest rows that any silo has, where rows are remote. score_at_silos: at the end, have the
    silos score the outcome on the rows that each holds back (`Silo.held_out`), and sum their scores in secret
    (`moretta.protocols.common.scoring`). model_source: a digest of what the model was built by
    (`moretta.models.catalogue.source_digest`), which noise is bound to; empty for a module given from Python. look:
    count rows and classes of all silos together before round one, for `data` in the result.

    Raises `moretta.errors.ParameterError` where model, data, loss and protocol do not fit.
    """

    @names_keywords(given.elsewhere())
    def __init__(
        self,
        model: nn.Module | str | Mapping[str, Any],
        silos: Sequence[Silo],
        protocol: Training,
        test: Any = None,
        validation: Any = None,
        aggregation: SecureAggregation | None = None,
        engine: Engine | None = None,
        out: str | Path | None = None,
        batch_size: int = 32,
        standardise: bool | Sequence[str] = False,
        missing: str = "error",
        dtype: str = "float32",
        device: str = "cpu",
        task: str | None = None,
        name: str = "run",
        augment: bool | str = False,
        early_stopping: int | None = None,
        participation: float = 1.0,
        checkpoint_every: int = 10,
        evaluate_every: int | None = None,
        metrics: Sequence[Metric] = (),
        record_views: bool | tuple[int, ...] = False,
        insecure_secret_seed: int | None = None,
        run_file: tuple[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
        feature_names: Sequence[str] = (),
        class_names: Sequence[str] = (),
        table: Schema | None = None,
        least_rows: int | None = None,
        score_at_silos: bool | Literal["classes"] = False,
        look: bool = False,
        model_source: str = "",
    ) -> None:
        given.check_protocol(protocol)
        given.check_kinds(aggregation, engine, metrics, out)
        given.check_settings(
            {
                **{"name": name, "dtype": dtype, "device": device, "record_views": record_views, "look": look},
                **{"batch_size": batch_size, "missing": missing, "checkpoint_every": checkpoint_every},
                **{"early_stopping": early_stopping, "least_rows": least_rows, "score_at_silos": score_at_silos},
                "insecure_secret_seed": insecure_secret_seed,
            }
        )
        silos, feature_names = given.columns_agreed(given.listed(silos), feature_names)
        test, validation = (
            given.rows_of(part, rows, feature_names) for part, rows in (("test", test), ("validation", validation))
        )
        if task is None and silos:
            task = "classification" if silos[0].y.dtype.kind in "iub" else "regression"
        model, self.made = given.built(model, silos, protocol, task or "", class_names)
        spec = Specification(
            protocol=protocol,
            task=task or "",
            aggregation=aggregation or SecureAggregation(),
            engine=engine or Engine(),
            batch_size=batch_size,
            standardise=_named(standardise),
            missing=missing,
            dtype=dtype,
            device=device,
            name=name,
            augment=("crop-flip" if augment else "") if isinstance(augment, bool) else augment,
            early_stopping=early_stopping,
            participation=participation,
            checkpoint_every=checkpoint_every,
            evaluate_every=evaluate_every,
            metrics=tuple(metrics),
            record_views=record_views,
            insecure_secret_seed=insecure_secret_seed,
            least_rows=least_rows,
            score_at_silos=score_at_silos,
            look=look,
            model_source=model_source or self.made.digest,
            table="" if table is None else table.digest,
            text=run_file[0] if run_file else "",
            digest=run_file[1] if run_file else "",
            given=settings,
        )
        self._tested: Subjects | None = None
        self._hold(spec, model, silos, test, validation, out, feature_names, class_names, table, None)

    @classmethod
    def of(
        cls,
        spec: Specification,
        model: nn.Module,
        silos: Sequence[Silo],
        *,
        test: tuple[Samples, NDArray[np.generic]] | None = None,
        validation: tuple[Samples, NDArray[np.generic]] | None = None,
        out: str | Path | None = None,
        feature_names: Sequence[str] = (),
        class_names: Sequence[str] = (),
        table: Schema | None = None,
        column_rules: ColumnRules | None = None,
        tested: Subjects | None = None,
    ) -> Federation:
        """Return the federation of a given specification; the other arguments are those of the class.

        column_rules: what is filled in where a value is absent; None takes the table's, or the specification's. tested:
        whom the test rows are about, which silos' rows are then compared with (`protocols.common.apart`).
        """
        made = cls.__new__(cls)
        made._tested, made.made = tested, given.Made.of(spec)
        made._hold(spec, model, silos, test, validation, out, feature_names, class_names, table, column_rules)
        return made

    def _hold(
        self,
        spec: Specification,
        model: nn.Module,
        silos: Sequence[Silo],
        test: tuple[Samples, NDArray[np.generic]] | None,
        validation: tuple[Samples, NDArray[np.generic]] | None,
        out: str | Path | None,
        feature_names: Sequence[str],
        class_names: Sequence[str],
        table: Schema | None,
        column_rules: ColumnRules | None,
    ) -> None:
        """Check what stands beside the settings against them and each other, and keep it."""
        if not spec.batch_size:  # every round uses all of a silo's rows
            silos = [replace(silo, x=loaded(silo.x)) if isinstance(silo.x, LazyRows) else silo for silo in silos]
        self.spec, self.silos = spec, silos
        self.out, self.table = out, table
        self.feature_names = feature_names or (() if table is None else expansion_of(table).names)
        self.class_names = class_names or (() if table is None else table.classes)
        self._check_some()
        self.layout = layout_of(silos, spec.standardise, spec.missing)
        self.test, self.validation = self._packed("test", test), self._packed("validation", validation)
        self.column_rules = self._rules_of_columns(column_rules)
        self._check_silos()
        self._check_names()
        self._roster = None if spec.aggregation.roster is None else Roster.load(spec.aggregation.roster)
        if self._roster is not None:
            self._roster.check(silo.name for silo in self.silos)
        self._dtype = {"float32": torch.float32, "float64": torch.float64}[spec.dtype]
        self.model = takes_packed(copy.deepcopy(model).to(self._dtype), self.layout)
        self.outputs = self._count_outputs()
        self._check_rows("test", self.test)
        self._check_rows("validation", self.validation)
        self._check_training()
        if spec.score_at_silos:
            self._check_scores()
        if spec.look:
            check_look(spec.protocol, self.silos)
        if spec.protocol.warm_start is not None:
            modules.load(self.model, modules.read_state_dict(spec.protocol.warm_start))

    def without_edge_processes(self) -> Federation:
        """Return the same federation with all roles by PyTorch in this process, as an audit plays them again."""
        if not self.spec.engine.edge:
            return self
        spec = replace(self.spec, engine=self.spec.engine.model_copy(update={"edge": ()}))
        return Federation.of(
            spec,
            self.model,
            self.silos,
            test=self.test,
            validation=self.validation,
            out=self.out,
            table=self.table,
            column_rules=self.column_rules,
        )

    def __repr__(self) -> str:
        return f"Federation({self.spec.name!r}, {self.spec.protocol.name}, {len(self.silos)} silos)"

    @names_keywords({name: given.OF_PROTOCOL.format(name) for name in Training.model_fields})
    def train(
        self,
        rounds: int,
        seed: int = 0,
        *,
        resume: bool = False,
        progress: Progress | bool = True,
        on_round: OnRound | None = None,
        transport: Transport | None = None,
        begin: Callable[[], None] | None = None,
    ) -> Result:
        """Train for a number of rounds and return the result; with `out`, leave a run folder.

        seed: of batches (and nothing secret). resume: go on from the folder's last checkpoint.
        progress: show a bar, or without a terminal or notebook a line every few seconds; false shows nothing, and a
        function is called in its place (`moretta.run.progress.Progress`). on_round: called after each round with what
        the server knows of it (`moretta.run.rounds.FinishedRound`). It ends the run by raising `moretta.StopTraining`;
        whatever else it raises ends `train`, and a folder then has a checkpoint of that round.
        transport: what delivers messages to remote silos; None where all are here. begin: called before the first
        round, once no setting can be refused any more.
        Raises `moretta.errors.RunFailed` when too few silos are left, with the last checkpoint whole, and
        `moretta.errors.ParameterError` where another process writes the folder.
        """
        rounds, seed = given.whole("rounds", rounds, 1), given.whole("seed", seed, 0)
        given.check_watchers(progress, on_round)
        folder = None if self.out is None else RunFolder(Path(self.out))
        try:
            if folder is not None and resume and folder.path.is_dir():
                folder.hold()  # before its checkpoint is read, as others could move on from that
            return self._trained(folder, rounds, seed, resume, progress, on_round, transport, begin)
        finally:
            if folder is not None:
                folder.release()

    def _trained(
        self,
        folder: RunFolder | None,
        rounds: int,
        seed: int,
        resume: bool,
        progress: Progress | bool,
        on_round: OnRound | None,
        transport: Transport | None,
        begin: Callable[[], None] | None,
    ) -> Result:
        checkpoint = self._checkpoint(folder, rounds, seed) if resume else None
        place = (
            CheckpointId(self._run_id(seed), 0, 0, self.digest(seed, rounds)) if checkpoint is None else checkpoint[0]
        )
        helped = None if folder is None else folder.helped
        players = self._built(self._setting(seed, rounds, place, helped))  # before anything is written
        silos = self._players_names(players)
        if len(silos) < players.least:
            raise ParameterError(
                f"a round needs at least {players.least} silos, got {len(silos)}; one silo needs "
                'scheme = "none", as its sum would be its own data'
            )
        if checkpoint is not None:
            _refuse_others(checkpoint[1], players)
            restore_states(players, checkpoint[1])
        elif folder is not None:
            folder.begin(self.spec.text or None)
            if not self.spec.text:
                saving.keep_made(folder, self.made, rounds, seed)
        if folder is not None:
            folder.hold_rows(digests_by_silo(self.silos))
        session, shown = None, Display(self.spec.protocol.name, rounds) if progress is True else None
        told = shown or (progress if callable(progress) else None)
        try:
            session = Session(self, players, silos, place, folder, rounds, seed, told, transport, on_round)
            if begin is not None:
                begin()
            with folder.logging() if folder else nullcontext(), shown or nullcontext():
                result = replace(session.play(), played=(self, rounds, seed))
                if shown is not None:
                    shown.end(result.record["warnings"])
                return result
        except ParameterError:
            if folder is not None and checkpoint is None and (session is None or not session.has_begun):
                folder.discard()  # nothing half-written: the mended run may take the same folder
            raise
        finally:
            if session is not None:
                session.close()

    def client(
        self, name: str, rounds: int, seed: int, place: CheckpointId, helped: HelpedFile
    ) -> tuple[Client, Sequence[type[Message]]]:
        """Build the role of one silo that is here, and return it with the messages of the run.

        place: the run, and how often it was resumed. helped: where it keeps which sums it has helped to open.
        """
        players = self._built(self._setting(seed, rounds, place, lambda name: helped))
        return players.clients[name], players.messages

    def players(self, rounds: int, seed: int) -> Roles:
        """Build all roles of a run anew, with secrets of their own until they are given a run's states."""
        return build(self.spec.protocol, self._setting(seed, rounds))

    def _built(self, setting: Setting) -> Roles:
        """Build the roles that play a run; what building needed beside them, as to trace a model, is given back."""
        built = build(self.spec.protocol, setting)
        give_back_heap()
        return built

    def _players_names(self, players: Roles) -> list[str]:
        """Return who is asked: the roles that are here (of centralised training a pool), or all remote silos."""
        return list(players.clients) or [silo.name for silo in self.silos if silo.remote]

    def rehearse(self, rounds: int, seed: int = 0) -> None:
        """Build all roles and write nothing: raises what `train` would raise before its first round."""
        self.players(rounds, seed)

    def _check_some(self) -> None:
        if not self.silos:
            raise ParameterError("a federation needs at least one silo; got none")

    def _rules_of_columns(self, given: ColumnRules | None) -> ColumnRules:
        """Return how input columns are prepared; tokens are left as they are."""
        columns = row_shape(self.silos)[-1] if self.silos[0].x.dtype.kind == "f" else 0
        scaled = bool(self.spec.standardise)
        if self.layout is not None:
            rules = ColumnRules.alike(columns)
            rules.scaled[self.layout.standardised] = True
            return rules
        if given is None and self.table is not None and self.table.features:
            given = rules_of(self.table)
        if given is None:
            return ColumnRules.alike(columns, scaled=scaled, fill="none" if self.spec.missing == "error" else "mean")
        if given.columns != columns:
            raise ParameterError(f"the table has {given.columns} input columns, and the silos' rows have {columns}")
        return replace(given, scaled=np.full(columns, scaled))

    def _check_silos(self) -> None:
        names = Counter(silo.name for silo in self.silos)
        folded = Counter(name.casefold() for name in names)
        self._check_grid()
        for silo in self.silos:
            if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", silo.name) or silo.name == "server":
                raise ParameterError(
                    f"silo name {silo.name!r:.80}: expected 1 to 64 letters, digits, dots, dashes and underscores, "
                    'not "server"'
                )
            if names[silo.name] > 1:
                raise ParameterError(f"two silos are called `{silo.name}`; give each its own name")
            if folded[silo.name.casefold()] > 1:  # their files would be one where a disk knows no capitals
                raise ParameterError(
                    f"silo `{silo.name}`: another silo's name differs from it by capitals alone; give each its own name"
                )
            unlabelled = bool(silo.columns) and not len(silo.y)
            if silo.remote:
                continue
            check_least(silo, self.spec.least_rows)
            if len(silo.x) == 0 or (len(silo.x) != len(silo.y) and not unlabelled):
                raise ParameterError(
                    f"silo `{silo.name}`: expected as many targets as rows, and at least one; got {len(silo.x)} rows "
                    f"and {len(silo.y)} targets"
                )
            self._check_finite(silo.x, f"silo `{silo.name}`", silo.columns)
            if not silo.columns and silo.x.shape[1:] != self.silos[0].x.shape[1:]:
                raise ParameterError(
                    f"silo `{silo.name}`: expected rows of shape {list(self.silos[0].x.shape[1:])}, as "
                    f"`{self.silos[0].name}` has, got {list(silo.x.shape[1:])}"
                )

    def _check_grid(self) -> None:
        """Check who holds which columns, where any silo says so."""
        if not any(silo.columns or silo.row for silo in self.silos):
            return
        if not entry_of(self.spec.protocol).grids:
            raise ParameterError(
                "silos that hold different columns of the same rows train by cgd; of the other protocols, centralised "
                f"alone puts the columns together, {getattr(self.spec.protocol, 'name', 'this one')} does not"
            )
        for silo in self.silos:
            if not silo.row or not silo.columns or silo.x.shape[1:] != (len(silo.columns),):
                raise ParameterError(
                    f"silo `{silo.name}`: expected the name of its row of the grid, and inputs [rows, columns] with "
                    f"the indices of their columns; got row `{silo.row}`, inputs {list(silo.x.shape)} and "
                    f"{len(silo.columns)} columns"
                )
        grid_of(self.silos).check(row_shape(self.silos)[0])

    def _check_names(self) -> None:
        """Check that the silos exist that edge clients and faults name."""
        for name in self.spec.engine.edge:
            self._check_name("[engine] edge", name)
        faults = self.spec.engine.faults or Faults()
        for key, rows in (("drop", faults.drop), ("delay", faults.delay), ("corrupt", faults.corrupt)):
            for row in rows:
                self._check_name(f"[engine.faults] {key}", row.silo)

    def _check_name(self, key: str, name: str) -> None:
        names = [silo.name for silo in self.silos]
        if name not in names:
            close = nearest(name, names)
            hint = f"did you mean `{close}`?" if close else f"the silos are {', '.join(names):.200}"
            raise ParameterError(f"{key}: no silo is called `{name}`; {hint}")

    def _check_training(self) -> None:
        spec = self.spec
        own_metrics.check(spec.metrics, self.outputs, spec.task, self._dtype)
        if (own := spec.protocol.own_loss) is not None:
            forward_only = bool(entry_of(spec.protocol).edge)
            check_loss(own, self.outputs, spec.protocol.loss, spec.task, self._dtype, differentiable=not forward_only)
        if spec.early_stopping is not None and self.validation is None:
            raise ParameterError("early_stopping needs rows to judge by; give validation=(x, y)")
        weights = len(spec.protocol.class_weights)
        if weights and weights != self.outputs:
            raise ParameterError(f"class-weights: expected {self.outputs}, one an output of the model, got {weights}")
        kind, _, number = spec.device.partition(":")
        there = torch.cuda.device_count() if kind == "cuda" and torch.cuda.is_available() else 0
        if kind == "cuda" and int(number or 0) >= there:
            raise ParameterError(f'device = "{spec.device}" is not there: this PyTorch finds {there} GPUs; use "cpu"')
        if spec.augment and self.silos[0].x.ndim != 4:
            raise ParameterError("augment is for images [rows, channels, height, width]; these inputs are none")
        if spec.augment == "reflect-crop-flip" and min(self.silos[0].x.shape[2:]) <= PADDING:
            raise ParameterError(f"augment mirrors {PADDING} pixels at each edge; images must be larger than that")
        if spec.augment not in ("", *CROPS, "turn"):
            raise ParameterError(f"augment = {spec.augment!r} is unknown; use one of {', '.join((*CROPS, 'turn'))}")

    def _figures(self) -> tuple[str, ...]:
        """Return what silos' scores are of; nothing where they are not asked for any."""
        asked = self.spec.score_at_silos
        return figures_of(self.spec.protocol.loss, self.spec.task, tables=asked == TABLES_TOO) if asked else ()

    def _check_scores(self) -> None:
        """Check that every silo here has rows to score models on, and that no score is of a single silo."""
        check_scores(self.spec.protocol, self.silos)
        if self.spec.score_at_silos == TABLES_TOO:
            check_tables(self.spec.aggregation, self.spec.task, self.outputs)
        for silo in self.silos:
            if not silo.remote:
                self._check_rows(f"silo `{silo.name}`: held_out", silo.held_out)

    def _packed(self, part: str, given: tuple[Samples, NDArray[np.generic]] | None) -> LabelledRows | None:
        return None if given is None else (packed_as(given[0], self.layout, part), given[1])

    def _check_rows(self, part: str, given: tuple[NDArray[np.generic], NDArray[np.generic]] | None) -> None:
        if given is None:
            return
        (x, y), row = given, row_shape(self.silos)
        if len(x) == 0 or len(x) != len(y) or x.shape[1:] != row:
            raise ParameterError(
                f"{part}: expected as many targets as rows, at least one, of shape {list(row)} as the silos have; got "
                f"inputs of shape {list(x.shape)} and {len(y)} targets"
            )
        self._check_finite(x, part)
        targets(y, self.outputs, self.spec.protocol.loss, part, self._dtype)

    def _check_finite(self, x: NDArray[np.generic], whose: str, columns: Sequence[int] = ()) -> None:
        """Check inputs for what is no number: infinity, and NaN, by which a value is absent, where none may be.

        columns: which x has, where they are split; empty for all.
        """
        if x.dtype.kind != "f" or isinstance(x, LazyRows):  # these are looked at when they are read
            return
        wrong = ~np.isfinite(x)
        if self.column_rules.may_lack:
            may_lack = self.column_rules.fills[list(columns)] if columns else self.column_rules.fills
            wrong = np.isinf(x) | (np.isnan(x) & (may_lack == 0))
        if wrong.any():
            column = int(np.argwhere(wrong)[0][-1])
            column = columns[column] if columns else column
            label = self.feature_names[column] if column < len(self.feature_names) else f"column {column}"
            raise ParameterError(
                f"{whose}: expected finite inputs, got NaN or infinity in {label}; remove or mend those rows, or where "
                'values are absent (NaN) say missing = "mean"'
            )

    def _count_outputs(self) -> int:
        sample = torch.zeros((2, *row_shape(self.silos)), dtype=torch.tensor(self.silos[0].x[:0]).dtype)
        sample = sample.to(self._dtype) if sample.is_floating_point() else sample
        model = copy.deepcopy(self.model).eval()
        try:
            with torch.no_grad():
                outputs = model(sample)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            if not sample.is_floating_point():
                said += "; whole numbers are token ids, so give numbers as floats: x.astype(numpy.float32)"
            raise ParameterError(
                f"the model cannot take {self.layout or f'rows of shape {list(sample.shape[1:])}'}: {said}"
            ) from error
        if not isinstance(outputs, torch.Tensor) or outputs.ndim != 2 or len(outputs) != len(sample):
            shape = list(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
            raise ParameterError(f"expected a model with outputs of shape [rows, outputs], got {shape}")
        return int(outputs.shape[1])

    @property
    def summing(self) -> SecureAggregation:
        """How sums are made: see `Specification.summing`."""
        return self.spec.summing(len(self.silos))

    def _setting(
        self, seed: int, rounds: int, place: CheckpointId = NOWHERE, helped: Callable[[str], HelpedFile] | None = None
    ) -> Setting:
        remote = any(silo.remote for silo in self.silos) and self.spec.insecure_secret_seed is None
        return Setting(
            built=self.model,
            outputs=self.outputs,
            silos=self.silos,
            secure_aggregation=self.summing,
            batch_size=self.spec.batch_size,
            columns=self.column_rules,
            dtype=self._dtype,
            device=self.spec.device,
            seed=seed,
            rounds=rounds,
            augment=self.spec.augment,
            session=place.session,
            insecure=self.spec.insecure_secret_seed,
            roster=self._roster,
            engine=self.spec.engine,
            least_rows=self.spec.least_rows,
            figures=self._figures(),
            playing=self.spec.playing([silo.name for silo in self.silos], seed),
            run=place.run if remote else "",
            helped=helped,
            model_source=self.spec.model_source,
            table=self.spec.table,
            tested=self._tested,
            layout=self.layout,
            classes=counted_classes(self.spec.task, self.outputs) if self.spec.look else 0,
        )

    def _run_id(self, seed: int) -> str:
        run = secrets.token_hex(16)
        if self.spec.insecure_secret_seed is not None:
            derived = derive(
                b"insecure run id.", self.spec.insecure_secret_seed, seed, type(self.spec.protocol).__name__
            )
            run = derived.hex()[:32]
        return f"{run}.{self._roster_mark()}".removesuffix(".")

    def _roster_mark(self) -> str:
        """Return what a run id ends with, so that silos with another roster refuse it."""
        return "" if self._roster is None else self._roster.digest[:RUN_DIGEST]

    def digest(self, seed: int, rounds: int) -> str:
        """Return what a resumed run must agree on: the run file, or without one what was given from Python."""
        if self.spec.digest:
            return self.spec.digest
        given = [
            {name: section for name, section in self.spec.settings.items() if name != "engine"},
            {silo.name: len(silo.x) for silo in self.silos},
            modules.schema(self.model),
            seed,
            rounds if self.spec.protocol.rate_depends_on_rounds else 0,
            *([self.layout.dump()] if self.layout else []),
            *([sorted(set(self.spec.engine.edge)), self.spec.engine.edge_precision] if self.spec.engine.edge else []),
        ]
        return hashlib.sha256(json.dumps(given, sort_keys=True, default=str).encode()).hexdigest()

    def _checkpoint(self, folder: RunFolder | None, rounds: int, seed: int) -> tuple[CheckpointId, dict[str, State]]:
        if folder is None:
            raise ParameterError("resuming needs the run's folder; name it by out")
        found = last_checkpoint(folder.path / "checkpoint")
        if found is None:
            raise ParameterError(
                f"{folder.path} holds no checkpoint to resume from; start without --resume, in an empty folder"
            )
        place, states = found
        if place.digest != self.digest(seed, rounds):
            raise ParameterError(
                f"{folder.path} was begun with another run file or other settings; resume with those it was begun "
                f"with ({folder.path / 'run.toml'}), or name another folder by --out"
            )
        if place.run.partition(".")[2] != self._roster_mark():
            raise ParameterError(
                f"{folder.path} was begun with another roster; resume with the one it was begun with, or name another "
                "folder by --out"
            )
        if place.round > rounds:
            raise ParameterError(f"{folder.path} stands at round {place.round}, past the {rounds} asked for")
        return CheckpointId(place.run, place.round, place.session + 1, place.digest), states


def _named(standardise: bool | str | Sequence[str]) -> bool | tuple[str, ...]:
    """Return the names of arrays to standardise as a tuple, of one too."""
    if isinstance(standardise, bool):
        return standardise
    return (standardise,) if isinstance(standardise, str) else tuple(standardise)


def _refuse_others(states: Mapping[str, State], players: Roles) -> None:
    expected = {"server", *(f"silo-{name}" for name in players.clients)}
    if set(states) != expected:
        raise ParameterError(f"the checkpoint is of other roles; expected {sorted(expected)}, got {sorted(states)}")
