"""The comparison of runs: one row a measure, one column a run, so that four runs fit a terminal.

Rows are made once, as text, and shown twice: as a `rich` table here and as HTML in `page.py`.
A unit stands in the row's header and not in its cells, and is chosen for the whole row, so that the digits compare.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from moretta.protocols.registry import ENTRIES, REFERENCE
from moretta.report.folder import Attacked, ClassTables, RunRecord, SiloScore

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


SHOWN = 20  # classes; the page has all
COUNTED_UP_TO = 8  # classes whose confusion fits beside them


def class_table(tables: ClassTables) -> Table:
    """Return the classes of one model, the first `SHOWN`: rows, precision, recall, F1, and the confusion of few."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    confusion = tables.confusion if len(tables.by_class) <= COUNTED_UP_TO else ()
    named = [f"as {one.name}" for one in tables.by_class] if confusion else []
    for name in ("Class", "Rows", "Precision", "Recall", "F1", *named):
        table.add_column(Text(name), justify="left" if name == "Class" else "right")
    for place, one in enumerate(tables.by_class[:SHOWN]):
        cells = [f"{one.rows:,}", plain(one.precision), plain(one.recall), plain(one.f1)]
        cells += [f"{count:,}" for count in confusion[place]] if confusion else []
        table.add_row(Text(one.name), *cells)
    if len(tables.by_class) > SHOWN:
        table.add_row(f"and {len(tables.by_class) - SHOWN} more in result.json")
    return table


SCALES: Mapping[str, str] = {
    "Accuracy": "part of the rows whose class is named rightly: 0 is none and 1 is all; to name the commonest class "
    "always gets that class’s part, and guessing evenly gets 1 in as many as there are classes",
    "Top-5 accuracy": "part of the rows whose class is among the five likeliest: 0 is none and 1 is all; guessing "
    "evenly gets 5 in as many as there are classes",
    "Balanced accuracy": "mean over classes of the part of their rows that are named rightly: 0 is none and 1 is all; "
    "guessing gets 1 in as many as there are classes, 0.5 of two",
    "AUC": "how often a row of a class is ranked above one of another: 0.5 is guessing, 1 perfect, 0 always wrong",
    "F1": "how well a class is found and nothing else taken for it: 0 is nothing right and 1 is perfect; guessing gets "
    "about the part of the rows that the class has",
    "F1, mean of classes": "mean of F1 over classes, how well each is found and nothing else taken for it: 0 is "
    "nothing right and 1 is perfect; guessing evenly gets about 1 in as many as there are classes",
    "Brier score": "squared distance of probabilities from the truth: 0 is perfect and 2 the worst; guessing evenly "
    "gets 0.5 of two classes and nears 1 of many",
    "Calibration error": "how far stated probabilities are from how often they are right: 0 is perfect and 1 the "
    "worst; it does not say how often they are right, and guessing that says so has 0",
    "Mean squared error": "0 is perfect, and there is no upper end; to guess the mean always gets the variance of the "
    "targets",
    "Loss": "what training lowers: 0 is perfect, and there is no upper end; under cross-entropy guessing evenly gets "
    "0.69 of two classes and 2.3 of ten",
}
"""By the beginning of a measure's name in a comparison: what it is, and what its ends and guessing are."""

UNKNOWN = "what its ends are, the run does not say"

ZEROS: Mapping[str, str] = {
    "area under the ROC curve": "wrong every time",
    "1 - relative error": "an error as large as the thing itself",
    "1 - mean squared error of rows": "no nearer than the mean row",
    "1 - squared error of rows": "no nearer than the mean row",
    "1 - error of": "wrong by all there is",
    "cosine": "a direction that tells nothing",
    "rate of": "none right",
    "rows ": "none right",
    "accuracy": "none right",
    "part of": "none",
    "R^2": "no nearer than the mean",
    "adjusted Rand index": "groups at random",
}
"""By the beginning of an attack's measure: what a score of 0 is. In all of them 1 is the most to be learnt."""


def meanings(measures: Iterable[str]) -> Mapping[str, str]:
    """Return what the scales of these measures of a comparison mean, once each."""
    return {name: SCALES.get(name, UNKNOWN) for name in dict.fromkeys(map(_name, measures))}


def _name(measure: str) -> str:
    """Return which of `SCALES` a measure is: the longest that its name begins with; its own name for another."""
    known = (name for name in SCALES if f"{measure},".startswith((f"{name},", f"{name} ")))
    return max(known, key=len, default=measure)


def figure(value: float | None) -> str:
    """A score in a few digits: 0.999, and 1 only where it is no less."""
    if value is None:
        return MISSING
    return f"{value:.3g}" if value == 0 or 1e-3 <= abs(value) < 0.9995 or abs(value) >= 1.0 else f"{value:.6g}"


def ends(one: Attacked) -> str:
    """Return what guessing, the best and 0 are on the scale of an attack's score."""
    guessing = "guessing is not known" if one.chance is None else f"{figure(one.chance)} is guessing"
    zero = next((words for start, words in ZEROS.items() if one.measure.startswith(start)), "")
    worst = f", 0 {zero}" if zero and one.chance != 0 else ""
    return f"{guessing}, 1 perfect{worst}"


def way(one: Attacked) -> str:
    """Return how far an attack that succeeded got, of the way from guessing to the most to be learnt."""
    reached = min(100.0, 100 * one.advantage)
    return f"{reached:{'.3g' if reached < 99.95 else '.6g'}} % of the way from guessing to perfect"
