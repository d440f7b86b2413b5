"""The one specification of a run: its settings, validated once and never changed. Model and rows stand beside it.

It is made from a run file (`of_run_file`) or from what Python gave (`moretta.run.federation.Federation`). A mark on
each key of a run file says whose it is: the server's own (`SERVER`), each site's own (`SITE`), or else shared with all
sites (`shared`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from moretta.config import run_files
from moretta.config.run_files import RunFile
from moretta.contract.settings import SERVER, SITE, Section, mark_of
from moretta.data.tables.schema import Schema
from moretta.engines.settings import Engine
from moretta.errors import ParameterError
from moretta.protocols.common.own_loss import found
from moretta.protocols.common.setting import TABLES_TOO
from moretta.protocols.common.training import Training
from moretta.protocols.registry import entry_of
from moretta.secure_aggregation.cohort import Participation
from moretta.secure_aggregation.settings import SecureAggregation


@dataclass(frozen=True)
class Specification:
    """All settings of a run; `moretta.run.federation.Federation` documents each under the same name.

    text, digest: the run file as resolved, and its digest; empty for a run from Python. settings: as ``result.json``
    has them; None gathers them. Raises `moretta.errors.ParameterError` where settings do not fit each other.
    """

    protocol: Training
    task: str
    aggregation: SecureAggregation = field(default_factory=SecureAggregation)
    engine: Engine = field(default_factory=Engine)
    batch_size: int = 32
    standardise: bool | tuple[str, ...] = False
    missing: str = "error"
    table: str = ""
    dtype: str = "float32"
    device: str = "cpu"
    name: str = "run"
    augment: str = ""
    early_stopping: int | None = None
    participation: float = 1.0
    checkpoint_every: int = 10
    evaluate_every: int | None = None
    metrics: tuple[Callable[..., Any], ...] = ()
    record_views: bool | tuple[int, ...] = False
    insecure_secret_seed: int | None = field(default=None, repr=False)
    least_rows: int | None = None
    score_at_silos: bool | Literal["classes"] = False
    look: bool = False
    model_source: str = ""
    text: str = ""
    digest: str = ""
    given: Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        entry, name = entry_of(self.protocol), self.engine.name
        if self.engine.edge and not entry.edge:
            raise ParameterError(
                f"edge: edge clients only run models forward, as baffle has it, and {entry.name} has not; remove it"
            )
        if self.engine.edge and self.protocol.own_loss is not None:
            raise ParameterError(
                "edge: edge clients compute the built-in losses alone, without PyTorch; remove it, or own-loss"
            )
        if not 0 < self.participation <= 1:
            raise ParameterError(f"participation = {self.participation}: expected more than 0 and at most 1")
        if self.participation < 1 and entry.takes_all:
            raise ParameterError(
                f"participation = {self.participation:g}: under {entry.name} everybody takes every step; leave it at 1"
            )
        if self.engine.simulates and name not in entry.simulations:
            raise ParameterError(f'engine = "{name}" simulates cgd alone; {entry.name} needs "in-process"')
        if self.engine.simulates and (self.engine.faults is not None or self.record_views):
            raise ParameterError(
                f'engine = "{name}" passes no messages, so there are none to record or to lose; remove record-views '
                "and [engine.faults]"
            )
        every = self.evaluate_every
        if every is not None and (type(every) is not int or every < 1):
            raise ParameterError(f"evaluate_every = {every}: expected a whole number, at least 1, or None")
        if self.look and (entry.pooled or self.engine.simulates):
            raise ParameterError(
                f"[data] look counts by a secure sum, and here nobody sums: {entry.name} under engine = "
                f'"{name}" has all rows in one place; remove it, and see moretta look'
            )
        if self.score_at_silos not in (False, True, TABLES_TOO):
            raise ParameterError(f'score_at_silos = {self.score_at_silos!r}: expected False, True or "{TABLES_TOO}"')
        if self.score_at_silos and (entry.pooled or self.engine.simulates):
            raise ParameterError(
                f"[data] score-at-silos sums what silos score, and here nobody sums: {entry.name} under engine = "
                f'"{name}" has all rows in one place; remove it, and give test rows'
            )
        if self.score_at_silos == TABLES_TOO and not (entry.common_model and entry.summed):
            raise ParameterError(
                f'[data] score-at-silos = "classes" is of one model that all silos score, and {entry.name} has a model '
                "for each; give true"
            )

    @property
    def settings(self) -> Mapping[str, Any]:
        """The sections as ``result.json`` has them, so that a report says how the run was made."""
        if self.given is not None:
            return self.given
        return {
            "run": {
                "dtype": self.dtype,
                "device": self.device,
                "participation": self.participation,
                "early-stopping": self.early_stopping or 0,
            },
            "data": {
                **{"batch-size": self.batch_size, "standardise": self.standardise, "augment": self.augment or "none"},
                "missing": self.missing,
                **({"score-at-silos": self.score_at_silos} if self.score_at_silos else {}),
            },
            "protocol": self.protocol.model_dump(mode="json", by_alias=True),
            "secure-aggregation": self.aggregation.model_dump(mode="json", by_alias=True, exclude_none=True),
            "engine": self.engine.model_dump(mode="json", by_alias=True, exclude_none=True),
        }

    def playing(self, silos: Sequence[str], seed: int) -> Participation:
        """Return who plays which round, of these silos."""
        return playing(self.aggregation, self.participation, silos, seed)

    def summing(self, silos: int) -> SecureAggregation:
        """Return how sums of so many silos are made; noise needs at least as many silos as its size assumes."""
        if self.protocol.privacy is None:
            return self.aggregation
        return self.aggregation.sharing_noise(silos, self.participation)


def playing(secure: SecureAggregation, part: float, silos: Sequence[str], seed: int) -> Participation:
    """Return who plays which round. part: of the silos that is in a round."""
    return Participation(tuple(silos), max(secure.least, round(part * len(silos))), seed)


def of_run_file(
    run_file: RunFile,
    *,
    task: str,
    standardise: bool,
    table: Schema | None = None,
    aggregation: SecureAggregation | None = None,
    device: str | None = None,
    insecure_secret_seed: int | None,
) -> Specification:
    """Return the specification of a run file, with its files found beside it.

    task, standardise: of the rows, where the run file leaves them open. table: the schema of the rows. aggregation,
    device: a site's own, in the place of the run file's. insecure_secret_seed: the run file's where it is this
    machine's own; a site takes none but its own, as all of its secrets follow from it.
    """
    run, data, text = run_file.run, run_file.data, run_files.dump(run_file)
    return Specification(
        protocol=_found_start(run_file),
        task=task,
        aggregation=_found_keys(run_file) if aggregation is None else aggregation,
        engine=run_file.engine,
        batch_size=data.batch_size,
        standardise=standardise if data.standardise is None else data.standardise,
        dtype=run.dtype,
        device=run.device if device is None else device,
        name=run.name,
        augment=data.varied,
        early_stopping=run.early_stopping,
        participation=run.participation,
        checkpoint_every=run.checkpoint_every,
        evaluate_every=run.evaluate_every,
        metrics=tuple(found(name, run_file.base, run_file.agreed) for name in run.metrics),
        record_views=run.record_views,
        insecure_secret_seed=insecure_secret_seed,
        least_rows=data.least_rows,
        score_at_silos=data.score_at_silos,
        look=data.look,
        model_source=run_file.model_source,
        missing=data.missing,
        table="" if table is None else table.digest,
        text=text,
        digest=run_files.digest(run_file),
        given=tomllib.loads(text),
    )


def _found_start(run_file: RunFile) -> Training:
    """Return the protocol's settings with its warm start and its own loss found beside the run file."""
    protocol, beside = run_file.protocol, dict[str, Any]()
    if protocol.warm_start is not None:
        beside["warm_start"] = run_file.resolve(protocol.warm_start)
    if protocol.own_loss is not None:
        beside["own_loss"] = found(protocol.own_loss, run_file.base, run_file.agreed)
    return protocol.model_copy(update=beside) if beside else protocol


def _found_keys(run_file: RunFile) -> SecureAggregation:
    """Return [secure-aggregation] with its roster and identities found beside the run file."""
    secure = run_file.secure_aggregation
    if secure.roster is None:
        return secure
    identity = None if secure.identity is None else str(run_file.resolve(secure.identity))
    return secure.model_copy(update={"roster": run_file.resolve(secure.roster), "identity": identity})


def shared(run_file: RunFile) -> RunFile:
    """Return the run file as sites are sent it: each key that is the server's or a site's own is at its default."""
    return run_file.model_copy(
        update={
            name: _told(part)
            for name in type(run_file).model_fields
            if isinstance(part := getattr(run_file, name), Section)
        }
    )


def _told(section: Section) -> Section:
    own = {
        name: known.get_default()
        for name, known in type(section).model_fields.items()
        if mark_of(known) in (SERVER, SITE)
    }
    return section.model_copy(update=own)
