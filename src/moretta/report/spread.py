"""What runs from several seeds come to: the mean over seeds, and how far they lie apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from moretta.report.folder import RunRecord
from moretta.report.table import METRICS, MISSING, Row, byte_unit, plain, table_of_rows

NAMES = {
    "accuracy": "Accuracy",
    "mse": "Mean squared error",
    "loss": "Loss",
    "top5": "Top-5 accuracy",
    **METRICS,
    "accuracy_of_mean": "Accuracy, mean of confined models",
    "mse_of_mean": "Mean squared error, mean of confined models",
    "epsilon": "Epsilon",
    "rounds": "Rounds",
    "up_per_silo_per_round": "Up, per silo and round",
    "down_per_silo_per_round": "Down, per silo and round",
    "seconds": "Seconds",
}
"""The measures of a run, in the order of the table; a run's own metrics come after them."""


@dataclass(frozen=True)
class OverSeeds:
    """Runs that differ in their seed alone. label: for a table's head. values: of each measure, one a seed."""

    label: str
    seeds: tuple[int, ...]
    values: Mapping[str, tuple[float | None, ...]]

    def mean(self, measure: str) -> float | None:
        """Return the mean over seeds; None where a run has no such number."""
        found = self._all(measure)
        return statistics.fmean(found) if found else None

    def deviation(self, measure: str) -> float | None:
        """Return the standard deviation of a sample (by n - 1); None of one seed, and where a run has no number."""
        found = self._all(measure)
        return statistics.stdev(found) if len(found) > 1 else None

    def told(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            measure: {"mean": self.mean(measure), "deviation": self.deviation(measure), "values": list(values)}
            for measure, values in self.values.items()
        }

    def _all(self, measure: str) -> list[float]:
        values = self.values.get(measure, ())
        found = [value for value in values if value is not None]
        return found if len(found) == len(values) else []


def spread_of(label: str, seeds: Sequence[int], records: Sequence[RunRecord]) -> OverSeeds:
    """Return the spread of runs, one a seed."""
    each = [_measures(record) for record in records]
    names = dict.fromkeys([*NAMES, *(name for one in each for name in one)])
    values = {name: tuple(one.get(name) for one in each) for name in names}
    there = {name: some for name, some in values.items() if any(value is not None for value in some)}
    return OverSeeds(label, tuple(seeds), there)


def spread_rows(spreads: Sequence[OverSeeds]) -> tuple[Row, ...]:
    """Return a row a measure, each cell the mean and the deviation of a protocol's runs."""
    there = {name for one in spreads for name in one.values}
    order = dict.fromkeys([*NAMES, *(name for one in spreads for name in one.values)])
    return tuple(_row(name, spreads) for name in order if name in there)


def spread_table(spreads: Sequence[OverSeeds]) -> Table:
    """Return the spread for a terminal."""
    return table_of_rows([one.label for one in spreads], spread_rows(spreads))


def _measures(record: RunRecord) -> dict[str, float | None]:
    test, mean = record.test, record.test.mean
    epsilon = record.facts.get("epsilon")
    found = {
        "accuracy": test.accuracy,
        "mse": test.mse,
        "loss": test.loss,
        "top5": test.top5,
        **test.metrics,
        "accuracy_of_mean": None if mean is None else mean.accuracy,
        "mse_of_mean": None if mean is None else mean.mse,
        "epsilon": float(epsilon) if isinstance(epsilon, int | float) else None,
        "rounds": float(record.rounds),
        "up_per_silo_per_round": record.traffic.up_per_silo_per_round,
        "down_per_silo_per_round": record.traffic.down_per_silo_per_round,
        "seconds": record.seconds["total"],
    }
    return {name: value if value is None or math.isfinite(value) else None for name, value in found.items()}


def _row(name: str, spreads: Sequence[OverSeeds]) -> Row:
    group = f"Over {len(spreads[0].seeds)} seeds"
    means = [one.mean(name) for one in spreads]
    unit, size = byte_unit(max(m or 0.0 for m in means)) if name.endswith("_per_round") else ("", 1.0)
    cells = [_cell(mean, one.deviation(name), size) for mean, one in zip(means, spreads, strict=True)]
    return Row(group, NAMES.get(name, name.replace("_", " ")), unit, tuple(cells))


def _cell(mean: float | None, deviation: float | None, size: float) -> str:
    if mean is None:
        return MISSING
    return plain(mean / size) + ("" if deviation is None else f" ± {plain(deviation / size)}")
