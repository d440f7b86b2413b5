"""What a run came to, as a Python user is given it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from moretta.contract.messages import Array
from moretta.data.layout import Samples, packed_as
from moretta.errors import ParameterError

if TYPE_CHECKING:
    from moretta.audit.auditor import Audit
    from moretta.audit.evidence.trained import Trained


@dataclass(frozen=True)
class Result:
    """What a run came to.

    record: the content of ``result.json``. history: a mapping a round. model: the true model, as the server holds it
    (None where silos train alone). released: what the silos may be given. models: each silo's own, where it has one.
    They take rows as the silos have them: where inputs are standardised, or values filled in, the module that was given
    stands as `model` in one that does this first (`moretta.run.raw_rows.Prepared`).
    played: the federation, its rounds and its seed; an audit needs their silos' rows and architecture.
    """

    record: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    model: nn.Module | None
    released: nn.Module | None
    models: Mapping[str, nn.Module]
    folder: Path | None = None
    played: tuple[Trained, int, int] | None = field(default=None, repr=False)

    @property
    def test(self) -> Mapping[str, Any]:
        """Loss, accuracy or mse, and metrics on the test rows."""
        return self.record["test"]  # type: ignore[no-any-return]

    @property
    def bytes(self) -> Mapping[str, float]:
        """Traffic: up and down per silo and round, and what keys and shares cost in all."""
        return self.record["bytes"]  # type: ignore[no-any-return]

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds in all and by phase; silos' phases are summed over silos."""
        return self.record["seconds"]  # type: ignore[no-any-return]

    def report(self, path: str | Path) -> Path:
        """Write the run's report, one self-contained HTML page, and return its path."""
        from moretta.report.page import write_report

        if self.folder is None:
            raise ParameterError("a report is made from a run folder; train with Federation(.., out=FOLDER)")
        return write_report([self.folder], Path(path))

    def audit(
        self,
        *,
        thorough: bool = False,
        background: tuple[Samples, Array] | None = None,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> Audit:
        """Attack what the run recorded, and return what each role could learn (`moretta.audit`).

        Arguments as of `moretta.audit.auditor.audit`. Raises `moretta.errors.ParameterError` for a run without recorded
        views.
        """
        from moretta.audit.auditor import audit

        if self.folder is None or self.played is None:
            raise ParameterError(
                "an audit reads a run folder; train with Federation(.., out=FOLDER, record_views=True)"
            )
        federation, rounds, seed = self.played
        held = None
        if background is not None:
            held = packed_as(background[0], federation.layout, "background"), background[1]
        return audit(self.folder, federation, rounds, seed, thorough=thorough, background=held, progress=progress)
