"""The setting of a run, which all its roles share."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.data.layout import SampleLayout
from moretta.data.rows import Subjects
from moretta.data.silo import Silo, check_least, groups_of, holding_back, layout_of, row_shape, rules_of_columns
from moretta.data.tables.preparation import ColumnRules
from moretta.engines.journal import HelpedFile
from moretta.errors import ParameterError, RowsError
from moretta.protocols.common.batches import rows_by_group
from moretta.protocols.common.lattice import Privacy
from moretta.protocols.common.overlap import Comparison
from moretta.protocols.common.scoring import figures_of
from moretta.protocols.common.silo_setup import SiloSetup
from moretta.protocols.common.specification import Specification
from moretta.protocols.common.statistics import CLASSES, TARGETS, Entry, Statistics
from moretta.protocols.common.targets import CONFUSION_UP_TO, encode
from moretta.secure_aggregation.cohort import Participation, Rules
from moretta.secure_aggregation.identity import Roster
from moretta.secure_aggregation.keystream import SecretRoot
from moretta.secure_aggregation.settings import SecureAggregation
from moretta.secure_aggregation.statistics import MAY_LACK

if TYPE_CHECKING:
    import torch
    from torch import nn

    from moretta.protocols.common.passes import Passes


TABLES_TOO = "classes"  # a value of score-at-silos


class PreparedRows(NamedTuple):
    """The silos of a run, how their columns are prepared, the layout of samples of several arrays, and the roster."""

    silos: Sequence[Silo]
    columns: ColumnRules
    layout: SampleLayout | None
    roster: Roster | None


def prepared_rows(spec: Specification, silos: Sequence[Silo], rules: ColumnRules | None = None) -> PreparedRows:
    """Check local and remote silos of a run against its settings; return the preparation of rows.

    A site without PyTorch calls this too, so it needs no model.

    Args:
        rules: How columns are prepared; None for the table's or the settings'.

    Raises:
        ParameterError: Settings, rows and roster do not fit each other.
    """
    data, secure = spec.data, spec.secure_aggregation
    if data.silos_validate:
        kept = data.validation_fraction or 0.0, "validation-fraction", 1, "validation"
        silos = [silo if silo.remote else holding_back(silo, *kept) for silo in silos]
    layout = layout_of(silos, data.standardise or False, data.missing)
    standardise = bool(data.standardise)
    columns = rules_of_columns(silos, layout, spec.table, rules, standardise=standardise, missing=data.missing)
    for silo in silos:
        if not silo.remote:
            check_least(silo, data.least_rows, grouped=_hides_groups(spec))
    if data.score_at_silos:
        _check_scores(silos)
    if data.look and any(silo.columns for silo in silos):
        raise ParameterError(
            "[data] look counts at silos that hold whole samples, and here columns are split; remove it"
        )
    roster = secure.load_roster()
    if roster is not None:
        roster.check(silo.name for silo in silos)
    return PreparedRows(silos, columns, layout, roster)


def _check_scores(silos: Sequence[Silo]) -> None:
    """Raise `moretta.errors.ParameterError` if a local silo has no rows, or no whole ones, to score on."""
    key = "[data] score-at-silos"
    if any(silo.columns for silo in silos):
        raise ParameterError(
            f"{key} needs silos that hold whole samples; where columns are split, no silo scores a model by itself"
        )
    for silo in silos:
        if silo.remote:
            continue
        if silo.held_out is None:
            raise ParameterError(
                f"silo `{silo.name}` has no held-out rows to score models on ({key}); set test-fraction in [data] of "
                "its silo.toml, for example 0.2, or a file as test (from Python: Silo held_out)"
            )
        if silo.held_out[0].dtype != silo.x.dtype:
            raise RowsError(
                f"silo `{silo.name}`: held_out: expected inputs of {silo.x.dtype}, as those it trains on are; got "
                f"{silo.held_out[0].dtype}"
            )


def check_tables(spec: Specification, outputs: int) -> None:
    """Raise `moretta.errors.ParameterError` if tables of classes are requested of a model without classes."""
    if spec.data.score_at_silos != TABLES_TOO:
        return
    key = f'[data] score-at-silos = "{TABLES_TOO}"'
    if spec.task != "classification":
        raise ParameterError(f"{key} counts rows by class, but targets are numbers here; set true")
    if outputs > CONFUSION_UP_TO:
        raise ParameterError(f"{key} counts up to {CONFUSION_UP_TO} classes, but the model has {outputs}; set true")


@dataclass(frozen=True)
class Setting:
    """The input of every protocol: the specification, the model, the silos, and what the set-up needs.

    Args:
        spec: all settings, with rounds and seed of the run.
        built: the model as built or warm-started; a run starts from `model`.
        outputs: their number.
        columns: how they are prepared.
        layout: of samples of several arrays (`moretta.data.layout`).
        roster: the silos' public identities, if any.
        tested: the subjects of the server's test rows, if silos' rows are compared with them.
        session: how often the run was resumed.
        run_id: of a run over many machines; batches and sums depend on it. Empty for a simulation.
        helped: returns the file of sums that a local silo has helped to open, or None.
    """

    spec: Specification
    built: nn.Module
    outputs: int
    silos: Sequence[Silo]
    columns: ColumnRules
    layout: SampleLayout | None = None
    roster: Roster | None = None
    tested: Subjects | None = None
    session: int = 0
    run_id: str = ""
    helped: Callable[[str], HelpedFile] | None = None

    @cached_property
    def secure_aggregation(self) -> SecureAggregation:
        """How sums are made: see `Specification.summing`."""
        return self.spec.summing(len(self.silos))

    @cached_property
    def playing(self) -> Participation:
        """Each round's silos."""
        return self.spec.playing([silo.name for silo in self.silos], self.spec.run.seed)

    @property
    def comparison(self) -> Comparison | None:
        """The comparison of silos' rows with the server's test rows; None if the latter's subjects are unknown."""
        return None if self.tested is None else Comparison(self.tested)

    @property
    def figures(self) -> Sequence[str]:
        """The figures of the silos' score at the end (`moretta.protocols.common.scoring`), empty for no score."""
        asked = self.spec.data.score_at_silos
        return figures_of(self.spec.protocol.loss, self.spec.task, tables=asked == TABLES_TOO) if asked else ()

    @property
    def validated(self) -> Sequence[str]:
        """The figures of the silos' validation rows, empty without such rows."""
        return figures_of(self.spec.protocol.loss, self.spec.task) if self.spec.data.silos_validate else ()

    @property
    def classes(self) -> int:
        """The number of classes that a look before training counts, 1 for numbers, 0 for no look."""
        many = max(2, self.outputs) if self.spec.task == "classification" else 1
        return many if self.spec.data.look else 0

    def statistics(
        self, rules: ColumnRules, batch_size: int, *, scales: bool = False, labelled: bool = True
    ) -> Statistics:
        """Return the closed list of silos' statistics, in the order of `enrolment.Enrolment`'s asks.

        Args:
            rules: How columns are prepared.
            batch_size: 0 for all of a silo's rows.
            scales: Also the scales of all inputs together and of the targets.
            labelled: Whether these silos have the targets.
        """
        layout, classes, targets = self.layout, self.classes, self.scaled_targets if labelled else 0
        listed: list[Entry] = [] if batch_size else [("rows", 1, 0, ())]
        listed += [(CLASSES, 1, classes, ())] if classes else []
        if rules.fitted:
            some = () if layout is None else tuple(layout.standardised.tolist())
            columns = rules.columns if layout is None else len(some)
            listed += [(MAY_LACK, order, columns, some) for order in (0, 1, 2) if order or rules.may_lack]
        listed += [(TARGETS, order, targets, ()) for order in (1, 2) if targets]
        if scales:
            numbers = () if layout is None else tuple(layout.numbers.tolist())
            matrices = [] if rules.fitted or not (layout is None or numbers) else [("inputs", numbers)]
            matrices += [] if targets else [("targets", ())]
            listed += [(what, order, 1, of) for what, of in matrices for order in (1, 2)]
        return Statistics(tuple(listed), rules.median_ranges)

    @property
    def scaled_targets(self) -> int:
        """The number of a row's targets that are scaled, 0 without scaling."""
        return self.outputs if self.spec.data.standardise_targets else 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model and the silos' arithmetic."""
        from moretta.protocols.common.modules import DTYPES  # torch, which a silo's own site may lack

        return DTYPES[self.spec.run.dtype]

    @property
    def local(self) -> Sequence[Silo]:
        """The silos that are not remote: this process has their rows and builds their roles."""
        return [silo for silo in self.silos if not silo.remote]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a whole sample, of the columns of all holders."""
        return row_shape(self.silos)

    @property
    def row_dtype(self) -> torch.dtype:
        """The dtype of the model's samples: the run's, or the rows' own for whole numbers."""
        import torch  # a silo's own site may have no PyTorch

        x = self.silos[0].x
        return torch.tensor(x[:0]).dtype if x.dtype.kind in "iu" else self.dtype

    @cached_property
    def passes(self) -> Passes:
        """How a silo's batch passes through the model and back. Raises as `Passes.check`."""
        from moretta.protocols.common.passes import Passes  # torch, which a silo's own site may lack

        engine = self.spec.engine
        passes = Passes(engine.micro_batch, engine.recompute is not None, self.spec.protocol.autocast)
        passes.check(self.model, self.example())
        return passes

    def example(self) -> torch.Tensor:
        """Return rows for tracing the model, independent of the silos' rows."""
        import torch  # a silo's own site may have no PyTorch

        if self.layout is not None:
            return torch.from_numpy(self.layout.example()).to(self.dtype)
        return torch.ones(2, *self.row_shape, dtype=torch.int64 if self.silos[0].x.dtype.kind in "iu" else self.dtype)

    @cached_property
    def model(self) -> nn.Module:
        """The initial model, in the run's dtype (`moretta.protocols.common.modules`)."""
        return self.start().to(self.dtype)

    def start(self) -> nn.Module:
        """Return the same in float64, before rounding to the run's dtype."""
        from moretta.protocols.common.modules import first_weights  # torch, which a silo's own site may lack

        return first_weights(self.built)

    def silo_model(self) -> nn.Module:
        """Return a copy of the model on the silos' device."""
        return copy.deepcopy(self.model).to(self.spec.run.device)

    def blank_model(self) -> nn.Module:
        """Return the same with all weights 0: a silo that receives a perturbed model must not hold the true one."""
        from moretta.protocols.common.modules import blank  # a silo's own site may have no PyTorch

        return blank(self.silo_model())

    def rules(self, scheme: str, members: Sequence[str] | None = None) -> Rules:
        """Return the rules that all roles of a sum share.

        Args:
            scheme: "none" for a pool of all rows, under all settings.
            members: The silos of the sum, None for all.
        """
        playing = self.playing if members is None else Participation(tuple(members), len(members), self.spec.run.seed)
        least = self.secure_aggregation.least if scheme == self.secure_aggregation.scheme else 1
        remote = any(silo.remote for silo in self.silos) and self.spec.run.insecure_secret_seed is None
        settings = self.spec.shared if remote else ""  # one process has all silos' settings
        return replace(self.secure_aggregation.rules(self.roster, playing), min_survivors=least, settings=settings)

    def bound(self, schema: str) -> bytes:
        """Return SHA-256 over all shared settings of a run that concern uploads, to which noise is bound.

        It is equal on every engine and in every session of a run: it omits the number of rounds, paths of files, and
        the user's own code, which noise excludes. It includes the layout, which decides how a model reads a packed row.

        Args:
            schema: The digest of the model's tensors.

        Returns:
            32 bytes; empty without noise.
        """
        protocol, secure = self.spec.protocol, self.secure_aggregation
        if protocol.privacy is None:
            return b""
        content = {
            "protocol": protocol.model_dump(mode="json", by_alias=True, exclude={*UNBOUND, *protocol.OWN}),
            "secure-aggregation": secure.model_dump(mode="json", by_alias=True, exclude={"roster", "identity"}),
            "roster": "" if self.roster is None else self.roster.digest,
            "silos": sorted(silo.name for silo in self.silos),
            "schema": schema,
            "batch-size": self.spec.data.batch_size,
            "augment": self.spec.data.varied,
            "seed": self.spec.run.seed,
            **({} if self.layout is None else {"arrays": self.layout.dump()}),
            **({"micro-batch": self.spec.engine.micro_batch} if self.spec.engine.micro_batch else {}),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()

    def setup(
        self, silo: Silo, schema: str, statistics: Statistics, bound: bytes, scheme: str | None = None
    ) -> SiloSetup:
        """Return the set-up of a local silo. Needs no torch.

        The silos of a round share the noise's variance (`noise`). An upload in the clear has all of it.

        Args:
            schema: the digest of the model's tensors.
            statistics: the closed list of the silo's statistics.
            bound: the digest that its noise is bound to, as of `bound`.
            scheme: of its sums; None is the setting's.

        Raises:
            moretta.errors.ParameterError: its targets do not fit the loss.
        """
        secure, run, protocol = self.secure_aggregation, self.spec.run, self.spec.protocol
        parts = (silo.held_out if self.figures else None, silo.validation)
        held_out, validation = (part and (part[0], self.targets(part[1], silo.name)) for part in parts)
        scheme = secure.scheme if scheme is None else scheme
        return SiloSetup(
            silo.name,
            silo.x,
            self.targets(silo.y, silo.name) if len(silo.y) else np.empty(0, np.float32),
            schema,
            batch_size=self.spec.data.batch_size,
            seed=run.seed,
            rounds=run.rounds,
            scheme=scheme,
            ring_bits=secure.ring_bits,
            rules=self.rules(scheme),
            session=self.session,
            run=self.run_id,
            table=self.spec.table_digest,
            statistics=statistics,
            loss=protocol.loss,
            figures=tuple(self.figures or self.validated),
            held_out=held_out,
            validation=validation,
            subjects=silo.subjects,
            augment=self.spec.data.varied,
            privacy=self.noise(scheme),
            bound=bound,
            groups=rows_by_group(groups_of(silo), silo.x, silo.y) if _hides_groups(self.spec) else (),
            roster=str(secure.roster or ""),
            identity="" if scheme == "none" else secure.identity_of(silo.name),
            helped=None if self.helped is None else self.helped(silo.name),
        )

    def targets(self, y: NDArray[np.generic], silo: str) -> Array:
        """Return a silo's targets encoded for the loss (`moretta.protocols.common.targets.encode`)."""
        return encode(y, self.outputs, self.spec.protocol.loss, silo, self.spec.run.dtype)

    def noise(self, scheme: str) -> Privacy | None:
        """Return the settings of noise on uploads under this scheme; None without noise.

        Raises:
            ParameterError: More silos collude than a sum, or its threshold, allows.
        """
        privacy = self.spec.protocol.privacy
        if privacy is None or scheme == "none":
            return privacy and replace(privacy, colluding=0)
        silos, least, colluding = self.playing.count, self.least(scheme), privacy.colluding
        bears = silos  # without a roster, silos with two different sets are sure to share an honest one
        if scheme == "pairwise" and self.roster is None:
            bears = 2 * self.rules(scheme).plan(silos).threshold - silos
        if colluding and colluding >= min(least, bears):
            raise ParameterError(
                f"dp-colluding = {colluding}: expected fewer than {min(least, bears)}, where {least} of {silos} silos "
                "open a sum; lower it, set a roster, or raise [secure-aggregation] threshold"
            )
        return privacy.among(silos, least)

    def units_of(self, silo: Silo) -> int:
        """Return the number of a silo's units that noise hides: groups, or rows."""
        return len(np.unique(groups_of(silo))) if _hides_groups(self.spec) else len(silo.x)

    def least(self, scheme: str) -> int:
        """Return the fewest silos at the end of a round under this scheme."""
        return self.rules(scheme).least(scheme)

    def insecure_root(self, role: str) -> SecretRoot | None:
        """Return the root of a role's keys in tests; None draws them from the operating system."""
        return None if self.spec.run.insecure_secret_seed is None else self.root(role)

    def root(self, role: str) -> SecretRoot:
        """Return the role's secret root."""
        insecure = self.spec.run.insecure_secret_seed
        return SecretRoot.fresh() if insecure is None else SecretRoot.insecure(insecure, role)


def _hides_groups(spec: Specification) -> bool:
    return spec.protocol.privacy is not None and spec.protocol.privacy.unit == "group"


UNBOUND = {"warm_start", "checkpoint_minutes"}  # no upload depends on these

LEAST_ROWS_MISSING = (
    "[data] least-rows is missing: silos on machines of their own do not report how many rows they have, and "
    "the epsilon of dp-noise depends on the fewest that any has; set it, for example least-rows = 500"
)
