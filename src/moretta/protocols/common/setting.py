"""The setting of a run, which all its roles share."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from moretta.data.layout import SampleLayout
from moretta.data.rows import Subjects
from moretta.data.silo import Silo, row_shape
from moretta.data.tables.preparation import ColumnRules
from moretta.engines.journal import HelpedFile
from moretta.engines.settings import Engine
from moretta.errors import ParameterError, RowsError
from moretta.protocols.common.scoring import LEAST_SILOS
from moretta.protocols.common.targets import CONFUSION_UP_TO
from moretta.protocols.common.training import Training
from moretta.secure_aggregation.cohort import Participation, Rules
from moretta.secure_aggregation.identity import Roster
from moretta.secure_aggregation.keystream import SecretRoot
from moretta.secure_aggregation.settings import SecureAggregation
from moretta.secure_aggregation.statistics import MOST_SILOS

if TYPE_CHECKING:
    import torch
    from torch import nn


TABLES_TOO = "classes"  # of score-at-silos


def check_scores(protocol: Training, silos: Sequence[Silo]) -> None:
    """Raise `moretta.errors.ParameterError` where a score would reveal rows, or a local silo has none to score on."""
    key = "[data] score-at-silos"
    if getattr(protocol, "dp_noise", None):
        raise ParameterError(f"{key}: a score would be a release without noise; remove it or dp-noise")
    if any(silo.columns for silo in silos):
        raise ParameterError(
            f"{key} needs silos that hold whole samples; where columns are split, no silo scores a model by itself"
        )
    if len(silos) > MOST_SILOS:
        raise ParameterError(f"{key} sums the scores of {MOST_SILOS} silos at most; got {len(silos)}")
    for silo in silos:
        if silo.remote:
            continue
        if silo.held_out is None:
            raise ParameterError(
                f"silo `{silo.name}` holds no rows back, on which the run wants models scored ({key}); give "
                "test-fraction in [data] of its silo.toml, for example 0.2 (from Python: Silo held_out)"
            )
        if silo.held_out[0].dtype != silo.x.dtype:
            raise RowsError(
                f"silo `{silo.name}`: held_out: expected inputs of {silo.x.dtype}, as those it trains on are; got "
                f"{silo.held_out[0].dtype}"
            )


def check_tables(secure: SecureAggregation, task: str | None, outputs: int) -> None:
    """Raise `moretta.errors.ParameterError` where tables of classes would be of few silos, or cannot be had."""
    key = f'[data] score-at-silos = "{TABLES_TOO}"'
    if task != "classification":
        raise ParameterError(f"{key} counts rows by class, and targets are numbers here; give true")
    if secure.scheme == "none" or secure.least < LEAST_SILOS:
        raise ParameterError(
            f"{key} tells how many rows of a class silos hold back, of two each the other's; give "
            f"[secure-aggregation] min-survivors = {LEAST_SILOS} and a scheme that masks"
        )
    if outputs > CONFUSION_UP_TO:
        raise ParameterError(f"{key} counts up to {CONFUSION_UP_TO} classes, the model has {outputs}; give true")


def check_look(protocol: Training, silos: Sequence[Silo]) -> None:
    """Raise `moretta.errors.ParameterError` where a look before training would reveal rows, or cannot be had."""
    key = "[data] look"
    if getattr(protocol, "dp_noise", None):
        raise ParameterError(f"{key}: counts would be a release without noise; remove it or dp-noise")
    if any(silo.columns for silo in silos):
        raise ParameterError(f"{key} counts at silos that hold whole samples, and here columns are split; remove it")


def settings_digest(
    protocol: Training,
    secure: SecureAggregation,
    roster: Roster | None,
    silos: Sequence[str],
    *,
    schema: str,
    batch_size: int,
    augment: str,
    seed: int,
    layout: SampleLayout | None,
) -> bytes:
    """Return SHA-256 over all shared settings of a run that concern uploads; noise is bound to it.

    It is the same on every engine and in every session of a run: the number of rounds and paths of files are left out,
    and `own_loss`, which no noise goes with.
    silos: the names of all. schema: the digest of the model's tensors. layout: of samples of several arrays, by which
    one and the same packed row may be other inputs of a model.
    """
    told = {
        "protocol": protocol.model_dump(mode="json", by_alias=True, exclude={"warm_start", "own_loss"}),
        "secure-aggregation": secure.model_dump(mode="json", by_alias=True, exclude={"roster", "identity"}),
        "roster": "" if roster is None else roster.digest,
        "silos": sorted(silos),
        "schema": schema,
        "batch-size": batch_size,
        "augment": augment,
        "seed": seed,
        **({} if layout is None else {"arrays": layout.dump()}),
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).digest()


@dataclass(frozen=True)
class Setting:
    """What every protocol is given.

    built: the model as it was built or warm-started; a run starts from `model`. columns: how they are prepared. table:
    the digest of the schema that tables are read by, empty for none. session: how often the run was resumed. insecure:
    the seed from which all secrets follow, for tests; None draws them from the operating system. roster: the silos'
    public identities, if they have any. engine: where the roles run, or what simulates them. least_rows: the fewest
    rows that any silo has, as agreed beforehand, where silos are remote. figures: of the score that silos are asked for
    at the end (`moretta.protocols.common.scoring`), none for no score. playing: who plays which round, None for all.
    run: the id of a run over many machines, from which batches follow beside the seed, and under which alone a silo
    takes part in sums; a simulation has none. helped: gives the file in which a local silo keeps the sums that it has
    helped to open, None for none. model_source: a digest of what built the model, empty where that is not known.
    tested: whom the server's test rows are about, where silos' rows are to be compared with them. layout: of samples of
    several arrays (`moretta.data.layout`). classes: how many a look before training counts, 1 where targets are
    numbers, 0 for no look.
    """

    built: nn.Module
    outputs: int
    silos: Sequence[Silo]
    secure_aggregation: SecureAggregation
    batch_size: int
    columns: ColumnRules
    dtype: torch.dtype
    device: str
    seed: int
    rounds: int
    augment: str = ""
    session: int = 0
    insecure: int | None = field(default=None, repr=False)
    roster: Roster | None = None
    engine: Engine = field(default_factory=Engine)
    least_rows: int | None = None
    figures: Sequence[str] = ()
    playing: Participation | None = None
    run: str = ""
    helped: Callable[[str], HelpedFile] | None = None
    model_source: str = ""
    table: str = ""
    tested: Subjects | None = None
    layout: SampleLayout | None = None
    classes: int = 0

    @property
    def here(self) -> Sequence[Silo]:
        """The silos that are not remote: their rows are in this process, and their roles are built here."""
        return [silo for silo in self.silos if not silo.remote]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a whole sample, whoever holds its columns."""
        return row_shape(self.silos)

    @property
    def row_dtype(self) -> torch.dtype:
        """The dtype in which the model reads samples: the run's, or the rows' own where these are whole numbers."""
        import torch  # a silo's own site may have no PyTorch

        x = self.silos[0].x
        return torch.tensor(x[:0]).dtype if x.dtype.kind in "iu" else self.dtype

    @cached_property
    def model(self) -> nn.Module:
        """The model as the run starts, in the run's dtype (`moretta.protocols.common.modules`)."""
        return self.start().to(self.dtype)

    def start(self) -> nn.Module:
        """Return the same before it is rounded to the run's dtype, in float64."""
        from moretta.protocols.common.modules import first_weights  # torch, which a silo's own site may lack

        return first_weights(self.built)

    def silo_model(self) -> nn.Module:
        """Return a copy of the model on the silos' device."""
        return copy.deepcopy(self.model).to(self.device)

    def blank_model(self) -> nn.Module:
        """Return the same with all weights 0: a silo that is sent a perturbed model must not hold the true one."""
        import torch  # a silo's own site may have no PyTorch

        model = self.silo_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        return model

    def rules(self, scheme: str, members: Sequence[str] | None = None) -> Rules:
        """Return the rules that all roles of a sum share. scheme: "none" for a pool of all rows, whatever is set.

        members: the silos of the sum, None for all.
        """
        playing = self.playing if members is None else Participation(tuple(members), len(members), self.seed)
        least = self.secure_aggregation.least if scheme == self.secure_aggregation.scheme else 1
        return replace(self.secure_aggregation.rules(self.roster, playing), min_survivors=least)

    def least(self, scheme: str) -> int:
        """Return the fewest silos that a round under this scheme may end with."""
        return self.rules(scheme).least(scheme)

    def insecure_root(self, role: str) -> SecretRoot | None:
        """Return the root from which a role's keys follow in tests; None draws them from the operating system."""
        return None if self.insecure is None else self.root(role)

    def root(self, role: str) -> SecretRoot:
        """Return the role's secret root."""
        return SecretRoot.fresh() if self.insecure is None else SecretRoot.insecure(self.insecure, role)


LEAST_ROWS_MISSING = (
    "[data] least-rows is missing: silos on machines of their own do not tell how many rows they have, and what "
    "dp-noise comes to depends on the fewest that any has; give it, for example least-rows = 500"
)
