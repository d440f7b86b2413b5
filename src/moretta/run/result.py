"""The result of a run for a Python user."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moretta.contract.messages import Array, Tensors
from moretta.contract.wording import names_keywords, path_of, says_keywords
from moretta.data.layout import Samples, packed_as
from moretta.errors import ParameterError
from moretta.protocols.common import modules
from moretta.protocols.registry import ENTRIES
from moretta.run.raw_rows import Prepared

if TYPE_CHECKING:
    from moretta.audit.auditor import Audit
    from moretta.audit.evidence.truth import Trained
    from moretta.run.trained_model import TrainedModel


@dataclass(frozen=True)
class Result:
    """Hold the result of a run.

    Args:
        record: The content of ``result.json``.
        history: One mapping per round.
        model: The true model that the server holds; None if silos train alone.
        released: The model that silos may receive.
        models: Each silo's own model, by name; empty if all share one.
        folder: The run folder; None without one.
        inputs: The meaning of inputs and outputs, the content of ``inputs.json``.
        played: The federation, its rounds and its seed. An audit needs their silos' rows and architecture.

    All three kinds of model take rows in the silos' form. If inputs are standardised or values filled in, the module
    that you passed is `model` of one that prepares rows first (`moretta.run.raw_rows.Prepared`).
    """

    record: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    model: nn.Module | None
    released: nn.Module | None
    models: Mapping[str, nn.Module]
    folder: Path | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    played: tuple[Trained, int, int] | None = field(default=None, repr=False)

    def _lines(self) -> list[tuple[str, str]]:
        """Return the most important results, as pairs of a name and a text."""
        record, test, facts = self.record, self.record["test"], self.record["facts"]
        figures = {key: test[key] for key in ("accuracy", "mse", "loss") if isinstance(test.get(key), float)}
        figures |= {key: value for key, value in test.get("metrics", {}).items() if key in ("auc", "balanced_accuracy")}
        spent = f"{facts['epsilon']:.4g} at delta {facts['delta']:g}" if "epsilon" in facts else ""
        lines = {
            "run": f"{record['name']}: {record['protocol']}, {record['silos']} silos, {record['rounds']} rounds",
            "best round": f"{facts['best_round']:.0f}" if "best_round" in facts else "",
            f"test, {test.get('rows', 0)} rows": ", ".join(f"{key} {value:.4g}" for key, value in figures.items()),
            "epsilon": spent,
            "model": f"{record['parameters']:,} parameters" + (f", {len(self.models)} models" if self.models else ""),
            "sums": f"{record['secure_aggregation']['scheme']}" if record.get("secure_aggregation") else "",
            "bytes a silo and round": "{up_per_silo_per_round:,.0f} up, {down_per_silo_per_round:,.0f} down".format(
                **record["bytes"]
            ),
            "silos that were missing": ", ".join(sorted({gone["silo"] for gone in record["dropped"]})),
            "seconds": f"{record['seconds']['total']:.3g}",
            "warnings": "; ".join(record["warnings"]),
            "folder": str(self.folder or ""),
        }
        return [(name, text) for name, text in lines.items() if text]

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {text}" for name, text in self._lines())

    def _repr_html_(self) -> str:
        cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self._lines())
        return f"<table>{cells}</table>{self._curves()}"

    def _curves(self) -> str:
        """Return the report's curves of losses and scores over rounds; empty if no round has any."""
        from moretta.report import folder, plots

        run = folder.RunRecord.model_validate_json(json.dumps({**self.record, "history": list(self.history)}))
        drawn = plots.curves([run], f"-{run.run}").values()
        colours = "--ink: currentColor; --faint: #888; --paper: transparent; --figures: sans-serif"
        return "".join(f'<div style="max-width: 32em; {colours}">{curve}</div>' for curve in drawn if curve)

    @property
    def test(self) -> Mapping[str, Any]:
        """Return loss, accuracy or mse, and metrics on the test rows; `per_silo` if each silo has its own model."""
        return {key: value for key, value in self.record["test"].items() if key != "per_silo" or self._is_by_model}

    @property
    def training(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the common model's scores on each silo's training rows, by silo; not its quality on new rows.

        Empty if each silo has its own model, or its rows are on another machine.
        """
        return {} if self._is_by_model else self.record["test"].get("per_silo", {})

    @property
    def _is_by_model(self) -> bool:
        """Whether `per_silo` of the record has the silos' own models on test rows."""
        return self.model is None or not ENTRIES[self.record["protocol"]].common_model

    @property
    def bytes(self) -> Mapping[str, float]:
        """Return traffic in bytes: up and down per silo and round, and keys and shares in total."""
        return self.record["bytes"]  # type: ignore[no-any-return]

    @property
    def seconds(self) -> Mapping[str, float]:
        """Return seconds in total and by phase; silos' phases are summed over silos."""
        return self.record["seconds"]  # type: ignore[no-any-return]

    @names_keywords()
    def raw_model(self, *, silo: str | None = None, true_model: bool = False) -> TrainedModel:
        """Return a copy of a model that takes rows as the data holds them (`moretta.run.trained_model.TrainedModel`).

        Args:
            silo: Whose model, where each silo has its own.
            true_model: Choose the server's model instead of the released one. Silos hold the released one too, and it
                gives exact predictions.

        Raises:
            ParameterError: The run has no such model.
        """
        from moretta.run.trained_model import TrainedModel

        module = copy.deepcopy(self._architecture())
        modules.load(module, self._tensors(silo, true_model))
        return TrainedModel(module, self.inputs)

    @names_keywords()
    def predict(self, x: Any, *, silo: str | None = None, true_model: bool = False) -> NDArray[np.generic]:
        """Predict each row.

        Args:
            x: Rows, as for `TrainedModel.predict`.
            silo, true_model: As for `raw_model`.

        Returns:
            The classes' names or numbers, or numbers in the targets' own units, one a row.
        """
        return self.raw_model(silo=silo, true_model=true_model).predict(x)

    @names_keywords()
    def predict_proba(self, x: Any, *, silo: str | None = None, true_model: bool = False) -> NDArray[np.float64]:
        """Return each class's probability, float64[rows, classes].

        Args:
            x: Rows, as for `TrainedModel.predict`.
            silo, true_model: As for `raw_model`.
        """
        return self.raw_model(silo=silo, true_model=true_model).predict_proba(x)

    @names_keywords()
    def evaluate(
        self, x: Any, y: Any, groups: Any = None, *, silo: str | None = None, true_model: bool = False
    ) -> dict[str, Any]:
        """Score a model on other labelled rows; return the figures of `TrainedModel.evaluate`.

        Args:
            x, y, groups: Rows, targets and subjects, as for `TrainedModel.evaluate`.
            silo, true_model: As for `raw_model`.
        """
        return self.raw_model(silo=silo, true_model=true_model).evaluate(x, y, groups)

    @names_keywords()
    def save(self, folder: str | Path | None = None) -> Path:
        """Write the models into a new folder for `moretta.load` and the shell's commands.

        The folder holds the released model, or each silo's own. The server's true model stays in the run folder alone.

        Args:
            folder: The new folder. None is the run's own folder, which gains the model's graph where nothing importable
                builds the model.

        Returns:
            Path: The folder.

        Raises:
            ParameterError: The model cannot be written.
        """
        from moretta.engines.files import write_atomically
        from moretta.models import graph
        from moretta.run import trained_model

        named = None if folder is None else path_of(folder, "save: expected the path of a new folder, or None")
        federation = self._federation()
        dtype = torch.tensor(federation.silos[0].x[:0]).dtype
        if named is None:
            if self.folder is None:
                raise ParameterError("save: the run has no folder of its own; name one, Result.save(folder)")
            if not federation.made.source:
                drawn = graph.written(self._architecture(), self.inputs["shape"], dtype)
                write_atomically(self.folder / trained_model.GRAPH, drawn)
            return self.folder
        models = {f"models/{name}": self._tensors(name, False) for name in self.models}
        models = models or {"released": self._tensors(None, False)}
        trained_model.save(named, self._architecture(), models, self.inputs, federation.made, dtype)
        return named

    def _tensors(self, silo: str | None, true_model: bool) -> Tensors:
        """Return a model's tensors by PyTorch's names, without the preparation of its inputs."""
        if silo is not None and silo not in self.models:
            alternatives = (
                f"it has those of {', '.join(self.models):.200}" if self.models else "it has one model for all"
            )
            raise ParameterError(f'silo = "{silo}": expected a silo with a model of its own; {alternatives}')
        if silo is None and self.models:
            raise ParameterError(
                f"silo is missing: here each silo has a model of its own ({', '.join(self.models):.200}); name one, "
                f'for example silo="{next(iter(self.models))}"'
            )
        model = self.models[silo] if silo is not None else self.model if true_model else self.released
        if model is None:
            raise ParameterError(
                "this run has no model to predict with: its silos' own are with the silos, or they are more than a "
                "simulation keeps"
            )
        return modules.arrays(model.model if isinstance(model, Prepared) else model)

    def _federation(self) -> Any:
        if self.played is None:
            raise ParameterError("this result is not of Federation.train, so its model's architecture is not known")
        return self.played[0]

    def _architecture(self) -> nn.Module:
        model: nn.Module = self._federation().model
        return model

    @names_keywords()
    def report(self, path: str | Path) -> Path:
        """Write the run's report, one self-contained HTML page, and return its path.

        Raises:
            ParameterError: The name ends in neither .html nor .htm, or the run has no folder.
        """
        from moretta.report.page import write_report

        page = path_of(path, "report: expected the path of the page to write")
        if self.folder is None:
            raise ParameterError("a report is made from a run folder; train with Federation(.., out=FOLDER)")
        return write_report([self.folder], page)

    @names_keywords()
    @says_keywords()
    def audit(
        self,
        *,
        thorough: bool = False,
        background: tuple[Samples, Array] | None = None,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> Audit:
        """Attack what the run recorded, and return what each role could learn (`moretta.audit`).

        Args:
            thorough: Run slow attacks too, up to an hour.
            background: Rows that attackers may have, (x, y); None takes half of the test rows.
            progress: Called with the number of attacks done, of all, and the next one's name.

        Raises:
            ParameterError: The run recorded no views.
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
