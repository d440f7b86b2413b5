"""What a silo needs to take part, as one frozen value, from which its role is built in every process.

That may be this process, a forked worker, a site, or a process without PyTorch, which receives text and two arrays. The
value holds no secret, and needs neither torch nor pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moretta.contract.lazy_rows import loaded
from moretta.contract.messages import Array
from moretta.data.rows import Subjects
from moretta.engines.checkpoint import HalfDone
from moretta.engines.journal import HelpedFile
from moretta.protocols.common.batches import Batches, UnionBatches
from moretta.protocols.common.lattice import Privacy
from moretta.protocols.common.scoring import HeldOut
from moretta.protocols.common.silo_rows import TrainingRows
from moretta.protocols.common.statistics import NOTHING, Statistics
from moretta.secure_aggregation.cohort import Credentials, Origin, Participation, Rules
from moretta.secure_aggregation.identity import Roster
from moretta.secure_aggregation.keyed_sums import Contributor
from moretta.secure_aggregation.keystream import SecretRoot
from moretta.secure_aggregation.one_sum import Answers
from moretta.secure_aggregation.schemes import contributor


@dataclass(frozen=True, eq=False)
class SiloSetup:
    """All that a silo needs to take part, except its model and its secrets.

    Args:
        name: of the silo.
        x, y: its rows: inputs, and targets encoded for the loss (`moretta.protocols.common.targets.encode`).
        schema: the digest of the model's tensors.
        batch_size, seed: of its batches.
        rounds: of the run.
        scheme, ring_bits, rules: of the secure sum.
        session: how often the run was resumed.
        run: the id of a run over many machines, of batches and sums; empty for any.
        table: the digest of the schema of tables.
        statistics: the closed list of the silo's statistics.
        loss, figures: of the score on held-out rows.
        held_out: those rows, if models are scored on them.
        validation: other rows, on which models are scored during the run (`Setting.validates`).
        subjects: of rows, which no other process learns.
        augment: how images of a batch are varied; empty for none.
        privacy, bound: of the noise on its uploads, if any, and the digest of settings that it is bound to.
        groups: the rows of each group, if noise hides groups (`moretta.protocols.common.batches.rows_by_group`).
        roster, identity: paths of all public keys and of its own key; empty for none.
        helped: the path of the record of sums that it has helped to open, with the floors of its site.
        unkept: the answers that it gives once, if no file keeps them.
    """

    name: str
    x: NDArray[np.generic]
    y: Array
    schema: str
    batch_size: int
    seed: int
    rounds: int
    scheme: str = "none"
    ring_bits: int = 64
    rules: Rules = field(default_factory=Rules)
    session: int = 0
    run: str = ""
    table: str = ""
    statistics: Statistics = NOTHING
    loss: str = "mse"
    figures: tuple[str, ...] = ()
    held_out: tuple[Array, Array] | None = None
    validation: tuple[Array, Array] | None = None
    subjects: Subjects = field(default_factory=Subjects)
    augment: str = ""
    privacy: Privacy | None = None
    bound: bytes = b""
    groups: tuple[tuple[int, ...], ...] = ()
    roster: str = ""
    identity: str = ""
    helped: HelpedFile | None = None
    unkept: Answers = field(default_factory=Answers, repr=False)

    @property
    def answers(self) -> Answers:
        """The answers that the silo gives once, kept with the sums that it has helped to open."""
        return self.unkept if self.helped is None else self.helped.opened.answers

    @cached_property
    def credentials(self) -> Credentials | None:
        """The proof of the silo's identity, if it has one. Raises as `Credentials.of`."""
        return Credentials.of(self.name, self.identity, self.rules.roster)

    def half_done(self, minutes: float | None) -> HalfDone:
        """Return the file of its work within a round, beside its record of sums. minutes: as of `HalfDone`."""
        return HalfDone(None if self.helped is None else self.helped.half_done, minutes)

    def rows(self, batches: Batches | UnionBatches | None = None) -> TrainingRows:
        """Return its rows, which answer the set-up. batches: replace its own."""
        answers = self.answers
        held_out, validation = (
            None if part is None else HeldOut(*part, self.loss, self.figures, self.rounds, answers, validates)
            for part, validates in ((self.held_out, False), (self.validation, True))
        )
        own = batches or Batches(len(self.x), self.batch_size, self.seed, self.name, self.run)
        parts = self.schema, held_out, self.table, self.subjects, self.statistics, answers, validation
        return TrainingRows(self.x, self.y, own, *parts)

    def contributor(
        self, insecure: SecretRoot | None, rules: Rules | None = None, run: str | None = None
    ) -> Contributor:
        """Return its half of the secure sum.

        Args:
            insecure: For tests, the root of its keys; None draws them from the operating system.
            rules, run: Of a sum of some silos, instead of all silos'.
        """
        return contributor(
            self.scheme,
            self.name,
            self.ring_bits,
            self.rules if rules is None else rules,
            origin=Origin(self.credentials, insecure, self.session),
            helped=None if self.helped is None or self.scheme == "none" else self.helped.opened,
            run=self.run if run is None else run,
        )

    def sent(self) -> tuple[Array, Array]:
        """Return the arrays for the silo's own process: rows, the held-out ones last."""
        parts = [(loaded(self.x), self.y), *filter(None, (self.held_out, self.validation))]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])

    def plain(self) -> dict[str, Any]:
        """Return all but the rows as JSON's values; `of` reads them."""
        helped, rules = self.helped, replace(self.rules, roster=None)
        bare = replace(self, x=np.empty(0), y=np.empty(0), held_out=None, validation=None, subjects=Subjects())
        counts = {name: len((getattr(self, name) or [()])[0]) for name in ("held_out", "validation")}
        values = asdict(replace(bare, rules=rules, unkept=Answers())) | {
            "helped": None if helped is None else asdict(replace(helped, path=_absolute(helped.path))),
            **counts,
            "bound": self.bound.hex(),
            "roster": _absolute(self.roster),
            "identity": _absolute(self.identity),
        }
        return {key: value for key, value in values.items() if key not in ("x", "y", "subjects", "unkept")}

    @classmethod
    def of(cls, values: Mapping[str, Any], x: Array, y: Array) -> SiloSetup:
        """Return the value of `plain` and `sent`. Raises `ParameterError` for an unreadable roster file."""
        playing, last = values["rules"]["participation"], len(x) - values["validation"]
        kept = last - values["held_out"]
        roster = Roster.load(values["roster"]) if values["roster"] else None
        rules = {"roster": roster, "participation": playing and Participation(**frozen(playing))}
        built = {
            "rules": Rules(**values["rules"] | rules),
            "statistics": Statistics.read(values["statistics"]),
            "helped": values["helped"] and HelpedFile(**values["helped"]),
            "privacy": values["privacy"] and Privacy(**values["privacy"]),
            "bound": bytes.fromhex(values["bound"]),
            "held_out": (x[kept:last], y[kept:last]) if values["held_out"] else None,
            "validation": (x[last:], y[last:]) if values["validation"] else None,
        }
        return cls(**frozen(values) | built, x=x[:kept], y=y[:kept])


def frozen(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON's values with tuples for its lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _absolute(path: str) -> str:
    return path and str(Path(path).absolute())
