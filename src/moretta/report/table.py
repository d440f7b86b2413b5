"""The comparison of runs: one row a measure, one column a run, so that four runs fit a terminal.

Rows are made once, as text, and shown twice: as a `rich` table here and as HTML in `page.py`.
A unit stands in the row's header and not in its cells, and is chosen for the whole row, so that the digits compare.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from moretta.protocols.registry import ENTRIES, REFERENCE
from moretta.report.folder import RunRecord, SiloScore

PHASES = {
    "perturbation": "Perturbation",
    "preparation": "Preparation at silos",
    "local_forward": "Local forward",
    "local_backward": "Local backward",
    "aggregation": "Aggregation",
    "update": "Update",
    "delivery": "Delivery",
}
"""The phases of a round, in the order in which they happen."""

MISSING = "–"

SCORED = ("On the test rows", "On rows that silos hold back")
"""The groups of a comparison that hold scores."""


@dataclass(frozen=True)
class Row:
    """One measure. cells: a text for each run, in the order of the runs; `MISSING` where a run has no such number."""

    group: str
    measure: str
    unit: str
    cells: tuple[str, ...]

    @property
    def header(self) -> str:
        """The measure with its unit."""
        return f"{self.measure} ({self.unit})" if self.unit else self.measure


def label_of(record: RunRecord) -> str:
    """The run's protocol as the field writes it; its bare name where this version does not know it."""
    entry = ENTRIES.get(record.protocol)
    return record.protocol if entry is None else entry.label


def labels(records: Sequence[RunRecord]) -> tuple[str, ...]:
    """A short, distinct name for each run: its protocol, and its folder or number where that is not enough."""
    names = [label_of(record) for record in records]
    # A folder called by its protocol and more, such as pbpfl-partitions-all, needs to say only what is more.
    names = _told_apart(names, [_further(record) for record in records])
    return tuple(_told_apart(names, [str(number) for number in range(1, len(records) + 1)]))


def comparison_rows(records: Sequence[RunRecord], differences: Mapping[str, float] | None = None) -> tuple[Row, ...]:
    """The measures that at least one of the runs has.

    differences: the largest relative difference of the final weights from the reference's, by run folder (its path or
    its name) or by protocol.
    """
    rows = [*_scores(records), *_stated(records), *_traffic(records), *_seconds(records)]
    if differences:
        distances = [_difference(record, differences) for record in records]
        cells = tuple(MISSING if value is None else ("0" if value == 0 else f"{value:.1e}") for value in distances)
        rows.append(Row("Final weights", f"Largest relative difference from {ENTRIES[REFERENCE].label}", "", cells))
    return tuple(row for row in rows if set(row.cells) != {MISSING})


def comparison_table(records: Sequence[RunRecord], differences: Mapping[str, float] | None = None) -> Table:
    """The comparison for a terminal; `differences` as in `comparison_rows`."""
    return table_of_rows(labels(records), comparison_rows(records, differences))


def table_of_rows(heads: Sequence[str], rows: Sequence[Row]) -> Table:
    """Rows for a terminal, under the names of their groups. heads: of the columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("")
    for head in heads:
        table.add_column(Text(head), justify="right")
    group = ""
    for row in rows:
        if row.group != group:
            group = row.group
            table.add_row(Text(group, style="bold"))
        table.add_row(Text(f"  {row.header}"), *(Text(cell) for cell in row.cells))
    return table


METRICS = {
    "auc": "AUC",
    "balanced_accuracy": "Balanced accuracy",
    "f1": "F1 of the second class",
    "f1_macro": "F1, mean of classes",
    "brier": "Brier score",
    "calibration_error": "Calibration error",
}


def silo_rows(records: Sequence[RunRecord]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The names of the scores, and of each silo its name, its rows and, for each run, its scores."""
    regression = all(record.task == "regression" for record in records)
    silos = dict.fromkeys(silo for record in records for silo in record.test.per_silo)
    found = {silo: [record.test.per_silo.get(silo, SiloScore()) for record in records] for silo in silos}
    ones = [one for scores in found.values() for one in scores]
    further = [key for key in ("f1_macro", "calibration_error") if any(key in one.metrics for one in ones)]
    rows = []
    for silo, scores in found.items():
        counts = dict.fromkeys(f"{one.rows:,}" for one in scores if one.rows is not None)
        values = [
            (one.mse if regression else one.accuracy, one.loss, *(one.metrics.get(key) for key in further))
            for one in scores
        ]
        rows.append((silo, [" / ".join(counts) or MISSING, *(plain(value) for some in values for value in some)]))
    return ["MSE" if regression else "Accuracy", "Loss", *(METRICS[key] for key in further)], rows


def byte_unit(largest: float) -> tuple[str, float]:
    """The decimal unit in which `largest` has one to three digits before the point, and its size in bytes."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if largest >= size:
            return unit, size
    return "bytes", 1.0


def human_bytes(count: float) -> str:
    """A count of bytes to three significant digits, such as 26.2 kB."""
    unit, size = byte_unit(count)
    return f"{_three_digits(count / size)} {unit}"


def human_seconds(seconds: float) -> str:
    """Seconds to three significant digits, such as 8.10 s."""
    return f"{_three_digits(seconds)} s"


def other_seconds(seconds: Mapping[str, float]) -> float:
    """What of the total no phase accounts for; 0 where phases of silos that worked side by side exceed the total."""
    return max(0.0, seconds["total"] - sum(value for phase, value in seconds.items() if phase != "total"))


def phases(records: Sequence[RunRecord]) -> dict[str, str]:
    """The phases that any of the runs timed, with their names: the known ones first."""
    seen = {phase: None for record in records for phase in record.seconds if phase != "total"}
    known = {phase: name for phase, name in PHASES.items() if phase in seen}
    return known | {phase: _words(phase) for phase in seen if phase not in PHASES}


def plain(value: float | None, digits: int = 4) -> str:
    """A score to so many digits after the point; in scientific form where that would show none of its digits."""
    if value is None:
        return MISSING
    if value != 0 and not 10 ** (1 - digits) <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.{digits}f}"


def _told_apart(names: Sequence[str], further: Sequence[str]) -> list[str]:
    count = Counter(names)
    return [f"{name} ({more})" if count[name] > 1 and more else name for name, more in zip(names, further, strict=True)]


def _further(record: RunRecord) -> str:
    folder = record.folder
    if re.fullmatch(r"seed-\d+", folder.name):  # of a sweep, whose runs by one protocol or variant lie in one folder
        folder = folder.parent
    name = folder.name or record.name
    return name.removeprefix(record.protocol).lstrip("-") if f"{name}-".startswith(f"{record.protocol}-") else name


def _words(key: str) -> str:
    words = key.replace("_", " ")
    return words[:1].upper() + words[1:]


def _scores(records: Sequence[RunRecord]) -> list[Row]:
    tests = [record.test for record in records]
    where = SCORED[all(test.by == "silos" for test in tests)]

    def row(measure: str, values: Sequence[float | None]) -> Row:
        return Row(where, measure, "", tuple(plain(value) for value in values))

    metrics = METRICS | {key: _words(key) for test in tests for key in test.metrics if key not in METRICS}
    confined = [test.mean is not None for test in tests]
    worst = ", worst confined model" if all(confined) else ", of confined models the worst" if any(confined) else ""
    beside = {
        "mean of confined models": [test.mean for test in tests],
        "D alone": [test.displacement for test in tests],
        "on rows that silos hold back": [test.silos for test in tests],
    }
    return [
        row(f"Accuracy{worst}", [test.accuracy for test in tests]),
        *(
            row(f"Accuracy, {whose}", [None if one is None else one.accuracy for one in scores])
            for whose, scores in beside.items()
        ),
        row(f"Mean squared error{worst}", [test.mse for test in tests]),
        *(
            row(f"Mean squared error, {whose}", [None if one is None else one.mse for one in scores])
            for whose, scores in beside.items()
        ),
        row(f"Loss{worst}", [test.loss for test in tests]),
        row("Top-5 accuracy", [test.top5 for test in tests]),
        *(row(name, [test.metrics.get(key) for test in tests]) for key, name in metrics.items()),
    ]


def _stated(records: Sequence[RunRecord]) -> list[Row]:
    """What noise gave, and which round a run returned to."""

    def row(group: str, measure: str, fact: str, digits: int) -> Row:
        values = [record.facts.get(fact) for record in records]
        cells = (
            str(v) if isinstance(v, str) else f"{v:.{digits}g}" if isinstance(v, float) else MISSING for v in values
        )
        return Row(group, measure, "", tuple(cells))

    return [
        row("Early stopping", "Best round, which the run returned to", "best_round", 9),
        row("Differential privacy", "Epsilon, of one example at one silo", "epsilon", 3),
        row("Differential privacy", "Epsilon towards another silo", "epsilon_to_silos", 3),
        row("Differential privacy", "Delta", "delta", 3),
    ]


def _traffic(records: Sequence[RunRecord]) -> list[Row]:
    def row(measure: str, values: Sequence[float]) -> Row:
        unit, size = byte_unit(max(values))
        return Row("Traffic", measure, unit, tuple(_three_digits(value / size) for value in values))

    traffic = [record.traffic for record in records]
    return [
        row("Up, per silo and round", [run.up_per_silo_per_round for run in traffic]),
        row("Down, per silo and round", [run.down_per_silo_per_round for run in traffic]),
        row("Keys and shares, whole run", [run.secure_aggregation for run in traffic]),
    ]


def _seconds(records: Sequence[RunRecord]) -> list[Row]:
    def row(measure: str, values: Sequence[float | None]) -> Row:
        return Row("Time", measure, "s", tuple(MISSING if v is None else _three_digits(v) for v in values))

    seconds = [record.seconds for record in records]
    return [
        row("Total", [run["total"] for run in seconds]),
        *(row(name, [run.get(phase) for run in seconds]) for phase, name in phases(records).items()),
        row("In no phase", [other_seconds(run) for run in seconds]),
    ]


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}" if value >= 0.01 else f"{value:.1g}"


def _difference(record: RunRecord, differences: Mapping[str, float]) -> float | None:
    for key in (str(record.folder), record.folder.name, record.protocol):
        if key in differences:
            return differences[key]
    return None
