"""The entry point for Python: silos, a protocol, a model, and `Federation.train`.

from moretta import PBPFL, Federation, Silo

silos = [Silo("north", x_north, y_north), Silo("south", x_south, y_south)]
result = Federation(model, silos, PBPFL(loss="mse", learning_rate=0.1), test=(x, y)).train(rounds=300, seed=7)
print(result.test, result.released)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from moretta.config import rules
from moretta.contract.lazy_rows import LazyRows, loaded
from moretta.contract.messages import Message
from moretta.contract.roles import Client
from moretta.contract.settings import check_rules, in_file, in_python
from moretta.contract.wording import check_choice, names_keywords, says_keywords
from moretta.data.layout import Samples, packed_as
from moretta.data.references import OWN_CODE
from moretta.data.settings import PYTHON, Data
from moretta.data.silo import Silo, digests_of, row_shape
from moretta.data.tables.rows import expansion_of
from moretta.data.tables.schema import Schema
from moretta.engines.checkpoint import CheckpointId, rounds_kept
from moretta.engines.journal import HelpedFile
from moretta.engines.run_folder import RunFolder
from moretta.engines.settings import Engine, Run
from moretta.engines.usage import give_back_heap
from moretta.errors import ParameterError, RunFailed
from moretta.models.checks import as_by_default, copied
from moretta.models.hooks import takes_packed
from moretta.protocols.common import modules
from moretta.protocols.common.own_loss import named
from moretta.protocols.common.roles import Roles
from moretta.protocols.common.setting import Setting, check_tables, prepared_rows
from moretta.protocols.common.specification import Specification
from moretta.protocols.common.targets import encode
from moretta.protocols.common.training import Training
from moretta.protocols.registry import build, entry_of
from moretta.run import consent, inputs, persistence, python_arguments, trained_model
from moretta.run.evaluation import LabelledRows
from moretta.run.inputs import RunRows
from moretta.run.loop import Session, Transport
from moretta.run.metrics import Metric
from moretta.run.persistence import restore_states
from moretta.run.progress import Display, Progress
from moretta.run.record import OnRound
from moretta.run.result import Result
from moretta.run.trackers import Tracker, trackers_of
from moretta.secure_aggregation.settings import SecureAggregation

NOWHERE = CheckpointId("", 0, 0, "")  # for roles without a run


class Federation:
    """Train one model across silos by one protocol, all in this process unless a silo is remote.

    If all silos are remote (`Silo.remote`), this is the server's side, and `train` takes the transport that reaches
    them.
    If one is local, this is that silo's side, which answers as its role (`client`).

    Args:
        model: A PyTorch module, which is copied (for PBPFL its last layer is linear); or a built-in name,
            "module:function", or a mapping with that as "source" and further arguments, as [model] of a run file.
            Others can build the model without this process only from a name.
        silos: The owners of rows. Each name has 1 to 64 letters, digits, dots, dashes and underscores.
        protocol: The settings of a protocol, such as `FedAvg(learning_rate=0.1)`.
        test: Rows on which the server scores the model, (x, y) or a Dataset, each as a `Silo` takes them.
        validation: Rows for early stopping, as `test`.
        aggregation: How uploads are summed; None is `SecureAggregation()`.
        engine: Where silos run; None is `Engine()`.
        out: The run folder to write; None keeps the result in memory alone.
        batch_size: Rows that a silo uses in a round; 0 for all.
        standardise: Bring input columns to mean 0 and deviation 1 by statistics from the secure sum. For samples of
            several arrays (`Silo`), true scales one-axis arrays of numbers that are no mask of 0 and 1; names choose
            others.
        standardise_targets: Bring numeric targets to mean 0 and deviation 1 for training. Predictions and scores keep
            the targets' own units.
        missing: "error", or "mean": NaN is an absent value, which becomes the column's mean over all silos' training
            rows.
        dtype: "float32" or "float64", of the model and the silos' arithmetic.
        device: Where the model is trained and scored, such as "cpu" or "cuda:0".
        task: "classification" or "regression". None takes whole numbers and one-hot rows for classes, and soft labels
            too under cross-entropy.
        name: The name of the run, 1 to 100 characters.
        augment: Vary training images each time they are used (`moretta.protocols.common.augmentation.varied`); true is
            "crop-flip".
        early_stopping: Rounds without a lower validation loss after which the run stops and returns to its best round;
            judged at evaluations. None never stops.
        participation: The fraction of silos that take part in a round, in (0, 1].
        checkpoint_every: Rounds from one checkpoint to the next.
        evaluate_every: Rounds from one evaluation on test and validation rows to the next; None for about 50
            evaluations in a run. The last round is always evaluated, unless `moretta.StopTraining` ended the run.
        metrics: Functions of outputs and targets, each of which returns a number. The result and the history hold it
            under the function's name (`moretta.run.metrics`).
        record_views: Keep what each role sees: never, always, or in these rounds, counted from 1. An audit needs it.
        insecure_secret_seed: For tests only: all secrets follow from it.
        run_file: The run file as resolved and its digest; `resume` compares them.
        settings: The sections of that run file, for the record.
        feature_names: The names of x's columns; a table has its own.
        class_names: The names of classes 0, 1, ..; a table with classes has its own.
        table: What columns mean, for rows that were read by a schema (`moretta.data.tables.rows.read_table`). It sets
            what is filled in, and names columns and classes; frames are put in its order.
        absent: Words for an absent value in tables to predict, the same as for `read_table`.
        least_rows: The fewest rows of any silo, where rows are remote.
        score_at_silos: Have the silos score the final model on the rows that each holds back (`Silo.held_out`), and sum
            their scores in secret (`moretta.protocols.common.scoring`).
        look: Count rows and classes of all silos together before round 1, for `data` in the result.
        model_source: A digest of what built the model (`moretta.models.catalogue.source_digest`), to which noise is
            bound; empty for a module from Python.
        validation_fraction: Instead of `validation`, the fraction of its rows that each silo holds back. It scores each
            evaluated round's model on them, and the scores are summed in secret.

    Raises:
        ParameterError: Model, data, loss and protocol do not fit.
    """

    @names_keywords(python_arguments.elsewhere())
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
        standardise_targets: bool = False,
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
        absent: Sequence[str] = (),
        least_rows: int | None = None,
        score_at_silos: bool | Literal["classes"] = False,
        look: bool = False,
        model_source: str = "",
        validation_fraction: float | None = None,
    ) -> None:
        python_arguments.check_kinds(protocol, aggregation, engine, metrics, out, record_views, table, settings)
        if isinstance(protocol, Training) and protocol.own_code:
            protocol = protocol.with_own_code(agreed=OWN_CODE)
        run = python_arguments.section(
            Run,
            rounds=1,  # `train` sets the number, and the seed
            name=name,
            dtype=dtype,
            device=device,
            checkpoint_every=checkpoint_every,
            evaluate_every=evaluate_every,
            record_views=record_views,
            early_stopping=early_stopping,
            participation=participation,
            insecure_secret_seed=insecure_secret_seed,
        )
        silos, feature_names = python_arguments.columns_agreed(python_arguments.listed(silos), feature_names, table)
        data = python_arguments.section(
            Data,
            source=PYTHON,
            silos=len(silos),
            batch_size=batch_size,
            missing=missing,
            standardise=python_arguments.standardised(standardise),
            standardise_targets=None if standardise_targets is False else standardise_targets,
            absent=python_arguments.names_in("absent", (absent,) if isinstance(absent, str) else absent),
            augment=("crop-flip" if augment else "none") if isinstance(augment, bool) else augment or "none",
            least_rows=least_rows,
            score_at_silos=score_at_silos,
            look=look,
            validation_fraction=validation_fraction,
        )
        class_names = python_arguments.names_in("class_names", class_names, () if table is None else table.classes)
        if task:
            check_choice("task", task, ("classification", "regression"))
        elif task is None and silos:
            task = python_arguments.task_of(silos, getattr(protocol, "loss", ""))
        silos = python_arguments.alike(silos, task or "")
        model, made = python_arguments.built(model, silos, protocol, task or "", class_names, table)
        spec = Specification(
            run,
            data,
            protocol,
            aggregation or SecureAggregation(),
            engine or Engine(),
            task=task or "",
            table=table,
            metrics=tuple(metrics),
            model_source=model_source or made.digest,
            text=run_file[0] if run_file else "",
            digest=run_file[1] if run_file else "",
            sections=settings,
        )
        if own := sorted({named(silo.fit) for silo in silos if silo.fit is not None}):  # so that the record says it
            kept = spec.settings["protocol"]
            fits = [*([kept["fit"]] if kept.get("fit") else []), *own]
            spec = replace(spec, sections={**spec.settings, "protocol": {**kept, "fit": ", ".join(fits)}})
        rules.check(spec, in_python)
        test, validation = (
            python_arguments.rows_of(part, rows, feature_names, task or "", python_arguments.of_floats(silos))
            for part, rows in (("test", test), ("validation", validation))
        )
        self._hold(spec, model, RunRows(silos, test, validation, feature_names, class_names), out, made)
        inputs.check_class_names(class_names, self.outputs)

    @classmethod
    def of(cls, spec: Specification, model: nn.Module, rows: RunRows, out: str | Path | None = None) -> Federation:
        """Return the federation of a finished specification."""
        federation = cls.__new__(cls)
        federation._hold(spec, model, rows, out, python_arguments.Made.of(spec))
        return federation

    @as_by_default()
    def _hold(
        self,
        spec: Specification,
        model: nn.Module,
        rows: RunRows,
        out: str | Path | None,
        made: python_arguments.Made,
    ) -> None:
        """Check settings, model and rows against each other, and keep them."""
        silos, data, table, loss = rows.silos, spec.data, spec.table, spec.protocol.loss
        if not data.batch_size:  # 0 means that every round uses all of a silo's rows
            silos = [replace(silo, x=loaded(silo.x)) if isinstance(silo.x, LazyRows) else silo for silo in silos]
        self.spec, self.out, self.made, self._tested = spec, out, made, rows.tested
        self.test_groups = rows.test_groups if rows.tested is None else rows.tested.whom
        self.feature_names = rows.feature_names or (() if table is None else expansion_of(table).names)
        self.class_names = rows.class_names or (() if table is None else table.classes)
        if not all(silo.remote for silo in silos):  # remote silos have their own keys for a roster
            check_rules((rules.KEYS_MISSING,), spec, in_python)
        self._rows = prepared_rows(spec, silos, rows.column_rules)
        silos, self.column_rules, self.layout, self._roster = self._rows
        self.silos = silos
        self.test, self.validation = self._packed("test", rows.test), self._packed("validation", rows.validation)
        tokens = silos[0].x.dtype.kind in "iu"
        row_checks = inputs.RowChecks(row_shape(silos), self.column_rules, self.feature_names, tokens)
        inputs.check_silos(silos, spec.protocol, row_checks)
        inputs.check_names(spec.engine, silos)
        dtype = modules.DTYPES[spec.run.dtype]
        inputs.refuse_scaled_twice(model, data.standardise or False, targets=bool(data.standardise_targets))
        self.model = takes_packed(copied(model).to(dtype), self.layout)
        targets = [*(silo.y for silo in silos), *(part[1] for part in (self.test, self.validation) if part is not None)]
        inputs.check_masks(spec, targets)
        self.model = inputs.with_one_tensor(self.model, silos, dtype, targets)
        gradients = not entry_of(spec.protocol).forward_only
        self.outputs = inputs.count_outputs(self.model, silos, self.layout, dtype, differentiable=gradients)
        labelled = [("test", self.test), ("validation", self.validation)]
        inputs.check_batches(self.model, silos, data.batch_size, dtype)
        check_tables(spec, self.outputs)
        if data.score_at_silos:
            labelled += [(f"silo `{silo.name}`: held_out", silo.held_out) for silo in silos if not silo.remote]
        if spec.data.silos_validate and self.validation is not None:
            raise ParameterError(
                "validation and validation_fraction exclude each other: the first has the server's rows, the second "
                "the silos'; set one"
            )
        for part, own in labelled:
            if own is not None:
                row_checks.check_rows(part, *own)
                encode(own[1], self.outputs, loss, part, spec.run.dtype)
        validated = spec.data.silos_validate or self.validation is not None
        inputs.check_training(spec, silos, self.outputs, dtype, validated=validated)
        if spec.protocol.warm_start is not None:
            modules.load(self.model, modules.read_state_dict(spec.protocol.warm_start))

    def without_edge_processes(self) -> Federation:
        """Return the same federation with all roles by PyTorch in this process, for an audit."""
        if not self.spec.engine.edge:
            return self
        made = copy.copy(self)
        made.spec = replace(self.spec, engine=self.spec.engine.model_copy(update={"edge": ()}))
        return made

    @property
    def table(self) -> Schema | None:
        """Return the schema of the silos' tables; None for arrays."""
        return self.spec.table

    def __repr__(self) -> str:
        return f"Federation({self.spec.run.name!r}, {self.spec.protocol.name}, {len(self.silos)} silos)"

    @names_keywords({name: python_arguments.OF_PROTOCOL.format(name) for name in Training.model_fields})
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
        trackers: Sequence[Tracker | str] = (),
    ) -> Result:
        """Train for a number of rounds and return the result; with `out`, leave a run folder.

        Args:
            rounds: How many rounds, 1 or more.
            seed: Seeds what is random in training and not secret, such as batches; 0 or more.
            resume: Continue from the folder's last checkpoint.
            progress: Show a bar, or a line every few seconds without a terminal or notebook. False shows nothing; a
                function is called instead (`moretta.run.progress.Progress`).
            on_round: Called after each round with what the server knows of it (`moretta.FinishedRound`).
                `moretta.StopTraining` ends the run. Any other exception ends `train`, and the folder has a checkpoint
                of that round.
            transport: Delivers messages to remote silos; None where all are local.
            begin: Called before the first round, once no setting can be refused any more.
            trackers: Receive each line of the history (`moretta.run.trackers.Tracker`); "tensorboard" and "mlflow" are
                built in. One that fails costs a warning.

        Returns:
            Result: The model, its scores and the history.

        Raises:
            RunFailed: Too few silos are left; the last checkpoint is complete.
            ParameterError: Another process writes the folder.
        """
        rounds, seed = python_arguments.whole("rounds", rounds, 1), python_arguments.whole("seed", seed, 0)
        python_arguments.check_watchers(progress, on_round)
        tracking = trackers_of(self.spec.run.trackers or (), Path(self.made.base)) + trackers_of(trackers, Path())
        self._check_playing(rounds, seed)
        folder = None if self.out is None else RunFolder(Path(self.out))
        try:
            with self._speaking(), as_by_default():
                if folder is not None and resume and folder.path.is_dir():
                    folder.hold()  # before its checkpoint is read, because another process could continue from it
                return self._trained(folder, rounds, seed, resume, progress, on_round, transport, begin, tracking)
        finally:
            if folder is not None:
                folder.release()

    def _check_playing(self, rounds: int, seed: int) -> None:
        rules.check_playing(self.spec.lasting(rounds, seed), in_file if self.spec.text else in_python)

    def _speaking(self) -> AbstractContextManager[None]:
        """Make errors name options if a run file exists, or else keywords."""
        return nullcontext() if self.spec.text else says_keywords()

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
        trackers: Sequence[Tracker],
    ) -> Result:
        digest, states = self.digest(seed, rounds), None
        if resume:
            place, states = persistence.last_session(
                None if folder is None else folder.path, digest, self._roster, rounds
            )
        else:
            place = CheckpointId(persistence.run_id(self.spec, self._roster, seed), 0, 0, digest)
        helped = None if folder is None else folder.helped
        players = self._built(self._setting(seed, rounds, place, helped))  # before anything is written
        # The addressees: the local roles (a pool in centralised training), or all remote silos.
        silos = list(players.clients) or [silo.name for silo in self.silos if silo.remote]
        if len(silos) < players.least:
            raise ParameterError(
                f"a round needs at least {players.least} silos, got {len(silos)}; one silo needs "
                'scheme = "none", as its sum would be its own data'
            )
        if states is not None:
            restore_states(players, states)
        elif folder is not None:
            folder.begin(self.spec.text or None)
            if not self.spec.text:
                made = trained_model.as_plain(self.made, folder.path)
                folder.write_json(trained_model.MADE, made | {"rounds": rounds, "seed": seed})
        if folder is not None:
            folder.begin_helped(begun=states is not None)
            folder.hold_rows(digests_of(self.silos, self.test, self.validation))
        code = "" if folder is None else consent.code_digest(folder.path)
        for number in [] if folder is None else folder.hold_code(code if place.round < rounds else "", place.round):
            changed = (
                f"the run's Python files were changed after round {number}, so that later rounds are of other code; "
                "begin another run if all should be of one"
            )
            players = replace(players, warnings=[*players.warnings, changed])
        session, shown = None, Display(self.spec.protocol.name, rounds) if progress is True else None
        display = shown or (progress if callable(progress) else None)
        try:
            session = Session(self, players, silos, place, folder, rounds, seed, display, transport, on_round, trackers)
            if begin is not None:
                begin()
            with folder.logging() if folder else nullcontext(), shown or nullcontext(), self._speaking():
                result = replace(session.play(), played=(self, rounds, seed))
                if folder is not None:
                    consent.note(folder.path, code)
                if shown is not None:
                    shown.end(result.record["warnings"])
                return result
        except ParameterError:
            if folder is not None and not resume and (session is None or not session.has_begun):
                folder.discard()  # leaves nothing half-written, so that the corrected run may use the same folder
            raise
        except RunFailed as error:
            kept = "nothing of the run is kept, as it has no `out`"
            if folder is not None and not rounds_kept(folder.path / "checkpoint"):
                kept = f"there is no checkpoint yet, so then remove {folder.path} and begin again"
            elif folder is not None:
                kept = "the last checkpoint is whole, so then go on with --resume"
            raise RunFailed(f"{error}; {kept}") from error
        finally:
            if session is not None:
                session.close()

    def client(
        self, name: str, rounds: int, seed: int, place: CheckpointId, helped: HelpedFile
    ) -> tuple[Client, Sequence[type[Message]]]:
        """Build the role of one silo of this machine, and return it with the messages of the run.

        Args:
            place: The run, and its number of resumes.
            helped: Records the sums that the silo has helped to open.
        """
        players = self._built(self._setting(seed, rounds, place, lambda name: helped))
        return players.clients[name], players.messages

    def players(self, rounds: int, seed: int) -> Roles:
        """Build all roles of a run anew, with new secrets until they receive a run's states."""
        return build(self._setting(seed, rounds))

    def _built(self, setting: Setting) -> Roles:
        """Build the roles of a run, and return the memory that only building needed, such as a model's trace."""
        built = build(setting)
        give_back_heap()
        return built

    def rehearse(self, rounds: int, seed: int = 0) -> None:
        """Build all roles and write nothing; raise any error that `train` would raise before its first round."""
        self._check_playing(rounds, seed)
        self.players(rounds, seed)

    def _packed(self, part: str, rows: tuple[Samples, NDArray[np.generic]] | None) -> LabelledRows | None:
        return None if rows is None else (packed_as(rows[0], self.layout, part), rows[1])

    def digest(self, seed: int, rounds: int) -> str:
        """Return the digest that a resumed run must match (`moretta.run.persistence.digest_of`)."""
        return persistence.digest_of(self.spec, self.silos, self.model, self.layout, seed, rounds)

    @property
    def summing(self) -> SecureAggregation:
        """The settings of sums: see `Specification.summing`."""
        return self.spec.summing(len(self.silos))

    def _setting(
        self, seed: int, rounds: int, place: CheckpointId = NOWHERE, helped: Callable[[str], HelpedFile] | None = None
    ) -> Setting:
        remote = any(silo.remote for silo in self.silos) and self.spec.run.insecure_secret_seed is None
        return Setting(
            self.spec.lasting(rounds, seed),
            self.model,
            self.outputs,
            *self._rows,
            self._tested,
            place.session,
            place.run if remote else "",
            helped,
        )
