"""The specification of a run: all sections of a run file. The model and the rows are not part of it.

`moretta.config.run_files` makes and checks it, once, from a run file or from Python's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moretta.data.settings import Data
from moretta.data.tables.schema import Schema
from moretta.engines.settings import Engine, Run
from moretta.protocols.common.training import Training
from moretta.secure_aggregation.cohort import Participation
from moretta.secure_aggregation.settings import SecureAggregation


@dataclass(frozen=True)
class Specification:
    """All settings of a run, section by section, with files and functions resolved.

    Args:
        task: "classification" or "regression".
        table: the schema that tables are read by; None for arrays.
        metrics: the functions of `run.metrics`, or Python's own.
        model_source: a digest of the model's source; empty if unknown.
        text, digest: the run file as resolved, and its digest; empty for a run from Python.
        shared: the digest of the settings that every site receives; empty for a run from Python.
        sections: as in ``result.json``; None gathers them.
    """

    run: Run
    data: Data
    protocol: Training
    secure_aggregation: SecureAggregation = field(default_factory=SecureAggregation)
    engine: Engine = field(default_factory=Engine)
    task: str = "classification"
    table: Schema | None = None
    metrics: tuple[Callable[..., Any], ...] = ()
    model_source: str = ""
    text: str = ""
    digest: str = ""
    shared: str = ""
    sections: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The sections as in ``result.json``, which record how the run was made."""
        if self.sections is not None:
            return self.sections
        run, data = self.run, self.data
        return {
            "run": {
                "dtype": run.dtype,
                "device": run.device,
                "participation": run.participation,
                "early-stopping": run.early_stopping or 0,
            },
            "data": {
                **{"batch-size": data.batch_size, "standardise": data.standardise, "augment": data.augment},
                "missing": data.missing,
                **({"standardise-targets": True} if data.standardise_targets else {}),
                **({"score-at-silos": data.score_at_silos} if data.score_at_silos else {}),
                **({"validation-fraction": data.validation_fraction} if data.silos_validate else {}),
            },
            "protocol": self.protocol.model_dump(mode="json", by_alias=True, exclude={"checkpoint_minutes"}),
            "secure-aggregation": self.secure_aggregation.model_dump(mode="json", by_alias=True, exclude_none=True),
            "engine": self.engine.model_dump(mode="json", by_alias=True, exclude_none=True),
        }

    @property
    def table_digest(self) -> str:
        """The digest of the schema that tables are read by; empty for arrays."""
        return "" if self.table is None else self.table.digest

    def lasting(self, rounds: int, seed: int) -> Specification:
        """Return the same with the rounds and the seed of batches that `train` received."""
        return replace(self, run=self.run.model_copy(update={"rounds": rounds, "seed": seed}))

    def playing(self, silos: Sequence[str], seed: int) -> Participation:
        """Return each round's silos, from these."""
        return playing(self.secure_aggregation, self.run.participation, silos, seed)

    def summing(self, silos: int) -> SecureAggregation:
        """Return the settings of sums of `silos` silos; noise needs at least the number that its size assumes."""
        if self.protocol.privacy is None:
            return self.secure_aggregation
        return self.secure_aggregation.sharing_noise(silos, self.run.participation)


def playing(secure: SecureAggregation, part: float, silos: Sequence[str], seed: int) -> Participation:
    """Return each round's silos. part: the fraction of silos in a round."""
    return Participation(tuple(silos), secure.playing(len(silos), part), seed)
